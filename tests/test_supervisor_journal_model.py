"""The journal against a model that is a dictionary, under any order of operations and crashes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
)
from journal_lab import unfinished_seqs

from stockade.sandbox.outcome import ErrorCode, Outcome, Status
from stockade.supervisor.dispatch import Dispatch
from stockade.supervisor.errors import InvalidTransitionError
from stockade.supervisor.journal import Journal
from stockade.supervisor.states import (
    TERMINAL,
    TRANSITIONS,
    UNFINISHED,
    Event,
    State,
    next_state,
)

SCHEDULERS = ("http://a", "http://b")
IDS = st.sampled_from(["x", "y", "z", "../x", "é", " "])


@given(st.lists(st.sampled_from(Event), max_size=40))
def test_any_order_of_events_keeps_the_promise_of_the_table(events: list[Event]) -> None:
    """Refused or taken, no event is half done: one end, one delivery at most, no way back."""
    state, taken = State.ACCEPTED, [State.ACCEPTED]
    for event in events:
        try:
            after = next_state(state, event)
        except InvalidTransitionError:
            assert (state, event) not in TRANSITIONS
            continue
        assert after is TRANSITIONS[state, event]
        state = after
        taken.append(state)
    ended = [each not in UNFINISHED for each in taken]
    assert ended == sorted(ended)  # once ended, never runnable again
    assert taken.count(State.DELIVERED) <= 1
    for each in taken[:-1]:
        assert each not in TERMINAL
    # What was owed was owed because of an end, a refusal or a wish, never out of nothing.
    for before, after in itertools.pairwise(taken):
        if after is State.DELIVERED:
            assert before is State.FINISHED


@dataclasses.dataclass
class Task:
    """What the journal should hold of one task."""

    key: tuple[str, str]
    payload: str
    state: State
    cancelled: bool
    attempts: int = 0
    excerpt: str = ""
    in_history: bool = False


class JournalMachine(RuleBasedStateMachine):
    """Every rule does one thing to the journal and to the model, and compares the answers."""

    seqs = Bundle("seqs")

    @initialize()
    def open(self) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="stockade-model-"))
        self.copies = 0
        self.path = self.place / "journal.db"
        self.loop = asyncio.new_event_loop()
        self.journal = self._do(Journal.open(self.path))
        self.tasks: dict[int, Task] = {}
        self.cancels: set[str] = set()
        self.meta: dict[str, str] = {}
        self.discarded: set[int] = set()
        self.told: set[int] = set()

    def teardown(self) -> None:
        self._do(self.journal.close())
        self.loop.close()
        shutil.rmtree(self.place)

    def _do(self, work: Awaitable[Any]) -> Any:
        return self.loop.run_until_complete(work)

    def _live(self, key: tuple[str, str]) -> int | None:
        found = [s for s, task in self.tasks.items() if task.key == key and not task.in_history]
        return found[0] if found else None

    @rule(
        target=seqs,
        instance_id=IDS,
        scheduler=st.sampled_from(SCHEDULERS),
        initial=st.sampled_from([State.ACCEPTED, State.RUNNING]),
        size=st.sampled_from([0, 10, 3000]),
    )
    def accept(self, instance_id: str, scheduler: str, initial: State, size: int) -> Any:
        dispatch = Dispatch(instance_id=instance_id, scheduler=scheduler, payload="p" * size)
        accepted = self._do(self.journal.accept(dispatch, initial=initial))
        known = self._live((instance_id, scheduler))
        if known is not None:
            assert (accepted.is_new, accepted.row.seq) == (False, known)
            assert accepted.row.state is self.tasks[known].state
            return multiple()
        cancelled = instance_id in self.cancels
        assert (accepted.is_new, accepted.cancelled_before) == (True, cancelled)
        # One cancel is for one task, of whichever scheduler sends its first.
        self.cancels.discard(instance_id)
        assert accepted.row.seq > max(self.tasks, default=0)
        self.tasks[accepted.row.seq] = Task(
            (instance_id, scheduler),
            dispatch.payload,
            State.ACCEPTED if cancelled else initial,
            cancelled,
        )
        return accepted.row.seq

    @rule(seq=seqs)
    def run_to_its_delivery(self, seq: int) -> None:
        for event in (Event.START, Event.END, Event.DELIVER):
            self.happen(seq, event, 1)

    @rule(seq=seqs, event=st.sampled_from(Event), attempts=st.integers(0, 3))
    def one_event(self, seq: int, event: Event, attempts: int) -> None:
        self.happen(seq, event, attempts)

    def happen(self, seq: int, event: Event, attempts: int) -> None:
        outcome = Outcome(Status.FAILED, ErrorCode.EXECUTE_FAILED, reason=f"of {seq}", exit_code=3)
        asked: dict[Event, Callable[[], Awaitable[None]]] = {
            Event.START: lambda: self.journal.start(seq),
            Event.REQUEUE: lambda: self.journal.requeue(seq),
            Event.END: lambda: self.journal.finish(seq, outcome, f"out {seq}"),
            Event.DELIVER: lambda: self.journal.deliver(seq, attempts),
            Event.REFUSE: lambda: self.journal.refuse(seq, "no", attempts),
            Event.RESEND: lambda: self.journal.resend(seq),
            Event.DROP: lambda: self.journal.drop(seq),
        }
        task = self.tasks[seq]
        after = None if task.in_history else TRANSITIONS.get((task.state, event))
        try:
            self._do(asked[event]())
        except InvalidTransitionError:
            assert after is None
            return
        assert after is not None
        task.state = after
        if event is Event.END:
            task.excerpt = f"out {seq}"
        if event in (Event.DELIVER, Event.REFUSE):
            task.attempts += attempts

    @rule(instance_id=IDS)
    def cancel(self, instance_id: str) -> None:
        rows = self._do(self.journal.cancel(instance_id))
        mine = {s: task for s, task in self.tasks.items() if task.key[0] == instance_id}
        assert [row.seq for row in rows] == sorted(mine)
        if not mine:
            self.cancels.add(instance_id)
        for task in mine.values():
            if task.state in UNFINISHED and not task.in_history:
                task.cancelled = True

    @rule(text=st.text(max_size=5))
    def remember(self, text: str) -> None:
        self._do(self.journal.set_meta("key", text))
        self.meta["key"] = text

    @rule()
    def sweep(self) -> None:
        """Without a time to live all that is closed leaves the duplicate check; no cancel stays."""
        assert self._do(self.journal.sweep(-1.0)) == self._swept(set())
        for task in self.tasks.values():
            if task.state in TERMINAL:
                task.in_history = True

    def _swept(self, forgotten: set[int]) -> list[int]:
        """What a sweep tells: what it forgot, and what it does not know to have been removed."""
        self.cancels.clear()
        self.discarded = (self.discarded - self.told) | forgotten
        self.told = self.discarded
        return sorted(self.discarded)

    @rule()
    def forget(self) -> None:
        """Without a history nothing closed stays, and its output is told to be removed."""
        closed = {
            seq
            for seq, task in self.tasks.items()
            if task.state in TERMINAL and not self._gone(task)
        }
        assert self._do(self.journal.sweep(-1.0, history_s=-1.0)) == self._swept(closed)
        for seq in closed:
            assert self._do(self.journal.row(seq)) is None
            # Its number is never used again, so the model keeps the newest of them only as a floor.
            self.tasks[seq].in_history = True
            self.tasks[seq].key = (f"gone {seq}", "")

    @rule()
    def restart(self) -> None:
        self._do(self.journal.close())
        self.told = set()
        self.journal = self._do(Journal.open(self.path))
        assert self.journal.damaged is None

    @rule()
    def crash(self) -> None:
        """Goes on from a copy of the files as they lie there while the journal is open."""
        self.copies += 1
        after = self.place / f"copy{self.copies}"
        after.mkdir()
        for suffix in ("", "-wal"):
            with contextlib.suppress(FileNotFoundError):
                shutil.copy(f"{self.path}{suffix}", after)
        self._do(self.journal.close())
        self.told = set()
        shutil.rmtree(self.path.parent) if self.path.parent != self.place else os.unlink(self.path)
        self.path = after / self.path.name
        self.journal = self._do(Journal.open(self.path))
        assert self.journal.damaged is None

    def _gone(self, task: Task) -> bool:
        return task.key[0].startswith("gone ")

    @invariant()
    def the_journal_holds_what_the_model_does(self) -> None:
        for seq, task in self.tasks.items():
            row = self._do(self.journal.row(seq))
            if self._gone(task):
                assert row is None
                continue
            assert (row.dispatch.instance_id, row.dispatch.scheduler) == task.key
            assert (row.state, row.cancelled, row.attempts, row.excerpt) == (
                task.state, task.cancelled, task.attempts, task.excerpt,
            )  # fmt: skip
            assert (row.outcome is None) == (task.state in UNFINISHED)
            if not task.in_history:
                assert row.dispatch.payload == task.payload

        def of(*states: State) -> list[int]:
            return sorted(
                s for s, t in self.tasks.items() if t.state in states and not t.in_history
            )

        assert self._do(self.journal.undelivered_seqs()) == of(State.FINISHED)
        assert self._do(self.journal.dead_letter_seqs()) == of(State.DEAD)
        assert self._do(unfinished_seqs(self.journal)) == of(State.ACCEPTED, State.RUNNING)
        assert [row.seq for row in self._do(self.journal.undelivered())] == of(State.FINISHED)
        assert self._do(self.journal.get_meta("key")) == self.meta.get("key")


TestJournalAgainstAModel = JournalMachine.TestCase
# STOCKADE_TEST_EXAMPLES=500 after a change of the journal; each run has other ones.
TestJournalAgainstAModel.settings = settings(
    max_examples=int(os.environ.get("STOCKADE_TEST_EXAMPLES", "20")),
    stateful_step_count=30,
    deadline=None,
)
