"""Where http tasks may connect to: hosts by name, networks by the address really connected to.

Names are checked before a request and before each redirect. Addresses are checked when the socket
for one is made, after every look-up: a name that resolves to something else the second time (DNS
rebinding) gains nothing.
"""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Sequence
from typing import Final, Self

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

DENIED_BY_DEFAULT: Final = (
    "0.0.0.0/8",  # "this host": the kernel takes it for loopback
    "::/128",
    "169.254.0.0/16",  # link-local, and with it most clouds' metadata service
    "fe80::/10",
    "fd00:ec2::254/128",  # metadata: Amazon over IPv6
    "100.100.100.200/32",  # metadata: Alibaba
    "168.63.129.16/32",  # metadata: Azure's wire server
    "192.0.0.192/32",  # metadata: Oracle
    "224.0.0.0/4",  # multicast
    "ff00::/8",
    "255.255.255.255/32",
)
# RFC 6052: IPv6 addresses that a gateway turns into the IPv4 address in their last 32 bits.
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """Hosts by name and networks.

    Attributes:
        hosts: names, lower case; one that begins with a dot stands for all names that end so.
    """

    hosts: tuple[str, ...]
    networks: tuple[Network, ...]

    @classmethod
    def parse(cls, entries: Sequence[str]) -> Self:
        """The rule of a list such as ``["10.0.0.0/8", "api.example.com", ".example.org"]``."""
        hosts, networks = [], []
        for entry in entries:
            try:
                networks.append(ipaddress.ip_network(entry))
            except ValueError:
                hosts.append(entry.lower().rstrip("."))
        return cls(tuple(hosts), tuple(networks))

    def has_host(self, host: str) -> bool:
        name = host.lower().rstrip(".")
        return any(
            name == entry or (entry.startswith(".") and name.endswith(entry))
            for entry in self.hosts
        )

    def has_address(self, address: Address) -> bool:
        return any(
            form in network
            for form in _forms(address)
            for network in self.networks
            if form.version == network.version
        )

    def __bool__(self) -> bool:
        return bool(self.hosts or self.networks)


class Access:
    """What the configuration allows and denies. A denial wins.

    Args:
        allow: the only hosts and networks; empty: all that are not denied.
        deny: what is never connected to.
    """

    def __init__(self, allow: Sequence[str], deny: Sequence[str]) -> None:
        self._allow = Rule.parse(allow)
        self._deny = Rule.parse(deny)

    def why_not_host(self, host: str) -> str:
        """Why no request may be made to ``host``, a name or an address; empty when one may."""
        if self._deny.has_host(host):
            return f"{host} is denied by task.http.deny"
        address = parse_address(host)
        if address is not None:
            return self.why_not_address(host, address)
        if self._allow and not self._allow.has_host(host) and not self._allow.networks:
            return f"{host} is not in task.http.allow"
        return ""

    def why_not_address(self, host: str, address: Address) -> str:
        """Why ``host`` may not be connected to at ``address``; empty when it may."""
        if self._deny.has_address(address):
            return f"address {address} is denied by task.http.deny"
        allowed = not self._allow or self._allow.has_host(host) or self._allow.has_address(address)
        return "" if allowed else f"address {address} of {host} is not in task.http.allow"


def parse_address(text: str) -> Address | None:
    """The address that ``text`` is; None for a name. A zone (``%eth0``) is left out."""
    try:
        return ipaddress.ip_address(text.strip("[]").partition("%")[0])
    except ValueError:
        return None


def _forms(address: Address) -> list[Address]:
    """The address, and the IPv4 address that it leads to."""
    forms: list[Address] = [address]
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            forms.append(address.ipv4_mapped)
        if address.sixtofour is not None:
            forms.append(address.sixtofour)
        if address.teredo is not None:
            forms.append(address.teredo[1])
        if address in _NAT64:
            forms.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return forms
