"""What is still to be told about one task, and one attempt to tell the next part of it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Awaitable, Callable
from typing import Protocol

import structlog

from stockade.sandbox.outcome import Outcome
from stockade.supervisor.backoff import backoff_s
from stockade.supervisor.config import Config
from stockade.supervisor.errors import InvalidTransitionError, JournalError
from stockade.supervisor.journal_rows import Row
from stockade.supervisor.links.link import Link, Reply, ReplyKind
from stockade.supervisor.outages import LineLimit
from stockade.supervisor.report import running_report, terminal_report
from stockade.supervisor.states import State
from stockade.supervisor.wire.messages import AckRequest

log = structlog.get_logger(__name__)

DEAD_LETTER_LINE_S = 10.0


class DeliveryJournal(Protocol):
    """What delivering needs of the journal. Every method may raise JournalError."""

    async def row(self, seq: int) -> Row | None: ...

    async def undelivered_seqs(self) -> list[int]: ...

    async def deliver(self, seq: int, attempts: int) -> object: ...

    async def refuse(self, seq: int, why: str, attempts: int) -> object: ...

    async def resend(self, seq: int) -> object: ...


@dataclasses.dataclass(slots=True, eq=False)
class Delivery:
    """What is still to be told about one task.

    Attributes:
        ack: the ack is still to be sent.
        running: the ``running`` report is.
        ended: the task has ended, so the terminal report is.
        outcome: how it ended, kept with the excerpt only for a first attempt that is near, so that
            a backlog is numbers; otherwise the journal is asked.
        attempts: terminal reports sent so far.
        failures: attempts without a usable answer, in a row.
        refusals: attempts that the scheduler refused.
        bare: the excerpt is left out, since the scheduler found the report too large.
        trouble: what the last attempt met, when it did not do its work.
        settlement: what the journal still has to be told; nothing is sent any more.
        held: it is in a queue or under way.
    """

    seq: int
    instance_id: str = ""
    ack: bool = False
    running: bool = False
    ended: bool = False
    outcome: Outcome | None = None
    excerpt: str = ""
    attempts: int = 0
    failures: int = 0
    refusals: int = 0
    bare: bool = False
    trouble: str = ""
    settlement: Callable[[], Awaitable[object]] | None = None
    held: bool = False

    @property
    def pending(self) -> bool:
        """Whether anything is still to be told."""
        return self.ack or self.running or self.ended


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """How one attempt went.

    Attributes:
        answered: the scheduler gave a usable answer; None when it was not asked.
        silent: it gave no answer at all.
        reason: why there was no usable answer.
        again_s: seconds until the next attempt; None when there is nothing more to do.
        retry_after_s: what the scheduler asked for.
    """

    answered: bool | None
    again_s: float | None
    silent: bool = False
    reason: str = ""
    retry_after_s: float | None = None


class Attempts:
    """Makes one attempt of a delivery at a time: sends its next message, and records the result.

    Args:
        journal: where rows are read and results recorded.
        config: ``[report]``, and who the worker is.
        settled: called with the task's number when nothing is to be delivered any more.
    """

    def __init__(
        self, journal: DeliveryJournal, config: Config, settled: Callable[[int], None]
    ) -> None:
        self._journal = journal
        self._worker_id = config.worker.id
        self._settings = config.report
        self._settled = settled
        self._dead_letter_lines = LineLimit(DEAD_LETTER_LINE_S)

    async def attempt(self, link: Link, scheduler: str, delivery: Delivery) -> Step:
        """Send what comes next: the ack, ``running``, the terminal report."""
        if delivery.settlement is not None:
            return await self._settle(delivery, answered=None)
        if delivery.ended and delivery.failures:
            # The scheduler was away when they mattered; what counts now is the end.
            delivery.ack = delivery.running = False
        if delivery.ack:
            ack = AckRequest(schedule_instance_id=delivery.instance_id, worker_id=self._worker_id)
            reply = await link.send_ack(scheduler, ack)
            return self._told(delivery, "ack", reply)
        if delivery.running:
            report = running_report(delivery.instance_id, self._worker_id)
            reply = await link.send_report(scheduler, report)
            return self._told(delivery, "running", reply)
        if delivery.ended:
            return await self._tell_end(link, scheduler, delivery)
        return Step(answered=None, again_s=None)

    def _told(self, delivery: Delivery, part: str, reply: Reply) -> Step:
        """An ack or ``running`` was sent. Refused, it is given up: the terminal report is not."""
        if reply.kind is ReplyKind.RETRY:
            return self._unanswered(delivery, reply)
        delivery.failures = 0
        if part == "ack":
            delivery.ack = False
        else:
            delivery.running = False
        if reply.kind is not ReplyKind.OK:
            log.debug("message refused", part=part, id=delivery.instance_id, reason=reply.reason)
        return Step(answered=True, again_s=0 if delivery.pending else None)

    async def _tell_end(self, link: Link, scheduler: str, delivery: Delivery) -> Step:
        try:
            known = delivery.outcome is not None or await self._fetch(delivery)
        except JournalError as error:
            return self._journal_failed(delivery, error)
        if not known or delivery.outcome is None:
            self._settled(delivery.seq)
            return Step(answered=None, again_s=None)
        outcome, excerpt = delivery.outcome, delivery.excerpt
        if delivery.bare and excerpt:
            outcome, excerpt = dataclasses.replace(outcome, output_truncated=True), ""
        delivery.attempts += 1
        reply = await link.send_report(
            scheduler, terminal_report(delivery.instance_id, self._worker_id, outcome, excerpt)
        )
        if reply.kind is ReplyKind.OK:
            delivery.failures = 0
            delivery.settlement = functools.partial(
                self._journal.deliver, delivery.seq, delivery.attempts
            )
            return await self._settle(delivery, answered=True)
        if reply.kind is ReplyKind.RETRY:
            delivery.outcome, delivery.excerpt = None, ""
            return self._unanswered(delivery, reply)
        return await self._refused(delivery, reply)

    async def _refused(self, delivery: Delivery, reply: Reply) -> Step:
        """The scheduler does not take the terminal report: try again, or give it up."""
        delivery.failures = 0
        delivery.trouble = reply.reason
        if reply.kind is ReplyKind.TOO_LARGE and not delivery.bare:
            delivery.bare = True
            return Step(answered=True, again_s=0)
        delivery.refusals += 1
        tries = self._settings.refused_tries
        if delivery.refusals < tries:
            delivery.outcome, delivery.excerpt = None, ""
            return Step(answered=True, again_s=self._settings.refused_period / (tries - 1))
        self._log_dead_letter(delivery, reply)
        delivery.settlement = functools.partial(
            self._journal.refuse, delivery.seq, reply.reason, delivery.attempts
        )
        return await self._settle(delivery, answered=True)

    async def _fetch(self, delivery: Delivery) -> bool:
        """Fill in what the report needs. False when the journal has nothing to deliver any more."""
        row = await self._journal.row(delivery.seq)
        if row is None or row.state is not State.FINISHED:
            return False
        delivery.instance_id = row.dispatch.instance_id
        delivery.outcome, delivery.excerpt = row.outcome, row.excerpt
        return True

    async def _settle(self, delivery: Delivery, *, answered: bool | None) -> Step:
        """Record the result. What was sent is not sent again when only this fails."""
        assert delivery.settlement is not None
        delivery.ack = delivery.running = delivery.ended = False
        try:
            await delivery.settlement()
        except JournalError as error:
            step = self._journal_failed(delivery, error)
            return dataclasses.replace(step, answered=answered)
        except InvalidTransitionError as error:
            log.error("result not recorded", seq=delivery.seq, reason=str(error))
        self._settled(delivery.seq)
        return Step(answered=answered, again_s=None)

    def _unanswered(self, delivery: Delivery, reply: Reply) -> Step:
        delivery.failures += 1
        delivery.trouble = reply.reason
        return Step(
            answered=False,
            silent=reply.silent,
            reason=reply.reason,
            again_s=self._backoff_s(delivery.failures),
            retry_after_s=reply.retry_after_s,
        )

    def _journal_failed(self, delivery: Delivery, error: JournalError) -> Step:
        delivery.failures += 1
        delivery.trouble = str(error)
        log.debug("delivery waits for the journal", seq=delivery.seq, reason=str(error))
        return Step(answered=None, again_s=self._backoff_s(delivery.failures))

    def _backoff_s(self, failures: int) -> float:
        return backoff_s(failures, min_s=self._settings.retry_min, max_s=self._settings.retry_max)

    def _log_dead_letter(self, delivery: Delivery, reply: Reply) -> None:
        others = self._dead_letter_lines.allow()
        if others is not None:
            log.error(
                "report refused for good, kept as a dead letter",
                id=delivery.instance_id,
                reason=reply.reason,
                tries=delivery.refusals,
                others=others,
            )
