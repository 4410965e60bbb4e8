"""What tasks print: kept on disk as head and tail, with memory flat however much it is.

``SEQ.head`` holds the first half of output_max; what comes after it goes round in ``SEQ.tail``
(output_ring.py), which keeps the last half.

Nothing is synced: the page cache outlives the supervisor, and what does not outlive the host is not
owed, for the excerpt is in the journal. A disk that is full loses output and says so in ``fault``;
it stops neither the task nor the loop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from stockade.platform.errors import StockadeError
from stockade.supervisor.output_capture import Capture, Fed
from stockade.supervisor.output_reader import Reader, reading
from stockade.supervisor.output_ring import PIECE_BYTES

__all__ = ["Capture", "Fed", "OutputStore", "Piece", "StoreDefault"]

CUT_FORM: Final = "\n[... {missing} bytes cut ...]\n"
_SUFFIXES: Final = (".head", ".tail")


class StoreDefault(enum.Enum):
    """Stands for what the store was made with."""

    OUTPUT_MAX = "output_max"


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A part of an output.

    Attributes:
        offset: where ``data`` begins in all that was printed; past what was asked for when that
            was cut.
        data: empty when there is no more yet.
        total: how much was printed until now.
    """

    offset: int
    data: bytes
    total: int


class OutputStore:
    """The directory of outputs. Names in it are made of seqs alone."""

    def __init__(self, directory: Path, output_max: int | None) -> None:
        """Makes the directory, for its owner alone, when it is absent.

        Raises:
            StockadeError: it cannot be made.
        """
        self._buffer: Final = memoryview(bytearray(PIECE_BYTES))
        self._directory = directory
        self._output_max = output_max
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise StockadeError(
                f"cannot create the output directory {directory}: {error.strerror}; "
                "its parent must exist and be writable for the worker's user"
            ) from error

    def open(
        self, seq: int, output_max: int | StoreDefault | None = StoreDefault.OUTPUT_MAX
    ) -> Capture:
        """A fresh capture for a task that starts. What lay there under its seq goes.

        Args:
            seq: the task.
            output_max: most bytes to keep, None for all of it; left out: the store's own.
        """
        with contextlib.suppress(OSError):
            self.remove(seq)
        return self._capture(seq, output_max)

    def reopen(
        self, seq: int, output_max: int | StoreDefault | None = StoreDefault.OUTPUT_MAX
    ) -> Capture:
        """A capture that goes on after what an earlier supervisor stored of a task that lives."""
        capture = self._capture(seq, output_max)
        try:
            capture.resume()
        except OSError as error:
            capture.fault = error.strerror
        return capture

    def excerpt(self, seq: int, limit_bytes: int) -> str:
        """Valid text of at most so many bytes, with both ends.

        Raises:
            StockadeError: it cannot be read.
        """
        with self._reading(seq) as reader:
            return reader.excerpt(limit_bytes, reader.total)

    def read(self, seq: int) -> bytes:
        """All that is kept, with a marker where it was cut. Empty when there is none.

        Raises:
            StockadeError: it cannot be read.
        """
        with self._reading(seq) as reader:
            head = reader.head(0, reader.head_bytes)
            missing = reader.tail_start - reader.head_bytes
            marker = CUT_FORM.format(missing=missing).encode() if missing else b""
            return head + marker + reader.tail(reader.tail_start, reader.total)

    def read_from(self, seq: int, offset: int, limit_bytes: int) -> Piece:
        """The next part for a reader that follows: ask again at ``offset + len(data)``.

        Raises:
            StockadeError: it cannot be read.
        """
        with self._reading(seq) as reader:
            if offset < reader.head_bytes:
                data = reader.head(offset, min(limit_bytes, reader.head_bytes - offset))
                return Piece(offset, data, reader.total)
            start = min(max(offset, reader.tail_start), reader.total)
            end = min(reader.total, start + limit_bytes)
            return Piece(start, reader.tail(start, end), reader.total)

    def size(self, seq: int) -> int:
        """Bytes printed, kept or not, as far as the files know.

        Raises:
            StockadeError: it cannot be read.
        """
        with self._reading(seq) as reader:
            return reader.total

    def seqs(self) -> list[int]:
        """The tasks of which something is stored, for finding what no journal knows."""
        found = set()
        with os.scandir(self._directory) as entries:
            for entry in entries:
                stem, dot, suffix = entry.name.partition(".")
                if dot + suffix in _SUFFIXES and stem.isdecimal():
                    found.add(int(stem))
        return sorted(found)

    def remove(self, seq: int) -> None:
        """Removes what is stored of the task; absent is fine.

        Raises:
            OSError: it cannot be removed.
        """
        for suffix in _SUFFIXES:
            # Each task comes here twice, most have nothing, and a Path is dear.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self._directory}/{seq:d}{suffix}")

    def _capture(self, seq: int, output_max: int | StoreDefault | None) -> Capture:
        limit = self._output_max if isinstance(output_max, StoreDefault) else output_max
        return Capture(self._path(seq, ".head"), self._path(seq, ".tail"), limit, self._buffer)

    def _path(self, seq: int, suffix: str) -> Path:
        return self._directory / f"{seq:d}{suffix}"

    @contextlib.contextmanager
    def _reading(self, seq: int) -> Iterator[Reader]:
        try:
            with reading(self._path(seq, ".head"), self._path(seq, ".tail")) as reader:
                yield reader
        except OSError as error:
            raise StockadeError(
                f"cannot read the output of task {seq}: {error.strerror}; check the disk"
            ) from error
