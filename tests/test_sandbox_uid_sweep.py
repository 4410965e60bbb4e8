"""The sweep of what tasks leave of their uids, seen from the spawner that cannot make one."""

from __future__ import annotations

import os

import pytest
from injection import Fault, attached, needs_strace
from spawner_client import SpawnerClient

from stockade.sandbox.outcome import Status

FIRST = 1879046000
USABLE = 8


@needs_strace
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: tasks get uids of their own")
def test_uids_that_could_not_be_swept_are_swept_later() -> None:
    # The first one is the launchers'.
    client = SpawnerClient(uid_min=FIRST, uid_max=FIRST + USABLE)
    try:
        seq = 0
        with attached(client.welcome.pid, Fault("clone3", 1, "EAGAIN", times=60000)):
            for seq in range(1, 2 * USABLE):
                outcome, _ = client.run(seq, "true")
                if outcome.status is not Status.SUCCESS:
                    break
            assert "cannot give the task a uid" in outcome.reason
        for later in range(seq + 1, seq + 2 * USABLE):
            assert client.run(later, "echo on")[1] == b"on\n"
    finally:
        client.close()
