"""Keeps the worker registered with its scheduler, and tells it the load."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import time
from collections.abc import Callable, Iterable
from typing import Final

import structlog

from stockade.supervisor.backoff import backoff_s
from stockade.supervisor.config import Config
from stockade.supervisor.links.link import Link, Reply, ReplyKind, joined
from stockade.supervisor.outages import Outages
from stockade.supervisor.wire.messages import HeartbeatRequest, RegisterRequest

log = structlog.get_logger(__name__)

CHANNEL: Final = "heartbeat"


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """What a heartbeat tells. A scheduler sends nothing to a worker at its maximum."""

    current_load: int
    running_tasks: int


class Heartbeat:
    """Registers, then beats at the link's interval on the monotonic clock, for ever.

    Args:
        link: the link that the worker registers over.
        config: who the worker is.
        load: asked before each beat.
        outages: shared with the reporter, so that one outage is one line in the log.
        others: the worker's other links, of whose addresses the scheduler is told too.
    """

    def __init__(
        self,
        link: Link,
        config: Config,
        load: Callable[[], Load],
        outages: Outages,
        others: Iterable[Link] = (),
    ) -> None:
        self._link = link
        self._others = tuple(others)
        self._worker = config.worker
        self._report = config.report
        self._interval_s = link.heartbeat_interval_s
        self._load = load
        self._outage = outages.of(link.scheduler)
        self._hurry = asyncio.Event()
        self._registered = False

    @property
    def registered(self) -> bool:
        """Whether the scheduler knows this worker, as far as its last answer told."""
        return self._registered

    def beat_now(self) -> None:
        """Send the next beat at once: the load has changed in a way that must not wait."""
        self._hurry.set()

    async def run(self) -> None:
        """Keep the worker registered. Ends only by being cancelled."""
        if not self._link.scheduler:
            await asyncio.Event().wait()
        failures = 0
        while True:
            begun_at = time.monotonic()
            was_known = self._registered
            reply = await self._say()
            if reply.kind is ReplyKind.OK:
                failures = 0
                self._outage.recovered(CHANNEL)
                # From the beat's begin, not its answer: a slow scheduler gets no fewer of them.
                await self._pause(begun_at + self._interval_s)
                continue
            if reply.kind is not ReplyKind.RETRY:
                # It answers, but not as it would to a worker it knows.
                self._registered = False
            if reply.kind is ReplyKind.UNKNOWN and was_known:
                log.info("scheduler has forgotten this worker", scheduler=self._link.scheduler)
                continue
            failures += 1
            self._outage.failed(CHANNEL, reply.reason)
            await asyncio.sleep(self._delay_s(failures, reply))

    async def _say(self) -> Reply:
        """One beat, and before it the registration when the scheduler does not know us."""
        if not self._registered:
            reply = await self._register()
            if reply.kind is not ReplyKind.OK:
                return reply
            self._registered = True
            log.info("registered", scheduler=self._link.scheduler, worker_id=self._worker.id)
        self._hurry.clear()
        load = self._load()
        return await self._link.heartbeat(
            HeartbeatRequest(
                worker_id=self._worker.id,
                current_load=load.current_load,
                running_tasks=load.running_tasks,
                report_unix_milli=time.time_ns() // 1_000_000,
            )
        )

    async def _register(self) -> Reply:
        where = joined([await link.advertised() for link in (self._link, *self._others)])
        return await self._link.register(
            RegisterRequest(
                worker_id=self._worker.id,
                hostname=socket.gethostname(),
                ip=where.ip,
                callback_url=where.callback_url,
                grpc_addr=where.grpc_addr,
                protocol=self._link.name,
                max_concurrency=self._worker.max_concurrency,
                labels=self._worker.labels,
            )
        )

    async def _pause(self, until: float) -> None:
        """Wait until then, or until somebody is in a hurry."""
        try:
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                await self._hurry.wait()
        except TimeoutError:
            pass

    def _delay_s(self, failures: int, reply: Reply) -> float:
        """Never longer than a beat, so that a scheduler that is back soon hears from us."""
        longest_s = min(self._report.retry_max, self._interval_s)
        delay_s = backoff_s(failures, min_s=self._report.retry_min, max_s=longest_s)
        return max(delay_s, min(reply.retry_after_s or 0.0, longest_s))
