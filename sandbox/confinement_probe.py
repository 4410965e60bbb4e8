"""Whether this host can confine as the profiles ask, found by doing it in children that end."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from typing import Final, NoReturn

from stockade.platform import clone, landlock, namespaces, net, prctl, seccomp
from stockade.platform.errors import StockadeError
from stockade.sandbox import landlock_policy, oom_score, seccomp_policy
from stockade.sandbox.confinement import Confinement, confine
from stockade.sandbox.launch_message import FD_CHANNEL
from stockade.sandbox.limits import Limits
from stockade.sandbox.profiles import Feature, Profile, View
from stockade.sandbox.slot_program import SlotProgram
from stockade.sandbox.work_directory import mount_of
from stockade.sandbox.zygote import Ground, Zygote
from stockade.sandbox.zygote_message import FD_PASSED, SETUP_FAILED

_REPORT_BYTES: Final = 4096
_WELL: Final = b"."
# Stand for the place of the work directories, and for one of them.
_ANY_PARENT: Final = "/usr"
_ANY_NAME: Final = "bin"


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
        Feature.PRIVATE_NETWORK: attempt(clone.CLONE_NEWNET | _user(), net.bring_up),
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
    try:
        zygote = Zygote(Ground(plan.system, as_root, _ANY_PARENT, oom_score.of_tasks()))
    except (StockadeError, OSError) as error:
        return str(error)
    try:
        return _try_slot(zygote, plan, as_root=as_root)
    except (StockadeError, OSError) as error:
        return str(error)
    finally:
        zygote.close(wait=True)


def _try_slot(zygote: Zygote, plan: Confinement, *, as_root: bool) -> str:
    program = SlotProgram(plan)
    with contextlib.ExitStack() as stack:
        stack.callback(program.close)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stack.enter_context(ours)
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        stack.callback(os.close, null)
        program_fd = program.open(_ANY_NAME)
        stack.callback(os.close, program_fd)
        with theirs:
            table = [null] * FD_PASSED
            table[FD_CHANNEL] = theirs.fileno()
            if as_root:
                work = mount_of(os.path.join(_ANY_PARENT, _ANY_NAME))
                stack.callback(os.close, work)
                table.append(work)
            _, pidfd = zygote.make(plan.namespaces, None, program_fd, table)
        stack.callback(os.close, pidfd)
        # A launcher that waits ends when it reads this.
        ours.shutdown(socket.SHUT_WR)
        said = ours.recv(_REPORT_BYTES)
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        return program.why_failed(said[1:]) if said.startswith(SETUP_FAILED) else ""


def _cgroup_namespace() -> str:
    if os.geteuid() != 0:
        return "a user can make one only before the task is in its group, which old kernels refuse"
    return attempt(0, lambda: namespaces.unshare(clone.CLONE_NEWCGROUP))


def _seccomp() -> str:
    try:
        filter_program = seccomp_policy.filter_of(Profile.SEALED, os.uname().machine)
    except ValueError as error:
        return str(error)

    def install() -> None:
        prctl.set_no_new_privs()
        seccomp.install(filter_program)

    return attempt(0, install)


def _landlock() -> str:
    abi = landlock.abi()
    if abi >= landlock_policy.MINIMUM_ABI:
        return ""
    if abi == 0:
        return "the kernel has no Landlock, or it is not in its lsm= list"
    return f"Landlock has ABI {abi} here; renames need {landlock_policy.MINIMUM_ABI} (Linux 5.19)"


def attempt(flags: int, body: Callable[[], None]) -> str:
    """Does ``body`` in a child, in new namespaces by ``flags``; why it failed, or nothing."""
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
