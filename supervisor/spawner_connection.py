"""One connection to a spawner, for asyncio: packets in, packets out, descriptors never leaked."""

from __future__ import annotations

import asyncio
import collections
import errno
import os
import socket
from collections.abc import Sequence
from typing import Final, Protocol

from stockade.platform.sockets import receive_packet, send_packet
from stockade.sandbox.errors import ProtocolError
from stockade.sandbox.protocol import (
    MAX_DESCRIPTORS,
    MAX_MESSAGE_BYTES,
    Ended,
    Job,
    JobTold,
    List,
    Listed,
    Message,
    Prepared,
    Refused,
    Renew,
    Renewed,
    SetAside,
    Started,
    Unstarted,
    Welcome,
    decode,
    encode,
)
from stockade.supervisor.errors import SpawnerLostError

_SEND_PAUSE_S: Final = 0.05
# Messages taken from the socket at one wake-up, so that a flood of ends leaves the loop responsive.
_PACKETS_AT_ONCE: Final = 32
# sendmsg(2): these pass when the peer has taken descriptors in, or the host has memory again.
_PAUSE_ERRORS: Final = (errno.ENOBUFS, errno.ETOOMANYREFS, errno.ENOMEM)

_Told = Prepared | Started | Ended | Unstarted


class SpawnerListener(Protocol):
    """Who is told what the spawner says. Descriptors passed here belong to the listener."""

    async def spawner_connected(self, welcome: Welcome) -> None:
        """A spawner answers. Until this returns nothing of it is delivered but what List tells."""

    def spawner_lost(self) -> None:
        """The connection is gone; whatever was not answered is unknown until the next one."""

    def task_prepared(self, prepared: Prepared, output_fd: int | None) -> None: ...

    def task_started(self, started: Started, output_fd: int | None) -> None: ...

    def task_ended(self, ended: Ended, output_fd: int | None) -> None: ...

    def task_unstarted(self, seq: int) -> None:
        """Nothing of the task ran, and the spawner knows it no more."""


class SpawnerConnection:
    """One connected socket. Must be made in a running event loop."""

    def __init__(self, sock: socket.socket, listener: SpawnerListener) -> None:
        self._sock = sock
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._outgoing: collections.deque[tuple[bytes, list[int]]] = collections.deque()
        self._writer_set = False
        self.welcome: asyncio.Future[Welcome] = self._loop.create_future()
        self._listed: asyncio.Future[tuple[Listed, list[int]]] | None = None
        self._list_lock = asyncio.Lock()
        self._renewed: asyncio.Future[Renewed] | None = None
        self.set_aside = SetAside(0, ())
        self._job: asyncio.Future[JobTold] | None = None
        self.closed = asyncio.Event()
        # What comes between a List and the listener's taking it in would be seen out of order.
        self._held: list[tuple[_Told, int | None]] | None = []
        sock.setblocking(False)
        self._loop.add_reader(sock.fileno(), self._readable)

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Queue one message; its descriptors are closed once sent, or at once when it cannot be.

        Raises:
            SpawnerLostError: the connection is gone.
        """
        if self.closed.is_set():
            close_all(descriptors)
            raise SpawnerLostError("cannot ask the spawner: the connection is lost")
        self._outgoing.append((encode(message), list(descriptors)))
        if not self._writer_set and len(self._outgoing) == 1:
            self._flush()

    async def list_page(self, after: int) -> tuple[Listed, list[int]]:
        async with self._list_lock:
            self._listed = self._loop.create_future()
            try:
                self.send(List(after=after))
                return await self._listed
            finally:
                self._listed = None

    async def renew(self, tuning: str) -> Renewed:
        self._renewed = self._loop.create_future()
        self.send(Renew(tuning=tuning))
        return await self._renewed

    async def job(self) -> JobTold:
        self._job = self._loop.create_future()
        self.send(Job())
        return await self._job

    def deliver_held(self) -> None:
        """Deliver what came so far, and from now on at once."""
        held, self._held = self._held or [], None
        for message, output_fd in held:
            self._deliver(message, output_fd)

    def _deliver(self, message: _Told, output_fd: int | None) -> None:
        match message:
            case Prepared():
                self._listener.task_prepared(message, output_fd)
            case Started():
                self._listener.task_started(message, output_fd)
            case Ended():
                self._listener.task_ended(message, output_fd)
            case Unstarted():
                self._listener.task_unstarted(message.seq)

    def _deliver_listed(self, listed: Listed, descriptors: list[int]) -> None:
        """A list that nobody asked for is the answer to the Start of a task known already."""
        remaining = iter(descriptors)
        for task in listed.tasks:
            output_fd = next(remaining, None) if task.has_output else None
            if task.outcome is None:
                self._deliver(Started(task.seq, task.pid, task.slot, task.started_at), output_fd)
            else:
                self._deliver(Ended(task.seq, task.outcome), output_fd)
        close_all(list(remaining))

    def close(self, reason: str) -> None:
        if self.closed.is_set():
            return
        self._loop.remove_reader(self._sock.fileno())
        self._stop_writing()
        self._sock.close()
        self.closed.set()
        for _, descriptors in self._outgoing:
            close_all(descriptors)
        self._outgoing.clear()
        close_all([fd for _, fd in self._held or () if fd is not None])
        self._held = None
        for waiter in (self.welcome, self._listed, self._renewed, self._job):
            if waiter is not None and not waiter.done():
                waiter.set_exception(SpawnerLostError(f"lost the spawner: {reason}"))
                # Who waits may have been cancelled meanwhile; then nobody reads the exception.
                waiter.exception()

    def _flush(self) -> None:
        while self._outgoing and not self.closed.is_set():
            packet, descriptors = self._outgoing[0]
            try:
                send_packet(self._sock, packet, descriptors)
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.EINTR):
                    self._start_writing()
                elif error.errno in _PAUSE_ERRORS:
                    self._stop_writing()
                    self._loop.call_later(_SEND_PAUSE_S, self._flush)
                else:
                    # The peer is gone. What it said before is still to be read, and its end with
                    # it; what we have to say, nobody hears.
                    self._stop_writing()
                    self._loop.call_soon(self._readable)
                return
            self._outgoing.popleft()
            close_all(descriptors)
        self._stop_writing()

    def _start_writing(self) -> None:
        if not self._writer_set:
            self._writer_set = True
            self._loop.add_writer(self._sock.fileno(), self._flush)

    def _stop_writing(self) -> None:
        if self._writer_set:
            self._writer_set = False
            self._loop.remove_writer(self._sock.fileno())

    def _readable(self) -> None:
        for _ in range(_PACKETS_AT_ONCE):
            if self.closed.is_set():
                return
            try:
                packet, descriptors = receive_packet(self._sock, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS)
            except OSError as error:
                if error.errno == errno.ECONNRESET:
                    # Told once, before what the peer sent last: that is read next.
                    continue
                if error.errno not in (errno.EAGAIN, errno.EINTR):
                    self.close(str(error))
                return
            if not packet:
                close_all(descriptors)
                self.close("it closed the connection")
                return
            try:
                self._dispatch(decode(packet), descriptors)
            except ProtocolError as error:
                close_all(descriptors)
                self.close(str(error))

    def _dispatch(self, message: Message, descriptors: list[int]) -> None:
        match message:
            case Prepared() | Started() | Ended() | Unstarted():
                if self._held is None:
                    self._deliver(message, _single(descriptors))
                else:
                    self._held.append((message, _single(descriptors)))
            case Listed():
                if self._listed is not None and not self._listed.done():
                    self._listed.set_result((message, descriptors))
                else:
                    self._deliver_listed(message, descriptors)
            case Welcome():
                close_all(descriptors)
                if not self.welcome.done():
                    self.welcome.set_result(message)
            case Refused():
                close_all(descriptors)
                self.close(message.reason)
            case _:
                self._note(message)
                close_all(descriptors)

    def _note(self, message: Message) -> None:
        match message:
            case JobTold():
                if self._job is not None and not self._job.done():
                    self._job.set_result(message)
            case Renewed():
                if self._renewed is not None and not self._renewed.done():
                    self._renewed.set_result(message)
            case SetAside():
                self.set_aside = message
            case _:
                raise ProtocolError(f"cannot take {message.type} from a spawner")


def _single(descriptors: list[int]) -> int | None:
    close_all(descriptors[1:])
    return descriptors[0] if descriptors else None


def close_all(descriptors: Sequence[int]) -> None:
    """Close every one."""
    for descriptor in descriptors:
        os.close(descriptor)
