"""What the journal costs: commits a second, an accept's answer, and a million delivered rows.

    python benchmarks/journal.py [--directory DIR] [--seconds S] [--rows N] [--json FILE]

- commits: one task's accept, start, finish and deliver after each other, by 1 and by 32 at once,
  with fsync and with synchronous=OFF (what the disk costs, not a way to run it).
- accept: from a dispatch over HTTP to its answer, at 200 a second, by a worker whose tasks wait.
- rows: the same commits, and an accept, a duplicate and a sweep, beside so many delivered rows.

Figures are this machine's disk's and this moment's. The directory decides which disk.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import aiohttp
from timing import fdatasync_s, percentile

from stockade.sandbox.outcome import Outcome, Status
from stockade.supervisor.cli.control_client import ControlClient
from stockade.supervisor.dispatch import Dispatch
from stockade.supervisor.journal import Journal
from stockade.supervisor.journal_store import JournalStore
from stockade.supervisor.wire.messages import EXECUTE_PATH

DONE: Final = Outcome(Status.SUCCESS, exit_code=0)
TRANSITIONS: Final = 4
RATE: Final = 200
DEADLINE_S: Final = 60.0


async def open_journal(path: Path, *, with_fsync: bool) -> Journal:
    journal = await Journal.open(path)
    if not with_fsync:
        await journal._commits.read(_without_fsync)
    return journal


def _without_fsync(store: JournalStore) -> None:
    store._execute("PRAGMA synchronous=OFF")


async def transitions(journal: Journal, name: str, at_once: int, seconds: float) -> dict[str, Any]:
    """Lives of tasks, so many at once, for so long."""
    waits: list[float] = []
    end = time.perf_counter() + seconds

    async def lives(worker: int) -> None:
        number = 0
        while time.perf_counter() < end:
            number += 1
            begun = time.perf_counter()
            dispatch = Dispatch(instance_id=f"{name}-{worker}-{number}", payload="true")
            seq = (await journal.accept(dispatch)).row.seq
            waits.append(time.perf_counter() - begun)
            await journal.start(seq)
            await journal.finish(seq, DONE, "output")
            await journal.deliver(seq)

    began = time.perf_counter()
    await asyncio.gather(*(lives(worker) for worker in range(at_once)))
    passed = time.perf_counter() - began
    return {
        "transitions_per_s": round(len(waits) * TRANSITIONS / passed),
        "accept_p50_ms": milliseconds(statistics.median(waits)),
        "accept_p99_ms": milliseconds(percentile(waits, 0.99)),
    }


def milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)


async def commits(directory: Path, seconds: float) -> dict[str, Any]:
    found = {}
    for with_fsync in (True, False):
        for at_once in (1, 32):
            path = directory / f"{with_fsync}-{at_once}.db"
            journal = await open_journal(path, with_fsync=with_fsync)
            name = f"{at_once} at once, {'with' if with_fsync else 'without'} fsync"
            found[name] = await transitions(journal, "t", at_once, seconds)
            await journal.close()
    return found


def add_delivered(path: Path, rows: int) -> None:
    """Fills a journal that nobody has open with tasks that were delivered just now."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA synchronous=OFF")
    connection.execute(
        """
        WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers LIMIT ?1)
        INSERT INTO tasks (state, scheduler, instance_id, accepted_at, started_at, finished_at,
                           closed_at, outcome, excerpt, attempts, dispatch)
        SELECT 'delivered', '', printf('task-%d-1732930000000000000', n), ?2, ?2, ?2, ?2,
               '{"status":"success","exit_code":0}', 'output', 1,
               CAST(json_object('instance_id', printf('task-%d-1732930000000000000', n),
                                'link', 'http', 'task_type', 'shell', 'payload', 'true') AS BLOB)
        FROM numbers
        """,
        (rows, time.time()),
    )
    connection.close()


async def timed(work: Callable[[], Awaitable[Any]], times: int = 1) -> float:
    """Milliseconds, the median."""
    took = []
    for _ in range(times):
        begun = time.perf_counter()
        await work()
        took.append(time.perf_counter() - begun)
    return milliseconds(statistics.median(took))


async def beside_rows(directory: Path, rows: int, seconds: float) -> dict[str, Any]:
    found = {}
    for count in (0, rows):
        path = directory / f"rows-{count}.db"
        await (await Journal.open(path)).close()
        if count:
            add_delivered(path, count)
        begun = time.perf_counter()
        journal = await Journal.open(path)
        opened_ms = milliseconds(time.perf_counter() - begun)
        again = Dispatch(instance_id="task-7-1732930000000000000")
        await journal.accept(again)
        figures = await transitions(journal, "t", 32, seconds)
        found[f"{count} delivered rows"] = {
            **figures,
            "open_ms": opened_ms,
            "duplicate_ms": await timed(lambda: journal.accept(again), 50),  # noqa: B023
            "undelivered_ms": await timed(journal.undelivered_seqs, 50),
            "sweep_that_evicts_nothing_ms": await timed(lambda: journal.sweep(3600.0), 5),  # noqa: B023
            "file_mib": round(path.stat().st_size / (1 << 20)),
        }
        await journal.close()
    return found


async def accept_over_http(directory: Path, seconds: float) -> dict[str, Any]:
    """Dispatches to a real worker at a fixed rate, to their 202; one task runs, the rest wait."""
    place = Path(tempfile.mkdtemp(prefix="stockade-bench-", dir="/tmp"))
    place.chmod(0o755)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = place / "stockade.toml"
    config.write_text(
        f"""
        [worker]
        id = "bench-journal-{os.getpid()}"
        state_dir = "{directory}/state"
        runtime_dir = "{place}/run"
        on_unsupported = "degrade"
        max_concurrency = 1
        log_level = "error"
        drain_timeout = "100ms"
        [profile]
        name = "process"
        [http]
        listen = "127.0.0.1:{port}"
        """
    )
    command = [sys.executable, "-m", "stockade.supervisor.cli.main", "worker", "--config"]
    worker = subprocess.Popen([*command, str(config)], stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + DEADLINE_S
        while True:
            try:
                ControlClient(place / "run" / "control.sock").get("/v1/status")
                break
            except Exception:
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(0.05)
        return await _dispatch_at_rate(f"http://127.0.0.1:{port}{EXECUTE_PATH}", seconds)
    finally:
        worker.terminate()
        worker.wait()
        shutil.rmtree(place)


async def _dispatch_at_rate(url: str, seconds: float) -> dict[str, Any]:
    waits: list[float] = []
    refused = 0

    async def dispatch(session: aiohttp.ClientSession, number: int, due: float) -> None:
        nonlocal refused
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        begun = time.perf_counter()
        payload = "sleep 3600" if number == 0 else "true"
        body = {"schedule_instance_id": f"t{number}", "task_type": "shell", "payload": payload}
        async with session.post(url, json=body) as response:
            refused += response.status != 202
            await response.read()
        waits.append(time.perf_counter() - begun)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        began = time.perf_counter() + 0.5
        await asyncio.gather(
            *(dispatch(session, n, began + n / RATE) for n in range(int(RATE * seconds)))
        )
        passed = time.perf_counter() - began
    return {
        "per_s": round(len(waits) / passed, 1),
        "refused": refused,
        "answer_p50_ms": milliseconds(statistics.median(waits)),
        "answer_p99_ms": milliseconds(percentile(waits, 0.99)),
        "answer_max_ms": milliseconds(max(waits)),
    }


def show(results: dict[str, Any], indent: str = "") -> None:
    for name, value in results.items():
        if isinstance(value, dict):
            print(f"{indent}{name}")
            show(value, indent + "    ")
        else:
            print(f"{indent}{name:32} {value}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path("/var/tmp"), help="on which disk")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each figure")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stockade-bench-", dir=given.directory) as name:
        directory = Path(name)
        directory.chmod(0o711)
        results = {
            "fdatasync of one page, ms": milliseconds(fdatasync_s(directory)),
            "commits": asyncio.run(commits(directory, given.seconds)),
            f"accept over HTTP at {RATE}/s": asyncio.run(
                accept_over_http(directory, given.seconds)
            ),
            "beside delivered rows": asyncio.run(beside_rows(directory, given.rows, given.seconds)),
        }
    show(results)
    if given.json is not None:
        given.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
