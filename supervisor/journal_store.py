"""The journal's SQL, on one connection of one thread.

Nothing here opens or ends a transaction but ``begin``, ``commit`` and ``rollback``: the group
commit puts many of these calls in one. Each change of a task's state is one statement, which names
the states it may come from; only when it changed nothing is the row read, to say why.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any, Final

from stockade.supervisor.errors import InvalidTransitionError, JournalError
from stockade.supervisor.journal_history import JournalHistory
from stockade.supervisor.journal_rows import COLUMNS, Accepted, Encoded, Row, decode_row, quoted
from stockade.supervisor.states import (
    UNFINISHED,
    Event,
    State,
    next_state,
    sources,
    target,
)

PROBE_BYTES: Final = 64 * 1024


def _move(event: Event, assignments: str = "") -> str:
    return (
        f"UPDATE tasks SET state = '{target(event)}'{assignments}"
        f" WHERE seq = ? AND state IN ({quoted(sources(event))})"
    )


_MOVES: Final[dict[Event, str]] = {
    Event.START: _move(Event.START, ", started_at = ?"),
    Event.REQUEUE: _move(Event.REQUEUE, ", started_at = NULL"),
    Event.END: _move(Event.END, ", finished_at = ?, outcome = ?, excerpt = ?, stored_bytes = ?"),
    Event.DELIVER: _move(Event.DELIVER, ", closed_at = ?, attempts = attempts + ?"),
    Event.REFUSE: _move(Event.REFUSE, ", error = ?, attempts = attempts + ?"),
    Event.RESEND: _move(Event.RESEND),
    Event.DROP: _move(Event.DROP, ", closed_at = ?"),
}

_UNFINISHED: Final = quoted(UNFINISHED)
_PREFIXED: Final = ", ".join(f"tasks.{name.strip()}" for name in COLUMNS.split(","))
_WITH_WHOLE: Final = (
    f"SELECT {_PREFIXED}, payloads.dispatch FROM tasks LEFT JOIN payloads USING (seq)"
)


class JournalStore:
    """Every read and write of the journal, one method each."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._execute: Callable[..., sqlite3.Cursor] = connection.execute
        self.history = JournalHistory(connection)
        # False only when the table of cancels is surely empty: then a dispatch need not look.
        self._cancels_possible = (
            self._execute("SELECT 1 FROM cancels LIMIT 1").fetchone() is not None
        )

    def begin(self) -> None:
        """Opens a transaction for writing."""
        self._execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        """Returns when everything since ``begin`` is on disk."""
        self._execute("COMMIT")

    def rollback(self) -> None:
        """Undoes everything since ``begin``; SQLite may have done so already."""
        if self._connection.in_transaction:
            self._execute("ROLLBACK")

    def close(self) -> None:
        """Ends the connection; SQLite then empties the WAL into the file."""
        self._connection.close()

    def accept(self, encoded: Encoded, initial: State, now: float) -> Accepted:
        """Adds the task, or finds the row that is there already."""
        dispatch = encoded.dispatch
        cancelled = self._cancels_possible and self._is_cancel_remembered(dispatch.instance_id)
        state = State.ACCEPTED if cancelled else initial
        started_at = now if state is State.RUNNING else None
        cursor = self._execute(
            "INSERT INTO tasks (state, scheduler, instance_id, accepted_at, started_at, cancelled,"
            " dispatch) VALUES (?, ?, ?, ?, ?, ?, ?)"
            " ON CONFLICT (instance_id, scheduler) DO NOTHING",
            (
                str(state),
                dispatch.scheduler,
                dispatch.instance_id,
                now,
                started_at,
                int(cancelled),
                encoded.inline,
            ),
        )
        if cursor.rowcount != 1:
            existing = self._execute(
                f"SELECT {COLUMNS} FROM tasks WHERE instance_id = ? AND scheduler = ?",
                (dispatch.instance_id, dispatch.scheduler),
            ).fetchone()
            return Accepted(decode_row(existing), is_new=False, cancelled_before=False)
        seq = cursor.lastrowid
        if seq is None:  # pragma: no cover - one row was inserted
            raise JournalError("cannot accept a task: the journal gave it no number")
        if encoded.whole is not None:
            self._execute("INSERT INTO payloads VALUES (?, ?)", (seq, encoded.whole))
        if cancelled:
            self._execute("DELETE FROM cancels WHERE instance_id = ?", (dispatch.instance_id,))
        row = Row(
            seq=seq,
            dispatch=dispatch,
            state=state,
            accepted_at=now,
            started_at=started_at,
            cancelled=cancelled,
        )
        return Accepted(row, is_new=True, cancelled_before=cancelled)

    def move(self, event: Event, seq: int, values: tuple[Any, ...]) -> None:
        """One event of one task; ``values`` are what the event's statement sets, in its order.

        Raises:
            InvalidTransitionError: nothing was changed.
        """
        if self._execute(_MOVES[event], (*values, seq)).rowcount == 1:
            return
        found = self._execute("SELECT state FROM tasks WHERE seq = ?", (seq,)).fetchone()
        if found is None:
            raise InvalidTransitionError(f"cannot {event} task {seq}: the journal has no such task")
        next_state(State(found[0]), event)
        raise JournalError(f"cannot {event} task {seq}: its row did not change")  # pragma: no cover

    def row(self, seq: int) -> Row | None:
        """The task with its whole dispatch; from the history, a summary."""
        found = self._execute(f"{_WITH_WHOLE} WHERE tasks.seq = ?", (seq,)).fetchone()
        if found is not None:
            return decode_row(found[:-1], found[-1])
        found = self._execute(f"SELECT {COLUMNS} FROM history WHERE seq = ?", (seq,)).fetchone()
        return None if found is None else decode_row(found)

    def find(self, instance_id: str) -> list[Row]:
        """Every task of that id, of any scheduler, live or in the history, oldest first."""
        rows = [
            decode_row(values)
            for table in ("history", "tasks")
            for values in self._execute(
                f"SELECT {COLUMNS} FROM {table} WHERE instance_id = ?", (instance_id,)
            )
        ]
        return sorted(rows, key=lambda row: row.seq)

    def unfinished(self) -> list[Row]:
        """Every task that has not ended, oldest first, dispatch whole."""
        rows = [
            decode_row(values[:-1], values[-1])
            for values in self._execute(f"{_WITH_WHOLE} WHERE tasks.state IN ({_UNFINISHED})")
        ]
        return sorted(rows, key=lambda row: row.seq)

    def seqs(self, state: State) -> list[int]:
        """The numbers of the tasks in that state, oldest first."""
        found = self._execute("SELECT seq FROM tasks WHERE state = ?", (str(state),))
        return sorted(seq for (seq,) in found)

    def in_state(self, state: State, limit: int) -> list[Row]:
        """Tasks in that state, oldest first."""
        found = self._execute(
            f"SELECT {COLUMNS} FROM tasks WHERE state = ? ORDER BY closed_at, seq LIMIT ?",
            (str(state), limit),
        )
        return [decode_row(values) for values in found]

    def recent(self, limit: int, before_seq: int | None) -> list[Row]:
        """The newest tasks, live or in the history, newest first."""
        below = before_seq if before_seq is not None else 2**63 - 1
        rows = [
            decode_row(values)
            for table in ("tasks", "history")
            for values in self._execute(
                f"SELECT {COLUMNS} FROM {table} WHERE seq < ? ORDER BY seq DESC LIMIT ?",
                (below, limit),
            )
        ]
        rows.sort(key=lambda row: row.seq, reverse=True)
        return rows[:limit]

    def mark_cancelled(self, seq: int) -> bool:
        """Notes the wish to cancel; whether the task had not ended yet."""
        cursor = self._execute(
            f"UPDATE tasks SET cancelled = 1 WHERE seq = ? AND state IN ({_UNFINISHED})", (seq,)
        )
        return cursor.rowcount == 1

    def remember_cancel(self, instance_id: str, now: float) -> None:
        """The next dispatch of that id is cancelled before it starts."""
        self._cancels_possible = True
        self._execute("INSERT OR REPLACE INTO cancels VALUES (?, ?)", (instance_id, now))

    def cancel(self, instance_id: str, now: float) -> list[Row]:
        """Marks what has not ended of that id; remembers the cancel when the id is unknown."""
        rows = self.find(instance_id)
        if not rows:
            self.remember_cancel(instance_id, now)
        for row in rows:
            self.mark_cancelled(row.seq)
        return self.find(instance_id)

    def meta(self, key: str) -> str | None:
        """What ``set_meta`` stored last, or None."""
        found = self._execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if found is None else found[0]

    def set_meta(self, key: str, value: str) -> None:
        """Stores one text under a key of the supervisor's."""
        self._execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def probe(self) -> None:
        """Writes about as much as a task needs, so that a success means that work can go on."""
        self._execute("INSERT OR REPLACE INTO meta VALUES ('.probe', zeroblob(?))", (PROBE_BYTES,))

    def expire_cancels(self, asked_before: float) -> None:
        """Forgets the cancels whose dispatch did not come."""
        if self._cancels_possible:
            self._execute("DELETE FROM cancels WHERE asked_at <= ?", (asked_before,))

    def unknown(self, seqs: list[int]) -> list[int]:
        """Those of ``seqs`` that no row has."""
        query = (
            "SELECT EXISTS (SELECT 1 FROM tasks WHERE seq = :seq)"
            " OR EXISTS (SELECT 1 FROM history WHERE seq = :seq)"
        )
        return [seq for seq in seqs if not self._execute(query, {"seq": seq}).fetchone()[0]]

    def _is_cancel_remembered(self, instance_id: str) -> bool:
        found = self._execute("SELECT 1 FROM cancels WHERE instance_id = ?", (instance_id,))
        return found.fetchone() is not None
