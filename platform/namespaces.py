"""Namespaces that a running process makes or enters; clone.py makes those of a new child."""

from __future__ import annotations

import ctypes
import os
from typing import Final

from stockade.platform._libc import function, translated

_unshare: Final = function("unshare", ctypes.c_int)
_setns: Final = function("setns", ctypes.c_int, ctypes.c_int)


def unshare(flags: int) -> None:
    """Moves the caller into new namespaces; with CLONE_NEWPID only its future children.

    Args:
        flags: CLONE_NEW* of clone.py.

    Raises:
        SyscallError: EPERM, ENOSPC (too many namespaces), EINVAL.

    Source: unshare(2).
    """
    _unshare(flags)


def enter(namespace_fd: int, kind: int) -> None:
    """Moves the caller into a namespace; with CLONE_NEWPID only its future children.

    Entering a mount namespace also changes the root and working directory, to that one's root.

    Args:
        namespace_fd: of open_namespace; or a pidfd, for that process' namespaces (Linux 5.8).
        kind: the CLONE_NEW* flag that it must be; several with a pidfd.

    Raises:
        SyscallError: EINVAL (another kind, or the file attributes are shared), EPERM.

    Source: setns(2).
    """
    _setns(namespace_fd, kind)


def open_namespace(pid: int | str, name: str) -> int:
    """A process' namespace (close-on-exec), which lives as long as the descriptor.

    Args:
        pid: a number, or ``self``.
        name: as in /proc/PID/ns: mnt, pid, net, ipc, uts, user, cgroup.

    Raises:
        SyscallError: ENOENT, EACCES.
    """
    path = f"/proc/{pid}/ns/{name}"
    with translated("open", path):
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
