"""The Landlock ruleset of ``sealed``: a second lock on what the mounts already close.

Mounts can fail to cover what an operator forgot, and a file of a task's own uid is its own wherever
it lies; Landlock grants by path and denies the rest, whoever owns it.
"""

from __future__ import annotations

import dataclasses
import os
import stat
from collections.abc import Sequence
from typing import Final

from stockade.platform import landlock
from stockade.platform.landlock import FILE_RIGHTS, NO_NET, AccessFs, Rights
from stockade.sandbox.errors import UnsupportedError

# Before it every rename or link from one directory into another is refused, with EXDEV, and no rule
# can grant it: mv, package managers and many build tools would break.
MINIMUM_ABI: Final = 2

_READ: Final = AccessFs.EXECUTE | AccessFs.READ_FILE | AccessFs.READ_DIR
# A rename needs REFER in both directories, and may not give the file more rights than it had: all
# writable places have the same, so any of them can be renamed into any other of the same mount.
_WRITE: Final = (
    _READ
    | AccessFs.WRITE_FILE
    | AccessFs.REMOVE_DIR
    | AccessFs.REMOVE_FILE
    | AccessFs.MAKE_DIR
    | AccessFs.MAKE_REG
    | AccessFs.MAKE_SOCK
    | AccessFs.MAKE_FIFO
    | AccessFs.MAKE_SYM
    | AccessFs.REFER
    | AccessFs.TRUNCATE
)
# IOCTL_DEV is handled, so a device node anywhere else answers to harmless commands only, and is
# granted here: without it a terminal could not be put into raw mode, nor its size be asked for.
_DEVICE: Final = (
    AccessFs.READ_FILE
    | AccessFs.WRITE_FILE
    | AccessFs.READ_DIR
    | AccessFs.TRUNCATE
    | AccessFs.IOCTL_DEV
)


@dataclasses.dataclass(frozen=True, slots=True)
class Grants:
    """Paths, absolute, as the one sees them who makes the ruleset; ``..`` and links are followed.

    Attributes:
        read_only: may be read and executed, with all beneath.
        read_write: may be changed too; no device node can be made there.
        devices: device nodes, or directories of them such as /dev: reading, writing and ioctl.
    """

    read_only: Sequence[str]
    read_write: Sequence[str]
    devices: Sequence[str] = ()


def make_ruleset(abi: int, grants: Grants) -> int:
    """A ruleset's descriptor (close-on-exec), for the launcher to put the task under.

    All rights that the ABI knows are handled. From ABI 6 a task can neither signal processes nor
    connect to abstract Unix sockets outside its own. TCP is left alone: ``sealed`` has a network of
    its own.

    Rules are bound to the files found now: make it where the task's mounts are seen.

    Raises:
        UnsupportedError: the ABI is older than MINIMUM_ABI.
        OSError: a path does not exist.
        SyscallError: those of landlock.create_ruleset.
    """
    if abi < MINIMUM_ABI:
        raise UnsupportedError(
            "landlock", f"Linux 5.19 with landlock in its lsm= list (ABI {MINIMUM_ABI}, not {abi})"
        )
    rights = landlock.rights_of(abi)
    ruleset_fd = landlock.create_ruleset(rights.fs, NO_NET, rights.scope)
    try:
        for paths, access in (
            (grants.read_only, _READ),
            (grants.read_write, _WRITE),
            (grants.devices, _DEVICE),
        ):
            for path in paths:
                _grant(ruleset_fd, path, access, rights)
    except BaseException:
        os.close(ruleset_fd)
        raise
    return ruleset_fd


def _grant(ruleset_fd: int, path: str, access: AccessFs, rights: Rights) -> None:
    path_fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        access &= rights.fs
        if not stat.S_ISDIR(os.fstat(path_fd).st_mode):
            access &= FILE_RIGHTS
        landlock.add_path_rule(ruleset_fd, path_fd, access)
    finally:
        os.close(path_fd)
