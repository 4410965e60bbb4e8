"""The spawner's side of its socket: one supervisor at a time, and never waiting for it."""

from __future__ import annotations

import collections
import errno
import logging
import os
import select
import socket
from collections.abc import Callable, Sequence

from stockade.platform import sockets
from stockade.platform.errors import SyscallError
from stockade.sandbox import protocol
from stockade.sandbox.errors import ProtocolError
from stockade.sandbox.loop import Loop

log = logging.getLogger(__name__)


class Connection:
    """A connected peer. What does not fit its socket waits here: a stopped peer stops nobody.

    Args:
        received: called with each message and its descriptors, which it must close.
        closed: called once when the peer is gone, or after ``close``.
    """

    def __init__(
        self, loop: Loop, sock: socket.socket,
        received: Callable[[Connection, protocol.Message, list[int]], None],
        closed: Callable[[Connection], None],
    ) -> None:  # fmt: skip
        sock.setblocking(False)
        self._loop = loop
        self._socket = sock
        self._received = received
        self._closed = closed
        self._waiting: collections.deque[tuple[bytes, list[int]]] = collections.deque()
        self.is_open = True
        loop.watch(sock.fileno(), select.EPOLLIN, self._ready)

    @property
    def peer_pid(self) -> int:
        """Who connected; the process may be another program by now."""
        return sockets.peer_credentials(self._socket)[0]

    def send(self, message: protocol.Message, fds: Sequence[int] = ()) -> None:
        """Sends now or later; copies ``fds``, which stay the caller's."""
        if not self.is_open:
            return
        packet = protocol.encode(message)
        if not self._waiting and self._try(packet, fds):
            return
        copies: list[int] = []
        try:
            copies.extend(os.dup(fd) for fd in fds)
        except OSError as error:
            # After the next Hello all that was not acknowledged is told again.
            log.error("hanging up: cannot keep a message for the supervisor: %s", error)
            for copy in copies:
                os.close(copy)
            self._loop.call_later(0, self.close)
            return
        self._waiting.append((packet, copies))
        self._loop.watch(self._socket.fileno(), select.EPOLLIN | select.EPOLLOUT, self._ready)

    def _try(self, packet: bytes, fds: Sequence[int]) -> bool:
        try:
            sockets.send_packet(self._socket, packet, fds)
        except SyscallError as error:
            if error.errno in (errno.EAGAIN, errno.ETOOMANYREFS):
                return False
            log.info("the supervisor is gone: %s", error)
            self._loop.call_later(0, self.close)
        return True

    def _ready(self, events: int) -> None:
        if events & select.EPOLLOUT:
            self._flush()
        if self.is_open and events & ~select.EPOLLOUT:
            self._receive()

    def _flush(self) -> None:
        while self._waiting:
            packet, fds = self._waiting[0]
            if not self._try(packet, fds):
                return
            self._waiting.popleft()
            for fd in fds:
                os.close(fd)
        self._loop.watch(self._socket.fileno(), select.EPOLLIN, self._ready)

    def _receive(self) -> None:
        while self.is_open:
            try:
                packet, fds = sockets.receive_packet(
                    self._socket, protocol.MAX_MESSAGE_BYTES, protocol.MAX_DESCRIPTORS
                )
            except SyscallError as error:
                if error.errno == errno.EAGAIN:
                    return
                log.warning("cannot read from the supervisor: %s", error)
                self.close()
                return
            if not packet:
                self.close()
                return
            try:
                message = protocol.decode(packet)
            except ProtocolError as error:
                for fd in fds:
                    os.close(fd)
                log.error("%s", error)
                self.send(protocol.Refused(str(error)))
                self.close()
                return
            self._received(self, message, fds)

    def close(self) -> None:
        """Hangs up. What still waits is not sent."""
        if not self.is_open:
            return
        self.is_open = False
        self._loop.unwatch(self._socket.fileno())
        self._socket.close()
        for _, fds in self._waiting:
            for fd in fds:
                os.close(fd)
        self._waiting.clear()
        self._closed(self)
