"""The spawner's program: ``python -I -m stockade.sandbox.spawner_main SETTINGS ...``.

With ``--ready-fd N`` it is in charge at once and tells so on that descriptor; see spawner_start.py.
With ``--join GROUP`` it moves into a worker's group that lives already. With
``--standby-for PID --generation N`` it waits for that spawner's death; see standby.py. With
``--tuning TEXT`` it takes the place of one that steps back; see renewal.py.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import json
import logging
import os
import resource
import signal
from pathlib import Path

from stockade.platform import clone, keyring, mounts, namespaces, prctl
from stockade.platform.cgroup import Group
from stockade.platform.errors import StockadeError, SyscallError
from stockade.sandbox import standby
from stockade.sandbox.installed import fingerprint
from stockade.sandbox.log import set_up as set_up_log
from stockade.sandbox.places import Places, generations
from stockade.sandbox.recovery import Succession
from stockade.sandbox.settings import SpawnerSettings
from stockade.sandbox.spawner import Spawner

log = logging.getLogger(__name__)


def _raise_nofile() -> None:
    """Each live task costs the spawner a few descriptors."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _leave_host_mounts() -> None:
    """As root: what is mounted for tasks is seen by this worker alone; host mounts still come in.

    A standby has this namespace from its parent. Where root may not make one, no profile that
    mounts anything is available, which the probe says.
    """
    if os.geteuid() != 0:
        return
    try:
        namespaces.unshare(clone.CLONE_NEWNS)
    except SyscallError as error:
        if error.errno != errno.EPERM:
            raise
    else:
        mounts.set_attributes("/", flags=mounts.AT_RECURSIVE, propagation=mounts.MS_SLAVE)


def _tell_starter(fd: int | None, answer: dict[str, object]) -> None:
    if fd is not None:
        with contextlib.suppress(BrokenPipeError):
            os.write(fd, json.dumps(answer).encode() + b"\n")
        os.close(fd)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="stockade-spawner")
    parser.add_argument("settings")
    parser.add_argument("--ready-fd", type=int)
    parser.add_argument("--stderr-fd", type=int)
    parser.add_argument("--join", type=Path)
    parser.add_argument("--standby-for", type=int)
    parser.add_argument("--generation", type=int)
    parser.add_argument("--tuning")
    return parser.parse_args()


def main() -> int:
    """The spawner's program. Ends with 0, or with 1 when it could not be set up."""
    arguments = _arguments()
    if arguments.stderr_fd is not None:
        os.dup2(arguments.stderr_fd, 2)
        os.close(arguments.stderr_fd)
    code = fingerprint()
    settings = SpawnerSettings.from_json(arguments.settings)
    # Terminals and service managers signal whole groups; who ends the spawner is its supervisor.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    succession = Succession.FIRST
    if arguments.standby_for is not None:
        set_up_log("stockade-standby")
        prctl.set_name("stockade-standby")
        standby.wait_for_death_of(arguments.standby_for)
        succession = Succession.STANDBY
    set_up_log("stockade-spawner")
    prctl.set_name("stockade-spawner")
    generation = arguments.generation or max(generations(settings.runtime_dir), default=0) + 1
    try:
        if arguments.tuning is not None:
            # In the place of a spawner that steps back, and takes its dead elders' tasks over.
            settings = settings.tuned(arguments.tuning)
            succession = Succession.STANDBY
        # What the session of whoever started the worker holds is not for its tasks.
        keyring.join_new_session()
        if arguments.join is not None:
            Group(arguments.join / "spawner").attach(os.getpid())
        if succession is Succession.FIRST:
            _leave_host_mounts()
        places = Places.open(settings)
        if not places.take_charge():
            _tell_starter(
                arguments.ready_fd, {"error": "another spawner is in charge", "busy": True}
            )
            return 0
        # An elder without a socket of its own can have the number.
        while not places.lock_generation(generation):
            generation += 1
        _raise_nofile()
        spawner = Spawner(settings, places, generation, code)
        signal.signal(signal.SIGTERM, lambda _number, _frame: spawner.finish())
        spawner.recover(succession)
        spawner.listen()
    except (StockadeError, OSError, ValueError) as error:
        log.error("cannot start the spawner: %s", error)
        _tell_starter(arguments.ready_fd, {"error": str(error)})
        return 1
    _tell_starter(
        arguments.ready_fd,
        {"socket": spawner.socket_path, "generation": generation, "pid": os.getpid()},
    )
    # All that lives so far stays: collections leave it, and so each child's pages, alone.
    gc.freeze()
    spawner.run()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
