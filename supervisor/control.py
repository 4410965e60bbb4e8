"""The operator's API, HTTP over control.sock: what `ps`, `top`, `cancel` and their like speak.

    GET  /v1/status                          who and how the worker is
    GET  /v1/tasks[?all=1|undelivered=1]     tasks, oldest first
    GET  /v1/output?id=ID[&offset=N]         a piece of a task's output; X-Offset, X-Next-Offset,
                                             X-Total-Bytes and X-Ended say where it stands
    GET  /v1/explain?id=ID                   each task of that id, its story, and what it waits for
    GET  /v1/usage                           what the tasks that run use at this moment
    GET  /v1/deadletters                     tasks whose report the scheduler refused, oldest first
    POST /v1/deadletters/resend {"id": ID} or {"all": true}
    POST /v1/deadletters/drop   {"id": ID} or {"all": true}
    POST /v1/cancel {"id": ID}
    POST /v1/drain
    POST /v1/reload                          answers {"error": why not, or ""}; /v1/status then
                                             shows another "life", or a "reload_error"

An id travels as a parameter and never as a part of a path: it is opaque text.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Final

from aiohttp import web
from aiohttp.typedefs import Handler

from stockade.platform.errors import StockadeError
from stockade.supervisor.errors import InvalidTransitionError, JournalError, RejectedError
from stockade.supervisor.executor import Executor
from stockade.supervisor.explain import story, what_becomes_of_its_report, what_it_waits_for
from stockade.supervisor.intake import Intake
from stockade.supervisor.journal import Journal, Row
from stockade.supervisor.links.http_server import STATUS_OF
from stockade.supervisor.live_task import Phase
from stockade.supervisor.output import OutputStore
from stockade.supervisor.reporter import Reporter
from stockade.supervisor.states import UNFINISHED, State
from stockade.supervisor.usage import sample

RECENT_MAX: Final = 1000
PIECE_BYTES: Final = 256 * 1024
CHUNK: Final = 256

StatusSource = Callable[[], dict[str, Any]]


class Control:
    """Serves operators.

    Args:
        status: the worker's own part of /v1/status.
        drain: begins a drain.
        reload: begins a reload, or raises StockadeError with the reason why not.
        reporter: delivers what is owed.
    """

    def __init__(
        self,
        *,
        journal: Journal,
        executor: Executor,
        intake: Intake,
        output: OutputStore,
        reporter: Reporter,
        status: StatusSource,
        drain: Callable[[], None],
        reload: Callable[[], Awaitable[None]],
    ) -> None:
        self._journal = journal
        self._executor = executor
        self._intake = intake
        self._output = output
        self._reporter = reporter
        self._status = status
        self._drain = drain
        self._reload = reload
        self._runner: web.AppRunner | None = None
        self._listener: socket.socket | None = None

    async def start(self, listener: socket.socket) -> None:
        """Serve on a listening socket, which ``close`` closes."""
        app = web.Application(middlewares=[_errors_as_json])
        routes: tuple[tuple[str, str, Callable[[web.Request], Awaitable[web.Response]]], ...] = (
            ("GET", "/v1/status", self._show_status),
            ("GET", "/v1/tasks", self._list_tasks),
            ("GET", "/v1/output", self._show_output),
            ("GET", "/v1/explain", self._explain),
            ("GET", "/v1/usage", self._show_usage),
            ("GET", "/v1/deadletters", self._list_dead_letters),
            ("POST", "/v1/deadletters/resend", self._resend),
            ("POST", "/v1/deadletters/drop", self._drop),
            ("POST", "/v1/cancel", self._cancel),
            ("POST", "/v1/drain", self._start_drain),
            ("POST", "/v1/reload", self._start_reload),
        )
        for method, path, handler in routes:
            app.router.add_route(method, path, handler)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.SockSite(self._runner, listener).start()
        self._listener = listener

    async def hand_over(self) -> int:
        """Stop serving; gives a descriptor of the socket, which goes on listening."""
        assert self._listener is not None
        listener = os.dup(self._listener.fileno())
        await self.close()
        return listener

    async def close(self) -> None:
        """Stop serving."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _show_status(self, _request: web.Request) -> web.Response:
        load = self._executor.load()
        return web.json_response(
            {
                **self._status(),
                "current_load": load.current_load,
                "running_tasks": load.running_tasks,
                "unfinished_tasks": len(self._executor.tasks),
                "draining": self._executor.draining,
                "journal_fault": self._journal.fault,
            }
        )

    async def _list_tasks(self, request: web.Request) -> web.Response:
        if request.query.get("undelivered"):
            rows = await self._journal.undelivered(RECENT_MAX)
        elif request.query.get("all"):
            rows = list(reversed(await self._journal.recent(RECENT_MAX)))
        else:
            rows = [task.row for task in self._executor.tasks.values()]
        tasks = [self._describe(row) for row in sorted(rows, key=lambda row: row.seq)]
        return web.json_response({"tasks": tasks})

    async def _show_output(self, request: web.Request) -> web.Response:
        row = await self._newest_row(request.query.get("id", ""))
        ended = row.state not in UNFINISHED
        try:
            offset = int(request.query.get("offset", "0"))
        except ValueError:
            offset = -1
        if offset < 0:
            raise web.HTTPBadRequest(reason="offset is no number of bytes")
        piece = self._output.read_from(row.seq, offset, PIECE_BYTES)
        following = piece.offset + len(piece.data)
        return web.Response(
            body=piece.data,
            content_type="application/octet-stream",
            headers={
                "X-Offset": str(piece.offset),
                "X-Next-Offset": str(following),
                "X-Total-Bytes": str(piece.total),
                "X-Ended": "1" if ended and following >= piece.total else "0",
            },
        )

    async def _explain(self, request: web.Request) -> web.Response:
        rows = await self._rows(request.query.get("id", ""))
        tasks = [
            {
                **self._describe(row),
                "scheduler": row.dispatch.scheduler,
                "story": [dataclasses.asdict(chapter) for chapter in story(row)],
                "now": self._now(row),
            }
            for row in rows
        ]
        return web.json_response({"tasks": tasks})

    def _now(self, row: Row) -> str:
        live = self._executor.tasks.get(row.seq)
        if live is not None:
            return what_it_waits_for(live, self._executor)
        return what_becomes_of_its_report(row, self._reporter.trouble(row))

    async def _show_usage(self, _request: web.Request) -> web.Response:
        live = [task for task in self._executor.tasks.values() if task.pid]
        # In a thread: with a thousand tasks it is some ten milliseconds of reading /proc.
        found = await asyncio.to_thread(sample, {task.seq: task.pid for task in live})
        tasks = [
            {
                **self._describe(task.row),
                "output_bytes": 0 if task.capture is None else task.capture.total,
                "usage": dataclasses.asdict(found[task.seq]) if task.seq in found else None,
            }
            for task in self._executor.tasks.values()
        ]
        return web.json_response({"tasks": tasks})

    async def _list_dead_letters(self, _request: web.Request) -> web.Response:
        seqs = await self._journal.dead_letter_seqs()
        tasks = [self._describe(row) for row in await self._journal.dead_letters(RECENT_MAX)]
        return web.json_response({"tasks": tasks, "total": len(seqs)})

    async def _resend(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"resent": await self._for_dead_letters(request, self._reporter.resend)}
        )

    async def _drop(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"dropped": await self._for_dead_letters(request, self._journal.drop)}
        )

    async def _for_dead_letters(
        self, request: web.Request, act: Callable[[int], Awaitable[None]]
    ) -> int:
        """Do it to the dead letters that the request names; how many there were."""
        body = await _object(request)
        if body.get("all") is True:
            seqs = await self._journal.dead_letter_seqs()
        else:
            rows = await self._rows(str(body.get("id", "")))
            seqs = [row.seq for row in rows if row.state is State.DEAD]
            if not seqs:
                raise web.HTTPConflict(
                    reason=f"its report is no dead letter: the task is {rows[-1].state}"
                )
        done = 0
        for start in range(0, len(seqs), CHUNK):
            # Together, so that they are one commit.
            answers = await asyncio.gather(
                *(act(seq) for seq in seqs[start : start + CHUNK]), return_exceptions=True
            )
            for answer in answers:
                # Somebody else was quicker with this one.
                if isinstance(answer, InvalidTransitionError):
                    continue
                if isinstance(answer, BaseException):
                    raise answer
                done += 1
        return done

    async def _cancel(self, request: web.Request) -> web.Response:
        body = await _object(request)
        stopped = await self._intake.cancel(str(body.get("id", "")))
        return web.json_response({"cancelled": stopped})

    async def _start_drain(self, _request: web.Request) -> web.Response:
        self._drain()
        return web.json_response({"draining": True})

    async def _start_reload(self, _request: web.Request) -> web.Response:
        try:
            await self._reload()
        except StockadeError as error:
            return web.json_response({"error": str(error)})
        return web.json_response({"error": ""})

    async def _newest_row(self, instance_id: str) -> Row:
        return (await self._rows(instance_id))[-1]

    async def _rows(self, instance_id: str) -> list[Row]:
        rows = await self._journal.find(instance_id)
        if not rows:
            raise web.HTTPNotFound(reason="no task has this id")
        return rows

    def _describe(self, row: Row) -> dict[str, Any]:
        live = self._executor.tasks.get(row.seq)
        state = row.state.value
        if live is not None:
            state = "accepted" if live.phase is Phase.QUEUED else "running"
        outcome = None if row.outcome is None else dataclasses.asdict(row.outcome)
        return {
            "id": row.dispatch.instance_id,
            "seq": row.seq,
            "type": row.dispatch.task_type,
            "state": state,
            "cancelled": row.cancelled or bool(live and live.cancel_reason),
            "accepted_at": row.accepted_at,
            "started_at": row.started_at,
            "finished_at": row.finished_at,
            "attempts": row.attempts,
            "error": row.error,
            "outcome": outcome,
        }


async def _object(request: web.Request) -> dict[str, Any]:
    """The request's body."""
    body = await request.json()
    if not isinstance(body, dict):
        raise web.HTTPBadRequest(reason="the request's body is no JSON object")
    return body


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RejectedError as error:
        return web.json_response({"error": str(error)}, status=STATUS_OF[error.rejection])
    except JournalError as error:
        return web.json_response({"error": str(error)}, status=503)
    except StockadeError as error:
        return web.json_response({"error": str(error)}, status=500)
    except json.JSONDecodeError:
        return web.json_response({"error": "the request's body is not JSON"}, status=400)
    except web.HTTPException as error:
        return web.json_response({"error": error.reason}, status=error.status)
