"""The scheduler's store on a real file: grouped commits, full disks, restarts."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from stockade.supervisor.scheduler.database import Database
from stockade.supervisor.scheduler.errors import (
    ConflictError,
    NotFoundError,
    RequestError,
    StoreError,
)
from stockade.supervisor.scheduler.states import Event, State
from stockade.supervisor.scheduler.store import Details, Store
from stockade.supervisor.scheduler.tasks import Submission, parse_submission


@asynccontextmanager
async def opened(directory: Path) -> AsyncIterator[Store]:
    store = await Store.open(str(directory / "scheduler.db"))
    try:
        yield store
    finally:
        await store.close()


def in_store(directory: Path, body: Callable[[Store], Awaitable[None]]) -> None:
    async def scenario() -> None:
        async with opened(directory) as store:
            await body(store)

    asyncio.run(scenario())


async def sent(store: Store, submission: Submission) -> str:
    await store.submit(submission)
    (claim,) = await store.claim({"w1": 1})
    return claim.instance.instance_id


def test_the_oldest_go_first_and_to_the_worker_with_the_most_room(tmp_path: Path) -> None:
    async def body(store: Store) -> None:
        for number in range(4):
            await store.submit(Submission(payload=str(number)))
        claims = await store.claim({"small": 1, "large": 2})
        assert [claim.submission.payload for claim in claims] == ["0", "1", "2"]
        assert claims[0].instance.worker_id == "large"
        assert sorted(claim.instance.worker_id for claim in claims) == ["large", "large", "small"]
        assert (await store.counts())[State.QUEUED] == 1

    in_store(tmp_path, body)


def test_a_retry_is_made_together_with_the_end_and_has_its_own_id(tmp_path: Path) -> None:
    async def body(store: Store) -> None:
        instance_id = await sent(store, Submission(retries=1))
        applied = await store.apply(instance_id, Event.FAIL, Details(error_code="execute_failed"))
        assert applied.retried
        task, _ = await store.find(instance_id)
        assert not task.ended
        assert task.current.retry_count == 1
        assert task.current.instance_id.startswith(f"task-{task.task_id}-retry-1-")
        (claim,) = await store.claim({"w1": 1})
        applied = await store.apply(claim.instance.instance_id, Event.TIME_OUT)
        assert not applied.retried
        task, _ = await store.find(instance_id)
        assert task.ended

    in_store(tmp_path, body)


@pytest.mark.parametrize(
    ("submission", "event", "error_code", "is_retried"),
    [
        (Submission(retries=1), Event.FAIL, "execute_failed", True),
        (Submission(retries=1), Event.TIME_OUT, "timeout", True),
        (Submission(retries=1), Event.CANCEL, "cancelled", False),
        (Submission(retries=1), Event.SUCCEED, "", False),
        (Submission(retries=1), Event.REFUSE, "dispatch_failed", False),
        (Submission(retries=0), Event.FAIL, "execute_failed", False),
        (Submission(retries=1, retry_on=("timeout",)), Event.FAIL, "execute_failed", False),
        (Submission(retries=1, retry_on=("timeout",)), Event.TIME_OUT, "timeout", True),
        (Submission(retries=1, retry_error_codes=("oom_killed",)), Event.FAIL, "signaled", False),
        (Submission(retries=1, retry_error_codes=("oom_killed",)), Event.FAIL, "oom_killed", True),
    ],
)
def test_the_policy_says_what_is_retried(
    tmp_path: Path, submission: Submission, event: Event, error_code: str, is_retried: bool
) -> None:
    async def body(store: Store) -> None:
        instance_id = await sent(store, submission)
        applied = await store.apply(instance_id, event, Details(error_code=error_code))
        assert applied.retried is is_retried

    in_store(tmp_path, body)


def test_no_retry_follows_once_a_cancel_was_asked_for(tmp_path: Path) -> None:
    async def body(store: Store) -> None:
        instance_id = await sent(store, Submission(retries=5))
        await store.request_cancel(instance_id)
        assert not (await store.apply(instance_id, Event.FAIL)).retried

    in_store(tmp_path, body)


def test_an_end_is_final(tmp_path: Path) -> None:
    async def body(store: Store) -> None:
        instance_id = await sent(store, Submission())
        await store.apply(instance_id, Event.SUCCEED, Details(error_message="hello"))
        for event in (Event.RUN, Event.FAIL, Event.CANCEL, Event.REFUSE):
            assert not (await store.apply(instance_id, event)).changed
        _, instance = await store.find(instance_id)
        assert (instance.state, instance.error_message) == (State.SUCCESS, "hello")

    in_store(tmp_path, body)


def test_a_dispatch_without_answer_goes_to_the_same_worker_after_a_restart(tmp_path: Path) -> None:
    async def first(store: Store) -> None:
        await sent(store, Submission(payload="bound"))
        await store.submit(Submission(payload="free"))

    async def second(store: Store) -> None:
        (claim,) = await store.claim({"w2": 5})
        assert claim.submission.payload == "free"
        (claim,) = await store.claim({"w1": 5, "w2": 5})
        assert (claim.submission.payload, claim.instance.worker_id) == ("bound", "w1")

    in_store(tmp_path, first)
    in_store(tmp_path, second)


def test_a_known_instance_id_gives_its_task_and_other_contents_are_a_conflict(
    tmp_path: Path,
) -> None:
    async def body(store: Store) -> None:
        task, is_new = await store.submit(Submission(payload="a", instance_id="../x"))
        assert is_new
        again, is_new = await store.submit(Submission(payload="a", instance_id="../x"))
        assert (again.task_id, is_new) == (task.task_id, False)
        with pytest.raises(ConflictError, match="other contents"):
            await store.submit(Submission(payload="b", instance_id="../x"))

    in_store(tmp_path, body)


def test_an_instance_id_of_digits_wins_over_the_task_of_that_number(tmp_path: Path) -> None:
    async def body(store: Store) -> None:
        await store.submit(Submission(payload="one"))
        await store.submit(Submission(payload="two", instance_id="1"))
        assert (await store.find("1"))[0].submission.payload == "two"
        assert (await store.find("2"))[0].submission.payload == "two"
        for unknown in ("3", "", "x", "\N{ARABIC-INDIC DIGIT ONE}", "9" * 400):
            with pytest.raises(NotFoundError):
                await store.find(unknown)

    in_store(tmp_path, body)


def test_old_ended_tasks_are_removed_and_others_kept(tmp_path: Path) -> None:
    async def body(store: Store) -> None:
        await store.apply(await sent(store, Submission()), Event.SUCCEED)
        await store.apply(await sent(store, Submission(retries=1)), Event.FAIL)
        future = 2.0**40
        assert await store.remove_ended(0.0, 10) == 0
        assert await store.remove_ended(future, 10) == 1
        assert [task.status for task in await store.recent(10)] == ["queued"]

    in_store(tmp_path, body)


def test_one_failing_operation_takes_no_other_of_its_group_with_it(tmp_path: Path) -> None:
    async def body(store: Store) -> None:
        results = await asyncio.gather(
            store.submit(Submission(payload="a")),
            store.apply("unknown", Event.RUN),
            store.submit(Submission(payload="b")),
            return_exceptions=True,
        )
        assert isinstance(results[1], NotFoundError)
        assert len(await store.recent(10)) == 2

    in_store(tmp_path, body)


def test_a_full_disk_is_an_error_of_the_request_and_passes(tmp_path: Path) -> None:
    async def scenario() -> None:
        def table(connection: sqlite3.Connection) -> None:
            connection.execute("CREATE TABLE things (thing TEXT)")

        def fill(connection: sqlite3.Connection) -> None:
            connection.execute("INSERT INTO things VALUES (?)", ("x" * 1_000_000,))

        def count(connection: sqlite3.Connection) -> int:
            return int(connection.execute("SELECT count(*) FROM things").fetchone()[0])

        def pages(number: int) -> Callable[[sqlite3.Connection], None]:
            def operation(connection: sqlite3.Connection) -> None:
                connection.execute(f"PRAGMA max_page_count = {number}")

            return operation

        database = await Database.open(str(tmp_path / "a.db"), table)
        try:
            await database.run(pages(10))
            with pytest.raises(StoreError, match="full"):
                await database.run(fill)
            assert await database.run(count) == 0
            await database.run(pages(10_000))
            await database.run(fill)
            assert await database.run(count) == 1
        finally:
            await database.close()
        with pytest.raises(StoreError, match="closed"):
            await database.run(count)

    asyncio.run(scenario())


def test_a_file_that_is_no_store_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "scheduler.db"
    path.write_bytes(b"not a database" * 100)

    async def scenario() -> None:
        with pytest.raises(StoreError, match="not a database"):
            await Store.open(str(path))

    asyncio.run(scenario())
    assert path.read_bytes() == b"not a database" * 100


def test_a_store_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    async def nothing(_store: Store) -> None: ...

    in_store(tmp_path, nothing)
    connection = sqlite3.connect(tmp_path / "scheduler.db")
    connection.execute("PRAGMA user_version = 99")
    connection.close()

    async def scenario() -> None:
        with pytest.raises(StoreError, match="version 99"):
            await Store.open(str(tmp_path / "scheduler.db"))

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"", "cannot submit the task"),
        (b"[]", "Expected `object`"),
        (b'{"pay_load": ""}', "unknown field `pay_load`"),
        (b'{"payload": 1}', r"\$\.payload"),
        (b'{"timeout_seconds": "5"}', r"\$\.timeout_seconds"),
        (b'{"retries": -1}', r"\$\.retries"),
        (b'{"retry_on": ["success"]}', r"\$\.retry_on"),
        (b'{"payload": "\\ud800\\u0041"}', "surrogate"),
        (b'{"instance_id": ""}', "1 to 256 characters"),
        (b'{"instance_id": "a\\u0000"}', "no NUL"),
        (b'{"instance_id": "%s"}' % (b"x" * 257), "1 to 256 characters"),
    ],
)
def test_a_bad_submission_is_refused_with_its_reason(body: bytes, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        parse_submission(body)
