"""Standard input, output and error of the command, whatever state we got them in."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any, Final

_DESCRIPTORS: Final = (0, 1, 2)


class _Unfailing(io.FileIO):
    """Standard error as a file that loses what cannot be written."""

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        rest = view
        with contextlib.suppress(OSError):
            while rest:
                rest = rest[super().write(rest) or 0 :]
        return len(view)


def make_usable() -> None:
    """Opens those that are closed, on /dev/null, and lets no work end for what stderr cannot take.

    A descriptor that is closed is the next one that is opened: `run` would hand what it has there
    to its command. And a log on a full disk, or on a pipe that nobody reads any more, must stop
    neither worker nor scheduler.
    """
    for descriptor in _DESCRIPTORS:
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest that is free is the one that is missing.
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 -- for the process's life
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 -- the same
    sys.stderr = io.TextIOWrapper(
        _Unfailing(2, "w", closefd=False),
        encoding=sys.stderr.encoding if sys.stderr else None,
        errors="backslashreplace",
        write_through=True,
    )
