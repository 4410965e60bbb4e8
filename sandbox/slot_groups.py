"""One slot's groups: made, limited, killed as a whole, removed."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from stockade.platform.cgroup import Group
from stockade.platform.cgroup_files import IoMax
from stockade.platform.errors import SyscallError
from stockade.sandbox.ceiling import Ceiling, cpu_max
from stockade.sandbox.limits import LIMIT_FIELDS, Ceilings, Limits

log = logging.getLogger(__name__)

# What the kernel gives a group that was just made.
FRESH: Final = Limits(
    memory_max=None,
    memory_high=None,
    memory_swap_max=None,
    cpu_quota=None,
    cpu_weight=None,
    tasks_max=None,
    io_weight=None,
    oom_policy="continue",
)
DEFAULT_WEIGHT: Final = 100


class SlotGroups:
    """One slot's three groups.

    Args:
        ceiling: of the group that the slot's is in.
        disk: ``MAJOR:MINOR`` that io.max is set for; None when it cannot be told.
        counts_peak: the kernel counts memory.peak.
    """

    def __init__(
        self, path: Path, ceiling: Ceiling, *, disk: str | None, counts_peak: bool
    ) -> None:
        self.slot = Group(path)
        self.init = self.slot.child(b"init")
        self.task = self.slot.child(b"task")
        self.ceiling = ceiling
        self.counts_peak = counts_peak
        self._disk = disk

    @property
    def path(self) -> Path:
        return Path(os.fsdecode(self.slot.path))

    def create(self, controllers: frozenset[str], limits: Limits) -> None:
        """Makes the groups and sets what of ``limits`` the controllers can hold.

        Raises:
            SyscallError: a group cannot be made, or the kernel refuses a value.
        """
        self.slot.create()
        if controllers:
            self.slot.enable(controllers)
        self.init.create()
        self.task.create()
        self.task.max_descendants = 0
        self.limit(controllers, limits, FRESH)

    def limit(self, controllers: frozenset[str], limits: Limits, current: Limits) -> None:
        """Sets what of ``limits`` differs from ``current`` and the controllers can hold.

        Raises:
            SyscallError: the kernel refuses a value.
        """
        for name, write in _WRITERS.items():
            value = getattr(limits, name)
            controller = LIMIT_FIELDS[name].metadata["controller"]
            if controller in controllers and value != getattr(current, name):
                write(self, value)
        if "io" in controllers and self._disk is not None:
            wanted = _io_max(self._disk, limits)
            if wanted != _io_max(self._disk, current):
                self.task.io_max = {self._disk: wanted}

    def _set_swap_max(self, limit: int | None) -> None:
        try:
            self.task.memory_swap_max = limit
        except SyscallError as error:
            # A kernel without swap accounting has no such file; there is no swap to limit then.
            if error.errno != errno.ENOENT:
                raise

    def _set_io_weight(self, weight: int | None) -> None:
        # Without a scheduler that knows weights there is no such file, which ``Tree.lacks`` tells.
        if self.task.io_weight is not None:
            self.task.io_weight = weight or DEFAULT_WEIGHT

    def kill(self, controllers: frozenset[str]) -> None:
        """SIGKILL to everything in the slot, its launcher included; ``settle`` when all is gone."""
        self._lift_quota(controllers)
        self.slot.kill()

    def kill_task(self, controllers: frozenset[str]) -> None:
        """SIGKILL to everything of the task; the launcher lives. ``settle`` when all is gone."""
        self._lift_quota(controllers)
        self.task.kill()

    def _lift_quota(self, controllers: frozenset[str]) -> None:
        if "cpu" not in controllers:
            return
        # Under a tiny quota a killed task takes seconds to run into its death.
        self.ceiling.lift(self.slot.path)
        try:
            self.task.cpu_max = cpu_max(None)
        except OSError as error:
            log.warning("cannot lift cpu.max before the kill: %s", error)

    def settle(self) -> None:
        """Nothing of the slot is being killed any more."""
        self.ceiling.settle(self.slot.path)

    @property
    def populated(self) -> bool:
        """Whether any process lives in the slot."""
        return self.slot.populated

    def remove(self) -> None:
        """Removes the groups, depth first.

        Raises:
            SyscallError: EBUSY: something still lives in one.
        """
        try:
            for group in (self.task, self.init, self.slot):
                group.remove()
        except SyscallError:
            # Partly made, or with groups that are not ours in it: looked at one by one.
            self.slot.remove_tree()
        self.settle()


def _io_max(disk: str, limits: Limits) -> IoMax:
    return IoMax(disk, limits.io_read_bandwidth_max, limits.io_write_bandwidth_max)


def _set(attribute: str) -> Callable[[SlotGroups, Any], None]:
    return lambda groups, value: setattr(groups.task, attribute, value)


# How those limits are written that are files of the task's group.
_WRITERS: Final[dict[str, Callable[[SlotGroups, Any], None]]] = {
    "memory_max": _set("memory_max"),
    "memory_high": _set("memory_high"),
    "memory_swap_max": SlotGroups._set_swap_max,
    "oom_policy": lambda groups, value: setattr(groups.task, "memory_oom_group", value == "kill"),
    "tasks_max": _set("pids_max"),
    "cpu_quota": lambda groups, value: setattr(groups.task, "cpu_max", cpu_max(value)),
    "cpu_weight": lambda groups, value: setattr(groups.task, "cpu_weight", value or DEFAULT_WEIGHT),
    "io_weight": SlotGroups._set_io_weight,
}


def planned(
    path: Path, controllers: frozenset[str], limits: Limits, *, disk: str | None
) -> tuple[str, ...]:
    """What ``SlotGroups(path).create`` does, one line each; pure: nothing is touched."""
    lines: list[str] = []
    nothing = Ceiling(Group(path.parent), Ceilings(), frozenset())
    groups = SlotGroups(path, nothing, disk=disk, counts_peak=False)
    for name, group in (("slot", groups.slot), ("init", groups.init), ("task", groups.task)):
        setattr(groups, name, _PlannedGroup(group.path, path.parent, lines))
    groups.create(controllers, limits)
    return tuple(lines)


class _PlannedGroup(Group):
    """A group that writes down what is asked of it, and does none of it."""

    def __init__(self, path: bytes, shown_from: Path, lines: list[str]) -> None:
        super().__init__(path)
        self._shown_from = shown_from
        self._lines = lines

    def create(self) -> None:
        self._lines.append(f"mkdir {self._shown(b'')}")

    def get_property(self, filename: bytes) -> str | None:  # noqa: ARG002 -- each is there
        return f"default {DEFAULT_WEIGHT}"

    def set_property(self, filename: bytes, value: Any) -> None:
        self._lines.append(f"{self._shown(filename)} = {value}")

    def _shown(self, filename: bytes) -> str:
        return os.path.relpath(os.fsdecode(self.filepath(filename)), self._shown_from)
