"""``stockade worker``: the daemon."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from stockade.supervisor.cli.ended import CommandEnded
from stockade.supervisor.config import Loaded
from stockade.supervisor.config_defaults import default_file
from stockade.supervisor.config_load import load


def worker(
    *,
    config: Annotated[
        Path | None, typer.Option("--config", help="Configuration file (TOML).")
    ] = None,
    worker_id: Annotated[
        str | None, typer.Option("--id", help="Stable name of this worker.")
    ] = None,
    state_dir: Annotated[
        str | None, typer.Option(help="Where journal, output and work directories are.")
    ] = None,
    runtime_dir: Annotated[str | None, typer.Option(help="Where the sockets are.")] = None,
    listen: Annotated[
        str | None, typer.Option(help="host:port that takes dispatches over HTTP.")
    ] = None,
    scheduler: Annotated[str | None, typer.Option(help="Base URL of the scheduler.")] = None,
    max_concurrency: Annotated[int | None, typer.Option(help="Most tasks at once.")] = None,
    on_unsupported: Annotated[
        str | None,
        typer.Option(help="What to do when this host cannot enforce all: refuse or degrade."),
    ] = None,
) -> None:
    """Run the worker until it is stopped (SIGTERM drains, a second one hurries, SIGHUP reloads)."""
    loaded = load_config(
        config,
        {
            "worker.id": worker_id,
            "worker.state_dir": state_dir,
            "worker.runtime_dir": runtime_dir,
            "worker.max_concurrency": max_concurrency,
            "worker.on_unsupported": on_unsupported,
            "http.listen": listen,
            "http.scheduler": scheduler,
        },
    )
    # Late: the daemon's imports are no other command's business.
    from stockade.supervisor.worker import run_worker

    raise CommandEnded(run_worker(loaded, reloadable=True))


def load_config(path: Path | None, overrides: dict[str, Any]) -> Loaded:
    """The configuration in force: the named file, else the default one where it exists.

    Raises:
        ConfigError: it cannot be used.
    """
    return load(path or default_file(os.environ), os.environ, overrides)
