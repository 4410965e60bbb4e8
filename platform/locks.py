"""Locks on single bytes of one file, held by an open file description (fcntl(2), F_OFD_SETLK).

Unlike flock(2) one file serves any number of locks and nothing is left to remove; unlike POSIX
locks they stay with a descriptor that a child inherits. Linux 3.15.
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
            fcntl.fcntl(
                fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, offset, 1, 0)
            )
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


def _lock(kind: int, offset: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, offset, 1, 0)
