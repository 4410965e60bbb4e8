"""Lets a request wait until a task changes."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Iterator


class Changes:
    """Who waits for which task."""

    def __init__(self) -> None:
        self._waiting: dict[int, set[asyncio.Event]] = collections.defaultdict(set)
        self._closed = False

    @contextlib.contextmanager
    def watch(self, task_id: int) -> Iterator[asyncio.Event]:
        """An event that is set at the task's next change.

        Watch first and read the task then: a change in between is not missed.
        """
        event = asyncio.Event()
        if self._closed:
            event.set()
        self._waiting[task_id].add(event)
        try:
            yield event
        finally:
            self._waiting[task_id].discard(event)
            if not self._waiting[task_id]:
                del self._waiting[task_id]

    @property
    def closed(self) -> bool:
        """The scheduler is about to stop, and nobody should wait any longer."""
        return self._closed

    def notify(self, task_id: int) -> None:
        """The task changed."""
        for event in self._waiting.get(task_id, ()):
            event.set()

    def close(self) -> None:
        """Wakes everybody, now and from now on."""
        self._closed = True
        for events in self._waiting.values():
            for event in events:
                event.set()
