"""The verdict: from what was seen of a task's end to its outcome. Pure: no system call here."""

from __future__ import annotations

import dataclasses
import enum
import os
import signal
import time
from typing import Final, NamedTuple, Self

from stockade.sandbox.failed_step import failed_step
from stockade.sandbox.limits import MIB, Ceilings, Limits
from stockade.sandbox.outcome import ErrorCode, Outcome, Status
from stockade.sandbox.profiles import Feature, Profile
from stockade.sandbox.record import Cause, Record

# From this share of its periods on, throttling may be why a task did not end in time.
_THROTTLED_SHARE: Final = 0.25


class PeakSource(enum.StrEnum):
    """Where a memory peak comes from."""

    KERNEL = "memory.peak"
    SAMPLED = "sampled"
    LARGEST_PROCESS = "maxrss"


@dataclasses.dataclass(frozen=True, slots=True)
class Accounts:
    """What a task used, as far as this host counts it. None: not counted here.

    Attributes:
        cpu_throttled_s: added up over all CPUs.
        cpu_periods: periods of cpu.max in which the task ran.
        cpu_periods_throttled: those of them in which its quota ran out.
        stall_cpu_s: time in which some process of the task waited for a CPU (PSI); so the others.
        oom_kills: processes of the task that any OOM killer took, as the kernel counts them.
        oom_group_kills: how often it took all of the task's at once (Linux 5.17).
        own_memory_hits: how often the task's own memory_max was why.
        ceiling_memory_hits: how often the worker's was, while the task ran.
        tasks_max_hits: forks that were refused.
        ceiling_tasks_hits: forks that the worker's tasks_max refused, while the task ran (6.11).
    """

    cpu_user_s: float | None = None
    cpu_system_s: float | None = None
    cpu_throttled_s: float | None = None
    cpu_periods: int = 0
    cpu_periods_throttled: int = 0
    memory_peak_bytes: int | None = None
    memory_peak_source: PeakSource | None = None
    processes_peak: int | None = None
    io_read_bytes: int | None = None
    io_write_bytes: int | None = None
    stall_cpu_s: float | None = None
    stall_memory_s: float | None = None
    stall_io_s: float | None = None
    oom_kills: int = 0
    oom_group_kills: int = 0
    own_memory_hits: int = 0
    ceiling_memory_hits: int = 0
    tasks_max_hits: int = 0
    ceiling_tasks_hits: int = 0
    survivors: tuple[int, ...] = ()


class Moment(NamedTuple):
    """A point in time on both clocks, in seconds."""

    monotonic: float
    unix: float

    @classmethod
    def now(cls) -> Self:
        return cls(time.monotonic(), time.time())


def judge(
    record: Record, accounts: Accounts, seen_gone: Moment, limits: Limits, *,
    profile: str, degraded: tuple[str, ...], ceilings: Ceilings = Ceilings(),  # noqa: B008 - frozen
) -> Outcome:  # fmt: skip
    """The outcome of a task that is over.

    ``seen_gone`` stands in for the end where nobody was left to write it down.

    Says ``oom_killed`` on evidence only: memory.events of the task's own group, or the watchdog's
    cause. What cannot be known is ``worker_lost``, never guessed.
    """
    if record.failed is not None and record.cause is None:
        is_confined = profile != Profile.PROCESS and Feature.NAMESPACES not in degraded
        reason = failed_step(record.failed, is_confined=is_confined)
        status, code = Status.FAILED, ErrorCode.SPAWN_FAILED
    else:
        status, code, reason = _verdict(record, accounts, limits, ceilings)
    if accounts.survivors:
        pids = ", ".join(map(str, accounts.survivors[:8]))
        reason = f"{reason}; could not be killed: {pids} still there".lstrip("; ")
    exit_code, signal_name = _wait_status(record)
    user, system = _cpu(record, accounts)
    # The launcher writes "started" just before the exec; one that fails never ran.
    started = record.started if record.failed is None else None
    rusage = record.ended
    end = rusage or seen_gone
    peak, source = _peak(record, accounts)
    return Outcome(
        status=status,
        error_code=code,
        reason=reason,
        exit_code=exit_code,
        signal=signal_name,
        wall_s=end.monotonic - started.monotonic if started else None,
        cpu_s=user + system if user is not None and system is not None else None,
        cpu_user_s=user,
        cpu_system_s=system,
        cpu_throttled_s=accounts.cpu_throttled_s,
        memory_peak_bytes=peak,
        memory_peak_source=source,
        processes_peak=accounts.processes_peak,
        io_read_bytes=_first(accounts.io_read_bytes, rusage.read_bytes if rusage else None),
        io_write_bytes=_first(accounts.io_write_bytes, rusage.write_bytes if rusage else None),
        stall_cpu_s=accounts.stall_cpu_s,
        stall_memory_s=accounts.stall_memory_s,
        stall_io_s=accounts.stall_io_s,
        profile=profile,
        degraded=degraded,
        started_at=started.unix if started else None,
        finished_at=end.unix,
    )


def _verdict(
    record: Record, accounts: Accounts, limits: Limits, ceilings: Ceilings
) -> tuple[Status, ErrorCode, str]:
    match record.cause:
        case Cause.TIMEOUT:
            text = record.cause_text + _throttling(accounts, limits)
            text += _hits(accounts, limits, ceilings)
            return Status.TIMEOUT, ErrorCode.TIMEOUT, text
        case Cause.CANCELLED:
            return Status.CANCELLED, ErrorCode.CANCELLED, record.cause_text or "cancelled"
        case Cause.MEMORY:
            return Status.FAILED, ErrorCode.OOM_KILLED, record.cause_text
        case Cause.START_DEADLINE:
            return Status.FAILED, ErrorCode.SPAWN_FAILED, record.cause_text
        case Cause.LOST:
            return Status.FAILED, ErrorCode.WORKER_LOST, record.cause_text
    if record.ended is None:
        return Status.FAILED, ErrorCode.WORKER_LOST, "the launcher ended without a word"
    return _by_wait_status(record.ended.status, accounts, limits, ceilings)


def _by_wait_status(
    status: int, accounts: Accounts, limits: Limits, ceilings: Ceilings
) -> tuple[Status, ErrorCode, str]:
    if status == 0:
        return Status.SUCCESS, ErrorCode.NONE, ""
    hits = _hits(accounts, limits, ceilings)
    if os.WIFEXITED(status):
        return (
            Status.FAILED,
            ErrorCode.EXECUTE_FAILED,
            f"exit status {os.WEXITSTATUS(status)}{hits}",
        )
    number = os.WTERMSIG(status)
    if number == signal.SIGKILL and accounts.oom_kills:
        return Status.FAILED, ErrorCode.OOM_KILLED, _out_of_memory(accounts, limits, ceilings)
    text = f"died of {signal_text(number)}"
    if number == signal.SIGKILL:
        text = (
            "killed from outside the worker (the host's OOM killer or an operator), "
            "or by one of its own processes"
        )
    return Status.FAILED, ErrorCode.SIGNALED, text + hits


def _hits(accounts: Accounts, limits: Limits, ceilings: Ceilings) -> str:
    """Limits that the task ran into and that may explain a failure."""
    text = ""
    refused = accounts.tasks_max_hits or accounts.ceiling_tasks_hits
    if refused:
        text += f"; {_tasks_limit(accounts, limits, ceilings)} was reached {_times(refused)}"
    if accounts.oom_kills:
        which = _memory_limit(accounts, limits, ceilings)
        text += f"; {which}, and {_victims(accounts)} of the task killed"
    return text


def _tasks_limit(accounts: Accounts, limits: Limits, ceilings: Ceilings) -> str:
    # Up to 6.10 a fork that any limit above refuses is counted with the task, so the peak tells.
    below_own = (
        accounts.processes_peak is not None
        and limits.tasks_max is not None
        and accounts.processes_peak < limits.tasks_max
    )
    if accounts.ceiling_tasks_hits or (ceilings.tasks_max is not None and below_own):
        return f"the worker's tasks_max {ceilings.tasks_max}"
    return f"tasks_max {limits.tasks_max}"


def _throttling(accounts: Accounts, limits: Limits) -> str:
    """That the CPU quota may be why a task was not done in time."""
    throttled, periods = accounts.cpu_periods_throttled, accounts.cpu_periods
    if limits.cpu_quota is None or not throttled or throttled < periods * _THROTTLED_SHARE:
        return ""
    quota = f"{100 * limits.cpu_quota:.4g}%"
    return f"; cpu_quota {quota} held it back in {throttled} of {periods} periods"


def _memory_limit(accounts: Accounts, limits: Limits, ceilings: Ceilings) -> str:
    """Whose memory ran out: memory.events counts ``oom`` where the limit is."""
    if accounts.own_memory_hits:
        limit = "unlimited" if limits.memory_max is None else format_bytes(limits.memory_max)
        return f"memory_max {limit} reached"
    if accounts.ceiling_memory_hits and ceilings.memory_max is not None:
        limit = format_bytes(ceilings.memory_max)
        return f"the worker's memory_max {limit} reached by all tasks together"
    return "the host, or a group above the worker, out of memory and no limit of the worker reached"


def _out_of_memory(accounts: Accounts, limits: Limits, ceilings: Ceilings) -> str:
    peak = accounts.memory_peak_bytes
    shown = "" if peak is None else f"peak {format_bytes(peak)}, "
    if accounts.memory_peak_source is PeakSource.SAMPLED:
        shown = f"sampled {shown}"
    victims = _victims(accounts)
    which = _memory_limit(accounts, limits, ceilings)
    return f"killed: {which} ({shown}{victims}, memory.events)"


def _victims(accounts: Accounts) -> str:
    # A kill of the whole group counts the process that it chose first once more, as one of the
    # group (mm/oom_kill.c, oom_kill_process).
    count = max(1, accounts.oom_kills - accounts.oom_group_kills)
    return "1 process" if count == 1 else f"{count} processes"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _wait_status(record: Record) -> tuple[int | None, str | None]:
    if record.ended is None:
        return None, None
    if os.WIFEXITED(record.ended.status):
        return os.WEXITSTATUS(record.ended.status), None
    return None, signal_text(os.WTERMSIG(record.ended.status))


def _cpu(record: Record, accounts: Accounts) -> tuple[float | None, float | None]:
    if accounts.cpu_user_s is not None:
        return accounts.cpu_user_s, accounts.cpu_system_s
    if record.ended is not None:
        return record.ended.user_s, record.ended.system_s
    return None, None


def _peak(record: Record, accounts: Accounts) -> tuple[int | None, PeakSource | None]:
    if accounts.memory_peak_bytes is not None:
        return accounts.memory_peak_bytes, accounts.memory_peak_source
    if record.ended is not None:
        return record.ended.maxrss_bytes, PeakSource.LARGEST_PROCESS
    return None, None


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


def signal_text(number: int) -> str:
    """``SIGSEGV`` for 11; ``SIG40`` where there is no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


def format_bytes(count: int) -> str:
    """``256M``; whole mebibytes, or kibibytes below one."""
    return f"{count // MIB}M" if count >= MIB else f"{count // 1024}K"
