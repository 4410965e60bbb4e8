"""What a worker costs that has nothing to do, and one whose tasks all sleep."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Final

import redis_peers
import uvloop
from accounting import activity, pss_kib, reap_strays
from results import Plot, Topic
from ways import UnavailableError
from worker import Running, running_worker

from stockade.platform import proc

NAME: Final = "idle"
TITLE: Final = "Idle"
SECTION: Final = "{} sleeping tasks"
TASK: Final = "sleep"

Look = Callable[[], list[int]]


@dataclasses.dataclass(frozen=True)
class Counts:
    """seconds: how long each look is; sleeping: tasks in the second one."""

    seconds: float
    sleeping: int


FULL: Final = Counts(seconds=30, sleeping=1000)
SHORT: Final = Counts(seconds=0.5, sleeping=4)


def _is_task(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip() == TASK
    return False


def _parts(running: Running) -> dict[str, Look]:
    """The worker's processes by what they are, without the tasks' own."""
    active, standby = running.spawners()
    named = {running.pid, active, standby}

    def launchers() -> list[int]:
        below = proc.descendants(running.pid)
        return [pid for pid in below if pid not in named and not _is_task(pid)]

    def everything() -> list[int]:
        return [running.pid, active, standby, *launchers()]

    return {
        "Stockade, everything": everything,
        "its supervisor": lambda: [running.pid],
        "its spawner": lambda: [active],
        "its standby": lambda: [standby],
        "its launchers and clean-up": launchers,
    }


def _tree(pid: int) -> Look:
    return lambda: [pid, *proc.descendants(pid)]


async def _look(topic: Topic, section: str, parts: dict[str, Look], seconds: float) -> None:
    """All parts during the same seconds."""
    before = {name: activity(pids()) for name, pids in parts.items()}
    await asyncio.sleep(seconds)
    for name, pids in parts.items():
        after = activity(pids())
        both = before[name].keys() & after.keys()
        a_minute = 60 / seconds
        topic.add_all(
            section,
            name,
            {
                "CPU ms/min": a_minute
                * 1e3
                * sum(after[pid].cpu_s - before[name][pid].cpu_s for pid in both),
                "wake-ups/min": a_minute
                * sum(after[pid].wake_ups - before[name][pid].wake_ups for pid in both),
                "PSS MiB": pss_kib(pids()) / 1024,
            },
        )


async def _measure(counts: Counts) -> Topic:
    topic = Topic(NAME, TITLE)
    async with contextlib.AsyncExitStack() as stack:
        running = await stack.enter_async_context(running_worker(counts.sleeping + 8))
        await running.bench.burst(10, 2)
        parts = _parts(running)
        others = _peers(topic, stack)
        # Until what was used is cleaned up and the pool is what it was.
        await asyncio.sleep(min(5.0, counts.seconds))
        await _look(topic, SECTION.format("no"), parts | others, counts.seconds)
        await running.bench.begin_many(counts.sleeping, f"exec {TASK} 3600")
        await asyncio.sleep(min(5.0, counts.seconds))
        await _look(topic, SECTION.format(counts.sleeping), parts, counts.seconds)
    reap_strays()
    topic.plots = [
        Plot("Wake-ups a minute", "wake-ups/min", (SECTION.format("no"),)),
        Plot("Memory, MiB", "PSS MiB", (SECTION.format("no"),)),
    ]
    return topic


def _peers(topic: Topic, stack: contextlib.AsyncExitStack) -> dict[str, Look]:
    try:
        socket, server = stack.enter_context(redis_peers.redis_server())
    except UnavailableError as error:
        topic.skipped |= dict.fromkeys(redis_peers.PEERS, str(error))
        return {}
    found = {"redis, for both": _tree(server)}
    for name in redis_peers.PEERS:
        try:
            _, workers = stack.enter_context(redis_peers.peer(name, socket))
        except UnavailableError as error:
            topic.skipped[name] = str(error)
        else:
            found[name] = _tree(workers)
    return found


def measure(counts: Counts) -> Topic:
    return uvloop.run(_measure(counts))
