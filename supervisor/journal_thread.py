"""The journal's thread: everything that is queued becomes one transaction and one fsync.

The loop puts operations in a queue and awaits futures. The thread takes all that is there, runs it,
commits, and only then answers, all of it with one call into the loop; while it syncs, the next
group gathers by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import queue
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import msgspec
import structlog

from stockade.supervisor.errors import InvalidTransitionError, JournalError
from stockade.supervisor.journal_file import disk_error, is_damage, open_file, replace_damaged
from stockade.supervisor.journal_salvage import Trust
from stockade.supervisor.journal_store import JournalStore

GROUP_MAX: Final = 512
PROBE_INTERVAL_S: Final = 1.0

_LOG: Final = structlog.get_logger("stockade.journal")
_Result = TypeVar("_Result")
_Future = asyncio.Future[Any]
_Answers = list[tuple[_Future, Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class _Read:
    """An operation that changes nothing."""

    run: Callable[[JournalStore], Any]
    future: _Future


@dataclasses.dataclass(frozen=True, slots=True)
class _Write:
    """An operation that is answered only when it is on disk."""

    run: Callable[[JournalStore], Any]
    future: _Future


@dataclasses.dataclass(frozen=True, slots=True)
class _Close:
    """The last entry of the queue."""

    future: _Future


class GroupCommit:
    """Runs operations on the journal's store, for one event loop.

    Attributes:
        damaged: where a damaged journal was set aside to, last.
        fault: why the last write failed; None while writing works. While it fails the thread
            tries by itself every PROBE_INTERVAL_S: under full load nobody else would.
    """

    def __init__(self, path: Path) -> None:
        self.damaged: Path | None = None
        self.fault: str | None = None
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[_Read | _Write | _Close] = queue.SimpleQueue()
        # Whether it is open is the thread's alone to know and change.
        self._store: JournalStore | None = None
        self._closing: asyncio.Future[None] | None = None
        self._thread: threading.Thread | None = None

    @classmethod
    async def open(cls, path: Path) -> Self:
        """Opens the journal in a thread of its own.

        Raises:
            JournalError: it cannot be opened; the thread is gone.
        """
        commits = cls(path)
        opened = commits._loop.create_future()
        # A daemon: a loop that ends without closing must not keep the process; nothing that was
        # answered is lost by it.
        commits._thread = threading.Thread(
            target=commits._work, args=(opened,), name="stockade-journal", daemon=True
        )
        commits._thread.start()
        await asyncio.shield(opened)
        return commits

    async def read(self, run: Callable[[JournalStore], _Result]) -> _Result:
        """What ``run`` gives, after everything that was asked before it."""
        future: asyncio.Future[_Result] = self._loop.create_future()
        self._submit(_Read(run, future))
        return await future

    async def write(self, run: Callable[[JournalStore], _Result]) -> _Result:
        """What ``run`` gives, once it is on disk.

        ``run`` may be called twice, the first time being undone; it must change nothing but the
        store. Cancelling the call does not undo it.

        Raises:
            JournalError: nothing was changed.
            InvalidTransitionError: the same.
        """
        future: asyncio.Future[_Result] = self._loop.create_future()
        self._submit(_Write(run, future))
        return await future

    async def close(self) -> None:
        """Returns when everything that was asked before is answered and the file is closed."""
        if self._closing is None:
            self._closing = self._loop.create_future()
            self._queue.put(_Close(self._closing))
        await asyncio.shield(self._closing)
        if self._thread is not None:
            self._thread.join()  # to answer was the last that it had to do

    def _submit(self, operation: _Read | _Write) -> None:
        if self._closing is not None:
            raise JournalError(f"cannot use the journal {self._path}: it is closed")
        self._queue.put(operation)

    # Everything below runs in the thread.

    def _work(self, opened: _Future) -> None:
        try:
            self._open()
        except Exception as error:  # noqa: BLE001 - handed to whoever awaits open()
            self._answer([(opened, error)])
            return
        self._answer([(opened, None)])
        closing: _Future | None = None
        while closing is None:
            group, closing = self._gather()
            if group:
                self._answer(self._run(group))
            elif closing is None:
                self._probe()
        if self._store is not None:
            # What was answered is in the WAL, so a failure to fold it into the file loses nothing.
            with contextlib.suppress(sqlite3.Error):
                self._store.close()
        self._answer([(closing, None)])

    def _gather(self) -> tuple[list[_Read | _Write], _Future | None]:
        """All that is queued, waiting for the first; empty when it is time to probe."""
        group: list[_Read | _Write] = []
        try:
            entry = self._queue.get(timeout=PROBE_INTERVAL_S if self.fault else None)
            while not isinstance(entry, _Close):
                group.append(entry)
                if len(group) == GROUP_MAX:
                    return group, None
                entry = self._queue.get_nowait()
        except queue.Empty:
            return group, None
        return group, entry.future

    def _run(self, group: list[_Read | _Write]) -> _Answers:
        try:
            answers = self._transaction(group)
        except Exception as error:  # noqa: BLE001 - handed to whoever awaits
            if len(group) > 1 and self._store is not None and not is_damage(error):
                # One of them may be at fault, or too large for the space that is left.
                return [answer for operation in group for answer in self._run([operation])]
            failure = self._failed(error)
            return [(operation.future, failure) for operation in group]
        return answers

    def _transaction(self, group: list[_Read | _Write]) -> _Answers:
        store = self._store or self._open()
        writes = any(isinstance(operation, _Write) for operation in group)
        answers: _Answers = []
        try:
            if writes:
                store.begin()
            for operation in group:
                try:
                    answers.append((operation.future, operation.run(store)))
                except InvalidTransitionError as error:
                    answers.append((operation.future, error))  # it changed nothing
            if writes:
                store.commit()
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                store.rollback()
            raise
        if writes and self.fault:
            self.fault = None
            _LOG.warning("journal can be written again", path=str(self._path))
        return answers

    def _open(self) -> JournalStore:
        opened = open_file(self._path)
        self.damaged = opened.damaged or self.damaged
        self._store = JournalStore(opened.connection)
        return self._store

    def _failed(self, error: Exception) -> Exception:
        """Notes the fault; the error for the callers. A damaged file is replaced at once."""
        if is_damage(error):
            self._replace()
        if isinstance(error, msgspec.MsgspecError):
            return JournalError(f"cannot read a task of the journal {self._path}: {error}")
        if not isinstance(error, sqlite3.Error | JournalError):
            return error  # the caller's fault, not the disk's
        failure = (
            error if isinstance(error, JournalError) else disk_error("write", self._path, error)
        )
        if not self.fault:
            _LOG.error("journal cannot be written", reason=str(failure))
        self.fault = str(failure)
        return failure

    def _replace(self) -> None:
        if self._store is not None:
            with contextlib.suppress(sqlite3.Error):
                self._store.close()
            self._store = None
        # When this fails too, the next operation opens the file, finds it damaged and tries again.
        with contextlib.suppress(JournalError):
            opened = replace_damaged(self._path, Trust.CURRENT)
            self.damaged = opened.damaged
            self._store = JournalStore(opened.connection)

    def _probe(self) -> None:
        try:
            self._transaction([_Write(JournalStore.probe, self._loop.create_future())])
        except Exception as error:  # noqa: BLE001 - becomes the fault
            self._failed(error)

    def _answer(self, answers: _Answers) -> None:
        # The loop may be closed by now: then nobody waits.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(_resolve, answers)


def _resolve(answers: _Answers) -> None:
    for future, answer in answers:
        if future.done():  # its caller was cancelled
            continue
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
