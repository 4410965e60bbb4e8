"""What schedulers ask the worker over HTTP: execute, cancel, health, metrics.

aiohttp's low-level server with one handler: a dispatch costs the parsing of its request, one decode
and the journal, and nothing else.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar, cast

import msgspec
import structlog
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import StreamReader

from stockade.supervisor.errors import RejectedError, Rejection
from stockade.supervisor.links.access import Access, PeerGate
from stockade.supervisor.links.link import Intake, checked_instance_id
from stockade.supervisor.links.listeners import Listening
from stockade.supervisor.wire.messages import (
    CANCEL_PATH,
    EXECUTE_PATH,
    HEALTH_PATH,
    MAX_DISPATCH_BYTES,
    METRICS_PATH,
    CancelRequest,
    ExecuteRequest,
)

log = structlog.get_logger(__name__)

T = TypeVar("T")

STATUS_OF: Final = {
    Rejection.INVALID: 400,
    Rejection.TOO_LARGE: 413,
    Rejection.UNAVAILABLE: 503,
}

# Longer than any client keeps an idle connection: were ours the shorter time, a dispatch could meet
# a connection that is just being closed, and a first dispatch that fails is never sent again.
KEEPALIVE_S: Final = 300.0
BODY_TIMEOUT_S: Final = 30.0

HAND_OVER_S: Final = 2.0
# How often to look whether the last requests are answered, when connections are handed over.
_LET_GO_S: Final = 0.005

_JSON: Final = {"Content-Type": "application/json"}
_PROMETHEUS: Final = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
_ACCEPTED: Final = b'{"status":"accepted"}'
_CANCELLED: Final = b'{"status":"cancelled"}'
_OK: Final = b'{"status":"ok"}'

_EXECUTE: Final = msgspec.json.Decoder(ExecuteRequest)
_CANCEL: Final = msgspec.json.Decoder(CancelRequest)


class HttpServer:
    """Answers schedulers on sockets that are already bound.

    Args:
        intake: gets the dispatches and cancels.
        access: who may connect.
        metrics: the Prometheus text.
        link: the name under which dispatches are handed on.
    """

    def __init__(
        self, intake: Intake, access: Access, metrics: Callable[[], bytes], link: str
    ) -> None:
        self._intake = intake
        self._access = access
        self._metrics = metrics
        self._link = link
        self._connections: _Connections | None = None
        self._listening: Listening | None = None
        self._routes: dict[
            str, tuple[str, Callable[[web.BaseRequest], Awaitable[web.Response]]]
        ] = {
            EXECUTE_PATH: ("POST", self._execute),
            CANCEL_PATH: ("POST", self._cancel),
            HEALTH_PATH: ("GET", self._health),
            METRICS_PATH: ("GET", self._show_metrics),
        }

    async def start(
        self, sockets: Sequence[socket.socket], tls: ssl.SSLContext | None = None
    ) -> None:
        """Serve on these listening sockets, which are closed by ``stop``."""
        self._connections = _Connections(self._answer, self._access)
        self._listening = Listening(self._connections, sockets)
        await self._listening.renew(tls)

    async def take_over(self, connection: socket.socket) -> None:
        """Serve on a connection that ``hand_over`` gave."""
        assert self._connections is not None
        await asyncio.get_running_loop().connect_accepted_socket(self._connections, connection)

    async def hand_over(self, grace_s: float = HAND_OVER_S) -> tuple[list[int], list[int]]:
        """Serve no more, and close nothing: who takes over serves on as if nothing had happened.

        Requests that have begun are answered first, for at most ``grace_s``; connections that have
        one under way even then are left out, and so are those with TLS, whose keys are ours alone.

        Returns:
            Descriptors of the listening sockets, and of the connections. They are the caller's.
        """
        listeners = [] if self._listening is None else self._listening.hand_over()
        self._listening = None
        connections, self._connections = self._connections, None
        if connections is None:
            return listeners, []
        end = time.monotonic() + grace_s
        while not connections.let_go() and time.monotonic() < end:
            await asyncio.sleep(_LET_GO_S)
        return listeners, connections.released

    async def renew(self, tls: ssl.SSLContext | None) -> None:
        """Use this context for new connections."""
        assert self._listening is not None
        await self._listening.renew(tls)

    async def stop(self, grace_s: float = 5.0) -> None:
        """Take no new connection, let running requests end, close all."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        if self._connections is not None:
            # First those without a request: shutdown would wait for one on each of them.
            self._connections.pre_shutdown()
            await self._connections.shutdown(grace_s)
            self._connections = None

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        refusal = cast(_Connection, request.protocol).refusal
        if refusal is not None:
            response = _error(403, f"cannot serve this peer: {refusal}")
            response.force_close()
            return response
        try:
            return await self._routed(request)
        except RejectedError as error:
            return _error(STATUS_OF[error.rejection], str(error))
        except Exception:
            log.exception("request failed", path=request.raw_path[:100])
            return _error(500, "cannot serve the request: a fault in the worker, see its log")

    async def _routed(self, request: web.BaseRequest) -> web.Response:
        path = request.raw_path.partition("?")[0]
        route = self._routes.get(path)
        if route is None:
            return _error(404, f"cannot find {path[:100]}: there is no such path")
        method, handler = route
        if request.method != method and (request.method, method) != ("HEAD", "GET"):
            problem = f"cannot {request.method[:20]} {path}: only {method} is served"
            return _error(405, problem, {"Allow": method})
        if path != HEALTH_PATH:
            refusal = self._access.token_refusal(request.headers.get("Authorization"))
            if refusal is not None:
                problem = f"cannot serve {path}: {refusal}"
                return _error(401, problem, {"WWW-Authenticate": "Bearer"})
        return await handler(request)

    async def _execute(self, request: web.BaseRequest) -> web.Response:
        dispatch = _decode(_EXECUTE, await _body(request), "dispatch")
        await self._intake.execute(dispatch, self._link)
        return web.Response(status=202, body=_ACCEPTED, headers=_JSON)

    async def _cancel(self, request: web.BaseRequest) -> web.Response:
        cancel = _decode(_CANCEL, await _body(request), "cancel")
        if await self._intake.cancel(checked_instance_id(cancel.schedule_instance_id)):
            return web.Response(body=_CANCELLED, headers=_JSON)
        # A cancel is answered 200 either way, as schedulers expect; the body tells.
        return _error(200, "cannot cancel the task: it is unknown or has ended")

    async def _health(self, _request: web.BaseRequest) -> web.Response:
        return web.Response(body=_OK, headers=_JSON)

    async def _show_metrics(self, _request: web.BaseRequest) -> web.Response:
        return web.Response(body=self._metrics(), headers=_PROMETHEUS)


class _Connections(web.Server):
    """aiohttp's server, with connections that are asked about the moment they are accepted."""

    def __init__(
        self, handler: Callable[[web.BaseRequest], Awaitable[web.Response]], access: Access
    ) -> None:
        super().__init__(
            handler,
            request_factory=self._request,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=KEEPALIVE_S,
        )
        self.gate = PeerGate(access)
        self.open: set[_Connection] = set()
        self.released: list[int] = []

    def let_go(self) -> bool:
        """Stop reading from connections without a request under way; whether that was all."""
        for connection in [each for each in self.open if each.is_idle]:
            self.open.discard(connection)
            connection.release(self.released)
        return not self.open

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)

    def _request(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: web.RequestHandler,
        writer: AbstractStreamWriter,
        task: asyncio.Task[None],
    ) -> web.BaseRequest:
        return web.BaseRequest(
            message,
            payload,
            protocol,
            writer,
            task,
            self._loop,
            client_max_size=MAX_DISPATCH_BYTES,
        )


class _Connection(web.RequestHandler):
    """One connection, which knows whether it is refused before it reads its first byte.

    The answer stays with the connection, since a request may be handled after it is lost.
    """

    refusal: str | None = "the peer is not known yet"

    def __init__(self, connections: _Connections, **settings: Any) -> None:
        super().__init__(connections, **settings)
        self._connections = connections
        self._is_answering = False

    @property
    def is_idle(self) -> bool:
        """Whether the peer has sent nothing that it has no answer to, down to the last byte."""
        return not (
            self._is_answering
            or self._messages
            or self.transport is None
            or self.transport.is_closing()
            or self.transport.get_write_buffer_size()
        )

    def release(self, released: list[int]) -> None:
        """Read no more, and add a descriptor of the connection, which stays open; see there."""
        assert self.transport is not None
        if self.transport.get_extra_info("ssl_object") is not None:
            self.close()
            return
        self.transport.pause_reading()
        released.append(os.dup(self.transport.get_extra_info("socket").fileno()))

    def data_received(self, data: bytes) -> None:
        self._is_answering = True
        super().data_received(data)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        ended = await super().finish_response(request, resp, start_time)
        # With a body that was not read to its end, what comes next is not a request.
        self._is_answering = not request.content.is_eof()
        return ended

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.refusal = self._connections.gate.refusal(transport)
        super().connection_made(transport)
        self._connections.open.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._connections.open.discard(self)
        if self.refusal is not None:
            self._connections.gate.closed()


async def _body(request: web.BaseRequest) -> bytes:
    """The request's body.

    Raises:
        RejectedError: it is too large, or does not come in time.
    """
    length = request.content_length
    if length is not None and length > MAX_DISPATCH_BYTES:
        raise _too_large()
    if request.headers.get("Expect", "").lower() == "100-continue" and request.transport:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    try:
        if request.content.is_eof():
            return await request.read()
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise _too_large() from None
    except TimeoutError:
        raise RejectedError(
            Rejection.INVALID,
            f"cannot read the request: its body did not come within {BODY_TIMEOUT_S:.0f} s",
        ) from None


def _too_large() -> RejectedError:
    return RejectedError(
        Rejection.TOO_LARGE,
        f"cannot take the request: its body is over {MAX_DISPATCH_BYTES} bytes",
    )


def _decode(decoder: msgspec.json.Decoder[T], body: bytes, what: str) -> T:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        problem = f"a field has the wrong type: {error}"
    except msgspec.DecodeError as error:
        problem = f"it is not JSON: {error}"
    except (UnicodeDecodeError, RecursionError) as error:
        problem = f"it is not JSON that can be read: {error}"
    raise RejectedError(Rejection.INVALID, f"cannot take the {what}: {problem}")


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    body = msgspec.json.encode({"error": message.encode("utf-8", "replace").decode("utf-8")})
    return web.Response(status=status, body=body, headers={**_JSON, **(headers or {})})
