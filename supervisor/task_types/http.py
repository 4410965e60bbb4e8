"""The task type ``http``: a request for the payload's URL, made from the supervisor's loop."""

from __future__ import annotations

from typing import ClassVar, Final

import aiohttp
from yarl import URL

from stockade.sandbox.outcome import ErrorCode, Outcome, Status
from stockade.supervisor.dispatch import Dispatch
from stockade.supervisor.errors import RejectedError, Rejection
from stockade.supervisor.task_types.base import LoopPlan, OutputWriter, TaskType
from stockade.supervisor.wire.messages import HttpRequest

_CHUNK_BYTES: Final = 64 * 1024
_FIRST_FAILING_STATUS: Final = 300


class HttpTask(TaskType):
    """Asks for a URL; a status of 300 or more fails. The body is the task's output.

    Args:
        body_max: most bytes of a body to read; the rest is left unread and the output marked cut.
        redirects_max: most redirects to follow.
    """

    name: ClassVar[str] = "http"

    def __init__(self, *, body_max: int, redirects_max: int) -> None:
        self._body_max = body_max
        self._redirects_max = redirects_max
        self._session: aiohttp.ClientSession | None = None

    def plan(self, dispatch: Dispatch) -> LoopPlan:
        url = _checked_url(dispatch.payload)
        request = dispatch.http or HttpRequest()
        headers = dict(request.headers or {})
        if dispatch.idempotency_key:
            headers["X-Idempotency-Key"] = dispatch.idempotency_key
        for name, value in headers.items():
            if not name or any(character in name + value for character in "\r\n\0"):
                raise RejectedError(
                    Rejection.INVALID, f"cannot ask {url}: header {name!r} is not valid"
                )
        method = (request.method or "GET").upper()
        if not method.isascii() or not method.isalpha():
            raise RejectedError(Rejection.INVALID, f"cannot ask {url}: no such method: {method!r}")
        data = None if request.body is None else request.body.encode("utf-8", "replace")
        expected = frozenset(request.expect or ())

        async def run(write: OutputWriter) -> Outcome:
            return await self._ask(
                method=method, url=url, headers=headers, data=data, expected=expected, write=write
            )

        return LoopPlan(run)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _ask(
        self,
        *,
        method: str,
        url: URL,
        headers: dict[str, str],
        data: bytes | None,
        expected: frozenset[int],
        write: OutputWriter,
    ) -> Outcome:
        try:
            async with self._open_session().request(
                method, url, headers=headers, data=data, max_redirects=self._redirects_max
            ) as response:
                truncated = await self._copy_body(response, write)
                status, reason = response.status, response.reason
        except aiohttp.TooManyRedirects:
            return _failed(f"cannot ask {url}: more than {self._redirects_max} redirects")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return _failed(f"cannot ask {url}: {error or type(error).__name__}")
        succeeded = status in expected if expected else status < _FIRST_FAILING_STATUS
        if succeeded:
            return Outcome(Status.SUCCESS, output_truncated=truncated)
        return _failed(f"HTTP status {status} {reason or ''}".rstrip(), truncated=truncated)

    async def _copy_body(self, response: aiohttp.ClientResponse, write: OutputWriter) -> bool:
        remaining = self._body_max
        async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
            write(chunk[:remaining])
            if len(chunk) > remaining:
                # Leaving the response unread closes its connection, so the rest costs nothing.
                response.close()
                return True
            remaining -= len(chunk)
        return False

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            # The executor's deadline is the only one. Cookies would tie tasks to each other.
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None),
                cookie_jar=aiohttp.DummyCookieJar(),
                connector=aiohttp.TCPConnector(limit=0),
            )
        return self._session


def _checked_url(payload: str) -> URL:
    text = payload.strip()
    try:
        url = URL(text)
    except ValueError as error:
        raise RejectedError(Rejection.INVALID, f"cannot ask {text!r}: {error}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise RejectedError(
            Rejection.INVALID,
            f"cannot ask {text[:200]!r}: the payload must be an http or https URL",
        )
    return url


def _failed(reason: str, *, truncated: bool = False) -> Outcome:
    return Outcome(
        Status.FAILED,
        ErrorCode.EXECUTE_FAILED,
        reason=" ".join(reason.split()),
        output_truncated=truncated,
    )
