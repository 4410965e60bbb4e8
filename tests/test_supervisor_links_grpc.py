from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import grpclib
import msgspec
import pytest
from grpc_scheduler import GrpcRecordingScheduler
from grpclib.client import Channel
from grpclib.const import Status
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ResponseReceived, TrailersReceived
from link_lab import (
    ACK,
    BEAT,
    REGISTER,
    TIMED_OUT,
    RecordingIntake,
    configured,
    make_link,
    telling,
)
from recording_scheduler import Answer, Hang

from stockade.supervisor.errors import RejectedError, Rejection
from stockade.supervisor.links import grpc_messages
from stockade.supervisor.links.link import ReplyKind
from stockade.supervisor.links.listeners import open_listeners
from stockade.supervisor.links.two_way import TwoWayLink
from stockade.supervisor.report import running_report
from stockade.supervisor.wire import scheduler_pb2 as pb
from stockade.supervisor.wire.messages import (
    ACK_PATH,
    HEARTBEAT_PATH,
    MAX_DISPATCH_BYTES,
    REGISTER_PATH,
    REPORT_PATH,
    AckRequest,
    ExecuteRequest,
    HttpRequest,
    StatusReport,
)
from stockade.supervisor.wire.scheduler_grpc import ExecutorServiceStub

GOAWAY = b"\0\0\x08\x07\0"  # the first bytes of its frame: length, type, flags
NO_MESSAGE = "it is no ExecuteTaskRequest, or a text in it is not UTF-8"


@contextlib.asynccontextmanager
async def served(
    tmp_path: Path, intake: RecordingIntake, *, token: str = "", **options: Any
) -> AsyncIterator[TwoWayLink]:
    task_uids = options.pop("task_uids", None)
    settings = configured("grpc", tmp_path, **options)
    link = make_link("grpc", settings, intake, token=token, task_uids=task_uids)
    assert settings.grpc.listen is not None
    await link.start(open_listeners(settings.grpc.listen, "grpc"))
    try:
        yield link
    finally:
        await link.close()


def serving(
    tmp_path: Path,
    body: Callable[[ExecutorServiceStub, RecordingIntake], Coroutine[Any, Any, None]],
    **options: Any,
) -> RecordingIntake:
    """Run ``body(stub, intake)`` beside a link that serves."""

    async def run() -> RecordingIntake:
        intake = RecordingIntake("grpc")
        async with served(tmp_path, intake, **options) as link:
            assert link.bound is not None
            async with Channel(link.bound.host, link.bound.port) as channel:
                await body(ExecutorServiceStub(channel), intake)
        return intake

    return asyncio.run(run())


async def refused(call: Coroutine[Any, Any, Any]) -> tuple[Status, str]:
    with pytest.raises(grpclib.GRPCError) as caught:
        await call
    return caught.value.status, caught.value.message or ""


def execute(**fields: Any) -> pb.ExecuteTaskRequest:
    return pb.ExecuteTaskRequest(**{"schedule_instance_id": "task-1", **fields})


# What schedulers ask.


def test_a_dispatch_is_handed_on_with_all_its_fields(tmp_path: Path) -> None:
    async def body(stub: ExecutorServiceStub, intake: RecordingIntake) -> None:
        answer = await stub.ExecuteTask(
            execute(
                task_id=7,
                task_type="shell",
                payload="true",
                timeout_seconds=5,
                retry_count=1,
                scheduler_url="a:1",
                image="i",
                shard_no=2,
                shard_total=3,
                idempotency_key="k",
                profile="process",
                limits={"memory_max": "64M"},
                http=pb.HttpRequest(method="POST", headers={"a": "b"}, body="x", expect=[200]),
                files={"f": "content"},
            )
        )
        assert answer.accepted

    (dispatch,) = serving(tmp_path, body).dispatches
    assert dispatch == ExecuteRequest(
        schedule_instance_id="task-1",
        task_id=7,
        task_type="shell",
        payload="true",
        timeout_seconds=5,
        retry_count=1,
        scheduler_url="a:1",
        image="i",
        shard_no=2,
        shard_total=3,
        idempotency_key="k",
        profile="process",
        limits={"memory_max": "64M"},
        http=HttpRequest(method="POST", headers={"a": "b"}, body="x", expect=[200]),
        files={"f": "content"},
    )


def test_what_a_plain_scheduler_leaves_out_is_absent(tmp_path: Path) -> None:
    async def body(stub: ExecutorServiceStub, intake: RecordingIntake) -> None:
        await stub.ExecuteTask(execute())

    (dispatch,) = serving(tmp_path, body).dispatches
    assert (dispatch.profile, dispatch.limits, dispatch.http, dispatch.files) == (None,) * 4
    assert (dispatch.timeout_seconds, dispatch.payload) == (0, "")


@pytest.mark.parametrize(
    ("rejection", "status"),
    [
        (Rejection.INVALID, Status.INVALID_ARGUMENT),
        (Rejection.TOO_LARGE, Status.RESOURCE_EXHAUSTED),
        (Rejection.UNAVAILABLE, Status.UNAVAILABLE),
    ],
)
def test_a_rejection_is_a_status_that_says_why(
    tmp_path: Path, rejection: Rejection, status: Status
) -> None:
    async def body(stub: ExecutorServiceStub, intake: RecordingIntake) -> None:
        intake.error = RejectedError(rejection, "cannot take it: wäre schön\ud800")
        found = await refused(stub.ExecuteTask(execute()))
        assert found == (status, "cannot take it: wäre schön?")

    serving(tmp_path, body)


def test_a_cancel_says_whether_the_task_was_stopped_and_needs_an_id(tmp_path: Path) -> None:
    async def body(stub: ExecutorServiceStub, intake: RecordingIntake) -> None:
        assert (await stub.CancelTask(pb.CancelTaskRequest(schedule_instance_id="running"))).ok
        assert not (await stub.CancelTask(pb.CancelTaskRequest(schedule_instance_id="gone"))).ok
        status, message = await refused(stub.CancelTask(pb.CancelTaskRequest()))
        assert status is Status.INVALID_ARGUMENT
        assert "schedule_instance_id is missing or empty" in message

    assert serving(tmp_path, body).cancels == ["running", "gone"]


def test_a_message_over_the_limit_is_refused_and_one_at_it_is_taken(tmp_path: Path) -> None:
    async def body(stub: ExecutorServiceStub, intake: RecordingIntake) -> None:
        room = MAX_DISPATCH_BYTES - execute(payload="x" * MAX_DISPATCH_BYTES).ByteSize()
        await stub.ExecuteTask(execute(payload="x" * (MAX_DISPATCH_BYTES + room)))
        large = execute(payload="x" * (MAX_DISPATCH_BYTES + room + 1))
        status, message = await refused(stub.ExecuteTask(large))
        assert status is Status.RESOURCE_EXHAUSTED
        assert str(MAX_DISPATCH_BYTES) in message
        await stub.ExecuteTask(execute())

    assert len(serving(tmp_path, body).dispatches) == 2


@pytest.mark.parametrize(
    ("content", "status", "said"),
    [
        (b"\0\0\0\0\4\xff\xff\xff\xff", Status.INVALID_ARGUMENT, NO_MESSAGE),
        (b"\0\0\0\0\3\x0a\x01\xff", Status.INVALID_ARGUMENT, NO_MESSAGE),
        (b"\1\0\0\0\1x", Status.UNIMPLEMENTED, "it is compressed, send it plain"),
        (b"\0\0\0\0\x09abc", Status.INVALID_ARGUMENT, "it ends early"),
        (b"\0\0", Status.INVALID_ARGUMENT, "it ends early"),
        (b"", Status.INVALID_ARGUMENT, "there is no message"),
        (
            b"\0\xff\xff\xff\xff",
            Status.RESOURCE_EXHAUSTED,
            f"it is over {MAX_DISPATCH_BYTES} bytes",
        ),
    ],
)
def test_a_message_that_is_none_is_refused_with_the_reason(
    tmp_path: Path, content: bytes, status: Status, said: str
) -> None:
    async def body(stub: ExecutorServiceStub, intake: RecordingIntake) -> None:
        assert await raw_call(stub, content) == (status, said)
        await stub.ExecuteTask(execute())

    assert len(serving(tmp_path, body).dispatches) == 1


async def raw_call(stub: ExecutorServiceStub, content: bytes) -> tuple[Status, str]:
    """Send these bytes where a message should be: the status, and the reason after the colon."""
    stream = stub.ExecuteTask.open()
    async with stream:
        await stream.send_request()
        await stream._stream.send_data(content, end_stream=True)
        stream._end_done = stream._send_message_done = True
        try:
            await stream.recv_initial_metadata()
        except grpclib.GRPCError as error:
            return error.status, (error.message or "").partition(": ")[2]
    raise AssertionError("answered OK")


def test_a_fault_is_internal_and_the_next_dispatch_is_served(tmp_path: Path) -> None:
    async def body(stub: ExecutorServiceStub, intake: RecordingIntake) -> None:
        intake.error = ZeroDivisionError("secret")
        status, message = await refused(stub.ExecuteTask(execute()))
        assert (status, "secret" in message) == (Status.INTERNAL, False)
        intake.error = None
        await stub.ExecuteTask(execute())

    assert len(serving(tmp_path, body).dispatches) == 1


def test_a_token_is_asked_for_and_checked(tmp_path: Path) -> None:
    async def body(stub: ExecutorServiceStub, intake: RecordingIntake) -> None:
        for metadata in ({}, {"authorization": "Bearer wrong"}, {"authorization": "s3cret"}):
            status, _ = await refused(stub.ExecuteTask(execute(), metadata=metadata))
            assert status is Status.UNAUTHENTICATED
            status, _ = await refused(stub.CancelTask(pb.CancelTaskRequest(), metadata=metadata))
            assert status is Status.UNAUTHENTICATED
        await stub.ExecuteTask(execute(), metadata={"authorization": "Bearer s3cret"})

    intake = serving(tmp_path, body, token="s3cret")
    assert (len(intake.dispatches), intake.cancels) == (1, [])


def test_a_peer_outside_allow_networks_is_refused(tmp_path: Path) -> None:
    async def body(stub: ExecutorServiceStub, intake: RecordingIntake) -> None:
        status, message = await refused(stub.ExecuteTask(execute()))
        assert status is Status.PERMISSION_DENIED
        assert "allow_networks" in message

    assert not serving(tmp_path, body, grpc__allow_networks=["10.0.0.0/8"]).dispatches


def test_a_connection_of_a_tasks_uid_is_refused(tmp_path: Path) -> None:
    async def body(stub: ExecutorServiceStub, intake: RecordingIntake) -> None:
        status, message = await refused(stub.ExecuteTask(execute()))
        assert status is Status.PERMISSION_DENIED
        assert "tasks may not talk to their own worker" in message

    uid = os.geteuid()
    assert not serving(tmp_path, body, task_uids=range(uid, uid + 1)).dispatches


def test_a_dispatch_goes_on_when_its_sender_hangs_up_or_runs_out_of_time(tmp_path: Path) -> None:
    async def body(stub: ExecutorServiceStub, intake: RecordingIntake) -> None:
        intake.gate = asyncio.Event()
        # The intake shields what it has begun; here it is the call that must not be an error.
        with pytest.raises(TimeoutError):
            await stub.ExecuteTask(execute(), timeout=0.2)
        intake.gate.set()
        await stub.ExecuteTask(execute())

    assert serving(tmp_path, body).dispatches


def test_the_end_lets_running_calls_end_and_tells_peers_to_call_elsewhere(tmp_path: Path) -> None:
    async def run() -> None:
        intake = RecordingIntake("grpc")
        intake.gate = asyncio.Event()
        async with served(tmp_path, intake) as link:
            assert link.bound is not None
            reader, writer = await asyncio.open_connection(link.bound.host, link.bound.port)
            client = H2Connection(H2Configuration(header_encoding="utf-8"))
            client.initiate_connection()
            client.send_headers(
                1,
                [
                    (":method", "POST"), (":scheme", "http"), (":authority", "x"),
                    (":path", "/scheduler.v1.ExecutorService/ExecuteTask"),
                    ("te", "trailers"), ("content-type", "application/grpc"),
                ],
            )  # fmt: skip
            content = execute().SerializeToString()
            client.send_data(1, struct.pack(">BI", 0, len(content)) + content, end_stream=True)
            writer.write(client.data_to_send())
            await intake.entered.wait()
            end = asyncio.create_task(link.stop_listening())
            seen: list[str] = []
            while chunk := await reader.read(65536):
                # h2 itself would read nothing after a GOAWAY, which gRPC's libraries do.
                while (at := chunk.find(GOAWAY)) >= 0:
                    seen.append("goodbye")
                    intake.gate.set()
                    chunk = chunk[:at] + chunk[at + 17 :]
                for event in client.receive_data(chunk):
                    if isinstance(event, ResponseReceived):
                        seen.append("answer")
                    if isinstance(event, TrailersReceived):
                        seen.append(dict(event.headers or {})["grpc-status"])
                writer.write(client.data_to_send())
                if seen[-1:] == ["goodbye"] and "0" in seen:
                    break
            writer.close()
            await end
            assert seen == ["goodbye", "answer", "0", "goodbye"]
            with pytest.raises(OSError, match=r"refused|Connect call failed"):
                await asyncio.open_connection(link.bound.host, link.bound.port)

    asyncio.run(run())


# What schedulers are told.


def test_each_message_has_its_call(tmp_path: Path) -> None:
    async def body(link: TwoWayLink) -> None:
        replies = [
            await link.register(REGISTER),
            await link.heartbeat(BEAT),
            await link.send_ack("", ACK),
            await link.send_report("", running_report("task-1", "w1")),
            await link.send_report("", TIMED_OUT),
        ]
        assert {reply.kind for reply in replies} == {ReplyKind.OK}

    with GrpcRecordingScheduler() as scheduler:
        telling("grpc", tmp_path, scheduler.url, body)
        paths = [message.path for message in scheduler.messages]
        assert paths == [REGISTER_PATH, HEARTBEAT_PATH, ACK_PATH, REPORT_PATH, REPORT_PATH]
        assert {message.connection for message in scheduler.messages} == {1}
        _, beat, ack, running, timeout = (m.body for m in scheduler.messages)
    assert beat["report_unix_milli"] == 5
    assert ack == {"schedule_instance_id": "task-1", "worker_id": "w1"}
    assert pb.ReportTaskStatusRequest.FromString(scheduler.messages[3].raw) == (
        pb.ReportTaskStatusRequest(schedule_instance_id="task-1", worker_id="w1", status="running")
    )
    assert running["started_at"] == ""
    assert timeout["error_message"] == "ran for 2 s\nlast words\n"
    assert timeout["finished_unix_seconds"] == 1_700_000_002
    assert timeout["finished_at"].startswith("2023-11-14T22:13:22.5")
    assert (timeout["signal"], timeout["wall_s"], timeout["exit_code"]) == ("SIGTERM", 2.25, None)
    assert set(StatusReport.__struct_fields__) < set(timeout)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (200, ReplyKind.OK),
        (409, ReplyKind.OK),
        (400, ReplyKind.REFUSED),
        (401, ReplyKind.REFUSED),
        (403, ReplyKind.REFUSED),
        (404, ReplyKind.UNKNOWN),
        (413, ReplyKind.TOO_LARGE),
        (429, ReplyKind.RETRY),
        (500, ReplyKind.RETRY),
        (503, ReplyKind.RETRY),
    ],
)
def test_each_answer_has_its_meaning(tmp_path: Path, status: int, kind: ReplyKind) -> None:
    async def body(link: TwoWayLink) -> None:
        for reply in (
            await link.heartbeat(BEAT),
            await link.send_ack("", ACK),
            await link.send_report("", TIMED_OUT),
        ):
            assert (reply.kind, reply.silent) == (kind, False), reply
            assert bool(reply.reason) == (kind is not ReplyKind.OK)

    with GrpcRecordingScheduler() as scheduler:
        scheduler.misbehave(Answer(status))
        telling("grpc", tmp_path, scheduler.url, body)


def test_a_registration_that_is_not_accepted_is_refused(tmp_path: Path) -> None:
    async def body(link: TwoWayLink) -> None:
        assert (await link.register(REGISTER)).kind is ReplyKind.REFUSED

    with GrpcRecordingScheduler() as scheduler:
        scheduler.misbehave(Answer(404), path=REGISTER_PATH)
        telling("grpc", tmp_path, scheduler.url, body)


def test_a_connection_on_which_nothing_comes_any_more_is_left(tmp_path: Path) -> None:
    """A host that vanished, or a firewall that forgot: no end ever comes, and no answer."""

    async def body(link: TwoWayLink) -> None:
        assert (await link.send_ack("", ACK)).kind is ReplyKind.OK
        scheduler.misbehave(Hang(), times=1)
        assert (await link.send_ack("", ACK)).silent
        assert (await link.send_ack("", ACK)).kind is ReplyKind.OK

    with GrpcRecordingScheduler() as scheduler:
        telling("grpc", tmp_path, scheduler.url, body, report__attempt_timeout=0.5)
        assert [message.connection for message in scheduler.messages] == [1, 1, 2]


def test_one_call_that_hangs_keeps_the_connection_that_answers_others(tmp_path: Path) -> None:
    async def body(link: TwoWayLink) -> None:
        assert (await link.send_ack("", ACK)).kind is ReplyKind.OK
        scheduler.misbehave(Hang(), path=REPORT_PATH)
        hanging = asyncio.create_task(link.send_report("", TIMED_OUT))
        while not hanging.done():
            assert (await link.send_ack("", ACK)).kind is ReplyKind.OK
            await asyncio.sleep(0.05)
        assert (await hanging).silent
        assert (await link.send_ack("", ACK)).kind is ReplyKind.OK

    with GrpcRecordingScheduler() as scheduler:
        telling("grpc", tmp_path, scheduler.url, body, report__attempt_timeout=0.5)
        assert {message.connection for message in scheduler.messages} == {1}


def test_a_server_that_does_not_speak_grpc_is_no_success(tmp_path: Path) -> None:
    async def body(link: TwoWayLink) -> None:
        assert (await link.send_ack("", ACK)).kind is ReplyKind.RETRY

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        port = listener.getsockname()[1]
        telling("grpc", tmp_path, f"127.0.0.1:{port}", body, report__attempt_timeout=1.0)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_what_is_advertised_is_the_bound_address(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path, RecordingIntake("grpc")) as link:
            told = await link.advertised()
            assert (told.ip, told.grpc_addr, told.callback_url) == (
                "127.0.0.1",
                str(link.bound),
                "",
            )

    asyncio.run(run())


# Messages.


def test_text_is_valid_utf8_whatever_it_was() -> None:
    told = grpc_messages.ack(AckRequest(schedule_instance_id="a\ud800é", worker_id="w"))
    assert told.schedule_instance_id == "a?é"
    assert told.SerializeToString()


def test_a_report_is_cut_to_fit_and_flagged() -> None:
    huge = StatusReport(
        schedule_instance_id="a",
        worker_id="w",
        status="failed",
        error_message="head\n" + "é" * (8 << 20) + "\ntail",
    )
    told = grpc_messages.report(huge)
    assert told.ByteSize() <= grpc_messages.REPORT_BYTES_MAX
    assert told.ByteSize() > grpc_messages.REPORT_BYTES_MAX - 64
    assert told.error_message.startswith("head\n")
    assert told.error_message.endswith("\ntail")
    assert told.output_truncated
    fits = msgspec.structs.replace(huge, error_message="é" * 1000)
    assert not grpc_messages.report(fits).output_truncated
