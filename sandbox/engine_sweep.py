"""Containers of this worker that no task stands for: found by label, killed and removed.

They are what an earlier life left: a host that lost power, a worker that was killed whole, an
engine that did not answer when its container was to be ended.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Final

from stockade.sandbox.engine import Engine
from stockade.sandbox.engine_call import Answer, Calls
from stockade.sandbox.loop import Loop, Timer

log = logging.getLogger(__name__)

_RETRY_S: Final = 2.0
_RETRY_MAX_S: Final = 60.0


class Sweep:
    """Sweeps when asked to, and again until the engine has answered.

    Args:
        in_use: the names of the containers of all tasks that are known.
    """

    def __init__(
        self, loop: Loop, engine: Engine, calls: Calls, in_use: Callable[[], set[str]]
    ) -> None:
        self._loop = loop
        self._engine = engine
        self._calls = calls
        self._in_use = in_use
        self._timer: Timer | None = None
        self._retry_s = _RETRY_S
        self._stopped = False

    def start(self) -> None:
        """Looks now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._stopped:
            return
        if not os.path.exists(self._engine.settings.socket):
            # No engine runs; a client would only say so at greater length.
            self._again()
            return
        self._calls.call(self._engine.list_ours(), self._listed)

    def stop(self) -> None:
        """No more looks."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def _listed(self, answer: Answer) -> None:
        if answer.status != 0:
            log.info("cannot look for left-over containers: %s", answer.error)
            self._again()
            return
        self._retry_s = _RETRY_S
        for name in set(answer.output.split()) - self._in_use():
            log.warning("removing container %s, which an earlier life left", name)
            self._calls.call(self._engine.remove(name), self._removed)

    def _removed(self, answer: Answer) -> None:
        if answer.status != 0 and not answer.is_absent:
            log.warning("cannot remove a left-over container: %s", answer.error)
            self._again()

    def _again(self) -> None:
        if self._timer is None and not self._stopped:
            self._timer = self._loop.call_later(self._retry_s, self.start)
            self._retry_s = min(2 * self._retry_s, _RETRY_MAX_S)
