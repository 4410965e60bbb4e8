"""The links that a configuration asks for: what they need from a privileged start, and they."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping

from stockade.supervisor.config import Config
from stockade.supervisor.links import http
from stockade.supervisor.links.link import Intake
from stockade.supervisor.links.listeners import open_listeners
from stockade.supervisor.links.two_way import Credentials, TwoWayLink

# grpclib and protobuf cost megabytes and are imported only where there is a grpc link. That has to
# be before the privileges go: after that the installation may be out of reach.


def open_link_listeners(config: Config) -> dict[str, list[socket.socket]]:
    """Each link's listening sockets, by its name; none for a link that only calls.

    Raises:
        ConfigError: an address is wrong or unknown.
        StockadeError: another program has a port.
    """
    opened: dict[str, list[socket.socket]] = {}
    try:
        for name, section in config.links.items():
            opened[name] = [] if section.listen is None else open_listeners(section.listen, name)
    except BaseException:
        for listeners in opened.values():
            for listener in listeners:
                listener.close()
        raise
    return opened


def read_link_credentials(config: Config) -> dict[str, Credentials]:
    """Each link's token and certificates, by its name; to be called with the privileges to.

    Raises:
        ConfigError: a file cannot be read or used.
    """
    found = {}
    if config.http.runs:
        found[http.NAME] = http.credentials_for(config)
    if config.grpc.runs:
        from stockade.supervisor.links import grpc

        found[grpc.NAME] = grpc.credentials_for(config)
    return found


def make_links(
    config: Config,
    intake: Intake,
    *,
    metrics: Callable[[], bytes],
    credentials: Mapping[str, Credentials],
    task_uids: range | None,
) -> dict[str, TwoWayLink]:
    """The links, by name, not started yet.

    Args:
        config: says which.
        intake: gets dispatches and cancels.
        metrics: the Prometheus text.
        credentials: see ``read_link_credentials``.
        task_uids: what tasks run as, when the worker was started as root; else None.
    """
    made: dict[str, TwoWayLink] = {}
    if config.http.runs:
        made[http.NAME] = http.HttpLink(
            config,
            intake,
            metrics=metrics,
            credentials=credentials[http.NAME],
            task_uids=task_uids,
        )
    if config.grpc.runs:
        from stockade.supervisor.links import grpc

        made[grpc.NAME] = grpc.GrpcLink(
            config, intake, credentials=credentials[grpc.NAME], task_uids=task_uids
        )
    return made


def registering(config: Config, links: Mapping[str, TwoWayLink]) -> list[TwoWayLink]:
    """The links over which the worker registers and beats: ``[worker] protocol``, or each."""
    protocol = config.worker.protocol
    wanted = links.values() if protocol is None else [links[protocol.value]]
    return [link for link in wanted if link.scheduler]
