"""The door for more task types: classes of other packages, by entry point.

A package offers one class under the group ``stockade.task_types``. What it gets wrong when it is
loaded or made costs its own type only: tasks of that type are reported as unsupported, with the
reason, and the worker runs on.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.metadata
import re
from collections.abc import Iterable, Mapping
from typing import Final

import structlog

from stockade.supervisor.task_types.base import TaskType

log = structlog.get_logger(__name__)

GROUP: Final = "stockade.task_types"
_CLOSE_S: Final = 5.0
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")


@dataclasses.dataclass(frozen=True, slots=True)
class Door:
    """What came in by entry point.

    Attributes:
        classes: by the name that dispatches use.
        faults: why a type is missing, by the name of its entry point.
    """

    classes: Mapping[str, type[TaskType]]
    faults: Mapping[str, str]


def load_classes(
    built_in: Iterable[str],
    entry_points: Iterable[importlib.metadata.EntryPoint] | None = None,
) -> Door:
    """Imports every class on offer; a fault in one is logged and leaves that one out.

    Args:
        built_in: names that are taken.
        entry_points: None for those that are installed.
    """
    if entry_points is None:
        entry_points = importlib.metadata.entry_points(group=GROUP)
    taken = frozenset(built_in)
    classes: dict[str, type[TaskType]] = {}
    faults: dict[str, str] = {}
    for entry in sorted(entry_points, key=lambda entry: (entry.name, entry.value)):
        try:
            found = _checked(entry.load())
            if found.name in taken or found.name in classes:
                raise TypeError(f"the name {found.name!r} is taken; choose another")
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            log.exception("cannot load a task type", entry_point=entry.name, value=entry.value)
            faults[entry.name.lower()] = f"cannot load {entry.value}: {_in_a_line(error)}"
        else:
            classes[found.name] = found
            log.info("task type loaded", name=found.name, value=entry.value)
    return Door(classes, faults)


def make_types(door: Door) -> tuple[dict[str, TaskType], dict[str, str]]:
    """An instance of each class, and why a type is missing, both by name."""
    types: dict[str, TaskType] = {}
    faults = dict(door.faults)
    for name, found in door.classes.items():
        try:
            types[name] = found()
        except Exception as error:
            log.exception("cannot make a task type", name=name)
            faults[name] = f"cannot make {found.__qualname__}: {_in_a_line(error)}"
    return types, faults


async def close_types(types: Mapping[str, TaskType]) -> None:
    """Closes each; a fault in one, or one that does not come to an end, holds up no other."""
    for name, task_type in types.items():
        try:
            async with asyncio.timeout(_CLOSE_S):
                await task_type.close()
        except (Exception, SystemExit):
            log.exception("cannot close a task type", name=name)


def _checked(found: object) -> type[TaskType]:
    if not isinstance(found, type) or not issubclass(found, TaskType):
        raise TypeError(f"{found!r} is not a class derived from TaskType")
    if getattr(found, "__abstractmethods__", None):
        raise TypeError(
            f"{found.__qualname__} lacks {', '.join(sorted(found.__abstractmethods__))}"
        )
    name = getattr(found, "name", None)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise TypeError(f"its name is {name!r}, not lower-case letters, digits, dots and dashes")
    return found


def _in_a_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
