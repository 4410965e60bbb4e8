"""The workers that registered, what they last said of their load, and how much room they have.

Kept in memory only: a scheduler that restarted answers 404 to a heartbeat, and the worker registers
again at once.
"""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Iterator
from typing import Any, Final

import structlog

from stockade.supervisor.scheduler.errors import NotFoundError
from stockade.supervisor.scheduler.tasks import utc_text
from stockade.supervisor.wire.messages import HeartbeatRequest, RegisterRequest

DEFAULT_MAX_CONCURRENCY: Final = 100

_log = structlog.get_logger(__name__)


class Presence(enum.StrEnum):
    """Whether a worker may be sent tasks."""

    ONLINE = "online"
    OFFLINE = "offline"


class Gate(enum.Enum):
    """How far a worker may be filled until its next heartbeat; see `Worker.beat`."""

    OPEN = "up to its maximum"
    ALMOST = "up to one below its maximum"
    SHUT = "not at all"


@dataclasses.dataclass(slots=True, kw_only=True)
class Worker:
    """One worker. Times are Unix milliseconds of the worker's own clock, as the protocol has them.

    Attributes:
        scheduler_url: this scheduler under the name by which the worker reached it.
        load: the load reported last, and what was sent and has ended since.
        peak: the highest ``load`` since the last heartbeat.
    """

    registration: RegisterRequest
    scheduler_url: str
    reported_ms: int
    presence: Presence = Presence.ONLINE
    load: int = 0
    running: int = 0
    peak: int = 0
    gate: Gate = Gate.OPEN

    @property
    def worker_id(self) -> str:
        return self.registration.worker_id

    @property
    def maximum(self) -> int:
        given = self.registration.max_concurrency
        return given if given > 0 else DEFAULT_MAX_CONCURRENCY

    @property
    def room(self) -> int:
        """How many more tasks may be sent to it now."""
        if self.presence is Presence.OFFLINE or self.gate is Gate.SHUT:
            return 0
        ceiling = self.maximum - (self.gate is Gate.ALMOST)
        return max(0, ceiling - self.load)

    @property
    def _expected(self) -> int:
        """The highest load that what we sent explains at the next heartbeat."""
        if self.gate is Gate.SHUT:
            return -1
        # While it is filled to the brim, a heartbeat made just before an end arrives just after it.
        return self.peak if self.gate is Gate.OPEN else self.load

    def beat(self, heartbeat: HeartbeatRequest) -> None:
        """Takes a heartbeat.

        A full load says "full" or "draining", and the two look alike. Full by what we sent: tasks
        may follow those that end, but one place is left free. Full although one of its tasks ended
        since, or full without us: the worker wants nothing, and gets nothing until it says
        otherwise.
        """
        load = max(heartbeat.current_load, heartbeat.running_tasks, 0)
        if load < self.maximum:
            self.gate = Gate.OPEN
        elif load > self._expected:
            self.gate = Gate.SHUT
        else:
            self.gate = Gate.ALMOST
        self.load = self.peak = load
        self.running = max(heartbeat.running_tasks, 0)
        self.reported_ms = heartbeat.report_unix_milli or time.time_ns() // 1_000_000
        self.presence = Presence.ONLINE

    def sent(self) -> None:
        """A task was sent to it."""
        self.load += 1
        self.peak = max(self.peak, self.load)

    def ended(self) -> None:
        """One of its tasks ended."""
        self.load = max(0, self.load - 1)

    def view(self) -> dict[str, Any]:
        """The worker as the API shows it."""
        return {
            "worker_id": self.worker_id,
            "hostname": self.registration.hostname,
            "ip": self.registration.ip,
            "callback_url": self.registration.callback_url,
            "protocol": self.registration.protocol,
            "labels": self.registration.labels,
            "status": str(self.presence),
            "current_load": self.load,
            "running_tasks": self.running,
            "max_concurrency": self.maximum,
            "room": self.room,
            "reported_at": utc_text(self.reported_ms / 1000),
        }


class Workers:
    """Every worker that registered since the scheduler started."""

    def __init__(self, *, offline_after_s: float) -> None:
        self._offline_after_s = offline_after_s
        self._workers: dict[str, Worker] = {}

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def find(self, worker_id: str) -> Worker:
        """The worker of this id.

        Raises:
            NotFoundError: it never registered here, or not since the scheduler started.
        """
        try:
            return self._workers[worker_id]
        except KeyError:
            raise NotFoundError(
                f"cannot find worker {worker_id!r}: it has not registered with this scheduler"
            ) from None

    def register(self, registration: RegisterRequest, scheduler_url: str) -> Worker:
        """Takes a worker in, or takes its new address; its load is kept until it tells another."""
        now_ms = time.time_ns() // 1_000_000
        known = self._workers.get(registration.worker_id)
        if known is None:
            worker = Worker(
                registration=registration, scheduler_url=scheduler_url, reported_ms=now_ms
            )
            self._workers[worker.worker_id] = worker
        else:
            worker = known
            worker.registration = registration
            worker.scheduler_url = scheduler_url
            worker.reported_ms = now_ms
            worker.presence = Presence.ONLINE
        _log.info(
            "worker registered",
            worker_id=worker.worker_id,
            callback_url=registration.callback_url,
            max_concurrency=worker.maximum,
        )
        return worker

    def rooms(self) -> dict[str, int]:
        """The workers with room, and how much."""
        return {worker.worker_id: worker.room for worker in self if worker.room > 0}

    def sent(self, worker_id: str) -> None:
        """Counts a task on its way to a worker."""
        if worker := self._workers.get(worker_id):
            worker.sent()

    def ended(self, worker_id: str) -> None:
        """Counts the end of a worker's task. The worker may be one from before a restart."""
        if worker := self._workers.get(worker_id):
            worker.ended()

    def mark_offline(self) -> None:
        """Marks those whose last word is too old, by the time that the word itself carries."""
        now_ms = time.time_ns() // 1_000_000
        for worker in self:
            age_s = (now_ms - worker.reported_ms) / 1000
            if worker.presence is Presence.ONLINE and age_s > self._offline_after_s:
                worker.presence = Presence.OFFLINE
                _log.warning(
                    "worker offline: its last heartbeat is too old, or its clock is wrong",
                    worker_id=worker.worker_id,
                    age_s=round(age_s, 1),
                )
