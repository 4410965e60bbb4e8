"""What an http task asks for, checked before anything is sent."""

from __future__ import annotations

import dataclasses
import re
from typing import Final, Self

from yarl import URL

from stockade.supervisor.dispatch import Dispatch
from stockade.supervisor.task_types.base import invalid
from stockade.supervisor.wire.messages import HttpRequest

# RFC 9110, 5.6.2: a token.
_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
# They say where a message ends and whose the connection is, which is the worker's to say.
_OWN_HEADERS: Final = frozenset(
    {"connection", "content-length", "expect", "host", "keep-alive", "proxy-connection", "te",
     "trailer", "transfer-encoding", "upgrade"}
)  # fmt: skip
HEADERS_MAX: Final = 100
HEADERS_BYTES_MAX: Final = 64 * 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Attributes:
        method: upper case.
        expected: statuses that are a success; empty: all below 300.
    """

    method: str
    url: URL
    headers: dict[str, str]
    body: bytes | None
    expected: frozenset[int]

    @classmethod
    def of(cls, dispatch: Dispatch) -> Self:
        """The request that a dispatch asks for.

        Raises:
            RejectedError: INVALID; it asks for none that can be made.
        """
        url = parse_url(dispatch.payload)
        wish = dispatch.http or HttpRequest()
        method = (wish.method or "GET").upper()
        if not _TOKEN.fullmatch(method) or method in ("CONNECT", "TRACE"):
            raise invalid(f"cannot ask {shown(url)}: method {method[:32]!r} cannot be used")
        expected = frozenset(wish.expect or ())
        wrong = [status for status in expected if not 100 <= status <= 599]
        if wrong:
            raise invalid(f"cannot ask {shown(url)}: no HTTP status is {wrong[0]}")
        body = None if wish.body is None else wish.body.encode("utf-8", "replace")
        return cls(method, url, _headers(url, wish, dispatch.idempotency_key), body, expected)

    def is_success(self, status: int) -> bool:
        return status in self.expected if self.expected else status < 300

    @property
    def follows(self) -> bool:
        """Whether redirects are to be followed: not when one is what is expected."""
        return not any(300 <= status < 400 for status in self.expected)

    def redirected(self, status: int, location: str) -> Self:
        """The request that follows a redirect; RFC 9110, 15.4, as browsers and Go do it.

        Raises:
            ValueError: ``location`` is no URL that can be asked.
        """
        url = self.url.join(URL(location))
        _check_url(url)
        method, body, headers = self.method, self.body, self.headers
        if (status == 303 and method != "HEAD") or (status in (301, 302) and method == "POST"):
            method, body = ("GET", None)
            headers = {k: v for k, v in headers.items() if not k.lower().startswith("content-")}
        if url.origin() != self.url.origin():
            # What was meant for one server is not another's to know.
            secret = ("authorization", "cookie", "proxy-authorization", "www-authenticate")
            headers = {k: v for k, v in headers.items() if k.lower() not in secret}
        return dataclasses.replace(self, url=url, method=method, body=body, headers=headers)


def parse_url(text: str) -> URL:
    """The URL in a payload.

    Raises:
        RejectedError: INVALID; it is none, and why.
    """
    try:
        url = URL(text.strip())
        _check_url(url)
    except ValueError as error:
        raise invalid(f"cannot ask {text.strip()[:200]!r}: {error}") from error
    return url


def shown(url: URL) -> str:
    """The URL without a user's name and password, for messages."""
    return str(url.with_user(None).with_password(None))[:500]


def _check_url(url: URL) -> None:
    if url.scheme not in ("http", "https") or not url.raw_host:
        raise ValueError("it must be an http or https URL")
    if url.port == 0:
        raise ValueError("there is no port 0")


def _headers(url: URL, wish: HttpRequest, idempotency_key: str) -> dict[str, str]:
    headers = dict(wish.headers or {})
    if idempotency_key:
        headers = {k: v for k, v in headers.items() if k.lower() != "x-idempotency-key"}
        headers["X-Idempotency-Key"] = idempotency_key
    for name, value in headers.items():
        if not _TOKEN.fullmatch(name):
            raise invalid(f"cannot ask {shown(url)}: header {name[:64]!r} is not a header's name")
        if name.lower() in _OWN_HEADERS:
            raise invalid(f"cannot ask {shown(url)}: header {name} is the worker's to set")
        if any(c in "\r\n" or (c < " " and c != "\t") or c == "\x7f" for c in value):
            raise invalid(f"cannot ask {shown(url)}: header {name} holds a control character")
    size = sum(len(name) + len(value.encode("utf-8", "replace")) for name, value in headers.items())
    if len(headers) > HEADERS_MAX or size > HEADERS_BYTES_MAX:
        raise invalid(
            f"cannot ask {shown(url)}: more than {HEADERS_MAX} headers"
            f" or {HEADERS_BYTES_MAX} bytes of them"
        )
    return headers
