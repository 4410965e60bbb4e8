"""One link of a worker, by its name, with an intake that records: what tests of links share."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from stockade.sandbox.outcome import ErrorCode, Outcome
from stockade.sandbox.outcome import Status as TaskStatus
from stockade.supervisor.config import Config
from stockade.supervisor.config_load import load
from stockade.supervisor.links import grpc, http
from stockade.supervisor.links.two_way import TwoWayLink
from stockade.supervisor.report import terminal_report
from stockade.supervisor.wire.messages import (
    AckRequest,
    ExecuteRequest,
    HeartbeatRequest,
    RegisterRequest,
)

ACK = AckRequest(schedule_instance_id="task-1", worker_id="w1")
BEAT = HeartbeatRequest(worker_id="w1", current_load=1, running_tasks=1, report_unix_milli=5)
REGISTER = RegisterRequest(
    worker_id="w1", hostname="h", ip="127.0.0.1", callback_url="http://x", max_concurrency=3
)
TIMED_OUT = terminal_report(
    "task-1",
    "w1",
    Outcome(
        status=TaskStatus.TIMEOUT,
        error_code=ErrorCode.TIMEOUT,
        reason="ran for 2 s",
        started_at=1_700_000_000.25,
        finished_at=1_700_000_002.5,
        exit_code=None,
        signal="SIGTERM",
        wall_s=2.25,
    ),
    "last words\n",
)


class RecordingIntake:
    """Takes everything from its link, or raises or does what it is told to."""

    def __init__(self, link: str) -> None:
        self.link = link
        self.dispatches: list[ExecuteRequest] = []
        self.cancels: list[str] = []
        self.error: Exception | None = None
        self.gate: asyncio.Event | None = None
        self.entered = asyncio.Event()

    async def execute(self, request: ExecuteRequest, link: str) -> None:
        assert link == self.link
        self.entered.set()
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        self.dispatches.append(request)

    async def cancel(self, instance_id: str) -> bool:
        self.cancels.append(instance_id)
        return instance_id == "running"


def configured(link: str, tmp_path: Path, **keys: object) -> Config:
    """A configuration of this link; ``keys`` have ``__`` for dots."""
    overrides: dict[str, object] = {
        "worker.id": "w1",
        "worker.state_dir": str(tmp_path),
        "worker.runtime_dir": str(tmp_path),
        f"{link}.listen": "127.0.0.1:0",
        "report.attempt_timeout": 5.0,
    }
    overrides.update({key.replace("__", "."): value for key, value in keys.items()})
    return load(None, {"HOME": str(tmp_path)}, overrides).config


def make_link(
    link: str,
    settings: Config,
    intake: RecordingIntake,
    *,
    token: str = "",
    task_uids: range | None = None,
) -> TwoWayLink:
    """The link, not started yet."""
    module = {"http": http, "grpc": grpc}[link]
    credentials = dataclasses.replace(module.credentials_for(settings), token=token)
    if link == "grpc":
        return grpc.GrpcLink(settings, intake, credentials=credentials, task_uids=task_uids)
    return http.HttpLink(
        settings,
        intake,
        metrics=lambda: b"up 1\n",
        credentials=credentials,
        task_uids=task_uids,
    )


def telling(
    link: str,
    tmp_path: Path,
    scheduler: str,
    body: Callable[[TwoWayLink], Coroutine[Any, Any, None]],
    *,
    token: str = "",
    **keys: object,
) -> None:
    """Run ``body(link)`` with a link that calls this scheduler; "" is for none."""

    async def run() -> None:
        to = {f"{link}__scheduler": scheduler} if scheduler else {}
        settings = configured(link, tmp_path, **to, **keys)
        made = make_link(link, settings, RecordingIntake(link), token=token)
        try:
            await body(made)
        finally:
            await made.close()

    asyncio.run(run())
