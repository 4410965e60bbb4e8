"""How a command hands its own exit status to the console script."""

from __future__ import annotations


class CommandEnded(Exception):  # noqa: N818 -- not an error
    """The command is done and the process shall end with ``status``."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status
