"""The table of a request's life."""

from __future__ import annotations

import itertools

import pytest

from laneway._lifecycle import TERMINAL, TRANSITIONS, Happening, IllegalTransition, State, advance


def test_the_table_knows_every_state_and_ends_in_the_terminal_ones() -> None:
    assert set(TRANSITIONS) == set(State)
    assert {state for state, moves in TRANSITIONS.items() if not moves} == TERMINAL
    reached = {State.NEW} | {after for moves in TRANSITIONS.values() for after in moves.values()}
    assert reached == set(State)


@pytest.mark.parametrize(("state", "happening"), list(itertools.product(State, Happening)))
def test_what_the_table_does_not_know_is_illegal(state: State, happening: Happening) -> None:
    if happening in TRANSITIONS[state]:
        assert advance(state, happening) is TRANSITIONS[state][happening]
    else:
        with pytest.raises(IllegalTransition, match=f"that is {state.value} cannot {happening.value}"):
            advance(state, happening)


def test_every_live_state_can_reach_each_kind_of_end_that_it_should() -> None:
    ends = {state: {after for after in moves.values() if after in TERMINAL} for state, moves in TRANSITIONS.items()}
    assert ends[State.RUNNING] == {State.COMPLETED, State.FAILED}
    assert ends[State.WAITING] == {State.REJECTED, State.FAILED}
    assert ends[State.CANCELLING] == {State.CANCELLED, State.COMPLETED, State.FAILED}
