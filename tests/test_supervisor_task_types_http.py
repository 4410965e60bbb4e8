from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import resource
import socket
import ssl
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop
from aiohttp import web

from stockade.sandbox.outcome import ErrorCode, Outcome, Status
from stockade.supervisor.dispatch import Dispatch
from stockade.supervisor.errors import RejectedError
from stockade.supervisor.task_types.http import HttpTask
from stockade.supervisor.task_types.http_access import DENIED_BY_DEFAULT, Access
from stockade.supervisor.task_types.http_names import THREADS, Names
from stockade.supervisor.wire.messages import HttpRequest

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
RawHandler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def http_task(**changes: Any) -> HttpTask:
    return HttpTask(
        **{
            "body_max": 1000,
            "redirects_max": 3,
            "connect_timeout_s": 30.0,
            "access": Access((), DENIED_BY_DEFAULT),
            **changes,
        }
    )


async def outcome_of(task: HttpTask, payload: str, **fields: Any) -> tuple[Outcome, bytes]:
    output = bytearray()
    plan = task.plan(Dispatch(instance_id="t", task_type="http", payload=payload, **fields))
    return await plan.run(output.extend), bytes(output)


@contextlib.asynccontextmanager
async def serving(handler: Handler, **site: Any) -> AsyncIterator[int]:
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, **site).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def raw_server(handler: RawHandler) -> AsyncIterator[int]:
    """A server of bytes: for what no HTTP library would send."""

    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        current = asyncio.current_task()
        assert current is not None
        serving.add(current)
        try:
            with contextlib.suppress(ConnectionError):
                await handler(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        if serving:
            await asyncio.wait(serving)


def ask(handler: Handler, path: str = "/", *, scheme: str = "http", site: Any = None,
        dispatch: Any = None, **changes: Any) -> tuple[Outcome, bytes]:  # fmt: skip
    """Run an http task against a server of one handler: its outcome and output."""

    async def main() -> tuple[Outcome, bytes]:
        async with serving(handler, **(site or {})) as port:
            payload = f" {scheme}://127.0.0.1:{port}{path}\n"
            return await outcome_of(http_task(**changes), payload, **(dispatch or {}))

    return asyncio.run(main())


def ask_raw(answer: bytes, **changes: Any) -> tuple[Outcome, bytes]:
    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()

    async def main() -> tuple[Outcome, bytes]:
        async with raw_server(send) as port:
            return await outcome_of(http_task(**changes), f"http://127.0.0.1:{port}/")

    return asyncio.run(main())


async def echo(request: web.Request) -> web.Response:
    headers = "\n".join(f"{name.lower()}: {value}" for name, value in request.headers.items())
    return web.Response(
        text=f"{request.method} {request.path}\n{headers}\n\n{await request.text()}"
    )


# What is asked for


def test_get_carries_the_idempotency_key_and_its_body_is_the_output() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=f"{request.method} {request.headers['X-Idempotency-Key']}")

    outcome, output = ask(answer, dispatch={"idempotency_key": "key-1"})
    assert (outcome.status, output) == (Status.SUCCESS, b"GET key-1")


def test_method_headers_and_body_of_the_dispatch_are_sent() -> None:
    wish = HttpRequest(method="put", headers={"X-A": "b", "Content-Type": "text/x"}, body="é\n")
    outcome, output = ask(echo, "/p", dispatch={"http": wish}, body_max=10_000)
    lines = output.decode().split("\n")
    assert outcome.status is Status.SUCCESS
    assert lines[0] == "PUT /p"
    assert {"x-a: b", "content-type: text/x", "content-length: 3"} <= set(lines)
    assert output.decode().endswith("\n\né\n")


def test_nothing_of_the_workers_environment_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1/")
    monkeypatch.setenv("NETRC", "/nonexistent")
    assert ask(echo)[0].status is Status.SUCCESS


@pytest.mark.parametrize("status", [300, 404, 500, 503])
def test_status_from_300_on_fails_and_is_named(status: int) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status, text="why")

    outcome, output = ask(answer)
    assert (outcome.status, outcome.error_code) == (Status.FAILED, ErrorCode.EXECUTE_FAILED)
    assert str(status) in outcome.reason
    assert output == b"why"


def test_expected_statuses_alone_succeed() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=int(request.path[1:]), text="sent")

    wish = HttpRequest(expect=[404, 410])
    assert ask(answer, "/404", dispatch={"http": wish}) == (Outcome(Status.SUCCESS), b"sent")
    outcome, output = ask(answer, "/200", dispatch={"http": wish})
    assert outcome.reason == "HTTP status 200 OK, expected 404, 410"
    assert output == b"sent"


@pytest.mark.parametrize(
    ("payload", "wish"),
    [
        ("", None),
        ("file:///etc/passwd", None),
        ("ftp://a/", None),
        ("//host/x", None),
        ("http://", None),
        ("http://[x/", None),
        ("http://a:0/", None),
        ("http://a:99999/", None),
        ("http://a/", HttpRequest(headers={"X": "a\r\nY: b"})),
        ("http://a/", HttpRequest(headers={"X": "a\0"})),
        ("http://a/", HttpRequest(headers={"X Y": "a"})),
        ("http://a/", HttpRequest(headers={"": "a"})),
        ("http://a/", HttpRequest(headers={"content-length": "5"})),
        ("http://a/", HttpRequest(headers={"Transfer-Encoding": "chunked"})),
        ("http://a/", HttpRequest(headers={"Host": "b"})),
        ("http://a/", HttpRequest(headers={f"X-{i}": "" for i in range(101)})),
        ("http://a/", HttpRequest(headers={"X": "a" * 70_000})),
        ("http://a/", HttpRequest(method="GET /")),
        ("http://a/", HttpRequest(method="CONNECT")),
        ("http://a/", HttpRequest(expect=[99])),
        ("http://a/", HttpRequest(expect=[600])),
    ],
)
def test_request_that_cannot_be_made_is_invalid(payload: str, wish: HttpRequest | None) -> None:
    with pytest.raises(RejectedError, match="cannot ask"):
        http_task().plan(Dispatch(instance_id="t", payload=payload, http=wish))


def test_files_are_refused_and_not_dropped() -> None:
    with pytest.raises(RejectedError, match="takes no files"):
        http_task().plan(Dispatch(instance_id="t", payload="http://a/", files={"a": "b"}))


# Bounds


def test_body_is_bounded() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(b"x" * 10_000)
        return response

    outcome, output = ask(answer, body_max=25_000)
    assert (outcome.status, outcome.output_truncated) == (Status.SUCCESS, True)
    assert output == b"x" * 25_000


def test_body_of_exactly_the_bound_is_whole() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=b"x" * 1000)

    assert ask(answer) == (Outcome(Status.SUCCESS), b"x" * 1000)


def test_compressed_body_is_not_unfolded() -> None:
    async def answer(request: web.Request) -> web.Response:
        response = web.Response(body=b"0" * 50_000_000)
        response.enable_compression(web.ContentCoding.gzip)
        return response

    outcome, output = ask(answer, body_max=1_000_000)
    assert outcome.status is Status.SUCCESS
    # Nobody asked for compression; a server that sends it all the same gets it stored as it came.
    assert len(output) <= 1_000_000


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nX-A: " + b"a" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 " + b"O" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 10_000 + b"\r\n",
    ],
    ids=["long header", "long status line", "many headers"],
)
def test_headers_are_bounded(answer: bytes) -> None:
    outcome, output = ask_raw(answer)
    assert outcome.error_code is ErrorCode.EXECUTE_FAILED
    assert "not an HTTP response that can be read" in outcome.reason
    assert len(outcome.reason) <= 1000
    assert output == b""


def test_redirects_are_followed_and_bounded() -> None:
    async def answer(request: web.Request) -> web.Response:
        number = int(request.path[1:])
        if not number:
            return web.Response(text="there")
        raise web.HTTPFound(f"/{number - 1}")

    assert ask(answer, "/3")[1] == b"there"
    outcome, _ = ask(answer, "/4")
    assert outcome.reason.endswith("more than 3 redirects")
    assert "/4" in outcome.reason


def test_without_redirects_or_when_one_is_expected_it_is_the_answer() -> None:
    async def answer(request: web.Request) -> web.Response:
        raise web.HTTPFound("/elsewhere")

    assert "HTTP status 302" in ask(answer, redirects_max=0)[0].reason
    wish = HttpRequest(expect=[302])
    assert ask(answer, dispatch={"http": wish})[0].status is Status.SUCCESS


@pytest.mark.parametrize(
    ("status", "method", "expected"),
    [
        (301, "POST", b"GET "),
        (302, "POST", b"GET "),
        (303, "PUT", b"GET "),
        (307, "POST", b"POST body"),
        (308, "PUT", b"PUT body"),
        (302, "DELETE", b"DELETE body"),
    ],
)
def test_redirect_keeps_or_changes_the_method_as_rfc_9110_says(
    status: int, method: str, expected: bytes
) -> None:
    async def answer(request: web.Request) -> web.Response:
        if request.path == "/there":
            return web.Response(text=f"{request.method} {await request.text()}")
        return web.Response(status=status, headers={"Location": "/there"})

    wish = HttpRequest(method=method, body="body")
    assert ask(answer, dispatch={"http": wish})[1] == expected


def test_redirect_to_another_origin_leaves_credentials_behind() -> None:
    async def main() -> bytes:
        async with serving(echo) as there:

            async def answer(request: web.Request) -> web.Response:
                raise web.HTTPFound(f"http://127.0.0.1:{there}/")

            async with serving(answer) as port:
                wish = HttpRequest(headers={"Authorization": "geheim", "Cookie": "c", "X-A": "b"})
                task = http_task(body_max=10_000)
                return (await outcome_of(task, f"http://127.0.0.1:{port}/", http=wish))[1]

    output = asyncio.run(main())
    assert b"x-a: b" in output
    assert b"geheim" not in output
    assert b"cookie" not in output


@pytest.mark.parametrize("location", ["file:///etc/passwd", "ftp://a/", "http://[x/"])
def test_redirect_to_what_is_not_http_fails(location: str) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": location})

    outcome, output = ask(answer)
    assert (outcome.status, output) == (Status.FAILED, b"")
    assert "cannot follow the redirect" in outcome.reason


# Kinds of errors


def reason_of(payload: str, **changes: Any) -> str:
    outcome, output = asyncio.run(outcome_of(http_task(**changes), payload))
    assert (outcome.status, outcome.error_code) == (Status.FAILED, ErrorCode.EXECUTE_FAILED)
    assert output == b""
    return outcome.reason


def test_refused_connection_is_named_so() -> None:
    reason = reason_of("http://127.0.0.1:1/")
    assert "cannot connect" in reason
    assert "127.0.0.1:1" in reason


def test_password_in_the_url_is_not_told() -> None:
    reason = reason_of("http://user:geheim@127.0.0.1:1/")
    assert "127.0.0.1:1" in reason
    assert "geheim" not in reason


def test_name_that_does_not_resolve_is_named_so() -> None:
    assert "cannot resolve the host's name" in reason_of("http://no-such-host.invalid/")


def test_silent_name_server_is_a_timeout_and_holds_nothing_up() -> None:
    release = threading.Event()

    def look_up(host: str, *args: Any, **more: Any) -> Any:
        release.wait(60)
        raise socket.gaierror(socket.EAI_AGAIN, "silence")

    before = threading.active_count()
    names = Names(look_up)

    async def main() -> list[Outcome]:
        task = http_task(names=names, connect_timeout_s=0.3)
        asked = [outcome_of(task, f"http://host-{i % 50}.test/") for i in range(200)]
        return [outcome for outcome, _ in await asyncio.gather(*asked)]

    try:
        outcomes = asyncio.run(main())
    finally:
        release.set()
    assert all("timeout: no connection within" in outcome.reason for outcome in outcomes)
    assert threading.active_count() <= before + THREADS


def test_silent_peer_is_a_connect_timeout() -> None:
    # A listener with a full queue drops what else would connect.
    with socket.socket() as full, contextlib.ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        reason = reason_of(f"http://127.0.0.1:{full.getsockname()[1]}/", connect_timeout_s=0.3)
    assert "timeout: no connection within" in reason


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate of 127.0.0.1 and its key, one PEM file."""
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", str(path), "-out", f"{path}.crt"],
        check=True, capture_output=True,
    )  # fmt: skip
    with open(path, "a") as both:
        both.write(Path(f"{path}.crt").read_text())
    return path


def test_certificate_that_is_not_trusted_is_named_so(certificate: Path) -> None:
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(certificate)
    outcome, output = ask(echo, scheme="https", site={"ssl_context": server})
    assert "TLS: the server's certificate is not valid" in outcome.reason
    assert output == b""
    trusting = ssl.create_default_context(cafile=str(certificate))
    outcome, _ = ask(echo, scheme="https", site={"ssl_context": server}, tls=trusting)
    assert outcome.status is Status.SUCCESS


def test_server_without_tls_is_named_so() -> None:
    outcome, _ = ask(echo, scheme="https")
    assert "TLS:" in outcome.reason
    assert "certificate" not in outcome.reason


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"", "closed the connection without an answer"),
        (b"SSH-2.0-OpenSSH\r\n", "not an HTTP response"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf", "the body broke off"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "chunk size"),
    ],
)
def test_broken_answers_are_told_apart(answer: bytes, expected: str) -> None:
    outcome, _ = ask_raw(answer)
    assert outcome.status is Status.FAILED
    assert expected in outcome.reason


# Where to


@pytest.mark.parametrize(
    "host",
    [
        "169.254.169.254",
        "[fe80::1]",
        "[fd00:ec2::254]",
        "100.100.100.200",
        "168.63.129.16",
        "0.0.0.0",
        "0",
        "[::]",
        "224.0.0.1",
        "255.255.255.255",
        "[::ffff:169.254.169.254]",
        "[::ffff:a9fe:a9fe]",
        "[64:ff9b::169.254.169.254]",
        "[2002:a9fe:a9fe::1]",
        "2852039166",
        "0xa9fea9fe",
        "0251.0376.0251.0376",
        "169.254.43518",
    ],
)
def test_link_local_and_metadata_addresses_are_denied_however_they_are_written(host: str) -> None:
    reason = reason_of(f"http://{host}/latest/meta-data/")
    assert "not allowed: address" in reason or "not a canonical IPv4 address" in reason


def names_of(*rounds: list[str]) -> Names:
    """Each look-up of any name answers with the next of these address lists."""
    left = list(rounds)

    def look_up(host: str, *args: Any, **more: Any) -> Any:
        addresses = left.pop(0) if len(left) > 1 else left[0]
        return [
            (socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM, 6, "",
             (address, 0))
            for address in addresses
        ]  # fmt: skip

    return Names(look_up)


def test_name_that_leads_to_a_denied_address_is_denied() -> None:
    reason = reason_of("http://public.test/", names=names_of(["169.254.169.254"]))
    assert "not allowed: address 169.254.169.254 is denied by task.http.deny" in reason


def test_rebound_name_is_checked_at_each_connection() -> None:
    async def main() -> tuple[Outcome, bytes]:
        async def answer(request: web.Request) -> web.Response:
            raise web.HTTPFound(f"http://name.test:{port}/again")

        async with serving(answer) as port:
            names = names_of(["127.0.0.1"], ["169.254.169.254"])
            return await outcome_of(http_task(names=names), f"http://name.test:{port}/")

    outcome, _ = asyncio.run(main())
    assert "not allowed: address 169.254.169.254" in outcome.reason


def test_name_with_a_denied_and_a_permitted_address_reaches_the_permitted_one_only() -> None:
    async def main() -> tuple[Outcome, bytes]:
        async with serving(echo) as port:
            names = names_of(["169.254.169.254", "127.0.0.1"])
            return await outcome_of(http_task(names=names), f"http://name.test:{port}/x")

    outcome, output = asyncio.run(main())
    assert outcome.status is Status.SUCCESS
    assert output.startswith(b"GET /x")


def test_redirect_to_a_denied_host_is_denied() -> None:
    async def answer(request: web.Request) -> web.Response:
        raise web.HTTPFound("http://169.254.169.254/latest/meta-data/")

    outcome, output = ask(answer)
    assert "not allowed" in outcome.reason
    assert output == b""


@pytest.mark.parametrize(
    ("allow", "deny", "permitted"),
    [
        ((), (), True),
        (("127.0.0.0/8",), (), True),
        (("10.0.0.0/8",), (), False),
        (("name.test",), (), True),
        ((".test",), (), True),
        (("other.test", "127.0.0.1/32"), (), True),
        (("other.test",), (), False),
        (("ame.test",), (), False),
        (("name.test",), ("127.0.0.0/8",), False),
        (("127.0.0.0/8",), ("name.test",), False),
        ((), (".test",), False),
        ((), ("NAME.test.",), False),
    ],
)
def test_allow_names_the_only_places_and_deny_wins(
    allow: tuple[str, ...], deny: tuple[str, ...], permitted: bool
) -> None:
    async def main() -> Outcome:
        async with serving(echo) as port:
            task = http_task(access=Access(allow, deny), names=names_of(["127.0.0.1"]))
            return (await outcome_of(task, f"http://Name.test:{port}/"))[0]

    outcome = asyncio.run(main())
    assert (outcome.status is Status.SUCCESS) is permitted
    assert ("not allowed" in outcome.reason) is not permitted


def test_default_denials_are_networks_that_python_calls_by_the_same_names() -> None:
    networks = [ipaddress.ip_network(text) for text in DENIED_BY_DEFAULT]
    for text in ("169.254.1.1", "fe80::5", "224.1.1.1", "ff02::1", "0.1.2.3"):
        address = ipaddress.ip_address(text)
        assert any(address in network for network in networks)


# A thousand at once


def test_a_thousand_slow_responses_hold_no_thread_and_bounded_memory() -> None:
    count = 1000
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * count + 200:
        pytest.skip(f"needs {2 * count + 200} descriptors, may have {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * count + 200), hard))

    async def main() -> tuple[int, int]:
        release = asyncio.Event()
        waiting = 0
        all_wait = asyncio.Event()

        async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal waiting
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + b"x" * 1000)
            await writer.drain()
            waiting += 1
            if waiting == count:
                all_wait.set()
            await release.wait()

        task = http_task(body_max=10**6, connect_timeout_s=60.0)
        async with raw_server(slow) as port:
            # The first pays for what is loaded once.
            before = psutil.Process().memory_info().rss
            threads = threading.active_count()
            asked = [
                asyncio.ensure_future(outcome_of(task, f"http://127.0.0.1:{port}/"))
                for _ in range(count)
            ]
            async with asyncio.timeout(100):
                await all_wait.wait()
            assert threading.active_count() == threads
            grown = psutil.Process().memory_info().rss - before
            # The loop is free: a turn of it takes no part of their time.
            await asyncio.sleep(0)
            assert not any(one.done() for one in asked)
            release.set()
            outcomes = await asyncio.gather(*asked)
        assert all(outcome.status is Status.SUCCESS for outcome, _ in outcomes)
        return grown, len(outcomes)

    try:
        grown, _ = uvloop.run(main())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    # The test's own server side is in it: both ends together stay below 100 KiB each.
    assert grown < count * 100 * 1024


def test_cancelled_requests_leave_no_descriptor() -> None:
    reached = asyncio.Semaphore(0)

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.release()
        await reader.read()

    async def main() -> tuple[int, int]:
        async with raw_server(never) as port:
            task = http_task()
            before = len(os.listdir("/proc/self/fd"))
            asked = [
                asyncio.ensure_future(outcome_of(task, f"http://127.0.0.1:{port}/"))
                for _ in range(50)
            ]
            for _ in asked:
                await reached.acquire()
            for one in asked:
                one.cancel()
            await asyncio.wait(asked)
            assert all(one.cancelled() for one in asked)
            async with asyncio.timeout(30):
                while len(os.listdir("/proc/self/fd")) > before:
                    await asyncio.sleep(0.01)
            return before, len(os.listdir("/proc/self/fd"))

    before, after = asyncio.run(main())
    assert after <= before


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "POST"])
def test_request_is_made_once_even_if_the_server_hangs_up(method: str) -> None:
    async def main() -> tuple[int, Outcome]:
        asked = 0

        async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal asked
            await reader.readuntil(b"\r\n\r\n")
            asked += 1

        async with raw_server(hang_up) as port:
            wish = HttpRequest(method=method)
            outcome, _ = await outcome_of(http_task(), f"http://127.0.0.1:{port}/", http=wish)
        return asked, outcome

    asked, outcome = asyncio.run(main())
    assert "closed the connection without an answer" in outcome.reason
    assert asked == 1
