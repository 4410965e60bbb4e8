"""Takes off what keeps us from removing a file: permissions, attributes, but never a mount.

Nothing here follows a symlink, and nothing fails for what it may not change: the removal that
follows says what is wrong.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import Final

from stockade.platform.files import (
    RESOLVE_BENEATH,
    RESOLVE_NO_SYMLINKS,
    RESOLVE_NO_XDEV,
    change_mode,
    clear_immutable,
    openat2,
)

_OWNER_ALL: Final = 0o700
_DIRECTORY: Final = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# NO_XDEV also stops at a bind mount of the same file system, which st_dev does not show.
_WITHIN: Final = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_XDEV


def open_within(fd: int, name: bytes) -> int:
    """Opens a subdirectory for reading, with every permission for its owner.

    Raises:
        SyscallError: EXDEV for a mount point, ELOOP or ENOTDIR for anything but a directory;
            EACCES or EPERM for one that is not ours.
    """
    try:
        below = openat2(fd, name, os.O_RDONLY | _DIRECTORY, resolve=_WITHIN)
    except OSError as error:
        if error.errno != errno.EACCES:
            raise
        # We own it and took our own permissions away. O_PATH asks for none.
        path_fd = openat2(fd, name, os.O_PATH | _DIRECTORY, resolve=_WITHIN)
        try:
            change_mode(path_fd, stat.S_IMODE(os.fstat(path_fd).st_mode) | _OWNER_ALL)
            return os.open(b".", os.O_RDONLY | _DIRECTORY, dir_fd=path_fd)
        finally:
            os.close(path_fd)
    _unlock(below)
    return below


def unprotect(fd: int) -> None:
    """Takes attributes off an open file or directory, and unlocks a directory, where we may."""
    with contextlib.suppress(OSError):
        clear_immutable(fd)
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            _unlock(fd)


def unprotect_file(dirfd: int, name: bytes) -> None:
    """Takes attributes off an entry that is a plain file, where we may."""
    with contextlib.suppress(OSError):
        # Only plain files can have attributes, and to open another kind may do something.
        # O_NONBLOCK in case it became a FIFO since.
        if stat.S_ISREG(os.stat(name, dir_fd=dirfd, follow_symlinks=False).st_mode):
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC
            fd = os.open(name, flags, dir_fd=dirfd)
            try:
                unprotect(fd)
            finally:
                os.close(fd)


def _unlock(fd: int) -> None:
    """Gives a directory's owner every permission, where we may."""
    mode = stat.S_IMODE(os.fstat(fd).st_mode)
    if mode & _OWNER_ALL != _OWNER_ALL:
        # CAP_DAC_OVERRIDE does without it.
        with contextlib.suppress(OSError):
            os.fchmod(fd, mode | _OWNER_ALL)
