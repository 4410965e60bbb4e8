"""A scheduler for tests, which records all that a worker tells it and misbehaves on demand.

It speaks HTTP over real sockets from a thread of its own, with its own few lines of HTTP, so that
it can do what no server library would; grpc_scheduler.py has the one that speaks gRPC::

    with RecordingScheduler() as scheduler:
        ... start a worker with --scheduler scheduler.url ...
        scheduler.wait_for(lambda s: s.workers)
        scheduler.dispatch(callback_url, schedule_instance_id="task-1", task_type="shell", ...)
        report = scheduler.terminal_report("task-1")          # waits
        scheduler.misbehave(Hang(), path=REPORT_PATH, times=3) # the next three reports
        scheduler.behave()                                     # all well again
        scheduler.stop(); scheduler.start()                    # down, and back on the same port

Unless told otherwise it answers as the real one: 201 to a registration, 404 to the heartbeat of a
worker that has not registered since the last ``forget_workers``, 200 to all else.
"""

from __future__ import annotations

import asyncio
import dataclasses
import http.client
import json
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar
from urllib.parse import SplitResult, urlsplit

from stockade.supervisor.wire.messages import (
    ACK_PATH,
    CANCEL_PATH,
    EXECUTE_PATH,
    HEARTBEAT_PATH,
    REGISTER_PATH,
    REPORT_PATH,
)

RESULT_PATH = "/internal/tasks/result"
TERMINAL = frozenset({"success", "failed", "timeout", "cancelled"})

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Message:
    """One request as it arrived: recorded before it is answered, however it is answered."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    at: float  # time.monotonic()
    connection: int
    raw: bytes

    @property
    def id(self) -> str:
        return str(self.body.get("schedule_instance_id", ""))

    @property
    def kind(self) -> str:
        """``register``, ``heartbeat``, ``ack``, or a report's status."""
        if self.path in (REPORT_PATH, RESULT_PATH):
            return str(self.body.get("status"))
        return self.path.rsplit("/", 1)[-1]


@dataclasses.dataclass(frozen=True)
class Answer:
    """Answer with this status."""

    status: int = 200
    body: Any = dataclasses.field(default_factory=lambda: {"status": "ok"})
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    delay_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Hang:
    """Read the request and never answer."""


@dataclasses.dataclass(frozen=True)
class Drop:
    """Close the connection instead of answering."""


@dataclasses.dataclass(frozen=True)
class CutBody:
    """Promise a body with 200, send half of it, and close."""


@dataclasses.dataclass(frozen=True)
class Drip:
    """Answer 200, one byte every so often, and never finish."""

    every_s: float = 0.05


Behaviour = Answer | Hang | Drop | CutBody | Drip


@dataclasses.dataclass
class _Rule:
    behaviour: Behaviour
    path: str | None
    matching: Callable[[Message], bool]
    left: int | None


class RecordingScheduler:
    """See the module's docstring. Every method may be called from any thread.

    Args:
        port: where to listen; 0 for any free port.
        tls: the listener's; None to be plain.
        caller_tls: for its calls to a worker that listens with TLS.
        token: sent to workers.
    """

    link = "http"

    def __init__(
        self,
        port: int = 0,
        *,
        tls: ssl.SSLContext | None = None,
        caller_tls: ssl.SSLContext | None = None,
        token: str = "",
    ) -> None:
        self._port = port
        self._tls = tls
        self._caller_tls = caller_tls
        self._token = token
        self._lock = threading.Condition()
        self._messages: list[Message] = []
        self._rules: list[_Rule] = []
        self._known: set[str] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="scheduler")
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._connected = 0

    # Life.

    def __enter__(self) -> Self:
        self._thread.start()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def start(self) -> None:
        """Listen; on the same port as before, after a ``stop``."""
        self._run(self._listen())

    def stop(self) -> None:
        """Refuse connections and cut those there are. What was recorded stays."""
        self._run(self._cut())

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(
            self._connection, "127.0.0.1", self._port, backlog=512, ssl=self._tls
        )
        self._port = self._server.sockets[0].getsockname()[1]

    async def _cut(self) -> None:
        if self._server is None:
            return
        self._server.close()
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.wait_closed()
        self._server = None

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self._port}"

    # What it saw.

    @property
    def messages(self) -> list[Message]:
        """Everything so far, in order of arrival."""
        with self._lock:
            return list(self._messages)

    @property
    def workers(self) -> list[dict[str, Any]]:
        """The registrations so far."""
        return [message.body for message in self.messages if message.path == REGISTER_PATH]

    def of(self, instance_id: str) -> list[Message]:
        """What was told about one task, in order of arrival."""
        return [message for message in self.messages if message.id == instance_id]

    def kinds(self, instance_id: str) -> list[str]:
        """For example ``["ack", "running", "success"]``."""
        return [message.kind for message in self.of(instance_id)]

    def terminal_reports(self, instance_id: str | None = None) -> list[dict[str, Any]]:
        return [
            message.body
            for message in self.messages
            if message.kind in TERMINAL and instance_id in (None, message.id)
        ]

    def wait_for(self, predicate: Callable[[Self], T], deadline_s: float = 10.0) -> T:
        """The first true value of ``predicate(self)``, asked again after each message."""
        until = time.monotonic() + deadline_s
        while True:
            with self._lock:
                seen = len(self._messages)
            if value := predicate(self):
                return value
            with self._lock:
                remaining = until - time.monotonic()
                if remaining <= 0:
                    told = [f"{m.kind} {m.id}".strip() for m in self._messages[-20:]]
                    raise AssertionError(f"not seen within {deadline_s} s; the last were {told}")
                if len(self._messages) == seen:
                    # Woken by messages; in between the predicate may look at other things.
                    self._lock.wait(min(remaining, 0.05))

    def terminal_report(self, instance_id: str, deadline_s: float = 10.0) -> dict[str, Any]:
        """The task's first terminal report."""
        return self.wait_for(lambda s: s.terminal_reports(instance_id), deadline_s)[0]

    # What it does.

    def misbehave(
        self,
        behaviour: Behaviour,
        *,
        path: str | None = None,
        matching: Callable[[Message], bool] = lambda _: True,
        times: int | None = None,
    ) -> None:
        """Answer so to requests for ``path`` (None: all) that match; at most ``times`` of them."""
        with self._lock:
            self._rules.append(_Rule(behaviour, path, matching, times))

    def behave(self) -> None:
        """Forget every ``misbehave``."""
        with self._lock:
            self._rules.clear()

    def forget_workers(self) -> None:
        """As a restarted scheduler: answer 404 to heartbeats until the worker registers again."""
        with self._lock:
            self._known.clear()

    def dispatch(self, worker_url: str, **fields: Any) -> tuple[int, dict[str, Any]]:
        """Send a task to a worker: (status, body of the answer). Fields as on the wire."""
        return self._post(worker_url + EXECUTE_PATH, {"task_type": "shell", **fields})

    def cancel(self, worker_url: str, instance_id: str) -> tuple[int, dict[str, Any]]:
        return self._post(worker_url + CANCEL_PATH, {"schedule_instance_id": instance_id})

    def callback(self, registration: Mapping[str, Any]) -> str:
        """Where a worker that registered so takes this scheduler's calls."""
        return str(registration["callback_url"])

    def _post(self, url: str, body: Any) -> tuple[int, dict[str, Any]]:
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        return post(url, body, headers=headers, tls=self._caller_tls)

    # How.

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=30)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        self._connected += 1
        try:
            await self._serve(reader, writer, self._connected)
        except (asyncio.CancelledError, ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: int
    ) -> None:
        while head := await _head(reader):
            request, headers = head
            raw = await reader.readexactly(int(headers.get("content-length", 0)))
            body = _json_object(raw)
            message = Message(request, body, headers, time.monotonic(), connection, raw)
            behaviour = self._record(message)
            if isinstance(behaviour, Answer):
                if behaviour.delay_s:
                    await asyncio.sleep(behaviour.delay_s)
                writer.write(_response(behaviour))
                await writer.drain()
            else:
                await _misbehave(behaviour, reader, writer)
                return

    def _record(self, message: Message) -> Behaviour:
        with self._lock:
            self._messages.append(message)
            self._lock.notify_all()
            for rule in self._rules:
                if rule.path in (None, message.path) and rule.left != 0 and rule.matching(message):
                    if rule.left is not None:
                        rule.left -= 1
                    return rule.behaviour
            worker = str(message.body.get("worker_id"))
            if message.path == REGISTER_PATH:
                self._known.add(worker)
                return Answer(201, {"ID": worker, "Hostname": message.body.get("hostname")})
            if message.path == HEARTBEAT_PATH and worker not in self._known:
                return Answer(404, {"error": "worker not found"})
            if message.path in (HEARTBEAT_PATH, ACK_PATH, REPORT_PATH, RESULT_PATH):
                return Answer()
            return Answer(404, {"error": "not found"})


def _json_object(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _response(answer: Answer) -> bytes:
    content = json.dumps(answer.body).encode()
    headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(content)),
        **answer.headers,
    }
    lines = "".join(f"{name}: {text}\r\n" for name, text in headers.items())
    return f"HTTP/1.1 {answer.status} X\r\n{lines}\r\n".encode() + content


async def _head(reader: asyncio.StreamReader) -> tuple[str, dict[str, str]] | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").rstrip().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    return first.split()[1], {name.lower(): text for name, text in headers.items()}


async def _misbehave(
    behaviour: Behaviour, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Do it, until the client gives up."""
    if isinstance(behaviour, Hang):
        await reader.read()
    elif isinstance(behaviour, CutBody):
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 30\r\n\r\n{"status":')
        await writer.drain()
        writer.close()
        await writer.wait_closed()
    elif isinstance(behaviour, Drip):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        while not writer.is_closing():
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(behaviour.every_s)


def post(
    url: str,
    body: Any,
    *,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
    tls: ssl.SSLContext | None = None,
) -> tuple[int, dict[str, Any]]:
    """POST JSON (or bytes as they are): (status, the answer's JSON)."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"Content-Type": "application/json", **(headers or {})}
    if tls is not None:
        return _post_over_tls(urlsplit(url), data, sent, timeout_s, tls)
    return _fetch(urllib.request.Request(url, data, sent, method="POST"), timeout_s)


def _post_over_tls(
    url: SplitResult, data: bytes, headers: Mapping[str, str], timeout_s: float, tls: ssl.SSLContext
) -> tuple[int, dict[str, Any]]:
    # urllib leaves its socket open when the handshake fails.
    assert url.hostname is not None
    with (
        socket.create_connection((url.hostname, url.port or 443), timeout_s) as plain,
        tls.wrap_socket(plain, server_hostname=url.hostname) as encrypted,
    ):
        connection = http.client.HTTPConnection(url.hostname, url.port)
        connection.sock = encrypted
        connection.request("POST", url.path, data, dict(headers))
        with connection.getresponse() as response:
            return response.status, json.loads(response.read())


def get(url: str, *, headers: Mapping[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    """GET: (status, the answer's JSON)."""
    return _fetch(urllib.request.Request(url, headers=dict(headers or {})), 10.0)


def _fetch(request: urllib.request.Request, timeout_s: float) -> tuple[int, dict[str, Any]]:
    # No proxy: the environment's is not for this host.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())
