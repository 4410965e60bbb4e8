"""Network interfaces of the namespace that the caller is in."""

from __future__ import annotations

import fcntl
import socket
import struct
from typing import Final

from stockade.platform._libc import translated

SIOCGIFFLAGS: Final = 0x8913
SIOCSIFFLAGS: Final = 0x8914
IFF_UP: Final = 0x1
LOOPBACK: Final = "lo"

_REQUEST: Final = struct.Struct("=16sh22x")  # struct ifreq: name, flags
REQUEST_BYTES: Final = _REQUEST.size


def bring_up(interface: str = LOOPBACK) -> None:
    """Sets an interface up; loopback then has 127.0.0.1 and ::1 of itself.

    A new network namespace has loopback alone, and has it down.

    Raises:
        SyscallError: EPERM without CAP_NET_ADMIN in the namespace, ENODEV.

    Source: netdevice(7).
    """
    with (
        translated("ioctl", interface, "SIOCSIFFLAGS"),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as any_socket,
    ):
        flags = _flags(any_socket, interface)
        request = _REQUEST.pack(interface.encode(), flags | IFF_UP)
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, request)


def up_request(interface: str = LOOPBACK) -> bytes:
    """What SIOCSIFFLAGS is to be given for an interface that is new, to set it up."""
    return _REQUEST.pack(interface.encode(), IFF_UP)


def _flags(any_socket: socket.socket, interface: str) -> int:
    answer = fcntl.ioctl(any_socket, SIOCGIFFLAGS, _REQUEST.pack(interface.encode(), 0))
    flags: int = _REQUEST.unpack(answer)[1]
    return flags
