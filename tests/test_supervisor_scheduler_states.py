"""The scheduler's table of states and events."""

from __future__ import annotations

import itertools

import pytest

from stockade.supervisor.scheduler.errors import InvalidTransitionError
from stockade.supervisor.scheduler.states import (
    REPORTED,
    TERMINAL,
    TRANSITIONS,
    Event,
    State,
    next_state,
)


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_every_pair_is_in_the_table_or_an_error(state: State, event: Event) -> None:
    if (state, event) in TRANSITIONS:
        assert next_state(state, event) is TRANSITIONS[state, event]
    else:
        with pytest.raises(InvalidTransitionError):
            next_state(state, event)


def test_the_ends_are_the_four_of_the_protocol() -> None:
    assert {str(state) for state in TERMINAL} == {"success", "failed", "timeout", "cancelled"}


@pytest.mark.parametrize("state", sorted(set(State) - TERMINAL))
@pytest.mark.parametrize("event", list(REPORTED.values()))
def test_every_report_is_taken_in_every_state_before_the_end(state: State, event: Event) -> None:
    assert next_state(state, event) is not State.QUEUED


def test_every_state_can_be_reached_from_the_queue() -> None:
    reached = {State.QUEUED}
    while more := {end for (begin, _), end in TRANSITIONS.items() if begin in reached} - reached:
        reached |= more
    assert reached == set(State)
