"""A worker of its own with its schedulers, for the time of a benchmark, and tasks sent to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from schedulers import GrpcScheduler, HttpScheduler, Scheduler

from stockade.platform import proc
from stockade.supervisor.cli.control_client import ControlClient

DEADLINE_S: Final = 60.0
ENVIRONMENT: Final = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/nonexistent"}
# As a host has them: state on a disk, sockets and records in memory (/run is no tmpfs everywhere).
STATE_ON: Final = "/var/tmp"
RUNTIME_ON: Final = "/dev/shm"
# Whatever a run makes bears its number.
PREFIX: Final = f"stockade-bench-{os.getpid()}-"
LINKS: Final[dict[str, type[HttpScheduler] | type[GrpcScheduler]]] = {
    "http": HttpScheduler,
    "grpc": GrpcScheduler,
}


class Bench:
    """Sends tasks over one link."""

    def __init__(self, scheduler: Scheduler, worker: str, name: str) -> None:
        self.ends = scheduler.ends
        self._scheduler = scheduler
        self._worker = worker
        self._name = name
        self._count = 0

    async def begin(self, payload: str, timeout_s: int = 0) -> str:
        """Dispatches a task; its instance id, once the worker has accepted it."""
        self._count += 1
        key = f"{self._name}-{self._count}"
        await self._dispatch(key, payload, timeout_s)
        return key

    async def _dispatch(self, key: str, payload: str, timeout_s: int) -> None:
        await self._scheduler.dispatch(self._worker, key, payload, timeout_s)

    async def run(self, payload: str, timeout_s: int = 0, deadline_s: float = DEADLINE_S) -> str:
        """The status that the terminal report of such a task tells."""
        self._count += 1
        key = f"{self._name}-{self._count}"
        ended = self.ends.expect(key)
        await self._dispatch(key, payload, timeout_s)
        return await asyncio.wait_for(ended, deadline_s)

    async def task(self, payload: str = "true", deadline_s: float = DEADLINE_S) -> float:
        """Seconds from dispatch to terminal report of a task that succeeds."""
        began = time.perf_counter()
        status = await self.run(payload, deadline_s=deadline_s)
        assert status == "success", status
        return time.perf_counter() - began

    async def burst(
        self, count: int, in_flight: int, payload: str = "true"
    ) -> tuple[float, list[float]]:
        """So many tasks in flight: tasks a second, and the seconds of each."""
        left = iter(range(count))
        times: list[float] = []

        async def one_after_another() -> None:
            times.extend([await self.task(payload) for _ in left])

        began = time.perf_counter()
        await asyncio.gather(*(one_after_another() for _ in range(in_flight)))
        return count / (time.perf_counter() - began), times

    async def begin_many(self, count: int, payload: str, at_once: int = 64) -> None:
        """So many tasks more that run, each reported running."""
        left = iter(range(count))

        async def one_after_another() -> None:
            for _ in left:
                self._count += 1
                key = f"{self._name}-{self._count}"
                runs = self.ends.expect_running(key)
                await self._dispatch(key, payload, 3600)
                await asyncio.wait_for(runs, DEADLINE_S)

        await asyncio.gather(*(one_after_another() for _ in range(at_once)))


class Running(NamedTuple):
    """A worker that serves."""

    benches: dict[str, Bench]
    pid: int
    runtime_dir: Path

    @property
    def bench(self) -> Bench:
        return self.benches["http"]

    def status(self) -> Any:
        return ControlClient(self.runtime_dir / "control.sock").get("/v1/status")

    def spawners(self) -> tuple[int, int]:
        """The active spawner, and its child, the standby."""
        found = spawners_of(self.runtime_dir)
        (standby,) = [pid for pid in found if (one := proc.process(pid)) and one.parent in found]
        (active,) = [pid for pid in found if pid != standby]
        return active, standby


def spawners_of(runtime_dir: Path) -> list[int]:
    """Pids of the spawners of a runtime directory."""
    wanted = f'"runtime_dir": "{runtime_dir}"'.encode()
    found = []
    for pid in proc.all_processes():
        with contextlib.suppress(OSError):
            if wanted in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


@contextlib.contextmanager
def places() -> Iterator[tuple[Path, Path]]:
    """A state and a runtime directory, which tasks may pass through."""
    made = [Path(tempfile.mkdtemp(prefix=PREFIX, dir=top)) for top in (STATE_ON, RUNTIME_ON)]
    try:
        for place in made:
            place.chmod(0o711)
        yield made[0], made[1]
    finally:
        for place in made:
            shutil.rmtree(place)


def _stop(worker: subprocess.Popen[bytes], runtime_dir: Path) -> None:
    """Ends the worker and what runs in it, and waits until its spawners are gone too."""
    while worker.poll() is None:
        # The second one ends the drain.
        worker.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.wait(1)
    end = time.monotonic() + DEADLINE_S
    while spawners_of(runtime_dir):
        assert time.monotonic() < end, "a spawner outlives its worker"
        time.sleep(0.05)


@contextlib.asynccontextmanager
async def running_worker(
    in_flight: int,
    *,
    links: tuple[str, ...] = ("http",),
    settings: Mapping[str, str] | None = None,
    before: Path | None = None,
) -> AsyncIterator[Running]:
    """A worker with a scheduler for each link.

    Args:
        in_flight: its max_concurrency, if more than 8.
        links: by name.
        settings: keys without STOCKADE_, such as PROFILE_NAME.
        before: a journal to begin with; None: an empty one.
    """
    schedulers = {name: LINKS[name]() for name in links}
    with places() as (state, run):
        environment = {
            "WORKER_ID": state.name,
            "WORKER_STATE_DIR": str(state / "state"),
            "WORKER_RUNTIME_DIR": str(run / "run"),
            "WORKER_ON_UNSUPPORTED": "degrade",
            "WORKER_MAX_CONCURRENCY": str(max(8, in_flight)),
        }
        for name, scheduler in schedulers.items():
            environment[f"{name.upper()}_LISTEN"] = "127.0.0.1:0"
            environment[f"{name.upper()}_SCHEDULER"] = await scheduler.start()
        environment |= settings or {}
        if before is not None:
            _begin_with(before, state / "state" / "worker")
        with open(state / "log", "wb") as log:
            worker = subprocess.Popen(
                [sys.executable, "-m", "stockade.supervisor.cli.main", "worker"],
                env={**ENVIRONMENT, **{f"STOCKADE_{k}": v for k, v in environment.items()}},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        try:
            benches = {
                name: Bench(scheduler, await _registered(scheduler, worker, state / "log"), name)
                for name, scheduler in schedulers.items()
            }
            yield Running(benches, worker.pid, run / "run")
        finally:
            await asyncio.to_thread(_stop, worker, run / "run")
            for scheduler in schedulers.values():
                await scheduler.stop()


async def _registered(scheduler: Scheduler, worker: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + DEADLINE_S
    while not scheduler.ends.worker.done():
        if worker.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"the worker does not start:\n{log.read_text()[-2000:]}")
        await asyncio.sleep(0.02)
    return scheduler.ends.worker.result()


def _begin_with(journal: Path, directory: Path) -> None:
    directory.mkdir(parents=True, mode=0o700)
    copy = shutil.copyfile(journal, directory / "journal.db")
    copy.chmod(0o600)
    # Or the worker's first fsync waits for all of it.
    with open(copy, "rb") as file:
        os.fsync(file.fileno())
    with contextlib.suppress(KeyError):
        user = pwd.getpwnam("stockade")
        if os.geteuid() == 0:
            for path in (directory, copy):
                os.chown(path, user.pw_uid, user.pw_gid)
