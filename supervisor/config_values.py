"""The kinds of configuration values: how each is read from TOML or text, and written back.

A reader takes what TOML gives (text, number, list, table) or the text of an environment variable or
flag, and raises ValueError with the reason. A reason never repeats what may hold a secret.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import ipaddress
import json
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from stockade.supervisor.limits import format_limit, parse_limit
from stockade.supervisor.listen import parse_address, parse_advertised
from stockade.supervisor.quantities import (
    format_bytes,
    format_quota,
    format_seconds,
    parse_bytes,
    parse_count,
    parse_quota,
    parse_seconds,
    shown,
)
from stockade.supervisor.spelling import suggestion

HIDDEN: Final = "(hidden)"


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """One kind of value.

    Attributes:
        read: the value from a raw one; raises ValueError with the reason.
        write: TOML text that ``read`` takes back, secrets left out; for any value but None.
    """

    read: Callable[[object], Any]
    write: Callable[[Any], str]


def count(least: int, most: int) -> Kind:
    """A whole number from ``least`` to ``most``."""

    def read(raw: object) -> int:
        return int(_in_range(parse_count(raw), raw, least, most, str))

    return Kind(read, str)


def seconds(least: float) -> Kind:
    """A finite time of at least ``least`` seconds."""

    def read(raw: object) -> float:
        return float(_in_range(parse_seconds(raw), raw, least, 2**31, format_seconds))

    return Kind(read, lambda value: quoted(format_seconds(value)))


def ceiling(name: str) -> Kind:
    """The value of limit ``name`` for all tasks together; unset for none."""
    kind = limit(name)
    return Kind(_optional(kind.read), kind.write)


def percentage() -> Kind:
    """A share of time from 0 to 1, written ``20%``; unset for none."""

    def read(raw: object) -> float | None:
        share = parse_quota(raw)
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"{shown(raw)} is not more than 0% and at most 100%")
        return share

    return Kind(_optional(read), lambda value: quoted(format_quota(value)))


def size(least: int, most: int) -> Kind:
    """A finite size from ``least`` to ``most`` bytes."""

    def read(raw: object) -> int:
        return int(_in_range(parse_bytes(raw), raw, least, most, format_bytes))

    return Kind(read, lambda value: quoted(format_bytes(value)))


def optional(kind: Kind) -> Kind:
    """That kind, or None for an empty text."""
    return Kind(_optional(kind.read), kind.write)


def choice(choices: type[enum.StrEnum], **unavailable: str) -> Kind:
    """One of an enumeration's texts; ``unavailable`` says why others, by name, are not taken."""

    def read(raw: object) -> enum.StrEnum:
        text = _text(raw).strip().lower()
        if text in unavailable:
            raise ValueError(f"{shown(text)}: {unavailable[text]}")
        if text not in list(choices):
            raise ValueError(f"{shown(raw)} is not known{suggestion(text, choices)}")
        return choices(text)

    return Kind(read, quoted)


def limit(name: str) -> Kind:
    """The value of limit ``name``."""

    def write(value: Any) -> str:
        text = format_limit(name, value)
        return text if text.isdigit() else quoted(text)

    return Kind(functools.partial(parse_limit, name), write)


def quoted(text: str) -> str:
    """A TOML basic string. JSON's escapes are TOML's too."""
    return json.dumps(text, ensure_ascii=False)


def _in_range(
    value: Any, raw: object, least: float, most: float, write: Callable[[Any], str]
) -> Any:
    if value is None:
        raise ValueError("it cannot be infinite")
    if value < least:
        raise ValueError(f"{shown(raw)} is less than the least, {write(least)}")
    if value > most:
        raise ValueError(f"{shown(raw)} is more than the most, {write(most)}")
    return value


def _text(raw: object) -> str:
    if not isinstance(raw, str):
        raise ValueError(f"a {type(raw).__name__} is not a text; write it in quotes")
    try:
        raw.encode()
    except UnicodeEncodeError as error:
        raise ValueError("it is not valid UTF-8") from error
    if "\0" in raw:
        raise ValueError("it holds a NUL character")
    return raw


def _line(raw: object) -> str:
    text = _text(raw).strip()
    if not text:
        raise ValueError("it is empty")
    if not text.isprintable():
        raise ValueError("it holds a control character")
    return text


def _optional(read: Callable[[object], Any]) -> Callable[[object], Any]:
    # TOML has no null: an empty text unsets the key.
    def read_optional(raw: object) -> Any:
        return None if raw == "" else read(raw)

    return read_optional


def _read_path(raw: object) -> Path:
    path = Path(_line(raw))
    if not path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{shown(str(path))} is not an absolute path without ..")
    return path


def _read_path_below_root(raw: object) -> str:
    path = str(_read_path(raw))
    if path == "/":
        raise ValueError("/ is the whole system: name what is meant in it")
    return path


def _read_switch(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    try:
        return {"true": True, "false": False}[_line(raw).lower()]
    except KeyError:
        raise ValueError(f"{shown(str(raw))} is neither true nor false") from None


def _read_worker_id(raw: object) -> str:
    text = _text(raw).strip()
    # The scheduler stores 64 characters; the rest keeps it one name of a cgroup and of a unit.
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]{0,63}", text):
        raise ValueError(
            f"{shown(text)} is not 1 to 64 letters, digits, dots, dashes, underscores, colons or @"
        )
    return text


def _read_url(raw: object) -> str:
    # No reason repeats the URL: it may hold a password.
    text = _line(raw)
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ValueError("it is not a URL with a valid host and port") from error
    if parts.scheme not in {"http", "https"} or not parts.hostname or port == 0:
        raise ValueError("it is not a URL such as http://scheduler.example:8080")
    if "@" in parts.netloc:
        raise ValueError("it holds a user name or password; put a token in http.token_file")
    if parts.query or parts.fragment or " " in text:
        raise ValueError("it is more than a base URL such as http://scheduler.example:8080")
    return f"{parts.scheme}://{parts.netloc.lower()}{parts.path.rstrip('/')}"


def _read_grpc_address(raw: object) -> str:
    text = _line(raw)
    scheme, separator, rest = text.rpartition("://")
    if separator and scheme.lower() not in {"http", "https"}:
        raise ValueError(f"{shown(scheme)} is not a scheme; write host:port, or https://host:port")
    address = parse_address(rest.rstrip("/"))
    if rest.startswith(":") or address.port == 0:
        raise ValueError('it is not an address such as "scheduler.example:9090"')
    # Plain text is the default, as in the calls of every gRPC library.
    return f"https://{address}".lower() if scheme.lower() == "https" else str(address).lower()


def _read_network(raw: object) -> str:
    text = _line(raw)
    try:
        return str(ipaddress.ip_network(text))
    except ValueError as error:
        raise ValueError(f"{shown(text)} is not a network such as 10.0.0.0/8: {error}") from error


def _read_place(raw: object) -> str:
    text = _line(raw)
    try:
        return str(ipaddress.ip_network(text))
    except ValueError as error:
        name = text.lower().rstrip(".")
        if not re.fullmatch(r"\.?[a-z0-9_-]+(\.[a-z0-9_-]+)*", name) or name[-1].isdigit():
            raise ValueError(
                f"{shown(text)} is neither a network such as 10.0.0.0/8 nor a host such as"
                " api.example.com or, for all hosts below it, .example.com"
            ) from error
        return name


def _read_command(raw: object) -> tuple[str, ...]:
    if isinstance(raw, str):
        raw = [word.strip() for word in raw.split(",")]
    words = _list(_text, repeats=True).read(raw)
    if not words or not words[0].startswith("/"):
        raise ValueError('it is not a program by its absolute path, such as ["/bin/bash", "-lc"]')
    return tuple(words)


def _list(read: Callable[[object], str], *, repeats: bool = False) -> Kind:
    def read_list(raw: object) -> tuple[str, ...]:
        if isinstance(raw, str):
            raw = [item for item in raw.split(",") if item.strip()]
        if not isinstance(raw, list | tuple):
            raise ValueError('it is not a list such as ["a", "b"]')
        values = [read(item) for item in raw]
        return tuple(values if repeats else dict.fromkeys(values))

    return Kind(read_list, lambda values: f"[{', '.join(map(quoted, values))}]")


def names(known: Collection[str]) -> Kind:
    """A list of names, each of them known."""

    def read(raw: object) -> str:
        text = _line(raw).removeprefix("--")
        if text not in known:
            raise ValueError(f"{shown(text)} is not one of {', '.join(sorted(known))}")
        return text

    return _list(read)


def _read_map(raw: object) -> dict[str, str]:
    if isinstance(raw, str):
        pairs = [item.partition("=") for item in raw.split(",") if item.strip()]
        if any(not equals for _, equals, _ in pairs):
            raise ValueError("an item has no =; write NAME=VALUE,NAME=VALUE")
        return {_map_name(name): _text(value) for name, _, value in pairs}
    if not isinstance(raw, dict):
        raise ValueError('it is not a table such as { name = "value" }')
    found = {}
    for name, value in raw.items():
        if not isinstance(value, str):
            raise ValueError(f"the value of {shown(name)} is not a text; write it in quotes")
        found[_map_name(name)] = _text(value)
    return found


def _map_name(raw: str) -> str:
    try:
        return _line(raw)
    except ValueError as error:
        raise ValueError(f"a name in it cannot be used: {error}") from error


# What the worker or the slot decides for each task, and what has a key of its own.
_TASK_VARIABLES: Final = frozenset(
    {"HOME", "TMPDIR", "PWD", "IDEMPOTENCY_KEY", "SHARD_NO", "SHARD_TOTAL", "SCHEDULE_INSTANCE_ID"}
)
_VARIABLE_KEYS: Final = {"PATH": "task.shell.path", "LANG": "task.shell.lang"}


def _read_environment(raw: object) -> dict[str, str]:
    variables = _read_map(raw)
    for name in variables:
        if "=" in name or not name.isascii() or " " in name:
            raise ValueError(f"{shown(name)} is not the name of an environment variable")
        if name in _TASK_VARIABLES:
            raise ValueError(f"{name} is set for each task by the worker")
        if name in _VARIABLE_KEYS:
            raise ValueError(f"{name} has a key of its own, {_VARIABLE_KEYS[name]}")
    return variables


def _write_map(values: dict[str, str]) -> str:
    pairs = ", ".join(f"{quoted(name)} = {quoted(value)}" for name, value in values.items())
    return f"{{ {pairs} }}" if pairs else "{}"


def _write_names(values: dict[str, str]) -> str:
    return _write_map(dict.fromkeys(values, HIDDEN))


TEXT: Final = Kind(_line, quoted)
OPTIONAL_TEXT: Final = Kind(lambda raw: "" if raw == "" else _line(raw), quoted)
PATH: Final = Kind(_read_path, lambda path: quoted(str(path)))
OPTIONAL_PATH: Final = Kind(_optional(_read_path), lambda path: quoted(str(path)))
WORKER_ID: Final = Kind(_read_worker_id, quoted)
OPTIONAL_ADDRESS: Final = Kind(_optional(lambda raw: str(parse_address(_line(raw)))), quoted)
GRPC_ADDRESS: Final = Kind(_optional(_read_grpc_address), quoted)
GRPC_ADDRESSES: Final = _list(_read_grpc_address)
URL: Final = Kind(_optional(_read_url), quoted)
URLS: Final = _list(_read_url)
NETWORKS: Final = _list(_read_network)
PATHS: Final = _list(_read_path_below_root)
SWITCH: Final = Kind(_read_switch, lambda value: "true" if value else "false")
PLACES: Final = _list(_read_place)
COMMAND: Final = Kind(_read_command, _list(_text).write)
LABELS: Final = Kind(_read_map, _write_map)
ENVIRONMENT: Final = Kind(_read_environment, _write_names)


def _read_advertised(raw: object) -> str:
    text = _line(raw)
    parse_advertised(text)
    return text


ADVERTISED: Final = Kind(_optional(_read_advertised), quoted)
