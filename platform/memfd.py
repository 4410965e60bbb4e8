"""Sealed memfds: how payloads travel between processes that do not trust each other."""

from __future__ import annotations

import fcntl
import os
from typing import Final

from stockade.platform._libc import translated
from stockade.platform.files import write_all

_CONTENT_SEALS: Final = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK


def sealed_memfd(name: str, content: bytes) -> int:
    """A memfd (close-on-exec) that holds ``content`` for good: no holder can change it.

    Args:
        name: shown in /proc/PID/fd, at most 249 bytes.
        content: what it holds; the file offset is at the end.

    Raises:
        SyscallError: for example ENOMEM or EMFILE.

    Source: memfd_create(2), F_ADD_SEALS in fcntl(2).
    """
    with translated("memfd_create", name):
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        write_all(fd, content)
        with translated("fcntl", fd, "F_ADD_SEALS"):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _CONTENT_SEALS | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_sealed(fd: int, max_bytes: int) -> bytes:
    """The whole content of a sealed memfd that a peer sent; its file offset is left alone.

    Without the seals the peer could change or cut the file while it is read.

    Raises:
        ValueError: it is not a memfd, lacks a seal, or is longer than ``max_bytes``.
        SyscallError: it cannot be read.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ValueError(f"cannot read descriptor {fd}: it is not a memfd") from error
    if seals & _CONTENT_SEALS != _CONTENT_SEALS:
        raise ValueError(f"cannot read descriptor {fd}: it is not sealed (seals {seals:#x})")
    with translated("fstat", fd):
        size = os.fstat(fd).st_size
    if size > max_bytes:
        raise ValueError(f"cannot read descriptor {fd}: {size} bytes, the limit is {max_bytes}")
    parts: list[bytes] = []
    offset = 0
    while offset < size:
        with translated("pread", fd):
            part = os.pread(fd, size - offset, offset)
        if not part:  # cannot be: the size is sealed
            raise ValueError(f"cannot read descriptor {fd}: it ended at {offset} of {size} bytes")
        parts.append(part)
        offset += len(part)
    return b"".join(parts)
