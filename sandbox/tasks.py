"""The spawner's tasks, from the slot that each is given to the clean-up after it."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable
from typing import Any

from stockade.sandbox import protocol
from stockade.sandbox.attempts import Attempts
from stockade.sandbox.cleaner import Cleaner
from stockade.sandbox.containers import Containers
from stockade.sandbox.engine_task import ContainerTask
from stockade.sandbox.equipment import Equipment
from stockade.sandbox.outcome import ErrorCode, Outcome, Status, reason_of
from stockade.sandbox.profiles import Profile
from stockade.sandbox.record import Cause, RecordFile, SlotRecord, recorded_slots
from stockade.sandbox.settings import Lifetime
from stockade.sandbox.slot import Slot
from stockade.sandbox.task import Phase, Task
from stockade.sandbox.telling import Telling
from stockade.sandbox.watchdog import Rounds

log = logging.getLogger(__name__)


class Tasks:
    """The tasks that are not forgotten yet. Each tells here what happens to it (task.Observer).

    Attributes:
        by_seq: they.
        cleaner: cleans up what they used.
        containers: None without an engine.

    Args:
        changed: called when the last of them may be gone.
    """

    def __init__(
        self, equipment: Equipment, telling: Telling, attempts: Attempts,
        changed: Callable[[], None],
    ) -> None:  # fmt: skip
        self.equipment = equipment
        self.by_seq: dict[int, Task] = {}
        self._telling = telling
        self._attempts = attempts
        self._changed = changed
        settings = equipment.settings
        self.cleaner = Cleaner(
            equipment.loop, equipment.places, equipment.uids, equipment.children.watch,
            on_set_aside=self.tell_set_aside,
            has_projects=equipment.host.project_quota is None,
        )  # fmt: skip
        self.containers: Containers | None = None
        if settings.engine is not None:
            self.containers = Containers(
                equipment.loop, equipment.children, settings.engine, settings.worker_id,
                hidden=(settings.state_dir, settings.runtime_dir), in_use=self._containers_in_use,
                private_network=settings.view.private_network,
            )  # fmt: skip
        self._rounds = Rounds(equipment.loop, self.by_seq)

    def take_on(self, made: Slot, record: RecordFile, header: SlotRecord) -> Task:
        """The task in a slot: a program, or the client of a container."""
        more: dict[str, Any] = {
            "controllers": self.equipment.controllers,
            "degraded": self.equipment.degraded(Profile(header.profile), header.limits),
            "start_deadline_s": self.equipment.settings.start_deadline_s,
        }
        loop = self.equipment.loop
        if header.container is None or self.containers is None:
            task = Task(loop, self, made, record, header, **more)
        else:
            task = ContainerTask(
                loop, self, made, record, header, **more,
                engine=self.containers.engine, calls=self.containers.calls,
            )  # fmt: skip
        self.by_seq[task.seq] = task
        return task

    def watch_memory(self) -> None:
        """Begins to sample what the kernel does not count, if anybody must be sampled."""
        self._rounds.begin()

    def tell_set_aside(self) -> None:
        """Tells which slots cannot be used again."""
        self._telling.set_aside(self.cleaner.set_aside)

    def not_started(self, start: protocol.Start, code: ErrorCode, reason: str) -> None:
        """Tells the outcome of a task that has no record."""
        self._attempts.forget(start.seq)
        status = Status.CANCELLED if code is ErrorCode.CANCELLED else Status.FAILED
        outcome = Outcome(
            status, code, reason_of(reason), profile=start.profile,
            degraded=self.equipment.degraded(Profile(start.profile), start.limits),
        )  # fmt: skip
        self._telling.send(protocol.Ended(start.seq, outcome))
        self._changed()

    def cancel(self, seq: int) -> None:
        """Terminates a task; one that is yet to run never does."""
        task, attempt = self.by_seq.get(seq), self._attempts.get(seq)
        if task is not None:
            task.terminate(Cause.CANCELLED, "cancelled")
        elif attempt is not None:
            self.not_started(attempt.start, ErrorCode.CANCELLED, "cancelled before it started")

    def acknowledge(self, seq: int) -> None:
        """The supervisor has journalled the outcome."""
        task = self.by_seq.get(seq)
        if task is not None and task.phase is Phase.OVER:
            self._forget(task)

    def end_all(self) -> None:
        """Kills all: nobody is left to hear of them."""
        self._attempts.clear()
        for task in list(self.by_seq.values()):
            if task.phase is Phase.OVER:
                self._forget(task)
            else:
                # Over at once, or later: it is forgotten by task_over.
                task.kill(Cause.CANCELLED, "cancelled: the supervisor is gone")

    # What happens to them (task.Observer).

    def task_started(self, task: Task) -> None:
        """Tells the supervisor."""
        if task.started is not None:
            self._attempts.forget(task.seq)
            self._telling.started(task)

    def task_unstarted(self, task: Task) -> None:
        """Tries another slot. The start of an adopted task is the supervisor's to send again."""
        attempt = self._attempts.get(task.seq)
        self._forget(task)
        if attempt is None:
            log.warning("the launcher of slot %s was killed before its task ran", task.slot.name)
            self._telling.send(protocol.Unstarted(task.seq))
        elif not self._attempts.again(task.seq, errno.ESRCH):
            reason = f"cannot start the task: its launcher was killed {attempt.tries + 1} times"
            self.not_started(attempt.start, ErrorCode.SPAWN_FAILED, reason)
        self._clean(task.slot)

    def task_over(self, task: Task) -> None:
        """Tells the supervisor the outcome and begins the clean-up of the slot."""
        assert task.outcome is not None
        if self._attempts.again(task.seq, task.start_failure):
            # Nothing of it ran: without a record it is a start that never was.
            self._forget(task)
        else:
            self._attempts.forget(task.seq)
            self._telling.all_of(task)
        if task.survivors:
            self.cleaner.put_aside(task.slot.name)
        elif task.lingers:
            self.cleaner.expect(task.slot.name)
        else:
            self._clean(task.slot)
        if isinstance(task, ContainerTask) and task.left_container and self.containers is not None:
            self.containers.sweep.start()
        if (
            self._telling.connection is None
            and self.equipment.settings.lifetime is Lifetime.EPHEMERAL
            and task.seq in self.by_seq
        ):
            self._forget(task)

    def launcher_gone(self, task: Task) -> None:
        """The slot can be cleaned up now."""
        self._clean(task.slot)

    # What they leave.

    def discard(self, unused: Slot) -> None:
        """Takes back a slot that no task had: its launcher exits when its channel closes."""
        unused.let_go()
        self._close_output(unused)
        self._clean(unused)

    def _clean(self, used: Slot) -> None:
        self.cleaner.clean(used.name, used.groups, used.uid, used.uid_lock)

    def _forget(self, task: Task) -> None:
        """The outcome is safe with the supervisor: record and output pipe may go."""
        del self.by_seq[task.seq]
        self._telling.forget(task.seq)
        self._close_output(task.slot)
        task.record.remove()
        self._changed()

    def _close_output(self, used: Slot) -> None:
        if used.output_fd >= 0:
            os.close(used.output_fd)
        # Where runtime_dir is in /tmp, what cleans that up may have been here.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(used.name, dir_fd=self.equipment.places.output)

    def _containers_in_use(self) -> set[str]:
        return {
            task.header.container
            for task in self.by_seq.values()
            if task.header.container is not None and task.phase is not Phase.OVER
        } | {
            theirs.container
            for theirs in recorded_slots(self.equipment.places.record, self.by_seq)
            if theirs.container is not None
        }
