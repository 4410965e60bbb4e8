"""A start that gets stuck, or whose launcher dies, on its way to the task's exec."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from recording_scheduler import RecordingScheduler
from spawner_client import SpawnerClient, children, eventually, kill_now, launchers, lives, reap
from worker_process import DEADLINE_S, STOCKADE, WorkerProcess

from stockade.sandbox import protocol
from stockade.sandbox.outcome import ErrorCode, Outcome, Status
from stockade.supervisor.wire.messages import METRICS_PATH

MakeClient = Callable[..., SpawnerClient]


@pytest.fixture
def make_client() -> Iterator[MakeClient]:
    made: list[SpawnerClient] = []

    def make(start_deadline_s: float, pool: int = 2) -> SpawnerClient:
        made.append(SpawnerClient(start_deadline_s=start_deadline_s, pool_min=pool, pool_max=pool))
        return made[-1]

    yield make
    for client in made:
        client.close()


def stopped_launchers(client: SpawnerClient) -> list[int]:
    """All that wait, stopped: the next task meets one of them."""
    waiting = eventually(lambda: len(found := launchers(client.welcome.pid)) == 2 and found)
    for pid in waiting:
        os.kill(pid, signal.SIGSTOP)
    return waiting


@contextlib.contextmanager
def delayed(pid: int, calls: str) -> Iterator[None]:
    """Every such call of the process and its children takes a minute to begin."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    tracer = subprocess.Popen(
        ["strace", "-f", "-q", "-o", "/dev/null", "-e", f"trace={calls}",
         "-e", f"inject={calls}:delay_enter=60000000", "-p", str(pid)],
        stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        eventually(lambda: b"TracerPid:\t0\n" not in Path(f"/proc/{pid}/status").read_bytes())
        yield
    finally:
        tracer.send_signal(signal.SIGINT)
        tracer.communicate(timeout=DEADLINE_S)


def restart(client: SpawnerClient) -> None:
    """Ends the spawner; the next one cleans up what this one had set aside."""
    for seq in list(client.outcomes):
        client.send(protocol.Acknowledge(seq))
    client.outcomes.clear()
    client.send(protocol.Finish())
    eventually(lambda: reap(client.welcome.pid))
    client.socket.close()
    client.connect()


def assert_spawn_failed(outcome: Outcome) -> None:
    assert (outcome.status, outcome.error_code) == (Status.FAILED, ErrorCode.SPAWN_FAILED)
    assert "its program did not run within 1 s" in outcome.reason


def test_stopped_launcher_is_caught_by_the_start_deadline_and_replaced(
    make_client: MakeClient,
) -> None:
    client = make_client(1.0)
    stopped = stopped_launchers(client)
    client.start(1, ["/bin/sleep", "98750"])
    assert_spawn_failed(client.wait_ended(1))
    assert not lives("98750")
    client.start(2, ["/bin/sleep", "98751"])
    assert_spawn_failed(client.wait_ended(2))
    outcome, output = client.run(3, "echo replaced")
    assert (outcome.status, output) == (Status.SUCCESS, b"replaced\n")
    assert not set(stopped) & set(launchers(client.welcome.pid))


def test_zygote_stuck_before_its_exec_is_caught(make_client: MakeClient) -> None:
    client = make_client(1.0, pool=0)
    for pid in children(client.welcome.pid, "zygote"):
        kill_now(pid)
    with delayed(client.welcome.pid, "execve,execveat"):
        client.start(1, ["/bin/sleep", "98752"])
        outcome = client.wait_ended(1)
    assert outcome.error_code is ErrorCode.SPAWN_FAILED
    assert outcome.reason.startswith("cannot start a zygote: ")
    assert client.run(2, "echo next")[1] == b"next\n"
    restart(client)


def test_stopped_zygote_is_replaced(make_client: MakeClient) -> None:
    client = make_client(30.0, pool=0)
    stopped = children(client.welcome.pid, "zygote")
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    assert client.run(1, "echo next")[1] == b"next\n"
    eventually(lambda: len(set(stopped) & set(children(client.welcome.pid, "zygote"))) == 1)


def test_child_stuck_before_it_is_a_launcher_is_caught(make_client: MakeClient) -> None:
    client = make_client(1.0, pool=0)
    with contextlib.ExitStack() as stack:
        for pid in children(client.welcome.pid, "zygote"):
            stack.enter_context(delayed(pid, "setsid"))
        client.start(1, ["/bin/sleep", "98752"])
        assert_spawn_failed(client.wait_ended(1))
    assert client.run(2, "echo next")[1] == b"next\n"
    restart(client)


def test_child_stuck_before_the_tasks_exec_is_caught(make_client: MakeClient) -> None:
    client = make_client(1.0, pool=1)
    (launcher,) = eventually(lambda: launchers(client.welcome.pid))
    with delayed(launcher, "execve,execveat"):
        client.start(1, ["/bin/sleep", "98753"])
        assert_spawn_failed(client.wait_ended(1))
        assert 1 not in client.pids
    eventually(lambda: not lives("98753"))
    assert client.run(2, "echo next")[1] == b"next\n"
    restart(client)


def test_task_that_cannot_be_killed_has_a_bounded_wait_and_its_slot_is_set_aside(
    scheduler: RecordingScheduler, make_worker: Callable[..., WorkerProcess]
) -> None:
    worker = make_worker()
    scheduler.dispatch(
        worker.url, schedule_instance_id="t", payload="exec sleep 98755", timeout_seconds=1
    )
    scheduler.wait_for(lambda s: "running" in s.kinds("t"), DEADLINE_S)
    (task,) = eventually(lambda: [pid for pid in lives("98755") if is_sleep(pid)])
    # A tracer that does not let a dying process go is as good as a disk that never answers.
    tracer = hold_at_exit(task)
    try:
        report = scheduler.terminal_report("t", DEADLINE_S)
        assert (report["status"], report["error_code"]) == ("timeout", "timeout")
        assert f"could not be killed: {task}" in report["reason"]
        status = eventually(lambda: worker.status()["slots_set_aside"] and worker.status())
        (name,) = status["set_aside"]
        for command in ("ps", "doctor"):
            shown = subprocess.run(
                [*STOCKADE, command, "--socket", str(worker.place / "run/control.sock")],
                capture_output=True, text=True, timeout=DEADLINE_S, check=True,
            )  # fmt: skip
            assert f"could not be killed or removed: {name}" in shown.stdout + shown.stderr
        with urllib.request.urlopen(worker.url + METRICS_PATH, timeout=DEADLINE_S) as response:
            assert b"stockade_slots_set_aside 1.0" in response.read()
        scheduler.dispatch(worker.url, schedule_instance_id="next", payload="true")
        assert scheduler.terminal_report("next", DEADLINE_S)["status"] == "success"
    finally:
        tracer.kill()
        tracer.wait()
    # The next spawner cleans it up.
    eventually(lambda: not lives("98755"))
    (standby,) = set(worker.spawners()) - {worker.active_spawner()}
    kill_now(worker.active_spawner())
    eventually(lambda: worker.log.count("event='spawner connected'") == 2)
    eventually(lambda: worker.status()["slots_set_aside"] == 0)
    assert standby in worker.spawners()


def is_sleep(pid: int) -> bool:
    return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep\0")


def hold_at_exit(pid: int) -> subprocess.Popen[bytes]:
    """A tracer that stops the process when it exits, and leaves it there until it is killed."""
    code = f"""
import ctypes, os, time
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long] * 4
PTRACE_SEIZE, PTRACE_O_TRACEEXIT = 0x4206, 0x40
assert libc.ptrace(PTRACE_SEIZE, {pid}, 0, PTRACE_O_TRACEEXIT) == 0, ctypes.get_errno()
print("held", flush=True)
time.sleep(600)
"""
    tracer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert tracer.stdout is not None
    with tracer.stdout as output:
        assert output.readline() == b"held\n"
    return tracer


def test_stuck_start_keeps_its_deadline_over_a_take_over(make_client: MakeClient) -> None:
    client = make_client(4.0)
    eventually(lambda: children(client.welcome.pid, "standby"))
    stopped_launchers(client)
    client.start(1, ["/bin/sleep", "98754"])
    assert tasks(client) == {1: None}
    kill_now(client.welcome.pid)
    client.reconnect()
    outcome = eventually(lambda: tasks(client)[1])
    assert outcome.error_code is ErrorCode.SPAWN_FAILED
    assert not lives("98754")
    client.outcomes[1] = outcome


def tasks(client: SpawnerClient) -> dict[int, Outcome | None]:
    client.send(protocol.List(0))
    listed = client.receive()
    while not isinstance(listed, protocol.Listed):
        listed = client.receive()
    return {task.seq: task.outcome for task in listed.tasks}


def test_task_whose_launcher_was_killed_before_it_ran_gets_another_slot(
    make_client: MakeClient,
) -> None:
    client = make_client(30.0)
    stopped = stopped_launchers(client)
    client.start(1, ["/bin/bash", "-c", "echo ran"])
    assert tasks(client) == {1: None}
    for pid in stopped:
        os.kill(pid, signal.SIGKILL)
    assert client.wait_ended(1).status is Status.SUCCESS
    client.outputs.pop(1, None)
    assert client.run(2, "echo next")[1] == b"next\n"


def test_adopted_start_whose_launcher_was_killed_is_told_as_unstarted_and_forgotten(
    make_client: MakeClient,
) -> None:
    client = make_client(30.0)
    eventually(lambda: children(client.welcome.pid, "standby"))
    stopped = stopped_launchers(client)
    client.start(1, ["/bin/bash", "-c", "echo ran"])
    assert tasks(client) == {1: None}
    kill_now(client.welcome.pid)
    client.reconnect()
    assert tasks(client) == {1: None}
    for pid in stopped:
        os.kill(pid, signal.SIGKILL)
    message = client.receive()
    assert message == protocol.Unstarted(1)
    assert not client.record(1).exists()
    os.close(client.outputs.pop(1))
    outcome, output = client.run(1, "echo ran")
    assert (outcome.status, output) == (Status.SUCCESS, b"ran\n")
    for pid in stopped:
        reap(pid)


def test_worker_sends_a_task_again_whose_launcher_was_killed_before_it_ran(
    scheduler: RecordingScheduler, make_worker: Callable[..., WorkerProcess], place: Path
) -> None:
    place.chmod(0o777)
    worker = make_worker(worker="pool_min = 2\npool_max = 2")
    spawner = worker.active_spawner()
    waiting = eventually(lambda: len(found := launchers(spawner)) == 2 and found)
    for pid in waiting:
        os.kill(pid, signal.SIGSTOP)
    scheduler.dispatch(
        worker.url, schedule_instance_id="t", payload=f"echo run >> {place}/runs; echo out"
    )
    record = worker.place / "run/spawner/record"
    eventually(lambda: os.listdir(record))
    for pid in waiting:
        os.kill(pid, signal.SIGKILL)
    report = scheduler.terminal_report("t", DEADLINE_S)
    assert (report["status"], report["error_message"]) == ("success", "out\n")
    assert (place / "runs").read_text() == "run\n"
    assert scheduler.kinds("t") == ["ack", "running", "success"]
