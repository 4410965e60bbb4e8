"""The spawner's event loop: descriptors and timers, one thread, nothing that blocks."""

from __future__ import annotations

import heapq
import itertools
import logging
import select
import time
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)

# So many cancelled timers are left where they are.
_FEW_TIMERS: Final = 64


class Timer:
    """A call that will be made once; ``cancel`` prevents it."""

    __slots__ = ("_loop", "callback")

    def __init__(self, loop: Loop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        if self.callback is not None:
            self.callback = None
            self._loop.timer_cancelled()


class Loop:
    """epoll and a heap of timers on the monotonic clock."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[int], None]] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._cancelled = 0
        self._stopped = False

    def watch(self, fd: int, events: int, callback: Callable[[int], None]) -> None:
        """Calls ``callback(events)`` whenever one of ``events`` (select.EPOLL*) is ready on fd."""
        if fd in self._callbacks:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
        self._callbacks[fd] = callback

    def unwatch(self, fd: int) -> None:
        """Forgets fd; call it before closing. An fd that is not watched is fine."""
        if self._callbacks.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Calls ``callback`` once at ``when`` (time.monotonic) or soon after."""
        timer = Timer(self, callback)
        heapq.heappush(self._timers, (when, next(self._order), timer))
        return timer

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        """Calls ``callback`` once, ``delay_s`` seconds from now."""
        return self.call_at(time.monotonic() + delay_s, callback)

    def timer_cancelled(self) -> None:
        """Called by a timer. Deadlines are far off and most tasks end long before theirs."""
        self._cancelled += 1
        if self._cancelled > max(_FEW_TIMERS, len(self._timers) // 2):
            self._timers = [entry for entry in self._timers if entry[2].callback is not None]
            heapq.heapify(self._timers)
            self._cancelled = 0

    def stop(self) -> None:
        self._stopped = True

    def run(self) -> None:
        """Runs until ``stop``. One callback's error is logged and does not end the others."""
        while not self._stopped:
            ready = self._epoll.poll(self._wait_s())
            for fd, events, callback in [(*each, self._callbacks.get(each[0])) for each in ready]:
                # One before it may have closed the descriptor, and opened another of its number.
                if callback is not None and self._callbacks.get(fd) is callback:
                    self.guard(lambda callback=callback, events=events: callback(events))  # type: ignore[misc]
            self._run_timers()

    def _wait_s(self) -> float:
        while self._timers and self._timers[0][2].callback is None:
            heapq.heappop(self._timers)
            self._cancelled -= 1
        if not self._timers:
            return -1
        return max(0.0, self._timers[0][0] - time.monotonic())

    def _run_timers(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            callback, timer.callback = timer.callback, None
            if callback is None:
                self._cancelled -= 1
            else:
                self.guard(callback)

    @staticmethod
    def guard(callback: Callable[[], None]) -> None:
        """Calls ``callback``; its error is logged and goes no further."""
        # The spawner must outlive a fault in the handling of one task: the others' deadlines
        # depend on it. The fault is logged whole; the task's own deadline still stands.
        try:
            callback()
        except Exception:
            log.exception("fault in a callback")
