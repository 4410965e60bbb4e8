"""The tail of an output: a file that holds a header and a ring of the last bytes.

    header   magic; size of the head; bytes kept; size of the ring; first good byte; bytes passed

Positions count the bytes that went past the head. The header is written after the data it speaks
of. A crash of the supervisor in between leaves a header that knows nothing of the last piece; so
the ring is larger than what is kept by one piece, and that piece can only have overwritten bytes
which the header does not count any more.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self

PIECE_BYTES: Final = 64 * 1024

_HEADER: Final = struct.Struct("<8sQQQQQ")
_MAGIC: Final = b"SKTAIL1\n"


class Ring:
    """The open tail of one output.

    Attributes:
        head_bytes: where the head ended for good.
        passed: bytes that came past the head, kept or not.
    """

    def __init__(
        self, fd: int, *, head_bytes: int, kept_bytes: int, ring_bytes: int, good: int, passed: int
    ) -> None:
        self.head_bytes = head_bytes
        self.passed = passed
        self._fd = fd
        self._kept_bytes = kept_bytes
        self._ring_bytes = ring_bytes
        self._good = good

    @classmethod
    def create(cls, path: Path, *, head_bytes: int, kept_bytes: int, passed: int) -> Self:
        """A fresh ring; ``passed`` bytes after the head are lost already.

        Raises:
            OSError: the disk refuses it.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        ring = cls(
            fd,
            head_bytes=head_bytes,
            kept_bytes=kept_bytes,
            ring_bytes=kept_bytes + min(kept_bytes, PIECE_BYTES),
            good=passed,
            passed=passed,
        )
        try:
            ring._write_header()
        except BaseException:
            os.close(fd)
            raise
        return ring

    @classmethod
    def open(cls, path: Path) -> Self | None:
        """The ring at ``path``; None when a crash left it without a header.

        Raises:
            OSError: it is absent or cannot be read.
        """
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            header = os.pread(fd, _HEADER.size, 0)
        except BaseException:
            os.close(fd)
            raise
        if len(header) == _HEADER.size:
            magic, head_bytes, kept_bytes, ring_bytes, good, passed = _HEADER.unpack(header)
            if magic == _MAGIC and kept_bytes <= ring_bytes and good <= passed:
                return cls(
                    fd,
                    head_bytes=head_bytes,
                    kept_bytes=kept_bytes,
                    ring_bytes=ring_bytes,
                    good=good,
                    passed=passed,
                )
        os.close(fd)
        return None

    @property
    def available(self) -> int:
        """How many of the last bytes can be read."""
        return min(self.passed - self._good, self._kept_bytes)

    @property
    def stored_bytes(self) -> int:
        """What it takes on disk."""
        return _HEADER.size + min(self.passed, self._ring_bytes)

    def append(self, piece: memoryview) -> None:
        """Takes at most PIECE_BYTES more.

        Raises:
            OSError: the disk refused it; this piece and what lay before it are lost.
        """
        kept = piece[max(0, len(piece) - self._kept_bytes) :]
        position = self.passed + len(piece) - len(kept)
        self.passed += len(piece)
        try:
            for offset, part in self._spans(position, len(kept)):
                _write(self._fd, kept[:part], offset)
                kept = kept[part:]
            self._write_header()
        except OSError:
            # The tail must stay without a hole: it begins anew after this piece.
            self._good = self.passed
            raise

    def read(self, position: int, length: int) -> bytes:
        """Bytes from ``position`` on, which must be available.

        Raises:
            OSError: they cannot be read.
        """
        return b"".join(
            os.pread(self._fd, part, offset) for offset, part in self._spans(position, length)
        )

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _spans(self, position: int, length: int) -> Iterator[tuple[int, int]]:
        """File offset and length of the one or two parts in which ``length`` bytes lie."""
        while length > 0:
            start = position % self._ring_bytes
            part = min(length, self._ring_bytes - start)
            yield _HEADER.size + start, part
            position += part
            length -= part

    def _write_header(self) -> None:
        header = _HEADER.pack(
            _MAGIC, self.head_bytes, self._kept_bytes, self._ring_bytes, self._good, self.passed
        )
        _write(self._fd, memoryview(header), 0)


def _write(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data = data[written:]
        offset += written
