"""The limits of one task: values from texts, and how a task's wishes meet the worker's maximum.

A task ends at ``runtime_max`` by SIGTERM and is killed ``timeout_stop`` later. The grace counts
from the deadline, so the order is always sane; still, a grace longer than the whole run is never
meant, so a task's ``timeout_stop`` is at most its ``runtime_max``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from stockade.sandbox.limits import LIMIT_FIELDS, Limits, Unit
from stockade.supervisor.errors import RejectedError, Rejection
from stockade.supervisor.quantities import (
    MAX_SECONDS,
    format_bytes,
    format_count,
    format_quota,
    format_seconds,
    parse_bytes,
    parse_count,
    parse_quota,
    parse_seconds,
    shown,
)
from stockade.supervisor.spelling import suggestion

__all__ = [
    "LIMIT_FIELDS",
    "UNLIMITED",
    "effective",
    "format_bytes",
    "format_limit",
    "format_quota",
    "format_seconds",
    "is_looser",
    "parse_bytes",
    "parse_limit",
    "parse_quota",
    "parse_seconds",
]

# cgroup v2 (Documentation/admin-guide/cgroup-v2.rst): weights are 1 to 10000 and default to 100.
MAX_WEIGHT: Final = 10_000
DEFAULT_WEIGHT: Final = 100

UNLIMITED: Final = Limits(
    **{
        name: MAX_WEIGHT if field.metadata["unit"] is Unit.WEIGHT else None
        for name, field in LIMIT_FIELDS.items()
        if field.metadata["unit"] is not Unit.CHOICE
    },
    oom_policy="continue",
)
"""A maximum that lowers nothing, for tasks that the host's own user starts."""


def parse_limit(name: str, value: object) -> Any:
    """The value of limit ``name`` from what a person or a dispatch wrote.

    Raises:
        ValueError: the reason, without the name unless the name itself is unknown.
    """
    if name not in LIMIT_FIELDS:
        raise ValueError(f"unknown limit {shown(name)}{suggestion(name, LIMIT_FIELDS)}")
    metadata = LIMIT_FIELDS[name].metadata
    if metadata["unit"] is Unit.CHOICE:
        return _choice(value, metadata["choices"])
    parsed = _PARSE[metadata["unit"]](value)
    least = metadata["least"]
    if parsed is not None and parsed < least:
        raise ValueError(f"{shown(value)} is less than the least, {format_limit(name, least)}")
    if parsed is not None and metadata["unit"] is Unit.WEIGHT and parsed > MAX_WEIGHT:
        raise ValueError(f"{shown(value)} is not a weight from 1 to {MAX_WEIGHT}")
    return parsed


def format_limit(name: str, value: Any) -> str:
    """The text of limit ``name``'s value, which ``parse_limit`` takes back.

    Raises:
        KeyError: no limit has this name.
    """
    return _FORMAT[LIMIT_FIELDS[name].metadata["unit"]](value)


def is_looser(name: str, value: Any, maximum: Any) -> bool:
    """Whether ``value`` allows more than ``maximum`` does, for limit ``name``."""
    metadata = LIMIT_FIELDS[name].metadata
    if metadata["unit"] is Unit.CHOICE:
        # Declared from the strictest on.
        choices = metadata["choices"]
        return bool(choices.index(value) > choices.index(maximum))
    if metadata["unit"] is Unit.WEIGHT:
        # A weight that is not set is the kernel's default, not boundless: more than the others'
        # share is taken from the others.
        value, maximum = value or DEFAULT_WEIGHT, maximum or DEFAULT_WEIGHT
    if maximum is None:
        return False
    return value is None or bool(value > maximum)


def effective(
    base: Limits, maximum: Limits, wishes: Mapping[str, object], timeout_s: float | None
) -> tuple[Limits, tuple[str, ...]]:
    """The limits that a task gets, and a note for each wish that was lowered.

    Args:
        base: the worker's defaults.
        maximum: what no wish goes beyond.
        wishes: raw values by limit name, as the dispatch had them; None means not wished.
        timeout_s: the task's timeout in seconds; None, 0 and less mean not given. With a wish for
            ``runtime_max`` too, the shorter one holds.

    Raises:
        RejectedError: INVALID; a limit is unknown or its value is none.
    """
    asked = _asked(wishes, timeout_s)
    notes = []
    for name, value in asked.items():
        most = getattr(maximum, name)
        if is_looser(name, value, most):
            lowered = DEFAULT_WEIGHT if most is None else most
            notes.append(_note(name, value, lowered, "the worker's maximum"))
            asked[name] = lowered
    limits = dataclasses.replace(base, **asked)
    if is_looser("timeout_stop", limits.timeout_stop, limits.runtime_max):
        if "timeout_stop" in asked:
            notes.append(
                _note("timeout_stop", limits.timeout_stop, limits.runtime_max, "its runtime_max")
            )
        limits = dataclasses.replace(limits, timeout_stop=limits.runtime_max)
    if limits.timeout_stop is None:
        raise RejectedError(
            Rejection.INVALID,
            "cannot use limit timeout_stop: a task that ignores SIGTERM would never end;"
            " give a time, or a runtime_max",
        )
    return limits, tuple(notes)


def _asked(wishes: Mapping[str, object], timeout_s: float | None) -> dict[str, Any]:
    asked: dict[str, Any] = {}
    for name, raw in wishes.items():
        if raw is None:
            continue
        try:
            asked[name] = parse_limit(name, raw)
        except ValueError as error:
            where = f"limit {name}" if name in LIMIT_FIELDS else "a limit"
            raise RejectedError(Rejection.INVALID, f"cannot use {where}: {error}") from error
    # Written so that NaN, too, means not given.
    if timeout_s is not None and timeout_s > 0:
        timeout = None if timeout_s == math.inf else float(min(timeout_s, MAX_SECONDS))
        if is_looser("runtime_max", asked.get("runtime_max"), timeout):
            asked["runtime_max"] = timeout
        asked.setdefault("runtime_max", timeout)
    return asked


def _note(name: str, value: Any, lowered: Any, because: str) -> str:
    was, now = format_limit(name, value), format_limit(name, lowered)
    return f"{name} lowered from {was} to {now}, {because}"


def _choice(value: object, choices: tuple[str, ...]) -> str:
    if isinstance(value, str) and value.strip() in choices:
        return value.strip()
    raise ValueError(f"{shown(value)} is not one of {', '.join(choices)}")


_PARSE: Final[dict[Unit, Callable[[object], Any]]] = {
    Unit.BYTES: parse_bytes,
    Unit.CPUS: parse_quota,
    Unit.SECONDS: parse_seconds,
    Unit.COUNT: parse_count,
    Unit.WEIGHT: parse_count,
}


_FORMAT: Final[dict[Unit, Callable[[Any], str]]] = {
    Unit.BYTES: format_bytes,
    Unit.CPUS: format_quota,
    Unit.SECONDS: format_seconds,
    Unit.COUNT: format_count,
    Unit.WEIGHT: format_count,
    Unit.CHOICE: str,
}
