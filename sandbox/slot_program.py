"""The steps of a slot as the calls that its child makes, and what it means when one fails."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator
from typing import Final

from stockade.platform import landlock, memfd
from stockade.platform.errors import SyscallError
from stockade.sandbox import landlock_policy
from stockade.sandbox.confinement import Confinement
from stockade.sandbox.errors import SandboxSetupError
from stockade.sandbox.landlock_policy import Grants
from stockade.sandbox.launch_message import FD_RULESET
from stockade.sandbox.slot_steps import SLOT
from stockade.sandbox.system_steps import TASK_DIRECTORY
from stockade.sandbox.zygote_message import FD_PASSED, Call, encode_program

_MAKE_RULESET: Final = "make a Landlock ruleset"
_LEAVE: Final = "leave the worker's directory"


class SlotProgram:
    """The program of a plan's slots.

    Raises:
        SandboxSetupError: it would be too long.
    """

    def __init__(self, confinement: Confinement) -> None:
        self._calls = list(_calls(confinement))
        self._names_slot = any(SLOT in _texts(call) for _, call in self._calls)
        # One for all slots, where nothing in it is a slot's own.
        self._fd = -1 if self._names_slot else self._write("")

    def open(self, slot: str) -> int:
        """A descriptor of the program for the slot of this name, the caller's to close.

        Raises:
            OSError: no descriptor is left.
        """
        return self._write(slot) if self._names_slot else os.dup(self._fd)

    def close(self) -> None:
        """Nothing is opened any more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, slot: str) -> int:
        calls = [_for_slot(call, slot) for _, call in self._calls]
        try:
            return memfd.sealed_memfd("stockade-program", encode_program(calls))
        except ValueError as error:
            raise SandboxSetupError("prepare slots", f"{error}; show fewer paths") from error

    def why_failed(self, said: bytes) -> str:
        """What a child's words on a call that failed mean, with what mends it."""
        number, code = map(int, said.split())
        step, call = self._calls[number]
        arguments = ", ".join(map(repr, call.arguments))
        return str(SandboxSetupError.refused(step, SyscallError(call.name, arguments, code)))


def _calls(confinement: Confinement) -> Iterator[tuple[str, Call]]:
    for step in confinement.slot:
        for call in step.calls():
            yield str(step), call
    if confinement.grants is not None:
        for call in _ruleset(confinement.grants):
            yield _MAKE_RULESET, call
    if confinement.has_own_files:
        yield _LEAVE, Call("chdir", ("/",))


def _ruleset(grants: Grants) -> Iterator[Call]:
    """Makes the launcher's FD_RULESET; what was passed to the child is closed by then."""
    # A host without /var/tmp has none in the slot either.
    there = [path for path in grants.read_write if path == TASK_DIRECTORY or os.path.exists(path)]
    grants = dataclasses.replace(grants, read_write=there)
    yield from landlock_policy.ruleset_calls(landlock.abi(), grants, FD_PASSED)
    yield Call("dup3", (FD_PASSED, FD_RULESET, 0))
    yield Call("close", (FD_PASSED,))


def _texts(call: Call) -> str:
    return "".join(argument for argument in call.arguments if isinstance(argument, str))


def _for_slot(call: Call, slot: str) -> Call:
    if SLOT not in _texts(call):
        return call
    arguments: Iterable[int | str | bytes] = (
        argument.replace(SLOT, slot) if isinstance(argument, str) else argument
        for argument in call.arguments
    )
    return dataclasses.replace(call, arguments=tuple(arguments))
