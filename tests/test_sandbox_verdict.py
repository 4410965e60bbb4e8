"""Verdicts: from what was seen of a task's end to the outcome and its one line of reason."""

from __future__ import annotations

import dataclasses

import pytest

from stockade.sandbox.limits import MIB, Ceilings, Limits
from stockade.sandbox.outcome import ErrorCode, Outcome, Status
from stockade.sandbox.record import Cause, EndedLine, FailedLine, Record, StartedLine
from stockade.sandbox.verdict import Accounts, Moment, PeakSource, judge

STARTED = StartedLine(pid=10, monotonic=100.0, unix=1000.0)
KILLED, EXIT_3, EXIT_0 = 9, 3 << 8, 0


def ended(status: int) -> EndedLine:
    return EndedLine(
        status=status, user_s=1.0, system_s=0.5, maxrss_bytes=7 * MIB, read_bytes=1,
        write_bytes=2, monotonic=102.0, unix=1002.0,
    )  # fmt: skip


def outcome(
    status: int | None, accounts: Accounts | None = None, *, cause: Cause | None = None,
    text: str = "", limits: Limits | None = None, ceilings: Ceilings | None = None,
) -> Outcome:  # fmt: skip
    record = Record(
        started=STARTED, cause=cause, cause_text=text,
        ended=None if status is None else ended(status),
    )  # fmt: skip
    return judge(
        record, accounts or Accounts(), Moment(103.0, 1003.0), limits or Limits(),
        profile="process", degraded=(), ceilings=ceilings or Ceilings(),
    )  # fmt: skip


OOM = Accounts(
    oom_kills=4,
    oom_group_kills=1,
    own_memory_hits=1,
    memory_peak_bytes=256 * MIB,
    memory_peak_source=PeakSource.KERNEL,
)


def test_own_memory_limit_is_told_with_limit_peak_and_victims() -> None:
    found = outcome(KILLED, OOM)
    assert found.error_code is ErrorCode.OOM_KILLED
    assert found.reason == (
        "killed: memory_max 256M reached (peak 256M, 3 processes, memory.events)"
    )


def test_a_sampled_peak_is_called_one() -> None:
    accounts = dataclasses.replace(OOM, oom_kills=2, memory_peak_source=PeakSource.SAMPLED)
    found = outcome(KILLED, accounts)
    assert "(sampled peak 256M, 1 process, memory.events)" in found.reason
    assert found.memory_peak_source == "sampled"


def test_the_workers_ceiling_is_blamed_when_it_was_what_ran_out() -> None:
    accounts = dataclasses.replace(OOM, own_memory_hits=0, ceiling_memory_hits=1)
    found = outcome(KILLED, accounts, ceilings=Ceilings(memory_max=1024 * MIB))
    assert found.error_code is ErrorCode.OOM_KILLED
    assert "the worker's memory_max 1024M reached by all tasks together" in found.reason


def test_memory_of_the_host_is_not_blamed_on_a_limit() -> None:
    found = outcome(KILLED, dataclasses.replace(OOM, own_memory_hits=0))
    assert found.error_code is ErrorCode.OOM_KILLED
    assert "no limit of the worker reached" in found.reason
    assert "memory_max" not in found.reason


def test_sigkill_without_any_evidence_is_from_outside() -> None:
    found = outcome(KILLED)
    assert (found.error_code, found.signal) == (ErrorCode.SIGNALED, "SIGKILL")
    assert found.reason.startswith(
        "killed from outside the worker (the host's OOM killer or an operator)"
    )


def test_our_own_kill_is_never_called_one_from_outside() -> None:
    found = outcome(KILLED, cause=Cause.CANCELLED, text="cancelled")
    assert (found.status, found.reason) == (Status.CANCELLED, "cancelled")


def test_victims_of_a_task_that_went_on_are_told_when_it_fails() -> None:
    found = outcome(EXIT_3, dataclasses.replace(OOM, oom_kills=1, oom_group_kills=0))
    assert found.error_code is ErrorCode.EXECUTE_FAILED
    assert (
        found.reason == "exit status 3; memory_max 256M reached, and 1 process of the task killed"
    )
    assert outcome(EXIT_0, OOM).reason == ""


@pytest.mark.parametrize(
    ("accounts", "ceilings", "told"),
    [
        (Accounts(tasks_max_hits=1), Ceilings(), "tasks_max 20 was reached once"),
        (Accounts(tasks_max_hits=5, processes_peak=20), Ceilings(tasks_max=90),
         "; tasks_max 20 was reached 5 times"),
        # Up to Linux 6.10 the task counts what a limit above refuses.
        (Accounts(tasks_max_hits=5, processes_peak=12), Ceilings(tasks_max=90),
         "the worker's tasks_max 90 was reached 5 times"),
        # From 6.11 on the group above does.
        (Accounts(ceiling_tasks_hits=2, processes_peak=12), Ceilings(tasks_max=90),
         "the worker's tasks_max 90 was reached 2 times"),
    ],
)  # fmt: skip
def test_refused_forks_are_told_with_whose_limit_it_was(
    accounts: Accounts, ceilings: Ceilings, told: str
) -> None:
    found = outcome(EXIT_3, accounts, limits=Limits(tasks_max=20), ceilings=ceilings)
    assert found.reason.startswith("exit status 3; ")
    assert told in found.reason


def test_throttling_is_told_when_it_may_be_why_time_ran_out() -> None:
    limits, text = Limits(cpu_quota=0.5), "timeout: ran longer than 5s"
    heavy = Accounts(cpu_periods=50, cpu_periods_throttled=45, cpu_throttled_s=2.5)
    found = outcome(KILLED, heavy, cause=Cause.TIMEOUT, text=text, limits=limits)
    assert found.reason == f"{text}; cpu_quota 50% held it back in 45 of 50 periods"
    assert found.cpu_throttled_s == 2.5
    light = dataclasses.replace(heavy, cpu_periods_throttled=3)
    assert outcome(KILLED, light, cause=Cause.TIMEOUT, text=text, limits=limits).reason == text
    assert outcome(KILLED, heavy, cause=Cause.TIMEOUT, text=text).reason == text


def test_without_a_group_the_peak_is_that_of_the_largest_process() -> None:
    found = outcome(EXIT_0)
    assert found.memory_peak_bytes == 7 * MIB
    assert found.memory_peak_source == "maxrss"
    assert (found.cpu_user_s, found.cpu_system_s, found.cpu_s) == (1.0, 0.5, 1.5)
    assert outcome(None, cause=Cause.LOST, text="gone").memory_peak_source is None


def test_what_could_not_be_killed_is_named() -> None:
    found = outcome(KILLED, Accounts(survivors=(4, 5)), cause=Cause.TIMEOUT, text="timeout")
    assert found.reason == "timeout; could not be killed: 4, 5 still there"


def test_a_step_that_failed_never_ran() -> None:
    record = Record(started=STARTED, failed=FailedLine("exec", 2))
    found = judge(
        record, Accounts(), Moment(103.0, 1003.0), Limits(), profile="process", degraded=()
    )
    assert (found.error_code, found.wall_s) == (ErrorCode.SPAWN_FAILED, None)
    assert "exec: execve: ENOENT (No such file or directory)" in found.reason
