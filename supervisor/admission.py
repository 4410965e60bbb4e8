"""Admission: whether another task may start, by what is promised and by the host's pressure.

Promised is what running tasks may come to use by their own limits, used or not: a task that was let
in is never killed for the others' growth, as long as the worker's ceilings hold the promises.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple

import structlog

from stockade.platform.errors import SyscallError
from stockade.platform.pressure import host_pressure
from stockade.sandbox.limits import Limits
from stockade.supervisor.config import WorkerConfig
from stockade.supervisor.outages import LineLimit

log = structlog.get_logger(__name__)

# The kernel renews its averages every two seconds.
LOOK_S: Final = 1.0
UNREAD_LINE_S: Final = 60.0


class Promise(NamedTuple):
    """What one task may come to use."""

    memory_bytes: float
    tasks: float


class Admission:
    """One worker's.

    Args:
        worker: its ceilings and thresholds.
    """

    def __init__(self, worker: WorkerConfig) -> None:
        self._memory_bytes = worker.memory_max
        self._tasks = worker.tasks_max
        self._watched = tuple(
            (name, threshold, read)
            for name, threshold, read in (
                ("pressure_memory", worker.pressure_memory, memory_stall),
                ("pressure_cpu", worker.pressure_cpu, cpu_stall),
            )
            if threshold is not None
        )
        self._promised: dict[int, Promise] = {}
        self.pressure = ""
        self._unread_lines = LineLimit(UNREAD_LINE_S)

    @property
    def counts(self) -> bool:
        """Whether there is a ceiling that promises count against."""
        return self._memory_bytes is not None or self._tasks is not None

    def has_room(self, limits: Limits | None) -> bool:
        """Whether a task with these limits may start now; None for one that uses nothing."""
        if self.pressure:
            return False
        if not self._promised or limits is None:
            # Alone it may always run, also with limits beyond the ceiling, which then holds it.
            return True
        wanted = self._promise(limits)
        return self._fits(self._memory_bytes, wanted.memory_bytes, 0) and self._fits(
            self._tasks, wanted.tasks, 1
        )

    def promise(self, seq: int, limits: Limits | None) -> None:
        """Counts a task that starts, or runs already."""
        if self.counts and limits is not None:
            self._promised[seq] = self._promise(limits)

    def release(self, seq: int) -> None:
        """The task is over, or was never started."""
        self._promised.pop(seq, None)

    def _fits(self, ceiling: int | None, wanted: float, field: int) -> bool:
        if ceiling is None:
            return True
        return sum(promise[field] for promise in self._promised.values()) + wanted <= ceiling

    def _promise(self, limits: Limits) -> Promise:
        # A task without a limit of its own may come to use all of the ceiling. Its launcher counts.
        memory = self._memory_bytes if limits.memory_max is None else limits.memory_max
        tasks = self._tasks if limits.tasks_max is None else limits.tasks_max + 1
        return Promise(memory or 0, tasks or 0)

    async def watch(self, changed: Callable[[], None]) -> None:
        """Looks at the host's pressure for ever; calls ``changed`` when it sets in or ends."""
        for name, _, read in self._watched:
            if read() is None:
                log.warning(
                    "pressure is not watched: this kernel does not count it; boot with psi=1",
                    key=f"worker.{name}",
                )
        while self._watched:
            self.look(changed)
            await asyncio.sleep(LOOK_S)
        await asyncio.Event().wait()

    def look(self, changed: Callable[[], None]) -> None:
        """One look."""
        before = self.pressure
        try:
            self.pressure = self._find_pressure()
        except SyscallError as error:
            # No descriptor or no memory is left, as may well be under pressure: what was seen last
            # holds until a look succeeds.
            others = self._unread_lines.allow()
            if others is not None:
                log.warning("the host's pressure cannot be read", reason=str(error), others=others)
            return
        if bool(before) == bool(self.pressure):
            return
        if self.pressure:
            log.warning("nothing is started: the host is under pressure", reason=self.pressure)
        else:
            log.info("the host's pressure is over", was=before)
        changed()

    def _find_pressure(self) -> str:
        for name, threshold, read in self._watched:
            share = read()
            if share is not None and share >= threshold:
                return f"{name} {share:.0%}, the threshold is {threshold:.0%}"
        return ""


def memory_stall() -> float | None:
    """The share of the last ten seconds in which all work of the host waited for memory.

    Not some of it: on a host that uses what it has, something now and then does. None when the
    kernel does not count it.
    """
    found = host_pressure("memory")
    return None if found is None or found.full is None else found.full.avg10 / 100


def cpu_stall() -> float | None:
    """The share in which some work waited for a CPU; of the whole host there is no other count."""
    found = host_pressure("cpu")
    return None if found is None else found.some.avg10 / 100
