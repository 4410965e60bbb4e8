"""The journal's file: created, checked, brought up to date, and set aside when it is damaged.

A damaged journal is renamed to ``journal.db.damaged-TIME`` (with its -wal) and never deleted. What
can still be read of its live tasks goes into the fresh one under the same seq (journal_salvage.py).

A seq names an output file and a spawner's record, both of which outlive the journal. So a fresh
journal does not begin at 1 but at the microseconds since 1970: a journal uses up fewer numbers than
the microseconds it lives for, so the next one begins above it, with nothing to remember elsewhere.
"""

from __future__ import annotations

import dataclasses
import os
import sqlite3
import struct
import time
from pathlib import Path
from typing import Final

import msgspec

from stockade.supervisor.errors import JournalError
from stockade.supervisor.journal_rows import COLUMNS, decode_row, quoted
from stockade.supervisor.journal_salvage import Trust, salvage
from stockade.supervisor.states import TERMINAL, State

SCHEMA_VERSION: Final = 1
APPLICATION_ID: Final = 0x53744B64  # "StKd": tells our file from another program's database

# Up to this size the whole file is checked at start; past it only what is alive is: a million
# delivered rows would hold the start up for seconds.
FULL_CHECK_BYTES: Final = 64 * 1024 * 1024
CHECKED_TABLES: Final = ("cancels", "meta")

_TASK_COLUMNS: Final = """
    state TEXT NOT NULL,
    scheduler TEXT NOT NULL,
    instance_id TEXT NOT NULL,
    accepted_at REAL NOT NULL,
    started_at REAL,
    finished_at REAL,
    closed_at REAL,
    outcome BLOB,
    excerpt TEXT NOT NULL DEFAULT '',
    attempts INTEGER NOT NULL DEFAULT 0,
    cancelled INTEGER NOT NULL DEFAULT 0,
    error TEXT NOT NULL DEFAULT '',
    stored_bytes INTEGER NOT NULL DEFAULT 0,
    dispatch BLOB NOT NULL
"""

# One entry a version: MIGRATIONS[n] brings user_version n to n + 1.
MIGRATIONS: Final[tuple[tuple[str, ...], ...]] = (
    (
        # The instance id leads the duplicate check's index, so that it serves look-ups by id too.
        f"CREATE TABLE tasks (seq INTEGER PRIMARY KEY AUTOINCREMENT, {_TASK_COLUMNS},"
        " UNIQUE (instance_id, scheduler))",
        "CREATE INDEX tasks_state ON tasks (state, closed_at)",
        "CREATE TABLE payloads (seq INTEGER PRIMARY KEY, dispatch BLOB NOT NULL)",
        "CREATE TABLE cancels (instance_id TEXT PRIMARY KEY, asked_at REAL NOT NULL) WITHOUT ROWID",
        f"CREATE TABLE history (seq INTEGER PRIMARY KEY, {_TASK_COLUMNS}, bytes INTEGER NOT NULL)",
        "CREATE INDEX history_instance ON history (instance_id)",
        "CREATE INDEX history_closed ON history (closed_at)",
        "CREATE TABLE discarded (seq INTEGER PRIMARY KEY)",
        "CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID",
    ),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Opened:
    """A journal ready for use, and where the one that was damaged went."""

    connection: sqlite3.Connection
    damaged: Path | None


class _DamagedError(Exception):
    """The file is not a journal that can be used; it goes aside."""


def open_file(path: Path) -> Opened:
    """The journal at ``path``: the one that is there, brought up to date, or a fresh one.

    Blocks on the disk. The connection belongs to the calling thread.

    Raises:
        JournalError: the place cannot be read or written, a newer Stockade or another program
            wrote the file, or another process has it open.
    """
    try:
        return Opened(_connect(path), None)
    except _DamagedError:
        return replace_damaged(path, Trust.STALE)


def replace_damaged(path: Path, trust: Trust) -> Opened:
    """Sets the file at ``path`` aside and opens a fresh one, with what can be saved of the old.

    Raises:
        JournalError: the file cannot be renamed, or no fresh one can be made.
    """
    aside = _set_aside(path)
    try:
        connection = _connect(path)
    except _DamagedError as error:  # pragma: no cover - a fresh file that reads back wrong
        raise JournalError(f"cannot create the journal {path}: {error}") from error
    try:
        salvage(aside, connection, trust)
    except sqlite3.Error as error:
        connection.close()
        raise disk_error("copy the damaged journal to", path, error) from error
    return Opened(connection, aside)


def is_damage(error: BaseException) -> bool:
    """Whether SQLite says that the file itself is wrong, not the disk or the caller."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


def disk_error(verb: str, path: Path, error: Exception) -> JournalError:
    """The error for a caller, with the hint that mends it."""
    name = getattr(error, "sqlite_errorname", None) or type(error).__name__
    hint = "check the disk and the kernel's log"
    if name.startswith("SQLITE_FULL") or name == "SQLITE_IOERR_WRITE":
        hint = "free space on its file system, or raise the quota or file size limit"
    elif name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
        hint = "make the file system writable and the file owned by the worker's user"
    elif name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        hint = "another process has it open: give each worker a state_dir of its own"
    return JournalError(f"cannot {verb} the journal {path}: {error} ({name}); {hint}")


def _connect(path: Path) -> sqlite3.Connection:
    _create(path)
    if _is_truncated(path):
        raise _DamagedError("it is shorter than its header says")
    # The statement cache holds every statement of journal_store.py.
    connection = sqlite3.connect(
        path, timeout=0.0, isolation_level=None, cached_statements=256, check_same_thread=True
    )
    try:
        # Exclusive: the index of the WAL then lives in our memory, not in a mapped -shm file, so a
        # full disk cannot fault it, and a second worker is refused.
        connection.execute("PRAGMA locking_mode=EXCLUSIVE")
        (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
        if mode != "wal":
            raise JournalError(f"cannot open the journal {path}: no write-ahead log here ({mode})")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA wal_autocheckpoint=2000")
        connection.execute(f"PRAGMA journal_size_limit={16 * 1024 * 1024}")
        connection.execute("PRAGMA temp_store=MEMORY")
        connection.execute("PRAGMA cache_size=-8192")
        _migrate(connection, path)
        _check(connection, path)
    except sqlite3.Error as error:
        connection.close()
        if is_damage(error):
            raise _DamagedError(str(error)) from error
        raise disk_error("open", path, error) from error
    except BaseException:
        connection.close()
        raise
    return connection


def _create(path: Path) -> None:
    """Makes the file when it is absent: for its owner alone, its name safe on disk."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        os.close(descriptor)
        _sync_directory(path.parent)
    except OSError as error:
        raise JournalError(
            f"cannot open the journal {path}: {error.strerror}; "
            "its directory must exist and be writable for the worker's user"
        ) from error


def _is_truncated(path: Path) -> bool:
    """Whether the file is shorter than it says; SQLite would see it only when it gets there."""
    wal = path.with_name(path.name + "-wal")
    try:
        wal_bytes = wal.stat().st_size
    except FileNotFoundError:
        wal_bytes = 0
    with path.open("rb", buffering=0) as file:
        header = file.read(100)
        size = os.fstat(file.fileno()).st_size
    if not size:
        # SQLite would take the file for new and throw the WAL away.
        return wal_bytes > 0
    if wal_bytes or len(header) < 100 or not header.startswith(b"SQLite format 3\0"):
        return False  # the WAL may complete it; the rest is for SQLite to judge
    (page_bytes,) = struct.unpack_from(">H", header, 16)
    changes, pages = struct.unpack_from(">II", header, 24)
    (pages_valid_for,) = struct.unpack_from(">I", header, 92)
    page_bytes = 65536 if page_bytes == 1 else page_bytes
    whole = int(pages) * int(page_bytes)
    return bool(changes == pages_valid_for and size < whole)


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if tables and application != APPLICATION_ID:
        raise JournalError(
            f"cannot open the journal {path}: it is another program's database; move it away"
        )
    if version > SCHEMA_VERSION:
        raise JournalError(
            f"cannot open the journal {path}: a newer Stockade wrote it (version {version}, this "
            f"one knows {SCHEMA_VERSION}); install that Stockade again, or move the file away"
        )
    if version == SCHEMA_VERSION:
        return
    # All in one transaction: a crash leaves the old version or the new one.
    connection.execute("BEGIN IMMEDIATE")
    for step in range(version, SCHEMA_VERSION):
        for statement in MIGRATIONS[step]:
            connection.execute(statement)
    if version == 0:
        seed = time.time_ns() // 1000
        connection.execute("INSERT INTO sqlite_sequence (name, seq) VALUES ('tasks', ?)", (seed,))
        connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
    connection.execute("COMMIT")


def _check(connection: sqlite3.Connection, path: Path) -> None:
    if path.stat().st_size <= FULL_CHECK_BYTES:
        checks = ["PRAGMA quick_check(1)"]
    else:
        checks = [f"PRAGMA quick_check({table})" for table in CHECKED_TABLES]
    for check in checks:
        (finding,) = connection.execute(check).fetchone()
        if finding != "ok":
            raise _DamagedError(finding)
    # However small it is: SQLite has no checksums, and finds no fault with what a row holds.
    _read_live_rows(connection)


def _read_live_rows(connection: sqlite3.Connection) -> None:
    """Reads every task that has not come to its end, whole: SQLite says when a page is wrong."""
    for state in sorted(frozenset(State) - TERMINAL):
        # Each state by the index; NOT IN would walk through all the others.
        for values in connection.execute(
            f"SELECT {COLUMNS} FROM tasks WHERE state = ?", (str(state),)
        ):
            try:
                decode_row(values)
            except (msgspec.MsgspecError, ValueError, TypeError) as error:
                raise _DamagedError(f"task {values[0]} cannot be read: {error}") from error
    connection.execute(
        "SELECT sum(length(payloads.dispatch)) FROM payloads JOIN tasks USING (seq)"
        f" WHERE tasks.state IN ({quoted(frozenset(State) - TERMINAL)})"
    ).fetchone()


def _set_aside(path: Path) -> Path:
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    aside = path.with_name(f"{path.name}.damaged-{stamp}")
    attempt = 1
    while aside.exists():
        attempt += 1
        aside = path.with_name(f"{path.name}.damaged-{stamp}.{attempt}")
    try:
        # The WAL goes first: it must never be taken for the fresh file's.
        for suffix in ("-wal", "-shm", ""):
            source = path.with_name(path.name + suffix)
            if source.exists():
                os.rename(source, aside.with_name(aside.name + suffix))
        _sync_directory(path.parent)
    except OSError as error:
        raise JournalError(
            f"cannot set the damaged journal {path} aside: {error.strerror}; "
            "make its directory writable for the worker's user"
        ) from error
    return aside


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
