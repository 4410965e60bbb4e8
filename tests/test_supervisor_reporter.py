from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from recording_scheduler import (
    RESULT_PATH,
    Answer,
    CutBody,
    Hang,
    Message,
    RecordingScheduler,
)
from structlog.testing import capture_logs

from stockade.sandbox.outcome import ErrorCode, Outcome, Status
from stockade.supervisor.channel import CONCURRENCY
from stockade.supervisor.config import Config
from stockade.supervisor.config_load import load
from stockade.supervisor.dispatch import Dispatch
from stockade.supervisor.errors import InvalidTransitionError, JournalError
from stockade.supervisor.journal import Journal, Row
from stockade.supervisor.links.http import HttpLink, credentials_for
from stockade.supervisor.outages import Outages
from stockade.supervisor.reporter import Reporter
from stockade.supervisor.states import State
from stockade.supervisor.wire.messages import (
    ACK_PATH,
    REPORT_PATH,
    RUNNING_FIELDS,
    ExecuteRequest,
)

DEADLINE_S = 10.0


class NoIntake:
    async def execute(self, request: ExecuteRequest, link: str) -> None: ...

    async def cancel(self, instance_id: str) -> bool:
        return False


def outcome(status: Status = Status.SUCCESS) -> Outcome:
    now = time.time()
    if status is Status.SUCCESS:
        return Outcome(status=status, exit_code=0, started_at=now - 1, finished_at=now)
    return Outcome(
        status=status,
        error_code=ErrorCode.EXECUTE_FAILED,
        reason="exit code 3",
        exit_code=3,
        started_at=now - 1,
        finished_at=now,
    )


class Bench:
    """A journal, a link and a reporter, as a worker has them, without tasks."""

    def __init__(self, journal: Journal, link: HttpLink, config: Config) -> None:
        self.journal = journal
        self.link = link
        self.outages = Outages()
        self.reporter = Reporter({"http": link}, journal, config, self.outages)

    async def accept(self, instance_id: str, scheduler: str = "") -> Row:
        dispatch = Dispatch(instance_id=instance_id, scheduler=scheduler, payload="true")
        accepted = await self.journal.accept(dispatch, initial=State.RUNNING)
        assert accepted.is_new
        return accepted.row

    async def finish(self, row: Row, end: Outcome | None = None, excerpt: str = "hi\n") -> Row:
        await self.journal.finish(row.seq, end or outcome(), excerpt)
        finished = await self.journal.row(row.seq)
        assert finished is not None
        return finished

    async def run(self, instance_id: str, scheduler: str = "") -> Row:
        """A whole task's life, told to the reporter."""
        row = await self.accept(instance_id, scheduler)
        self.reporter.accepted(row)
        self.reporter.running(row)
        row = await self.finish(row)
        self.reporter.finished(row)
        return row

    async def reaches(self, row: Row, state: State) -> None:
        """Wait until the journal says so."""
        async with asyncio.timeout(DEADLINE_S):
            while (found := await self.journal.row(row.seq)) is None or found.state is not state:
                await asyncio.sleep(0.005)


def config(tmp_path: Path, scheduler: RecordingScheduler, **keys: object) -> Config:
    overrides: dict[str, object] = {
        "worker.id": "w1",
        "worker.state_dir": str(tmp_path),
        "worker.runtime_dir": str(tmp_path),
        "http.listen": "127.0.0.1:0",
        "http.scheduler": scheduler.url,
        "report.attempt_timeout": 5.0,
        "report.retry_min": 0.02,
        "report.retry_max": 0.1,
        "report.refused_period": 0.1,
    }
    overrides.update({key.replace("__", "."): value for key, value in keys.items()})
    return load(None, {"HOME": str(tmp_path)}, overrides).config


@contextlib.asynccontextmanager
async def benched(
    tmp_path: Path, scheduler: RecordingScheduler, **keys: object
) -> AsyncIterator[Bench]:
    settings = config(tmp_path, scheduler, **keys)
    journal = await Journal.open(tmp_path / "journal.db")
    link = HttpLink(
        settings,
        NoIntake(),
        metrics=bytes,
        credentials=credentials_for(settings),
        task_uids=None,
    )
    bench = Bench(journal, link, settings)
    try:
        yield bench
    finally:
        await bench.reporter.close()
        await link.close()
        await journal.close()


def reporting(
    tmp_path: Path,
    scheduler: RecordingScheduler,
    body: Callable[[Bench], Coroutine[Any, Any, None]],
    **keys: object,
) -> list[Any]:
    """Run ``body`` with a bench; gives the log without its debug lines."""

    async def run() -> None:
        async with benched(tmp_path, scheduler, **keys) as bench:
            await body(bench)

    with capture_logs() as lines:
        asyncio.run(run())
    return [line for line in lines if line["log_level"] != "debug"]


async def seen(
    scheduler: RecordingScheduler, predicate: Callable[[RecordingScheduler], Any]
) -> Any:
    return await asyncio.to_thread(scheduler.wait_for, predicate, DEADLINE_S)


def outage_lines(lines: list[Any]) -> list[str]:
    return [line["event"] for line in lines if "outage" in line["event"]]


ONE_OUTAGE = ["scheduler outage began", "scheduler outage ended"]


# The order of a task's messages.


def test_a_task_is_told_as_ack_running_and_its_end(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        row = await bench.run("task-1")
        await bench.reaches(row, State.DELIVERED)
        assert bench.reporter.undelivered() == (0, 0.0)

    with RecordingScheduler() as scheduler:
        reporting(tmp_path, scheduler, body)
        assert scheduler.kinds("task-1") == ["ack", "running", "success"]
        ack, running, success = (message.body for message in scheduler.messages)
    assert ack == {"schedule_instance_id": "task-1", "worker_id": "w1"}
    assert tuple(running) == RUNNING_FIELDS
    assert running["status"] == "running"
    assert success["error_message"] == "hi\n"
    assert success["exit_code"] == 0
    assert success["finished_at"].endswith("Z")


def test_many_tasks_each_keep_their_order(tmp_path: Path) -> None:
    ids = [f"task-{number}" for number in range(200)]

    async def body(bench: Bench) -> None:
        rows = await asyncio.gather(*(bench.run(instance_id) for instance_id in ids))
        for row in rows:
            await bench.reaches(row, State.DELIVERED)

    with RecordingScheduler() as scheduler:
        reporting(tmp_path, scheduler, body)
        for instance_id in ids:
            assert scheduler.kinds(instance_id) == ["ack", "running", "success"]
        assert len({message.connection for message in scheduler.messages}) <= 16


def test_a_late_running_never_follows_the_end(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        row = await bench.accept("task-1")
        finished = await bench.finish(row)
        bench.reporter.finished(finished)
        bench.reporter.running(row)
        await bench.reaches(row, State.DELIVERED)
        bench.reporter.running(row)
        other = await bench.run("task-2")
        await bench.reaches(other, State.DELIVERED)

    with RecordingScheduler() as scheduler:
        reporting(tmp_path, scheduler, body)
        assert scheduler.kinds("task-1") == ["success"]


def test_an_end_waits_for_the_running_report_under_way(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        slow = Answer(delay_s=0.1)
        scheduler.misbehave(slow, matching=lambda message: message.kind == "running")
        row = await bench.run("task-1")
        await bench.reaches(row, State.DELIVERED)

    with RecordingScheduler() as scheduler:
        reporting(tmp_path, scheduler, body)
        assert scheduler.kinds("task-1") == ["ack", "running", "success"]
        _, running, success = scheduler.messages
        assert success.at - running.at >= 0.1


def test_a_refused_ack_and_running_are_given_up_and_the_end_is_not(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        scheduler.misbehave(Answer(400), matching=lambda message: message.kind != "success")
        row = await bench.run("task-1")
        await bench.reaches(row, State.DELIVERED)

    with RecordingScheduler() as scheduler:
        reporting(tmp_path, scheduler, body)
        assert scheduler.kinds("task-1") == ["ack", "running", "success"]


def test_the_older_dialect_is_told_the_result_alone(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        row = await bench.accept("task-1")
        bench.reporter.accepted(row)
        bench.reporter.running(row)
        bench.reporter.finished(await bench.finish(row, outcome(Status.FAILED), "last\n"))
        await bench.reaches(row, State.DELIVERED)

    with RecordingScheduler() as scheduler:
        reporting(tmp_path, scheduler, body, report__dialect="task-result")
        (message,) = scheduler.messages
    assert message.path == RESULT_PATH
    assert message.body == {
        "schedule_instance_id": "task-1",
        "status": "failed",
        "output": "last\n",
        "error_message": "exit code 3",
    }


# Outages.


def test_reports_of_an_outage_are_delivered_after_it_and_it_is_two_lines(tmp_path: Path) -> None:
    ids = [f"task-{number}" for number in range(50)]

    async def body(bench: Bench) -> None:
        scheduler.stop()
        rows = [await bench.run(instance_id) for instance_id in ids]
        assert await bench.reporter.flush(DEADLINE_S)
        count, age_s = bench.reporter.undelivered()
        assert count == len(ids)
        assert age_s > 0
        scheduler.start()
        for row in rows:
            await bench.reaches(row, State.DELIVERED)
        assert bench.reporter.undelivered() == (0, 0.0)

    with RecordingScheduler() as scheduler:
        lines = reporting(tmp_path, scheduler, body)
        delivered = [report["schedule_instance_id"] for report in scheduler.terminal_reports()]
    assert sorted(delivered) == sorted(ids)
    assert outage_lines(lines) == ONE_OUTAGE


def test_after_an_outage_as_many_are_under_way_as_before(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        scheduler.stop()
        for number in range(40):
            await bench.run(f"task-{number}")
        assert await bench.reporter.flush(DEADLINE_S)
        before = len(scheduler.messages)
        scheduler.misbehave(Answer(), times=1)
        scheduler.misbehave(Hang())
        scheduler.start()
        # The first answer ends the outage; all that follows waits for its own.
        await seen(scheduler, lambda s: len(s.messages) >= before + 1 + CONCURRENCY)

    with RecordingScheduler() as scheduler:
        reporting(tmp_path, scheduler, body, report__attempt_timeout=60)


def test_a_scheduler_that_never_answers_is_asked_by_one_delivery_at_a_time(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        scheduler.misbehave(Hang())
        rows = [await bench.run(f"task-{number}") for number in range(40)]
        # The first 16 are under way when it shows; after them it is one by one, each another.
        await seen(scheduler, lambda s: len(s.messages) >= 20)
        assert len({message.id for message in scheduler.messages[16:20]}) >= 3
        scheduler.behave()
        for row in rows:
            await bench.reaches(row, State.DELIVERED)

    with RecordingScheduler() as scheduler:
        reporting(tmp_path, scheduler, body, report__attempt_timeout=0.5)
        probes = scheduler.messages[16:20]
        assert all(later.at - earlier.at > 0.05 for earlier, later in pairwise(probes))


def test_a_scheduler_that_never_answers_holds_up_no_other(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        scheduler.misbehave(Hang())
        for number in range(40):
            await bench.run(f"stuck-{number}")
        row = await bench.run("task-1", other.url)
        await bench.reaches(row, State.DELIVERED)
        assert bench.reporter.undelivered()[0] == 40

    with RecordingScheduler() as scheduler, RecordingScheduler() as other:
        reporting(tmp_path, scheduler, body, report__attempt_timeout=60)
        assert other.kinds("task-1") == ["ack", "running", "success"]


def test_one_report_that_meets_errors_for_ever_holds_up_no_other(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        scheduler.misbehave(Answer(500), matching=lambda message: message.id == "poison")
        poison = await bench.run("poison")
        await seen(scheduler, lambda s: len(s.of("poison")) >= 3)
        rows = [await bench.run(f"task-{number}") for number in range(20)]
        for row in rows:
            await bench.reaches(row, State.DELIVERED)
        count = len(scheduler.of("poison"))
        await seen(scheduler, lambda s: len(s.of("poison")) >= count + 7)
        scheduler.behave()
        await bench.reaches(poison, State.DELIVERED)

    with RecordingScheduler() as scheduler:
        lines = reporting(tmp_path, scheduler, body)
        for number in range(20):
            assert scheduler.kinds(f"task-{number}") == ["ack", "running", "success"]
        # Once its end is known, an ack that failed is not tried again.
        assert scheduler.kinds("poison")[-1] == "success"
    assert outage_lines(lines) == []


def test_a_scheduler_that_answers_503_to_all_is_an_outage(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        scheduler.misbehave(Answer(503))
        rows = [await bench.run(f"task-{number}") for number in range(20)]
        await seen(scheduler, lambda s: len(s.messages) >= 30)
        scheduler.behave()
        for row in rows:
            await bench.reaches(row, State.DELIVERED)

    with RecordingScheduler() as scheduler:
        lines = reporting(tmp_path, scheduler, body)
        assert len(scheduler.terminal_reports()) >= 20
    assert outage_lines(lines) == ONE_OUTAGE


def test_the_heartbeats_contact_ends_the_wait(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        outage = bench.outages.of(scheduler.url)
        scheduler.stop()
        outage.failed("heartbeat", "refused")
        row = await bench.run("task-1")
        assert await bench.reporter.flush(DEADLINE_S)
        scheduler.start()
        # The next attempt is an hour away.
        outage.recovered("heartbeat")
        await bench.reaches(row, State.DELIVERED)

    with RecordingScheduler() as scheduler:
        lines = reporting(tmp_path, scheduler, body, report__retry_min=3600, report__retry_max=3600)
    assert outage_lines(lines) == ONE_OUTAGE


# Answers that refuse.


@pytest.mark.parametrize("status", [400, 404, 413])
def test_a_report_refused_for_ever_becomes_a_dead_letter(tmp_path: Path, status: int) -> None:
    async def body(bench: Bench) -> None:
        scheduler.misbehave(Answer(status, {"error": "no"}), path=REPORT_PATH)
        row = await bench.accept("task-1")
        bench.reporter.finished(await bench.finish(row))
        await bench.reaches(row, State.DEAD)
        assert bench.reporter.undelivered() == (0, 0.0)
        (dead,) = await bench.journal.dead_letters()
        assert f"answered {status}" in dead.error
        assert dead.attempts == len(scheduler.messages)
        # It is sent again when an operator wants it.
        scheduler.behave()
        await bench.reporter.resend(row.seq)
        await bench.reaches(row, State.DELIVERED)
        with pytest.raises(InvalidTransitionError):
            await bench.reporter.resend(row.seq)

    with RecordingScheduler() as scheduler:
        lines = reporting(tmp_path, scheduler, body, report__refused_period=0.2)
        refused = scheduler.messages[:-1]
        assert refused[-1].at - refused[0].at >= 0.2
    assert len(refused) == 5 + (status == 413)
    events = [line["event"] for line in lines]
    assert events == ["report refused for good, kept as a dead letter"]


def test_many_dead_letters_are_few_lines_and_hold_up_no_other(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        scheduler.misbehave(Answer(400), matching=lambda m: m.id.startswith("bad"))
        bad = [await bench.run(f"bad-{number}") for number in range(50)]
        good = await bench.run("good")
        await bench.reaches(good, State.DELIVERED)
        for row in bad:
            await bench.reaches(row, State.DEAD)

    with RecordingScheduler() as scheduler:
        lines = reporting(tmp_path, scheduler, body)
    assert len(lines) == 1


def test_a_report_that_is_too_large_is_sent_without_its_excerpt(tmp_path: Path) -> None:
    def large(message: Message) -> bool:
        return len(message.raw) > 1000

    async def body(bench: Bench) -> None:
        scheduler.misbehave(Answer(413), matching=large)
        row = await bench.accept("task-1")
        bench.reporter.finished(
            await bench.finish(row, outcome(Status.FAILED), "long output " * 100)
        )
        await bench.reaches(row, State.DELIVERED)

    with RecordingScheduler() as scheduler:
        reporting(tmp_path, scheduler, body)
        first, second = scheduler.terminal_reports()
    assert first["output_truncated"] is False
    assert second["error_message"] == "exit code 3"
    assert second["output_truncated"] is True


def test_a_conflict_is_delivered(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        # The first answer is lost on its way; the repeat meets a scheduler that knows already.
        scheduler.misbehave(CutBody(), path=REPORT_PATH, times=1)
        scheduler.misbehave(Answer(409), path=REPORT_PATH)
        row = await bench.accept("task-1")
        bench.reporter.finished(await bench.finish(row))
        await bench.reaches(row, State.DELIVERED)

    with RecordingScheduler() as scheduler:
        reporting(tmp_path, scheduler, body)
        assert scheduler.kinds("task-1") == ["success", "success"]


# Restarts and the journal.


def test_reports_of_before_are_delivered_once_and_oldest_first(tmp_path: Path) -> None:
    ids = [f"task-{number:03}" for number in range(100)]

    async def before(bench: Bench) -> None:
        scheduler.stop()
        for instance_id in ids:
            await bench.run(instance_id)

    async def after(bench: Bench) -> None:
        scheduler.start()
        await bench.reporter.resume()
        assert bench.reporter.undelivered()[0] == len(ids)
        assert await bench.reporter.flush(DEADLINE_S)
        assert bench.reporter.undelivered() == (0, 0.0)
        assert await bench.journal.undelivered_seqs() == []

    with RecordingScheduler() as scheduler:
        reporting(tmp_path, scheduler, before)
        reporting(tmp_path, scheduler, after)
        # No ack and no running any more: they have ended.
        told = [message.id for message in scheduler.messages]
    assert sorted(told) == ids
    # Up to 16 are under way together, so each may come at most so much too early or too late.
    assert all(abs(told.index(instance_id) - n) <= 16 for n, instance_id in enumerate(ids))


def test_a_long_backlog_holds_up_no_fresh_report(tmp_path: Path) -> None:
    async def before(bench: Bench) -> None:
        scheduler.stop()
        for number in range(300):
            await bench.run(f"old-{number}")

    async def after(bench: Bench) -> None:
        scheduler.start()
        scheduler.misbehave(Answer(delay_s=0.01))
        await bench.reporter.resume()
        await seen(scheduler, lambda s: s.messages)
        row = await bench.run("fresh")
        await bench.reaches(row, State.DELIVERED)
        # With 16 under way and every second turn the fresh ones', three messages are soon sent.
        assert bench.reporter.undelivered()[0] > 100
        assert await bench.reporter.flush(30)

    with RecordingScheduler() as scheduler:
        reporting(tmp_path, scheduler, before)
        reporting(tmp_path, scheduler, after)
        assert scheduler.kinds("fresh") == ["ack", "running", "success"]
        assert len(scheduler.terminal_reports()) == 301


class FailingJournal:
    """The real journal, except that it fails so many times first."""

    def __init__(self, journal: Journal, failures: int) -> None:
        self._journal = journal
        self.failures = failures

    def _maybe_fail(self) -> None:
        if self.failures:
            self.failures -= 1
            raise JournalError("cannot write the journal: no space left on device")

    async def row(self, seq: int) -> Row | None:
        self._maybe_fail()
        return await self._journal.row(seq)

    async def undelivered_seqs(self) -> list[int]:
        return await self._journal.undelivered_seqs()

    async def deliver(self, seq: int, attempts: int) -> None:
        self._maybe_fail()
        await self._journal.deliver(seq, attempts)

    async def refuse(self, seq: int, why: str, attempts: int) -> None:
        self._maybe_fail()
        await self._journal.refuse(seq, why, attempts)

    async def resend(self, seq: int) -> None:
        await self._journal.resend(seq)


def test_a_delivery_that_cannot_be_recorded_is_recorded_later_and_not_sent_again(
    tmp_path: Path,
) -> None:
    async def body(bench: Bench) -> None:
        journal = FailingJournal(bench.journal, 3)
        settings = config(tmp_path, scheduler)
        bench.reporter = Reporter({"http": bench.link}, journal, settings, Outages())
        row = await bench.run("task-1")
        await bench.reaches(row, State.DELIVERED)
        assert journal.failures == 0

    with RecordingScheduler() as scheduler:
        lines = reporting(tmp_path, scheduler, body)
        assert scheduler.kinds("task-1") == ["ack", "running", "success"]
    assert outage_lines(lines) == []


def test_a_backlog_waits_for_a_journal_that_cannot_be_read(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        row = await bench.finish(await bench.accept("task-1"))
        journal = FailingJournal(bench.journal, 3)
        settings = config(tmp_path, scheduler)
        bench.reporter = Reporter({"http": bench.link}, journal, settings, Outages())
        await bench.reporter.resume()
        await bench.reaches(row, State.DELIVERED)

    with RecordingScheduler() as scheduler:
        reporting(tmp_path, scheduler, body)
        assert scheduler.kinds("task-1") == ["success"]


def test_a_fault_that_one_report_meets_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(bench: Bench) -> None:
        real = bench.link.send_ack

        async def faulty(url: str, ack: Any) -> Any:
            if ack.schedule_instance_id == "odd":
                raise ZeroDivisionError
            return await real(url, ack)

        monkeypatch.setattr(bench.link, "send_ack", faulty)
        await bench.run("odd")
        row = await bench.run("task-1")
        await bench.reaches(row, State.DELIVERED)

    with RecordingScheduler() as scheduler:
        lines = reporting(tmp_path, scheduler, body)
        assert scheduler.kinds("task-1") == ["ack", "running", "success"]
    assert lines[0]["event"] == "delivery failed"


def test_flush_gives_up_at_its_deadline(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        scheduler.misbehave(Hang())
        await bench.run("task-1")
        assert not await bench.reporter.flush(0.1)
        assert bench.reporter.undelivered()[0] == 1

    with RecordingScheduler() as scheduler:
        reporting(tmp_path, scheduler, body)


def test_a_task_of_a_link_that_is_gone_is_reported_all_the_same(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        dispatch = Dispatch(instance_id="task-1", link="nats")
        row = (await bench.journal.accept(dispatch, initial=State.RUNNING)).row
        bench.reporter.finished(await bench.finish(row))
        await bench.reaches(row, State.DELIVERED)

    with RecordingScheduler() as scheduler:
        reporting(tmp_path, scheduler, body)
        assert scheduler.kinds("task-1") == ["success"]


def test_an_ack_that_fails_is_sent_again_while_the_task_runs(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        scheduler.misbehave(Answer(503), path=ACK_PATH, times=3)
        row = await bench.accept("task-1")
        bench.reporter.accepted(row)
        bench.reporter.running(row)
        await seen(scheduler, lambda s: "running" in s.kinds("task-1"))

    with RecordingScheduler() as scheduler:
        reporting(tmp_path, scheduler, body)
        assert scheduler.kinds("task-1") == ["ack"] * 4 + ["running"]
