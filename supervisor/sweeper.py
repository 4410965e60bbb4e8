"""Evicts what is delivered and old from the journal, and its output from the disk."""

from __future__ import annotations

import asyncio
import contextlib

import structlog

from stockade.supervisor.config import WorkerConfig
from stockade.supervisor.errors import JournalError
from stockade.supervisor.journal import Journal
from stockade.supervisor.output import OutputStore

log = structlog.get_logger(__name__)


async def sweep_for_ever(journal: Journal, output: OutputStore, config: WorkerConfig) -> None:
    """Sweep every ``dedup_sweep`` seconds. Ends only by being cancelled.

    Output that no row stands for (a journal that was set aside, a crash while sweeping) goes once,
    at the start. Listed before the journal is asked: a row is always there before its output.
    """
    stored = output.seqs()
    with contextlib.suppress(JournalError):
        _remove(output, await journal.unknown(stored))
    while True:
        await asyncio.sleep(config.dedup_sweep)
        try:
            seqs = await journal.sweep(config.dedup_ttl, config.history)
        except JournalError as error:
            log.warning("cannot sweep the journal", reason=str(error))
            continue
        _remove(output, seqs)


def _remove(output: OutputStore, seqs: list[int]) -> None:
    for seq in seqs:
        try:
            output.remove(seq)
        except OSError as error:
            log.warning("cannot remove an output", seq=seq, reason=str(error))
