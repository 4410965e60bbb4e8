"""Addresses to listen on, and which of them are safe to bind.

A listener takes tasks, that is commands, from whoever reaches it. So it is on loopback unless the
configuration names another address *and* says how callers are told apart.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
import socket
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

from stockade.supervisor.quantities import shown

LOOPBACK: Final = "127.0.0.1"
_HOST_AND_PORT: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]*)):([0-9]{1,5})")
_HOST: Final = re.compile(r"\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+)")


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """A host (name or IP literal, without brackets) and a TCP port; port 0 is any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """The address in ``host:port``, ``[IPv6]:port`` or ``:port``, which is loopback.

    Raises:
        ValueError: the reason.
    """
    match = _HOST_AND_PORT.fullmatch(text)
    if match is None or int(match[3]) > 65535:
        raise ValueError(
            f'{shown(text)} is not an address such as "127.0.0.1:8081", "[::1]:8081" or ":8081"'
        )
    return Address(_checked_host(text, match[1], match[2] or LOOPBACK), int(match[3]))


def parse_advertised(text: str) -> Address:
    """The address in ``host`` or ``host:port``; port 0 means the listener's own.

    Raises:
        ValueError: the reason.
    """
    match = _HOST.fullmatch(text)
    if match is not None:
        return Address(_checked_host(text, match[1], match[2]), 0)
    address = parse_address(text)
    if text.startswith(":"):
        raise ValueError(f"{shown(text)} names no host that a scheduler could call")
    return address


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerAddress:
    """Where a scheduler is called, and whether over TLS."""

    host: str
    port: int
    tls: bool


def parse_scheduler(text: str) -> SchedulerAddress:
    """The address in a URL, or in ``host:port``, which is without TLS.

    Raises:
        ValueError: the reason.
    """
    if "://" not in text:
        address = parse_address(text)
        return SchedulerAddress(address.host, address.port, tls=False)
    parts = urlsplit(text)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError("it is neither a URL nor host:port")
    tls = parts.scheme == "https"
    return SchedulerAddress(parts.hostname, parts.port or (443 if tls else 80), tls)


def is_loopback(host: str) -> bool:
    """Whether only this host can reach ``host``. A name other than localhost is not looked up."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower() in {"localhost", "localhost.", "ip6-localhost", "ip6-loopback"}
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def is_this_host(host: str) -> bool:
    """Whether ``host`` is loopback, this host's own name, or an address one can bind here."""
    if is_loopback(host) or host.lower() == socket.gethostname().lower():
        return True
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        # A datagram socket that is bound and closed: nobody outside sees it, and the kernel says
        # whether the address is one of ours.
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except (ValueError, OSError):
        return False
    return True


def bind_problems(
    section: str,
    *,
    listen: str,
    advertise: str | None,
    scheduler: str | None,
    callers_known: bool,
    allow_networks: Sequence[str],
) -> list[str]:
    """Why this listener is refused, with the way out; empty when it is fine.

    Args:
        section: the configuration's section, for messages.
        listen: ``host:port``, as ``parse_address`` takes it.
        advertise: the address told to the scheduler, if not found by itself.
        scheduler: the scheduler's URL or address, if any.
        callers_known: callers must show a token or a certificate.
        allow_networks: networks that callers may be in.
    """
    address = parse_address(listen)
    if not is_loopback(address.host):
        if not callers_known and not allow_networks:
            return [
                f"cannot listen on {address}: whoever reaches it could run commands here;"
                f" set {section}.token_file or {section}.allow_networks"
                f" (or {section}.tls_client_ca), or listen on loopback"
            ]
        return []
    called = parse_advertised(advertise).host if advertise else address.host
    scheduler_host = parse_scheduler(scheduler).host if scheduler else ""
    if scheduler_host and is_loopback(called) and not is_this_host(scheduler_host):
        return [
            f"cannot listen on {address}: the scheduler on {scheduler_host} could not call back,"
            f" so this worker would never get a task; set {section}.listen to an address that it"
            f" reaches together with {section}.allow_networks (or {section}.token_file),"
            f" or {section}.advertise when a proxy passes its calls on"
        ]
    return []


def _checked_host(text: str, bracketed: str | None, plain: str) -> str:
    if bracketed is not None:
        try:
            return str(ipaddress.IPv6Address(bracketed))
        except ValueError as error:
            raise ValueError(f"{shown(text)} holds no IPv6 address: {error}") from error
    if re.fullmatch(r"[0-9.]+", plain):
        try:
            return str(ipaddress.IPv4Address(plain))
        except ValueError as error:
            raise ValueError(f"{shown(text)} holds no IPv4 address: {error}") from error
    return plain
