"""The ceiling: what all tasks of the worker together may use, as limits of ``tasks/``."""

from __future__ import annotations

import errno
import logging
from typing import Final, NamedTuple

from stockade.platform.cgroup import Group
from stockade.platform.errors import SyscallError
from stockade.sandbox.limits import Ceilings

log = logging.getLogger(__name__)

CPU_PERIOD_US: Final = 100_000
# cpu.max takes no less.
CPU_QUOTA_LEAST_US: Final = 1000


def cpu_max(cpus: float | None) -> tuple[int | None, int]:
    """cpu.max for a number of CPUs."""
    if cpus is None:
        return None, CPU_PERIOD_US
    return max(CPU_QUOTA_LEAST_US, int(cpus * CPU_PERIOD_US)), CPU_PERIOD_US


class Hits(NamedTuple):
    """How often the tasks together ran into the ceiling so far."""

    memory: int = 0
    tasks: int = 0


class Ceiling:
    """The limits of one group that all slots are in.

    Args:
        group: ``tasks/``.
        controllers: what can be limited there.
    """

    def __init__(self, group: Group, ceilings: Ceilings, controllers: frozenset[str]) -> None:
        self.limits: Final = ceilings
        self._group = group
        self._controllers = controllers
        self._lifted_for: set[bytes] = set()

    def apply(self) -> None:
        """Sets the limits, also back to none where an earlier spawner had one.

        Raises:
            SyscallError: the kernel refuses a value.
        """
        if "memory" in self._controllers:
            self._group.memory_max = self.limits.memory_max
        if "pids" in self._controllers:
            self._group.pids_max = self.limits.tasks_max
        if "cpu" in self._controllers:
            self._group.cpu_max = cpu_max(self.limits.cpu_quota)

    def lift(self, slot: bytes) -> None:
        """Lets the CPU go for the time of a kill: what is throttled does not come to die.

        cgroup v2 has no exception for one child, so the others run freely for those moments, too.
        """
        if not self._limits_cpu():
            return
        if not self._lifted_for:
            self._set_cpu(None)
        self._lifted_for.add(slot)

    def settle(self, slot: bytes) -> None:
        """The slot's kill is over: the last one of them puts the quota back."""
        if slot in self._lifted_for:
            self._lifted_for.discard(slot)
            if not self._lifted_for:
                self._set_cpu(self.limits.cpu_quota)

    def hits(self) -> Hits:
        """What was counted so far; compare with what it was when a task began."""
        return Hits(
            memory=_count(self._group.memory_events_local, "oom")
            if self.limits.memory_max is not None and "memory" in self._controllers
            else 0,
            # Before 6.11 there is no such file: a refused fork is counted where it was tried.
            tasks=_count(self._group.pids_events_local, "max")
            if self.limits.tasks_max is not None and "pids" in self._controllers
            else 0,
        )

    def _limits_cpu(self) -> bool:
        return self.limits.cpu_quota is not None and "cpu" in self._controllers

    def _set_cpu(self, cpus: float | None) -> None:
        try:
            self._group.cpu_max = cpu_max(cpus)
        except SyscallError as error:
            if error.errno != errno.ENOENT:
                log.warning("cannot set cpu.max of all tasks: %s", error)


def _count(events: dict[str, int] | None, name: str) -> int:
    return (events or {}).get(name, 0)
