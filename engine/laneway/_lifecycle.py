"""The life of a request, as one table.

Every change of state goes through :func:`advance`; the diagram in the documentation is drawn from :data:`TRANSITIONS`.
Pure: no clock, no tasks.
"""

from __future__ import annotations

import enum


class State(enum.Enum):
    """Where a request is.  The last four are terminal."""

    NEW = "new"
    WAITING = "waiting"
    RUNNING = "running"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"
    REJECTED = "rejected"


class Happening(enum.Enum):
    """What can happen to a request."""

    ARRIVE = "arrive"
    REFUSE = "refuse"
    ADMIT = "admit"
    CANCEL = "cancel"
    COMPLETE = "complete"
    FAIL = "fail"
    END_CANCELLED = "end cancelled"


TERMINAL = frozenset({State.COMPLETED, State.CANCELLED, State.FAILED, State.REJECTED})

TRANSITIONS: dict[State, dict[Happening, State]] = {
    State.NEW: {
        Happening.ARRIVE: State.WAITING,
        Happening.REFUSE: State.REJECTED,
        # An id that was cancelled before its request came (rule C5).
        Happening.END_CANCELLED: State.CANCELLED,
    },
    State.WAITING: {
        Happening.ADMIT: State.RUNNING,
        Happening.CANCEL: State.CANCELLING,
        # The wait was bounded by a queue_timeout and is over (rule A5).
        Happening.REFUSE: State.REJECTED,
        Happening.FAIL: State.FAILED,
    },
    State.RUNNING: {
        Happening.CANCEL: State.CANCELLING,
        Happening.COMPLETE: State.COMPLETED,
        Happening.FAIL: State.FAILED,
    },
    State.CANCELLING: {
        Happening.END_CANCELLED: State.CANCELLED,
        # The cancel came too late (rule C7).
        Happening.COMPLETE: State.COMPLETED,
        Happening.FAIL: State.FAILED,
    },
    State.COMPLETED: {},
    State.CANCELLED: {},
    State.FAILED: {},
    State.REJECTED: {},
}


class IllegalTransition(Exception):  # noqa: N818 - says what was attempted
    """A happening that the state knows nothing of: a fault of the engine itself.  The state has not changed."""


def advance(state: State, happening: Happening) -> State:
    """The state after ``happening``.  Raises :class:`IllegalTransition` where the table has no entry."""
    try:
        return TRANSITIONS[state][happening]
    except KeyError:
        raise IllegalTransition(f"a request that is {state.value} cannot {happening.value}") from None
