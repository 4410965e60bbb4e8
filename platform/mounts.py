"""Mounts of the caller's mount namespace: the calls, and the table of what is mounted.

A mount made by the new calls (open_tree, new_file_system) is first attached nowhere: it has only a
descriptor, so its attributes are set before anybody can see it, and it can be made in one mount
namespace and attached in another by whoever gets the descriptor. Closing the descriptor of one that
was not attached unmounts it.

Paths follow symlinks, as mount(2) does. Give paths that only root can change; or a descriptor and
the path "" (``AT_EMPTY_PATH``), which is what was opened and nothing else.

Source: mount(2), mount_setattr(2), mount_namespaces(7), proc_pid_mountinfo(5). The
new calls are Linux 5.2, mount_setattr 5.12.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from stockade.platform._libc import function, system_call
from stockade.platform.errors import SyscallError

SYS_OPEN_TREE: Final = 428
SYS_MOVE_MOUNT: Final = 429
SYS_FSOPEN: Final = 430
SYS_FSCONFIG: Final = 431
SYS_FSMOUNT: Final = 432
SYS_MOUNT_SETATTR: Final = 442

AT_FDCWD: Final = -100
AT_EMPTY_PATH: Final = 0x1000
AT_RECURSIVE: Final = 0x8000

MS_NOSUID: Final = 0x2
MS_NODEV: Final = 0x4
MS_NOEXEC: Final = 0x8
MS_BIND: Final = 0x1000
MS_REC: Final = 0x4000
MS_PRIVATE: Final = 0x40000
MS_SLAVE: Final = 0x80000
MS_SHARED: Final = 0x100000

MNT_DETACH: Final = 0x2
UMOUNT_NOFOLLOW: Final = 0x8

MOUNT_ATTR_RDONLY: Final = 0x1
MOUNT_ATTR_NOSUID: Final = 0x2
MOUNT_ATTR_NODEV: Final = 0x4
MOUNT_ATTR_NOEXEC: Final = 0x8

OPEN_TREE_CLONE: Final = 0x1
OPEN_TREE_CLOEXEC: Final = 0x80000  # O_CLOEXEC
MOVE_MOUNT_F_EMPTY_PATH: Final = 0x4
MOVE_MOUNT_T_EMPTY_PATH: Final = 0x40
FSOPEN_CLOEXEC: Final = 0x1
FSMOUNT_CLOEXEC: Final = 0x1
FSCONFIG_SET_FLAG: Final = 0
FSCONFIG_SET_STRING: Final = 1
FSCONFIG_CMD_CREATE: Final = 6

_LOG_BYTES: Final = 8192

AnyPath = str | bytes | os.PathLike[str]


class MountAttributes(ctypes.Structure):
    """``struct mount_attr`` of <linux/mount.h>."""

    _fields_ = [
        (name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")
    ]


_text = ctypes.c_char_p
_int = ctypes.c_int
_unsigned = ctypes.c_uint
_mount: Final = function("mount", _text, _text, _text, ctypes.c_ulong, _text)
_umount2: Final = function("umount2", _text, _int)
_open_tree: Final = system_call("open_tree", SYS_OPEN_TREE, _int, _text, _unsigned)
_move_mount: Final = system_call("move_mount", SYS_MOVE_MOUNT, _int, _text, _int, _text, _unsigned)
_fsopen: Final = system_call("fsopen", SYS_FSOPEN, _text, _unsigned)
_fsconfig: Final = system_call("fsconfig", SYS_FSCONFIG, _int, _unsigned, _text, _text, _int)
_fsmount: Final = system_call("fsmount", SYS_FSMOUNT, _int, _unsigned, _unsigned)
_mount_setattr: Final = system_call(
    "mount_setattr",
    SYS_MOUNT_SETATTR,
    _int,
    _text,
    _unsigned,
    ctypes.POINTER(MountAttributes),
    ctypes.c_size_t,
)


def mount(
    source: AnyPath | None,
    target: AnyPath,
    kind: str | None,
    flags: int,
    options: str | None = None,
) -> None:
    """The old way to mount: one call where the new ones take several, and no message on failure.

    Args:
        source: for MS_BIND what is bound; for a new file system a name that mountinfo shows.
        target: must exist.
        kind: the file system's type; None with MS_BIND and changes of propagation.
        flags: MS_*.
        options: the file system's own, ``size=1m,mode=755``.

    Raises:
        SyscallError: ENOENT, EINVAL, EPERM, EBUSY and many more.
    """
    _mount(
        None if source is None else os.fsencode(source),
        os.fsencode(target),
        None if kind is None else kind.encode(),
        flags,
        None if options is None else options.encode(),
    )


def unmount(target: AnyPath, flags: int = 0) -> None:
    """umount2(2). With MNT_DETACH at once, also a busy one, with all that is mounted below it.

    Raises:
        SyscallError: EBUSY, EINVAL (not a mount point, or a locked one), ENOENT.
    """
    _umount2(os.fsencode(target), flags)


def set_attributes(
    path: AnyPath,
    *,
    fd: int = AT_FDCWD,
    flags: int = 0,
    add: int = 0,
    remove: int = 0,
    propagation: int = 0,
) -> None:
    """Changes a mount, and with AT_RECURSIVE all mounts below it, wholly or not at all.

    Only this namespace's mounts change, not the file systems: others see them as before.

    Args:
        path: of the mount's root; relative to ``fd``.
        fd: a directory; with AT_EMPTY_PATH and the path "" the mount itself.
        flags: AT_RECURSIVE, AT_EMPTY_PATH.
        add: MOUNT_ATTR_* to set.
        remove: MOUNT_ATTR_* to clear.
        propagation: MS_PRIVATE, MS_SLAVE or MS_SHARED; 0 leaves it.

    Raises:
        SyscallError: EINVAL (not a mount's root), EPERM (a locked attribute), EBUSY (RDONLY, and a
            file is open for writing through the mount), ENOSYS before Linux 5.12.
    """
    attributes = MountAttributes(add, remove, propagation, 0)
    _mount_setattr(fd, os.fsencode(path), flags, attributes, ctypes.sizeof(attributes))


def open_tree(path: AnyPath, *, fd: int = AT_FDCWD, flags: int = 0) -> int:
    """A copy of the mount at ``path`` (a bind mount of it), attached nowhere: its descriptor.

    Args:
        path: any file or directory; relative to ``fd``.
        fd: a directory; with AT_EMPTY_PATH and the path "" what is copied. It must lie in the
            caller's mount namespace.
        flags: AT_RECURSIVE for the mounts below too, AT_EMPTY_PATH.

    Raises:
        SyscallError: ENOENT; EINVAL (another mount namespace's, or with locked mounts below).
    """
    opened: int = _open_tree(fd, os.fsencode(path), flags | OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC)
    return opened


def new_file_system(
    kind: str, options: Mapping[str, str | None] | None = None, attributes: int = 0
) -> int:
    """A new instance of a file system, mounted nowhere yet: its mount's descriptor.

    Args:
        kind: ``tmpfs``, ``proc``, ``devpts``, ``mqueue``, ...
        options: the file system's own; None is a flag without a value. ``source`` is the name that
            mountinfo shows.
        attributes: MOUNT_ATTR_*.

    Raises:
        SyscallError: ENODEV (no such file system), EINVAL (an option), EPERM. ``arguments`` ends in
            what the kernel said about it.
    """
    context: int = _fsopen(kind.encode(), FSOPEN_CLOEXEC)
    try:
        for key, value in (options or {}).items():
            command = FSCONFIG_SET_FLAG if value is None else FSCONFIG_SET_STRING
            text = None if value is None else value.encode()
            _fsconfig(context, command, key.encode(), text, 0)
        _fsconfig(context, FSCONFIG_CMD_CREATE, None, None, 0)
        fd: int = _fsmount(context, FSMOUNT_CLOEXEC, attributes)
    except SyscallError as error:
        said = _log_of(context)
        raise SyscallError(
            error.call, f"{kind}: {said or error.arguments}", error.errno or errno.EIO
        ) from error
    finally:
        os.close(context)
    return fd


def mount_points() -> frozenset[bytes]:
    """Where something is mounted in this mount namespace; nothing that is mounted is asked.

    Raises:
        OSError: there is no /proc.
    """
    # "36 35 98:0 /root /mount/point options ..."
    lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    return frozenset(unescape(line.split(b" ", 5)[4]) for line in lines)


def unescape(field: bytes) -> bytes:
    """Undoes the octal escapes (of space, tab, newline, backslash) in /proc/self/mountinfo."""
    return re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), field)


def attach(mount_fd: int, target: AnyPath, *, fd: int = AT_FDCWD) -> None:
    """Mounts what open_tree or new_file_system made; while its descriptor is open it is busy.

    Args:
        mount_fd: of one that is not attached yet.
        target: a directory, or a file for a file; relative to ``fd``, "" for ``fd`` itself.
        fd: a directory, or with "" what is covered.

    Raises:
        SyscallError: ENOENT, ENOTDIR (a directory onto a file), EINVAL, EPERM.
    """
    path = os.fsencode(target)
    flags = MOVE_MOUNT_F_EMPTY_PATH | (0 if path else MOVE_MOUNT_T_EMPTY_PATH)
    _move_mount(mount_fd, b"", fd, path, flags)


def _log_of(context: int) -> str:
    """What the kernel says about a failed fsconfig or fsmount, one message a read."""
    said = []
    while True:
        try:
            said.append(os.read(context, _LOG_BYTES).decode(errors="replace").strip())
        except OSError:  # ENODATA: that was all
            return "; ".join(said)
