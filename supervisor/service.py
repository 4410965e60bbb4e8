"""What the service manager hears of this worker, where one started it.

The watchdog is fed by a task in the event loop: a loop that does not come round feeds nobody. What
the manager does not take at once is said again at the next round; nothing here waits for it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from typing import Final

import structlog

from stockade.platform.errors import SyscallError
from stockade.platform.notify import notify

log = structlog.get_logger(__name__)

# A round: how often the status text is looked at, and the time that a stop is given asked for.
ROUND_S: Final = 5.0
# The watchdog is fed so many times in its time.
_FEEDS: Final = 4.0
# A stop that goes on is given this much more at each round.
EXTENSION_S: Final = 60.0


class Service:
    """The manager's end of things; without a manager every call does nothing.

    Args:
        environ: NOTIFY_SOCKET, and WATCHDOG_USEC where the manager wants to be fed.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        self._watchdog_s = _watchdog_s(environ)
        # Said, and not yet taken.
        self._owed: list[str] = []
        self._status = ""
        self._stopping = False
        self._fault = ""

    @property
    def exists(self) -> bool:
        """Whether a service manager started us and listens."""
        return bool(self._address)

    def reloading(self) -> None:
        """Another life begins; it is the one that will be ready."""
        self._say(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """The end has begun; from now on each round asks for the time that it takes."""
        self._stopping = True
        self._say(f"STOPPING=1\n{_extension()}")

    async def serve(self, status: Callable[[], str]) -> None:
        """Say that the worker serves, and keep the manager told; returns never.

        Args:
            status: one line for people, such as ``12 running, 3 queued, 0 undelivered``.
        """
        if not self.exists:
            return
        self._say("READY=1")
        while True:
            self._round(status())
            await asyncio.sleep(min(ROUND_S, self._watchdog_s / _FEEDS))

    def _round(self, status: str) -> None:
        lines = ["WATCHDOG=1"] if self._watchdog_s < float("inf") else []
        if self._stopping:
            lines.append(_extension())
        if status != self._status:
            lines.append(f"STATUS={status}")
        if self._send([*self._owed, *lines]):
            self._status = status

    def _say(self, text: str) -> None:
        if self.exists:
            self._owed.append(text)
            self._send(self._owed)

    def _send(self, lines: list[str]) -> bool:
        """Whether the manager took all of it."""
        if not lines:
            return True
        try:
            notify(self._address, "\n".join(lines))
        except (SyscallError, ValueError) as error:
            if str(error) != self._fault:
                log.warning("the service manager does not listen", reason=str(error))
            self._fault = str(error)
            return False
        self._fault = ""
        self._owed = []
        return True


def _extension() -> str:
    return f"EXTEND_TIMEOUT_USEC={int(EXTENSION_S * 1e6)}"


def _watchdog_s(environ: Mapping[str, str]) -> float:
    """In what time the manager wants to be fed; infinite when it does not, or not by us."""
    if environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return float("inf")
    try:
        return int(environ.get("WATCHDOG_USEC", "")) / 1e6 or float("inf")
    except ValueError:
        return float("inf")
