"""Stockade and a small worker are judged good by the wire alone, and each fault is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from both_links import over_both_links
from conformance import SEQUENCES, Judge, judged
from recording_scheduler import RecordingScheduler
from small_worker import FAULTS, SmallWorker
from worker_process import WorkerProcess

# The sequence that has to find each fault.
FOUND_BY = {
    "no ack": Judge.ack_running_and_end_come_in_this_order,
    "running last": Judge.ack_running_and_end_come_in_this_order,
    "two ends": Judge.ack_running_and_end_come_in_this_order,
    "camel case": Judge.ack_running_and_end_come_in_this_order,
    "local time": Judge.fields_are_spelt_as_schedulers_read_them,
    "errors in running": Judge.fields_are_spelt_as_schedulers_read_them,
    "case matters": Judge.task_types_are_trimmed_and_of_any_case,
    "null refused": Judge.absent_and_null_fields_mean_empty,
    "runs twice": Judge.a_repeated_id_runs_once,
    "one at a time until answered": Judge.a_retry_is_taken_before_the_report_is_answered,
    "never registers again": Judge.a_forgotten_worker_registers_again,
    "no heartbeat after registration": Judge.registration_comes_first_and_a_heartbeat_at_once,
    "ignores cancel": Judge.a_cancel_ends_a_task_and_one_of_an_unknown_id_is_answered,
}


def verdicts(judge: Judge) -> dict[str, list[str]]:
    found = {sequence.__name__: judged(judge, sequence) for sequence in SEQUENCES}
    return {name: complaints for name, complaints in found.items() if complaints}


@over_both_links
def test_stockade_conforms(
    scheduler: RecordingScheduler, make_worker: Callable[..., WorkerProcess]
) -> None:
    make_worker(lines="heartbeat_interval = 0.5")
    assert verdicts(Judge(scheduler)) == {}


def test_another_worker_can_conform(scheduler: RecordingScheduler) -> None:
    with SmallWorker(scheduler.url):
        assert verdicts(Judge(scheduler)) == {}


def test_every_fault_has_its_sequence() -> None:
    assert set(FOUND_BY) == set(FAULTS)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(scheduler: RecordingScheduler, fault: str) -> None:
    with SmallWorker(scheduler.url, fault):
        judge = Judge(scheduler, deadline_s=5)
        if FOUND_BY[fault] is Judge.fields_are_spelt_as_schedulers_read_them:
            judged(judge, Judge.ack_running_and_end_come_in_this_order)
        if fault == "no heartbeat after registration":
            scheduler.wait_for(lambda s: len(s.workers) > 1)
        assert judged(judge, FOUND_BY[fault])
