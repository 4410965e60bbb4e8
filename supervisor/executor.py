"""Runs tasks: the life of each, from the journal's row to its end.

A task's start is journalled before the spawner hears of it, and its outcome before the spawner may
forget it. So whatever dies at whatever moment, what the journal and the spawner hold together says
what is still to be done; adoption.py compares them.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

import structlog

from stockade.sandbox.limits import Limits
from stockade.sandbox.outcome import ErrorCode, Outcome, Status
from stockade.supervisor.admission import Admission
from stockade.supervisor.adoption import CUT, reconcile
from stockade.supervisor.errors import JournalError, RejectedError
from stockade.supervisor.heartbeat import Load
from stockade.supervisor.journal import Journal, Row
from stockade.supervisor.live_task import LiveTask, Phase
from stockade.supervisor.output import OutputStore
from stockade.supervisor.planning import (
    Planner,
    TaskTypeFaultError,
    cancelled_before_start,
    lost,
    refused,
)
from stockade.supervisor.process_plan import pack_start
from stockade.supervisor.reporter import Reporter
from stockade.supervisor.spawner_side import SpawnerSide
from stockade.supervisor.states import State
from stockade.supervisor.task_end import completed, run_in_loop
from stockade.supervisor.task_types.base import LoopPlan
from stockade.supervisor.turns import Turns

log = structlog.get_logger(__name__)

T = TypeVar("T")

JOURNAL_RETRY_S: Final = 1.0


class Executor:
    """The tasks that are neither finished nor refused.

    Attributes:
        tasks: they, by seq.
        turns: which of them wait, and which run.
        spawner: the way to whoever runs those that need a slot.
        ended: how many have ended so far, by status and error code.

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
        self.turns = Turns(
            planner,
            admission,
            max_concurrency,
            may_begin=lambda: self.spawner.connected.is_set() and not self._stopping,
            begin=self._begin,
        )
        self._max_concurrency = max_concurrency
        self._excerpt_bytes = excerpt_bytes
        self.tasks: dict[int, LiveTask] = {}
        self.spawner = SpawnerSide(
            self.tasks,
            reporter,
            output,
            compare=lambda welcome: reconcile(self, welcome),
            go_on=self.turns.go_on,
        )
        self._jobs: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.ended: collections.Counter[tuple[str, str]] = collections.Counter()
        self._draining = False
        self._stopping = False

    # --- places ---------------------------------------------------------------------------------

    def claim(self) -> State:
        """The state to journal a new task in.

        RUNNING holds a place for it, so that acceptance and start are one commit. Every claim is
        given to `submit` or `release`.
        """
        return State.RUNNING if self.turns.claim() else State.ACCEPTED

    def release(self, claimed: State) -> None:
        """Give a claim back unused."""
        if claimed is State.RUNNING:
            self.turns.give_back()
            self.turns.go_on()

    def submit(self, row: Row, claimed: State) -> LiveTask:
        """Take a journalled task on. It starts in a later turn of the loop, if at all."""
        task = self._add(row, Phase.QUEUED)
        if claimed is State.RUNNING:
            self.turns.give_back()
        if row.state is State.RUNNING:
            self.turns.hold(task)
            self._begin(task)
        else:
            self.turns.wait(task)
            self.turns.go_on()
        return task

    def load(self) -> Load:
        """What the heartbeat tells: full while nothing new should come."""
        running = len(self.turns.running)
        full = self._draining or self.journal.fault is not None or bool(self.turns.pressure)
        wanted = self._max_concurrency if full else running + self.turns.waiting
        return Load(current_load=min(wanted, self._max_concurrency), running_tasks=running)

    # --- recovery -------------------------------------------------------------------------------

    def recover(self, rows: list[Row]) -> None:
        """Take on what an earlier life left unfinished; nothing starts before a spawner answers."""
        for row in rows:
            task = self._add(row, Phase.QUEUED)
            # What lost its script to a damaged journal is asked about, and never run.
            if row.state is State.ACCEPTED and not row.is_cut:
                self.turns.wait(task)
                if row.cancelled:
                    self.cancel(task, "cancelled")
                continue
            task.phase = Phase.RECOVERED
            task.recovered = True
            task.cancel_reason = "cancelled" if row.cancelled else ""
            # None where its type, or what it asks for, is not to be had any more. It may live all
            # the same: what this life would run is not what the one before has started.
            task.planned = self._planner.plan_if_possible(row.dispatch)
            self.turns.hold(task)
            if task.planned is not None and isinstance(task.planned.plan, LoopPlan):
                self.take_on(task)
                ran = "the worker was restarted while the task ran in it"
                task.end(lost(ran if row.state is State.RUNNING else CUT))

    def take_on(self, task: LiveTask) -> None:
        """Follow a recovered task to its end, which the spawner (or nobody) tells."""
        self._spawn(self._run(task))

    def requeue(self, task: LiveTask) -> None:
        """Put a recovered task, of which the spawner never heard, before all that wait."""
        task.phase = Phase.QUEUED
        task.row = dataclasses.replace(task.row, state=State.ACCEPTED)
        self.turns.wait_first(task)

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
        else:
            self.spawner.cancel(task.seq)

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
        for task in list(self.turns.running):
            self.cancel(task, reason)
        while self._jobs:
            await asyncio.wait(self._jobs)

    async def let_loop_tasks_end(self, deadline_s: float) -> None:
        """Start no more tasks that run in this process, and wait for the end of those that do.

        All else goes on. What still runs after the deadline is lost, and reported so.
        """
        running = self.turns.keep_loop_tasks()
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
        self.turns.let_loop_tasks_go()

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

    def _begin(self, task: LiveTask) -> None:
        if task.phase is Phase.QUEUED:
            task.phase = Phase.UNSENT
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
            log.exception("a task type is at fault", task_type=task.row.dispatch.task_type)
            outcome = Outcome(Status.FAILED, ErrorCode.SPAWN_FAILED, reason=str(error)[:1000])
        except Exception as error:
            log.exception("a task's start failed", seq=task.seq)
            outcome = Outcome(Status.FAILED, ErrorCode.SPAWN_FAILED, reason=f"fault: {error!r}")
        await self._finish(task, outcome)

    async def _carry_out(self, task: LiveTask) -> Outcome:
        if task.phase is not Phase.UNSENT or task.ended.done():
            # Recovered, and by now perhaps found to run: nothing of it is to be planned or sent,
            # the less since what it was to do may be known in short only.
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
        if self.spawner.connected.is_set() and not task.ended.done():
            self.spawner.send(task)
        return await task.ended

    async def _run_in_loop(self, task: LiveTask, plan: LoopPlan, limits: Limits) -> Outcome:
        if task.ended.done():
            return task.ended.result()
        capture = task.open_capture(self._output)
        task.phase = Phase.RUNNING
        task.row = dataclasses.replace(task.row, started_at=time.time())
        self._reporter.running(task.row)
        return await run_in_loop(task, plan, capture, limits)

    async def _finish(self, task: LiveTask, outcome: Outcome) -> None:
        task.phase = Phase.ENDED
        task.packed = None
        self.turns.leave(task)
        self.turns.go_on()
        if task.output is not None:
            task.output.drain()
        elif task.recovered:
            # Nobody has its pipe any more; what an earlier life stored is still worth telling.
            task.open_capture(self._output)
        outcome = completed(task, outcome)
        excerpt, stored_bytes = "", 0
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
        self.spawner.acknowledge(task.seq)
        task.settled.set()
        if not self.tasks:
            self._idle.set()
