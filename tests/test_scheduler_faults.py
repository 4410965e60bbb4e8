"""A real worker whose scheduler misbehaves for longer than every timeout, and then behaves."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from recording_scheduler import (
    Answer,
    Behaviour,
    CutBody,
    Drip,
    Drop,
    Hang,
    Message,
    RecordingScheduler,
)
from worker_process import DEADLINE_S, WorkerProcess, eventually

from stockade.supervisor.wire.messages import REPORT_PATH

MakeWorker = Callable[..., WorkerProcess]

# Every timeout of the way there, an attempt's and the pauses', is over before this is.
HELD_S = 1.2
REPORT = """
[report]
attempt_timeout = "200ms"
retry_min = "50ms"
retry_max = "300ms"
refused_tries = 3
refused_period = "200ms"
"""
HEARTBEAT = 'heartbeat_interval = "200ms"'


def hold(begun_at: float) -> None:
    """Returns when the fault has lasted for long enough."""
    eventually(lambda: time.monotonic() > begun_at + HELD_S)


@pytest.fixture
def other() -> Iterator[RecordingScheduler]:
    """Another scheduler, which is well."""
    with RecordingScheduler() as well:
        yield well


@pytest.fixture
def two(
    scheduler: RecordingScheduler, other: RecordingScheduler, make_worker: MakeWorker
) -> WorkerProcess:
    """A worker of both, whose own scheduler is the first."""
    http = f'{HEARTBEAT}\nallow_schedulers = ["{other.url}"]'
    return make_worker(lines=http, extra=REPORT)


@pytest.mark.parametrize(
    "behaviour",
    [
        None,
        Hang(),
        Answer(500),
        Answer(429, headers={"Retry-After": "1"}),
        Answer(429, headers={"Retry-After": "Wed, 21 Oct 2125 07:28:00 GMT"}),
        Answer(503, headers={"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}),
        Answer(408),
        CutBody(),
        Drop(),
        Drip(),
        Answer(302, headers={"Location": "/elsewhere"}),
    ],
    ids=[
        "refuses", "never-answers", "500", "429", "429-a-century-ahead", "503-years-ago", "408",
        "closes-mid-body", "closes", "drips", "redirects",
    ],
)  # fmt: skip
def test_fault_that_passes_delays_reports_and_nothing_else(
    scheduler: RecordingScheduler,
    other: RecordingScheduler,
    two: WorkerProcess,
    place: Path,
    behaviour: Behaviour | None,
) -> None:
    place.chmod(0o777)
    scheduler.wait_for(lambda s: s.workers)
    url = two.url
    scheduler.dispatch(url, schedule_instance_id="before", payload="echo before")
    scheduler.terminal_report("before", DEADLINE_S)
    eventually(lambda: two.status()["undelivered_reports"] == 0)
    begun_at = time.monotonic()
    if behaviour is None:
        scheduler.stop()
    else:
        scheduler.misbehave(behaviour)
    for number in range(3):
        script = f": > {place}/during{number}.$EPOCHREALTIME; echo during"
        scheduler.dispatch(url, schedule_instance_id=f"during{number}", payload=script)
        # The other one, which is well, is served meanwhile.
        name = f"other{number}"
        scheduler.dispatch(
            url, schedule_instance_id=name, payload="echo other", scheduler_url=other.url
        )
        assert other.terminal_report(name, DEADLINE_S)["error_message"] == "other\n"
        assert other.kinds(name) == ["ack", "running", "success"]
    eventually(lambda: two.status()["undelivered_reports"] == 3)
    # A report is owed a moment before its task is forgotten.
    eventually(lambda: two.status()["unfinished_tasks"] == 0)
    hold(begun_at)
    assert all(len(list(place.glob(f"during{number}.*"))) == 1 for number in range(3))
    until_then = len(scheduler.messages)
    if behaviour is None:
        scheduler.start()
    scheduler.behave()
    eventually(lambda: two.status()["undelivered_reports"] == 0)
    later = scheduler.messages[until_then:]
    for number in range(3):
        ends = [m for m in scheduler.of(f"during{number}") if m.kind == "success"]
        # One counts: the one that was answered. None follows it, and no late running either.
        assert len([m for m in ends if m in later]) == 1
        assert scheduler.kinds(f"during{number}")[-1] == "success"
        assert {m.body["error_message"] for m in ends} == {"during\n"}
    assert two.control.get("/v1/deadletters")["total"] == 0


@pytest.mark.parametrize("status", [400, 401, 404, 413])
def test_refusal_for_ever_becomes_a_dead_letter_which_can_be_resent(
    scheduler: RecordingScheduler, make_worker: MakeWorker, status: int
) -> None:
    worker = make_worker(lines=HEARTBEAT, extra=REPORT)
    scheduler.misbehave(Answer(status), path=REPORT_PATH)
    begun_at = time.monotonic()
    for name in ("a", "b"):
        scheduler.dispatch(worker.url, schedule_instance_id=name, payload="echo out")
    eventually(lambda: worker.control.get("/v1/deadletters")["total"] == 2)
    hold(begun_at)
    tries = len(scheduler.terminal_reports("a"))
    # One more, without its excerpt, when that was said to be too much.
    assert tries == (4 if status == 413 else 3)
    scheduler.behave()
    assert worker.control.post("/v1/deadletters/resend", {"all": True}) == {"resent": 2}
    eventually(lambda: worker.status()["undelivered_reports"] == 0)
    assert worker.control.get("/v1/deadletters")["total"] == 0
    assert len(scheduler.terminal_reports("a")) == tries + 1
    assert scheduler.terminal_reports("a")[-1]["error_message"] == "out\n"


def test_conflict_is_the_end_of_it(scheduler: RecordingScheduler, make_worker: MakeWorker) -> None:
    worker = make_worker(lines=HEARTBEAT, extra=REPORT)
    begun_at = time.monotonic()
    scheduler.misbehave(Answer(409), path=REPORT_PATH)
    scheduler.dispatch(worker.url, schedule_instance_id="t", payload="true")
    scheduler.terminal_report("t", DEADLINE_S)
    hold(begun_at)
    assert len(scheduler.terminal_reports("t")) == 1
    eventually(lambda: worker.status()["undelivered_reports"] == 0)


def test_success_whose_answer_was_lost_stays_success_when_the_repeat_conflicts(
    scheduler: RecordingScheduler, make_worker: MakeWorker
) -> None:
    worker = make_worker(lines=HEARTBEAT, extra=REPORT)

    def is_end(message: Message) -> bool:
        return message.kind == "success"

    # Late enough that nobody waits for the answer any more, and then a conflict.
    scheduler.misbehave(Answer(delay_s=2.0), path=REPORT_PATH, matching=is_end, times=1)
    scheduler.misbehave(Answer(409), path=REPORT_PATH, matching=is_end)
    scheduler.dispatch(worker.url, schedule_instance_id="t", payload="echo out")
    eventually(lambda: len(scheduler.terminal_reports("t")) == 2)
    eventually(lambda: worker.status()["undelivered_reports"] == 0)
    (task,) = worker.tasks(all="1")
    assert (task["state"], task["outcome"]["status"]) == ("delivered", "success")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a process its own /etc/hosts")
def test_name_that_does_not_resolve_delays_reports_until_it_does(
    scheduler: RecordingScheduler, place: Path
) -> None:
    without = "127.0.0.1 localhost\n"
    (place / "hosts").write_text(without)
    (place / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
    worker = WorkerProcess(
        scheduler.url.replace("127.0.0.1", "scheduler.test"),
        lines=f'{HEARTBEAT}\nadvertise = "worker.test"',
        extra=REPORT,
    )
    mounts = " && ".join(
        f"mount --bind {place}/{name} /etc/{name}" for name in ("hosts", "resolv.conf")
    )
    worker.before = ("unshare", "-m", "sh", "-c", f'{mounts} && exec "$@"', "sh")
    try:
        worker.start()
        begun_at = time.monotonic()
        scheduler.dispatch(worker.url, schedule_instance_id="t", payload="echo out")
        eventually(lambda: worker.status()["undelivered_reports"] == 1)
        hold(begun_at)
        assert not scheduler.messages
        (told,) = worker.control.get("/v1/explain", {"id": "t"})["tasks"]
        assert "its report is owed" in told["now"]
        (place / "hosts").write_text(without + "127.0.0.1 scheduler.test\n")
        assert scheduler.terminal_report("t", DEADLINE_S)["error_message"] == "out\n"
        eventually(lambda: worker.status()["undelivered_reports"] == 0)
        assert len(scheduler.terminal_reports("t")) == 1
    finally:
        worker.close()


SKEWED_CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
static long skew(void) { return atol(getenv("TEST_CLOCK_SKEW_S")); }
int clock_gettime(clockid_t clock, struct timespec *now)
{
    static int (*real)(clockid_t, struct timespec *);
    if (!real)
        real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)
        now->tv_sec += skew();
    return result;
}
time_t time(time_t *out)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return out ? (*out = now.tv_sec) : now.tv_sec;
}
int gettimeofday(struct timeval *out, void *zone)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    out->tv_sec = now.tv_sec;
    out->tv_usec = now.tv_nsec / 1000;
    return 0;
}
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
@pytest.mark.parametrize("skews_s", [(3600, 0), (-3600, 0), (3600, -3600), (-3600, 3600)])
def test_clock_an_hour_off_moves_no_deadline_no_duplicate_check_and_no_report(
    scheduler: RecordingScheduler, place: Path, skews_s: tuple[int, int]
) -> None:
    """The supervisor's wall clock is off, and off the other way after a restart."""
    (place / "skew.c").write_text(SKEWED_CLOCK)
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", place / "skew.so", place / "skew.c", "-ldl"], check=True
    )
    place.chmod(0o777)
    worker = WorkerProcess(scheduler.url, lines=HEARTBEAT, extra=REPORT)

    def off_by(skew_s: int) -> None:
        worker.environment = {
            "LD_PRELOAD": str(place / "skew.so"),
            "TEST_CLOCK_SKEW_S": str(skew_s),
        }

    script = f": > {place}/runs.$EPOCHREALTIME; sleep 60"
    try:
        off_by(skews_s[0])
        worker.start()
        (beat,) = scheduler.wait_for(
            lambda s: [
                m for m in s.messages if m.kind == "heartbeat" and "report_unix_milli" in m.body
            ][:1]
        )
        assert abs(beat.body["report_unix_milli"] / 1000 - time.time() - skews_s[0]) < 600
        scheduler.dispatch(worker.url, schedule_instance_id="t", payload=script, timeout_seconds=4)
        scheduler.wait_for(lambda s: "running" in s.kinds("t"), DEADLINE_S)
        worker.kill()
        off_by(skews_s[1])
        worker.start()
        scheduler.dispatch(worker.url, schedule_instance_id="t", payload=script, timeout_seconds=4)
        report = scheduler.terminal_report("t", DEADLINE_S)
        assert (report["status"], report["error_code"]) == ("timeout", "timeout")
        assert 3.9 < report["wall_s"] < 60
        eventually(lambda: worker.status()["undelivered_reports"] == 0)
        # Still known: a clock that is ahead makes no row older than it is.
        scheduler.dispatch(worker.url, schedule_instance_id="t", payload=script)
        scheduler.dispatch(worker.url, schedule_instance_id="after", payload="echo after")
        assert scheduler.terminal_report("after", DEADLINE_S)["error_message"] == "after\n"
        eventually(lambda: worker.status()["undelivered_reports"] == 0)
        assert len(list(place.glob("runs.*"))) == 1
        assert len(scheduler.terminal_reports("t")) == 1
    finally:
        worker.close()


def test_dead_scheduler_leaves_the_well_one_all_its_speed(
    scheduler: RecordingScheduler, other: RecordingScheduler, two: WorkerProcess
) -> None:
    scheduler.wait_for(lambda s: s.workers)
    url = two.url
    scheduler.misbehave(Hang())
    for number in range(60):
        scheduler.dispatch(url, schedule_instance_id=f"dead{number}", payload="true")
        scheduler.dispatch(
            url, schedule_instance_id=f"well{number}", payload="true", scheduler_url=other.url
        )
    other.wait_for(lambda s: len(s.terminal_reports()) == 60, DEADLINE_S)
    # Each told whole and in order, while not one message of the dead one's was answered.
    assert all(other.kinds(f"well{n}") == ["ack", "running", "success"] for n in range(60))
    eventually(lambda: two.status()["undelivered_reports"] == 60)
    scheduler.behave()
    eventually(lambda: two.status()["undelivered_reports"] == 0)
    delivered = {report["schedule_instance_id"] for report in scheduler.terminal_reports()}
    assert delivered == {f"dead{number}" for number in range(60)}


# STOCKADE_TEST_BACKLOG=100000 for as many as an outage of hours leaves.
BACKLOG = int(os.environ.get("STOCKADE_TEST_BACKLOG", "10000"))
# A scheduler that records so many is slow at times, and what it answers late is sent again.
PATIENT_REPORT = REPORT.replace('attempt_timeout = "200ms"', 'attempt_timeout = "30s"')


def owe_reports(journal: Path, count: int, scheduler: str) -> None:
    """Put so many ended tasks, whose reports nobody took, into a journal that nobody has open."""
    connection = sqlite3.connect(journal, isolation_level=None)
    connection.execute(
        """
        WITH RECURSIVE numbers (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM numbers LIMIT ?)
        INSERT INTO tasks (state, scheduler, instance_id, accepted_at, started_at, finished_at,
                           outcome, excerpt, dispatch)
        SELECT 'finished', ?1, printf('old-%06d', n), 1.0, 2.0, 3.0 + n,
               '{"status":"success","exit_code":0}', printf('output of %d', n),
               CAST(json_object('instance_id', printf('old-%06d', n), 'scheduler', ?1,
                                'link', 'http', 'task_type', 'shell', 'payload', 'true') AS BLOB)
        FROM numbers
        """.replace("LIMIT ?)", "LIMIT ?2)"),
        (scheduler, count),
    )
    connection.close()


def resident_bytes(worker: WorkerProcess) -> int:
    assert worker.process is not None
    statm = Path(f"/proc/{worker.process.pid}/statm").read_text().split()
    return int(statm[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.timeout(3000)
def test_backlog_of_reports_holds_up_neither_the_start_nor_the_new_ones(
    scheduler: RecordingScheduler, make_worker: MakeWorker
) -> None:
    worker = make_worker(extra=PATIENT_REPORT)
    scheduler.wait_for(lambda s: s.workers)
    scheduler.dispatch(worker.url, schedule_instance_id="warm", payload="true")
    scheduler.terminal_report("warm", DEADLINE_S)
    eventually(lambda: worker.status()["undelivered_reports"] == 0)
    empty_bytes = resident_bytes(worker)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    owe_reports(worker.place / "state" / "worker" / "journal.db", BACKLOG, scheduler.url)
    scheduler.stop()
    worker.start()
    # It serves before it has looked at them all, and takes new work at once.
    status = worker.status()
    assert status["undelivered_reports"] == BACKLOG
    scheduler.dispatch(worker.url, schedule_instance_id="new-early", payload="true")
    eventually(lambda: worker.status()["undelivered_reports"] == BACKLOG + 1)
    seen = len(scheduler.messages)
    scheduler.start()
    scheduler.wait_for(lambda s: len(s.messages) > seen, DEADLINE_S)
    for number in range(20):
        name = f"new-{number}"
        scheduler.dispatch(worker.url, schedule_instance_id=name, payload="true")
        scheduler.terminal_report(name, DEADLINE_S)
    scheduler.terminal_report("new-early", DEADLINE_S)
    # The newest did not wait for the oldest.
    assert worker.status()["undelivered_reports"] > BACKLOG // 20
    while left := worker.status()["undelivered_reports"]:
        # However slow the machine is, it goes on.
        eventually(lambda: worker.status()["undelivered_reports"] < left, 60)
        time.sleep(0.5)
    assert resident_bytes(worker) - empty_bytes < 48 << 20
    messages = scheduler.messages[seen:]
    old = [m.id for m in messages if m.id.startswith("old-")]
    assert len(old) == len(set(old)) == BACKLOG
    # Oldest first: up to 16 are under way together, and each may pass so many others.
    assert all(abs(int(name[4:]) - place) <= 32 for place, name in enumerate(old))
    reporting = {m.connection for m in messages if m.path == REPORT_PATH}
    assert len(reporting) <= 16 + 2
