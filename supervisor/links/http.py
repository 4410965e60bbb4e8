"""The ``http`` link: the worker's HTTP server and client, as one."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Sequence
from typing import Final
from urllib.parse import urlsplit

from stockade.platform.errors import StockadeError
from stockade.supervisor.config import Config
from stockade.supervisor.errors import ConfigError
from stockade.supervisor.links.access import Access, parse_networks
from stockade.supervisor.links.http_client import HttpClient
from stockade.supervisor.links.http_server import HttpServer
from stockade.supervisor.links.link import Advertised, Intake, Reply
from stockade.supervisor.listen import Address, parse_address, parse_advertised
from stockade.supervisor.wire.messages import (
    AckRequest,
    HeartbeatRequest,
    RegisterRequest,
    StatusReport,
)

NAME: Final = "http"
BACKLOG: Final = 1024


class HttpLink:
    """Serves and talks to schedulers over HTTP. A ``Link``.

    Args:
        config: ``[http]`` and ``[report]`` of it.
        intake: gets dispatches and cancels.
        metrics: the Prometheus text.
        token: the bearer token for both directions, empty for none; see ``access.read_token``,
            to be called while the process may still read the file.
        task_uids: what tasks run as, when the worker was started as root; else None.
    """

    name = NAME

    def __init__(
        self,
        config: Config,
        intake: Intake,
        *,
        metrics: Callable[[], bytes],
        token: str,
        task_uids: range | None,
    ) -> None:
        self._config = config.http
        self._access = Access(
            token=token, networks=parse_networks(config.http.allow_networks), task_uids=task_uids
        )
        self._server = HttpServer(intake, self._access, metrics, NAME)
        self._client = HttpClient(
            config.http.scheduler or "",
            token=token,
            dialect=config.report.dialect,
            attempt_timeout_s=config.report.attempt_timeout,
        )
        self._bound: Address | None = None

    @property
    def scheduler(self) -> str:
        return self._client.scheduler

    @property
    def bound(self) -> Address | None:
        """Where it listens; None before ``start``."""
        return self._bound

    async def start(self, sockets: Sequence[socket.socket]) -> None:
        """Serve on these listening sockets; see ``open_listeners``."""
        host, port = sockets[0].getsockname()[:2]
        self._bound = Address(host, port)
        await self._server.start(sockets)

    async def stop_listening(self) -> None:
        """Take no more requests. Messages to schedulers can still be sent."""
        await self._server.stop()

    async def close(self) -> None:
        """Stop listening and close every connection."""
        await self._server.stop()
        await self._client.close()

    async def advertised(self) -> Advertised:
        """Where the scheduler finds this worker: as configured, as bound, or by its route.

        The route is looked up each time, since a host's address may change while it runs.
        """
        if self._bound is None:
            return Advertised()
        port = self._bound.port
        if self._config.advertise:
            told = parse_advertised(self._config.advertise)
            host, port = told.host, told.port or port
        else:
            host = self._bound.host
            if host in {"0.0.0.0", "::"}:
                host = await _source_address(self.scheduler)
        return Advertised(ip=host, callback_url=f"http://{Address(host, port)}")

    async def register(self, request: RegisterRequest) -> Reply:
        return await self._client.register(request)

    async def heartbeat(self, request: HeartbeatRequest) -> Reply:
        return await self._client.heartbeat(request)

    async def send_ack(self, scheduler: str, ack: AckRequest) -> Reply:
        return await self._client.send_ack(scheduler, ack)

    async def send_report(self, scheduler: str, report: StatusReport) -> Reply:
        return await self._client.send_report(scheduler, report)


def open_listeners(listen: str) -> list[socket.socket]:
    """Listening sockets for ``host:port``: one for each address that the host's name has.

    Raises:
        ConfigError: the address is wrong or unknown.
        StockadeError: another program has the port.
    """
    opened: list[socket.socket] = []
    try:
        address = parse_address(listen)
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, _, _, _, endpoint in dict.fromkeys(found):
            listener = socket.socket(family, socket.SOCK_STREAM)
            opened.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # One port for all the addresses of a name, also when any free one is asked for.
            port = address.port or opened[0].getsockname()[1]
            listener.bind((endpoint[0], port, *endpoint[2:]))
            listener.listen(BACKLOG)
    except (OSError, ValueError) as error:
        for listener in opened:
            listener.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            # Not the configuration's fault for certain: a worker that is just ending may have it.
            raise StockadeError(
                f"cannot listen on {listen}: the port is in use; end the program that has it "
                "(ss -ltnp names it), or choose another with [http] listen"
            ) from error
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot listen on {listen}: {reason}; give [http] listen an address of this host"
        ) from error
    return opened


async def _source_address(scheduler: str) -> str:
    """The local address from which packets to the scheduler leave; loopback when none do."""
    parts = urlsplit(scheduler)
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(
            parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM, proto=socket.IPPROTO_UDP
        )
        family, kind, protocol, _, endpoint = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(endpoint)  # sends nothing; the kernel picks the route
            address: str = probe.getsockname()[0]
    except OSError:
        return "127.0.0.1"
    return address.partition("%")[0]
