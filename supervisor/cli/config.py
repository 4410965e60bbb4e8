"""``stockade config``: check a configuration file, show what is in force and where it came from.

A configuration that cannot be used leaves as ConfigError, which the console script turns into one
message a problem and exit status 78.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from stockade.supervisor.config import KEYS, SECTIONS, Config, Loaded
from stockade.supervisor.config_defaults import default_file
from stockade.supervisor.config_load import load

_COMMENT_COLUMN: Final = 44

app = typer.Typer(
    help="Check the configuration, or show what is in force.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="The configuration file.", show_default=False)],
) -> None:
    """Check FILE as a worker would read it here, environment included."""
    loaded = load(file, os.environ)
    _warn(loaded)
    print(f"{file}: ok")


@app.command()
def show(
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            help="The configuration file; without it, the default one if there is one.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Print what is in force, as TOML, and where each value came from. Secrets are left out."""
    loaded = load(config or default_file(os.environ), os.environ)
    _warn(loaded)
    print(render(loaded), end="")


def render(loaded: Loaded) -> str:
    """The whole configuration as TOML, with each value's source as a comment; no secrets."""
    lines: list[str] = []
    for section in SECTIONS:
        lines += ["", f"[{section}]"]
        for key in KEYS.values():
            if key.section == section:
                value = _value(loaded.config, section, key.name)
                # A key that is not set reads as an empty text; a limit writes its own "infinity".
                is_unset = value is None and not section.startswith("limits")
                text = f"{key.name} = " + ('""' if is_unset else key.kind.write(value))
                source = _printable(loaded.sources[key.dotted])
                lines.append(f"{text:<{_COMMENT_COLUMN}} # {source}")
    return "\n".join(lines[1:]) + "\n"


def _value(config: Config, section: str, name: str) -> Any:
    return getattr(getattr(config, section.replace(".", "_")), name)


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)


def _warn(loaded: Loaded) -> None:
    for warning in loaded.warnings:
        print(f"stockade: warning: {warning}", file=sys.stderr)
