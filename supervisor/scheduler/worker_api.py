"""The protocol's scheduler side: what workers call."""

from __future__ import annotations

import contextlib
from typing import Any, Final

import msgspec
from aiohttp import web

from stockade.supervisor.scheduler.bodies import json_response, read_message
from stockade.supervisor.scheduler.dispatcher import Dispatcher
from stockade.supervisor.scheduler.errors import NotFoundError, RequestError
from stockade.supervisor.scheduler.states import REPORTED, Event
from stockade.supervisor.scheduler.store import Details
from stockade.supervisor.scheduler.tasks import utc_text
from stockade.supervisor.scheduler.workers import Worker, Workers
from stockade.supervisor.wire.messages import (
    ACK_PATH,
    HEARTBEAT_PATH,
    REGISTER_PATH,
    REPORT_PATH,
    RUNNING_FIELDS,
    AckRequest,
    HeartbeatRequest,
    RegisterRequest,
    StatusReport,
)

_OK: Final = {"status": "ok"}
_PLAIN_FIELDS: Final = frozenset({*RUNNING_FIELDS, "started_at", "finished_at"})


class WorkerApi:
    """Register, heartbeat, ack and report."""

    def __init__(self, workers: Workers, dispatcher: Dispatcher) -> None:
        self._workers = workers
        self._dispatcher = dispatcher

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post(REGISTER_PATH, self._register),
            web.post(HEARTBEAT_PATH, self._heartbeat),
            web.post(ACK_PATH, self._ack),
            web.post(REPORT_PATH, self._report),
        ]

    async def _register(self, request: web.Request) -> web.Response:
        registration = read_message(await request.read(), RegisterRequest)
        if not registration.worker_id or not registration.hostname:
            raise RequestError("cannot register the worker: worker_id and hostname are required")
        # Reports go to the name by which the worker reached us, which is the one it is set to.
        worker = self._workers.register(registration, f"http://{request.host}")
        self._dispatcher.wake()
        return json_response(_plain_view(worker), status=201)

    async def _heartbeat(self, request: web.Request) -> web.Response:
        heartbeat = read_message(await request.read(), HeartbeatRequest)
        if not heartbeat.worker_id:
            raise RequestError("cannot take the heartbeat: worker_id is required")
        worker = self._workers.find(heartbeat.worker_id)
        worker.beat(heartbeat)
        self._dispatcher.wake()
        return json_response(_plain_view(worker))

    async def _ack(self, request: web.Request) -> web.Response:
        # Always 200: an ack changes nothing that the dispatch's own answer does not.
        with contextlib.suppress(RequestError, NotFoundError):
            ack = read_message(await request.read(), AckRequest)
            await self._dispatcher.take(ack.schedule_instance_id, Event.ACCEPT)
        return json_response(_OK)

    async def _report(self, request: web.Request) -> web.Response:
        report = read_message(await request.read(), StatusReport)
        if not report.schedule_instance_id:
            raise RequestError("cannot take the report: schedule_instance_id is required")
        event = REPORTED.get(report.status)
        if event is None:
            raise RequestError(
                f"cannot take the report: status {report.status!r} is none of {', '.join(REPORTED)}"
            )
        await self._dispatcher.take(report.schedule_instance_id, event, _details(report, event))
        return json_response(_OK)


def _details(report: StatusReport, event: Event) -> Details:
    if event is Event.RUN:
        return Details()
    fields: dict[str, Any] = msgspec.to_builtins(report)
    # A plain worker sends none of the extra fields; all of them at their defaults means that.
    told = report != StatusReport(**{name: fields[name] for name in _PLAIN_FIELDS})
    return Details(
        error_code=report.error_code,
        error_message=report.error_message,
        started_at=report.started_at or None,
        finished_at=report.finished_at or None,
        outcome={
            "status": report.status,
            "error_code": report.error_code,
            **{name: value for name, value in fields.items() if name not in _PLAIN_FIELDS},
        }
        if told
        else {},
    )


def _plain_view(worker: Worker) -> dict[str, Any]:
    """The worker under the names that the scheduler of the protocol gives its fields."""
    registration = worker.registration
    return {
        "ID": worker.worker_id,
        "Hostname": registration.hostname,
        "IP": registration.ip,
        "CallbackURL": registration.callback_url,
        "GRPCAddr": registration.grpc_addr,
        "Protocol": registration.protocol,
        "MaxConcurrency": worker.maximum,
        "CurrentLoad": worker.load,
        "RunningTasks": worker.running,
        "Status": str(worker.presence),
        "Labels": registration.labels,
        "LastHeartbeat": utc_text(worker.reported_ms / 1000),
    }
