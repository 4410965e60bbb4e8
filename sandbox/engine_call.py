"""Calls of an engine's client from the spawner's loop: none waits, and each has a bound."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import os
import select
import signal
from collections.abc import Callable
from typing import Final

from stockade.sandbox.children import Children
from stockade.sandbox.loop import Loop, Timer

log = logging.getLogger(__name__)

CALL_S: Final = 15.0
OUTPUT_BYTES_MAX: Final = 256 * 1024
# Each is a process of tens of megabytes for tens of milliseconds.
AT_ONCE: Final = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What a client said.

    Attributes:
        status: its exit status; None when it did not end in time, or could not be started.
        error: its standard error in one line, or why there is no answer.
    """

    status: int | None
    output: str
    error: str

    @property
    def is_absent(self) -> bool:
        """The engine knows no such container: said by itself, not concluded from silence."""
        words = self.error.lower()
        return self.status not in (0, None) and (
            "no such container" in words or "no such object" in words
        )


Done = Callable[[Answer], None]


class Calls:
    """Starts clients, some at once, the others in turn.

    Args:
        environment: all of a client's environment.
    """

    def __init__(self, loop: Loop, children: Children, environment: dict[str, str]) -> None:
        self._loop = loop
        self._children = children
        self._environment = environment
        self._waiting: collections.deque[tuple[list[str], Done, float]] = collections.deque()
        self._running = 0

    @property
    def pending(self) -> int:
        """Calls that were not answered yet."""
        return self._running + len(self._waiting)

    def call(self, argv: list[str], done: Done, *, within_s: float = CALL_S) -> None:
        """Runs ``argv`` and calls ``done`` once, never before this returns."""
        self._waiting.append((argv, done, within_s))
        self._loop.call_later(0, self._start)

    def _start(self) -> None:
        while self._waiting and self._running < AT_ONCE:
            argv, done, within_s = self._waiting.popleft()
            self._running += 1
            _Call(
                self._loop, self._children, argv, environment=self._environment,
                within_s=within_s, done=self._ended(done),
            )  # fmt: skip

    def _ended(self, done: Done) -> Done:
        def ended(answer: Answer) -> None:
            self._running -= 1
            self._loop.call_later(0, self._start)
            done(answer)

        return ended


class _Call:
    def __init__(
        self, loop: Loop, children: Children, argv: list[str], *, environment: dict[str, str],
        within_s: float, done: Done,
    ) -> None:  # fmt: skip
        self._loop = loop
        self._done = done
        self._within_s = within_s
        self._pid = 0
        self._late = False
        self._timer: Timer | None = None
        self._said: dict[int, bytearray] = {}
        pipes: list[tuple[int, int]] = []
        try:
            # Extended, so that the first is in it when the second cannot be made.
            pipes.extend(os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK) for _ in range(2))
            self._output, self._error = (read_end for read_end, _ in pipes)
            self._pid = os.posix_spawn(
                argv[0], argv, environment, setsid=True, setsigmask=(),
                setsigdef=(signal.SIGPIPE, signal.SIGCHLD, signal.SIGINT, signal.SIGHUP),
                file_actions=(
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, pipes[0][1], 1),
                    (os.POSIX_SPAWN_DUP2, pipes[1][1], 2),
                ),
            )  # fmt: skip
        except OSError as error:
            for read_end, _ in pipes:
                os.close(read_end)
            text = f"cannot start {argv[0]}: {error.strerror}"
            loop.call_later(0, lambda: done(Answer(None, "", text)))
            return
        finally:
            for _, write_end in pipes:
                os.close(write_end)
        for fd in (self._output, self._error):
            self._said[fd] = bytearray()
            loop.watch(fd, select.EPOLLIN, lambda _events, fd=fd: self._read(fd))  # type: ignore[misc]
        children.watch(self._pid, self._exited)
        self._timer = loop.call_later(within_s, self._too_late)

    def _read(self, fd: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(fd, 65536):
                kept = self._said[fd]
                kept += piece[: OUTPUT_BYTES_MAX - len(kept)]
            self._loop.unwatch(fd)

    def _too_late(self) -> None:
        self._late = True
        # Our own child, not reaped yet: the number is still its.
        os.kill(self._pid, signal.SIGKILL)

    def _exited(self, wait_status: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for fd in (self._output, self._error):
            self._read(fd)
            self._loop.unwatch(fd)
            os.close(fd)
        if self._late:
            answer = Answer(None, "", f"the engine did not answer within {self._within_s:g} s")
        else:
            error = self._said[self._error].decode("utf-8", "replace")
            answer = Answer(
                os.waitstatus_to_exitcode(wait_status),
                self._said[self._output].decode("utf-8", "replace"),
                " ".join(error.split())[:500],
            )
        self._done(answer)
