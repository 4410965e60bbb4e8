"""The watchdog: memory and process counts by sampling, on hosts whose kernel does not count them.

It is coarser than the kernel: what is allocated and freed between two samples is not seen.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping
from typing import Final, Protocol

from stockade.platform import proc
from stockade.platform.cgroup import Group
from stockade.sandbox.kill import Reach
from stockade.sandbox.limits import Limits
from stockade.sandbox.loop import Loop
from stockade.sandbox.verdict import format_bytes

log = logging.getLogger(__name__)

_SHORTEST_INTERVAL_S: Final = 0.05
# Sampling may take at most this share of the spawner's time.
_SHARE: Final = 0.1


class Sampler(Protocol):
    """Looks at a task again and again."""

    memory_peak_bytes: int
    processes_peak: int

    def sample(self) -> str | None:
        """Looks once. The evidence when memory_max is passed and nobody else acts on it."""


@dataclasses.dataclass(slots=True)
class PeakSampler:
    """The most that a group used, on kernels before memory.peak (5.19) and pids.peak (6.1).

    The limit is the kernel's to hold.
    """

    group: Group
    memory_peak_bytes: int = 0
    processes_peak: int = 0

    def sample(self) -> None:
        """Looks once."""
        self.memory_peak_bytes = max(self.memory_peak_bytes, self.group.memory_current or 0)
        self.processes_peak = max(self.processes_peak, self.group.pids_current or 0)


@dataclasses.dataclass(slots=True)
class Watch:
    """What was sampled of one task so far."""

    limits: Limits
    reach: Reach
    memory_peak_bytes: int = 0
    processes_peak: int = 0

    def sample(self) -> str | None:
        """Looks once. The evidence when memory_max is passed, else None."""
        pids = self.reach.members()
        used = proc.memory_bytes(pids)
        self.memory_peak_bytes = max(self.memory_peak_bytes, used)
        self.processes_peak = max(self.processes_peak, len(pids))
        limit = self.limits.memory_max
        if limit is None or used <= limit:
            return None
        return (
            f"killed: memory_max {format_bytes(limit)} reached "
            f"(peak {format_bytes(used)}, {len(pids)} processes, watchdog)"
        )


class Sampled(Protocol):
    """A task, which has a sampler where the kernel does not count what it uses."""

    sampler: Sampler | None

    @property
    def is_over(self) -> bool: ...

    def sample(self) -> None:
        """Looks once, and acts on what is seen."""


class Rounds:
    """Samples all tasks that need it, in rounds, for as long as there are any.

    Many tasks do not make it expensive: the more time a round takes, the later comes the next.
    """

    def __init__(self, loop: Loop, tasks: Mapping[int, Sampled]) -> None:
        self._loop = loop
        self._tasks = tasks
        self._is_waiting = False
        self._is_blind = False
        self._delay_s = _SHORTEST_INTERVAL_S

    def begin(self) -> None:
        """Begins, if there is a task that needs it and no round is coming already."""
        if self._is_waiting or all(task.sampler is None for task in self._tasks.values()):
            return
        self._is_waiting = True
        self._loop.call_later(self._delay_s, self._round)

    def _round(self) -> None:
        self._is_waiting = False
        live = [task for task in self._tasks.values() if not task.is_over]
        if live:
            self.begin()
        began = time.monotonic()
        fault: OSError | None = None
        for task in live:
            try:
                task.sample()
            except OSError as error:
                fault = error
        self._delay_s = max(_SHORTEST_INTERVAL_S, (time.monotonic() - began) / _SHARE)
        if fault is not None and not self._is_blind:
            log.error("cannot see what tasks use, nor hold them to memory_max: %s", fault)
        self._is_blind = fault is not None
