from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from journal_lab import unfinished_seqs, with_journal

from stockade.sandbox.outcome import ErrorCode, Outcome, Status
from stockade.supervisor import journal_history
from stockade.supervisor.dispatch import Dispatch
from stockade.supervisor.errors import InvalidTransitionError, JournalError
from stockade.supervisor.journal import Journal, Row
from stockade.supervisor.journal_rows import encode_dispatch, encode_outcome
from stockade.supervisor.journal_store import JournalStore
from stockade.supervisor.states import TRANSITIONS, Event, State
from stockade.supervisor.wire.messages import HttpRequest

OUTCOME = Outcome(
    Status.FAILED,
    ErrorCode.OOM_KILLED,
    reason="killed: memory_max 256M reached",
    signal="SIGKILL",
    wall_s=1.5,
    memory_peak_bytes=256 * 1024 * 1024,
    output_bytes=12,
    output_truncated=True,
    profile="process",
    degraded=("cpu_quota",),
    started_at=1.0,
    finished_at=2.5,
)
EVENTS: dict[Event, Callable[[Journal, int], Awaitable[None]]] = {
    Event.START: Journal.start,
    Event.REQUEUE: Journal.requeue,
    Event.END: lambda journal, seq: journal.finish(seq, OUTCOME, "excerpt"),
    Event.DELIVER: Journal.deliver,
    Event.REFUSE: lambda journal, seq: journal.refuse(seq, "404 unknown instance"),
    Event.RESEND: Journal.resend,
    Event.DROP: Journal.drop,
}
PATHS: dict[State, tuple[Event, ...]] = {
    State.ACCEPTED: (),
    State.RUNNING: (Event.START,),
    State.FINISHED: (Event.START, Event.END),
    State.DELIVERED: (Event.END, Event.DELIVER),
    State.DEAD: (Event.END, Event.REFUSE),
    State.DROPPED: (Event.END, Event.REFUSE, Event.DROP),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


async def add(journal: Journal, instance_id: str, *events: Event, payload: str = "true") -> int:
    accepted = await journal.accept(Dispatch(instance_id=instance_id, payload=payload))
    for event in events:
        await EVENTS[event](journal, accepted.row.seq)
    return accepted.row.seq


async def get(journal: Journal, seq: int) -> Row:
    row = await journal.row(seq)
    assert row is not None
    return row


def test_a_task_comes_back_whole_after_a_restart(path: Path) -> None:
    dispatch = Dispatch(
        instance_id="task-7-\N{SNOWMAN}/../x",
        scheduler="http://127.0.0.1:8080",
        task_id=7,
        task_type="shell",
        payload="echo hi\n" * 100_000,
        timeout_s=2.5,
        retry_count=1,
        shard_no=2,
        shard_total=3,
        idempotency_key="key",
        profile="process",
        limits={"memory_max": "64M", "cpu_weight": 10, "memory_high": None},
        http=HttpRequest(method="POST", headers={"a": "b"}, expect=[200]),
        files={"name": "content"},
    )

    async def before(journal: Journal) -> Row:
        accepted = await journal.accept(dispatch, initial=State.RUNNING)
        assert accepted.is_new
        assert not accepted.cancelled_before
        assert await journal.mark_cancelled(accepted.row.seq)
        return accepted.row

    async def between(journal: Journal) -> None:
        (row,) = await journal.unfinished()
        assert (row.seq, row.state, row.cancelled) == (old.seq, State.RUNNING, True)
        assert row.dispatch == dispatch == old.dispatch
        assert (row.accepted_at, row.started_at) == (old.accepted_at, old.started_at)
        assert await unfinished_seqs(journal) == [old.seq]
        await journal.finish(row.seq, OUTCOME, "out\n", 12)

    async def after(journal: Journal) -> None:
        assert await journal.unfinished() == []
        assert await journal.undelivered_seqs() == [old.seq]
        row = await get(journal, old.seq)
        assert (row.outcome, row.excerpt, row.stored_bytes) == (OUTCOME, "out\n", 12)
        assert row.dispatch == dispatch
        assert row.finished_at is not None
        await journal.deliver(old.seq, attempts=3)
        row = await get(journal, old.seq)
        assert (row.state, row.attempts) == (State.DELIVERED, 3)

    old = with_journal(path, before)
    with_journal(path, between)
    with_journal(path, after)


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("event", list(Event))
def test_the_journal_allows_just_what_the_table_allows(
    path: Path, state: State, event: Event
) -> None:
    async def body(journal: Journal) -> None:
        seq = await add(journal, "one", *PATHS[state])
        before = await get(journal, seq)
        assert before.state is state
        if (state, event) in TRANSITIONS:
            await EVENTS[event](journal, seq)
            assert (await get(journal, seq)).state is TRANSITIONS[state, event]
        else:
            with pytest.raises(InvalidTransitionError):
                await EVENTS[event](journal, seq)
            assert await get(journal, seq) == before

    with_journal(path, body)


@pytest.mark.parametrize("state", sorted(set(State) - {State.ACCEPTED, State.RUNNING}))
def test_a_new_task_waits_or_runs(path: Path, state: State) -> None:
    async def body(journal: Journal) -> None:
        with pytest.raises(InvalidTransitionError, match=f"cannot accept a task as {state}"):
            await journal.accept(Dispatch(instance_id="a"), initial=state)
        assert await journal.find("a") == []

    with_journal(path, body)


@pytest.mark.parametrize("event", list(Event))
def test_an_unknown_task_takes_no_event(path: Path, event: Event) -> None:
    async def body(journal: Journal) -> None:
        with pytest.raises(InvalidTransitionError, match="no such task"):
            await EVENTS[event](journal, 5)

    with_journal(path, body)


def test_one_id_twice_runs_once_at_once_after_it_ended_and_after_a_restart(path: Path) -> None:
    async def first(journal: Journal) -> int:
        dispatch = Dispatch(instance_id="id", payload="first")
        answers = await asyncio.gather(*(journal.accept(dispatch) for _ in range(20)))
        assert sum(answer.is_new for answer in answers) == 1
        (seq,) = {answer.row.seq for answer in answers}
        await journal.finish(seq, OUTCOME, "")
        again = await journal.accept(Dispatch(instance_id="id", payload="second"))
        assert (again.is_new, again.row.seq, again.row.state) == (False, seq, State.FINISHED)
        assert again.row.outcome == OUTCOME
        await journal.deliver(seq)
        return seq

    async def second(journal: Journal) -> None:
        again = await journal.accept(Dispatch(instance_id="id"), initial=State.RUNNING)
        assert (again.is_new, again.row.seq, again.row.state) == (False, seq, State.DELIVERED)
        assert again.row.dispatch.payload == "first"

    seq = with_journal(path, first)
    with_journal(path, second)


def test_the_same_id_of_another_scheduler_is_another_task(path: Path) -> None:
    async def body(journal: Journal) -> None:
        one = await journal.accept(Dispatch(instance_id="id", scheduler="http://a"))
        two = await journal.accept(Dispatch(instance_id="id", scheduler="http://b"))
        assert one.is_new
        assert two.is_new
        assert [row.seq for row in await journal.find("id")] == [one.row.seq, two.row.seq]
        for task in (one, two):
            again = await journal.accept(task.row.dispatch)
            assert (again.is_new, again.row.seq) == (False, task.row.seq)

    with_journal(path, body)


def test_each_time_in_a_row_is_that_of_its_event(path: Path) -> None:
    now = 1000.0

    async def run() -> None:
        nonlocal now
        journal = await Journal.open(path, clock=lambda: now)
        seq = (await journal.accept(Dispatch(instance_id="a"))).row.seq
        for event, started_at, finished_at in (
            (Event.START, 1001.0, None),
            (Event.REQUEUE, None, None),
            (Event.START, 1003.0, None),
            (Event.END, 1003.0, 1004.0),
        ):
            now += 1
            await EVENTS[event](journal, seq)
            row = await get(journal, seq)
            assert (row.accepted_at, row.started_at, row.finished_at, row.closed_at) == (
                1000.0, started_at, finished_at, None,
            )  # fmt: skip
        await journal.deliver(seq)
        closed_at = (await get(journal, seq)).closed_at
        assert closed_at is not None
        # By the journal's own clock, which nobody moves.
        assert closed_at > 1000.0
        begun = await journal.accept(Dispatch(instance_id="b"), initial=State.RUNNING)
        assert begun.row.started_at == begun.row.accepted_at == now
        assert (await get(journal, begun.row.seq)).started_at == now
        waiting = await journal.accept(Dispatch(instance_id="c"))
        assert waiting.row.started_at is None
        assert (await get(journal, waiting.row.seq)).started_at is None
        await journal.close()

    asyncio.run(run())


@pytest.mark.parametrize("instance_id", ["../x", "a'b\";--", "\N{SNOWMAN}", "x" * 256, "a\nb", "%"])
def test_any_id_is_harmless_and_found_again(path: Path, instance_id: str) -> None:
    async def body(journal: Journal) -> None:
        seq = await add(journal, instance_id)
        await add(journal, "other")
        assert [row.seq for row in await journal.find(instance_id)] == [seq]

    with_journal(path, body)


def test_text_that_is_no_text_is_refused_or_replaced_and_harms_nobody(path: Path) -> None:
    async def body(journal: Journal) -> None:
        with pytest.raises(JournalError, match="cannot journal a dispatch"):
            await journal.accept(Dispatch(instance_id="a", payload="\ud800"))
        results = await asyncio.gather(
            journal.accept(Dispatch(instance_id="b")),
            journal.set_meta("key", "\ud800"),
            journal.accept(Dispatch(instance_id="c")),
            return_exceptions=True,
        )
        assert isinstance(results[1], UnicodeEncodeError)
        assert [row.dispatch.instance_id for row in await journal.unfinished()] == ["b", "c"]
        assert journal.fault is None
        seq = (await journal.find("b"))[0].seq
        await journal.finish(seq, Outcome(Status.FAILED, reason="no \udcff"), "out \udcff")
        row = await get(journal, seq)
        assert (row.outcome, row.excerpt) == (Outcome(Status.FAILED, reason="no ?"), "out ?")
        assert await journal.find("\udcff") == []
        assert await journal.cancel("\udcff") == []

    with_journal(path, body)


def test_numbers_grow_and_never_come_back(path: Path) -> None:
    async def round_of_three(journal: Journal) -> list[int]:
        seqs = [await add(journal, f"{time.monotonic_ns()}", *PATHS[State.DELIVERED])]
        seqs += [await add(journal, f"{time.monotonic_ns()}", *PATHS[State.DELIVERED])]
        await journal.sweep(0, history_s=0)
        assert await journal.recent(10) == []
        seqs += [await add(journal, f"{time.monotonic_ns()}", *PATHS[State.DELIVERED])]
        await journal.sweep(0, history_s=0)
        return seqs

    seqs = with_journal(path, round_of_three) + with_journal(path, round_of_three)
    assert seqs == sorted(set(seqs))
    path.unlink()  # lost altogether: a fresh journal still begins above
    again = with_journal(path, round_of_three)
    assert min(again) > max(seqs)
    assert max(again) < 2**53  # exact for every reader of JSON


def test_many_operations_share_a_commit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commits = 0
    real = JournalStore.commit

    def counting(store: JournalStore) -> None:
        nonlocal commits
        commits += 1
        real(store)

    async def body(journal: Journal) -> None:
        await asyncio.gather(
            *(journal.accept(Dispatch(instance_id=str(number))) for number in range(1000))
        )
        assert len(await unfinished_seqs(journal)) == 1000

    monkeypatch.setattr(JournalStore, "commit", counting)
    with_journal(path, body)
    assert commits < 100


def test_the_loop_runs_on_while_the_disk_is_slow(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    real = JournalStore.commit

    def slow(store: JournalStore) -> None:
        assert release.wait(30)
        real(store)

    async def body(journal: Journal) -> None:
        monkeypatch.setattr(JournalStore, "commit", slow)
        waiting = asyncio.ensure_future(journal.accept(Dispatch(instance_id="slow")))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not waiting.done()  # not answered before it is on disk, and the loop is free
        release.set()
        assert (await waiting).is_new

    with_journal(path, body)


def test_a_caller_that_gives_up_undoes_nothing_and_harms_nobody(path: Path) -> None:
    async def body(journal: Journal) -> None:
        given_up = asyncio.ensure_future(journal.accept(Dispatch(instance_id="a")))
        await asyncio.sleep(0)
        given_up.cancel()
        other = await journal.accept(Dispatch(instance_id="b"))
        assert other.is_new
        with pytest.raises(asyncio.CancelledError):
            await given_up
        assert [row.dispatch.instance_id for row in await journal.unfinished()] == ["a", "b"]

    with_journal(path, body)


def test_close_commits_what_was_asked_before_and_refuses_what_comes_after(path: Path) -> None:
    async def run() -> None:
        journal = await Journal.open(path)
        last = [
            asyncio.ensure_future(journal.accept(Dispatch(instance_id=str(number))))
            for number in range(2000)
        ]
        await asyncio.sleep(0)
        await asyncio.gather(journal.close(), journal.close())
        assert all(answer.result().is_new for answer in last)
        with pytest.raises(JournalError, match="closed"):
            await journal.unfinished()
        assert "stockade-journal" not in {thread.name for thread in threading.enumerate()}

    asyncio.run(run())
    assert len(with_journal(path, unfinished_seqs)) == 2000
    assert sorted(os.listdir(path.parent)) == ["journal.db"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_cancel_before_its_dispatch_is_remembered_and_used_once(path: Path) -> None:
    async def before(journal: Journal) -> None:
        assert await journal.cancel("early") == []
        await journal.remember_cancel("early too")

    async def after(journal: Journal) -> None:
        for instance_id in ("early", "early too"):
            accepted = await journal.accept(
                Dispatch(instance_id=instance_id), initial=State.RUNNING
            )
            assert accepted.is_new
            assert accepted.cancelled_before
            # Not running: after a crash here nobody may take it for started.
            assert (accepted.row.state, accepted.row.cancelled) == (State.ACCEPTED, True)
            assert await get(journal, accepted.row.seq) == accepted.row
        other = await journal.accept(Dispatch(instance_id="early", scheduler="http://b"))
        assert not other.cancelled_before

    with_journal(path, before)
    with_journal(path, after)


def test_a_cancel_finds_what_has_not_ended(path: Path) -> None:
    async def body(journal: Journal) -> None:
        seq = await add(journal, "one", Event.START)
        (row,) = await journal.cancel("one")
        assert (row.seq, row.state, row.cancelled) == (seq, State.RUNNING, True)
        await journal.finish(seq, OUTCOME, "")
        assert not await journal.mark_cancelled(seq)
        ended = await add(journal, "two", *PATHS[State.DELIVERED])
        (row,) = await journal.cancel("two")
        assert (row.seq, row.cancelled) == (ended, False)
        await journal.sweep(0)
        assert not (await journal.accept(Dispatch(instance_id="two"))).cancelled_before

    with_journal(path, body)


def test_a_cancel_and_its_dispatch_at_once_never_miss_each_other(path: Path) -> None:
    async def body(journal: Journal) -> None:
        for number in range(100):
            name = str(number)
            both = [journal.cancel(name), journal.accept(Dispatch(instance_id=name))]
            await asyncio.gather(*(both if number % 2 else reversed(both)))
            (row,) = await journal.find(name)
            assert row.cancelled

    with_journal(path, body)


def test_a_remembered_cancel_ends_with_the_dedup_ttl(path: Path) -> None:
    async def body(journal: Journal) -> None:
        for instance_id in ("in time", "late"):
            await journal.remember_cancel(instance_id)
        await journal.sweep(300)
        assert (await journal.accept(Dispatch(instance_id="in time"))).cancelled_before
        await journal.sweep(0)
        assert not (await journal.accept(Dispatch(instance_id="late"))).cancelled_before

    with_journal(path, body)


def test_a_cancel_asked_for_again_is_remembered_from_then_on(path: Path) -> None:
    with_journal(path, Journal.unfinished)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        store = JournalStore(connection)
        for asked_at in (1.0, 5.0):
            store.remember_cancel("a", asked_at)
        store.expire_cancels(3.0)
        encoded = encode_dispatch(Dispatch(instance_id="a"))
        assert store.accept(encoded, State.ACCEPTED, 6.0).cancelled_before
        # A duplicate is no task to be cancelled.
        store.remember_cancel("a", 7.0)
        assert not store.accept(encoded, State.ACCEPTED, 8.0).cancelled_before


def test_only_delivered_and_dropped_tasks_leave_the_duplicate_check(path: Path) -> None:
    async def body(journal: Journal) -> None:
        seqs = {state: await add(journal, state.value, *PATHS[state]) for state in State}
        assert await journal.sweep(300) == []
        for state in State:
            assert not (await journal.accept(Dispatch(instance_id=state.value))).is_new
        assert await journal.sweep(0) == []
        left = {
            state
            for state in State
            if (await journal.accept(Dispatch(instance_id=state.value))).is_new
        }
        assert left == {State.DELIVERED, State.DROPPED}
        # And what left is still told about.
        for state in State:
            assert (await get(journal, seqs[state])).state is state
            assert (await journal.find(state.value))[0].seq == seqs[state]

    with_journal(path, body)


def test_a_wall_clock_that_jumps_evicts_nothing_early(path: Path) -> None:
    now = time.time()

    async def run() -> None:
        nonlocal now
        journal = await Journal.open(path, clock=lambda: now)
        seq = await add(journal, "a", *PATHS[State.DELIVERED])
        now += 3600
        await journal.sweep(300, history_s=300)
        now -= 7200
        await journal.sweep(300, history_s=300)
        assert not (await journal.accept(Dispatch(instance_id="a"))).is_new
        await journal.close()
        # Nor does one that was set back in between keep it for ever.
        journal = await Journal.open(path, clock=lambda: now)
        await journal.sweep(0)
        again = await journal.accept(Dispatch(instance_id="a"))
        assert again.is_new
        assert again.row.seq > seq
        await journal.close()

    asyncio.run(run())


def test_the_history_drops_the_oldest_past_its_size(path: Path) -> None:
    async def body(journal: Journal) -> None:
        seqs = []
        for number in range(10):
            seq = await add(journal, str(number))
            await journal.finish(seq, OUTCOME, "", stored_bytes=100_000)
            seqs.append(seq)
        for seq in reversed(seqs):  # oldest is what was delivered first
            await journal.deliver(seq)
        assert await journal.sweep(0, history_bytes=10**9) == []
        size = int(await journal.get_meta(".history_bytes") or 0)
        assert await journal.sweep(0, history_bytes=size) == []
        one = size // 10
        assert await journal.sweep(0, history_bytes=size - one) == seqs[9:]
        assert await journal.sweep(0, history_bytes=size - 2 * one - 1) == seqs[7:9]
        gone = await journal.sweep(0, history_bytes=350_000)
        assert gone == seqs[3:7]
        assert [row.seq for row in await journal.recent(100)] == seqs[:3][::-1]
        assert await journal.unknown(seqs) == seqs[3:]
        assert await journal.sweep(0, history_bytes=350_000) == []
        assert await journal.sweep(0, history_s=0) == seqs[:3]
        assert await journal.recent(100) == []

    with_journal(path, body)


def test_output_to_be_removed_is_told_again_after_a_crash(path: Path) -> None:
    async def before(journal: Journal) -> int:
        seq = await add(journal, "a", *PATHS[State.DELIVERED])
        assert await journal.sweep(0, history_s=0) == [seq]
        return seq

    async def after(journal: Journal) -> None:
        assert await journal.sweep(0, history_s=0) == [seq]
        assert await journal.sweep(0, history_s=0) == []

    seq = with_journal(path, before)
    with_journal(path, after)


def test_a_sweep_goes_in_steps_between_other_operations(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_history, "SWEEP_CHUNK", 10)
    monkeypatch.setattr("stockade.supervisor.journal.SWEEP_CHUNK", 10)

    async def body(journal: Journal) -> None:
        seqs = [await add(journal, str(number), *PATHS[State.DELIVERED]) for number in range(95)]
        sweep = asyncio.ensure_future(journal.sweep(0, history_s=0))
        await asyncio.sleep(0)
        await journal.accept(Dispatch(instance_id="between"))
        assert not sweep.done()
        assert await sweep == seqs

    with_journal(path, body)


def test_lists_do_not_carry_long_payloads(path: Path) -> None:
    async def body(journal: Journal) -> None:
        payload = "x" * 1_000_000
        # What names a task stays whole.
        name, scheduler = "i" * 2000, "http://" + "s" * 2000
        dispatch = Dispatch(instance_id=name, scheduler=scheduler, payload=payload)
        seq = (await journal.accept(dispatch)).row.seq
        for event in PATHS[State.DEAD]:
            await EVENTS[event](journal, seq)
        assert (await get(journal, seq)).dispatch == dispatch
        for rows in (
            await journal.find(name),
            await journal.recent(1),
            await journal.dead_letters(),
        ):
            assert [row.dispatch for row in rows] == [
                Dispatch(instance_id=name, scheduler=scheduler, payload="x" * 1024)
            ]
        await journal.drop(seq)
        await journal.sweep(0)
        assert (await get(journal, seq)).dispatch.payload == "x" * 1024

    with_journal(path, body)


def test_a_long_dispatch_goes_from_the_file_with_its_duplicate_check_and_not_before(
    path: Path,
) -> None:
    async def body(journal: Journal) -> None:
        for instance_id in ("gone", "kept"):
            await add(journal, instance_id, *PATHS[State.FINISHED], payload="x" * 3000)
        await add(journal, "short")  # whole in its row, and nowhere else
        await journal.deliver((await journal.find("gone"))[0].seq)
        await journal.sweep(0)

    with_journal(path, body)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute(
            "SELECT instance_id FROM payloads JOIN tasks USING (seq)"
        ).fetchall() == [("kept",)]
        assert connection.execute("SELECT count(*) FROM payloads").fetchone() == (1,)


def test_changing_the_state_of_a_long_dispatch_does_not_write_it_again(path: Path) -> None:
    async def body(journal: Journal) -> None:
        seq = await add(journal, "long", payload="x" * 1_000_000)
        wal = path.with_name("journal.db-wal")
        before = wal.stat().st_size
        await journal.start(seq)
        await journal.finish(seq, OUTCOME, "")
        assert wal.stat().st_size - before < 100_000

    with_journal(path, body)


def test_a_dead_letter_is_listed_resent_and_dropped(path: Path) -> None:
    async def body(journal: Journal) -> None:
        seq = await add(journal, "a", Event.END)
        await journal.refuse(seq, "404 unknown instance \udcff", attempts=5)
        (row,) = await journal.dead_letters()
        assert (row.seq, row.error, row.attempts) == (seq, "404 unknown instance ?", 5)
        await journal.resend(seq)
        assert await journal.dead_letters() == []
        assert await journal.undelivered_seqs() == [seq]
        await journal.refuse(seq, "400", attempts=5)
        assert (await get(journal, seq)).attempts == 10
        await journal.drop(seq)
        assert await journal.dead_letters() == []

    with_journal(path, body)


def test_recent_pages_through_live_tasks_and_history(path: Path) -> None:
    async def body(journal: Journal) -> None:
        seqs = [await add(journal, str(number), *PATHS[State.DELIVERED]) for number in range(6)]
        await journal.sweep(0)
        seqs += [await add(journal, str(number)) for number in range(6)]
        newest_first = seqs[::-1]
        assert [row.seq for row in await journal.recent(100)] == newest_first
        assert [row.seq for row in await journal.recent(4)] == newest_first[:4]
        page = await journal.recent(4, before_seq=newest_first[3])
        assert [row.seq for row in page] == newest_first[4:8]

    with_journal(path, body)


def test_meta_outlives_a_restart(path: Path) -> None:
    async def before(journal: Journal) -> None:
        assert await journal.get_meta("spawner_token") is None
        await journal.set_meta("spawner_token", "one")
        await journal.set_meta("spawner_token", "two")

    with_journal(path, before)
    assert with_journal(path, lambda journal: journal.get_meta("spawner_token")) == "two"


def test_no_statement_walks_through_all_tasks(path: Path) -> None:
    """With a million rows a scan would hold up every commit: each statement must use an index."""

    async def body(journal: Journal) -> None:
        for state in State:
            await add(journal, state.value, *PATHS[state], payload="x" * 3000)

    with_journal(path, body)
    connection = sqlite3.connect(path, isolation_level=None)
    statements: list[str] = []
    connection.set_trace_callback(statements.append)
    store = JournalStore(connection)
    store.remember_cancel("x", 1.0)
    encoded = encode_dispatch(Dispatch(instance_id="x", payload="x" * 3000))
    seq = store.accept(encoded, State.RUNNING, 1.0).row.seq
    for event, values in (
        (Event.START, (1.0,)),
        (Event.REQUEUE, ()),
        (Event.END, (1.0, encode_outcome(OUTCOME), "", 0)),
        (Event.REFUSE, ("", 1)),
        (Event.RESEND, ()),
        (Event.DELIVER, (1.0, 1)),
        (Event.DROP, (1.0,)),
    ):
        try:
            store.move(event, seq, values)
        except InvalidTransitionError:
            continue
    store.find("dead")
    store.cancel("dead", 1.0)
    store.row(seq)
    store.seqs(State.FINISHED)
    store.in_state(State.DEAD, 10)
    store.unfinished()
    store.recent(10, None)
    store.unknown([1, seq])
    store.expire_cancels(0.0)
    store.history.latest_closed_at()
    store.history.evict(10.0**10)
    store.history.forget(10.0**10, 0)
    store.history.discarded(10)
    store.history.clear_discarded([1])
    connection.set_trace_callback(None)
    scans = {
        (statement, detail)
        for statement in statements
        if statement.startswith(("SELECT", "UPDATE", "DELETE", "INSERT"))
        for *_, detail in connection.execute(f"EXPLAIN QUERY PLAN {statement}")
        if ("SCAN tasks" in detail or "SCAN history" in detail or "TEMP B-TREE" in detail)
        # The newest or oldest by an index, with a LIMIT, stops early.
        and not ("LIMIT" in statement and "USING INDEX" in detail)
    }
    connection.close()
    assert len(statements) > 30
    assert scans == set()
