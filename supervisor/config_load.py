"""Reads the configuration from its sources: flag over environment over file over default.

Everything wrong is found in one go: a ConfigError holds one line a problem. No line repeats a value
that may be a secret.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from stockade.supervisor.config import (
    ENVIRONMENT_PREFIX,
    KEYS,
    NO_DEFAULT,
    SECTIONS,
    Config,
    Key,
    Loaded,
)
from stockade.supervisor.config_checks import check
from stockade.supervisor.config_defaults import host_defaults
from stockade.supervisor.errors import ConfigError
from stockade.supervisor.limits import LIMIT_FIELDS, is_looser
from stockade.supervisor.spelling import nearest, suggestion

DEFAULT: Final = "default"

ALIASES: Final = {
    "APP_HTTP_ADDR": "http.listen",
    "APP_GRPC_ADDR": "grpc.listen",
    "SCHEDULER_URL": "http.scheduler",
    "SCHEDULER_GRPC_ADDR": "grpc.scheduler",
    "WORKER_ID": "worker.id",
    "INTERNAL_PROTOCOL": "worker.protocol",
}
"""The Go worker's environment variables, and the keys they set."""

_BY_ENVIRONMENT: Final = {key.environment: key for key in KEYS.values()}
_UIDS: Final = 65_535
# A number too long for Python is a bare ValueError.
_NOT_TOML: Final = "it is not TOML in UTF-8, or a number in it has thousands of digits"


@dataclasses.dataclass(frozen=True, slots=True)
class _Raw:
    """A value as written, and where."""

    value: object
    source: str


def load(
    path: Path | None,
    environ: Mapping[str, str],
    overrides: Mapping[str, object] | None = None,
) -> Loaded:
    """The configuration in force, checked as a whole.

    Args:
        path: the file, or None for none; see ``config_defaults.default_file``.
        environ: the environment; only ``STOCKADE_*`` and the aliases are looked at, and the XDG
            variables and HOME for default directories.
        overrides: values of flags by dotted key; None means that the flag was not given.

    Raises:
        ConfigError: one line for each thing that is wrong.
    """
    problems: list[str] = []
    raw: dict[str, _Raw] = {}
    if path is not None:
        raw.update(_from_file(path, problems))
    raw.update(_from_environment(environ, problems))
    raw.update(_from_flags(overrides or {}, problems))
    values, sources = _read(raw, environ, problems)
    _stop_at(problems)
    _fill_uids(values, sources)
    _fill_limits(values, sources, problems)
    _stop_at(problems)
    config = _build(values)
    problems, warnings = check(config)
    _stop_at(problems)
    return Loaded(config=config, sources=sources, file=path, warnings=tuple(warnings))


def _stop_at(problems: list[str]) -> None:
    if problems:
        raise ConfigError("\n".join(problems))


def _from_file(path: Path, problems: list[str]) -> Iterator[tuple[str, _Raw]]:
    try:
        document = tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise ConfigError(f"cannot read configuration {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        # Decode errors carry the text they failed on, which may hold secrets: say the place only.
        reason = str(error) if isinstance(error, tomllib.TOMLDecodeError) else _NOT_TOML
        raise ConfigError(f"cannot read configuration {path}: {reason}") from error
    yield from _from_table(document, "", path, problems)


def _from_table(
    table: Mapping[str, Any], section: str, path: Path, problems: list[str]
) -> Iterator[tuple[str, _Raw]]:
    known = [*_subsections(section), *(key.name for key in _section_keys(section))]
    for name, value in table.items():
        dotted = f"{section}.{name}" if section else name
        if dotted in KEYS:
            yield dotted, _Raw(value, f"file {path}")
        elif name not in known:
            what = f"key {name} in [{section}]" if section else f"section [{name}]"
            problems.append(f"cannot use {what} of {path}: unknown{suggestion(name, known)}")
        elif isinstance(value, dict):
            yield from _from_table(value, dotted, path, problems)
        else:
            problems.append(f"cannot use {dotted} of {path}: it is a section, write [{dotted}]")


def _subsections(section: str) -> list[str]:
    prefix = f"{section}." if section else ""
    below = [name.removeprefix(prefix) for name in SECTIONS if name.startswith(prefix)]
    return list(dict.fromkeys(name.split(".")[0] for name in below))


def _section_keys(section: str) -> list[Key]:
    return [key for key in KEYS.values() if key.section == section]


def _from_environment(
    environ: Mapping[str, str], problems: list[str]
) -> Iterator[tuple[str, _Raw]]:
    for name, dotted in ALIASES.items():
        # The Go worker takes an empty variable for an absent one.
        if environ.get(name):
            yield dotted, _Raw(environ[name], f"environment {name}")
    for name in sorted(environ):
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        if name in _BY_ENVIRONMENT:
            yield _BY_ENVIRONMENT[name].dotted, _Raw(environ[name], f"environment {name}")
        else:
            hint = _variable_hint(name)
            problems.append(f"cannot use environment variable {name}: unknown{hint}")


def _variable_hint(name: str) -> str:
    # Without the prefix, which makes any two of them look alike.
    names = {known.removeprefix(ENVIRONMENT_PREFIX) for known in _BY_ENVIRONMENT}
    near = nearest(name.removeprefix(ENVIRONMENT_PREFIX), names)
    if near is None:
        return "; a key's variable is STOCKADE_SECTION_KEY, and `stockade config show` lists keys"
    return f"; did you mean {ENVIRONMENT_PREFIX}{near}?"


def _from_flags(overrides: Mapping[str, object], problems: list[str]) -> Iterator[tuple[str, _Raw]]:
    for dotted, value in overrides.items():
        if dotted not in KEYS:
            problems.append(f"cannot use {dotted}: unknown{suggestion(dotted, KEYS)}")
        elif value is not None:
            flag = f"--{KEYS[dotted].name.replace('_', '-')}"
            yield dotted, _Raw(value, f"flag {flag}")


def _read(
    raw: Mapping[str, _Raw], environ: Mapping[str, str], problems: list[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    from_host = host_defaults(environ)
    for dotted, key in KEYS.items():
        sources[dotted] = raw[dotted].source if dotted in raw else DEFAULT
        try:
            if dotted in raw:
                values[dotted] = key.kind.read(raw[dotted].value)
            elif dotted in from_host:
                values[dotted] = from_host[dotted]()
            elif key.default is not NO_DEFAULT:
                values[dotted] = key.default
        except ValueError as error:
            problems.append(f"cannot use {dotted} ({sources[dotted]}): {error}")
        except ConfigError as error:
            problems.append(str(error))
    return values, sources


def _fill_uids(values: dict[str, Any], sources: dict[str, str]) -> None:
    if "worker.uid_max" not in values:
        values["worker.uid_max"] = min(values["worker.uid_min"] + _UIDS, 2**32 - 3)
        sources["worker.uid_max"] = f"{DEFAULT} (worker.uid_min + {_UIDS})"


def _fill_limits(values: dict[str, Any], sources: dict[str, str], problems: list[str]) -> None:
    for name in LIMIT_FIELDS:
        base, most = f"limits.{name}", f"limits.max.{name}"
        if most not in values:
            values[most] = values[base]
            sources[most] = f"{DEFAULT} (as {base})"
        elif is_looser(name, values[base], values[most]):
            if sources[base] == DEFAULT:
                values[base] = values[most]
                sources[base] = f"{DEFAULT} (lowered to {most})"
            else:
                problems.append(
                    f"cannot use {base} ({sources[base]}): it is more than {most}"
                    f" ({sources[most]}); lower the one or raise the other"
                )
    stop, run = "limits.timeout_stop", "limits.runtime_max"
    if values[stop] is None:
        problems.append(
            f"cannot use {stop} ({sources[stop]}): a task that ignores SIGTERM would never end;"
            " give a time"
        )
    elif is_looser("timeout_stop", values[stop], values[run]):
        if sources[stop].startswith(DEFAULT):
            values[stop] = values[run]
            sources[stop] = f"{DEFAULT} (lowered to {run})"
        else:
            problems.append(
                f"cannot use {stop} ({sources[stop]}): the grace after the deadline is longer than"
                f" {run}, the longest run; lower the one or raise the other"
            )


def _build(values: Mapping[str, Any]) -> Config:
    sections: dict[str, Any] = {
        section: struct(**{key.name: values[key.dotted] for key in _section_keys(section)})
        for section, struct in SECTIONS.items()
    }
    return Config(**{section.replace(".", "_"): values for section, values in sections.items()})
