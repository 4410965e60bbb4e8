"""The spawner's log: lines on stderr, written without ever waiting for a reader.

The spawner outlives whoever read its stderr. A write to a pipe that nobody empties would stop it,
and with it every deadline, so a line that cannot be written at once is dropped and counted.
"""

from __future__ import annotations

import logging
import os
import socket
import stat


class DroppingHandler(logging.Handler):
    """Writes each record to a descriptor, or drops it when that would block or fail."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._dropped = 0
        mode = os.fstat(fd).st_mode
        self._socket: socket.socket | None = None
        if stat.S_ISREG(mode):
            # Never blocks; a new description would have a position of its own and overwrite.
            self._fd = os.dup(fd)
        elif stat.S_ISSOCK(mode):
            # systemd hands services a stream socket to the journal.
            self._socket = socket.socket(fileno=os.dup(fd))
            self._fd = -1
        else:
            # A new open file description, so that O_NONBLOCK is ours alone and not set on the
            # terminal or pipe that others share. Where it cannot be had, the old one serves.
            try:
                flags = os.O_WRONLY | os.O_NONBLOCK | os.O_APPEND | os.O_CLOEXEC | os.O_NOCTTY
                self._fd = os.open(f"/proc/self/fd/{fd}", flags)
            except OSError:
                self._fd = os.dup(fd)

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        if self._dropped:
            line = f"{line} dropped_before={self._dropped}"
        packet = (line + "\n").encode("utf-8", "backslashreplace")
        try:
            if self._socket is not None:
                self._socket.send(packet, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            else:
                os.write(self._fd, packet)
            self._dropped = 0
        except OSError:
            self._dropped += 1


def set_up(name: str) -> None:
    """Sends this process's log to stderr, each line marked with ``name`` and the pid."""
    handler = DroppingHandler(2)
    handler.setFormatter(
        logging.Formatter(
            f"%(asctime)s %(levelname)-7s {name}[{os.getpid()}] %(message)s", "%Y-%m-%dT%H:%M:%S%z"
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.INFO)
