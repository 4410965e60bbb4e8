from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from spawner_client import (
    SpawnerClient,
    children,
    eventually,
    kill_now,
    launchers,
    lives,
    reap,
)
from tiny_filesystem import fill, tiny_filesystem

from stockade.platform import proc, sockets
from stockade.sandbox import protocol
from stockade.sandbox.limits import Limits
from stockade.sandbox.outcome import ErrorCode, Status
from stockade.sandbox.settings import Lifetime

MIB = 1024 * 1024


@pytest.fixture
def client() -> Iterator[SpawnerClient]:
    client = SpawnerClient()
    yield client
    client.close()


def test_exit_0_is_success_with_output_and_times(client: SpawnerClient) -> None:
    outcome, output = client.run(1, "echo hi; echo err >&2")
    assert (outcome.status, outcome.error_code, outcome.exit_code) == (
        Status.SUCCESS, ErrorCode.NONE, 0,
    )  # fmt: skip
    assert output == b"hi\nerr\n"
    assert outcome.wall_s is not None
    assert outcome.wall_s > 0
    assert outcome.started_at is not None
    assert outcome.finished_at is not None
    assert outcome.finished_at >= outcome.started_at
    assert outcome.profile == "process"


def test_exit_code_and_reason_are_told(client: SpawnerClient) -> None:
    outcome, _ = client.run(1, "exit 3")
    assert (outcome.error_code, outcome.exit_code) == (ErrorCode.EXECUTE_FAILED, 3)
    assert outcome.reason == "exit status 3"


def test_exit_137_is_not_taken_for_a_kill(client: SpawnerClient) -> None:
    outcome, _ = client.run(1, "exit 137")
    assert (outcome.error_code, outcome.exit_code) == (ErrorCode.EXECUTE_FAILED, 137)


def test_own_sigkill_is_signaled_and_not_oom(client: SpawnerClient) -> None:
    outcome, _ = client.run(1, "kill -9 $$")
    assert (outcome.error_code, outcome.signal) == (ErrorCode.SIGNALED, "SIGKILL")


def test_deadline_ends_the_task_and_all_its_children(client: SpawnerClient) -> None:
    outcome, output = client.run(1, "echo before; sleep 98765; echo after", Limits(runtime_max=0.5))
    assert (outcome.status, outcome.error_code) == (Status.TIMEOUT, ErrorCode.TIMEOUT)
    assert output == b"before\n"
    assert not lives("98765")


def test_task_that_ignores_term_is_killed_after_its_grace(client: SpawnerClient) -> None:
    limits = Limits(runtime_max=0.3, timeout_stop=0.3)
    outcome, _ = client.run(1, "trap '' TERM INT HUP; while :; do sleep 0.1; done", limits)
    assert (outcome.status, outcome.signal) == (Status.TIMEOUT, "SIGKILL")


def test_stopped_task_dies_at_its_deadline(client: SpawnerClient) -> None:
    outcome, _ = client.run(1, "kill -STOP $$", Limits(runtime_max=0.3, timeout_stop=1))
    assert outcome.status is Status.TIMEOUT


@pytest.mark.parametrize("script", ["sleep 98766 & echo hi", "(setsid sleep 98766 &); echo hi"])
def test_what_a_task_leaves_behind_is_gone_before_its_outcome(
    client: SpawnerClient, script: str
) -> None:
    outcome, output = client.run(1, script)
    assert outcome.status is Status.SUCCESS
    assert output == b"hi\n"
    assert not lives("98766")


def test_cancel_ends_a_running_task(client: SpawnerClient) -> None:
    client.start(1, ["/bin/sleep", "98767"])
    client.wait_started(1)
    client.send(protocol.Cancel(1))
    outcome = client.wait_ended(1)
    assert (outcome.status, outcome.error_code) == (Status.CANCELLED, ErrorCode.CANCELLED)
    assert not lives("98767")


def test_first_cause_stands_when_cancel_and_deadline_meet(client: SpawnerClient) -> None:
    limits = Limits(runtime_max=0.05)
    for seq in range(1, 30):
        client.start(seq, ["/bin/sleep", "98768"], limits)
        client.wait_started(seq)
        client.send(protocol.Cancel(seq))
        outcome = client.wait_ended(seq)
        assert outcome.status in (Status.CANCELLED, Status.TIMEOUT)
        client.send(protocol.Acknowledge(seq))


def test_program_that_is_not_there_is_spawn_failed_with_the_step(client: SpawnerClient) -> None:
    client.start(1, ["/nonexistent/program"])
    outcome = client.wait_ended(1)
    assert outcome.error_code is ErrorCode.SPAWN_FAILED
    assert "exec" in outcome.reason
    assert "No such file" in outcome.reason


def test_memory_past_its_limit_is_oom_killed_with_evidence(client: SpawnerClient) -> None:
    outcome, _ = client.run(
        1,
        "python3 -c 'x=bytearray(200<<20); import time; time.sleep(30)'",
        Limits(memory_max=64 * MIB),
    )
    assert outcome.error_code is ErrorCode.OOM_KILLED
    assert "memory_max 64M reached" in outcome.reason
    assert "memory.events" in outcome.reason or "watchdog" in outcome.reason


def test_fork_bomb_is_held_and_leaves_nothing(client: SpawnerClient) -> None:
    client.start(
        1,
        ["/bin/bash", "-c", ":(){ :|:& };:; sleep 1"],
        Limits(tasks_max=24, runtime_max=5),
    )
    outcome = client.wait_ended(1)
    assert outcome.status in (Status.SUCCESS, Status.FAILED, Status.TIMEOUT)
    assert client.run(2, "echo still here")[1] == b"still here\n"


def test_process_that_forks_and_setsids_for_ever_dies(client: SpawnerClient) -> None:
    comet = "import os\nwhile 1:\n  if os.fork(): os._exit(0)\n  os.setsid()\n#comet98769"
    client.start(1, ["/usr/bin/python3", "-c", comet], Limits(runtime_max=1, tasks_max=24))
    client.wait_ended(1)
    assert not lives("comet98769")


def test_environment_and_descriptors_are_the_tasks_own(client: SpawnerClient) -> None:
    _, output = client.run(1, "env | sort; ls /proc/self/fd | tr '\\n' ' '")
    lines = output.decode().splitlines()
    names = {line.partition("=")[0] for line in lines[:-1]}
    assert names == {"HOME", "PATH", "PWD", "SHLVL", "TMPDIR", "_"}
    assert lines[-1].split() == ["0", "1", "2", "3"]


def test_task_has_its_own_session_and_no_terminal(client: SpawnerClient) -> None:
    _, output = client.run(1, "(: </dev/tty) 2>/dev/null; echo $?; ps -o pid=,sid=,pgid= -p $$")
    status, numbers = output.decode().splitlines()
    assert status != "0"
    assert len(set(numbers.split())) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: uids per slot")
def test_tasks_run_with_uids_of_their_own_and_without_privileges(client: SpawnerClient) -> None:
    script = "id -u; grep -E '^(Cap|NoNewPrivs)' /proc/self/status"
    first, second = client.run(1, script)[1].decode(), client.run(2, script)[1].decode()
    assert first.splitlines()[0] != second.splitlines()[0]
    for line in first.splitlines()[1:]:
        name, value = line.split()
        assert int(value, 16) == (1 if name == "NoNewPrivs:" else 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: the launcher has another uid")
def test_task_cannot_look_into_its_launcher(client: SpawnerClient) -> None:
    _, output = client.run(1, "cat /proc/$PPID/environ; kill -9 $PPID; echo $?")
    assert output.decode().splitlines()[-1] == "1"


def test_task_may_open_its_own_stdout_anew(client: SpawnerClient) -> None:
    assert client.run(1, "echo again > /dev/stdout; echo e > /dev/stderr")[1] == b"again\ne\n"


def test_work_directory_starts_empty_and_is_removed(client: SpawnerClient) -> None:
    for seq in (1, 2):
        outcome, output = client.run(seq, "ls -A; mkdir -p a/b; chmod 000 a; chmod 000 .; pwd")
        assert outcome.status is Status.SUCCESS
        directory = output.decode().strip()
        assert "\n" not in directory
        eventually(lambda directory=directory: not os.path.exists(directory))


def state_of(pid: int) -> str:
    one = proc.process(pid)
    return "gone" if one is None else one.state


def stopped_cleaner(client: SpawnerClient) -> int:
    """The child that cleans up after a task, in its midst; tried again when it was missed."""

    def stop() -> int:
        for pid in children(client.welcome.pid, "spawner"):
            with contextlib.suppress(OSError):
                # Only it has become the task's uid.
                if "\nUid:\t0\t" not in Path(f"/proc/{pid}/status").read_text():
                    os.kill(pid, signal.SIGSTOP)
                    # Ended and reaped, or a zombie, when the signal came late.
                    state = eventually(lambda pid=pid: state_of(pid).strip("RSD"))
                    return pid if state == "T" else 0
        return 0

    for seq in range(1, 20):
        client.run(seq, "mkdir d && seq 10000 | sed s:^:d/: | xargs touch")
        end = time.monotonic() + 2
        while time.monotonic() < end:
            if pid := stop():
                return pid
    raise AssertionError("no clean-up was met in its midst")


def test_waiting_launchers_go_while_a_long_clean_up_goes_on() -> None:
    """The child that does it holds none of their channels open."""
    client = SpawnerClient()
    spawner = client.welcome.pid
    eventually(lambda: len(launchers(spawner)) == client.settings.pool_min)
    cleaner = stopped_cleaner(client)
    try:
        client.send(protocol.Finish())
        eventually(lambda: not launchers(spawner))
    finally:
        os.kill(cleaner, signal.SIGCONT)
        eventually(lambda: reap(spawner))
        client.socket.close()
        left = os.listdir(client.home / "state/work")
        shutil.rmtree(client.home)
    assert left == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a file system of its own")
def test_start_whose_record_cannot_be_written_is_spawn_failed_and_takes_nothing_with_it(
    place: Path,
) -> None:
    with tiny_filesystem(place / "run", 1 << 16) as full:
        client = SpawnerClient(runtime_dir=str(full), pool_min=1, pool_max=1)
        filler, records = full / "filler", full / "spawner/record"
        try:
            assert client.run(1, "echo on")[1] == b"on\n"
            eventually(lambda: not os.listdir(records))
            fill(filler)
            for seq in (2, 3):
                outcome, _ = client.run(seq, "true")
                assert outcome.error_code is ErrorCode.SPAWN_FAILED
                assert "No space left" in outcome.reason
            filler.unlink()
            assert client.run(4, "echo on")[1] == b"on\n"
        finally:
            client.send_finish()
            left = [*records.iterdir(), *(client.home / "state/work").iterdir()]
            shutil.rmtree(client.home)
        assert left == []


def test_spawner_whose_files_a_cleaner_of_tmp_removed_goes_on_and_ends() -> None:
    client = SpawnerClient()
    spawner = client.welcome.pid
    eventually(lambda: len(launchers(spawner)) == 2)
    for file in (client.home / "run/spawner/output").iterdir():
        file.unlink()
    client.start(1, ["/bin/true"])
    assert client.wait_ended(1).status is Status.SUCCESS
    client.record(1).unlink()
    # Nothing but the acknowledgement is waited for.
    client.send(protocol.Finish())
    client.acknowledge(1)
    eventually(lambda: reap(spawner))
    client.socket.close()
    assert os.listdir(client.home / "state/work") == []
    shutil.rmtree(client.home)


def test_files_are_put_into_the_work_directory(client: SpawnerClient) -> None:
    client.start(
        1, ["/bin/bash", "-c", "cat ./f; stat -c %a:%u f; id -u"], files={"f": b"content\n"}
    )
    client.wait_ended(1)
    content, facts, uid = client.output(1).decode().split()
    assert content == "content"
    assert facts == f"600:{uid}"


def test_own_stdio_is_passed_through_apart(client: SpawnerClient) -> None:
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    null = os.open("/dev/null", os.O_RDONLY)
    client.start(
        1, ["/bin/bash", "-c", "echo out; echo err >&2"], stdio=(null, out_write, err_write)
    )
    for fd in (null, out_write, err_write):
        os.close(fd)
    assert client.wait_ended(1).status is Status.SUCCESS
    for fd, expected in ((out_read, b"out\n"), (err_read, b"err\n")):
        with open(fd, "rb") as pipe:
            assert pipe.read() == expected


def test_same_seq_does_not_run_twice(client: SpawnerClient) -> None:
    client.start(1, ["/bin/bash", "-c", "echo once; sleep 0.3"])
    client.wait_started(1)
    client.start(1, ["/bin/bash", "-c", "echo twice"])
    client.wait_ended(1)
    assert client.output(1) == b"once\n"


def test_killed_launcher_means_worker_lost_and_its_task_dies(client: SpawnerClient) -> None:
    client.start(1, ["/bin/sleep", "98770"])
    task = client.wait_started(1)
    found = proc.process(task)
    assert found is not None
    os.kill(found.parent, signal.SIGKILL)
    outcome = client.wait_ended(1)
    assert outcome.error_code is ErrorCode.WORKER_LOST
    assert "launcher" in outcome.reason
    assert not lives("98770")


def test_stopped_launcher_hangs_nobody(client: SpawnerClient) -> None:
    client.start(1, ["/bin/sleep", "98771"], Limits(timeout_stop=0.2))
    found = proc.process(client.wait_started(1))
    assert found is not None
    os.kill(found.parent, signal.SIGSTOP)
    assert client.run(2, "echo other")[1] == b"other\n"
    client.send(protocol.Cancel(1))
    assert client.wait_ended(1).status is Status.CANCELLED
    assert not lives("98771")


def test_wrong_protocol_version_is_refused_in_words(client: SpawnerClient) -> None:
    peer = sockets.connect_seqpacket(client.home / "run/spawner/1.sock")
    with peer:
        sockets.send_packet(peer, protocol.encode(protocol.Hello(999, "future")))
        answer = protocol.decode(peer.recv(65536))
        assert isinstance(answer, protocol.Refused)
        assert "version 999" in answer.reason
        assert peer.recv(65536) == b""
    assert client.run(1, "echo on")[1] == b"on\n"


@pytest.mark.parametrize(
    "packet",
    [b"not json", b"[]", b'{"type": "nonsense"}', b'{"type": "cancel"}', b'{"type": "hello"}'],
)
def test_malformed_packet_ends_that_connection_only(client: SpawnerClient, packet: bytes) -> None:
    peer = sockets.connect_seqpacket(client.home / "run/spawner/1.sock")
    with peer:
        peer.send(packet)
        assert isinstance(protocol.decode(peer.recv(65536)), protocol.Refused)
        assert peer.recv(65536) == b""
    assert client.run(1, "echo on")[1] == b"on\n"


def test_stopped_supervisor_does_not_stop_deadlines(client: SpawnerClient) -> None:
    # Nobody reads for a while: a hundred outcomes pile up, and none is lost.
    for seq in range(1, 101):
        client.start(seq, ["/bin/sleep", "98772"], Limits(runtime_max=0.2))
    eventually(lambda: not lives("98772"))
    for seq in range(1, 101):
        assert client.wait_ended(seq).status is Status.TIMEOUT
        client.send(protocol.Acknowledge(seq))
        client.output(seq)


def test_ephemeral_spawner_ends_everything_with_its_supervisor() -> None:
    client = SpawnerClient(Lifetime.EPHEMERAL)
    client.start(1, ["/bin/sleep", "98773"])
    client.wait_started(1)
    client.socket.shutdown(socket.SHUT_RDWR)
    client.socket.close()
    eventually(lambda: not lives("98773"))
    client.outputs.clear()
    eventually(lambda: not any(p == client.welcome.pid for p in proc.all_processes()))
    for left in ("run/spawner/output", "run/spawner/record", "state/work"):
        assert os.listdir(client.home / left) == []
    shutil.rmtree(client.home)


def test_spawner_survives_hundreds_of_tasks_without_leaks(client: SpawnerClient) -> None:
    client.run(1, "true")
    eventually(lambda: is_complete(client))
    descriptors = len(os.listdir(f"/proc/{client.welcome.pid}/fd"))
    for seq in range(2, 202):
        client.run(seq, "sleep 60 &")
    eventually(lambda: is_complete(client))
    eventually(lambda: len(os.listdir(f"/proc/{client.welcome.pid}/fd")) <= descriptors)


def is_complete(client: SpawnerClient) -> bool:
    """Whether the spawner has all that it has between tasks, and no other child."""
    spawner = client.welcome.pid
    zygotes = children(spawner, "zygote")
    ready = [len(children(spawner, "standby")), len(children(spawner, "launcher"))]
    return ready == [1, 2] and len(proc.children(spawner)) == 3 + len(zygotes)


def test_dead_standby_is_replaced(client: SpawnerClient) -> None:
    (first,) = eventually(lambda: children(client.welcome.pid, "standby"))
    kill_now(first)
    eventually(lambda: children(client.welcome.pid, "standby") not in ([], [first]))


def test_dead_zygote_is_replaced(client: SpawnerClient) -> None:
    before = eventually(lambda: children(client.welcome.pid, "zygote"))
    for pid in before:
        kill_now(pid)
    # The first two slots are ready.
    for seq in range(1, 4):
        assert client.run(seq, "echo on")[1] == b"on\n"
    assert set(eventually(lambda: children(client.welcome.pid, "zygote"))).isdisjoint(before)


def test_ready_slot_gets_the_limits_of_its_task(client: SpawnerClient) -> None:
    script = "ulimit -n; ulimit -f; ulimit -c"
    limits = Limits(limit_nofile=100, limit_fsize=1 << 20)
    assert client.run(1, script, limits)[1].split() == [b"100", b"1024", b"0"]
    outcome, _ = client.run(2, "sleep 30", Limits(runtime_max=0.2))
    assert outcome.status is Status.TIMEOUT


def test_killed_ready_launcher_is_replaced(client: SpawnerClient) -> None:
    eventually(lambda: is_complete(client))
    for pid in children(client.welcome.pid, "launcher"):
        kill_now(pid)
    assert client.run(1, "echo on")[1] == b"on\n"
    eventually(lambda: is_complete(client))
