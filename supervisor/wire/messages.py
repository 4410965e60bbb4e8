"""The messages between worker and scheduler, as JSON bodies and as plain types.

Field names are the wire's. Missing and null fields mean empty; unknown ones are ignored by both
sides. Times are RFC 3339 UTC texts. Shared by the links and by the embedded scheduler.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

EXECUTE_PATH: Final = "/internal/tasks/execute"
CANCEL_PATH: Final = "/internal/tasks/cancel"
HEALTH_PATH: Final = "/healthz"
METRICS_PATH: Final = "/metrics"
REGISTER_PATH: Final = "/api/v1/workers/register"
HEARTBEAT_PATH: Final = "/api/v1/workers/heartbeat"
ACK_PATH: Final = "/api/v1/task-instances/ack"
REPORT_PATH: Final = "/api/v1/task-instances/report"

MAX_DISPATCH_BYTES: Final = 4 * 1024 * 1024
MAX_INSTANCE_ID_CHARACTERS: Final = 256

# As wide as over gRPC: nobody has to cope with a worker of 10**30 places.
_Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
# To the end of the year 9999, which is as far as a time can be written as text.
_UnixMilli = Annotated[int, msgspec.Meta(ge=0, le=253_402_300_799_999)]


class HttpRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The extra ``http`` field of a dispatch: how an http task asks."""

    method: str | None = None
    headers: dict[str, str] | None = None
    body: str | None = None
    expect: list[int] | None = None


class ExecuteRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Scheduler to worker: run this task. ``timeout_seconds`` <= 0 means the default."""

    schedule_instance_id: str | None = None
    task_id: int | None = None
    task_type: str | None = None
    payload: str | None = None
    image: str | None = None
    timeout_seconds: int | None = None
    retry_count: int | None = None
    shard_no: int | None = None
    shard_total: int | None = None
    idempotency_key: str | None = None
    scheduler_url: str | None = None
    # Stockade's own, which another worker ignores.
    profile: str | None = None
    limits: dict[str, Any] | None = None
    http: HttpRequest | None = None
    files: dict[str, str] | None = None


class CancelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Scheduler to worker: stop this task, wherever it is in its life."""

    schedule_instance_id: str | None = None


class RegisterRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Worker to scheduler: here I am. The first heartbeat follows at once."""

    worker_id: str
    hostname: str
    ip: str
    callback_url: str
    grpc_addr: str = ""
    protocol: str = "http"
    max_concurrency: _Int32
    labels: dict[str, str] = {}


class HeartbeatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Worker to scheduler, every 10 s. Answered 404 when the worker must register again."""

    worker_id: str
    current_load: _Int32
    running_tasks: _Int32
    report_unix_milli: _UnixMilli


class AckRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Worker to scheduler: the dispatch is accepted and safe. First of a task's messages."""

    schedule_instance_id: str
    worker_id: str


class StatusReport(msgspec.Struct, frozen=True, kw_only=True):
    """Worker to scheduler: ``running``, or how the task ended (the terminal report).

    On success ``error_message`` is the output's excerpt; otherwise the reason on one line, then the
    excerpt. ``started_at`` and ``finished_at`` are absent in the ``running`` report, which carries
    the first eight fields only.
    """

    schedule_instance_id: str
    worker_id: str
    status: str
    error_code: str = ""
    error_message: str = ""
    started_at: str | None = None
    finished_at: str | None = None
    # Stockade's own, absent in the running report; a plain scheduler ignores them.
    exit_code: int | None = None
    signal: str | None = None
    reason: str | None = None
    wall_s: float | None = None
    cpu_s: float | None = None
    cpu_user_s: float | None = None
    cpu_system_s: float | None = None
    cpu_throttled_s: float | None = None
    memory_peak_bytes: int | None = None
    memory_peak_source: str | None = None
    processes_peak: int | None = None
    io_read_bytes: int | None = None
    io_write_bytes: int | None = None
    stall_cpu_s: float | None = None
    stall_memory_s: float | None = None
    stall_io_s: float | None = None
    output_bytes: int | None = None
    output_truncated: bool = False
    profile: str | None = None
    degraded: list[str] = []


RUNNING_FIELDS: Final = (
    "schedule_instance_id",
    "worker_id",
    "status",
    "error_code",
    "error_message",
)
