"""The supervisor's lasting work: a fault in it is logged and it begins anew."""

from __future__ import annotations

import asyncio

import pytest
import structlog

from stockade.supervisor.daemon import lasting


def test_work_that_fails_is_logged_and_begins_anew() -> None:
    begun = 0

    async def work() -> None:
        nonlocal begun
        begun += 1
        if begun < 3:
            raise OverflowError("a fault of ours")

    with structlog.testing.capture_logs() as logged:
        asyncio.run(lasting("heartbeat", work, pause_s=0))
    assert begun == 3
    assert [(line["log_level"], line["work"]) for line in logged] == [("error", "heartbeat")] * 2


def test_work_that_is_cancelled_does_not_begin_anew() -> None:
    begun = 0

    async def work() -> None:
        nonlocal begun
        begun += 1
        await asyncio.Event().wait()

    async def cancel() -> None:
        task = asyncio.create_task(lasting("sweep", work, pause_s=0))
        while not begun:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert begun == 1
