"""What a spawner is told when it starts."""

from __future__ import annotations

import dataclasses
import enum
import json
from typing import Any, Final, Self

from stockade.sandbox.engine import EngineSettings
from stockade.sandbox.limits import Ceilings, Limits
from stockade.sandbox.profiles import WHOLE_VIEW, Profile, View


class Lifetime(enum.StrEnum):
    """How long a spawner lives when its supervisor goes away.

    LASTING: tasks go on and wait for the next supervisor; a standby stands by.
    EPHEMERAL: everything is killed and the spawner ends; no standby (``stockade run``).
    """

    LASTING = "lasting"
    EPHEMERAL = "ephemeral"


# Nothing in here gives a task more rights, for it comes from a process with fewer than ours.
_TUNABLE: Final = ("limits", "profile", "pool_min", "pool_max")


@dataclasses.dataclass(frozen=True, slots=True)
class SpawnerSettings:
    """One worker's places and users, as the spawner needs them.

    Attributes:
        worker_id: names the cgroup; any text, made safe there.
        runtime_dir: absolute; ``spawner/`` is made in it.
        state_dir: absolute; ``work/`` is made in it.
        supervisor_uid: the user that may connect, besides root and the spawner's own.
        supervisor_gid: its group.
        uid_min: first uid of the range that slots take theirs from, when root. The first two are
            the launchers' own.
        uid_max: last uid of that range.
        profile: of ready slots; a task with another one gets a slot made for it.
        ceilings: what all tasks together may use.
        limits: what ready slots are made with; a task with others has the difference applied.
        view: what of the host tasks see.
        pool_min: how many slots wait ready when nothing has happened for long.
        pool_max: how many may wait.
        lifetime: see Lifetime.
        engine: runs container tasks; None: there is none.
        start_deadline_s: from the dispatch until the task's program runs. Generous: it is for a
            launcher that hangs.
    """

    worker_id: str
    runtime_dir: str
    state_dir: str
    supervisor_uid: int
    supervisor_gid: int
    uid_min: int
    uid_max: int
    profile: Profile = Profile.PRIVATE
    ceilings: Ceilings = Ceilings()  # noqa: RUF009 - frozen
    limits: Limits = Limits()  # noqa: RUF009 - frozen
    view: View = WHOLE_VIEW
    pool_min: int = 0
    pool_max: int = 0
    lifetime: Lifetime = Lifetime.LASTING
    engine: EngineSettings | None = None
    start_deadline_s: float = 30.0

    @property
    def tuning(self) -> str:
        """What a supervisor may choose anew for a spawner that runs, as one line of JSON."""
        fields = dataclasses.asdict(self)
        return json.dumps({name: fields[name] for name in _TUNABLE}, sort_keys=True)

    def tuned(self, tuning: str) -> Self:
        """These settings with the choices in ``tuning``, and nothing else of it.

        Raises:
            ValueError: it cannot be read.
        """
        try:
            wishes = json.loads(tuning)
            chosen = {name: wishes[name] for name in _TUNABLE if name in wishes}
            if "limits" in chosen:
                chosen["limits"] = Limits.from_json(chosen["limits"])
            if "profile" in chosen:
                chosen["profile"] = Profile(chosen["profile"])
            return dataclasses.replace(self, **chosen)
        except (TypeError, AttributeError) as error:
            raise ValueError(f"cannot use the settings in a renewal: {error}") from error

    def to_json(self) -> str:
        """One line of JSON; ``from_json`` takes it back."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The settings that ``to_json`` gave."""
        fields = json.loads(text)
        return cls(
            **{
                **fields,
                "profile": Profile(fields["profile"]),
                "ceilings": Ceilings(**fields["ceilings"]),
                "limits": Limits.from_json(fields["limits"]),
                "view": View.from_json(fields["view"]),
                "lifetime": Lifetime(fields["lifetime"]),
                "engine": _engine(fields["engine"]),
            }
        )


def _engine(fields: dict[str, Any] | None) -> EngineSettings | None:
    if fields is None:
        return None
    lists = {name: tuple(fields[name]) for name in ("flags", "volumes")}
    return EngineSettings(**{**fields, **lists})
