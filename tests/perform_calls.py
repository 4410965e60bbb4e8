"""Makes in this process the calls that a slot's child would make."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

from stockade.platform import syscalls
from stockade.sandbox.landlock_policy import Grants, ruleset_calls
from stockade.sandbox.zygote_message import Call

LIBC = ctypes.CDLL(None, use_errno=True)


def perform(calls: Iterable[Call]) -> int:
    """The result of the first."""
    results: list[int] = []
    for call in calls:
        number = syscalls.numbers(os.uname().machine)[call.name]
        arguments = [
            ctypes.c_long(each) if isinstance(each, int) else ctypes.c_char_p(os.fsencode(each))
            for each in call.arguments
        ]
        result = LIBC.syscall(ctypes.c_long(number), *arguments)
        if result < 0 and ctypes.get_errno() != call.tolerated:
            raise OSError(ctypes.get_errno(), f"{call}")
        results.append(result)
    return results[0]


def make_ruleset(abi: int, grants: Grants) -> int:
    """The ruleset's descriptor."""
    free = os.open("/", os.O_RDONLY)
    os.close(free)
    return perform(ruleset_calls(abi, grants, free))
