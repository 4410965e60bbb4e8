"""The plan of a slot: from (profile, view, limits, features) to namespaces and steps. Pure.

The steps are in two parts. Those of the *system* are the same for every slot of a worker: they are
done once, by what becomes a zygote (zygote.py), in a mount namespace of which each slot gets a
copy, since copying what is done costs less than doing it again. Those of the *slot* are done in
each.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from typing import Final

from stockade.platform import clone
from stockade.sandbox import slot_steps, system_steps
from stockade.sandbox.landlock_policy import Grants
from stockade.sandbox.limits import Limits
from stockade.sandbox.profiles import Feature, Profile, View, needs
from stockade.sandbox.steps import SlotStep, Step
from stockade.sandbox.system_steps import TASK_DIRECTORY
from stockade.sandbox.work_directory import temporary_bytes, wants_tmpfs

# Hidden whatever the configuration says; it can show parts of them.
HIDDEN: Final = ("/home", "/root", "/sys/fs/cgroup")
_NAMESPACES: Final = (
    clone.CLONE_NEWNS | clone.CLONE_NEWPID | clone.CLONE_NEWIPC | clone.CLONE_NEWUTS
)
# Mounted anew in each slot, so nothing of the host's can be seen through them.
_TEMPORARY: Final = ("/tmp", "/var/tmp", "/dev/shm")


@dataclasses.dataclass(frozen=True, slots=True)
class Confinement:
    """What a slot's child does before it becomes the launcher.

    Attributes:
        namespaces: CLONE_NEW* flags for the child.
        system: steps that make what all slots see; empty: the host's files as they are.
        slot: the slot's own steps.
        grants: what Landlock is to allow; None without it.
        cgroup_namespace: whether the task gets a cgroup namespace.
    """

    namespaces: int
    system: tuple[Step, ...]
    slot: tuple[SlotStep, ...]
    grants: Grants | None
    cgroup_namespace: bool

    @property
    def has_own_files(self) -> bool:
        """Whether the task sees mounts of its own, its work directory at TASK_DIRECTORY."""
        return bool(self.system)


def confine(
    profile: Profile, view: View, limits: Limits, available: frozenset[Feature],
    resolv_conf: str | None = None,
) -> Confinement:  # fmt: skip
    """The plan.

    Args:
        profile: says what is wanted.
        view: with its symlinks followed.
        limits: half of memory_max is the size of the temporary directories.
        available: what the host has. OWN_UID: the steps are done by real root, not by that of a
            user namespace.
        resolv_conf: what /etc/resolv.conf leads to, if that is in /run.
    """
    features = needs(profile, view) & available
    if Feature.NAMESPACES not in features:
        return Confinement(
            namespaces=0,
            system=(),
            slot=(slot_steps.Keyring(),) if Feature.OWN_UID in features else (),
            grants=None,
            cgroup_namespace=False,
        )
    network = clone.CLONE_NEWNET if Feature.PRIVATE_NETWORK in features else 0
    shown = _shown(view, resolv_conf)
    return Confinement(
        namespaces=_NAMESPACES | network,
        system=_system_steps(shown, view, as_root=Feature.OWN_UID in features),
        slot=_slot_steps(shown, limits, features),
        grants=_grants(shown) if Feature.LANDLOCK in features else None,
        cgroup_namespace=Feature.CGROUP_NAMESPACE in features,
    )


def same_files(profile: Profile, wanted: Limits, made: Limits) -> bool:
    """Whether a slot made with one set of limits has the file systems that another asks for.

    What cgroups hold can be changed when the task is known; the size of a mount is not.
    """
    quotas = (made.workdir_max, made.workdir_inodes_max)
    if quotas != (wanted.workdir_max, wanted.workdir_inodes_max):
        return False
    if wants_tmpfs(made) != wants_tmpfs(wanted):
        return False
    by_memory = profile is not Profile.PROCESS or made.workdir_inodes_max is not None
    return not by_memory or made.memory_max == wanted.memory_max


def _shown(view: View, resolv_conf: str | None) -> dict[str, bool]:
    """What is shown besides the read-only system, by path: whether it may be written."""
    shown = dict.fromkeys(view.read_only_paths, False)
    if resolv_conf is not None:
        shown.setdefault(resolv_conf, False)
    shown.update(dict.fromkeys(view.read_write_paths, True))
    return dict(sorted(shown.items()))


def _system_steps(shown: dict[str, bool], view: View, *, as_root: bool) -> tuple[Step, ...]:
    steps: list[Step] = [system_steps.Keep(path, writable) for path, writable in shown.items()]
    if not as_root:
        steps.append(system_steps.KeepDevices())
    steps.append(system_steps.ReadOnlySystem())
    if as_root:
        # Not in a user namespace: there a new /proc can only be mounted where the host's is seen.
        steps += [system_steps.Detach(path) for path in ("/proc", "/sys/fs/cgroup", "/dev", "/run")]
    steps += [system_steps.Devices(), system_steps.RunDirectory(for_work=not as_root)]
    # On some hosts homes lie elsewhere, and links lead there.
    hidden = {*map(os.path.realpath, HIDDEN), *view.inaccessible_paths}
    # Parents first, so that the longer path decides.
    for path in sorted(hidden | set(shown)):
        if path not in shown:
            steps.append(system_steps.Hide(path, parent=_holds_any(path, shown)))
        elif _is_in_any(path, _TEMPORARY):
            steps.append(system_steps.Show(path, _waiting_place(path, shown)))
        else:
            steps.append(system_steps.Show(path, path))
    steps += [
        system_steps.Seal(path)
        for path in ("/dev", "/run", *sorted(path for path in hidden if _holds_any(path, shown)))
    ]
    return tuple(steps)


def _slot_steps(
    shown: dict[str, bool], limits: Limits, features: frozenset[Feature]
) -> tuple[SlotStep, ...]:
    size = temporary_bytes(limits)
    steps: list[SlotStep] = [
        slot_steps.ProcessTable(),
        slot_steps.TemporaryDirectories(size),
        slot_steps.SharedMemory(None if size is None else size // 4),
        slot_steps.Terminals(),
        slot_steps.PassedWorkDirectory()
        if Feature.OWN_UID in features
        else slot_steps.OwnWorkDirectory(),
    ]
    steps += [
        slot_steps.ShowAgain(_waiting_place(path, shown), path)
        for path in shown
        if _is_in_any(path, _TEMPORARY)
    ]
    if Feature.PRIVATE_NETWORK in features:
        steps.append(slot_steps.Loopback())
    if Feature.OWN_UID in features:
        # Without, all tasks share a uid, its keys with it, and the few keyrings that it may have.
        steps.append(slot_steps.Keyring())
    return tuple(steps)


def _grants(shown: dict[str, bool]) -> Grants:
    return Grants(
        read_only=("/",),
        read_write=(TASK_DIRECTORY, *_TEMPORARY, *(p for p, writable in shown.items() if writable)),
        devices=("/dev",),
    )


def _waiting_place(path: str, shown: dict[str, bool]) -> str:
    return f"{system_steps.SHOWN}/{list(shown).index(path)}"


def _holds_any(path: str, others: Iterable[str]) -> bool:
    return any(_is_in(other, path) for other in others)


def _is_in_any(path: str, others: Iterable[str]) -> bool:
    return any(_is_in(path, other) for other in others)


def _is_in(path: str, directory: str) -> bool:
    return path != directory and os.path.commonpath((path, directory)) == directory
