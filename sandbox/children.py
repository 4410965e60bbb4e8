"""The spawner's children: each is reaped once, and whoever waits for it is told."""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Callable

from stockade.platform import prctl
from stockade.sandbox.loop import Loop


class Children:
    """Reaps every child of this process: known ones with a callback, orphans silently.

    This process is a child subreaper, so what a killed launcher leaves behind comes to it.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._callbacks: dict[int, Callable[[int], None]] = {}
        self._wakeup, wake = socket.socketpair()
        self._wake = wake
        self._wakeup.setblocking(False)
        wake.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        prctl.set_child_subreaper()
        loop.watch(self._wakeup.fileno(), select.EPOLLIN, self._ready)

    def watch(self, pid: int, callback: Callable[[int], None]) -> None:
        """Calls ``callback(wait_status)`` when the child ``pid`` has been reaped."""
        self._callbacks[pid] = callback

    def _ready(self, _events: int) -> None:
        self._wakeup.recv(4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            callback = self._callbacks.pop(pid, None)
            if callback is not None:
                # One that fails must not keep those from being told who ended with it: no signal
                # comes for them again.
                self._loop.guard(lambda callback=callback, status=status: callback(status))  # type: ignore[misc]
