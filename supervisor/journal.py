"""The journal: the duplicate check, the record of what runs, and the buffer of undelivered reports.

One SQLite file holds one row a task.

The event loop never waits for the disk. Each call here puts an operation in a queue and awaits a
future; the journal's one thread takes everything that is queued, runs it in one transaction, and
answers all of it after one fsync. While it syncs, the next group gathers by itself.

An operation that the disk refuses raises JournalError and has changed nothing. The group is then
tried again one by one, so that one operation too large for what is left does not fail the others.
Until a write succeeds, ``fault`` says why, and the thread tries by itself every second.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self, TypeVar

from stockade.sandbox.outcome import Outcome
from stockade.supervisor.dispatch import Dispatch
from stockade.supervisor.errors import InvalidTransitionError, JournalError
from stockade.supervisor.journal_history import SWEEP_CHUNK
from stockade.supervisor.journal_rows import (
    Accepted,
    Row,
    clean_text,
    encode_dispatch,
    encode_outcome,
)
from stockade.supervisor.journal_store import JournalStore
from stockade.supervisor.journal_thread import GroupCommit
from stockade.supervisor.states import Event, State

__all__ = ["Accepted", "Journal", "Row"]

DISCARDED_MAX: Final = 10_000
HISTORY_BYTES: Final = 1024 * 1024 * 1024

_Result = TypeVar("_Result")


class Journal:
    """The journal of one worker, for the event loop that opened it."""

    def __init__(self, commits: GroupCommit, wall: Callable[[], float], latest: float) -> None:
        self._commits = commits
        self._wall = wall
        self._clock = _steady_clock(max(wall(), latest))
        self._told_discarded: list[int] = []

    @classmethod
    async def open(cls, path: Path, *, clock: Callable[[], float] = time.time) -> Self:
        """Opens the journal at ``path``, makes a fresh one, or sets a damaged one aside first.

        Args:
            path: the file; its directory must exist.
            clock: the wall clock, which gives the stamps in a row. The age of a row is reckoned
                from it only here: from then on ages are counted on the monotonic clock.

        Raises:
            JournalError: the place cannot be written, or the file is another's.
        """
        commits = await GroupCommit.open(path)
        latest = await commits.read(lambda store: store.history.latest_closed_at())
        return cls(commits, clock, latest)

    @property
    def damaged(self) -> Path | None:
        """Where a damaged journal was set aside to, last; None when that did not happen."""
        return self._commits.damaged

    @property
    def fault(self) -> str | None:
        """Why the last write failed; None while the journal can be written."""
        return self._commits.fault

    async def accept(self, dispatch: Dispatch, *, initial: State = State.ACCEPTED) -> Accepted:
        """Returns when the task is on disk, or with the row that a duplicate finds.

        Args:
            dispatch: what to run.
            initial: ACCEPTED, or RUNNING for a task that can start at once: one commit, not two.

        Raises:
            JournalError: it cannot be journalled, so it must not be answered as accepted.
        """
        if initial not in {State.ACCEPTED, State.RUNNING}:
            raise InvalidTransitionError(f"cannot accept a task as {initial}")
        try:
            encoded = encode_dispatch(dispatch)
        except UnicodeEncodeError as error:
            raise JournalError(f"cannot journal a dispatch: {error}") from error
        return await self._write(lambda store: store.accept(encoded, initial, self._wall()))

    async def start(self, seq: int) -> None:
        """The task is about to be started: journalled before the spawner is asked."""
        await self._move(Event.START, seq, self._wall())

    async def requeue(self, seq: int) -> None:
        """The task was journalled running and, as the spawner proves, never began."""
        await self._move(Event.REQUEUE, seq)

    async def finish(self, seq: int, outcome: Outcome, excerpt: str, stored_bytes: int = 0) -> None:
        """The task ended; from here on its report is owed.

        Args:
            seq: the task.
            outcome: how it ended.
            excerpt: the part of its output that the report carries.
            stored_bytes: what its output takes on disk, for the history's size limit.

        Raises:
            InvalidTransitionError: it had ended before; nothing changed.
            JournalError: not on disk; nothing changed.
        """
        await self._move(
            Event.END, seq, self._wall(), encode_outcome(outcome), clean_text(excerpt), stored_bytes
        )

    async def deliver(self, seq: int, attempts: int = 1) -> None:
        """The scheduler has the terminal report, after so many more attempts."""
        await self._move(Event.DELIVER, seq, self._clock(), attempts)

    async def refuse(self, seq: int, why: str, attempts: int = 1) -> None:
        """The scheduler refuses the report for good: the row becomes a dead letter."""
        await self._move(Event.REFUSE, seq, clean_text(why), attempts)

    async def resend(self, seq: int) -> None:
        """A dead letter is owed again."""
        await self._move(Event.RESEND, seq)

    async def drop(self, seq: int) -> None:
        """An operator gives a dead letter up; it ages into the history like a delivered one."""
        await self._move(Event.DROP, seq, self._clock())

    async def row(self, seq: int) -> Row | None:
        """The task, dispatch whole unless it is in the history."""
        return await self._read(lambda store: store.row(seq))

    async def find(self, instance_id: str) -> list[Row]:
        """Every task of that id, of any scheduler, live or in the history, oldest first."""
        return await self._read(lambda store: store.find(clean_text(instance_id)))

    async def unfinished(self) -> list[Row]:
        """Every task that has not ended, oldest first, dispatch whole."""
        return await self._read(JournalStore.unfinished)

    async def undelivered_seqs(self) -> list[int]:
        """The tasks whose terminal report is owed, oldest first."""
        return await self._read(lambda store: store.seqs(State.FINISHED))

    async def undelivered(self, limit: int = 1000) -> list[Row]:
        """The first of the tasks whose terminal report is owed, oldest first."""
        return await self._read(lambda store: store.in_state(State.FINISHED, limit))

    async def dead_letters(self, limit: int = 1000) -> list[Row]:
        """The tasks whose report the scheduler refused, oldest first."""
        return await self._read(lambda store: store.in_state(State.DEAD, limit))

    async def dead_letter_seqs(self) -> list[int]:
        """The same, numbers alone, and all of them."""
        return await self._read(lambda store: store.seqs(State.DEAD))

    async def recent(self, limit: int, before_seq: int | None = None) -> list[Row]:
        """The newest tasks below ``before_seq``, live or in the history, newest first."""
        return await self._read(lambda store: store.recent(limit, before_seq))

    async def cancel(self, instance_id: str) -> list[Row]:
        """In one step: marks what has not ended of that id and returns all its rows.

        When there are none the cancel is remembered, so that a dispatch that comes after it does
        not start. No dispatch can slip in between.
        """
        return await self._write(lambda store: store.cancel(clean_text(instance_id), self._clock()))

    async def remember_cancel(self, instance_id: str) -> None:
        """The next dispatch of that id is accepted as cancelled."""
        await self._write(
            lambda store: store.remember_cancel(clean_text(instance_id), self._clock())
        )

    async def mark_cancelled(self, seq: int) -> bool:
        """Notes that a cancel was asked for; False when the task had ended."""
        return await self._write(lambda store: store.mark_cancelled(seq))

    async def sweep(
        self,
        dedup_ttl_s: float,
        history_s: float = math.inf,
        history_bytes: int = HISTORY_BYTES,
    ) -> list[int]:
        """Ends the duplicate check of old delivered tasks, and keeps the history within its limits.

        Works in small steps, so that other operations are not held up. Ages are measured on the
        monotonic clock: a wall clock that jumps evicts nothing early.

        Args:
            dedup_ttl_s: how long a delivered task still answers its duplicates.
            history_s: how long it stays in the history after it was delivered.
            history_bytes: most of output and rows in the history; the oldest go first.

        Returns:
            The tasks whose output is to be removed. Calling again says that they were; a crash in
            between has them returned again.
        """
        now = self._clock()
        told, self._told_discarded = self._told_discarded, []
        await self._write(lambda store: store.history.clear_discarded(told))
        await self._write(lambda store: store.expire_cancels(now - dedup_ttl_s))
        while (
            await self._write(lambda store: store.history.evict(now - dedup_ttl_s)) == SWEEP_CHUNK
        ):
            pass
        while await self._write(lambda store: store.history.forget(now - history_s, history_bytes)):
            pass
        self._told_discarded = await self._read(
            lambda store: store.history.discarded(DISCARDED_MAX)
        )
        return list(self._told_discarded)

    async def unknown(self, seqs: list[int]) -> list[int]:
        """Those of ``seqs`` that no row has, live or in the history."""
        return await self._read(lambda store: store.unknown(seqs))

    async def get_meta(self, key: str) -> str | None:
        """What ``set_meta`` stored last, or None."""
        return await self._read(lambda store: store.meta(key))

    async def set_meta(self, key: str, value: str) -> None:
        """Stores a text under a key, for example the spawner's token."""
        await self._write(lambda store: store.set_meta(key, value))

    async def close(self) -> None:
        """Returns when everything that was asked before is on disk and the file is closed."""
        await self._commits.close()

    async def _read(self, run: Callable[[JournalStore], _Result]) -> _Result:
        return await self._commits.read(run)

    async def _write(self, run: Callable[[JournalStore], _Result]) -> _Result:
        return await self._commits.write(run)

    async def _move(self, event: Event, seq: int, *values: object) -> None:
        await self._write(functools.partial(JournalStore.move, event=event, seq=seq, values=values))


def _steady_clock(start: float) -> Callable[[], float]:
    """A clock that begins at ``start`` and that nobody can move."""
    offset = start - time.monotonic()
    return lambda: time.monotonic() + offset
