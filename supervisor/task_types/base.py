"""The contract of a task type: one class that turns a dispatch into something to run.

Built-in types and those of other packages keep the same contract. Another package offers its class
under the entry-point group ``stockade.task_types``; docs/task-types.md shows one whole.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Awaitable, Callable
from typing import ClassVar

from stockade.sandbox.outcome import ErrorCode, Outcome, Status
from stockade.supervisor.dispatch import Dispatch
from stockade.supervisor.errors import RejectedError, Rejection
from stockade.supervisor.process_plan import ProcessPlan

__all__ = [
    "Dispatch",
    "ErrorCode",
    "LoopPlan",
    "Outcome",
    "OutputWriter",
    "Plan",
    "ProcessPlan",
    "Status",
    "TaskType",
    "common_environment",
    "invalid",
    "refuse_files",
]

OutputWriter = Callable[[bytes], None]


@dataclasses.dataclass(frozen=True, slots=True)
class LoopPlan:
    """A task that needs no slot and runs in the supervisor's loop.

    Attributes:
        run: does it, handing output over as it comes. Its deadline and its cancel arrive as the
            cancellation of the coroutine; times and output fields of the outcome are filled in by
            the executor. It must never block: heartbeat and reports share its thread.
    """

    run: Callable[[OutputWriter], Awaitable[Outcome]]


Plan = ProcessPlan | LoopPlan


class TaskType(abc.ABC):
    """One kind of task. Made once, without arguments when another package brings it.

    Attributes:
        name: as in a dispatch's ``task_type``, lower case.
    """

    name: ClassVar[str]

    def validate(self, dispatch: Dispatch) -> None:  # noqa: B027 -- most types check in plan()
        """Refuse a dispatch that makes no task of this type; called before each ``plan``.

        Raises:
            RejectedError: made by `invalid`. The task is reported failed / invalid_request.
        """

    @abc.abstractmethod
    def plan(self, dispatch: Dispatch) -> Plan:
        """How to run this dispatch: a program in a slot, or a coroutine in the supervisor's loop.

        Pure, quick, and may be called more than once. Any exception but RejectedError is a fault of
        the type: the task is reported failed / spawn_failed, and nothing else is touched.

        Raises:
            RejectedError: made by `invalid`; as for ``validate``.
        """

    async def close(self) -> None:  # noqa: B027 -- most hold nothing open
        """Let go of what the type holds open; called once, when no task of it runs."""


def invalid(message: str) -> RejectedError:
    """The error to raise for a dispatch that makes no task: what is wrong and how to mend it."""
    return RejectedError(Rejection.INVALID, message)


def refuse_files(dispatch: Dispatch) -> None:
    """For types without a work directory.

    Raises:
        RejectedError: INVALID; the dispatch brings files, which would silently be nowhere.
    """
    if dispatch.files:
        raise invalid(f"cannot run: a task of type {dispatch.task_type or '?'} takes no files")


def common_environment(dispatch: Dispatch) -> dict[str, str]:
    """The variables that tasks of every type get."""
    return {
        "IDEMPOTENCY_KEY": dispatch.idempotency_key,
        "SHARD_NO": str(dispatch.shard_no),
        "SHARD_TOTAL": str(dispatch.shard_total),
        "SCHEDULE_INSTANCE_ID": dispatch.instance_id,
    }
