"""``top``: what runs and what it uses, as a table that renews itself."""

from __future__ import annotations

import dataclasses
import signal
import sys
import time
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from stockade.sandbox.verdict import format_bytes
from stockade.supervisor.cli.control_client import ControlClient
from stockade.supervisor.cli.operate import SocketOption
from stockade.supervisor.cli.task_table import printable, run_time

_LEFT = ("ID", "TYPE", "STATE")
_RIGHT = ("RUN", "CPU%", "CPU", "MEMORY", "PROCESSES", "OUTPUT")


@dataclasses.dataclass(frozen=True, slots=True)
class _Look:
    """One answer of the worker: its status, its tasks, and when (monotonic) it came."""

    at: float
    status: dict[str, Any]
    tasks: list[dict[str, Any]]

    @classmethod
    def take(cls, client: ControlClient) -> _Look:
        tasks = client.get("/v1/usage")["tasks"]
        return cls(time.monotonic(), client.get("/v1/status"), tasks)

    def cpu_s(self) -> dict[int, float]:
        return {task["seq"]: task["usage"]["cpu_s"] for task in self.tasks if task["usage"]}


def top(
    *,
    interval: Annotated[
        float, typer.Option("--interval", metavar="S", min=0.1, help="Seconds between looks.")
    ] = 1.0,
    socket: SocketOption = None,
) -> None:
    """Show what runs, the busiest first, until Ctrl-C. Not on a terminal: once."""
    client = ControlClient(socket)
    look = _Look.take(client)
    if not sys.stdout.isatty():
        # Twice, for CPU% is what was used between two looks.
        time.sleep(interval)
        Console(width=200, highlight=False).print(_screen(_Look.take(client), look))
        return
    # Waited for, and not as an exception: one that is raised in a destructor is lost.
    ctrl_c = {signal.SIGINT}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ctrl_c)
    try:
        with Live(_screen(look, look), screen=True, auto_refresh=False) as live:
            while signal.sigtimedwait(ctrl_c, interval) is None:
                before, look = look, _Look.take(client)
                live.update(_screen(look, before), refresh=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _screen(now: _Look, before: _Look) -> Table:
    table = Table(title=_title(now.status), title_justify="left", box=None, pad_edge=False)
    for name in _LEFT:
        table.add_column(name, no_wrap=True)
    for name in _RIGHT:
        table.add_column(name, justify="right", no_wrap=True)
    earlier = before.cpu_s()
    passed_s = now.at - before.at

    def share(task: dict[str, Any]) -> float:
        """CPU used since the look before, in percent of one CPU."""
        if task["usage"] is None or task["seq"] not in earlier or passed_s <= 0:
            return 0.0
        used_s: float = task["usage"]["cpu_s"] - earlier[task["seq"]]
        return max(0.0, used_s) / passed_s * 100

    for task in sorted(now.tasks, key=lambda task: (-share(task), task["seq"])):
        table.add_row(*_cells(task, share(task)))
    return table


def _cells(task: dict[str, Any], cpu_percent: float) -> list[Text]:
    usage = task["usage"]
    used = ("", "", "", "")
    if usage is not None:
        used = (
            f"{cpu_percent:.0f}", f"{usage['cpu_s']:.1f}s",
            format_bytes(usage["memory_bytes"]), str(usage["processes"]),
        )  # fmt: skip
    texts = (
        printable(task["id"]), printable(task["type"]), task["state"],
        run_time(task), *used, format_bytes(task["output_bytes"]),
    )  # fmt: skip
    # Text, not str: an id in square brackets is no markup of rich's.
    return [Text(text) for text in texts]


def _title(status: dict[str, Any]) -> Text:
    words = [
        f"{status['worker_id']}: {status['running_tasks']} of {status['max_concurrency']} run, "
        f"{status['unfinished_tasks'] - status['running_tasks']} wait"
    ]
    if status["undelivered_reports"]:
        words.append(f"{status['undelivered_reports']} undelivered reports")
    if status["draining"]:
        words.append("draining")
    if status["journal_fault"]:
        words.append(f"cannot journal: {status['journal_fault']}")
    return Text("; ".join(words))
