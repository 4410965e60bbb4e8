"""How the supervisor ends when it was asked to: tasks are drained, or left to the spawner."""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from stockade.supervisor.errors import SpawnerLostError
from stockade.supervisor.parts import Parts
from stockade.supervisor.service import Service
from stockade.supervisor.slots import SpawnerClient

log = structlog.get_logger(__name__)

FLUSH_S: Final = 5.0
# systemd's answer, over the spawner; without one it is taken for a stop, which leaves nothing.
JOB_S: Final = 15.0
# The jobs of systemd after which the service runs again; the others stop it.
RESTARTS: Final = frozenset({"restart", "try-restart"})
# The spawner's end: slots that wait, its standby, its groups.
SPAWNER_END_S: Final = 20.0
# Beyond a task's own grace: the spawner's kill, its bounded wait for the dead, and the journal.
STOP_MARGIN_S: Final = 20.0


async def stop(
    parts: Parts, service: Service, hurry: asyncio.Event, connection: asyncio.Task[None]
) -> None:
    """A drain, or, when the service runs again at once, no end but our own.

    Args:
        parts: what runs.
        service: is told of the end, and asked for its reason.
        hurry: set when somebody asks again, and so for the end of the drain.
        connection: ends with the last spawner.
    """
    service.stopping()
    restarted = service.exists and await _is_restarted(parts.client)
    executor = parts.executor
    if restarted:
        log.info("tasks are left to the spawner: restart", tasks=len(executor.tasks))
        # Those of the loop would end with it.
        await executor.let_loop_tasks_end(parts.config.worker.drain_timeout)
    else:
        parts.drain()
        await _let_tasks_end(parts, hurry, connection)
    for link in parts.links.values():
        await link.stop_listening()
    if not await parts.reporter.flush(FLUSH_S):
        left, _ = parts.reporter.undelivered()
        log.warning("reports are left for the next start", count=left)
    if not restarted:
        parts.client.finish()
        if not await parts.client.ended(SPAWNER_END_S):
            log.warning("the spawner has not ended yet")


async def _is_restarted(client: SpawnerClient) -> bool:
    """Whether the service manager starts us again at once, so that tasks need not end."""
    try:
        async with asyncio.timeout(JOB_S):
            told = await client.service_job()
    except (SpawnerLostError, TimeoutError) as error:
        log.warning("cannot find out why the service ends", reason=str(error) or "no answer")
        return False
    if told.error:
        log.warning("cannot find out why the service ends", reason=told.error)
    return told.kind in RESTARTS


async def _let_tasks_end(
    parts: Parts, hurry: asyncio.Event, connection: asyncio.Task[None]
) -> None:
    """The drain: wait for what runs and waits, then terminate what still runs."""
    executor, drain_s = parts.executor, parts.config.worker.drain_timeout
    log.info("draining", tasks=len(executor.tasks), drain_timeout_s=drain_s)
    waits = {asyncio.ensure_future(executor.idle()), asyncio.ensure_future(hurry.wait())}
    await asyncio.wait({*waits, connection}, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    if not executor.tasks:
        return
    grace_s = parts.config.limits_max.timeout_stop or 0.0
    log.warning("terminating what still runs", tasks=len(executor.tasks))
    try:
        async with asyncio.timeout(grace_s + STOP_MARGIN_S):
            await executor.stop("cancelled: the worker was stopped")
    except TimeoutError:
        log.error("tasks are left to the spawner", tasks=len(executor.tasks))
