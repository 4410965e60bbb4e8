"""The worker's messages as those of the wire, and back. Pure functions."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any, Final

from stockade.supervisor.report import RUNNING
from stockade.supervisor.wire import scheduler_pb2 as pb
from stockade.supervisor.wire.messages import (
    RUNNING_FIELDS,
    AckRequest,
    ExecuteRequest,
    HeartbeatRequest,
    HttpRequest,
    RegisterRequest,
    StatusReport,
)

# What every gRPC library takes unless told otherwise is 4 MiB.
REPORT_BYTES_MAX: Final = 4 * 1024 * 1024 - 1024
_CUT: Final = "\n[... cut to fit a gRPC message ...]\n"
_REPORT_FIELDS: Final = tuple(
    name for name in StatusReport.__struct_fields__ if name not in RUNNING_FIELDS
)


def registration(request: RegisterRequest) -> pb.RegisterWorkerRequest:
    """RegisterWorker's request."""
    return pb.RegisterWorkerRequest(
        worker_id=request.worker_id,
        hostname=_clean(request.hostname),
        ip=request.ip,
        callback_url=request.callback_url,
        grpc_addr=request.grpc_addr,
        protocol=request.protocol,
        max_concurrency=request.max_concurrency,
        labels=_clean_map(request.labels),
    )


def heartbeat(request: HeartbeatRequest) -> pb.HeartbeatRequest:
    """Heartbeat's request."""
    return pb.HeartbeatRequest(
        worker_id=request.worker_id,
        current_load=request.current_load,
        running_tasks=request.running_tasks,
        report_unix_milli=request.report_unix_milli,
    )


def ack(request: AckRequest) -> pb.AckTaskRequest:
    """AckTask's request."""
    return pb.AckTaskRequest(
        schedule_instance_id=_clean(request.schedule_instance_id), worker_id=request.worker_id
    )


def report(message: StatusReport) -> pb.ReportTaskStatusRequest:
    """The report, with ``error_message`` cut where the whole would be too large to be taken."""
    told = pb.ReportTaskStatusRequest()
    for name in RUNNING_FIELDS:
        setattr(told, name, _clean(getattr(message, name)))
    if message.status == RUNNING:
        return told
    for name in _REPORT_FIELDS:
        value = getattr(message, name)
        if isinstance(value, list):
            getattr(told, name).extend(_clean(item) for item in value)
        elif value is not None:
            setattr(told, name, _clean(value) if isinstance(value, str) else value)
    if message.finished_at is not None:
        moment = datetime.datetime.fromisoformat(message.finished_at[:19] + "+00:00")
        told.finished_unix_seconds = int(moment.timestamp())
    if told.ByteSize() > REPORT_BYTES_MAX:
        told.output_truncated = True
        excess_bytes = told.ByteSize() - REPORT_BYTES_MAX
        told.error_message = _without_middle(told.error_message, excess_bytes)
    return told


def dispatch(request: pb.ExecuteTaskRequest) -> ExecuteRequest:
    """The dispatch. What proto3 does not carry, as it is empty, is absent here too."""
    return ExecuteRequest(
        schedule_instance_id=request.schedule_instance_id,
        task_id=request.task_id,
        task_type=request.task_type,
        payload=request.payload,
        image=request.image,
        timeout_seconds=request.timeout_seconds,
        retry_count=request.retry_count,
        shard_no=request.shard_no,
        shard_total=request.shard_total,
        idempotency_key=request.idempotency_key,
        scheduler_url=request.scheduler_url,
        profile=request.profile or None,
        limits=dict(request.limits) or None,
        http=_http(request.http) if request.HasField("http") else None,
        files=dict(request.files) or None,
    )


def _http(request: pb.HttpRequest) -> HttpRequest:
    return HttpRequest(
        method=request.method or None,
        headers=dict(request.headers) or None,
        body=request.body or None,
        expect=list(request.expect) or None,
    )


def _without_middle(text: str, excess_bytes: int) -> str:
    """The text's head and tail, shorter by at least so many bytes, cut between characters."""
    data = text.encode()
    room = max(0, len(data) - excess_bytes - len(_CUT))
    head = data[: room // 2].decode(errors="ignore")
    tail = data[len(data) - room // 2 :].decode(errors="ignore")
    return head + _CUT + tail


def _clean(text: Any) -> str:
    """Text that a protobuf string takes: valid UTF-8. Lone surrogates become question marks."""
    if not isinstance(text, str) or text.isascii():
        return str(text)
    return text.encode("utf-8", "replace").decode()


def _clean_map(values: Mapping[str, str]) -> dict[str, str]:
    return {_clean(name): _clean(value) for name, value in values.items()}
