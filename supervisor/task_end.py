"""How a task's outcome comes about on the supervisor's side."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from typing import Final

import structlog

from stockade.sandbox.limits import Limits
from stockade.sandbox.outcome import ErrorCode, Outcome, Status
from stockade.supervisor.limits import format_seconds
from stockade.supervisor.live_task import LiveTask
from stockade.supervisor.output import Capture
from stockade.supervisor.planning import TaskTypeFaultError
from stockade.supervisor.task_types.base import LoopPlan

log = structlog.get_logger(__name__)

LEFT_BEHIND: Final = "left behind"
"""The name of a coroutine's task that does not stop, and so would keep its loop from ending."""


async def run_in_loop(task: LiveTask, plan: LoopPlan, capture: Capture, limits: Limits) -> Outcome:
    """Run a task that needs no slot, to its end, its deadline or its cancel.

    A coroutine that does not stop when it is cancelled is left behind after ``timeout_stop``: the
    task's outcome and its place do not wait for it.
    """
    started = time.monotonic()
    output = _Output(capture)
    # What a cancel of the task cancels.
    task.work = asyncio.ensure_future(_supervised(task, plan, output, limits))
    try:
        outcome = await task.work
    except asyncio.CancelledError:
        if not task.cancel_reason:
            raise
        # Before its first step, so nothing of it ran.
        outcome = Outcome(Status.CANCELLED, ErrorCode.CANCELLED, reason=task.cancel_reason)
    finally:
        output.closed = True
    return dataclasses.replace(
        outcome,
        wall_s=time.monotonic() - started,
        started_at=task.row.started_at,
        finished_at=time.time(),
    )


class _Output:
    """What a coroutine prints into, until its task is over."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self.closed = False

    def write(self, data: bytes) -> None:
        if self.closed:
            raise RuntimeError("cannot write output: the task is over")
        if not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(f"cannot write output: {type(data).__name__} is not bytes")
        self._capture.write(bytes(data))


async def _supervised(task: LiveTask, plan: LoopPlan, output: _Output, limits: Limits) -> Outcome:
    work = asyncio.ensure_future(_contained(plan, output.write))
    try:
        done, _ = await asyncio.wait({work}, timeout=limits.runtime_max)
        limit = format_seconds(limits.runtime_max)
        status, code, reason = (
            Status.TIMEOUT, ErrorCode.TIMEOUT, f"timeout: ran longer than {limit}",
        )  # fmt: skip
    except asyncio.CancelledError:
        # Cancelled by whoever asked for its end, or knows it already.
        told = task.ended.result() if task.ended.done() else None
        if told is None and not task.cancel_reason:
            work.cancel()
            raise
        done = {work} if work.done() else set()
        status, code, reason = Status.CANCELLED, ErrorCode.CANCELLED, task.cancel_reason
        if told is not None:
            status, code, reason = told.status, told.error_code, told.reason
    if done:
        return _result(task, work)
    output.closed = True
    work.cancel()
    await asyncio.wait({work}, timeout=limits.timeout_stop)
    if not work.done():
        work.set_name(LEFT_BEHIND)
        log.error("a task's code ignores its cancellation", task_type=task.row.dispatch.task_type)
        reason += "; its code did not stop when asked and was left behind"
    # Whatever it still returns or raises changes nothing, and is no news to the loop.
    work.add_done_callback(lambda done: done.cancelled() or done.exception())
    return Outcome(status, code, reason=reason)


def _result(task: LiveTask, work: asyncio.Future[Outcome]) -> Outcome:
    if work.cancelled():
        return _at_fault(task, asyncio.CancelledError("it cancelled itself"))
    error = work.exception()
    return work.result() if error is None else _at_fault(task, error)


async def _contained(plan: LoopPlan, write: Callable[[bytes], None]) -> Outcome:
    try:
        outcome = await plan.run(write)
    except (SystemExit, KeyboardInterrupt) as error:
        # In a task of the loop these would end the loop itself.
        raise TaskTypeFaultError(f"it raised {type(error).__name__}") from error
    if not isinstance(outcome, Outcome):  # whatever its type hints promise
        raise TaskTypeFaultError(f"run() gave {type(outcome).__name__}, not an Outcome")
    return outcome


def _at_fault(task: LiveTask, error: BaseException) -> Outcome:
    task_type = task.row.dispatch.task_type
    log.error("a task type is at fault", task_type=task_type, exc_info=error)
    text = " ".join(f"fault in task type {task_type}: {type(error).__name__}: {error}".split())
    return Outcome(Status.FAILED, ErrorCode.EXECUTE_FAILED, reason=text[:1000])


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
