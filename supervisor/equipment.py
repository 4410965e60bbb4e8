"""What the daemon works with, however it came to have it."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from stockade.sandbox.capabilities import HostCapabilities
from stockade.supervisor.links.two_way import Credentials
from stockade.supervisor.places import WorkerPlaces
from stockade.supervisor.task_types.door import Door


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Equipment:
    """What the daemon works with: opened while there were rights to, or taken over in a reload.

    Attributes:
        credentials: of each link.
        as_root: the worker was started as root, whoever the process is by now.
        host: what was found at the start.
        unavailable: the profiles that tasks may ask for and that cannot be enforced, and why.
        door: task types of other packages.
        listeners: of each link.
        connections: of schedulers, from the life before, of each link.
        draining: a drain was in force.
        reloadable: the process can be executed anew by its own command line.
    """

    places: WorkerPlaces
    spawner_socket: Path
    credentials: Mapping[str, Credentials]
    as_root: bool
    host: HostCapabilities
    unavailable: Mapping[str, str]
    door: Door
    listeners: Mapping[str, Sequence[socket.socket]]
    control: socket.socket
    connections: Mapping[str, Sequence[socket.socket]] = dataclasses.field(default_factory=dict)
    draining: bool = False
    reloadable: bool = False
