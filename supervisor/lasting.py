"""Work without which a worker or a scheduler is of no use."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

log = structlog.get_logger(__name__)

FAULT_PAUSE_S: Final = 1.0


async def lasting(
    name: str, work: Callable[[], Awaitable[None]], pause_s: float = FAULT_PAUSE_S
) -> None:
    """Does what nothing goes on without, and begins anew after a fault in it.

    A worker that takes tasks and tells nobody that it lives would be worse than one that is gone.
    """
    while True:
        try:
            return await work()
        except Exception:
            log.exception("a fault; it begins anew", work=name)
            await asyncio.sleep(pause_s)
