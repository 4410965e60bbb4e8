"""How a supervisor gets its spawner: the one that runs already, or a new one."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Final

from stockade.platform import cgroup, sockets
from stockade.platform.cgroup import Group
from stockade.platform.errors import SyscallError
from stockade.sandbox import standby
from stockade.sandbox.delegation import find_delegation
from stockade.sandbox.errors import SandboxSetupError
from stockade.sandbox.places import generations
from stockade.sandbox.settings import SpawnerSettings
from stockade.sandbox.systemd import Manager
from stockade.sandbox.tree import group_name

# Also the longest that a scope of an earlier life is waited for.
_START_S: Final = 60.0
_RETRY_S: Final = 0.05
# Of what a start that failed said: a Python traceback's last words, or systemd's one line.
_WORDS: Final = 60


@dataclasses.dataclass(frozen=True, slots=True)
class StartedSpawner:
    """A spawner that listens.

    Attributes:
        found: it ran before we came; its tasks wait to be adopted.
    """

    socket_path: str
    found: bool


def find_spawner(runtime_dir: str) -> str | None:
    """The socket of the spawner in charge, if one answers; the newest, if several do."""
    for number in generations(runtime_dir):
        path = os.path.join(runtime_dir, "spawner", f"{number}.sock")
        try:
            sockets.connect_seqpacket(path).close()
        except SyscallError:
            # Of a spawner that died: the next one removes it.
            continue
        return path
    return None


def start_spawner(settings: SpawnerSettings) -> StartedSpawner:
    """Finds the worker's spawner or starts one, and returns when it listens.

    Call it before there are threads, an event loop, or fewer privileges.

    Raises:
        SandboxSetupError: with the spawner's own words, or systemd's.
    """
    deadline = time.monotonic() + _START_S
    manager = find_delegation().manager
    while True:
        found = find_spawner(settings.runtime_dir)
        if found is not None:
            return StartedSpawner(found, found=True)
        answer = _start(settings, [], []) if manager is None else _start_in_scope(settings, manager)
        if "socket" in answer:
            return StartedSpawner(answer["socket"], found=False)
        # A standby that is just taking over holds the lock already and listens in a moment; a scope
        # that is just ending is gone in a moment.
        if not answer.get("busy") or time.monotonic() > deadline:
            raise SandboxSetupError("start the spawner", answer["error"])
        time.sleep(_RETRY_S)


def _start_in_scope(settings: SpawnerSettings, manager: Manager) -> dict[str, Any]:
    """One try: in a scope that is made for it, or in the one that tasks keep alive."""
    unit = group_name(settings.worker_id)
    answer = _start(
        settings, manager.scope_command(unit, manager.service_of(cgroup.own_group())), [], manager
    )
    if "refused" not in answer:
        return answer
    # systemd has a unit of this name, perhaps only for a moment more.
    state, path = _state_of(manager, unit)
    mount = cgroup.find_mount()
    if state in ("inactive", "failed") or mount is None:
        # It went meanwhile, or was never the reason.
        again = "already" in answer["error"]
        return {**answer, "busy": True} if again else answer
    if state != "active" or not path or not _has_processes(mount / path.lstrip("/")):
        return {"error": f"the scope {unit} of an earlier spawner is {state} and does not end: "
                f"see systemctl status {unit}", "busy": True}  # fmt: skip
    # From a scope of any name, since an ordinary user's login is outside of his own systemd's tree
    # and may move nothing from there; it ends as the spawner leaves it.
    group = str(mount / path.lstrip("/"))
    answer = _start(settings, manager.scope_command(None, None), ["--join", group], manager)
    if _state_of(manager, unit)[0] == "active":
        return answer
    # Its last task ended while we came: systemd lets go of the group that we went into.
    if "socket" in answer:
        os.kill(int(answer["pid"]), signal.SIGKILL)
    return {"error": f"the scope {unit} ended meanwhile", "busy": True}


def _state_of(manager: Manager, unit: str) -> tuple[str, str]:
    try:
        return manager.state_of(unit)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxSetupError("start the spawner", str(error)) from error


def _has_processes(group: Path) -> bool:
    try:
        return Group(group).populated
    except SyscallError as error:
        if error.errno in (errno.ENOENT, errno.ENODEV):
            return False
        raise


def _start(
    settings: SpawnerSettings, prefix: list[str], arguments: list[str],
    manager: Manager | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Starts one and gives its answer; ``refused`` is in it when ``prefix`` did not even run it."""
    read_end, write_end = os.pipe()
    words_end, stderr_end = os.pipe()
    own_stderr = os.dup(2)
    arguments = ["--ready-fd", str(write_end), "--stderr-fd", str(own_stderr), *arguments]
    command = standby.command(settings, *arguments)
    environment = standby.environment()
    if prefix and manager is not None:
        # What only systemd-run needs to know is not for the spawner.
        variables = [f"{name}={value}" for name, value in environment.items()]
        command = [*prefix, "/usr/bin/env", "-i", *variables, *command]
        environment = {**environment, **manager.environment()}
    try:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=stderr_end, pass_fds=(write_end, own_stderr), start_new_session=True, cwd="/",
        )  # fmt: skip
    except BaseException:
        os.close(read_end)
        os.close(words_end)
        raise
    finally:
        for fd in (write_end, stderr_end, own_stderr):
            os.close(fd)
    with open(read_end, "rb") as answers, open(words_end, "rb") as words:
        line = answers.readline()
        if not line:
            # Until it has put its own stderr in place, what it says is the reason.
            said = " ".join(words.read().decode("utf-8", "replace").split()[-_WORDS:])
            status = process.wait()
            said = said or f"it ended with status {status} before it was ready"
            return {"error": said, "refused": True}
    answer: dict[str, Any] = json.loads(line)
    if "socket" not in answer:
        process.wait()
    else:
        # It outlives us on purpose; whoever is its parent then reaps it.
        process.returncode = 0
    return answer
