"""Schedulers on loopback that take a worker's reports and send it tasks, as the real ones do.

http over kept connections, grpc over a new one for each dispatch.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, Protocol

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


class Ends:
    """Wakes whoever waits for a task's reports, and remembers when heartbeats came."""

    def __init__(self) -> None:
        self.worker: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.heartbeats: list[float] = []
        self._ended: dict[str, asyncio.Future[str]] = {}
        self._running: dict[str, asyncio.Future[str]] = {}

    def expect(self, key: str) -> asyncio.Future[str]:
        """Its status, once the terminal report is there."""
        return self._ended.setdefault(key, asyncio.get_running_loop().create_future())

    def expect_running(self, key: str) -> asyncio.Future[str]:
        """Done once the task is reported running."""
        return self._running.setdefault(key, asyncio.get_running_loop().create_future())

    def registered(self, address: str) -> None:
        if not self.worker.done():
            self.worker.set_result(address)

    def beat(self) -> None:
        self.heartbeats.append(time.monotonic())

    def reported(self, key: str, status: str) -> None:
        waiting = self._running if status == "running" else self._ended
        future = waiting.pop(key, None)
        if future is not None and not future.done():
            future.set_result(status)


class Scheduler(Protocol):
    """One link's: ``start`` gives its address, ``dispatch`` raises unless the task is accepted."""

    ends: Ends

    async def start(self) -> str: ...

    async def dispatch(self, worker: str, key: str, payload: str, timeout_s: int) -> None: ...

    async def stop(self) -> None: ...


class HttpScheduler:
    def __init__(self) -> None:
        self.ends = Ends()

    async def start(self) -> str:
        app = web.Application()
        app.router.add_post(REGISTER_PATH, self._register)
        app.router.add_post(HEARTBEAT_PATH, self._beat)
        app.router.add_post(ACK_PATH, self._ok)
        app.router.add_post(REPORT_PATH, self._report)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, backlog=1024).start()
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def dispatch(self, worker: str, key: str, payload: str, timeout_s: int) -> None:
        body = {
            "schedule_instance_id": key, "task_type": "shell", "payload": payload,
            "timeout_seconds": timeout_s,
        }  # fmt: skip
        async with self._session.post(worker + EXECUTE_PATH, json=body) as answer:
            assert answer.status == 202, await answer.text()

    async def stop(self) -> None:
        await self._session.close()
        await self._runner.cleanup()

    async def _register(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.ends.registered(body["callback_url"])
        return web.json_response(body, status=201)

    async def _beat(self, request: web.Request) -> web.Response:
        self.ends.beat()
        return await self._ok(request)

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

    async def dispatch(self, worker: str, key: str, payload: str, timeout_s: int) -> None:
        host, _, port = worker.rpartition(":")
        async with Channel(host, int(port)) as channel:
            answer = await ExecutorServiceStub(channel).ExecuteTask(
                pb.ExecuteTaskRequest(
                    schedule_instance_id=key, task_type="shell", payload=payload,
                    timeout_seconds=timeout_s,
                )
            )  # fmt: skip
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
        self.ends.beat()
        await stream.send_message(pb.HeartbeatResponse(ok=True))

    async def ReportTaskStatus(self, stream: Stream[Any, Any]) -> None:
        request = await stream.recv_message()
        self.ends.reported(request.schedule_instance_id, request.status)
        await stream.send_message(pb.ReportTaskStatusResponse(ok=True))

    async def AckTask(self, stream: Stream[Any, Any]) -> None:
        await stream.recv_message()
        await stream.send_message(pb.AckTaskResponse(ok=True))

    async def ReportTaskLog(self, stream: Stream[Any, Any]) -> None:
        await stream.recv_message()
        await stream.send_message(pb.ReportTaskLogResponse(ok=True))
