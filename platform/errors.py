"""The root of Stockade's exceptions, and the one that the system-call layer raises."""

from __future__ import annotations

import errno
import os


class StockadeError(Exception):
    """Root of every error that Stockade raises on purpose.

    Wording: "cannot VERB OBJECT: reason", then one hint that mends it.
    """


class SyscallError(StockadeError, OSError):
    """A system call failed.

    Attributes:
        call: the call's name, for example ``clone3``.
        arguments: its arguments as text, for the log.
        errno: the error number, as for every OSError.
    """

    def __init__(self, call: str, arguments: str, number: int) -> None:
        super().__init__(number, os.strerror(number))
        self.call = call
        self.arguments = arguments

    def __str__(self) -> str:
        name = errno.errorcode.get(self.errno or 0, str(self.errno))
        return f"{self.call}({self.arguments}): {name} ({self.strerror})"
