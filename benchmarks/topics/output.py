"""How fast output is captured, beside the same writers on pipes that a plain loop reads."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import selectors
import statistics
import time
from typing import Final

import uvloop
from accounting import process_cpu_s, tree_cpu_s
from results import Plot, Topic
from ways import ENVIRONMENT
from worker import Running, running_worker

NAME: Final = "output"
TITLE: Final = "Output"
SECTION: Final = "{} task(s) that write {} MB in all"
PLAIN: Final = "pipes read by a plain loop"
STOCKADE: Final = "Stockade private, http"
READ_BYTES: Final = 65536
# What cat writes at a time.
BLOCK_BYTES: Final = 131072


@dataclasses.dataclass(frozen=True)
class Counts:
    """How often.

    Attributes:
        writers: at once.
        total_bytes: of all writers together.
        rounds: of both ways in turn.
    """

    writers: tuple[int, ...]
    total_bytes: int
    rounds: int


FULL: Final = Counts(writers=(1, 32), total_bytes=1 << 31, rounds=5)
SHORT: Final = Counts(writers=(1, 4), total_bytes=1 << 22, rounds=1)


def _writer(size: int) -> tuple[str, ...]:
    blocks = size // BLOCK_BYTES
    return ("dd", "if=/dev/zero", f"bs={BLOCK_BYTES}", f"count={blocks}", "status=none")


def _plain(writers: int, size: int) -> None:
    """Starts the writers and reads what they write, in one process."""
    pids, left = [], size * writers
    with selectors.DefaultSelector() as selector:
        for _ in range(writers):
            read, write = os.pipe()
            actions = [(os.POSIX_SPAWN_DUP2, write, 1)]
            argv = _writer(size)
            pids.append(os.posix_spawnp(argv[0], argv, ENVIRONMENT, file_actions=actions))
            os.close(write)
            selector.register(read, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                data = os.read(key.fd, READ_BYTES)
                left -= len(data)
                if not data:
                    selector.unregister(key.fd)
                    os.close(key.fd)
    for pid in pids:
        os.waitpid(pid, 0)
    assert left == 0, f"{left} bytes were not read"


async def _measure(counts: Counts) -> Topic:
    topic = Topic(NAME, TITLE)
    async with running_worker(max(counts.writers)) as running:
        await running.bench.burst(10, 2)
        for writers in counts.writers:
            await _compare(topic, running, writers, counts)
    sections = tuple(dict.fromkeys(row.section for row in topic.rows))
    topic.plots = [Plot("Output captured, MB a second", "MB/s", sections)]
    return topic


async def _compare(topic: Topic, running: Running, writers: int, counts: Counts) -> None:
    size = counts.total_bytes // writers
    payload = " ".join(_writer(size))
    speeds: dict[str, list[float]] = {PLAIN: [], STOCKADE: []}
    cpu = dict.fromkeys(speeds, 0.0)
    for _ in range(counts.rounds):
        before, began = process_cpu_s(os.getpid()), time.perf_counter()
        await asyncio.to_thread(_plain, writers, size)
        speeds[PLAIN].append(counts.total_bytes / (time.perf_counter() - began) / 1e6)
        cpu[PLAIN] += process_cpu_s(os.getpid()) - before
        before, began = tree_cpu_s(running.pid), time.perf_counter()
        await running.bench.burst(writers, writers, payload)
        speeds[STOCKADE].append(counts.total_bytes / (time.perf_counter() - began) / 1e6)
        await asyncio.sleep(0.3)
        cpu[STOCKADE] += tree_cpu_s(running.pid) - before
    section = SECTION.format(writers, round(counts.total_bytes / 1e6))
    plain = statistics.median(speeds[PLAIN])
    for name, found in speeds.items():
        topic.add_all(
            section,
            name,
            {
                "MB/s": statistics.median(found),
                "share": statistics.median(found) / plain,
                "CPU s/GB": cpu[name] / (counts.rounds * counts.total_bytes / 1e9),
                "n": counts.rounds,
            },
        )


def measure(counts: Counts) -> Topic:
    return uvloop.run(_measure(counts))
