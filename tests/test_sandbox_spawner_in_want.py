"""A spawner that is denied what it needs at the end of a task: descriptors, and its record."""

from __future__ import annotations

import os
import resource
import select
import signal
from collections.abc import Iterator

import pytest
from spawner_client import SpawnerClient, eventually, launchers

from stockade.sandbox.limits import Limits
from stockade.sandbox.outcome import ErrorCode, Status

# Standard streams only: whatever else is opened is refused.
NO_DESCRIPTORS = 3


@pytest.fixture
def client() -> Iterator[SpawnerClient]:
    client = SpawnerClient(pool_min=0, pool_max=0)
    yield client
    client.close()


def lower(client: SpawnerClient, kind: int, soft: int) -> None:
    """The spawner's soft limit; its launchers keep theirs."""
    hard = resource.prlimit(client.welcome.pid, kind)[1]
    resource.prlimit(client.welcome.pid, kind, (soft, hard))


def test_deadline_ends_a_task_whose_record_takes_no_more_lines(client: SpawnerClient) -> None:
    client.start(1, ["/bin/sleep", "60"], limits=Limits(runtime_max=1.0))
    client.wait_started(1)
    lower(client, resource.RLIMIT_FSIZE, 0)
    outcome = client.wait_ended(1)
    assert outcome.error_code is ErrorCode.TIMEOUT
    assert outcome.reason == "timeout: ran longer than 1s"
    lower(client, resource.RLIMIT_FSIZE, resource.RLIM_INFINITY)
    assert client.run(2, "echo on")[1] == b"on\n"


def test_tasks_that_end_while_no_descriptor_is_left_are_judged_once_there_is_one(
    client: SpawnerClient,
) -> None:
    client.start(1, ["/bin/sleep", "60"], limits=Limits(runtime_max=1.0))
    client.start(2, ["/bin/sh", "-c", "sleep 1; echo hi"])
    client.start(3, ["/bin/sh", "-c", "sleep 1; kill -9 $$"])
    # It leaves a process behind, which is to be killed.
    client.start(4, ["/bin/sh", "-c", "(setsid sleep 60) & sleep 1; echo left"])
    for seq in (1, 2, 3, 4):
        client.wait_started(seq)
    lower(client, resource.RLIMIT_NOFILE, NO_DESCRIPTORS)
    assert not select.select([client.socket], [], [], 3)[0]
    lower(client, resource.RLIMIT_NOFILE, 1024)
    assert client.wait_ended(1).error_code is ErrorCode.TIMEOUT
    for seq, output in ((2, b"hi\n"), (4, b"left\n")):
        outcome = client.wait_ended(seq)
        assert outcome.status is Status.SUCCESS
        assert outcome.cpu_user_s is not None
        assert client.output(seq) == output
    assert client.wait_ended(3).signal == "SIGKILL"
    assert client.run(5, "echo on")[1] == b"on\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: slots with their own uids")
def test_pool_that_was_emptied_while_no_descriptor_is_left_is_filled_and_has_all_its_uids() -> None:
    first = 1879044000
    client = SpawnerClient(pool_min=1, pool_max=1, uid_min=first, uid_max=first + 2)
    try:
        (waiting,) = eventually(lambda: launchers(client.welcome.pid))
        lower(client, resource.RLIMIT_NOFILE, NO_DESCRIPTORS)
        os.kill(waiting, signal.SIGKILL)
        # Long enough for a slot to be tried.
        assert not select.select([client.socket], [], [], 3)[0]
        lower(client, resource.RLIMIT_NOFILE, 1024)
        eventually(lambda: launchers(client.welcome.pid))
        client.start(1, ["/bin/sleep", "60"])
        client.wait_started(1)
        assert client.run(2, "echo on")[1] == b"on\n"
        client.cancel(1)
        client.wait_ended(1)
    finally:
        client.close()
