"""Runs tasks: a queue, places for max_concurrency of them, and the life of each to its end.

A task's start is journalled before the spawner hears of it, and its outcome before the spawner may
forget it. So whatever dies at whatever moment, what the journal and the spawner hold together says
what is still to be done; adoption.py compares them.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import os
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

import structlog

from stockade.platform.errors import StockadeError
from stockade.sandbox.limits import Limits
from stockade.sandbox.outcome import ErrorCode, Outcome, Status
from stockade.sandbox.protocol import Ended, Prepared, Started, Welcome
from stockade.supervisor.admission import Admission
from stockade.supervisor.adoption import reconcile
from stockade.supervisor.errors import JournalError, RejectedError, SpawnerLostError
from stockade.supervisor.heartbeat import Load
from stockade.supervisor.journal import Journal, Row
from stockade.supervisor.journal_rows import summarise
from stockade.supervisor.live_task import LiveTask, OutputPipe, Phase
from stockade.supervisor.output import Capture, OutputStore
from stockade.supervisor.planning import (
    Planner,
    TaskTypeFaultError,
    cancelled_before_start,
    lost,
    refused,
)
from stockade.supervisor.process_plan import pack_start
from stockade.supervisor.reporter import Reporter
from stockade.supervisor.slots import SpawnerClient
from stockade.supervisor.states import State
from stockade.supervisor.task_end import completed, run_in_loop
from stockade.supervisor.task_types.base import LoopPlan

log = structlog.get_logger(__name__)

T = TypeVar("T")

JOURNAL_RETRY_S: Final = 1.0
# How often a task is sent whose launchers are killed before it runs.
STARTS_MAX: Final = 5


class Executor:
    """The tasks that are neither finished nor refused. A SpawnerListener.

    Args:
        max_concurrency: how many run at once; the rest waits, first come, first served.
        excerpt_bytes: how much of a task's output goes into its report.
    """

    def __init__(
        self,
        *,
        journal: Journal,
        output: OutputStore,
        reporter: Reporter,
        planner: Planner,
        admission: Admission,
        max_concurrency: int,
        excerpt_bytes: int,
    ) -> None:
        self.journal = journal
        self._output = output
        self._reporter = reporter
        self._planner = planner
        self._admission = admission
        self._max_concurrency = max_concurrency
        self._excerpt_bytes = excerpt_bytes
        self.client: SpawnerClient | None = None
        self.tasks: dict[int, LiveTask] = {}
        self._queue: collections.deque[LiveTask] = collections.deque()
        self._active: set[LiveTask] = set()
        self._claims = 0
        self._jobs: set[asyncio.Task[None]] = set()
        self.connected = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        # Ended tasks by status and error code, for the metrics.
        self.ended: collections.Counter[tuple[str, str]] = collections.Counter()
        self._draining = False
        self._stopping = False
        # While loop tasks are kept from starting, those whose turn has come wait here.
        self._kept: list[LiveTask] | None = None

    # --- places ---------------------------------------------------------------------------------

    def claim(self) -> State:
        """The state to journal a new task in.

        RUNNING holds a place for it, so that acceptance and start are one commit. Every claim is
        given to `submit` or `release`.
        """
        if self._admission.counts:
            # What the task would be promised is not known here: it waits for its turn.
            return State.ACCEPTED
        if self._kept is None and not self._queue and self._may_start(None):
            self._claims += 1
            return State.RUNNING
        return State.ACCEPTED

    def release(self, claimed: State) -> None:
        """Give a claim back unused."""
        if claimed is State.RUNNING:
            self._claims -= 1
            self._admit()

    def submit(self, row: Row, claimed: State) -> LiveTask:
        """Take a journalled task on. It starts in a later turn of the loop, if at all."""
        task = self._add(row, Phase.QUEUED)
        if claimed is State.RUNNING:
            self._claims -= 1
        if row.state is State.RUNNING:
            self._activate(task)
        else:
            self._queue.append(task)
            self._admit()
        return task

    def load(self) -> Load:
        """What the heartbeat tells: full while nothing new should come."""
        running = len(self._active)
        full = self._draining or self.journal.fault is not None or bool(self.pressure)
        wanted = self._max_concurrency if full else running + self.waiting
        return Load(current_load=min(wanted, self._max_concurrency), running_tasks=running)

    @property
    def pressure(self) -> str:
        """Why the host's pressure lets nothing start; empty when it does."""
        return self._admission.pressure

    def pressure_changed(self) -> None:
        """Start what waited for the pressure's end, if that is what has changed."""
        self._admit()

    @property
    def waiting(self) -> int:
        """How many tasks wait for a place."""
        waiting = [*self._queue, *(self._kept or ())]
        return sum(1 for task in waiting if task.phase is Phase.QUEUED)

    def before(self, task: LiveTask) -> int:
        """How many tasks wait for a place before this one does."""
        queued = itertools.takewhile(lambda each: each is not task, self._queue)
        return sum(1 for each in queued if each.phase is Phase.QUEUED)

    # --- recovery -------------------------------------------------------------------------------

    def recover(self, rows: list[Row]) -> None:
        """Take on what an earlier life left unfinished; nothing starts before a spawner answers."""
        for row in rows:
            task = self._add(row, Phase.QUEUED)
            if row.state is State.ACCEPTED:
                self._queue.append(task)
                if row.cancelled:
                    self.cancel(task, "cancelled")
                continue
            self._active.add(task)
            task.phase = Phase.RECOVERED
            task.recovered = True
            task.cancel_reason = "cancelled" if row.cancelled else ""
            with contextlib.suppress(RejectedError):
                task.planned = self._planner.plan(row.dispatch)
            self._admission.promise(task.seq, self._limits_of(task))
            if task.planned is None or isinstance(task.planned.plan, LoopPlan):
                self.take_on(task)
                task.end(lost("the worker was restarted while the task ran in it"))

    def take_on(self, task: LiveTask) -> None:
        """Follow a recovered task to its end, which the spawner (or nobody) tells."""
        self._spawn(self._run(task))

    def requeue(self, task: LiveTask) -> None:
        """Put a recovered task, of which the spawner never heard, before all that wait."""
        task.phase = Phase.QUEUED
        task.row = dataclasses.replace(task.row, state=State.ACCEPTED)
        self._active.discard(task)
        self._admission.release(task.seq)
        self._queue.appendleft(task)

    def send(self, task: LiveTask) -> None:
        """Ask the spawner to start it; without a connection it is sent after the next one."""
        assert self.client is not None
        assert task.packed is not None
        try:
            self.client.start(task.packed)
        except SpawnerLostError:
            task.phase = Phase.UNSENT
            return
        except (OSError, StockadeError) as error:
            task.end(Outcome(Status.FAILED, ErrorCode.SPAWN_FAILED, reason=str(error)))
            return
        task.phase = Phase.SENT
        if task.cancel_reason:
            self.ask_for_end(task)

    # --- the spawner's side ---------------------------------------------------------------------

    async def spawner_connected(self, welcome: Welcome) -> None:
        assert self.client is not None
        await reconcile(self, self.client, welcome)
        log.info("spawner connected", pid=welcome.pid, generation=welcome.generation)
        self.connected.set()
        for task in list(self.tasks.values()):
            if task.phase is not Phase.UNSENT or task.ended.done():
                continue
            # One that is not packed yet sends itself; but nobody packs what was recovered.
            if task.packed is not None or (task.recovered and task.row.state is State.RUNNING):
                self._send_again(task)
        self._admit()

    def spawner_lost(self) -> None:
        self.connected.clear()

    def task_known(self, task: LiveTask, output_fd: int | None) -> None:
        """The spawner has it and will start it."""
        task.phase = Phase.SENT
        self._attach(task, output_fd)

    def task_prepared(self, prepared: Prepared, output_fd: int | None) -> None:
        task = self.tasks.get(prepared.seq)
        if task is not None and task.phase is not Phase.ENDED:
            if task.output is not None:
                # Sent again after a spawner's death: what was prepared first will not be used.
                task.output.close()
                task.output = None
            self._attach(task, output_fd)
        elif output_fd is not None:
            os.close(output_fd)

    def task_started(self, started: Started, output_fd: int | None) -> None:
        task = self.tasks.get(started.seq)
        if task is None or task.phase is Phase.ENDED:
            if output_fd is not None:
                os.close(output_fd)
            return
        first = task.phase is not Phase.RUNNING
        task.phase = Phase.RUNNING
        task.pid = started.pid
        task.packed = None
        self._attach(task, output_fd)
        if first:
            # A payload of megabytes is not kept in memory while its task runs.
            task.row = dataclasses.replace(
                task.row, started_at=started.started_at, dispatch=summarise(task.row.dispatch)
            )
            self._reporter.running(task.row)

    def task_ended(self, ended: Ended, output_fd: int | None) -> None:
        task = self.tasks.get(ended.seq)
        if task is None or task.phase is Phase.ENDED:
            if output_fd is not None:
                os.close(output_fd)
            if task is None and self.client is not None:
                self.client.acknowledge(ended.seq)
            return
        self._attach(task, output_fd)
        if task.phase is Phase.SENT and ended.outcome.started_at is not None:
            # The end of a short task can overtake its start; the scheduler hears of both.
            self._reporter.running(task.row)
        task.end(ended.outcome)

    def task_unstarted(self, seq: int) -> None:
        task = self.tasks.get(seq)
        if task is None or task.phase is Phase.ENDED or task.ended.done():
            return
        task.unstarted += 1
        if task.cancel_reason:
            task.end(cancelled_before_start())
        elif task.unstarted == STARTS_MAX or task.planned is None:
            reason = f"cannot start the task: its launcher was killed {task.unstarted} times"
            task.end(Outcome(Status.FAILED, ErrorCode.SPAWN_FAILED, reason=reason))
        else:
            self._detach(task)
            self._send_again(task)

    def _send_again(self, task: LiveTask) -> None:
        if task.packed is None:
            assert task.planned is not None
            plan, limits, profile = task.planned.plan, task.planned.limits, task.planned.profile
            assert not isinstance(plan, LoopPlan)
            task.packed = pack_start(task.seq, plan, limits, profile)
        self.send(task)

    # --- cancel and drain -----------------------------------------------------------------------

    def cancel(self, task: LiveTask, reason: str) -> None:
        """Have a task ended: at once when it did not start, else by the spawner."""
        if task.cancel_reason or task.phase is Phase.ENDED:
            return
        task.cancel_reason = reason
        match task.phase:
            case Phase.QUEUED:
                task.end(cancelled_before_start())
                self._spawn(self._finish(task, cancelled_before_start()))
            case Phase.UNSENT if task.work is None:
                task.end(cancelled_before_start())
            case _:
                self.ask_for_end(task)

    def ask_for_end(self, task: LiveTask) -> None:
        """Pass a cancel on; without a connection it is passed on after the next one."""
        if task.work is not None:
            task.work.cancel()
            return
        try:
            if self.client is not None:
                self.client.cancel(task.seq)
        except SpawnerLostError:
            log.info("the cancel waits for the spawner", seq=task.seq)

    def find(self, instance_id: str) -> list[LiveTask]:
        """The live tasks of this id: one for each scheduler that uses it."""
        return [task for task in self.tasks.values() if task.instance_id == instance_id]

    def drain(self) -> None:
        """Report full load from now on; what arrives all the same still runs."""
        self._draining = True

    @property
    def draining(self) -> bool:
        return self._draining

    async def idle(self) -> None:
        """Until no task is left, queued or running."""
        await self._idle.wait()

    async def stop(self, reason: str) -> None:
        """Start nothing more, terminate what runs, wait for its end. What is queued stays so."""
        self._stopping = True
        for task in list(self._active):
            self.cancel(task, reason)
        while self._jobs:
            await asyncio.wait(self._jobs)

    async def let_loop_tasks_end(self, deadline_s: float) -> None:
        """Start no more tasks that run in this process, and wait for the end of those that do.

        All else goes on. What still runs after the deadline is lost, and reported so.
        """
        self._kept = []
        running = [task for task in self._active if self._is_loop_task(task)]
        if not running:
            return
        log.info("waiting for the tasks that run in this process", count=len(running))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await asyncio.gather(*(task.settled.wait() for task in running))
        for task in running:
            task.end(lost("the worker was reloaded, and the task did not end in time"))
            if task.work is not None:
                task.work.cancel()
        # As long as the journal can be written; else the next life finds and reports them.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(JOURNAL_RETRY_S):
                await asyncio.gather(*(task.settled.wait() for task in running))

    def start_loop_tasks(self) -> None:
        """Go on after `let_loop_tasks_end`."""
        kept, self._kept = self._kept or [], None
        self._queue.extendleft(reversed(kept))
        self._admit()

    def _is_loop_task(self, task: LiveTask) -> bool:
        with contextlib.suppress(RejectedError):
            return isinstance(self._planner.plan(task.row.dispatch).plan, LoopPlan)
        return False

    async def persist(self, write: Callable[[], Awaitable[T]]) -> T:
        """The result of a journal's write, tried again after each JournalError."""
        while True:
            try:
                return await write()
            except JournalError as error:
                log.warning("the journal cannot be written; trying again", reason=str(error))
                await asyncio.sleep(JOURNAL_RETRY_S)

    # --- one task's life ------------------------------------------------------------------------

    def _add(self, row: Row, phase: Phase) -> LiveTask:
        task = LiveTask(row, phase, asyncio.get_running_loop().create_future())
        self.tasks[row.seq] = task
        self._idle.clear()
        return task

    def _may_start(self, limits: Limits | None) -> bool:
        return (
            self.connected.is_set()
            and not self._stopping
            and len(self._active) + self._claims < self._max_concurrency
            and self._admission.has_room(limits)
        )

    def _limits_of(self, task: LiveTask) -> Limits | None:
        """What the task may come to use; None when it uses nothing or will be refused."""
        if not self._admission.counts:
            return None
        try:
            planned = task.planned or self._planner.plan(task.row.dispatch)
        except RejectedError:
            return None
        return None if isinstance(planned.plan, LoopPlan) else planned.limits

    def _admit(self) -> None:
        """Start what may start, first come, first served: none overtakes one that needs more."""
        while self._queue:
            task = self._queue[0]
            if task.phase is not Phase.QUEUED or task.ended.done():
                self._queue.popleft()
                continue
            if self._kept is not None and self._is_loop_task(task):
                self._kept.append(self._queue.popleft())
                continue
            if not self._may_start(self._limits_of(task)):
                return
            self._queue.popleft()
            self._activate(task)

    def _activate(self, task: LiveTask) -> None:
        if task.phase is Phase.QUEUED:
            task.phase = Phase.UNSENT
        self._active.add(task)
        self._admission.promise(task.seq, self._limits_of(task))
        self._spawn(self._run(task))

    def _spawn(self, life: Coroutine[Any, Any, None]) -> None:
        job = asyncio.create_task(life)
        self._jobs.add(job)
        job.add_done_callback(self._job_done)

    def _job_done(self, job: asyncio.Task[None]) -> None:
        self._jobs.discard(job)
        if not job.cancelled() and (error := job.exception()) is not None:
            log.error("a task's end could not be recorded", exc_info=error)

    async def _run(self, task: LiveTask) -> None:
        try:
            outcome = await self._carry_out(task)
        except RejectedError as error:
            outcome = refused(error)
        except TaskTypeFaultError as error:
            outcome = Outcome(Status.FAILED, ErrorCode.SPAWN_FAILED, reason=str(error)[:1000])
        except Exception as error:
            log.exception("a task's start failed", seq=task.seq)
            outcome = Outcome(Status.FAILED, ErrorCode.SPAWN_FAILED, reason=f"fault: {error!r}")
        await self._finish(task, outcome)

    async def _carry_out(self, task: LiveTask) -> Outcome:
        if task.phase is Phase.RECOVERED or task.ended.done():
            return await task.ended
        planned = self._planner.plan(task.row.dispatch)
        task.planned = planned
        packed = None
        if not isinstance(planned.plan, LoopPlan):
            packed = pack_start(task.seq, planned.plan, planned.limits, planned.profile)
        if task.row.state is State.ACCEPTED:
            await self.persist(lambda: self.journal.start(task.seq))
            task.row = dataclasses.replace(task.row, state=State.RUNNING)
        if isinstance(planned.plan, LoopPlan):
            return await self._run_in_loop(task, planned.plan, planned.limits)
        task.packed = packed
        # Without a spawner it is sent when the next one has told what lives.
        if self.connected.is_set() and not task.ended.done():
            self.send(task)
        return await task.ended

    async def _run_in_loop(self, task: LiveTask, plan: LoopPlan, limits: Limits) -> Outcome:
        if task.ended.done():
            return task.ended.result()
        capture = self._open_capture(task)
        task.phase = Phase.RUNNING
        task.row = dataclasses.replace(task.row, started_at=time.time())
        self._reporter.running(task.row)
        return await run_in_loop(task, plan, capture, limits)

    def _attach(self, task: LiveTask, output_fd: int | None) -> None:
        if output_fd is None:
            return
        if task.output is not None:
            # The same pipe, told again by another spawner.
            os.close(output_fd)
            return
        task.output = OutputPipe(output_fd, self._open_capture(task))

    def _detach(self, task: LiveTask) -> None:
        """Let go of the pipe of a slot in which nothing ran."""
        if task.output is not None:
            task.output.close()
            task.output = None

    def _open_capture(self, task: LiveTask) -> Capture:
        if task.capture is None:
            output_max = None if task.planned is None else task.planned.limits.output_max
            open_capture = self._output.reopen if task.recovered else self._output.open
            task.capture = open_capture(task.seq, output_max)
        return task.capture

    async def _finish(self, task: LiveTask, outcome: Outcome) -> None:
        task.phase = Phase.ENDED
        task.packed = None
        self._active.discard(task)
        self._admission.release(task.seq)
        self._admit()
        if task.output is not None:
            task.output.drain()
        elif task.recovered:
            # Nobody has its pipe any more; what an earlier life stored is still worth telling.
            self._open_capture(task)
        outcome = completed(task, outcome)
        excerpt, stored_bytes = "", None
        if task.capture is not None:
            task.capture.finish()
            excerpt = task.capture.excerpt(self._excerpt_bytes)
            stored_bytes = task.capture.stored_bytes
        await self.persist(lambda: self.journal.finish(task.seq, outcome, excerpt, stored_bytes))
        del self.tasks[task.seq]
        self.ended[outcome.status.value, outcome.error_code.value] += 1
        self._reporter.finished(
            dataclasses.replace(
                task.row,
                state=State.FINISHED,
                outcome=outcome,
                excerpt=excerpt,
                finished_at=outcome.finished_at,
            )
        )
        if self.client is not None:
            self.client.acknowledge(task.seq)
        task.settled.set()
        if not self.tasks:
            self._idle.set()
