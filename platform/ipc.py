"""System V IPC objects.

Without an ipc namespace of one's own such objects live until they are removed or the host reboots,
whoever made them.

Source: sysvipc(7), proc_sysvipc(5), shmctl(2), semctl(2), msgctl(2).
"""

from __future__ import annotations

import ctypes
import enum
import errno
from typing import Final, NamedTuple

from stockade.platform._libc import function, translated
from stockade.platform.errors import SyscallError

IPC_RMID: Final = 0

_shmctl: Final = function("shmctl", ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
_semctl: Final = function("semctl", ctypes.c_int, ctypes.c_int, ctypes.c_int)
_msgctl: Final = function("msgctl", ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
# EINVAL, EIDRM: somebody else removed it. A number is not used again soon.
_GONE: Final = (errno.EINVAL, errno.EIDRM)


class Kind(enum.Enum):
    """The three kinds, by their file in /proc/sysvipc and the column of the number in it."""

    SHARED_MEMORY = ("shm", "shmid")
    SEMAPHORES = ("sem", "semid")
    MESSAGES = ("msg", "msqid")


class IpcObject(NamedTuple):
    """One System V object of the caller's ipc namespace."""

    kind: Kind
    number: int


def objects_of(uid: int) -> list[IpcObject]:
    """All that a uid owns or made: an owner can give an object away, and is still its maker.

    Raises:
        SyscallError: /proc is not readable. A kernel without System V IPC has none of them.
    """
    return [found for kind in Kind for found in _objects(kind, uid)]


def owners() -> set[int]:
    """The uids that own or made any System V object.

    Raises:
        SyscallError: /proc is not readable.
    """
    return {uid for kind in Kind for _, uids in _rows(kind) for uid in uids}


def remove(found: IpcObject) -> bool:
    """Removes an object; shared memory goes when the last process detaches it.

    Returns:
        False when it was gone already.

    Raises:
        SyscallError: EPERM: the caller is neither owner nor maker and lacks CAP_SYS_ADMIN.
    """
    try:
        if found.kind is Kind.SHARED_MEMORY:
            _shmctl(found.number, IPC_RMID, None)
        elif found.kind is Kind.SEMAPHORES:
            _semctl(found.number, 0, IPC_RMID)
        else:
            _msgctl(found.number, IPC_RMID, None)
    except SyscallError as error:
        if error.errno in _GONE:
            return False
        raise
    return True


def _objects(kind: Kind, uid: int) -> list[IpcObject]:
    return [IpcObject(kind, number) for number, uids in _rows(kind) if uid in uids]


def _rows(kind: Kind) -> list[tuple[int, tuple[int, int]]]:
    """Of each object its number, and the uids of its owner and its maker."""
    file_name, number_column = kind.value
    path = f"/proc/sysvipc/{file_name}"
    try:
        with translated("read", path), open(path, encoding="ascii") as file:
            lines = file.read().splitlines()
    except SyscallError as error:
        if error.errno == errno.ENOENT:
            return []
        raise
    header = lines[0].split()
    number, owner, maker = map(header.index, (number_column, "uid", "cuid"))
    rows = (line.split() for line in lines[1:])
    return [(int(row[number]), (int(row[owner]), int(row[maker]))) for row in rows]
