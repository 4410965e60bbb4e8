"""The warm pool: slots whose launchers wait, so that a task only needs its own message to start.

The pool refills one slot at a time between other events, never while a start waits. It aims at as
many slots as were taken in a burst, between its least and its most, and comes back down when they
are not used: an idle pool has its least, and no timer.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable
from typing import Final

from stockade.platform.errors import StockadeError
from stockade.sandbox.confinement import same_files
from stockade.sandbox.errors import SandboxSetupError
from stockade.sandbox.limits import Limits
from stockade.sandbox.loop import Loop, Timer
from stockade.sandbox.profiles import Profile
from stockade.sandbox.slot import Slot, SlotMaker

log = logging.getLogger(__name__)

# The pool is refilled once nothing has been started for this long: making a slot takes about as
# long as starting a task, and must not come between two of them, nor between a short task and its
# end.
_QUIET_S: Final = 0.01
_SHRINK_S: Final = 10.0
_RETRY_S: Final = 1.0


class Pool:
    """Ready slots.

    Args:
        profile: of the slots; a task with another one gets a slot made for it.
        limits: what the slots are made with; a task with others has the difference applied.
        discard: cleans up a slot that was never used, its launcher being gone or told to go.
        watch_child: registers a callback for the end of a child, by pid.
        least: how many wait when nothing has happened for long.
        most: how many may wait.
    """

    def __init__(
        self, loop: Loop, maker: SlotMaker, profile: Profile, limits: Limits, *,
        discard: Callable[[Slot], None],
        watch_child: Callable[[int, Callable[[int], None]], None],
        least: int, most: int,
    ) -> None:  # fmt: skip
        self._loop = loop
        self._maker = maker
        self._profile = profile
        self._limits = limits
        self._discard = discard
        self._watch_child = watch_child
        self._least = min(least, most)
        self._most = most
        self._aim = self._least
        self._ready: collections.deque[Slot] = collections.deque()
        self._refill_timer: Timer | None = None
        self._shrink_timer: Timer | None = None
        self._closed = False

    def take(self, profile: Profile, limits: Limits) -> Slot:
        """A slot for a task: a ready one, or one made now.

        Raises:
            SandboxSetupError: none can be made.
        """
        if profile is not self._profile or not same_files(profile, limits, self._limits):
            return self._maker.make(profile, limits)
        slot = self._next_alive()
        if slot is not None:
            try:
                slot.limit(limits, self._limits)
            except OSError as error:
                self._discard(slot)
                raise SandboxSetupError("apply the task's limits", str(error)) from error
        else:
            # A burst came that the pool was too small for.
            self._aim = min(self._most, max(1, 2 * self._aim))
            slot = self._maker.make(profile, limits)
        self._plan_refill(_QUIET_S)
        self._plan_shrink()
        return slot

    def _next_alive(self) -> Slot | None:
        """The longest-waiting slot whose launcher lives; one that does not is told to ``_lost``."""
        for slot in list(self._ready):
            if slot.is_waiting():
                self._ready.remove(slot)
                return slot
        return None

    def fill(self) -> None:
        """Begins to make slots up to the aim, one at a time, also after ``close``."""
        self._closed = False
        self._plan_refill(0.0)

    def _plan_refill(self, delay_s: float) -> None:
        if self._refill_timer is not None:
            self._refill_timer.cancel()
        self._refill_timer = None
        if len(self._ready) < self._aim and not self._closed:
            self._refill_timer = self._loop.call_later(delay_s, self._refill)

    def _refill(self) -> None:
        self._refill_timer = None
        try:
            slot = self._maker.make(self._profile, self._limits)
        except (StockadeError, OSError) as error:
            log.warning("cannot make a slot ahead of need: %s", error)
            self._plan_refill(_RETRY_S)
            return
        self._ready.append(slot)
        self._watch_child(slot.launcher_pid, lambda _status: self._lost(slot))
        self._plan_refill(0.0)

    def _lost(self, slot: Slot) -> None:
        """A waiting launcher was killed from outside. One that was taken is its task's to watch."""
        if slot in self._ready:
            self._ready.remove(slot)
            log.warning("the launcher of the ready slot %s was killed", slot.name)
            self._discard(slot)
            self._plan_refill(_RETRY_S)

    def _plan_shrink(self) -> None:
        if self._shrink_timer is not None:
            self._shrink_timer.cancel()
        self._shrink_timer = None
        if self._aim > self._least and not self._closed:
            self._shrink_timer = self._loop.call_later(_SHRINK_S, self._shrink)

    def _shrink(self) -> None:
        self._shrink_timer = None
        self._aim = max(self._least, self._aim // 2)
        while len(self._ready) > self._aim:
            self._discard(self._ready.pop())
        self._plan_shrink()

    def close(self) -> None:
        """Discards every ready slot; no more are made ahead of need."""
        self._closed = True
        for timer in (self._refill_timer, self._shrink_timer):
            if timer is not None:
                timer.cancel()
        while self._ready:
            self._discard(self._ready.pop())
