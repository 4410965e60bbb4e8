"""One SQLite file, one thread, grouped commits.

Everything that waits when the thread is free goes into one transaction and shares its fsync. Each
operation has a savepoint of its own: one that fails takes nothing else with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Self, TypeVar

from stockade.supervisor.scheduler.errors import StoreError

T = TypeVar("T")

Operation = Callable[[sqlite3.Connection], T]

_GROUP_MAX: Final = 500


class _Waiting(NamedTuple):
    operation: Operation[Any]
    future: asyncio.Future[Any]


class Database:
    """Runs operations one after another, and answers each only after its commit."""

    def __init__(self, path: str, loop: asyncio.AbstractEventLoop) -> None:
        self._path = path
        self._loop = loop
        self._waiting: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="scheduler-store", daemon=True)
        self._closed = False

    @classmethod
    async def open(cls, path: str, prepare: Operation[None]) -> Self:
        """An open database, on which ``prepare`` (schema, migration) has run.

        Raises:
            StoreError: the file cannot be opened or is not a database of ours.
        """
        database = cls(path, asyncio.get_running_loop())
        database._thread.start()
        try:
            await database.run(prepare)
        except BaseException:
            await database.close()
            raise
        return database

    async def run(self, operation: Operation[T]) -> T:
        """What the operation returns or raises; when this returns, its writes are on disk.

        Raises:
            StoreError: SQLite could not do it, and nothing of it was done.
        """
        if self._closed:
            raise StoreError("cannot use the scheduler's store: it is closed")
        future: asyncio.Future[T] = self._loop.create_future()
        self._waiting.put(_Waiting(operation, future))
        return await future

    async def close(self) -> None:
        """Returns when everything asked before is committed and the file is closed."""
        if not self._closed:
            self._closed = True
            self._waiting.put(None)
        await asyncio.to_thread(self._thread.join)

    def _serve(self) -> None:
        connection: sqlite3.Connection | None = None
        last = False
        while not last:
            group, last = self._next_group()
            try:
                if connection is None:
                    connection = _connect(self._path)
                results = _run_group(connection, group)
            except sqlite3.Error as error:
                failure = StoreError(
                    f"cannot use {self._path}: {error}. Nothing was changed; "
                    "look at the disk's space and the file's owner"
                )
                results = [failure] * len(group)
            for waiting, result in zip(group, results, strict=True):
                # The loop is gone only when its owner did not close us: nobody waits any more.
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(_complete, waiting.future, result)
        if connection is not None:
            connection.close()

    def _next_group(self) -> tuple[list[_Waiting], bool]:
        group: list[_Waiting] = []
        waiting = self._waiting.get()
        while waiting is not None:
            group.append(waiting)
            if len(group) == _GROUP_MAX:
                return group, False
            try:
                waiting = self._waiting.get_nowait()
            except queue.Empty:
                return group, False
        return group, True


class _Result(NamedTuple):
    value: Any


def _connect(path: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, timeout=5.0)
    try:
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA journal_mode = WAL")
        # FULL: a report is answered once, and then the worker forgets it.
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _run_group(connection: sqlite3.Connection, group: list[_Waiting]) -> list[_Result | Exception]:
    """One transaction for the group. Raises sqlite3.Error when the whole of it failed."""
    if not group:
        return []
    results: list[_Result | Exception] = []
    connection.execute("BEGIN IMMEDIATE")
    try:
        for waiting in group:
            connection.execute("SAVEPOINT operation")
            try:
                results.append(_Result(waiting.operation(connection)))
            except Exception as error:  # the caller's, whose future gets it
                # A full disk may have rolled the whole transaction back already.
                if not connection.in_transaction:
                    raise sqlite3.OperationalError(str(error)) from error
                connection.execute("ROLLBACK TO operation")
                results.append(_translated(error))
            connection.execute("RELEASE operation")
        connection.execute("COMMIT")
    except sqlite3.Error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return results


def _translated(error: Exception) -> Exception:
    if not isinstance(error, sqlite3.Error):
        return error
    translated = StoreError(f"cannot use the scheduler's store: {error}")
    translated.__cause__ = error
    return translated


def _complete(future: asyncio.Future[Any], result: _Result | Exception) -> None:
    if future.done():
        return
    if isinstance(result, _Result):
        future.set_result(result.value)
    else:
        future.set_exception(result)
