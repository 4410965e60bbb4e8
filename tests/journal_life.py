"""A journal's whole life in a process of its own, to put faults into, and a check of what it said.

    python tests/journal_life.py PATH       says one line a transition that the journal answered for

What is refused is tried again, as the worker does, so that a life with one fault in it ends whole.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TypeVar

from stockade.sandbox.outcome import Outcome, Status
from stockade.supervisor.dispatch import Dispatch
from stockade.supervisor.errors import JournalError
from stockade.supervisor.journal import Journal
from stockade.supervisor.states import State

T = TypeVar("T")

ORDER = (State.ACCEPTED, State.RUNNING, State.FINISHED, State.DELIVERED)
# Three of them fill the write-ahead log past the point where it is folded into the file.
LARGE_BYTES = 3_000_000
# Of a fault that lasts, this many tries have to see the end.
TRIES = 200
# An opening counts its calls anew, so a fault in it comes again: the process gives up, as a worker.
OPENINGS = 3
GAVE_UP = 3
WHOLE = "whole"


def say(*words: object) -> None:
    """One line, written at once."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


async def opened(path: Path) -> Journal:
    """The journal, or the end of this process."""
    for _ in range(OPENINGS):
        try:
            return await Journal.open(path)
        except JournalError as error:
            say("refused", error)
    sys.exit(GAVE_UP)


async def insist(ask: Callable[[], Awaitable[T]]) -> T:
    """The answer, after as many refusals as there are."""
    for _ in range(TRIES):
        try:
            return await ask()
        except JournalError as error:
            say("refused", error)
            await asyncio.sleep(0.01)
    raise AssertionError("refused for ever")


async def task(journal: Journal, name: str, payload: str = "") -> None:
    """One task, from its dispatch to its delivery."""
    dispatch = Dispatch(instance_id=name, payload=payload)
    seq = (await insist(lambda: journal.accept(dispatch))).row.seq
    say(State.ACCEPTED, name)
    await insist(lambda: journal.start(seq))
    say(State.RUNNING, name)
    await insist(lambda: journal.finish(seq, Outcome(Status.SUCCESS, exit_code=0), name))
    say(State.FINISHED, name)
    if not name.startswith("owed"):
        await insist(lambda: journal.deliver(seq))
        say(State.DELIVERED, name)


async def life(path: Path) -> None:
    """Made, written, folded, swept, closed, opened again."""
    journal = await opened(path)
    await task(journal, "first")
    await task(journal, "owed")
    for number in range(3):
        await task(journal, f"large{number}", "x" * LARGE_BYTES)
    await task(journal, "after")
    await insist(lambda: journal.sweep(0.0, 0.0))
    await journal.close()
    again = await opened(path)
    await task(again, "owed again")
    assert again.damaged is None, again.damaged
    await again.close()
    say(WHOLE)


def check(path: Path, said: Iterable[str]) -> None:
    """What was said is there, and the journal is in order. Raises AssertionError."""
    latest: dict[str, State] = {}
    for line in said:
        word, _, name = line.partition(" ")
        if word in ORDER:
            latest[name] = State(word)

    async def look() -> None:
        journal = await Journal.open(path)
        assert journal.damaged is None, journal.damaged
        rows = {row.dispatch.instance_id: row for row in await journal.recent(1000)}
        for name, state in latest.items():
            if name not in rows:
                assert state is State.DELIVERED, f"{name} is {state} and gone"  # swept
                continue
            assert ORDER.index(rows[name].state) >= ORDER.index(state), (name, state, rows[name])
        for row in rows.values():
            assert (row.outcome is not None) == (row.state in {State.FINISHED, State.DELIVERED})
        for row in await journal.unfinished():
            large = row.dispatch.instance_id.startswith("large")
            assert len(row.dispatch.payload) == (LARGE_BYTES if large else 0)
        assert (await journal.accept(Dispatch(instance_id="at last"))).is_new
        await journal.close()

    asyncio.run(look())


if __name__ == "__main__":
    asyncio.run(life(Path(sys.argv[1])))
