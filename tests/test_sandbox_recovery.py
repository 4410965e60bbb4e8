from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from spawner_client import SpawnerClient, children, eventually, kill_now, lives

from stockade.platform import proc
from stockade.sandbox import protocol, uids
from stockade.sandbox.limits import Limits
from stockade.sandbox.outcome import ErrorCode, Outcome, Status

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: tasks get uids of their own")


@pytest.fixture
def client() -> Iterator[SpawnerClient]:
    client = SpawnerClient()
    yield client
    client.close()


def take_over(client: SpawnerClient) -> dict[int, Outcome | None]:
    """Asks whoever is in charge now what it knows; outputs are taken along."""
    client.send(protocol.List(0))
    listed = client.receive()
    while not isinstance(listed, protocol.Listed):
        listed = client.receive()
    return {task.seq: task.outcome for task in listed.tasks}


def outcome_after(client: SpawnerClient, seq: int) -> Outcome:
    """The task's outcome, whether it ended before, during or after the take-over."""
    client.outcomes[seq] = take_over(client)[seq] or client.wait_ended(seq)
    return client.outcomes[seq]


def standby_of(client: SpawnerClient) -> int:
    return eventually(lambda: children(client.welcome.pid, "standby"))[0]


def kill_spawner(client: SpawnerClient) -> None:
    """SIGKILL of the spawner in charge, once its standby can take its place."""
    standby_of(client)
    kill_now(client.welcome.pid)


def test_next_supervisor_finds_running_tasks_and_their_output(client: SpawnerClient) -> None:
    client.start(1, ["/bin/bash", "-c", "echo one; sleep 0.5; echo two"])
    client.wait_started(1)
    client.socket.close()
    os.close(client.outputs.pop(1))
    client.connect()
    assert outcome_after(client, 1).status is Status.SUCCESS
    assert client.output(1) == b"one\ntwo\n"


def test_outcome_waits_for_the_next_supervisor(client: SpawnerClient) -> None:
    client.start(1, ["/bin/bash", "-c", "echo kept; exit 5"])
    client.wait_started(1)
    client.socket.close()
    os.close(client.outputs.pop(1))
    client.connect()
    outcome = eventually(lambda: take_over(client)[1])
    assert outcome.exit_code == 5
    assert client.output(1) == b"kept\n"
    client.outcomes[1] = outcome


def test_standby_takes_over_a_running_task(client: SpawnerClient) -> None:
    client.start(1, ["/bin/bash", "-c", "echo before; sleep 1; echo after; exit 4"])
    client.wait_started(1)
    kill_spawner(client)
    welcome = client.reconnect()
    assert welcome.generation == 2
    outcome = outcome_after(client, 1)
    assert (outcome.error_code, outcome.exit_code) == (ErrorCode.EXECUTE_FAILED, 4)
    assert client.output(1) == b"before\nafter\n"


def test_standby_keeps_deadlines_and_kills(client: SpawnerClient) -> None:
    client.start(1, ["/bin/bash", "-c", "trap '' TERM; while :; do sleep 0.1; done"],
                 Limits(runtime_max=1.5, timeout_stop=0.3))  # fmt: skip
    client.wait_started(1)
    kill_spawner(client)
    client.reconnect()
    outcome = outcome_after(client, 1)
    assert (outcome.status, outcome.signal) == (Status.TIMEOUT, "SIGKILL")


def test_daemon_left_behind_during_the_gap_is_gone(client: SpawnerClient) -> None:
    client.start(1, ["/bin/bash", "-c", "(setsid sleep 98780 &); sleep 0.2"])
    client.wait_started(1)
    kill_spawner(client)
    client.reconnect()
    assert outcome_after(client, 1).status is Status.SUCCESS
    assert not lives("98780")


def test_second_and_third_death_are_survived_like_the_first(client: SpawnerClient) -> None:
    client.start(1, ["/bin/sleep", "3"])
    client.wait_started(1)
    for generation in (2, 3, 4):
        kill_spawner(client)
        assert client.reconnect().generation == generation
    assert outcome_after(client, 1).status is Status.SUCCESS


def test_spawner_starts_tasks_after_a_take_over(client: SpawnerClient) -> None:
    kill_spawner(client)
    client.reconnect()
    outcome, output = client.run(1, "echo new")
    assert (outcome.status, output) == (Status.SUCCESS, b"new\n")


def test_all_dead_means_worker_lost_and_nothing_left(client: SpawnerClient) -> None:
    client.start(1, ["/bin/sleep", "98781"])
    client.start(2, ["/bin/true"])
    task = client.wait_started(1)
    ended = client.wait_ended(2)
    standby = standby_of(client)
    os.kill(standby, signal.SIGSTOP)
    kill_now(client.welcome.pid)
    kill_now(standby)
    client.socket.close()
    client.connect()
    found = take_over(client)
    outcome = found[1] or client.wait_ended(1)
    assert outcome.error_code is ErrorCode.WORKER_LOST
    assert found[2] == ended
    assert proc.process(task) is None or not proc.process(task).is_alive  # type: ignore[union-attr]
    client.outcomes = {1: outcome, 2: ended}


def test_launcher_killed_together_with_the_spawner(client: SpawnerClient) -> None:
    client.start(1, ["/bin/sleep", "98782"])
    found = proc.process(client.wait_started(1))
    assert found is not None
    standby_of(client)
    os.kill(client.welcome.pid, signal.SIGSTOP)
    os.kill(found.parent, signal.SIGKILL)
    kill_now(client.welcome.pid)
    client.reconnect()
    assert outcome_after(client, 1).error_code is ErrorCode.WORKER_LOST
    assert not lives("98782")


def test_pid_of_another_process_is_never_signalled(client: SpawnerClient) -> None:
    """A record whose launcher's number belongs to somebody else by now."""
    client.start(1, ["/bin/sleep", "98783"])
    client.wait_started(1)
    standby = standby_of(client)
    os.kill(standby, signal.SIGSTOP)
    kill_now(client.welcome.pid)
    kill_now(standby)
    record = client.record(1)
    innocent = os.posix_spawn("/bin/sleep", ["sleep", "98784"], {})
    try:
        lines = record.read_text().splitlines(keepends=True)
        launcher = lines[0].split('"launcher_pid":')[1].split(",")[0]
        record.write_text(
            "".join(lines).replace(f'"launcher_pid":{launcher}', f'"launcher_pid":{innocent}')
        )
        client.socket.close()
        client.connect()
        assert outcome_after(client, 1).error_code is ErrorCode.WORKER_LOST
        assert proc.process(innocent).is_alive  # type: ignore[union-attr]
    finally:
        kill_now(innocent)


def test_damaged_record_is_kept_aside_and_said(client: SpawnerClient) -> None:
    standby = standby_of(client)
    os.kill(standby, signal.SIGSTOP)
    kill_now(client.welcome.pid)
    kill_now(standby)
    client.record(7).write_bytes(b"\xff\xfe garbage\n")
    client.socket.close()
    client.connect()
    assert take_over(client) == {}
    damaged = client.home / "run/spawner/record/7.damaged"
    assert damaged.exists()
    damaged.unlink()


def test_token_stays_over_a_take_over_and_a_restart(client: SpawnerClient) -> None:
    token = client.welcome.token
    kill_spawner(client)
    assert client.reconnect().token == token


def test_what_is_no_slots_is_cleared_and_keeps_no_spawner_from_starting(
    client: SpawnerClient,
) -> None:
    work = client.home / "state/work/odd"
    work.mkdir()
    (client.home / "run/spawner/output/odd").touch()
    (standby,) = eventually(lambda: children(client.welcome.pid, "standby"))
    os.kill(standby, signal.SIGKILL)
    kill_now(client.welcome.pid)
    client.socket.close()
    client.connect()
    eventually(lambda: not work.exists())
    assert client.run(1, "echo on")[1] == b"on\n"


def uid_of(client: SpawnerClient, seq: int) -> int:
    return int(client.record(seq).read_text().split('"uid":')[1].split(",")[0])


@needs_root
def test_uid_that_another_worker_took_after_a_crash_is_left_to_it() -> None:
    client = SpawnerClient()
    client.start(1, ["/bin/sleep", "98785"])
    found = proc.process(client.wait_started(1))
    assert found is not None
    uid, standby = uid_of(client, 1), standby_of(client)
    os.kill(standby, signal.SIGSTOP)
    for pid in (client.welcome.pid, standby, found.parent):
        kill_now(pid)
    lock = eventually(lambda: uids.lock(uid))
    theirs = Path("/tmp") / f"stockade-test-{uid}"
    theirs.touch()
    os.chown(theirs, uid, uid)
    try:
        client.socket.close()
        client.connect()
        assert outcome_after(client, 1).error_code is ErrorCode.WORKER_LOST
        # What is to be swept is swept before it ends.
        client.close()
        assert theirs.exists()
    finally:
        theirs.unlink(missing_ok=True)
        uids.unlock(uid, lock)


@needs_root
def test_what_a_task_that_lives_has_is_not_swept_for_one_that_had_its_uid_before() -> None:
    # The first uid is the launchers'; two are left.
    client = SpawnerClient(uid_min=1879046100, uid_max=1879046102, pool_min=0, pool_max=0)
    theirs = Path("/tmp") / f"stockade-test-{os.getpid()}"
    try:
        client.start(1, ["/bin/true"])
        client.wait_ended(1)
        client.run(2, "true")
        # With its directory a slot gives its uid back.
        eventually(lambda: not os.listdir(client.home / "state/work"))
        client.start(3, ["/bin/sh", "-c", f": > {theirs}; sleep 98786"])
        client.wait_started(3)
        assert uid_of(client, 3) == uid_of(client, 1)
        eventually(theirs.exists)
        kill_spawner(client)
        client.reconnect()
        take_over(client)
        client.start(4, ["/bin/sleep", "98787"])
        client.wait_started(4)
        # Without a uid left all are swept that can be.
        assert client.run(5, "true")[0].error_code is ErrorCode.SPAWN_FAILED
        assert theirs.exists()
    finally:
        for seq in (3, 4):
            client.cancel(seq)
            client.wait_ended(seq)
        client.close()
    assert not theirs.exists()
