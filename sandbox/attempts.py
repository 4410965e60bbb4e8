"""Starts that may be tried again: a group that was spoiled, or no process to spare just now.

clone3 into a group fails with EBUSY when somebody enabled controllers for children of it, with
ENOENT or ENODEV when somebody removed it, and with EAGAIN at pids.max of a group above, or when the
host has no process to spare. Nothing of the task ran then, so a fresh slot is tried.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
from collections.abc import Callable
from typing import Final

from stockade.sandbox.hand_over import Request
from stockade.sandbox.loop import Loop
from stockade.sandbox.protocol import Start

log = logging.getLogger(__name__)

# Waits before the tries after the first. Another slot is the cure for all but EAGAIN, which time
# cures if anything does.
_AT_ONCE: Final = (0.0, 0.0)
_PATIENT: Final = (0.05, 0.2, 0.8)
_WAITS: Final = {
    errno.EBUSY: _AT_ONCE,
    errno.ENOENT: _AT_ONCE,
    errno.ENODEV: _AT_ONCE,
    errno.EAGAIN: _PATIENT,
    # Said for a launcher that was killed before it let the task go: whoever killed it can have
    # killed others that wait.
    errno.ESRCH: (0.0, 0.0, 0.05, 0.2),
}


@dataclasses.dataclass(slots=True)
class Attempt:
    """A start that was not seen to run yet.

    Attributes:
        request: what came with it; its descriptors are our own copies.
        tries: how often it failed so far.
    """

    start: Start
    request: Request
    tries: int = 0


class Attempts:
    """The starts under way, by seq.

    Args:
        attempt: tries one of them.
    """

    def __init__(self, loop: Loop, attempt: Callable[[int], None]) -> None:
        self._loop = loop
        self._attempt = attempt
        self._attempts: dict[int, Attempt] = {}

    def __contains__(self, seq: int) -> bool:
        return seq in self._attempts

    def __bool__(self) -> bool:
        return bool(self._attempts)

    def begin(self, start: Start, request: Request) -> Attempt:
        """Keeps the start until ``forget``.

        Raises:
            OSError: no descriptor is left.
        """
        own: list[int] = []
        try:
            own.extend(os.dup(fd) for fd in request.stdio)
        except OSError:
            _close(own)
            raise
        attempt = Attempt(start, request._replace(stdio=own))
        self._attempts[start.seq] = attempt
        return attempt

    def get(self, seq: int) -> Attempt | None:
        """The start; None when it is known no more."""
        return self._attempts.get(seq)

    def again(self, seq: int, failure: int | None) -> bool:
        """Whether the start that failed with this errno will be tried again; if so, it is."""
        attempt = self._attempts.get(seq)
        waits = _WAITS.get(failure or 0, ())
        if attempt is None or attempt.tries >= len(waits):
            return False
        wait_s = waits[attempt.tries]
        attempt.tries += 1
        why = os.strerror(failure or 0)
        log.warning("cannot start task seq=%d: %s; trying another slot", seq, why)
        self._loop.call_later(wait_s, lambda: self._attempt(seq))
        return True

    def forget(self, seq: int) -> None:
        """It runs, or never will."""
        attempt = self._attempts.pop(seq, None)
        if attempt is not None:
            _close(attempt.request.stdio)

    def clear(self) -> None:
        """Forgets all."""
        for seq in list(self._attempts):
            self.forget(seq)


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
