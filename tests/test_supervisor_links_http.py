from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import socket
import struct
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from link_lab import ACK, BEAT, REGISTER, RecordingIntake, configured, make_link, telling
from recording_scheduler import (
    RESULT_PATH,
    Answer,
    RecordingScheduler,
    get,
    post,
)
from structlog.testing import capture_logs

from stockade.platform.errors import StockadeError
from stockade.sandbox.outcome import ErrorCode, Outcome, Status
from stockade.supervisor.errors import ConfigError, RejectedError, Rejection
from stockade.supervisor.links.access import (
    REFUSED_OPEN_MAX,
    Access,
    is_own_address,
    parse_networks,
    read_token,
)
from stockade.supervisor.links.link import Reply, ReplyKind
from stockade.supervisor.links.listeners import open_listeners
from stockade.supervisor.links.two_way import TwoWayLink
from stockade.supervisor.report import running_report, terminal_report
from stockade.supervisor.wire.messages import (
    ACK_PATH,
    CANCEL_PATH,
    EXECUTE_PATH,
    HEARTBEAT_PATH,
    MAX_DISPATCH_BYTES,
    REGISTER_PATH,
    REPORT_PATH,
    RUNNING_FIELDS,
    ExecuteRequest,
    StatusReport,
)

FAILED = terminal_report(
    "task-1",
    "w1",
    Outcome(status=Status.TIMEOUT, error_code=ErrorCode.TIMEOUT, reason="ran for 2 s"),
    "last words\n",
)
SUCCESS = terminal_report("task-1", "w1", Outcome(status=Status.SUCCESS), "hi\n")


@contextlib.asynccontextmanager
async def served(
    tmp_path: Path,
    intake: RecordingIntake,
    *,
    token: str = "",
    task_uids: range | None = None,
    **keys: object,
) -> AsyncIterator[str]:
    settings = configured("http", tmp_path, **keys)
    link = make_link("http", settings, intake, token=token, task_uids=task_uids)
    assert settings.http.listen is not None
    await link.start(open_listeners(settings.http.listen))
    try:
        yield f"http://{link.bound}"
    finally:
        await link.close()


def serving(
    tmp_path: Path,
    body: Callable[[str, RecordingIntake], Coroutine[Any, Any, None]],
    **settings: Any,
) -> RecordingIntake:
    """Run ``body(url, intake)`` beside a link that serves."""

    async def run() -> RecordingIntake:
        intake = RecordingIntake("http")
        async with served(tmp_path, intake, **settings) as url:
            await body(url, intake)
        return intake

    return asyncio.run(run())


async def ask(url: str, body: Any, **options: Any) -> tuple[int, dict[str, Any]]:
    return await asyncio.to_thread(post, url, body, **options)


def raw_exchange(url: str, request: bytes) -> bytes:
    """Send bytes over one connection and read until the server closes it."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(request)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while chunk := connection.recv(65536):
                received += chunk
        return received


# What schedulers ask.


def test_a_dispatch_is_handed_on_and_answered_202(tmp_path: Path) -> None:
    async def body(url: str, intake: RecordingIntake) -> None:
        answer = await ask(
            url + EXECUTE_PATH,
            {
                "schedule_instance_id": "task-1",
                "task_id": 7,
                "task_type": " Shell ",
                "payload": "true",
                "timeout_seconds": None,
                "limits": {"memory_max": "64M"},
                "something_else": [1, {"a": 2}],
            },
        )
        assert answer == (202, {"status": "accepted"})

    (dispatch,) = serving(tmp_path, body).dispatches
    assert dispatch == ExecuteRequest(
        schedule_instance_id="task-1",
        task_id=7,
        task_type=" Shell ",
        payload="true",
        limits={"memory_max": "64M"},
    )


@pytest.mark.parametrize(
    ("rejection", "status"),
    [(Rejection.INVALID, 400), (Rejection.TOO_LARGE, 413), (Rejection.UNAVAILABLE, 503)],
)
def test_a_rejected_dispatch_says_why(tmp_path: Path, rejection: Rejection, status: int) -> None:
    async def body(url: str, intake: RecordingIntake) -> None:
        intake.error = RejectedError(rejection, "cannot take it: because \ud800")
        answered, answer = await ask(url + EXECUTE_PATH, {"schedule_instance_id": "a"})
        assert answered == status
        assert answer["error"].startswith("cannot take it: because")

    serving(tmp_path, body)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b'{"schedule_instance_id": 7}',
        b'{"schedule_instance_id": "a", "task_id": "7"}',
        b'{"schedule_instance_id": "a", "timeout_seconds": 1.5}',
        b'{"schedule_instance_id": "a", "limits": []}',
        b'{"schedule_instance_id": "a", "files": {"x": 1}}',
        b'{"schedule_instance_id": "\\ud800"}',
        b'{"schedule_instance_id": "\xff"}',
        b'{"schedule_instance_id": "a", "limits": ' + b'{"x":' * 50_000 + b"1" + b"}" * 50_001,
        b"{} {}",
    ],
    ids=lambda content: content[:45].decode("latin-1"),
)
def test_what_is_no_dispatch_is_a_400_with_the_reason(tmp_path: Path, content: bytes) -> None:
    async def body(url: str, intake: RecordingIntake) -> None:
        status, answer = await ask(url + EXECUTE_PATH, content)
        assert status == 400
        assert answer["error"].startswith("cannot take the dispatch: ")

    assert serving(tmp_path, body).dispatches == []


def test_a_body_of_4_mib_is_taken_and_one_byte_more_is_a_413(tmp_path: Path) -> None:
    def content(length: int) -> bytes:
        rest = b'{"schedule_instance_id":"a","payload":""}'
        return rest[:-2] + b"x" * (length - len(rest)) + rest[-2:]

    async def body(url: str, intake: RecordingIntake) -> None:
        status, _ = await ask(url + EXECUTE_PATH, content(MAX_DISPATCH_BYTES))
        assert status == 202
        status, answer = await ask(url + EXECUTE_PATH, content(MAX_DISPATCH_BYTES + 1))
        assert status == 413
        assert "over 4194304 bytes" in answer["error"]

    assert len(serving(tmp_path, body).dispatches) == 1


def test_a_chunked_body_over_4_mib_is_a_413_too(tmp_path: Path) -> None:
    async def body(url: str, intake: RecordingIntake) -> None:
        piece = b"x" * 65536
        request = (
            b"POST /internal/tasks/execute HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
            + (b"10000\r\n" + piece + b"\r\n") * 65
            + b"0\r\n\r\n"
        )
        received = await asyncio.to_thread(raw_exchange, url, request)
        assert received.startswith(b"HTTP/1.1 413 ")

    assert serving(tmp_path, body).dispatches == []


def test_a_client_that_asks_before_it_sends_is_told_to_go_on(tmp_path: Path) -> None:
    def talk(url: str) -> bytes:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(
                b"POST /internal/tasks/execute HTTP/1.1\r\nHost: x\r\nContent-Length: 28\r\n"
                b"Expect: 100-continue\r\n\r\n"
            )
            assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
            connection.sendall(b'{"schedule_instance_id":"a"}')
            return connection.recv(100)

    async def body(url: str, intake: RecordingIntake) -> None:
        assert (await asyncio.to_thread(talk, url)).startswith(b"HTTP/1.1 202 ")

    assert len(serving(tmp_path, body).dispatches) == 1


def test_other_methods_are_a_405_and_other_paths_a_404_in_json(tmp_path: Path) -> None:
    def talk(url: str) -> None:
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
        with contextlib.closing(connection):
            for method, path, status in [
                ("GET", EXECUTE_PATH, 405),
                ("PUT", EXECUTE_PATH, 405),
                ("DELETE", CANCEL_PATH, 405),
                ("POST", "/healthz", 405),
                ("POST", EXECUTE_PATH + "/", 404),
                ("GET", "/", 404),
            ]:
                connection.request(method, path)
                response = connection.getresponse()
                answer = json.loads(response.read())
                assert (response.status, list(answer)) == (status, ["error"]), (method, path)
                assert (response.headers["Allow"] is not None) == (status == 405)

    async def body(url: str, intake: RecordingIntake) -> None:
        await asyncio.to_thread(talk, url)

    serving(tmp_path, body)


def test_a_cancel_is_answered_200_whether_or_not_the_task_is_known(tmp_path: Path) -> None:
    async def body(url: str, intake: RecordingIntake) -> None:
        path = url + CANCEL_PATH
        known = await ask(path, {"schedule_instance_id": "running"})
        assert known == (200, {"status": "cancelled"})
        status, answer = await ask(path, {"schedule_instance_id": "never heard of"})
        assert (status, list(answer)) == (200, ["error"])

    assert serving(tmp_path, body).cancels == ["running", "never heard of"]


@pytest.mark.parametrize("instance_id", [None, "", "a\0b", "x" * 257])
def test_a_cancel_of_no_id_is_a_400(tmp_path: Path, instance_id: str | None) -> None:
    async def body(url: str, intake: RecordingIntake) -> None:
        status, answer = await ask(url + CANCEL_PATH, {"schedule_instance_id": instance_id})
        assert status == 400
        assert "schedule_instance_id" in answer["error"]

    assert serving(tmp_path, body).cancels == []


def test_health_and_metrics_are_served(tmp_path: Path) -> None:
    def talk(url: str) -> None:
        assert get(url + "/healthz?from=balancer") == (200, {"status": "ok"})
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
        with contextlib.closing(connection):
            connection.request("GET", "/metrics")
            response = connection.getresponse()
            assert response.read() == b"up 1\n"
            assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            connection.request("HEAD", "/healthz")
            response = connection.getresponse()
            assert (response.status, response.read()) == (200, b"")

    async def body(url: str, intake: RecordingIntake) -> None:
        await asyncio.to_thread(talk, url)

    serving(tmp_path, body)


def test_a_fault_is_a_500_in_json_and_the_next_dispatch_is_served(tmp_path: Path) -> None:
    async def body(url: str, intake: RecordingIntake) -> None:
        intake.error = ZeroDivisionError("secret")
        with capture_logs() as lines:
            status, answer = await ask(url + EXECUTE_PATH, {"schedule_instance_id": "a"})
        assert status == 500
        assert "secret" not in answer["error"]
        assert [line["event"] for line in lines] == ["request failed"]
        intake.error = None
        status, _ = await ask(url + EXECUTE_PATH, {"schedule_instance_id": "b"})
        assert status == 202

    serving(tmp_path, body)


def test_a_dispatch_goes_on_when_its_sender_hangs_up(tmp_path: Path) -> None:
    async def body(url: str, intake: RecordingIntake) -> None:
        intake.gate = asyncio.Event()
        host, port = url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /internal/tasks/execute HTTP/1.1\r\nHost: x\r\nContent-Length: 28\r\n\r\n"
            b'{"schedule_instance_id":"a"}'
        )
        await asyncio.wait_for(intake.entered.wait(), 10)
        writer.transport.abort()
        status, _ = await asyncio.to_thread(get, url + "/healthz")
        assert status == 200
        intake.gate.set()

    assert len(serving(tmp_path, body).dispatches) == 1


# Who may ask.


def test_a_token_is_asked_for_and_checked(tmp_path: Path) -> None:
    async def body(url: str, intake: RecordingIntake) -> None:
        path, task = url + EXECUTE_PATH, {"schedule_instance_id": "a"}
        for authorization in (None, "Bearer wrong", "Bearer ", "Basic s3cret", "Bearer s3cret\xe9"):
            headers = {} if authorization is None else {"Authorization": authorization}
            status, answer = await ask(path, task, headers=headers)
            assert (status, list(answer)) == (401, ["error"])
        assert (await ask(url + CANCEL_PATH, {"schedule_instance_id": "a"}))[0] == 401
        assert (await asyncio.to_thread(get, url + "/metrics"))[0] == 401
        assert (await asyncio.to_thread(get, url + "/healthz"))[0] == 200
        assert intake.dispatches == []
        status, _ = await ask(path, task, headers={"Authorization": "Bearer s3cret"})
        assert status == 202

    serving(tmp_path, body, token="s3cret")


def test_a_peer_outside_allow_networks_is_refused(tmp_path: Path) -> None:
    async def body(url: str, intake: RecordingIntake) -> None:
        with capture_logs() as lines:
            for _ in range(5):
                status, answer = await ask(url + EXECUTE_PATH, {"schedule_instance_id": "a"})
                assert status == 403
                assert "allow_networks" in answer["error"]
        assert [line["event"] for line in lines] == ["connection refused"]

    intake = serving(tmp_path, body, http__allow_networks=["10.0.0.0/8"])
    assert intake.dispatches == []


def test_a_peer_inside_allow_networks_is_served(tmp_path: Path) -> None:
    async def body(url: str, intake: RecordingIntake) -> None:
        assert (await ask(url + EXECUTE_PATH, {"schedule_instance_id": "a"}))[0] == 202

    serving(tmp_path, body, http__allow_networks=["10.0.0.0/8", "127.0.0.1"])


def test_a_connection_of_a_tasks_uid_is_refused(tmp_path: Path) -> None:
    async def body(url: str, intake: RecordingIntake) -> None:
        status, answer = await ask(url + CANCEL_PATH, {"schedule_instance_id": "victim"})
        assert status == 403
        assert "tasks may not" in answer["error"]

    # This very process plays the task: its uid is in the range.
    intake = serving(tmp_path, body, task_uids=range(os.getuid(), os.getuid() + 1))
    assert intake.cancels == []


def test_a_connection_of_another_local_uid_is_served(tmp_path: Path) -> None:
    async def body(url: str, intake: RecordingIntake) -> None:
        assert (await ask(url + CANCEL_PATH, {"schedule_instance_id": "running"}))[0] == 200

    intake = serving(tmp_path, body, task_uids=range(os.getuid() + 1, os.getuid() + 100))
    assert intake.cancels == ["running"]


def test_a_sender_that_closes_at_once_is_acted_on_never(tmp_path: Path) -> None:
    content = b'{"schedule_instance_id":"victim"}'
    request = (
        b"POST /internal/tasks/cancel HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        % len(content)
    ) + content

    def strike(url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        for linger in (None, struct.pack("ii", 1, 0)):
            for _ in range(20):
                with socket.create_connection((host, int(port)), timeout=10) as connection:
                    if linger is not None:
                        # Closes with a reset instead.
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    connection.sendall(request)

    async def body(url: str, intake: RecordingIntake) -> None:
        with capture_logs():
            await asyncio.to_thread(strike, url)
            # All those were accepted before this one, which is refused or cut too.
            with contextlib.suppress(ConnectionError):
                assert (await ask(url + CANCEL_PATH, {"schedule_instance_id": "last"}))[0] == 403

    intake = serving(tmp_path, body, task_uids=range(os.getuid(), os.getuid() + 1))
    assert intake.cancels == []


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to run a process as a task's uid")
def test_a_task_of_another_uid_cannot_drive_its_worker(tmp_path: Path) -> None:
    uid = 0x70000000 + 4242
    script = """
        head='POST /internal/tasks/cancel HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: %d\\r\\n\\r\\n'
        content='{"schedule_instance_id":"victim"}'
        for i in 1 2 3 4 5; do
            exec 3<>/dev/tcp/127.0.0.1/$0 || exit 1
            printf "$head" ${#content} >&3
            printf '%s' "$content" >&3
            [ $i = 5 ] && head -c 12 <&3
            exec 3>&-
        done
    """

    async def body(url: str, intake: RecordingIntake) -> None:
        port = url.rpartition(":")[2]
        with capture_logs():
            task = await asyncio.to_thread(
                subprocess.run,
                ["bash", "-c", script, port],
                user=uid, group=uid, extra_groups=[], cwd="/",
                capture_output=True, timeout=20, check=True,
            )  # fmt: skip
        assert task.stdout == b"HTTP/1.1 403"
        assert (await ask(url + CANCEL_PATH, {"schedule_instance_id": "running"}))[0] == 200

    intake = serving(tmp_path, body, task_uids=range(0x70000000, 0x70010000))
    assert intake.cancels == ["running"]


def test_refused_peers_cannot_hold_many_descriptors(tmp_path: Path) -> None:
    async def body(url: str, intake: RecordingIntake) -> None:
        host, port = url.removeprefix("http://").split(":")
        with capture_logs(), contextlib.ExitStack() as stack:
            before = len(os.listdir("/proc/self/fd"))
            for _ in range(REFUSED_OPEN_MAX + 60):
                client = stack.enter_context(socket.socket())
                client.setblocking(False)
                await asyncio.get_running_loop().sock_connect(client, (host, int(port)))
            # The last ones are cut at once: the first sign that the server has seen them all.
            assert await asyncio.wait_for(_cut(client), 10)
            held = len(os.listdir("/proc/self/fd")) - before - (REFUSED_OPEN_MAX + 60)
            assert held <= REFUSED_OPEN_MAX

    serving(tmp_path, body, task_uids=range(os.getuid(), os.getuid() + 1))


async def _cut(client: socket.socket) -> bool:
    try:
        return await asyncio.get_running_loop().sock_recv(client, 1) == b""
    except ConnectionResetError:
        return True


def test_a_closed_client_socket_has_no_owner_and_is_refused() -> None:
    access = Access(task_uids=range(0x70000000, 0x70010000))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        with client, listener.accept()[0] as connection:
            ends = connection.getpeername(), connection.getsockname()
            assert access.peer_refusal(*ends) is None
            client.close()
            assert "no owner" in (access.peer_refusal(*ends) or "")


def test_own_addresses_are_told_from_others() -> None:
    networks = parse_networks(["127.0.0.0/8", "::1", "::ffff:127.0.0.1/128"])
    assert len(networks) == 3
    assert is_own_address(networks[0][9], "10.0.0.1")
    assert is_own_address(networks[1][0], "::")
    (elsewhere,) = parse_networks(["203.0.113.7"])
    assert not is_own_address(elsewhere[0], "127.0.0.1")
    assert is_own_address(elsewhere[0], "203.0.113.7")


def test_a_token_file_holds_one_token(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("s3cret\n")
    assert read_token(path) == "s3cret"
    for text in ("", " \n", "one two\n", "one\ntwo\n"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="cannot use token_file"):
            read_token(path)
    with pytest.raises(ConfigError, match="cannot read token_file"):
        read_token(tmp_path / "absent")


# What schedulers are told.


def test_each_message_goes_to_its_path(tmp_path: Path) -> None:
    async def body(link: TwoWayLink) -> None:
        replies = [
            await link.register(REGISTER),
            await link.heartbeat(BEAT),
            await link.send_ack("", ACK),
            await link.send_report("", running_report("task-1", "w1")),
            await link.send_report("", FAILED),
        ]
        assert {reply.kind for reply in replies} == {ReplyKind.OK}

    with RecordingScheduler() as scheduler:
        telling("http", tmp_path, scheduler.url, body)
        paths = [message.path for message in scheduler.messages]
        assert paths == [REGISTER_PATH, HEARTBEAT_PATH, ACK_PATH, REPORT_PATH, REPORT_PATH]
        types = {message.headers["content-type"] for message in scheduler.messages}
        assert types == {"application/json"}
        registration, beat, ack, running, failed = (m.body for m in scheduler.messages)
    assert registration["protocol"] == "http"
    assert registration["labels"] == {}
    assert set(beat) == {"worker_id", "current_load", "running_tasks", "report_unix_milli"}
    assert ack == {"schedule_instance_id": "task-1", "worker_id": "w1"}
    assert tuple(running) == RUNNING_FIELDS
    assert set(failed) == set(StatusReport.__struct_fields__)
    assert failed["error_message"] == "ran for 2 s\nlast words\n"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (200, ReplyKind.OK),
        (201, ReplyKind.OK),
        (299, ReplyKind.OK),
        (302, ReplyKind.RETRY),
        (400, ReplyKind.REFUSED),
        (401, ReplyKind.REFUSED),
        (404, ReplyKind.UNKNOWN),
        (408, ReplyKind.RETRY),
        (409, ReplyKind.OK),
        (413, ReplyKind.TOO_LARGE),
        (422, ReplyKind.REFUSED),
        (425, ReplyKind.RETRY),
        (429, ReplyKind.RETRY),
        (500, ReplyKind.RETRY),
        (503, ReplyKind.RETRY),
    ],
)
def test_each_status_has_its_meaning(tmp_path: Path, status: int, kind: ReplyKind) -> None:
    async def body(link: TwoWayLink) -> None:
        reply = await link.send_report("", SUCCESS)
        assert reply.kind is kind
        assert not reply.silent
        if kind is not ReplyKind.OK:
            assert reply.reason == f'answered {status}: "because"'

    with RecordingScheduler() as scheduler:
        headers = {"Location": "/elsewhere"}
        scheduler.misbehave(Answer(status, "because", headers))
        telling("http", tmp_path, scheduler.url, body)
        assert len(scheduler.messages) == 1


@pytest.mark.parametrize(
    ("header", "low_s", "high_s"),
    [
        ("7", 7, 7),
        ("Fri, 01 Jan 2100 00:00:00 GMT", 1e6, 1e10),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0, 0),
    ],
)
def test_retry_after_is_read(tmp_path: Path, header: str, low_s: float, high_s: float) -> None:
    async def body(link: TwoWayLink) -> None:
        reply = await link.send_ack("", ACK)
        assert reply.retry_after_s is not None
        assert low_s <= reply.retry_after_s <= high_s

    with RecordingScheduler() as scheduler:
        scheduler.misbehave(Answer(503, {}, {"Retry-After": header}))
        telling("http", tmp_path, scheduler.url, body)


def test_the_older_dialect_tells_results_only(tmp_path: Path) -> None:
    replies: list[Reply] = []

    async def body(link: TwoWayLink) -> None:
        replies.append(await link.send_ack("", ACK))
        replies.append(await link.send_report("", running_report("task-1", "w1")))
        replies.append(await link.send_report("", SUCCESS))
        replies.append(await link.send_report("", FAILED))

    with RecordingScheduler() as scheduler:
        telling("http", tmp_path, scheduler.url, body, report__dialect="task-result")
        assert {message.path for message in scheduler.messages} == {RESULT_PATH}
        assert [message.body for message in scheduler.messages] == [
            {
                "schedule_instance_id": "task-1",
                "status": "success",
                "output": "hi\n",
                "error_message": "",
            },
            {
                "schedule_instance_id": "task-1",
                "status": "failed",
                "output": "last words\n",
                "error_message": "ran for 2 s",
            },
        ]
    assert {reply.kind for reply in replies} == {ReplyKind.OK}


# Where it listens.


def advertised(tmp_path: Path, listen: str, **keys: object) -> tuple[str, str, int]:
    async def run() -> tuple[str, str, int]:
        settings = configured("http", tmp_path, http__listen=listen, **keys)
        link = make_link("http", settings, RecordingIntake("http"))
        assert (await link.advertised()).callback_url == ""
        await link.start(open_listeners(listen))
        try:
            told = await link.advertised()
            assert link.bound is not None
            return told.ip, told.callback_url, link.bound.port
        finally:
            await link.close()

    return asyncio.run(run())


def test_the_bound_address_is_advertised(tmp_path: Path) -> None:
    ip, url, port = advertised(tmp_path, "127.0.0.1:0")
    assert (ip, url) == ("127.0.0.1", f"http://127.0.0.1:{port}")


def test_a_listener_on_all_addresses_advertises_the_route_to_the_scheduler(tmp_path: Path) -> None:
    ip, url, port = advertised(
        tmp_path,
        "0.0.0.0:0",
        http__allow_networks=["127.0.0.0/8"],
        http__scheduler="http://localhost:1",
    )
    assert (ip, url) == ("127.0.0.1", f"http://127.0.0.1:{port}")


def test_what_is_configured_is_advertised_before_all(tmp_path: Path) -> None:
    ip, url, port = advertised(tmp_path, "127.0.0.1:0", http__advertise="worker.example")
    assert (ip, url) == ("worker.example", f"http://worker.example:{port}")
    ip, url, _ = advertised(tmp_path, "127.0.0.1:0", http__advertise="[2001:db8::7]:99")
    assert (ip, url) == ("2001:db8::7", "http://[2001:db8::7]:99")


def test_a_name_is_listened_on_at_each_of_its_addresses_with_one_port() -> None:
    listeners = open_listeners("localhost:0")
    try:
        assert len({listener.getsockname()[1] for listener in listeners}) == 1
        assert all(not listener.get_inheritable() for listener in listeners)
    finally:
        for listener in listeners:
            listener.close()


def test_a_taken_port_is_told_with_what_mends_it() -> None:
    (listener,) = open_listeners("127.0.0.1:0")
    with listener, pytest.raises(StockadeError, match="the port is in use; end the program"):
        open_listeners(f"127.0.0.1:{listener.getsockname()[1]}")
