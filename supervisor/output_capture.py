"""What one task prints, taken from its pipe as it comes and stored as head and tail."""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import os
import stat
import struct
import termios
from pathlib import Path
from typing import Final

from stockade.supervisor.output_reader import reading
from stockade.supervisor.output_ring import PIECE_BYTES, Ring

# One call reads at most so many pieces: a task that prints without end shares the loop.
PIECES_A_FEED: Final = 4
_NO_LIMIT: Final = 2**62


class Fed(enum.Enum):
    """What ``Capture.feed`` found: nothing more for now, more to read at once, or the end."""

    DRAINED = "drained"
    MORE = "more"
    CLOSED = "closed"


class Capture:
    """The output of one task while it comes in.

    Attributes:
        total: bytes printed, kept or not.
        fault: why output was lost, when the disk refused some.
    """

    def __init__(
        self, head_path: Path, tail_path: Path, output_max: int | None, buffer: memoryview
    ) -> None:
        """Touches nothing: a task that prints nothing leaves no file.

        Args:
            head_path: the head's file.
            tail_path: the tail's file.
            output_max: most bytes to keep; None: all.
            buffer: PIECE_BYTES long; may be shared, for it holds nothing between two calls.
        """
        self.total = 0
        self.fault: str | None = None
        self._head_path = head_path
        self._tail_path = tail_path
        self._buffer = buffer
        self._head_max = _NO_LIMIT if output_max is None else (output_max + 1) // 2
        self._tail_max = 0 if output_max is None else output_max - self._head_max
        self._head_bytes = 0
        self._head_fd: int | None = None
        self._splices = True
        self._ring: Ring | None = None

    @property
    def truncated(self) -> bool:
        """Whether some of it is not kept."""
        return self.total > self._head_bytes + (self._ring.available if self._ring else 0)

    @property
    def stored_bytes(self) -> int:
        """What it takes on disk."""
        return self._head_bytes + (self._ring.stored_bytes if self._ring else 0)

    def feed(self, fd: int) -> Fed:
        """Takes what is in the pipe, at most PIECES_A_FEED pieces.

        Args:
            fd: the read end, non-blocking. Never closed here.
        """
        for _ in range(PIECES_A_FEED):
            try:
                length = self._take(fd)
            except BlockingIOError:
                return Fed.DRAINED
            if not length:
                return Fed.CLOSED
        return Fed.MORE

    def write(self, data: bytes) -> None:
        """Takes output that did not come through a pipe."""
        view = memoryview(data)
        for start in range(0, len(view), PIECE_BYTES):
            self._keep(view[start : start + PIECE_BYTES])

    def excerpt(self, limit_bytes: int) -> str:
        """Valid text of at most so many bytes, with both ends; empty when it cannot be read."""
        if not self.total:
            return ""
        try:
            with reading(self._head_path, self._tail_path) as reader:
                return reader.excerpt(limit_bytes, self.total)
        except OSError as error:
            self._lost(error)
            return ""

    def finish(self) -> None:
        """Closes the files. Nothing more may be fed; the output stays in the store."""
        if self._head_fd is not None:
            os.close(self._head_fd)
            self._head_fd = None
        if self._ring is not None:
            self._ring.close()

    def resume(self) -> None:
        """Goes on after what an earlier supervisor stored.

        Raises:
            OSError: it cannot be read.
        """
        with contextlib.suppress(FileNotFoundError):
            self._ring = Ring.open(self._tail_path)
        if self._ring is not None:
            self._head_bytes = self._head_max = self._ring.head_bytes
            self.total = self._head_bytes + self._ring.passed
            return
        with contextlib.suppress(FileNotFoundError):
            self.total = self._head_bytes = self._head_path.stat().st_size

    def _take(self, fd: int) -> int:
        """Takes one piece from a pipe; how long it was, 0 at the pipe's end."""
        if self._head_bytes < self._head_max and self._splices and self._open_head_for(fd):
            try:
                return self._move_into_head(fd)
            except BlockingIOError:
                raise
            except OSError as error:
                # Nothing was taken. EINVAL: this file system does not do it.
                self._splices = False
                if error.errno != errno.EINVAL:
                    self._end_head(error)
        length = os.readv(fd, [self._buffer])
        if length:
            self._keep(self._buffer[:length])
        return length

    def _open_head_for(self, fd: int) -> bool:
        """Whether the head is open; opened only for a pipe that has something for it."""
        if self._head_fd is None:
            if not stat.S_ISFIFO(os.fstat(fd).st_mode):
                self._splices = False
                return False
            (waiting,) = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))
            if not waiting:
                return False
            try:
                self._head_fd = self._open_head()
            except OSError as error:
                self._end_head(error)
                return False
        return True

    def _move_into_head(self, fd: int) -> int:
        # In one step from the pipe to the file: read and then written, a supervisor that is killed
        # in between would take it along.
        assert self._head_fd is not None
        length = min(PIECE_BYTES, self._head_max - self._head_bytes)
        moved = os.splice(fd, self._head_fd, length, offset_dst=self._head_bytes)
        self._head_bytes += moved
        self.total += moved
        return moved

    def _open_head(self) -> int:
        return os.open(self._head_path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _end_head(self, error: OSError) -> None:
        # What comes later goes into the ring, or is lost as well.
        self._lost(error)
        self._head_max = self._head_bytes

    def _keep(self, piece: memoryview) -> None:
        self.total += len(piece)
        if self._head_bytes < self._head_max:
            piece = self._keep_head(piece)
        if piece:
            self._keep_tail(piece)

    def _keep_head(self, piece: memoryview) -> memoryview:
        """Stores what belongs to the head; the rest of the piece."""
        part = piece[: self._head_max - self._head_bytes]
        rest = piece[len(part) :]
        try:
            if self._head_fd is None:
                self._head_fd = self._open_head()
            while part:
                written = os.pwrite(self._head_fd, part, self._head_bytes)
                self._head_bytes += written
                part = part[written:]
        except OSError as error:
            self._end_head(error)
            return piece[len(piece) - len(part) - len(rest) :]
        return rest

    def _keep_tail(self, piece: memoryview) -> None:
        try:
            if self._ring is None:
                before = self.total - len(piece) - self._head_bytes
                self._ring = Ring.create(
                    self._tail_path,
                    head_bytes=self._head_bytes,
                    kept_bytes=self._tail_max,
                    passed=before,
                )
            self._ring.append(piece)
        except OSError as error:
            self._lost(error)

    def _lost(self, error: OSError) -> None:
        if self.fault is None:
            self.fault = error.strerror or str(error)
