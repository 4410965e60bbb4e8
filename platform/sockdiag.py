"""Who owns a TCP socket of this host, by NETLINK_SOCK_DIAG.

/proc/net/tcp says the same, but as a text of every socket that is read for each question.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
from typing import Final

from stockade.platform._libc import translated
from stockade.platform.errors import SyscallError

NETLINK_SOCK_DIAG: Final = 4
SOCK_DIAG_BY_FAMILY: Final = 20
NLM_F_REQUEST: Final = 1
NLMSG_ERROR: Final = 2
TCP_LISTEN: Final = 10
_NO_COOKIE: Final = 0xFFFFFFFF

_HEADER: Final = struct.Struct("=IHHII")  # nlmsghdr
_ERROR: Final = struct.Struct("=i")
_REQUEST: Final = struct.Struct("=BBBBI")  # inet_diag_req_v2 up to the socket's id
_SOCKET_ID: Final = struct.Struct("!HH16s16s")  # inet_diag_sockid: network order up to here,
_SOCKET_ID_TAIL: Final = struct.Struct("=III")  # the host's from here
_ANSWER: Final = struct.Struct("=BBBB")  # inet_diag_msg up to the socket's id
_ANSWER_TAIL: Final = struct.Struct("=IIIII")  # and behind it: expires, queues, uid, inode

REQUEST_BYTES: Final = _REQUEST.size + _SOCKET_ID.size + _SOCKET_ID_TAIL.size
ANSWER_BYTES: Final = _ANSWER.size + _SOCKET_ID.size + _SOCKET_ID_TAIL.size + _ANSWER_TAIL.size

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def tcp_socket_owner(local: tuple[str, int], remote: tuple[str, int]) -> tuple[int, int] | None:
    """Uid and inode of the TCP socket of this network namespace that has exactly these two ends.

    For a connection from this host to a server on it, the client's socket is found by giving the
    client's address as ``local`` and the server's as ``remote``.

    Args:
        local: address (IPv4, IPv6, or IPv4 written as IPv6; a scope such as ``%eth0`` may follow)
            and port of the socket's own end.
        remote: those of its peer.

    Returns:
        None when there is no such socket, and also when it is one that nobody holds any more
        (TIME_WAIT, closed before its end was seen): its owner is not known then, so a caller that
        asks before it trusts must refuse.

    Raises:
        ValueError: an address or port is not one, or the ends are of two families.
        SyscallError: the kernel cannot be asked.

    Source: sock_diag(7).
    """
    (source, scope), (target, target_scope) = _parse(local[0]), _parse(remote[0])
    if source.version != target.version:
        raise ValueError(f"cannot look up a socket from {local[0]} to {remote[0]}: two families")
    ends = (local[1], remote[1], source.packed.ljust(16, b"\0"), target.packed.ljust(16, b"\0"))
    try:
        socket_id = _SOCKET_ID.pack(*ends)
    except struct.error as error:
        raise ValueError(f"cannot look up ports {local[1]} and {remote[1]}: {error}") from error
    family = socket.AF_INET if source.version == 4 else socket.AF_INET6
    answer = _ask(
        _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, _NO_COOKIE)
        + socket_id
        + _SOCKET_ID_TAIL.pack(scope or target_scope, _NO_COOKIE, _NO_COOKIE)
    )
    if answer is None:
        return None
    answered_family, state, _, _ = _ANSWER.unpack_from(answer)
    offset = _ANSWER.size
    local_port, remote_port, local_raw, remote_raw = _SOCKET_ID.unpack_from(answer, offset)
    offset += _SOCKET_ID.size + _SOCKET_ID_TAIL.size
    _, _, _, uid, inode = _ANSWER_TAIL.unpack_from(answer, offset)
    found = (
        (_unpack(answered_family, local_raw), local_port),
        (_unpack(answered_family, remote_raw), remote_port),
    )
    # The kernel falls back to a socket that listens on the local port. One that has no inode
    # belongs to no process any more, and its uid reads as root's.
    if found != ((source, local[1]), (target, remote[1])) or state == TCP_LISTEN or inode == 0:
        return None
    return uid, inode


def _parse(text: str) -> tuple[_Address, int]:
    """The address, IPv4 as such also when it is written as IPv6, and its interface's index."""
    plain, _, scope = text.partition("%")
    address = ipaddress.ip_address(plain)
    index = 0
    if scope:
        try:
            index = int(scope) if scope.isdecimal() else socket.if_nametoindex(scope)
        except OSError as error:
            raise ValueError(f"cannot look up {text}: no such interface") from error
    return _unmapped(address), index


def _unpack(family: int, raw: bytes) -> _Address:
    if family == socket.AF_INET:
        return ipaddress.IPv4Address(raw[:4])
    return _unmapped(ipaddress.IPv6Address(raw))


def _unmapped(address: _Address) -> _Address:
    mapped = getattr(address, "ipv4_mapped", None)
    return address if mapped is None else mapped


def _ask(request: bytes) -> bytes | None:
    """The kernel's one answer to one inet_diag request, None for ENOENT."""
    header = _HEADER.pack(_HEADER.size + len(request), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 1, 0)
    with translated("socket", "AF_NETLINK", "NETLINK_SOCK_DIAG"):
        netlink = socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_SOCK_DIAG
        )
    with netlink, translated("sendto", "NETLINK_SOCK_DIAG"):
        netlink.sendto(header + request, (0, 0))
        # The kernel answers before sendto returns, so this never waits.
        answer = netlink.recv(8192, socket.MSG_DONTWAIT)
    length, kind, _, _, _ = _HEADER.unpack_from(answer)
    body = answer[_HEADER.size : length]
    if kind == NLMSG_ERROR:
        number = -_ERROR.unpack_from(body)[0]
        if number == errno.ENOENT:
            return None
        raise SyscallError("sock_diag", "TCP", number or errno.EPROTO)
    if kind != SOCK_DIAG_BY_FAMILY:
        raise SyscallError("sock_diag", f"TCP, answer of type {kind}", errno.EPROTO)
    return body
