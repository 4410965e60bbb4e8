"""The installed code takes over as the spawner in charge; the old one finishes its own tasks."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from spawner_client import SpawnerClient, children, eventually, kill_now, lives, reap

from stockade.platform import proc, sockets
from stockade.sandbox import protocol
from stockade.sandbox.outcome import ErrorCode, Outcome, Status


class Elder:
    """A connection of its own to a spawner that was renewed."""

    def __init__(self, client: SpawnerClient, generation: int) -> None:
        self.client = client
        self.socket = sockets.connect_seqpacket(str(client.home / f"run/spawner/{generation}.old"))
        OPENED.append(self.socket)
        self.socket.settimeout(30)
        self.send(protocol.Hello(protocol.PROTOCOL_VERSION, "test"))
        welcome = self.receive()
        assert isinstance(welcome, protocol.Welcome)
        self.pid = welcome.pid

    def send(self, message: protocol.Message) -> None:
        sockets.send_packet(self.socket, protocol.encode(message))

    def receive(self) -> protocol.Message:
        packet, fds = sockets.receive_packet(
            self.socket, protocol.MAX_MESSAGE_BYTES, protocol.MAX_DESCRIPTORS
        )
        for fd in fds:
            os.close(fd)
        assert packet, "the elder hung up"
        return protocol.decode(packet)

    def tasks(self) -> dict[int, Outcome | None]:
        self.send(protocol.List(0))
        listed = self.receive()
        while not isinstance(listed, protocol.Listed):
            listed = self.receive()
        return {task.seq: task.outcome for task in listed.tasks}

    def wait_ended(self, seq: int) -> Outcome:
        return eventually(lambda: self.tasks()[seq])

    def has_ended(self) -> bool:
        return proc.process(self.pid) is None or reap(self.pid)


OPENED: list[socket.socket] = []


@pytest.fixture
def client() -> Iterator[SpawnerClient]:
    client = SpawnerClient()
    yield client
    for opened in OPENED:
        opened.close()
    OPENED.clear()
    client.close()


def renew(client: SpawnerClient, tuning: str | None = None) -> Elder:
    """Renews the spawner in charge, which has tasks; ``client`` speaks to the new one then."""
    before = client.welcome
    renew_idle(client, tuning)
    return Elder(client, before.generation)


def renew_idle(client: SpawnerClient, tuning: str | None = None) -> None:
    """Renews the spawner in charge, which without tasks ends at once."""
    before = client.welcome
    client.send(protocol.Renew(client.settings.tuning if tuning is None else tuning))
    answer = client.receive()
    while not isinstance(answer, protocol.Renewed):
        answer = client.receive()
    assert answer.error == ""
    assert client.reconnect().generation > before.generation


def tasks(client: SpawnerClient) -> dict[int, Outcome | None]:
    client.send(protocol.List(0))
    listed = client.receive()
    while not isinstance(listed, protocol.Listed):
        listed = client.receive()
    return {task.seq: task.outcome for task in listed.tasks}


def kill_in_charge(client: SpawnerClient, *, with_standby: bool = False) -> None:
    (standby,) = eventually(lambda: standbys(client))
    if with_standby:
        os.kill(standby, signal.SIGKILL)
    kill_now(client.welcome.pid)


def standbys(client: SpawnerClient) -> list[int]:
    """The one of the spawner in charge, once it waits."""
    return children(client.welcome.pid, "standby")


def test_new_tasks_go_to_the_new_spawner_and_the_old_one_finishes_its_own(
    client: SpawnerClient,
) -> None:
    script = "until [ -e go ]; do sleep 0.05; done; echo kept > here; cat here; exit 7"
    client.start(1, ["/bin/bash", "-c", script])
    client.wait_started(1)
    tuned = dataclasses.replace(client.settings, pool_min=1, pool_max=3)
    elder = renew(client, tuned.tuning)
    assert client.welcome.elders == (1,)
    assert client.welcome.tuning == tuned.tuning
    assert (tasks(client), elder.tasks()) == ({}, {1: None})
    outcome, output = client.run(2, "echo new")
    assert (outcome.status, output) == (Status.SUCCESS, b"new\n")
    (client.home / "state/work").joinpath(
        next(name for name in os.listdir(client.home / "state/work") if name.startswith("1-")), "go"
    ).touch()
    assert elder.wait_ended(1).exit_code == 7
    assert client.output(1) == b"kept\n"
    elder.send(protocol.Acknowledge(1))
    eventually(elder.has_ended)
    assert eventually(lambda: client.reconnect().elders == ())


def test_spawner_that_stepped_back_has_no_standby_even_if_one_was_to_be_started_again(
    client: SpawnerClient,
) -> None:
    client.start(1, ["/bin/sleep", "98789"])
    client.wait_started(1)
    (standby,) = eventually(lambda: standbys(client))
    os.kill(standby, signal.SIGKILL)
    elder = renew(client)
    # Longer than it waits before it starts another.
    assert not select.select([elder.socket], [], [], 1.5)[0]
    # By its command line: one that has just been started has no name of its own yet.
    assert not lives(f"--standby-for\0{elder.pid}\0")
    elder.send(protocol.Cancel(1))
    assert elder.wait_ended(1).status is Status.CANCELLED
    elder.send(protocol.Acknowledge(1))
    eventually(elder.has_ended)


def test_start_that_reaches_a_renewed_spawner_is_not_run(client: SpawnerClient) -> None:
    client.start(1, ["/bin/sleep", "98790"])
    client.wait_started(1)
    client.send(protocol.Renew(client.settings.tuning))
    while not isinstance(client.receive(), protocol.Renewed):
        pass
    client.start(2, ["/bin/sleep", "98791"])
    client.send(protocol.List(0))
    listed = client.receive()
    assert isinstance(listed, protocol.Listed)
    assert [task.seq for task in listed.tasks] == [1]
    assert not lives("98791")
    client.send(protocol.Cancel(1))
    client.wait_ended(1)
    client.send(protocol.Acknowledge(1))
    client.outcomes.clear()
    client.reconnect()


def test_renewal_that_fails_changes_nothing(client: SpawnerClient) -> None:
    client.start(1, ["/bin/sleep", "98792"])
    client.wait_started(1)
    for tuning in ("no json", json.dumps({"pool_min": "many"}), json.dumps({"limits": {"x": 1}})):
        client.send(protocol.Renew(tuning))
        answer = client.receive()
        assert isinstance(answer, protocol.Renewed)
        assert answer.error.startswith("cannot renew the spawner: ")
    assert client.run(2, "echo on")[1] == b"on\n"
    # The next one can succeed, and the standby still stands by.
    elder = renew(client)
    assert client.welcome.generation == 2
    elder.send(protocol.Cancel(1))
    assert elder.wait_ended(1).status is Status.CANCELLED
    elder.send(protocol.Acknowledge(1))
    eventually(elder.has_ended)


def test_tuning_cannot_change_users_places_or_uids(client: SpawnerClient) -> None:
    wishes = {"pool_min": 0, "uid_min": 0, "supervisor_uid": 65534, "state_dir": "/nowhere"}
    renew_idle(client, json.dumps(wishes))
    assert json.loads(client.welcome.tuning)["pool_min"] == 0
    client.run(1, "true")
    settings = client.settings.to_json()
    line = Path(f"/proc/{client.welcome.pid}/cmdline").read_text()
    assert json.loads(line.split("\0")[4]) == json.loads(settings)


def test_task_of_an_elder_that_dies_is_adopted_by_its_successor(client: SpawnerClient) -> None:
    client.start(1, ["/bin/bash", "-c", "echo a; sleep 1.5; echo b; exit 4"])
    client.wait_started(1)
    elder = renew(client)
    os.kill(elder.pid, signal.SIGKILL)
    assert eventually(lambda: 1 in tasks(client))
    outcome = eventually(lambda: tasks(client)[1])
    assert (outcome.exit_code, client.output(1)) == (4, b"a\nb\n")
    client.outcomes[1] = outcome
    assert client.reconnect().elders == ()


@pytest.mark.parametrize("with_standby", [False, True])
def test_whoever_follows_the_successor_touches_nothing_of_a_living_elder(
    client: SpawnerClient, with_standby: bool
) -> None:
    client.start(1, ["/bin/bash", "-c", "sleep 3; touch still-there; exit 5"])
    client.wait_started(1)
    elder = renew(client)
    client.start(2, ["/bin/sleep", "98793"])
    client.wait_started(2)
    kill_in_charge(client, with_standby=with_standby)
    client.socket.close()
    client.connect()
    assert client.welcome.elders == (1,)
    found = tasks(client)
    assert set(found) == {2}
    if with_standby:
        outcome = found[2] or client.wait_ended(2)
        assert outcome.error_code is ErrorCode.WORKER_LOST
    else:
        assert found[2] is None
        client.send(protocol.Cancel(2))
        outcome = client.wait_ended(2)
    client.outcomes[2] = outcome
    assert elder.wait_ended(1).exit_code == 5
    elder.send(protocol.Acknowledge(1))
    eventually(elder.has_ended)


def test_two_elders_finish_side_by_side_and_each_can_die(client: SpawnerClient) -> None:
    client.start(1, ["/bin/bash", "-c", "sleep 4; exit 11"])
    client.wait_started(1)
    first = renew(client)
    client.start(2, ["/bin/bash", "-c", "sleep 4; exit 12"])
    client.wait_started(2)
    second = renew(client)
    assert client.welcome.elders == (1, 2)
    # The second adopted nothing of the first; the third does when the first dies.
    os.kill(first.pid, signal.SIGKILL)
    assert eventually(lambda: 1 in tasks(client))
    kill_in_charge(client)
    client.reconnect()
    assert client.welcome.elders == (2,)
    assert set(tasks(client)) == {1}
    outcome = eventually(lambda: tasks(client)[1])
    assert outcome.exit_code == 11
    client.outcomes[1] = outcome
    assert second.wait_ended(2).exit_code == 12
    second.send(protocol.Acknowledge(2))
    eventually(second.has_ended)


def test_spawner_in_charge_outlasts_its_elders(client: SpawnerClient) -> None:
    client.start(1, ["/bin/sleep", "98794"])
    client.wait_started(1)
    elder = renew(client)
    client.send(protocol.Finish())
    assert client.run(2, "echo here")[1] == b"here\n"
    elder.send(protocol.Cancel(1))
    elder.wait_ended(1)
    elder.send(protocol.Acknowledge(1))
    eventually(elder.has_ended)
    eventually(lambda: reap(client.welcome.pid) or proc.process(client.welcome.pid) is None)
    client.socket.close()
    client.outcomes.clear()
    client.connect()
