"""Where the worker's cgroup tree can stand, what it can have there, and what mends the rest.

systemd    a delegated scope of our own, of the system's systemd or, as a user, of the user's
by hand    root without systemd, or in a container: a group beside or below pid 1's, which is the
           top of what is ours; the host's cgroup namespace or a private one makes no difference
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from stockade.platform import cgroup, proc
from stockade.platform.cgroup import Group
from stockade.sandbox import systemd
from stockade.sandbox.systemd import Manager

CONTROLLERS: Final = ("cpu", "io", "memory", "pids")
# A group below the root that has processes cannot enable controllers for others (cgroups(7), "no
# internal processes"), so what is there already is moved to a leaf of this name.
ASIDE: Final = "stockade-aside"
_PROBE: Final = "stockade-probe-"

_BOOT_V2: Final = "boot with cgroup v2 (kernel parameter systemd.unified_cgroup_hierarchy=1)"
_BOOT_V2_ALONE: Final = (
    "boot with cgroup v2 alone (kernel parameters systemd.unified_cgroup_hierarchy=1 "
    "cgroup_no_v1=all)"
)
_CONTAINER: Final = (
    "start the worker as root with a writable /sys/fs/cgroup (of a container: a private cgroup "
    "namespace and a cgroup2 mount that is not read-only), or under systemd"
)
_FOREIGN: Final = (
    "do not hand the host's /sys/fs/cgroup to a container with a private cgroup namespace: its "
    "own is what the engine mounts there"
)
_USER_DELEGATION: Final = (
    "as root: mkdir -p /etc/systemd/system/user@.service.d && "
    "printf '[Service]\\nDelegate=cpu io memory pids\\n' "
    ">/etc/systemd/system/user@.service.d/delegate.conf && systemctl daemon-reload; "
    "then log in anew"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Delegation:
    """A place for the tree, found without making anything that stays.

    Attributes:
        parent: the group that the worker's own is, or will be, made in; None when there is none.
        manager: the systemd that makes it; None when we make it by hand.
        controllers: which of CONTROLLERS it can have.
        has_kill: groups there have cgroup.kill.
        reason: why there is no parent.
        mend: what to do about that.
    """

    parent: Path | None
    manager: Manager | None = None
    controllers: frozenset[str] = frozenset()
    has_kill: bool = False
    reason: str = ""
    mend: str = ""

    def lacks(self) -> dict[str, tuple[str, str]]:
        """For each controller that is not there: why, and what mends it."""
        missing = sorted(frozenset(CONTROLLERS) - self.controllers)
        if self.parent is None:
            return dict.fromkeys(missing, (self.reason, self.mend))
        return {name: self._why(name) for name in missing}

    def _why(self, controller: str) -> tuple[str, str]:
        found = _why_not_in_v2(controller)
        if found is not None:
            return found
        if self.manager is not None and self.manager.runtime_dir is not None:
            mend = _USER_DELEGATION
        elif self.manager is not None or self.parent == cgroup.find_mount():
            mend = f"{_CONTAINER}; on a host of its own: use a kernel that was built with it"
        else:
            mend = _CONTAINER
        return f"the cgroup v2 controller {controller} is not offered in {self.parent}", mend


def find_delegation() -> Delegation:
    """Where a worker that is started by this process would have its tree."""
    mount = cgroup.find_mount()
    if mount is None:
        foreign = cgroup.find_foreign_mount()
        if foreign is None:
            return Delegation(None, reason="no cgroup v2 is mounted", mend=_BOOT_V2)
        # Used as ours, its top would be: the host's, out of the container's own limits.
        return Delegation(
            None,
            reason=f"the cgroup v2 mounted at {foreign} is that of another cgroup namespace",
            mend=_FOREIGN,
        )
    return _of_systemd(mount) if systemd.is_running() else _by_hand(mount)


def _of_systemd(mount: Path) -> Delegation:
    manager, reason, mend = systemd.find_manager()
    if manager is None:
        return Delegation(None, reason=reason, mend=mend)
    if manager.runtime_dir is not None:
        uid = os.geteuid()
        parent = mount / f"user.slice/user-{uid}.slice/user@{uid}.service"
        source = Group(parent)
    else:
        parent, source = mount / "system.slice", Group(mount)
        if not os.access(mount / "cgroup.procs", os.W_OK):
            return Delegation(
                None,
                reason=f"{mount} is not writable: root of a user namespace is not systemd's root",
                mend="start the worker as the host's root, or as an ordinary user",
            )
    own = Group(mount / cgroup.own_group().lstrip("/"))
    return Delegation(parent, manager, _ours(source.controllers), own.has_kill)


def _by_hand(mount: Path) -> Delegation:
    found: Delegation | None = None
    reason = ""
    for parent in _candidates(mount):
        # Tried, since a file's mode tells little (read-only mounts, delegation, user namespaces).
        probe = Group(parent / f"{_PROBE}{os.getpid()}")
        try:
            _remove_stale_probes(parent)
            probe.create()
            has_kill = probe.has_kill
            probe.remove()
        except OSError as error:
            reason = f"cannot make a group in {parent}: {error.strerror}"
            continue
        here = Delegation(parent, None, _obtainable(Group(parent)), has_kill)
        if found is None or len(here.controllers) > len(found.controllers):
            found = here
    return found or Delegation(None, reason=reason, mend=_CONTAINER)


def _remove_stale_probes(parent: Path) -> None:
    """Removes what is left of those that were killed before they could do it themselves."""
    for path in parent.glob(f"{_PROBE}*"):
        pid = path.name.removeprefix(_PROBE)
        if pid.isdecimal() and proc.process(int(pid)) is None:
            # Another worker may be at it too.
            with contextlib.suppress(OSError):
                Group(path).remove()


def _candidates(mount: Path) -> Iterable[Path]:
    groups = (cgroup.group_of(1), cgroup.own_group())
    # Where a worker before us moved pid 1 aside, the place is one up.
    names = (group.removesuffix(f"/{ASIDE}") for group in groups if group is not None)
    return dict.fromkeys(mount / name.lstrip("/") for name in names)


def _obtainable(group: Group) -> frozenset[str]:
    """The controllers that groups made in ``group`` have, or that we can enable for them."""
    if os.access(group.filepath(b"cgroup.subtree_control"), os.W_OK):
        return _ours(group.controllers)
    return _ours(group.subtree_control)


def _ours(names: frozenset[str] | None) -> frozenset[str]:
    return frozenset(CONTROLLERS) & (names or frozenset())


def _why_not_in_v2(controller: str) -> tuple[str, str] | None:
    """Why cgroup v2 lacks the controller on this whole host, and what mends it, if /proc tells."""
    # blkio is what v1 calls io. Newer kernels tell of v1's controllers only.
    name = {"io": "blkio"}.get(controller, controller)
    for line in Path("/proc/cgroups").read_text().splitlines():
        word, hierarchy, _, enabled = line.split()[:4]
        if word != name:
            continue
        if enabled == "0":
            return (
                f"the controller {controller} was disabled at boot",
                f"take cgroup_disable={controller} off the kernel's command line "
                f"(on some boards: add cgroup_enable={controller})",
            )
        if hierarchy != "0":
            return f"the controller {controller} is in use as cgroup v1", _BOOT_V2_ALONE
    return None
