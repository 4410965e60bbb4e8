"""Tasks as lines for an operator's terminal."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator, Sequence
from typing import Any


def task_table(tasks: list[dict[str, Any]]) -> Iterator[str]:
    """One line a task, as the control socket describes it, and a header."""
    header: tuple[str, ...] = ("ID", "TYPE", "STATE", "ACCEPTED", "RUN", "OUTCOME")
    rows = [header, *(_row(task) for task in tasks)]
    yield from aligned(rows)


def aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """The rows as lines whose columns stand below each other."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


def _row(task: dict[str, Any]) -> tuple[str, ...]:
    outcome = task["outcome"]
    ended = ""
    if outcome is not None:
        ended = outcome["status"]
        if outcome["reason"]:
            ended = f"{ended}: {outcome['reason']}"
    if task["error"]:
        ended = f"{ended} (report refused: {task['error']})"
    return (
        printable(task["id"]),
        printable(task["type"]),
        task["state"],
        clock(task["accepted_at"]),
        run_time(task),
        printable(ended),
    )


def run_time(task: dict[str, Any]) -> str:
    """How long it ran, or runs."""
    outcome = task["outcome"]
    if outcome is not None:
        return "" if outcome["wall_s"] is None else f"{outcome['wall_s']:.1f}s"
    if task["started_at"] is None:
        return ""
    return f"{max(0.0, time.time() - task['started_at']):.0f}s"


def clock(unix_s: float) -> str:
    """The time in the operator's own time zone."""
    moment = datetime.datetime.fromtimestamp(unix_s).astimezone()
    return f"{moment:%Y-%m-%d %H:%M:%S}"


def printable(text: str) -> str:
    """Ids and reasons are others' texts: nothing in them may steer the terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)
