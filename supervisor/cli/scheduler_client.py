"""Talking to the embedded scheduler from the command line."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Final, TypeVar
from urllib.parse import quote, urlsplit

import aiohttp

from stockade.supervisor.cli.submission import SubmitError

T = TypeVar("T")

# Longer than the 5 s that the scheduler gives a worker to answer a cancel.
_ANSWER_TIMEOUT_S: Final = 15.0
_POLL_S: Final = 30
# A scheduler that is being restarted; the task goes on meanwhile.
_LOST_MAX_S: Final = 60.0
_LOST_PAUSE_S: Final = 0.5
_UNAVAILABLE: Final = 503


class UnreachableError(SubmitError):
    """The scheduler does not answer, or has no use of its store; that may pass."""


class SchedulerClient:
    """The scheduler's API. Every answer that is no success is a SubmitError."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url = url.rstrip("/")
        self._session = session

    async def submit(self, body: dict[str, Any]) -> dict[str, Any]:
        return await self._ask("POST", "/v1/tasks", body=body)

    async def cancel(self, task: dict[str, Any]) -> dict[str, Any]:
        return await self._ask("POST", f"{_path(task)}/cancel")

    async def until_ended(self, task: dict[str, Any]) -> dict[str, Any]:
        """The task once it has ended. Bears with a scheduler that is away for a minute."""
        loop = asyncio.get_running_loop()
        heard_at = loop.time()
        while not task["ended"]:
            try:
                task = await self._ask("GET", _path(task), wait_s=_POLL_S)
                heard_at = loop.time()
            except UnreachableError as error:
                if loop.time() - heard_at > _LOST_MAX_S:
                    raise SubmitError(
                        f"cannot wait for task {task['id']}: {error}. The task goes on"
                    ) from error
                await asyncio.sleep(_LOST_PAUSE_S)
        return task

    async def _ask(
        self, method: str, path: str, *, body: dict[str, Any] | None = None, wait_s: int = 0
    ) -> dict[str, Any]:
        timeout_s = _ANSWER_TIMEOUT_S + wait_s
        try:
            async with self._session.request(
                method,
                self._url + path,
                data=None if body is None else io.BytesIO(json.dumps(body).encode()),
                headers={"Content-Type": "application/json"},
                params={"wait": str(wait_s)} if wait_s else None,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
            ) as response:
                text = await response.text(errors="replace")
        except TimeoutError as error:
            raise UnreachableError(
                f"cannot reach the scheduler at {self._url}: no answer within {timeout_s:g} s"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise UnreachableError(
                f"cannot reach the scheduler at {self._url}: {_reason(error)}. "
                "Start one with `stockade scheduler` or `stockade dev`, or name it with --scheduler"
            ) from error
        return _answer(self._url, response.status, text)


async def submit_only(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The task as the scheduler took it.

    Raises:
        SubmitError: the scheduler cannot be reached, or refuses it.
    """
    async with _client(url) as client:
        return await client.submit(body)


async def submit_and_wait(
    url: str, body: dict[str, Any]
) -> tuple[dict[str, Any], signal.Signals | None]:
    """The ended task; SIGINT or SIGTERM cancels it, and is returned too.

    Raises:
        SubmitError: the scheduler cannot be reached, refuses the task, or is away too long.
    """
    interrupted: asyncio.Queue[signal.Signals] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupted.put_nowait, number)
    async with _client(url) as client:
        # Not given up when a signal comes: an unanswered submission may be one that runs.
        task = await client.submit(body)
        ended = await _unless_interrupted(client.until_ended(task), interrupted)
        if isinstance(ended, dict):
            return ended, None
        print(f"stockade submit: cancelling task {task['id']}", file=sys.stderr)
        # The next one ends us at once, as it does any command.
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        return await client.cancel(task), ended


async def _unless_interrupted(
    waiting: Coroutine[Any, Any, T], interrupted: asyncio.Queue[signal.Signals]
) -> T | signal.Signals:
    task = asyncio.ensure_future(waiting)
    signalled = asyncio.ensure_future(interrupted.get())
    await asyncio.wait({task, signalled}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        signalled.cancel()
        return task.result()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return signalled.result()


@contextlib.asynccontextmanager
async def _client(url: str) -> AsyncIterator[SchedulerClient]:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        usable = False
    if not usable:
        raise SubmitError(f"cannot use --scheduler {url}: not a URL such as http://127.0.0.1:8080")
    # A connection for each request: a kept one may have been closed by a scheduler that restarted.
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        yield SchedulerClient(url, session)


def _path(task: dict[str, Any]) -> str:
    return f"/v1/tasks/{quote(task['id'], safe='')}"


def _answer(url: str, status: int, text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    if not isinstance(content, dict) or (status < 300 and "ended" not in content):
        raise SubmitError(
            f"cannot use the answer of {url}: it is not Stockade's scheduler. "
            "Name that one with --scheduler"
        )
    if status >= 300:
        kind = UnreachableError if status == _UNAVAILABLE else SubmitError
        raise kind(str(content.get("error", f"the scheduler answered {status}")))
    return content


def _reason(error: Exception) -> str:
    """``Connection refused`` where the system said so; aiohttp's own text is for its debugging."""
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__
