"""From a dispatch to what is run: its type's plan, its limits and its profile."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from stockade.platform.errors import StockadeError
from stockade.sandbox.limits import Limits
from stockade.sandbox.outcome import ErrorCode, Outcome, Status
from stockade.sandbox.profiles import PROFILES
from stockade.supervisor.dispatch import Dispatch
from stockade.supervisor.errors import RejectedError, Rejection
from stockade.supervisor.limits import effective
from stockade.supervisor.process_plan import ProcessPlan
from stockade.supervisor.task_types.base import LoopPlan, Plan, TaskType


class UnsupportedTaskTypeError(RejectedError):
    """No task type has the name that the dispatch asks for."""

    def __init__(self, name: str, known: Mapping[str, TaskType], fault: str = "") -> None:
        why = fault or f"this worker has {', '.join(sorted(known))}"
        super().__init__(Rejection.INVALID, f"unsupported task type {name[:64]!r}: {why}")


class TaskTypeFaultError(StockadeError):
    """A task type did what its contract forbids: a fault of whoever wrote it, not of the task."""


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
        faults: why a type is missing that should be there, by name.
    """

    def __init__(
        self,
        *,
        limits: Limits,
        limits_max: Limits,
        profile: str,
        unavailable: Mapping[str, str],
        task_types: Mapping[str, TaskType],
        faults: Mapping[str, str] | None = None,
    ) -> None:
        self._limits = limits
        self._limits_max = limits_max
        self._profile = profile
        self._unavailable = unavailable
        self._task_types = task_types
        self._faults = faults or {}

    def plan(self, dispatch: Dispatch) -> Planned:
        """Everything that starting ``dispatch`` takes. Pure.

        Raises:
            RejectedError: INVALID; it cannot be run, and why.
            TaskTypeFaultError: its task type is at fault.
        """
        task_type = self._task_types.get(dispatch.task_type)
        if task_type is None:
            fault = self._faults.get(dispatch.task_type, "")
            raise UnsupportedTaskTypeError(dispatch.task_type, self._task_types, fault)
        profile = self._choose_profile(dispatch.profile)
        limits, notes = effective(
            self._limits, self._limits_max, dispatch.limits, dispatch.timeout_s
        )
        return Planned(_planned_by(task_type, dispatch), limits, profile, notes)

    def plan_if_possible(self, dispatch: Dispatch) -> Planned | None:
        """What `plan` gives; None for a task that cannot be run, whosever fault that is."""
        try:
            return self.plan(dispatch)
        except (RejectedError, TaskTypeFaultError):
            return None

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


def _planned_by(task_type: TaskType, dispatch: Dispatch) -> Plan:
    try:
        task_type.validate(dispatch)
        plan = task_type.plan(dispatch)
    except RejectedError:
        raise
    except Exception as error:
        raise TaskTypeFaultError(
            f"fault in task type {dispatch.task_type}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(plan, ProcessPlan | LoopPlan):
        raise TaskTypeFaultError(
            f"fault in task type {dispatch.task_type}: plan() gave {type(plan).__name__},"
            " neither ProcessPlan nor LoopPlan"
        )
    return plan


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
