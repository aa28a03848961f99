"""A caller's end of a request: events, the result, and the promise that it does not outlive its block (R1-R5)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, final

import attrs
import trio

from laneway._events import Done, Stats

if TYPE_CHECKING:
    from collections.abc import Callable

    from laneway._events import StopReason
    from laneway._request import Request

log = logging.getLogger("laneway.run")


@final
class Run:
    """One live request, as ``async with engine.run(...) as run`` gives it.

    Iterate for its events; the last one of a run that ends well is :class:`Done`.  A run that ends badly raises its
    error from the iteration, and again from :meth:`result`.  One task at a time may iterate or await the result.
    """

    def __init__(self, request: Request, on_dropped: Callable[[Request, BaseException | None], None]) -> None:
        self._request = request
        self._on_dropped = on_dropped
        self._busy = False
        self._error_seen = False
        self._done_given = False

    def __del__(self) -> None:
        # If its block was entered by hand and never left, only this object could end the request or tell its failure.
        failure = self.unseen_error()
        if self._request.attached and (failure is not None or not self._request.ended.is_set()):
            self._on_dropped(self._request, failure)

    def __repr__(self) -> str:
        request = self._request
        return f"<laneway.Run {request.id!r} {request.kind} on {request.model.name!r}: {request.state.value}>"

    @property
    def request_id(self) -> str:
        """The id to cancel this request by."""
        return self._request.id

    @property
    def kind(self) -> str:
        """The operation's kind."""
        return self._request.kind

    @property
    def state(self) -> str:
        """``waiting``, ``running``, ``cancelling``, ``completed``, ``cancelled``, ``failed`` or ``rejected``."""
        return self._request.state.value

    @property
    def stats(self) -> Stats:
        """The figures so far."""
        return collect_stats(self._request)

    async def admitted(self) -> None:
        """Wait until the request has its permit.  Raises its error if it ended before that."""
        self._request.check_home()
        await self._request.turned.wait()
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._request.started_at is None:
            self._raise_error()

    def __aiter__(self) -> Run:
        return self

    async def __anext__(self) -> Any:
        request = self._request
        self._begin_reading()
        try:
            if request.outbox or request.settled.is_set():
                await trio.lowlevel.checkpoint()
            while not request.outbox:
                if request.settled.is_set():
                    # Rule C6: the caller's own cancel goes before ours.
                    await trio.lowlevel.checkpoint_if_cancelled()
                    self._raise_error()
                    if self._done_given:
                        raise StopAsyncIteration
                    self._done_given = True
                    return self._done()
                await request.readable.park()
            return request.get()
        finally:
            self._busy = False

    async def result(self) -> Any:
        """Wait for the end and return what the operation made.  Unread events are dropped.  May be called again."""
        request = self._request
        self._begin_reading()
        try:
            request.discard()
            await request.settled.wait()
            await trio.lowlevel.checkpoint_if_cancelled()
            self._raise_error()
            return request.result
        finally:
            self._busy = False

    def _begin_reading(self) -> None:
        """Rule R5: a second task in the iteration or in ``result()`` is a mistake, and told so."""
        self._request.check_home()
        if self._busy:
            raise trio.BusyResourceError("another task is reading this run: one task iterates or awaits result()")
        self._busy = True

    def _done(self) -> Done:
        result = self._request.result
        if isinstance(result, Done):
            return result
        reason: StopReason = getattr(result, "stop_reason", "stop")
        stats = getattr(result, "stats", None)
        return Done(reason, stats if isinstance(stats, Stats) else self.stats)

    def _raise_error(self) -> None:
        if self._request.error is not None:
            self._error_seen = True
            raise self._request.error

    def unseen_error(self) -> BaseException | None:
        """The failure of an ended run, if no reader has been told yet (rule R4)."""
        if self._error_seen or not self._request.settled.is_set():
            return None
        return self._request.error


def collect_stats(request: Request) -> Stats:
    """One set of figures over all sequences of a request: sums, the earliest first token, the mean concurrency."""
    parts = [tokens.stats for tokens in request.streams]
    if len(parts) == 1:
        return parts[0] if request.cache is None else attrs.evolve(parts[0], cache=request.cache)
    queued = request.started_at if request.started_at is not None else request.ended_at
    firsts = [part.time_to_first_token for part in parts if part.time_to_first_token is not None]
    begun = [
        part.queue_seconds
        for tokens, part in zip(request.streams, parts, strict=True)
        if tokens.first_chunk_at is not None
    ]
    steps = sum(tokens.sequence.decode_steps for tokens in request.streams)
    spans = [span for tokens in request.streams if (span := tokens.span) is not None]
    generated = sum(part.generated_tokens for part in parts)
    seconds = max(last for _, last in spans) - min(first for first, _ in spans) if spans else 0.0
    return Stats(
        prompt_tokens=sum(part.prompt_tokens for part in parts),
        cached_tokens=sum(part.cached_tokens for part in parts),
        generated_tokens=generated,
        queue_seconds=min(begun) if begun else (0.0 if queued is None else queued - request.arrived_at),
        time_to_first_token=min(firsts, default=None),
        tokens_per_second=(generated - 1) / seconds if seconds > 0 else None,
        average_concurrent_sequences=(
            sum(tokens.sequence.concurrency_sum for tokens in request.streams) / steps if steps else None
        ),
        cache=request.cache,
    )
