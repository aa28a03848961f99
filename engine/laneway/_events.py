"""What a run tells its reader, and the figures that it ends with.

Pure values: frozen, comparable, without a clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import attrs

if TYPE_CHECKING:
    from collections.abc import Mapping

StopReason = Literal["eos", "length", "stop", "cancelled", "error"]
"""``eos``: an end token; ``length``: max_tokens or the window; ``stop``: a stop string, or the handler's own end.
``cancelled`` and ``error`` occur only on items of a batch (rule R4)."""


@attrs.frozen
class TokenLogprob:
    """One generated token with natural-log probabilities of the model's own distribution.

    ``top`` holds ``(token, logprob)`` pairs, most likely first, as many as ``top_logprobs`` asked for.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@attrs.frozen(kw_only=True)
class CacheReport:
    """What became of the cache of one request (rule K3)."""

    key: str | None
    """None for one that was found by its content."""
    miss: str | None = None
    """Why nothing was taken up; None if there was a state to begin with."""
    ended: Literal["commit", "rollback", "release"] = "release"
    """``commit``: the file is of this turn; ``release``: the last committed one stays; ``rollback``: there is none."""
    reason: str | None = None
    """Why it is no commit."""


@attrs.frozen(kw_only=True)
class Stats:
    """Figures of one request (or of one item of a batch).  Seconds are of the run's clock."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    queue_seconds: float = 0.0
    """From arrival to the first prefill chunk (rule A15)."""
    time_to_first_token: float | None = None
    """From arrival to the first token; None when there was none."""
    tokens_per_second: float | None = None
    """Generated tokens after the first, over the seconds from the first to the last; None below two tokens."""
    average_concurrent_sequences: float | None = None
    """Mean number of sequences in the decode steps that this one took part in; None when there was none."""
    cache: CacheReport | None = None
    """What became of its KV cache on disk; None without one, and while the request has not ended."""


@attrs.frozen
class TextDelta:
    """More text of the answer.  Joined, the deltas are the final text (rule S1)."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()

    def merge(self, later: object) -> TextDelta | None:
        """This delta with ``later`` appended, or None if ``later`` is no text (rule S2)."""
        if isinstance(later, TextDelta):
            return TextDelta(self.text + later.text, self.logprobs + later.logprobs)
        return None


@attrs.frozen
class Progress:
    """How far a long request has come.  Unread progress is replaced by later progress."""

    done: int
    total: int | None = None
    unit: str = "step"
    metrics: Mapping[str, float] = attrs.field(factory=dict)

    def merge(self, later: object) -> Progress | None:
        """``later`` if it is progress too: only the newest matters to a slow reader."""
        return later if isinstance(later, Progress) else None


@attrs.frozen
class Done:
    """The last event of a run that ended well."""

    stop_reason: StopReason
    stats: Stats
    error: Exception | None = None
    """Set on a batch item whose reason is ``cancelled`` or ``error``."""


@attrs.frozen
class BatchEvent:
    """An event of one item of a batch, tagged by the item's id."""

    id: str
    event: TextDelta | Progress | Done

    def merge(self, later: object) -> BatchEvent | None:
        """Both in one, if ``later`` is of the same item and its event merges into this one."""
        if isinstance(later, BatchEvent) and later.id == self.id and not isinstance(self.event, Done):
            merged = self.event.merge(later.event)
            return None if merged is None else BatchEvent(self.id, merged)
        return None


Event = TextDelta | Progress | Done | BatchEvent
