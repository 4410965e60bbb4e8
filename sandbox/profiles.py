"""The profiles, from the weakest on, and what each takes from the host."""

from __future__ import annotations

import dataclasses
import enum
import os
from typing import Any, Final, Self


class Profile(enum.StrEnum):
    """How strongly a task is confined, the weakest first; each holds all that the one before does.

    PROCESS: session, clean environment, limits, a uid of its own, no privileges.
    PRIVATE: also namespaces, in which the system is read-only and what is the worker's is hidden.
    SEALED: also no network, a system call filter and Landlock.
    """

    PROCESS = "process"
    PRIVATE = "private"
    SEALED = "sealed"


PROFILES: Final = tuple(profile.value for profile in Profile)


class Feature(enum.StrEnum):
    """What a profile needs of the host besides limits, by the names that ``degraded`` uses."""

    OWN_UID = "own_uid"
    CGROUP_KILL = "cgroup_kill"
    NAMESPACES = "namespaces"
    CGROUP_NAMESPACE = "cgroup_namespace"
    PRIVATE_NETWORK = "private_network"
    SECCOMP = "seccomp"
    LANDLOCK = "landlock"


_ALWAYS: Final = frozenset((Feature.OWN_UID, Feature.CGROUP_KILL, Feature.SECCOMP))
_PRIVATE: Final = _ALWAYS | {Feature.NAMESPACES, Feature.CGROUP_NAMESPACE}
NEEDS: Final[dict[Profile, frozenset[Feature]]] = {
    Profile.PROCESS: _ALWAYS,
    Profile.PRIVATE: _PRIVATE,
    Profile.SEALED: _PRIVATE | {Feature.PRIVATE_NETWORK, Feature.LANDLOCK},
}


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """What of the host the tasks of one worker see, in ``private`` and ``sealed``.

    Of two paths one of which is in the other the longer one decides about what is in it.

    Attributes:
        read_only_paths: absolute; seen although they lie where nothing is (homes, /run, /tmp).
        read_write_paths: absolute; may be changed too, as far as their modes let the task's uid.
        inaccessible_paths: absolute; covered with nothing.
        private_network: no network but a loopback of its own, in ``private`` too.
    """

    read_only_paths: tuple[str, ...] = ()
    read_write_paths: tuple[str, ...] = ()
    inaccessible_paths: tuple[str, ...] = ()
    private_network: bool = False

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """The view whose ``dataclasses.asdict`` this is."""
        lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        return cls(**{**fields, **lists})

    def resolved(self) -> View:
        """The same with every symlink followed, so that mounts land where the files are."""
        return dataclasses.replace(
            self,
            read_only_paths=_real(self.read_only_paths),
            read_write_paths=_real(self.read_write_paths),
            inaccessible_paths=_real(self.inaccessible_paths),
        )


# Nothing shown or hidden beyond what the profile itself does.
WHOLE_VIEW: Final = View()


def _real(paths: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(os.path.realpath(path) for path in paths))


def needs(profile: Profile, view: View) -> frozenset[Feature]:
    """What the profile needs with this view."""
    if view.private_network and profile is not Profile.PROCESS:
        return NEEDS[profile] | {Feature.PRIVATE_NETWORK}
    return NEEDS[profile]
