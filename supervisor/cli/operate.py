"""``ps``, ``explain``, ``logs``, ``cancel``, ``drain``, ``reload``: to steer a running worker."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from stockade.platform.errors import StockadeError
from stockade.supervisor.cli.control_client import ControlClient
from stockade.supervisor.cli.ended import CommandEnded
from stockade.supervisor.cli.streams import write_some
from stockade.supervisor.cli.task_table import aligned, clock, printable, task_table
from stockade.supervisor.quantities import parse_seconds

POLL_S: Final = 0.2
# sysexits.h EX_TEMPFAIL: asking again later may do.
EXIT_TASKS_LEFT: Final = 75
# The installed code is tried first, and then has to start.
RELOAD_S: Final = 90.0

SocketOption = Annotated[
    Path | None,
    typer.Option(
        "--socket",
        help="The worker's control.sock [default: in STOCKADE_WORKER_RUNTIME_DIR, or in the"
        " default runtime_dir].",
        show_default=False,
    ),
]


def ps(
    *,
    show_all: Annotated[
        bool, typer.Option("--all", help="Also ended tasks: the newest 1,000 of all.")
    ] = False,
    undelivered: Annotated[
        bool,
        typer.Option("--undelivered", help="Only tasks whose report is owed: the oldest 1,000."),
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
    for line in task_table(tasks):
        print(line)
    status = client.get("/v1/status")
    if status["undelivered_reports"]:
        print(
            f"{status['undelivered_reports']} undelivered reports, "
            f"the oldest for {status['undelivered_age_s']:.0f} s",
            file=sys.stderr,
        )
    if status["slots_set_aside"]:
        print(set_aside(status), file=sys.stderr)
    for elder in status["elders"]:
        print(
            f"spawner {elder['generation']} (pid {elder['pid']}) was renewed and still finishes "
            f"{elder['tasks']} tasks",
            file=sys.stderr,
        )
    if status["draining"]:
        print("draining", file=sys.stderr)
    if status["pressure"]:
        print(f"nothing is started: {status['pressure']}", file=sys.stderr)
    if status["journal_fault"]:
        print(f"cannot journal: {status['journal_fault']}", file=sys.stderr)


def explain(
    instance_id: Annotated[str, typer.Argument(metavar="ID", help="The task's instance id.")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    socket: SocketOption = None,
) -> None:
    """Tell what happened to a task, and what it waits for now."""
    tasks = ControlClient(socket).get("/v1/explain", {"id": instance_id})["tasks"]
    if as_json:
        print(json.dumps(tasks, indent=2))
        return
    for task in tasks:
        print(f"{printable(task['id'])}  {printable(task['type'])}  seq {task['seq']}")
        chapters = [
            ("", "" if chapter["at"] is None else clock(chapter["at"]), printable(chapter["text"]))
            for chapter in task["story"]
        ]
        for line in aligned([*chapters, ("", "now", printable(task["now"]))]):
            print(line)


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
    # What it prints meanwhile is for --follow: a task that prints fast is never caught up with.
    asked_for: int | None = None
    try:
        while True:
            data, offset, total, ended, cut = client.output(instance_id, offset)
            asked_for = total if asked_for is None else asked_for
            if cut:
                _write(f"\n[... {cut} bytes cut ...]\n".encode())
            _write(data)
            if ended or (not follow and offset >= asked_for):
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
    timeout: Annotated[
        str | None,
        typer.Option("--timeout", help="With --wait: wait no longer than this, such as 10min."),
    ] = None,
    socket: SocketOption = None,
) -> None:
    """Have the scheduler send nothing more; what runs, and what still arrives, ends normally.

    The exit status is 0 when that is so, with --wait when no task is left; 75 when --timeout has
    passed before; 1 when no worker answers, or none any more.
    """
    try:
        timeout_s = None if timeout is None else parse_seconds(timeout)
    except ValueError as error:
        raise typer.BadParameter(f"--timeout: {error}") from error
    client = ControlClient(socket)
    client.post("/v1/drain", {})
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while wait and (left := client.get("/v1/status")["unfinished_tasks"]):
        if deadline is not None and time.monotonic() >= deadline:
            print(f"stockade: {left} tasks have not ended within {timeout}", file=sys.stderr)
            raise CommandEnded(EXIT_TASKS_LEFT)
        time.sleep(POLL_S)


def reload(socket: SocketOption = None) -> None:
    """Have the worker go on with the installed code and the current configuration.

    No task notices and no dispatch is refused. Tasks of type http end first.
    """
    client = ControlClient(socket, RELOAD_S)
    life = client.get("/v1/status")["life"]
    error = client.post("/v1/reload", {})["error"]
    while not error and client.get("/v1/status")["life"] == life:
        time.sleep(POLL_S)
        error = client.get("/v1/status")["reload_error"]
    if error:
        raise StockadeError(error)


def set_aside(status: dict[str, Any]) -> str:
    """One line for the slots of a worker that nothing can be done with."""
    names = ", ".join(status["set_aside"][:8])
    return (
        f"{status['slots_set_aside']} slots are set aside, something in them could not be killed "
        f"or removed: {names}"
    )


def _write(data: bytes) -> None:
    view = memoryview(data)
    sys.stdout.flush()
    while view:
        view = view[write_some(sys.stdout.fileno(), view) :]
