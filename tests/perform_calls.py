"""Makes in this process the calls that a slot's child would make."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

from stockade.platform import landlock, syscalls
from stockade.platform.landlock import NO_NET, NO_SCOPE, AccessFs, AccessNet, Scope
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
        if result < 0 and ctypes.get_errno() not in call.tolerated:
            raise OSError(ctypes.get_errno(), f"{call}")
        results.append(result)
    return results[0]


def make_ruleset(abi: int, grants: Grants) -> int:
    """The ruleset's descriptor."""
    free = os.open("/", os.O_RDONLY)
    os.close(free)
    return perform(ruleset_calls(abi, grants, free))


def create_ruleset(
    handled_fs: AccessFs, handled_net: AccessNet = NO_NET, scoped: Scope = NO_SCOPE
) -> int:
    """The ruleset's descriptor."""
    attributes = bytes(landlock.RulesetAttributes(handled_fs, handled_net, scoped))
    return perform([Call("landlock_create_ruleset", (attributes, len(attributes), 0))])


def add_path_rule(ruleset_fd: int, path_fd: int, access: AccessFs) -> None:
    """Grants access to a file, or beneath a directory."""
    rule = bytes(landlock.PathAttributes(access, path_fd))
    kind = landlock.LANDLOCK_RULE_PATH_BENEATH
    perform([Call("landlock_add_rule", (ruleset_fd, kind, rule, 0))])


def restrict_self(ruleset_fd: int) -> None:
    """Puts this thread under the ruleset, for good, as the launcher does to its task."""
    perform([Call("landlock_restrict_self", (ruleset_fd, 0))])
