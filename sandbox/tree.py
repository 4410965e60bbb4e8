"""The worker's cgroup tree: where it stands, the slots' groups in it, and what is left of them.

stockade-ID.scope/        the worker's; no process of its own, so that controllers can be enabled
    spawner/              the spawner and its standby
    tasks/SLOT/           one slot; killed as a whole
        init/             its launcher, outside the task's account
        task/             the task: limits and verdicts are here
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self

from stockade.platform import cgroup
from stockade.platform.cgroup import Group
from stockade.platform.errors import SyscallError
from stockade.sandbox.limits import Limits

log = logging.getLogger(__name__)

CONTROLLERS: Final = ("cpu", "io", "memory", "pids")
CPU_PERIOD_US: Final = 100_000


def group_name(worker_id: str) -> str:
    """The worker's group: its id with all but plain characters replaced, told apart by a hash."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", worker_id)[:64]
    if plain != worker_id:
        plain += "-" + hashlib.sha256(worker_id.encode()).hexdigest()[:8]
    return f"stockade-{plain}.scope"


def find_parent() -> tuple[Path | None, str]:
    """The group that ours can be made in, and why there is none.

    Tried by making a group and removing it, since a file's mode tells little (read-only mounts,
    delegation, user namespaces).
    """
    mount = cgroup.find_mount()
    if mount is None:
        return None, "no cgroup v2 is mounted"
    own = mount / cgroup.own_group().lstrip("/")
    reason = ""
    # Our own group first when it was delegated to us; a group with processes of its own cannot
    # hand controllers to children (cgroups(7), "no internal processes"), so the root comes first
    # when we may write there.
    for parent in dict.fromkeys((mount, own)):
        probe = Group(parent / f"stockade-probe-{os.getpid()}")
        try:
            probe.create()
            probe.remove()
        except OSError as error:
            reason = f"cannot make a group in {parent}: {error.strerror}"
            continue
        return parent, ""
    return None, reason


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
    """One slot's three groups."""

    def __init__(self, path: Path) -> None:
        self.slot = Group(path)
        self.init = Group(path / "init")
        self.task = Group(path / "task")

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
        for name, (controller, write) in _WRITERS.items():
            value = getattr(limits, name)
            if controller in controllers and value != getattr(current, name):
                write(self, value)

    def _set_cpu_max(self, cpus: float | None) -> None:
        quota_us = None if cpus is None else max(1000, int(cpus * CPU_PERIOD_US))
        self.task.cpu_max = (quota_us, CPU_PERIOD_US)

    def _set_swap_max(self, limit: int | None) -> None:
        try:
            self.task.memory_swap_max = limit
        except SyscallError as error:
            # A kernel without swap accounting has no such file; there is no swap to limit then.
            if error.errno != errno.ENOENT:
                raise

    def kill(self, controllers: frozenset[str]) -> None:
        """SIGKILL to everything in the slot, its launcher included."""
        self._lift_quota(controllers)
        self.slot.kill()

    def kill_task(self, controllers: frozenset[str]) -> None:
        """SIGKILL to everything of the task; the launcher lives."""
        self._lift_quota(controllers)
        self.task.kill()

    def _lift_quota(self, controllers: frozenset[str]) -> None:
        if "cpu" in controllers:
            # Under a tiny quota a killed task takes seconds to run into its death.
            try:
                self.task.cpu_max = (None, CPU_PERIOD_US)
            except OSError as error:
                log.warning("cannot lift cpu.max before the kill: %s", error)

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


def _set(attribute: str) -> Callable[[SlotGroups, Any], None]:
    return lambda groups, value: setattr(groups.task, attribute, value)


def _set_weight(attribute: str) -> Callable[[SlotGroups, Any], None]:
    return lambda groups, value: setattr(groups.task, attribute, value or DEFAULT_WEIGHT)


# Which limits are files of the task's group, of which controller, and how they are written.
_WRITERS: Final[dict[str, tuple[str, Callable[[SlotGroups, Any], None]]]] = {
    "memory_max": ("memory", _set("memory_max")),
    "memory_high": ("memory", _set("memory_high")),
    "memory_swap_max": ("memory", SlotGroups._set_swap_max),
    "oom_policy": (
        "memory",
        lambda groups, value: setattr(groups.task, "memory_oom_group", value == "kill"),
    ),
    "tasks_max": ("pids", _set("pids_max")),
    "cpu_quota": ("cpu", SlotGroups._set_cpu_max),
    "cpu_weight": ("cpu", _set_weight("cpu_weight")),
    "io_weight": ("io", _set_weight("io_weight")),
}


class Tree:
    """The worker's own group and the slots in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._root = Group(path)
        self._spawner = Group(path / "spawner")
        self._tasks = Group(path / "tasks")
        self.controllers: frozenset[str] = frozenset()

    @classmethod
    def set_up(cls, parent: Path, worker_id: str) -> Self:
        """Makes the worker's groups, moves this process into ``spawner/``, enables controllers.

        Raises:
            SyscallError: a group cannot be made or entered.
        """
        tree = cls(parent / group_name(worker_id))
        for group in (tree._root, tree._spawner, tree._tasks):
            try:
                group.create()
            except SyscallError as error:
                # An earlier spawner of this worker made it.
                if error.errno != errno.EEXIST:
                    raise
        tree._spawner.attach(os.getpid())
        for name in CONTROLLERS:
            tree._enable(name)
        tree.controllers = frozenset(CONTROLLERS) & (tree._tasks.subtree_control or frozenset())
        return tree

    def _enable(self, name: str) -> None:
        if name not in (self._root.controllers or ()):
            return
        # A group can pass on only what its own parent enabled for it.
        for group in (self._root, self._tasks):
            try:
                group.enable(frozenset((name,)))
            except SyscallError as error:
                log.warning("cannot enable controller %s in %s: %s", name, group.path, error)
                return

    def slot(self, name: str) -> SlotGroups:
        """The groups of the slot called ``name``, made or not."""
        return SlotGroups(self.path / "tasks" / name)

    def slots(self) -> list[str]:
        """The names of all slots that have groups."""
        return [Path(os.fsdecode(child.path)).name for child in self._tasks.children()]

    def remove(self) -> None:
        """Removes the worker's groups after the last task, with this process moved out of them.

        What still holds a process stays, and is said.
        """
        try:
            Group(self.path.parent).attach(os.getpid())
            self._root.remove_tree()
        except OSError as error:
            log.warning("cannot remove %s: %s", self.path, error)
