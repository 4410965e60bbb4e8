"""pidfds, and the only functions that send a signal by number.

A pid can be used again by another process; a pidfd cannot. Where only a number is known, the
checked functions refuse every number that means more than one process, or ourselves.
"""

from __future__ import annotations

import os
import select
import signal as signals
from typing import NamedTuple

from stockade.platform._libc import translated


class Reaped(NamedTuple):
    """How a child ended. One of ``exit_code`` and ``signal`` is None.

    Attributes:
        wait_status: as wait(2) gives it, for the functions of ``os`` (WIFEXITED and so on).
    """

    wait_status: int
    pid: int
    exit_code: int | None
    signal: int | None


def open_pidfd(pid: int) -> int:
    """A pidfd (close-on-exec) for a process that runs or was not yet reaped.

    Raises:
        SyscallError: ESRCH when there is no such process, EINVAL for a thread.

    Source: pidfd_open(2), Linux 5.3.
    """
    with translated("pidfd_open", pid):
        return os.pidfd_open(pid)


def has_ended(pidfd: int, timeout_s: float | None = 0.0) -> bool:
    """Whether the process of the pidfd has ended, reaped or not; waits for that up to the timeout.

    Args:
        pidfd: of any process, child or not.
        timeout_s: None waits for ever.

    Source: pidfd_open(2): a pidfd is readable once its process has ended.
    """
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


def send_signal(pidfd: int, signal: int) -> bool:
    """Sends a signal to exactly the process of the pidfd.

    Returns:
        False when it was reaped already.

    Raises:
        SyscallError: EPERM, EINVAL, EBADF.
    """
    with translated("pidfd_send_signal", pidfd, signal):
        try:
            signals.pidfd_send_signal(pidfd, signal)
        except ProcessLookupError:
            return False
        return True


def reap(pidfd: int) -> Reaped | None:
    """Takes the end of our child off the kernel, without waiting.

    Returns:
        None while it lives.

    Raises:
        SyscallError: ECHILD when it is not our child or was reaped already.
    """
    with translated("waitid", "P_PIDFD", pidfd):
        # Returns None while the child lives, which typeshed's signature does say.
        ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    if ended is None:
        return None
    if ended.si_code == os.CLD_EXITED:
        return Reaped(ended.si_status << 8, ended.si_pid, ended.si_status, None)
    core = 0x80 if ended.si_code == os.CLD_DUMPED else 0
    return Reaped(ended.si_status | core, ended.si_pid, None, ended.si_status)


def checked_kill(pid: int, signal: int) -> bool:
    """Sends a signal to one process that is not us.

    Returns:
        False when there is no such process.

    Raises:
        ValueError: ``pid`` is 0 (our group), negative (groups, everything), 1 (init) or our own;
            the kernel is not asked.
        SyscallError: EPERM, EINVAL.
    """
    if pid <= 1 or pid == os.getpid():
        raise ValueError(f"cannot signal process {pid}: it is not one single process besides us")
    with translated("kill", pid, signal):
        try:
            os.kill(pid, signal)
        except ProcessLookupError:
            return False
        return True


def kill_everything_of_uid(uid: int) -> None:
    """Sends SIGKILL to every process of our uid, all at once, but ourselves.

    For a short-lived child that became the uid of a slot: kill(-1) leaves a process that forks for
    ever no gap. It succeeds also when nobody is left, so look at /proc to see whether it is done.

    Raises:
        ValueError: we are not that uid alone, or it is root; the kernel is not asked.
        SyscallError: EPERM.
    """
    # Without this check, a step forgotten by the caller would end every process of the host.
    if uid == 0 or os.getresuid() != (uid, uid, uid):
        raise ValueError(f"cannot kill everything of uid {uid}: we are {os.getresuid()}")
    with translated("kill", -1, int(signals.SIGKILL)):
        try:
            os.kill(-1, signals.SIGKILL)
        except ProcessLookupError:
            return
