from __future__ import annotations

import datetime

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.sandbox.outcome import ErrorCode, Outcome, Status
from stockade.supervisor.report import rfc3339, running_report, split_message, terminal_report
from stockade.supervisor.wire.messages import StatusReport

SUCCESS = Outcome(status=Status.SUCCESS, exit_code=0)
OOM = Outcome(
    status=Status.FAILED,
    error_code=ErrorCode.OOM_KILLED,
    reason="killed: memory_max 256M reached (peak 256M, 3 processes, memory.events)",
)


def message(outcome: Outcome, excerpt: str) -> str:
    return terminal_report("task-1", "w1", outcome, excerpt).error_message


def test_success_carries_the_excerpt_alone() -> None:
    assert message(SUCCESS, "line 1\nline 2\n") == "line 1\nline 2\n"
    assert message(SUCCESS, "") == ""


def test_a_note_on_success_is_the_reason_and_not_in_the_message() -> None:
    outcome = Outcome(status=Status.SUCCESS, reason="memory_max lowered from 2G to 256M")
    report = terminal_report("task-1", "w1", outcome, "out")
    assert report.error_message == "out"
    assert report.reason == "memory_max lowered from 2G to 256M"


def test_failure_carries_the_reason_on_one_line_and_then_the_excerpt() -> None:
    assert message(OOM, "some\noutput") == f"{OOM.reason}\nsome\noutput"
    assert message(OOM, "") == OOM.reason


def test_a_reason_of_several_lines_becomes_one() -> None:
    outcome = Outcome(
        status=Status.FAILED, error_code=ErrorCode.SPAWN_FAILED, reason="cannot start:\n  EAGAIN\n"
    )
    assert message(outcome, "x") == "cannot start: EAGAIN\nx"


def test_a_failure_without_reason_says_its_code() -> None:
    outcome = Outcome(status=Status.FAILED, error_code=ErrorCode.WORKER_LOST)
    assert message(outcome, "x") == "worker_lost\nx"


def test_every_measure_is_carried_and_what_does_not_apply_is_null() -> None:
    outcome = Outcome(
        status=Status.FAILED,
        error_code=ErrorCode.SIGNALED,
        reason="died of SIGSEGV",
        signal="SIGSEGV",
        wall_s=1.5,
        cpu_s=0.5,
        cpu_user_s=0.3,
        cpu_system_s=0.2,
        memory_peak_bytes=4096,
        processes_peak=3,
        io_read_bytes=1,
        io_write_bytes=2,
        output_bytes=7,
        output_truncated=True,
        profile="process",
        degraded=("memory_max",),
    )
    body = msgspec.json.decode(msgspec.json.encode(terminal_report("task-1", "w1", outcome, "")))
    assert set(body) == set(StatusReport.__struct_fields__)
    for name, value in outcome.to_json().items():
        assert body[name] == (list(value) if isinstance(value, tuple) else value), name
    assert body["exit_code"] is None
    assert body["started_at"] is None


def test_times_are_rfc_3339_in_utc_with_nine_digits() -> None:
    assert rfc3339(1_732_930_000.25) == "2024-11-30T01:26:40.250000000Z"
    assert rfc3339(0.999_999_9) == "1970-01-01T00:00:01.000000000Z"
    outcome = Outcome(status=Status.SUCCESS, started_at=1.5, finished_at=2.0)
    report = terminal_report("task-1", "w1", outcome, "")
    assert report.started_at == "1970-01-01T00:00:01.500000000Z"
    assert report.finished_at == "1970-01-01T00:00:02.000000000Z"


@given(st.floats(min_value=0, max_value=4e9))
def test_times_are_those_that_datetime_reads_back(unix_s: float) -> None:
    text = rfc3339(unix_s)
    assert text.endswith("000Z")
    # fromisoformat of Python 3.11 takes any number of digits, and keeps six.
    assert abs(datetime.datetime.fromisoformat(text).timestamp() - unix_s) < 2e-6


@pytest.mark.parametrize("text", ["a\0b", "\ud800", "ok\udcff", "\x1b[2J\r\n"])
def test_any_text_gives_a_body_of_valid_utf_8_without_nul(text: str) -> None:
    outcome = Outcome(status=Status.FAILED, error_code=ErrorCode.EXECUTE_FAILED, reason=text)
    body = msgspec.json.encode(terminal_report("task-1", "w1", outcome, text))
    assert "\0" not in msgspec.json.decode(body)["error_message"]


@given(reason=st.text(), excerpt=st.text())
def test_message_splits_into_what_it_was_made_of(reason: str, excerpt: str) -> None:
    outcome = Outcome(status=Status.TIMEOUT, error_code=ErrorCode.TIMEOUT, reason=reason)
    report = terminal_report("task-1", "w1", outcome, excerpt)
    told, shown = split_message(report)
    assert told == (report.reason or "timeout")
    assert shown == excerpt.replace("\0", "\ufffd")


def test_running_report_has_empty_error_fields() -> None:
    report = running_report("task-1", "w1")
    assert (report.status, report.error_code, report.error_message) == ("running", "", "")
