"""A container task: an engine's client in a slot, and a container that must be over before it is.

The client is a task like any other. What is different is its end: whatever ended the client, the
engine is asked what became of the container. One that lives though nobody wants it to is killed;
one that lives though its client is gone (the engine was restarted, the client was killed) is
followed to its true end, under the same deadline. Only when the container was inspected, removed
and seen to be gone is the task over.
"""

from __future__ import annotations

import logging
import signal
import time
from typing import Any, Final

from stockade.platform import pidfd
from stockade.platform.errors import SyscallError
from stockade.sandbox.engine import Engine
from stockade.sandbox.engine_call import CALL_S, Answer, Calls
from stockade.sandbox.engine_state import ContainerState, container_outcome
from stockade.sandbox.outcome import Outcome
from stockade.sandbox.record import Cause
from stockade.sandbox.task import Phase, Task

log = logging.getLogger(__name__)

# While a container is followed without its client.
FOLLOW_LOOK_S: Final = 1.0
# While it is being ended.
_LOOK_S: Final = 0.1
# How long an engine may give no answer, or not end a container, before the task ends without.
ENGINE_WAIT_S: Final = 60.0
# A client that was killed may have left a request behind that still makes the container.
_ABSENT_LOOKS: Final = 3
_ALIVE_LOOKS: Final = 5
# The engine hears of an OOM kill by another way than of the end, at times after it.
_EVIDENCE_LOOKS: Final = 10


class ContainerTask(Task):
    """See the module.

    Attributes:
        left_container: the engine did not say that it is gone.

    Args:
        engine: builds the command lines.
        calls: runs them.
    """

    def __init__(self, *arguments: Any, engine: Engine, calls: Calls, **more: Any) -> None:
        super().__init__(*arguments, **more)
        assert self.header.container is not None
        self._name = self.header.container
        self._engine = engine
        self._calls = calls
        # What would be sampled is the client.
        self.sampler = None
        self.left_container = False
        self._settling = False
        self._settled = False
        self._forced = False
        self._following = False
        self._wish: tuple[Cause, str] | None = None
        self._alive_looks = 0
        self._asking = False
        self._state: ContainerState | None = None
        self._note = ""
        self._absent_looks = 0
        self._evidence_looks = 0
        self._silent_since: float | None = None
        self._ending_since: float | None = None

    # Ending it.

    def _terminate_launcher(self) -> None:
        grace_s = self.header.limits.timeout_stop
        self._calls.call(
            self._engine.stop(self._name, grace_s), self._stopped,
            within_s=(grace_s or 0.0) + CALL_S,
        )  # fmt: skip
        if grace_s is not None:
            self._timer("grace", grace_s, self.clear)

    def _stopped(self, answer: Answer) -> None:
        if answer.status != 0 and self.phase is Phase.TERMINATING and not self._settling:
            # No container yet (an image is being pulled), or no engine: the client is all there is.
            log.info("task seq=%d: cannot stop its container: %s", self.seq, answer.error)
            pidfd.send_signal(self.slot.launcher_pidfd, signal.SIGTERM)

    def _set_cause(self, cause: Cause, text: str) -> bool:
        if self._following and self.phase is Phase.RUNNING:
            # The client's end is on record, and is not the task's.
            if self.record.read().cause is None:
                self.record.append_cause(cause, text)
            return True
        if super()._set_cause(cause, text):
            return True
        if self.phase is Phase.RUNNING and self._wish is None:
            # The client is over, and the engine is asked, perhaps for long, whether all of it is.
            self._wish = (cause, text)
        return False

    def launcher_exited(self) -> None:
        if self.phase is Phase.OVER:
            super().launcher_exited()
            return
        self._launcher_is_gone = True
        found = self.record.read()
        if found.ended is None and found.failed is None and found.cause is None:
            log.warning("task seq=%d: its launcher is gone; looking for its container", self.seq)
        self.clear()

    def clear(self) -> None:
        """The client is over, or the container must be: sees to both, then clears the slot."""
        if self.phase in (Phase.CLEARING, Phase.OVER):
            return
        if self._settled or self.record.read().failed is not None:
            super().clear()
            return
        self._settling = True
        # Whether we ended the task: then nothing of it may go on.
        self._forced = self.record.read().cause is not None
        self._look()

    # Settling what became of the container.

    def _look(self) -> None:
        if not self._asking and not self._settled:
            self._asking = True
            self._calls.call(self._engine.inspect(self._name), self._looked)

    def _look_later(self, delay_s: float) -> None:
        self._timer("engine", delay_s, self._look)

    def _looked(self, answer: Answer) -> None:
        self._asking = False
        if self.phase in (Phase.CLEARING, Phase.OVER):
            return
        if answer.is_absent:
            self._silent_since = None
            self._is_absent()
            return
        try:
            if answer.status != 0:
                raise ValueError(answer.error)
            state = ContainerState.parse(answer.output)
        except ValueError as error:
            self._no_answer(str(error))
            return
        self._silent_since = None
        self._is_there(state)

    def _is_absent(self) -> None:
        if self._state is not None:
            self._settle()
        elif not self._client_is_over():
            # Nothing to end but the client, before it makes the container after all.
            self._end_client()
        elif self._forced and self._absent_looks < _ABSENT_LOOKS:
            self._absent_looks += 1
            self._look_later(_LOOK_S * self._absent_looks)
        else:
            self._settle()

    def _is_there(self, state: ContainerState) -> None:
        if state.lives and not self._forced:
            self._follow()
        elif state.lives:
            self._end(self._engine.kill(self._name))
        elif state.may_be_oom and not self._forced and self._evidence_looks < _EVIDENCE_LOOKS:
            self._evidence_looks += 1
            self._look_later(_LOOK_S)
        elif state.is_over or self._client_is_over():
            # One that is neither over nor alive was made and never started.
            self._state = self._state or state
            self._end(self._engine.remove(self._name))
        else:
            self._end_client()

    def _end(self, argv: list[str]) -> None:
        if self._has_time():
            self._calls.call(argv, lambda _answer: self._look_later(_LOOK_S))

    def _end_client(self) -> None:
        if self._has_time():
            never_ran = self.phase is Phase.STARTING
            self._kill(self.reach.kill_launcher_too if never_ran else self.reach.kill)
            self._look_later(_LOOK_S)

    def _has_time(self) -> bool:
        now = time.monotonic()
        self._ending_since = self._ending_since or now
        if now - self._ending_since <= ENGINE_WAIT_S:
            return True
        self._give_up_on_engine("does not end it")
        return False

    def _follow(self) -> None:
        self._alive_looks += 1
        if self._alive_looks <= _ALIVE_LOOKS:
            # The client heard of the end before the engine tells of it.
            self._look_later(_LOOK_S)
            return
        if not self._following:
            self._following = True
            log.warning(
                "task seq=%d: container %s lives without its client: followed by its name",
                self.seq, self._name,
            )  # fmt: skip
            self._note = "the engine's client was lost, and with it the output after that"
            if self.started is not None and "deadline" not in self._timers:
                # Taken over from an earlier spawner: the deadline is still the first one's.
                self._is_started(self.started)
            if self._wish is not None:
                self.terminate(*self._wish)
        self._look_later(FOLLOW_LOOK_S if self.phase is Phase.RUNNING else _LOOK_S)

    def _no_answer(self, why: str) -> None:
        now = time.monotonic()
        if self._silent_since is None:
            self._silent_since = now
            log.warning("task seq=%d: the engine gives no answer: %s", self.seq, why)
        if now - self._silent_since > ENGINE_WAIT_S:
            self._give_up_on_engine(f"gives no answer ({why})")
        else:
            self._look_later(FOLLOW_LOOK_S)

    def _give_up_on_engine(self, how: str) -> None:
        self.left_container = True
        self._note = f"container {self._name} may still live: the engine {how}"
        log.error("task seq=%d: %s", self.seq, self._note)
        self._settle()

    def _settle(self) -> None:
        found = self.record.read()
        silent = found.ended is None and found.failed is None and found.cause is None
        if silent and self._state is None:
            what = "the task" if found.started is not None else "the task's start"
            self.record.append_cause(
                Cause.LOST, f"the launcher was killed from outside the worker and {what} with it"
            )
        self._settled = True
        self.clear()

    def _client_is_over(self) -> bool:
        found = self.record.read()
        if found.ended is not None or found.failed is not None:
            return True
        try:
            return self.slot.launcher_pidfd < 0 or pidfd.has_ended(self.slot.launcher_pidfd)
        except SyscallError:
            return True

    def _judged(self) -> Outcome:
        return container_outcome(super()._judged(), self._state, self.header.limits, self._note)
