"""The supervisor in its event loop: how its parts start, serve, and give way to what comes next."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final

import structlog

from stockade.platform.errors import StockadeError
from stockade.supervisor import reload
from stockade.supervisor.config import Config
from stockade.supervisor.equipment import Equipment
from stockade.supervisor.errors import SpawnerLostError
from stockade.supervisor.executor import Executor
from stockade.supervisor.journal import Journal
from stockade.supervisor.parts import Parts
from stockade.supervisor.planning import Planner
from stockade.supervisor.reload import Handover
from stockade.supervisor.reloader import Reloader
from stockade.supervisor.service import Service
from stockade.supervisor.slots import Wanted
from stockade.supervisor.stopping import stop
from stockade.supervisor.sweeper import sweep_for_ever
from stockade.supervisor.task_end import LEFT_BEHIND
from stockade.supervisor.task_types.built_in import built_in_types
from stockade.supervisor.task_types.door import close_types, make_types

log = structlog.get_logger(__name__)

# Both the spawner and its standby are gone: the service manager starts the worker anew, as root.
EXIT_NO_SPAWNER: Final = 75
FAULT_PAUSE_S: Final = 1.0


class Daemon:
    """One life of the supervisor, from its loop's first turn to its last."""

    def __init__(self, config: Config, equipment: Equipment, wanted: Wanted) -> None:
        self._config = config
        self._equipment = equipment
        self._wanted = wanted
        self._life = secrets.token_hex(8)
        door = equipment.door
        self._task_types, self._type_faults = make_types(door)
        self._task_types |= {task_type.name: task_type for task_type in built_in_types(config)}
        self._jobs: set[asyncio.Task[None]] = set()
        self.stop_requests = 0
        # Somebody asked for a stop, or a reload can begin.
        self._asked = asyncio.Event()
        self._hurry = asyncio.Event()
        self._reloader = Reloader(
            config,
            equipment,
            is_stopping=lambda: self.stop_requests > 0,
            begin=self._asked.set,
        )
        self._service = Service(os.environ)

    async def run(self) -> int | Handover:
        """Serve until it is time to end, with this exit status, or to become the next life."""
        self._loop = asyncio.get_running_loop()
        self._watch_signals()
        journal = await Journal.open(self._equipment.places.journal)
        if journal.damaged is not None:
            log.error("the journal was damaged and set aside", path=str(journal.damaged))
        try:
            ended = await self._run(journal)
        finally:
            await close_types(self._task_types)
            await journal.close()
        if isinstance(ended, int):
            _leave_what_does_not_stop(ended)
        return ended

    async def _run(self, journal: Journal) -> int | Handover:
        config, equipment = self._config, self._equipment
        parts = Parts(
            config,
            equipment,
            journal,
            self._planner(),
            wanted=self._wanted,
            reloader=self._reloader,
            life=self._life,
        )
        executor, links = parts.executor, parts.links
        await parts.reporter.resume()
        executor.recover(await journal.unfinished())
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(parts.reporter.close)
            for link in links.values():
                stack.push_async_callback(link.close)
            connection = _background(stack, parts.client.run())
            if await self._until(executor.spawner.connected.wait(), connection) is None:
                return EXIT_NO_SPAWNER
            for link in links.values():
                await link.start(
                    equipment.listeners[link.name], equipment.connections.get(link.name, ())
                )
            stack.push_async_callback(parts.control.close)
            await parts.control.start(equipment.control)
            for heartbeat in parts.heartbeats.values():
                _background(stack, lasting("heartbeat", heartbeat.run))
            _background(
                stack, lasting("pressure", lambda: parts.admission.watch(parts.pressure_changed))
            )
            _background(
                stack,
                lasting("sweep", lambda: sweep_for_ever(journal, parts.output, config.worker)),
            )
            bound = {name: str(link.bound) for name, link in links.items() if link.bound}
            if equipment.draining:
                parts.drain()
            _background(
                stack,
                lasting("service", lambda: self._service.serve(lambda: self._summary(parts))),
            )
            log.info("ready", listen=bound, worker_id=config.worker.id)
            reloads = await self._serve(executor, connection)
            if reloads is None:
                return EXIT_NO_SPAWNER
            if reloads:
                self._service.reloading()
                return await self._reloader.hand_over(
                    executor,
                    parts.reporter,
                    links=links,
                    control=parts.control,
                    client=parts.client,
                )
            await stop(parts, self._service, self._hurry, connection)
        log.info("stopped")
        return 0

    async def _serve(self, executor: Executor, connection: asyncio.Task[None]) -> bool | None:
        """Until the worker is to stop (False) or to reload; None when no spawner is left."""
        while not self.stop_requests:
            if await self._until(self._asked.wait(), connection) is None:
                return None
            self._asked.clear()
            if self._reloader.wanted and not self.stop_requests:
                ended = self._reloader.let_loop_tasks_end(executor, self._asked)
                may_go_on = await self._until(ended, connection)
                if may_go_on or may_go_on is None:
                    return may_go_on
        return False

    def _summary(self, parts: Parts) -> str:
        """The service's status text."""
        text, pressure = parts.counts(), parts.executor.turns.pressure
        if self.stop_requests:
            return f"stopping: {text}"
        if parts.executor.draining:
            return f"draining: {text}"
        return f"{text}; nothing is started: {pressure}" if pressure else text

    def _planner(self) -> Planner:
        config = self._config
        return Planner(
            limits=config.limits,
            limits_max=config.limits_max,
            profile=config.profile.name.value,
            unavailable=self._equipment.unavailable,
            task_types=self._task_types,
            faults=self._type_faults,
        )

    async def _until(self, wanted: Awaitable[bool], connection: asyncio.Task[None]) -> bool | None:
        """What ``wanted`` gives, or None when all spawners end before."""
        waiting = asyncio.ensure_future(wanted)
        await asyncio.wait({waiting, connection}, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return waiting.result()
        waiting.cancel()
        error = connection.exception()
        if not isinstance(error, SpawnerLostError):
            raise error or RuntimeError("the spawner's client ended")
        log.error("no spawner is left", reason=str(error))
        return None

    def _watch_signals(self) -> None:
        # Plain handlers and not the loop's, which forgets at its end what it has not yet handled.
        # They run in this thread, as soon as the loop, which any signal wakes, comes round.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda _number, _frame: self._stop_signal())
        signal.signal(signal.SIGHUP, lambda _number, _frame: self._reload_signal())
        signal.signal(signal.SIGCHLD, lambda _number, _frame: reap_children())
        reap_children()
        # Those that came while the life before became this one.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, reload.SIGNALS)

    def _stop_signal(self) -> None:
        self.stop_requests += 1
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._asked.set)
            if self.stop_requests > 1:
                self._loop.call_soon_threadsafe(self._hurry.set)

    def _reload_signal(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: a reload is just done
            self._loop.call_soon_threadsafe(self._begin_reload)

    def _begin_reload(self) -> None:
        async def ask() -> None:
            with contextlib.suppress(StockadeError):  # logged, and in the status
                await self._reloader.ask()

        job = self._loop.create_task(ask())
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)


async def lasting(
    name: str, work: Callable[[], Awaitable[None]], pause_s: float = FAULT_PAUSE_S
) -> None:
    """Does what the worker cannot be without, and begins anew after a fault in it.

    A worker that takes tasks and tells nobody that it lives would be worse than one that is gone.
    """
    while True:
        try:
            return await work()
        except Exception:
            log.exception("a fault; it begins anew", work=name)
            await asyncio.sleep(pause_s)


def _background(stack: contextlib.AsyncExitStack, work: Any) -> asyncio.Task[None]:
    """A task that ends with the stack."""
    task: asyncio.Task[None] = asyncio.ensure_future(work)

    async def end() -> None:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("background work ended", reason=repr(error))

    stack.push_async_callback(end)
    return task


def _leave_what_does_not_stop(status: int) -> None:
    """Ends the process if the loop could not: a task type's coroutine ignores its cancellation."""
    if any(task.get_name() == LEFT_BEHIND for task in asyncio.all_tasks()):
        log.error("ending without a task type's code that does not stop")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def reap_children() -> None:
    """Take in every child that has ended: orphans of a dead spawner become ours, as a subreaper."""
    with contextlib.suppress(ChildProcessError):
        while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG) is not None:
            pass
