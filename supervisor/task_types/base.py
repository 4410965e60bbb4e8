"""What a task type is: a class that turns a dispatch into a plan."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Awaitable, Callable
from typing import ClassVar

from stockade.sandbox.outcome import Outcome
from stockade.supervisor.dispatch import Dispatch
from stockade.supervisor.process_plan import ProcessPlan

OutputWriter = Callable[[bytes], None]


@dataclasses.dataclass(frozen=True, slots=True)
class LoopPlan:
    """A task that needs no slot and runs in the supervisor's loop.

    Attributes:
        run: does it, handing output over as it comes. Its deadline and its cancel arrive as the
            cancellation of the coroutine; times and output fields of the outcome are filled in by
            the executor.
    """

    run: Callable[[OutputWriter], Awaitable[Outcome]]


Plan = ProcessPlan | LoopPlan


class TaskType(abc.ABC):
    """One kind of task.

    Attributes:
        name: as in a dispatch's ``task_type``, lower case.
    """

    name: ClassVar[str]

    @abc.abstractmethod
    def plan(self, dispatch: Dispatch) -> Plan:
        """How to run this dispatch. Pure, quick, and may be called more than once.

        Raises:
            RejectedError: INVALID; the dispatch's fields make no task of this type. It is reported
                as failed with ``invalid_request``.
        """

    async def close(self) -> None:  # noqa: B027 -- most hold nothing open
        """Let go of what the type holds open; called once, when no task of it runs."""


def common_environment(dispatch: Dispatch) -> dict[str, str]:
    """The variables that tasks of every type get."""
    return {
        "IDEMPOTENCY_KEY": dispatch.idempotency_key,
        "SHARD_NO": str(dispatch.shard_no),
        "SHARD_TOTAL": str(dispatch.shard_total),
        "SCHEDULE_INSTANCE_ID": dispatch.instance_id,
    }
