"""``stockade dev``: scheduler and worker on this host, nothing to configure."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import typer

from stockade.platform.errors import StockadeError
from stockade.platform.pidfd import has_ended, open_pidfd, send_signal
from stockade.supervisor.cli.ended import CommandEnded
from stockade.supervisor.config_defaults import host_defaults
from stockade.supervisor.config_load import load

SCHEDULER_LISTEN: Final = "127.0.0.1:8080"
WORKER_LISTEN: Final = "127.0.0.1:8081"
# Whoever presses Ctrl-C here wants to be done soon.
DRAIN_S: Final = 5.0
SCHEDULER_EXIT_S: Final = 10.0


def dev(
    scheduler_listen: Annotated[
        str, typer.Option(help="host:port of the scheduler; port 0 takes a free one.")
    ] = SCHEDULER_LISTEN,
    listen: Annotated[
        str, typer.Option(help="host:port of the worker; port 0 takes a free one.")
    ] = WORKER_LISTEN,
    state_dir: Annotated[
        Path | None,
        typer.Option(help="Where all is kept [default: dev/ in the worker's].", show_default=False),
    ] = None,
    runtime_dir: Annotated[
        Path | None,
        typer.Option(help="Where the sockets are [default: the worker's].", show_default=False),
    ] = None,
) -> None:
    """Run a scheduler and a worker on this host until Ctrl-C."""
    from stockade.supervisor.worker import run_worker

    directory = state_dir or host_defaults(os.environ)["worker.state_dir"]() / "dev"
    with _scheduler(scheduler_listen, directory / "scheduler") as url:
        loaded = load(
            None,
            os.environ,
            {
                "worker.state_dir": str(directory.absolute()),
                "worker.runtime_dir": None if runtime_dir is None else str(runtime_dir.absolute()),
                "worker.on_unsupported": "degrade",
                "worker.drain_timeout": DRAIN_S,
                "http.listen": listen,
                "http.scheduler": url,
            },
        )
        print(f"scheduler: {url}  (status page)", flush=True)
        print(f"worker:    http://{loaded.config.http.listen}", flush=True)
        print(f"try:       stockade submit --scheduler {url} --wait 'echo hello'", flush=True)
        status = run_worker(loaded)
    raise CommandEnded(status)


@contextlib.contextmanager
def _scheduler(listen: str, state_dir: Path) -> Iterator[str]:
    """The URL of a scheduler that runs as a child of ours."""
    process = subprocess.Popen(
        [
            sys.executable, "-m", "stockade.supervisor.cli.main", "scheduler",
            "--listen", listen, "--state-dir", str(state_dir),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        # Its end is ours to give, after the worker's: Ctrl-C goes to the whole group.
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    # The worker reaps whatever ends, this child too, so it is watched by descriptor.
    pidfd = open_pidfd(process.pid)
    try:
        _, _, url = process.stdout.readline().decode().strip().partition(": ")
        if not url:
            process.wait()
            raise StockadeError("cannot start the scheduler: see its message above")
        yield url
    finally:
        send_signal(pidfd, signal.SIGTERM)
        if not has_ended(pidfd, SCHEDULER_EXIT_S):
            send_signal(pidfd, signal.SIGKILL)
            has_ended(pidfd, None)
        os.close(pidfd)
        process.stdout.close()
        process.wait()
