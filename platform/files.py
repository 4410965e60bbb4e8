"""Files by descriptor: opening below a directory without being led astray, writing whole."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import struct
from typing import Final

from stockade.platform import _libc
from stockade.platform._libc import translated
from stockade.platform.errors import SyscallError

RESOLVE_NO_XDEV: Final = 0x01
RESOLVE_NO_MAGICLINKS: Final = 0x02
RESOLVE_NO_SYMLINKS: Final = 0x04
RESOLVE_BENEATH: Final = 0x08

# _IOR(f, 1, long) and _IOW(f, 2, long) of x86-64, arm64 and riscv64; the kernel moves an int.
FS_IOC_GETFLAGS: Final = 0x80086601
FS_IOC_SETFLAGS: Final = 0x40086602
FS_IOC32_SETFLAGS: Final = 0x40046602  # of 32-bit programs
FS_IMMUTABLE_FL: Final = 0x10
FS_APPEND_FL: Final = 0x20

_OPENAT2_TRIES: Final = 32


def openat2(
    dirfd: int,
    path: str | bytes | os.PathLike[str],
    flags: int,
    mode: int = 0,
    resolve: int = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS,
) -> int:
    """Opens ``path`` below ``dirfd``; by default no symlink in any part of it is followed.

    O_CLOEXEC is always added.

    Args:
        dirfd: a directory's descriptor, or AT_FDCWD (-100) with another ``resolve``.
        path: relative, without ``..`` that leaves ``dirfd``.
        flags: O_*; unlike open(2), unknown bits are EINVAL.
        mode: permission bits, only with O_CREAT or O_TMPFILE; the umask applies.
        resolve: RESOLVE_* of this module.

    Raises:
        SyscallError: ELOOP (a symlink), EXDEV (leaves ``dirfd``, or a mount point with
            RESOLVE_NO_XDEV), and those of open(2).

    Source: openat2(2), Linux 5.6.
    """
    how = _libc.OpenHow(flags | os.O_CLOEXEC, mode, resolve)
    for _ in range(_OPENAT2_TRIES):
        try:
            fd: int = _libc.openat2(dirfd, os.fsencode(path), how, ctypes.sizeof(how))
        except SyscallError as error:
            # A rename or mount somewhere on the host while ".." was resolved: the kernel cannot
            # tell whether it concerned us and asks to try again.
            if error.errno != errno.EAGAIN or flags & os.O_NONBLOCK:
                raise
        else:
            return fd
    raise SyscallError("openat2", f"{dirfd}, {path!r}", errno.EAGAIN)


def open_directory(path: str | bytes | os.PathLike[str], *, dir_fd: int | None = None) -> int:
    """A directory's descriptor (O_DIRECTORY, close-on-exec). Symlinks in ``path`` are followed.

    For paths that only root or the operator can change; below others use openat2.

    Raises:
        SyscallError: ENOENT, ENOTDIR, EACCES.
    """
    with translated("open", path):
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=dir_fd)


def make_fifo_at(dirfd: int, name: str | bytes, mode: int) -> None:
    """Makes a FIFO with exactly ``mode``, whatever the umask.

    Raises:
        SyscallError: EEXIST, EACCES.
    """
    with translated("mkfifoat", dirfd, name, mode):
        os.mkfifo(name, mode, dir_fd=dirfd)
        change_mode_at(dirfd, name, mode)


def change_mode_at(dirfd: int, name: str | bytes, mode: int) -> None:
    """Sets the permission bits of a file of any kind and of mode 000 too, never of a link's target.

    Raises:
        SyscallError: ENOENT, EPERM; EOPNOTSUPP for a symlink.
    """
    with translated("chmod", dirfd, name, mode):
        # O_PATH needs no permission on the file itself; fchmodat(AT_SYMLINK_NOFOLLOW) is Linux 6.6.
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dirfd)
        try:
            change_mode(fd, mode)
        finally:
            os.close(fd)


def change_mode(fd: int, mode: int) -> None:
    """Sets the permission bits of an open file; unlike fchmod(2) also of one opened by O_PATH.

    Raises:
        SyscallError: EPERM; EOPNOTSUPP for a symlink.
    """
    with translated("chmod", fd, mode):
        os.chmod(f"/proc/self/fd/{fd}", mode)


def write_all(fd: int, content: bytes | memoryview) -> None:
    """Writes everything, unbuffered, so no error can be lost at close.

    Raises:
        SyscallError: what the failing write(2) gave; a part may be written then.
    """
    rest = memoryview(content)
    while rest:
        with translated("write", fd, f"{len(rest)} bytes"):
            written = os.write(fd, rest)
        if written == 0:
            raise SyscallError("write", f"{fd}, {len(rest)} bytes", errno.EIO)
        rest = rest[written:]


def close_all_but(*fds: int) -> None:
    """Closes what a child without an exec has of its parent's, but 0, 1, 2 and ``fds``.

    A copy keeps what it leads to as it is: a peer does not see that its other end was closed, a
    lock is not given up.

    Raises:
        SyscallError: /proc is not readable.
    """
    # os.closerange tries every number there can be where the C library has no close_range.
    with translated("listdir", "/proc/self/fd"):
        names = os.listdir("/proc/self/fd")
    for fd in {*map(int, names)} - {0, 1, 2, *fds}:
        with contextlib.suppress(OSError):  # the listing's own
            os.close(fd)


def clear_immutable(fd: int) -> bool:
    """Takes the immutable and append-only attributes (chattr +i, +a) off an open file or directory.

    Returns:
        Whether one was set. A file system without attributes has none set.

    Raises:
        SyscallError: EPERM without CAP_LINUX_IMMUTABLE.

    Source: ioctl_iflags(2).
    """
    with translated("ioctl", fd, "FS_IOC_SETFLAGS"):
        try:
            attributes = fcntl.ioctl(fd, FS_IOC_GETFLAGS, bytes(8))
        except OSError as error:
            if error.errno in (errno.ENOTTY, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                return False
            raise
        (flags,) = struct.unpack_from("=I", attributes)
        if not flags & (FS_IMMUTABLE_FL | FS_APPEND_FL):
            return False
        flags &= ~(FS_IMMUTABLE_FL | FS_APPEND_FL)
        fcntl.ioctl(fd, FS_IOC_SETFLAGS, struct.pack("=I4x", flags))
        return True
