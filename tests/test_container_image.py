"""The container image, run as its README.md says; on demand, by tests/container_image."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from image_lab import UNIFIED, Container, ImageEngine, documented_grants, pod_grants
from lab import parcel
from lab.errors import LabUnavailableError
from recording_scheduler import RecordingScheduler, get
from worker_process import (
    DEADLINE_S,
    UID_BASE,
    UID_SPAN,
    directories_named,
    eventually,
    processes_that_name,
)

from stockade.sandbox.profiles import Profile

pytestmark = [
    pytest.mark.skipif(
        "STOCKADE_CONTAINER_IMAGE" not in os.environ, reason="on demand: tests/container_image"
    ),
    # The first builds the image.
    pytest.mark.timeout(3000),
]

Make = Callable[..., Container]
# What an engine may forbid, and a task is then run without.
FORBIDDEN = {"namespaces", "cgroup_namespace"}


@pytest.fixture(scope="module")
def engine() -> Iterator[ImageEngine]:
    reason = ImageEngine.why_not()
    if reason:
        pytest.skip(reason)
    made = ImageEngine()
    try:
        made.start()
        made.build()
        yield made
    except LabUnavailableError as error:
        pytest.skip(str(error))
    finally:
        made.close()
    assert str(made.place) not in Path("/proc/self/mounts").read_text()
    assert not made.place.exists()
    assert not processes_that_name(str(made.place))


@pytest.fixture
def scheduler() -> Iterator[RecordingScheduler]:
    with RecordingScheduler() as scheduler:
        yield scheduler


@pytest.fixture
def make(engine: ImageEngine, scheduler: RecordingScheduler) -> Iterator[Make]:
    """Containers of one worker, on one volume; what they leave is looked for at the end."""
    name = f"image-{secrets.token_hex(6)}"
    uid_min = UID_BASE + secrets.randbelow(100) * UID_SPAN
    made: list[Container] = []

    def make(*, grants: list[str] | None = None, **variables: str) -> Container:
        variables = {
            "WORKER_UID_MIN": str(uid_min),
            "WORKER_UID_MAX": str(uid_min + UID_SPAN - 1),
            "WORKER_ON_UNSUPPORTED": "degrade",
            **variables,
        }
        grants = documented_grants() if grants is None else grants
        made.append(Container(engine, scheduler, name, grants, **variables))
        return made[-1]

    yield make
    for container in made:
        container.close()
    assert engine.names() == []
    assert name not in engine.call("volume", "ls", "--quiet").stdout.decode()
    eventually(lambda: not processes_that_name(name))
    if UNIFIED.exists():
        for left in directories_named(UNIFIED, name):
            # Killed at the end of a test: its groups are empty, and nobody else's.
            for directory, _, _ in os.walk(left, topdown=False):
                os.rmdir(directory)


@pytest.fixture
def worker(make: Make) -> Container:
    """With all that README.md grants and this machine has."""
    return make().start()


def missing_of(doctor: dict[str, Any], profile: str) -> set[str]:
    return {entry["feature"] for entry in doctor["profiles"][profile]["missing"]}


def test_the_build_is_given_what_it_copies_and_nothing_else(engine: ImageEngine) -> None:
    places = ("deploy/bundle", "deploy/container/entrypoint", "CHANGELOG.md", "README.md",
              "pyproject.toml", "setup.py", "platform/", "sandbox/", "supervisor/")  # fmt: skip
    wanted = {name for name in parcel.checkout_files() if name.startswith(places)}
    assert engine.context() == wanted


def test_with_the_documented_grants_doctor_finds_what_the_host_has(worker: Container) -> None:
    host = subprocess.run(
        [parcel.CHECKOUT / ".venv/bin/stockade", "doctor", "--json"],
        capture_output=True, check=True,
    ).stdout  # fmt: skip
    found = worker.doctor()
    for profile in Profile:
        lost = missing_of(found, profile) - missing_of(json.loads(host), profile)
        assert not lost, (profile, lost)


def test_the_hosts_cgroups_are_not_taken_for_the_containers_own(make: Make) -> None:
    mount = UNIFIED if UNIFIED.exists() else Path("/sys/fs/cgroup")
    worker = make(grants=[*documented_grants(), "--cgroupns=private", "-v", f"{mount}:{mount}"])
    host = worker.start().doctor()["host"]
    assert host["cgroup_parent"] is None
    assert "another cgroup namespace" in host["cgroup_reason"]
    assert worker.run("task", "echo well")["status"] == "success"
    assert not directories_named(mount, worker.name)


@pytest.mark.parametrize("profile", list(Profile))
def test_a_task_of_each_profile_runs_and_is_reported(make: Make, profile: str) -> None:
    worker = make(PROFILE_NAME=profile).start()
    report = worker.run(
        "task", "id -u; grep NoNewPrivs /proc/self/status; ls /var/lib/stockade/worker"
    )
    assert report["profile"] == profile
    # Its exit status is that of ls, which may not look there.
    assert (report["status"], report["error_code"]) == ("failed", "execute_failed"), report
    uid, privileges = report["error_message"].splitlines()[1:3]
    assert int(uid) >= UID_BASE
    assert privileges.split() == ["NoNewPrivs:", "1"]
    assert not FORBIDDEN & set(report["degraded"])
    assert set(report["degraded"]) <= missing_of(worker.doctor(), profile)


def test_a_memory_hog_and_an_endless_loop_are_contained(worker: Container) -> None:
    hog = "python3 -c 'x = bytearray(400 << 20); import time; time.sleep(300)'"
    report = worker.run("hog", hog, limits={"memory_max": "64M"})
    assert report["error_code"] == "oom_killed", report
    loop = "while :; do :; done & setsid sleep 3000 & while :; do :; done"
    report = worker.run("loop", loop, timeout_seconds=2)
    assert (report["status"], report["error_code"]) == ("timeout", "timeout"), report
    top = worker.execute("sh", "-c", "cat /proc/[0-9]*/comm").stdout.decode().split()
    assert "sleep" not in top
    assert worker.run("after", "echo well")["status"] == "success"


def test_without_grants_it_refuses_to_start_and_names_them(make: Make) -> None:
    container = make(grants=[], WORKER_ON_UNSUPPORTED="refuse")
    container.launch()
    assert container.wait() == 78
    said = container.log()
    assert "cannot start" in said
    assert "CAP_SYS_ADMIN" in said
    assert "degrade" in said


@pytest.mark.parametrize(
    "grants", [[], ["--security-opt=seccomp=unconfined"]], ids=["none", "seccomp alone"]
)
def test_without_grants_it_runs_degraded_and_marks_each_report(
    make: Make, grants: list[str]
) -> None:
    worker = make(grants=grants).start()
    assert "not enforced" in worker.log()
    for name in ("one", "two"):
        report = worker.run(name, "echo well")
        assert report["status"] == "success", report
        assert {"memory_max", "namespaces"} <= set(report["degraded"])
    report = worker.run("loop", "while :; do :; done", timeout_seconds=2)
    assert report["status"] == "timeout", report
    hog = "python3 -c 'x = bytearray(400 << 20); import time; time.sleep(300)'"
    assert worker.run("hog", hog, limits={"memory_max": "64M"})["error_code"] == "oom_killed"
    assert worker.stop() == 0


def test_stop_lets_a_task_end_and_reports_it(
    worker: Container, scheduler: RecordingScheduler
) -> None:
    worker.dispatch(
        "task", "until [ -e over ]; do sleep 0.1; i=$((i+1)); [ $i = 30 ] && exit; done"
    )
    worker.until_running("task")
    assert worker.stop() == 0
    # It was told before the container ended.
    (report,) = scheduler.terminal_reports("task")
    assert report["status"] == "success", report
    assert worker.state()["OOMKilled"] is False


def test_stop_ends_a_task_that_outlasts_the_drain(
    make: Make, scheduler: RecordingScheduler
) -> None:
    worker = make(WORKER_DRAIN_TIMEOUT="1s").start()
    worker.dispatch("task", "trap : TERM; while :; do sleep 1; done")
    worker.until_running("task")
    assert worker.stop() == 0
    (report,) = scheduler.terminal_reports("task")
    assert report["status"] == "cancelled", report


def test_after_a_kill_the_next_container_on_the_volume_reports_what_was_lost(
    make: Make, scheduler: RecordingScheduler, engine: ImageEngine
) -> None:
    worker = make().start()
    worker.dispatch("task", "sleep 3000")
    worker.until_running("task")
    engine.call("kill", worker.name).check_returncode()
    assert worker.wait() == 137
    worker.remove()
    following = make().start()
    report = scheduler.terminal_report("task", 4 * DEADLINE_S)
    assert (report["status"], report["error_code"]) == ("failed", "worker_lost"), report
    assert following.run("after", "echo well")["status"] == "success"
    assert following.stop() == 0
    if UNIFIED.exists():
        assert not directories_named(UNIFIED, worker.name)


def test_drain_returns_when_no_task_is_left(
    worker: Container, scheduler: RecordingScheduler
) -> None:
    worker.dispatch("task", "sleep 3")
    worker.until_running("task")
    done = worker.execute("stockade", "drain", "--wait", "--timeout", "1s")
    assert done.returncode == 75, done
    done = worker.execute("stockade", "drain", "--wait", "--timeout", "5min")
    assert done.returncode == 0, done
    (report,) = scheduler.terminal_reports("task")
    assert report["status"] == "success", report
    assert worker.state()["Running"]
    assert worker.stop() == 0


def test_as_in_a_pod_it_serves_its_probe_and_runs_tasks(make: Make) -> None:
    worker = make(grants=pod_grants(), HTTP_ADVERTISE="127.0.0.1").start()
    assert get(f"{worker.url}/healthz") == (200, {"status": "ok"})
    report = worker.run("task", "echo well")
    assert report["status"] == "success", report
    assert not FORBIDDEN & set(report["degraded"])
    assert worker.stop() == 0
