"""One request between its arrival and the end of its teardown: the record that registry, context and run share."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import attrs
import trio

from laneway._events import BatchEvent, TextDelta
from laneway._lifecycle import State
from laneway._outbox import PAUSE_AT, Outbox

if TYPE_CHECKING:
    from laneway._admission import Ticket
    from laneway._declarations import Operation, Prepared
    from laneway._events import CacheReport
    from laneway._model import Model
    from laneway._tokens import Tokens


@attrs.define(eq=False, kw_only=True)
class Request:
    """Mutable, known by identity.  Times (``arrived_at`` and the like) are of Trio's clock."""

    id: str
    operation: Operation
    model: Model
    prepared: Prepared
    arrived_at: float
    parent: Request | None
    queue_timeout: float | None
    number: int
    """Arrival order in the engine: what the scheduler is fair by (rule A15)."""
    outbox: Outbox
    pausing: bool = False
    """Opened with ``backpressure='pause'``."""
    ticket: Ticket | None = None
    state: State = State.NEW
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    attached: bool = True
    """False once the caller has left its block; the request may go on without it (rule C1)."""
    cancel_reason: str | None = None
    cancel_asked: bool = False
    """A call of ``cancel()`` or ``cancel_all()`` ends it, so its caller wants nothing of what it has made."""
    doom: Exception | None = None
    """What a waiter ends with whose model has failed."""
    started_at: float | None = None
    ended_at: float | None = None
    paused_at: float | None = None
    stall_timeout: float = math.inf
    stall_scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    streams: list[Tokens] = attrs.field(factory=list)
    cache: CacheReport | None = None
    """What became of its KV cache."""
    knocking: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    """Around the task that tries a gate which somebody outside has closed."""
    _said: dict[str | None, list[str]] = attrs.field(factory=dict, init=False, repr=False)
    """Text by the id of its item, None without one: what a handler has said before its first sequence (rule C6)."""
    closing: bool = False
    """The handler has ended: no more sequences join."""
    result: Any = None
    error: BaseException | None = None
    turned: trio.Event = attrs.field(factory=trio.Event)
    """The wait is over: admitted, or ended without that."""
    settled: trio.Event = attrs.field(factory=trio.Event)
    """The outcome is known."""
    ended: trio.Event = attrs.field(factory=trio.Event)
    """Teardown has ended, permit and id are free."""
    readable: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)
    writable: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    @property
    def kind(self) -> str:
        """The operation's kind."""
        return self.operation.kind

    def check_home(self) -> None:
        """Raise :class:`RuntimeError` outside of the engine's own ``trio.run``."""
        self.model.engine._home.check()

    def put(self, event: object) -> None:
        """Hand an event to the reader; at a full outbox (opt-in), pause what feeds it.

        Dropped once the outcome is known, which is the last thing that a reader hears.
        """
        if self.settled.is_set():
            return
        if not self.streams:
            self._keep_said(event)
        self.outbox.put(event)
        self.readable.unpark()
        if self.pausing and self.paused_at is None and self.outbox.full:
            self.paused_at = trio.current_time()
            self.stall_scope.deadline = self.paused_at + self.stall_timeout
            for tokens in self.streams:
                tokens.pause()

    def _keep_said(self, event: object) -> None:
        item = None
        if isinstance(event, BatchEvent):
            item, event = event.id, event.event
        if isinstance(event, TextDelta):
            self._said.setdefault(item, []).append(event.text)

    def get(self) -> object:
        """Take an event for the reader; raises :class:`IndexError` if there is none."""
        event = self.outbox.get()
        # Half empty, not merely below full: a pause and a resume for each token would cost more than they hold back.
        if self.paused_at is not None:
            if len(self.outbox) <= PAUSE_AT // 2:
                self.unpause()
            else:
                # A slow reader is not an absent one.
                self.stall_scope.deadline = trio.current_time() + self.stall_timeout
        return event

    def discard(self) -> None:
        """The reader wants no events any more."""
        self.outbox.discard()
        self.unpause()

    def unpause(self) -> None:
        """Let paused streams go on."""
        if self.paused_at is not None:
            self.paused_at = None
            self.stall_scope.deadline = math.inf
            for tokens in self.streams:
                tokens.resume()
        self.writable.unpark_all()

    def settle(self, *, result: Any = None, error: BaseException | None = None) -> None:
        """Make the outcome known to the reader, once; a later one is dropped (scope ``none``, rule C1)."""
        if not self.settled.is_set():
            self.result = result
            self.error = error
            self.settled.set()
            self.turned.set()
            self.readable.unpark_all()
            # A handler that goes on, unheard, need not wait for a reader who has all that there will be.
            self.unpause()

    def made(self) -> tuple[str, tuple[int, ...]]:
        """Text and tokens of all sequences so far, in the order in which they were asked for.

        Before it comes the text that the handler has handed out, item by item, while it had asked for no sequence.
        """
        said = "".join(part for parts in self._said.values() for part in parts)
        text = said + "".join(tokens.made for tokens in self.streams)
        return text, tuple(token for tokens in self.streams for token in tokens.tokens)
