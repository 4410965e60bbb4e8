"""What schedulers ask the worker over gRPC: execute and cancel.

grpclib's connections and calls, with three things of our own: a connection is asked about the
moment it is accepted, a message is measured before it is read, and the end is one that no dispatch
notices.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar, cast

import structlog
from google.protobuf.message import DecodeError, Message
from grpclib.config import Configuration
from grpclib.const import Status
from grpclib.encoding.proto import ProtoCodec
from grpclib.events import _DispatchServerEvents
from grpclib.exceptions import GRPCError
from grpclib.protocol import H2Protocol
from grpclib.server import Handler, Stream
from h2.config import H2Configuration
from h2.events import PingAckReceived
from hyperframe.frame import GoAwayFrame

from stockade.supervisor.errors import RejectedError, Rejection
from stockade.supervisor.links import grpc_messages
from stockade.supervisor.links.access import Access, PeerGate
from stockade.supervisor.links.link import Intake, checked_instance_id
from stockade.supervisor.links.listeners import Listening
from stockade.supervisor.wire import scheduler_pb2 as pb
from stockade.supervisor.wire.messages import MAX_DISPATCH_BYTES
from stockade.supervisor.wire.scheduler_grpc import ExecutorServiceBase

log = structlog.get_logger(__name__)

STATUS_OF: Final = {
    Rejection.INVALID: Status.INVALID_ARGUMENT,
    Rejection.TOO_LARGE: Status.RESOURCE_EXHAUSTED,
    Rejection.UNAVAILABLE: Status.UNAVAILABLE,
}

BODY_TIMEOUT_S: Final = 30.0
# A scheduler that is gone without a word holds no connection for ever.
KEEPALIVE_S: Final = 60.0
KEEPALIVE_ANSWER_S: Final = 20.0
CLOSE_S: Final = 1.0
HAND_OVER_S: Final = 2.0

_CONFIGURATION: Final = Configuration(
    _keepalive_time=KEEPALIVE_S,
    _keepalive_timeout=KEEPALIVE_ANSWER_S,
    _keepalive_permit_without_calls=True,
    _http2_max_pings_without_data=0,
    _http2_min_sent_ping_interval_without_data=KEEPALIVE_S,
).__for_server__()
_H2: Final = H2Configuration(
    client_side=False,
    header_encoding="ascii",
    validate_outbound_headers=False,
    normalize_outbound_headers=False,
)
_GOODBYE: Final = b"goodbye!"
_PREFIX_BYTES: Final = 5  # of each message: whether it is compressed, and its length

Request = TypeVar("Request", bound=Message)
Answer = TypeVar("Answer", bound=Message)


class GrpcServer:
    """Answers schedulers on sockets that are already bound.

    Args:
        intake: gets the dispatches and cancels.
        access: who may connect and call.
        link: the name under which dispatches are handed on.
    """

    def __init__(self, intake: Intake, access: Access, link: str) -> None:
        self._intake = intake
        self._access = access
        self._link = link
        self._gate = PeerGate(access)
        self._connections: set[_Connection] = set()
        self._listening: Listening | None = None
        self._ending = False

    async def start(
        self, sockets: Sequence[socket.socket], tls: ssl.SSLContext | None = None
    ) -> None:
        """Serve on these listening sockets, which are closed by ``stop``."""
        self._listening = Listening(self._connection, sockets)
        await self._listening.renew(tls)

    async def renew(self, tls: ssl.SSLContext | None) -> None:
        """Use this context for new connections."""
        assert self._listening is not None
        await self._listening.renew(tls)

    async def take_over(self, connection: socket.socket) -> None:
        """There are none to serve on; see ``hand_over``."""
        connection.close()

    async def hand_over(self) -> tuple[list[int], list[int]]:
        """Serve no more, and leave the sockets listening; descriptors of them, and no connections.

        What two ends know of an HTTP/2 connection cannot be handed over: peers are told to go to
        another one, which the sockets' queue takes in.
        """
        listeners = [] if self._listening is None else self._listening.hand_over()
        self._listening = None
        await self.stop(HAND_OVER_S)
        return listeners, []

    async def stop(self, grace_s: float = 5.0) -> None:
        """Take no new connection, let running calls end, close all."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        self._ending = True
        ends = {asyncio.create_task(connection.end()) for connection in self._connections}
        if ends:
            _, pending = await asyncio.wait(ends, timeout=grace_s)
            for end in pending:
                end.cancel()
        for connection in list(self._connections):
            connection.abort()

    def _connection(self) -> _Connection:
        service = _Executor(self._intake, self._access, self._link)
        connection = _Connection(service, self._gate, self._connections)
        if self._ending:
            # It was accepted just before the end: told at once to go elsewhere.
            asyncio.get_running_loop().call_soon(connection.say_goodbye)
        return connection


class _Connection(H2Protocol):
    """One connection, which knows whether it is refused before it reads its first byte."""

    def __init__(self, service: _Executor, gate: PeerGate, connections: set[_Connection]) -> None:
        self._handler = Handler(service.__mapping__(), ProtoCodec(), None, _DispatchServerEvents())
        super().__init__(self._handler, _CONFIGURATION, _H2)
        self._service = service
        self._gate = gate
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        self._goodbye_seen = asyncio.Event()
        self.lost = asyncio.Event()

    @property
    def calls(self) -> list[asyncio.Task[None]]:
        """Those that run."""
        return [call for call in self._handler._tasks.values() if not call.done()]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._service.refusal = self._gate.refusal(transport)
        super().connection_made(transport)
        self.processor.processors[PingAckReceived] = self._ping_answered
        self._connections.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._connections.discard(self)
        self._goodbye_seen.set()
        self.lost.set()
        if self._service.refusal is not None:
            self._gate.closed()

    async def end(self) -> None:
        """Let the peer go elsewhere, answer what it has asked, and close the connection.

        In the steps of RFC 9113, 6.8: without the second one, a call that the peer made before it
        read the goodbye would be cut.
        """
        self.say_goodbye()
        await _at_most(CLOSE_S, self._goodbye_seen)
        while calls := self.calls:
            await asyncio.wait(calls)
        self._send_goaway(self.connection._connection.highest_inbound_stream_id)
        # The peer closes when it has its answers. Closed by us, with bytes of its unread, the
        # connection would be reset, and the answers lost with it.
        await _at_most(CLOSE_S, self.lost)
        self.processor.close("the worker ends")
        await _at_most(CLOSE_S, self.lost)

    def abort(self) -> None:
        """Close at once, whatever is unsent."""
        if self._transport is not None:
            self._transport.abort()

    def say_goodbye(self) -> None:
        """Ask the peer to call over another connection from now on, and to confirm."""
        if self._transport is None or self._transport.is_closing():
            self._goodbye_seen.set()
            return
        self._send_goaway(2**31 - 1)
        self.connection._connection.ping(_GOODBYE)
        self.connection.flush()

    def _send_goaway(self, last_stream_id: int) -> None:
        # By hand: h2's own way takes the connection for closed and answers no call any more.
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(GoAwayFrame(0, last_stream_id=last_stream_id).serialize())

    def _ping_answered(self, event: PingAckReceived) -> None:
        if event.ping_data == _GOODBYE:
            self._goodbye_seen.set()
        self.connection.ping_ack_process()


async def _at_most(timeout_s: float, event: asyncio.Event) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)


class _Executor(ExecutorServiceBase):
    """The service, as the calls of one connection find it."""

    refusal: str | None = "the peer is not known yet"

    def __init__(self, intake: Intake, access: Access, link: str) -> None:
        self._intake = intake
        self._access = access
        self._link = link

    async def ExecuteTask(  # noqa: N802 -- the wire's name
        self, stream: Stream[pb.ExecuteTaskRequest, pb.ExecuteTaskResponse]
    ) -> None:
        await self._serve(stream, pb.ExecuteTaskRequest, self._execute)

    async def CancelTask(  # noqa: N802 -- the wire's name
        self, stream: Stream[pb.CancelTaskRequest, pb.CancelTaskResponse]
    ) -> None:
        await self._serve(stream, pb.CancelTaskRequest, self._cancel)

    async def _execute(self, request: pb.ExecuteTaskRequest) -> pb.ExecuteTaskResponse:
        await self._intake.execute(grpc_messages.dispatch(request), self._link)
        return pb.ExecuteTaskResponse(accepted=True)

    async def _cancel(self, request: pb.CancelTaskRequest) -> pb.CancelTaskResponse:
        instance_id = checked_instance_id(request.schedule_instance_id)
        return pb.CancelTaskResponse(ok=await self._intake.cancel(instance_id))

    async def _serve(
        self,
        stream: Stream[Any, Any],
        kind: type[Request],
        answer: Callable[[Request], Awaitable[Answer]],
    ) -> None:
        """One call: who asks, what for, and the answer or the status that says why not."""
        if self.refusal is not None:
            raise GRPCError(Status.PERMISSION_DENIED, f"cannot serve this peer: {self.refusal}")
        assert stream.metadata is not None
        given = stream.metadata.get("authorization")
        refusal = self._access.token_refusal(None if given is None else str(given))
        if refusal is not None:
            raise GRPCError(Status.UNAUTHENTICATED, f"cannot serve the call: {refusal}")
        try:
            reply = await answer(await _read(stream, kind))
        except RejectedError as error:
            message = str(error).encode("utf-8", "replace").decode()
            raise GRPCError(STATUS_OF[error.rejection], message) from error
        except GRPCError:
            raise
        except Exception as error:
            log.exception("call failed", kind=kind.__name__)
            raise GRPCError(
                Status.INTERNAL, "cannot serve the call: a fault in the worker, see its log"
            ) from error
        await stream.send_message(reply)


async def _read(stream: Stream[Any, Any], kind: type[Request]) -> Request:
    """The call's one message. grpclib's own way would read any length into memory.

    Raises:
        RejectedError: it is too large, does not come in time, or is none.
        GRPCError: it is compressed.
    """
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            prefix = await stream._stream.recv_data(_PREFIX_BYTES)
            if not prefix:
                raise _invalid("there is no message")
            if prefix[0]:
                # The status that gRPC's own description of compression asks for.
                raise GRPCError(
                    Status.UNIMPLEMENTED, "cannot read the message: it is compressed, send it plain"
                )
            length = int.from_bytes(prefix[1:], "big")
            if length > MAX_DISPATCH_BYTES:
                raise RejectedError(
                    Rejection.TOO_LARGE,
                    f"cannot take the message: it is over {MAX_DISPATCH_BYTES} bytes",
                )
            data = await stream._stream.recv_data(length)
    except TimeoutError:
        raise _invalid(f"it did not come within {BODY_TIMEOUT_S:.0f} s") from None
    except AssertionError:
        # What grpclib's buffer raises when the peer ends the stream before it has sent all.
        raise _invalid("it ends early") from None
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise _invalid(f"it is no {kind.__name__}, or a text in it is not UTF-8") from error


def _invalid(reason: str) -> RejectedError:
    return RejectedError(Rejection.INVALID, f"cannot read the message: {reason}")
