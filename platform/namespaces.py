"""Namespaces that a running process makes; clone.py makes those of a new child."""

from __future__ import annotations

import ctypes
from typing import Final

from stockade.platform._libc import function

_unshare: Final = function("unshare", ctypes.c_int)


def unshare(flags: int) -> None:
    """Moves the caller into new namespaces; with CLONE_NEWPID only its future children.

    Args:
        flags: CLONE_NEW* of clone.py.

    Raises:
        SyscallError: EPERM, ENOSPC (too many namespaces), EINVAL.

    Source: unshare(2).
    """
    _unshare(flags)
