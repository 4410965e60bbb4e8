"""Work directories that are limited by a project quota of their file system.

The project of a slot has the number of its uid: uids are locked across all workers of the host, so
no two slots share one. A task could take its files out of the project; its seccomp filter refuses
the calls (seccomp_policy.ATTRIBUTES), and without one there are no such quotas.
"""

from __future__ import annotations

import os
from typing import Final

from stockade.platform import quota
from stockade.platform.errors import SyscallError
from stockade.platform.quota import Project
from stockade.sandbox.limits import Limits

_OPEN: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def set_up(work_fd: int, uid: int, limits: Limits) -> None:
    """Makes an empty work directory, which no task can reach yet, a project of its own with limits.

    What the project has already does not count: the directory itself, and what earlier tasks of the
    uid moved elsewhere on the file system.

    Args:
        work_fd: the directory.
        uid: the slot's.
        limits: workdir_max and workdir_inodes_max of it.

    Raises:
        SyscallError: the kernel refuses.
    """
    # Those that a spawner left which died may be used up.
    lift(work_fd, uid)
    quota.set_project(work_fd, Project(uid, inherits=True))
    used = quota.usage(work_fd, uid)
    size, inodes = limits.workdir_max, limits.workdir_inodes_max
    quota.set_limits(
        work_fd, uid,
        None if size is None else used.size_bytes + size,
        None if inodes is None else used.inodes + inodes,
    )  # fmt: skip


def project_of(parent_fd: int, name: str) -> int | None:
    """The project of a slot's work directory, which is its uid; None when it has none."""
    try:
        fd = os.open(name, _OPEN, dir_fd=parent_fd)
    except OSError:
        return None
    try:
        found = quota.project_of(fd).project_id
        # All work directories may be in one that is the operator's.
        return found if found and found == os.fstat(fd).st_uid else None
    except SyscallError:
        return None
    finally:
        os.close(fd)


def lift(fd: int, uid: int) -> None:
    """Takes the limits off a uid's project, on the file system of ``fd``; the uid is locked.

    Raises:
        SyscallError: the kernel refuses.
    """
    quota.set_limits(fd, uid, None, None)
