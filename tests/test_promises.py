"""What goes wrong for users of such workers, each as one test against a real worker.

From the failures of a peer worker and from public trackers of others; what another file covers
already (drain, adoption, duplicates at once, queueing) is not repeated here. Each is run over both
links.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable

import psutil
import pytest
from both_links import over_both_links
from recording_scheduler import Answer, Hang, RecordingScheduler
from worker_process import WorkerProcess, eventually, processes_that_name

from stockade.platform import proc
from stockade.supervisor.wire.messages import ACK_PATH, HEARTBEAT_PATH, REPORT_PATH

pytestmark = over_both_links

MakeWorker = Callable[..., WorkerProcess]
DEADLINE_S = 60.0


def send(
    scheduler: RecordingScheduler, worker: WorkerProcess, key: str, script: str, **fields: object
) -> None:
    status, answer = scheduler.dispatch(
        worker.url, schedule_instance_id=key, payload=script, **fields
    )
    assert status == 202, answer


def whole_output(worker: WorkerProcess, key: str) -> bytes:
    """What `stockade logs` would print."""
    parts = []
    offset = 0
    while True:
        part, offset, total, _, _ = worker.control.output(key, offset)
        parts.append(part)
        if offset >= total:
            return b"".join(parts)


def test_background_process_that_holds_the_output_delays_nothing(
    scheduler: RecordingScheduler, worker: WorkerProcess
) -> None:
    send(scheduler, worker, "a", "sleep 31001 & echo hi", timeout_seconds=60)
    report = scheduler.terminal_report("a", DEADLINE_S)
    assert (report["status"], report["error_message"]) == ("success", "hi\n")
    assert report["wall_s"] < 30
    assert not processes_that_name("31001")


def test_output_before_a_timeout_is_kept(
    scheduler: RecordingScheduler, worker: WorkerProcess
) -> None:
    send(scheduler, worker, "a", "echo so far; sleep 31002; echo never", timeout_seconds=1)
    report = scheduler.terminal_report("a", DEADLINE_S)
    assert (report["status"], report["error_code"]) == ("timeout", "timeout")
    assert report["error_message"].splitlines() == [report["reason"], "so far"]
    assert not processes_that_name("31002")


def test_output_and_exit_code_of_a_failure_are_reported(
    scheduler: RecordingScheduler, worker: WorkerProcess
) -> None:
    send(scheduler, worker, "a", "echo why; exit 3")
    report = scheduler.terminal_report("a", DEADLINE_S)
    assert (report["status"], report["error_code"]) == ("failed", "execute_failed")
    assert report["exit_code"] == 3
    assert report["error_message"].splitlines() == [report["reason"], "why"]


def test_more_memory_than_the_limit_is_killed_for_it(
    scheduler: RecordingScheduler, worker: WorkerProcess
) -> None:
    hog = "exec python3 -c 'import time; x = bytearray(1 << 30); time.sleep(60)'"
    send(scheduler, worker, "a", hog, timeout_seconds=60)
    report = scheduler.terminal_report("a", DEADLINE_S)
    assert (report["status"], report["error_code"]) == ("failed", "oom_killed")
    assert "256M" in report["reason"]


def test_payload_with_nul_is_refused_and_a_long_one_runs(
    scheduler: RecordingScheduler, worker: WorkerProcess
) -> None:
    status, answer = scheduler.dispatch(worker.url, schedule_instance_id="nul", payload="echo a\0b")
    assert status == 400
    assert "NUL" in answer["error"]
    send(scheduler, worker, "long", "echo $((1+1)) #" + "x" * 200_000)
    assert scheduler.terminal_report("long", DEADLINE_S)["error_message"] == "2\n"
    assert not scheduler.of("nul")


def test_worker_registers_again_when_its_scheduler_has_forgotten_it(
    scheduler: RecordingScheduler, make_worker: MakeWorker
) -> None:
    make_worker(lines="heartbeat_interval = 0.1")
    scheduler.wait_for(lambda s: s.workers, DEADLINE_S)
    scheduler.forget_workers()
    scheduler.wait_for(lambda s: len(s.workers) == 2, DEADLINE_S)
    told = [m.kind for m in scheduler.messages]
    # The next beat follows the second registration at once.
    again = len(told) - told[::-1].index("register") - 1
    scheduler.wait_for(lambda s: len(s.messages) > again + 1, DEADLINE_S)
    assert told[again - 1] == "heartbeat"
    assert scheduler.messages[again + 1].kind == "heartbeat"


def test_report_refused_for_ever_is_a_dead_letter_after_bounded_tries(
    scheduler: RecordingScheduler, make_worker: MakeWorker
) -> None:
    worker = make_worker(extra="[report]\nrefused_tries = 3\nrefused_period = 0.2")
    scheduler.misbehave(Answer(404), path=REPORT_PATH, matching=lambda m: m.id == "a")
    send(scheduler, worker, "a", "echo unwanted")
    send(scheduler, worker, "b", "echo wanted")
    assert scheduler.terminal_report("b", DEADLINE_S)["error_message"] == "wanted\n"
    eventually(lambda: worker.status()["undelivered_reports"] == 0)
    assert len(scheduler.terminal_reports("a")) == 3
    assert worker.log.count("dead letter") == 1


def test_huge_output_leaves_memory_flat(
    scheduler: RecordingScheduler, worker: WorkerProcess
) -> None:
    assert worker.process is not None
    supervisor = psutil.Process(worker.process.pid)
    before = supervisor.memory_info().rss
    send(scheduler, worker, "a", "head -c 200M /dev/zero | tr '\\0' x")
    report = scheduler.terminal_report("a", DEADLINE_S)
    assert report["status"] == "success"
    assert report["output_bytes"] == 200 << 20
    assert report["output_truncated"]
    assert len(report["error_message"].encode()) <= 1024
    assert supervisor.memory_info().rss - before < 32 << 20
    stored = sum(entry.stat().st_size for entry in os.scandir(worker.place / "state/worker/output"))
    assert stored <= (10 << 20) + (128 << 10)


def test_one_line_of_5_mb_is_kept_whole(
    scheduler: RecordingScheduler, worker: WorkerProcess
) -> None:
    send(scheduler, worker, "a", "head -c 5000000 /dev/zero | tr '\\0' y")
    report = scheduler.terminal_report("a", DEADLINE_S)
    assert report["output_bytes"] == 5_000_000
    assert not report["output_truncated"]
    assert whole_output(worker, "a") == b"y" * 5_000_000


def test_bytes_that_are_no_text_are_recoverable_and_reported_as_text(
    scheduler: RecordingScheduler, worker: WorkerProcess
) -> None:
    content = bytes(range(256)) * 256
    source = worker.place / "bytes"
    source.write_bytes(content)
    source.chmod(0o644)
    send(scheduler, worker, "a", f"cat {source}")
    report = scheduler.terminal_report("a", DEADLINE_S)
    assert report["status"] == "success"
    report["error_message"].encode()  # valid text: no lone surrogate
    assert whole_output(worker, "a") == content


def test_heartbeats_go_on_while_tasks_flood_the_output(
    scheduler: RecordingScheduler, make_worker: MakeWorker
) -> None:
    worker = make_worker(lines="heartbeat_interval = 1")
    for key in ("a", "b"):
        send(scheduler, worker, key, "yes", timeout_seconds=6)
    for key in ("a", "b"):
        assert scheduler.terminal_report(key, DEADLINE_S)["output_truncated"]
    beats = [message.at for message in scheduler.messages if message.path == HEARTBEAT_PATH]
    gaps = [later - earlier for earlier, later in itertools.pairwise(beats)]
    # A scheduler gives a worker up after three intervals.
    assert gaps
    assert max(gaps) < 3


@pytest.mark.parametrize(
    "key",
    ["../x", "/etc/x", "..", ".", "a/../../b", "x" * 256, "é\n%2e", " ", "'; rm -rf /", "$(id)"],
)
def test_any_instance_id_is_harmless(
    scheduler: RecordingScheduler, worker: WorkerProcess, key: str
) -> None:
    before = set(os.listdir(worker.place)) | set(os.listdir("/tmp"))
    send(scheduler, worker, key, 'printf %s "$SCHEDULE_INSTANCE_ID"')
    assert scheduler.terminal_report(key, DEADLINE_S)["error_message"] == key
    new = set(os.listdir(worker.place)) | set(os.listdir("/tmp"))
    assert not {name for name in new - before if key.strip("./") and key.strip("./") in name}


def test_type_in_another_case_is_sandboxed_all_the_same(
    scheduler: RecordingScheduler, worker: WorkerProcess
) -> None:
    send(scheduler, worker, "a", "echo $SANDBOX; id -u", task_type=" SHELL ")
    sandbox, uid = scheduler.terminal_report("a", DEADLINE_S)["error_message"].split()
    assert sandbox == "true"
    if os.geteuid() == 0:
        assert worker.uid_min <= int(uid) < worker.uid_min + 200


def test_scheduler_that_never_answers_delays_no_task(
    scheduler: RecordingScheduler, worker: WorkerProcess
) -> None:
    for path in (ACK_PATH, REPORT_PATH, HEARTBEAT_PATH):
        scheduler.misbehave(Hang(), path=path, times=1000)
    mark = worker.place / "mark"
    mark.touch()
    mark.chmod(0o666)
    send(scheduler, worker, "a", f"echo ran >> {mark}")
    # Well below the 10 s that one attempt at a report may take.
    eventually(lambda: mark.read_text() == "ran\n", 8)
    scheduler.behave()
    # Cuts the calls that hang.
    scheduler.stop()
    scheduler.start()
    assert scheduler.terminal_report("a", DEADLINE_S)["status"] == "success"


def test_failing_report_channel_frees_places_all_the_same(
    scheduler: RecordingScheduler, make_worker: MakeWorker
) -> None:
    worker = make_worker(worker="max_concurrency = 2")
    for path in (ACK_PATH, REPORT_PATH):
        scheduler.misbehave(Answer(500), path=path, times=100_000)
    mark = worker.place / "mark"
    mark.touch()
    mark.chmod(0o666)
    for number in range(6):
        send(scheduler, worker, f"t{number}", f"echo {number} >> {mark}")
    eventually(lambda: len(mark.read_text().split()) == 6)
    eventually(lambda: worker.status()["undelivered_reports"] == 6)
    scheduler.behave()
    for number in range(6):
        assert scheduler.terminal_report(f"t{number}", DEADLINE_S)["status"] == "success"


def test_code_that_blocks_every_signal_is_killed_on_time(
    scheduler: RecordingScheduler, worker: WorkerProcess
) -> None:
    script = """exec python3 -c '
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
while True: pass'"""
    send(scheduler, worker, "a", script, timeout_seconds=1)
    report = scheduler.terminal_report("a", DEADLINE_S)
    assert (report["status"], report["signal"]) == ("timeout", "SIGKILL")


def test_many_timeouts_leave_no_zombie(
    scheduler: RecordingScheduler, make_worker: MakeWorker
) -> None:
    worker = make_worker(worker="max_concurrency = 40")
    for number in range(200):
        send(scheduler, worker, f"t{number}", "sleep 31003", limits={"runtime_max": "200ms"})
    for number in range(200):
        assert scheduler.terminal_report(f"t{number}", DEADLINE_S)["status"] == "timeout"
    assert worker.process is not None
    ours = {worker.process.pid, *worker.spawners()}

    def zombies() -> list[int]:
        found = (proc.process(int(name)) for name in os.listdir("/proc") if name.isdigit())
        return [one.pid for one in found if one and one.state == "Z" and one.parent in ours]

    eventually(lambda: not zombies())
    assert not processes_that_name("31003")
