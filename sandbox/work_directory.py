"""A slot's work directory: on disk, or, when its size is limited, a tmpfs of that size.

A size that would not fit in the task's memory is a project quota on the disk instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
from typing import Final

from stockade.platform import mounts
from stockade.platform.errors import SyscallError
from stockade.platform.mounts import MOUNT_ATTR_NODEV, MOUNT_ATTR_NOSUID
from stockade.sandbox import project_quota
from stockade.sandbox.limits import Limits

_OPEN: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ATTRIBUTES: Final = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV


def temporary_bytes(limits: Limits) -> int | None:
    """The most that a task may keep in files that count as its memory."""
    return None if limits.memory_max is None else limits.memory_max // 2


def tmpfs_options(
    size_bytes: int | None, inodes: int | None, mode: int, uid: int = 0
) -> dict[str, str | None]:
    """Options of a tmpfs; None leaves the kernel's default, half of the host's memory."""
    options: dict[str, str | None] = {"mode": f"{mode:04o}"}
    if size_bytes is not None:
        # 0 is no limit to the kernel, which counts whole pages.
        options["size"] = str(max(1, size_bytes))
    if inodes is not None:
        options["nr_inodes"] = str(inodes)
    if uid:
        options |= {"uid": str(uid), "gid": str(uid)}
    return options


def wants_quota(limits: Limits) -> bool:
    """Whether the work directory is limited."""
    return limits.workdir_max is not None or limits.workdir_inodes_max is not None


def wants_tmpfs(limits: Limits) -> bool:
    """Whether the work directory is a tmpfs."""
    return wants_quota(limits) and fits_in_memory(limits)


def wants_project(limits: Limits) -> bool:
    """Whether the work directory has a project quota."""
    return wants_quota(limits) and not fits_in_memory(limits)


def quota_options(limits: Limits, uid: int | None) -> dict[str, str | None]:
    """Options of the tmpfs that a limited work directory is; ``uid``: whose it is."""
    size = temporary_bytes(limits) if limits.workdir_max is None else limits.workdir_max
    # The directory itself is one.
    inodes = None if limits.workdir_inodes_max is None else limits.workdir_inodes_max + 1
    return tmpfs_options(size, inodes, 0o700, uid or 0)


def fits_in_memory(limits: Limits) -> bool:
    """Whether a work directory of this size may be a tmpfs: it counts as the task's memory."""
    most = temporary_bytes(limits)
    return limits.workdir_max is None or most is None or limits.workdir_max <= most


@dataclasses.dataclass(slots=True)
class WorkDirectory:
    """An open work directory.

    Attributes:
        fd: for the files that come with the task; closed when it starts.
        mount: a mount of it that is attached nowhere, for the slot's child; -1 when the task sees
            the host's.
    """

    fd: int
    mount: int = -1

    def close(self) -> None:
        """Closes what is open; twice is once."""
        for name in ("fd", "mount"):
            if getattr(self, name) >= 0:
                os.close(getattr(self, name))
                setattr(self, name, -1)


def open_work_directory(
    parent_fd: int, parent_path: str, name: str, limits: Limits, uid: int | None, *, detached: bool
) -> WorkDirectory:
    """Opens a directory that was just made, and limits it where the limits ask for that.

    Args:
        parent_fd: the directory that it is in.
        parent_path: the same, by path.
        name: the directory's.
        limits: its size is in them.
        uid: whom it is given to; None leaves it.
        detached: the task has a mount namespace of its own: the tmpfs, or a mount of the directory,
            is made for it alone.

    Raises:
        SyscallError: the kernel refuses.
        OSError: the same.
    """
    work = WorkDirectory(os.open(name, _OPEN, dir_fd=parent_fd))
    with contextlib.ExitStack() as undo:
        undo.callback(work.close)
        if wants_tmpfs(limits):
            tmpfs = mounts.new_file_system("tmpfs", quota_options(limits, uid), _ATTRIBUTES)
            os.close(work.fd)
            work.fd = tmpfs
            if detached:
                work.mount = os.dup(tmpfs)
            else:
                mounts.attach(tmpfs, os.path.join(parent_path, name))
        else:
            if wants_project(limits):
                assert uid is not None, "as an ordinary user no quota can be held"
                project_quota.set_up(work.fd, uid, limits)
            if uid is not None:
                os.fchown(work.fd, uid, uid)
            if detached:
                work.mount = mount_of("", fd=work.fd, flags=mounts.AT_EMPTY_PATH)
        undo.pop_all()
    return work


def mount_of(path: str, *, fd: int = mounts.AT_FDCWD, flags: int = 0) -> int:
    """A mount of a directory, attached nowhere, nosuid and nodev; as mounts.open_tree.

    Raises:
        SyscallError: the kernel refuses.
    """
    tree = mounts.open_tree(path, fd=fd, flags=flags)
    try:
        mounts.set_attributes("", fd=tree, flags=mounts.AT_EMPTY_PATH, add=_ATTRIBUTES)
    except SyscallError:
        os.close(tree)
        raise
    return tree


def unmount_work_directory(path: str) -> bool:
    """Takes a tmpfs off a work directory, with all that is in it.

    Returns:
        False when there is none.

    Raises:
        SyscallError: the kernel refuses.
    """
    try:
        mounts.unmount(path, mounts.MNT_DETACH | mounts.UMOUNT_NOFOLLOW)
    except SyscallError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT):
            return False
        raise
    return True
