"""One task's life in the spawner: started, watched, terminated, killed, seen to be gone, judged."""

from __future__ import annotations

import dataclasses
import enum
import logging
import os
import select
import signal
import time
from collections.abc import Callable
from typing import Final, Protocol

from stockade.platform import pidfd, proc
from stockade.sandbox.accounts import accounts_of
from stockade.sandbox.ceiling import Hits
from stockade.sandbox.kill import InitReach, Reach, ScatteredReach, TreeReach
from stockade.sandbox.launch_message import SAYS_ENDED, SAYS_STARTED
from stockade.sandbox.limits import Ceilings
from stockade.sandbox.loop import Loop, Timer
from stockade.sandbox.outcome import Outcome
from stockade.sandbox.profiles import Profile
from stockade.sandbox.record import Cause, Record, RecordFile, SlotRecord, StartedLine
from stockade.sandbox.slot import Slot
from stockade.sandbox.verdict import Accounts, Moment, judge
from stockade.sandbox.watchdog import PeakSampler, Sampler, Watch
from stockade.sandbox.zygote_message import SETUP_FAILED

log = logging.getLogger(__name__)

# From the kill until nothing may be left; a task in uninterruptible sleep can outlast it.
KILL_WAIT_S: Final = 10.0
# From the kill until the launcher, which then only has to write and exit, is killed with the rest.
LAUNCHER_WAIT_S: Final = 2.0
# Until a step of a task's end is taken again for which the host had nothing to spare.
_AGAIN_S: Final = 1.0
# How often to look where the kernel sends no event: processes without a tree, an adopted record.
_LOOK_S: Final = 0.02
_ADOPTED_LOOK_S: Final = 0.1


class Phase(enum.Enum):
    """Where a task is. CLEARING: its main process is over and whatever it left is being killed."""

    STARTING = enum.auto()
    RUNNING = enum.auto()
    TERMINATING = enum.auto()
    CLEARING = enum.auto()
    OVER = enum.auto()


class Observer(Protocol):
    """Who is told what happens to a task."""

    def task_started(self, task: Task) -> None: ...

    def task_unstarted(self, task: Task) -> None: ...

    def task_over(self, task: Task) -> None: ...

    def launcher_gone(self, task: Task) -> None:
        """Told of a task that is over, if its launcher lingered."""


class Task:
    """A task with its slot and record.

    Attributes:
        outcome: set when phase is OVER.
        survivors: pids that could not be killed; the slot must be set aside.
        lingers: the task is over, and its launcher has only to exit.
    """

    def __init__(
        self, loop: Loop, observer: Observer, slot: Slot, record: RecordFile, header: SlotRecord,
        *, controllers: frozenset[str], degraded: tuple[str, ...], start_deadline_s: float,
    ) -> None:  # fmt: skip
        self.seq = header.seq
        self.slot = slot
        self.record = record
        self.header = header
        self.phase = Phase.STARTING
        self.started: StartedLine | None = None
        self.outcome: Outcome | None = None
        self.survivors: tuple[int, ...] = ()
        self.lingers = False
        self.sampler: Sampler | None = None
        self._loop = loop
        self._observer = observer
        self._controllers = controllers
        self._degraded = degraded
        self._start_deadline_s = start_deadline_s
        self._timers: dict[str, Timer] = {}
        self._events_fd = -1
        self._launcher_is_gone = False
        self.reach = self._make_reach()
        groups = slot.groups
        self._ceiling_before = groups.ceiling.hits() if groups is not None else Hits()
        if "memory" not in controllers:
            self.sampler = Watch(header.limits, self.reach)
        elif groups is not None and not groups.counts_peak:
            self.sampler = PeakSampler(groups.task)

    def _make_reach(self) -> Reach:
        if self.slot.groups is not None:
            return TreeReach(self.slot.groups, self._controllers)
        pid = self.slot.launcher_pid
        reach = InitReach if len(proc.namespaced_pids(pid)) > 1 else ScatteredReach
        return reach(pid, self.slot.launcher_pidfd, None, self.header.uid)

    # Following a launcher of ours, and one that an earlier spawner started.

    def follow(self) -> None:
        """Listens to the launcher that was just handed its message."""
        channel = self.slot.channel
        assert channel is not None
        self._loop.watch(channel.fileno(), select.EPOLLIN, self._on_channel)
        self._timer("start", self._start_deadline_s, self._start_deadline)

    def adopt(self, found: Record) -> None:
        """Follows a live launcher of an earlier spawner, by its record and its pidfd."""
        self._loop.watch(self.slot.launcher_pidfd, select.EPOLLIN, self._on_adopted_exit)
        if found.started is not None:
            self._is_started(found.started)
        else:
            self._timer("start", self._start_deadline_s, self._start_deadline)
        if found.cause is not None:
            # Terminated by the earlier spawner, which may have died before its grace was over.
            self.phase = Phase.TERMINATING
            self._terminate_launcher()
        self._look_at_record()

    def hear_launcher(self) -> None:
        """Takes what the launcher has said so far, which may be why it is gone."""
        self._on_channel(0)

    def _on_channel(self, _events: int) -> None:
        # A packet can be the task's last: then the channel is closed and gone.
        while (channel := self.slot.channel) is not None:
            try:
                packet = channel.recv(4096)
            except BlockingIOError:
                return
            except ConnectionResetError:
                # It ended with our packet unread, and is told so once; what it said comes after.
                continue
            if not packet:
                # The launcher is gone or going; its exit is seen by launcher_exited.
                self._loop.unwatch(channel.fileno())
                return
            if packet == SAYS_STARTED:
                found = self.record.read().started
                if found is not None:
                    self._is_started(found)
                    self._observer.task_started(self)
            elif packet == SAYS_ENDED:
                self.clear()
            elif packet[:1] == SETUP_FAILED:
                assert self.slot.plan is not None
                text = self.slot.plan.program.why_failed(packet[1:])
                self._set_cause(Cause.START_DEADLINE, f"cannot prepare the slot: {text}")

    def _look_at_record(self) -> None:
        """An adopted launcher has no channel to us, so its record is looked at."""
        found = self.record.read()
        if self.phase is Phase.STARTING and found.started is not None:
            self._is_started(found.started)
            self._observer.task_started(self)
        if found.ended is not None or found.failed is not None:
            # It may stay only for what was printed, which we hold by now.
            pidfd.send_signal(self.slot.launcher_pidfd, signal.SIGTERM)
            self.clear()
        elif self.phase not in (Phase.CLEARING, Phase.OVER):
            self._timer("look", _ADOPTED_LOOK_S, self._look_at_record)

    def _on_adopted_exit(self, _events: int) -> None:
        self._loop.unwatch(self.slot.launcher_pidfd)
        self.launcher_exited()

    def _is_started(self, started: StartedLine) -> None:
        if self.header.profile != Profile.PROCESS:
            # The launcher knows the task by its number in the slot's pid namespace.
            started = dataclasses.replace(started, pid=self._pid_on_host(started.pid))
        self.started = started
        self._stop_timer("start")
        if isinstance(self.reach, ScatteredReach):
            self.reach.session = started.pid or None
        if self.phase is Phase.STARTING:
            self.phase = Phase.RUNNING
        limit = self.header.limits.runtime_max
        if limit is not None:
            self._timers["deadline"] = self._loop.call_at(
                started.monotonic + limit, lambda: self._deadline(limit)
            )

    def _pid_on_host(self, own_number: int) -> int:
        try:
            return proc.child_by_own_number(self.slot.launcher_pid, own_number) or 0
        except OSError as error:
            log.warning("task seq=%d runs, and its pid cannot be told: %s", self.seq, error)
            return 0

    @property
    def is_over(self) -> bool:
        """Whether its outcome is known."""
        return self.phase is Phase.OVER

    def sample(self) -> None:
        """Looks once at what the kernel does not count; past memory_max it is killed."""
        if self.sampler is not None and self.phase in (Phase.RUNNING, Phase.TERMINATING):
            evidence = self.sampler.sample()
            if evidence is not None:
                self.kill(Cause.MEMORY, evidence)

    # Ending it.

    def _deadline(self, limit_s: float) -> None:
        self.terminate(Cause.TIMEOUT, f"timeout: ran longer than {limit_s:g}s")

    def _start_deadline(self) -> None:
        if self._set_cause(
            Cause.START_DEADLINE,
            f"cannot start the task: its program did not run within {self._start_deadline_s:g} s",
        ):
            self.clear()

    def terminate(self, cause: Cause, text: str) -> None:
        """SIGTERM to the task, then, after its grace, the kill. The first cause stands."""
        if not self._set_cause(cause, text):
            return
        if self.phase is Phase.STARTING:
            self.clear()
            return
        self.phase = Phase.TERMINATING
        self._terminate_launcher()

    def _terminate_launcher(self) -> None:
        grace_s = self.header.limits.timeout_stop
        pidfd.send_signal(self.slot.launcher_pidfd, signal.SIGTERM)
        if grace_s is not None:
            self._timer("grace", grace_s, self.clear)

    def kill(self, cause: Cause, text: str) -> None:
        """Kills everything in the slot now, without the rest of a grace that may be running."""
        if self._set_cause(cause, text) or self.phase is Phase.TERMINATING:
            self.clear()

    def _set_cause(self, cause: Cause, text: str) -> bool:
        """Records why we end it; False when it is ending or over by itself already."""
        if self.phase not in (Phase.STARTING, Phase.RUNNING):
            return False
        found = self.record.read()
        if found.ended is not None or found.failed is not None:
            return False
        self.record.append_cause(cause, text)
        return True

    def launcher_exited(self) -> None:
        """The launcher is gone. Its record says how the task ended; silence means it was killed."""
        self._launcher_is_gone = True
        if self.phase is not Phase.OVER:
            self.hear_launcher()
        if self.phase is Phase.OVER:
            # Its task was seen to be gone before, and the record may be closed.
            if self.lingers:
                self.lingers = False
                self._stop_timer("launcher")
                self._let_go_of_launcher()
                self._observer.launcher_gone(self)
            return
        found = self.record.read()
        if found.never_started and self.phase is Phase.STARTING:
            # It writes "started" before it lets the task go. What it may have cloned waits for its
            # word and ends without it.
            self._close()
            self._observer.task_unstarted(self)
            return
        if found.ended is None and found.failed is None and found.cause is None:
            self.record.append_cause(
                Cause.LOST, "the launcher was killed from outside the worker and the task with it"
            )
        self.clear()

    def clear(self) -> None:
        """Kills what is left and waits, with a bound, until it is seen to be gone."""
        if self.phase in (Phase.CLEARING, Phase.OVER):
            return
        found = self.record.read()
        # A launcher that has nothing to write down any more need not outlive the rest.
        is_told = self.phase is Phase.STARTING or found.ended is not None
        self.phase = Phase.CLEARING
        for name in list(self._timers):
            self._stop_timer(name)
        self._take(lambda: self._clear(found, is_told=is_told))

    def _take(self, step: Callable[[], None], *, again: bool = False) -> None:
        """Takes a step of the end, again and again while the host has not even a descriptor."""
        if self.phase is not Phase.CLEARING:
            return
        try:
            step()
        except OSError as error:
            if self.phase is not Phase.CLEARING:
                raise
            if not again:
                log.error("task seq=%d cannot be ended yet, tried again: %s", self.seq, error)
            self._timer("again", _AGAIN_S, lambda: self._take(step, again=True))

    def _clear(self, found: Record, *, is_told: bool) -> None:
        if found.ended is not None and self.slot.channel is not None and self.reach.is_left():
            # What the launcher still has to do is to exit, and no outcome waits for that.
            self.lingers = True
            self._finish()
            return
        if self.reach.gone():
            self._finish()
            return
        self._kill(self.reach.kill_launcher_too if is_told else self.reach.kill)
        if self.slot.groups is not None:
            self._events_fd = self.slot.groups.slot.events_fd()
            self._loop.watch(
                self._events_fd, select.EPOLLPRI, lambda _events: self._take(self._check_gone)
            )
        self._timer("launcher", LAUNCHER_WAIT_S, lambda: self._kill(self.reach.kill_launcher_too))
        self._timer("killed", KILL_WAIT_S, lambda: self._take(self._give_up))
        self._take(self._check_gone)

    def _kill(self, way: Callable[[], None]) -> None:
        try:
            way()
        except OSError as error:
            # Never taken for success: what still lives is looked for and named in the outcome.
            log.error("cannot kill task seq=%d slot=%s: %s", self.seq, self.slot.name, error)

    def _check_gone(self) -> None:
        if self.reach.gone():
            self._finish()
        elif self.slot.groups is None:
            # A comet is always somewhere else when one looks: kill again at each look.
            self._kill(self.reach.kill)
            self._timer("look", _LOOK_S, lambda: self._take(self._check_gone))

    def _give_up(self) -> None:
        if not self.reach.gone():
            self.survivors = tuple(self.reach.members()) or (self.slot.launcher_pid,)
            log.error(
                "cannot kill task seq=%d slot=%s survivors=%s: the slot is set aside",
                self.seq, self.slot.name, self.survivors,
            )  # fmt: skip
        self._finish()

    # Judging it.

    def _close(self) -> None:
        self.phase = Phase.OVER
        for name in list(self._timers):
            self._stop_timer(name)
        if self._events_fd >= 0:
            self._loop.unwatch(self._events_fd)
            os.close(self._events_fd)
            self._events_fd = -1
        if self.lingers:
            assert self.slot.channel is not None
            self._loop.unwatch(self.slot.channel.fileno())
            kill = self.reach.kill_launcher_too
            self._timer("launcher", LAUNCHER_WAIT_S, lambda: self._kill(kill))
        else:
            self._let_go_of_launcher()

    def _finish(self) -> None:
        self._take(self._conclude)

    def _conclude(self) -> None:
        outcome = self._judged()
        self.lingers = self.lingers and not self._launcher_is_gone
        self._close()
        if self.slot.groups is not None:
            self.slot.groups.settle()
        self.outcome = outcome
        self.record.append_outcome(outcome)
        self._observer.task_over(self)

    def _judged(self) -> Outcome:
        return judge(
            self.record.read(), self._accounts(), Moment.now(), self.header.limits,
            profile=self.header.profile, degraded=self._degraded, ceilings=self._ceilings(),
        )  # fmt: skip

    def _accounts(self) -> Accounts:
        return accounts_of(
            self.slot.groups, self._controllers, self.sampler, self._ceiling_before, self.survivors
        )

    def _let_go_of_launcher(self) -> None:
        if self.slot.channel is not None:
            self._loop.unwatch(self.slot.channel.fileno())
        self._loop.unwatch(self.slot.launcher_pidfd)
        self.slot.let_go()

    @property
    def start_failure(self) -> int | None:
        """The errno with which its group refused it, if that is how it ended: nothing of it ran."""
        found = self.record.read()
        if found.failed is None or found.cause is not None or found.failed.step != "clone":
            return None
        return found.failed.errno

    def _ceilings(self) -> Ceilings:
        groups = self.slot.groups
        return groups.ceiling.limits if groups is not None else Ceilings()

    def _timer(self, name: str, delay_s: float, callback: Callable[[], None]) -> None:
        self._stop_timer(name)
        self._timers[name] = self._loop.call_at(time.monotonic() + delay_s, callback)

    def _stop_timer(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()
