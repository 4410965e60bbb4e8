"""All that is done for one task, as text, in its order: what ``stockade run --plan`` prints. Pure.

Nothing is told twice: each line comes out of what is executed. A slot's groups are "made" by the
code that makes them, on groups that only write down; the child's steps are the Confinement's own;
the launcher's are read off its message.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import resource
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Self

from stockade.platform import clone
from stockade.sandbox import hand_over, plan, seccomp_policy, slot_groups, tree
from stockade.sandbox.capabilities import HostCapabilities, without_lost_quota
from stockade.sandbox.confinement import Confinement, confine
from stockade.sandbox.launch_message import (
    INSTRUCTION_BYTES,
    RLIM_INFINITY,
    Flags,
    LaunchMessage,
    Step,
)
from stockade.sandbox.limits import Limits
from stockade.sandbox.profiles import Feature, Profile
from stockade.sandbox.settings import SpawnerSettings
from stockade.sandbox.slot import Making
from stockade.sandbox.system_steps import TASK_DIRECTORY
from stockade.sandbox.uids import RESERVED
from stockade.sandbox.work_directory import quota_options, wants_project, wants_quota
from stockade.sandbox.zygote import resolv_conf_in_run

# Stands for the name that the slot gets.
SLOT: Final = "SLOT"
_NAMESPACES: Final = {
    clone.CLONE_NEWNS: "mount", clone.CLONE_NEWPID: "pid",
    clone.CLONE_NEWIPC: "ipc", clone.CLONE_NEWUTS: "uts", clone.CLONE_NEWNET: "net",
}  # fmt: skip
_RLIMITS: Final = {
    getattr(resource, name): name
    for name in dir(resource)
    # The old name of RLIMIT_NOFILE.
    if name.startswith("RLIMIT_") and name != "RLIMIT_OFILE"
}


class Doer(enum.StrEnum):
    """Who does a step."""

    ZYGOTE = "zygote, once for all slots"
    SPAWNER = "spawner, for this slot"
    CHILD = "slot's child, a copy of the zygote"
    LAUNCHER = "launcher"


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedStep:
    """One thing that is done, by whom, and in which kernel files or settings that shows."""

    by: Doer
    does: str
    details: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """One task, as a Start asks for it, with streams of its own."""

    argv: Sequence[bytes]
    environment: Sequence[bytes]
    directory: str | None
    profile: Profile
    limits: Limits


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """What the plan depends on besides what is wanted.

    Attributes:
        resolv_conf: see zygote.resolv_conf_in_run.
        own_hard: see plan.rlimits.
        threads_of_user: the same, for a task without a uid of its own.
    """

    host: HostCapabilities
    machine: str
    resolv_conf: str | None
    own_hard: Mapping[int, int]
    threads_of_user: int

    @classmethod
    def gather(cls, host: HostCapabilities) -> Self:
        """Those of this host, now."""
        return cls(
            host=host,
            machine=os.uname().machine,
            resolv_conf=resolv_conf_in_run(),
            own_hard=hand_over.own_hard_limits(),
            threads_of_user=0 if host.root else hand_over.threads_of(os.geteuid()),
        )


def outline(wanted: Wanted, settings: SpawnerSettings, facts: Facts) -> tuple[PlannedStep, ...]:
    """Everything from the task's arrival at a spawner without a ready slot to its exec."""
    host = facts.host
    confinement = confine(
        wanted.profile, settings.view.resolved(), wanted.limits, host.available, facts.resolv_conf
    )
    return (
        *_zygote(confinement, host),
        *_spawner(wanted, settings, host, confinement),
        *_child(confinement),
        *_launcher(_message(wanted, settings, facts, confinement)),
    )


def _spawner(
    wanted: Wanted, settings: SpawnerSettings, host: HostCapabilities, confinement: Confinement
) -> Iterator[PlannedStep]:
    place = os.path.join(settings.state_dir, "work", SLOT)
    uids = f"{settings.uid_min + RESERVED} to {settings.uid_max}"
    details: dict[Making, tuple[str, ...] | None] = {
        Making.PLACE: (f"{place}, mode 0700",),
        Making.UID: (f"the next free one of {uids}, locked for this slot",) if host.root else None,
        Making.WORK: (_work(without_lost_quota(wanted.limits, host), confinement, host, place),),
        Making.CGROUP: _groups(settings, wanted.limits, host),
        Making.OUTPUT: ("a FIFO; the task has streams of its own",),
        Making.LAUNCHER: (
            "clone3, by the zygote" + ("" if not host.has_cgroup_kill else f" into {SLOT}/init"),
        ),
    }
    for making in Making:
        found = details[making]
        if found is not None:
            yield PlannedStep(Doer.SPAWNER, making.value, found)


def _groups(
    settings: SpawnerSettings, limits: Limits, host: HostCapabilities
) -> tuple[str, ...] | None:
    if not host.has_cgroup_kill:
        return None
    top = Path(host.cgroup_parent or "", tree.group_name(settings.worker_id))
    path = tree.slot_path(top, SLOT)
    made_by = ", the scope being one of systemd's" if host.cgroup_scope else ""
    done = slot_groups.planned(path, host.controllers, limits, disk=host.disk)
    return (f"in {path.parent}{made_by}", *done)


def _work(limits: Limits, confinement: Confinement, host: HostCapabilities, place: str) -> str:
    where = f"seen by the task as {TASK_DIRECTORY if confinement.has_own_files else place}"
    if not wants_quota(limits):
        return f"on disk, without a quota; {where}"
    if wants_project(limits):
        files = limits.workdir_inodes_max
        most = f"{limits.workdir_max} bytes" + ("" if files is None else f" and {files} files")
        return f"on disk, with a project quota of {most}, project UID; {where}"
    options = quota_options(limits, None)
    text = ",".join(f"{key}={value}" for key, value in options.items())
    return f"a tmpfs, {text}{',uid=UID,gid=UID' if host.root else ''}; {where}"


def _zygote(confinement: Confinement, host: HostCapabilities) -> Iterator[PlannedStep]:
    if confinement.has_own_files:
        whose = "mount" if host.root else "user, mount"
        yield PlannedStep(Doer.ZYGOTE, f"be born in new namespaces: {whose}")
    yield PlannedStep(Doer.ZYGOTE, "set oom_score_adj and umask, whatever the worker's are")
    if confinement.has_own_files and not host.root:
        yield PlannedStep(Doer.ZYGOTE, "map its own user and group into the user namespace")
    for step in confinement.system:
        yield PlannedStep(Doer.ZYGOTE, str(step))


def _child(confinement: Confinement) -> Iterator[PlannedStep]:
    names = [name for flag, name in _NAMESPACES.items() if confinement.namespaces & flag]
    if names:
        yield PlannedStep(Doer.CHILD, f"be born in new namespaces: {', '.join(names)}")
    yield PlannedStep(Doer.CHILD, "start a session")
    for step in confinement.slot:
        yield PlannedStep(Doer.CHILD, str(step))
    grants = confinement.grants
    if grants is not None:
        yield PlannedStep(
            Doer.CHILD,
            "make a Landlock ruleset",
            (
                f"read and execute: {', '.join(grants.read_only)}",
                f"write: {', '.join(grants.read_write)}",
                f"devices: {', '.join(grants.devices)}",
            ),
        )
    yield PlannedStep(Doer.CHILD, "become the launcher, which waits for the task")


def _message(
    wanted: Wanted, settings: SpawnerSettings, facts: Facts, confinement: Confinement
) -> LaunchMessage:
    host = facts.host
    place = os.path.join(settings.state_dir, "work", SLOT)
    filter_program = b""
    if Feature.SECCOMP in host.available:
        filter_program = seccomp_policy.filter_of(wanted.profile, facts.machine)
    return plan.launch_message(
        argv=wanted.argv,
        base_environment=wanted.environment,
        work_directory=TASK_DIRECTORY if confinement.has_own_files else place,
        directory=wanted.directory,
        rlimits=plan.rlimits(
            wanted.limits, host.controllers,
            own_hard=facts.own_hard, threads_of_user=facts.threads_of_user,
        ),
        uid=settings.uid_min + RESERVED if host.root else None,
        launcher_uid=settings.uid_min,
        filter_program=filter_program,
        flags=plan.message_flags(confinement, has_cgroup=host.has_cgroup_kill, has_stdio=True),
    )  # fmt: skip


def _launcher(message: LaunchMessage) -> Iterator[PlannedStep]:
    """The steps of a launcher that gets this message, by their names in its record."""
    details = {
        Step.RLIMIT: tuple(map(_rlimit, message.rlimits)),
        Step.EXEC: (f"environment: {_names(message.environment)}",),
    }
    for step, does in _launcher_does(message).items():
        if does:
            yield PlannedStep(Doer.LAUNCHER, f"{step}: {does}", details.get(step, ()))
        if step is Step.DESCRIPTORS:
            yield PlannedStep(Doer.LAUNCHER, _itself(message))


def _launcher_does(message: LaunchMessage) -> dict[Step, str]:
    """In the launcher's order; empty for what this message does not ask for."""
    flags = message.flags
    has_uid = message.users is not None
    filtered = len(message.filter) // INSTRUCTION_BYTES
    command = shlex.join(os.fsdecode(argument) for argument in message.argv)
    return {
        Step.MESSAGE: "read and check what to start",
        Step.CLONE: f"make the task's process{_if(Flags.CGROUP in flags, f', in {SLOT}/task')}",
        Step.SETSID: "start a session, with no terminal",
        Step.NAMESPACE: _if(Flags.CGROUP_NAMESPACE in flags, "enter a new cgroup namespace"),
        Step.STDIO: _if(Flags.STDIO in flags, "take the task's streams as 0, 1, 2"),
        Step.RLIMIT: "set resource limits",
        Step.GROUPS: _if(has_uid, "leave every supplementary group"),
        Step.GID: _if(has_uid, "become the slot's gid"),
        Step.UID: _if(has_uid, "become the slot's uid"),
        Step.CAPABILITIES: "drop all; no_new_privs and an empty bounding set hold already",
        Step.PDEATHSIG: "die with the launcher",
        Step.DIRECTORY: f"enter {os.fsdecode(message.directory)}",
        Step.DESCRIPTORS: "close all but 0, 1, 2",
        Step.RECORD: "write down that the task starts",
        Step.LANDLOCK: _if(Flags.LANDLOCK in flags, "go under the Landlock ruleset"),
        Step.SECCOMP: _if(filtered > 0, f"filter system calls, {filtered} instructions"),
        Step.EXEC: f"execute {command}",
    }


def _if(condition: bool, text: str) -> str:  # noqa: FBT001 -- the text or nothing
    return text if condition else ""


def _names(environment: Sequence[bytes]) -> str:
    return ", ".join(os.fsdecode(entry.partition(b"=")[0]) for entry in environment)


def _itself(message: LaunchMessage) -> str:
    if message.users is None:
        return "meanwhile the launcher drops its own capabilities"
    uid = message.users.init_uid
    return f"meanwhile the launcher itself becomes uid {uid} and keeps CAP_KILL alone"


def _rlimit(limit: tuple[int, int, int]) -> str:
    kind, soft, hard = limit
    values = ("infinity" if value == RLIM_INFINITY else str(value) for value in (soft, hard))
    return f"{_RLIMITS.get(kind, kind)} = {':'.join(values)}"
