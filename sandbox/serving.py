"""The spawner's socket: who may connect, and who is its supervisor, one at a time."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
from typing import Final, Protocol

from stockade.platform import sockets
from stockade.sandbox import protocol
from stockade.sandbox.connection import Connection
from stockade.sandbox.equipment import Equipment
from stockade.sandbox.errors import ProtocolError
from stockade.sandbox.telling import Telling

log = logging.getLogger(__name__)

_ACCEPT_PAUSE_S: Final = 0.5


class Served(Protocol):
    """Who serves the supervisor."""

    def connected(self) -> None:
        """Answers its Hello."""

    def request(self, message: protocol.Message, fds: list[int]) -> None:
        """Does what the supervisor asks. Raises ProtocolError when that is not to be done."""

    def disconnected(self) -> None: ...


class Serving:
    """Listens, greets, and hands each request on.

    Attributes:
        name: the socket's, below the spawner's directory.
    """

    def __init__(self, equipment: Equipment, telling: Telling, served: Served) -> None:
        self._equipment = equipment
        self._places = equipment.places
        self._telling = telling
        self._served = served
        self._listener: socket.socket | None = None
        self.name = f"{equipment.generation}.sock"

    @property
    def path(self) -> str:
        """Where supervisors connect to."""
        return os.path.join(self._places.spawner_path, self.name)

    def listen(self) -> None:
        """Opens the way in."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.name, dir_fd=self._places.spawner)
        self._listener = sockets.listen_seqpacket(self.path, 0o600)
        settings = self._equipment.settings
        if os.geteuid() != settings.supervisor_uid:
            os.chown(self.path, settings.supervisor_uid, settings.supervisor_gid)
        self._listener.setblocking(False)
        self._watch()

    def _watch(self) -> None:
        if self._listener is not None:
            self._equipment.loop.watch(self._listener.fileno(), select.EPOLLIN, self._accept)

    def step_back(self) -> None:
        """Answers by the name of an elder from now on."""
        own, self.name = self.name, f"{self._equipment.generation}.old"
        directory = self._places.spawner
        os.rename(own, self.name, src_dir_fd=directory, dst_dir_fd=directory)

    def stop_listening(self) -> None:
        """Lets nobody in any more; whoever is connected stays so."""
        if self._listener is not None:
            self._equipment.loop.unwatch(self._listener.fileno())
            self._listener.close()
            self._listener = None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.name, dir_fd=self._places.spawner)

    def _accept(self, _events: int) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            log.warning("cannot accept a supervisor: %s", error)
            # With no descriptor left it waits on, and would be told of in each turn of the loop.
            self._equipment.loop.unwatch(self._listener.fileno())
            self._equipment.loop.call_later(_ACCEPT_PAUSE_S, self._watch)
            return
        _, uid, _ = sockets.peer_credentials(sock)
        if uid not in (0, os.geteuid(), self._equipment.settings.supervisor_uid):
            log.warning("refused a connection by uid %d", uid)
            sock.close()
            return
        Connection(self._equipment.loop, sock, self._received, self._closed)

    def _closed(self, connection: Connection) -> None:
        if connection is self._telling.connection:
            self._telling.connection = None
            self._served.disconnected()

    def _received(self, connection: Connection, message: protocol.Message, fds: list[int]) -> None:
        try:
            if isinstance(message, protocol.Hello):
                self._hello(connection, message)
            elif connection is not self._telling.connection:
                raise ProtocolError(f"cannot take {message.type} before hello")
            else:
                self._served.request(message, fds)
        except ProtocolError as error:
            log.error("%s", error)
            connection.send(protocol.Refused(str(error)))
            connection.close()
        finally:
            for fd in fds:
                os.close(fd)

    def _hello(self, connection: Connection, hello: protocol.Hello) -> None:
        if hello.version != protocol.PROTOCOL_VERSION:
            raise ProtocolError(
                f"cannot serve a supervisor of protocol version {hello.version}: this spawner has "
                f"{protocol.PROTOCOL_VERSION}; let its tasks end first, then restart the worker"
            )
        previous, self._telling.connection = self._telling.connection, connection
        if previous is not None:
            previous.close()
        log.info("supervisor connected, version %s", hello.software)
        self._served.connected()
