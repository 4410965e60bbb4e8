"""Whether this host can confine as the profiles ask, found by doing it in children that end."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final, NoReturn

from stockade.platform import clone, landlock, namespaces, net, prctl, seccomp
from stockade.platform.errors import StockadeError
from stockade.sandbox import landlock_policy, oom_score, seccomp_policy, template
from stockade.sandbox.child import Ground, prepare
from stockade.sandbox.confinement import confine
from stockade.sandbox.limits import Limits
from stockade.sandbox.profiles import Feature, Profile, View
from stockade.sandbox.work_directory import mount_of

_REPORT_BYTES: Final = 4096
_WELL: Final = b"."
# Stands for a work directory.
_ANY_DIRECTORY: Final = "/usr"


def obstacles() -> dict[Feature, str]:
    """What keeps each feature from being used here, by feature; one that works is not in it.

    Call it from a process with a single thread. Nothing is left.
    """
    namespaces_why = _namespaces()
    if namespaces_why:
        # The others of this kind are only used together with them.
        found = dict.fromkeys(
            (
                Feature.NAMESPACES, Feature.CGROUP_NAMESPACE, Feature.PRIVATE_NETWORK,
                Feature.LANDLOCK,
            ),
            namespaces_why,
        )  # fmt: skip
        return found | ({Feature.SECCOMP: why} if (why := _seccomp()) else {})
    found = {
        Feature.CGROUP_NAMESPACE: _cgroup_namespace(),
        Feature.PRIVATE_NETWORK: _attempt(clone.CLONE_NEWNET | _user(), net.bring_up),
        Feature.SECCOMP: _seccomp(),
        Feature.LANDLOCK: _landlock(),
    }
    return {feature: why for feature, why in found.items() if why}


def _user() -> int:
    return 0 if os.geteuid() == 0 else clone.CLONE_NEWUSER


def _namespaces() -> str:
    """The plan of ``private`` for a host that has everything, done."""
    as_root = os.geteuid() == 0
    available = {Feature.NAMESPACES, *((Feature.OWN_UID,) if as_root else ())}
    plan = confine(Profile.PRIVATE, View(), Limits(), frozenset(available))
    made = work = -1
    try:
        if as_root:
            made = template.make_template(plan.system)
            work = mount_of(_ANY_DIRECTORY)
        ground = Ground(
            plan, made, work, _ANY_DIRECTORY, os.geteuid(), os.getegid(), oom_score.of_tasks()
        )
        return _attempt(ground.clone_flags, lambda: prepare(ground))
    except (StockadeError, OSError) as error:
        return str(error)
    finally:
        for fd in (made, work):
            if fd >= 0:
                os.close(fd)


def _cgroup_namespace() -> str:
    if os.geteuid() != 0:
        return "a user can make one only before the task is in its group, which old kernels refuse"
    return _attempt(0, lambda: namespaces.unshare(clone.CLONE_NEWCGROUP))


def _seccomp() -> str:
    try:
        filter_program = seccomp_policy.filter_of(Profile.SEALED, os.uname().machine)
    except ValueError as error:
        return str(error)

    def install() -> None:
        prctl.set_no_new_privs()
        seccomp.install(filter_program)

    return _attempt(0, install)


def _landlock() -> str:
    abi = landlock.abi()
    if abi >= landlock_policy.MINIMUM_ABI:
        return ""
    if abi == 0:
        return "the kernel has no Landlock, or it is not in its lsm= list"
    return f"Landlock has ABI {abi} here; renames need {landlock_policy.MINIMUM_ABI} (Linux 5.19)"


def _attempt(flags: int, body: Callable[[], None]) -> str:
    """Does ``body`` in a child in new namespaces; why it failed, or nothing."""
    report, theirs = os.pipe2(os.O_CLOEXEC)
    try:
        try:
            pid, pidfd = clone.clone3(flags)
        except OSError as error:
            return str(error)
        if pid == 0:
            _do_and_exit(body, theirs)
        os.close(theirs)
        theirs = -1
        said = os.read(report, _REPORT_BYTES)
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        os.close(pidfd)
        return "" if said == _WELL else said.decode(errors="replace") or "the child died"
    finally:
        os.close(report)
        if theirs >= 0:
            os.close(theirs)


def _do_and_exit(body: Callable[[], None], report: int) -> NoReturn:
    try:
        try:
            body()
            said = _WELL
        except (StockadeError, OSError) as error:
            said = str(error).encode(errors="backslashreplace")[:_REPORT_BYTES]
        os.write(report, said)
    finally:
        os._exit(0)
