"""Whether the work directories' file system holds project quotas, found by trying."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Final

from stockade.platform import quota
from stockade.platform.errors import SyscallError
from stockade.platform.quota import Project
from stockade.sandbox import uids
from stockade.sandbox.confinement_probe import attempt
from stockade.sandbox.errors import SandboxSetupError

# For trying, each locked as the uid of its number would be. A few of them, since XFS keeps a record
# for good of each project that it ever saw.
_PROJECTS: Final = range(0xFFFF0000, 0xFFFF0040)
_NOBODY: Final = 65534
_PAST_LIMIT: Final = (errno.EDQUOT, errno.ENOSPC)
_TRY: Final = "try a project quota"

_MEND: Final = (
    "put state_dir on a file system with project quotas: on ext4 unmount it, run "
    "`tune2fs -O project -Q prjquota DEVICE` and mount it with the option prjquota (as root file "
    "system: from a rescue system, and with rootflags=prjquota; the kernel needs CONFIG_QFMT_V2); "
    "on XFS mount it with the option prjquota"
)
_LEAVE: Final = "choose a state_dir that is in no project (`lsattr -pd DIRECTORY` tells it)"


def obstacle(directory: str) -> tuple[str, str] | None:
    """Why work directories in ``directory`` can have no project quota, and what mends it.

    Call it as root, from a process with a single thread. Nothing is left: the files that are tried
    with have no names.
    """
    try:
        with _opened(directory, os.O_DIRECTORY) as fd:
            return _obstacle(directory, fd)
    except (SandboxSetupError, OSError) as error:
        return f"cannot {_TRY} in {directory}: {error}", _MEND


def _obstacle(directory: str, fd: int) -> tuple[str, str] | None:
    try:
        quota.usage(fd, _PROJECTS[0])
    except SyscallError as error:
        why = {
            errno.ENOSYS: "keeps no quotas, or the kernel is older than Linux 5.14",
            errno.ESRCH: "does not count by projects",
        }.get(error.errno or 0, f"does not tell of projects: {error}")
        return f"the file system of {directory} {why}", _MEND
    outer = quota.project_of(fd).project_id
    if outer:
        return f"{directory} is in project {outer}, whose limits tasks would then leave", _LEAVE
    with _locked() as project_id:
        why = _try(directory, fd, project_id)
    return (f"the file system of {directory} does not hold limits: {why}", _MEND) if why else None


def _try(directory: str, fd: int, project_id: int) -> str:
    """Why a child without privileges is not kept from a second file; empty when it is."""
    # A trial that was killed may have left some.
    quota.set_limits(fd, project_id, None, None)
    with _unnamed(directory) as first, _unnamed(directory) as second:
        quota.set_project(first, Project(project_id, inherits=False))
        os.fchown(second, _NOBODY, _NOBODY)
        try:
            quota.set_limits(fd, project_id, None, quota.usage(fd, project_id).inodes)
            return attempt(0, lambda: _pass_limit(second, project_id))
        finally:
            quota.set_limits(fd, project_id, None, None)


def _pass_limit(fd: int, project_id: int) -> None:
    # Root passes every limit.
    os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    try:
        quota.set_project(fd, Project(project_id, inherits=False))
    except SyscallError as error:
        if error.errno not in _PAST_LIMIT:
            raise
    else:
        raise SandboxSetupError(_TRY, "a project could pass its limit (mounted without prjquota?)")


@contextlib.contextmanager
def _locked() -> Iterator[int]:
    uids.make_lock_file()
    for project_id in _PROJECTS:
        lock_fd = uids.lock(project_id)
        if lock_fd is not None:
            try:
                yield project_id
            finally:
                uids.unlock(project_id, lock_fd)
            return
    raise SandboxSetupError(_TRY, f"{len(_PROJECTS)} others do so now")


def _unnamed(directory: str) -> contextlib.AbstractContextManager[int]:
    return _opened(directory, os.O_TMPFILE | os.O_RDWR)


@contextlib.contextmanager
def _opened(directory: str, flags: int) -> Iterator[int]:
    fd = os.open(directory, flags | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)
