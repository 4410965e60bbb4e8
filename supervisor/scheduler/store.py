"""What the scheduler knows of tasks, kept in SQLite; every method is one transaction.

Every change of an instance's state goes through `Store.apply`, which asks the table in `states` and
makes the retry, so that no end is ever on disk without the retry that belongs to it.
"""

from __future__ import annotations

import dataclasses
import json
import sqlite3
import time
from collections.abc import Mapping
from typing import Any, Self

import msgspec

from stockade.supervisor.scheduler.database import Database
from stockade.supervisor.scheduler.errors import ConflictError, NotFoundError
from stockade.supervisor.scheduler.rows import (
    find,
    queue_instance,
    read_instance,
    read_submission,
    read_task,
)
from stockade.supervisor.scheduler.schema import prepare
from stockade.supervisor.scheduler.states import TERMINAL, Event, State, next_state
from stockade.supervisor.scheduler.tasks import (
    Instance,
    Submission,
    Task,
    TaskSummary,
    should_retry,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """An instance that was given to a worker and has now to be sent."""

    task_id: int
    submission: Submission
    instance: Instance


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What an event did. ``changed`` is False when the instance had ended before."""

    instance: Instance
    changed: bool
    retried: bool

    @property
    def ended(self) -> bool:
        """The event is what ended the instance."""
        return self.changed and self.instance.state in TERMINAL


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """What comes with an end: texts, times and the extra fields of a terminal report."""

    error_code: str = ""
    error_message: str = ""
    started_at: str | None = None
    finished_at: str | None = None
    outcome: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Store:
    """Tasks and instances. Every method raises StoreError when the disk does not do its part."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @classmethod
    async def open(cls, path: str) -> Self:
        """The store in the file ``path``, made when absent."""
        return cls(await Database.open(path, prepare))

    async def close(self) -> None:
        await self._database.close()

    async def submit(self, submission: Submission) -> tuple[Task, bool]:
        """The task, and whether it is new: a known instance id gives the task that has it.

        Raises:
            ConflictError: the instance id belongs to a task with other contents.
        """

        def operation(connection: sqlite3.Connection) -> tuple[Task, bool]:
            given = submission.instance_id
            known = None if given is None else read_instance(connection, given)
            if known is not None:
                task = read_task(connection, known.task_id)
                if _contents(task.submission) != _contents(submission):
                    raise ConflictError(
                        f"cannot submit instance {given!r}: task {task.task_id} has this id and "
                        "other contents. Leave instance_id out, or send the same contents"
                    )
                return task, False
            now = time.time()
            cursor = connection.execute(
                "INSERT INTO tasks (submission, type, title, created_at) VALUES (?, ?, ?, ?)",
                (
                    msgspec.json.encode(submission).decode(),
                    submission.type,
                    submission.title,
                    now,
                ),
            )
            assert cursor.lastrowid is not None
            queue_instance(connection, cursor.lastrowid, 0, given)
            return read_task(connection, cursor.lastrowid), True

        return await self._database.run(operation)

    async def claim(self, rooms: Mapping[str, int]) -> list[Claim]:
        """Gives queued instances, oldest first, to the workers with the most room.

        One that was sent before goes to the same worker or stays queued.
        """

        def operation(connection: sqlite3.Connection) -> list[Claim]:
            left = {worker_id: room for worker_id, room in rooms.items() if room > 0}
            claims: list[Claim] = []
            rows = connection.execute(
                "SELECT instance_id, worker_id FROM instances WHERE state = ? AND (worker_id = '' "
                "OR worker_id IN (SELECT value FROM json_each(?))) ORDER BY seq LIMIT ?",
                (State.QUEUED, json.dumps(list(left)), sum(left.values())),
            ).fetchall()
            for instance_id, bound_to in rows:
                worker_id = bound_to or max(left, key=left.__getitem__)
                if left.get(worker_id, 0) == 0:
                    continue
                left[worker_id] -= 1
                connection.execute(
                    "UPDATE instances SET state = ?, worker_id = ?, sent_at = ? "
                    "WHERE instance_id = ?",
                    (next_state(State.QUEUED, Event.SEND), worker_id, time.time(), instance_id),
                )
                instance = read_instance(connection, instance_id)
                assert instance is not None
                submission = read_submission(connection, instance.task_id)
                claims.append(
                    Claim(task_id=instance.task_id, submission=submission, instance=instance)
                )
            return claims

        return await self._database.run(operation)

    async def apply(
        self, instance_id: str, event: Event, details: Details | None = None
    ) -> Applied:
        """Takes an event, and queues the retry when the policy asks for one.

        An instance that has ended stays as it is.

        Raises:
            NotFoundError: no instance has this id.
            InvalidTransitionError: the event does not belong in this state.
        """

        def operation(connection: sqlite3.Connection) -> Applied:
            instance = read_instance(connection, instance_id)
            if instance is None:
                raise NotFoundError(f"cannot find instance {instance_id!r}: it is not known here")
            if instance.state in TERMINAL:
                return Applied(instance=instance, changed=False, retried=False)
            state = next_state(instance.state, event)
            told = details or Details()
            instance = dataclasses.replace(
                instance,
                state=state,
                error_code=told.error_code,
                error_message=told.error_message,
                started_at=told.started_at or instance.started_at,
                finished_at=told.finished_at or instance.finished_at,
                ended_at=time.time() if state in TERMINAL else None,
                outcome=dict(told.outcome),
            )
            connection.execute(
                "UPDATE instances SET state = ?, error_code = ?, error_message = ?, "
                "started_at = ?, finished_at = ?, ended_at = ?, outcome = ? WHERE instance_id = ?",
                (
                    instance.state,
                    instance.error_code,
                    instance.error_message,
                    instance.started_at,
                    instance.finished_at,
                    instance.ended_at,
                    json.dumps(instance.outcome),
                    instance_id,
                ),
            )
            retried = _retry(connection, instance, event)
            return Applied(instance=instance, changed=True, retried=retried)

        return await self._database.run(operation)

    async def request_cancel(self, key: str) -> Task:
        """The task to cancel, for which no further retry will be made.

        Raises:
            NotFoundError: as for `find`.
        """

        def operation(connection: sqlite3.Connection) -> Task:
            task, _ = find(connection, key)
            if not task.ended:
                connection.execute(
                    "UPDATE tasks SET cancel_requested = 1 WHERE task_id = ?", (task.task_id,)
                )
            return task

        return await self._database.run(operation)

    async def find(self, key: str) -> tuple[Task, Instance]:
        """The task, and the instance meant by ``key``: an instance id, or a task's number.

        Raises:
            NotFoundError: there is neither.
        """
        return await self._database.run(lambda connection: find(connection, key))

    async def recent(self, limit: int, state: State | None = None) -> list[TaskSummary]:
        """The newest tasks first, those whose current instance is in ``state`` when it is given."""

        def operation(connection: sqlite3.Connection) -> list[TaskSummary]:
            rows = connection.execute(
                "SELECT (SELECT instance_id FROM instances AS first "
                "        WHERE first.task_id = tasks.task_id ORDER BY seq LIMIT 1) AS id, "
                "tasks.task_id, type, title, instance_id, retry_count, state AS status, worker_id, "
                "error_code, substr(error_message, 1, 200) AS error_message, tasks.created_at, "
                "sent_at, ended_at "
                "FROM tasks JOIN instances ON seq = (SELECT max(seq) FROM instances AS newest "
                "                                    WHERE newest.task_id = tasks.task_id) "
                "WHERE ? IS NULL OR state = ? ORDER BY tasks.task_id DESC LIMIT ?",
                (state, state, limit),
            )
            return [TaskSummary(**dict(row)) for row in rows]

        return await self._database.run(operation)

    async def counts(self) -> dict[State, int]:
        """How many instances are in each state."""

        def operation(connection: sqlite3.Connection) -> dict[State, int]:
            rows = connection.execute("SELECT state, count(*) FROM instances GROUP BY state")
            return {State(state): count for state, count in rows}

        return await self._database.run(operation)

    async def remove_ended(self, before: float, limit: int) -> int:
        """Forgets tasks that ended before a Unix time, ``limit`` at most; returns how many."""

        def operation(connection: sqlite3.Connection) -> int:
            marks = ", ".join("?" * len(TERMINAL))
            cursor = connection.execute(
                "DELETE FROM tasks WHERE task_id IN (SELECT task_id FROM instances "
                f"WHERE state IN ({marks}) AND ended_at < ? AND NOT EXISTS (SELECT 1 "
                "FROM instances AS later WHERE later.task_id = instances.task_id "
                "AND later.seq > instances.seq) LIMIT ?)",
                (*TERMINAL, before, limit),
            )
            return cursor.rowcount

        return await self._database.run(operation)


def _retry(connection: sqlite3.Connection, ended: Instance, event: Event) -> bool:
    if ended.state not in TERMINAL:
        return False
    task = read_task(connection, ended.task_id)
    if task.cancel_requested or not should_retry(task.submission, ended, event):
        return False
    queue_instance(connection, ended.task_id, ended.retry_count + 1, None)
    return True


def _contents(submission: Submission) -> Submission:
    return msgspec.structs.replace(submission, instance_id=None)
