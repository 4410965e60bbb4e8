"""Scheduler outages in the log: one line when one begins, one when it ends.

Several parts of the worker talk to one scheduler and find out about an outage at the same time,
each for itself. They share one ``Outage`` a scheduler, so that it is told once.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

log = structlog.get_logger(__name__)


class Outage:
    """Whether one scheduler can be used, as seen by all who talk to it."""

    def __init__(self, scheduler: str) -> None:
        self.scheduler = scheduler
        self._failing: set[str] = set()
        self._since = 0.0
        self._listeners: list[Callable[[], None]] = []

    def on_contact(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` whenever somebody gets an answer again."""
        self._listeners.append(listener)

    def failed(self, channel: str, reason: str) -> None:
        """``channel`` (``heartbeat``, ``reports``) gets no usable answer."""
        if not self._failing:
            self._since = time.monotonic()
            log.warning("scheduler outage began", scheduler=self.scheduler, reason=reason)
        self._failing.add(channel)

    def recovered(self, channel: str) -> None:
        """``channel`` has got an answer. Cheap when there was no outage."""
        if channel not in self._failing:
            return
        self._failing.discard(channel)
        if not self._failing:
            log.warning(
                "scheduler outage ended",
                scheduler=self.scheduler,
                outage_s=round(time.monotonic() - self._since, 1),
            )
        for listener in self._listeners:
            listener()


class Outages:
    """The outages of all schedulers, by their URL."""

    def __init__(self) -> None:
        self._by_scheduler: dict[str, Outage] = {}

    def of(self, scheduler: str) -> Outage:
        """The one ``Outage`` of this scheduler."""
        return self._by_scheduler.setdefault(scheduler, Outage(scheduler))


class LineLimit:
    """Lets one log line through in ``interval_s`` and counts the rest."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._next = 0.0
        self._held_back = 0

    def allow(self) -> int | None:
        """None to keep silent, otherwise how many lines were held back since the last one."""
        now = time.monotonic()
        if now < self._next:
            self._held_back += 1
            return None
        held_back, self._held_back = self._held_back, 0
        self._next = now + self._interval_s
        return held_back
