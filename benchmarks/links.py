"""From a dispatch to its terminal report over each link, side by side.

    python benchmarks/links.py [--repetitions N] [--in-flight N ...] [--json FILE]

One worker serves http and grpc at once, each with a scheduler of its own on loopback that takes the
reports and dials as the real ones do: http over kept connections, grpc over a new one each time.
The links take turns, so that what disturbs one disturbs the other.
Times are this machine's and this moment's: only the ratios carry over.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final, Protocol

import aiohttp
from aiohttp import web
from grpclib.client import Channel
from grpclib.server import Server, Stream

from stockade.supervisor.wire import scheduler_pb2 as pb
from stockade.supervisor.wire.messages import (
    ACK_PATH,
    EXECUTE_PATH,
    HEARTBEAT_PATH,
    REGISTER_PATH,
    REPORT_PATH,
)
from stockade.supervisor.wire.scheduler_grpc import ExecutorServiceStub, WorkerControlServiceBase

DEADLINE_S: Final = 60.0
ROUNDS: Final = 3
ENVIRONMENT: Final = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/nonexistent"}


class Ends:
    """Wakes whoever waits for a task's terminal report."""

    def __init__(self) -> None:
        self.worker: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._ended: dict[str, asyncio.Future[str]] = {}

    def expect(self, key: str) -> asyncio.Future[str]:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._ended[key] = future
        return future

    def registered(self, address: str) -> None:
        if not self.worker.done():
            self.worker.set_result(address)

    def reported(self, key: str, status: str) -> None:
        if status != "running" and key in self._ended:
            self._ended.pop(key).set_result(status)


class Scheduler(Protocol):
    """One link's: ``start`` gives its address, ``dispatch`` raises unless the task is accepted."""

    ends: Ends

    async def start(self) -> str: ...

    async def dispatch(self, worker: str, key: str) -> None: ...

    async def stop(self) -> None: ...


class HttpScheduler:
    def __init__(self) -> None:
        self.ends = Ends()

    async def start(self) -> str:
        app = web.Application()
        app.router.add_post(REGISTER_PATH, self._register)
        for path in (HEARTBEAT_PATH, ACK_PATH):
            app.router.add_post(path, self._ok)
        app.router.add_post(REPORT_PATH, self._report)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._session = aiohttp.ClientSession()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def dispatch(self, worker: str, key: str) -> None:
        body = {"schedule_instance_id": key, "task_type": "shell", "payload": "true"}
        async with self._session.post(worker + EXECUTE_PATH, json=body) as answer:
            assert answer.status == 202, await answer.text()

    async def stop(self) -> None:
        await self._session.close()
        await self._runner.cleanup()

    async def _register(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.ends.registered(body["callback_url"])
        return web.json_response(body, status=201)

    async def _ok(self, request: web.Request) -> web.Response:
        await request.read()
        return web.json_response({"status": "ok"})

    async def _report(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        self.ends.reported(body["schedule_instance_id"], body["status"])
        return web.json_response({"status": "ok"})


class GrpcScheduler(WorkerControlServiceBase):
    def __init__(self) -> None:
        self.ends = Ends()

    async def start(self) -> str:
        self._server = Server([self])
        await self._server.start("127.0.0.1", 0)
        assert self._server._server is not None
        port = self._server._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        return f"127.0.0.1:{port}"

    async def dispatch(self, worker: str, key: str) -> None:
        host, _, port = worker.rpartition(":")
        async with Channel(host, int(port)) as channel:
            answer = await ExecutorServiceStub(channel).ExecuteTask(
                pb.ExecuteTaskRequest(schedule_instance_id=key, task_type="shell", payload="true")
            )
        assert answer.accepted, answer.message

    async def stop(self) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def RegisterWorker(self, stream: Stream[Any, Any]) -> None:
        request = await stream.recv_message()
        self.ends.registered(request.grpc_addr)
        await stream.send_message(pb.RegisterWorkerResponse(accepted=True))

    async def Heartbeat(self, stream: Stream[Any, Any]) -> None:
        await stream.recv_message()
        await stream.send_message(pb.HeartbeatResponse(ok=True))

    async def AckTask(self, stream: Stream[Any, Any]) -> None:
        await stream.recv_message()
        await stream.send_message(pb.AckTaskResponse(ok=True))

    async def ReportTaskStatus(self, stream: Stream[Any, Any]) -> None:
        request = await stream.recv_message()
        self.ends.reported(request.schedule_instance_id, request.status)
        await stream.send_message(pb.ReportTaskStatusResponse(ok=True))

    async def ReportTaskLog(self, stream: Stream[Any, Any]) -> None:
        await stream.recv_message()
        await stream.send_message(pb.ReportTaskLogResponse(ok=True))


class Bench:
    """Dispatches over one link."""

    def __init__(self, scheduler: Scheduler, worker: str, name: str) -> None:
        self._scheduler = scheduler
        self._worker = worker
        self._name = name
        self._count = 0

    async def task(self) -> float:
        """Seconds from dispatch to terminal report."""
        self._count += 1
        key = f"{self._name}-{self._count}"
        end = self._scheduler.ends.expect(key)
        began = time.perf_counter()
        await self._scheduler.dispatch(self._worker, key)
        status = await asyncio.wait_for(end, DEADLINE_S)
        assert status == "success", status
        return time.perf_counter() - began

    async def burst(self, count: int, in_flight: int) -> tuple[float, list[float]]:
        """Tasks a second, and the seconds of each."""
        left = iter(range(count))
        times: list[float] = []

        async def one_after_another() -> None:
            times.extend([await self.task() for _ in left])

        began = time.perf_counter()
        await asyncio.gather(*(one_after_another() for _ in range(in_flight)))
        return count / (time.perf_counter() - began), times


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def measure(repetitions: int, in_flights: list[int]) -> list[dict[str, Any]]:
    schedulers: dict[str, Scheduler] = {"http": HttpScheduler(), "grpc": GrpcScheduler()}
    place = Path(tempfile.mkdtemp(prefix="stockade-bench-"))
    place.chmod(0o711)
    environment = {
        **ENVIRONMENT,
        "STOCKADE_WORKER_ID": place.name,
        "STOCKADE_WORKER_STATE_DIR": str(place / "state"),
        "STOCKADE_WORKER_RUNTIME_DIR": str(place / "run"),
        "STOCKADE_WORKER_ON_UNSUPPORTED": "degrade",
        "STOCKADE_WORKER_MAX_CONCURRENCY": str(max(8, *in_flights)),
    }
    for name, scheduler in schedulers.items():
        environment[f"STOCKADE_{name.upper()}_LISTEN"] = "127.0.0.1:0"
        environment[f"STOCKADE_{name.upper()}_SCHEDULER"] = await scheduler.start()
    worker = subprocess.Popen(
        [sys.executable, "-m", "stockade.supervisor.cli.main", "worker"],
        env=environment, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    found = []
    try:
        benches = {
            name: Bench(scheduler, await asyncio.wait_for(scheduler.ends.worker, DEADLINE_S), name)
            for name, scheduler in schedulers.items()
        }
        for bench in benches.values():
            await bench.burst(20, 4)
        for in_flight in in_flights:
            rates: dict[str, list[float]] = {name: [] for name in benches}
            times: dict[str, list[float]] = {name: [] for name in benches}
            for _ in range(ROUNDS):
                for name, bench in benches.items():
                    rate, each = await bench.burst(max(repetitions // ROUNDS, 1), in_flight)
                    rates[name].append(rate)
                    times[name] += each
            found += [
                {
                    "link": name,
                    "in_flight": in_flight,
                    "tasks": len(times[name]),
                    "p50_ms": 1e3 * statistics.median(times[name]),
                    "p99_ms": 1e3 * percentile(times[name], 0.99),
                    "tasks_per_s": statistics.median(rates[name]),
                }
                for name in benches
            ]
    finally:
        worker.terminate()
        worker.wait()
        for scheduler in schedulers.values():
            await scheduler.stop()
        shutil.rmtree(place)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=300)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = asyncio.run(measure(arguments.repetitions, arguments.in_flight))
    print("dispatch to terminal report   in flight     p50 ms     p99 ms    tasks/s   rate of http")
    base = {one["in_flight"]: one["tasks_per_s"] for one in found if one["link"] == "http"}
    for one in found:
        ratio = one["tasks_per_s"] / base[one["in_flight"]]
        print(
            f"{one['link']:28} {one['in_flight']:10} {one['p50_ms']:10.2f} {one['p99_ms']:10.2f}"
            f" {one['tasks_per_s']:10.0f} {ratio:14.2f}"
        )
    if arguments.json:
        facts = {"machine": os.uname().machine, "kernel": os.uname().release, "found": found}
        arguments.json.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
