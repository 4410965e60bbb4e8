"""Reading and adding rows of the store, inside a transaction of the caller's."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
import time
from typing import Final

import msgspec

from stockade.supervisor.scheduler.errors import NotFoundError
from stockade.supervisor.scheduler.states import State
from stockade.supervisor.scheduler.tasks import Instance, Submission, Task, new_instance_id

_INSTANCE_COLUMNS: Final = ", ".join(field.name for field in dataclasses.fields(Instance))


def queue_instance(
    connection: sqlite3.Connection, task_id: int, retry_count: int, given: str | None
) -> None:
    """Adds an instance to the queue, under the id ``given`` or a new one."""
    instance_id = given or new_instance_id(task_id, retry_count, time.time_ns())
    connection.execute(
        "INSERT INTO instances (instance_id, task_id, retry_count, state, created_at) "
        "VALUES (?, ?, ?, ?, ?)",
        (instance_id, task_id, retry_count, State.QUEUED, time.time()),
    )


def read_submission(connection: sqlite3.Connection, task_id: int) -> Submission:
    """What was submitted."""
    (text,) = connection.execute(
        "SELECT submission FROM tasks WHERE task_id = ?", (task_id,)
    ).fetchone()
    return msgspec.json.decode(text, type=Submission)


def read_instance(connection: sqlite3.Connection, instance_id: str) -> Instance | None:
    """The instance of this id, None when there is none."""
    row = connection.execute(
        f"SELECT {_INSTANCE_COLUMNS} FROM instances WHERE instance_id = ?", (instance_id,)
    ).fetchone()
    return None if row is None else _from_row(row)


def _from_row(row: sqlite3.Row) -> Instance:
    fields = dict(row)
    fields["state"] = State(fields["state"])
    fields["outcome"] = json.loads(fields["outcome"])
    return Instance(**fields)


def read_task(connection: sqlite3.Connection, task_id: int) -> Task:
    """The task of this number, which exists."""
    created_at, cancel_requested = connection.execute(
        "SELECT created_at, cancel_requested FROM tasks WHERE task_id = ?", (task_id,)
    ).fetchone()
    rows = connection.execute(
        f"SELECT {_INSTANCE_COLUMNS} FROM instances WHERE task_id = ? ORDER BY seq", (task_id,)
    )
    return Task(
        task_id=task_id,
        submission=read_submission(connection, task_id),
        created_at=created_at,
        cancel_requested=bool(cancel_requested),
        instances=tuple(_from_row(row) for row in rows),
    )


def find(connection: sqlite3.Connection, key: str) -> tuple[Task, Instance]:
    """The task, and the instance meant by ``key``: an instance id, or a task's number.

    Raises:
        NotFoundError: there is neither.
    """
    instance = read_instance(connection, key)
    if instance is not None:
        return read_task(connection, instance.task_id), instance
    # 18 digits always fit SQLite's integers; isascii because other scripts have digits too.
    if key.isascii() and key.isdigit() and len(key) <= 18:
        row = connection.execute("SELECT 1 FROM tasks WHERE task_id = ?", (int(key),)).fetchone()
        if row is not None:
            task = read_task(connection, int(key))
            return task, task.current
    raise NotFoundError(
        f"cannot find task {key!r}: no task or instance has this id. See GET /v1/tasks"
    )
