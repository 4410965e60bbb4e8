"""The recording scheduler over gRPC: records, answers and misbehaves as the HTTP one does.

A message is recorded under the path that it would have over HTTP, with a body of the same fields,
so that a test need not know which of the two it talks to. An ``Answer`` is translated: 2xx is
ok=true, 404 is ok=false as the real scheduler says it, and other statuses are gRPC's own.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpclib
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message import Message as ProtoMessage
from grpclib.client import Channel
from grpclib.config import Configuration
from grpclib.const import Status
from grpclib.exceptions import StreamTerminatedError
from grpclib.protocol import H2Protocol
from grpclib.server import Server, Stream
from recording_scheduler import Answer, Behaviour, CutBody, Drip, Drop, Message, RecordingScheduler

from stockade.supervisor.wire import scheduler_pb2 as pb
from stockade.supervisor.wire.messages import (
    ACK_PATH,
    HEARTBEAT_PATH,
    REGISTER_PATH,
    REPORT_PATH,
)
from stockade.supervisor.wire.scheduler_grpc import ExecutorServiceStub, WorkerControlServiceBase

STATUS_OF = {
    400: (Status.INVALID_ARGUMENT, "bad request"),
    401: (Status.UNAUTHENTICATED, "who are you"),
    403: (Status.PERMISSION_DENIED, "no"),
    404: (Status.NOT_FOUND, "not found"),
    409: (Status.ALREADY_EXISTS, "conflict"),
    413: (Status.RESOURCE_EXHAUSTED, "grpc: received message larger than max (9 vs. 8)"),
    429: (Status.RESOURCE_EXHAUSTED, "quota"),
    500: (Status.INTERNAL, "fault"),
    503: (Status.UNAVAILABLE, "not now"),
}
HTTP_OF = {
    Status.INVALID_ARGUMENT: 400,
    Status.UNAUTHENTICATED: 401,
    Status.PERMISSION_DENIED: 403,
    Status.RESOURCE_EXHAUSTED: 413,
    Status.UNAVAILABLE: 503,
}


class GrpcRecordingScheduler(RecordingScheduler):
    """See the module's docstring."""

    link = "grpc"

    async def _listen(self) -> None:
        self._grpc = _Server([_Control(self)])
        await self._grpc.start("127.0.0.1", self._port, ssl=self._tls)
        assert self._grpc._server is not None
        self._port = self._grpc._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]

    async def _cut(self) -> None:
        server, self._grpc = getattr(self, "_grpc", None), None
        if server is None:
            return
        for protocol in server.protocols:
            # None of a connection whose handshake failed; no transport of one that is closed.
            connection = getattr(protocol, "connection", None)
            if hasattr(connection, "_transport"):
                connection._transport.abort()
        server.close()
        await server.wait_closed()

    @property
    def url(self) -> str:
        return f"{'https://' if self._tls else ''}127.0.0.1:{self._port}"

    def callback(self, registration: Any) -> str:
        return str(registration["grpc_addr"])

    def dispatch(self, worker_url: str, **fields: Any) -> tuple[int, dict[str, Any]]:
        known = {name: value for name, value in fields.items() if value is not None}
        if "limits" in known:
            known["limits"] = {name: str(value) for name, value in known["limits"].items()}
        request = ParseDict({"task_type": "shell", **known}, pb.ExecuteTaskRequest())
        answer = self._run(self._ask(worker_url, "ExecuteTask", request))
        if isinstance(answer, tuple):
            return answer
        return 202, {"status": "accepted"} if answer.accepted else {"error": answer.message}

    def cancel(self, worker_url: str, instance_id: str) -> tuple[int, dict[str, Any]]:
        request = pb.CancelTaskRequest(schedule_instance_id=instance_id)
        answer = self._run(self._ask(worker_url, "CancelTask", request))
        if isinstance(answer, tuple):
            return answer
        return 200, {"status": "cancelled"} if answer.ok else {"error": "not cancelled"}

    async def _ask(self, address: str, method: str, request: ProtoMessage) -> Any:
        """One call over a connection of its own, as the real scheduler makes it."""
        host, _, port = address.removeprefix("https://").rpartition(":")
        metadata = {"authorization": f"Bearer {self._token}"} if self._token else {}
        async with Channel(host, int(port), ssl=self._caller_tls) as channel:
            call = getattr(ExecutorServiceStub(channel), method)
            try:
                return await call(request, timeout=10, metadata=metadata)
            except grpclib.GRPCError as error:
                return HTTP_OF[error.status], {"error": error.message}
            finally:
                connection = getattr(channel._protocol, "connection", None)
                if hasattr(connection, "_transport"):
                    # Over TLS a close waits for the peer's.
                    connection._transport.abort()


class _Server(Server):
    """Knows its connections, so that they can be cut."""

    def __init__(self, handlers: Any) -> None:
        # No keepalive of its own: what is tested is the worker's.
        super().__init__(handlers, config=Configuration(_keepalive_time=None))
        self.protocols: list[H2Protocol] = []

    def _protocol_factory(self) -> H2Protocol:
        protocol = super()._protocol_factory()
        self.protocols.append(protocol)
        return protocol

    def number(self, connection: Any) -> int:
        return next(
            number
            for number, protocol in enumerate(self.protocols, 1)
            if getattr(protocol, "connection", None) is connection
        )


class _Control(WorkerControlServiceBase):
    def __init__(self, scheduler: GrpcRecordingScheduler) -> None:
        self._scheduler = scheduler

    async def RegisterWorker(self, stream: Stream[Any, Any]) -> None:  # noqa: N802
        await self._answer(stream, REGISTER_PATH, pb.RegisterWorkerResponse(accepted=True))

    async def Heartbeat(self, stream: Stream[Any, Any]) -> None:  # noqa: N802
        await self._answer(stream, HEARTBEAT_PATH, pb.HeartbeatResponse(ok=True))

    async def ReportTaskStatus(self, stream: Stream[Any, Any]) -> None:  # noqa: N802
        await self._answer(stream, REPORT_PATH, pb.ReportTaskStatusResponse(ok=True))

    async def AckTask(self, stream: Stream[Any, Any]) -> None:  # noqa: N802
        await self._answer(stream, ACK_PATH, pb.AckTaskResponse(ok=True))

    async def ReportTaskLog(self, stream: Stream[Any, Any]) -> None:  # noqa: N802
        await self._answer(stream, "ReportTaskLog", pb.ReportTaskLogResponse(ok=True))

    async def _answer(self, stream: Stream[Any, Any], path: str, yes: Any) -> None:
        connection = stream._stream.connection
        request = await stream.recv_message()
        assert request is not None
        assert self._scheduler._grpc is not None
        message = Message(
            path,
            body_of(request),
            {name: str(value) for name, value in (stream.metadata or {}).items()},
            time.monotonic(),
            self._scheduler._grpc.number(connection),
            request.SerializeToString(),
        )
        behaviour = self._scheduler._record(message)
        if isinstance(behaviour, Answer):
            await asyncio.sleep(behaviour.delay_s)
            await _say(stream, behaviour, yes)
        else:
            await _misbehave(stream, behaviour)


async def _say(stream: Stream[Any, Any], answer: Answer, yes: Any) -> None:
    if 200 <= answer.status < 300:
        await stream.send_message(yes)
    elif answer.status == 404:
        await stream.send_message(type(yes)())
    else:
        status, message = STATUS_OF[answer.status]
        raise grpclib.GRPCError(status, message)


async def _misbehave(stream: Stream[Any, Any], behaviour: Behaviour) -> None:
    transport = stream._stream.connection._transport
    if isinstance(behaviour, Drop):
        transport.abort()
    elif isinstance(behaviour, CutBody):
        await stream.send_initial_metadata()
        await stream._stream.send_data(b"\0\0\0")
        transport.close()
    elif isinstance(behaviour, Drip):
        await stream.send_initial_metadata()
    # Until the client gives up.
    try:
        await asyncio.Event().wait()
    except StreamTerminatedError:
        return


def body_of(request: ProtoMessage) -> dict[str, Any]:
    """The message as HTTP's JSON would have it: numbers are numbers, what is absent is null."""
    body: dict[str, Any] = {}
    plain = MessageToDict(
        request, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    for field in request.DESCRIPTOR.fields:
        value = plain.get(field.name)
        is_int64 = field.type in (field.TYPE_INT64, field.TYPE_UINT64)
        body[field.name] = int(value) if is_int64 and value is not None else value
    return body
