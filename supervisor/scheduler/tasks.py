"""A task: what was submitted, the instances it became, and the rules that need no store.

A task is what a user submits. Each try of it is an instance with an id of its own: the first, and
one more for each retry. What travels to a worker is always an instance.
"""

from __future__ import annotations

import dataclasses
import datetime
from typing import Annotated, Any, Final, Literal

import msgspec

from stockade.supervisor.scheduler.errors import RequestError
from stockade.supervisor.scheduler.states import TERMINAL, Event, State
from stockade.supervisor.wire.messages import (
    MAX_INSTANCE_ID_CHARACTERS,
    ExecuteRequest,
    HttpRequest,
)

TITLE_CHARACTERS: Final = 200

_WireInteger = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]


class Submission(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/tasks. Unknown fields are errors here: a misspelt limit must not pass.

    Attributes:
        timeout_seconds: 0 means the worker's default.
        retries: how many further instances may follow the first.
        retry_on: the statuses that are retried.
        retry_error_codes: when given, only these error codes are retried.
        limits: wishes by limit name; the worker checks and caps them.
        files: contents by name, put into the task's work directory.
        idempotency_key: the same for every retry; ``task-N`` when empty.
        instance_id: the first instance's id; made here when absent. A known one is sent again.
    """

    type: str = "shell"
    payload: str = ""
    timeout_seconds: _WireInteger = 0
    image: str = ""
    retries: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 0
    retry_on: tuple[Literal["failed", "timeout"], ...] = ("failed", "timeout")
    retry_error_codes: tuple[str, ...] | None = None
    profile: str | None = None
    limits: dict[str, str | int | float | None] | None = None
    http: HttpRequest | None = None
    files: dict[str, str] | None = None
    idempotency_key: str = ""
    shard_no: _WireInteger = 0
    shard_total: _WireInteger = 0
    instance_id: str | None = None

    @property
    def title(self) -> str:
        """The payload's beginning on one line, for lists."""
        return " ".join(self.payload[: TITLE_CHARACTERS * 2].split())[:TITLE_CHARACTERS]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One try of a task. Times are Unix seconds but for the two that the worker reported as text.

    Attributes:
        worker_id: the worker it was sent to, empty before.
        outcome: the terminal report's extra fields; empty before the end and from plain workers.
    """

    instance_id: str
    task_id: int
    retry_count: int
    state: State
    worker_id: str = ""
    error_code: str = ""
    error_message: str = ""
    created_at: float
    sent_at: float | None = None
    ended_at: float | None = None
    started_at: str | None = None
    finished_at: str | None = None
    outcome: dict[str, Any] = dataclasses.field(default_factory=dict)

    def view(self) -> dict[str, Any]:
        """The instance as the API shows it."""
        return {
            "instance_id": self.instance_id,
            "retry_count": self.retry_count,
            "status": str(self.state),
            "worker_id": self.worker_id,
            "error_code": self.error_code,
            "error_message": self.error_message,
            "created_at": utc_text(self.created_at),
            "sent_at": utc_text(self.sent_at),
            "ended_at": utc_text(self.ended_at),
            "started_at": self.started_at,
            "finished_at": self.finished_at,
            "outcome": self.outcome,
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A submission and every instance of it, oldest first; there is always one at least."""

    task_id: int
    submission: Submission
    created_at: float
    cancel_requested: bool
    instances: tuple[Instance, ...]

    @property
    def current(self) -> Instance:
        """The newest instance, whose state is the task's."""
        return self.instances[-1]

    @property
    def ended(self) -> bool:
        """No retry will follow: a retry is made together with the end that it follows."""
        return self.current.state in TERMINAL

    def view(self) -> dict[str, Any]:
        """The task as the API shows it: the current instance's fields, and all instances."""
        submission = msgspec.to_builtins(self.submission)
        submission.pop("instance_id")
        return {
            "id": self.instances[0].instance_id,
            "task_id": self.task_id,
            "ended": self.ended,
            **self.current.view(),
            "created_at": utc_text(self.created_at),
            "submission": submission,
            "instances": [instance.view() for instance in self.instances],
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TaskSummary:
    """A task in a list: without payload, output and history, so that a list stays small."""

    id: str
    task_id: int
    type: str
    title: str
    instance_id: str
    retry_count: int
    status: str
    worker_id: str
    error_code: str
    error_message: str
    created_at: float
    sent_at: float | None
    ended_at: float | None

    def view(self) -> dict[str, Any]:
        """The summary as the API shows it."""
        fields = dataclasses.asdict(self)
        for name in ("created_at", "sent_at", "ended_at"):
            fields[name] = utc_text(fields[name])
        return fields


def parse_submission(body: bytes) -> Submission:
    """The submission in a request's body.

    Raises:
        RequestError: it is not JSON, or a field is unknown, of another type or out of range.
    """
    try:
        submission = msgspec.json.decode(body, type=Submission)
    except msgspec.MsgspecError as error:
        raise RequestError(f"cannot submit the task: {error}") from error
    given = submission.instance_id
    if given is not None and (not 0 < len(given) <= MAX_INSTANCE_ID_CHARACTERS or "\0" in given):
        raise RequestError(
            "cannot submit the task: instance_id must have 1 to "
            f"{MAX_INSTANCE_ID_CHARACTERS} characters and no NUL"
        )
    return submission


def new_instance_id(task_id: int, retry_count: int, now_ns: int) -> str:
    """``task-7-NANOS``, or ``task-7-retry-1-NANOS`` for a retry."""
    retry = f"-retry-{retry_count}" if retry_count else ""
    return f"task-{task_id}{retry}-{now_ns}"


def should_retry(submission: Submission, instance: Instance, event: Event) -> bool:
    """Whether another instance follows one that has just ended by ``event``.

    A failed dispatch and a cancel are never retried, whatever the policy says.
    """
    return (
        event in (Event.FAIL, Event.TIME_OUT)
        and instance.retry_count < submission.retries
        and str(instance.state) in submission.retry_on
        and (
            submission.retry_error_codes is None
            or instance.error_code in submission.retry_error_codes
        )
    )


def execute_body(task_id: int, submission: Submission, instance: Instance, url: str) -> bytes:
    """The dispatch of an instance: every field of the protocol, and our own where given."""
    request = ExecuteRequest(
        schedule_instance_id=instance.instance_id,
        task_id=task_id,
        task_type=submission.type,
        payload=submission.payload,
        image=submission.image,
        timeout_seconds=submission.timeout_seconds,
        retry_count=instance.retry_count,
        shard_no=submission.shard_no,
        shard_total=submission.shard_total,
        idempotency_key=submission.idempotency_key or f"task-{task_id}",
        scheduler_url=url,
        profile=submission.profile,
        limits=submission.limits,
        http=submission.http,
        files=submission.files,
    )
    fields = msgspec.to_builtins(request)
    return msgspec.json.encode({name: value for name, value in fields.items() if value is not None})


def utc_text(unix_s: float | None) -> str | None:
    """RFC 3339 in UTC, with microseconds."""
    if unix_s is None:
        return None
    moment = datetime.datetime.fromtimestamp(unix_s, datetime.UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
