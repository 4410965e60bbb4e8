"""How figures are taken from times: percentiles, ways in turn, and the exponent of a growth."""

from __future__ import annotations

import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

# Between two measurements: pools are refilled and used slots are cleaned up meanwhile.
PAUSE_S = 0.03


def percentile(values: Sequence[float], share: float) -> float:
    """The value that this share of them does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def milliseconds(times: Sequence[float]) -> dict[str, float]:
    """The columns that a sample of seconds gives."""
    return {
        "p50 ms": 1e3 * statistics.median(times),
        "p90 ms": 1e3 * percentile(times, 0.9),
        "n": len(times),
    }


def fdatasync_s(directory: Path | str) -> float:
    """Seconds of one append of a page and its fdatasync there, the median."""
    took = []
    with tempfile.TemporaryFile(dir=directory) as file:
        for _ in range(200):
            os.write(file.fileno(), bytes(4096))
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            took.append(time.perf_counter() - began)
    return statistics.median(took)


def interleaved(
    ways: Mapping[str, Callable[[], float]], rounds: int, every: Mapping[str, int] | None = None
) -> dict[str, list[float]]:
    """What each way gives, once a round, in an order that chance decides anew each round.

    Args:
        ways: by name.
        rounds: how many.
        every: ways that take long are only in every so manieth round.
    """
    taken: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(rounds):
        random.shuffle(names)
        for name in names:
            if number % (every or {}).get(name, 1) == 0:
                time.sleep(PAUSE_S)
                taken[name].append(ways[name]())
    return taken


def beside(times: Sequence[float], bare: Sequence[float]) -> dict[str, float]:
    """The columns of a sample and of the bare way that was interleaved with it."""
    return {**milliseconds(times), "bare ms": 1e3 * statistics.median(bare)}


def exponent(points: Iterable[tuple[float, float]]) -> float:
    """The b of y = a x^b that fits best (least squares of the logarithms); 0 is no growth."""
    logs = [(math.log(x), math.log(y)) for x, y in points]
    middle_x = statistics.fmean(x for x, _ in logs)
    middle_y = statistics.fmean(y for _, y in logs)
    return sum((x - middle_x) * (y - middle_y) for x, y in logs) / sum(
        (x - middle_x) ** 2 for x, _ in logs
    )
