"""The standard streams of a command in `stockade run`."""

from __future__ import annotations

import contextlib
import errno
import os
import select
from typing import Final

CHUNK_BYTES: Final = 64 * 1024


class Streams:
    """The task's standard streams: its output comes through pipes, its input is ours.

    Attributes:
        fault: why some output could not be passed on, though somebody may want it.
    """

    def __init__(self, output_max: int | None) -> None:
        self.copied_bytes = 0
        self.cut = False
        self.fault: OSError | None = None
        self._output_max = output_max
        self._stack = contextlib.ExitStack()
        self._task_stack = contextlib.ExitStack()
        self._for_task: list[int] = [self._open_input()]
        # Read end to our own descriptor.
        self.copies: dict[int, int] = {}
        for target in (1, 2):
            read_end, write_end = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(read_end, False)
            self.copies[read_end] = target
            self._for_task.append(write_end)
            self._task_stack.callback(os.close, write_end)

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_for_task()
        for read_end in list(self.copies):
            self.stop(read_end)

    def for_task(self) -> list[int]:
        return self._for_task

    def close_for_task(self) -> None:
        """Ours must not keep the pipes open when the task is gone."""
        self._task_stack.close()

    def copy(self, read_end: int) -> bool:
        """Pass a piece on. False when there is no more for now, or for ever."""
        try:
            data = os.read(read_end, CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self.stop(read_end)
            return False
        self.copied_bytes += len(data)
        if self._output_max is not None and self.copied_bytes > self._output_max:
            self.cut = True
            data = data[: max(0, len(data) - (self.copied_bytes - self._output_max))]
        view = memoryview(data)
        try:
            while view:
                view = view[write_some(self.copies[read_end], view) :]
        except OSError as error:
            # Nobody reads our output any more: then the task is told in the same way, by SIGPIPE.
            self.stop(read_end)
            if error.errno != errno.EPIPE:
                self.fault = error
            return False
        return True

    def stop(self, read_end: int) -> None:
        os.close(read_end)
        del self.copies[read_end]

    def _open_input(self) -> int:
        with contextlib.suppress(OSError):
            # A terminal would let the task read what is typed, and push its own input into it.
            if not os.isatty(0):
                os.fstat(0)
                return 0
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._task_stack.callback(os.close, null)
        return null


def write_some(descriptor: int, view: memoryview) -> int:
    """Writes the beginning of ``view``, waiting for a reader where need be; how much it was.

    Raises:
        OSError: nobody reads, or the disk is full.
    """
    while True:
        try:
            return os.write(descriptor, view)
        except BlockingIOError:
            # Somebody made our output non-blocking; it is shared, so it stays that way.
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()
