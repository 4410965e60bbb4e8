from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from executor_lab import SCHEDULER, ExecutorLab, Life

from stockade.sandbox.outcome import ErrorCode, Status
from stockade.supervisor.errors import RejectedError, Rejection
from stockade.supervisor.intake import normalise
from stockade.supervisor.quantities import MAX_SECONDS
from stockade.supervisor.states import State
from stockade.supervisor.wire.messages import ExecuteRequest


@pytest.fixture
def lab() -> Iterator[ExecutorLab]:
    made = ExecutorLab()
    yield made
    made.close()


def request(**fields: Any) -> ExecuteRequest:
    return ExecuteRequest(**{"schedule_instance_id": "t", **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"schedule_instance_id": None},
        {"schedule_instance_id": ""},
        {"schedule_instance_id": "x" * 257},
        {"schedule_instance_id": "a\0b"},
        {"payload": "echo \0"},
    ],
)
def test_what_no_worker_can_take_is_invalid(fields: dict[str, Any]) -> None:
    with pytest.raises(RejectedError) as caught:
        normalise(request(**fields), "http", SCHEDULER)
    assert caught.value.rejection is Rejection.INVALID


def test_missing_fields_mean_empty_and_the_type_is_normalised() -> None:
    dispatch = normalise(request(task_type="  ShElL\n"), "http", SCHEDULER)
    assert (dispatch.task_type, dispatch.payload, dispatch.timeout_s) == ("shell", "", None)
    assert (dispatch.scheduler, dispatch.link, dispatch.limits) == (SCHEDULER, "http", {})


@pytest.mark.parametrize(
    ("timeout_seconds", "expected"),
    [(None, None), (0, None), (-1, None), (-(10**400), None), (7, 7.0), (10**400, MAX_SECONDS)],
)
def test_timeout_that_is_not_positive_means_the_default_and_one_without_end_is_bounded(
    timeout_seconds: int | None, expected: float | None
) -> None:
    dispatch = normalise(request(timeout_seconds=timeout_seconds), "http", SCHEDULER)
    assert dispatch.timeout_s == expected


def test_report_goes_to_the_named_scheduler_only_when_it_is_allowed(lab: ExecutorLab) -> None:
    async def body(life: Life) -> None:
        for name, url, expected in (
            ("none", "", SCHEDULER),
            ("allowed", "http://other.test/", "http://other.test"),
            ("foreign", "http://evil.test", SCHEDULER),
        ):
            await life.dispatch(name, "true", scheduler_url=url)
            await life.reporter.outcome(name)
            assert life.reporter.rows[name].dispatch.scheduler == expected

    lab.live(body)


def test_dispatch_is_in_the_journal_when_it_is_answered(lab: ExecutorLab) -> None:
    async def body(life: Life) -> None:
        await life.dispatch("../../etc/x", "true")
        (row,) = await life.journal.find("../../etc/x")
        assert row.state is not State.ACCEPTED

    lab.live(body)


@pytest.mark.parametrize("wish", [True, [64], {"bytes": 64}])
def test_wish_of_a_wrong_type_is_reported_also_after_a_restart(lab: ExecutorLab, wish: Any) -> None:
    async def crash(life: Life) -> None:
        await life.dispatch("first", "sleep 300")
        await life.dispatch("t", "true", limits={"memory_max": wish})
        await life.dispatch("t", "true", limits={"memory_max": wish})
        assert len(await life.journal.recent(10)) == 2

    async def recover(life: Life) -> None:
        await life.intake.cancel("first")
        outcome = await life.reporter.outcome("t")
        assert outcome.error_code is ErrorCode.INVALID_REQUEST
        (row,) = await life.journal.find("t")
        assert row.state is State.FINISHED

    lab.live(crash, max_concurrency=1)
    lab.live(recover, max_concurrency=1)


def test_same_id_many_times_at_once_runs_once(lab: ExecutorLab) -> None:
    async def body(life: Life) -> None:
        await asyncio.gather(*(life.dispatch("t", "echo once") for _ in range(20)))
        await life.reporter.outcome("t")
        await life.dispatch("t", "echo again")
        assert life.reporter.told["t"] == ["accepted", "running", "success"]
        load = life.executor.load()
        assert (load.current_load, load.running_tasks) == (0, 0)

    lab.live(body)


def test_cancel_before_the_dispatch_and_during_it_hold(lab: ExecutorLab) -> None:
    async def body(life: Life) -> None:
        assert not await life.intake.cancel("before")
        await life.dispatch("before", "echo never")
        outcome = await life.reporter.outcome("before")
        assert outcome.status is Status.CANCELLED
        assert "running" not in life.reporter.told["before"]
        for number in range(50):
            name = f"during{number}"
            dispatch = asyncio.create_task(life.dispatch(name, "sleep 300"))
            for _ in range(number % 5):
                await asyncio.sleep(0)
            await life.intake.cancel(name)
            await dispatch
            assert (await life.reporter.outcome(name)).status is Status.CANCELLED

    lab.live(body)


def test_dispatch_goes_on_when_its_caller_hangs_up(lab: ExecutorLab) -> None:
    async def body(life: Life) -> None:
        dispatch = asyncio.create_task(life.dispatch("t", "echo on"))
        await asyncio.sleep(0)
        dispatch.cancel()
        await asyncio.wait([dispatch])
        assert dispatch.cancelled()
        assert (await life.reporter.outcome("t")).status is Status.SUCCESS
        assert life.executor.load().current_load == 0

    lab.live(body)


def test_closed_journal_refuses_as_unavailable_and_gives_the_place_back(lab: ExecutorLab) -> None:
    async def body(life: Life) -> None:
        await life.journal.close()
        for number in range(9):
            with pytest.raises(RejectedError) as caught:
                await life.dispatch(f"t{number}", "true")
            assert caught.value.rejection is Rejection.UNAVAILABLE
        assert life.executor.claim() is State.RUNNING

    lab.live(body)
