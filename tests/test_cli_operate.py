from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recording_scheduler import Answer, RecordingScheduler, post
from worker_process import DEADLINE_S, STOCKADE, WorkerProcess, eventually

from stockade.supervisor.wire.messages import EXECUTE_PATH, REPORT_PATH


def stockade(
    *arguments: str, worker: WorkerProcess | None = None
) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": "/nonexistent"}
    if worker is not None:
        environment["STOCKADE_WORKER_RUNTIME_DIR"] = str(worker.place / "run")
    return subprocess.run(
        [*STOCKADE, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=DEADLINE_S,
        check=False,
    )


def test_ps_lists_running_all_and_undelivered_tasks(
    scheduler: RecordingScheduler, worker: WorkerProcess
) -> None:
    url = worker.url
    scheduler.dispatch(url, schedule_instance_id="done", payload="exit 3")
    scheduler.terminal_report("done")
    eventually(lambda: worker.status()["undelivered_reports"] == 0)
    scheduler.stop()
    scheduler.dispatch(url, schedule_instance_id="owed", payload="true")
    scheduler.dispatch(url, schedule_instance_id="evil\x1b[2J\nid", payload="sleep 60")
    eventually(lambda: [task["state"] for task in worker.tasks()] == ["running"])
    lines = stockade("ps", worker=worker).stdout.splitlines()
    assert lines[0].split() == ["ID", "TYPE", "STATE", "ACCEPTED", "RUN", "OUTCOME"]
    assert [line.split()[0] for line in lines[1:]] == ["evil?[2J?id"]
    ended = stockade("ps", "--all", worker=worker)
    assert [line.split()[0] for line in ended.stdout.splitlines()[1:]] == [
        "done", "owed", "evil?[2J?id",
    ]  # fmt: skip
    assert "failed: exit status 3" in ended.stdout
    assert "1 undelivered reports" in ended.stderr
    owed = json.loads(stockade("ps", "--undelivered", "--json", worker=worker).stdout)
    assert [task["id"] for task in owed] == ["owed"]


def test_logs_prints_what_was_printed_and_follows_to_the_end(
    scheduler: RecordingScheduler, worker: WorkerProcess, place: Path
) -> None:
    script = f"echo one; until [ -e {place}/go ]; do sleep 0.05; done; echo two"
    scheduler.dispatch(worker.url, schedule_instance_id="a/../b", payload=script)
    eventually(lambda: stockade("logs", "a/../b", worker=worker).stdout == "one\n")
    following = subprocess.Popen(
        [*STOCKADE, "logs", "-f", "--socket", str(worker.place / "run/control.sock"), "a/../b"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert following.stdout is not None
    assert following.stdout.readline() == "one\n"
    (place / "go").touch()
    assert following.communicate(timeout=DEADLINE_S)[0] == "two\n"
    assert following.returncode == 0
    assert stockade("logs", "a/../b", worker=worker).stdout == "one\ntwo\n"


def test_logs_of_a_task_that_prints_without_end_ends(
    scheduler: RecordingScheduler, worker: WorkerProcess
) -> None:
    scheduler.dispatch(worker.url, schedule_instance_id="t", payload="yes")
    eventually(lambda: worker.control.output("t", 0)[2] > 20 << 20)
    printed = stockade("logs", "t", worker=worker).stdout
    # The head, and of the tail, which runs ahead, little more than a piece.
    assert 5 << 20 < len(printed) < 11 << 20


def test_logs_waits_for_the_reader_of_a_pipe_that_is_non_blocking(
    scheduler: RecordingScheduler, worker: WorkerProcess
) -> None:
    scheduler.dispatch(worker.url, schedule_instance_id="t", payload="head -c 300000 /dev/zero")
    scheduler.terminal_report("t")
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    with open(read_end, "rb") as reader:
        process = subprocess.Popen(
            [*STOCKADE, "logs", "t", "--socket", str(worker.place / "run" / "control.sock")],
            stdout=write_end,
            stderr=subprocess.PIPE,
        )
        os.close(write_end)
        # It is full, and the next write has to wait.
        eventually(lambda: readable_bytes(read_end) >= 65536 or process.poll() is not None)
        printed = reader.read()
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, len(printed), errors) == (0, 300_000, b"")


def readable_bytes(descriptor: int) -> int:
    (waiting,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))
    return int(waiting)


@pytest.mark.parametrize("command", ["logs", "explain", "cancel"])
def test_id_that_is_not_utf_8_is_told(command: str) -> None:
    ended = stockade(command, "\udcff")
    assert ended.returncode == 1
    assert ended.stderr.startswith("stockade: cannot ")
    assert "not UTF-8" in ended.stderr


def test_logs_says_why_an_output_cannot_be_read(
    scheduler: RecordingScheduler, worker: WorkerProcess
) -> None:
    scheduler.dispatch(worker.url, schedule_instance_id="t", payload="echo one")
    scheduler.terminal_report("t")
    (head,) = worker.place.glob("**/output/*.head")
    head.unlink()
    head.mkdir()
    answer = stockade("logs", "t", worker=worker)
    assert answer.returncode == 1
    assert f"cannot read the output of task {head.stem}: Is a directory" in answer.stderr


def test_logs_marks_what_was_cut(
    scheduler: RecordingScheduler, make_worker: Callable[..., WorkerProcess]
) -> None:
    worker = make_worker(extra='[limits]\noutput_max = "64K"')
    payload = "head -c 1M /dev/zero | tr '\\0' x; echo; echo end"
    scheduler.dispatch(worker.url, schedule_instance_id="t", payload=payload)
    report = scheduler.terminal_report("t", DEADLINE_S)
    assert (report["output_truncated"], report["output_bytes"]) == (True, (1 << 20) + 5)
    output = stockade("logs", "t", worker=worker).stdout
    assert re.fullmatch(r"x{32768}\n\[\.\.\. (\d+) bytes cut \.\.\.\]\nx+\nend\n", output)


def test_cancel_and_its_refusals(scheduler: RecordingScheduler, worker: WorkerProcess) -> None:
    scheduler.dispatch(worker.url, schedule_instance_id="t", payload="sleep 60")
    assert stockade("cancel", "t", worker=worker).returncode == 0
    assert scheduler.terminal_report("t")["status"] == "cancelled"
    for name, words in (("t", "has ended"), ("unknown", "unknown"), ("", "missing")):
        ended = stockade("cancel", name, worker=worker)
        assert ended.returncode == 1
        assert words in ended.stderr
        assert "Traceback" not in ended.stderr


def test_drain_reports_full_load_and_wait_returns_when_nothing_is_left(
    scheduler: RecordingScheduler, worker: WorkerProcess
) -> None:
    scheduler.dispatch(worker.url, schedule_instance_id="t", payload="sleep 1")
    assert stockade("drain", worker=worker).returncode == 0
    status = worker.status()
    assert (status["draining"], status["current_load"]) == (True, status["max_concurrency"])
    assert stockade("drain", "--wait", worker=worker).returncode == 0
    assert worker.status()["unfinished_tasks"] == 0
    assert scheduler.terminal_report("t")["status"] == "success"


def test_drain_that_takes_too_long_says_so_by_its_exit_status(
    scheduler: RecordingScheduler, worker: WorkerProcess
) -> None:
    scheduler.dispatch(worker.url, schedule_instance_id="t", payload="sleep 3000")
    ended = stockade("drain", "--wait", "--timeout", "200ms", worker=worker)
    assert ended.returncode == 75
    assert "1 tasks have not ended within 200ms" in ended.stderr
    assert worker.status()["draining"]
    stockade("cancel", "t", worker=worker)
    assert stockade("drain", "--wait", "--timeout", "infinity", worker=worker).returncode == 0
    ended = stockade("drain", "--timeout", "soon", worker=worker)
    assert ended.returncode == 2
    assert "is not a time" in ended.stderr


REFUSE_AT_ONCE = '[report]\nrefused_tries = 2\nrefused_period = "10ms"'


def test_dead_letters_are_listed_resent_and_dropped(
    scheduler: RecordingScheduler, make_worker: Callable[..., WorkerProcess]
) -> None:
    worker = make_worker(extra=REFUSE_AT_ONCE)
    scheduler.misbehave(Answer(404, {"error": "instance gone"}), path=REPORT_PATH)
    names = ["a", "b", "c", "evil\x1b[2J"]
    for name in names:
        scheduler.dispatch(worker.url, schedule_instance_id=name, payload="exit 3")
    eventually(lambda: worker.control.get("/v1/deadletters")["total"] == 4)
    scheduler.behave()
    assert worker.tasks(undelivered="1") == []
    lines = stockade("deadletters", "list", worker=worker).stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["a", "b", "c", "evil?[2J"]
    assert all("instance gone" in line for line in lines[1:])
    listed = json.loads(stockade("deadletters", "list", "--json", worker=worker).stdout)
    assert [(task["id"], task["attempts"]) for task in listed] == [(name, 2) for name in names]

    refused = len(scheduler.terminal_reports("b"))
    assert stockade("deadletters", "resend", "b", worker=worker).stdout == "resent 1\n"
    scheduler.wait_for(lambda s: len(s.terminal_reports("b")) == refused + 1, DEADLINE_S)
    assert stockade("deadletters", "drop", "a", "c", worker=worker).stdout == "dropped 2\n"
    assert len(scheduler.terminal_reports("a")) == refused
    assert stockade("deadletters", "resend", "--all", worker=worker).stdout == "resent 1\n"
    eventually(lambda: worker.control.get("/v1/deadletters")["total"] == 0)
    eventually(lambda: worker.status()["undelivered_reports"] == 0)
    states = {task["id"]: task["state"] for task in worker.tasks(all="1")}
    assert states == {"a": "dropped", "b": "delivered", "c": "dropped", names[3]: "delivered"}


def test_dead_letters_that_cannot_be_named_are_told(
    scheduler: RecordingScheduler, worker: WorkerProcess
) -> None:
    scheduler.dispatch(worker.url, schedule_instance_id="done", payload="true")
    scheduler.terminal_report("done", DEADLINE_S)
    eventually(lambda: worker.status()["undelivered_reports"] == 0)
    for arguments, words in (
        (["resend"], "name the tasks' ids, or give --all"),
        (["drop", "--all", "x"], "name the tasks' ids, or give --all"),
        (["resend", "unknown"], "no task has this id"),
        (["drop", "done"], "no dead letter: the task is delivered"),
    ):
        ended = stockade("deadletters", *arguments, worker=worker)
        assert (ended.returncode, words in ended.stderr) == (1, True), ended.stderr
        assert "Traceback" not in ended.stderr
    assert stockade("deadletters", "resend", "--all", worker=worker).stdout == "resent 0\n"


def test_a_dead_letter_outlives_a_restart_and_its_dropped_report_is_never_sent(
    scheduler: RecordingScheduler, make_worker: Callable[..., WorkerProcess]
) -> None:
    worker = make_worker(extra=REFUSE_AT_ONCE)
    scheduler.misbehave(Answer(400), path=REPORT_PATH)
    for name in ("kept", "dropped"):
        scheduler.dispatch(worker.url, schedule_instance_id=name, payload="true")
    eventually(lambda: worker.control.get("/v1/deadletters")["total"] == 2)
    assert stockade("deadletters", "drop", "dropped", worker=worker).returncode == 0
    scheduler.behave()
    told = len(scheduler.terminal_reports())
    worker.kill()
    worker.start()
    (letter,) = worker.control.get("/v1/deadletters")["tasks"]
    assert letter["id"] == "kept"
    assert stockade("deadletters", "resend", "kept", worker=worker).returncode == 0
    scheduler.wait_for(lambda s: len(s.terminal_reports()) == told + 1, DEADLINE_S)
    assert scheduler.terminal_reports()[-1]["schedule_instance_id"] == "kept"


def test_explain_tells_a_tasks_story_and_what_it_waits_for(
    scheduler: RecordingScheduler, make_worker: Callable[..., WorkerProcess]
) -> None:
    worker = make_worker(
        worker="max_concurrency = 1", extra=REFUSE_AT_ONCE + '\nretry_min = "50ms"'
    )
    url = worker.url

    def explained(name: str) -> str:
        return stockade("explain", name, worker=worker).stdout

    scheduler.dispatch(url, schedule_instance_id="ended", payload="echo out; exit 3")
    eventually(lambda: "its report was delivered, after 1 attempt" in explained("ended"))
    assert "ended: failed (execute_failed): exit status 3" in explained("ended")
    assert "nothing is owed any more" in explained("ended")
    scheduler.dispatch(url, schedule_instance_id="runs", payload="sleep 60")
    for name in ("first", "second"):
        scheduler.dispatch(url, schedule_instance_id=name, payload="true")
    eventually(lambda: "it runs, as process" in explained("runs"))
    assert "it waits for a place: 1 tasks run, 1 wait before it" in explained("second")
    scheduler.stop()
    stockade("cancel", "runs", worker=worker)
    eventually(lambda: "its report is owed: the scheduler gives no usable" in explained("runs"))
    assert "a cancel was asked for" in explained("runs")
    (told,) = json.loads(stockade("explain", "--json", "runs", worker=worker).stdout)
    assert (told["state"], told["scheduler"]) == ("finished", scheduler.url)
    missing = stockade("explain", "nobody", worker=worker)
    assert (missing.returncode, "no task has this id" in missing.stderr) == (1, True)
    scheduler.start()


def test_top_shows_what_tasks_use(scheduler: RecordingScheduler, worker: WorkerProcess) -> None:
    busy = "while :; do :; done & (while :; do :; done) & wait"
    scheduler.dispatch(worker.url, schedule_instance_id="[red]busy", payload=busy)
    scheduler.dispatch(
        worker.url, schedule_instance_id="idle", payload="head -c 3M /dev/zero; sleep 60"
    )
    eventually(lambda: worker.control.output("idle", 0)[2] == 3 << 20)

    def used(task: dict[str, Any]) -> bool:
        return bool(task["usage"]) and task["usage"]["processes"] >= 3

    eventually(lambda: used(worker.control.get("/v1/usage")["tasks"][0]))
    lines = stockade("top", "--interval", "0.5", worker=worker).stdout.splitlines()
    assert lines[0].startswith(f"{worker.id}: 2 of ")
    assert lines[1].split() == [
        "ID", "TYPE", "STATE", "RUN", "CPU%", "CPU", "MEMORY", "PROCESSES", "OUTPUT",
    ]  # fmt: skip
    first, second = lines[2].split(), lines[3].split()
    # The busiest first. An id is no markup.
    assert (first[0], second[0]) == ("[red]busy", "idle")
    assert float(first[4]) > float(second[4])
    assert int(first[7]) == 3
    assert second[-1] == "3M"


def test_top_renews_itself_on_a_terminal_until_ctrl_c(
    scheduler: RecordingScheduler, worker: WorkerProcess
) -> None:
    scheduler.dispatch(worker.url, schedule_instance_id="seen", payload="sleep 60")
    ours, theirs = os.openpty()
    with subprocess.Popen(
        [*STOCKADE, "top", "--interval", "0.1", "--socket", str(worker.place / "run/control.sock")],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={"PATH": os.environ["PATH"], "TERM": "xterm", "COLUMNS": "150", "LINES": "20"},
        start_new_session=True,
    ) as process:
        os.close(theirs)
        shown = b""
        while shown.count(b"seen") < 3:
            shown += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):
            while os.read(ours, 65536):
                pass
        assert process.wait(DEADLINE_S) == 0
    os.close(ours)
    assert b"Traceback" not in shown


@pytest.mark.parametrize(
    "command",
    [
        ["ps"], ["logs", "x"], ["cancel", "x"], ["drain"], ["explain", "x"], ["top"],
        ["deadletters", "list"], ["deadletters", "drop", "--all"],
    ],
)  # fmt: skip
def test_without_a_worker_the_message_says_where_it_was_looked_for(command: list[str]) -> None:
    ended = stockade(*command, "--socket", "/nonexistent/control.sock")
    assert ended.returncode == 1
    assert "cannot reach a worker at /nonexistent/control.sock" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_doctor_lists_every_limit_and_how_to_mend_what_is_missing() -> None:
    text = stockade("doctor").stdout
    assert "memory_max" in text
    found = json.loads(stockade("doctor", "--json").stdout)
    assert found["host"]["kernel"]
    for missing in found["profiles"]["process"]["missing"]:
        assert missing["mend"]


def test_version_help_and_unknown_commands() -> None:
    assert stockade("--version").stdout.startswith("stockade ")
    assert stockade().returncode == 2
    text = stockade("--help").stdout
    for name in ("run", "worker", "dev", "scheduler", "submit", "ps", "logs", "doctor", "config"):
        assert re.search(rf"^  {name} ", text, re.MULTILINE)
    assert stockade("no-such-command").returncode == 2


@pytest.mark.parametrize(
    ("reader", "told"),
    [("full", "stockade: cannot write the output: No space left on device\n"), ("nobody", "")],
)
@pytest.mark.parametrize("arguments", [["--version"], ["config", "show"]])
def test_output_that_cannot_be_written_is_a_failure(
    arguments: list[str], reader: str, told: str
) -> None:
    if reader == "full":
        descriptor = os.open("/dev/full", os.O_WRONLY)
    else:
        read_end, descriptor = os.pipe()
        os.close(read_end)
    try:
        ended = subprocess.run(
            [*STOCKADE, *arguments],
            stdout=descriptor,
            stderr=subprocess.PIPE,
            text=True,
            env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": "/nonexistent"},
            timeout=DEADLINE_S,
            check=False,
        )
    finally:
        os.close(descriptor)
    assert (ended.returncode, ended.stderr) == (1, told)


def test_run_imports_neither_the_daemon_nor_its_libraries() -> None:
    code = (
        "import sys; from stockade.supervisor.cli.main import build_app; build_app(['run']);"
        "late = ('asyncio', 'aiohttp', 'uvloop', 'structlog', 'rich');"
        "print([name for name in late if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"


def test_dev_runs_scheduler_and_worker_and_ends_on_ctrl_c(place: Path) -> None:
    process = subprocess.Popen(
        [
            *STOCKADE, "dev", "--scheduler-listen", "127.0.0.1:0", "--listen", "127.0.0.1:0",
            "--state-dir", str(place / "state"), "--runtime-dir", str(place / "run"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        match = re.match(r"scheduler: (http://\S+)", process.stdout.readline())
        assert match is not None
        submit = ("submit", "--scheduler", match[1], "--wait", "echo hello; exit 3")
        ended = eventually(
            lambda: (found := stockade(*submit)).returncode == 3 and found, DEADLINE_S
        )
        assert ended.stdout == "hello\n"
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0


def test_dispatch_over_4_mib_is_too_large(worker: WorkerProcess) -> None:
    body = {"schedule_instance_id": "t", "payload": "x" * (4 << 20)}
    assert post(worker.url + EXECUTE_PATH, body)[0] == 413
