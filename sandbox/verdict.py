"""The verdict: from what was seen of a task's end to its outcome. Pure: no system call here."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from typing import Final, NamedTuple, Self

from stockade.sandbox.limits import MIB, Limits
from stockade.sandbox.outcome import ErrorCode, Outcome, Status
from stockade.sandbox.record import Cause, Record

# What mends a step that failed, where there is something to say beyond the kernel's words.
_STEP_HINTS: Final = {
    "exec": "is the program there, executable, and of this machine's kind?",
    "directory": "may the task's uid enter it?",
    "clone": "the host or the worker's cgroup is out of processes, or out of memory",
    "uid": "is the uid range allowed in this user namespace?",
    "rlimit": "the worker's own hard limit is lower: raise it in the unit (LimitNOFILE=)",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Accounts:
    """What a task used, as far as this host counts it. None: not counted here."""

    cpu_user_s: float | None = None
    cpu_system_s: float | None = None
    memory_peak_bytes: int | None = None
    processes_peak: int | None = None
    io_read_bytes: int | None = None
    io_write_bytes: int | None = None
    oom_kills: int = 0
    tasks_max_hits: int = 0
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
    profile: str, degraded: tuple[str, ...],
) -> Outcome:  # fmt: skip
    """The outcome of a task that is over.

    ``seen_gone`` stands in for the end where nobody was left to write it down.

    Says ``oom_killed`` on evidence only: memory.events of the task's own group, or the watchdog's
    cause. What cannot be known is ``worker_lost``, never guessed.
    """
    status, code, reason = _verdict(record, accounts, limits)
    if accounts.survivors:
        pids = ", ".join(map(str, accounts.survivors[:8]))
        reason = f"{reason}; could not be killed: {pids} still there".lstrip("; ")
    exit_code, signal_name = _wait_status(record)
    user, system = _cpu(record, accounts)
    # The launcher writes "started" just before the exec; one that fails never ran.
    started = record.started if record.failed is None else None
    rusage = record.ended
    end = rusage or seen_gone
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
        memory_peak_bytes=_peak(record, accounts),
        processes_peak=accounts.processes_peak,
        io_read_bytes=_first(accounts.io_read_bytes, rusage.read_bytes if rusage else None),
        io_write_bytes=_first(accounts.io_write_bytes, rusage.write_bytes if rusage else None),
        profile=profile,
        degraded=degraded,
        started_at=started.unix if started else None,
        finished_at=end.unix,
    )


def _verdict(record: Record, accounts: Accounts, limits: Limits) -> tuple[Status, ErrorCode, str]:
    if record.failed is not None and record.cause is None:
        return Status.FAILED, ErrorCode.SPAWN_FAILED, _failed_step(record)
    match record.cause:
        case Cause.TIMEOUT:
            return Status.TIMEOUT, ErrorCode.TIMEOUT, record.cause_text
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
    return _by_wait_status(record.ended.status, accounts, limits)


def _by_wait_status(
    status: int, accounts: Accounts, limits: Limits
) -> tuple[Status, ErrorCode, str]:
    if status == 0:
        return Status.SUCCESS, ErrorCode.NONE, ""
    hits = _limits_hit(accounts, limits)
    if os.WIFEXITED(status):
        return (
            Status.FAILED,
            ErrorCode.EXECUTE_FAILED,
            f"exit status {os.WEXITSTATUS(status)}{hits}",
        )
    number = os.WTERMSIG(status)
    if number == signal.SIGKILL and accounts.oom_kills:
        return Status.FAILED, ErrorCode.OOM_KILLED, _out_of_memory(accounts, limits)
    text = f"died of {signal_text(number)}"
    if number == signal.SIGKILL:
        text = (
            "killed by SIGKILL from outside the worker "
            "(itself, the host's OOM killer or an operator)"
        )
    return Status.FAILED, ErrorCode.SIGNALED, text + hits


def _limits_hit(accounts: Accounts, limits: Limits) -> str:
    """Limits that the task ran into and that may explain a failure."""
    text = ""
    if accounts.tasks_max_hits:
        text += f"; tasks_max {limits.tasks_max} was reached {accounts.tasks_max_hits} times"
    if accounts.oom_kills:
        text += f"; memory_max was reached, {accounts.oom_kills} of its processes were killed"
    return text


def _out_of_memory(accounts: Accounts, limits: Limits) -> str:
    limit = format_bytes(limits.memory_max) if limits.memory_max is not None else "unlimited"
    peak = accounts.memory_peak_bytes
    shown = "" if peak is None else f"peak {format_bytes(peak)}, "
    return (
        f"killed: memory_max {limit} reached ({shown}{accounts.oom_kills} processes, memory.events)"
    )


def _failed_step(record: Record) -> str:
    failed = record.failed
    assert failed is not None
    hint = _STEP_HINTS.get(failed.step)
    text = f"cannot start the task: {failed.step}: {os.strerror(failed.errno)}"
    return f"{text} ({hint})" if hint else text


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


def _peak(record: Record, accounts: Accounts) -> int | None:
    if accounts.memory_peak_bytes is not None:
        return accounts.memory_peak_bytes
    return record.ended.maxrss_bytes if record.ended is not None else None


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
