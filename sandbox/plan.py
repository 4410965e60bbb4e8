"""The plan: what the launcher is to do for one task, by pure functions."""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence
from typing import Final

from stockade.sandbox.confinement import Confinement
from stockade.sandbox.launch_message import NO_FLAGS, Flags, LaunchMessage, Users
from stockade.sandbox.limits import Limits

UMASK: Final = 0o022
# Which limits are setrlimit(2)'s, of each process.
RLIMITS: Final = {
    "limit_core": resource.RLIMIT_CORE,
    "limit_fsize": resource.RLIMIT_FSIZE,
    "limit_nofile": resource.RLIMIT_NOFILE,
}


def rlimits(
    limits: Limits,
    controllers: frozenset[str],
    *,
    own_hard: Mapping[int, int],
    threads_of_user: int,
) -> tuple[tuple[int, int, int], ...]:
    """The task's resource limits, setrlimit(2), as (resource, soft, hard).

    Args:
        limits: the task's.
        controllers: with ``pids`` the kernel counts per task and RLIMIT_NPROC is not used.
        own_hard: hard limits of this process that it may not pass, by resource; empty for root.
        threads_of_user: threads that the task's uid runs already, which RLIMIT_NPROC counts too;
            0 for a uid of the slot's own.
    """
    wanted: list[tuple[int, int | None]] = [
        # No priority above the default, whatever the worker itself was given.
        (resource.RLIMIT_NICE, 0),
        (resource.RLIMIT_RTPRIO, 0),
        *((kind, getattr(limits, name)) for name, kind in RLIMITS.items()),
    ]
    if limits.tasks_max is not None and "pids" not in controllers:
        wanted.append((resource.RLIMIT_NPROC, limits.tasks_max + threads_of_user))
    return tuple(
        (kind, lowest, lowest)
        for kind, value in wanted
        if value is not None
        for lowest in (min(value, own_hard.get(kind, value)),)
    )


def message_flags(confinement: Confinement, *, has_cgroup: bool, has_stdio: bool) -> Flags:
    """The message's flags: what of the slot the launcher is to use."""
    found = NO_FLAGS
    if has_cgroup:
        found |= Flags.CGROUP
        if confinement.cgroup_namespace:
            found |= Flags.CGROUP_NAMESPACE
    if has_stdio:
        found |= Flags.STDIO
    if confinement.grants is not None:
        found |= Flags.LANDLOCK
    return found


def environment(base: Sequence[bytes], work_directory: str) -> tuple[bytes, ...]:
    """The task's environment: what the supervisor sent, and the slot's own directory.

    HOME, TMPDIR and PWD are the slot's and win over what was sent.
    """
    home = work_directory.encode()
    own = (b"HOME", b"TMPDIR", b"PWD")
    kept = [entry for entry in base if entry.partition(b"=")[0] not in own]
    return (*kept, *(name + b"=" + home for name in own))


def launch_message(
    *,
    argv: Sequence[bytes],
    base_environment: Sequence[bytes],
    work_directory: str,
    directory: str | None,
    rlimits: Sequence[tuple[int, int, int]],
    uid: int | None,
    launcher_uid: int,
    filter_program: bytes,
    flags: Flags,
) -> LaunchMessage:
    """What the launcher is to do. ``uid`` None: not root, the task runs as the worker's user."""
    return LaunchMessage(
        program=argv[0],
        argv=tuple(argv),
        environment=environment(base_environment, work_directory),
        directory=(directory or work_directory).encode(),
        users=None if uid is None else Users(uid, uid, launcher_uid, launcher_uid),
        rlimits=tuple(rlimits),
        filter=filter_program,
        umask=UMASK,
        flags=flags,
    )
