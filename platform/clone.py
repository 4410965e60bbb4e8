"""clone3(2): the one way in which Stockade makes a process."""

from __future__ import annotations

import ctypes
import errno
import signal
from typing import Final

from stockade.platform import _libc
from stockade.platform.errors import SyscallError

CLONE_NEWTIME: Final = 0x00000080
CLONE_PIDFD: Final = 0x00001000
CLONE_NEWNS: Final = 0x00020000
CLONE_NEWCGROUP: Final = 0x02000000
CLONE_NEWUTS: Final = 0x04000000
CLONE_NEWIPC: Final = 0x08000000
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWPID: Final = 0x20000000
CLONE_NEWNET: Final = 0x40000000
CLONE_CLEAR_SIGHAND: Final = 0x100000000
CLONE_INTO_CGROUP: Final = 0x200000000


def clone3(flags: int, *, cgroup_fd: int | None = None) -> tuple[int, int]:
    """Makes a child as fork(2) does, and a pidfd for it in the same step.

    CLONE_PIDFD is always set, so a pid is never looked up after the fact. CLONE_CLEAR_SIGHAND is
    always set too: a signal that reaches the child before it execs must not run a Python handler or
    write into the parent's wakeup descriptor, which the child shares. What was ignored stays
    ignored, and the signal mask is kept.

    Call it from a single-threaded process only. The child must end in execve or ``os._exit``:
    nothing that Python registered for a fork has run in it, and an exception must not leave it.

    Args:
        flags: CLONE_NEW* flags. Sharing flags (CLONE_VM, CLONE_FILES, ...) are refused.
        cgroup_fd: an open cgroup v2 directory in which the child starts (CLONE_INTO_CGROUP).

    Returns:
        In the parent the child's pid and a pidfd (close-on-exec). In the child (0, -1).

    Raises:
        ValueError: flags holds anything but CLONE_NEW*.
        SyscallError: EPERM; with a cgroup EBUSY (it has controllers enabled for its children),
            EAGAIN (pids.max), ENOENT (it was removed), EOPNOTSUPP (threaded), ENOSYS.

    Where clone3 is hidden, as container engines do for what their filters cannot look into, clone
    does the same, but for a cgroup.

    Source: clone(2); CLONE_CLEAR_SIGHAND is Linux 5.5, CLONE_INTO_CGROUP 5.7.
    """
    if flags & ~_NAMESPACES:
        raise ValueError(f"cannot clone with flags {flags:#x}: only CLONE_NEW* are allowed")
    pidfd = ctypes.c_int(-1)
    arguments = _libc.CloneArgs(
        flags=flags | CLONE_PIDFD | CLONE_CLEAR_SIGHAND,
        pidfd=ctypes.addressof(pidfd),
        exit_signal=signal.SIGCHLD,
    )
    if cgroup_fd is not None:
        arguments.flags |= CLONE_INTO_CGROUP
        arguments.cgroup = cgroup_fd
    try:
        pid: int = _libc.clone3(arguments, ctypes.sizeof(arguments))
    except SyscallError as error:
        if error.errno != errno.ENOSYS or cgroup_fd is not None:
            raise
        pid = _clone(flags, pidfd)
    return pid, pidfd.value if pid else -1


def _clone(flags: int, pidfd: ctypes.c_int) -> int:
    """The same by clone(2), which leaves handlers to the child: none may run before that."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid: int = _libc.clone(flags | CLONE_PIDFD | signal.SIGCHLD, None, pidfd, None, None)
        if pid == 0:
            for number in signal.valid_signals():
                if callable(signal.getsignal(number)):
                    signal.signal(number, signal.SIG_DFL)
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


_NAMESPACES: Final = (
    CLONE_NEWTIME
    | CLONE_NEWNS
    | CLONE_NEWCGROUP
    | CLONE_NEWUTS
    | CLONE_NEWIPC
    | CLONE_NEWUSER
    | CLONE_NEWPID
    | CLONE_NEWNET
)
