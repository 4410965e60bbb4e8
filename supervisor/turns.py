"""Whose turn it is: the line of tasks that wait, and places for those that run."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable

from stockade.sandbox.limits import Limits
from stockade.supervisor.admission import Admission
from stockade.supervisor.live_task import LiveTask, Phase
from stockade.supervisor.planning import Planner
from stockade.supervisor.task_types.base import LoopPlan


class Turns:
    """First come, first served: none overtakes one that needs more.

    Attributes:
        running: the tasks that have a place.

    Args:
        max_concurrency: how many places there are.
        may_begin: whether any task may begin now.
        begin: called with each task that was given its place.
    """

    def __init__(
        self,
        planner: Planner,
        admission: Admission,
        max_concurrency: int,
        *,
        may_begin: Callable[[], bool],
        begin: Callable[[LiveTask], None],
    ) -> None:
        self._planner = planner
        self._admission = admission
        self._max_concurrency = max_concurrency
        self._may_begin = may_begin
        self._begin = begin
        self._line: collections.deque[LiveTask] = collections.deque()
        self.running: set[LiveTask] = set()
        self._claims = 0
        # While loop tasks are kept from starting, those whose turn has come wait here.
        self._kept: list[LiveTask] | None = None

    @property
    def pressure(self) -> str:
        """Why the host's pressure lets nothing start; empty when it does."""
        return self._admission.pressure

    @property
    def waiting(self) -> int:
        """How many tasks wait for a place."""
        waiting = [*self._line, *(self._kept or ())]
        return sum(1 for task in waiting if task.phase is Phase.QUEUED)

    def before(self, task: LiveTask) -> int:
        """How many tasks wait for a place before this one does."""
        queued = itertools.takewhile(lambda each: each is not task, self._line)
        return sum(1 for each in queued if each.phase is Phase.QUEUED)

    def claim(self) -> bool:
        """Whether a place is held for a task that is still to come, until `give_back`."""
        if self._admission.counts:
            # What the task would be promised is not known here: it waits for its turn.
            return False
        if self._kept is None and not self._line and self._is_free(None):
            self._claims += 1
            return True
        return False

    def give_back(self) -> None:
        """Ends a claim."""
        self._claims -= 1

    def wait(self, task: LiveTask) -> None:
        """Puts a task behind all that wait."""
        self._line.append(task)

    def wait_first(self, task: LiveTask) -> None:
        """Puts a task that had a place before all that wait."""
        self.leave(task)
        self._line.appendleft(task)

    def hold(self, task: LiveTask) -> None:
        """Gives a task a place without asking: it runs."""
        self.running.add(task)
        self._admission.promise(task.seq, self._limits_of(task))

    def leave(self, task: LiveTask) -> None:
        """Takes the task's place back, if it has one."""
        self.running.discard(task)
        self._admission.release(task.seq)

    def go_on(self) -> None:
        """Begins what may begin."""
        while self._line:
            task = self._line[0]
            if task.phase is not Phase.QUEUED or task.ended.done():
                self._line.popleft()
                continue
            if self._kept is not None and self._is_loop_task(task):
                self._kept.append(self._line.popleft())
                continue
            if not self._is_free(self._limits_of(task)):
                return
            self._line.popleft()
            self.hold(task)
            self._begin(task)

    def keep_loop_tasks(self) -> list[LiveTask]:
        """Begins no more tasks that run in this process; returns those that do."""
        self._kept = []
        return [task for task in self.running if self._is_loop_task(task)]

    def let_loop_tasks_go(self) -> None:
        """Goes on after `keep_loop_tasks`."""
        kept, self._kept = self._kept or [], None
        self._line.extendleft(reversed(kept))
        self.go_on()

    def _is_free(self, limits: Limits | None) -> bool:
        return (
            self._may_begin()
            and len(self.running) + self._claims < self._max_concurrency
            and self._admission.has_room(limits)
        )

    def _is_loop_task(self, task: LiveTask) -> bool:
        planned = self._planner.plan_if_possible(task.row.dispatch)
        return planned is not None and isinstance(planned.plan, LoopPlan)

    def _limits_of(self, task: LiveTask) -> Limits | None:
        """What the task may come to use; None when it uses nothing or cannot be run."""
        if not self._admission.counts:
            return None
        planned = task.planned or self._planner.plan_if_possible(task.row.dispatch)
        return None if planned is None or isinstance(planned.plan, LoopPlan) else planned.limits
