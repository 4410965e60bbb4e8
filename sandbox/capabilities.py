"""What this host can enforce, found once by trying, and what a profile would miss."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Mapping
from typing import Final

from stockade.platform import devices
from stockade.sandbox import confinement_probe, quota_probe
from stockade.sandbox.delegation import CONTROLLERS, Delegation, find_delegation
from stockade.sandbox.limits import LIMIT_FIELDS, Ceilings, Limits
from stockade.sandbox.profiles import WHOLE_VIEW, Feature, Profile, View, needs
from stockade.sandbox.work_directory import wants_project, wants_quota


@dataclasses.dataclass(frozen=True, slots=True)
class HostCapabilities:
    """The frozen table of what was found.

    Attributes:
        root: this process has uid 0 and so can give each slot a uid of its own.
        kernel: the release, for people.
        cgroup_parent: the group that the worker's tree goes in; None without one.
        cgroup_scope: the tree is a scope that systemd makes.
        cgroup_reason: why there is no parent.
        cgroup_mend: what to do about that.
        controllers: which of cpu, io, memory, pids the tree can use.
        lacks: for each of those, or limit, that it cannot: why, and what mends it.
        cgroup_kill: the kernel has cgroup.kill (5.14).
        obstacles: why a feature of a profile cannot be used, by feature; one that can is not in it.
        disk: MAJOR:MINOR of the work directories' disk; None when it cannot be told.
        project_quota: why the work directories' file system can hold no project quota, and what
            mends it; None when it can.
    """

    root: bool
    kernel: str
    cgroup_parent: str | None
    cgroup_scope: bool
    cgroup_reason: str
    cgroup_mend: str
    controllers: frozenset[str]
    lacks: Mapping[str, tuple[str, str]]
    cgroup_kill: bool
    obstacles: Mapping[Feature, str]
    disk: str | None
    # What a worker takes over from one of an older version has it not.
    project_quota: tuple[str, str] | None = (
        "it was not looked for when the worker was started",
        "restart the worker",
    )

    @property
    def available(self) -> frozenset[Feature]:
        """The features that this host has."""
        lacking = {Feature.OWN_UID: not self.root, Feature.CGROUP_KILL: not self.has_cgroup_kill}
        return frozenset(
            feature
            for feature in Feature
            if feature not in self.obstacles and not lacking.get(feature)
        )

    @property
    def lacks_project_quota(self) -> tuple[str, str] | None:
        """Why tasks cannot be held by a project quota, and what mends it; None when they can."""
        if self.project_quota is None and Feature.SECCOMP in self.obstacles:
            return _CAN_LEAVE, _BY_FEATURE[Feature.SECCOMP][1]
        return self.project_quota

    @property
    def has_cgroup_kill(self) -> bool:
        """Whether the kernel finds and kills all of a slot's processes."""
        return self.cgroup_parent is not None and self.cgroup_kill


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


def probe(directory: str = "/", delegation: Delegation | None = None) -> HostCapabilities:
    """Tries what the host offers; leaves nothing.

    Args:
        directory: holds, or is above, the work directories; absent ones are looked for above.
        delegation: where the tree would stand, when that is known already.
    """
    delegation = delegation or find_delegation()
    controllers, lacks = delegation.controllers, delegation.lacks()
    if delegation.parent is not None and not delegation.has_kill:
        # Without it the tree is not used at all.
        controllers = frozenset()
        lacks = dict.fromkeys(CONTROLLERS, (_NO_KILL, _KILL))
    root, directory = os.geteuid() == 0, _existing(directory)
    return HostCapabilities(
        root=root,
        kernel=platform.release(),
        cgroup_parent=None if delegation.parent is None else str(delegation.parent),
        cgroup_scope=delegation.manager is not None,
        cgroup_reason=delegation.reason,
        cgroup_mend=delegation.mend,
        controllers=controllers,
        lacks=lacks,
        cgroup_kill=delegation.has_kill,
        obstacles=confinement_probe.obstacles(),
        disk=devices.disk_of(directory),
        project_quota=quota_probe.obstacle(directory) if root else (_ONLY_ROOT, _AS_ROOT),
    )


def _existing(directory: str) -> str:
    while not os.path.isdir(directory):
        directory = os.path.dirname(directory) or "."
    return directory


_NO_KILL: Final = "the kernel has no cgroup.kill (5.14)"
_KILL: Final = "use Linux 5.14 or newer"
_DISK: Final = (
    "the work directories' disk cannot be told (a file system without a block device of its own)"
)


# Of what a profile needs: what is done without it, and what mends that, as root and as a user.
_AS_ROOT: Final = "start the worker as root"
_ONLY_ROOT: Final = "only root can set one"
_CAN_LEAVE: Final = "without seccomp a task can leave its project"
_PRIVILEGED: Final = (
    "let root mount and make namespaces: outside of a container, or in one with CAP_SYS_ADMIN, "
    "CAP_NET_ADMIN and CAP_MKNOD and without a filter on those calls"
)
_USER_NAMESPACES: Final = (
    "allow user namespaces (sysctl user.max_user_namespaces and, where there are such, "
    "kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0), "
    "or start the worker as root"
)
_BY_FEATURE: Final[dict[Feature, tuple[str, str, str]]] = {
    Feature.OWN_UID: (
        "tasks run as the worker's user and can reach its processes and each other's",
        _AS_ROOT, _AS_ROOT,
    ),
    Feature.CGROUP_KILL: (
        "leftovers are found by process group, session, uid and parentage", _KILL, _KILL,
    ),
    Feature.NAMESPACES: (
        "tasks see the host's files, processes and IPC, as in profile process",
        _PRIVILEGED, _USER_NAMESPACES,
    ),
    Feature.CGROUP_NAMESPACE: (
        "no cgroup files are shown; /proc/self/cgroup tells the group's path",
        _PRIVILEGED, _AS_ROOT,
    ),
    Feature.PRIVATE_NETWORK: ("tasks use the host's network", _PRIVILEGED, _USER_NAMESPACES),
    Feature.SECCOMP: (
        "no system call is filtered", "use a kernel with CONFIG_SECCOMP_FILTER, on x86_64 or "
        "aarch64", "use a kernel with CONFIG_SECCOMP_FILTER, on x86_64 or aarch64",
    ),
    Feature.LANDLOCK: (
        "mounts and modes alone decide about files", "boot with landlock in lsm=, on Linux 5.19 or "
        "newer", "boot with landlock in lsm=, on Linux 5.19 or newer",
    ),
}  # fmt: skip


def missing(
    profile: Profile, limits: Limits, host: HostCapabilities, view: View = WHOLE_VIEW
) -> tuple[Missing, ...]:
    """What of (profile, limits) this host cannot enforce; empty when all of it can be.

    A limit that is not set is not missed.
    """
    found = [
        Missing(name, why, field.metadata["instead"], mend)
        for name, field in LIMIT_FIELDS.items()
        if field.metadata["instead"] and getattr(limits, name) is not None
        for why, mend in _lacks(host, name, field.metadata["controller"])
    ]
    lacking = needs(profile, view) - host.available
    for feature, (instead, mend_as_root, mend_as_user) in _BY_FEATURE.items():
        if feature in lacking:
            mend = mend_as_root if host.root else mend_as_user
            if feature is Feature.CGROUP_KILL and host.cgroup_mend:
                mend = host.cgroup_mend
            found.append(Missing(feature.value, _why(feature, host), instead, mend))
    if wants_quota(limits):
        found.extend(_missing_quota(limits, host))
    return tuple(found)


def _why(feature: Feature, host: HostCapabilities) -> str:
    if feature is Feature.OWN_UID:
        return "the worker does not run as root"
    if feature is Feature.CGROUP_KILL:
        return host.cgroup_reason or _NO_KILL
    return host.obstacles[feature]


def _missing_quota(limits: Limits, host: HostCapabilities) -> list[Missing]:
    if wants_project(limits):
        if host.lacks_project_quota is None:
            return []
        why, mend = host.lacks_project_quota
        why = f"more than half of memory_max takes a project quota: {why}"
        mend = f"lower workdir_max, or raise memory_max, or {mend}"
    elif not host.root or Feature.NAMESPACES in host.obstacles:
        why = host.obstacles.get(Feature.NAMESPACES) or "only root can mount a tmpfs for each task"
        mend = _PRIVILEGED if host.root else _AS_ROOT
    else:
        return []
    return [Missing("workdir_max", why, "limit_fsize bounds single files", mend)]


def missing_ceilings(ceilings: Ceilings, host: HostCapabilities) -> tuple[Missing, ...]:
    """What of the worker's ceilings this host cannot enforce. One that is not set is not missed."""
    return tuple(
        Missing(f"worker.{name}", why, "nothing", mend)
        for name, controller in (
            ("memory_max", "memory"),
            ("cpu_quota", "cpu"),
            ("tasks_max", "pids"),
        )
        if getattr(ceilings, name) is not None
        for why, mend in _lacks(host, f"worker.{name}", controller)
    )


def _lacks(host: HostCapabilities, name: str, controller: str) -> list[tuple[str, str]]:
    """Why the host cannot hold the limit, and what mends it; empty when it can."""
    if name in host.lacks:
        return [host.lacks[name]]
    if controller not in host.controllers:
        return [host.lacks[controller]]
    if name.startswith("io_") and name.endswith("_bandwidth_max") and host.disk is None:
        return [(_DISK, "put state_dir on a file system with a disk of its own, such as ext4")]
    return []


def without_lost_quota(limits: Limits, host: HostCapabilities) -> Limits:
    """The limits, but for a quota of the work directory that this host cannot hold."""
    if wants_quota(limits) and _missing_quota(limits, host):
        return dataclasses.replace(limits, workdir_max=None, workdir_inodes_max=None)
    return limits


def features(
    profile: Profile, limits: Limits, host: HostCapabilities, view: View = WHOLE_VIEW
) -> tuple[str, ...]:
    """The names of what ``missing`` finds, as outcomes carry them."""
    return tuple(entry.feature for entry in missing(profile, limits, host, view))
