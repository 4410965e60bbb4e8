"""A worker whose other slots are held by hostile tasks: heartbeats and harmless tasks meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import statistics
import time
from collections.abc import AsyncIterator
from typing import Final

import uvloop
from bare import bare_s
from results import Plot, Topic
from timing import beside, percentile
from worker import Bench, Running, running_worker

from stockade.sandbox.profiles import Profile

NAME: Final = "attack"
TITLE: Final = "Under attack"
SECTION: Final = "heartbeats, and bash -lc true from dispatch to report, http"
INTERVAL_S: Final = 0.2
DEADLINE_S: Final = 300.0
LOOP: Final = "while :; do :; done"
FLOOD: Final = "yes"
# Each in a slot of its own, and again whenever it was ended.
ATTACKS: Final = {
    "endless loop": LOOP,
    "another endless loop": LOOP,
    # The first sleep keeps the task alive while its bomb has spent itself.
    "fork bomb": "sleep 3600 & :(){ :|:& };:; wait",
    "memory hog": "tail /dev/zero",
    "output flood": FLOOD,
    "disk filler": "while :; do for i in 1 2 3 4; do dd if=/dev/zero of=f$i bs=1M; done; done",
}
SETTINGS: Final = {
    "HTTP_HEARTBEAT_INTERVAL": f"{INTERVAL_S}s",
    "LIMITS_WORKDIR_MAX": "64M",
    "LIMITS_LIMIT_FSIZE": "32M",
    "LIMITS_TIMEOUT_STOP": "1s",
}


@dataclasses.dataclass(frozen=True)
class Counts:
    """For how long each profile is looked at."""

    quiet_s: float
    attacked_s: float


FULL: Final = Counts(quiet_s=10, attacked_s=40)
SHORT: Final = Counts(quiet_s=0.5, attacked_s=1)


@contextlib.asynccontextmanager
async def _attacked(bench: Bench) -> AsyncIterator[None]:
    ended: list[str] = []

    async def again_and_again(name: str, payload: str) -> None:
        while True:
            await bench.run(payload, timeout_s=3600, deadline_s=DEADLINE_S)
            ended.append(name)

    attacks = [asyncio.create_task(again_and_again(*attack)) for attack in ATTACKS.items()]
    try:
        yield
        # Else the rest was measured beside nothing.
        for name, payload in ATTACKS.items():
            assert payload not in (LOOP, FLOOD) or name not in ended, f"{name} was ended"
    finally:
        for attack in attacks:
            attack.cancel()
        await asyncio.gather(*attacks, return_exceptions=True)


async def _bystander(late: list[float]) -> None:
    """How late a timer of an ordinary process is."""
    while True:
        began = time.monotonic()
        await asyncio.sleep(INTERVAL_S)
        late.append(time.monotonic() - began - INTERVAL_S)


async def _look(running: Running, seconds: float) -> dict[str, float]:
    """The columns, from so many seconds."""
    heartbeats = running.bench.ends.heartbeats
    first = max(0, len(heartbeats) - 1)
    late: list[float] = [0.0]
    bystander = asyncio.create_task(_bystander(late))
    times: list[float] = []
    bare: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end or not times:
        bare.append(await asyncio.to_thread(bare_s))
        times.append(await running.bench.task(deadline_s=DEADLINE_S))
        await asyncio.sleep(0.05)
    bystander.cancel()
    # A heartbeat that has not come yet is late too.
    came = [*heartbeats[first:], time.monotonic()]
    lates = [max(0.0, after - before - INTERVAL_S) for before, after in itertools.pairwise(came)]
    return {
        "late p99 ms": 1e3 * percentile(lates, 0.99),
        "late max ms": 1e3 * max(lates),
        "bystander max ms": 1e3 * max(late),
        **beside(times, bare),
        "p99 ms": 1e3 * percentile(times, 0.99),
        "ratio": statistics.median(times) / statistics.median(bare),
    }


async def _profile(topic: Topic, profile: Profile, counts: Counts) -> None:
    settings = {**SETTINGS, "PROFILE_NAME": profile.value}
    async with running_worker(8, settings=settings) as running:
        await running.bench.burst(10, 2)
        topic.add_all(SECTION, f"{profile}, quiet", await _look(running, counts.quiet_s))
        async with _attacked(running.bench):
            # Until they are all at it.
            await asyncio.sleep(min(2.0, counts.attacked_s))
            topic.add_all(SECTION, f"{profile}, attacked", await _look(running, counts.attacked_s))


async def _measure(counts: Counts) -> Topic:
    topic = Topic(NAME, TITLE)
    for profile in Profile:
        await _profile(topic, profile, counts)
    topic.plots = [
        Plot("Latest heartbeat, milliseconds", "late max ms", (SECTION,)),
        Plot("A harmless task, milliseconds", "p50 ms", (SECTION,)),
    ]
    return topic


def measure(counts: Counts) -> Topic:
    return uvloop.run(_measure(counts))
