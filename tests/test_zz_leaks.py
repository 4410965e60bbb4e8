"""The suite's last check: nothing that it made is left."""

from __future__ import annotations

import time

import pytest
from leaks import STARTED, snapshot

DEADLINE_S = 30.0


def test_the_suite_left_nothing_behind(request: pytest.FixtureRequest) -> None:
    before = request.config.stash[STARTED]
    end = time.monotonic() + DEADLINE_S
    while True:
        left = {
            kind: sorted(found - before[kind])
            for kind, found in snapshot().items()
            if found - before[kind]
        }
        if not left or time.monotonic() > end:
            break
        # A spawner that is just ending, a directory that is just being removed.
        time.sleep(0.1)
    assert not left
