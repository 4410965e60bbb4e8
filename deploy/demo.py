"""The demo: a scheduler and a worker on free loopback ports, and tasks of every temper."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import aiohttp
import psutil
from rich.console import Console

START_S: Final = 30.0
TASK_S: Final = 60.0

Ended = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """One task: what it does, what is sent, and what must come of it.

    Attributes:
        marker: a text in the command line of what the task might leave behind.
    """

    title: str
    submission: dict[str, Any]
    expected: str
    holds: Callable[[Ended], bool] = lambda _ended: True
    twice: bool = False


def _shell(script: str, **extra: Any) -> dict[str, Any]:
    return {"type": "shell", "payload": script, **extra}


def cases(url: str, scratch: Path) -> list[Case]:
    """What the demo shows. ``scratch`` is a file that every task may append to."""
    return [
        Case("prints and succeeds", _shell("echo hello from $(id -u)"), "success",
             lambda ended: "hello from" in ended["error_message"]),
        Case("exits 3 with output", _shell("echo about to fail; exit 3"), "failed/execute_failed",
             lambda ended: ended["outcome"]["exit_code"] == 3
             and "about to fail" in ended["error_message"]),
        Case("allocates 1 GB under 64 MB",
             _shell("python3 -c 'x = bytearray(1 << 30); import time; time.sleep(30)'",
                    limits={"memory_max": "64M"}), "failed/oom_killed"),
        Case("endless loop, timeout 2 s", _shell("while :; do :; done", timeout_seconds=2),
             "timeout/timeout"),
        Case("leaves a daemon on its output", _shell("(setsid sleep 31415 &); echo done"),
             "success",
             lambda ended: ended["error_message"].strip() == "done"),
        Case("fork bomb, 24 processes at most",
             _shell(":(){ :|:& };:; sleep 2; echo survived", timeout_seconds=5,
                    limits={"tasks_max": 24}), "*"),
        Case("asks an HTTP server", {"type": "http", "payload": f"{url}/healthz"}, "success"),
        Case("one instance id, sent twice", _shell(f"echo ran >> {scratch}; sleep 1"), "success",
             lambda _ended: scratch.read_text() == "ran\n", twice=True),
    ]  # fmt: skip


@contextlib.contextmanager
def program(
    *arguments: str, log: Path, environment: dict[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """A stockade command, ended with SIGTERM; what it logs goes to a file."""
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "stockade.supervisor.cli.main", *arguments],
            stdout=subprocess.PIPE, stderr=file, text=True, start_new_session=True,
            env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **environment},
        )  # fmt: skip
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=START_S)
            if process.stdout is not None:
                process.stdout.close()


async def wait_for_worker(session: aiohttp.ClientSession, worker: subprocess.Popen[str]) -> None:
    """Returns when the scheduler knows the worker."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if worker.poll() is not None:
            raise SystemExit(f"the worker ended with status {worker.returncode}")
        async with session.get("/v1/workers") as answer:
            if (await answer.json())["workers"]:
                return
        await asyncio.sleep(0.05)
    raise SystemExit("the worker did not register in time")


async def run(session: aiohttp.ClientSession, case: Case) -> tuple[Case, Ended, float]:
    """Submits one task, twice where the case says so, and waits for its end."""
    began = time.monotonic()
    async with session.post("/v1/tasks", json=case.submission) as answer:
        task = await answer.json()
        if answer.status >= 300:
            raise SystemExit(f"cannot submit: {task}")
    key = task["task_id"]
    if case.twice:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            async with session.get(f"/v1/tasks/{key}") as answer:
                if (await answer.json())["status"] == "running":
                    break
            await asyncio.sleep(0.02)
        async with session.post(f"/v1/tasks/{key}/dispatch") as answer:
            if answer.status >= 300:
                raise SystemExit(f"cannot send it again: {await answer.text()}")
    async with session.get(f"/v1/tasks/{key}", params={"wait": str(TASK_S)}) as answer:
        return case, await answer.json(), time.monotonic() - began


def verdict(case: Case, ended: Ended) -> tuple[str, bool]:
    """How it ended, and whether that is right."""
    shown = ended["status"] + (f"/{ended['error_code']}" if ended["error_code"] else "")
    return shown, case.expected in ("*", shown) and case.holds(ended)


def leftovers(place: Path) -> list[str]:
    """What should not be there any more."""
    found = [f"process {p.pid}: {' '.join(p.cmdline())}" for p in psutil.process_iter()
             if p.pid != os.getpid() and _mentions(p, str(place), "31415")]  # fmt: skip
    work = place / "state/work"
    found += [f"work directory {name}" for name in (os.listdir(work) if work.is_dir() else [])]
    return found


def _mentions(process: psutil.Process, *texts: str) -> bool:
    try:
        line = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return any(text in line for text in texts)


async def main() -> int:
    """Runs the demo; 0 when every task ended as it must and nothing is left."""
    console = Console()
    place = Path(tempfile.mkdtemp(prefix="stockade-demo-"))
    # Tasks run with uids of their own and must be able to pass through to their work directories.
    place.chmod(0o711)
    scratch = place / "ran"
    scratch.touch()
    scratch.chmod(0o666)
    failures = 0
    try:
        listen = ("--listen", "127.0.0.1:0", "--state-dir", str(place / "scheduler"))
        with program(
            "scheduler", *listen, log=place / "scheduler.log", environment={}
        ) as scheduler:
            assert scheduler.stdout is not None
            url = scheduler.stdout.readline().strip().partition(": ")[2]
            environment = {
                "STOCKADE_WORKER_ID": place.name,
                "STOCKADE_WORKER_STATE_DIR": str(place / "state"),
                "STOCKADE_PROFILE_READ_WRITE_PATHS": str(scratch),
                "STOCKADE_WORKER_RUNTIME_DIR": str(place / "run"),
                "STOCKADE_WORKER_ON_UNSUPPORTED": "degrade",
                "STOCKADE_HTTP_LISTEN": "127.0.0.1:0",
                "STOCKADE_HTTP_SCHEDULER": url,
            }
            with program("worker", log=place / "worker.log", environment=environment) as worker:
                console.print(
                    f"scheduler [bold]{url}[/bold]; each line appears when its task ends\n"
                )
                async with aiohttp.ClientSession(url) as session:
                    await wait_for_worker(session, worker)
                    failures = await show(console, session, cases(url, scratch))
        left = leftovers(place)
        failures += len(left)
        for line in left:
            console.print(f"[red]left behind: {line}[/red]")
        if not left:
            console.print("nothing is left behind: no process, no work directory")
        if failures:
            console.print((place / "worker.log").read_text())
    finally:
        shutil.rmtree(place)
    return 1 if failures else 0


async def show(console: Console, session: aiohttp.ClientSession, todo: list[Case]) -> int:
    """Runs all at once and prints each as it ends; how many ended wrong."""
    failures = 0
    degraded: set[str] = set()
    console.print(f"[bold]{'task':34}{'ended as':24}{'after':>8}{'memory':>12}[/bold]")
    for next_one in asyncio.as_completed([run(session, case) for case in todo]):
        case, ended, took_s = await next_one
        shown, is_right = verdict(case, ended)
        failures += not is_right
        outcome = ended.get("outcome") or {}
        degraded.update(outcome.get("degraded") or ())
        peak = outcome.get("memory_peak_bytes")
        memory = f"{peak / 2**20:.1f} MiB" if peak else "-"
        first_line = (ended["error_message"] or "").partition("\n")[0][:74]
        style = "" if is_right else "red"
        console.print(f"{case.title:34}{shown:24}{took_s:6.1f} s{memory:>12}", style=style)
        if first_line:
            console.print(f"    {first_line}", style="dim", markup=False, highlight=False)
    if degraded:
        names = ", ".join(sorted(degraded))
        console.print(f"\nheld more coarsely on this host: {names} (stockade doctor says why)")
    return failures


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main()))
