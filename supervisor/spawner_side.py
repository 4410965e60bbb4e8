"""The executor's way to the spawner: what is asked of it, and what it tells of each task."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import structlog

from stockade.platform.errors import StockadeError
from stockade.sandbox.outcome import ErrorCode, Outcome, Status
from stockade.sandbox.protocol import Ended, Prepared, Started, Welcome
from stockade.supervisor.errors import SpawnerLostError
from stockade.supervisor.journal_rows import summarise
from stockade.supervisor.live_task import LiveTask, Phase
from stockade.supervisor.output import OutputStore
from stockade.supervisor.planning import cancelled_before_start
from stockade.supervisor.process_plan import pack_start
from stockade.supervisor.reporter import Reporter
from stockade.supervisor.slots import SpawnerClient
from stockade.supervisor.states import State
from stockade.supervisor.task_types.base import LoopPlan

log = structlog.get_logger(__name__)

# How often a task is sent whose launchers are killed before it runs.
STARTS_MAX: Final = 5


class SpawnerSide:
    """Sends tasks, and hears of them: a SpawnerListener.

    Attributes:
        client: the connections; set before the first of them.
        connected: a spawner answers, and what it knows was compared with what the journal says.

    Args:
        tasks: the executor's, by seq.
        compare: does that comparison.
        go_on: called after it.
    """

    def __init__(
        self,
        tasks: Mapping[int, LiveTask],
        reporter: Reporter,
        output: OutputStore,
        *,
        compare: Callable[[Welcome], Awaitable[None]],
        go_on: Callable[[], None],
    ) -> None:
        self._tasks = tasks
        self._reporter = reporter
        self._output = output
        self._compare = compare
        self._go_on = go_on
        self.client: SpawnerClient | None = None
        self.connected = asyncio.Event()

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
            self.cancel(task.seq)

    def _send_again(self, task: LiveTask) -> None:
        if task.packed is None:
            assert task.planned is not None
            plan, limits, profile = task.planned.plan, task.planned.limits, task.planned.profile
            assert not isinstance(plan, LoopPlan)
            task.packed = pack_start(task.seq, plan, limits, profile)
        self.send(task)

    def cancel(self, seq: int) -> None:
        """Ask for a task's end; without a connection it is asked for after the next one."""
        try:
            if self.client is not None:
                self.client.cancel(seq)
        except SpawnerLostError:
            log.info("the cancel waits for the spawner", seq=seq)

    def acknowledge(self, seq: int) -> None:
        """Say that a task's outcome is safe."""
        if self.client is not None:
            self.client.acknowledge(seq)

    # What it tells (spawner_connection.SpawnerListener).

    async def spawner_connected(self, welcome: Welcome) -> None:
        await self._compare(welcome)
        log.info("spawner connected", pid=welcome.pid, generation=welcome.generation)
        self.connected.set()
        for task in list(self._tasks.values()):
            if task.phase is not Phase.UNSENT or task.ended.done():
                continue
            # One that is not packed yet sends itself; but nobody packs what was recovered.
            if task.packed is not None or (task.recovered and task.row.state is State.RUNNING):
                self._send_again(task)
        self._go_on()

    def spawner_lost(self) -> None:
        self.connected.clear()

    def task_known(self, task: LiveTask, output_fd: int | None) -> None:
        """The spawner has it and will start it."""
        task.phase = Phase.SENT
        task.attach(output_fd, self._output)

    def task_prepared(self, prepared: Prepared, output_fd: int | None) -> None:
        task = self._tasks.get(prepared.seq)
        if task is not None and task.phase is not Phase.ENDED:
            # Sent again after a spawner's death: what was prepared first will not be used.
            task.detach()
            task.attach(output_fd, self._output)
        elif output_fd is not None:
            os.close(output_fd)

    def task_started(self, started: Started, output_fd: int | None) -> None:
        task = self._tasks.get(started.seq)
        if task is None or task.phase is Phase.ENDED:
            if output_fd is not None:
                os.close(output_fd)
            return
        first = task.phase is not Phase.RUNNING
        task.phase = Phase.RUNNING
        task.pid = started.pid
        task.packed = None
        task.attach(output_fd, self._output)
        if first:
            # A payload of megabytes is not kept in memory while its task runs.
            task.row = dataclasses.replace(
                task.row, started_at=started.started_at, dispatch=summarise(task.row.dispatch)
            )
            self._reporter.running(task.row)

    def task_ended(self, ended: Ended, output_fd: int | None) -> None:
        task = self._tasks.get(ended.seq)
        if task is None or task.phase is Phase.ENDED:
            if output_fd is not None:
                os.close(output_fd)
            if task is None:
                self.acknowledge(ended.seq)
            return
        task.attach(output_fd, self._output)
        if task.phase is Phase.SENT and ended.outcome.started_at is not None:
            # The end of a short task can overtake its start; the scheduler hears of both.
            self._reporter.running(task.row)
        task.end(ended.outcome)

    def task_unstarted(self, seq: int) -> None:
        task = self._tasks.get(seq)
        if task is None or task.phase is Phase.ENDED or task.ended.done():
            return
        task.unstarted += 1
        if task.cancel_reason:
            task.end(cancelled_before_start())
        elif task.unstarted == STARTS_MAX or task.planned is None:
            reason = f"cannot start the task: its launcher was killed {task.unstarted} times"
            task.end(Outcome(Status.FAILED, ErrorCode.SPAWN_FAILED, reason=reason))
        else:
            task.detach()
            self._send_again(task)
