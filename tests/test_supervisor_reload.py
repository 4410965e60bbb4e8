"""``stockade reload`` and SIGHUP, against a real worker."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import os
import pwd
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from installation import Installation
from recording_scheduler import RecordingScheduler
from worker_process import DEADLINE_S, STOCKADE, WorkerProcess, eventually

from stockade.supervisor.wire.messages import EXECUTE_PATH

MakeWorker = Callable[..., WorkerProcess]
# A reload imports all of the worker twice, which a busy machine can take a minute for.
SLOW_S = 240.0
pytestmark = pytest.mark.timeout(3 * SLOW_S)


def reload(worker: WorkerProcess) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*STOCKADE, "reload", "--socket", str(worker.place / "run/control.sock")],
        capture_output=True,
        text=True,
        timeout=SLOW_S,
        check=False,
    )


def configure(worker: WorkerProcess, before: str, after: str) -> None:
    path = worker.place / "stockade.toml"
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


class Flood:
    """Dispatches one task after the other over one connection that is never closed by us."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=SLOW_S)
        self.answers: list[int | Exception] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self._connection.auto_open = 1
        while not self._stop.wait(0.02):
            key = f"flood-{len(self.answers)}"
            body = json.dumps(
                {"schedule_instance_id": key, "task_type": "shell", "payload": "echo x"}
            )
            try:
                self._connection.request("POST", EXECUTE_PATH, body)
                # From now on a connection that was closed is an error and not opened anew.
                self._connection.auto_open = 0
                response = self._connection.getresponse()
                response.read()
                self.answers.append(response.status)
            except (OSError, http.client.HTTPException) as error:
                self.answers.append(error)
                return

    def stop(self) -> list[str]:
        """The ids of the tasks, every one of which was accepted."""
        self._stop.set()
        self._thread.join(SLOW_S)
        self._connection.close()
        assert set(self.answers) == {202}, self.answers
        return [f"flood-{number}" for number in range(len(self.answers))]


def test_reload_refuses_no_dispatch_and_no_task_notices(
    scheduler: RecordingScheduler, worker: WorkerProcess
) -> None:
    before = worker.status()
    script = "for i in 1 2 3 4 5 6 7 8; do echo $i; sleep 0.5; done; exit 3"
    scheduler.dispatch(worker.url, schedule_instance_id="long", payload=script)
    flood = Flood(worker.url)
    lives = {before["life"]}
    for number in range(3):
        assert reload(worker).returncode == 0
        lives.add(worker.status()["life"])
        # Over a connection of its own, too.
        assert scheduler.dispatch(
            worker.url, schedule_instance_id=f"other-{number}", payload="true"
        ) == (202, {"status": "accepted"})
    keys = [*flood.stop(), "long", *(f"other-{number}" for number in range(3))]
    assert len(lives) == 4
    assert worker.status()["pid"] == before["pid"]
    for key in keys:
        scheduler.terminal_report(key, DEADLINE_S)
    report = scheduler.terminal_report("long")
    assert (report["exit_code"], report["output_bytes"]) == (3, 16)
    assert {len(scheduler.terminal_reports(key)) for key in keys} == {1}


def test_sighup_brings_the_current_configuration_into_force(worker: WorkerProcess) -> None:
    eventually(lambda: worker.status()["links"]["http"]["registered"])
    before = worker.status()
    configure(worker, "[http]", "max_concurrency = 3\n[http]")
    worker.signal(signal.SIGHUP)
    eventually(lambda: worker.status()["life"] != before["life"], SLOW_S)
    assert worker.status()["max_concurrency"] == 3
    # Once it has registered again, all is as before but for what was changed.
    eventually(lambda: worker.status()["links"] == before["links"])


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("[http]", "max_concurency = 3\n[http]", "max_concurrency"),
        ("[http]", "[[http]", "cannot read configuration"),
        ('id = "test-', 'id = "other-', "worker.id"),
        ("/run", "/run2", "worker.runtime_dir"),
        ("[http]", "[http]\ntoken_file = '/nowhere/at/all'", "/nowhere/at/all"),
    ],
)
def test_configuration_that_cannot_be_used_is_refused_and_the_old_one_goes_on(
    scheduler: RecordingScheduler, worker: WorkerProcess, before: str, after: str, reason: str
) -> None:
    life = worker.status()["life"]
    configure(worker, before, after)
    ended = reload(worker)
    assert ended.returncode == 1
    assert ended.stderr.startswith("stockade: cannot reload: ")
    assert reason in ended.stderr
    assert "Traceback" not in ended.stderr
    worker.signal(signal.SIGHUP)
    eventually(lambda: "reload refused" in worker.log, SLOW_S)
    assert reason in worker.log
    assert worker.status()["life"] == life
    scheduler.dispatch(worker.url, schedule_instance_id="t", payload="true")
    assert scheduler.terminal_report("t", SLOW_S)["status"] == "success"


def test_another_listen_is_opened_before_the_old_one_is_closed(
    scheduler: RecordingScheduler, worker: WorkerProcess
) -> None:
    old = worker.url
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        configure(worker, "127.0.0.1:0", f"127.0.0.1:{port}")
        ended = reload(worker)
        assert ended.returncode == 1
        assert "the port is in use" in ended.stderr
        assert worker.url == old
    assert reload(worker).returncode == 0
    assert worker.url == f"http://127.0.0.1:{port}"
    scheduler.wait_for(lambda s: s.workers[-1]["callback_url"] == worker.url, DEADLINE_S)
    scheduler.dispatch(worker.url, schedule_instance_id="t", payload="true")
    assert scheduler.terminal_report("t", SLOW_S)["status"] == "success"
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(old.rpartition(":")[2]))).close()


class SlowServer:
    """Answers a GET when it is told to."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.go = threading.Event()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.set()
                outer.go.wait(SLOW_S)
                with contextlib.suppress(OSError):
                    self.send_response(200)
                    self.end_headers()
                    self.wfile.write(b"slow")

            def log_message(self, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/"

    def close(self) -> None:
        self.go.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def slow() -> Iterator[SlowServer]:
    server = SlowServer()
    yield server
    server.close()


def test_http_tasks_end_first_while_intake_goes_on(
    scheduler: RecordingScheduler, worker: WorkerProcess, slow: SlowServer
) -> None:
    life = worker.status()["life"]
    ask = {"task_type": "http", "payload": slow.url}
    scheduler.dispatch(worker.url, schedule_instance_id="running", **ask)
    assert slow.asked.wait(DEADLINE_S)
    slow.asked.clear()
    worker.signal(signal.SIGHUP)
    eventually(lambda: "waiting for the tasks" in worker.log, SLOW_S)
    scheduler.dispatch(worker.url, schedule_instance_id="later", **ask)
    scheduler.dispatch(worker.url, schedule_instance_id="shell", payload="echo meanwhile")
    assert scheduler.terminal_report("shell", SLOW_S)["error_message"] == "meanwhile\n"
    assert worker.status()["life"] == life
    assert not slow.asked.is_set()
    slow.go.set()
    for key in ("running", "later"):
        report = scheduler.terminal_report(key, DEADLINE_S)
        assert (report["status"], report["error_message"]) == ("success", "slow")
        assert len(scheduler.terminal_reports(key)) == 1
    assert worker.status()["life"] != life


def test_http_task_that_outlasts_the_drain_timeout_is_lost_and_reported(
    scheduler: RecordingScheduler, make_worker: MakeWorker, slow: SlowServer
) -> None:
    worker = make_worker(worker="drain_timeout = '500ms'")
    life = worker.status()["life"]
    scheduler.dispatch(worker.url, schedule_instance_id="t", task_type="http", payload=slow.url)
    assert slow.asked.wait(DEADLINE_S)
    assert reload(worker).returncode == 0
    assert worker.status()["life"] != life
    report = scheduler.terminal_report("t", DEADLINE_S)
    assert (report["status"], report["error_code"]) == ("failed", "worker_lost")
    assert "reloaded" in report["reason"]
    assert len(scheduler.terminal_reports("t")) == 1


def test_stop_during_a_wait_for_http_tasks_is_a_stop(
    scheduler: RecordingScheduler, worker: WorkerProcess, slow: SlowServer
) -> None:
    scheduler.dispatch(worker.url, schedule_instance_id="t", task_type="http", payload=slow.url)
    assert slow.asked.wait(DEADLINE_S)
    worker.signal(signal.SIGHUP)
    eventually(lambda: "waiting for the tasks" in worker.log, SLOW_S)
    worker.signal(signal.SIGTERM)
    eventually(lambda: "draining" in worker.log, SLOW_S)
    slow.go.set()
    assert worker.process is not None
    assert worker.process.wait(SLOW_S) == 0
    assert scheduler.terminal_report("t", SLOW_S)["status"] == "success"


def test_stop_asked_for_in_the_middle_of_a_reload_is_not_lost(worker: WorkerProcess) -> None:
    worker.signal(signal.SIGHUP)
    eventually(lambda: "event='reloading'" in worker.log, SLOW_S)
    worker.signal(signal.SIGTERM)
    assert worker.process is not None
    assert worker.process.wait(SLOW_S) == 0


def test_drain_stays_in_force_over_a_reload(worker: WorkerProcess) -> None:
    worker.control.post("/v1/drain", {})
    assert reload(worker).returncode == 0
    assert worker.status()["draining"]


@pytest.mark.needs_root
def test_supervisor_that_gave_root_up_reloads_without_it(
    scheduler: RecordingScheduler, make_worker: MakeWorker, place: Path
) -> None:
    python = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    if not os.path.exists(python):
        pytest.skip(f"needs {python}, which every user can execute")
    installed = Installation(place / "installed", python)
    nobody = pwd.getpwnam("nobody")
    can_import = subprocess.run(
        [installed.python, "-c", "import uvloop, stockade.supervisor.worker"],
        user=nobody.pw_uid, group=nobody.pw_gid, extra_groups=[], cwd="/", check=False,
        timeout=60,
    )  # fmt: skip
    if can_import.returncode:
        pytest.skip("nobody cannot read the dependencies that the tests run with")
    worker = make_worker(worker='user = "nobody"', command=installed.command)
    assert worker.process is not None
    assert os.stat(f"/proc/{worker.process.pid}/task").st_uid == nobody.pw_uid
    life = worker.status()["life"]
    ended = reload(worker)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert worker.status()["life"] != life
    scheduler.dispatch(worker.url, schedule_instance_id="t", payload="id -u")
    uid = int(scheduler.terminal_report("t", SLOW_S)["error_message"])
    assert worker.uid_min <= uid < worker.uid_min + 200
    # What it could read as root and cannot any more is said.
    (worker.place / "stockade.toml").chmod(0o600)
    ended = reload(worker)
    assert ended.returncode == 1
    assert "is not readable" in ended.stderr


def test_installed_code_that_cannot_run_is_refused_and_the_old_one_goes_on(
    scheduler: RecordingScheduler, make_worker: MakeWorker, place: Path
) -> None:
    installed = Installation(place / "installed")
    worker = make_worker(command=installed.command)
    life = worker.status()["life"]
    installed.replace("supervisor/daemon.py", "import asyncio\n", "import no_such_module\n")
    ended = reload(worker)
    assert ended.returncode == 1
    assert "no_such_module" in ended.stderr
    scheduler.dispatch(worker.url, schedule_instance_id="t", payload="echo still")
    assert scheduler.terminal_report("t", SLOW_S)["error_message"] == "still\n"
    installed.replace("supervisor/daemon.py", "import no_such_module\n", "import asyncio\n")
    installed.replace(
        "sandbox/protocol.py", "PROTOCOL_VERSION: Final = ", "PROTOCOL_VERSION: Final = 9"
    )
    ended = reload(worker)
    assert ended.returncode == 1
    assert "speaks protocol" in ended.stderr
    assert "restart the worker" in ended.stderr
    assert worker.status()["life"] == life


def test_reload_after_an_upgrade_renews_the_spawner_and_the_old_one_finishes_its_tasks(
    scheduler: RecordingScheduler, make_worker: MakeWorker, place: Path
) -> None:
    installed = Installation(place / "installed")
    worker = make_worker(command=installed.command)
    assert worker.status()["elders"] == []
    place.chmod(0o777)
    script = f"until [ -e {place}/go ]; do sleep 0.1; done; exit 6"
    scheduler.dispatch(worker.url, schedule_instance_id="old", payload=script)
    scheduler.wait_for(lambda s: "running" in s.kinds("old"), DEADLINE_S)
    installed.replace("sandbox/task.py", "ran longer than", "went on for more than")
    flood = Flood(worker.url)
    ended = reload(worker)
    assert (ended.returncode, ended.stderr) == (0, "")
    (elder,) = eventually(lambda: [e for e in worker.status()["elders"] if e["tasks"] == 1], SLOW_S)
    assert elder["generation"] == 1
    listed = subprocess.run(
        [*STOCKADE, "ps", "--socket", str(worker.place / "run/control.sock")],
        capture_output=True, text=True, timeout=DEADLINE_S, check=True,
    )  # fmt: skip
    assert f"spawner 1 (pid {elder['pid']}) was renewed and still finishes 1 tasks" in listed.stderr
    scheduler.dispatch(
        worker.url, schedule_instance_id="new", payload="sleep 31501", timeout_seconds=1
    )
    assert "went on for more than" in scheduler.terminal_report("new", SLOW_S)["reason"]
    (place / "go").touch()
    assert scheduler.terminal_report("old", SLOW_S)["exit_code"] == 6
    eventually(lambda: worker.status()["elders"] == [], SLOW_S)
    for key in ["old", "new", *flood.stop()]:
        assert scheduler.terminal_report(key, DEADLINE_S)
        assert len(scheduler.terminal_reports(key)) == 1


def test_reload_renews_a_spawner_whose_settings_changed(
    scheduler: RecordingScheduler, worker: WorkerProcess
) -> None:
    spawner = worker.active_spawner()
    assert reload(worker).returncode == 0
    assert worker.active_spawner() == spawner
    configure(worker, "[http]", "pool_min = 1\n[http]")
    assert reload(worker).returncode == 0
    eventually(lambda: spawner not in worker.spawners(), SLOW_S)
    scheduler.dispatch(worker.url, schedule_instance_id="t", payload="true")
    assert scheduler.terminal_report("t", SLOW_S)["status"] == "success"


def test_upgrade_to_a_spawner_that_cannot_run_leaves_the_old_one_in_charge(
    scheduler: RecordingScheduler, make_worker: MakeWorker, place: Path
) -> None:
    installed = Installation(place / "installed")
    worker = make_worker(command=installed.command)
    spawner = worker.active_spawner()
    # What the rehearsal of the supervisor does not see.
    installed.replace("sandbox/spawner_main.py", "import gc\n", "import no_such_module\n")
    assert reload(worker).returncode == 0
    eventually(lambda: "the spawner goes on as it was" in worker.log, SLOW_S)
    assert spawner in worker.spawners()
    scheduler.dispatch(worker.url, schedule_instance_id="t", payload="echo served")
    assert scheduler.terminal_report("t", SLOW_S)["error_message"] == "served\n"
    installed.replace("sandbox/spawner_main.py", "import no_such_module\n", "import gc\n")
