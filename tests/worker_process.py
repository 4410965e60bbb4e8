"""A real ``stockade worker`` in directories of its own, and the check that it leaves nothing."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from stockade.platform import cgroup, pidfd, proc
from stockade.platform.errors import StockadeError
from stockade.supervisor.cli.control_client import ControlClient

# Emulated processors are slow.
DEADLINE_S = 300.0 if os.environ.get("STOCKADE_LAB_HOST") else 30.0
STOCKADE = (sys.executable, "-m", "stockade.supervisor.cli.main")
# Of the range that slots use; each worker of a test takes a part of its own.
UID_BASE = 0x70010000
UID_SPAN = 200

T = TypeVar("T")


def eventually(look: Callable[[], T], deadline_s: float = DEADLINE_S) -> T:
    """The first true answer of ``look``; fails the test after a generous deadline."""
    end = time.monotonic() + deadline_s
    while not (found := look()):
        assert time.monotonic() < end, f"still {found!r} after {deadline_s} s"
        time.sleep(0.01)
    return found


def make_place() -> Path:
    """A directory that other users can pass through, which pytest's own are not."""
    place = Path(tempfile.mkdtemp(prefix="stockade-test-", dir="/tmp"))
    place.chmod(0o755)
    return place


def processes_that_name(text: str) -> list[int]:
    """Pids of the processes whose command line holds ``text``, but for our own."""
    found = []
    for pid in proc.all_processes():
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if text.encode() in file.read() and pid != os.getpid():
                    found.append(pid)
        except OSError:
            continue
    return found


def directories_named(top: Path, part: str) -> set[str]:
    """Directories below ``top`` with ``part`` in their name, while others come and go there."""
    return {
        os.path.join(directory, name)
        for directory, names, _ in os.walk(top)
        for name in names
        if part in name
    }


def in_charge(spawners: list[int]) -> int:
    """The spawner whose child the other, the standby, is."""
    (pid,) = [
        pid
        for pid in spawners
        if (found := proc.process(pid)) is not None and found.parent not in spawners
    ]
    return pid


class WorkerProcess:
    """One worker, which can be started, killed and started again on the same directories.

    Args:
        scheduler: URL; None for none.
        worker: further lines for ``[worker]``.
        extra: further sections.
        link: ``http`` or ``grpc``: the section of the scheduler's link.
        lines: further lines for that section.
        profile: many tests look at what tasks write into the host's directories, so not private.
        environment: further variables of the worker.
        command: the ``stockade`` to run.
    """

    def __init__(
        self,
        scheduler: str | None = None,
        *,
        worker: str = "",
        extra: str = "",
        link: str = "http",
        lines: str = "",
        profile: str = "process",
        environment: dict[str, str] | None = None,
        command: tuple[str, ...] = STOCKADE,
    ) -> None:
        self.command = command
        self.link = link
        self.place = make_place()
        self.id = f"test-{secrets.token_hex(6)}"
        self.uid_min = UID_BASE + secrets.randbelow(100) * UID_SPAN
        self.process: subprocess.Popen[bytes] | None = None
        # What a test puts before the command, and into the supervisor's environment.
        self.before: tuple[str, ...] = ()
        self.environment = environment or {}
        scheduler_line = f'scheduler = "{scheduler}"' if scheduler else ""
        # Without a port that others could have, too.
        other = "" if link == "http" else '[http]\nlisten = "127.0.0.1:0"\n'
        (self.place / "stockade.toml").write_text(
            f"""
            [worker]
            id = "{self.id}"
            state_dir = "{self.place}/state"
            runtime_dir = "{self.place}/run"
            on_unsupported = "degrade"
            uid_min = {self.uid_min}
            uid_max = {self.uid_min + UID_SPAN - 1}
            {worker}
            {other}
            [{link}]
            listen = "127.0.0.1:0"
            {scheduler_line}
            {lines}
            [profile]
            name = "{profile}"
            {extra}
            """
        )

    @property
    def log(self) -> str:
        path = self.place / "worker.log"
        return path.read_text() if path.exists() else ""

    @property
    def control(self) -> ControlClient:
        return ControlClient(self.place / "run" / "control.sock")

    @property
    def url(self) -> str:
        """Where its link's scheduler sends tasks, as ``RecordingScheduler.dispatch`` takes it."""
        address = self.listen(self.link)
        return address if self.link == "grpc" else f"http://{address}"

    def listen(self, link: str) -> str:
        """Where it takes the calls of this link's scheduler."""
        address: str = self.status()["links"][link]["listen"]
        return address

    def status(self) -> Any:
        return self.control.get("/v1/status")

    def tasks(self, **query: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.control.get("/v1/tasks", query)["tasks"]
        return found

    def start(self) -> WorkerProcess:
        """Start it and return when it serves."""
        self.launch()
        eventually(self._serves)
        return self

    def launch(self) -> subprocess.Popen[bytes]:
        """Start it without waiting."""
        with open(self.place / "worker.log", "ab") as log:
            self.process = subprocess.Popen(
                [
                    *self.before,
                    *self.command,
                    "worker",
                    "--config",
                    str(self.place / "stockade.toml"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8", **self.environment},
            )
        return self.process

    def _serves(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"the worker ended:\n{self.log}"
        try:
            return bool(self.status()["pid"] == self.process.pid)
        except StockadeError:
            return False

    def spawners(self) -> list[int]:
        """Spawner and standby."""
        return processes_that_name(f'"runtime_dir": "{self.place}/run"')

    def active_spawner(self) -> int:
        """The one in charge."""
        return in_charge(self.spawners())

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL of the supervisor alone, and wait."""
        self.signal(signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        assert self.process is not None
        return self.process.wait(DEADLINE_S)

    def stop(self) -> int:
        """SIGTERM twice, and wait: the exit status."""
        assert self.process is not None
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
            eventually(lambda: "draining" in self.log or self.process.poll() is not None)  # type: ignore[union-attr]
            if self.process.poll() is None:
                self.signal(signal.SIGTERM)
        return self.wait()

    def close(self) -> None:
        """Stop everything, check that nothing is left, and remove the directories."""
        try:
            if self.process is not None:
                self.stop()
                self.check_nothing_left()
        finally:
            for pid in self.spawners():
                pidfd.checked_kill(pid, signal.SIGKILL)
            shutil.rmtree(self.place, ignore_errors=True)

    def _groups(self, mount: str) -> list[str]:
        # Not glob: it fails when another worker's group goes while it looks.
        groups = [name for _, names, _ in os.walk(mount) for name in names]
        return [name for name in groups if self.id in name]

    def check_nothing_left(self) -> None:
        """No process, no cgroup, no work directory, record or output pipe of it."""
        eventually(lambda: not self.spawners())
        left = range(self.uid_min, self.uid_min + UID_SPAN)
        eventually(lambda: not any(proc.processes_of_uid(uid) for uid in left))
        mount = cgroup.find_mount()
        if mount is not None:
            # A scope is systemd's to remove, moments after its last process.
            eventually(lambda: not self._groups(os.fsdecode(mount)))
        for directory in ("state/work", "run/spawner/record", "run/spawner/output"):
            assert os.listdir(self.place / directory) == [], directory
