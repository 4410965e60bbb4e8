"""A host with systemd on which Stockade is installed as an operator would do it, for its tests."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from recording_scheduler import RecordingScheduler
from spawner_client import lives
from worker_process import eventually

PATIENCE_S = 300.0
UNIT = "stockade.service"
URL = "http://127.0.0.1:8081"
CONFIG = Path("/etc/stockade/stockade.toml")
# What apt and dpkg write about any package, and systemd about its own doings.
NOT_OURS = (
    "/var/lib/dpkg/", "/var/lib/apt/", "/var/cache/", "/var/log/", "/var/tmp/", "/var/lib/systemd/",
    "/etc/passwd", "/etc/group", "/etc/shadow", "/etc/gshadow", "/etc/subuid", "/etc/subgid",
    "/var/lib/pam/",
)  # fmt: skip


def beside(name: str, script: str) -> tuple[Path, list[pytest.MarkDecorator]]:
    """The folder that a script takes to a lab host, and what tests that need it are marked with."""
    folder = Path(__file__).parents[2] / name
    return folder, [
        pytest.mark.needs_cgroup2_controllers,
        pytest.mark.needs_systemd,
        pytest.mark.needs_lab,
        pytest.mark.skipif(not folder.is_dir(), reason=f"needs what {script} puts in {folder}"),
    ]


@dataclasses.dataclass
class Host:
    """The host, and the scheduler that its worker reports to.

    Attributes:
        before: the host's files before the installation.
    """

    scheduler: RecordingScheduler
    before: set[str]

    def run(self, instance_id: str, payload: str, **fields: Any) -> None:
        status, answer = self.scheduler.dispatch(
            URL, schedule_instance_id=instance_id, payload=payload, **fields
        )
        assert status == 202, answer

    def report(self, instance_id: str) -> dict[str, Any]:
        return self.scheduler.terminal_report(instance_id, deadline_s=PATIENCE_S)

    def sleeper(self, instance_id: str, marker: str, **fields: Any) -> int:
        """A task that sleeps for so long; its pid."""
        self.run(instance_id, f"exec sleep {marker}", timeout_seconds=3000, **fields)
        return eventually(lambda: lives(marker), PATIENCE_S)[0]

    def finish(self, instance_id: str, pid: int) -> dict[str, Any]:
        os.kill(pid, signal.SIGTERM)
        return self.report(instance_id)


def command(*arguments: str, status: int = 0) -> str:
    ended = subprocess.run(
        arguments, capture_output=True, text=True, check=False, timeout=PATIENCE_S,
        env={"DEBIAN_FRONTEND": "noninteractive", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
    )  # fmt: skip
    if ended.returncode != status:
        journal = ["journalctl", "-u", UNIT, "-n", "40", "-o", "cat", "--no-pager"]
        said = subprocess.run(journal, capture_output=True, text=True, check=False).stdout
        raise AssertionError(f"{arguments}: {ended.stdout}{ended.stderr}\n{said}")
    return ended.stdout + ended.stderr


def show(name: str, unit: str = UNIT) -> str:
    return command("systemctl", "show", "--value", "-p", name, unit).strip()


def main_pid() -> int:
    return int(show("MainPID"))


def scope() -> str:
    (name,) = command(
        "systemctl", "list-units", "--plain", "--no-legend", "--type=scope", "stockade-*"
    ).split("\n")[:1]
    return name.split()[0] if name else ""


def files() -> set[str]:
    """All paths where a package or a service leaves things."""
    found = set()
    for top in ("/etc", "/usr", "/var", "/opt", "/run/stockade"):
        for directory, names, plain in os.walk(top):
            found |= {os.path.join(directory, name) for name in [*names, *plain]}
    return {
        path for path in found
        if not path.startswith(NOT_OURS) and "__pycache__" not in path
    }  # fmt: skip


def started_anew(before: int) -> int:
    """The main process, once another one than ``before`` serves."""

    def look() -> int:
        pid = main_pid()
        return pid if pid not in (0, before) and show("SubState") == "running" else 0

    return eventually(look, PATIENCE_S)


def begin(host: Host) -> None:
    """Writes the two lines that a worker needs, and enables and starts it."""
    text = CONFIG.read_text()
    for line, ours in (
        ('#listen = "127.0.0.1:8081"', 'listen = "127.0.0.1:8081"'),
        ('#scheduler = ""', f'scheduler = "{host.scheduler.url}"'),
    ):
        section, _, rest = text.partition("[http]")
        text = section + "[http]" + rest.replace(line, ours, 1)
    CONFIG.write_text(text)
    command("systemctl", "enable", "--now", UNIT)
    assert show("Type") == "notify"
    eventually(lambda: show("StatusText") == "0 running, 0 queued, 0 undelivered", PATIENCE_S)
    host.scheduler.wait_for(lambda s: s.workers, deadline_s=PATIENCE_S)


@contextlib.contextmanager
def fresh_host() -> Iterator[Host]:
    """The host before anything was installed."""
    with RecordingScheduler() as scheduler:
        yield Host(scheduler, files())
