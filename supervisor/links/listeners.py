"""Listening sockets of a link, and the address that its scheduler is told."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Final

from stockade.platform.errors import StockadeError
from stockade.supervisor.errors import ConfigError
from stockade.supervisor.links.tls import HANDSHAKE_S
from stockade.supervisor.listen import Address, parse_address, parse_advertised

BACKLOG: Final = 1024


def open_listeners(listen: str, section: str = "http") -> list[socket.socket]:
    """Listening sockets for ``host:port``: one for each address that the host's name has.

    Args:
        listen: where.
        section: the configuration's section that says so, for messages.

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
                f"(ss -ltnp names it), or choose another with [{section}] listen"
            ) from error
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot listen on {listen}: {reason}; give [{section}] listen an address of this host"
        ) from error
    return opened


class Listening:
    """The event loop's servers on a link's listening sockets, whose TLS can be renewed.

    Each server has a duplicate of its socket. So a new one accepts before the old one ends, from
    the same queue in the kernel: no connection is refused in between.

    Args:
        factory: makes a protocol for each connection.
        sockets: closed by ``close``.
    """

    def __init__(
        self, factory: Callable[[], asyncio.Protocol], sockets: Sequence[socket.socket]
    ) -> None:
        self._factory = factory
        self._sockets = tuple(sockets)
        self._servers: list[asyncio.Server] = []

    async def renew(self, tls: ssl.SSLContext | None) -> None:
        """Accept with this context, or without TLS."""
        loop = asyncio.get_running_loop()
        before = self._servers
        self._servers = [
            await loop.create_server(
                self._factory,
                sock=listener.dup(),
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else HANDSHAKE_S,
                backlog=BACKLOG,
            )
            for listener in self._sockets
        ]
        for server in before:
            server.close()

    def hand_over(self) -> list[int]:
        """Accept nothing more, and leave the sockets listening; descriptors of them."""
        listeners = [os.dup(listener.fileno()) for listener in self._sockets]
        self.close()
        return listeners

    def close(self) -> None:
        """Accept nothing more. Connections that there are stay."""
        for server in self._servers:
            server.close()
        for listener in self._sockets:
            listener.close()


async def advertised_address(
    bound: Address, advertise: str | None, scheduler: tuple[str, int] | None
) -> Address:
    """Where the scheduler finds a listener: as configured, as bound, or by its route.

    The route is looked up each time, since a host's address may change while it runs.

    Args:
        bound: where the listener is.
        advertise: what is configured, if anything; see ``parse_advertised``.
        scheduler: host and port of the scheduler, if there is one.
    """
    if advertise:
        told = parse_advertised(advertise)
        return Address(told.host, told.port or bound.port)
    if bound.host in {"0.0.0.0", "::"}:
        return Address(await _source_address(scheduler), bound.port)
    return bound


async def _source_address(scheduler: tuple[str, int] | None) -> str:
    """The local address from which packets to the scheduler leave; loopback when none do."""
    host, port = scheduler or (None, 0)
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_DGRAM, proto=socket.IPPROTO_UDP)
        family, kind, protocol, _, endpoint = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(endpoint)  # sends nothing; the kernel picks the route
            address: str = probe.getsockname()[0]
    except OSError:
        return "127.0.0.1"
    return address.partition("%")[0]
