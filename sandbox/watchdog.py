"""The watchdog: memory and process counts by sampling, on hosts whose kernel does not count them.

It is coarser than the kernel: what is allocated and freed between two samples is not seen.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Final, Protocol

from stockade.platform import proc
from stockade.platform.cgroup import Group
from stockade.sandbox.kill import Reach
from stockade.sandbox.limits import Limits
from stockade.sandbox.verdict import format_bytes

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


class Pace:
    """How long to wait between rounds, so that many tasks do not make sampling expensive."""

    def __init__(self) -> None:
        self.delay_s = _SHORTEST_INTERVAL_S

    @contextlib.contextmanager
    def round(self) -> Iterator[None]:
        """Times one round of samples; ``delay_s`` is the wait until the next one after it."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.delay_s = max(_SHORTEST_INTERVAL_S, (time.monotonic() - began) / _SHARE)
