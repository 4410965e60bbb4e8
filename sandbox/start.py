"""How a supervisor gets its spawner: the one that runs already, or a new one."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import time
from typing import Final

from stockade.platform import sockets
from stockade.platform.errors import SyscallError
from stockade.sandbox import standby
from stockade.sandbox.errors import SandboxSetupError
from stockade.sandbox.places import generations
from stockade.sandbox.settings import SpawnerSettings

_START_S: Final = 60.0
_RETRY_S: Final = 0.05


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
        SandboxSetupError: with the spawner's own words.
    """
    deadline = time.monotonic() + _START_S
    while True:
        found = find_spawner(settings.runtime_dir)
        if found is not None:
            return StartedSpawner(found, found=True)
        answer = _start(settings)
        if "socket" in answer:
            return StartedSpawner(answer["socket"], found=False)
        # A standby that is just taking over holds the lock already and listens in a moment.
        if not answer.get("busy") or time.monotonic() > deadline:
            raise SandboxSetupError("start the spawner", answer["error"])
        time.sleep(_RETRY_S)


def _start(settings: SpawnerSettings) -> dict[str, str]:
    read_end, write_end = os.pipe()
    try:
        process = subprocess.Popen(
            standby.command(settings, "--ready-fd", str(write_end)),
            env=standby.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(write_end,),
            start_new_session=True,
            cwd="/",
        )
    finally:
        os.close(write_end)
    with open(read_end, "rb") as answers:
        line = answers.readline()
    if not line:
        raise SandboxSetupError(
            "start the spawner", f"it ended with status {process.wait()} before it was ready"
        )
    answer: dict[str, str] = json.loads(line)
    if "socket" not in answer:
        process.wait()
    else:
        # It outlives us on purpose; whoever is its parent then reaps it.
        process.returncode = 0
    return answer
