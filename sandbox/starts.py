"""Starts: from a Start to a launcher that has its message, in as many slots as it takes."""

from __future__ import annotations

import logging
from typing import Final

from stockade.platform.errors import StockadeError
from stockade.sandbox import protocol
from stockade.sandbox.attempts import Attempts
from stockade.sandbox.containers import client_limits
from stockade.sandbox.engine import RunLine
from stockade.sandbox.errors import ContainerRefusedError, NoEngineError, ProtocolError
from stockade.sandbox.hand_over import Request, Starter, read_request
from stockade.sandbox.outcome import ErrorCode
from stockade.sandbox.pool import Pool
from stockade.sandbox.profiles import Profile
from stockade.sandbox.record import Cause, RecordFile, SlotRecord
from stockade.sandbox.slot import Slot, SlotMaker
from stockade.sandbox.task import Phase
from stockade.sandbox.tasks import Tasks
from stockade.sandbox.telling import Telling

log = logging.getLogger(__name__)

# How a task ends that is refused before it has a slot.
_REFUSALS: Final[dict[type[StockadeError], ErrorCode]] = {
    ContainerRefusedError: ErrorCode.INVALID_REQUEST,
    NoEngineError: ErrorCode.UNSUPPORTED_TASK_TYPE,
}


class Starts:
    """Starts tasks, each once.

    Attributes:
        pool: the slots that wait.
    """

    def __init__(self, tasks: Tasks, attempts: Attempts, telling: Telling) -> None:
        self._tasks = tasks
        self._attempts = attempts
        self._telling = telling
        self._equipment = equipment = tasks.equipment
        settings = equipment.settings
        self._maker = SlotMaker(
            equipment.places, equipment.tree, equipment.uids, equipment.confiner,
            generation=equipment.generation,
        )  # fmt: skip
        self.pool = Pool(
            equipment.loop, self._maker, settings.profile, settings.limits,
            discard=tasks.discard, watch_child=equipment.children.watch,
            least=settings.pool_min, most=settings.pool_max,
        )  # fmt: skip
        self._starter = Starter(
            equipment.places, equipment.uids, equipment.controllers, equipment.confiner
        )
        self._closed = False

    def close(self) -> None:
        """Another spawner starts tasks from now on."""
        self._closed = True
        # Starts that were to be tried again are nobody's now; the supervisor sends them again.
        self._attempts.clear()
        self.pool.close()

    def start(self, start: protocol.Start, fds: list[int]) -> None:
        """Starts a task that is not known yet, or tells how far it has come.

        Raises:
            ProtocolError: the message or its descriptors are not what they should be.
        """
        known = self._tasks.by_seq.get(start.seq)
        if known is not None:
            self._telling.all_of(known)
            return
        if start.seq in self._attempts:
            return
        if self._closed:
            # Sent before Renewed was read. Whoever sent it asks all of us, and sends it again.
            log.info("not started, another spawner is in charge: task seq=%d", start.seq)
            return
        if not self._may_record(start.seq):
            log.error("not started, another spawner has it: task seq=%d", start.seq)
            return
        try:
            Profile(start.profile)
        except ValueError as error:
            raise ProtocolError(f"cannot start task {start.seq}: {error}") from error
        try:
            self._attempts.begin(start, read_request(start, fds))
        except OSError as error:
            reason = f"cannot start the task: {error}"
            self._tasks.not_started(start, ErrorCode.SPAWN_FAILED, reason)
            return
        self.attempt(start.seq)

    def _may_record(self, seq: int) -> bool:
        """Whether nobody has the task. A record that says nothing is of one that died in between.

        Who sends us a Start has asked every living spawner first.
        """
        try:
            record = RecordFile.open(self._equipment.places.record, seq)
        except FileNotFoundError:
            return True
        if record.read().slot is not None:
            record.close()
            return False
        record.remove()
        return True

    def attempt(self, seq: int) -> None:
        """Tries, once, a start that is known to the attempts."""
        attempt = self._attempts.get(seq)
        if attempt is None:
            return
        start, request = attempt.start, attempt.request
        line = None
        try:
            # Whatever spoiled a slot that waited may have spoiled the others.
            take = self._maker.make if attempt.tries else self.pool.take
            if start.container is None:
                made = take(Profile(start.profile), start.limits)
            else:
                line = self._container_line(start, request)
                made = take(Profile.PROCESS, client_limits())
        except StockadeError as error:
            if not self._attempts.again(seq, getattr(error.__cause__, "errno", None)):
                code = _REFUSALS.get(type(error), ErrorCode.SPAWN_FAILED)
                self._tasks.not_started(start, code, str(error))
            return
        self._start_in(made, start, request, line)

    def _start_in(
        self, made: Slot, start: protocol.Start, request: Request, line: RunLine | None
    ) -> None:
        places, containers = self._equipment.places, self._tasks.containers
        header = SlotRecord(
            seq=start.seq, slot=made.name, boot_id=places.token.split()[0],
            launcher_pid=made.launcher_pid, launcher_start=made.launcher_start,
            cgroup=str(made.groups.path) if made.groups is not None else None,
            uid=made.uid, profile=start.profile, limits=start.limits, own_stdio=start.own_stdio,
            container=None if line is None else line.name,
        )  # fmt: skip
        # Before the launcher hears of the task: whoever comes next must be able to find it.
        try:
            record = RecordFile.made(places.record, header)
        except OSError as error:
            self._tasks.discard(made)
            reason = f"cannot start the task: its record cannot be written: {error}"
            self._tasks.not_started(start, ErrorCode.SPAWN_FAILED, reason)
            return
        task = self._tasks.take_on(made, record, header)
        self._equipment.children.watch(made.launcher_pid, lambda _status: task.launcher_exited())
        task.follow()
        try:
            if line is None or containers is None:
                self._starter.hand_over(made, start, request, record.fd)
            else:
                with containers.client(places, made, line, start) as (client, run):
                    self._starter.hand_over(made, client, run, record.fd)
        except (BrokenPipeError, ConnectionResetError):
            # Its exit is told in a moment, and what it said by then.
            log.warning("the launcher of slot %s is gone before its task came", made.name)
        except (OSError, ValueError) as error:
            task.hear_launcher()
            task.kill(Cause.START_DEADLINE, f"cannot start the task: {error}")
        if not start.own_stdio and task.phase is not Phase.OVER:
            # Should we die now: until the supervisor holds the pipe the launcher stays for it.
            self._telling.prepared(task)
        self._tasks.watch_memory()

    def _container_line(self, start: protocol.Start, request: Request) -> RunLine:
        if self._tasks.containers is None:
            raise NoEngineError(
                "cannot run a container: this worker has no engine; install docker or podman,"
                " or set task.container.engine"
            )
        return self._tasks.containers.run_line(start, request)
