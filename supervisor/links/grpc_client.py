"""What the worker tells schedulers over gRPC: register, heartbeat, ack, reports."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any, Final

import h2.exceptions
import structlog
from google.protobuf.message import Message
from grpclib.client import Channel, UnaryUnaryMethod
from grpclib.config import Configuration
from grpclib.const import Status
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError

from stockade.supervisor.links import grpc_messages
from stockade.supervisor.links.link import OK, Reply, ReplyKind
from stockade.supervisor.links.tls import Certificates
from stockade.supervisor.listen import SchedulerAddress, parse_scheduler
from stockade.supervisor.wire.messages import (
    AckRequest,
    HeartbeatRequest,
    RegisterRequest,
    StatusReport,
)
from stockade.supervisor.wire.scheduler_grpc import WorkerControlServiceStub

log = structlog.get_logger(__name__)

# Servers forgive two pings without a call between them, and cut who sends a third.
_CONFIGURATION: Final = Configuration(
    _keepalive_time=30.0,
    _keepalive_timeout=10.0,
    _keepalive_permit_without_calls=True,
    _http2_max_pings_without_data=2,
    _http2_min_sent_ping_interval_without_data=30.0,
)
# A kept connection that is closed shows itself at once.
STALE_S: Final = 0.5

# As the HTTP statuses of the same meaning. What is in neither is tried again without end.
_DELIVERED: Final = frozenset({Status.ALREADY_EXISTS})
_REFUSED: Final = frozenset(
    {
        Status.INVALID_ARGUMENT,
        Status.FAILED_PRECONDITION,
        Status.OUT_OF_RANGE,
        Status.PERMISSION_DENIED,
        Status.UNAUTHENTICATED,
        Status.UNIMPLEMENTED,
    }
)
# RESOURCE_EXHAUSTED is also "not now". These are the words of gRPC's libraries for "too large".
_TOO_LARGE: Final = "larger than max"


@dataclasses.dataclass(slots=True)
class _Peer:
    """One scheduler. ``answered_at`` is when it last answered anything, on the monotonic clock."""

    channel: Channel
    stub: WorkerControlServiceStub
    answered_at: float = 0.0


class GrpcClient:
    """Sends messages to schedulers, to each over one kept connection.

    A connection is made when it is needed, and anew when it was lost; the callers wait between
    their attempts.

    Args:
        scheduler: the configured one, used where a method gets an empty scheduler.
        token: sent as a bearer token; empty for none.
        attempt_timeout_s: the longest that one attempt may take, name lookup included.
        certificates: for schedulers that are called over TLS.
    """

    def __init__(
        self, scheduler: str, *, token: str, attempt_timeout_s: float, certificates: Certificates
    ) -> None:
        self.scheduler = scheduler
        self._metadata = {"authorization": f"Bearer {token}"} if token else {}
        self._timeout_s = attempt_timeout_s
        self._certificates = certificates
        self._peers: dict[str, _Peer] = {}
        self._retired: dict[Channel, asyncio.TimerHandle] = {}

    async def renew(self) -> None:
        """Make new connections with the renewed certificates; what is under way goes on."""
        for scheduler in list(self._peers):
            self._retire(scheduler)

    async def close(self) -> None:
        """Close all connections at once."""
        for timer in self._retired.values():
            timer.cancel()
        channels = [*self._retired, *(peer.channel for peer in self._peers.values())]
        self._peers.clear()
        self._retired.clear()
        for channel in channels:
            protocol = channel._protocol
            transport = getattr(getattr(protocol, "connection", None), "_transport", None)
            channel.close()
            if transport is not None:
                # Over TLS a close waits for the peer's, and nobody waits for that any more.
                transport.abort()

    async def register(self, request: RegisterRequest) -> Reply:
        answer = await self._call("", "RegisterWorker", grpc_messages.registration(request))
        if isinstance(answer, Reply):
            return answer
        if answer.accepted:
            return OK
        return Reply(ReplyKind.REFUSED, f"not accepted: {_shown(answer.message)}")

    async def heartbeat(self, request: HeartbeatRequest) -> Reply:
        answer = await self._call("", "Heartbeat", grpc_messages.heartbeat(request))
        return _if_ok(answer, "the scheduler does not know this worker")

    async def send_ack(self, scheduler: str, ack: AckRequest) -> Reply:
        answer = await self._call(scheduler, "AckTask", grpc_messages.ack(ack))
        return _if_ok(answer, "answered ok=false")

    async def send_report(self, scheduler: str, report: StatusReport) -> Reply:
        answer = await self._call(scheduler, "ReportTaskStatus", grpc_messages.report(report))
        return _if_ok(answer, "answered ok=false")

    async def _call(self, scheduler: str, method: str, message: Message) -> Any:
        """The scheduler's answer, or a Reply that says why there is none of use."""
        scheduler = scheduler or self.scheduler
        if not scheduler:
            return Reply(ReplyKind.REFUSED, "no scheduler is configured: set [grpc] scheduler")
        try:
            address = parse_scheduler(scheduler)
        except ValueError as error:
            return Reply(ReplyKind.REFUSED, f"{scheduler} is no address: {error}")
        begun_at = time.monotonic()
        try:
            try:
                return await self._exchange(scheduler, address, method, message)
            except StreamTerminatedError:
                if time.monotonic() - begun_at > STALE_S:
                    raise
                # Most often a kept connection that the scheduler closed just now. Every message may
                # be sent twice, so one immediate try over a new connection is safe.
                return await self._exchange(scheduler, address, method, message)
        except TimeoutError:
            peer = self._peers.get(scheduler)
            if peer is not None and peer.answered_at < begun_at:
                # Nobody has heard of it since: the connection may lead nowhere any more.
                self._retire(scheduler)
            return Reply(ReplyKind.RETRY, f"no answer within {self._timeout_s:g} s", silent=True)
        except GRPCError as error:
            return _reply(error)
        except (StreamTerminatedError, ProtocolError, h2.exceptions.ProtocolError) as error:
            self._retire(scheduler)
            return Reply(ReplyKind.RETRY, str(error) or type(error).__name__, silent=True)
        except OSError as error:
            return Reply(ReplyKind.RETRY, str(error) or type(error).__name__, silent=True)
        except Exception as error:
            # A scheduler's answer that the library trips over must not end the heartbeat.
            log.exception("call failed", method=method, scheduler=scheduler)
            self._retire(scheduler)
            return Reply(ReplyKind.RETRY, repr(error))

    async def _exchange(
        self, scheduler: str, address: SchedulerAddress, method: str, message: Message
    ) -> Message:
        peer = self._peer(scheduler, address)
        call: UnaryUnaryMethod[Any, Any] = getattr(peer.stub, method)
        try:
            async with call.open(timeout=self._timeout_s, metadata=self._metadata) as stream:
                await stream.send_message(message, end=True)
                answer = await stream.recv_message()
        except GRPCError:
            peer.answered_at = time.monotonic()
            raise
        peer.answered_at = time.monotonic()
        if answer is None:
            raise GRPCError(Status.UNKNOWN, "an answer without a message")
        return answer  # type: ignore[no-any-return]

    def _peer(self, scheduler: str, address: SchedulerAddress) -> _Peer:
        peer = self._peers.get(scheduler)
        if peer is None:
            channel = Channel(
                address.host,
                address.port,
                ssl=self._certificates.client if address.tls else None,
                config=_CONFIGURATION,
            )
            peer = self._peers[scheduler] = _Peer(channel, WorkerControlServiceStub(channel))
        return peer

    def _retire(self, scheduler: str) -> None:
        """Use this connection for no new call, and close it when those under way are over."""
        peer = self._peers.pop(scheduler, None)
        if peer is None:
            return
        channel = peer.channel

        def close() -> None:
            del self._retired[channel]
            channel.close()

        loop = asyncio.get_running_loop()
        self._retired[channel] = loop.call_later(self._timeout_s, close)


def _if_ok(answer: Any, otherwise: str) -> Reply:
    """OK when the scheduler says ok. Its no means that it does not know what was told of."""
    if isinstance(answer, Reply):
        return answer
    return OK if answer.ok else Reply(ReplyKind.UNKNOWN, otherwise)


def _reply(error: GRPCError) -> Reply:
    reason = f"answered {error.status.name}: {_shown(error.message or '')}"
    if error.status in _DELIVERED:
        return OK
    if error.status is Status.NOT_FOUND:
        return Reply(ReplyKind.UNKNOWN, reason)
    if error.status is Status.RESOURCE_EXHAUSTED and _TOO_LARGE in (error.message or ""):
        return Reply(ReplyKind.TOO_LARGE, reason)
    if error.status in _REFUSED:
        return Reply(ReplyKind.REFUSED, reason)
    return Reply(ReplyKind.RETRY, reason)


def _shown(text: str) -> str:
    return " ".join(text[:200].split()) or "(nothing)"
