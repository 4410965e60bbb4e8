"""Declares C functions and system calls, each with its own argument types and error check.

A C function that returns int leaves the upper half of the register as it happens to be: read as a
long, umount2's -1 is a positive number and every error of it passes unseen.
"""

from __future__ import annotations

import ctypes
from typing import Any

from stockade.platform import _libc


def function(name: str, *argument_types: Any) -> Any:
    """A function of the C library that returns int, -1 on error; raises SyscallError."""
    declared = _libc._declare(name, _libc.libc[name], *argument_types)
    declared.restype = ctypes.c_int
    return declared


def system_call(name: str, number: int, *argument_types: Any) -> Any:
    """A call that the C library of Debian 12 has no function for; raises SyscallError."""
    return _libc._system_call(name, number, *argument_types)
