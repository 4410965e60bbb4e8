"""Starts and memory beside many live tasks that sleep."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Final

import uvloop
from accounting import resident_mib
from bare import beside_bash
from beside_live import BesideLive
from results import Plot, Topic
from spawner import TRUE, spawners
from timing import beside, exponent, interleaved
from ways import posix_spawn
from worker import running_worker

from stockade.sandbox.profiles import Profile

NAME: Final = "live"
TITLE: Final = "Beside many live tasks"
START: Final = "start to exit of /bin/true beside N sleeping tasks, {}"
REPORT: Final = "dispatch to report of bash -lc true beside N sleeping tasks, private, http"
FIT: Final = "exponent of the growth with live tasks"


@dataclasses.dataclass(frozen=True)
class Counts:
    """live: how many sleep, one after the other; repetitions: at each."""

    live: tuple[int, ...]
    repetitions: int


FULL: Final = Counts(live=(10, 100, 1000, 2000), repetitions=100)
SHORT: Final = Counts(live=(2, 4), repetitions=2)


def _starts(topic: Topic, profile: Profile, counts: Counts) -> float:
    """Of one spawner: a start and the memory of each task more. The exponent of the starts."""
    points = []
    with spawners({"one": (profile, 2)}) as made:
        beside_live = BesideLive(made["one"])
        runs = {"start": made["one"].run, "bare": lambda: posix_spawn(TRUE)}
        for live in counts.live:
            beside_live.weigh()
            beside_live.up_to(live)
            taken = interleaved(runs, counts.repetitions)
            points.append((float(live), statistics.median(taken["start"])))
            topic.add_all(
                START.format(profile),
                str(live),
                {
                    **beside(taken["start"], taken["bare"]),
                    "ratio": points[-1][1] / points[0][1],
                    "spawner MiB": beside_live.spawner_mib(),
                    **beside_live.grown_kib_per_task(),
                },
            )
    return exponent(points)


async def _reports(topic: Topic, counts: Counts) -> float:
    """The same of a whole worker."""
    points = []
    async with running_worker(counts.live[-1] + 8) as running:
        active, _ = running.spawners()
        started = 0
        for live in counts.live:
            await running.bench.begin_many(live - started, "exec sleep 3600")
            started = live
            times, bare = await beside_bash(running.bench, counts.repetitions)
            points.append((float(live), statistics.median(times)))
            topic.add_all(
                REPORT,
                str(live),
                {
                    **beside(times, bare),
                    "ratio": points[-1][1] / points[0][1],
                    "supervisor MiB": resident_mib(running.pid),
                    "spawner MiB": resident_mib(active),
                },
            )
    return exponent(points)


def measure(counts: Counts) -> Topic:
    topic = Topic(NAME, TITLE)
    profiles = (Profile.PROCESS, Profile.PRIVATE)
    exponents = {f"start, {profile}": _starts(topic, profile, counts) for profile in profiles}
    exponents["dispatch to report, private, http"] = uvloop.run(_reports(topic, counts))
    for name, value in exponents.items():
        topic.add(FIT, name, exponent=value)
    sections = (*(START.format(profile) for profile in profiles), REPORT)
    topic.plots = [Plot("Beside N sleeping tasks, milliseconds", "p50 ms", sections)]
    return topic
