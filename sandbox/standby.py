"""The standby: a second spawner that waits, ready to run, for the death of the first.

It is a child of the active spawner, started with the same settings and the next generation, and
waits on a pidfd of it: the kernel tells of the death at once and cannot mistake the process.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Final

from stockade.platform import pidfd
from stockade.platform.errors import SyscallError
from stockade.sandbox.children import Children
from stockade.sandbox.loop import Loop
from stockade.sandbox.settings import SpawnerSettings

log = logging.getLogger(__name__)

_RESTART_S: Final = 1.0


def command(settings: SpawnerSettings, *arguments: str) -> list[str]:
    """The command line of a spawner. Isolated: no environment variable changes what it imports."""
    return [
        sys.executable,
        "-I",
        "-m",
        "stockade.sandbox.spawner_main",
        settings.to_json(),
        *arguments,
    ]


def environment() -> dict[str, str]:
    """All of a spawner's environment: nothing in it tells of the worker."""
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LANG": "C.UTF-8",
    }


class Standby:
    """Keeps one standby alive for the active spawner."""

    def __init__(
        self, loop: Loop, children: Children, settings: SpawnerSettings, generation: int
    ) -> None:
        self._loop = loop
        self._children = children
        self._settings = settings
        self._generation = generation
        self._pid: int | None = None
        self._dismissed: Callable[[], None] | None = None

    def start(self) -> None:
        """Starts it, unless it was dismissed. A standby that ends is started again."""
        if self._dismissed is not None:
            return
        arguments = command(self._settings, "--standby-for", str(os.getpid()),
                            "--generation", str(self._generation + 1))  # fmt: skip
        try:
            self._pid = os.posix_spawn(
                sys.executable, arguments, environment(), setsid=True,
                setsigmask=(), setsigdef=(signal.SIGPIPE, signal.SIGCHLD),
            )  # fmt: skip
        except OSError as error:
            log.error("cannot start a standby: %s", error)
            self._loop.call_later(_RESTART_S, self.start)
            return
        self._children.watch(self._pid, self._ended)

    def _ended(self, status: int) -> None:
        self._pid = None
        if self._dismissed is not None:
            self._dismissed()
            return
        log.warning("the standby ended (wait status %d): starting another", status)
        self._loop.call_later(_RESTART_S, self.start)

    def dismiss(self, then: Callable[[], None]) -> None:
        """Ends it and calls ``then``: it must not take over from a spawner that ends on purpose."""
        self._dismissed = then
        if self._pid is None:
            then()
        else:
            os.kill(self._pid, signal.SIGKILL)


def wait_for_death_of(pid: int) -> bool:
    """In the standby: returns when the active spawner, our parent, is dead.

    Returns:
        False when it was dead before we could look: then we are not its successor for certain, but
        its number may belong to somebody else by now, and nobody else is.
    """
    try:
        fd = pidfd.open_pidfd(pid)
    except SyscallError:
        return False
    try:
        if os.getppid() != pid:
            return False
        return pidfd.has_ended(fd, None)
    finally:
        os.close(fd)
