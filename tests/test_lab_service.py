"""A worker as a systemd service: whatever of it dies, it starts again and tasks live."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from recording_scheduler import RecordingScheduler
from spawner_client import lives
from worker_process import WorkerProcess, eventually

from stockade.platform import cgroup, proc
from stockade.platform.errors import StockadeError
from stockade.supervisor.wire.messages import HEARTBEAT_PATH

pytestmark = [
    pytest.mark.needs_cgroup2_controllers,
    pytest.mark.needs_systemd,
    pytest.mark.needs_lab,
]

PATIENCE_S = 120.0


class Service(WorkerProcess):
    """The same worker, started by systemd."""

    def __init__(self, scheduler: str | None, *, worker: str = "", unit: str = "") -> None:
        super().__init__(scheduler, worker=f'drain_timeout = "20s"\n{worker}')
        self.unit = f"{self.id}.service"
        self.file = Path("/run/systemd/system", self.unit)
        self.file.write_text(
            f"""[Unit]
StartLimitIntervalSec=0
[Service]
ExecStart={sys.executable} -m stockade.supervisor.cli.main worker \
--config {self.place}/stockade.toml
Restart=always
RestartSec=100ms
StandardError=append:{self.place}/worker.log
{unit}
"""
        )
        systemctl("daemon-reload")

    @property
    def main_pid(self) -> int:
        return int(show(self.unit, "MainPID"))

    def up(self) -> Service:
        systemctl("start", self.unit)
        self.serves()
        return self

    def serves(self, *, other_than: int = 0) -> int:
        """Its pid, once it answers."""

        def look() -> int:
            try:
                pid = int(self.status()["pid"])
            except StockadeError:
                return 0
            return pid if pid not in (0, other_than) and pid == self.main_pid else 0

        return eventually(look, PATIENCE_S)

    def down(self) -> None:
        systemctl("stop", self.unit)
        self.file.unlink()
        systemctl("daemon-reload")
        self.check_nothing_left()
        self.close()


def systemctl(*arguments: str, check: bool = True) -> None:
    subprocess.run(
        ["systemctl", *arguments], check=check, stderr=None if check else subprocess.DEVNULL
    )


def show(unit: str, name: str) -> str:
    return subprocess.run(
        ["systemctl", "show", "--value", "-p", name, unit],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip


@pytest.fixture
def scheduler() -> Iterator[RecordingScheduler]:
    with RecordingScheduler() as scheduler:
        yield scheduler


@pytest.fixture
def service(scheduler: RecordingScheduler) -> Iterator[Service]:
    service = Service(scheduler.url)
    service.up()
    yield service
    service.down()


def execute(service: Service, instance_id: str, payload: str, **fields: Any) -> None:
    body = {"schedule_instance_id": instance_id, "task_type": "shell", "payload": payload}
    request = urllib.request.Request(
        f"{service.url}/internal/tasks/execute",
        data=json.dumps({**body, **fields}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        assert answer.status == 202


def start_task(service: Service, instance_id: str, marker: str, **fields: Any) -> int:
    """A task that sleeps for so long; its pid."""
    execute(service, instance_id, f"exec sleep {marker}", timeout_seconds=3000, **fields)
    return eventually(lambda: lives(marker), PATIENCE_S)[0]


def report_of(scheduler: RecordingScheduler, instance_id: str) -> dict[str, Any]:
    return scheduler.terminal_report(instance_id, deadline_s=PATIENCE_S)


def finish_task(scheduler: RecordingScheduler, instance_id: str, pid: int) -> dict[str, Any]:
    """Ends the task's sleep from outside: its report."""
    os.kill(pid, signal.SIGTERM)
    return report_of(scheduler, instance_id)


def test_spawner_and_tasks_are_not_in_the_services_group(service: Service) -> None:
    pid = start_task(service, "t", "71001")
    own = f"/system.slice/{service.unit}"
    scope = f"/system.slice/stockade-{service.id}.scope"
    assert cgroup.group_of(service.main_pid) == own
    assert cgroup.group_of(service.active_spawner()) == f"{scope}/spawner"
    assert str(cgroup.group_of(pid)).startswith(f"{scope}/tasks/")
    assert service.unit in show(f"stockade-{service.id}.scope", "Before").split()
    os.kill(pid, signal.SIGTERM)


def test_killed_supervisor_is_started_again_and_adopts_the_task(
    service: Service, scheduler: RecordingScheduler
) -> None:
    pid = start_task(service, "t", "71002")
    before = service.main_pid
    os.kill(before, signal.SIGKILL)
    service.serves(other_than=before)
    assert lives("71002") == [pid]
    report = finish_task(scheduler, "t", pid)
    assert (report["status"], report["signal"]) == ("failed", "SIGTERM")


def test_killed_service_is_started_again_and_the_task_lives(
    service: Service, scheduler: RecordingScheduler
) -> None:
    pid = start_task(service, "t", "71003")
    for _ in range(3):
        before = service.main_pid
        systemctl("kill", "--signal=KILL", service.unit)
        service.serves(other_than=before)
        assert lives("71003") == [pid]
    finish_task(scheduler, "t", pid)


def test_service_killed_at_any_moment_of_its_start_starts_again_and_the_task_lives(
    service: Service, scheduler: RecordingScheduler
) -> None:
    pid = start_task(service, "t", "71004")
    for step in range(12):
        systemctl("kill", "--signal=KILL", service.unit, check=False)
        # From "not yet executed" to "serving": the moment itself is what varies.
        time.sleep(0.25 * step)
        assert lives("71004") == [pid]
    service.serves()
    finish_task(scheduler, "t", pid)


def test_killed_spawner_and_supervisor_leave_a_task_that_the_standby_keeps(
    service: Service, scheduler: RecordingScheduler
) -> None:
    pid = start_task(service, "t", "71005")
    eventually(lambda: len(service.spawners()) == 2, PATIENCE_S)
    before = service.main_pid
    os.kill(service.active_spawner(), signal.SIGKILL)
    systemctl("kill", "--signal=KILL", service.unit)
    service.serves(other_than=before)
    assert lives("71005") == [pid]
    finish_task(scheduler, "t", pid)


def test_all_of_it_killed_while_a_task_runs_starts_again_in_the_same_scope(
    service: Service, scheduler: RecordingScheduler
) -> None:
    start_task(service, "t", "71006")
    eventually(lambda: len(service.spawners()) == 2, PATIENCE_S)
    before, spawners = service.main_pid, service.spawners()
    for pid in spawners:
        os.kill(pid, signal.SIGSTOP)
    for pid in spawners:
        os.kill(pid, signal.SIGKILL)
    systemctl("kill", "--signal=KILL", service.unit)
    service.serves(other_than=before)
    # Nobody kept its deadline for an unknown time: it is ended, and told once.
    assert report_of(scheduler, "t")["error_code"] == "worker_lost"
    assert not lives("71006")
    execute(service, "next", "true")
    report = report_of(scheduler, "next")
    assert (report["status"], report["degraded"]) == ("success", [])


def test_restart_of_the_service_with_a_task_that_ends_in_time(
    service: Service, scheduler: RecordingScheduler
) -> None:
    execute(service, "t", "sleep 3; exit 7")
    eventually(service.tasks, PATIENCE_S)
    before = service.main_pid
    systemctl("restart", service.unit)
    service.serves(other_than=before)
    assert report_of(scheduler, "t")["exit_code"] == 7


def test_oom_score_of_the_unit_protects_the_worker_and_not_its_tasks(
    scheduler: RecordingScheduler,
) -> None:
    service = Service(scheduler.url, unit="OOMScoreAdjust=-500").up()
    try:
        pid = start_task(service, "t", "71008")
        assert score(service.main_pid) == score(service.active_spawner()) == -500
        found = proc.process(pid)
        assert found is not None
        assert score(pid) == score(found.parent) == 0
        os.kill(pid, signal.SIGTERM)
    finally:
        service.down()


def test_worker_protects_itself_where_the_unit_says_nothing(service: Service) -> None:
    assert score(service.main_pid) == score(service.active_spawner()) == -900
    pid = start_task(service, "t", "71009")
    assert score(pid) == 0
    os.kill(pid, signal.SIGTERM)


def score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def test_pressure_holds_starts_up_and_its_end_lets_them_go(scheduler: RecordingScheduler) -> None:
    service = Service(scheduler.url, worker='pressure_cpu = "60%"\nmax_concurrency = 3').up()
    loops = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(12)]
    try:
        eventually(lambda: service.status()["pressure"], PATIENCE_S)
        execute(service, "waits", "true")
        scheduler.wait_for(
            lambda s: any(
                (message.body["current_load"], message.body["running_tasks"]) == (3, 0)
                for message in s.messages
                if message.path == HEARTBEAT_PATH
            ),
            deadline_s=PATIENCE_S,
        )
        (task,) = service.tasks()
        assert task["state"] == "accepted", task
        for loop in loops:
            loop.kill()
        assert report_of(scheduler, "waits")["status"] == "success"
        assert not service.status()["pressure"]
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
        service.down()


def test_promised_memory_makes_tasks_wait(scheduler: RecordingScheduler) -> None:
    service = Service(scheduler.url, worker='memory_max = "100M"').up()
    try:
        first = start_task(service, "first", "71010", limits={"memory_max": "64M"})
        execute(service, "second", "true", limits={"memory_max": "64M"})
        states = {task["id"]: task["state"] for task in service.tasks()}
        assert states == {"first": "running", "second": "accepted"}
        tasks = Path(f"/sys/fs/cgroup/system.slice/stockade-{service.id}.scope/tasks/memory.max")
        assert tasks.read_text() == f"{100 << 20}\n"
        os.kill(first, signal.SIGTERM)
        assert report_of(scheduler, "second")["status"] == "success"
    finally:
        service.down()
