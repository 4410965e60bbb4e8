"""Who may talk to a listener: the token, the allowed networks, and no task of our own.

A task in the profile ``process`` or ``private`` shares the host's network, so it can connect to its
own worker and dispatch or cancel tasks. A connection from one of this host's own addresses is
therefore traced to the uid that owns its other end, and refused when that is a task's, or when the
owner cannot be told any more: a sender that closes at once leaves a socket without an owner.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import os
import socket
from collections.abc import Callable, Sequence
from typing import Final, cast

import structlog

from stockade.platform.errors import SyscallError
from stockade.platform.sockdiag import tcp_socket_owner
from stockade.supervisor.errors import ConfigError
from stockade.supervisor.outages import LineLimit

log = structlog.get_logger(__name__)

Endpoint = tuple[str, int]
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
SocketOwner = Callable[[Endpoint, Endpoint], tuple[int, int] | None]

_BEARER = "Bearer "

# Refused peers get an answer, but may not hold descriptors with it.
REFUSED_OPEN_MAX: Final = 32
REFUSED_OPEN_S: Final = 5.0


class Access:
    """The rules of one listener.

    Args:
        token: what a bearer token must be; empty when none is asked for.
        networks: the only ones that peers may come from; empty when any may.
        task_uids: uids that tasks run as; None when they run as the worker's own user, from which
            nothing can tell them apart.
        socket_owner: (uid, inode) of the socket with this local and remote end, or None.
    """

    def __init__(
        self,
        *,
        token: str = "",
        networks: Sequence[Network] = (),
        task_uids: range | None = None,
        socket_owner: SocketOwner = tcp_socket_owner,
    ) -> None:
        self._token = token.encode()
        self._networks = tuple(networks)
        self._task_uids = task_uids
        self._socket_owner = socket_owner

    def peer_refusal(self, peer: Endpoint, listener: Endpoint) -> str | None:
        """Why this connection is refused, or None. To be asked as soon as it is accepted."""
        address = _plain_address(peer[0])
        if self._networks and not any(address in network for network in self._networks):
            return "the peer is in none of allow_networks"
        if self._task_uids is None or not is_own_address(address, listener[0]):
            return None
        try:
            owner = self._socket_owner((peer[0], peer[1]), (listener[0], listener[1]))
        except SyscallError as error:
            return f"the owner of the connection cannot be found: {error}"
        if owner is None or owner[1] == 0:
            return "the connection has no owner on this host any more"
        if owner[0] in self._task_uids:
            return "tasks may not talk to their own worker"
        return None

    def token_refusal(self, authorization: str | None) -> str | None:
        """Why a request with this Authorization header is refused, or None."""
        if not self._token:
            return None
        if authorization is None or not authorization.startswith(_BEARER):
            return "a bearer token is required"
        given = authorization[len(_BEARER) :].strip().encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, self._token):
            return "the bearer token is wrong"
        return None


class PeerGate:
    """Asks about the connections of one listener, each at the moment it is accepted.

    Asked later, a peer that sends and closes at once would have left nothing to be traced by.
    """

    def __init__(self, access: Access) -> None:
        self._access = access
        self._open = 0
        self._lines = LineLimit(10.0)

    def refusal(self, transport: asyncio.BaseTransport) -> str | None:
        """Why this new connection is refused, or None. One that is refused is cut before long."""
        peer, listener = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        if peer and listener:
            reason = self._access.peer_refusal(peer[:2], listener[:2])
        else:
            reason = "the peer is gone already"
        if reason is None:
            return None
        held_back = self._lines.allow()
        if held_back is not None:
            log.warning(
                "connection refused",
                peer=peer[0] if peer else None,
                reason=reason,
                others=held_back,
            )
        self._open += 1
        abort = cast(asyncio.Transport, transport).abort
        if self._open > REFUSED_OPEN_MAX:
            abort()
        else:
            asyncio.get_running_loop().call_later(REFUSED_OPEN_S, abort)
        return reason

    def closed(self) -> None:
        """A refused connection is closed."""
        self._open -= 1


def is_own_address(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address, listener_ip: str
) -> bool:
    """Whether the address is one of this host's own, as its routing says at this moment."""
    if address.is_loopback or address == _plain_address(listener_ip):
        return True
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            # Sends nothing. To an address of its own the kernel answers from that address.
            probe.connect((str(address), 9))
        except OSError:
            return False
        source: str = probe.getsockname()[0]
    return _plain_address(source) == address


def read_token(path: str | os.PathLike[str]) -> str:
    """The token in a file: its only line.

    Raises:
        ConfigError: the file cannot be read, is empty, or has more than one line.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(65536)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read token_file {os.fspath(path)}: {error}") from error
    token = text.strip()
    if not token or any(character.isspace() for character in token):
        raise ConfigError(
            f"cannot use token_file {os.fspath(path)}: it must hold one token on one line"
        )
    return token


def parse_networks(texts: Sequence[str]) -> tuple[Network, ...]:
    """The networks of ``allow_networks``, such as ``10.1.0.0/16`` or a single address.

    Raises:
        ConfigError: one is not a network.
    """
    try:
        return tuple(ipaddress.ip_network(text.strip(), strict=False) for text in texts)
    except ValueError as error:
        raise ConfigError(f"cannot use allow_networks: {error}") from error


def _plain_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address without its scope, and as IPv4 when it is an IPv4 one in an IPv6 coat."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address
