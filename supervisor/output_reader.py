"""What is stored of one output, read as one range of bytes with a gap where it was cut."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from stockade.supervisor.excerpt import excerpt
from stockade.supervisor.output_ring import Ring


class Reader:
    """One look at a stored output. Offsets count all that was printed.

    Attributes:
        head_bytes: the head is [0, head_bytes).
        tail_start: the tail is [tail_start, total); what lies between them was cut.
        total: bytes printed.
    """

    def __init__(self, head_fd: int | None, ring: Ring | None) -> None:
        self._head_fd = head_fd
        self._ring = ring
        size = 0 if head_fd is None else os.fstat(head_fd).st_size
        if ring is None:
            self.head_bytes = self.tail_start = self.total = size
        else:
            self.head_bytes = min(size, ring.head_bytes)
            self.total = ring.head_bytes + ring.passed
            self.tail_start = self.total - ring.available

    def head(self, offset: int, length: int) -> bytes:
        """Bytes of the head."""
        return b"" if self._head_fd is None else os.pread(self._head_fd, length, offset)

    def tail(self, start: int, end: int) -> bytes:
        """Bytes of the tail."""
        if self._ring is None:
            return b""
        return self._ring.read(start - self._ring.head_bytes, end - start)

    def excerpt(self, limit_bytes: int, total: int) -> str:
        """Both ends as text; ``total`` is what the task printed, for the marker."""
        head = self.head(0, min(self.head_bytes, limit_bytes))
        tail_start = max(self.tail_start, self.total - limit_bytes)
        if self._ring is None and self.head_bytes > limit_bytes:
            tail = self.head(self.head_bytes - limit_bytes, limit_bytes)
        else:
            tail = self.tail(tail_start, self.total)
        return excerpt(head, tail, total, limit_bytes)


@contextlib.contextmanager
def reading(head_path: Path, tail_path: Path) -> Iterator[Reader]:
    """What is stored at this moment, open for reading; absent files are empty.

    Raises:
        OSError: a file is there and cannot be read.
    """
    with contextlib.ExitStack() as stack:
        head_fd: int | None = None
        ring: Ring | None = None
        with contextlib.suppress(FileNotFoundError):
            head_fd = os.open(head_path, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, head_fd)
        with contextlib.suppress(FileNotFoundError):
            ring = Ring.open(tail_path)
        if ring is not None:
            stack.callback(ring.close)
        yield Reader(head_fd, ring)
