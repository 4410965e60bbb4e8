"""What `stockade submit` sends, and how it reads what came of it: plain values, no network."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from typing import Any, Final

from stockade.platform.errors import StockadeError
from stockade.supervisor.quantities import parse_seconds

EXIT_TIMEOUT: Final = 124
EXIT_OURS: Final = 125
EXIT_CANCELLED: Final = 130
EXIT_OOM_KILLED: Final = 137


class SubmitError(StockadeError):
    """The task cannot be submitted or waited for."""


def make_submission(
    *,
    payload: str,
    task_type: str,
    timeout: str | None,
    image: str,
    retries: int,
    profile: str | None,
    limits: Sequence[str],
    idempotency_key: str,
) -> dict[str, Any]:
    """The body of POST /v1/tasks.

    Raises:
        SubmitError: the timeout is negative or no time, a limit has no value, or a text is not
            UTF-8.
    """
    body: dict[str, Any] = {"type": task_type, "payload": payload}
    optional = {
        "timeout_seconds": _timeout_seconds(timeout),
        "image": image,
        "retries": retries,
        "profile": profile,
        "limits": _limits(limits),
        "idempotency_key": idempotency_key,
    }
    body |= {name: value for name, value in optional.items() if value}
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        # The shell's bytes that are not UTF-8 arrive here as lone surrogates.
        raise SubmitError("cannot submit the task: it holds bytes that are not UTF-8") from error
    return body


def exit_status(task: dict[str, Any]) -> int:
    """What `stockade run` would have ended with, for an ended task as the scheduler shows it."""
    outcome = task["outcome"]
    by_cause = {
        "success": 0,
        "timeout": EXIT_TIMEOUT,
        "cancelled": EXIT_CANCELLED,
        "oom_killed": EXIT_OOM_KILLED,
        "signaled": 128 + _signal_number(outcome.get("signal")),
        # A plain worker does not say the exit code, and an http task has none.
        "execute_failed": outcome.get("exit_code") or 1,
    }
    cause = task["error_code"] if task["status"] == "failed" else task["status"]
    return by_cause.get(cause, EXIT_OURS)


def split_message(task: dict[str, Any]) -> tuple[str, str]:
    """Reason and excerpt: a success's message is the excerpt, else the reason is its first line."""
    message: str = task["error_message"]
    if task["status"] == "success":
        return "", message
    reason, _, excerpt = message.partition("\n")
    return reason or task["error_code"], excerpt


def _timeout_seconds(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        # Said here because a negative time is refused, and "not a time" would not say why.
        if text.strip().startswith("-"):
            raise ValueError("a timeout cannot be negative")
        seconds = parse_seconds(text)
        if seconds is None or seconds != int(seconds):
            raise ValueError("it must be whole seconds")
    except ValueError as error:
        raise SubmitError(
            f"cannot use --timeout {text}: {error}. Give whole seconds, such as 5 or 2min"
        ) from error
    return int(seconds)


def _limits(texts: Sequence[str]) -> dict[str, str]:
    limits: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise SubmitError(f"cannot use --limit {text}: write it as memory_max=64M")
        limits[name.replace("-", "_")] = value
    return limits


def _signal_number(name: Any) -> int:
    try:
        return int(signal.Signals[str(name)])
    except KeyError:
        # SIGRTMIN+3 and the like, or a worker that does not say.
        return int(signal.SIGKILL)
