"""After each connection to a spawner: what it knows compared with what the journal says.

    the executor holds it as    the spawner knows it            it does not
    recovered from the journal  adopted, or its end taken over  same token: queued again; else lost
    the same, script damaged    the same                        lost
    the same, no plan for it    the same                        lost
    sent                        the same                        same token: sent again; else lost
    running                     the same                        lost
    anything else               is not asked about
    nothing                     cancelled and acknowledged

The token names the life of the spawners' records. A record is opened before a task is started and
kept until the supervisor acknowledges, so under the same token no record means never started. The
token is journalled only after everything of the old one is settled in the journal, so a crash in
between repeats the comparison with the same result.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Final

import structlog

from stockade.sandbox.protocol import Ended, ListedTask, Started, Welcome
from stockade.supervisor.live_task import LiveTask, Phase
from stockade.supervisor.planning import cancelled_before_start, lost
from stockade.supervisor.slots import SpawnerClient
from stockade.supervisor.states import State

if TYPE_CHECKING:
    from stockade.supervisor.executor import Executor

log = structlog.get_logger(__name__)

TOKEN: Final = "spawner_token"
LOST: Final = "the worker lost the task: the host was restarted, or all of the worker died"
CUT: Final = "the journal was damaged, and what the task was to run is lost: it never ran"
FOREIGN_PAUSE_S: Final = 0.1

_ASKED_ABOUT: Final = (Phase.RECOVERED, Phase.SENT, Phase.RUNNING)


async def reconcile(executor: Executor, welcome: Welcome) -> None:
    """Settle every task that the executor holds, and what only the spawner knows.

    Raises:
        SpawnerLostError: the connection was lost meanwhile; the next one starts over.
    """
    client = executor.spawner.client
    assert client is not None, "whoever says welcome is connected"
    journal, persist = executor.journal, executor.persist
    stored = await persist(lambda: journal.get_meta(TOKEN))
    same_life = stored == welcome.token
    listed = {task.seq: (task, output_fd) for task, output_fd in await client.list_tasks()}
    given_up: list[LiveTask] = []
    never_started: list[LiveTask] = []
    for task in list(executor.tasks.values()):
        known, output_fd = listed.pop(task.seq, (None, None))
        if task.phase not in _ASKED_ABOUT or task.work is not None or task.ended.done():
            # A queued task can be known by a Start that was on its way when the last supervisor
            # died; its own Start will be answered with what became of it.
            if output_fd is not None:
                os.close(output_fd)
        elif known is not None:
            _take_over(executor, task, known, output_fd)
        elif not same_life or task.planned is None:
            given_up.append(task)
        elif task.phase is Phase.SENT:
            task.phase = Phase.UNSENT
        elif task.phase is Phase.RECOVERED:
            never_started.append(task)
        else:
            given_up.append(task)
    # Newest first, since each goes before all that wait.
    for task in sorted(never_started, key=lambda task: task.seq, reverse=True):
        await _put_back(executor, task)
    for task in given_up:
        _give_up(executor, task)
    await _clear_foreign(client, listed)
    for task in given_up:
        await task.settled.wait()
    if not same_life:
        await persist(lambda: journal.set_meta(TOKEN, welcome.token))


def _take_over(
    executor: Executor, task: LiveTask, known: ListedTask, output_fd: int | None
) -> None:
    recovered = task.phase is Phase.RECOVERED
    if known.outcome is not None:
        executor.spawner.task_ended(Ended(known.seq, known.outcome), output_fd)
    else:
        if known.started_at:
            executor.spawner.task_started(
                Started(known.seq, known.pid, known.slot, known.started_at), output_fd
            )
        else:
            executor.spawner.task_known(task, output_fd)
        if task.cancel_reason:
            executor.ask_for_end(task)
    if recovered:
        log.info("task adopted", seq=task.seq, lives=known.outcome is None)
        executor.take_on(task)


async def _put_back(executor: Executor, task: LiveTask) -> None:
    if task.cancel_reason or task.row.is_cut:
        task.end(cancelled_before_start() if task.cancel_reason else lost(CUT))
        executor.take_on(task)
        return
    await executor.persist(lambda: executor.journal.requeue(task.seq))
    executor.requeue(task)


def _give_up(executor: Executor, task: LiveTask) -> None:
    recovered = task.phase is Phase.RECOVERED
    log.warning("task lost", seq=task.seq)
    # Only what was journalled running may have run.
    never_ran = task.row.is_cut and task.row.state is State.ACCEPTED
    task.end(lost(CUT if never_ran else LOST))
    if recovered:
        executor.take_on(task)


async def _clear_foreign(
    client: SpawnerClient, foreign: dict[int, tuple[ListedTask, int | None]]
) -> None:
    """Rid the spawner of tasks that no journal row stands for, before their seqs are used again.

    They are what an acknowledgement lost on its way leaves, or a journal that was set aside.
    """
    while foreign:
        for seq, (task, output_fd) in foreign.items():
            if output_fd is not None:
                os.close(output_fd)
            if task.outcome is None:
                log.warning("ending a task that the journal does not know", seq=seq)
                client.cancel(seq)
            else:
                client.acknowledge(seq)
        alive = {seq for seq, (task, _) in foreign.items() if task.outcome is None}
        if not alive:
            return
        await asyncio.sleep(FOREIGN_PAUSE_S)
        foreign = {}
        for task, output_fd in await client.list_tasks():
            if task.seq in alive:
                foreign[task.seq] = (task, output_fd)
            elif output_fd is not None:
                os.close(output_fd)
