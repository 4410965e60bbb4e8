"""A task's story for its operator: what happened to it, and what it waits for now. Pure texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from stockade.supervisor.executor import Executor
from stockade.supervisor.journal_rows import Row
from stockade.supervisor.live_task import LiveTask, Phase
from stockade.supervisor.states import State


@dataclasses.dataclass(frozen=True, slots=True)
class Chapter:
    """One thing that happened; ``at`` is Unix time in seconds, None when nobody noted it."""

    at: float | None
    text: str


def story(row: Row) -> Iterator[Chapter]:
    """What the journal knows of a task, in order."""
    by = row.dispatch.scheduler or "the configured scheduler"
    yield Chapter(row.accepted_at, f"accepted over {row.dispatch.link or 'no link'} for {by}")
    if row.started_at is not None:
        waited_s = max(0.0, row.started_at - row.accepted_at)
        yield Chapter(row.started_at, f"its turn came, after {waited_s:.1f} s in the queue")
    if row.cancelled:
        yield Chapter(None, "a cancel was asked for")
    if row.outcome is not None:
        code = f" ({row.outcome.error_code})" if row.outcome.error_code else ""
        reason = f": {row.outcome.reason}" if row.outcome.reason else ""
        yield Chapter(row.finished_at, f"ended: {row.outcome.status}{code}{reason}")
    tried = f"{row.attempts} attempts" if row.attempts != 1 else "1 attempt"
    match row.state:
        case State.DELIVERED:
            yield Chapter(row.closed_at, f"its report was delivered, after {tried}")
        case State.DEAD:
            yield Chapter(None, f"its report was refused for good, after {tried}: {row.error}")
        case State.DROPPED:
            yield Chapter(row.closed_at, f"its dead letter was dropped: {row.error}")


def what_it_waits_for(task: LiveTask, executor: Executor) -> str:
    """What has to happen next for a task that has not ended."""
    if task.phase is Phase.ENDED or task.ended.done():
        fault = executor.journal.fault
        return f"its end waits for the journal: {fault}" if fault else "its end is being recorded"
    if task.cancel_reason:
        return "it was asked to end and is given its time to"
    if not executor.spawner.connected.is_set() and task.phase is not Phase.RUNNING:
        return "it waits for a spawner: there is no connection to one"
    match task.phase:
        case Phase.QUEUED:
            running, before = executor.load().running_tasks, executor.turns.before(task)
            return f"it waits for a place: {running} tasks run, {before} wait before it"
        case Phase.RUNNING:
            return f"it runs, as process {task.pid}" if task.pid else "it runs in the worker"
        case _:
            return "it is being started"


def what_becomes_of_its_report(row: Row, trouble: str) -> str:
    """What has to happen next for a task that has ended.

    Args:
        row: the task.
        trouble: why its report is not delivered yet, as far as the reporter knows.
    """
    match row.state:
        case State.FINISHED:
            return f"its report is owed: {trouble or 'it waits for its turn'}"
        case State.DEAD:
            return "nothing more is sent until you resend it or drop it: stockade deadletters"
        case _:
            return "nothing is owed any more"
