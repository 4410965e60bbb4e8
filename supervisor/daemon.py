"""The supervisor in its event loop: its parts, how they start, serve and stop."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import structlog

from stockade.supervisor.admission import Admission
from stockade.supervisor.config import Config
from stockade.supervisor.control import Control
from stockade.supervisor.errors import SpawnerLostError
from stockade.supervisor.executor import Executor
from stockade.supervisor.heartbeat import Heartbeat
from stockade.supervisor.intake import Intake, Schedulers
from stockade.supervisor.journal import Journal
from stockade.supervisor.links.link import Link
from stockade.supervisor.links.running import make_links, registering
from stockade.supervisor.links.two_way import Credentials, TwoWayLink
from stockade.supervisor.metrics import Metrics
from stockade.supervisor.outages import Outages
from stockade.supervisor.output import OutputStore
from stockade.supervisor.places import WorkerPlaces
from stockade.supervisor.planning import Planner
from stockade.supervisor.reporter import Reporter
from stockade.supervisor.slots import SpawnerClient
from stockade.supervisor.sweeper import sweep_for_ever
from stockade.supervisor.task_end import LEFT_BEHIND
from stockade.supervisor.task_types.built_in import built_in_types
from stockade.supervisor.task_types.door import Door, close_types, make_types

log = structlog.get_logger(__name__)

# Both the spawner and its standby are gone: the service manager starts the worker anew, as root.
EXIT_NO_SPAWNER: Final = 75
FLUSH_S: Final = 5.0
# Beyond a task's own grace: the spawner's kill, its bounded wait for the dead, and the journal.
STOP_MARGIN_S: Final = 20.0


class Daemon:
    """The supervisor's parts, and how they start and stop."""

    def __init__(
        self,
        config: Config,
        places: WorkerPlaces,
        spawner_socket: Path,
        credentials: Mapping[str, Credentials],
        *,
        task_uids: range | None,
        unavailable: Mapping[str, str],
        door: Door,
    ) -> None:
        self._config = config
        self._places = places
        self._spawner_socket = spawner_socket
        self._credentials = credentials
        self._task_uids = task_uids
        self._unavailable = unavailable
        self._task_types, self._type_faults = make_types(door)
        self._task_types |= {task_type.name: task_type for task_type in built_in_types(config)}
        self._stop_requests = 0
        self._stop_asked = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(
        self, listeners: Mapping[str, Sequence[socket.socket]], control_socket: socket.socket
    ) -> int:
        self._watch_signals()
        journal = await Journal.open(self._places.journal)
        if journal.damaged is not None:
            log.error("the journal was damaged and set aside", path=str(journal.damaged))
        try:
            status = await self._run(journal, listeners, control_socket)
        finally:
            await close_types(self._task_types)
            await journal.close()
        _leave_what_does_not_stop(status)
        return status

    async def _run(
        self,
        journal: Journal,
        listeners: Mapping[str, Sequence[socket.socket]],
        control_socket: socket.socket,
    ) -> int:
        config = self._config
        outages = Outages()
        links: dict[str, Link] = {}
        reporter = Reporter(links, journal, config, outages)
        output = OutputStore(self._places.output, config.limits.output_max)
        admission = Admission(config.worker)
        # Before anything that an earlier life left in line can start.
        admission.look(lambda: None)
        executor = Executor(
            journal=journal,
            output=output,
            reporter=reporter,
            planner=self._planner(),
            admission=admission,
            max_concurrency=config.worker.max_concurrency,
            excerpt_bytes=config.report.excerpt,
        )
        intake = Intake(
            journal=journal,
            executor=executor,
            reporter=reporter,
            schedulers={
                name: Schedulers(link.scheduler or "", frozenset(link.allow_schedulers))
                for name, link in config.links.items()
            },
        )
        running = make_links(
            config,
            intake,
            metrics=lambda: metrics.text(),  # noqa: PLW0108 -- they come after the links
            credentials=self._credentials,
            task_uids=self._task_uids,
        )
        links.update(running)
        heartbeats = {
            link.name: Heartbeat(
                link,
                config,
                executor.load,
                outages,
                others=[other for other in running.values() if other is not link],
            )
            for link in registering(config, running)
        }
        metrics = Metrics(
            executor=executor,
            journal=journal,
            reporter=reporter,
            heartbeats=heartbeats,
            max_concurrency=config.worker.max_concurrency,
        )

        def drain() -> None:
            executor.drain()
            for heartbeat in heartbeats.values():
                heartbeat.beat_now()

        def pressure_changed() -> None:
            executor.pressure_changed()
            for heartbeat in heartbeats.values():
                heartbeat.beat_now()

        client = SpawnerClient(
            self._spawner_socket, executor, software=importlib.metadata.version("stockade")
        )
        executor.client = client
        control = Control(
            journal=journal,
            executor=executor,
            intake=intake,
            output=output,
            reporter=reporter,
            status=lambda: self._status(running, heartbeats, reporter, executor),
            drain=drain,
        )
        await reporter.resume()
        executor.recover(await journal.unfinished())
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(reporter.close)
            for link in running.values():
                stack.push_async_callback(link.close)
            connection = _background(stack, client.run())
            if not await self._until(executor.connected.wait(), connection):
                return EXIT_NO_SPAWNER
            for link in running.values():
                await link.start(listeners[link.name])
            stack.push_async_callback(control.close)
            await control.start(control_socket)
            for heartbeat in heartbeats.values():
                _background(stack, heartbeat.run())
            _background(stack, admission.watch(pressure_changed))
            _background(stack, sweep_for_ever(journal, output, config.worker))
            bound = {name: str(link.bound) for name, link in running.items() if link.bound}
            log.info("ready", listen=bound, worker_id=config.worker.id)
            if not await self._until(self._stop_asked.wait(), connection):
                return EXIT_NO_SPAWNER
            drain()
            await self._let_tasks_end(executor, connection)
            for link in running.values():
                await link.stop_listening()
            if not await reporter.flush(FLUSH_S):
                log.warning("reports are left for the next start", count=reporter.undelivered()[0])
            client.finish()
        log.info("stopped")
        return 0

    def _planner(self) -> Planner:
        config = self._config
        return Planner(
            limits=config.limits,
            limits_max=config.limits_max,
            profile=config.profile.name.value,
            unavailable=self._unavailable,
            task_types=self._task_types,
            faults=self._type_faults,
        )

    async def _let_tasks_end(self, executor: Executor, connection: asyncio.Task[None]) -> None:
        """The drain: wait for what runs and waits, then terminate what still runs."""
        drain_s = self._config.worker.drain_timeout
        log.info("draining", tasks=len(executor.tasks), drain_timeout_s=drain_s)
        waits = {asyncio.ensure_future(executor.idle()), asyncio.ensure_future(self._hurry.wait())}
        await asyncio.wait(
            {*waits, connection}, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED
        )
        for wait in waits:
            wait.cancel()
        if not executor.tasks:
            return
        grace_s = self._config.limits_max.timeout_stop or 0.0
        log.warning("terminating what still runs", tasks=len(executor.tasks))
        try:
            async with asyncio.timeout(grace_s + STOP_MARGIN_S):
                await executor.stop("cancelled: the worker was stopped")
        except TimeoutError:
            log.error("tasks are left to the spawner", tasks=len(executor.tasks))

    async def _until(self, wanted: Any, connection: asyncio.Task[None]) -> bool:
        """Wait for something, or for the end of all spawners; False for the latter."""
        waiting = asyncio.ensure_future(wanted)
        await asyncio.wait({waiting, connection}, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return True
        waiting.cancel()
        error = connection.exception()
        if not isinstance(error, SpawnerLostError):
            raise error or RuntimeError("the spawner's client ended")
        log.error("no spawner is left", reason=str(error))
        return False

    def _watch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop_signal)
        # uvloop keeps SIGCHLD for its own subprocesses, of which there are none; a plain handler
        # runs in this thread as soon as the loop, which any signal wakes, comes round.
        signal.signal(signal.SIGCHLD, lambda _number, _frame: reap_children())
        reap_children()

    def _stop_signal(self) -> None:
        self._stop_requests += 1
        self._stop_asked.set()
        if self._stop_requests > 1:
            self._hurry.set()

    def _status(
        self,
        links: Mapping[str, TwoWayLink],
        heartbeats: Mapping[str, Heartbeat],
        reporter: Reporter,
        executor: Executor,
    ) -> dict[str, Any]:
        undelivered, age_s = reporter.undelivered()
        return {
            "worker_id": self._config.worker.id,
            "version": importlib.metadata.version("stockade"),
            "pid": os.getpid(),
            "links": {
                name: {
                    "listen": str(link.bound) if link.bound else None,
                    "scheduler": link.scheduler or None,
                    "registered": name in heartbeats and heartbeats[name].registered,
                }
                for name, link in links.items()
            },
            "max_concurrency": self._config.worker.max_concurrency,
            "pressure": executor.pressure,
            "undelivered_reports": undelivered,
            "undelivered_age_s": age_s,
        }


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
