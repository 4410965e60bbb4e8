"""A real scheduler process, and a small server that plays the worker's side of the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

DEADLINE_S = 20.0


class SchedulerProcess:
    """``python -m stockade.supervisor.scheduler`` on a free port."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process = process
        self.url = url

    async def stop(self) -> int:
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        return await asyncio.wait_for(self.process.wait(), DEADLINE_S)

    async def kill(self) -> None:
        self.process.kill()
        await asyncio.wait_for(self.process.wait(), DEADLINE_S)


async def spawn(
    *arguments: str, stderr: int = asyncio.subprocess.DEVNULL
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "stockade.supervisor.scheduler",
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=stderr,
    )


@contextlib.asynccontextmanager
async def scheduler_process(
    state_dir: Path, listen: str = "127.0.0.1:0"
) -> AsyncIterator[SchedulerProcess]:
    process = await spawn("--listen", listen, "--state-dir", str(state_dir))
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), DEADLINE_S)
        url = line.decode().strip().removeprefix("stockade scheduler: ")
        assert url.startswith("http://"), line
        yield SchedulerProcess(process, url)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


class FakeWorker:
    """Takes dispatches and cancels and keeps them; says only what the test lets it say."""

    def __init__(self, session: aiohttp.ClientSession, worker_id: str = "w1") -> None:
        self.session = session
        self.worker_id = worker_id
        self.scheduler_url = ""
        self.callback_url = ""
        self.dispatches: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.cancels: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.on_execute: Callable[[dict[str, Any]], Awaitable[web.Response]] = _accept
        self.on_cancel: Callable[[dict[str, Any]], Awaitable[web.Response]] = _cancelled

    async def execute(self, request: web.Request) -> web.Response:
        body = await request.json()
        await self.dispatches.put(body)
        return await self.on_execute(body)

    async def cancel(self, request: web.Request) -> web.Response:
        body = await request.json()
        await self.cancels.put(body)
        return await self.on_cancel(body)

    async def next_dispatch(self) -> dict[str, Any]:
        return await asyncio.wait_for(self.dispatches.get(), DEADLINE_S)

    async def call(self, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        return await post(self.session, self.scheduler_url + path, body)

    async def register(self, max_concurrency: int = 4) -> dict[str, Any]:
        status, worker = await self.call(
            "/api/v1/workers/register",
            {
                "worker_id": self.worker_id,
                "hostname": "lab",
                "ip": "127.0.0.1",
                "callback_url": self.callback_url,
                "grpc_addr": "",
                "protocol": "http",
                "max_concurrency": max_concurrency,
                "labels": {},
            },
        )
        assert status == 201, worker
        return worker

    async def beat(self, load: int = 0, running: int = 0, *, at: float | None = None) -> int:
        moment = time.time() if at is None else at
        status, _ = await self.call(
            "/api/v1/workers/heartbeat",
            {
                "worker_id": self.worker_id,
                "current_load": load,
                "running_tasks": running,
                "report_unix_milli": int(moment * 1000),
            },
        )
        return status

    async def report(self, dispatch: dict[str, Any] | str, status: str, **fields: Any) -> int:
        instance_id = dispatch if isinstance(dispatch, str) else dispatch["schedule_instance_id"]
        answer, _ = await self.call(
            "/api/v1/task-instances/report",
            {
                "schedule_instance_id": instance_id,
                "worker_id": self.worker_id,
                "status": status,
                "error_code": "",
                "error_message": "",
                **fields,
            },
        )
        return answer


@contextlib.asynccontextmanager
async def fake_worker(scheduler_url: str, worker_id: str = "w1") -> AsyncIterator[FakeWorker]:
    async with aiohttp.ClientSession() as session:
        worker = FakeWorker(session, worker_id)
        app = web.Application(client_max_size=8 << 20)
        app.router.add_post("/internal/tasks/execute", worker.execute)
        app.router.add_post("/internal/tasks/cancel", worker.cancel)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0][:2]
            worker.callback_url = f"http://{host}:{port}"
            worker.scheduler_url = scheduler_url
            yield worker
        finally:
            await runner.cleanup()


@contextlib.asynccontextmanager
async def lab(state_dir: Path) -> AsyncIterator[tuple[SchedulerProcess, FakeWorker]]:
    """A scheduler, and a worker that is not registered yet."""
    async with scheduler_process(state_dir) as scheduler, fake_worker(scheduler.url) as worker:
        yield scheduler, worker


async def post(
    session: aiohttp.ClientSession, url: str, body: Any, **options: Any
) -> tuple[int, dict[str, Any]]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with session.post(url, data=io.BytesIO(content), **options) as response:
        return response.status, await response.json()


async def get(session: aiohttp.ClientSession, url: str, **options: Any) -> tuple[int, Any]:
    async with session.get(url, **options) as response:
        return response.status, await response.json()


async def submit(worker: FakeWorker, **fields: Any) -> dict[str, Any]:
    status, task = await post(worker.session, worker.scheduler_url + "/v1/tasks", fields)
    assert status == 201, task
    return task


async def ended(worker: FakeWorker, task: dict[str, Any]) -> dict[str, Any]:
    """The task when it has ended."""
    url = f"{worker.scheduler_url}/v1/tasks/{task['task_id']}"
    status, shown = await get(worker.session, url, params={"wait": str(DEADLINE_S)})
    assert status == 200
    assert shown["ended"], shown
    return shown


async def until(check: Callable[[], Awaitable[bool]]) -> None:
    """Returns when the check holds; for states that nobody announces."""
    async with asyncio.timeout(DEADLINE_S):
        while not await check():
            await asyncio.sleep(0.02)


async def _accept(_dispatch: dict[str, Any]) -> web.Response:
    return web.json_response({"status": "accepted"}, status=202)


async def _cancelled(_cancel: dict[str, Any]) -> web.Response:
    return web.json_response({"status": "cancelled"})


Scenario = Callable[[SchedulerProcess, FakeWorker], Awaitable[None]]


def play(state_dir: Path, scenario: Scenario) -> None:
    """Runs it with a scheduler and a worker of its own."""

    async def main() -> None:
        async with lab(state_dir) as (scheduler, worker):
            await scenario(scheduler, worker)

    asyncio.run(main())
