"""``bash -lc true`` alone, which tasks are compared with."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from ways import posix_spawn

COMMAND: Final = ("bash", "-lc", "true")


def bare_s() -> float:
    """Seconds of one by posix_spawn, started and reaped."""
    return posix_spawn(COMMAND)


async def bare_rate(count: int) -> tuple[float, list[float]]:
    """Two loops over it in parallel: runs a second, and the seconds of each."""

    def loop() -> list[float]:
        return [bare_s() for _ in range(count // 2)]

    began = time.perf_counter()
    one, two = await asyncio.gather(asyncio.to_thread(loop), asyncio.to_thread(loop))
    return (len(one) + len(two)) / (time.perf_counter() - began), one + two
