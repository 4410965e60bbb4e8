"""The ``grpc`` link: the worker's ExecutorService and its calls to WorkerControlService, as one."""

from __future__ import annotations

from typing import Final

from stockade.supervisor.config import Config
from stockade.supervisor.links.access import Access, parse_networks
from stockade.supervisor.links.grpc_client import GrpcClient
from stockade.supervisor.links.grpc_server import GrpcServer
from stockade.supervisor.links.link import Advertised, Intake
from stockade.supervisor.links.two_way import Credentials, TwoWayLink, read_credentials
from stockade.supervisor.listen import Address

NAME: Final = "grpc"


class GrpcLink(TwoWayLink):
    """Serves and talks to schedulers over gRPC. A ``Link``.

    Args:
        config: ``[grpc]`` and ``[report]`` of it.
        intake: gets dispatches and cancels.
        credentials: see ``credentials_for``.
        task_uids: what tasks run as, when the worker was started as root; else None.
    """

    name = NAME

    def __init__(
        self,
        config: Config,
        intake: Intake,
        *,
        credentials: Credentials,
        task_uids: range | None,
    ) -> None:
        access = Access(
            token=credentials.token,
            networks=parse_networks(config.grpc.allow_networks),
            task_uids=task_uids,
        )
        client = GrpcClient(
            config.grpc.scheduler or "",
            token=credentials.token,
            attempt_timeout_s=config.report.attempt_timeout,
            certificates=credentials.certificates,
        )
        super().__init__(config.grpc, GrpcServer(intake, access, NAME), client, credentials)

    def _told(self, address: Address) -> Advertised:
        return Advertised(ip=address.host, grpc_addr=str(address))


def credentials_for(config: Config) -> Credentials:
    """What ``[grpc]`` names, to be read while the process may still do so.

    Raises:
        ConfigError: a file cannot be read or used.
    """
    return read_credentials(config.grpc, alpn="h2", section=NAME)
