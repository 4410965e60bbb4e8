"""The store's tables, and what opening an existing store does to them."""

from __future__ import annotations

import sqlite3
from typing import Final

from stockade.supervisor.scheduler.errors import StoreError
from stockade.supervisor.scheduler.states import Event, State, next_state

SCHEMA_VERSION: Final = 1

_TABLES: Final = """
CREATE TABLE tasks (
    task_id INTEGER PRIMARY KEY AUTOINCREMENT,
    submission TEXT NOT NULL,
    type TEXT NOT NULL,
    title TEXT NOT NULL,
    created_at REAL NOT NULL,
    cancel_requested INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE instances (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    instance_id TEXT NOT NULL UNIQUE,
    task_id INTEGER NOT NULL REFERENCES tasks ON DELETE CASCADE,
    retry_count INTEGER NOT NULL,
    state TEXT NOT NULL,
    worker_id TEXT NOT NULL DEFAULT '',
    error_code TEXT NOT NULL DEFAULT '',
    error_message TEXT NOT NULL DEFAULT '',
    created_at REAL NOT NULL,
    sent_at REAL,
    ended_at REAL,
    started_at TEXT,
    finished_at TEXT,
    outcome TEXT NOT NULL DEFAULT '{}'
);
CREATE INDEX instances_by_state ON instances (state, seq);
CREATE INDEX instances_by_task ON instances (task_id, seq);
"""


def prepare(connection: sqlite3.Connection) -> None:
    """Makes the tables of a new store, and puts interrupted dispatches back into the queue.

    They keep their worker: it may have the task already, and takes the same id only once, while any
    other worker would run a second copy.

    Raises:
        StoreError: the store was written by a newer version.
    """
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"cannot open the scheduler's store: it has version {version}, and this Stockade "
            f"knows {SCHEMA_VERSION}. Install the newer Stockade, or name another --state-dir"
        )
    if version == 0:
        for statement in filter(str.strip, _TABLES.split(";")):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    connection.execute(
        "UPDATE instances SET state = ? WHERE state = ?",
        (next_state(State.SENDING, Event.RECOVER), State.SENDING),
    )
