"""From a dispatch to the terminal report of ``bash -lc true``, beside RQ and Celery."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import statistics
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Final

import redis_peers
import uvloop
from accounting import process_cpu_s, reap_strays, tree_cpu_s
from bare import COMMAND, bare_rate, bare_s
from redis_peers import Peer
from results import Plot, Topic
from timing import percentile
from ways import UnavailableError
from worker import Bench, running_worker

from stockade.sandbox.profiles import Profile

NAME: Final = "end-to-end"
TITLE: Final = "From dispatch to report"
BARE: Final = "bash -lc true alone"
# grpc once: what differs between profiles is the same over both.
LINKS: Final = {
    Profile.PROCESS: ("http",),
    Profile.PRIVATE: ("http", "grpc"),
    Profile.SEALED: ("http",),
}

Burst = Callable[[int, int], Awaitable[tuple[float, list[float]]]]


@dataclasses.dataclass(frozen=True)
class Counts:
    """How often.

    Attributes:
        in_flight: how many at once, with how many tasks in each round.
        rounds: of all systems in turn.
    """

    in_flight: dict[int, int]
    rounds: int


FULL: Final = Counts(in_flight={1: 80, 8: 160, 32: 300, 128: 400}, rounds=4)
SHORT: Final = Counts(in_flight={1: 2, 4: 8}, rounds=1)


@dataclasses.dataclass
class System:
    """One that takes tasks, its CPU seconds so far, and what it has shown."""

    burst: Burst
    cpu_now_s: Callable[[], float]
    rates: list[float] = dataclasses.field(default_factory=list)
    times: list[float] = dataclasses.field(default_factory=list)
    cpu_s: float = 0.0

    async def round(self, count: int, in_flight: int) -> None:
        before = self.cpu_now_s()
        rate, times = await self.burst(count, in_flight)
        # What it does after the last report counts too.
        await asyncio.sleep(0.3)
        self.cpu_s += self.cpu_now_s() - before
        self.rates.append(rate)
        self.times += times

    def reset(self) -> None:
        self.rates, self.times, self.cpu_s = [], [], 0.0


def _stockade(bench: Bench, pid: int) -> System:
    return System(bench.burst, lambda: tree_cpu_s(pid))


def _peer(peer: Peer, pids: tuple[int, ...]) -> System:
    # In a thread, so that workers of Stockade find their schedulers meanwhile.
    return System(
        lambda count, in_flight: asyncio.to_thread(peer.burst, count, in_flight, COMMAND),
        lambda: sum(map(tree_cpu_s, pids)),
    )


async def _bare(count: int, in_flight: int) -> tuple[float, list[float]]:
    if in_flight > 1:
        return await bare_rate(count)
    times = [bare_s() for _ in range(count)]
    return count / sum(times), times


async def _systems(topic: Topic, stack: AsyncExitStack, most: int) -> dict[str, System]:
    found = {BARE: System(_bare, lambda: process_cpu_s(os.getpid()))}
    for profile, links in LINKS.items():
        settings = {"PROFILE_NAME": profile.value}
        running = await stack.enter_async_context(
            running_worker(most, links=links, settings=settings)
        )
        for link, bench in running.benches.items():
            found[f"Stockade {profile}, {link}"] = _stockade(bench, running.pid)
    try:
        socket, server = stack.enter_context(redis_peers.redis_server())
    except UnavailableError as error:
        topic.skipped |= dict.fromkeys(redis_peers.PEERS, str(error))
        return found
    for name in redis_peers.PEERS:
        try:
            peer, workers = stack.enter_context(redis_peers.peer(name, socket))
        except UnavailableError as error:
            topic.skipped[name] = str(error)
        else:
            found[name] = _peer(peer, (server, workers))
    return found


def _row(system: System, systems: dict[str, System], in_flight: int) -> dict[str, float]:
    rate, p50 = statistics.median(system.rates), statistics.median(system.times)
    bare = systems[BARE]
    figures = {
        "p50 ms": 1e3 * p50,
        "p99 ms": 1e3 * percentile(system.times, 0.99),
        "tasks/s": rate,
        "share": rate / statistics.median(bare.rates),
        "CPU ms": 1e3 * system.cpu_s / len(system.times),
        "n": len(system.times),
    }
    if in_flight == 1:
        figures["ratio"] = p50 / statistics.median(bare.times)
    if system not in (bare, *(systems.get(name) for name in redis_peers.PEERS)):
        for name in redis_peers.PEERS:
            if name in systems:
                figures[f"x {name}"] = rate / statistics.median(systems[name].rates)
    return figures


async def _measure(counts: Counts) -> Topic:
    topic = Topic(NAME, TITLE)
    async with AsyncExitStack() as stack:
        systems = await _systems(topic, stack, max(counts.in_flight))
        for system in systems.values():
            await system.burst(20, 4)
        for in_flight, count in counts.in_flight.items():
            for system in systems.values():
                system.reset()
            for _ in range(counts.rounds):
                for system in systems.values():
                    await system.round(count, in_flight)
            for name, system in systems.items():
                topic.add_all(f"{in_flight} in flight", name, _row(system, systems, in_flight))
    sections = tuple(f"{in_flight} in flight" for in_flight in counts.in_flight)
    topic.plots = [Plot("Tasks a second", "tasks/s", sections)]
    reap_strays()
    return topic


def measure(counts: Counts) -> Topic:
    return uvloop.run(_measure(counts))
