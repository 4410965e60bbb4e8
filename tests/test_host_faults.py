"""A real worker on a host that fails it: damaged and read-only journals, nothing left to take."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from injection import Fault, attached, needs_strace
from recording_scheduler import RecordingScheduler
from spawner_client import children
from worker_process import DEADLINE_S, WorkerProcess, eventually

MakeWorker = Callable[..., WorkerProcess]

PAGE_BYTES = 4096
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def overwrite_header(journal: Path) -> None:
    with journal.open("r+b") as file:
        file.write(b"no database any more" * 20)


def truncate(journal: Path) -> None:
    os.truncate(journal, journal.stat().st_size // 2)


def overwrite_middle(journal: Path) -> None:
    """The pages from the middle on, but for the last."""
    pages = journal.stat().st_size // PAGE_BYTES
    with journal.open("r+b") as file:
        file.seek(pages // 2 * PAGE_BYTES)
        file.write(os.urandom((pages - pages // 2 - 1) * PAGE_BYTES))


@pytest.mark.parametrize("damage", [overwrite_header, truncate, overwrite_middle])
def test_damaged_journal_is_set_aside_and_said_and_the_worker_goes_on(
    scheduler: RecordingScheduler,
    make_worker: MakeWorker,
    place: Path,
    damage: Callable[[Path], None],
) -> None:
    place.chmod(0o777)
    worker = make_worker()
    scheduler.wait_for(lambda s: s.workers)
    url = worker.url
    scheduler.stop()
    for number in range(40):
        script = f": > {place}/run{number}.$EPOCHREALTIME #" + "x" * 1500
        scheduler.dispatch(url, schedule_instance_id=f"t{number}", payload=script)
    eventually(lambda: worker.status()["undelivered_reports"] == 40)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    journal = worker.place / "state" / "worker" / "journal.db"
    damage(journal)
    remains = journal.read_bytes()
    scheduler.start()
    worker.start()
    assert "the journal was damaged and set aside" in worker.log
    (aside,) = journal.parent.glob("journal.db.damaged-*")
    assert aside.read_bytes() == remains
    eventually(lambda: worker.status()["undelivered_reports"] == 0)
    # What could be read is told, once, and nothing else is.
    told = [report["schedule_instance_id"] for report in scheduler.terminal_reports()]
    assert len(told) == len(set(told))
    assert bool(told) == (damage is not overwrite_header)
    assert {report["status"] for report in scheduler.terminal_reports()} <= {"success"}
    scheduler.dispatch(worker.url, schedule_instance_id="after", payload="echo after")
    assert scheduler.terminal_report("after", DEADLINE_S)["error_message"] == "after\n"
    assert all(len(list(place.glob(f"run{number}.*"))) == 1 for number in range(40))
    worker.kill()
    worker.start()
    assert len(list(journal.parent.glob("journal.db.damaged-*"))) == 1


@pytest.fixture
def worker_on_a_mount(scheduler: RecordingScheduler) -> Iterator[WorkerProcess]:
    """A worker whose state_dir is a file system of its own."""
    worker = WorkerProcess(scheduler.url, lines='heartbeat_interval = "100ms"')
    state = worker.place / "state"
    state.mkdir(0o711)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m,mode=0711", "none", state], check=True)
    try:
        yield worker.start()
    finally:
        subprocess.run(["mount", "-o", "remount,rw", state], check=True)
        try:
            worker.stop()
            worker.check_nothing_left()
        finally:
            subprocess.run(["umount", "--lazy", state], check=True)
            worker.process = None
            worker.close()


@needs_root
def test_file_system_that_becomes_read_only_refuses_work_and_recovers_by_itself(
    scheduler: RecordingScheduler, worker_on_a_mount: WorkerProcess
) -> None:
    worker = worker_on_a_mount
    state = worker.place / "state"
    scheduler.dispatch(worker.url, schedule_instance_id="running", payload="sleep 2; echo out")
    scheduler.wait_for(lambda s: "running" in s.kinds("running"), DEADLINE_S)
    pid = worker.process.pid if worker.process is not None else 0
    # As the kernel does it after an error of the disk; files that are open may not keep it back.
    assert pid
    subprocess.run(["mount", "-o", "remount,ro", state], check=False)
    if os.access(state, os.W_OK) and "ro" not in mount_options(state):
        # It is busy: then the journal's own calls say so.
        journal_thread = sorted(int(name) for name in os.listdir(f"/proc/{pid}/task"))[1]
        with attached(journal_thread, Fault("pwrite64", 1, "EROFS", times=60000)):
            refuses_and_reports_full_load(scheduler, worker)
    else:
        refuses_and_reports_full_load(scheduler, worker)
        subprocess.run(["mount", "-o", "remount,rw", state], check=True)
    eventually(lambda: worker.status()["journal_fault"] is None)
    scheduler.dispatch(worker.url, schedule_instance_id="after", payload="echo after")
    assert scheduler.terminal_report("after", DEADLINE_S)["error_message"] == "after\n"
    assert scheduler.terminal_report("running", DEADLINE_S)["error_message"] == "out\n"
    for name in ("running", "after"):
        assert len(scheduler.terminal_reports(name)) == 1


def mount_options(path: Path) -> list[str]:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[4] == str(path):
            return fields[5].split(",") + fields[-1].split(",")
    return []


def refuses_and_reports_full_load(scheduler: RecordingScheduler, worker: WorkerProcess) -> None:
    status, body = scheduler.dispatch(worker.url, schedule_instance_id="no", payload="true")
    assert status == 503
    assert "cannot write the journal" in body["error"]
    full = worker.status()["max_concurrency"]
    scheduler.wait_for(
        lambda s: [m for m in s.messages if m.body.get("current_load") == full], DEADLINE_S
    )


@needs_root
def test_supervisor_without_a_descriptor_left_recovers_and_loses_nothing(
    scheduler: RecordingScheduler, worker: WorkerProcess, place: Path
) -> None:
    place.chmod(0o777)
    assert worker.process is not None
    pid, url = worker.process.pid, worker.url
    scheduler.dispatch(url, schedule_instance_id="before", payload="sleep 1; echo before")
    scheduler.wait_for(lambda s: "running" in s.kinds("before"), DEADLINE_S)
    usual = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    # Not one more than it has open now.
    held = max(int(name) for name in os.listdir(f"/proc/{pid}/fd")) + 1
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (held, usual[1]))
    accepted = []
    for number in range(10):
        with contextlib.suppress(OSError):
            script = f": > {place}/run{number}.$EPOCHREALTIME; echo out"
            name = f"t{number}"
            if scheduler.dispatch(url, schedule_instance_id=name, payload=script)[0] == 202:
                accepted.append(name)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, usual)
    assert scheduler.terminal_report("before", DEADLINE_S)["error_message"] == "before\n"
    for name in accepted:
        assert scheduler.terminal_report(name, DEADLINE_S)["status"] in ("success", "failed")
    scheduler.dispatch(url, schedule_instance_id="after", payload="echo after")
    assert scheduler.terminal_report("after", DEADLINE_S)["error_message"] == "after\n"
    eventually(lambda: worker.status()["undelivered_reports"] == 0)
    for name in ("before", "after", *accepted):
        assert len(scheduler.terminal_reports(name)) == 1
    for number in range(10):
        assert len(list(place.glob(f"run{number}.*"))) <= 1


@needs_root
@needs_strace
@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("clone3", "ENOMEM"),  # no memory for a fork
        ("clone3", "EAGAIN"),  # no pids left
        ("memfd_create", "EMFILE"),
        ("socketpair", "ENFILE"),
        ("mkdirat", "ENOSPC"),
    ],
)
def test_spawner_that_cannot_make_a_slot_fails_that_task_with_the_step_and_recovers(
    scheduler: RecordingScheduler, make_worker: MakeWorker, call: str, error: str
) -> None:
    worker = make_worker(worker="pool_min = 0\npool_max = 0")
    scheduler.wait_for(lambda s: s.workers)
    call = "mkdir" if call == "mkdirat" and os.uname().machine != "x86_64" else call
    spawner = worker.active_spawner()
    # Launchers are copies that zygotes make.
    makers = children(spawner, "zygote") if call == "clone3" else [spawner]
    with contextlib.ExitStack() as stack:
        for maker in makers:
            stack.enter_context(attached(maker, Fault(call, 1, error, times=60000)))
        for number in range(3):
            scheduler.dispatch(worker.url, schedule_instance_id=f"t{number}", payload="true")
            report = scheduler.terminal_report(f"t{number}", DEADLINE_S)
            assert (report["status"], report["error_code"]) == ("failed", "spawn_failed")
            assert (
                error in report["reason"]
                or os.strerror(getattr(errno, error)) in (report["reason"])
            )
    scheduler.dispatch(worker.url, schedule_instance_id="after", payload="echo after")
    assert scheduler.terminal_report("after", DEADLINE_S)["error_message"] == "after\n"
    assert all(len(scheduler.terminal_reports(f"t{number}")) == 1 for number in range(3))
