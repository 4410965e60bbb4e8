"""The supervisor's end of the spawner's socket.

One connection at a time. When it is lost (the spawner died) the client looks for the newest socket
that answers, which is the standby's, and tells its listener, who asks what lives. Nothing that was
sent on a lost connection is taken for done: the listener compares with `list_tasks`.
"""

from __future__ import annotations

import asyncio
import dataclasses
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
    JobTold,
    ListedTask,
    Message,
    SetAside,
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


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """What the spawner should be; one that differs is renewed.

    Attributes:
        code: fingerprint of the installed code.
        tuning: what it should have been started with; see SpawnerSettings.
    """

    code: str
    tuning: str


@dataclasses.dataclass(slots=True)
class Elder:
    """A spawner that only finishes its own tasks; ``seqs`` are those it told of."""

    generation: int
    pid: int
    connection: SpawnerConnection
    seqs: frozenset[int] = frozenset()


class SpawnerClient:
    """Keeps a connection to whichever spawner is in charge, and one to each elder.

    Args:
        socket_path: ``runtime_dir/spawner/N.sock`` of the spawner that runs now.
        software: our version, for the spawner's log.
        give_up_s: how long no spawner may answer before `run` raises.
        wanted: what it should be; None: it is taken as it is.
    """

    def __init__(
        self,
        socket_path: Path,
        listener: SpawnerListener,
        *,
        software: str,
        give_up_s: float = 10.0,
        wanted: Wanted | None = None,
    ) -> None:
        self._newest = socket_path
        self._listener = listener
        self._software = software
        self._give_up_s = give_up_s
        self._wanted = wanted
        self._connection: SpawnerConnection | None = None
        self.elders: list[Elder] = []

    @property
    def newest(self) -> Path:
        """The socket of the newest spawner that answered."""
        return self._newest

    @property
    def set_aside(self) -> SetAside:
        """The slots that the spawners have set aside, as far as they are connected."""
        told = [connection.set_aside for connection in self._all()]
        return SetAside(
            sum(each.count for each in told), tuple(name for each in told for name in each.slots)
        )

    async def run(self) -> None:
        """Connect, tell the listener, stay connected; returns never.

        Raises:
            SpawnerLostError: no spawner answered for ``give_up_s``.
        """
        try:
            while True:
                welcome = await self._connect()
                try:
                    await self._listener.spawner_connected(welcome)
                    for connection in self._all():
                        connection.deliver_held()
                    if not await self._renewed(welcome):
                        await self._until_one_closes()
                        log.warning("spawner lost", generation=welcome.generation, pid=welcome.pid)
                except SpawnerLostError as error:
                    log.warning("spawner lost", reason=str(error))
                finally:
                    self._hang_up("the supervisor closed it")
                    self._listener.spawner_lost()
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
        """Ask for a task's termination, whoever has it.

        Raises:
            SpawnerLostError: there is no connection.
        """
        self._require()
        self._tell_all(Cancel(seq=seq))

    def acknowledge(self, seq: int) -> None:
        """Say that a task's outcome is safe. Without a connection nothing: List tells it again."""
        self._tell_all(Acknowledge(seq=seq))

    def finish(self) -> None:
        """Say that no more Starts will come: the spawner ends when nothing is left to do."""
        self._tell_all(Finish())

    def _all(self) -> list[SpawnerConnection]:
        found = [] if self._connection is None else [self._connection]
        return found + [elder.connection for elder in self.elders]

    def _tell_all(self, message: Message) -> None:
        for connection in self._all():
            if not connection.closed.is_set():
                connection.send(message)

    async def _until_one_closes(self) -> None:
        waits = [asyncio.ensure_future(each.closed.wait()) for each in self._all()]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _renewed(self, welcome: Welcome) -> bool:
        """Whether another spawner is in charge now, because this one was not as it should be."""
        wanted, self._wanted = self._wanted, None
        if wanted is None or (welcome.code, welcome.tuning) == (wanted.code, wanted.tuning):
            return False
        log.info("renewing the spawner", generation=welcome.generation)
        try:
            answer = await self._require().renew(wanted.tuning)
        except SpawnerLostError as error:
            # Tried once: what it did not survive, or does not understand, is not asked again.
            log.error("cannot renew the spawner", reason=str(error))
            raise
        if answer.error:
            log.error("the spawner goes on as it was", reason=answer.error)
            return False
        return True

    def _hang_up(self, reason: str) -> None:
        for connection in self._all():
            connection.close(reason)
        self._connection = None
        self.elders = []

    async def ended(self, timeout_s: float) -> bool:
        """Whether, told to finish, the spawner has ended within that time, and all that it made."""
        connection = self._connection
        if connection is None:
            return False
        try:
            async with asyncio.timeout(timeout_s):
                await connection.closed.wait()
        except TimeoutError:
            return False
        return True

    async def service_job(self) -> JobTold:
        """What the service manager is about to do with us.

        Raises:
            SpawnerLostError: there is no connection, or it was lost meanwhile.
        """
        return await self._require().job()

    async def list_tasks(self) -> list[tuple[ListedTask, int | None]]:
        """Every task that a spawner knows, each with its output pipe where it has one.

        The one in charge is asked first: what an elder that dies leaves is its then, and the elder
        that cannot be asked any more is an error, so nothing is missed.

        Raises:
            SpawnerLostError: a connection was lost meanwhile.
        """
        tasks = await self._list(self._require())
        try:
            for elder in self.elders:
                theirs = await self._list(elder.connection)
                elder.seqs = frozenset(task.seq for task, _ in theirs)
                tasks += theirs
        except BaseException:
            close_all([fd for _, fd in tasks if fd is not None])
            raise
        return tasks

    async def _list(self, connection: SpawnerConnection) -> list[tuple[ListedTask, int | None]]:
        tasks: list[tuple[ListedTask, int | None]] = []
        after = -1
        try:
            while True:
                page, descriptors = await connection.list_page(after)
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

    async def _connect(self) -> Welcome:
        deadline = asyncio.get_running_loop().time() + self._give_up_s
        problem = f"there is no {self._newest}"
        while True:
            for path in _successors(self._newest):
                try:
                    self._connection, welcome = await self._greet(path)
                    for generation in welcome.elders:
                        # One that died just now is missed by its successor in a moment.
                        connection, told = await self._greet(path.with_name(f"{generation}.old"))
                        self.elders.append(Elder(generation, told.pid, connection))
                    self._newest = path
                    return welcome
                except (OSError, SpawnerLostError, TimeoutError) as error:
                    self._hang_up("another one is tried")
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
