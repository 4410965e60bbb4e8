"""One id again and again, cancels at every moment, and a cancel that meets a timeout."""

from __future__ import annotations

import concurrent.futures
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from both_links import over_both_links
from recording_scheduler import RecordingScheduler
from worker_process import DEADLINE_S, WorkerProcess, eventually

MakeWorker = Callable[..., WorkerProcess]

SHORT_TTL = 'dedup_ttl = "300ms"\ndedup_sweep = "100ms"'


def settled(worker: WorkerProcess) -> None:
    """Returns when nothing runs, waits or is owed."""

    def idle() -> bool:
        status = worker.status()
        return not (status["unfinished_tasks"] or status["undelivered_reports"])

    eventually(idle)


@pytest.fixture
def runs(place: Path) -> Path:
    """A file that gets a dot for each execution."""
    place.chmod(0o755)
    path = place / "runs"
    path.touch()
    # Each execution has a uid of its own.
    path.chmod(0o666)
    return path


def test_one_id_a_thousand_times_at_once_runs_once(
    scheduler: RecordingScheduler, worker: WorkerProcess, runs: Path
) -> None:
    url, script = worker.url, f"echo . >> {runs}; sleep 0.5"

    def send(_: int) -> int:
        return scheduler.dispatch(url, schedule_instance_id="t", payload=script)[0]

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        answers = Counter(pool.map(send, range(1000)))
    # During the run, and after its end.
    assert answers == {202: 1000}
    scheduler.terminal_report("t", DEADLINE_S)
    assert send(0) == 202
    settled(worker)
    worker.kill()
    worker.start()
    url = worker.url
    # After a restart.
    assert send(0) == 202
    settled(worker)
    assert runs.read_text() == ".\n"
    assert scheduler.kinds("t") == ["ack", "running", "success"]


@over_both_links
def test_id_after_its_ttl_runs_no_second_copy_while_it_runs_and_a_new_task_once_it_ended(
    scheduler: RecordingScheduler, make_worker: MakeWorker, runs: Path, place: Path
) -> None:
    worker = make_worker(worker=SHORT_TTL)
    url = worker.url
    script = f"echo . >> {runs}; until [ -e {place}/go ]; do sleep 0.02; done"
    scheduler.dispatch(url, schedule_instance_id="t", payload=script)
    eventually(runs.read_text)
    begun_at = time.monotonic()
    # Many times its time to live, with sweeps in it.
    while time.monotonic() < begun_at + 1.0:
        assert scheduler.dispatch(url, schedule_instance_id="t", payload=script)[0] == 202
    assert runs.read_text() == ".\n"
    (place / "go").touch()
    scheduler.terminal_report("t", DEADLINE_S)
    settled(worker)

    def is_history() -> bool:
        scheduler.dispatch(url, schedule_instance_id="t", payload=script)
        settled(worker)
        return runs.read_text() == ".\n.\n"

    # Ended, delivered and older than that: the id is a new task's.
    eventually(is_history)
    assert len(scheduler.terminal_reports("t")) == 2
    assert len([task for task in worker.tasks(all="1") if task["id"] == "t"]) == 2


def test_undelivered_task_is_no_new_one_however_old_it_is(
    scheduler: RecordingScheduler, make_worker: MakeWorker, runs: Path
) -> None:
    worker = make_worker(worker=SHORT_TTL)
    scheduler.wait_for(lambda s: s.workers)
    url, script = worker.url, f"echo . >> {runs}"
    scheduler.stop()
    scheduler.dispatch(url, schedule_instance_id="t", payload=script)
    eventually(lambda: worker.status()["undelivered_reports"] == 1)
    begun_at = time.monotonic()
    while time.monotonic() < begun_at + 1.0:
        assert scheduler.dispatch(url, schedule_instance_id="t", payload=script)[0] == 202
    scheduler.start()
    settled(worker)
    assert runs.read_text() == ".\n"
    assert len(scheduler.terminal_reports("t")) == 1


def test_cancel_before_during_and_after(
    scheduler: RecordingScheduler, worker: WorkerProcess, runs: Path
) -> None:
    url = worker.url
    for name in ("before", "twice"):
        assert "error" in scheduler.cancel(url, name)[1]
    assert "error" in scheduler.cancel(url, "twice")[1]
    worker.kill()
    worker.start()
    url = worker.url
    # Remembered over the restart.
    for name in ("before", "twice"):
        scheduler.dispatch(url, schedule_instance_id=name, payload=f"echo . >> {runs}")
        assert scheduler.terminal_report(name, DEADLINE_S)["status"] == "cancelled"
    assert not runs.read_text()
    scheduler.dispatch(url, schedule_instance_id="during", payload=f"echo . >> {runs}; sleep 60")
    eventually(runs.read_text)
    for _ in range(3):
        assert scheduler.cancel(url, "during")[0] == 200
    assert scheduler.terminal_report("during", DEADLINE_S)["status"] == "cancelled"
    scheduler.dispatch(url, schedule_instance_id="after", payload="true")
    assert scheduler.terminal_report("after", DEADLINE_S)["status"] == "success"
    assert "error" in scheduler.cancel(url, "after")[1]
    # A cancel that came too late is not kept for a task to come.
    settled(worker)
    for name in ("before", "twice", "during", "after"):
        assert len(scheduler.terminal_reports(name)) == 1
    assert runs.read_text() == ".\n"


@pytest.mark.timeout(600)
def test_cancel_within_10_ms_of_the_timeout_500_times_is_one_report_each(
    scheduler: RecordingScheduler, make_worker: MakeWorker
) -> None:
    worker = make_worker(worker="max_concurrency = 25\npool_max = 25")
    url = worker.url
    timeout_s = 1.0

    def one(number: int) -> str:
        name = f"t{number}"
        scheduler.dispatch(
            url,
            schedule_instance_id=name,
            payload="exec sleep 300",
            limits={"runtime_max": f"{timeout_s}s"},
        )
        (running,) = scheduler.wait_for(
            lambda s: [m for m in s.of(name) if m.kind == "running"], DEADLINE_S
        )
        # From 10 ms before the deadline to 10 ms after it, as well as a loaded machine can.
        due = running.at + timeout_s + (number % 21 - 10) / 1000
        time.sleep(max(0.0, due - time.monotonic()))
        scheduler.cancel(url, name)
        return name

    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        names = list(pool.map(one, range(500)))
    settled(worker)
    for name in names:
        (report,) = scheduler.terminal_reports(name)
        assert report["status"] in ("timeout", "cancelled")
        assert scheduler.kinds(name) == ["ack", "running", report["status"]]
    assert Counter(r["status"] for r in scheduler.terminal_reports()).total() == 500
