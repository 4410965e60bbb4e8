"""What a spawner tells its supervisor of its tasks, each with its output pipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stockade.sandbox import protocol
from stockade.sandbox.connection import Connection
from stockade.sandbox.task import Phase, Task

# Of a page, for all but the tasks in it.
_PAGE_FRAME_BYTES = 256


class Telling:
    """Tells over whichever connection there is; without one nothing is said.

    Attributes:
        connection: the supervisor's.
    """

    def __init__(self) -> None:
        self.connection: Connection | None = None
        # Over which connection a task's output pipe went: once is enough for each.
        self._holds_output: dict[int, Connection | None] = {}

    def send(self, message: protocol.Message, fds: Sequence[int] = ()) -> None:
        """Sends a message; ``fds`` stay the caller's."""
        if self.connection is not None:
            self.connection.send(message, fds)

    def prepared(self, task: Task) -> None:
        """The task is being started."""
        self._send_with_output(protocol.Prepared(task.seq), task)

    def started(self, task: Task) -> None:
        """The task's program runs, if it does."""
        if task.started is not None:
            self.send(_started(task))

    def all_of(self, task: Task) -> None:
        """How far the task has come."""
        if task.phase is Phase.OVER:
            assert task.outcome is not None
            self._send_with_output(protocol.Ended(task.seq, task.outcome), task)
        elif task.started is not None:
            self._send_with_output(_started(task), task)

    def page(self, tasks: Mapping[int, Task], after: int) -> None:
        """The tasks beyond ``after``, as many as one message holds."""
        found = sorted(seq for seq in tasks if seq > after)
        listed: list[protocol.ListedTask] = []
        fds: list[int] = []
        size = 0
        for task in (tasks[seq] for seq in found[: protocol.LIST_PAGE]):
            has_output = task.slot.output_fd >= 0 and not task.header.own_stdio
            entry = protocol.ListedTask(
                seq=task.seq,
                pid=task.started.pid if task.started is not None else 0,
                slot=task.slot.name,
                started_at=task.started.unix if task.started is not None else 0.0,
                has_output=has_output,
                outcome=task.outcome,
            )
            size += protocol.encoded_bytes(entry) + 1
            if size > protocol.MAX_MESSAGE_BYTES - _PAGE_FRAME_BYTES and listed:
                break
            if has_output:
                fds.append(task.slot.output_fd)
            listed.append(entry)
        self.send(protocol.Listed(tuple(listed), len(listed) < len(found)), fds)

    def set_aside(self, names: Sequence[str]) -> None:
        """The slots that cannot be used again."""
        self.send(protocol.SetAside(len(names), tuple(names[: protocol.LIST_PAGE])))

    def forget(self, seq: int) -> None:
        """The task's pipe is nobody's any more."""
        self._holds_output.pop(seq, None)

    def _send_with_output(
        self, message: protocol.Prepared | protocol.Started | protocol.Ended, task: Task
    ) -> None:
        if (
            task.header.own_stdio
            or task.slot.output_fd < 0
            or self._holds_output.get(task.seq) is self.connection
        ):
            self.send(message)
            return
        self.send(message, (task.slot.output_fd,))
        self._holds_output[task.seq] = self.connection


def _started(task: Task) -> protocol.Started:
    assert task.started is not None
    return protocol.Started(task.seq, task.started.pid, task.slot.name, task.started.unix)
