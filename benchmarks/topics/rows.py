"""What a long journal costs: opening it, a task, a duplicate and a sweep beside so many rows."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from pathlib import Path
from typing import Any, Final

import uvloop
from bare import beside_bash
from journal import add_delivered, timed
from results import Plot, Topic
from timing import beside, exponent
from worker import PREFIX, STATE_ON, running_worker

from stockade.supervisor.dispatch import Dispatch
from stockade.supervisor.journal import Journal

NAME: Final = "rows"
TITLE: Final = "Beside many journal rows"
REPORT: Final = "dispatch to report of bash -lc true beside N delivered rows, private, http"
ACCEPT: Final = "journal: accept of a task beside N delivered rows"
DUPLICATE: Final = "journal: a duplicate refused beside N delivered rows"
FIT: Final = "exponent of the growth with rows"


@dataclasses.dataclass(frozen=True)
class Counts:
    """rows: how many, in a journal of its own each; repetitions: at each."""

    rows: tuple[int, ...]
    repetitions: int


FULL: Final = Counts(rows=(1000, 10_000, 100_000, 1_000_000), repetitions=100)
SHORT: Final = Counts(rows=(10, 20), repetitions=2)


async def _beside(topic: Topic, path: Path, rows: int, counts: Counts) -> dict[str, float]:
    """A row of each table; the medians, by table."""
    await (await Journal.open(path)).close()
    add_delivered(path, rows)
    found: dict[str, float] = {}
    async with running_worker(8, before=path) as running:
        times, bare = await beside_bash(running.bench, counts.repetitions)
    found[REPORT] = statistics.median(times)
    figures = {**beside(times, bare), "file MiB": path.stat().st_size / (1 << 20)}
    topic.add_all(REPORT, str(rows), figures)
    opened: list[Journal] = []

    async def open_it() -> Any:
        opened.append(await Journal.open(path))

    open_ms = await timed(open_it)
    (journal,) = opened
    number = iter(range(10**9))
    accept_ms = await timed(
        lambda: journal.accept(Dispatch(instance_id=f"new-{next(number)}", payload="true")),
        counts.repetitions,
    )
    again = Dispatch(instance_id="task-7-1732930000000000000")
    duplicate_ms = await timed(lambda: journal.accept(again), counts.repetitions)
    topic.add_all(ACCEPT, str(rows), {"p50 ms": accept_ms, "open ms": open_ms})
    topic.add_all(DUPLICATE, str(rows), {"p50 ms": duplicate_ms})
    await journal.close()
    path.unlink()
    return found | {ACCEPT: accept_ms, DUPLICATE: duplicate_ms}


async def _measure(counts: Counts) -> Topic:
    topic = Topic(NAME, TITLE)
    points: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=STATE_ON) as directory:
        for rows in counts.rows:
            found = await _beside(topic, Path(directory) / "journal.db", rows, counts)
            for section, value in found.items():
                points.setdefault(section, []).append((float(rows), value))
    for section, some in points.items():
        topic.add(FIT, section, exponent=exponent(some))
    topic.plots = [
        Plot("Beside N journal rows, milliseconds", "p50 ms", (REPORT, ACCEPT, DUPLICATE))
    ]
    return topic


def measure(counts: Counts) -> Topic:
    return uvloop.run(_measure(counts))
