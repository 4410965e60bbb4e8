from __future__ import annotations

import asyncio
import contextlib
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from executor_lab import ExecutorLab, Life, shell
from worker_process import in_charge

from stockade.platform import pidfd
from stockade.sandbox.outcome import ErrorCode, Status
from stockade.supervisor.adoption import TOKEN
from stockade.supervisor.journal import Journal
from stockade.supervisor.live_task import Phase
from stockade.supervisor.states import State
from stockade.supervisor.task_types.base import Dispatch, ProcessPlan, TaskType, invalid
from stockade.supervisor.wire.messages import HttpRequest


@pytest.fixture
def lab() -> Iterator[ExecutorLab]:
    made = ExecutorLab()
    yield made
    made.close()


def runs(place: Path) -> int:
    return len(list(place.glob("run-*")))


def test_outcome_is_journalled_with_excerpt_and_output_figures(lab: ExecutorLab) -> None:
    async def body(life: Life) -> None:
        await life.dispatch("t", "echo hello; exit 3")
        outcome = await life.reporter.outcome("t")
        assert (outcome.error_code, outcome.output_bytes) == (ErrorCode.EXECUTE_FAILED, 6)
        assert life.reporter.told["t"] == ["accepted", "running", "failed"]
        (row,) = await life.journal.find("t")
        assert (row.state, row.excerpt, row.outcome) == (State.FINISHED, "hello\n", outcome)
        assert life.executor.tasks == {}
        assert life.executor.spawner.client is not None
        assert await life.executor.spawner.client.list_tasks() == []

    lab.live(body)


def test_task_that_can_start_at_once_is_journalled_running_and_others_accepted(
    lab: ExecutorLab,
) -> None:
    async def body(life: Life) -> None:
        for name in ("first", "second"):
            await life.dispatch(name, "sleep 300")
        rows = [(await life.journal.find(name))[0] for name in ("first", "second")]
        assert [row.state for row in rows] == [State.RUNNING, State.ACCEPTED]
        load = life.executor.load()
        assert (load.current_load, load.running_tasks) == (1, 1)

    lab.live(body, max_concurrency=1)


def test_load_is_full_while_draining_and_what_arrives_still_runs(lab: ExecutorLab) -> None:
    async def body(life: Life) -> None:
        assert life.executor.load().current_load == 0
        life.executor.drain()
        load = life.executor.load()
        assert (load.current_load, load.running_tasks) == (4, 0)
        await life.dispatch("t", "true")
        assert (await life.reporter.outcome("t")).status is Status.SUCCESS

    lab.live(body)


def test_queued_task_is_cancelled_without_running(lab: ExecutorLab) -> None:
    async def body(life: Life) -> None:
        await life.dispatch("running", "sleep 0.5")
        await life.dispatch("queued", "echo never")
        await life.dispatch("last", "echo last")
        assert await life.intake.cancel("queued")
        outcome = await life.reporter.outcome("queued")
        assert (outcome.status, outcome.output_bytes) == (Status.CANCELLED, 0)
        assert life.reporter.told["queued"] == ["accepted", "cancelled"]
        assert (await life.reporter.outcome("last")).status is Status.SUCCESS
        assert not await life.intake.cancel("queued")

    lab.live(body, max_concurrency=1)


def test_timeout_and_cancel_at_the_same_moment_give_one_end_each(lab: ExecutorLab) -> None:
    async def body(life: Life) -> None:
        names = [f"t{number}" for number in range(60)]
        for name in names:
            await life.dispatch(name, "sleep 300", limits={"runtime_max": "0.2"})

        async def cancel_about_then(name: str, number: int) -> None:
            await life.reporter.until(lambda: "running" in life.reporter.told[name])
            await asyncio.sleep(0.19 + 0.0005 * (number % 40))
            await life.intake.cancel(name)

        await asyncio.gather(*(cancel_about_then(name, n) for n, name in enumerate(names)))
        for name in names:
            assert (await life.reporter.outcome(name)).status in (
                Status.TIMEOUT, Status.CANCELLED,
            )  # fmt: skip
            assert len(life.reporter.told[name]) == 3

    lab.live(body, max_concurrency=16)


def test_task_that_was_journalled_running_but_never_sent_runs_once(
    lab: ExecutorLab, place: Path
) -> None:
    place.chmod(0o777)

    async def connect(life: Life) -> None:
        assert await life.journal.get_meta(TOKEN)

    async def crash_before_the_start(journal: Journal) -> None:
        await journal.accept(shell("t", f"mktemp {place}/run-XXXX"), initial=State.RUNNING)
        await journal.accept(shell("u", f"mktemp {place}/run-XXXX"), initial=State.RUNNING)

    async def recover(life: Life) -> None:
        assert (await life.reporter.outcome("t")).status is Status.SUCCESS
        assert (await life.reporter.outcome("u")).status is Status.SUCCESS
        assert [name for name, told in life.reporter.order if told == "running"] == ["t", "u"]

    lab.live(connect)
    lab.with_journal(crash_before_the_start)
    lab.live(recover, max_concurrency=1)
    assert runs(place) == 2


def test_task_of_another_life_of_the_records_is_lost_and_never_runs(
    lab: ExecutorLab, place: Path
) -> None:
    place.chmod(0o777)

    async def crash(journal: Journal) -> None:
        await journal.set_meta(TOKEN, "another boot")
        await journal.accept(shell("running", f"mktemp {place}/run-XXXX"), initial=State.RUNNING)
        await journal.accept(shell("queued", "true"))

    async def recover(life: Life) -> None:
        outcome = await life.reporter.outcome("running")
        assert (outcome.status, outcome.error_code) == (Status.FAILED, ErrorCode.WORKER_LOST)
        assert (await life.reporter.outcome("queued")).status is Status.SUCCESS
        assert await life.journal.get_meta(TOKEN) != "another boot"

    lab.with_journal(crash)
    lab.live(recover)
    assert runs(place) == 0


def test_adopted_task_is_neither_planned_nor_told_again(lab: ExecutorLab, place: Path) -> None:
    place.chmod(0o777)

    class Wordy(TaskType):
        name = "wordy"

        def plan(self, dispatch: Dispatch) -> ProcessPlan:
            if not dispatch.payload.endswith(" END"):
                raise invalid("the payload has no end")
            script = f"until [ -e {place}/go ]; do sleep 0.05; done; echo gone"
            return ProcessPlan(("/bin/sh", "-c", script), {"PATH": "/usr/bin:/bin"})

    async def crash(life: Life) -> None:
        await life.dispatch("t", "x" * 5000 + " END", task_type="wordy")
        await life.reporter.until(lambda: "running" in life.reporter.told["t"])

    async def recover(life: Life) -> None:
        (task,) = life.executor.find("t")
        assert task.phase is Phase.RUNNING
        # What a Start would be answered with has come when this has.
        assert life.executor.spawner.client is not None
        assert len(await life.executor.spawner.client.list_tasks()) == 1
        assert task.phase is Phase.RUNNING
        (place / "go").touch()
        assert (await life.reporter.outcome("t")).status is Status.SUCCESS
        assert life.reporter.told["t"] == ["running", "success"]

    lab.live(crash, types=[Wordy()])
    lab.live(recover, types=[Wordy()])


@pytest.mark.parametrize("token", ["the same", "another boot"])
@pytest.mark.parametrize("state", [State.ACCEPTED, State.RUNNING])
def test_task_whose_script_was_damaged_never_runs_what_is_left_of_it(
    lab: ExecutorLab, place: Path, state: State, token: str
) -> None:
    place.chmod(0o777)

    async def connect(life: Life) -> None:
        assert await life.journal.get_meta(TOKEN)

    async def crash(journal: Journal) -> None:
        if token != "the same":
            await journal.set_meta(TOKEN, token)
        script = f"mktemp {place}/run-XXXX; : {'x' * 5000}"
        await journal.accept(shell("t", script), initial=state)
        url = f"http://127.0.0.1:1/{'x' * 5000}"
        await journal.accept(
            msgspec.structs.replace(shell("u", url), task_type="http"), initial=state
        )

    async def recover(life: Life) -> None:
        outcome = await life.reporter.outcome("t")
        assert (outcome.status, outcome.error_code) == (Status.FAILED, ErrorCode.WORKER_LOST)
        may_have_run = state is State.RUNNING and token != "the same"
        assert ("never ran" in outcome.reason) is not may_have_run
        outcome = await life.reporter.outcome("u")
        assert (outcome.status, outcome.error_code) == (Status.FAILED, ErrorCode.WORKER_LOST)
        assert ("never ran" in outcome.reason) is (state is State.ACCEPTED)

    lab.live(connect)
    lab.with_journal(crash)
    with contextlib.closing(sqlite3.connect(lab.place / "journal.db")) as journal:
        assert journal.execute("DELETE FROM payloads").rowcount == 2
        journal.commit()
    lab.live(recover)
    assert runs(place) == 0


def test_cancel_that_was_journalled_before_a_crash_holds_after_it(lab: ExecutorLab) -> None:
    async def first(life: Life) -> None:
        await life.dispatch("running", "sleep 300")
        await life.reporter.until(lambda: "running" in life.reporter.told["running"])

    async def crash(journal: Journal) -> None:
        await journal.accept(shell("queued", "true"))
        await journal.accept(shell("unsent", "true"), initial=State.RUNNING)
        for name in ("running", "queued", "unsent"):
            await journal.cancel(name)

    async def second(life: Life) -> None:
        for name in ("running", "queued", "unsent"):
            assert (await life.reporter.outcome(name)).status is Status.CANCELLED
        assert "running" not in life.reporter.told["queued"] + life.reporter.told["unsent"]

    lab.live(first)
    lab.with_journal(crash)
    lab.live(second)


def test_task_that_the_journal_does_not_know_is_ended_and_forgotten(lab: ExecutorLab) -> None:
    async def first(life: Life) -> None:
        await life.dispatch("t", "sleep 300")
        await life.reporter.until(lambda: "running" in life.reporter.told["t"])

    async def second(life: Life) -> None:
        assert life.executor.spawner.client is not None
        assert await life.executor.spawner.client.list_tasks() == []
        await life.dispatch("t", "echo new")
        assert (await life.reporter.outcome("t")).status is Status.SUCCESS

    lab.live(first)
    for path in lab.place.glob("journal.db*"):
        path.unlink()
    lab.live(second)


def test_adopted_output_goes_on_where_the_last_life_stopped(lab: ExecutorLab, place: Path) -> None:
    async def first(life: Life) -> None:
        await life.dispatch(
            "t", f"echo one; until [ -e {place}/go ]; do sleep 0.02; done; echo two"
        )
        await life.reporter.until(lambda: life.executor.find("t")[0].capture is not None)
        capture = life.executor.find("t")[0].capture
        assert capture is not None
        while not capture.total:
            await asyncio.sleep(0.01)

    async def second(life: Life) -> None:
        (place / "go").touch()
        outcome = await life.reporter.outcome("t")
        assert outcome.output_bytes == 8
        assert life.reporter.rows["t"].excerpt == "one\ntwo\n"

    lab.live(first)
    lab.live(second)


def test_spawners_death_between_starts_loses_and_repeats_nothing(
    lab: ExecutorLab, place: Path
) -> None:
    place.chmod(0o777)

    async def body(life: Life) -> None:
        names = [f"t{number}" for number in range(40)]
        for number, name in enumerate(names):
            await life.dispatch(name, f"mktemp {place}/run-XXXXXX; sleep 0.05")
            if number == 15:
                pidfd.checked_kill(in_charge(lab.spawners()), signal.SIGKILL)
        outcomes = [await life.reporter.outcome(name) for name in names]
        failed = [each for each in outcomes if each.status is not Status.SUCCESS]
        assert failed == []
        ends = [what for _, what in life.reporter.order if what not in ("accepted", "running")]
        assert len(ends) == len(names)

    lab.live(body, max_concurrency=3)
    assert runs(place) == 40


def test_nothing_starts_without_a_spawner_and_all_of_it_after_its_return(
    lab: ExecutorLab,
) -> None:
    async def body(life: Life) -> None:
        assert life.executor.spawner.client is not None
        life.executor.spawner.spawner_lost()
        await life.dispatch("queued", "echo queued")
        await life.dispatch("cancelled", "echo never")
        (row,) = await life.journal.find("queued")
        assert row.state is State.ACCEPTED
        assert await life.intake.cancel("cancelled")
        await life.reporter.outcome("cancelled")
        assert life.executor.find("queued")[0].phase is Phase.QUEUED
        pidfd.checked_kill(in_charge(lab.spawners()), signal.SIGKILL)
        assert (await life.reporter.outcome("queued")).status is Status.SUCCESS

    lab.live(body)


def test_stop_terminates_what_runs_and_leaves_the_queue_journalled(lab: ExecutorLab) -> None:
    async def first(life: Life) -> None:
        await life.dispatch("running", "sleep 300")
        await life.dispatch("queued", "echo later")
        await life.executor.stop("cancelled: the worker was stopped")
        outcome = await life.reporter.outcome("running")
        assert (outcome.status, outcome.reason) == (
            Status.CANCELLED, "cancelled: the worker was stopped",
        )  # fmt: skip
        assert "queued" not in life.reporter.rows

    async def second(life: Life) -> None:
        assert (await life.reporter.outcome("queued")).status is Status.SUCCESS

    lab.live(first, max_concurrency=1)
    lab.live(second, max_concurrency=1)


def test_lowered_wishes_are_told_in_the_reason(lab: ExecutorLab) -> None:
    async def body(life: Life) -> None:
        await life.dispatch("t", "true", limits={"timeout_stop": "99"},
                            timeout_seconds=9)  # fmt: skip
        outcome = await life.reporter.outcome("t")
        assert outcome.status is Status.SUCCESS
        assert "timeout_stop lowered" in outcome.reason
        assert outcome.profile == "process"

    lab.live(body)


async def hung_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until the client has, or the loop ends."""
    try:
        await reader.read()
    finally:
        writer.transport.abort()
        # One turn of the loop closes the socket.
        await asyncio.sleep(0)


def test_http_task_is_worker_lost_after_a_crash_and_not_asked_again(lab: ExecutorLab) -> None:
    asked = []

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        await hung_up(reader, writer)

    async def first(life: Life) -> None:
        server = await asyncio.start_server(hang, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        await life.dispatch("t", f"http://127.0.0.1:{port}/x", task_type="http")
        while not asked:
            await asyncio.sleep(0.01)
        assert life.executor.load().running_tasks == 1
        server.close()

    async def second(life: Life) -> None:
        outcome = await life.reporter.outcome("t")
        assert outcome.error_code is ErrorCode.WORKER_LOST
        assert life.reporter.told["t"] == ["failed"]

    lab.live(first)
    lab.live(second)
    assert len(asked) == 1


@pytest.mark.parametrize(("end", "status"), [("cancel", "cancelled"), ("deadline", "timeout")])
def test_http_task_ends_at_its_deadline_and_on_cancel(
    lab: ExecutorLab, end: str, status: str
) -> None:
    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\npart")
        await hung_up(reader, writer)

    async def body(life: Life) -> None:
        server = await asyncio.start_server(hang, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        await life.dispatch(
            "t", f"http://127.0.0.1:{port}/x", task_type="http",
            limits={"runtime_max": "300ms"} if end == "deadline" else {},
            http=HttpRequest(),
        )  # fmt: skip
        if end == "cancel":
            await life.reporter.until(lambda: "running" in life.reporter.told["t"])
            assert await life.intake.cancel("t")
        outcome = await life.reporter.outcome("t")
        assert outcome.status.value == outcome.error_code.value == status
        assert outcome.wall_s is not None
        server.close()

    lab.live(body)
