"""One scheduler's queue of deliveries: bounded concurrency, backoff, and one outage for all.

While the scheduler answers, up to 16 deliveries are under way; one that must be tried again waits
by itself. When it does not answer, the whole channel waits: one delivery at a time is tried, each
time another one, at growing intervals, until an answer comes. Old deliveries go first, but every
second turn belongs to the fresh ones, so that a long backlog holds nobody up.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from stockade.supervisor.backoff import backoff_s
from stockade.supervisor.delivery import Delivery, Step
from stockade.supervisor.outages import Outage

log = structlog.get_logger(__name__)

CONCURRENCY: Final = 16
# Answers such as 500 may be about one message: only when this many different ones in a row meet
# them is it about the scheduler. Silence always is.
DISTINCT_FAILURES: Final = 3
FRESH_KEPT: Final = 1000
NAME: Final = "reports"


class Channel:
    """Delivers to one scheduler over one link.

    Args:
        attempt: makes one attempt of a delivery to this scheduler.
        outage: the scheduler's, shared with the heartbeat.
        retry_min_s: shortest wait between attempts in an outage.
        retry_max_s: longest one.
    """

    def __init__(
        self,
        attempt: Callable[[Delivery], Awaitable[Step]],
        outage: Outage,
        *,
        retry_min_s: float,
        retry_max_s: float,
    ) -> None:
        self._attempt = attempt
        self._outage = outage
        self._retry_min_s = retry_min_s
        self._retry_max_s = retry_max_s
        self._fresh: deque[Delivery] = deque()
        self._backlog: deque[int] = deque()
        # (due, seq, delivery): at the same moment the oldest goes first.
        self._waiting: list[tuple[float, int, Delivery]] = []
        self._fresh_next = True
        self._failing: set[int] = set()
        self._down = False
        self._probing = False
        self._probes = 0
        self._tried_at = 0.0
        self._probe_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._starting = 0
        self._settling = False
        self._quiet = asyncio.Event()
        outage.on_contact(self._hurry)

    @property
    def down(self) -> bool:
        """Whether the scheduler gives no usable answers."""
        return self._down

    @property
    def crowded(self) -> bool:
        """Whether so much is queued, or so little moves, that a queue of numbers has to do."""
        return self._down or len(self._fresh) >= FRESH_KEPT

    @property
    def pause_s(self) -> float:
        """In an outage: seconds until the scheduler is tried again."""
        return max(0.0, self._probe_at - time.monotonic()) if self._down else 0.0

    async def quiet(self) -> None:
        """Return when all that can be delivered now is, or the scheduler is not there."""
        self._pump()
        await self._quiet.wait()

    def push(self, delivery: Delivery) -> None:
        """Deliver, in turn. A delivery that is held already is only taken note of."""
        if not delivery.held:
            delivery.held = True
            self._fresh.append(delivery)
        if self._down:
            # Work that has just come up hints that the scheduler is back.
            self._probe_at = min(self._probe_at, self._tried_at + self._retry_min_s)
        self._pump()

    def push_old(self, seq: int) -> None:
        """Deliver a terminal report from before; only its number is kept until its turn."""
        self._backlog.append(seq)
        self._pump()

    async def settle(self, deadline_s: float) -> None:
        """Begin no further attempt, and let those under way end, so that none is made twice."""
        self._settling = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=deadline_s)

    async def close(self) -> None:
        """Stop at once; what is not delivered stays in the journal."""
        if self._timer is not None:
            self._timer.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _hurry(self) -> None:
        if self._down:
            self._probe_at = 0.0
            self._pump()

    def _pump(self) -> None:
        """Start as many servers as there is work for, and a timer for what is due later."""
        if self._settling:
            return
        now = time.monotonic()
        queued = len(self._fresh) + len(self._backlog)
        due = sum(entry[0] <= now for entry in self._waiting[:CONCURRENCY])
        if self._down:
            if (queued or due) and not self._probing and now >= self._probe_at:
                self._probing = True
                self._start(probe=True)
        else:
            wanted = queued + due - self._starting
            for _ in range(min(wanted, CONCURRENCY - len(self._tasks))):
                self._start(probe=False)
        self._set_timer(now, queued)
        if self._down or not (queued or due or self._tasks):
            self._quiet.set()
        else:
            self._quiet.clear()

    def _start(self, *, probe: bool) -> None:
        self._starting += 1
        self._tasks.add(asyncio.get_running_loop().create_task(self._serve(probe)))

    def _set_timer(self, now: float, queued: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_at = self._waiting[0][0] if self._waiting else None
        if self._down:
            if self._probing or (due_at is None and not queued):
                return
            due_at = max(self._probe_at, 0.0 if queued or due_at is None else due_at)
        # What is due already waits for a server, not for the clock.
        if due_at is not None and due_at > now:
            self._timer = asyncio.get_running_loop().call_later(due_at - now, self._pump)

    async def _serve(self, probe: bool) -> None:  # noqa: FBT001 - never called by hand
        task = asyncio.current_task()
        assert task is not None
        self._starting -= 1
        try:
            delivery = self._next()
            while delivery is not None:
                step = await self._attempted(delivery)
                self._tried_at = time.monotonic()
                self._weigh(delivery, step, probe)
                if step.again_s == 0 and not self._down and not self._settling:
                    continue
                self._put_back(delivery, step)
                delivery = None if self._down else self._next()
        except asyncio.CancelledError:
            self._tasks.discard(task)
            raise
        self._tasks.discard(task)
        if probe:
            self._probing = False
        self._pump()

    async def _attempted(self, delivery: Delivery) -> Step:
        try:
            return await self._attempt(delivery)
        except Exception:
            # A fault that one message brings to light must not end the delivery of all others.
            log.exception("delivery failed", seq=delivery.seq)
            return Step(answered=None, again_s=self._retry_max_s)

    def _next(self) -> Delivery | None:
        """The delivery whose turn it is."""
        if self._settling:
            return None
        self._fresh_next = not self._fresh_next
        if self._fresh and self._fresh_next:
            return self._fresh.popleft()
        if self._waiting and self._waiting[0][0] <= time.monotonic():
            return heapq.heappop(self._waiting)[2]
        if self._backlog:
            return Delivery(self._backlog.popleft(), ended=True, held=True)
        return self._fresh.popleft() if self._fresh else None

    def _put_back(self, delivery: Delivery, step: Step) -> None:
        if step.again_s is None:
            delivery.held = False
            return
        # In an outage the channel waits for all: each delivery is due, and their turns rotate.
        wait_s = 0.0 if self._down and step.answered is False else step.again_s
        heapq.heappush(self._waiting, (time.monotonic() + wait_s, delivery.seq, delivery))

    def _weigh(self, delivery: Delivery, step: Step, probe: bool) -> None:  # noqa: FBT001
        """Draw from one attempt what it says about the scheduler."""
        if step.answered is None:
            return
        if step.answered:
            self._failing.clear()
            if self._down:
                self._down = False
                self._probes = 0
                self._outage.recovered(NAME)
                # Whoever found out goes on alone unless the others are started here.
                self._pump()
            return
        self._failing.add(delivery.seq)
        if self._down and not probe:
            return  # it was under way when the outage began
        if self._down or step.silent or len(self._failing) >= DISTINCT_FAILURES:
            self._down = True
            self._probes += 1
            delay_s = backoff_s(self._probes, min_s=self._retry_min_s, max_s=self._retry_max_s)
            asked_s = min(step.retry_after_s or 0.0, self._retry_max_s)
            self._probe_at = self._tried_at + max(delay_s, asked_s)
            self._outage.failed(NAME, step.reason)
