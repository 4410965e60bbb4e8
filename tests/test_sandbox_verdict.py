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
    # The group above the slots may be somebody else's: its hits are no ceiling's of ours.
    for above in (0, 1):
        accounts = dataclasses.replace(OOM, own_memory_hits=0, ceiling_memory_hits=above)
        found = outcome(KILLED, accounts)
        assert found.error_code is ErrorCode.OOM_KILLED
        assert "no limit of the worker reached" in found.reason
        assert "memory_max" not in found.reason


def test_sigkill_without_any_evidence_is_from_outside() -> None:
    found = outcome(KILLED)
    assert (found.error_code, found.signal) == (ErrorCode.SIGNALED, "SIGKILL")
    assert found.reason.startswith(
        "killed from outside the worker (the host's OOM killer or an operator)"
    )


@pytest.mark.parametrize(
    ("cause", "status", "error_code"),
    [
        (Cause.TIMEOUT, Status.TIMEOUT, ErrorCode.TIMEOUT),
        (Cause.CANCELLED, Status.CANCELLED, ErrorCode.CANCELLED),
        (Cause.MEMORY, Status.FAILED, ErrorCode.OOM_KILLED),
        (Cause.START_DEADLINE, Status.FAILED, ErrorCode.SPAWN_FAILED),
        (Cause.LOST, Status.FAILED, ErrorCode.WORKER_LOST),
    ],
)
def test_our_own_kill_is_told_with_its_cause_and_never_called_one_from_outside(
    cause: Cause, status: Status, error_code: ErrorCode
) -> None:
    found = outcome(KILLED, cause=cause, text="why")
    assert (found.status, found.error_code, found.reason) == (status, error_code, "why")


def test_a_cancel_that_came_without_words_is_called_one() -> None:
    assert outcome(KILLED, cause=Cause.CANCELLED).reason == "cancelled"


def test_a_launcher_that_wrote_nothing_down_is_a_lost_task() -> None:
    found = outcome(None)
    assert (found.status, found.error_code) == (Status.FAILED, ErrorCode.WORKER_LOST)
    assert found.reason == "the launcher ended without a word"
    assert (found.exit_code, found.signal) == (None, None)


def test_exit_status_and_signal_are_told_apart() -> None:
    assert (outcome(EXIT_3).exit_code, outcome(EXIT_3).signal) == (3, None)
    assert (outcome(KILLED).exit_code, outcome(KILLED).signal) == (None, "SIGKILL")


@pytest.mark.parametrize(
    ("kills", "of_the_group", "victims"),
    [(1, 0, "1 process"), (1, 1, "1 process"), (4, 1, "3 processes"), (2, 0, "2 processes")],
)
def test_the_victim_that_a_kill_of_the_group_counts_twice_is_one(
    kills: int, of_the_group: int, victims: str
) -> None:
    found = outcome(KILLED, Accounts(oom_kills=kills, oom_group_kills=of_the_group))
    assert found.reason.endswith(f"reached ({victims}, memory.events)")


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
        (Accounts(ceiling_tasks_hits=2), Ceilings(tasks_max=90),
         "the worker's tasks_max 90 was reached 2 times"),
        (Accounts(tasks_max_hits=5, processes_peak=12), Ceilings(),
         "; tasks_max 20 was reached 5 times"),
    ],
)  # fmt: skip
def test_refused_forks_are_told_with_whose_limit_it_was(
    accounts: Accounts, ceilings: Ceilings, told: str
) -> None:
    limits = Limits(tasks_max=20)
    found = outcome(EXIT_3, accounts, limits=limits, ceilings=ceilings)
    assert found.reason.startswith("exit status 3; ")
    assert told in found.reason
    late = outcome(
        KILLED, accounts, cause=Cause.TIMEOUT, text="x", limits=limits, ceilings=ceilings
    )
    assert told in late.reason


def test_throttling_is_told_when_it_may_be_why_time_ran_out() -> None:
    limits, text = Limits(cpu_quota=0.5), "timeout: ran longer than 5s"
    heavy = Accounts(cpu_periods=50, cpu_periods_throttled=45, cpu_throttled_s=2.5)
    found = outcome(KILLED, heavy, cause=Cause.TIMEOUT, text=text, limits=limits)
    assert found.reason == f"{text}; cpu_quota 50% held it back in 45 of 50 periods"
    assert found.cpu_throttled_s == 2.5
    light = dataclasses.replace(heavy, cpu_periods_throttled=3)
    assert outcome(KILLED, light, cause=Cause.TIMEOUT, text=text, limits=limits).reason == text
    assert outcome(KILLED, heavy, cause=Cause.TIMEOUT, text=text).reason == text
    # What nobody counted is not told as 0 of 0.
    assert outcome(KILLED, cause=Cause.TIMEOUT, text=text, limits=limits).reason == text


def test_without_a_group_the_peak_is_that_of_the_largest_process() -> None:
    found = outcome(EXIT_0)
    assert found.memory_peak_bytes == 7 * MIB
    assert found.memory_peak_source == "maxrss"
    assert (found.cpu_user_s, found.cpu_system_s, found.cpu_s) == (1.0, 0.5, 1.5)
    assert outcome(None, cause=Cause.LOST, text="gone").memory_peak_source is None


def test_cpu_times_of_a_group_are_told_before_those_of_the_main_process() -> None:
    found = outcome(EXIT_0, Accounts(cpu_user_s=3.0, cpu_system_s=4.0))
    assert (found.cpu_user_s, found.cpu_system_s, found.cpu_s) == (3.0, 4.0, 7.0)


def test_what_could_not_be_killed_is_named() -> None:
    found = outcome(KILLED, Accounts(survivors=(4, 5)), cause=Cause.TIMEOUT, text="timeout")
    assert found.reason == "timeout; could not be killed: 4, 5 still there"
    many = outcome(KILLED, Accounts(survivors=tuple(range(20, 40))))
    assert many.reason.endswith("could not be killed: 20, 21, 22, 23, 24, 25, 26, 27 still there")


def test_a_step_that_failed_never_ran() -> None:
    record = Record(started=STARTED, failed=FailedLine("exec", 2))
    found = judge(
        record, Accounts(), Moment(103.0, 1003.0), Limits(), profile="process", degraded=()
    )
    assert (found.error_code, found.wall_s) == (ErrorCode.SPAWN_FAILED, None)
    assert "exec: execve: ENOENT (No such file or directory)" in found.reason


@pytest.mark.parametrize(
    ("profile", "degraded", "is_confined"),
    [("process", (), False), ("private", (), True), ("private", ("namespaces",), False)],
)
def test_a_profile_is_blamed_for_a_failed_step_only_where_it_holds(
    profile: str, degraded: tuple[str, ...], is_confined: bool
) -> None:
    record = Record(started=STARTED, failed=FailedLine("exec", 2))
    found = judge(
        record, Accounts(), Moment(103.0, 1003.0), Limits(), profile=profile, degraded=degraded
    )
    assert ("--read-only-paths" in found.reason) == is_confined
