"""The supervisor's end of the spawner's socket.

One connection at a time. When it is lost (the spawner died) the client looks for the newest socket
that answers, which is the standby's, and tells its listener, who asks what lives. Nothing that was
sent on a lost connection is taken for done: the listener compares with `list_tasks`.
"""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Final

import structlog

from stockade.platform.sockets import connect_seqpacket
from stockade.sandbox.protocol import (
    PROTOCOL_VERSION,
    Acknowledge,
    Cancel,
    Finish,
    Hello,
    ListedTask,
    Welcome,
)
from stockade.supervisor.errors import SpawnerLostError
from stockade.supervisor.process_plan import PackedStart
from stockade.supervisor.spawner_connection import SpawnerConnection, SpawnerListener, close_all

log = structlog.get_logger(__name__)

HANDSHAKE_TIMEOUT_S: Final = 5.0
RECONNECT_PAUSE_S: Final = 0.05
# Generations looked for beyond the last known one: as many takeovers can go by unnoticed.
_AHEAD: Final = 16


def _successors(newest: Path) -> list[Path]:
    """Where the next spawners would listen, the likeliest last, and ``newest`` itself.

    Generations count up by one. The directory is not listed: it is not ours to read.
    """
    generation = int(newest.stem)
    return [newest.with_name(f"{generation + step}.sock") for step in range(_AHEAD, -1, -1)]


class SpawnerClient:
    """Keeps a connection to whichever spawner lives.

    Args:
        socket_path: ``runtime_dir/spawner/N.sock`` of the spawner that runs now.
        software: our version, for the spawner's log.
        give_up_s: how long no spawner may answer before `run` raises.
    """

    def __init__(
        self,
        socket_path: Path,
        listener: SpawnerListener,
        *,
        software: str,
        give_up_s: float = 10.0,
    ) -> None:
        self._newest = socket_path
        self._listener = listener
        self._software = software
        self._give_up_s = give_up_s
        self._connection: SpawnerConnection | None = None

    async def run(self) -> None:
        """Connect, tell the listener, stay connected; returns never.

        Raises:
            SpawnerLostError: no spawner answered for ``give_up_s``.
        """
        try:
            while True:
                self._connection, welcome = await self._connect()
                try:
                    await self._listener.spawner_connected(welcome)
                    self._connection.deliver_held()
                    await self._connection.closed.wait()
                except SpawnerLostError:
                    pass
                finally:
                    self._connection.close("the supervisor closed it")
                    self._listener.spawner_lost()
                log.warning("spawner lost", generation=welcome.generation, pid=welcome.pid)
        finally:
            self._connection = None

    def start(self, packed: PackedStart) -> None:
        """Send a Start; the listener hears of it.

        Raises:
            SpawnerLostError: there is no connection.
            OSError: no descriptor is left to send it with.
        """
        connection = self._require()
        connection.send(packed.message, packed.open_descriptors())

    def cancel(self, seq: int) -> None:
        """Ask for a task's termination.

        Raises:
            SpawnerLostError: there is no connection.
        """
        self._require().send(Cancel(seq=seq))

    def acknowledge(self, seq: int) -> None:
        """Say that a task's outcome is safe. Without a connection nothing: List tells it again."""
        if self._connection is not None and not self._connection.closed.is_set():
            self._connection.send(Acknowledge(seq=seq))

    def finish(self) -> None:
        """Say that no more Starts will come: the spawner ends when nothing is left to do."""
        if self._connection is not None and not self._connection.closed.is_set():
            self._connection.send(Finish())

    async def list_tasks(self) -> list[tuple[ListedTask, int | None]]:
        """Every task the spawner knows, each with its output pipe where it has one.

        Raises:
            SpawnerLostError: there is no connection, or it was lost meanwhile.
        """
        tasks: list[tuple[ListedTask, int | None]] = []
        after = -1
        try:
            while True:
                page, descriptors = await self._require().list_page(after)
                remaining = iter(descriptors)
                tasks.extend(
                    (task, next(remaining, None) if task.has_output else None)
                    for task in page.tasks
                )
                close_all(list(remaining))
                if not page.more or not page.tasks:
                    return tasks
                after = page.tasks[-1].seq
        except BaseException:
            close_all([fd for _, fd in tasks if fd is not None])
            raise

    def _require(self) -> SpawnerConnection:
        if self._connection is None or self._connection.closed.is_set():
            raise SpawnerLostError("cannot ask the spawner: there is no connection")
        return self._connection

    async def _connect(self) -> tuple[SpawnerConnection, Welcome]:
        deadline = asyncio.get_running_loop().time() + self._give_up_s
        problem = f"there is no {self._newest}"
        while True:
            for path in _successors(self._newest):
                try:
                    connected = await self._greet(path)
                    self._newest = path
                    return connected
                except (OSError, SpawnerLostError, TimeoutError) as error:
                    if getattr(error, "errno", None) != errno.ENOENT:
                        problem = f"{path.name}: {error or 'it does not answer'}"
            if asyncio.get_running_loop().time() >= deadline:
                raise SpawnerLostError(f"cannot reach a spawner: {problem}")
            await asyncio.sleep(RECONNECT_PAUSE_S)

    async def _greet(self, path: Path) -> tuple[SpawnerConnection, Welcome]:
        connection = SpawnerConnection(connect_seqpacket(path), self._listener)
        try:
            connection.send(Hello(version=PROTOCOL_VERSION, software=self._software))
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                welcome = await connection.welcome
            if welcome.version != PROTOCOL_VERSION:
                raise SpawnerLostError(
                    f"the spawner speaks protocol {welcome.version}, this is {PROTOCOL_VERSION}"
                )
        except BaseException:
            connection.close("no welcome")
            raise
        return connection, welcome
