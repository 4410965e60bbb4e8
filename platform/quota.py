"""Project quotas: limits on what a directory and all that comes to be in it takes of a file system.

Every file carries a project id, 0 where nobody gave it one. What is made in a directory that
*inherits* gets the directory's id and inherits too, whoever makes it. The file system counts bytes
and files by id, and refuses what would pass the id's limits: EDQUOT on ext4 and f2fs, ENOSPC on
XFS. CAP_SYS_RESOURCE passes them.

The owner of a file may change its id and whether it inherits (FS_IOC_FSSETXATTR, FS_IOC_SETFLAGS,
file_setattr), unless the process is in a user namespace of its own: a limit holds only for those
who are kept from these calls.

Source: quotactl(2), ioctl_fs(2), <linux/quota.h>, <linux/fs.h>. quotactl_fd is Linux 5.14.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import struct
from typing import Final, NamedTuple

from stockade.platform._libc import system_call, translated
from stockade.platform.errors import SyscallError

SYS_QUOTACTL_FD: Final = 443
Q_GETQUOTA: Final = 0x800007
Q_SETQUOTA: Final = 0x800008
PRJQUOTA: Final = 2
QIF_LIMITS: Final = 5
QIF_DQBLKSIZE: Final = 1024

FS_IOC_FSGETXATTR: Final = 0x801C581F
FS_IOC_FSSETXATTR: Final = 0x401C5820
FS_XFLAG_PROJINHERIT: Final = 0x200

FSXATTR: Final = struct.Struct("=5I8x")  # flags, extsize, nextents, projid, cowextsize


class DiskQuota(ctypes.Structure):
    """``struct if_dqblk`` of <linux/quota.h>. Limits are in units of 1,024 bytes, 0 for none."""

    _fields_ = [
        *(
            (f"dqb_{name}", ctypes.c_uint64)
            for name in (
                "bhardlimit", "bsoftlimit", "curspace", "ihardlimit", "isoftlimit", "curinodes",
                "btime", "itime",
            )
        ),
        ("dqb_valid", ctypes.c_uint32),
    ]  # fmt: skip


_quotactl_fd: Final = system_call(
    "quotactl_fd",
    SYS_QUOTACTL_FD,
    ctypes.c_uint,
    ctypes.c_uint,
    ctypes.c_uint32,
    ctypes.POINTER(DiskQuota),
)


class Project(NamedTuple):
    """The project of a file or directory; ``inherits``: what is made in it is of it too."""

    project_id: int
    inherits: bool


class Usage(NamedTuple):
    """What a project has on one file system; directories are files."""

    size_bytes: int
    inodes: int


def project_of(fd: int) -> Project:
    """The project of an open file (not O_PATH).

    Raises:
        SyscallError: ENOTTY or EOPNOTSUPP, the file system has no such attributes.
    """
    with translated("ioctl", fd, "FS_IOC_FSGETXATTR"):
        flags, _, _, project_id, _ = FSXATTR.unpack(
            fcntl.ioctl(fd, FS_IOC_FSGETXATTR, bytes(FSXATTR.size))
        )
    return Project(project_id, bool(flags & FS_XFLAG_PROJINHERIT))


def set_project(fd: int, project: Project) -> None:
    """Moves an open file, with what it takes, to a project; what is in a directory stays.

    Raises:
        SyscallError: ENOTTY, EOPNOTSUPP or EINVAL, the file system has no projects; EPERM or
            EINVAL, not its owner, or in a user namespace; EDQUOT or ENOSPC, past a limit.
    """
    with translated("ioctl", fd, "FS_IOC_FSSETXATTR", *project):
        # The rest is set to what it was: reading it back is how the interface is meant.
        attributes = fcntl.ioctl(fd, FS_IOC_FSGETXATTR, bytes(FSXATTR.size))
        flags, extent_size, extents, _, cow_extent_size = FSXATTR.unpack(attributes)
        flags &= ~FS_XFLAG_PROJINHERIT
        if project.inherits:
            flags |= FS_XFLAG_PROJINHERIT
        changed = FSXATTR.pack(flags, extent_size, extents, project.project_id, cow_extent_size)
        fcntl.ioctl(fd, FS_IOC_FSSETXATTR, changed)


def usage(fd: int, project_id: int) -> Usage:
    """What the project has on the file system of any open file (not O_PATH) of it.

    Raises:
        SyscallError: ENOSYS, no quotas in the kernel, on this file system, or (XFS) switched on;
            ESRCH, not switched on for projects; EPERM.
    """
    found = DiskQuota()
    try:
        _quotactl_fd(fd, _command(Q_GETQUOTA), project_id, found)
    except SyscallError as error:
        # XFS, of a project that it never saw.
        if error.errno != errno.ENOENT:
            raise
        return Usage(0, 0)
    return Usage(found.dqb_curspace, found.dqb_curinodes)


def set_limits(fd: int, project_id: int, size_bytes: int | None, inodes: int | None) -> None:
    """Sets what the project may have on the file system of any open file (not O_PATH) of it.

    Args:
        fd: a file or directory there.
        project_id: whose limits.
        size_bytes: counted in whole KiB, the last one begun; None for no limit.
        inodes: None for no limit.

    Raises:
        ValueError: a limit of 0, which the kernel takes for none.
        SyscallError: as usage; EROFS; ERANGE, more than the file system can count.
    """
    if size_bytes == 0 or inodes == 0:
        raise ValueError("cannot limit a project to nothing: the kernel takes 0 for no limit")
    limits = DiskQuota(dqb_valid=QIF_LIMITS)
    limits.dqb_bhardlimit = -(-(size_bytes or 0) // QIF_DQBLKSIZE)
    limits.dqb_ihardlimit = inodes or 0
    _quotactl_fd(fd, _command(Q_SETQUOTA), project_id, limits)


def _command(command: int) -> int:
    return command << 8 | PRJQUOTA  # QCMD
