"""``stockade scheduler``: the embedded single-host scheduler alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from stockade.supervisor.errors import ConfigError
from stockade.supervisor.scheduler.errors import SettingsError
from stockade.supervisor.scheduler.settings import (
    DEFAULT_LISTEN,
    default_state_dir,
    make_settings,
)


def scheduler(
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Where to listen. Port 0 takes a free one, which is printed.",
        ),
    ] = DEFAULT_LISTEN,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where tasks are kept; made when absent. "
            "[default: /var/lib/stockade/scheduler, or the user's own]",
            show_default=False,
        ),
    ] = None,
    allow_networks: Annotated[
        str,
        typer.Option(
            metavar="NETWORK,...",
            help="Who may connect besides this host. Needed to listen on more than loopback.",
            show_default=False,
        ),
    ] = "",
) -> None:
    """Run the embedded scheduler: workers register with it, `stockade submit` sends it tasks."""
    # Imported late: the server's libraries are no concern of --help.
    from stockade.supervisor.scheduler.app import run

    directory = default_state_dir(os.environ) if state_dir is None else str(state_dir)
    networks = [text for text in allow_networks.split(",") if text.strip()]
    try:
        run(make_settings(listen, directory, networks))
    except SettingsError as error:
        raise ConfigError(str(error)) from error
