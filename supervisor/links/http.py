"""The ``http`` link: the worker's HTTP server and client, as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from stockade.supervisor.config import Config
from stockade.supervisor.links.access import Access, parse_networks
from stockade.supervisor.links.http_client import HttpClient
from stockade.supervisor.links.http_server import HttpServer
from stockade.supervisor.links.link import Advertised, Intake
from stockade.supervisor.links.two_way import Credentials, TwoWayLink, read_credentials
from stockade.supervisor.listen import Address

NAME: Final = "http"


class HttpLink(TwoWayLink):
    """Serves and talks to schedulers over HTTP. A ``Link``.

    Args:
        config: ``[http]`` and ``[report]`` of it.
        intake: gets dispatches and cancels.
        metrics: the Prometheus text.
        credentials: see ``credentials_for``.
        task_uids: what tasks run as, when the worker was started as root; else None.
    """

    name = NAME

    def __init__(
        self,
        config: Config,
        intake: Intake,
        *,
        metrics: Callable[[], bytes],
        credentials: Credentials,
        task_uids: range | None,
    ) -> None:
        access = Access(
            token=credentials.token,
            networks=parse_networks(config.http.allow_networks),
            task_uids=task_uids,
        )
        client = HttpClient(
            config.http.scheduler or "",
            token=credentials.token,
            dialect=config.report.dialect,
            attempt_timeout_s=config.report.attempt_timeout,
            certificates=credentials.certificates,
        )
        super().__init__(
            config.http, HttpServer(intake, access, metrics, NAME), client, credentials
        )
        self._scheme = "http" if config.http.tls_cert is None else "https"

    def _told(self, address: Address) -> Advertised:
        return Advertised(ip=address.host, callback_url=f"{self._scheme}://{address}")


def credentials_for(config: Config) -> Credentials:
    """What ``[http]`` names, to be read while the process may still do so.

    Raises:
        ConfigError: a file cannot be read or used.
    """
    return read_credentials(config.http, alpn="http/1.1", section=NAME)
