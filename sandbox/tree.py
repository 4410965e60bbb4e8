"""The worker's cgroup tree: where it stands, and the slots' groups in it.

stockade-ID.scope/        the worker's; no process of its own, so that controllers can be enabled
    spawner/              the spawner and its standby
    tasks/                the worker's ceiling
        SLOT/             one slot; killed as a whole
            init/         its launcher, outside the task's account
            task/         the task: limits and verdicts are here
"""

from __future__ import annotations

import errno
import logging
import os
import re
import time
from pathlib import Path
from typing import Final, Self

from stockade.platform import cgroup
from stockade.platform.cgroup import Group
from stockade.platform.errors import SyscallError
from stockade.sandbox import systemd
from stockade.sandbox.ceiling import Ceiling
from stockade.sandbox.delegation import ASIDE, CONTROLLERS, Delegation
from stockade.sandbox.errors import SandboxSetupError
from stockade.sandbox.limits import Ceilings
from stockade.sandbox.slot_groups import SlotGroups

log = logging.getLogger(__name__)

# Processes that fork while they are moved need more than one look.
_MOVE_ROUNDS: Final = 100
# A process that ends is out of its group this soon after its descriptors are closed.
_REMOVE_S: Final = 10.0
_REMOVE_PAUSE_S: Final = 0.01


def group_name(worker_id: str) -> str:
    """The worker's group."""
    return f"stockade-{safe_name(worker_id)}.scope"


def safe_name(text: str) -> str:
    """Any text with all but plain characters replaced, and told apart by a hash if it was changed.

    At most 73 characters; empty only for an empty text.
    """
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", text)[:64]
    if plain != text:
        # Here, for few need it: it loads OpenSSL, a fifth of what a spawner holds in memory.
        import hashlib

        plain += "-" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return plain


def slot_path(tree: Path, name: str) -> Path:
    """Where in a worker's tree the groups of the slot called ``name`` are."""
    return tree / "tasks" / name


def root_around_us(worker_id: str) -> Path | None:
    """The worker's own group, when this process was started in it or below."""
    mount = cgroup.find_mount()
    if mount is None:
        return None
    names = cgroup.own_group().strip("/").split("/")
    try:
        depth = names.index(group_name(worker_id))
    except ValueError:
        return None
    return mount.joinpath(*names[: depth + 1])


class Tree:
    """The worker's own group and the slots in it.

    Attributes:
        controllers: what the slots' groups have.
        lacks: for each controller, or limit, that they have not: why, and what mends it.
        is_new: nobody had made it before.
    """

    def __init__(
        self, path: Path, delegation: Delegation, ceilings: Ceilings, disk: str | None
    ) -> None:
        self.path = path
        self.controllers: frozenset[str] = frozenset()
        self.is_new = False
        self.lacks: dict[str, tuple[str, str]] = {}
        self._root = Group(path)
        self._spawner = Group(path / "spawner")
        self._tasks = Group(path / "tasks")
        self._delegation = delegation
        self._by_hand = not systemd.is_running()
        self._disk = disk
        self._counts_peak = False
        self._ceiling = Ceiling(self._tasks, ceilings, frozenset())

    @classmethod
    def set_up(
        cls, delegation: Delegation, worker_id: str, ceilings: Ceilings, disk: str | None
    ) -> Self | None:
        """Makes the worker's groups, moves this process into ``spawner/``, enables controllers.

        None where nothing is delegated.

        Raises:
            SyscallError: a group cannot be made or entered.
            SandboxSetupError: under systemd this process was not started in the worker's scope.
        """
        path = root_around_us(worker_id)
        if path is None:
            if delegation.parent is None:
                return None
            if systemd.is_running():
                raise SandboxSetupError(
                    "use cgroups",
                    f"this process is in {cgroup.own_group()}, not in {group_name(worker_id)}: "
                    "start it through stockade worker or stockade run",
                )
            path = delegation.parent / group_name(worker_id)
        tree = cls(path, delegation, ceilings, disk)
        for group in (tree._root, tree._spawner, tree._tasks):
            try:
                group.create()
            except SyscallError as error:
                # systemd, or an earlier spawner of this worker, made it.
                if error.errno != errno.EEXIST:
                    raise
            else:
                tree.is_new = tree.is_new or group is tree._root
        tree._spawner.attach(os.getpid())
        if tree._by_hand:
            tree._open_parent(Group(path.parent))
        for name in CONTROLLERS:
            tree._enable(name)
        tree._look()
        tree._ceiling = Ceiling(tree._tasks, ceilings, tree.controllers)
        tree._ceiling.apply()
        return tree

    def _open_parent(self, parent: Group) -> None:
        """By hand: has the group above pass controllers on, which none with processes may.

        In a container they are all of the container's, and stay in its group and limits.
        """
        wanted = self._delegation.controllers - (parent.subtree_control or frozenset())
        if not wanted:
            return
        try:
            parent.enable(wanted)
        except SyscallError as error:
            if error.errno != errno.EBUSY:
                log.warning("cannot enable controllers in %s: %s", parent.path, error)
                return
            self._move_aside(parent)
            try:
                parent.enable(wanted)
            except SyscallError as again:
                log.warning("cannot enable controllers in %s: %s", parent.path, again)

    @staticmethod
    def _move_aside(parent: Group) -> None:
        aside = _made(parent.child(ASIDE))
        for _ in range(_MOVE_ROUNDS):
            pids = parent.procs
            if not pids:
                return
            for pid in pids:
                if pid == 0:
                    # Not in our pid namespace; and written, 0 would mean ourselves.
                    log.warning(
                        "cannot enable controllers in %s: a process from outside of this container "
                        "is in it", parent.path,
                    )  # fmt: skip
                    return
                try:
                    aside.attach(pid)
                except SyscallError as error:
                    if error.errno != errno.ESRCH:
                        log.warning("cannot move process %d out of %s: %s", pid, parent.path, error)
                        return

    def _enable(self, name: str) -> None:
        if name not in (self._root.controllers or ()):
            return
        # A group can pass on only what its own parent enabled for it.
        for group in (self._root, self._tasks):
            try:
                group.enable(frozenset((name,)))
            except SyscallError as error:
                log.warning("cannot enable controller %s in %s: %s", name, group.path, error)
                self.lacks[name] = (
                    f"cannot enable the controller {name}: {error}",
                    f"see which processes are in {os.fsdecode(group.path)}/cgroup.procs",
                )
                return

    def _look(self) -> None:
        """Finds what the slots will have; on some kernels io has no weights."""
        self.controllers = frozenset(CONTROLLERS) & (self._tasks.subtree_control or frozenset())
        found = Delegation(self.path.parent, self._delegation.manager, self.controllers)
        why_not = found.lacks()
        self.lacks = {**why_not, **self.lacks}
        self._counts_peak = self._tasks.memory_peak is not None
        if "io" in self.controllers and self._tasks.io_weight is None:
            self.lacks["io_weight"] = (
                "this kernel has no io.weight",
                "use a kernel with blk-iocost or the bfq scheduler",
            )

    def slot(self, name: str) -> SlotGroups:
        """The groups of the slot called ``name``, made or not."""
        return SlotGroups(
            slot_path(self.path, name), self._ceiling,
            disk=self._disk, counts_peak=self._counts_peak,
        )  # fmt: skip

    def slots(self) -> list[str]:
        """The names of all slots that have groups."""
        return [Path(os.fsdecode(child.path)).name for child in self._tasks.children()]

    def remove(self) -> None:
        """Removes the worker's groups after the last task.

        A scope is systemd's: it goes when its last process, which is this one, ends. By hand this
        process is moved out first; what still holds a process stays, and is said.
        """
        if not self._by_hand:
            return
        parent = Group(self.path.parent)
        try:
            try:
                parent.attach(os.getpid())
            except SyscallError as error:
                if error.errno != errno.EBUSY:
                    raise
                _made(parent.child(ASIDE)).attach(os.getpid())
            self._remove_all()
        except OSError as error:
            log.warning("cannot remove %s: %s", self.path, error)

    def _remove_all(self) -> None:
        """A spawner, or standby, that ended before us lets go of its locks first, then of this."""
        deadline = time.monotonic() + _REMOVE_S
        while True:
            try:
                return self._root.remove_tree()
            except SyscallError as error:
                if error.errno != errno.EBUSY or time.monotonic() > deadline:
                    raise
            time.sleep(_REMOVE_PAUSE_S)


def _made(group: Group) -> Group:
    try:
        group.create()
    except SyscallError as error:
        if error.errno != errno.EEXIST:
            raise
    return group
