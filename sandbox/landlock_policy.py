"""The Landlock ruleset of ``sealed``: a second lock on what the mounts already close.

Mounts can fail to cover what an operator forgot, and a file of a task's own uid is its own wherever
it lies; Landlock grants by path and denies the rest, whoever owns it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Final

from stockade.platform import landlock
from stockade.platform.landlock import FILE_RIGHTS, NO_NET, AccessFs, Rights
from stockade.platform.mounts import AT_FDCWD
from stockade.sandbox.errors import UnsupportedError
from stockade.sandbox.zygote_message import Call

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


def _rights(abi: int) -> Rights:
    """What the ABI knows, all of which is to be handled.

    Raises:
        UnsupportedError: the ABI is older than MINIMUM_ABI.
    """
    if abi < MINIMUM_ABI:
        raise UnsupportedError(
            "landlock", f"Linux 5.19 with landlock in its lsm= list (ABI {MINIMUM_ABI}, not {abi})"
        )
    return landlock.rights_of(abi)


def ruleset_calls(abi: int, grants: Grants, first_fd: int) -> Iterator[Call]:
    """The calls that make a ruleset, whose descriptor is ``first_fd``; see zygote_message.py.

    All rights that the ABI knows are handled. From ABI 6 a task can neither signal processes nor
    connect to abstract Unix sockets outside its own. TCP is left alone: ``sealed`` has a network of
    its own.

    Rules are bound to the files found then: make it where the task's mounts are seen.

    Args:
        abi: the kernel's.
        grants: what to allow.
        first_fd: the lowest number that is free.

    Raises:
        UnsupportedError: the ABI is older than MINIMUM_ABI.
    """
    handled = _rights(abi)
    attributes = bytes(landlock.RulesetAttributes(handled.fs, NO_NET, handled.scope))
    yield Call("landlock_create_ruleset", (attributes, len(attributes), 0))
    path_fd = first_fd + 1
    for path, access in _rules(grants, handled):
        rule = bytes(landlock.PathAttributes(access, path_fd))
        yield Call("openat", (AT_FDCWD, path, os.O_PATH | os.O_CLOEXEC, 0))
        yield Call("landlock_add_rule", (first_fd, landlock.LANDLOCK_RULE_PATH_BENEATH, rule, 0))
        yield Call("close", (path_fd,))


def _rules(grants: Grants, handled: Rights) -> Iterator[tuple[str, AccessFs]]:
    """Each path with what is granted there, as far as it is handled.

    A path that is not there is taken for a directory's, of a slot that is still to be made.
    """
    for paths, wanted in (
        (grants.read_only, _READ),
        (grants.read_write, _WRITE),
        (grants.devices, _DEVICE),
    ):
        for path in paths:
            access = wanted & handled.fs
            if os.path.exists(path) and not os.path.isdir(path):
                access &= FILE_RIGHTS
            yield path, access
