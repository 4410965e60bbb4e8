"""Locks on single bytes of one file: unlike flock(2) one file serves any number of them.

Two kinds, fcntl(2). Those of an open file description (F_OFD_SETLK, Linux 3.15) stay with every
copy of a descriptor, a child's too. Those of a process (F_SETLK) end with it, no child has them,
and others can ask whose they are; but closing *any* descriptor of the file gives all of them up.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from typing import Final

from stockade.platform._libc import translated

# struct flock: l_type, l_whence, l_start, l_len, l_pid (0 for these locks).
_FLOCK: Final = struct.Struct("@hhqqi4x")


def lock_byte(fd: int, offset: int) -> bool:
    """Locks one byte; False when another open file description has it.

    Raises:
        SyscallError: for example EBADF, when fd is not open for writing.
    """
    with translated("fcntl", fd, "F_OFD_SETLK", offset):
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _lock(fcntl.F_WRLCK, offset))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
    return True


def unlock_byte(fd: int, offset: int) -> None:
    """Gives the byte up, whoever else holds a copy of the descriptor.

    Raises:
        SyscallError: for example EBADF.
    """
    with translated("fcntl", fd, "F_OFD_SETLK", offset):
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _lock(fcntl.F_UNLCK, offset))


def lock_byte_as_process(fd: int, offset: int) -> bool:
    """Locks one byte for this process; False when another process has it.

    Raises:
        SyscallError: for example EBADF, when fd is not open for writing.
    """
    with translated("fcntl", fd, "F_SETLK", offset):
        try:
            fcntl.fcntl(fd, fcntl.F_SETLK, _lock(fcntl.F_WRLCK, offset))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
    return True


def unlock_byte_as_process(fd: int, offset: int) -> None:
    """Gives up this process's lock of the byte.

    Raises:
        SyscallError: for example EBADF.
    """
    with translated("fcntl", fd, "F_SETLK", offset):
        fcntl.fcntl(fd, fcntl.F_SETLK, _lock(fcntl.F_UNLCK, offset))


def processes_that_locked(fd: int, first: int) -> dict[int, int]:
    """Which bytes from ``first`` on other processes have locked, one by one: offset to pid.

    Raises:
        SyscallError: for example EBADF.
    """
    found: dict[int, int] = {}
    while True:
        with translated("fcntl", fd, "F_GETLK", first):
            # Length 0: up to the end of all offsets. The kernel tells one lock in the range.
            answer = fcntl.fcntl(fd, fcntl.F_GETLK, _lock(fcntl.F_WRLCK, first, length=0))
        kind, _, offset, _, pid = _FLOCK.unpack(answer)
        if kind == fcntl.F_UNLCK:
            return found
        found[offset] = pid
        first = offset + 1


def _lock(kind: int, offset: int, *, length: int = 1) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, offset, length, 0)
