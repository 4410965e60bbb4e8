"""The crash sweep: one task's whole life, over and over, with a death at each call of each kind.

    python tests/crash_sweep.py [--seed N] [--share 0.1] [--scenarios life,takeover]

Whoever dies is started again as a service manager would; then the promise is checked against a
scheduler that records everything: a dispatch that was answered "accepted" is executed at most once,
and its scheduler gets one terminal report that counts. The table says what was tried.

    life        a task from its dispatch to its delivery; a death in
                supervisor (its loop), journal (its other thread), spawner, launcher
    takeover    the spawner is killed while a task runs; a death in the standby that takes over
    restart     a task ended while no supervisor was there; a death in the next one's start
    boot        all are killed while a task runs; a death in whatever starts next
    pairs       two of the first die in one life, or one of them and the standby
    errors      nobody dies: the journal's disk answers EIO or ENOSPC, once or for some time
    journal     the journal alone, from its creation to its second end: deaths and errors
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar

import journal_life
from injection import (
    Fault,
    Strace,
    attached,
    counted,
    kill_if_alive,
    threads,
    tracing_all,
    under_strace,
    wait_until_gone,
)
from recording_scheduler import RecordingScheduler
from worker_process import (
    DEADLINE_S,
    STOCKADE,
    UID_SPAN,
    WorkerProcess,
    eventually,
    processes_that_name,
)

from stockade.platform import proc
from stockade.platform.errors import StockadeError
from stockade.supervisor.errors import JournalError

T = TypeVar("T")

# Calls that leave the process as it was, for everybody else: a death at one is no other than the
# death at the next of those that are tried.
_NO_EFFECT = frozenset(
    {
        "access", "brk", "clock_gettime", "clock_nanosleep", "epoll_pwait", "epoll_wait", "fcntl",
        "fstat", "futex", "getpeername", "getpid", "getrandom", "getsockname", "getsockopt",
        "gettid", "ioctl", "lseek", "madvise", "mmap", "mprotect", "mremap", "munmap",
        "newfstatat", "pipe2", "poll", "pread64", "read", "restart_syscall", "rt_sigaction",
        "rt_sigprocmask", "rt_sigreturn", "sched_yield",
    }
)  # fmt: skip
_START_CALLS = (
    "fdatasync", "fsync", "pwrite64", "write", "sendmsg", "recvmsg", "sendto", "connect", "bind",
    "listen", "accept4", "mkdir", "mkdirat", "mknodat", "unlink", "unlinkat", "rename", "rmdir",
    "flock", "ftruncate", "clone3", "vfork", "execve", "memfd_create", "chmod", "fchown", "kill",
    "pidfd_send_signal", "wait4", "waitid",
)  # fmt: skip
# From the terminal report on: the delivery is recorded, the slot cleaned, the pool refilled.
_AFTERMATH_S = 0.3
_LIFE_S = 20.0
_BOTH_S = 0.2
# How often, and how long in all, it is waited for that a worker serves again.
_STARTS = 5
_COMING_BACK_S = 4 * DEADLINE_S


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """Where somebody dies."""

    victim: str
    fault: Fault

    def __str__(self) -> str:
        return f"{self.victim}:{self.fault}"


@dataclasses.dataclass(slots=True)
class Tally:
    """One line of the table."""

    calls: set[str] = dataclasses.field(default_factory=set)
    tried: int = 0
    crashes: int = 0
    restarts: int = 0
    tasks: int = 0
    reports: int = 0
    lost: int = 0
    doubled: int = 0
    untrue: int = 0


class Sweep:
    """One worker, its scheduler, and what was found out about them.

    Attributes:
        tallies: by scenario and victims.
        faults: what broke the promise, one line each, with the point where.
    """

    def __init__(self, scheduler: RecordingScheduler, worker: WorkerProcess) -> None:
        self.tallies: dict[str, Tally] = {}
        self.faults: list[str] = []
        self._scheduler = scheduler
        self._worker = worker
        self._numbers = itertools.count(1)
        self._url = ""
        self._runs = worker.place / "runs"
        self._runs.mkdir()
        self._runs.chmod(0o777)

    # The points there are.

    def points_of_a_life(self, victims: tuple[str, ...]) -> list[Point]:
        """Every call that matters, as often as each victim makes it in one undisturbed life."""
        self.make_ready()
        name = self._name()
        with contextlib.ExitStack() as stack:
            straces = {v: stack.enter_context(attached(self._thread(v))) for v in victims}
            assert self._dispatch(name)
            self._scheduler.terminal_report(name, _LIFE_S)
            time.sleep(1.0)
            return _points({victim: dict(strace.calls()) for victim, strace in straces.items()})

    def points_of_a_takeover(self) -> list[Point]:
        """The same for a standby whose spawner is killed while a task runs."""
        self.make_ready()
        name, gate = self._name(), self._runs / "gate"
        self._run_until(name, gate)
        with attached(self._thread("standby")) as strace:
            self._kill_spawner()
            gate.touch()
            self._scheduler.terminal_report(name, _LIFE_S)
            time.sleep(1.0)
            return _points({"standby": dict(strace.calls())})

    def points_of_a_start(self, kill: Callable[[], None]) -> list[Point]:
        """The same for a supervisor that starts, and whatever it starts, after ``kill``."""
        self.make_ready()
        name, gate = self._name(), self._runs / "gate"
        self._run_until(name, gate)
        kill()
        gate.touch()
        with tempfile.TemporaryDirectory(prefix="stockade-strace-") as directory:
            trace = Path(directory) / "trace"
            with self._started(tracing_all(trace, _START_CALLS)):
                self._scheduler.terminal_report(name, DEADLINE_S)
                time.sleep(0.5)
            return _points({"start": counted(trace)})

    # The cases.

    def life(self, *points: Point) -> None:
        """One task's life, with deaths in it."""
        self.make_ready()
        name = self._name()
        tally = self._tally("life", points)
        processes = {point.victim: self._process(point.victim) for point in points}
        with contextlib.ExitStack() as stack:
            straces = {
                point.victim: stack.enter_context(attached(self._thread(point.victim), point.fault))
                for point in points
                if point.victim != "standby"  # which does nothing that could be counted
            }
            accepted = self._dispatch(name)
            self._wait(name, list(straces.values()))
            dead = {victim for victim, strace in straces.items() if strace.done}
            if dead and len(points) > 1:
                # The other one dies at its own point, if it comes to that within moments.
                end = time.monotonic() + _BOTH_S
                while time.monotonic() < end and not all(s.done for s in straces.values()):
                    time.sleep(0.005)
                for pid in processes.values():
                    kill_if_alive(pid)
                dead = set(processes)
        tally.crashes += len(dead - {"journal"} if "supervisor" in dead else dead)
        self._settle(tally, name, dead, " ".join(map(str, points)), accepted=accepted)

    def errors(self, point: Point) -> None:
        """One task's life with an error of the disk in it, which the worker must get over."""
        self.make_ready()
        name = self._name()
        tally = self._tally("errors", (point,))
        with attached(self._thread("journal"), point.fault) as strace:
            accepted = self._dispatch(name)
            self._wait(name, [strace])
        self._settle(tally, name, set(), str(point), accepted=accepted)

    def takeover(self, point: Point, *, supervisor_too: bool) -> None:
        """The spawner is killed while a task runs, and then the standby at its point."""
        self.make_ready()
        name, gate = self._name(), self._runs / "gate"
        tally = self._tally("takeover", (point,))
        self._run_until(name, gate)
        with attached(self._thread("standby"), point.fault) as strace:
            self._kill_spawner()
            gate.touch()
            self._wait(name, [strace])
            dead = {"spawner", "standby"} if strace.done else {"spawner"}
        tally.crashes += len(dead)
        if supervisor_too and self._is_serving():
            # Else it would look for another spawner for ten seconds before it gives up.
            self._worker.kill()
            tally.crashes += 1
        self._settle(tally, name, dead, str(point), accepted=True)

    def start(self, point: Point, scenario: str, kill: Callable[[], None], dead: set[str]) -> None:
        """A task runs while ``kill`` happens; then a start that ends at the point, and another."""
        self.make_ready()
        name, gate = self._name(), self._runs / "gate"
        tally = self._tally(scenario, (point,))
        self._run_until(name, gate)
        kill()
        gate.touch()
        with self._started(under_strace(point.fault)) as lives:
            end = time.monotonic() + _LIFE_S
            while lives() and time.monotonic() < end:
                if self._scheduler.terminal_reports(name):
                    end = min(end, time.monotonic() + _AFTERMATH_S)
                time.sleep(0.01)
            tally.crashes += not lives()
        self._settle(tally, name, dead, f"{scenario} {point}", accepted=True)

    def kill_supervisor(self) -> None:
        self._worker.kill()

    def kill_all(self) -> None:
        """All of the worker, with what its tasks run: as a host that goes down, but for /run."""
        self._worker.kill()
        for pid in self._worker.spawners():
            kill_if_alive(pid)
        uids = range(self._worker.uid_min, self._worker.uid_min + UID_SPAN)
        eventually(
            lambda: not [kill_if_alive(p) for uid in uids for p in proc.processes_of_uid(uid)]
        )

    def journal(self, fault: Fault) -> None:
        """The journal's life alone, with one fault in it."""
        tally = self._tally("journal", (Point("death" if fault.error is None else "error", fault),))
        with tempfile.TemporaryDirectory(prefix="stockade-journal-") as directory:
            path = Path(directory) / "journal.db"
            life = [sys.executable, journal_life.__file__, str(path)]
            ended = subprocess.run(
                [*under_strace(fault), *life], capture_output=True, text=True,
                timeout=DEADLINE_S, check=False,
            )  # fmt: skip
            said = ended.stdout.splitlines()
            tally.tasks += 1
            tally.crashes += ended.returncode == -signal.SIGKILL
            try:
                if fault.error is not None and ended.returncode != journal_life.GAVE_UP:
                    assert said[-1:] == [journal_life.WHOLE], f"{said[-2:]} {ended.stderr[-2000:]}"
                journal_life.check(path, said)
            except (AssertionError, JournalError) as error:
                self._note(tally, "lost", f"the journal's {fault}", str(error))

    # The promise.

    def _settle(
        self, tally: Tally, name: str, dead: set[str], where: str, *, accepted: bool
    ) -> None:
        """Bring everything back, and compare what was seen with what was promised."""
        deaths_of_supervisor = not self._is_serving()
        if not self._come_back(tally):
            self._note(tally, "lost", where, f"the worker does not start:\n{self._log()}")
            raise AssertionError(self.faults[-1])
        if not accepted:
            # A scheduler that got no answer may ask again; from here on the promise holds.
            assert self._dispatch(name), where
        tally.tasks += 1
        try:
            self._scheduler.terminal_report(name, DEADLINE_S)
            eventually(lambda: self._is_idle(tally))
        except AssertionError as error:
            self._note(tally, "lost", where, f"{error}; log:\n{self._log()}")
            return
        self.check(tally, name, where, dead, once=not deaths_of_supervisor)

    def check(self, tally: Tally, name: str, where: str, dead: set[str], *, once: bool) -> None:
        """The promise, for one task."""
        reports = self._scheduler.terminal_reports(name)
        tally.reports += len(reports)
        told = {(r["status"], r["error_code"], r["error_message"]) for r in reports}
        runs = self._executions(name)
        if runs > 1:
            self._note(tally, "doubled", where, f"executed {runs} times")
        if len(told) != 1 or (once and len(reports) != 1):
            self._note(tally, "doubled", where, f"{len(reports)} reports: {told}")
            return
        kinds = self._scheduler.kinds(name)
        ends = [at for at, kind in enumerate(kinds) if kind == reports[0]["status"]]
        if "running" in kinds[ends[0] :]:
            self._note(tally, "untrue", where, f"a late running: {kinds}")
        (report,) = told
        lost_may_be = bool(dead & {"launcher", "all"}) or {"spawner", "standby"} <= dead
        if report[0] == "success":
            # Of all that prints and reads, nobody was left who could hold what was printed.
            unread = "spawner" in dead and bool(dead & {"supervisor", "journal"})
            if runs != 1 or report[2] not in ("out\n", *([""] if unread else [])):
                self._note(tally, "untrue", where, f"success after {runs} executions: {report}")
        elif not (lost_may_be and report[:2] == ("failed", "worker_lost")):
            self._note(tally, "untrue", where, f"{report}; log:\n{self._log()}")

    def _log(self) -> str:
        """The worker's log, from the end."""
        return "\n".join(self._worker.log.splitlines()[-12:])

    def _note(self, tally: Tally, what: str, where: str, text: str) -> None:
        setattr(tally, what, getattr(tally, what) + 1)
        self.faults.append(f"{what} at {where}: {text}")

    # The worker.

    def make_ready(self) -> None:
        """A worker with a spawner, a standby and one waiting launcher."""
        worker = self._worker
        if worker.process is None or worker.process.poll() is not None:
            worker.start()
        eventually(lambda: len(worker.spawners()) == 2 and self._waiting_launcher())
        # Asked now: later it would be calls of the victim's too.
        self._url = worker.url
        (self._runs / "gate").unlink(missing_ok=True)

    def _come_back(self, tally: Tally) -> bool:
        """The service manager's part: start it again when it has ended, until it serves."""
        end = time.monotonic() + _COMING_BACK_S
        starts = 0
        while time.monotonic() < end:
            process = self._worker.process
            if process is None or process.poll() is not None:
                if starts == _STARTS:
                    return False
                starts += 1
                tally.restarts += 1
                self._worker.launch()
            elif self._is_serving() and len(self._worker.spawners()) == 2:
                self._url = self._worker.url
                return True
            time.sleep(0.02)
        return False

    def _is_serving(self) -> bool:
        process = self._worker.process
        if process is None or process.poll() is not None:
            return False
        try:
            return bool(self._worker.status()["pid"] == process.pid)
        except StockadeError:
            return False

    def _is_idle(self, tally: Tally) -> bool:
        if not self._is_serving():
            # With both spawners gone it ends with 75, which may come now.
            return self._come_back(tally) and False
        status = self._worker.status()
        return not (status["unfinished_tasks"] or status["undelivered_reports"])

    def _dispatch(self, name: str) -> bool:
        """Whether it was answered with "accepted"."""
        script = f"{self._mark(name)}; echo out"
        return self._send(name, script)

    def _run_until(self, name: str, gate: Path) -> None:
        """A task that runs until the gate is there."""
        script = f"{self._mark(name)}; until [ -e {gate} ]; do sleep 0.01; done; echo out"
        assert self._send(name, script)
        self._scheduler.wait_for(lambda s: "running" in s.kinds(name), DEADLINE_S)

    def _send(self, name: str, script: str) -> bool:
        try:
            answer = self._scheduler.dispatch(self._url, schedule_instance_id=name, payload=script)
        except OSError:
            return False
        return answer[0] == 202

    def _name(self) -> str:
        return f"t{next(self._numbers)}"

    def _executions(self, name: str) -> int:
        return len(list(self._runs.glob(f"{name}.*")))

    def _mark(self, name: str) -> str:
        """The shell command that leaves a file for each execution, whichever uid it has."""
        return f": > {self._runs}/{name}.$EPOCHREALTIME"

    def _wait(self, name: str, straces: list[Strace]) -> None:
        """Until one has died, or the life is over with all that follows its report."""
        end = time.monotonic() + _LIFE_S
        while time.monotonic() < end and not any(strace.done for strace in straces):
            if self._scheduler.terminal_reports(name):
                end = min(end, time.monotonic() + _AFTERMATH_S)
                while time.monotonic() < end and not any(strace.done for strace in straces):
                    time.sleep(0.01)
                return
            time.sleep(0.005)

    def _thread(self, victim: str) -> int:
        worker = self._worker
        assert worker.process is not None
        match victim:
            case "supervisor":
                return worker.process.pid
            case "journal":
                # The first thread that it makes, before those of the loop's pool.
                return threads(worker.process.pid)[1]
            case "spawner":
                return self._spawners()[0]
            case "standby":
                return self._spawners()[1]
            case "launcher":
                return self._waiting_launcher()
        raise ValueError(victim)

    def _process(self, victim: str) -> int:
        return self._thread("supervisor" if victim == "journal" else victim)

    def _spawners(self) -> tuple[int, int]:
        """The one in charge, and its standby."""

        def look() -> tuple[int, int] | None:
            found = self._worker.spawners()
            # A child that has not executed its program yet looks like another one.
            if len(found) != 2:
                return None
            parents = {pid: one.parent for pid, one in proc.all_processes().items()}
            for active, standby in itertools.permutations(found):
                if parents.get(standby) == active and parents.get(active) != standby:
                    return active, standby
            return None

        both = eventually(look)
        assert both is not None
        return both

    def _waiting_launcher(self) -> int:
        """The one in the pool; 0 while there is none."""
        spawners = self._worker.spawners()
        found = [
            one.pid
            for one in proc.all_processes().values()
            if one.parent in spawners and _is_launcher(one.pid) and not proc.children(one.pid)
        ]
        return found[0] if len(found) == 1 else 0

    def _kill_spawner(self) -> None:
        kill_if_alive(self._spawners()[0])

    @contextlib.contextmanager
    def _started(self, before: list[str]) -> Iterator[Callable[[], bool]]:
        """A supervisor started below strace: gives a look at whether it lives. Killed at the end.

        Whatever it has started by then goes on, and without strace.
        """
        assert self._worker.process is None or self._worker.process.poll() is not None
        self._worker.process = None
        with open(self._worker.place / "worker.log", "ab") as log:
            tracer = subprocess.Popen(
                [*before, *STOCKADE, "worker", "--config", f"{self._worker.place}/stockade.toml"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8"},
            )  # fmt: skip
        command = f"{self._worker.place}/stockade.toml"

        def look() -> int:
            found = [
                pid
                for pid in processes_that_name(command)
                if pid in proc.children(tracer.pid) and _has_executed(pid)
            ]
            # It may have died at its very first call.
            return found[0] if found else -1 if tracer.poll() is not None else 0

        pid = eventually(look)

        def lives() -> bool:
            found = proc.process(pid) if pid > 0 else None
            return found is not None and found.is_alive

        try:
            yield lives
        finally:
            if pid > 0:
                kill_if_alive(pid)
            # Told to end, it would wait for the command's children; killed, it lets go of them.
            tracer.kill()
            tracer.wait(DEADLINE_S)
            if pid > 0:
                wait_until_gone(pid)

    def _tally(self, scenario: str, points: tuple[Point, ...]) -> Tally:
        victims = "+".join(sorted({point.victim for point in points}))
        tally = self.tallies.setdefault(f"{scenario}: {victims}", Tally())
        tally.tried += 1
        tally.calls.update(point.fault.call for point in points)
        return tally

    def table(self) -> str:
        """What was tried and found, as lines."""
        fields = ("tried", "crashes", "restarts", "tasks", "reports", "lost", "doubled", "untrue")
        total = Tally()
        rows = [("scenario: victims", "kinds", *fields)]
        for name, tally in [*self.tallies.items(), ("all", total)]:
            if tally is not total:
                total.calls |= tally.calls
                for field in fields:
                    setattr(total, field, getattr(total, field) + getattr(tally, field))
            figures = (str(getattr(tally, field)) for field in fields)
            rows.append((name, str(len(tally.calls)), *figures))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        )


def _is_launcher(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"stockade-launcher")
    except OSError:
        return False


def _has_executed(pid: int) -> bool:
    """Whether a child of strace is the command by now, and none that tries what the kernel can."""
    try:
        return Path(f"/proc/{pid}/comm").read_text() != "strace\n"
    except OSError:
        return False


def _points(counts: dict[str, dict[str, int]]) -> list[Point]:
    return [
        Point(victim, Fault(call, number))
        for victim, calls in counts.items()
        for call, count in sorted(calls.items())
        if call not in _NO_EFFECT
        for number in range(1, count + 1)
    ]


@contextlib.contextmanager
def sweeping() -> Iterator[Sweep]:
    """A sweep with a scheduler and a worker of its own."""
    with RecordingScheduler() as scheduler:
        worker = WorkerProcess(
            scheduler.url,
            worker="pool_min = 1\npool_max = 1",
            lines='heartbeat_interval = "60s"',
            extra='[report]\nretry_min = "50ms"\nretry_max = "200ms"',
        )
        try:
            yield Sweep(scheduler, worker.start())
        finally:
            if worker.process is None:
                worker.start()
            worker.close()


def spread(points: Sequence[T], count: int, chance: random.Random) -> list[T]:
    """So many of the points, spread over all of them."""
    if count >= len(points):
        return list(points)
    step = len(points) / count
    return [points[int((number + chance.random()) * step)] for number in range(count)]


# Of one life of the journal: all of the rare ones; of the 13,000 writes the first and the last of
# each kind of place, and some of the many that are like each other.
JOURNAL_CALLS: Final = {
    "pwrite64": (*range(1, 81), *range(81, 13600, 450)),
    "fdatasync": range(1, 42),
    "fsync": range(1, 3),
    "ftruncate": range(1, 4),
    "unlink": range(1, 3),
}
VICTIMS: Final = ("supervisor", "journal", "spawner", "launcher")
PAIRS: Final = (*itertools.combinations(VICTIMS, 2), *((victim, "standby") for victim in VICTIMS))


def run(
    sweep: Sweep, chance: random.Random, *, share: float, scenarios: Container[str],
    say: Callable[[str], None] = lambda _: None,
) -> None:  # fmt: skip
    """The sweep, or the given share of each of its parts."""

    def some(points: list[T]) -> list[T]:
        return spread(points, max(1, round(share * len(points))), chance)

    def each(what: str, points: list[Point], case: Callable[[Point], None]) -> None:
        say(f"{what}: {len(points)} points")
        for number, point in enumerate(points):
            case(point)
            if number % 25 == 24:
                say(f"{what}: {number + 1} done, {len(sweep.faults)} faults")

    everything = sweep.points_of_a_life(VICTIMS)
    of = {victim: [p for p in everything if p.victim == victim] for victim in VICTIMS}
    of["standby"] = [Point("standby", Fault("none", 1))]
    if "life" in scenarios:
        for victim in VICTIMS:
            each(f"life: {victim}", some(of[victim]), sweep.life)
    if "takeover" in scenarios:
        points = some(sweep.points_of_a_takeover())
        turns = itertools.count()
        each("takeover", points, lambda p: sweep.takeover(p, supervisor_too=next(turns) % 8 > 0))
    if "restart" in scenarios:
        kill, dead = sweep.kill_supervisor, {"supervisor"}
        points = some(sweep.points_of_a_start(kill))
        each("restart", points, lambda p: sweep.start(p, "restart", kill, dead))
    if "boot" in scenarios:
        kill_all, all_dead = sweep.kill_all, {"all"}
        points = some(sweep.points_of_a_start(kill_all))
        each("boot", points, lambda p: sweep.start(p, "boot", kill_all, all_dead))
    if "errors" in scenarios:
        faults = [
            Point("journal", dataclasses.replace(p.fault, error=error, times=times))
            for p in of["journal"]
            if p.fault.call in ("pwrite64", "fdatasync", "ftruncate")
            for error, times in (("EIO", 1), ("ENOSPC", 1), ("EIO", 40))
        ]
        each("errors", some(faults), sweep.errors)
    if "journal" in scenarios:
        journal_faults = [
            Fault(call, number, error)
            for call, numbers in JOURNAL_CALLS.items()
            for number in numbers
            for error in (None, "EIO", *(["ENOSPC"] if call == "pwrite64" else []))
        ]
        say(f"journal: {len(some(journal_faults))} points")
        for fault in some(journal_faults):
            sweep.journal(fault)
    if "pairs" in scenarios:
        for first, second in PAIRS:
            pairs = [(p, chance.choice(of[second])) for p in some(of[first])]
            say(f"pair {first}+{second}: {len(pairs)}")
            for pair in pairs:
                sweep.life(*pair)


SCENARIOS: Final = ("life", "takeover", "restart", "boot", "pairs", "errors", "journal")


def main() -> int:
    """The command line: the table on standard output, what broke the promise below it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--share", type=float, default=1.0, help="of each part; 1 is all (1)")
    parser.add_argument("--scenarios", default=",".join(SCENARIOS), help="which (all)")
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    began = time.monotonic()
    with sweeping() as sweep:
        try:
            run(
                sweep, random.Random(seed), share=given.share,
                scenarios=given.scenarios.split(","), say=lambda line: print(line, flush=True),
            )  # fmt: skip
        finally:
            print(sweep.table())
            for fault in sweep.faults:
                print(f"\n{fault}")
    print(f"{time.monotonic() - began:.0f} s")
    return 1 if sweep.faults else 0


if __name__ == "__main__":
    sys.exit(main())
