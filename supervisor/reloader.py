"""When a reload may happen, and what is brought in order before it; reload.py does it."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Final

import msgspec
import structlog

from stockade.platform.errors import StockadeError
from stockade.sandbox.protocol import PROTOCOL_VERSION
from stockade.supervisor import reload
from stockade.supervisor.config import Config
from stockade.supervisor.control import Control
from stockade.supervisor.equipment import Equipment
from stockade.supervisor.executor import Executor
from stockade.supervisor.journal_file import SCHEMA_VERSION
from stockade.supervisor.links.listeners import open_listeners
from stockade.supervisor.links.two_way import TwoWayLink
from stockade.supervisor.reporter import Reporter
from stockade.supervisor.slots import SpawnerClient

log = structlog.get_logger(__name__)

# A rehearsal older than this is made again before the exec.
REHEARSAL_HOLDS_S: Final = 2.0


class Reloader:
    """One life's way to the next.

    Args:
        config: this life's.
        equipment: what the next life gets, too.
        is_stopping: whether the worker is about to stop, which goes before.
        begin: called when a reload was found possible and can begin.

    Attributes:
        wanted: a reload was asked for and found possible.
        error: why the last one was refused or given up; empty when none was.
    """

    def __init__(
        self,
        config: Config,
        equipment: Equipment,
        *,
        is_stopping: Callable[[], bool],
        begin: Callable[[], None],
    ) -> None:
        self._config = config
        self._equipment = equipment
        self._is_stopping = is_stopping
        self._begin = begin
        self._asking = False
        self.wanted = False
        self.error = ""
        self._rehearsed_at = 0.0
        # Opened for links of the next life that listen elsewhere than ours, with where.
        self._opened: dict[str, tuple[str, list[socket.socket]]] = {}
        self._listen = reload.listen(config)

    async def ask(self) -> None:
        """Begin a reload; it is done when the process has another life.

        Raises:
            StockadeError: the reason why not; the worker goes on as it is.
        """
        if self._asking or self.wanted:
            return
        self._asking = True
        self.error = ""
        try:
            await self._rehearse()
        except StockadeError as error:
            self.error = str(error)
            log.error("reload refused", reason=self.error)
            raise
        finally:
            self._asking = False
        log.info("reloading")
        self.wanted = True
        self._begin()

    async def _rehearse(self) -> None:
        if not self._equipment.reloadable:
            raise StockadeError("cannot reload `stockade dev`: stop it and start it again")
        if self._is_stopping():
            raise StockadeError("cannot reload: the worker is stopping")
        self._listen = await reload.rehearse(self._handover())
        self._rehearsed_at = time.monotonic()
        before = reload.listen(self._config)
        for name, (address, listeners) in list(self._opened.items()):
            if self._listen.get(name) != address:
                del self._opened[name]
                for listener in listeners:
                    listener.close()
        for name, wanted in self._listen.items():
            if wanted is not None and wanted != before.get(name) and name not in self._opened:
                # Now, while there is a way back.
                self._opened[name] = (wanted, open_listeners(wanted, name))

    async def let_loop_tasks_end(self, executor: Executor, asked: asyncio.Event) -> bool:
        """Wait for the tasks that an exec would end; whether the reload is still to happen.

        Args:
            executor: has them.
            asked: set when somebody asks for a stop, which ends the wait.
        """
        timeout_s = self._config.worker.drain_timeout
        waits = {
            asyncio.ensure_future(executor.let_loop_tasks_end(timeout_s)),
            asyncio.ensure_future(asked.wait()),
        }
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        try:
            if self._is_stopping() or time.monotonic() - self._rehearsed_at > REHEARSAL_HOLDS_S:
                # After a wait the configuration may have become another one.
                await self._rehearse()
        except StockadeError as error:
            log.error("reload given up", reason=str(error))
            self.error = str(error)
            self.wanted = False
            executor.start_loop_tasks()
            return False
        return True

    async def hand_over(
        self,
        executor: Executor,
        reporter: Reporter,
        *,
        links: Mapping[str, TwoWayLink],
        control: Control,
        client: SpawnerClient,
    ) -> reload.Handover:
        """Stop serving without closing anything that the next life goes on with."""
        await reporter.settle(self._config.report.attempt_timeout)
        # From here on nobody is answered until the next life does.
        ends = await asyncio.gather(*(link.hand_over() for link in links.values()))
        handed = dict(zip(links, ends, strict=True))
        # Where a link listens elsewhere, or not any more, what it had is closed by the exec.
        stays = {name: name not in self._opened and self._listen.get(name) for name in handed}
        opened = {
            name: [os.dup(each.fileno()) for each in listeners]
            for name, (_, listeners) in self._opened.items()
        }
        kept = {name: listeners for name, (listeners, _) in handed.items() if stays[name]}
        return msgspec.structs.replace(
            self._handover(),
            spawner_socket=str(client.newest),
            draining=executor.draining,
            lock=self._equipment.places.lock,
            control=await control.hand_over(),
            listen=self._listen,
            listeners={**kept, **opened},
            connections={name: each for name, (_, each) in handed.items() if stays[name]},
        )

    def _handover(self) -> reload.Handover:
        return reload.Handover(
            fixed=reload.fixed(self._config),
            spawner_socket=str(self._equipment.spawner_socket),
            spawner_protocol=PROTOCOL_VERSION,
            journal_version=SCHEMA_VERSION,
            as_root=self._equipment.as_root,
            host=self._equipment.host,
        )
