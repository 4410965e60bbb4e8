"""The scheduler's dispatching goes on after a fault in it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from stockade.supervisor.scheduler import dispatcher
from stockade.supervisor.scheduler.changes import Changes
from stockade.supervisor.scheduler.dispatcher import Dispatcher
from stockade.supervisor.scheduler.store import Store
from stockade.supervisor.scheduler.workers import Workers

DEADLINE_S = 20.0


def test_fault_is_logged_and_what_is_queued_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dispatcher, "_STORE_RETRY_S", 0.0)

    async def scenario() -> int:
        looks = 0
        looked_again = asyncio.Event()

        def rooms() -> dict[str, int]:
            nonlocal looks
            looks += 1
            if looks == 1:
                raise ArithmeticError("a number that nobody thought of")
            looked_again.set()
            return {}

        store = await Store.open(tmp_path / "scheduler.db")
        workers = Workers(offline_after_s=60.0)
        monkeypatch.setattr(workers, "rooms", rooms)
        dispatching = Dispatcher(store, workers, Changes(), answer_timeout_s=1.0)
        dispatching.start()
        await asyncio.wait_for(looked_again.wait(), DEADLINE_S)
        await dispatching.close()
        await store.close()
        return looks

    assert asyncio.run(scenario()) == 2
    assert "a number that nobody thought of" in capsys.readouterr().out
