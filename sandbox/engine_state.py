"""What an engine says of a container, and the outcome that follows from it. Pure."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Final, Self

from stockade.sandbox.limits import Limits
from stockade.sandbox.outcome import ErrorCode, Outcome, Status
from stockade.sandbox.verdict import format_bytes

# docker run(1), podman-run(1): the engine's own statuses.
ENGINE_STATUSES: Final = (125, 126, 127)
_CLIENTS_OWN: Final = (
    "cpu_s", "cpu_user_s", "cpu_system_s", "cpu_throttled_s", "memory_peak_bytes",
    "memory_peak_source", "processes_peak", "io_read_bytes", "io_write_bytes", "stall_cpu_s",
    "stall_memory_s", "stall_io_s",
)  # fmt: skip
_NEVER: Final = "0001-01-01"
_KILLED: Final = 137
# Limits that no engine's flag holds.
_NOT_HELD: Final = (
    "memory_high", "io_weight", "io_read_bandwidth_max", "io_write_bandwidth_max", "workdir_max",
    "workdir_inodes_max",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class ContainerState:
    """One container as its engine's inspect tells it.

    Attributes:
        started: it ever ran.
        lives: it runs, or is about to, or is paused.
        error: why it could not be started; empty when it was.
        not_applied: limits that were asked for and that the engine dropped.
    """

    status: str
    started: bool
    lives: bool
    exit_code: int
    oom_killed: bool
    error: str
    memory_bytes: int
    pids_max: int
    nano_cpus: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """The state in what inspect printed in engine.INSPECT_FORMAT.

        Raises:
            ValueError: it is something else.
        """
        try:
            state_text, host_text = text.strip().split("\n", 1)
            state, host = json.loads(state_text), json.loads(host_text)
            status = str(state["Status"]).lower()
            return cls(
                status=status,
                started=not str(state.get("StartedAt") or _NEVER).startswith(_NEVER),
                lives=bool(state.get("Running") or state.get("Paused") or state.get("Restarting"))
                or status in ("running", "paused", "restarting", "stopping"),
                exit_code=int(state["ExitCode"]),
                oom_killed=bool(state.get("OOMKilled")),
                error=" ".join(str(state.get("Error") or "").split())[:500],
                memory_bytes=_number(host, "Memory"),
                pids_max=_number(host, "PidsLimit"),
                nano_cpus=_number(host, "NanoCpus"),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"cannot read what the engine says: {text[:200]!r}") from error

    @property
    def is_over(self) -> bool:
        """It ran and ended, for good."""
        return not self.lives and self.status in ("exited", "stopped", "dead")

    @property
    def may_be_oom(self) -> bool:
        """It was killed by SIGKILL, and nothing says by whom."""
        return self.is_over and self.exit_code == _KILLED and not self.oom_killed

    def not_applied(self, limits: Limits) -> tuple[str, ...]:
        """The limits that this container is not held by."""
        lacks = {
            "memory_max": self.memory_bytes,
            "tasks_max": self.pids_max,
            "cpu_quota": self.nano_cpus,
        }
        return tuple(
            name for name, value in lacks.items() if getattr(limits, name) is not None and not value
        ) + tuple(name for name in _NOT_HELD if getattr(limits, name) is not None)


def _number(fields: dict[str, Any], name: str) -> int:
    return max(0, int(fields.get(name) or 0))


def container_outcome(
    by_client: Outcome, state: ContainerState | None, limits: Limits, note: str
) -> Outcome:
    """A container task's outcome.

    Args:
        by_client: what the end of the engine's client looks like, by the rules of any task.
        state: the container after its end; None when the engine knows no such container.
        limits: the container's.
        note: what could not be done, for the reason.
    """
    status, code, reason = by_client.status, by_client.error_code, by_client.reason
    exit_code, signal_name = by_client.exit_code, by_client.signal
    is_ours = code in (ErrorCode.TIMEOUT, ErrorCode.CANCELLED)
    if state is not None and state.is_over and state.started:
        exit_code, signal_name = state.exit_code, None
        if not is_ours:
            status, code, reason = _by_exit(state, limits)
    elif not is_ours and code is not ErrorCode.SPAWN_FAILED:
        if state is not None and not state.started:
            status, code = Status.FAILED, ErrorCode.SPAWN_FAILED
            reason = f"cannot start the container: {state.error or 'its output says why'}"
        elif exit_code in ENGINE_STATUSES:
            status, code = Status.FAILED, ErrorCode.SPAWN_FAILED
            reason = (
                f"cannot run the container: the engine ended with {exit_code}; its output says why"
            )
    unknown: dict[str, Any] = dict.fromkeys(_CLIENTS_OWN)
    return dataclasses.replace(
        by_client,
        status=status,
        error_code=code,
        reason="; ".join(text for text in (reason, note) if text),
        exit_code=exit_code,
        signal=signal_name,
        # What was counted is the engine's client, which is not the task.
        **unknown,
        degraded=state.not_applied(limits) if state is not None else (),
    )  # fmt: skip


def _by_exit(state: ContainerState, limits: Limits) -> tuple[Status, ErrorCode, str]:
    if state.exit_code == 0:
        return Status.SUCCESS, ErrorCode.NONE, ""
    if state.oom_killed and state.exit_code == _KILLED:
        limit = format_bytes(limits.memory_max) if limits.memory_max is not None else "of the host"
        reason = f"killed: memory_max {limit} reached (the engine's inspect)"
        return Status.FAILED, ErrorCode.OOM_KILLED, reason
    hit = "; memory_max was reached, some of its processes were killed" if state.oom_killed else ""
    return Status.FAILED, ErrorCode.EXECUTE_FAILED, f"exit status {state.exit_code}{hit}"
