"""Every process killed at random moments under load: each task runs once and is reported once.

A task appends a line to a file of its own, so that two executions, or none, show. The seed is
printed; with it the same moments and victims are chosen again (what the kernel makes of them is
its own):

    STOCKADE_STORM_SEED=17 STOCKADE_STORM_KILLS=400 python -m pytest -s tests/test_kill_storms.py

Kills are by pid of processes that this test's own worker started.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from recording_scheduler import RecordingScheduler
from worker_process import WorkerProcess, eventually, make_place

from stockade.platform import pidfd, proc
from stockade.platform.errors import StockadeError, SyscallError

SEED = int(os.environ.get("STOCKADE_STORM_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
KILLS = int(os.environ.get("STOCKADE_STORM_KILLS", "24"))
DEADLINE_S = 120.0

SUPERVISOR, SPAWNER, STANDBY, LAUNCHER = "supervisor", "spawner", "standby", "launcher"
# No kill: SIGHUP, with other settings each time, so that the spawner is renewed in the middle.
RELOAD = "reload"
VICTIMS: tuple[tuple[str, ...], ...] = (
    (SUPERVISOR,),
    (SPAWNER,),
    (STANDBY,),
    (LAUNCHER,),
    (SUPERVISOR, SPAWNER),
    (SUPERVISOR, STANDBY),
    (SUPERVISOR, LAUNCHER),
    (SPAWNER, STANDBY),
    (SPAWNER, LAUNCHER),
    (STANDBY, LAUNCHER),
    (LAUNCHER, LAUNCHER),
    (SUPERVISOR, SPAWNER, STANDBY, LAUNCHER),
    (RELOAD,),
    (RELOAD, SPAWNER),
    (RELOAD, SUPERVISOR),
)
# Short ones and some that outlast several kills; what a task does beside its line differs.
SCRIPTS = (
    "echo run >> {file}; exit 0",
    "echo run >> {file}; sleep 0.{tenths}; echo done",
    "echo run >> {file}; (setsid sleep 3{tenths}9.5 &); sleep 1.{tenths}; exit 3",
    "echo run >> {file}; head -c 200000 /dev/zero | tr '\\0' x; sleep 0.{tenths}",
)
KNOWN_LOSSES = ("the launcher was killed", "the worker's processes died while the task ran")
TRUE_ENDS = {"success": "", "failed": "execute_failed"}


@dataclasses.dataclass
class Process:
    """A process of the worker, told from a later one of its number."""

    pid: int
    fd: int


class Storm:
    """A worker under load whose processes are killed."""

    def __init__(self, scheduler: RecordingScheduler, place: Path, profile: str) -> None:
        # A name hashes differently in every process; its characters do not.
        self.random = random.Random(f"{SEED} {profile}")
        self.profile = profile
        self.scheduler = scheduler
        self.place = place
        self.kills: collections.Counter[str] = collections.Counter()
        self.accepted: dict[str, Path] = {}
        self._numbers = iter(range(10**9))
        self._stop = threading.Event()
        self._fault: Exception | None = None
        self.explanation = ""
        place.chmod(0o777)
        self.worker = WorkerProcess(
            scheduler.url,
            worker="max_concurrency = 12\npool_min = 1\n",
            profile=profile,
            extra=f"read_write_paths = ['{place}']\n[report]\nretry_min = '50ms'",
        ).start()
        self.url = self.worker.url
        # Keeps its port over restarts.
        path = self.worker.place / "stockade.toml"
        port = self.url.rpartition(":")[2]
        path.write_text(path.read_text().replace("127.0.0.1:0", f"127.0.0.1:{port}"))

    # Load.

    @contextlib.contextmanager
    def load(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._dispatch, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()
        if self._fault is not None:
            raise self._fault

    def _dispatch(self, seed: int) -> None:
        chooser = random.Random(f"{SEED} {seed}")
        try:
            while not self._stop.is_set():
                self._dispatch_one(chooser)
                self._stop.wait(chooser.uniform(0.02, 0.3))
        except Exception as error:  # noqa: BLE001 - raised again in load()
            self._fault = error

    def _dispatch_one(self, chooser: random.Random) -> None:
        key = f"storm-{next(self._numbers)}"
        file = self.place / key
        script = chooser.choice(SCRIPTS).format(file=file, tenths=chooser.randrange(1, 10))
        while not self._stop.is_set():
            # As a scheduler that tries again: only an answer says that it was accepted.
            with contextlib.suppress(OSError):
                status, answer = self.scheduler.dispatch(
                    self.url, schedule_instance_id=key, payload=script, timeout_seconds=60
                )
                assert status == 202, answer
                self.accepted[key] = file
                return
            self._stop.wait(0.05)

    # Kills.

    def victims(self) -> dict[str, list[Process]]:
        """Every process of the worker by its part, as they are now."""
        found: dict[str, list[Process]] = collections.defaultdict(list)
        assert self.worker.process is not None
        if self.worker.process.poll() is None:
            self._add(found[SUPERVISOR], self.worker.process.pid)
        for pid in self.worker.spawners():
            part = STANDBY if _comm(pid) == "stockade-standb" else SPAWNER
            self._add(found[part], pid)
        spawners = {process.pid for process in found[SPAWNER]}
        for pid, process in proc.all_processes().items():
            if _command(pid).startswith(b"stockade-launcher\0") and (
                process.parent in spawners or self.worker.id in _cgroup(pid)
            ):
                self._add(found[LAUNCHER], pid)
        return found

    @staticmethod
    def _add(processes: list[Process], pid: int) -> None:
        with contextlib.suppress(SyscallError):
            processes.append(Process(pid, pidfd.open_pidfd(pid)))

    def kill(self, parts: tuple[str, ...]) -> None:
        found = self.victims()
        chosen = []
        if RELOAD in parts:
            self._configure()
            found[RELOAD] = [Process(each.pid, os.dup(each.fd)) for each in found[SUPERVISOR]]
        for part in parts:
            if found[part]:
                index = self.random.randrange(len(found[part]))
                chosen.append((part, found[part].pop(index)))
        self.random.shuffle(chosen)
        for part, process in chosen:
            pidfd.send_signal(process.fd, signal.SIGHUP if part == RELOAD else signal.SIGKILL)
            self.kills[part] += 1
            os.close(process.fd)
        for processes in found.values():
            for process in processes:
                os.close(process.fd)

    def _configure(self) -> None:
        path = self.worker.place / "stockade.toml"
        before, after = "pool_min = 1\n", "pool_min = 3\n"
        text = path.read_text()
        if before not in text:
            before, after = after, before
        changed = path.with_suffix(".new")
        changed.write_text(text.replace(before, after))
        changed.replace(path)

    def mend(self) -> None:
        """What a service manager does: start the worker again when it has ended."""
        assert self.worker.process is not None
        if self.worker.process.poll() is not None:
            self.worker.launch()

    def calm(self) -> None:
        """Until the worker serves."""

        def serves() -> bool:
            self.mend()
            with contextlib.suppress(StockadeError):
                return bool(self.worker.status()["pid"] == self.worker.process.pid)  # type: ignore[union-attr]
            return False

        eventually(serves, DEADLINE_S)

    # The account.

    def check(self) -> None:
        """Every accepted task: one execution at most, none only with a reason, one report."""
        self.calm()
        end = time.monotonic() + DEADLINE_S
        while self._owed():
            # The worker may only now find that its last spawner is gone.
            self.mend()
            self._explain()
            time.sleep(0.2)
            assert time.monotonic() < end, f"{self.explanation}\n{self.worker.log[-20000:]}"
        eventually(lambda: self.worker.status()["undelivered_reports"] == 0, DEADLINE_S)
        eventually(lambda: self.worker.status()["unfinished_tasks"] == 0, DEADLINE_S)
        reports = collections.defaultdict(list)
        for report in self.scheduler.terminal_reports():
            reports[report["schedule_instance_id"]].append(report)
        wrong: list[str] = []
        lost: collections.Counter[str] = collections.Counter()
        repeated = 0
        for key, file in self.accepted.items():
            runs = file.read_text().count("run\n") if file.exists() else 0
            # A report whose answer a killed supervisor did not live to journal is sent again; but
            # it is the same report to the last byte.
            report, *again = reports[key]
            repeated += bool(again)
            if any(other != report for other in again):
                wrong.append(f"{key}: reports differ: {reports[key]}")
            code = report["error_code"]
            if code == "worker_lost":
                # Its launcher was killed, or spawner and standby were: both leave a record.
                lost[report["reason"]] += 1
                if runs > 1 or not any(each in report["reason"] for each in KNOWN_LOSSES):
                    wrong.append(f"{key}: ran {runs} times, lost: {report['reason']}")
            elif (report["status"], code) not in TRUE_ENDS.items():
                wrong.append(f"{key}: ran {runs} times, reported {report}")
            elif runs != 1:
                wrong.append(f"{key}: ran {runs} times, reported {code or 'success'}")
        print(
            f"\nseed {SEED}, {self.profile}: {dict(self.kills)}, "
            f"{len(self.accepted)} tasks, lost {dict(lost)}, {repeated} reports sent again"
        )
        assert not wrong, f"seed {SEED}:\n" + "\n".join(wrong)
        by_launcher = sum(count for reason, count in lost.items() if KNOWN_LOSSES[0] in reason)
        assert by_launcher <= self.kills[LAUNCHER]

    def _owed(self) -> set[str]:
        told = {report["schedule_instance_id"] for report in self.scheduler.terminal_reports()}
        return self.accepted.keys() - told

    def _explain(self) -> None:
        """Kept for the message of a check that fails: what the worker knows of what it owes."""
        with contextlib.suppress(StockadeError, OSError):
            known = [task for task in self.worker.tasks(all="1") if task["id"] in self._owed()]
            records = self.worker.place / "run/spawner/record"
            files = {path.name: path.read_text()[-400:] for path in records.iterdir()}
            self.explanation = f"{self.worker.status()}\n{known}\n{files}"

    def close(self) -> None:
        self.calm()
        self.worker.close()


def _comm(pid: int) -> str:
    return _read(pid, "comm").decode().strip()


def _command(pid: int) -> bytes:
    return _read(pid, "cmdline")


def _cgroup(pid: int) -> str:
    return _read(pid, "cgroup").decode()


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


@pytest.fixture
def make_storm(scheduler: RecordingScheduler) -> Iterator[Callable[[str], Storm]]:
    storms: list[Storm] = []
    place = make_place()

    def make(profile: str) -> Storm:
        storms.append(Storm(scheduler, place, profile))
        return storms[-1]

    print(f"\nSTOCKADE_STORM_SEED={SEED}")
    yield make
    for storm in storms:
        storm.close()
    shutil.rmtree(place)


@pytest.mark.timeout(300 + 20 * KILLS)
@pytest.mark.parametrize("profile", ["process", "private"])
def test_each_task_runs_once_and_is_reported_once_whoever_is_killed(
    make_storm: Callable[[str], Storm], profile: str
) -> None:
    storm = make_storm(profile)
    rounds = [VICTIMS[number % len(VICTIMS)] for number in range(KILLS)]
    storm.random.shuffle(rounds)
    with storm.load():
        while storm.kills.total() - storm.kills[RELOAD] < KILLS // 2:
            # Mostly under load, and sometimes in the middle of what the last kill began.
            if storm.random.random() < 0.75:
                storm.calm()
            time.sleep(storm.random.expovariate(1 / 0.3))
            storm.kill(rounds.pop() if rounds else storm.random.choice(VICTIMS))
            storm.mend()
    storm.check()
