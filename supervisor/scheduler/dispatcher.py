"""Sends instances to workers, and tells workers to cancel.

One loop gives queued instances to workers with room; each dispatch is then a task of its own, so a
worker that does not answer holds up nobody else.
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
import os
from collections.abc import Coroutine
from typing import Any, Final

import aiohttp
import msgspec
import structlog

from stockade.supervisor.scheduler.changes import Changes
from stockade.supervisor.scheduler.errors import ConflictError, NotFoundError, StoreError
from stockade.supervisor.scheduler.states import Event, State
from stockade.supervisor.scheduler.store import Applied, Claim, Details, Store
from stockade.supervisor.scheduler.tasks import Instance, Task, execute_body
from stockade.supervisor.scheduler.workers import Worker, Workers
from stockade.supervisor.wire.messages import CANCEL_PATH, EXECUTE_PATH, CancelRequest

DISPATCH_FAILED: Final = "dispatch_failed"

_ANSWER_MAX_BYTES: Final = 2000
_STORE_RETRY_S: Final = 1.0

_log = structlog.get_logger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What a worker said. ``status`` is None when it said nothing in time, and ``text`` is why."""

    status: int | None
    text: str

    @property
    def accepted(self) -> bool:
        return self.status is not None and self.status < 300

    def __str__(self) -> str:
        return self.text if self.status is None else f"it answered {self.status}: {self.text}"


class Dispatcher:
    """The scheduler's way to its workers. `start` it inside the loop, `close` it at the end."""

    def __init__(
        self, store: Store, workers: Workers, changes: Changes, *, answer_timeout_s: float
    ) -> None:
        self._store = store
        self._workers = workers
        self._changes = changes
        self._answer_timeout_s = answer_timeout_s
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        # A fresh connection each time: a kept one that the worker has just closed would make the
        # first dispatch fail, which is final. No limit: time in a queue of ours would count as the
        # worker's.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=answer_timeout_s),
        )

    def start(self) -> None:
        """Begins to dispatch what is queued."""
        self._spawn(self._run())
        self.wake()

    def wake(self) -> None:
        """Something is queued, or a worker has room: look again."""
        self._wake.set()

    async def close(self) -> None:
        """Stops. A dispatch without its answer is sent again to its worker after the next start."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()

    async def take(self, instance_id: str, event: Event, details: Details | None = None) -> Applied:
        """Applies an event and lets everybody know who waits for it.

        Raises:
            NotFoundError: no instance has this id.
        """
        applied = await self._store.apply(instance_id, event, details)
        if applied.ended:
            self._workers.ended(applied.instance.worker_id)
        if applied.changed:
            self._changes.notify(applied.instance.task_id)
            self.wake()
        return applied

    async def cancel(self, key: str) -> Task:
        """Calls the worker, whatever it answers, and then writes ``cancelled``.

        Raises:
            NotFoundError: there is no such task.
        """
        task = await self._store.request_cancel(key)
        # Once more when a retry was made between the end of one instance and the request.
        while not task.ended:
            instance = task.current
            if instance.worker_id:
                answer = await self._tell_to_cancel(instance)
                _log.info("cancel", instance_id=instance.instance_id, answer=str(answer))
            await self.take(
                instance.instance_id,
                Event.CANCEL,
                Details(error_code="cancelled", error_message="cancelled on request"),
            )
            task, _ = await self._store.find(instance.instance_id)
        return task

    async def send_again(self, task: Task, instance: Instance) -> tuple[Worker, Answer]:
        """Sends an instance again under its own id, to the worker that had it. Changes no state.

        Raises:
            ConflictError: it was not sent yet, or its worker is not registered.
        """
        if not instance.worker_id or instance.state is State.QUEUED:
            raise ConflictError(
                f"cannot send {instance.instance_id!r} again: it was not sent yet. "
                "It goes out by itself when a worker has room"
            )
        try:
            worker = self._workers.find(instance.worker_id)
        except NotFoundError as error:
            raise ConflictError(f"cannot send {instance.instance_id!r} again: {error}") from error
        body = execute_body(task.task_id, task.submission, instance, worker.scheduler_url)
        return worker, await self._post(worker, EXECUTE_PATH, body)

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                while rooms := self._workers.rooms():
                    claims = await self._store.claim(rooms)
                    if not claims:
                        break
                    for claim in claims:
                        self._workers.sent(claim.instance.worker_id)
                        self._changes.notify(claim.task_id)
                        self._spawn(self._send(claim))
            except StoreError as error:
                _log.error("cannot dispatch; trying again", error=str(error))
            except Exception:  # noqa: BLE001 - nothing else ever sends a task
                _log.exception("a fault in dispatching; trying again")
            else:
                continue
            await asyncio.sleep(_STORE_RETRY_S)
            self.wake()

    async def _send(self, claim: Claim) -> None:
        instance = claim.instance
        worker = self._workers.find(instance.worker_id)
        body = execute_body(claim.task_id, claim.submission, instance, worker.scheduler_url)
        answer = await self._post(worker, EXECUTE_PATH, body)
        if answer.accepted:
            event, details = Event.ACCEPT, None
        else:
            event = Event.REFUSE
            details = Details(
                error_code=DISPATCH_FAILED,
                error_message=f"cannot dispatch to worker {worker.worker_id}: {answer}",
            )
            _log.warning(
                "dispatch failed",
                instance_id=instance.instance_id,
                worker_id=worker.worker_id,
                reason=str(answer),
            )
        while True:
            try:
                await self.take(instance.instance_id, event, details)
            except StoreError as error:
                _log.error("cannot write a dispatch's answer; trying again", error=str(error))
                await asyncio.sleep(_STORE_RETRY_S)
            else:
                return

    async def _tell_to_cancel(self, instance: Instance) -> Answer:
        try:
            worker = self._workers.find(instance.worker_id)
        except NotFoundError as error:
            return Answer(None, str(error))
        body = msgspec.json.encode(CancelRequest(schedule_instance_id=instance.instance_id))
        return await self._post(worker, CANCEL_PATH, body)

    async def _post(self, worker: Worker, path: str, body: bytes) -> Answer:
        url = worker.registration.callback_url.rstrip("/") + path
        try:
            async with self._session.post(
                url,
                # A file, because aiohttp copies large bytes at once in the loop, and warns of it.
                data=io.BytesIO(body),
                headers={"Content-Type": "application/json"},
                allow_redirects=False,
            ) as response:
                text = await response.content.read(_ANSWER_MAX_BYTES)
                return Answer(response.status, text.decode(errors="replace").strip())
        except TimeoutError:
            return Answer(None, f"no answer from {url} within {self._answer_timeout_s:g} s")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # ValueError: a callback_url that is no URL.
            return Answer(None, f"no answer from {url}: {_reason(error)}")

    def _spawn(self, body: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(body)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a fault in the scheduler", exc_info=error)


def _reason(error: Exception) -> str:
    """``Connection refused`` where the system said so; aiohttp's own text is for its debugging."""
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__
