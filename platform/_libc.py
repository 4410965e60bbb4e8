"""The C library: the only place that loads it, and the only place that reads its errno.

Every function is declared with its argument types and one error check, so no call can fail unseen.
"""

from __future__ import annotations

import ctypes
import errno
import os
from types import TracebackType
from typing import Any, Final

from stockade.platform.errors import SyscallError

SYS_CLONE3: Final = 435  # the same number on every architecture, as for all calls since Linux 5.1
SYS_CLONE: Final = {"x86_64": 56}.get(os.uname().machine, 220)
SYS_OPENAT2: Final = 437
# kcmp is older than that agreement.
SYS_KCMP: Final = {"x86_64": 312}.get(os.uname().machine, 272)
KCMP_VM: Final = 1

# PyDLL and not CDLL: the GIL stays held, so a child made by clone3 wakes up owning it.
libc: Final = ctypes.PyDLL(None, use_errno=True)


class CloneArgs(ctypes.Structure):
    """``struct clone_args`` of <linux/sched.h>, as of Linux 5.7 (88 bytes)."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "flags", "pidfd", "child_tid", "parent_tid", "exit_signal", "stack", "stack_size",
            "tls", "set_tid", "set_tid_size", "cgroup",
        )
    ]  # fmt: skip


class OpenHow(ctypes.Structure):
    """``struct open_how`` of <linux/openat2.h>."""

    _fields_ = [
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    ]


class CapabilityHeader(ctypes.Structure):
    """``struct __user_cap_header_struct`` of <linux/capability.h>."""

    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class CapabilityData(ctypes.Structure):
    """``struct __user_cap_data_struct``: 32 capabilities; version 3 takes two of them."""

    _fields_ = [
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    ]


def _declare(call: str, function: Any, result_type: Any, *argument_types: Any) -> Any:
    def check(result: int, _function: Any, arguments: tuple[Any, ...]) -> int:
        if result < 0:
            raise SyscallError(call, ", ".join(map(_text, arguments)), ctypes.get_errno())
        return result

    function.argtypes = argument_types
    function.restype = result_type
    function.errcheck = check
    return function


def _text(argument: Any) -> str:
    if isinstance(argument, ctypes.Structure):
        fields = (field[0] for field in argument._fields_)
        return "{" + ", ".join(f"{name}={getattr(argument, name):#x}" for name in fields) + "}"
    if isinstance(argument, ctypes.Array):
        return "[" + ", ".join(map(_text, argument)) + "]"
    return repr(argument)


def function(name: str, *argument_types: Any) -> Any:
    """A function of the C library that returns int, -1 on error; raises SyscallError.

    As int and not as long: the upper half of the register is as it happens to be, and read with it
    umount2's -1 is a positive number, so that every error of it would pass unseen.
    """
    return _declare(name, libc[name], ctypes.c_int, *argument_types)


def system_call(name: str, number: int, *argument_types: Any) -> Any:
    """A call that the C library of Debian 12 has no function for; raises SyscallError."""
    # Indexing gives a fresh function object each time: each keeps its own argument types.
    function = _declare(name, libc["syscall"], ctypes.c_long, ctypes.c_long, *argument_types)
    return lambda *arguments: function(number, *arguments)


clone3: Final = system_call("clone3", SYS_CLONE3, ctypes.POINTER(CloneArgs), ctypes.c_size_t)
# Of the pointers the order differs between machines; but for the pidfd's they are all NULL here.
clone: Final = system_call(
    "clone", SYS_CLONE, ctypes.c_ulong, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int),
    ctypes.c_void_p, ctypes.c_void_p,
)  # fmt: skip
openat2: Final = system_call(
    "openat2",
    SYS_OPENAT2,
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.POINTER(OpenHow),
    ctypes.c_size_t,
)
prctl: Final = function("prctl", ctypes.c_int, *[ctypes.c_ulong] * 4)
capset: Final = function("capset", ctypes.POINTER(CapabilityHeader), ctypes.POINTER(CapabilityData))
_kcmp: Final = system_call(
    "kcmp", SYS_KCMP, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong
)


def share_memory(pid: int, other_pid: int) -> bool:
    """Whether two processes have one address space, kcmp(2); False when we may not know."""
    try:
        return bool(_kcmp(pid, other_pid, KCMP_VM, 0, 0) == 0)
    except SyscallError:
        return False


class translated:  # noqa: N801 -- reads as a statement: ``with translated("open", path):``
    """Raises what the standard library reports of a system call as SyscallError."""

    __slots__ = ("_arguments", "_call")

    def __init__(self, call: str, *arguments: object) -> None:
        self._call = call
        self._arguments = arguments

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, OSError) and not isinstance(error, SyscallError):
            raise SyscallError(
                self._call, ", ".join(map(repr, self._arguments)), error.errno or errno.EIO
            ) from error
