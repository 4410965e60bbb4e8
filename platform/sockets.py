"""SOCK_SEQPACKET Unix sockets: one packet is one message, and descriptors travel with it."""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Final

from stockade.platform._libc import translated
from stockade.platform.errors import SyscallError
from stockade.platform.files import open_directory

MAX_PATH_BYTES: Final = 107  # sizeof(sun_path) without the terminating NUL, unix(7)
MAX_DESCRIPTORS: Final = 253  # SCM_MAX_FD
_BACKLOG: Final = 128


def listen_seqpacket(path: str | bytes | os.PathLike[str], mode: int) -> socket.socket:
    """A listening socket at ``path`` with exactly ``mode``; blocking, close-on-exec.

    Nobody can connect before the mode is set. A path of more than 107 bytes works too.

    Raises:
        SyscallError: EADDRINUSE when the file exists (also a dead one: removing it is the
            caller's), ENOENT, EACCES; ENAMETOOLONG when the last part has over 85 bytes.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with _short(path) as address, translated("bind", path):
            listener.bind(address)
            # Before listen(): until then a connect is refused, so no one slips in by the umask.
            os.chmod(address, mode)
            listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def connect_seqpacket(path: str | bytes | os.PathLike[str]) -> socket.socket:
    """A socket connected to the listener at ``path``; blocking, close-on-exec.

    Raises:
        SyscallError: ECONNREFUSED when nobody listens, ENOENT, EACCES.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with _short(path) as address, translated("connect", path):
            connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


def send_packet(sock: socket.socket, packet: bytes, fds: Sequence[int] = ()) -> None:
    """Sends one packet, whole, with descriptors; no SIGPIPE. Our descriptors stay open.

    Raises:
        ValueError: the packet is empty (the peer would take it for the end), or has more than 253
            descriptors.
        SyscallError: EPIPE or ECONNRESET (the peer is gone), EAGAIN (a non-blocking socket is
            full), EMSGSIZE (larger than the send buffer), ETOOMANYREFS.
    """
    if not packet:
        raise ValueError("cannot send an empty packet: it would read as the end")
    if len(fds) > MAX_DESCRIPTORS:
        raise ValueError(f"cannot send {len(fds)} descriptors: the limit is {MAX_DESCRIPTORS}")
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    with translated("sendmsg", sock.fileno(), f"{len(packet)} bytes", list(fds)):
        sock.sendmsg([packet], rights, socket.MSG_NOSIGNAL)


def receive_packet(sock: socket.socket, max_bytes: int, max_fds: int) -> tuple[bytes, list[int]]:
    """Receives one packet and its descriptors (close-on-exec), which are the caller's to close.

    Returns:
        ``(b"", [])`` when the peer has closed its end.

    Raises:
        SyscallError: EMSGSIZE when the packet was longer than ``max_bytes`` or had more than
            ``max_fds`` descriptors, or we had no room for them; all of them are closed then, and
            the packet is gone. EAGAIN when nothing is there on a non-blocking socket. ECONNRESET.
    """
    # CMSG_LEN and not CMSG_SPACE: its padding has room for one descriptor more.
    room = socket.CMSG_LEN(max_fds * _INT_BYTES) if max_fds else 0
    with translated("recvmsg", sock.fileno()):
        packet, control, flags, _ = sock.recvmsg(max_bytes, room, socket.MSG_CMSG_CLOEXEC)
    fds = [
        fd
        for level, kind, data in control
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS
        for (fd,) in struct.iter_unpack("=i", data[: len(data) - len(data) % _INT_BYTES])
    ]
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        for fd in fds:
            os.close(fd)
        what = "bytes" if flags & socket.MSG_TRUNC else "descriptors"
        raise SyscallError(
            "recvmsg", f"{sock.fileno()}, more {what} than {max_bytes}/{max_fds}", errno.EMSGSIZE
        )
    return packet, fds


def peer_credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Pid, uid and gid that the peer had when it connected (or made the socket pair).

    Raises:
        SyscallError: ENOTCONN and the like.

    Source: SO_PEERCRED in unix(7).
    """
    with translated("getsockopt", sock.fileno(), "SO_PEERCRED"):
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(credentials)
    return pid, uid, gid


_INT_BYTES: Final = 4
_CREDENTIALS: Final = struct.Struct("=iII")


@contextlib.contextmanager
def _short(path: str | bytes | os.PathLike[str]) -> Iterator[bytes]:
    """``path`` itself when it fits into a socket address, else a short one through /proc."""
    full = os.fsencode(path)
    if len(full) <= MAX_PATH_BYTES:
        yield full
        return
    directory, name = os.path.split(full)
    fd = open_directory(directory or b".")
    try:
        short = b"/proc/self/fd/%d/%s" % (fd, name)
        if len(short) > MAX_PATH_BYTES:
            raise SyscallError("bind", repr(path), errno.ENAMETOOLONG)
        yield short
    finally:
        os.close(fd)
