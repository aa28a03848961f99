"""What the engine tells observers about a request: plain values, made when something happens."""

from __future__ import annotations

import attrs

from laneway._lifecycle import TERMINAL

_ENDS = frozenset(state.value for state in TERMINAL)


@attrs.frozen(kw_only=True)
class RequestRecord:
    """One request at one moment.  Times are seconds of the run's clock (``trio.current_time()``)."""

    request_id: str
    kind: str
    model: str
    """The name of the model."""
    state: str
    """Where the request is after what just happened: ``waiting``, ``running``, ``cancelling``, or an ``outcome``."""
    queued_at: float
    """When it arrived."""
    started_at: float | None = None
    """When its permit was granted; None before, and for one that never ran."""
    ended_at: float | None = None
    """When its teardown had ended; None before."""
    ticket: int | None = None
    """Its place in the model's order of arrival.  None for one that took no ticket: refused on arrival, or no lane."""
    lane: str = ""
    """The lane group; empty for the model's own lane."""
    weight: int = 1
    """Permits that it asked for (rule A12)."""
    error: str | None = None
    """Why it was cancelled or refused, or the type and text of what it failed with.  None while nothing went wrong."""

    @property
    def outcome(self) -> str | None:
        """``completed``, ``cancelled``, ``failed`` or ``rejected``; None before the end."""
        return self.state if self.state in _ENDS else None
