from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RegisterWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "hostname", "ip", "max_concurrency", "labels", "callback_url", "grpc_addr", "protocol")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    IP_FIELD_NUMBER: _ClassVar[int]
    MAX_CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    CALLBACK_URL_FIELD_NUMBER: _ClassVar[int]
    GRPC_ADDR_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    hostname: str
    ip: str
    max_concurrency: int
    labels: _containers.ScalarMap[str, str]
    callback_url: str
    grpc_addr: str
    protocol: str
    def __init__(self, worker_id: _Optional[str] = ..., hostname: _Optional[str] = ..., ip: _Optional[str] = ..., max_concurrency: _Optional[int] = ..., labels: _Optional[_Mapping[str, str]] = ..., callback_url: _Optional[str] = ..., grpc_addr: _Optional[str] = ..., protocol: _Optional[str] = ...) -> None: ...

class RegisterWorkerResponse(_message.Message):
    __slots__ = ("accepted", "message")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    message: str
    def __init__(self, accepted: _Optional[bool] = ..., message: _Optional[str] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("worker_id", "current_load", "running_tasks", "report_unix_milli")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    CURRENT_LOAD_FIELD_NUMBER: _ClassVar[int]
    RUNNING_TASKS_FIELD_NUMBER: _ClassVar[int]
    REPORT_UNIX_MILLI_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    current_load: int
    running_tasks: int
    report_unix_milli: int
    def __init__(self, worker_id: _Optional[str] = ..., current_load: _Optional[int] = ..., running_tasks: _Optional[int] = ..., report_unix_milli: _Optional[int] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("ok",)
    OK_FIELD_NUMBER: _ClassVar[int]
    ok: bool
    def __init__(self, ok: _Optional[bool] = ...) -> None: ...

class ReportTaskStatusRequest(_message.Message):
    __slots__ = ("schedule_instance_id", "worker_id", "status", "error_code", "error_message", "finished_unix_seconds", "started_at", "finished_at", "exit_code", "signal", "reason", "wall_s", "cpu_s", "cpu_user_s", "cpu_system_s", "memory_peak_bytes", "processes_peak", "io_read_bytes", "io_write_bytes", "output_bytes", "output_truncated", "profile", "degraded", "cpu_throttled_s", "memory_peak_source", "stall_cpu_s", "stall_memory_s", "stall_io_s")
    SCHEDULE_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FINISHED_UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_AT_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WALL_S_FIELD_NUMBER: _ClassVar[int]
    CPU_S_FIELD_NUMBER: _ClassVar[int]
    CPU_USER_S_FIELD_NUMBER: _ClassVar[int]
    CPU_SYSTEM_S_FIELD_NUMBER: _ClassVar[int]
    MEMORY_PEAK_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_PEAK_FIELD_NUMBER: _ClassVar[int]
    IO_READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    IO_WRITE_BYTES_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    CPU_THROTTLED_S_FIELD_NUMBER: _ClassVar[int]
    MEMORY_PEAK_SOURCE_FIELD_NUMBER: _ClassVar[int]
    STALL_CPU_S_FIELD_NUMBER: _ClassVar[int]
    STALL_MEMORY_S_FIELD_NUMBER: _ClassVar[int]
    STALL_IO_S_FIELD_NUMBER: _ClassVar[int]
    schedule_instance_id: str
    worker_id: str
    status: str
    error_code: str
    error_message: str
    finished_unix_seconds: int
    started_at: str
    finished_at: str
    exit_code: int
    signal: str
    reason: str
    wall_s: float
    cpu_s: float
    cpu_user_s: float
    cpu_system_s: float
    memory_peak_bytes: int
    processes_peak: int
    io_read_bytes: int
    io_write_bytes: int
    output_bytes: int
    output_truncated: bool
    profile: str
    degraded: _containers.RepeatedScalarFieldContainer[str]
    cpu_throttled_s: float
    memory_peak_source: str
    stall_cpu_s: float
    stall_memory_s: float
    stall_io_s: float
    def __init__(self, schedule_instance_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., status: _Optional[str] = ..., error_code: _Optional[str] = ..., error_message: _Optional[str] = ..., finished_unix_seconds: _Optional[int] = ..., started_at: _Optional[str] = ..., finished_at: _Optional[str] = ..., exit_code: _Optional[int] = ..., signal: _Optional[str] = ..., reason: _Optional[str] = ..., wall_s: _Optional[float] = ..., cpu_s: _Optional[float] = ..., cpu_user_s: _Optional[float] = ..., cpu_system_s: _Optional[float] = ..., memory_peak_bytes: _Optional[int] = ..., processes_peak: _Optional[int] = ..., io_read_bytes: _Optional[int] = ..., io_write_bytes: _Optional[int] = ..., output_bytes: _Optional[int] = ..., output_truncated: _Optional[bool] = ..., profile: _Optional[str] = ..., degraded: _Optional[_Iterable[str]] = ..., cpu_throttled_s: _Optional[float] = ..., memory_peak_source: _Optional[str] = ..., stall_cpu_s: _Optional[float] = ..., stall_memory_s: _Optional[float] = ..., stall_io_s: _Optional[float] = ...) -> None: ...

class ReportTaskStatusResponse(_message.Message):
    __slots__ = ("ok",)
    OK_FIELD_NUMBER: _ClassVar[int]
    ok: bool
    def __init__(self, ok: _Optional[bool] = ...) -> None: ...

class ExecuteTaskRequest(_message.Message):
    __slots__ = ("schedule_instance_id", "task_id", "task_type", "payload", "timeout_seconds", "retry_count", "scheduler_url", "image", "shard_no", "shard_total", "idempotency_key", "profile", "limits", "http", "files")
    class LimitsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class FilesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SCHEDULE_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_TYPE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RETRY_COUNT_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_URL_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    SHARD_NO_FIELD_NUMBER: _ClassVar[int]
    SHARD_TOTAL_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    HTTP_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    schedule_instance_id: str
    task_id: int
    task_type: str
    payload: str
    timeout_seconds: int
    retry_count: int
    scheduler_url: str
    image: str
    shard_no: int
    shard_total: int
    idempotency_key: str
    profile: str
    limits: _containers.ScalarMap[str, str]
    http: HttpRequest
    files: _containers.ScalarMap[str, str]
    def __init__(self, schedule_instance_id: _Optional[str] = ..., task_id: _Optional[int] = ..., task_type: _Optional[str] = ..., payload: _Optional[str] = ..., timeout_seconds: _Optional[int] = ..., retry_count: _Optional[int] = ..., scheduler_url: _Optional[str] = ..., image: _Optional[str] = ..., shard_no: _Optional[int] = ..., shard_total: _Optional[int] = ..., idempotency_key: _Optional[str] = ..., profile: _Optional[str] = ..., limits: _Optional[_Mapping[str, str]] = ..., http: _Optional[_Union[HttpRequest, _Mapping]] = ..., files: _Optional[_Mapping[str, str]] = ...) -> None: ...

class HttpRequest(_message.Message):
    __slots__ = ("method", "headers", "body", "expect")
    class HeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    METHOD_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    EXPECT_FIELD_NUMBER: _ClassVar[int]
    method: str
    headers: _containers.ScalarMap[str, str]
    body: str
    expect: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, method: _Optional[str] = ..., headers: _Optional[_Mapping[str, str]] = ..., body: _Optional[str] = ..., expect: _Optional[_Iterable[int]] = ...) -> None: ...

class ExecuteTaskResponse(_message.Message):
    __slots__ = ("accepted", "message")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    message: str
    def __init__(self, accepted: _Optional[bool] = ..., message: _Optional[str] = ...) -> None: ...

class AckTaskRequest(_message.Message):
    __slots__ = ("schedule_instance_id", "worker_id")
    SCHEDULE_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    schedule_instance_id: str
    worker_id: str
    def __init__(self, schedule_instance_id: _Optional[str] = ..., worker_id: _Optional[str] = ...) -> None: ...

class AckTaskResponse(_message.Message):
    __slots__ = ("ok",)
    OK_FIELD_NUMBER: _ClassVar[int]
    ok: bool
    def __init__(self, ok: _Optional[bool] = ...) -> None: ...

class ReportTaskLogRequest(_message.Message):
    __slots__ = ("schedule_instance_id", "worker_id", "log_level", "log_message", "timestamp_unix_seconds")
    SCHEDULE_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    LOG_LEVEL_FIELD_NUMBER: _ClassVar[int]
    LOG_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    schedule_instance_id: str
    worker_id: str
    log_level: str
    log_message: str
    timestamp_unix_seconds: int
    def __init__(self, schedule_instance_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., log_level: _Optional[str] = ..., log_message: _Optional[str] = ..., timestamp_unix_seconds: _Optional[int] = ...) -> None: ...

class ReportTaskLogResponse(_message.Message):
    __slots__ = ("ok",)
    OK_FIELD_NUMBER: _ClassVar[int]
    ok: bool
    def __init__(self, ok: _Optional[bool] = ...) -> None: ...

class CancelTaskRequest(_message.Message):
    __slots__ = ("schedule_instance_id", "reason")
    SCHEDULE_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    schedule_instance_id: str
    reason: str
    def __init__(self, schedule_instance_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class CancelTaskResponse(_message.Message):
    __slots__ = ("ok",)
    OK_FIELD_NUMBER: _ClassVar[int]
    ok: bool
    def __init__(self, ok: _Optional[bool] = ...) -> None: ...
