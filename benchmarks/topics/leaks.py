"""What many tasks leave behind in one worker, and whether the last take longer than the first."""

from __future__ import annotations

import dataclasses
from typing import Final

import uvloop
from leaks import Look, looks_at
from results import Plot, Topic
from timing import exponent

NAME: Final = "leaks"
TITLE: Final = "After many tasks"
SECTION: Final = "after N tasks, private, http"
FIT: Final = "exponent of the growth with tasks, from the middle on"
MIB: Final = float(1 << 20)


@dataclasses.dataclass(frozen=True)
class Counts:
    """How often.

    Attributes:
        tasks: in all.
        in_flight: at once.
        parts: after each of which there is a look.
        pairs: of a task and bash alone in each look.
    """

    tasks: int
    in_flight: int
    parts: int
    pairs: int


FULL: Final = Counts(tasks=20_000, in_flight=32, parts=20, pairs=15)
SHORT: Final = Counts(tasks=40, in_flight=4, parts=4, pairs=2)


async def _looks(counts: Counts) -> list[Look]:
    return [one async for one in looks_at(**dataclasses.asdict(counts))]


def measure(counts: Counts) -> Topic:
    topic = Topic(NAME, TITLE)
    looks = uvloop.run(_looks(counts))
    for one in looks:
        topic.add_all(
            SECTION,
            str(one.tasks),
            {
                "p50 ms": one.task_p50_ms,
                "bare ms": one.bare_p50_ms,
                "ratio": one.ratio,
                "supervisor MiB": one.supervisor_bytes / MIB,
                "spawner MiB": one.spawner_bytes / MIB,
                "descriptors": one.descriptors,
                "slab MiB": one.slab_bytes / MIB,
            },
        )
    # The first half is for warming up: allocators, caches, the duplicate check of five minutes.
    late = looks[len(looks) // 2 :]
    for name, values in (
        ("dispatch to report", [one.ratio for one in late]),
        ("supervisor's memory", [one.supervisor_bytes for one in late]),
        ("spawner's memory", [one.spawner_bytes for one in late]),
        ("descriptors", [one.descriptors for one in late]),
    ):
        points = zip((float(one.tasks) for one in late), values, strict=True)
        topic.add(FIT, name, exponent=exponent(points))
    topic.plots = [Plot("After N tasks, milliseconds", "p50 ms", (SECTION,))]
    return topic
