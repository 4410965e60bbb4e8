"""How a task's outcome comes about on the supervisor's side."""

from __future__ import annotations

import asyncio
import dataclasses
import time

from stockade.sandbox.outcome import ErrorCode, Outcome, Status
from stockade.supervisor.limits import format_seconds
from stockade.supervisor.live_task import LiveTask
from stockade.supervisor.output import Capture
from stockade.supervisor.task_types.base import LoopPlan


async def run_in_loop(
    task: LiveTask, plan: LoopPlan, capture: Capture, runtime_max_s: float | None
) -> Outcome:
    """Run a task that needs no slot, to its end, its deadline or its cancel."""
    started = time.monotonic()
    task.work = asyncio.ensure_future(plan.run(capture.write))
    try:
        async with asyncio.timeout(runtime_max_s) as deadline:
            outcome = await task.work
    except TimeoutError:
        if not deadline.expired():
            raise
        limit = format_seconds(runtime_max_s)
        outcome = Outcome(
            Status.TIMEOUT, ErrorCode.TIMEOUT, reason=f"timeout: ran longer than {limit}"
        )
    except asyncio.CancelledError:
        if not task.cancel_reason:
            raise
        outcome = Outcome(Status.CANCELLED, ErrorCode.CANCELLED, reason=task.cancel_reason)
    return dataclasses.replace(
        outcome,
        wall_s=time.monotonic() - started,
        started_at=task.row.started_at,
        finished_at=time.time(),
    )


def completed(task: LiveTask, outcome: Outcome) -> Outcome:
    """The outcome with what only the supervisor knows."""
    reason = outcome.reason
    if outcome.status is Status.CANCELLED and task.cancel_reason:
        # The spawner knows that somebody asked, and we know who.
        reason = reason.replace("cancelled", task.cancel_reason, 1)
    capture, planned = task.capture, task.planned
    notes = () if planned is None else planned.notes
    if capture is not None and capture.fault:
        notes += (f"output was lost: {capture.fault}",)
    return dataclasses.replace(
        outcome,
        reason="; ".join(text for text in (reason, *notes) if text),
        output_bytes=0 if capture is None else capture.total,
        output_truncated=outcome.output_truncated or (capture is not None and capture.truncated),
        profile=outcome.profile or (planned.profile if planned else None),
        finished_at=outcome.finished_at or time.time(),
    )
