"""``deadletters list, resend, drop``: the reports that a scheduler refused for good."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from stockade.platform.errors import StockadeError
from stockade.supervisor.cli.control_client import ControlClient
from stockade.supervisor.cli.operate import SocketOption
from stockade.supervisor.cli.task_table import task_table

app = typer.Typer(
    help="Reports that a scheduler refused for good: kept until they are resent or dropped.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

IdsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="ID...", help="The tasks' instance ids.")
]
AllOption = Annotated[bool, typer.Option("--all", help="Every dead letter.")]


@app.command("list")
def list_dead_letters(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    socket: SocketOption = None,
) -> None:
    """List them, oldest first, each with the reason of its refusal."""
    found = ControlClient(socket).get("/v1/deadletters")
    if as_json:
        print(json.dumps(found["tasks"], indent=2))
        return
    for line in task_table(found["tasks"]):
        print(line)
    if (left := found["total"] - len(found["tasks"])) > 0:
        print(f"and {left} more", file=sys.stderr)


@app.command()
def resend(
    ids: IdsArgument = None, *, every: AllOption = False, socket: SocketOption = None
) -> None:
    """Have reports sent again, as if their task had just ended."""
    _for_each("resend", "resent", ids, every=every, client=ControlClient(socket))


@app.command()
def drop(ids: IdsArgument = None, *, every: AllOption = False, socket: SocketOption = None) -> None:
    """Give reports up: they are never sent, and age into the history."""
    _for_each("drop", "dropped", ids, every=every, client=ControlClient(socket))


def _for_each(
    verb: str, done: str, ids: list[str] | None, *, every: bool, client: ControlClient
) -> None:
    if every == bool(ids):
        raise StockadeError(f"cannot {verb}: name the tasks' ids, or give --all")
    wishes: list[dict[str, Any]] = (
        [{"all": True}] if every else [{"id": each} for each in ids or ()]
    )
    count = 0
    for wish in wishes:
        try:
            count += client.post(f"/v1/deadletters/{verb}", wish)[done]
        except StockadeError as error:
            if count:
                print(f"{done} {count}", file=sys.stderr)
            raise StockadeError(f"cannot {verb} {wish.get('id', 'all')!r}: {error}") from error
    print(f"{done} {count}")
