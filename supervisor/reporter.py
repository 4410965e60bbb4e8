"""Tells schedulers what becomes of their tasks: ack, ``running``, terminal report, in this order.

The executor only says what has happened; nothing here ever makes a task wait. The journal is the
buffer: a terminal report that is not delivered stays ``finished`` there, and after a restart
``resume`` takes it up again.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Mapping
from typing import Final

from stockade.supervisor.backoff import backoff_s
from stockade.supervisor.channel import Channel
from stockade.supervisor.config import Config
from stockade.supervisor.delivery import Attempts, Delivery, DeliveryJournal
from stockade.supervisor.errors import JournalError
from stockade.supervisor.journal_rows import Row
from stockade.supervisor.links.link import Link
from stockade.supervisor.outages import Outages
from stockade.supervisor.states import State

ENDED_REMEMBERED: Final = 4096


class Reporter:
    """Delivers each task's messages to the scheduler that dispatched it.

    Args:
        links: the running links by name; a task of a link that is gone is reported over the first.
        journal: where rows are read and deliveries recorded.
        config: ``[report]``, and who the worker is.
        outages: shared with the heartbeat, so that one outage is one line in the log.
    """

    def __init__(
        self,
        links: Mapping[str, Link],
        journal: DeliveryJournal,
        config: Config,
        outages: Outages,
    ) -> None:
        self._links = links
        self._journal = journal
        self._settings = config.report
        self._attempts = Attempts(journal, config, self._settled)
        self._outages = outages
        self._channels: dict[tuple[str, str], Channel] = {}
        self._deliveries: dict[int, Delivery] = {}
        # Undelivered tasks in the order of their ends, with the (monotonic) time of each.
        self._undelivered: dict[int, float] = {}
        # So that a `running` that comes late finds out; bounded, oldest out first.
        self._ended: dict[int, None] = {}
        self._feeder: asyncio.Task[None] | None = None

    # What has happened. None of these waits.

    def accepted(self, row: Row) -> None:
        """The dispatch is journalled: send its ack."""
        delivery = self._delivery(row)
        delivery.ack = True
        # The answer to the dispatch is written two turns of the loop from now; the ack comes after.
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, self._channel(row).push, delivery)

    def running(self, row: Row) -> None:
        """The task runs. Ignored when it has ended already."""
        if row.seq in self._ended:
            return
        delivery = self._delivery(row)
        delivery.running = True
        self._channel(row).push(delivery)

    def finished(self, row: Row) -> None:
        """The task's end is journalled: send its terminal report."""
        channel = self._channel(row)
        delivery = self._delivery(row)
        delivery.ended = True
        if channel.crowded:
            delivery.ack = delivery.running = False
        else:
            delivery.outcome, delivery.excerpt = row.outcome, row.excerpt
        self._note_end(row.seq, 0.0)
        channel.push(delivery)

    async def resume(self) -> None:
        """Take up the undelivered reports of before. To be called once, before tasks end.

        Raises:
            JournalError: they cannot be listed.
        """
        seqs = await self._journal.undelivered_seqs()
        now = time.monotonic()
        old = [seq for seq in seqs if seq not in self._undelivered]
        self._undelivered.update(dict.fromkeys(old, now))
        self._feeder = asyncio.create_task(self._feed(old))

    async def resend(self, seq: int) -> None:
        """Make a dead letter an undelivered report again.

        Raises:
            InvalidTransitionError: it is no dead letter.
            JournalError: the journal cannot be written.
        """
        # Asked before: when that failed after the resend, the report would wait for a restart.
        row = await self._journal.row(seq)
        await self._journal.resend(seq)
        if row is not None:
            self.finished(row)

    def trouble(self, row: Row) -> str:
        """Why the next message about this task is not with its scheduler yet; empty: no reason."""
        delivery = self._deliveries.get(row.seq)
        channel = self._channel(row)
        reason = "" if delivery is None else delivery.trouble
        if channel.down:
            return (
                f"the scheduler gives no usable answer ({reason or 'as other reports found'}); "
                f"it is tried again in {channel.pause_s:.0f} s"
            )
        if reason and delivery is not None and delivery.held:
            return f"{reason}; it is tried again"
        return ""

    def undelivered(self) -> tuple[int, float]:
        """How many terminal reports are undelivered, and the age of the oldest in seconds."""
        oldest = next(iter(self._undelivered.values()), None)
        age_s = 0.0 if oldest is None else max(0.0, time.monotonic() - oldest)
        return len(self._undelivered), age_s

    async def flush(self, deadline_s: float) -> bool:
        """Wait until all that can be delivered now is. False when the time was not enough."""
        try:
            async with asyncio.timeout(deadline_s):
                if self._feeder is not None:
                    await asyncio.shield(self._feeder)
                for channel in list(self._channels.values()):
                    await channel.quiet()
        except TimeoutError:
            return False
        return True

    async def settle(self, deadline_s: float) -> None:
        """Begin no further attempt and let those under way end; the rest is for a next life."""
        settling = [channel.settle(deadline_s) for channel in self._channels.values()]
        await asyncio.gather(*settling)

    async def close(self) -> None:
        """Stop at once; what is not delivered stays in the journal."""
        if self._feeder is not None:
            self._feeder.cancel()
            await asyncio.gather(self._feeder, return_exceptions=True)
        for channel in self._channels.values():
            await channel.close()

    # Bookkeeping.

    def _delivery(self, row: Row) -> Delivery:
        delivery = self._deliveries.get(row.seq)
        if delivery is None:
            delivery = Delivery(row.seq, row.dispatch.instance_id)
            self._deliveries[row.seq] = delivery
        return delivery

    def _channel(self, row: Row) -> Channel:
        link = self._links.get(row.dispatch.link)
        if link is None:
            # The address of one link's scheduler means nothing to another link.
            link = next(iter(self._links.values()))
            scheduler = link.scheduler
        else:
            scheduler = row.dispatch.scheduler or link.scheduler
        channel = self._channels.get((link.name, scheduler))
        if channel is None:
            channel = Channel(
                functools.partial(self._attempts.attempt, link, scheduler),
                self._outages.of(scheduler),
                retry_min_s=self._settings.retry_min,
                retry_max_s=self._settings.retry_max,
            )
            self._channels[link.name, scheduler] = channel
        return channel

    def _note_end(self, seq: int, age_s: float) -> None:
        self._undelivered[seq] = time.monotonic() - age_s
        self._ended[seq] = None
        if len(self._ended) > ENDED_REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def _settled(self, seq: int) -> None:
        self._undelivered.pop(seq, None)
        self._deliveries.pop(seq, None)

    async def _feed(self, seqs: list[int]) -> None:
        """Hand reports of before to the channels of their schedulers, oldest first."""
        for seq in seqs:
            failures = 0
            while True:
                try:
                    row = await self._journal.row(seq)
                    break
                except JournalError:
                    failures += 1
                    await asyncio.sleep(
                        backoff_s(
                            failures,
                            min_s=self._settings.retry_min,
                            max_s=self._settings.retry_max,
                        )
                    )
            if row is None or row.state is not State.FINISHED:
                self._undelivered.pop(seq, None)
            elif seq not in self._ended:
                ended_at = row.finished_at
                # Of an earlier life: only the wall clock can say for how long it has been owed.
                age_s = 0.0 if ended_at is None else max(0.0, time.time() - ended_at)
                self._note_end(seq, age_s)
                self._channel(row).push_old(seq)
