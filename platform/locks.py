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
    # (first, length); length 0 is up to the end of all offsets.
    ranges = [(first, 0)]
    while ranges:
        start, length = ranges.pop()
        with translated("fcntl", fd, "F_GETLK", start):
            # The kernel tells one lock in the range, and not the first: the rest is asked about
            # anew. One lock can cover several bytes, also some before the range.
            answer = fcntl.fcntl(fd, fcntl.F_GETLK, _lock(fcntl.F_WRLCK, start, length=length))
        kind, _, locked, locked_length, pid = _FLOCK.unpack(answer)
        if kind == fcntl.F_UNLCK:
            continue
        begin, end = max(locked, start), locked + locked_length
        if length:
            end = min(end, start + length)
        found.update(dict.fromkeys(range(begin, end), pid))
        if begin > start:
            ranges.append((start, begin - start))
        if not length:
            ranges.append((end, 0))
        elif end < start + length:
            ranges.append((end, start + length - end))
    return found


def _lock(kind: int, offset: int, *, length: int = 1) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, offset, length, 0)
