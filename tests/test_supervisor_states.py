from __future__ import annotations

import itertools

import pytest

from stockade.supervisor.errors import InvalidTransitionError
from stockade.supervisor.states import (
    TERMINAL,
    TRANSITIONS,
    UNFINISHED,
    Event,
    State,
    next_state,
    sources,
    target,
)

# Written out a second time on purpose: a change of the table has to be made twice.
EXPECTED = {
    ("accepted", "start"): "running",
    ("accepted", "end"): "finished",
    ("running", "requeue"): "accepted",
    ("running", "end"): "finished",
    ("finished", "deliver"): "delivered",
    ("finished", "refuse"): "dead",
    ("dead", "resend"): "finished",
    ("dead", "drop"): "dropped",
}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_every_pair_leads_where_the_design_says_or_is_refused(state: State, event: Event) -> None:
    expected = EXPECTED.get((str(state), str(event)))
    if expected is None:
        with pytest.raises(InvalidTransitionError, match=f"cannot {event} a task that is {state}"):
            next_state(state, event)
    else:
        assert next_state(state, event) == expected


def test_delivered_and_dropped_are_the_ends() -> None:
    assert {State.DELIVERED, State.DROPPED} == TERMINAL


def test_a_task_that_is_accepted_or_running_has_not_ended() -> None:
    assert {State.ACCEPTED, State.RUNNING} == UNFINISHED


def test_every_state_is_reached_from_accepted() -> None:
    reached = {State.ACCEPTED}
    for _ in State:
        reached |= {after for (state, _), after in TRANSITIONS.items() if state in reached}
    assert reached == set(State)


@pytest.mark.parametrize("event", list(Event))
def test_an_event_leads_to_one_state_from_wherever_it_happens(event: Event) -> None:
    assert sources(event)
    assert {next_state(state, event) for state in sources(event)} == {target(event)}


def test_a_finished_task_never_runs_again() -> None:
    after_end = {State.FINISHED}
    for _ in State:
        after_end |= {after for (state, _), after in TRANSITIONS.items() if state in after_end}
    assert not after_end & UNFINISHED
