"""One task between its dispatch and its journalled end, as the executor holds it."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import os

from stockade.sandbox.outcome import Outcome
from stockade.supervisor.journal import Row
from stockade.supervisor.output import Capture, Fed, OutputStore
from stockade.supervisor.planning import Planned
from stockade.supervisor.process_plan import PackedStart


class Phase(enum.Enum):
    """How far a task has come.

    QUEUED: waits for its turn.
    RECOVERED: the journal of an earlier life says that it runs; the spawner was not asked yet.
    UNSENT: its turn has come; the spawner knows nothing of it.
    SENT: the Start was sent; whether it arrived is not known.
    RUNNING: its program runs.
    ENDED: its outcome is known and on the way into the journal.
    """

    QUEUED = enum.auto()
    RECOVERED = enum.auto()
    UNSENT = enum.auto()
    SENT = enum.auto()
    RUNNING = enum.auto()
    ENDED = enum.auto()


class OutputPipe:
    """Copies what a task prints from its pipe into its capture, a bounded piece at a wake-up."""

    def __init__(self, fd: int, capture: Capture) -> None:
        self._fd = fd
        self._capture = capture
        self._loop = asyncio.get_running_loop()
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._readable)

    def drain(self) -> None:
        """Take what is in the pipe now, which is all when the task is gone, and close it."""
        while self._fd >= 0 and self._capture.feed(self._fd) is Fed.MORE:
            pass
        self.close()

    def close(self) -> None:
        """Stop reading; what the pipe still holds is left to whoever has its other descriptor."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _readable(self) -> None:
        if self._capture.feed(self._fd) is Fed.CLOSED:
            self.close()


@dataclasses.dataclass(slots=True, eq=False)
class LiveTask:
    """The executor's account of one task.

    Attributes:
        row: as the journal has it.
        ended: the outcome, from the spawner or from whoever finds that there will be none.
        packed: kept until the program runs, to be sent again to a spawner that never got it.
        work: the coroutine of a task that runs in the supervisor's loop.
        cancel_reason: empty until somebody asks for the task's end.
        settled: set when the outcome is journalled.
        recovered: it comes from an earlier life, so its output goes on where that one stopped.
        pid: its main process, once it has one.
        unstarted: how often the spawner said that nothing of it ran.
    """

    row: Row
    phase: Phase
    ended: asyncio.Future[Outcome]
    packed: PackedStart | None = None
    capture: Capture | None = None
    output: OutputPipe | None = None
    work: asyncio.Future[Outcome] | None = None
    cancel_reason: str = ""
    settled: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    planned: Planned | None = None
    recovered: bool = False
    pid: int = 0
    unstarted: int = 0

    @property
    def seq(self) -> int:
        return self.row.seq

    @property
    def instance_id(self) -> str:
        return self.row.dispatch.instance_id

    def end(self, outcome: Outcome) -> None:
        """Settle the outcome; the first one stands."""
        if not self.ended.done():
            self.ended.set_result(outcome)

    def open_capture(self, store: OutputStore) -> Capture:
        """Where its output goes; one and the same from the first call on."""
        if self.capture is None:
            output_max = None if self.planned is None else self.planned.limits.output_max
            open_capture = store.reopen if self.recovered else store.open
            self.capture = open_capture(self.seq, output_max)
        return self.capture

    def attach(self, output_fd: int | None, store: OutputStore) -> None:
        """Read what it prints from its pipe, which is ours from now on."""
        if output_fd is None:
            return
        if self.output is not None:
            # The same pipe, told again by another spawner.
            os.close(output_fd)
            return
        self.output = OutputPipe(output_fd, self.open_capture(store))

    def detach(self) -> None:
        """Let go of the pipe of a slot in which nothing ran, if there is one."""
        if self.output is not None:
            self.output.close()
            self.output = None
