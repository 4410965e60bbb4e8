"""Starts beside many sleeping tasks of one spawner, and the memory that each of those takes."""

from __future__ import annotations

from typing import Final

from accounting import kernel_kib, pss_kib, resident_mib
from spawner import Spawner
from timing import interleaved

from stockade.platform import proc
from stockade.sandbox import protocol

SLEEP: Final = ("/bin/sleep", "3600")


class BesideLive:
    """The sleeping tasks of one spawner."""

    def __init__(self, spawner: Spawner) -> None:
        self._spawner = spawner
        self._tasks: set[int] = set()
        self._weighed: tuple[int, float, dict[str, int]] = (0, 0.0, {})

    def up_to(self, count: int) -> None:
        """Starts sleeping tasks until there are so many."""
        while len(self._tasks) < count:
            seq = self._spawner.start(*SLEEP)
            self._tasks.add(self._spawner.wait(seq, protocol.Started).pid)

    def starts(self, repetitions: int) -> list[float]:
        """Seconds of harmless tasks meanwhile."""
        return interleaved({"start": self._spawner.run}, repetitions)["start"]

    def weigh(self) -> None:
        """From here on the memory of what is started is counted."""
        self._weighed = (len(self._tasks), self._own_kib(), kernel_kib())

    def grown_kib_per_task(self) -> dict[str, float]:
        """KiB for each task since ``weigh``: ours, and the kernel's by its kind."""
        count, own, kernel = self._weighed
        more = len(self._tasks) - count
        now = kernel_kib()
        return {
            "PSS KiB/task": (self._own_kib() - own) / more,
            **{f"{name} KiB/task": (now[name] - kernel[name]) / more for name in kernel},
        }

    def spawner_mib(self) -> float:
        return resident_mib(self._spawner.pid)

    def _own_kib(self) -> float:
        """The spawner and its launchers, which all but the tasks themselves are."""
        below = proc.descendants(self._spawner.pid)
        return pss_kib([self._spawner.pid, *(pid for pid in below if pid not in self._tasks)])
