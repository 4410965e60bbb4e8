"""Container tasks of a real worker on a real Docker engine of the tests' own."""

from __future__ import annotations

import secrets
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_lab import IMAGE, Docker, EngineFailedError, EngineLab, Podman
from recording_scheduler import RecordingScheduler
from worker_process import DEADLINE_S, WorkerProcess, eventually, processes_that_name

from stockade.platform import pidfd, proc

MakeWorker = Callable[..., WorkerProcess]


ENGINES = {"docker": Docker, "podman": Podman}


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[EngineLab]:
    kind = ENGINES[request.param]
    reason = kind.why_not()
    if reason:
        pytest.skip(reason)
    made = kind()
    try:
        made.start()
        made.make_image()
    except EngineFailedError as error:
        made.close()
        pytest.skip(str(error))
    yield made
    made.close()


@pytest.fixture
def volume(engine: EngineLab) -> Path:
    path = engine.place / f"volume-{secrets.token_hex(4)}"
    path.mkdir()
    path.chmod(0o777)
    return path


@pytest.fixture
def start_worker(engine: EngineLab, make_worker: MakeWorker) -> MakeWorker:
    def start(container: str = "", **settings: Any) -> WorkerProcess:
        extra = f"""
            [task.container]
            engine = "{engine.client_program}"
            socket = "{engine.socket}"
            network = "none"
            pull = "never"
            {container}
            [limits]
            timeout_stop = "2s"
            """
        return make_worker(extra=extra, **settings)

    return start


@pytest.fixture
def worker(start_worker: MakeWorker, engine: EngineLab) -> Iterator[WorkerProcess]:
    yield start_worker()
    # Each test ends with its containers gone; what is removed late is removed by the worker.
    eventually(lambda: not engine.names())


def dispatch(
    scheduler: RecordingScheduler, worker: WorkerProcess, instance_id: str, payload: str,
    **fields: Any,
) -> None:  # fmt: skip
    status, body = scheduler.dispatch(
        worker.url, schedule_instance_id=instance_id, payload=payload,
        **{"task_type": "container", "image": IMAGE, **fields},
    )  # fmt: skip
    assert (status, body) == (202, {"status": "accepted"})


def run(
    scheduler: RecordingScheduler, worker: WorkerProcess, instance_id: str, payload: str,
    **fields: Any,
) -> dict[str, Any]:  # fmt: skip
    dispatch(scheduler, worker, instance_id, payload, **fields)
    return scheduler.terminal_report(instance_id, DEADLINE_S)


def running(engine: EngineLab, count: int = 1) -> list[str]:
    """The names of our running containers, once there are so many."""

    def look() -> list[str]:
        found = engine.names("--filter=status=running")
        return found if len(found) == count else []

    return eventually(look)


def code(report: dict[str, Any]) -> tuple[str, str, int | None]:
    return report["status"], report["error_code"], report["exit_code"]


# What runs


def test_container_runs_with_its_output_environment_and_exit_status(
    scheduler: RecordingScheduler, worker: WorkerProcess, engine: EngineLab
) -> None:
    payload = (
        "-e 'A=a b' --workdir /data sh -c 'pwd; echo $A $SHARD_NO/$SHARD_TOTAL >&2;"
        " echo $SCHEDULE_INSTANCE_ID $IDEMPOTENCY_KEY; wc -c; exit 3'"
    )
    fields = {"shard_no": 1, "shard_total": 2, "idempotency_key": "key"}
    report = run(scheduler, worker, "t-1", payload, **fields)
    assert code(report) == ("failed", "execute_failed", 3)
    lines = report["error_message"].split("\n")
    assert sorted(lines) == sorted(["exit status 3", "/data", "a b 1/2", "t-1 key", "0", ""])
    assert report["memory_peak_bytes"] is None
    assert engine.names() == []
    assert run(scheduler, worker, "t-2", "true")["status"] == "success"
    assert scheduler.kinds("t-2") == ["ack", "running", "success"]


def test_engine_holds_the_tasks_limits_name_and_labels(
    scheduler: RecordingScheduler, worker: WorkerProcess, engine: EngineLab
) -> None:
    limits = {"memory_max": "64M", "memory_swap_max": 0, "cpu_quota": "50%", "tasks_max": 30}
    dispatch(scheduler, worker, "../odd id\n", "sleep 60", limits=limits)
    (name,) = running(engine)
    found = engine.inspect(name)
    host, labels = found["HostConfig"], found["Config"]["Labels"]
    assert (host["Memory"], host["MemorySwap"]) == (64 << 20, 64 << 20)
    assert (host["NanoCpus"], host["PidsLimit"]) == (500_000_000, 30)
    assert (host["NetworkMode"], host["Init"], host["Privileged"]) == ("none", True, False)
    assert host["LogConfig"]["Type"] == "none"
    assert labels["stockade.worker"] == worker.id
    assert name.startswith(f"stockade-{worker.id}-")
    assert labels["stockade.instance"] in name
    # Nothing of the environment is to be read from a process's arguments.
    assert not processes_that_name("SCHEDULE_INSTANCE_ID=t")
    scheduler.cancel(worker.url, "../odd id\n")
    report = scheduler.terminal_report("../odd id\n", DEADLINE_S)
    assert report["degraded"] == []
    assert engine.names() == []


def test_output_is_bounded_like_any_other(
    scheduler: RecordingScheduler, worker: WorkerProcess, engine: EngineLab
) -> None:
    report = run(scheduler, worker, "t", "sh -c 'yes | head -c 30000000'", timeout_seconds=100)
    assert report["status"] == "success"
    assert report["output_bytes"] == 30_000_000
    assert report["output_truncated"] is True
    head = worker.place / "state/worker/output"
    assert sum(path.stat().st_size for path in head.iterdir()) <= 11 << 20


def test_profile_of_a_task_may_not_be_loosened_by_its_payload(
    scheduler: RecordingScheduler, worker: WorkerProcess
) -> None:
    for number, payload in enumerate(
        ["--privileged sh", "-v /:/host sh", "--pid=host sh", "--device /dev/null sh",
         "-v /var/run/docker.sock:/s sh", "--network=host sh", "--name x sh", "-d sh", "'"]
    ):  # fmt: skip
        report = run(scheduler, worker, f"t{number}", payload)
        assert code(report) == ("failed", "invalid_request", None), payload
        assert report["reason"]
    report = run(scheduler, worker, "image", "true", image="")
    assert (report["error_code"], "no image" in report["reason"]) == ("invalid_request", True)
    report = run(scheduler, worker, "files", "true", files={"a": "b"})
    assert (report["error_code"], "no files" in report["reason"]) == ("invalid_request", True)


def test_volume_below_a_configured_path_is_mounted(
    scheduler: RecordingScheduler, start_worker: MakeWorker, volume: Path
) -> None:
    worker = start_worker(f'volumes = ["{volume}"]')
    report = run(scheduler, worker, "rw", f"-v {volume}:/data sh -c 'echo hi >/data/file'")
    assert report["status"] == "success", report
    assert (volume / "file").read_text() == "hi\n"
    report = run(scheduler, worker, "ro", f"-v {volume}:/data:ro sh -c 'echo no >/data/file'")
    assert report["status"] == "failed"
    assert (volume / "file").read_text() == "hi\n"
    (volume / "escape").symlink_to("/")
    report = run(scheduler, worker, "link", f"-v {volume}/escape:/data true")
    assert code(report) == ("failed", "invalid_request", None)


# How it ends


@pytest.mark.parametrize("status", [125, 126, 127])
def test_exit_status_of_the_task_is_not_taken_for_the_engines(
    scheduler: RecordingScheduler, worker: WorkerProcess, status: int
) -> None:
    report = run(scheduler, worker, "t", f"sh -c 'exit {status}'")
    assert code(report) == ("failed", "execute_failed", status)
    assert report["reason"] == f"exit status {status}"


def test_missing_image_fails_with_the_engines_own_words(
    scheduler: RecordingScheduler, worker: WorkerProcess, engine: EngineLab
) -> None:
    report = run(scheduler, worker, "t", "true", image="no/such:image")
    assert code(report) == ("failed", "spawn_failed", 125)
    words = {"docker": "No such image: no/such:image", "podman": "no/such:image: image not known"}
    assert words[engine.program] in report["error_message"]


def test_container_that_cannot_be_started_is_the_engines_failure(
    scheduler: RecordingScheduler, worker: WorkerProcess, engine: EngineLab
) -> None:
    report = run(scheduler, worker, "t", "--user nobody-there true")
    assert report["error_code"] == "spawn_failed"
    assert "unable to find user nobody-there" in report["error_message"]
    if (
        engine.program == "docker"
    ):  # Podman takes any limit, and its runtime starts a task in this one
        report = run(scheduler, worker, "small", "true", limits={"memory_max": "1M"})
        assert report["error_code"] == "spawn_failed"
        assert "memory" in report["error_message"].lower()


def test_out_of_memory_is_told_by_the_engines_inspect(
    scheduler: RecordingScheduler, worker: WorkerProcess, engine: EngineLab
) -> None:
    if not engine.tells_oom():
        pytest.skip(f"{engine.program}'s own inspect tells of no OOM kill on this host")
    limits = {"memory_max": "32M", "memory_swap_max": 0}
    report = run(
        scheduler, worker, "t", "dd if=/dev/zero of=/dev/null bs=200M count=1", limits=limits
    )
    assert code(report) == ("failed", "oom_killed", 137)
    assert report["reason"] == "killed: memory_max 32M reached (the engine's inspect)"
    report = run(scheduler, worker, "self", "sh -c 'kill -9 $$; sleep 60'", limits=limits)
    assert code(report) == ("failed", "execute_failed", 137)


STUBBORN = "sh -c 'trap \"\" TERM INT; echo up; while :; do sleep 1; done'"
WILLING = "sh -c 'trap \"echo bye; exit 0\" TERM; echo up; while :; do sleep 0.1; done'"


@pytest.mark.parametrize(("payload", "exit_code"), [(STUBBORN, 137), (WILLING, 0)])
def test_timeout_stops_the_container_and_kills_one_that_does_not_stop(
    scheduler: RecordingScheduler, worker: WorkerProcess, engine: EngineLab, payload: str,
    exit_code: int,
) -> None:  # fmt: skip
    report = run(scheduler, worker, "t", payload, timeout_seconds=3)
    assert code(report) == ("timeout", "timeout", exit_code)
    assert "up\n" in report["error_message"]
    assert ("bye\n" in report["error_message"]) == (exit_code == 0)
    # Seen gone before it was reported.
    assert engine.names() == []


def test_cancel_ends_the_container(
    scheduler: RecordingScheduler, worker: WorkerProcess, engine: EngineLab
) -> None:
    dispatch(scheduler, worker, "t", STUBBORN)
    running(engine)
    assert scheduler.cancel(worker.url, "t")[0] == 200
    report = scheduler.terminal_report("t", DEADLINE_S)
    assert code(report)[:2] == ("cancelled", "cancelled")
    assert engine.names() == []


def test_cancel_at_any_moment_of_the_start_leaves_no_container(
    scheduler: RecordingScheduler, worker: WorkerProcess, engine: EngineLab
) -> None:
    for number in range(12):
        dispatch(scheduler, worker, f"t{number}", "sleep 300")
        if number % 3:
            scheduler.wait_for(lambda s, number=number: "running" in s.kinds(f"t{number}"))
        if number % 3 == 2:
            eventually(engine.names)
        scheduler.cancel(worker.url, f"t{number}")
        report = scheduler.terminal_report(f"t{number}", DEADLINE_S)
        assert report["status"] == "cancelled"
        assert engine.names() == []


def test_drain_ends_the_container(
    scheduler: RecordingScheduler, worker: WorkerProcess, engine: EngineLab
) -> None:
    dispatch(scheduler, worker, "t", STUBBORN)
    running(engine)
    assert worker.stop() == 0
    assert scheduler.terminal_report("t", DEADLINE_S)["status"] == "cancelled"
    assert engine.names() == []


def test_what_a_container_left_in_the_background_dies_with_it(
    scheduler: RecordingScheduler, worker: WorkerProcess, engine: EngineLab
) -> None:
    marker = f"3{secrets.randbelow(10**6):06}"
    report = run(scheduler, worker, "t", f"sh -c 'sleep {marker} & echo hi'")
    assert (report["status"], report["error_message"]) == ("success", "hi\n")
    assert not processes_that_name(f"sleep\0{marker}")


# Crashes


def finish(volume: Path) -> str:
    """A payload that ends with status 5 once ``volume/go`` is there."""
    return (
        f"-v {volume}:/data sh -c 'echo up; until [ -e /data/go ]; do sleep 0.1; done;"
        " echo over; exit 5'"
    )


@pytest.fixture
def volume_worker(
    start_worker: MakeWorker, volume: Path, engine: EngineLab
) -> Iterator[WorkerProcess]:
    yield start_worker(f'volumes = ["{volume}"]')
    eventually(lambda: not engine.names())


def assert_true_result(
    scheduler: RecordingScheduler, volume: Path, engine: EngineLab, *, output: bool
) -> None:
    (volume / "go").touch()
    report = scheduler.terminal_report("t", DEADLINE_S)
    assert code(report) == ("failed", "execute_failed", 5)
    assert ("over" in report["error_message"]) == output
    assert len(scheduler.terminal_reports("t")) == 1
    eventually(lambda: not engine.names())


def test_supervisor_that_crashed_reports_the_true_result(
    scheduler: RecordingScheduler, volume_worker: WorkerProcess, volume: Path, engine: EngineLab
) -> None:
    dispatch(scheduler, volume_worker, "t", finish(volume))
    running(engine)
    volume_worker.kill()
    volume_worker.start()
    assert_true_result(scheduler, volume, engine, output=True)


def test_standby_reports_the_true_result(
    scheduler: RecordingScheduler, volume_worker: WorkerProcess, volume: Path, engine: EngineLab
) -> None:
    dispatch(scheduler, volume_worker, "t", finish(volume))
    running(engine)
    spawner = volume_worker.active_spawner()
    pidfd.checked_kill(spawner, signal.SIGKILL)
    eventually(lambda: proc.process(spawner) is None)
    assert_true_result(scheduler, volume, engine, output=True)


def kill_all(worker: WorkerProcess) -> None:
    """SIGKILL of supervisor, spawner, standby, launchers and clients: all of the worker."""
    launchers = [
        pid
        for pid, process in proc.all_processes().items()
        if process.parent == worker.active_spawner() and pid not in worker.spawners()
    ]
    worker.signal(signal.SIGSTOP)
    for pid in (*worker.spawners(), *launchers):
        pidfd.checked_kill(pid, signal.SIGKILL)
    worker.kill()
    eventually(lambda: not worker.spawners())


def test_worker_that_was_killed_whole_adopts_the_container_and_reports_its_true_result(
    scheduler: RecordingScheduler, volume_worker: WorkerProcess, volume: Path, engine: EngineLab
) -> None:
    dispatch(scheduler, volume_worker, "t", finish(volume))
    running(engine)
    scheduler.wait_for(lambda s: "running" in s.kinds("t"))
    kill_all(volume_worker)
    assert len(engine.names("--filter=status=running")) == 1
    volume_worker.start()
    eventually(lambda: "followed by its name" in volume_worker.log)
    assert len(engine.names("--filter=status=running")) == 1
    assert_true_result(scheduler, volume, engine, output=False)


def test_container_that_ended_while_nobody_looked_is_told_truly(
    scheduler: RecordingScheduler, volume_worker: WorkerProcess, volume: Path, engine: EngineLab
) -> None:
    dispatch(scheduler, volume_worker, "t", finish(volume))
    running(engine)
    scheduler.wait_for(lambda s: "running" in s.kinds("t"))
    kill_all(volume_worker)
    (volume / "go").touch()
    eventually(lambda: not engine.names("--filter=status=running"))
    volume_worker.start()
    assert_true_result(scheduler, volume, engine, output=False)


def test_adopted_container_keeps_its_deadline(
    scheduler: RecordingScheduler, volume_worker: WorkerProcess, volume: Path, engine: EngineLab
) -> None:
    dispatch(scheduler, volume_worker, "t", finish(volume), timeout_seconds=6)
    running(engine)
    scheduler.wait_for(lambda s: "running" in s.kinds("t"))
    kill_all(volume_worker)
    volume_worker.start()
    report = scheduler.terminal_report("t", DEADLINE_S)
    assert report["status"] == "timeout"
    assert engine.names() == []


def test_client_that_was_killed_costs_output_and_not_the_result(
    scheduler: RecordingScheduler, volume_worker: WorkerProcess, volume: Path, engine: EngineLab
) -> None:
    dispatch(scheduler, volume_worker, "t", finish(volume))
    (name,) = running(engine)
    (client,) = [
        pid for pid in processes_that_name(f"--name={name}") if proc.process(pid) is not None
    ]
    pidfd.checked_kill(client, signal.SIGKILL)
    eventually(lambda: "followed by its name" in volume_worker.log)
    assert engine.names("--filter=status=running") == [name]
    assert_true_result(scheduler, volume, engine, output=False)


def test_followed_container_can_be_cancelled(
    scheduler: RecordingScheduler, volume_worker: WorkerProcess, volume: Path, engine: EngineLab
) -> None:
    dispatch(scheduler, volume_worker, "t", STUBBORN)
    (name,) = running(engine)
    for client in processes_that_name(f"--name={name}"):
        pidfd.checked_kill(client, signal.SIGKILL)
    eventually(lambda: "followed by its name" in volume_worker.log)
    scheduler.cancel(volume_worker.url, "t")
    report = scheduler.terminal_report("t", DEADLINE_S)
    assert code(report) == ("cancelled", "cancelled", 137)
    assert engine.names() == []


def test_engine_that_is_restarted_costs_output_and_not_the_result(
    scheduler: RecordingScheduler, volume_worker: WorkerProcess, volume: Path, engine: EngineLab
) -> None:
    dispatch(scheduler, volume_worker, "t", finish(volume))
    (name,) = running(engine)
    engine.kill()
    eventually(lambda: "the engine gives no answer" in volume_worker.log)
    engine.start()
    assert engine.names("--filter=status=running") == [name]
    assert_true_result(scheduler, volume, engine, output=False)


def test_leftovers_of_this_worker_are_swept_by_label_and_others_are_not(
    scheduler: RecordingScheduler, worker: WorkerProcess, engine: EngineLab
) -> None:
    dispatch(scheduler, worker, "t", "sleep 300")
    running(engine)
    label = f"stockade.worker={worker.id}"
    for name, mark in (("ours", label), ("ours-dead", label), ("theirs", f"{label}-2")):
        seconds = "0" if "dead" in name else "300"
        engine.call(
            "run", "-d", "--network=none", f"--name={name}", f"--label={mark}", IMAGE, "sleep",
            seconds,
        ).check_returncode()  # fmt: skip
    try:
        worker.kill()
        spawner = worker.active_spawner()
        pidfd.checked_kill(spawner, signal.SIGKILL)
        worker.start()
        eventually(lambda: set(engine.names()) & {"ours", "ours-dead"} == set())
        # A task's own container is no leftover.
        assert len(engine.names()) == 2
        scheduler.cancel(worker.url, "t")
        assert scheduler.terminal_report("t", DEADLINE_S)["status"] == "cancelled"
        assert engine.names() == ["theirs"]
    finally:
        for name in ("theirs", "ours", "ours-dead"):
            engine.call("rm", "--force", name)


# Who may reach the engine


def test_neither_supervisor_nor_tasks_can_open_the_engines_socket(
    scheduler: RecordingScheduler, start_worker: MakeWorker, engine: EngineLab
) -> None:
    assert stat.S_IMODE(engine.socket.stat().st_mode) & 0o007 == 0
    engine.place.chmod(0o755)
    worker = start_worker(worker='user = "nobody"')
    assert worker.process is not None
    status = Path(f"/proc/{worker.process.pid}/status").read_text()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    socket_gid = engine.socket.stat().st_gid
    assert set(fields["Uid"].split()) == {"65534"}
    assert str(socket_gid) not in fields["Groups"].split() + fields["Gid"].split()
    assert fields["CapEff"] == fields["CapPrm"] == "0" * 16
    connect = f"socket.socket(socket.AF_UNIX).connect('{engine.socket}')"
    script = f'python3 -c "import socket; {connect}"'
    report = run(scheduler, worker, "shell", script, task_type="shell")
    assert report["status"] == "failed"
    assert "Permission denied" in report["error_message"]
    assert run(scheduler, worker, "still", "true")["status"] == "success"


def test_worker_without_an_engine_says_so(
    scheduler: RecordingScheduler, make_worker: MakeWorker
) -> None:
    worker = make_worker(extra='[task.container]\nengine = "none"\n')
    report = run(scheduler, worker, "t", "true")
    assert code(report) == ("failed", "unsupported_task_type", None)
    assert "no engine" in report["reason"]


def test_engine_that_does_not_run_fails_its_tasks_alone(
    scheduler: RecordingScheduler, engine: EngineLab, make_worker: MakeWorker
) -> None:
    absent = f"{engine.place}/absent.sock"
    extra = f'[task.container]\nengine = "{engine.client_program}"\nsocket = "{absent}"\n'
    worker = make_worker(extra=extra)
    report = run(scheduler, worker, "t", "true")
    assert code(report) == ("failed", "spawn_failed", None)
    assert "cannot reach the container engine: " in report["reason"]
    assert "is it running" in report["reason"]
    assert run(scheduler, worker, "s", "true", task_type="shell")["status"] == "success"
