"""Where dispatches and cancels come in: check, journal, answer, hand on.

The answer to a dispatch promises that it is neither lost nor run twice, so it comes after the
commit. Nothing is refused for being busy: a scheduler may never send it again.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Final

import structlog

from stockade.supervisor.dispatch import Dispatch
from stockade.supervisor.errors import JournalError, RejectedError, Rejection
from stockade.supervisor.executor import Executor
from stockade.supervisor.journal import Journal
from stockade.supervisor.links.link import checked_instance_id
from stockade.supervisor.outages import LineLimit
from stockade.supervisor.quantities import MAX_SECONDS
from stockade.supervisor.reporter import Reporter
from stockade.supervisor.states import UNFINISHED
from stockade.supervisor.wire.messages import ExecuteRequest

log = structlog.get_logger(__name__)

CANCELLED: Final = "cancelled"
OTHER_SCHEDULER_LINE_S: Final = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class Schedulers:
    """Who gets the reports of one link's dispatches.

    Attributes:
        configured: gets those of a dispatch that names none, or one that is not allowed.
        allowed: those that a dispatch may name.
    """

    configured: str
    allowed: frozenset[str] = frozenset()


class Intake:
    """Takes what the links bring.

    Args:
        schedulers: those of each link, by its name.
    """

    def __init__(
        self,
        *,
        journal: Journal,
        executor: Executor,
        reporter: Reporter,
        schedulers: Mapping[str, Schedulers],
    ) -> None:
        self._journal = journal
        self._executor = executor
        self._reporter = reporter
        self._schedulers = schedulers
        self._other_scheduler_lines = LineLimit(OTHER_SCHEDULER_LINE_S)
        # Tasks that were cancelled between their commit and their arrival at the executor.
        self._cancelled_early: set[int] = set()
        self._jobs: set[asyncio.Task[None]] = set()

    async def execute(self, request: ExecuteRequest, link: str) -> None:
        """Return once the dispatch is safe in the journal, or known to be there already.

        Raises:
            RejectedError: INVALID, or UNAVAILABLE when it cannot be journalled.
        """
        scheduler = self._choose_scheduler(self._schedulers[link], request.scheduler_url)
        dispatch = normalise(request, link, scheduler)
        # Not cut short when the caller hangs up: what is committed must also be taken on.
        job = asyncio.create_task(self._take(dispatch))
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        await asyncio.shield(job)

    async def _take(self, dispatch: Dispatch) -> None:
        claimed = self._executor.claim()
        try:
            accepted = await self._journal.accept(dispatch, initial=claimed)
        except JournalError as error:
            self._executor.release(claimed)
            raise RejectedError(Rejection.UNAVAILABLE, str(error)) from error
        row = accepted.row
        if not accepted.is_new:
            self._executor.release(claimed)
            log.info("duplicate dispatch", seq=row.seq, state=row.state.value)
            return
        self._reporter.accepted(row)
        task = self._executor.submit(row, claimed)
        if accepted.cancelled_before or row.seq in self._cancelled_early:
            self._cancelled_early.discard(row.seq)
            self._executor.cancel(task, CANCELLED)

    async def cancel(self, instance_id: str) -> bool:
        """Whether a task of this id was stopped; one that is unknown is remembered.

        Raises:
            RejectedError: INVALID, or UNAVAILABLE when the cancel cannot be journalled.
        """
        checked_instance_id(instance_id)
        # At once, whatever the disk is doing; the journal makes it last.
        tasks = self._executor.find(instance_id)
        for task in tasks:
            self._executor.cancel(task, CANCELLED)
        try:
            rows = await self._journal.cancel(instance_id)
        except JournalError as error:
            if tasks:
                return True
            raise RejectedError(Rejection.UNAVAILABLE, str(error)) from error
        known = {task.seq for task in tasks}
        for row in rows:
            if row.state in UNFINISHED and row.seq not in known:
                if row.seq in self._executor.tasks:
                    self._executor.cancel(self._executor.tasks[row.seq], CANCELLED)
                else:
                    self._cancelled_early.add(row.seq)
        return bool(tasks) or any(row.state in UNFINISHED for row in rows)

    def _choose_scheduler(self, schedulers: Schedulers, asked: str | None) -> str:
        url = (asked or "").strip().rstrip("/")
        if not url or url in schedulers.allowed or url == schedulers.configured:
            return url or schedulers.configured
        # Once in a while: a scheduler that names itself otherwise does so in every dispatch.
        others = self._other_scheduler_lines.allow()
        if others is not None:
            log.warning(
                "reporting to the configured scheduler instead", asked=url[:200], others=others
            )
        return schedulers.configured


def normalise(request: ExecuteRequest, link: str, scheduler: str) -> Dispatch:
    """The dispatch in a request, checked for what no worker can take.

    Raises:
        RejectedError: INVALID.
    """
    instance_id = checked_instance_id(request.schedule_instance_id)
    payload = request.payload or ""
    if "\0" in payload:
        raise RejectedError(
            Rejection.INVALID, "cannot take the dispatch: payload holds a NUL character"
        )
    # JSON's numbers have no end, and a float has.
    timeout_s = float(max(0, min(request.timeout_seconds or 0, MAX_SECONDS)))
    return Dispatch(
        instance_id=instance_id,
        scheduler=scheduler,
        link=link,
        task_id=request.task_id or 0,
        task_type=(request.task_type or "").strip().lower(),
        payload=payload,
        image=request.image or "",
        timeout_s=timeout_s or None,
        retry_count=request.retry_count or 0,
        shard_no=request.shard_no or 0,
        shard_total=request.shard_total or 0,
        idempotency_key=request.idempotency_key or "",
        profile=request.profile,
        limits=request.limits or {},
        http=request.http,
        files=request.files or {},
    )
