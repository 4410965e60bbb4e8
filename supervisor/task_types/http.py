"""The task type ``http``: a request for the payload's URL, made from the supervisor's loop.

It must stay harmless there, however slow the servers are: a request is one coroutine and one
socket, holds at most two small buffers, and no thread once its host's name is known.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import aiohttp

from stockade.sandbox.outcome import ErrorCode, Outcome, Status
from stockade.supervisor.dispatch import Dispatch
from stockade.supervisor.limits import format_seconds
from stockade.supervisor.task_types.base import LoopPlan, OutputWriter, TaskType, refuse_files
from stockade.supervisor.task_types.http_access import Access, parse_address
from stockade.supervisor.task_types.http_names import Names
from stockade.supervisor.task_types.http_request import Request, shown

_BUFFER_BYTES: Final = 16 * 1024
HEADER_BYTES_MAX: Final = 16 * 1024
RESPONSE_HEADERS_MAX: Final = 128
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})


class AddressRefusedError(OSError):
    """The address that a name led to may not be connected to."""


class HttpTask(TaskType):
    """Asks for a URL; a status of 300 or more, or one not expected, fails. The body is the output.

    Args:
        body_max: most bytes of a body to read; the rest is left unread and the output marked cut.
        redirects_max: most redirects to follow.
        connect_timeout_s: for the name, the connection and TLS together.
        access: where to.
        tls: how servers prove who they are; None: by the host's certificate authorities.
    """

    name: ClassVar[str] = "http"

    def __init__(
        self,
        *,
        body_max: int,
        redirects_max: int,
        connect_timeout_s: float,
        access: Access,
        tls: ssl.SSLContext | None = None,
        names: Names | None = None,
    ) -> None:
        self._body_max = body_max
        self._redirects_max = redirects_max
        self._connect_timeout_s = connect_timeout_s
        self._access = access
        self._tls = tls
        self._names = names or Names()

    def plan(self, dispatch: Dispatch) -> LoopPlan:
        refuse_files(dispatch)
        request = Request.of(dispatch)

        async def run(write: OutputWriter) -> Outcome:
            return await self._ask(request, write)

        return LoopPlan(run)

    async def _ask(self, request: Request, write: OutputWriter) -> Outcome:
        asked = request
        try:
            for _ in range(self._redirects_max + 1):
                why_not = self._access.why_not_host(request.url.host or "")
                if why_not:
                    return _failed(request, f"not allowed: {why_not}")
                answer = await self._exchange(request, write)
                if isinstance(answer, Outcome):
                    return answer
                try:
                    request = request.redirected(*answer)
                except ValueError as error:
                    return _failed(request, f"cannot follow the redirect: {error}")
        except AddressRefusedError as error:
            return _failed(request, f"not allowed: {error}")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return _failed(request, self._explained(error))
        return _failed(asked, f"more than {self._redirects_max} redirects")

    async def _exchange(self, request: Request, write: OutputWriter) -> Outcome | tuple[int, str]:
        """One request and its response: the outcome, or the redirect (status, location)."""
        refusals: list[str] = []
        host = request.url.host or ""

        def make_socket(info: Sequence[Any]) -> socket.socket:
            family, kind, protocol, _, sockaddr = info
            address = parse_address(sockaddr[0])
            assert address is not None
            why_not = self._access.why_not_address(host, address)
            if why_not:
                refusals.append(why_not)
                raise AddressRefusedError(why_not)
            return socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)

        # Everything of its own: nothing of one task, no cookie and no connection, meets another's.
        connector = aiohttp.TCPConnector(
            limit=0, force_close=True, use_dns_cache=False, resolver=self._names,
            socket_factory=make_socket, ssl=self._tls or True,
        )  # fmt: skip
        session = aiohttp.ClientSession(
            connector=connector,
            # The task's own deadline is the executor's.
            timeout=aiohttp.ClientTimeout(total=None, connect=self._connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            # What is compressed comes as it is: a small body must not unfold into gigabytes here.
            auto_decompress=False,
            headers={"Accept-Encoding": "identity"},
            read_bufsize=_BUFFER_BYTES,
            max_line_size=HEADER_BYTES_MAX, max_field_size=HEADER_BYTES_MAX,
            max_headers=RESPONSE_HEADERS_MAX,
        )  # fmt: skip
        # Or a GET whose answer is lost would be sent again: whether to try again is the scheduler's
        # to say. aiohttp has no public switch.
        session._retry_connection = False
        try:
            async with session, session.request(
                request.method, request.url, headers=request.headers, data=request.body,
                allow_redirects=False,
            ) as response:  # fmt: skip
                location = response.headers.get("Location")
                if (
                    response.status in _REDIRECTS
                    and location
                    and self._redirects_max
                    and (request.follows)
                ):
                    return response.status, location
                truncated = await self._copy_body(response, write)
                return _judged(request, response, truncated=truncated)
        except aiohttp.ClientConnectorError as error:
            if refusals and isinstance(error.os_error, AddressRefusedError):
                raise AddressRefusedError("; ".join(dict.fromkeys(refusals))) from error
            raise

    async def _copy_body(self, response: aiohttp.ClientResponse, write: OutputWriter) -> bool:
        remaining = self._body_max
        async for chunk in response.content.iter_any():
            write(chunk[:remaining])
            if len(chunk) > remaining:
                # Leaving the response unread closes its connection, so the rest costs nothing.
                response.close()
                return True
            remaining -= len(chunk)
        return False

    def _explained(self, error: Exception) -> str:
        """What went wrong, the kinds told apart by their first words."""
        within = f"within {format_seconds(self._connect_timeout_s)}"
        match error:
            case aiohttp.ClientConnectorDNSError():
                return f"cannot resolve the host's name: {error.os_error.strerror or error}"
            case aiohttp.ClientConnectorCertificateError():
                return f"TLS: the server's certificate is not valid: {error.certificate_error}"
            case aiohttp.ClientSSLError() | ssl.SSLError():
                return f"TLS: {error}"
            case aiohttp.ServerTimeoutError() | TimeoutError():
                return f"timeout: no connection {within}"
            case aiohttp.ClientConnectorError():
                return f"cannot connect: {error.os_error.strerror or error.os_error}"
            case aiohttp.ServerDisconnectedError():
                return "the server closed the connection without an answer"
            case aiohttp.ClientPayloadError():
                return f"the body broke off: {error}"
            case aiohttp.ClientResponseError():
                return f"not an HTTP response that can be read: {error.message}"
            case aiohttp.ClientOSError():
                return f"the connection broke: {error.strerror or error}"
            case aiohttp.InvalidURL():
                return f"not a URL that can be asked: {error.description}"
        return str(error) or type(error).__name__


def _judged(request: Request, response: aiohttp.ClientResponse, *, truncated: bool) -> Outcome:
    if request.is_success(response.status):
        return Outcome(Status.SUCCESS, output_truncated=truncated)
    expected = ", ".join(map(str, sorted(request.expected)))
    wanted = f", expected {expected}" if expected else ""
    reason = f"HTTP status {response.status} {response.reason or ''}".rstrip() + wanted
    return _outcome(reason, truncated=truncated)


def _failed(request: Request, why: str) -> Outcome:
    return _outcome(f"cannot ask {shown(request.url)}: {why}")


def _outcome(reason: str, *, truncated: bool = False) -> Outcome:
    return Outcome(
        Status.FAILED,
        ErrorCode.EXECUTE_FAILED,
        reason=" ".join(reason.split())[:1000],
        output_truncated=truncated,
    )
