"""The daemon: everything put together, in the order that privileges and crashes ask for.

    configuration, lock, listeners, spawner, control socket     as who started it, blocking
    become [worker] user                                        for good
    journal, what an earlier life left, spawner's tasks, links  in the event loop

Nothing forks after the event loop has started: the spawner makes the tasks' processes.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import resource
import signal
import socket
from pathlib import Path
from typing import Final

import structlog
import uvloop

from stockade.platform import prctl
from stockade.platform.errors import StockadeError
from stockade.sandbox import capabilities, oom_score, supervisor_confinement
from stockade.sandbox.capabilities import HostCapabilities
from stockade.sandbox.installed import fingerprint
from stockade.sandbox.limits import Ceilings
from stockade.sandbox.profiles import Profile, View
from stockade.sandbox.settings import SpawnerSettings
from stockade.sandbox.spawner_start import start_spawner
from stockade.supervisor import reload
from stockade.supervisor.config import Config, Loaded, OnUnsupported, WorkerConfig
from stockade.supervisor.control_socket import listen_control
from stockade.supervisor.daemon import Daemon
from stockade.supervisor.equipment import Equipment
from stockade.supervisor.errors import ConfigError
from stockade.supervisor.links.running import open_link_listeners, read_link_credentials
from stockade.supervisor.logs import set_up_logs
from stockade.supervisor.places import (
    SupervisorUser,
    WorkerPlaces,
    become,
    open_places,
    supervisor_user,
)
from stockade.supervisor.reload import Handover
from stockade.supervisor.slots import Wanted
from stockade.supervisor.task_types.built_in import NAMES
from stockade.supervisor.task_types.container import engine_settings
from stockade.supervisor.task_types.door import load_classes

log = structlog.get_logger(__name__)

# Tasks do not see it, whether this worker reads it or not.
CONFIGURATION: Final = Path("/etc/stockade")

# Imported by the standard library and aiohttp only when first needed; by then the installation may
# be out of reach of the user that the supervisor has become.
_NEEDED_LATER: Final = (
    "concurrent.futures.thread", "encodings.idna", "encodings.punycode",
    "encodings.latin_1", "encodings.ascii", "encodings.utf_8_sig", "stringprep",
    "aiohttp.web_runner",
    "asyncio.base_events", "asyncio.unix_events", "uuid", "json.decoder", "traceback",
)  # fmt: skip


def run_worker(loaded: Loaded, *, reloadable: bool = False) -> int:
    """Run the worker until it is told to stop. Returns the process's exit status.

    Args:
        loaded: the configuration.
        reloadable: executing the process's own command line anew gives this worker again.

    Raises:
        ConfigError: the configuration, or what it names, cannot be used here.
        StockadeError: the worker cannot start.
    """
    config = loaded.config
    # A watchdog ends a loop that hangs with SIGABRT: then the log tells where it hung.
    faulthandler.enable()
    set_up_logs(config.worker.log_level.value)
    handover = reload.receive(os.environ)
    for module in _NEEDED_LATER:
        importlib.import_module(module)
    if handover is not None and handover.answer is not None:
        return _rehearse(loaded, handover)
    for warning in loaded.warnings:
        log.warning(warning)
    if handover is None:
        equipment = _equip(loaded, reloadable=reloadable)
    else:
        equipment = _take_over(loaded, handover)
    wanted = Wanted(
        fingerprint(), _spawner_settings(loaded, supervisor_user(config.worker.user)).tuning
    )
    daemon = Daemon(config, equipment, wanted)
    ended = uvloop.run(daemon.run())
    if isinstance(ended, int):
        return ended
    return reload.re_execute(ended, stop_asked=lambda: daemon.stop_requests > 0)


def _equip(loaded: Loaded, *, reloadable: bool) -> Equipment:
    """Open all that takes the rights we started with, and give these up."""
    # Until the daemon listens to it: the configuration was read just now.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    config = loaded.config
    user = supervisor_user(config.worker.user)
    if user.missing:
        log.warning("the supervisor stays root: no such user", user=user.missing)
    host = capabilities.probe(str(config.worker.state_dir))
    unavailable = check_host(config, view_of(loaded), host)
    places = open_places(config.worker, user)
    listeners = open_link_listeners(config)
    credentials = read_link_credentials(config)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # An http task is a connection and an output file; a thousand pass the usual soft limit.
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    prctl.set_child_subreaper()
    oom_score.protect_worker()
    as_root = os.geteuid() == 0
    spawner = start_spawner(_spawner_settings(loaded, user))
    log.info("spawner found" if spawner.found else "spawner started", socket=spawner.socket_path)
    control = listen_control(
        config.worker.runtime_dir, group=user.gid if as_root and user.changes else None
    )
    # Before the user changes: they may be installed where only root can look.
    door = load_classes(NAMES)
    if user.changes:
        supervisor_confinement.give_up_capabilities()
        become(user)
    supervisor_confinement.confine()
    return Equipment(
        places=places,
        spawner_socket=Path(spawner.socket_path),
        credentials=credentials,
        as_root=as_root,
        host=host,
        unavailable=unavailable,
        door=door,
        listeners=listeners,
        control=control,
        reloadable=reloadable,
    )


def _take_over(loaded: Loaded, handover: Handover) -> Equipment:
    """What the life before left open."""
    config = loaded.config
    return Equipment(
        places=WorkerPlaces(config.worker.state_dir / "worker", handover.lock),
        spawner_socket=Path(handover.spawner_socket),
        credentials=read_link_credentials(config),
        as_root=handover.as_root,
        host=handover.host,
        unavailable=check_host(config, view_of(loaded), handover.host),
        door=load_classes(NAMES),
        listeners={name: _sockets(handover.listeners.get(name, [])) for name in config.links},
        control=socket.socket(fileno=handover.control),
        connections={name: _sockets(fds) for name, fds in handover.connections.items()},
        draining=handover.draining,
        reloadable=True,
    )


def _sockets(fds: list[int]) -> list[socket.socket]:
    return [socket.socket(fileno=fd) for fd in fds]


def _rehearse(loaded: Loaded, handover: Handover) -> int:
    """Find out all that could stop a take-over, and answer."""
    try:
        reload.check(handover, loaded.config)
        check_host(loaded.config, view_of(loaded), handover.host)
        read_link_credentials(loaded.config)
        load_classes(NAMES)
    except StockadeError as error:
        reload.answer(handover, error)
        return 1
    reload.answer(handover, loaded.config)
    return 0


def _spawner_settings(loaded: Loaded, user: SupervisorUser) -> SpawnerSettings:
    config = loaded.config
    return SpawnerSettings(
        worker_id=config.worker.id,
        runtime_dir=str(config.worker.runtime_dir),
        state_dir=str(config.worker.state_dir),
        supervisor_uid=user.uid,
        supervisor_gid=user.gid,
        uid_min=config.worker.uid_min,
        uid_max=config.worker.uid_max,
        profile=config.profile.name,
        ceilings=ceilings(config.worker),
        limits=config.limits,
        view=view_of(loaded),
        pool_min=config.worker.pool_min,
        pool_max=config.worker.pool_max,
        engine=engine_settings(config.task_container, os.environ.get("PATH", os.defpath)),
    )


def ceilings(worker: WorkerConfig) -> Ceilings:
    """What all tasks together may use."""
    return Ceilings(worker.memory_max, worker.cpu_quota, worker.tasks_max)


def view_of(loaded: Loaded) -> View:
    """What tasks see of the host: what is configured, and nothing that is the worker's own."""
    config = loaded.config
    profile = config.profile
    own_paths = (
        CONFIGURATION, loaded.file, config.worker.state_dir, config.worker.runtime_dir,
        *(path for link in config.links.values() for path in (link.token_file, link.tls_key)),
    )  # fmt: skip
    own = [str(path) for path in own_paths if path is not None]
    return View(
        read_only_paths=profile.read_only_paths,
        read_write_paths=profile.read_write_paths,
        inaccessible_paths=(*profile.inaccessible_paths, *own),
        private_network=profile.private_network,
    )


def check_host(config: Config, view: View, host: HostCapabilities) -> dict[str, str]:
    """Say what this host cannot enforce; refuse to start with it unless degrading is allowed.

    Returns:
        The stronger profiles that tasks may ask for and that this host cannot enforce, and why;
        none when degrading is allowed.

    Raises:
        ConfigError: something is missing and ``on_unsupported`` is ``refuse``.
    """
    missing = (
        *capabilities.missing(config.profile.name, config.limits, host, view),
        *capabilities.missing_ceilings(ceilings(config.worker), host),
    )
    refuse = config.worker.on_unsupported is OnUnsupported.REFUSE
    if missing and refuse:
        lines = [f"  {entry.feature}: {entry.why}; {entry.mend}" for entry in missing]
        raise ConfigError(
            "cannot start: this host does not offer what the configuration asks for\n"
            + "\n".join(lines)
            + '\nmend that, or set worker.on_unsupported = "degrade" to run with what there is'
        )
    for entry in missing:
        log.warning("not enforced", feature=entry.feature, why=entry.why, instead=entry.instead)
    found = {
        profile.value: capabilities.missing(profile, config.limits, host, view)
        for profile in Profile
    }
    return {
        profile: "; ".join(f"{entry.feature}: {entry.why}" for entry in lacking)
        for profile, lacking in found.items()
        if lacking and refuse
    }
