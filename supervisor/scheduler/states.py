"""The life of one instance, as the scheduler sees it: states, events, and the one table.

    queued -> sending -> dispatched -> running -> success | failed | timeout | cancelled

A report may overtake the answer to the dispatch that caused it, so every state before the end takes
every report. The end is final: what comes after it is answered and ignored.
"""

from __future__ import annotations

import enum
from typing import Final

from stockade.supervisor.scheduler.errors import InvalidTransitionError


class State(enum.StrEnum):
    """Where an instance is; the API's ``status``."""

    QUEUED = "queued"
    SENDING = "sending"
    DISPATCHED = "dispatched"
    RUNNING = "running"
    SUCCESS = "success"
    FAILED = "failed"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"


class Event(enum.Enum):
    """What happens to an instance."""

    SEND = "a worker was chosen and the dispatch is on its way"
    RECOVER = "the scheduler stopped before it knew what the worker answered"
    ACCEPT = "the worker answered the dispatch, or sent its ack"
    REFUSE = "the first dispatch failed, which is final"
    RUN = "reported running"
    SUCCEED = "reported success"
    FAIL = "reported failed"
    TIME_OUT = "reported timeout"
    CANCEL = "cancelled by the scheduler, or reported cancelled"


_ENDINGS: Final = {
    Event.SUCCEED: State.SUCCESS,
    Event.FAIL: State.FAILED,
    Event.TIME_OUT: State.TIMEOUT,
    Event.CANCEL: State.CANCELLED,
}

TRANSITIONS: Final[dict[tuple[State, Event], State]] = {
    (State.QUEUED, Event.SEND): State.SENDING,
    # A queued instance may be one that was on its way when the scheduler stopped: its worker may
    # have it, and speak of it before it is sent again.
    (State.QUEUED, Event.ACCEPT): State.DISPATCHED,
    (State.QUEUED, Event.RUN): State.RUNNING,
    (State.SENDING, Event.RECOVER): State.QUEUED,
    (State.SENDING, Event.ACCEPT): State.DISPATCHED,
    (State.SENDING, Event.REFUSE): State.FAILED,
    (State.SENDING, Event.RUN): State.RUNNING,
    (State.DISPATCHED, Event.ACCEPT): State.DISPATCHED,
    (State.DISPATCHED, Event.REFUSE): State.FAILED,
    (State.DISPATCHED, Event.RUN): State.RUNNING,
    (State.RUNNING, Event.ACCEPT): State.RUNNING,
    (State.RUNNING, Event.REFUSE): State.FAILED,
    (State.RUNNING, Event.RUN): State.RUNNING,
    **{
        (state, event): end
        for state in (State.QUEUED, State.SENDING, State.DISPATCHED, State.RUNNING)
        for event, end in _ENDINGS.items()
    },
}

TERMINAL: Final = frozenset(State) - {state for state, _ in TRANSITIONS}

REPORTED: Final[dict[str, Event]] = {
    "running": Event.RUN,
    "success": Event.SUCCEED,
    "failed": Event.FAIL,
    "timeout": Event.TIME_OUT,
    "cancelled": Event.CANCEL,
}


def next_state(state: State, event: Event) -> State:
    """The state after an event.

    Raises:
        InvalidTransitionError: the pair is not in the table.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise InvalidTransitionError(
            f"cannot take {event.name} in state {state}: not in the table"
        ) from None
