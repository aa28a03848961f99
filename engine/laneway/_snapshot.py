"""What :meth:`Engine.snapshot` returns: frozen figures of one moment, for people and for tests."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class RequestSnapshot:
    """One live request.  ``age`` is the seconds since it arrived."""

    request_id: str
    kind: str
    state: str
    age: float
    position: int | None = None
    """1 is the oldest waiter of the lane; None for one that does not wait."""
    paused_seconds: float | None = None
    """How long its reader has kept it paused (rule S2); None if it is not paused."""
    slots: int = 0
    """Slots that it holds."""
    slot_waiters: int = 0
    """Its sequences that wait for a slot."""


@attrs.frozen(kw_only=True)
class LaneSnapshot:
    """One lane: its cap (``math.inf``: none), the weight in use, who runs and who waits, oldest first."""

    group: str
    cap: float
    used: int
    queue_limit: int
    running: tuple[RequestSnapshot, ...]
    waiting: tuple[RequestSnapshot, ...]


@attrs.frozen(kw_only=True)
class ModelSnapshot:
    """One model.  ``slot_waiters`` are sequences that wait for a slot; ``steps`` and so on count from its loading."""

    name: str
    state: str
    parallel: int
    lanes: tuple[LaneSnapshot, ...]
    without_lane: tuple[RequestSnapshot, ...]
    sequences: int = 0
    slot_waiters: int = 0
    stalled: tuple[RequestSnapshot, ...] = ()
    steps: int = 0
    decode_steps: int = 0
    tokens: int = 0
    step_seconds: float = 0.0


@attrs.frozen(kw_only=True)
class EngineSnapshot:
    """All models at one moment, in the order in which they were loaded."""

    models: tuple[ModelSnapshot, ...]
    closed: bool

    def model(self, name: str) -> ModelSnapshot:
        """The model of this name.  Raises :class:`KeyError`."""
        for model in self.models:
            if model.name == name:
                return model
        raise KeyError(name)
