"""Look-ups of host names for http tasks, in a few threads of their own.

getaddrinfo(3) blocks for as long as name servers are silent. In the loop's own thread pool a
thousand such look-ups would hold up those of the heartbeat and of the reports.
"""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any, Final

from aiohttp.abc import AbstractResolver, ResolveResult

THREADS: Final = 4

_Answer = list[tuple[Any, ...]]


class Names(AbstractResolver):
    """Resolves names; look-ups of one name at the same time are one look-up.

    Args:
        look_up: socket.getaddrinfo, or what a test puts in its place.
    """

    def __init__(self, look_up: Callable[..., _Answer] = socket.getaddrinfo) -> None:
        self._look_up = look_up
        self._asked: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._threads = 0
        self._pending: dict[tuple[str, int], asyncio.Future[_Answer]] = {}

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """The addresses of ``host``.

        Raises:
            OSError: socket.gaierror; there are none, or no name server answers.
        """
        key = (host, family)
        pending = self._pending.get(key)
        if pending is None:
            pending = self._pending[key] = asyncio.get_running_loop().create_future()
            pending.add_done_callback(lambda _: self._pending.pop(key, None))
            self._ask(pending, host, family)
        # Shared with other tasks, so one's deadline must not cancel it.
        found = await asyncio.shield(pending)
        return [
            ResolveResult(
                hostname=host,
                host=address[0],
                port=port,
                family=kind,
                proto=protocol,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for kind, _, protocol, _, address in found
        ]

    async def close(self) -> None:
        """Nothing: it serves all sessions. The threads wait and end with the process."""

    def _ask(self, answer: asyncio.Future[_Answer], host: str, family: int) -> None:
        loop = asyncio.get_running_loop()

        def settle(found: _Answer | None, error: Exception | None) -> None:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
                # Whoever asked may be gone; then nobody reads it.
                answer.exception()
            else:
                answer.set_result(found or [])

        def work() -> None:
            found: _Answer | None = None
            error: Exception | None = None
            try:
                found = self._look_up(
                    host, None, family=family, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
                )
            except (OSError, ValueError) as caught:
                error = caught if isinstance(caught, OSError) else OSError(str(caught))
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, found, error)

        self._asked.put(work)
        if self._threads < THREADS and len(self._pending) > self._threads:
            self._threads += 1
            # Daemons: a silent name server must not hold up the end of the process.
            threading.Thread(target=self._serve, name="http-names", daemon=True).start()

    def _serve(self) -> None:
        while True:
            self._asked.get()()
