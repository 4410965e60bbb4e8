"""What this host can enforce, found once by trying, and what a profile would miss."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Callable
from typing import Final

from stockade.platform.cgroup import Group
from stockade.sandbox import tree
from stockade.sandbox.limits import Limits

PROFILES: Final = ("process",)


@dataclasses.dataclass(frozen=True, slots=True)
class HostCapabilities:
    """The frozen table of what was found.

    Attributes:
        root: this process has uid 0 and so can give each slot a uid of its own.
        kernel: the release, for people.
        cgroup_parent: the group that the worker's tree goes in; None without one.
        cgroup_reason: why there is none.
        controllers: which of cpu, io, memory, pids the tree can use.
        cgroup_kill: the kernel has cgroup.kill (5.14).
    """

    root: bool
    kernel: str
    cgroup_parent: str | None
    cgroup_reason: str
    controllers: frozenset[str]
    cgroup_kill: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Missing:
    """One feature that this host cannot enforce, or only more coarsely.

    Attributes:
        feature: a limit's or property's name, as reports carry it in ``degraded``.
        why: what the host lacks.
        instead: what is done in its place.
        mend: what to do about it.
    """

    feature: str
    why: str
    instead: str
    mend: str


def probe() -> HostCapabilities:
    """Tries what the host offers. Makes a cgroup and removes it; leaves nothing."""
    parent, reason = tree.find_parent()
    controllers: frozenset[str] = frozenset()
    cgroup_kill = False
    if parent is not None:
        group = Group(parent / f"stockade-probe-{os.getpid()}")
        group.create()
        try:
            controllers = frozenset(tree.CONTROLLERS) & (group.controllers or frozenset())
            cgroup_kill = os.path.exists(os.path.join(os.fsdecode(group.path), "cgroup.kill"))
        finally:
            group.remove()
    return HostCapabilities(
        root=os.geteuid() == 0,
        kernel=platform.release(),
        cgroup_parent=None if parent is None else str(parent),
        cgroup_reason=reason,
        controllers=controllers,
        cgroup_kill=cgroup_kill,
    )


_DELEGATE: Final = (
    "boot with cgroup v2 (systemd.unified_cgroup_hierarchy=1) and start the worker as root, "
    "or in a unit or scope with Delegate=yes"
)

# Which controller holds a limit, and what is done without it.
_BY_CONTROLLER: Final[dict[str, tuple[str, str]]] = {
    "memory_max": ("memory", "a watchdog samples the task's processes and kills at the limit"),
    "memory_high": ("memory", "nothing"),
    "memory_swap_max": ("memory", "nothing"),
    "cpu_quota": ("cpu", "nothing"),
    "cpu_weight": ("cpu", "nothing"),
    "tasks_max": ("pids", "RLIMIT_NPROC of the task's uid"),
    "io_weight": ("io", "nothing"),
}


def missing(profile: str, limits: Limits, host: HostCapabilities) -> tuple[Missing, ...]:
    """What of (profile, limits) this host cannot enforce; empty when all of it can be.

    A limit that is not set is not missed.

    Raises:
        ValueError: no such profile.
    """
    if profile not in PROFILES:
        raise ValueError(f"unknown profile {profile!r}: this version has {', '.join(PROFILES)}")
    found = [
        Missing(
            feature=name,
            why=host.cgroup_reason or f"the cgroup v2 controller {controller} is not available",
            instead=instead,
            mend=_DELEGATE,
        )
        for name, (controller, instead) in _BY_CONTROLLER.items()
        if getattr(limits, name) is not None and controller not in host.controllers
    ]
    checks: tuple[tuple[Callable[[], bool], Missing], ...] = (
        (
            lambda: host.cgroup_parent is None or not host.cgroup_kill,
            Missing(
                "cgroup_kill",
                host.cgroup_reason or "the kernel has no cgroup.kill (5.14)",
                "leftovers are found by process group, session, uid and parentage",
                _DELEGATE,
            ),
        ),
        (
            lambda: not host.root,
            Missing(
                "own_uid",
                "the worker does not run as root",
                "tasks run as the worker's user and can reach its processes and each other's",
                "start the worker as root",
            ),
        ),
        (
            lambda: limits.workdir_max is not None or limits.workdir_inodes_max is not None,
            Missing(
                "workdir_max",
                "this version has no quota of the work directory",
                "limit_fsize bounds single files",
                "leave workdir_max and workdir_inodes_max unset",
            ),
        ),
    )
    found.extend(entry for lacks, entry in checks if lacks())
    return tuple(found)


def features(profile: str, limits: Limits, host: HostCapabilities) -> tuple[str, ...]:
    """The names of what ``missing`` finds, as outcomes carry them."""
    return tuple(entry.feature for entry in missing(profile, limits, host))
