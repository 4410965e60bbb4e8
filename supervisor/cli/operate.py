"""``ps``, ``logs``, ``cancel``, ``drain``: look at and steer a running worker."""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from stockade.platform.errors import StockadeError
from stockade.supervisor.cli.control_client import ControlClient
from stockade.supervisor.cli.ended import CommandEnded

POLL_S: Final = 0.2

SocketOption = Annotated[
    Path | None,
    typer.Option("--socket", help="The worker's control.sock; default: in its runtime_dir."),
]


def ps(
    *,
    show_all: Annotated[
        bool, typer.Option("--all", help="Also ended tasks, as far as the history goes.")
    ] = False,
    undelivered: Annotated[
        bool, typer.Option("--undelivered", help="Only tasks whose report is still owed.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    socket: SocketOption = None,
) -> None:
    """List tasks: those queued and running, unless told otherwise."""
    client = ControlClient(socket)
    query = {"undelivered": "1"} if undelivered else {"all": "1"} if show_all else {}
    tasks = client.get("/v1/tasks", query)["tasks"]
    if as_json:
        print(json.dumps(tasks, indent=2))
        return
    for line in _table(tasks):
        print(line)
    status = client.get("/v1/status")
    if status["undelivered_reports"]:
        print(
            f"{status['undelivered_reports']} undelivered reports, "
            f"the oldest for {status['undelivered_age_s']:.0f} s",
            file=sys.stderr,
        )
    if status["draining"]:
        print("draining", file=sys.stderr)
    if status["pressure"]:
        print(f"nothing is started: {status['pressure']}", file=sys.stderr)
    if status["journal_fault"]:
        print(f"cannot journal: {status['journal_fault']}", file=sys.stderr)


def logs(
    instance_id: Annotated[str, typer.Argument(metavar="ID", help="The task's instance id.")],
    *,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Go on until the task has ended.")
    ] = False,
    socket: SocketOption = None,
) -> None:
    """Print what a task has printed."""
    client = ControlClient(socket)
    offset = 0
    try:
        while True:
            data, offset, total, ended, cut = client.output(instance_id, offset)
            if cut:
                _write(f"\n[... {cut} bytes cut ...]\n".encode())
            _write(data)
            if ended or (not follow and offset >= total):
                return
            if not data:
                time.sleep(POLL_S)
    except KeyboardInterrupt:
        raise CommandEnded(130) from None


def cancel(
    instance_id: Annotated[str, typer.Argument(metavar="ID", help="The task's instance id.")],
    socket: SocketOption = None,
) -> None:
    """Cancel a task, wherever it is in its life."""
    answer = ControlClient(socket).post("/v1/cancel", {"id": instance_id})
    if not answer["cancelled"]:
        raise StockadeError(f"cannot cancel {instance_id!r}: it is unknown or has ended")


def drain(
    *,
    wait: Annotated[bool, typer.Option("--wait", help="Return when no task is left.")] = False,
    socket: SocketOption = None,
) -> None:
    """Have the scheduler send nothing more; what runs, and what still arrives, ends normally."""
    client = ControlClient(socket)
    client.post("/v1/drain", {})
    while wait and client.get("/v1/status")["unfinished_tasks"]:
        time.sleep(POLL_S)


def _table(tasks: list[dict[str, Any]]) -> Iterator[str]:
    header: tuple[str, ...] = ("ID", "TYPE", "STATE", "ACCEPTED", "RUN", "OUTCOME")
    rows = [header, *(_row(task) for task in tasks)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


def _row(task: dict[str, Any]) -> tuple[str, ...]:
    outcome = task["outcome"]
    ended = ""
    if outcome is not None:
        ended = outcome["status"]
        if outcome["reason"]:
            ended = f"{ended}: {outcome['reason']}"
    if task["error"]:
        ended = f"{ended} (report refused: {task['error']})"
    return (
        _printable(task["id"]),
        _printable(task["type"]),
        task["state"],
        _clock(task["accepted_at"]),
        _run_time(task),
        _printable(ended),
    )


def _run_time(task: dict[str, Any]) -> str:
    outcome = task["outcome"]
    if outcome is not None:
        return "" if outcome["wall_s"] is None else f"{outcome['wall_s']:.1f}s"
    if task["started_at"] is None:
        return ""
    return f"{max(0.0, time.time() - task['started_at']):.0f}s"


def _clock(unix_s: float) -> str:
    moment = datetime.datetime.fromtimestamp(unix_s).astimezone()
    return f"{moment:%Y-%m-%d %H:%M:%S}"


def _printable(text: str) -> str:
    """Ids and reasons are others' texts: nothing in them may steer the terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _write(data: bytes) -> None:
    view = memoryview(data)
    sys.stdout.flush()
    while view:
        view = view[os.write(sys.stdout.fileno(), view) :]
