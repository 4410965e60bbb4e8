"""What tests of the journal share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from stockade.supervisor.journal import Journal


def with_journal(path: Path, body: Callable[[Journal], Awaitable[Any]]) -> Any:
    """What ``body`` gives, in a loop of its own, with the journal at ``path``."""

    async def run() -> Any:
        journal = await Journal.open(path)
        try:
            return await body(journal)
        finally:
            await journal.close()

    return asyncio.run(run())


async def unfinished_seqs(journal: Journal) -> list[int]:
    """The tasks that have not ended, oldest first."""
    return [row.seq for row in await journal.unfinished()]
