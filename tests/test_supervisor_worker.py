from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from both_links import over_both_links
from recording_scheduler import RecordingScheduler
from worker_process import DEADLINE_S, STOCKADE, WorkerProcess, eventually, processes_that_name

from stockade.platform import pidfd, proc
from stockade.supervisor.wire.messages import METRICS_PATH

MakeWorker = Callable[..., WorkerProcess]


def run(
    scheduler: RecordingScheduler,
    worker: WorkerProcess,
    instance_id: str,
    script: str,
    **fields: Any,
) -> dict[str, Any]:
    """Dispatch a task and return its terminal report."""
    status, body = scheduler.dispatch(
        worker.url, schedule_instance_id=instance_id, payload=script, **fields
    )
    assert (status, body) == (202, {"status": "accepted"})
    return scheduler.terminal_report(instance_id, DEADLINE_S)


def wait_running(scheduler: RecordingScheduler, *instance_ids: str) -> None:
    scheduler.wait_for(lambda s: all("running" in s.kinds(each) for each in instance_ids))


def assert_reported_once(scheduler: RecordingScheduler, instance_id: str) -> None:
    assert len(scheduler.terminal_reports(instance_id)) == 1


@over_both_links
def test_task_is_acked_then_running_then_success_with_its_output(
    scheduler: RecordingScheduler, worker: WorkerProcess
) -> None:
    report = run(scheduler, worker, "t", "echo hello; echo oops >&2")
    assert scheduler.kinds("t") == ["ack", "running", "success"]
    assert report["error_message"] == "hello\noops\n"
    assert (report["exit_code"], report["output_bytes"]) == (0, 11)
    assert report["worker_id"] == worker.id


@over_both_links
def test_outcome_is_told_by_status_and_error_code(
    scheduler: RecordingScheduler, worker: WorkerProcess
) -> None:
    cases: list[tuple[dict[str, Any], tuple[str, str]]] = [
        ({"payload": "exit 3"}, ("failed", "execute_failed")),
        ({"payload": "kill -9 $$"}, ("failed", "signaled")),
        ({"payload": "sleep 60", "timeout_seconds": 1}, ("timeout", "timeout")),
        ({"payload": "x", "task_type": "nonsense"}, ("failed", "unsupported_task_type")),
        ({"payload": "x", "task_type": " SHELL "}, ("failed", "execute_failed")),
        ({"payload": "x", "limits": {"memory_max": "lots"}}, ("failed", "invalid_request")),
        ({"payload": "x", "idempotency_key": "k" * 200_000}, ("failed", "invalid_request")),
        ({"payload": "x", "profile": "paranoid"}, ("failed", "invalid_request")),
        ({"payload": "ftp://x", "task_type": "http"}, ("failed", "invalid_request")),
    ]
    for number, (fields, _) in enumerate(cases):
        scheduler.dispatch(worker.url, schedule_instance_id=str(number), **fields)
    for number, (fields, expected) in enumerate(cases):
        report = scheduler.terminal_report(str(number), DEADLINE_S)
        assert (report["status"], report["error_code"]) == expected, fields
        assert report["reason"]


def test_metrics_tell_ended_tasks_and_the_load(
    scheduler: RecordingScheduler, worker: WorkerProcess
) -> None:
    run(scheduler, worker, "t", "exit 1")
    eventually(lambda: worker.status()["undelivered_reports"] == 0)
    with urllib.request.urlopen(worker.url + METRICS_PATH, timeout=DEADLINE_S) as response:
        lines = response.read().decode().splitlines()
    assert 'stockade_tasks_ended_total{error_code="execute_failed",status="failed"} 1.0' in lines
    assert "stockade_running_tasks 0.0" in lines
    assert "stockade_undelivered_reports 0.0" in lines


def test_log_that_cannot_be_written_stops_nothing(
    scheduler: RecordingScheduler, worker: WorkerProcess
) -> None:
    worker.kill()
    worker.before = ("sh", "-c", 'exec "$@" 2>/dev/full', "-")
    worker.start()
    assert run(scheduler, worker, "t", "echo hello")["status"] == "success"


@over_both_links
def test_long_payloads_run(scheduler: RecordingScheduler, worker: WorkerProcess) -> None:
    for size in (131_071, 131_072, 200_000, 1_000_000):
        script = "echo $((1+1)) #" + "x" * size
        assert run(scheduler, worker, f"t{size}", script)["error_message"] == "2\n"


@over_both_links
def test_worker_environment_and_descriptors_do_not_reach_a_task(
    scheduler: RecordingScheduler, worker: WorkerProcess
) -> None:
    report = run(
        scheduler, worker, "id/../x", "env; ls /proc/self/fd | wc -l",
        shard_no=2, shard_total=5, idempotency_key="key",
    )  # fmt: skip
    lines = report["error_message"].splitlines()
    names = {line.partition("=")[0] for line in lines[:-1]}
    # _, SHLVL and OLDPWD are bash's own.
    assert names - {"_", "SHLVL", "OLDPWD"} == {
        "PATH", "HOME", "TMPDIR", "PWD", "USER", "LOGNAME", "SHELL", "LANG", "SANDBOX",
        "IDEMPOTENCY_KEY", "SHARD_NO", "SHARD_TOTAL", "SCHEDULE_INSTANCE_ID",
    }  # fmt: skip
    assert {"IDEMPOTENCY_KEY=key", "SHARD_NO=2", "SHARD_TOTAL=5"} < set(lines)
    assert "SCHEDULE_INSTANCE_ID=id/../x" in lines
    assert lines[-1] == "4"  # 0, 1, 2, and the one that ls has open


@over_both_links
def test_same_id_runs_once_at_once_and_after_its_end(
    scheduler: RecordingScheduler, worker: WorkerProcess, place: Path
) -> None:
    place.chmod(0o777)
    script = f"echo run >> {place}/runs; sleep 0.3"
    for _ in range(3):
        scheduler.dispatch(worker.url, schedule_instance_id="t", payload=script)
    scheduler.terminal_report("t")
    assert scheduler.dispatch(worker.url, schedule_instance_id="t", payload=script)[0] == 202
    run(scheduler, worker, "other", "true")
    assert (place / "runs").read_text() == "run\n"
    assert_reported_once(scheduler, "t")


@over_both_links
def test_max_concurrency_is_kept_and_the_rest_waits_in_order(
    scheduler: RecordingScheduler, make_worker: MakeWorker, place: Path
) -> None:
    place.chmod(0o777)
    (place / "log").touch()
    (place / "log").chmod(0o666)
    worker = make_worker(worker="max_concurrency = 2")
    script = f"echo + >> {place}/log; sleep 0.2; echo - >> {place}/log"
    for number in range(8):
        scheduler.dispatch(worker.url, schedule_instance_id=f"t{number}", payload=script)
    scheduler.wait_for(lambda s: len(s.terminal_reports()) == 8, DEADLINE_S)
    running = most = 0
    for line in (place / "log").read_text().split():
        running += 1 if line == "+" else -1
        most = max(most, running)
    assert most == 2
    started = [m.id for m in scheduler.messages if m.kind == "running"]
    assert [int(each[1:]) // 2 for each in started] == [0, 0, 1, 1, 2, 2, 3, 3]


@over_both_links
def test_cancel_ends_a_running_a_queued_and_a_future_task(
    scheduler: RecordingScheduler, make_worker: MakeWorker
) -> None:
    worker = make_worker(worker="max_concurrency = 1")
    scheduler.dispatch(worker.url, schedule_instance_id="running", payload="echo begun; sleep 60")
    scheduler.dispatch(worker.url, schedule_instance_id="queued", payload="echo never")
    wait_running(scheduler, "running")
    eventually(lambda: worker.control.output("running", 0)[0])
    assert scheduler.cancel(worker.url, "queued") == (200, {"status": "cancelled"})
    assert scheduler.terminal_report("queued")["status"] == "cancelled"
    assert "error" in scheduler.cancel(worker.url, "future")[1]
    scheduler.dispatch(worker.url, schedule_instance_id="future", payload="echo never")
    assert scheduler.terminal_report("future")["status"] == "cancelled"
    assert scheduler.cancel(worker.url, "running")[0] == 200
    report = scheduler.terminal_report("running")
    assert (report["status"], report["error_code"]) == ("cancelled", "cancelled")
    assert report["error_message"].endswith("\nbegun\n")
    for instance_id in ("queued", "future"):
        assert "running" not in scheduler.kinds(instance_id)
        assert scheduler.terminal_reports(instance_id)[0]["output_bytes"] == 0
    assert "error" in scheduler.cancel(worker.url, "running")[1]


@over_both_links
def test_task_survives_the_supervisor_and_is_reported_once_with_all_its_output(
    scheduler: RecordingScheduler, worker: WorkerProcess, place: Path
) -> None:
    place.chmod(0o777)
    script = f"echo one; until [ -e {place}/go ]; do sleep 0.05; echo -n .; done; echo two"
    scheduler.dispatch(worker.url, schedule_instance_id="t", payload=script)
    eventually(lambda: b"one" in worker.control.output("t", 0)[0])
    worker.kill()
    worker.start()
    assert scheduler.dispatch(worker.url, schedule_instance_id="t", payload=script)[0] == 202
    (place / "go").touch()
    report = scheduler.terminal_report("t", DEADLINE_S)
    assert report["status"] == "success"
    assert report["error_message"].replace(".", "") == "one\ntwo\n"
    assert_reported_once(scheduler, "t")


def test_end_while_the_supervisor_is_dead_is_reported_when_it_is_back(
    scheduler: RecordingScheduler, worker: WorkerProcess, place: Path
) -> None:
    place.chmod(0o777)
    script = f"until [ -e {place}/go ]; do sleep 0.05; done; echo done; touch {place}/gone; exit 4"
    scheduler.dispatch(worker.url, schedule_instance_id="t", payload=script)
    wait_running(scheduler, "t")
    worker.kill()
    (place / "go").touch()
    eventually((place / "gone").exists)
    worker.start()
    report = scheduler.terminal_report("t", DEADLINE_S)
    assert (report["exit_code"], report["error_message"]) == (4, "exit status 4\ndone\n")
    assert_reported_once(scheduler, "t")


def test_task_survives_the_spawner(scheduler: RecordingScheduler, worker: WorkerProcess) -> None:
    scheduler.dispatch(worker.url, schedule_instance_id="t", payload="echo a; sleep 2; echo b")
    wait_running(scheduler, "t")
    pidfd.checked_kill(worker.active_spawner(), signal.SIGKILL)
    assert scheduler.terminal_report("t", DEADLINE_S)["error_message"] == "a\nb\n"
    assert run(scheduler, worker, "after", "echo c")["error_message"] == "c\n"
    assert_reported_once(scheduler, "t")


def test_spawner_can_die_again_and_again(
    scheduler: RecordingScheduler, worker: WorkerProcess
) -> None:
    for number in range(3):
        eventually(lambda: len(worker.spawners()) == 2)
        pidfd.checked_kill(worker.active_spawner(), signal.SIGKILL)
        assert run(scheduler, worker, f"t{number}", "echo ok")["error_message"] == "ok\n"


def test_worker_ends_with_75_when_spawner_and_standby_are_gone(
    scheduler: RecordingScheduler, worker: WorkerProcess
) -> None:
    scheduler.dispatch(worker.url, schedule_instance_id="t", payload="sleep 1; echo alive")
    wait_running(scheduler, "t")
    for pid in worker.spawners():
        pidfd.checked_kill(pid, signal.SIGSTOP)
    for pid in worker.spawners():
        pidfd.checked_kill(pid, signal.SIGKILL)
    assert worker.wait() == 75
    worker.start()
    assert scheduler.terminal_report("t", DEADLINE_S)["error_message"] == "alive\n"
    assert_reported_once(scheduler, "t")


def test_task_is_lost_when_the_host_forgot_it(
    scheduler: RecordingScheduler, worker: WorkerProcess
) -> None:
    scheduler.dispatch(worker.url, schedule_instance_id="t", payload="echo seen; sleep 300.5")
    eventually(lambda: worker.control.output("t", 0)[0])
    worker.kill()
    # As a reboot leaves it: no process of ours and nothing in /run.
    for pid in worker.spawners():
        pidfd.checked_kill(pid, signal.SIGKILL)
    uids = range(worker.uid_min, worker.uid_min + 200)
    eventually(lambda: kill_all_of(uids))
    shutil.rmtree(worker.place / "run")
    worker.start()
    report = scheduler.terminal_report("t", DEADLINE_S)
    assert (report["status"], report["error_code"]) == ("failed", "worker_lost")
    assert report["error_message"].endswith("\nseen\n")
    assert_reported_once(scheduler, "t")


def kill_all_of(uids: range) -> bool:
    pids = [pid for uid in uids for pid in proc.processes_of_uid(uid)]
    for pid in pids:
        pidfd.checked_kill(pid, signal.SIGKILL)
    return not pids


@over_both_links
def test_undelivered_report_survives_a_restart(
    scheduler: RecordingScheduler, worker: WorkerProcess
) -> None:
    scheduler.wait_for(lambda s: s.workers)
    url = worker.url
    scheduler.stop()
    scheduler.dispatch(url, schedule_instance_id="t", payload="echo kept")
    eventually(lambda: worker.tasks(undelivered="1"))
    worker.kill()
    worker.start()
    scheduler.start()
    assert scheduler.terminal_report("t", DEADLINE_S)["error_message"] == "kept\n"
    eventually(lambda: worker.status()["undelivered_reports"] == 0)
    assert_reported_once(scheduler, "t")


@over_both_links
def test_worker_serves_while_its_scheduler_is_down_and_registers_later(
    scheduler: RecordingScheduler, make_worker: MakeWorker
) -> None:
    scheduler.stop()
    worker = make_worker()
    scheduler.dispatch(worker.url, schedule_instance_id="t", payload="echo early")
    scheduler.start()
    scheduler.wait_for(lambda s: s.workers, DEADLINE_S)
    assert scheduler.terminal_report("t", DEADLINE_S)["error_message"] == "early\n"


@over_both_links
def test_sigterm_drains_reports_full_load_and_ends_with_0(
    scheduler: RecordingScheduler, make_worker: MakeWorker
) -> None:
    worker = make_worker(worker="max_concurrency = 7")
    scheduler.dispatch(worker.url, schedule_instance_id="t", payload="sleep 1; echo whole")
    wait_running(scheduler, "t")
    worker.signal(signal.SIGTERM)
    scheduler.wait_for(
        lambda s: [m for m in s.messages if m.body.get("current_load") == 7], DEADLINE_S
    )
    # Who has not heard of it yet still gets its task run.
    assert run(scheduler, worker, "late", "echo late")["status"] == "success"
    assert scheduler.terminal_report("t")["error_message"] == "whole\n"
    assert worker.wait() == 0


@pytest.mark.parametrize(("drain_timeout", "signals"), [("200ms", 1), ("5min", 2)])
def test_end_of_the_drain_terminates_and_reports_each_task_and_keeps_the_queue(
    scheduler: RecordingScheduler, make_worker: MakeWorker, drain_timeout: str, signals: int
) -> None:
    worker = make_worker(worker=f'max_concurrency = 2\ndrain_timeout = "{drain_timeout}"')
    for name in ("a", "b", "queued"):
        payload = "echo $SCHEDULE_INSTANCE_ID; sleep 2.5"
        scheduler.dispatch(worker.url, schedule_instance_id=name, payload=payload)
    wait_running(scheduler, "a", "b")
    for _ in range(signals):
        worker.signal(signal.SIGTERM)
        eventually(lambda: "draining" in worker.log)
    assert worker.wait() == 0
    for name in ("a", "b"):
        (report,) = scheduler.terminal_reports(name)
        assert report["status"] == "cancelled"
        assert "worker was stopped" in report["reason"]
    assert not scheduler.terminal_reports("queued")
    worker.start()
    assert scheduler.terminal_report("queued", DEADLINE_S)["error_message"] == "queued\n"


def test_second_worker_on_the_same_state_is_refused(worker: WorkerProcess) -> None:
    second = subprocess.run(
        [*STOCKADE, "worker", "--config", str(worker.place / "stockade.toml")],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert second.returncode == 1
    assert "another worker runs in it" in second.stderr
    assert "Traceback" not in second.stderr


def test_bad_configuration_ends_with_78_and_no_traceback(place: Path) -> None:
    (place / "bad.toml").write_text("[worker]\nmax_concurency = 3\n")
    ended = subprocess.run(
        [*STOCKADE, "worker", "--config", str(place / "bad.toml")],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ended.returncode == 78
    assert "max_concurrency" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_many_tasks_leave_no_descriptor_and_no_child_behind(
    scheduler: RecordingScheduler, worker: WorkerProcess
) -> None:
    def burst(name: str) -> None:
        for number in range(60):
            scheduler.dispatch(
                worker.url, schedule_instance_id=f"{name}{number}", payload="echo $RANDOM"
            )
        scheduler.wait_for(
            lambda s: len([m for m in s.messages if m.kind == "success" and m.id[0] == name]) == 60,
            DEADLINE_S,
        )
        eventually(lambda: worker.status()["unfinished_tasks"] == 0)

    assert worker.process is not None
    pid = worker.process.pid
    descriptors = []
    for name in "abc":
        burst(name)
        descriptors.append(
            sum(
                not os.readlink(f"/proc/{pid}/fd/{fd}").startswith("socket:")
                for fd in os.listdir(f"/proc/{pid}/fd")
            )
        )
    assert descriptors[1] == descriptors[2]
    assert [p.pid for p in proc.all_processes().values() if p.parent == pid] == [
        worker.active_spawner()
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_supervisor_started_as_root_becomes_its_user(
    scheduler: RecordingScheduler, make_worker: MakeWorker
) -> None:
    worker = make_worker(worker='user = "nobody"')
    assert worker.process is not None
    status = Path(f"/proc/{worker.process.pid}/status").read_text()
    assert "Uid:\t65534\t65534\t65534\t65534" in status
    assert "CapEff:\t0000000000000000" in status
    assert "CapPrm:\t0000000000000000" in status
    report = run(scheduler, worker, "t", "id -u; id -g")
    uid, gid = report["error_message"].split()[:2]
    assert int(uid) in range(worker.uid_min, worker.uid_min + 200)
    assert gid == uid
    pidfd.checked_kill(worker.active_spawner(), signal.SIGKILL)
    assert run(scheduler, worker, "after", "echo still")["error_message"] == "still\n"


@over_both_links
def test_what_a_task_leaves_running_is_gone_with_it(
    scheduler: RecordingScheduler, worker: WorkerProcess
) -> None:
    for number, script in enumerate(
        ("sleep 321.5 & echo hi", "(setsid sleep 321.5 &); echo hi; exit 0")
    ):
        assert run(scheduler, worker, f"t{number}", script)["error_message"] == "hi\n"
        assert not processes_that_name("321.5")


@pytest.fixture
def small_disk_worker(scheduler: RecordingScheduler) -> Iterator[WorkerProcess]:
    """A worker whose state_dir is a file system of 8 MiB."""
    worker = WorkerProcess(
        scheduler.url,
        worker="max_concurrency = 5\npool_max = 0",
        lines='heartbeat_interval = "100ms"',
    )
    state = worker.place / "state"
    state.mkdir(0o711)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m,mode=0711", "none", state], check=True)
    try:
        yield worker.start()
    finally:
        try:
            worker.stop()
            worker.check_nothing_left()
        finally:
            subprocess.run(["umount", "--lazy", state], check=True)
            worker.process = None
            worker.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")
def test_full_disk_refuses_dispatches_reports_full_load_and_recovers_by_itself(
    scheduler: RecordingScheduler, small_disk_worker: WorkerProcess
) -> None:
    worker = small_disk_worker
    state = worker.place / "state"
    running = "until [ -e go ]; do sleep 0.05; done; echo out"
    scheduler.dispatch(worker.url, schedule_instance_id="running", payload=running)
    wait_running(scheduler, "running")
    (work,) = (state / "work").iterdir()
    with open(state / "filler", "wb", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(b"x" * 4096)
    payload = "echo later #" + "x" * 100_000
    answers = [
        scheduler.dispatch(worker.url, schedule_instance_id=f"t{number}", payload=payload)[0]
        for number in range(3)
    ]
    assert answers[-1] == 503
    scheduler.wait_for(
        lambda s: [
            m
            for m in s.messages
            if (m.body.get("current_load"), m.body.get("running_tasks")) == (5, 1)
        ],
        DEADLINE_S,
    )
    (state / "filler").unlink()
    eventually(lambda: worker.status()["journal_fault"] is None)
    assert run(scheduler, worker, "t9", payload)["error_message"] == "later\n"
    (work / "go").touch()
    assert scheduler.terminal_report("running", DEADLINE_S)["error_message"] == "out\n"
