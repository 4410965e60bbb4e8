"""What a hostile task of ``stockade doctor --prove`` is. hostile_tasks.py has the table of them.

A task is a script for bash that prints ``REACHED WHAT`` for every bad thing that it brought about,
and at last ``end``: one that says neither has not tried. None does harm where nothing contains it:
signals are number 0, files are opened and not written, loops and sleepers end by themselves.

In its environment a script finds MARK, a text that is only there, and what it may try to reach:
NEIGHBOUR_PID, _PORT, _DIRECTORY and _MARK of the task that runs beside it, and of whoever runs all
this HOST_PORT, HOST_SOCKET and HOST_DIRECTORY.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from stockade.sandbox.limits import MIB, Limits
from stockade.sandbox.outcome import ErrorCode
from stockade.sandbox.profiles import Profile

REACHED: Final = "REACHED "
END: Final = "end"

LIMITS: Final = Limits(
    memory_max=64 * MIB,
    tasks_max=24,
    runtime_max=30.0,
    timeout_stop=1.0,
    limit_fsize=12 * MIB,
    workdir_max=16 * MIB,
    workdir_inodes_max=1000,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Hostile:
    """One hostile task.

    Attributes:
        tries: what it tries, for people.
        by: what contains it, for people.
        held_by: features and limits; any one of them, in force, contains it. Empty: nothing that a
            host could lack.
        weakest: the weakest profile that holds it.
        ends: what it must end with; NONE means success.
        limits: what differs from LIMITS.
        has_coarser: where what it is held by is missing, something coarser holds it still.
    """

    name: str
    tries: str
    script: str
    by: str
    held_by: tuple[str, ...] = ()
    weakest: Profile = Profile.PROCESS
    ends: ErrorCode = ErrorCode.NONE
    limits: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    has_coarser: bool = False


def python(code: str) -> str:
    """A script that is Python, with the usual modules imported."""
    return f"exec python3 - <<'E'\nimport ctypes, os, socket, sys, time\n{code.strip()}\nE"


# The task beside them. What it makes outside of its own directory it takes away at its end.
NEIGHBOUR: Final = python("""
import signal
mark = os.environ['MARK']
abstract = socket.socket(socket.AF_UNIX)
abstract.bind('\\0' + mark)
abstract.listen()
server = socket.create_server(('127.0.0.1', 0))
for path in ('secret', '/dev/shm/' + mark):
    open(path, 'w').close()
    os.chmod(path, 0o666)
libc = ctypes.CDLL(None)
segment = libc.shmget(int(mark[-6:], 16), 4096, 0o1666)
def leave(*_):
    os.unlink('/dev/shm/' + mark)
    libc.shmctl(segment, 0, None)
    os._exit(0)
signal.signal(signal.SIGTERM, leave)
print('ready', server.getsockname()[1], os.getcwd(), flush=True)
while True:
    signal.pause()
""")
