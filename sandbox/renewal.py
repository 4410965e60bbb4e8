"""Renewal: the installed code takes over as the spawner in charge, beside the one that runs.

The old spawner starts it by the fixed command of every standby and waits, serving on, for its
answer. Only when the new one listens does the old one step back; whatever goes wrong before leaves
it in charge.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
from collections.abc import Callable
from typing import Any, Final

from stockade.platform import pidfd
from stockade.sandbox.children import Children
from stockade.sandbox.loop import Loop
from stockade.sandbox.settings import SpawnerSettings
from stockade.sandbox.standby import command, environment

_ANSWER_S: Final = 60.0


class Renewal:
    """One attempt.

    Args:
        tuning: what the new one takes of the supervisor's wishes; see SpawnerSettings.
        done: called once with the new spawner's answer: ``socket``, or ``error``. In the latter
            case its process is gone.
    """

    def __init__(
        self, loop: Loop, children: Children, settings: SpawnerSettings, generation: int,
        *, tuning: str, done: Callable[[dict[str, Any]], None],
    ) -> None:  # fmt: skip
        self._loop = loop
        self._done = done
        self._said = b""
        self._answers, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        arguments = command(settings, "--generation", str(generation), "--tuning", tuning,
                            "--ready-fd", str(write_end))  # fmt: skip
        os.set_inheritable(write_end, True)
        try:
            self._pid = os.posix_spawn(
                sys.executable, arguments, environment(), setsid=True,
                setsigmask=(), setsigdef=(signal.SIGPIPE, signal.SIGCHLD),
            )  # fmt: skip
        except OSError:
            os.close(self._answers)
            raise
        finally:
            os.close(write_end)
        children.watch(self._pid, self._ended)
        loop.watch(self._answers, select.EPOLLIN, self._readable)
        self._timer = loop.call_later(_ANSWER_S, self._too_late)

    def _readable(self, _events: int) -> None:
        part = os.read(self._answers, 65536)
        self._said += part
        if not part or b"\n" in part:
            self._loop.unwatch(self._answers)
            answer = self._answer()
            if "socket" in answer:
                self._finish(answer)

    def _answer(self) -> dict[str, Any]:
        with contextlib.suppress(ValueError):
            answer = json.loads(self._said)
            if isinstance(answer, dict):
                return answer
        return {"error": "it ended before it was ready; its own log says why"}

    def _too_late(self) -> None:
        self._said = json.dumps({"error": f"it was not ready within {_ANSWER_S:g} s"}).encode()
        pidfd.checked_kill(self._pid, signal.SIGKILL)

    def _ended(self, _status: int) -> None:
        if self._answers >= 0:
            self._finish(self._answer())

    def _finish(self, answer: dict[str, Any]) -> None:
        self._timer.cancel()
        self._loop.unwatch(self._answers)
        os.close(self._answers)
        self._answers = -1
        self._done(answer)
