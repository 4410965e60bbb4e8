"""The committed gRPC code is what the description makes, and the description is the schedulers'."""

from __future__ import annotations

from pathlib import Path

import pytest
from wire_generation import GENERATED, WIRE, generate

from stockade.supervisor.wire import scheduler_pb2 as pb
from stockade.supervisor.wire.messages import ExecuteRequest, StatusReport

# The field numbers of the schedulers that exist: never to be changed.
NUMBERS = {
    "RegisterWorkerRequest": {
        "worker_id": 1, "hostname": 2, "ip": 3, "max_concurrency": 4, "labels": 5,
        "callback_url": 6, "grpc_addr": 7, "protocol": 8,
    },
    "RegisterWorkerResponse": {"accepted": 1, "message": 2},
    "HeartbeatRequest": {
        "worker_id": 1, "current_load": 2, "running_tasks": 3, "report_unix_milli": 4,
    },
    "HeartbeatResponse": {"ok": 1},
    "ReportTaskStatusRequest": {
        "schedule_instance_id": 1, "worker_id": 2, "status": 3, "error_code": 4,
        "error_message": 5, "finished_unix_seconds": 6, "started_at": 7, "finished_at": 8,
    },
    "ReportTaskStatusResponse": {"ok": 1},
    "ExecuteTaskRequest": {
        "schedule_instance_id": 1, "task_id": 2, "task_type": 3, "payload": 4,
        "timeout_seconds": 5, "retry_count": 6, "scheduler_url": 7, "image": 8,
    },
    "ExecuteTaskResponse": {"accepted": 1, "message": 2},
    "AckTaskRequest": {"schedule_instance_id": 1, "worker_id": 2},
    "AckTaskResponse": {"ok": 1},
    "ReportTaskLogRequest": {
        "schedule_instance_id": 1, "worker_id": 2, "log_level": 3, "log_message": 4,
        "timestamp_unix_seconds": 5,
    },
    "ReportTaskLogResponse": {"ok": 1},
    "CancelTaskRequest": {"schedule_instance_id": 1, "reason": 2},
    "CancelTaskResponse": {"ok": 1},
}  # fmt: skip
OTHER_TYPES = {
    "max_concurrency": "int32", "current_load": "int32", "running_tasks": "int32",
    "report_unix_milli": "int64", "finished_unix_seconds": "int64", "task_id": "int64",
    "timeout_seconds": "int32", "retry_count": "int32", "timestamp_unix_seconds": "int64",
    "ok": "bool", "accepted": "bool", "labels": "message",
}  # fmt: skip
TYPE_NAMES = {3: "int64", 5: "int32", 8: "bool", 9: "string", 11: "message"}


def test_committed_code_is_what_the_description_makes(tmp_path: Path) -> None:
    made = generate(tmp_path)
    for name in GENERATED:
        assert (WIRE / name).read_text() == made[name], f"run tests/wire_generation.py for {name}"


def test_package_and_services_are_the_schedulers() -> None:
    assert pb.DESCRIPTOR.package == "scheduler.v1"
    services = pb.DESCRIPTOR.services_by_name
    assert {name: set(service.methods_by_name) for name, service in services.items()} == {
        "WorkerControlService": {
            "RegisterWorker", "Heartbeat", "ReportTaskStatus", "ReportTaskLog", "AckTask",
        },
        "ExecutorService": {"ExecuteTask", "CancelTask"},
    }  # fmt: skip


@pytest.mark.parametrize("message", NUMBERS)
def test_fields_have_the_schedulers_numbers_and_ours_begin_at_100(message: str) -> None:
    fields = pb.DESCRIPTOR.message_types_by_name[message].fields
    theirs = {field.name: field for field in fields if field.number < 100}
    assert {name: field.number for name, field in theirs.items()} == NUMBERS[message]
    for name, field in theirs.items():
        assert TYPE_NAMES[field.type] == OTHER_TYPES.get(name, "string"), name


@pytest.mark.parametrize(
    ("struct", "message"),
    [(StatusReport, pb.ReportTaskStatusRequest), (ExecuteRequest, pb.ExecuteTaskRequest)],
)
def test_whatever_http_carries_has_a_field(struct: type, message: type) -> None:
    carried = set(message.DESCRIPTOR.fields_by_name)  # type: ignore[attr-defined]
    assert set(struct.__struct_fields__) <= carried  # type: ignore[attr-defined]
