"""What every link offers the rest of the supervisor, and what it needs from it.

A link carries the same messages over its own transport. It never raises for what a scheduler does
or fails to do: each sending method gives a ``Reply``, and the caller decides what to do next.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Protocol

from stockade.supervisor.errors import RejectedError, Rejection
from stockade.supervisor.wire.messages import (
    MAX_INSTANCE_ID_CHARACTERS,
    AckRequest,
    ExecuteRequest,
    HeartbeatRequest,
    RegisterRequest,
    StatusReport,
)


class ReplyKind(enum.Enum):
    """What a scheduler's answer, or its silence, means for the message that was sent."""

    OK = "ok"
    RETRY = "retry"
    """It says nothing about the message: silence, or an answer such as 503. Tried without end."""
    REFUSED = "refused"
    TOO_LARGE = "too_large"
    UNKNOWN = "unknown"
    """The scheduler does not know the worker (heartbeat), or the instance (ack, report)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """A scheduler's answer to one message.

    Attributes:
        reason: one line for the log; empty when OK.
        silent: nobody answered at all, so no other message would get through either.
        retry_after_s: the wait that the scheduler asked for, in seconds.
    """

    kind: ReplyKind
    reason: str = ""
    silent: bool = False
    retry_after_s: float | None = None


OK = Reply(ReplyKind.OK)


@dataclasses.dataclass(frozen=True, slots=True)
class Advertised:
    """Where a scheduler finds this worker; what a link does not serve is empty."""

    ip: str = ""
    callback_url: str = ""
    grpc_addr: str = ""


def joined(told: Sequence[Advertised]) -> Advertised:
    """All addresses of a worker with several links; the first one's ``ip``."""
    return Advertised(
        ip=told[0].ip,
        callback_url=next((one.callback_url for one in told if one.callback_url), ""),
        grpc_addr=next((one.grpc_addr for one in told if one.grpc_addr), ""),
    )


class Link(Protocol):
    """One way to talk to schedulers.

    ``scheduler`` is the configured one; where a method takes a scheduler, an empty text means it.
    """

    @property
    def name(self) -> str: ...

    @property
    def scheduler(self) -> str: ...

    @property
    def heartbeat_interval_s(self) -> float: ...

    async def advertised(self) -> Advertised: ...

    async def register(self, request: RegisterRequest) -> Reply: ...

    async def heartbeat(self, request: HeartbeatRequest) -> Reply: ...

    async def send_ack(self, scheduler: str, ack: AckRequest) -> Reply: ...

    async def send_report(self, scheduler: str, report: StatusReport) -> Reply: ...


class Intake(Protocol):
    """Where a link hands on what schedulers ask for."""

    async def execute(self, request: ExecuteRequest, link: str) -> None:
        """Return once the dispatch is safe in the journal (or known to be there already).

        Raises:
            RejectedError: the dispatch is not accepted.
        """

    async def cancel(self, instance_id: str) -> bool:
        """Whether a task of this id was stopped; False when it is unknown or has ended.

        Raises:
            RejectedError: the request cannot be taken.
        """


def checked_instance_id(value: str | None) -> str:
    """The instance id, when it is one that a worker takes.

    Raises:
        RejectedError: it is missing, empty, longer than 256 characters, or holds a NUL.
    """
    if not value:
        raise RejectedError(
            Rejection.INVALID,
            "cannot take the request: schedule_instance_id is missing or empty",
        )
    if len(value) > MAX_INSTANCE_ID_CHARACTERS:
        raise RejectedError(
            Rejection.INVALID,
            f"cannot take the request: schedule_instance_id has {len(value)} characters, "
            f"at most {MAX_INSTANCE_ID_CHARACTERS} are allowed",
        )
    if "\0" in value:
        raise RejectedError(
            Rejection.INVALID,
            "cannot take the request: schedule_instance_id holds a NUL character",
        )
    return value
