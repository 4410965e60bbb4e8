"""The life of a journalled task: its states, its events, and the one table that joins them.

    accepted -> running -> finished -> delivered
        |          |           |  ^
        +----------+-> finished |  | resend
                               v  |
                              dead -> dropped

``accepted -> finished`` is a task that was cancelled or refused before it ran. ``dead`` is a dead
letter: the scheduler refuses its report for good. ``running -> accepted`` (requeue) is a task whose
start was journalled but, as the spawner proves after a crash, never begun.
"""

from __future__ import annotations

import enum
from typing import Final

from stockade.supervisor.errors import InvalidTransitionError


class State(enum.StrEnum):
    """Where a task is. The texts are what the journal holds."""

    ACCEPTED = "accepted"
    RUNNING = "running"
    FINISHED = "finished"
    DELIVERED = "delivered"
    DEAD = "dead"
    DROPPED = "dropped"


class Event(enum.StrEnum):
    """What can happen to a task. Each leads to one state, wherever it is allowed."""

    START = "start"
    REQUEUE = "requeue"
    END = "end"
    DELIVER = "deliver"
    REFUSE = "refuse"
    RESEND = "resend"
    DROP = "drop"


TRANSITIONS: Final[dict[tuple[State, Event], State]] = {
    (State.ACCEPTED, Event.START): State.RUNNING,
    (State.ACCEPTED, Event.END): State.FINISHED,
    (State.RUNNING, Event.REQUEUE): State.ACCEPTED,
    (State.RUNNING, Event.END): State.FINISHED,
    (State.FINISHED, Event.DELIVER): State.DELIVERED,
    (State.FINISHED, Event.REFUSE): State.DEAD,
    (State.DEAD, Event.RESEND): State.FINISHED,
    (State.DEAD, Event.DROP): State.DROPPED,
}

# Nothing can happen to these any more: only they may leave the duplicate check.
TERMINAL: Final[frozenset[State]] = frozenset(State) - {state for state, _ in TRANSITIONS}

# The task has not ended: after a crash these are reconciled with what the spawner knows.
UNFINISHED: Final[frozenset[State]] = frozenset(
    state for (state, event) in TRANSITIONS if event is Event.END
)


def next_state(state: State, event: Event) -> State:
    """The state after ``event``.

    Raises:
        InvalidTransitionError: the event cannot happen in this state.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise InvalidTransitionError(
            f"cannot {event} a task that is {state}: "
            f"possible are {', '.join(sorted(sources(event)))}"
        ) from None


def sources(event: Event) -> frozenset[State]:
    """The states in which ``event`` can happen."""
    return frozenset(state for state, possible in TRANSITIONS if possible is event)


def target(event: Event) -> State:
    """The one state that ``event`` leads to."""
    (state,) = {after for (_, possible), after in TRANSITIONS.items() if possible is event}
    return state
