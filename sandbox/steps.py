"""Steps that confine a slot: each one thing, named.

A plan (confinement.py) is a list of them, which ``stockade run --plan`` prints as they stand.
system_steps.py has those that make what every slot sees of the host, slot_steps.py those that are
each slot's own. They run as root, or as the root of a user namespace, in namespaces that nobody
else is in, before anything of the task exists.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import Protocol

from stockade.sandbox.errors import SandboxSetupError
from stockade.sandbox.zygote_message import Call

# Copies of mounts, attached nowhere yet, by the path that they were taken from.
Kept = dict[str, int]


class Step(Protocol):
    """One step of the system. ``str`` says what it does, for people."""

    def apply(self, kept: Kept, /) -> None:
        """Does it.

        Raises:
            OSError: the kernel refuses.
        """


class SlotStep(Protocol):
    """One step of a slot. ``str`` says what it does, for people."""

    def calls(self) -> Iterable[Call]:
        """The system calls that do it."""


def run(steps: Iterable[Step], kept: Kept) -> None:
    """Does the steps in their order.

    Raises:
        SandboxSetupError: names the step that failed, the call and its error.
    """
    for step in steps:
        with named(str(step)):
            step.apply(kept)


@contextlib.contextmanager
def named(step: str) -> Iterator[None]:
    """What the kernel refuses in here is told as this step's failure.

    Raises:
        SandboxSetupError: names the step, the call, its error, and what mends it.
    """
    try:
        yield
    except OSError as error:
        raise SandboxSetupError.refused(step, error) from error


def make_mount_point(path: str, *, is_directory: bool) -> None:
    """Makes an empty directory or file where there is none, with the directories above it."""
    if os.path.lexists(path):
        return
    parent = path if is_directory else os.path.dirname(path)
    os.makedirs(parent, 0o755, exist_ok=True)
    if not is_directory:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644))
