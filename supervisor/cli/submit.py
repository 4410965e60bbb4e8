"""``stockade submit``: send a task to the embedded scheduler, and with --wait end as it ended."""

from __future__ import annotations

import asyncio
import enum
import json
import sys
from typing import Annotated, Any, Final

import typer

from stockade.platform.errors import StockadeError
from stockade.supervisor.cli.ended import CommandEnded
from stockade.supervisor.cli.submission import (
    SubmitError,
    exit_status,
    make_submission,
    split_message,
)

DEFAULT_SCHEDULER: Final = "http://127.0.0.1:8080"

_EXIT_FAILURE: Final = 1
# With --wait every status up to 124 is the task's own, so a failure of ours has to be this one.
_EXIT_OURS: Final = 125


class _Show(enum.Enum):
    TEXT = enum.auto()
    JSON = enum.auto()


def submit(
    payload: Annotated[
        str,
        typer.Argument(
            metavar="PAYLOAD", help="The task's payload; - reads it from standard input."
        ),
    ],
    *,
    task_type: Annotated[
        str, typer.Option("--type", metavar="T", help="The task's type.")
    ] = "shell",
    timeout: Annotated[
        str | None,
        typer.Option(
            metavar="S",
            help="Seconds, or 5min; 0 is the worker's default.",
            show_default=False,
        ),
    ] = None,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait", help="Wait for the end; print the output's excerpt and end with its status."
        ),
    ] = False,
    scheduler: Annotated[
        str,
        typer.Option(
            metavar="URL", envvar="STOCKADE_HTTP_SCHEDULER", help="The scheduler to send it to."
        ),
    ] = DEFAULT_SCHEDULER,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the task as one JSON object instead of text.")
    ] = False,
    image: Annotated[
        str, typer.Option(help="The image of a container task.", show_default=False)
    ] = "",
    retries: Annotated[int, typer.Option(help="How often to try again after a failure.")] = 0,
    profile: Annotated[
        str | None, typer.Option(help="How strongly to confine it.", show_default=False)
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Tighten a limit, as memory_max=64M; may be repeated.",
            show_default=False,
        ),
    ] = None,
    idempotency_key: Annotated[
        str, typer.Option(help="What IDEMPOTENCY_KEY shall be.", show_default=False)
    ] = "",
) -> None:
    """Send a task to the scheduler.

    With --wait the exit status is the task's own, 124 on timeout, 137 when killed for memory, 128+N
    on signal N, 125 when it could not be run or waited for, 130 on Ctrl-C, which cancels it.
    """
    from stockade.supervisor.cli.scheduler_client import submit_and_wait, submit_only

    show = _Show.JSON if as_json else _Show.TEXT
    try:
        body = make_submission(
            payload=_read_payload(payload),
            task_type=task_type,
            timeout=timeout,
            image=image,
            retries=retries,
            profile=profile,
            limits=limit or [],
            idempotency_key=idempotency_key,
        )
        if wait:
            task, interrupted_by = asyncio.run(submit_and_wait(scheduler, body))
        else:
            task, interrupted_by = asyncio.run(submit_only(scheduler, body)), None
    except StockadeError as error:
        print(f"stockade submit: {error}", file=sys.stderr)
        raise CommandEnded(_EXIT_OURS if wait else _EXIT_FAILURE) from error
    if not wait:
        print(json.dumps(task) if show is _Show.JSON else task["id"])
        return
    _print_end(task, show)
    status = exit_status(task) if interrupted_by is None else 128 + interrupted_by
    if status:
        raise CommandEnded(status)


def _print_end(task: dict[str, Any], show: _Show) -> None:
    if show is _Show.JSON:
        print(json.dumps(task), flush=True)
        return
    reason, excerpt = split_message(task)
    # Exactly what the task printed: no newline of ours after it.
    sys.stdout.buffer.write(excerpt.encode())
    sys.stdout.flush()
    if reason:
        print(f"stockade submit: {task['status']}: {reason}", file=sys.stderr)


def _read_payload(argument: str) -> str:
    if argument != "-":
        return argument
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise SubmitError(f"cannot submit standard input: {error}") from error
