"""A sample of the crash sweep, spread over all of it; whole with tests/crash_sweep.py."""

from __future__ import annotations

import os
import random

import pytest
from crash_sweep import run, sweeping
from injection import needs_strace

pytestmark = [
    needs_strace,
    pytest.mark.skipif(os.geteuid() != 0, reason="strace of the worker's processes needs root"),
    pytest.mark.timeout(600),
]


@pytest.mark.parametrize(
    ("scenario", "share"),
    [
        ("life", 0.06),
        ("takeover", 0.015),
        ("restart", 0.03),
        ("boot", 0.015),
        ("pairs", 0.008),
        ("errors", 0.03),
        ("journal", 0.02),
    ],
)
def test_death_or_disk_error_at_any_call_loses_and_doubles_nothing(
    scenario: str, share: float
) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    with sweeping() as sweep:
        run(sweep, random.Random(seed), share=share, scenarios=(scenario,), say=print)
    print(sweep.table())
    assert not sweep.faults, "\n".join(sweep.faults)
    assert sum(tally.tried for tally in sweep.tallies.values()) > 0
