"""Landlock: file system, network and signal rules that an ordinary process puts on itself.

Source: landlock(7), Documentation/userspace-api/landlock.rst, <linux/landlock.h>.
"""

from __future__ import annotations

import ctypes
import dataclasses
import enum
from typing import Final

from stockade.platform._libc import system_call
from stockade.platform.errors import SyscallError

# Newer than Linux 5.1, so the same number on every architecture.
SYS_LANDLOCK_CREATE_RULESET: Final = 444

LANDLOCK_CREATE_RULESET_VERSION: Final = 1
LANDLOCK_RULE_PATH_BENEATH: Final = 1


class AccessFs(enum.IntFlag):
    """LANDLOCK_ACCESS_FS_*: what a rule on a path can grant."""

    EXECUTE = 1 << 0
    WRITE_FILE = 1 << 1
    READ_FILE = 1 << 2
    READ_DIR = 1 << 3
    REMOVE_DIR = 1 << 4
    REMOVE_FILE = 1 << 5
    MAKE_CHAR = 1 << 6
    MAKE_DIR = 1 << 7
    MAKE_REG = 1 << 8
    MAKE_SOCK = 1 << 9
    MAKE_FIFO = 1 << 10
    MAKE_BLOCK = 1 << 11
    MAKE_SYM = 1 << 12
    REFER = 1 << 13
    TRUNCATE = 1 << 14
    IOCTL_DEV = 1 << 15


class AccessNet(enum.IntFlag):
    """LANDLOCK_ACCESS_NET_*: what a rule on a TCP port can grant."""

    BIND_TCP = 1 << 0
    CONNECT_TCP = 1 << 1


class Scope(enum.IntFlag):
    """LANDLOCK_SCOPE_*: what cannot reach out of the restricted processes; no rule grants it."""

    ABSTRACT_UNIX_SOCKET = 1 << 0
    SIGNAL = 1 << 1


NO_NET: Final = AccessNet(0)
NO_SCOPE: Final = Scope(0)

# The rights that a rule on anything but a directory may name.
FILE_RIGHTS: Final = (
    AccessFs.EXECUTE
    | AccessFs.WRITE_FILE
    | AccessFs.READ_FILE
    | AccessFs.TRUNCATE
    | AccessFs.IOCTL_DEV
)


@dataclasses.dataclass(frozen=True, slots=True)
class Rights:
    """What one ABI version can restrict."""

    fs: AccessFs
    net: AccessNet
    scope: Scope


_FS_1: Final = AccessFs((1 << 13) - 1)  # EXECUTE to MAKE_SYM
_FS_2: Final = _FS_1 | AccessFs.REFER
_FS_3: Final = _FS_2 | AccessFs.TRUNCATE
_FS_5: Final = _FS_3 | AccessFs.IOCTL_DEV
_NET_4: Final = AccessNet.BIND_TCP | AccessNet.CONNECT_TCP
_SCOPE_6: Final = Scope.ABSTRACT_UNIX_SOCKET | Scope.SIGNAL

_BY_ABI: Final[dict[int, Rights]] = {
    1: Rights(_FS_1, NO_NET, NO_SCOPE),  # Linux 5.13
    2: Rights(_FS_2, NO_NET, NO_SCOPE),  # 5.19
    3: Rights(_FS_3, NO_NET, NO_SCOPE),  # 6.2
    4: Rights(_FS_3, _NET_4, NO_SCOPE),  # 6.7
    5: Rights(_FS_5, _NET_4, NO_SCOPE),  # 6.10
    6: Rights(_FS_5, _NET_4, _SCOPE_6),  # 6.12
    7: Rights(_FS_5, _NET_4, _SCOPE_6),  # 6.15: adds flags for the audit log alone
}
NEWEST_ABI: Final = max(_BY_ABI)


def rights_of(abi: int) -> Rights:
    """What a kernel of this ABI version can restrict.

    A version newer than NEWEST_ABI can do all that NEWEST_ABI can.

    Raises:
        ValueError: ``abi`` is below 1, where there is no Landlock.
    """
    if abi < 1:
        raise ValueError(f"cannot use Landlock ABI {abi}: the first one is 1")
    return _BY_ABI[min(abi, NEWEST_ABI)]


class RulesetAttributes(ctypes.Structure):
    """``struct landlock_ruleset_attr``: what is handled is denied where no rule grants it.

    Older kernels take it as long as what follows is zero.
    """

    _fields_ = [
        ("handled_access_fs", ctypes.c_uint64),
        ("handled_access_net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    ]


class PathAttributes(ctypes.Structure):
    """``struct landlock_path_beneath_attr``, which is packed.

    Grants access to a file, or to a directory and all that is beneath it. The rule is bound to the
    file itself and not to its path or mount: bind mounts of it elsewhere are granted the same.
    """

    _pack_ = 1
    _fields_ = [("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32)]


_create_ruleset: Final = system_call(
    "landlock_create_ruleset",
    SYS_LANDLOCK_CREATE_RULESET,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_uint32,
)


def abi() -> int:
    """The kernel's Landlock ABI version; 0 when it has none or it is not enabled at boot."""
    try:
        return int(_create_ruleset(None, 0, LANDLOCK_CREATE_RULESET_VERSION))
    except SyscallError:  # ENOSYS: not built in; EOPNOTSUPP: not in the kernel's lsm= list
        return 0
