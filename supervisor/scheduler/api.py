"""The scheduler's own API, for people and for `stockade submit`."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from typing import Final

from aiohttp import web

from stockade.supervisor.scheduler.bodies import json_response
from stockade.supervisor.scheduler.changes import Changes
from stockade.supervisor.scheduler.dispatcher import Dispatcher
from stockade.supervisor.scheduler.errors import RequestError
from stockade.supervisor.scheduler.page import render
from stockade.supervisor.scheduler.states import State
from stockade.supervisor.scheduler.store import Store
from stockade.supervisor.scheduler.tasks import Task, parse_submission
from stockade.supervisor.scheduler.workers import Workers
from stockade.supervisor.wire.messages import HEALTH_PATH

WAIT_MAX_S: Final = 300.0
LIST_MAX: Final = 1000
LIST_DEFAULT: Final = 100
PAGE_TASKS: Final = 50

# The page needs nothing but its own style; whatever a task printed must not become a script.
_PAGE_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
}


class TaskApi:
    """Tasks, workers, the status page and the health check."""

    def __init__(
        self, store: Store, workers: Workers, dispatcher: Dispatcher, changes: Changes
    ) -> None:
        self._store = store
        self._workers = workers
        self._dispatcher = dispatcher
        self._changes = changes

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/", self._page),
            web.get(HEALTH_PATH, self._health),
            web.post("/v1/tasks", self._submit),
            web.get("/v1/tasks", self._list),
            web.get("/v1/tasks/{key}", self._show),
            web.post("/v1/tasks/{key}/cancel", self._cancel),
            web.post("/v1/tasks/{key}/dispatch", self._dispatch),
            web.get("/v1/workers", self._list_workers),
        ]

    async def _submit(self, request: web.Request) -> web.Response:
        submission = parse_submission(await request.read())
        task, is_new = await self._store.submit(submission)
        if is_new:
            self._dispatcher.wake()
            return json_response(task.view(), status=201)
        return await self._send_again(task)

    async def _list(self, request: web.Request) -> web.Response:
        limit = int(_number(request, "limit", LIST_DEFAULT, LIST_MAX))
        status = request.query.get("status")
        try:
            state = None if status is None else State(status)
        except ValueError:
            raise RequestError(
                f"cannot list tasks: status {status!r} is none of {', '.join(State)}"
            ) from None
        summaries = await self._store.recent(limit, state)
        return json_response({"tasks": [summary.view() for summary in summaries]})

    async def _show(self, request: web.Request) -> web.Response:
        wait_s = _number(request, "wait", 0.0, WAIT_MAX_S)
        task = await self._until_ended(request.match_info["key"], wait_s)
        return json_response(task.view())

    async def _cancel(self, request: web.Request) -> web.Response:
        task = await self._dispatcher.cancel(request.match_info["key"])
        return json_response(task.view())

    async def _dispatch(self, request: web.Request) -> web.Response:
        task, instance = await self._store.find(request.match_info["key"])
        # The instance that was named, not the newest one: an old one may be sent again too.
        named = dataclasses.replace(task, instances=(instance,))
        return await self._send_again(named)

    async def _send_again(self, task: Task) -> web.Response:
        instance = task.current
        worker, answer = await self._dispatcher.send_again(task, instance)
        content = {
            "task_id": task.task_id,
            "instance_id": instance.instance_id,
            "worker_id": worker.worker_id,
            "accepted": answer.accepted,
            "answer_status": answer.status,
            "answer": answer.text,
        }
        if not answer.accepted:
            content["error"] = f"cannot send {instance.instance_id!r} again: {answer}"
        return json_response(content, status=200 if answer.accepted else 502)

    async def _list_workers(self, _request: web.Request) -> web.Response:
        return json_response({"workers": [worker.view() for worker in self._workers]})

    async def _page(self, request: web.Request) -> web.Response:
        text = render(
            url=f"http://{request.host}",
            workers=list(self._workers),
            counts=await self._store.counts(),
            tasks=await self._store.recent(PAGE_TASKS),
        )
        return web.Response(text=text, content_type="text/html", headers=_PAGE_HEADERS)

    async def _health(self, _request: web.Request) -> web.Response:
        return json_response({"status": "ok"})

    async def _until_ended(self, key: str, wait_s: float) -> Task:
        """The task once it has ended, or as it is after ``wait_s`` seconds."""
        try:
            async with asyncio.timeout(wait_s):
                return await self._ended(key)
        except TimeoutError:
            task, _ = await self._store.find(key)
            return task

    async def _ended(self, key: str) -> Task:
        while True:
            task, _ = await self._store.find(key)
            if task.ended or self._changes.closed:
                return task
            with self._changes.watch(task.task_id) as changed:
                task, _ = await self._store.find(key)
                if not task.ended:
                    await changed.wait()


def _number(request: web.Request, name: str, default: float, maximum: float) -> float:
    """A number from the query, cut to ``maximum``."""
    text = request.query.get(name)
    if text is None:
        return default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number >= 0:
        raise RequestError(f"cannot use {name}={text}: give a number of 0 or more")
    return min(number, maximum)
