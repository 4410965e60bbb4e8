"""Outcomes as the messages that schedulers get. Pure functions."""

from __future__ import annotations

import datetime

from stockade.sandbox.outcome import Outcome, Status
from stockade.supervisor.wire.messages import StatusReport

RUNNING = "running"


def running_report(instance_id: str, worker_id: str) -> StatusReport:
    """The report that the task has begun; over the wire it has the RUNNING_FIELDS only."""
    return StatusReport(schedule_instance_id=instance_id, worker_id=worker_id, status=RUNNING)


def terminal_report(
    instance_id: str, worker_id: str, outcome: Outcome, excerpt: str
) -> StatusReport:
    """The report that says how the task ended.

    ``error_message`` is the excerpt alone on success, otherwise the reason on one line and then the
    excerpt. Every text is valid UTF-8 and free of NUL, which some schedulers' databases refuse.
    """
    reason = _one_line(outcome.reason)
    excerpt = _clean(excerpt)
    if outcome.status is Status.SUCCESS:
        message = excerpt
    else:
        head = reason or outcome.error_code.value or outcome.status.value
        message = f"{head}\n{excerpt}" if excerpt else head
    return StatusReport(
        schedule_instance_id=instance_id,
        worker_id=worker_id,
        status=outcome.status.value,
        error_code=outcome.error_code.value,
        error_message=message,
        started_at=None if outcome.started_at is None else rfc3339(outcome.started_at),
        finished_at=None if outcome.finished_at is None else rfc3339(outcome.finished_at),
        exit_code=outcome.exit_code,
        signal=outcome.signal,
        reason=reason or None,
        wall_s=outcome.wall_s,
        cpu_s=outcome.cpu_s,
        cpu_user_s=outcome.cpu_user_s,
        cpu_system_s=outcome.cpu_system_s,
        cpu_throttled_s=outcome.cpu_throttled_s,
        memory_peak_bytes=outcome.memory_peak_bytes,
        memory_peak_source=outcome.memory_peak_source,
        processes_peak=outcome.processes_peak,
        io_read_bytes=outcome.io_read_bytes,
        io_write_bytes=outcome.io_write_bytes,
        stall_cpu_s=outcome.stall_cpu_s,
        stall_memory_s=outcome.stall_memory_s,
        stall_io_s=outcome.stall_io_s,
        output_bytes=outcome.output_bytes,
        output_truncated=outcome.output_truncated,
        profile=outcome.profile,
        degraded=list(outcome.degraded),
    )


def split_message(report: StatusReport) -> tuple[str, str]:
    """The reason and the excerpt that ``error_message`` was made of."""
    if report.status == Status.SUCCESS:
        return "", report.error_message
    reason, _, excerpt = report.error_message.partition("\n")
    return reason, excerpt


def rfc3339(unix_s: float) -> str:
    """The time in UTC with nine digits of a second, as RFC 3339 and Go's RFC3339Nano read it.

    A float holds today's time to a quarter of a microsecond, so the last three digits are zero.
    """
    seconds, microseconds = divmod(round(unix_s * 1_000_000), 1_000_000)
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{microseconds:06d}000Z"


def _one_line(text: str) -> str:
    return " ".join(_clean(text).split())


def _clean(text: str) -> str:
    # isascii() is a flag in the string's header: the common case costs nothing.
    if not text.isascii():
        text = text.encode("utf-8", "replace").decode("utf-8")
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}") if "\0" in text else text
