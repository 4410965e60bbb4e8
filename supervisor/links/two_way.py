"""A link that serves on listening sockets and calls its scheduler: what http and grpc share."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import ssl
from collections.abc import Sequence
from typing import Protocol

from stockade.supervisor.config import LinkConfig
from stockade.supervisor.links.access import read_token
from stockade.supervisor.links.link import Advertised, Reply
from stockade.supervisor.links.listeners import advertised_address
from stockade.supervisor.links.tls import Certificates, TlsFiles
from stockade.supervisor.listen import Address, parse_scheduler
from stockade.supervisor.wire.messages import (
    AckRequest,
    HeartbeatRequest,
    RegisterRequest,
    StatusReport,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Credentials:
    """What a link proves itself with, read while the process may still read it.

    Attributes:
        token: the bearer token for both directions; empty for none.
    """

    token: str
    certificates: Certificates


def read_credentials(config: LinkConfig, *, alpn: str, section: str) -> Credentials:
    """The token and certificates that a link's section names.

    Raises:
        ConfigError: a file cannot be read or used.
    """
    files = TlsFiles(config.tls_cert, config.tls_key, config.tls_ca, config.tls_client_ca)
    return Credentials(
        token="" if config.token_file is None else read_token(config.token_file),
        certificates=Certificates(files, alpn=alpn, section=section),
    )


class LinkServer(Protocol):
    """Takes what schedulers ask."""

    async def start(self, sockets: Sequence[socket.socket], tls: ssl.SSLContext | None) -> None:
        """Serve on these listening sockets, which are closed by ``stop``."""

    async def renew(self, tls: ssl.SSLContext | None) -> None:
        """Use this context for new connections. None is refused, none is cut."""

    async def take_over(self, connection: socket.socket) -> None:
        """Serve on a connection that ``hand_over`` gave."""

    async def hand_over(self) -> tuple[list[int], list[int]]:
        """Answer what was asked, serve no more, and close nothing that can be served on.

        Returns:
            Descriptors of the listening sockets, and of connections; the caller's to close.
        """

    async def stop(self) -> None:
        """Take no more requests, let running ones end, close all."""


class LinkClient(Protocol):
    """Tells schedulers. An empty scheduler means the configured one."""

    async def register(self, request: RegisterRequest) -> Reply: ...

    async def heartbeat(self, request: HeartbeatRequest) -> Reply: ...

    async def send_ack(self, scheduler: str, ack: AckRequest) -> Reply: ...

    async def send_report(self, scheduler: str, report: StatusReport) -> Reply: ...

    async def renew(self) -> None:
        """Use the renewed certificates for new connections."""

    async def close(self) -> None: ...


class TwoWayLink:
    """A ``Link`` of a server and a client.

    Args:
        config: the link's section.
        server: takes what schedulers ask.
        client: tells them.
        credentials: whose certificates are watched.
    """

    name = ""

    def __init__(
        self, config: LinkConfig, server: LinkServer, client: LinkClient, credentials: Credentials
    ) -> None:
        self._config = config
        self._server = server
        self._client = client
        self._certificates = credentials.certificates
        self._bound: Address | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def scheduler(self) -> str:
        return self._config.scheduler or ""

    @property
    def heartbeat_interval_s(self) -> float:
        return self._config.heartbeat_interval

    @property
    def bound(self) -> Address | None:
        """Where it listens; None before ``start``, and when it only calls."""
        return self._bound

    async def start(
        self, sockets: Sequence[socket.socket], connections: Sequence[socket.socket] = ()
    ) -> None:
        """Serve on these listening sockets (see ``open_listeners``), and watch the certificates.

        Also on the connections that ``hand_over`` gave.
        """
        if sockets:
            host, port = sockets[0].getsockname()[:2]
            self._bound = Address(host, port)
            await self._server.start(sockets, self._certificates.server)
            for connection in connections:
                await self._server.take_over(connection)
        self._watch = asyncio.create_task(self._certificates.watch(self._renewed))

    async def hand_over(self) -> tuple[list[int], list[int]]:
        """Serve no more, and close nothing that the next can go on with; see ``LinkServer``."""
        return await self._server.hand_over()

    async def stop_listening(self) -> None:
        """Take no more requests. Messages to schedulers can still be sent."""
        await self._server.stop()

    async def close(self) -> None:
        """Stop listening and close every connection."""
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
            self._watch = None
        await self._server.stop()
        await self._client.close()

    async def advertised(self) -> Advertised:
        """Where the scheduler finds this worker over this link; empty when it does not listen."""
        if self._bound is None:
            return Advertised()
        scheduler = parse_scheduler(self.scheduler) if self.scheduler else None
        address = await advertised_address(
            self._bound,
            self._config.advertise,
            None if scheduler is None else (scheduler.host, scheduler.port),
        )
        return self._told(address)

    def _told(self, address: Address) -> Advertised:
        raise NotImplementedError

    async def _renewed(self) -> None:
        if self._bound is not None:
            await self._server.renew(self._certificates.server)
        await self._client.renew()

    async def register(self, request: RegisterRequest) -> Reply:
        return await self._client.register(request)

    async def heartbeat(self, request: HeartbeatRequest) -> Reply:
        return await self._client.heartbeat(request)

    async def send_ack(self, scheduler: str, ack: AckRequest) -> Reply:
        return await self._client.send_ack(scheduler, ack)

    async def send_report(self, scheduler: str, report: StatusReport) -> Reply:
        return await self._client.send_report(scheduler, report)
