"""The status page: one HTML document without scripts, remote parts or state."""

from __future__ import annotations

import html
import time
from collections.abc import Mapping, Sequence
from typing import Final

from stockade.supervisor.scheduler.states import State
from stockade.supervisor.scheduler.tasks import TaskSummary
from stockade.supervisor.scheduler.workers import Worker

REFRESH_S: Final = 3

_STYLE: Final = """
:root { color-scheme: light dark; --text: #1c2128; --faint: #59636e; --ground: #fff;
  --raised: #f6f8fa; --line: #d1d9e0; --good: #1a7f37; --bad: #c4161c; --busy: #0969da;
  --odd: #8a5a00; }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --faint: #9198a1;
  --ground: #0d1117; --raised: #161b22; --line: #30363d; --good: #3fb950; --bad: #ff7b72;
  --busy: #58a6ff; --odd: #d29922; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 75rem; background: var(--ground);
  color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.3rem; margin: 0; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
p { color: var(--faint); margin: .25rem 0; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .4rem .75rem; border-top: 1px solid var(--line);
  vertical-align: top; white-space: nowrap; }
thead th { border-top: 0; background: var(--raised); color: var(--faint); font-weight: 500; }
td.wide { white-space: normal; overflow-wrap: anywhere; min-width: 14rem; }
code { font: .87em ui-monospace, monospace; }
small { color: var(--faint); display: block; }
a { color: var(--busy); }
.success, .online { color: var(--good); } .failed, .timeout, .offline { color: var(--bad); }
.running, .dispatched, .sending { color: var(--busy); } .cancelled, .queued { color: var(--odd); }
ul { list-style: none; display: flex; flex-wrap: wrap; gap: .5rem 1.5rem; padding: 0;
  margin: .75rem 0 0; }
"""


def render(
    *,
    url: str,
    workers: Sequence[Worker],
    counts: Mapping[State, int],
    tasks: Sequence[TaskSummary],
) -> str:
    """The page as it is now, at ``url``. Every text that is not ours is escaped."""
    now = time.time()
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="refresh" content="{REFRESH_S}">
<title>Stockade scheduler</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>Stockade scheduler</h1>
<p>{time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))}, refreshed every {REFRESH_S} s</p>
<ul>{"".join(_count(state, counts.get(state, 0)) for state in State)}</ul>
<h2>Workers</h2>
{_workers(workers, url, now)}
<h2>Newest tasks</h2>
{_tasks(tasks, now)}
</body>
</html>
"""


def _count(state: State, count: int) -> str:
    return f'<li><span class="{state}">{state}</span> {count}</li>'


def _workers(workers: Sequence[Worker], url: str, now: float) -> str:
    if not workers:
        return (
            "<p>None has registered yet. Start one on this host with "
            f"<code>STOCKADE_HTTP_SCHEDULER={_text(url)} stockade worker</code>; "
            "tasks wait until then.</p>"
        )
    rows = "".join(
        "<tr>"
        f"<td><code>{_text(worker.worker_id)}</code></td>"
        f'<td class="{worker.presence}">{worker.presence}</td>'
        f"<td>{worker.load} of {worker.maximum}</td>"
        f"<td>{_ago(worker.reported_ms / 1000, now)}</td>"
        f'<td class="wide">{_text(worker.registration.callback_url)}</td>'
        "</tr>"
        for worker in workers
    )
    return _table(("worker", "status", "load", "last heartbeat", "address"), rows)


def _tasks(tasks: Sequence[TaskSummary], now: float) -> str:
    if not tasks:
        return "<p>None yet. Send one with <code>stockade submit --wait 'echo hello'</code>.</p>"
    return _table(
        ("task", "status", "submitted", "took", "worker", "payload and message"),
        "".join(_task(task, now) for task in tasks),
    )


def _task(task: TaskSummary, now: float) -> str:
    code = f" <small>{_text(task.error_code)}</small>" if task.error_code else ""
    retry = f" <small>retry {task.retry_count}</small>" if task.retry_count else ""
    message = f"<small>{_text(task.error_message)}</small>" if task.error_message else ""
    took = "" if task.sent_at is None else _duration((task.ended_at or now) - task.sent_at)
    return (
        "<tr>"
        f'<td><a href="/v1/tasks/{task.task_id}">{task.task_id}</a>{retry}</td>'
        f'<td><span class="{_text(task.status)}">{_text(task.status)}</span>{code}</td>'
        f"<td>{_ago(task.created_at, now)}</td>"
        f"<td>{took}</td>"
        f"<td><code>{_text(task.worker_id)}</code></td>"
        f'<td class="wide"><code>{_text(task.title)}</code> {message}</td>'
        "</tr>"
    )


def _table(names: Sequence[str], rows: str) -> str:
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    return (
        '<div class="scroll"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _text(text: str) -> str:
    return html.escape(text.replace("\0", "\N{REPLACEMENT CHARACTER}"))


def _ago(moment: float, now: float) -> str:
    return f"{_duration(now - moment)} ago"


def _duration(seconds: float) -> str:
    seconds = max(0.0, seconds)
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"
