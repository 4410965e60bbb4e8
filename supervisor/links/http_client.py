"""What the worker tells schedulers over HTTP: register, heartbeat, ack, reports."""

from __future__ import annotations

import datetime
import email.utils
import time
from typing import Final

import aiohttp
import msgspec
import yarl

from stockade.sandbox.outcome import Status
from stockade.supervisor.config import Dialect
from stockade.supervisor.links.link import OK, Reply, ReplyKind
from stockade.supervisor.links.tls import Certificates
from stockade.supervisor.report import RUNNING, split_message
from stockade.supervisor.wire.messages import (
    ACK_PATH,
    HEARTBEAT_PATH,
    REGISTER_PATH,
    REPORT_PATH,
    RUNNING_FIELDS,
    AckRequest,
    HeartbeatRequest,
    RegisterRequest,
    StatusReport,
)

RESULT_PATH: Final = "/internal/tasks/result"
REPLY_BYTES_MAX: Final = 64 * 1024
# Shorter than what firewalls and load balancers forget idle connections after.
IDLE_S: Final = 15.0
# A kept connection that is closed shows itself at once.
STALE_S: Final = 0.5

_ENCODER: Final = msgspec.json.Encoder()
_DELIVERED: Final = frozenset({409})
_TRY_AGAIN: Final = frozenset({408, 425, 429})


class HttpClient:
    """Sends messages to schedulers over a pool of kept connections.

    Args:
        scheduler: the configured one, used where a method gets an empty scheduler.
        token: sent as a bearer token; empty for none.
        dialect: how results are told. The older one knows neither acks nor ``running``.
        attempt_timeout_s: the longest that one attempt may take, name lookup included.
        certificates: for schedulers with an https URL.
    """

    def __init__(
        self,
        scheduler: str,
        *,
        token: str,
        dialect: Dialect,
        attempt_timeout_s: float,
        certificates: Certificates,
    ) -> None:
        self.scheduler = base_url(scheduler)
        self._dialect = dialect
        self._certificates = certificates
        self._timeout = aiohttp.ClientTimeout(total=attempt_timeout_s)
        self._headers = {"Content-Type": "application/json", "User-Agent": "stockade"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._urls: dict[tuple[str, str], yarl.URL] = {}
        self._session: aiohttp.ClientSession | None = None

    async def renew(self) -> None:
        """Use the renewed certificates for new connections; those that idle end by themselves."""
        # The context is asked for with each request, and is a part of what connections are kept by.

    async def close(self) -> None:
        """Close all connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def register(self, request: RegisterRequest) -> Reply:
        return await self._post("", REGISTER_PATH, _ENCODER.encode(request))

    async def heartbeat(self, request: HeartbeatRequest) -> Reply:
        return await self._post("", HEARTBEAT_PATH, _ENCODER.encode(request))

    async def send_ack(self, scheduler: str, ack: AckRequest) -> Reply:
        if self._dialect is Dialect.TASK_RESULT:
            return OK
        return await self._post(scheduler, ACK_PATH, _ENCODER.encode(ack))

    async def send_report(self, scheduler: str, report: StatusReport) -> Reply:
        if self._dialect is Dialect.TASK_RESULT:
            if report.status == RUNNING:
                return OK
            return await self._post(scheduler, RESULT_PATH, _ENCODER.encode(_result(report)))
        if report.status == RUNNING:
            body = _ENCODER.encode({name: getattr(report, name) for name in RUNNING_FIELDS})
        else:
            body = _ENCODER.encode(report)
        return await self._post(scheduler, REPORT_PATH, body)

    async def _post(self, scheduler: str, path: str, body: bytes) -> Reply:
        scheduler = scheduler or self.scheduler
        if not scheduler:
            return Reply(ReplyKind.REFUSED, "no scheduler is configured: set [http] scheduler")
        try:
            url = self._url(scheduler, path)
            begun_at = time.monotonic()
            try:
                return await self._exchange(url, body)
            except aiohttp.ClientConnectorError:
                raise
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                if time.monotonic() - begun_at > STALE_S:
                    raise
                # Most often a kept connection that the scheduler closed just now. Every message may
                # be sent twice, so one immediate try over a new connection is safe.
                return await self._exchange(url, body)
        except TimeoutError:
            return Reply(
                ReplyKind.RETRY, f"no answer within {self._timeout.total:g} s", silent=True
            )
        except aiohttp.InvalidURL as error:
            return Reply(ReplyKind.REFUSED, f"{scheduler} is not a URL: {error}")
        except (aiohttp.ClientError, OSError) as error:
            # Before ValueError, which aiohttp's error of a certificate is too.
            return Reply(ReplyKind.RETRY, str(error) or type(error).__name__, silent=True)
        except ValueError as error:
            return Reply(ReplyKind.REFUSED, f"{scheduler} is not a URL: {error}")

    async def _exchange(self, url: yarl.URL, body: bytes) -> Reply:
        async with self._pool().post(
            url,
            data=body,
            headers=self._headers,
            allow_redirects=False,
            ssl=self._certificates.client if url.scheme == "https" else True,
        ) as response:
            # To the end, also of an answer that nobody reads: what breaks off halfway may come from
            # anything between here and the scheduler, and lost contact is no success.
            answer = await response.content.read(REPLY_BYTES_MAX)
            while len(answer) < REPLY_BYTES_MAX and not response.content.at_eof():
                answer += await response.content.read(REPLY_BYTES_MAX - len(answer))
            status = response.status
            if 200 <= status < 300 or status in _DELIVERED:
                return OK
            return Reply(
                _kind(status),
                f"answered {status}: {_shown(answer)}",
                retry_after_s=_retry_after_s(response.headers.get("Retry-After")),
            )

    def _url(self, scheduler: str, path: str) -> yarl.URL:
        url = self._urls.get((scheduler, path))
        if url is None:
            url = self._urls[scheduler, path] = yarl.URL(base_url(scheduler) + path)
        return url

    def _pool(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # No limit: the callers bound what is in flight for each scheduler, and one that
                # hangs must not hold up another, or the heartbeat.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
                timeout=self._timeout,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            )
        return self._session


def base_url(scheduler: str) -> str:
    """The scheduler's URL without a slash at its end, and with a scheme."""
    scheduler = scheduler.strip().rstrip("/")
    if scheduler and "://" not in scheduler:
        return f"http://{scheduler}"
    return scheduler


def _result(report: StatusReport) -> dict[str, str]:
    """The body of the older dialect."""
    reason, excerpt = split_message(report)
    succeeded = report.status == Status.SUCCESS
    return {
        "schedule_instance_id": report.schedule_instance_id,
        "status": Status.SUCCESS if succeeded else Status.FAILED,
        "output": excerpt,
        "error_message": reason,
    }


def _kind(status: int) -> ReplyKind:
    if status == 404:
        return ReplyKind.UNKNOWN
    if status == 413:
        return ReplyKind.TOO_LARGE
    if 400 <= status < 500 and status not in _TRY_AGAIN:
        return ReplyKind.REFUSED
    # 5xx; and redirects, which come from something in front of the scheduler.
    return ReplyKind.RETRY


def _shown(answer: bytes) -> str:
    return " ".join(answer[:200].decode("utf-8", "replace").split()) or "(nothing)"


def _retry_after_s(header: str | None) -> float | None:
    """The seconds of a Retry-After header, which may also be a date (RFC 9110, 10.2.3)."""
    if header is None:
        return None
    if header.strip().isdecimal():
        return float(header)
    try:
        moment = email.utils.parsedate_to_datetime(header)
        return max(0.0, (moment - datetime.datetime.now(datetime.UTC)).total_seconds())
    except (TypeError, ValueError, OverflowError):
        # The last is for numbers in a date or its time zone that no clock holds.
        return None
