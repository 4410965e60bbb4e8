"""From a dispatch over HTTP to its terminal report, beside ``bash -lc true`` alone, interleaved.

    python benchmarks/dispatch.py [--repetitions N] [--in-flight N] [--json FILE]

Starts a worker and a recording scheduler on loopback. One at a time: the p50 of each and their
ratio. Then ``--in-flight`` at once: tasks a second, beside two loops over ``bash -lc true`` in
parallel. Times are this machine's and this moment's: only the ratios carry over.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
from aiohttp import web

from stockade.supervisor.wire.messages import (
    ACK_PATH,
    EXECUTE_PATH,
    HEARTBEAT_PATH,
    REGISTER_PATH,
    REPORT_PATH,
)

COMMAND: Final = ("bash", "-lc", "true")
DEADLINE_S: Final = 60.0
ENVIRONMENT: Final = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/nonexistent"}


class Scheduler:
    """Answers a worker and wakes whoever waits for a task's terminal report."""

    def __init__(self) -> None:
        self.ended: dict[str, asyncio.Future[str]] = {}
        self.worker: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self) -> str:
        app = web.Application()
        app.router.add_post(REGISTER_PATH, self._register)
        for path in (HEARTBEAT_PATH, ACK_PATH):
            app.router.add_post(path, self._ok)
        app.router.add_post(REPORT_PATH, self._report)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        return f"http://127.0.0.1:{port}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _register(self, request: web.Request) -> web.Response:
        body = await request.json()
        if not self.worker.done():
            self.worker.set_result(body["callback_url"])
        return web.json_response(body, status=201)

    async def _ok(self, request: web.Request) -> web.Response:
        await request.read()
        return web.json_response({"status": "ok"})

    async def _report(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        future = self.ended.get(body["schedule_instance_id"])
        if body["status"] != "running" and future is not None and not future.done():
            future.set_result(body["status"])
        return web.json_response({"status": "ok"})


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def bare_s() -> float:
    """One ``bash -lc true`` by posix_spawn, started and reaped."""
    began = time.perf_counter()
    pid = os.posix_spawnp(COMMAND[0], COMMAND, ENVIRONMENT)
    os.waitpid(pid, 0)
    return time.perf_counter() - began


async def bare_rate(count: int) -> float:
    """Runs a second of two loops in parallel."""

    def loop() -> None:
        for _ in range(count // 2):
            bare_s()

    began = time.perf_counter()
    await asyncio.gather(asyncio.to_thread(loop), asyncio.to_thread(loop))
    return count / (time.perf_counter() - began)


class Bench:
    def __init__(self, session: aiohttp.ClientSession, scheduler: Scheduler, url: str) -> None:
        self._session = session
        self._scheduler = scheduler
        self._url = url
        self._count = 0

    async def task(self) -> float:
        self._count += 1
        key = f"bench-{self._count}"
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._scheduler.ended[key] = future
        began = time.perf_counter()
        body = {"schedule_instance_id": key, "task_type": "shell", "payload": "true"}
        async with self._session.post(self._url + EXECUTE_PATH, json=body) as answer:
            assert answer.status == 202, await answer.text()
        status = await asyncio.wait_for(future, DEADLINE_S)
        assert status == "success", status
        del self._scheduler.ended[key]
        return time.perf_counter() - began

    async def rate(self, count: int, in_flight: int) -> float:
        left = iter(range(count))

        async def one_after_another() -> None:
            for _ in left:
                await self.task()

        began = time.perf_counter()
        await asyncio.gather(*(one_after_another() for _ in range(in_flight)))
        return count / (time.perf_counter() - began)


class Running(NamedTuple):
    """A worker of its own with a scheduler, for the time of a benchmark."""

    bench: Bench
    pid: int
    id: str
    runtime_dir: Path


@contextlib.asynccontextmanager
async def running_worker(in_flight: int) -> AsyncIterator[Running]:
    scheduler = Scheduler()
    url = await scheduler.start()
    place = Path(tempfile.mkdtemp(prefix="stockade-bench-"))
    place.chmod(0o711)
    # As /run is on a host: in memory.
    runtime = Path(tempfile.mkdtemp(prefix="stockade-bench-", dir="/dev/shm"))
    runtime.chmod(0o711)
    environment = {
        **ENVIRONMENT,
        "STOCKADE_WORKER_ID": place.name,
        "STOCKADE_WORKER_STATE_DIR": str(place / "state"),
        "STOCKADE_WORKER_RUNTIME_DIR": str(runtime),
        "STOCKADE_WORKER_ON_UNSUPPORTED": "degrade",
        "STOCKADE_WORKER_MAX_CONCURRENCY": str(max(8, in_flight)),
        "STOCKADE_HTTP_LISTEN": "127.0.0.1:0",
        "STOCKADE_HTTP_SCHEDULER": url,
    }
    worker = subprocess.Popen(
        [sys.executable, "-m", "stockade.supervisor.cli.main", "worker"],
        env=environment, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        worker_url = await asyncio.wait_for(scheduler.worker, DEADLINE_S)
        async with aiohttp.ClientSession() as session:
            bench = Bench(session, scheduler, worker_url)
            yield Running(bench, worker.pid, place.name, runtime)
    finally:
        worker.terminate()
        worker.wait()
        await scheduler.stop()
        shutil.rmtree(place)
        shutil.rmtree(runtime)


async def measure(repetitions: int, in_flight: int) -> dict[str, Any]:
    async with running_worker(in_flight) as running:
        bench = running.bench
        for _ in range(20):
            await bench.task()
            bare_s()
        tasks, bare = [], []
        for _ in range(repetitions):
            bare.append(bare_s())
            tasks.append(await bench.task())
        rates: dict[str, list[float]] = {"bare": [], "worker": []}
        for _ in range(3):
            rates["bare"].append(await bare_rate(repetitions))
            rates["worker"].append(await bench.rate(repetitions, in_flight))
    return {
        "one_at_a_time": {
            "repetitions": repetitions,
            "bare_p50_ms": 1e3 * statistics.median(bare),
            "bare_p99_ms": 1e3 * percentile(bare, 0.99),
            "task_p50_ms": 1e3 * statistics.median(tasks),
            "task_p99_ms": 1e3 * percentile(tasks, 0.99),
            "p50_ratio": statistics.median(tasks) / statistics.median(bare),
        },
        "in_flight": {
            "count": in_flight,
            "bare_per_s": statistics.median(rates["bare"]),
            "tasks_per_s": statistics.median(rates["worker"]),
            "share": statistics.median(rates["worker"]) / statistics.median(rates["bare"]),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=300)
    parser.add_argument("--in-flight", type=int, default=32)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = asyncio.run(measure(arguments.repetitions, arguments.in_flight))
    one, many = found["one_at_a_time"], found["in_flight"]
    print(f"one at a time, {one['repetitions']} each, interleaved      p50 ms    p99 ms")
    for title, name in (("bash -lc true alone", "bare"), ("dispatch to terminal report", "task")):
        print(f"  {title:38} {one[name + '_p50_ms']:9.2f} {one[name + '_p99_ms']:9.2f}")
    print(f"  ratio of the p50                       {one['p50_ratio']:9.2f}")
    print(f"{many['count']} in flight")
    print(f"  bash -lc true alone, two in parallel   {many['bare_per_s']:9.0f} /s")
    print(f"  dispatch to terminal report            {many['tasks_per_s']:9.0f} /s")
    print(f"  share                                  {100 * many['share']:9.0f} %")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
