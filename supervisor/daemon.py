"""The supervisor in its event loop: its parts, how they start, serve and stop."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import structlog

from stockade.platform.errors import StockadeError
from stockade.supervisor import reload
from stockade.supervisor.admission import Admission
from stockade.supervisor.config import Config
from stockade.supervisor.control import Control
from stockade.supervisor.equipment import Equipment
from stockade.supervisor.errors import SpawnerLostError
from stockade.supervisor.executor import Executor
from stockade.supervisor.heartbeat import Heartbeat
from stockade.supervisor.intake import Intake, Schedulers
from stockade.supervisor.journal import Journal
from stockade.supervisor.links.link import Link
from stockade.supervisor.links.running import make_links, registering
from stockade.supervisor.links.two_way import TwoWayLink
from stockade.supervisor.metrics import Metrics
from stockade.supervisor.outages import Outages
from stockade.supervisor.output import OutputStore
from stockade.supervisor.planning import Planner
from stockade.supervisor.reload import Handover
from stockade.supervisor.reloader import Reloader
from stockade.supervisor.reporter import Reporter
from stockade.supervisor.service import Service
from stockade.supervisor.slots import SpawnerClient, Wanted
from stockade.supervisor.sweeper import sweep_for_ever
from stockade.supervisor.task_end import LEFT_BEHIND
from stockade.supervisor.task_types.built_in import built_in_types
from stockade.supervisor.task_types.door import close_types, make_types

log = structlog.get_logger(__name__)

# Both the spawner and its standby are gone: the service manager starts the worker anew, as root.
EXIT_NO_SPAWNER: Final = 75
FLUSH_S: Final = 5.0
# systemd's answer, over the spawner; without one it is taken for a stop, which leaves nothing.
JOB_S: Final = 15.0
# The jobs of systemd after which the service runs again; the others stop it.
RESTARTS: Final = frozenset({"restart", "try-restart"})
# The spawner's end: slots that wait, its standby, its groups.
SPAWNER_END_S: Final = 20.0
# Beyond a task's own grace: the spawner's kill, its bounded wait for the dead, and the journal.
STOP_MARGIN_S: Final = 20.0


class Daemon:
    """The supervisor's parts, and how they start and stop."""

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
        uids = range(config.worker.uid_min, config.worker.uid_max + 1)
        outages = Outages()
        links: dict[str, Link] = {}
        reporter = Reporter(links, journal, config, outages)
        output = OutputStore(equipment.places.output, config.limits.output_max)
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
            credentials=equipment.credentials,
            task_uids=uids if equipment.as_root else None,
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
            slots_set_aside=lambda: client.set_aside.count,
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
            equipment.spawner_socket,
            executor,
            software=importlib.metadata.version("stockade"),
            wanted=self._wanted,
        )
        executor.client = client
        control = Control(
            journal=journal,
            executor=executor,
            intake=intake,
            output=output,
            reporter=reporter,
            status=lambda: {
                **self._status(running, heartbeats, reporter, executor),
                **_spawners(client, executor),
            },
            drain=drain,
            reload=self._reloader.ask,
        )
        await reporter.resume()
        executor.recover(await journal.unfinished())
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(reporter.close)
            for link in running.values():
                stack.push_async_callback(link.close)
            connection = _background(stack, client.run())
            if await self._until(executor.connected.wait(), connection) is None:
                return EXIT_NO_SPAWNER
            for link in running.values():
                await link.start(
                    equipment.listeners[link.name], equipment.connections.get(link.name, ())
                )
            stack.push_async_callback(control.close)
            await control.start(equipment.control)
            for heartbeat in heartbeats.values():
                _background(stack, heartbeat.run())
            _background(stack, admission.watch(pressure_changed))
            _background(stack, sweep_for_ever(journal, output, config.worker))
            bound = {name: str(link.bound) for name, link in running.items() if link.bound}
            if equipment.draining:
                drain()
            _background(stack, self._service.serve(lambda: self._summary(executor, reporter)))
            log.info("ready", listen=bound, worker_id=config.worker.id)
            reloads = await self._serve(executor, connection)
            if reloads is None:
                return EXIT_NO_SPAWNER
            if reloads:
                self._service.reloading()
                return await self._reloader.hand_over(
                    executor, reporter, links=running, control=control, client=client
                )
            await self._stop(
                executor, reporter, running, client=client, connection=connection, drain=drain
            )
        log.info("stopped")
        return 0

    async def _stop(
        self,
        executor: Executor,
        reporter: Reporter,
        links: Mapping[str, TwoWayLink],
        *,
        client: SpawnerClient,
        connection: asyncio.Task[None],
        drain: Callable[[], None],
    ) -> None:
        """The end that was asked for: a drain, or, when we run again at once, no more than we."""
        self._service.stopping()
        restarted = await self._is_restarted(client)
        if restarted:
            log.info("tasks are left to the spawner: restart", tasks=len(executor.tasks))
            # Those of the loop would end with it.
            await executor.let_loop_tasks_end(self._config.worker.drain_timeout)
        else:
            drain()
            await self._let_tasks_end(executor, connection)
        await self._stop_serving(links, reporter)
        if not restarted:
            await self._end_spawner(client)

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

    async def _stop_serving(self, links: Mapping[str, TwoWayLink], reporter: Reporter) -> None:
        for link in links.values():
            await link.stop_listening()
        if not await reporter.flush(FLUSH_S):
            log.warning("reports are left for the next start", count=reporter.undelivered()[0])

    async def _end_spawner(self, client: SpawnerClient) -> None:
        client.finish()
        if not await client.ended(SPAWNER_END_S):
            log.warning("the spawner has not ended yet")

    async def _is_restarted(self, client: SpawnerClient) -> bool:
        """Whether the service manager starts us again at once, so that tasks need not end."""
        if not self._service.exists:
            return False
        try:
            async with asyncio.timeout(JOB_S):
                told = await client.service_job()
        except (SpawnerLostError, TimeoutError) as error:
            log.warning("cannot find out why the service ends", reason=str(error) or "no answer")
            return False
        if told.error:
            log.warning("cannot find out why the service ends", reason=told.error)
        return told.kind in RESTARTS

    def _summary(self, executor: Executor, reporter: Reporter) -> str:
        """The service's status text."""
        running = executor.load().running_tasks
        text = (
            f"{running} running, {executor.waiting} queued, {reporter.undelivered()[0]} undelivered"
        )
        if self.stop_requests:
            return f"stopping: {text}"
        if executor.draining:
            return f"draining: {text}"
        return f"{text}; nothing is started: {executor.pressure}" if executor.pressure else text

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
            "life": self._life,
            "reload_error": self._reloader.error,
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


def _spawners(client: SpawnerClient, executor: Executor) -> dict[str, Any]:
    """What is to be known of the spawners, for the status."""
    return {
        "elders": [
            {
                "generation": elder.generation,
                "pid": elder.pid,
                "tasks": len(elder.seqs & executor.tasks.keys()),
            }
            for elder in client.elders
        ],
        "slots_set_aside": client.set_aside.count,
        "set_aside": list(client.set_aside.slots),
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
