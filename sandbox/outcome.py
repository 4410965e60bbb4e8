"""How a task ended: a value, never an exception."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, Final, Self

_REASON_CHARACTERS_MAX: Final = 4096


class Status(enum.StrEnum):
    """The status that a terminal report carries."""

    SUCCESS = "success"
    FAILED = "failed"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"


class ErrorCode(enum.StrEnum):
    """Why a task did not succeed; schedulers match retry policies on it."""

    NONE = ""
    EXECUTE_FAILED = "execute_failed"
    SIGNALED = "signaled"
    OOM_KILLED = "oom_killed"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    SPAWN_FAILED = "spawn_failed"
    WORKER_LOST = "worker_lost"
    UNSUPPORTED_TASK_TYPE = "unsupported_task_type"
    INVALID_REQUEST = "invalid_request"


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """How one task ended, and what it used. What does not apply, or is not known, is None.

    Attributes:
        reason: one human line; empty on success.
        exit_code: 0 to 255, when the task's main process exited.
        signal: for example ``SIGSEGV``, when a signal ended it.
        wall_s: seconds from start to end, monotonic.
        cpu_throttled_s: time that cpu_quota kept it from running, added up over all CPUs.
        memory_peak_source: ``memory.peak``, the kernel's count; ``sampled``; or ``maxrss``, the
            largest process alone.
        stall_cpu_s: time in which some process of the task waited for a CPU (PSI, as the two after
            it).
        output_bytes: bytes the task printed in all, kept or not.
        degraded: what this host could not enforce, by feature name.
        started_at: Unix time in seconds, for people and schedulers.
        finished_at: the same.
    """

    status: Status
    error_code: ErrorCode = ErrorCode.NONE
    reason: str = ""
    exit_code: int | None = None
    signal: str | None = None
    wall_s: float | None = None
    cpu_s: float | None = None
    cpu_user_s: float | None = None
    cpu_system_s: float | None = None
    cpu_throttled_s: float | None = None
    memory_peak_bytes: int | None = None
    memory_peak_source: str | None = None
    processes_peak: int | None = None
    io_read_bytes: int | None = None
    io_write_bytes: int | None = None
    stall_cpu_s: float | None = None
    stall_memory_s: float | None = None
    stall_io_s: float | None = None
    output_bytes: int | None = None
    output_truncated: bool = False
    profile: str | None = None
    degraded: tuple[str, ...] = ()
    started_at: float | None = None
    finished_at: float | None = None

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary for ``json.dumps``; ``from_json`` takes it back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """The outcome that ``to_json`` gave.

        Raises:
            TypeError: a field is unknown or missing.
            ValueError: status or error_code is not one of ours.
        """
        fields = dict(fields)
        fields["status"] = Status(fields["status"])
        fields["error_code"] = ErrorCode(fields["error_code"])
        fields["degraded"] = tuple(fields["degraded"])
        return cls(**fields)


def reason_of(text: str) -> str:
    """A text as an outcome's reason: one line, which any message and record can hold.

    What a task asks for can be quoted in it, however long, and with bytes that are no text.
    """
    line = text.rstrip().replace("\n", " ")
    return line[:_REASON_CHARACTERS_MAX].encode("utf-8", "replace").decode()
