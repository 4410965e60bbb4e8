"""How a scheduler is set up: checked, frozen, the same for the command and for embedding."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
from collections.abc import Mapping, Sequence
from typing import Final

from stockade.supervisor.scheduler.errors import SettingsError

DEFAULT_LISTEN: Final = "127.0.0.1:8080"

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a scheduler needs to start.

    Attributes:
        host: an address or a name; what is not loopback needs ``allow_networks``.
        port: 0 means any free one.
        state_dir: holds ``scheduler.db`` and ``lock``; made when absent.
        allow_networks: who may connect besides this host itself.
        answer_timeout_s: how long a worker may take to answer a dispatch or a cancel.
        offline_after_s: age of a heartbeat from which its worker is offline.
        scan_interval_s: how often heartbeats' ages are looked at.
        history_s: how long an ended task is kept.
    """

    state_dir: str
    host: str = "127.0.0.1"
    port: int = 8080
    allow_networks: tuple[Network, ...] = ()
    answer_timeout_s: float = 5.0
    offline_after_s: float = 30.0
    scan_interval_s: float = 10.0
    history_s: float = 7 * 86400.0


def make_settings(listen: str, state_dir: str, allow_networks: Sequence[str] = ()) -> Settings:
    """Settings from the command line's texts.

    Raises:
        SettingsError: an address or network cannot be read.
    """
    host, port = parse_listen(listen)
    networks = []
    for text in allow_networks:
        try:
            networks.append(ipaddress.ip_network(text.strip()))
        except ValueError as error:
            raise SettingsError(
                f"cannot use --allow-networks {text}: {error}. Write it as 10.0.0.0/8"
            ) from error
    return Settings(state_dir=state_dir, host=host, port=port, allow_networks=tuple(networks))


def parse_listen(text: str) -> tuple[str, int]:
    """Host and port of ``host:port``, ``[v6]:port`` or ``:port``, which means loopback.

    Raises:
        SettingsError: it is none of them.
    """
    host, colon, port = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise SettingsError(f"cannot listen on {text!r}: write it as 127.0.0.1:8080 or [::1]:8080")
    return host or "127.0.0.1", int(port)


def default_state_dir(environ: Mapping[str, str]) -> str:
    """The scheduler's own directory: /var/lib/stockade/scheduler, or the user's own."""
    if os.geteuid() == 0:
        return "/var/lib/stockade/scheduler"
    home = environ.get("HOME") or os.path.expanduser("~")
    state = environ.get("XDG_STATE_HOME") or os.path.join(home, ".local", "state")
    return os.path.join(state, "stockade", "scheduler")


def plain_address(text: str) -> Address | None:
    """The address in a text, IPv4 where it is mapped into IPv6; None when it is a name."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address
