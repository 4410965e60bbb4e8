"""From a dispatch to what is run: its type's plan, its limits and its profile."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from stockade.sandbox.limits import Limits
from stockade.sandbox.outcome import ErrorCode, Outcome, Status
from stockade.sandbox.profiles import PROFILES
from stockade.supervisor.dispatch import Dispatch
from stockade.supervisor.errors import RejectedError, Rejection
from stockade.supervisor.limits import effective
from stockade.supervisor.task_types.base import Plan, TaskType


class UnsupportedTaskTypeError(RejectedError):
    """No task type has the name that the dispatch asks for."""

    def __init__(self, name: str, known: Mapping[str, TaskType]) -> None:
        super().__init__(
            Rejection.INVALID,
            f"unsupported task type {name[:64]!r}: this worker has {', '.join(sorted(known))}",
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Planned:
    """All that starting one task needs.

    Attributes:
        notes: wishes that were lowered, for the report's reason.
    """

    plan: Plan
    limits: Limits
    profile: str
    notes: tuple[str, ...]


class Planner:
    """Plans tasks under one configuration.

    Args:
        profile: the worker's own profile.
        unavailable: the profiles that this host cannot enforce and may not weaken, and why.
        task_types: by name.
    """

    def __init__(
        self,
        *,
        limits: Limits,
        limits_max: Limits,
        profile: str,
        unavailable: Mapping[str, str],
        task_types: Mapping[str, TaskType],
    ) -> None:
        self._limits = limits
        self._limits_max = limits_max
        self._profile = profile
        self._unavailable = unavailable
        self._task_types = task_types

    def plan(self, dispatch: Dispatch) -> Planned:
        """Everything that starting ``dispatch`` takes. Pure.

        Raises:
            RejectedError: INVALID; it cannot be run, and why.
        """
        task_type = self._task_types.get(dispatch.task_type)
        if task_type is None:
            raise UnsupportedTaskTypeError(dispatch.task_type, self._task_types)
        profile = self._choose_profile(dispatch.profile)
        limits, notes = effective(
            self._limits, self._limits_max, dispatch.limits, dispatch.timeout_s
        )
        return Planned(task_type.plan(dispatch), limits, profile, notes)

    def _choose_profile(self, wish: str | None) -> str:
        if wish is not None and wish not in PROFILES:
            raise RejectedError(
                Rejection.INVALID,
                f"unknown profile {wish[:64]!r}: there are {', '.join(PROFILES)}",
            )
        # A task may ask for a stronger one than the worker's, never for a weaker one.
        asked = max(self._profile, wish or self._profile, key=PROFILES.index)
        if asked in self._unavailable:
            raise RejectedError(
                Rejection.INVALID,
                f"profile {asked} is not available on this host: {self._unavailable[asked]}",
            )
        return asked


def refused(error: RejectedError) -> Outcome:
    """The outcome of a task that cannot be run as it was sent."""
    code = (
        ErrorCode.UNSUPPORTED_TASK_TYPE
        if isinstance(error, UnsupportedTaskTypeError)
        else ErrorCode.INVALID_REQUEST
    )
    return Outcome(Status.FAILED, code, reason=" ".join(str(error).split()))


def cancelled_before_start() -> Outcome:
    """The outcome of a task that was cancelled before it ran."""
    return Outcome(Status.CANCELLED, ErrorCode.CANCELLED, reason="cancelled before it started")


def lost(reason: str) -> Outcome:
    """The outcome of a task that nobody can tell the end of."""
    return Outcome(Status.FAILED, ErrorCode.WORKER_LOST, reason=reason)
