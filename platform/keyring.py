"""Kernel keyrings of the calling process and its uid.

A session keyring is inherited over fork and exec; a user's keyring belongs to the uid and outlives
all its processes. Neither is in any namespace but the user's.

Source: keyctl(2), session-keyring(7), user-keyring(7), persistent-keyring(7).
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Final

from stockade.platform._libc import system_call, translated
from stockade.platform.errors import SyscallError

SYS_KEYCTL: Final = {"x86_64": 250}.get(os.uname().machine, 219)
KEYCTL_JOIN_SESSION_KEYRING: Final = 1
KEYCTL_CLEAR: Final = 7
KEYCTL_GET_PERSISTENT: Final = 22
KEY_SPEC_SESSION_KEYRING: Final = -3
KEY_SPEC_USER_KEYRING: Final = -4
KEY_SPEC_USER_SESSION_KEYRING: Final = -5
# Of a kernel without keyrings, and of the filter of an engine, which all in a container are under.
ABSENT: Final = (errno.ENOSYS, errno.EPERM)

_keyctl: Final = system_call(
    "keyctl",
    SYS_KEYCTL,
    ctypes.c_int,
    ctypes.c_long,
    ctypes.c_long,
    ctypes.c_long,
    ctypes.c_long,
)


def join_new_session() -> None:
    """Replaces the session keyring by a new, empty one without a name, which nobody can join.

    What the caller's parent had in its keyring is out of reach of it and of what it starts then.
    Where there are none (``ABSENT``) there is nothing to leave.

    Raises:
        SyscallError: EDQUOT (the uid has too many keys), ENOMEM.
    """
    try:
        _keyctl(KEYCTL_JOIN_SESSION_KEYRING, 0, 0, 0, 0)
    except SyscallError as error:
        if error.errno not in ABSENT:
            raise


def owners() -> set[int]:
    """The uids that have any key or keyring; none on a kernel without keys.

    Raises:
        SyscallError: /proc is not readable.

    Source: proc_key-users(5).
    """
    try:
        with (
            translated("read", "/proc/key-users"),
            open("/proc/key-users", encoding="ascii") as file,
        ):
            return {int(line.partition(":")[0]) for line in file}
    except SyscallError as error:
        if error.errno == errno.ENOENT:
            return set()
        raise


def clear_user_keyrings() -> bool:
    """Unlinks every key of the caller's uid: its user, user session and persistent keyrings.

    Run it as the uid, with a session keyring of its own, when none of the uid's tasks lives.

    Returns:
        False when a task has taken the right to do so away from the uid, which is for good and for
        root too: what it left there may still be read by whoever has the uid next. For a moment
        also after it had used up the uid's quota of keys.

    Raises:
        SyscallError: EDQUOT, ENOMEM.
    """
    try:
        # First: keys in it can use up the quota that it takes to find the others, if only to make
        # them.
        persistent = _persistent_keyring()
        if persistent is not None:
            _keyctl(KEYCTL_CLEAR, persistent, 0, 0, 0)
        for keyring in (KEY_SPEC_USER_KEYRING, KEY_SPEC_USER_SESSION_KEYRING):
            _keyctl(KEYCTL_CLEAR, keyring, 0, 0, 0)
    except SyscallError as error:
        if error.errno in ABSENT:
            return True
        # ENOKEY: without the right to look for it, the kernel does not find the keyring itself.
        if error.errno in (errno.EACCES, errno.ENOKEY):
            return False
        raise
    return True


def _persistent_keyring() -> int | None:
    try:
        return int(_keyctl(KEYCTL_GET_PERSISTENT, -1, KEY_SPEC_SESSION_KEYRING, 0, 0))
    except SyscallError as error:
        if error.errno == errno.EOPNOTSUPP:  # the kernel is built without them
            return None
        raise
