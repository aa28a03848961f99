"""The answer to one prompt while it is being made: what ``ctx.generate`` hands to a handler."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol, Self

import attrs
import trio

from laneway._errors import DecodeError
from laneway._events import Stats, StopReason, TextDelta, TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType

    from laneway._scheduler import Output, Sequence

log = logging.getLogger("laneway.decode")


@attrs.frozen
class Answer:
    """A finished answer: its text (rule S1), its tokens without the end token, why it ended, and its figures."""

    text: str
    tokens: tuple[int, ...]
    stop_reason: StopReason
    stats: Stats
    logprobs: tuple[TokenLogprob, ...] = ()


@attrs.frozen
class SavedState:
    """What was in a sequence's cells: ``tokens``, first to last, and the backend's own bytes for them.

    ``ctx.generate(..., keep_state=True)`` makes one, ``ctx.generate(..., restore=...)`` takes it.  The last token of an
    answer is mostly not in it, for nothing came after it.  The bytes fit only the model and the settings that they are
    of, and say so themselves.
    """

    tokens: tuple[int, ...] = attrs.field(repr=False)
    data: bytes = attrs.field(repr=False)
    verified: bool = attrs.field(default=False, kw_only=True, repr=False)
    """Whether whoever gives it knows that it is undamaged and of this model, so that nobody need look once more."""

    @property
    def size(self) -> int:
        """Bytes of ``data``."""
        return len(self.data)


class LoopHandle(Protocol):
    """What a :class:`Tokens` needs of the decode loop that feeds it."""

    def add(self, tokens: Tokens) -> None:
        """Let the sequence join at the next step."""

    def remove(self, tokens: Tokens) -> None:
        """Let the sequence leave at the next step."""

    async def verify(self, state: bytes) -> None:
        """Raise :class:`DecodeError` for a saved state that is of no use."""

    def pause(self, tokens: Tokens) -> None:
        """Keep the slot, decode nothing."""

    def resume(self, tokens: Tokens) -> None:
        """Undo :meth:`pause`."""


class Owner(Protocol):
    """The request that a sequence belongs to."""

    id: str
    arrived_at: float
    paused_at: float | None
    streams: list[Tokens]
    closing: bool

    def check_home(self) -> None:
        """Raise :class:`RuntimeError` outside of the engine's own ``trio.run``."""


class Tokens:
    """One sequence's output, for one reader.

    Iterate for :class:`TextDelta` events as they come (unread ones merge), or await :meth:`finish` for the whole.
    With a ``deliver`` callback the deltas go there instead, from the decode loop's own task, and iterating gives none:
    that saves a task switch a token.  The callback must be quick and must not raise; if it raises, the error ends this
    sequence.
    """

    def __init__(
        self,
        loop: LoopHandle,
        sequence: Sequence,
        owner: Owner,
        deliver: Callable[[TextDelta], None] | None = None,
        *,
        restore: SavedState | None = None,
        keep_state: bool = False,
    ) -> None:
        self.sequence = sequence
        self.restore = restore
        self.keep_state = keep_state
        self.wants_state = keep_state
        """False once its block was left by an error or a cancel: nobody is going to ask for the state."""
        self.seal: Callable[[], Awaitable[bytes]] | None = None
        """Makes bytes of the copy that was made of its cells when it ended."""
        self.leaving = False
        self.freed = trio.Event()
        """Set when the slot is free again, or was never given."""
        self.first_chunk_at: float | None = None
        self._loop = loop
        self._deliver = deliver
        self._owner = owner
        self._first_token_at: float | None = None
        self._last_token_at: float | None = None
        self._entered = False
        self._received = 0
        self._parts: list[str] = []
        self._held = ""
        self._logprobs: list[TokenLogprob] = []
        self._unread: TextDelta | None = None
        self._reason: StopReason | None = None
        self._error: BaseException | None = None
        self._ended = trio.Event()
        self._saved: SavedState | None = None
        self._sealing = trio.Lock()
        self._reader = trio.lowlevel.ParkingLot()

    def __repr__(self) -> str:
        state = self._reason or ("failed" if self._error else self.sequence.state.name.lower())
        return f"<laneway.Tokens {state}, {self._received} tokens>"

    # KeyboardInterrupt is held off: a sequence that has joined must be known to its request.
    @trio.lowlevel.enable_ki_protection
    async def __aenter__(self) -> Self:
        self._owner.check_home()
        if self._entered:
            raise RuntimeError("a sequence can be entered once: call ctx.generate() again for another")
        self._check_owner()
        if self.restore is not None and not self.restore.verified:
            await self._verify(self.restore)
            self._check_owner()
        self._loop.add(self)
        self._entered = True
        self._owner.streams.append(self)
        if self._owner.paused_at is not None:
            self.pause()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # The slot is not waited for, or nested blocks would leave one step after the other, and a step that all of them
        # are leaving would not be cut short (rules C3, C9).  The request waits, before its permit goes back.
        if error is not None:
            self.wants_state = False
        self.drop()
        # A last output may still be on its way; whoever has left must not hear of it after saying so.
        self.fail(trio.ClosedResourceError("this sequence was dropped"))
        await trio.lowlevel.cancel_shielded_checkpoint()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextDelta:
        self._check_entered()
        while self._unread is None:
            if self._ended.is_set():
                await trio.lowlevel.checkpoint()
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            await self._reader.park()
        delta, self._unread = self._unread, None
        return delta

    async def finish(self) -> Answer:
        """Wait for the end of the answer.  Raises :class:`DecodeError` or :class:`ModelNotLoadedError` if it failed."""
        self._check_entered()
        await self._ended.wait()
        if self._error is not None:
            raise self._error
        assert self._reason is not None
        return Answer(self.text, self.tokens, self._reason, self.stats, tuple(self._logprobs))

    async def saved_state(self) -> SavedState | None:
        """What was in its cells when it ended, once they are copied and the slot is free: with ``keep_state`` only.

        It ends by its answer, or because its block was left.  None if nothing was in cells, if its block was left by an
        error or a cancel before, if the step that it was in failed, or if copying failed, which is logged.
        """
        self._check_entered()
        if not self.keep_state:
            raise RuntimeError("no state was kept: call ctx.generate(..., keep_state=True)")
        await self.freed.wait()
        # Whoever asks a second time meanwhile waits for the one copy.
        async with self._sealing:
            if self.seal is not None:
                try:
                    self._saved = SavedState(self.sequence.held, await self.seal())
                except DecodeError as error:
                    log.warning("the state of a sequence could not be sealed: %s", error.reason)
                self.seal = None
        return self._saved

    @property
    def restored(self) -> int:
        """How many of the prompt's tokens came from the state that was to be restored; 0 before there is a slot."""
        return self.sequence.restored

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._parts)

    @property
    def made(self) -> str:
        """:attr:`text`, and what is held back because it may become a stop string: what a cancelled answer had."""
        return self.text + self._held

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens so far, without the end token: those that :attr:`text` is of.

        A step that is under way may add one to the sequence that its owner, leaving, never hears of.
        """
        return tuple(self.sequence.output[: self._received])

    @property
    def stats(self) -> Stats:
        """The figures so far."""
        sequence = self.sequence
        generated = self._received
        first, last = self.span or (None, None)
        rate = None
        if first is not None and last is not None and last > first:
            rate = (generated - 1) / (last - first)
        return Stats(
            prompt_tokens=len(sequence.prompt),
            cached_tokens=sequence.cached,
            generated_tokens=generated,
            queue_seconds=0.0 if self.first_chunk_at is None else self.first_chunk_at - self._owner.arrived_at,
            time_to_first_token=None if first is None else first - self._owner.arrived_at,
            tokens_per_second=rate,
            average_concurrent_sequences=(
                sequence.concurrency_sum / sequence.decode_steps if sequence.decode_steps else None
            ),
        )

    @property
    def span(self) -> tuple[float, float] | None:
        """When the first and the last token came, by Trio's clock."""
        if self._first_token_at is None or self._last_token_at is None:
            return None
        return self._first_token_at, self._last_token_at

    def drop(self) -> None:
        """Let the sequence leave; :attr:`freed` tells when its slot is free.  Nothing to do for one that never came."""
        if self._entered:
            self._loop.remove(self)

    def pause(self) -> None:
        """Decode no more of this sequence until :meth:`resume`; it keeps its slot."""
        self._loop.pause(self)

    def resume(self) -> None:
        """Undo :meth:`pause`."""
        self._loop.resume(self)

    # The decode loop's side.

    @property
    def ended(self) -> bool:
        """Whether the outcome is known."""
        return self._ended.is_set()

    def receive(self, output: Output, now: float) -> None:
        """Take one step's output, ``now`` being when its token came."""
        if self._ended.is_set():
            return
        # A closing token is no part of the answer, and its time is none of a token's.
        made = output.tokens - output.closed
        if made:
            self._received += made
            if self._first_token_at is None:
                self._first_token_at = now
            self._last_token_at = now
        self._held = output.held
        if output.text or output.logprob is not None:
            self._push(output)
        if output.error is not None:
            self.fail(output.error)
        elif output.finish_reason is not None:
            self._reason = output.finish_reason
            self._end()

    def forget_states(self) -> None:
        """Let go of the bytes of saved states: nobody can ask for them any more, and readers may keep their runs."""
        self.restore = self.seal = self._saved = None

    def fail(self, error: BaseException) -> None:
        """End with an error, unless the outcome is known already."""
        if not self._ended.is_set():
            self._error = error
            self._end()

    def _check_owner(self) -> None:
        if self._owner.closing:
            raise trio.ClosedResourceError(
                f"the handler of request {self._owner.id!r} has ended, and its permit with it"
            )

    async def _verify(self, restore: SavedState) -> None:
        """Look at a saved state before it is a matter of the decode loop, which has no time for checksums."""
        try:
            await self._loop.verify(restore.data)
        except DecodeError as error:
            log.warning("a saved state is of no use, so it is computed anew: %s", error.reason)
            self.restore = None
            self.sequence.restorable = 0

    def _check_entered(self) -> None:
        if not self._entered:
            raise RuntimeError("the sequence has not joined: use `async with ctx.generate(...) as tokens`")

    def _push(self, output: Output) -> None:
        delta = TextDelta(output.text, () if output.logprob is None else (output.logprob,))
        self._parts.append(output.text)
        self._logprobs.extend(delta.logprobs)
        if self._deliver is not None:
            self._deliver(delta)
            return
        self._unread = delta if self._unread is None else self._unread.merge(delta)
        self._reader.unpark()

    def _end(self) -> None:
        self._ended.set()
        self._reader.unpark_all()
