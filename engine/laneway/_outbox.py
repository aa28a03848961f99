"""What a run has said and its reader has not read yet (rule S2).  Pure."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Hashable

PAUSE_AT = 16
"""Unread events at which a run with ``backpressure='pause'`` is paused."""


@attrs.define(eq=False)
class _Entry:
    event: object
    stream: Hashable


class Outbox:
    """A queue in which an event merges into the unread one before it of the same stream, where both allow it.

    A stream is an item of a batch (its events carry an ``id``), or the run itself.  Events merge through a method
    ``merge(later) -> event | None`` of their own; what has none is kept apart, in order.  With ``merging=False``
    nothing merges and :attr:`full` asks for a pause.
    """

    __slots__ = ("_discarding", "_entries", "_last", "_merging")

    def __init__(self, *, merging: bool = True) -> None:
        self._merging = merging
        self._entries: deque[_Entry] = deque()
        self._last: dict[Hashable, _Entry] = {}
        self._discarding = False

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def full(self) -> bool:
        """Whether the writer should pause."""
        return not self._merging and len(self._entries) >= PAUSE_AT

    def put(self, event: object) -> None:
        """Add an event.  Never waits, never fails for want of room."""
        if self._discarding:
            return
        stream = getattr(event, "id", None)
        last = self._last.get(stream) if self._merging else None
        if last is not None:
            merge = getattr(last.event, "merge", None)
            merged = None if merge is None else merge(event)
            if merged is not None:
                last.event = merged
                return
        entry = _Entry(event, stream)
        self._entries.append(entry)
        self._last[stream] = entry

    def get(self) -> object:
        """Take the oldest event.  Raises :class:`IndexError` if there is none."""
        entry = self._entries.popleft()
        if self._last.get(entry.stream) is entry:
            del self._last[entry.stream]
        return entry.event

    def discard(self) -> None:
        """Forget what is unread, and everything to come: the reader wants the result alone."""
        self._discarding = True
        self._entries.clear()
        self._last.clear()
