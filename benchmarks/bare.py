"""``bash -lc true`` alone, which tasks are compared with."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from timing import PAUSE_S
from ways import posix_spawn
from worker import Bench

COMMAND: Final = ("bash", "-lc", "true")


def bare_s() -> float:
    """Seconds of one by posix_spawn, started and reaped."""
    return posix_spawn(COMMAND)


async def beside_bash(bench: Bench, repetitions: int) -> tuple[list[float], list[float]]:
    """Seconds of tasks, one at a time, and of bash alone in between."""
    times, bare = [], []
    for _ in range(repetitions):
        await asyncio.sleep(PAUSE_S)
        bare.append(bare_s())
        times.append(await bench.task())
    return times, bare


async def bare_rate(count: int) -> tuple[float, list[float]]:
    """Two loops over it in parallel: runs a second, and the seconds of each."""

    def loop() -> list[float]:
        return [bare_s() for _ in range(count // 2)]

    began = time.perf_counter()
    one, two = await asyncio.gather(asyncio.to_thread(loop), asyncio.to_thread(loop))
    return (len(one) + len(two)) / (time.perf_counter() - began), one + two
