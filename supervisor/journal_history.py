"""What becomes of delivered tasks: out of the duplicate check, into the history, and out of that.

A row in the history keeps its seq, and its output stays on disk. When it leaves, its seq waits in
``discarded`` until the output is known to be gone, so that a crash leaves no file behind.

Every method does one small step, so that a sweep over a million rows holds nobody up.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Final

from stockade.supervisor.journal_rows import COLUMNS, quoted
from stockade.supervisor.states import TERMINAL, State

SWEEP_CHUNK: Final = 100

_TERMINAL: Final = quoted(TERMINAL)
# What a row costs in the history: its output on disk and its own texts.
_ROW_BYTES: Final = (
    "stored_bytes + length(dispatch) + coalesce(length(outcome), 0) + length(excerpt)"
    " + length(error) + 256"
)


class JournalHistory:
    """The SQL of eviction and of the history, on the store's connection."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._execute: Callable[..., sqlite3.Cursor] = connection.execute

    def latest_closed_at(self) -> float:
        """The newest mark of the journal's clock in the file, or 0."""
        found = self._execute(
            "SELECT max(coalesce((SELECT max(closed_at) FROM history), 0),"
            f" {', '.join(self._latest_of(state) for state in sorted(TERMINAL))})"
        ).fetchone()
        return float(found[0])

    def evict(self, closed_before: float) -> int:
        """Moves at most SWEEP_CHUNK tasks that were closed by then to the history; how many."""
        found = self._execute(
            f"SELECT seq, {_ROW_BYTES} FROM tasks WHERE state IN ({_TERMINAL}) AND closed_at <= ?"
            f" LIMIT {SWEEP_CHUNK}",
            (closed_before,),
        ).fetchall()
        if found:
            names = f"{COLUMNS}, scheduler, instance_id"
            seqs = ", ".join(str(seq) for seq, _ in found)
            self._execute(
                f"INSERT INTO history ({names}, bytes)"
                f" SELECT {names}, {_ROW_BYTES} FROM tasks WHERE seq IN ({seqs})"
            )
            self._execute(f"DELETE FROM payloads WHERE seq IN ({seqs})")
            self._execute(f"DELETE FROM tasks WHERE seq IN ({seqs})")
            self._add_history_bytes(sum(cost for _, cost in found))
        return len(found)

    def forget(self, closed_before: float, bytes_max: int) -> int:
        """Takes some of the oldest out of the history: too old, or over the limit; how many.

        Their seqs stay in ``discarded`` until their output is known to be gone.
        """
        over = self.size_bytes() - bytes_max
        freed = 0
        seqs: list[int] = []
        for seq, closed_at, cost in self._execute(
            f"SELECT seq, closed_at, bytes FROM history ORDER BY closed_at LIMIT {SWEEP_CHUNK}"
        ):
            if closed_at > closed_before and freed >= over:
                break
            seqs.append(seq)
            freed += cost
        if seqs:
            joined = ", ".join(map(str, seqs))
            self._execute(
                f"INSERT OR IGNORE INTO discarded SELECT seq FROM history WHERE seq IN ({joined})"
            )
            self._execute(f"DELETE FROM history WHERE seq IN ({joined})")
            self._add_history_bytes(-freed)
        return len(seqs)

    def discarded(self, limit: int) -> list[int]:
        """Tasks out of the history whose output may still be on disk."""
        found = self._execute("SELECT seq FROM discarded ORDER BY seq LIMIT ?", (limit,))
        return [seq for (seq,) in found]

    def clear_discarded(self, seqs: list[int]) -> None:
        """The output of these is gone."""
        for seq in seqs:
            self._execute("DELETE FROM discarded WHERE seq = ?", (seq,))

    def size_bytes(self) -> int:
        """What the history takes: output on disk and the rows' own texts."""
        found = self._execute("SELECT value FROM meta WHERE key = '.history_bytes'").fetchone()
        return 0 if found is None else int(found[0])

    def _add_history_bytes(self, change: int) -> None:
        self._execute(
            "INSERT OR REPLACE INTO meta VALUES ('.history_bytes', ?)",
            (self.size_bytes() + change,),
        )

    @staticmethod
    def _latest_of(state: State) -> str:
        # One look at the end of the index; max() over two states at once would walk it.
        return f"coalesce((SELECT max(closed_at) FROM tasks WHERE state = '{state}'), 0)"
