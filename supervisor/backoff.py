"""Waiting times between attempts: exponential, bounded, with jitter."""

from __future__ import annotations

import random


def backoff_s(attempts: int, *, min_s: float, max_s: float) -> float:
    """Seconds to wait after ``attempts`` failures in a row (at least one): never above ``max_s``.

    The jitter of a fifth either way keeps many workers from asking a scheduler that has just come
    back all at the same moment.
    """
    doublings = min(max(attempts - 1, 0), 30)
    delay_s: float = min(min_s * 2**doublings, max_s)
    return min(delay_s * random.uniform(0.8, 1.2), max_s)
