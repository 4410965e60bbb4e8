"""What can still be read of a damaged journal, copied into a fresh one under the same seq.

Only live rows matter: tasks that have not ended and reports that were not delivered. The history
stays in the file that was set aside.
"""

from __future__ import annotations

import enum
import sqlite3
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from stockade.supervisor.journal_rows import COLUMNS, decode_row
from stockade.supervisor.states import State


class Trust(enum.Enum):
    """How far the states in the damaged file can be believed.

    CURRENT: this process wrote them. STALE: found at start, the last commits may be missing; then
    a task that reads as accepted may have run, so it is taken for running, and whoever reconciles
    with the spawner adopts it or reports it lost. It never runs twice.
    """

    CURRENT = "current"
    STALE = "stale"


_NAMES: Final = tuple(name.strip() for name in COLUMNS.split(","))
_INSERT: Final = (
    f"INSERT OR IGNORE INTO tasks ({COLUMNS}, scheduler, instance_id)"
    f" VALUES ({', '.join('?' * (len(_NAMES) + 2))})"
)


def salvage(damaged: Path, connection: sqlite3.Connection, trust: Trust) -> None:
    """Copies every live row that can be read, in one transaction.

    Raises:
        sqlite3.Error: the fresh journal cannot be written.
    """
    connection.execute("BEGIN IMMEDIATE")
    for values, whole in _readable_rows(damaged):
        try:
            row = decode_row(values)
        except (msgspec.MsgspecError, ValueError, TypeError):
            continue
        state = row.state
        if trust is Trust.STALE and state is State.ACCEPTED:
            state = State.RUNNING
        written = (values[0], str(state), *values[2:])
        cursor = connection.execute(
            _INSERT, (*written, row.dispatch.scheduler, row.dispatch.instance_id)
        )
        # The scan from the other end meets what the first one has copied.
        if cursor.rowcount == 1 and whole is not None:
            connection.execute("INSERT INTO payloads VALUES (?, ?)", (row.seq, whole))
    connection.execute("COMMIT")


def _readable_rows(damaged: Path) -> Iterator[tuple[tuple[Any, ...], bytes | None]]:
    """Every row that a scan from either end reaches, with its whole dispatch where that is apart.

    A scan stops at the first page that is wrong; the one from the other end gets what lies behind.
    What is apart is read through a connection of its own: an error of one statement makes SQLite
    begin another one's scan anew, and it would never end.
    Read-only, so the damaged file and its log stay as they were found; SQLite then needs a -shm
    file beside them, and makes an empty log where there is none.
    """
    if not damaged.stat().st_size:
        return  # beside an empty file SQLite deletes the log, even when it may only read
    try:
        source, beside = _connect(damaged), _connect(damaged)
    except sqlite3.Error:
        return
    try:
        for order in ("ASC", "DESC"):
            try:
                for values in source.execute(
                    f"SELECT {COLUMNS} FROM tasks NOT INDEXED ORDER BY seq {order}"
                ):
                    yield values, _whole_dispatch(beside, values[0])
            except sqlite3.Error:
                continue
    finally:
        source.close()
        beside.close()
        damaged.with_name(damaged.name + "-shm").unlink(missing_ok=True)
        log = damaged.with_name(damaged.name + "-wal")
        if log.exists() and not log.stat().st_size:
            log.unlink()


def _connect(damaged: Path) -> sqlite3.Connection:
    uri = f"file:{urllib.parse.quote(str(damaged))}?mode=ro"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None)
    # Without this SQLite does not even open a file that is shorter than its header says.
    connection.execute("PRAGMA writable_schema=ON")
    return connection


def _whole_dispatch(source: sqlite3.Connection, seq: Any) -> bytes | None:
    try:
        found = source.execute("SELECT dispatch FROM payloads WHERE seq = ?", (seq,)).fetchone()
    except sqlite3.Error:
        return None
    return None if found is None else found[0]
