"""What a handler sees of the engine: one object a request."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, final

import trio

from laneway._errors import InvalidRequestError, ModelNotLoadedError
from laneway._kvcache._turns import CacheTurn
from laneway._run import collect_stats
from laneway._scheduler import Sequence, common_prefix
from laneway._text import control_tokens
from laneway._tokens import Tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from laneway._events import CacheReport, Stats, TextDelta
    from laneway._kvcache._caches import CachePlan
    from laneway._model import Model
    from laneway._request import Request
    from laneway._tokens import SavedState
    from laneway.decoder import Sampling


@final
class Context:
    """The engine's side of :class:`laneway.RequestContext`."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._indexes = itertools.count()

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self._request.id

    @property
    def model(self) -> Model:
        """The model that it runs on."""
        return self._request.model

    @property
    def stats(self) -> Stats:
        """Figures over all sequences of this request so far."""
        return collect_stats(self._request)

    @property
    def cancel_asked(self) -> bool:
        """Whether the request ends because of a call of ``cancel()`` or ``cancel_all()``."""
        return self._request.cancel_asked

    def put(self, event: object) -> None:
        """Hand an event to the reader without ever waiting: what a ``deliver`` callback wants."""
        self._request.check_home()
        self._request.put(event)

    async def emit(self, event: object) -> None:
        """Hand an event to the reader; with ``backpressure='pause'``, wait until there is room for more."""
        self._request.check_home()
        # A whole checkpoint, so that a handler which does nothing but emit leaves others their turns.
        await trio.lowlevel.checkpoint()
        self._request.put(event)
        while self._request.paused_at is not None:
            await self._request.writable.park()

    def generate(
        self,
        prompt: list[int],
        sampling: Sampling,
        *,
        max_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        deliver: Callable[[TextDelta], None] | None = None,
        restore: SavedState | None = None,
        keep_state: bool = False,
    ) -> Tokens:
        """Ask for an answer to ``prompt``.  Enter the result to let the sequence join the next step.

        ``stop``: strings that end the answer and are no part of it.  One that is the whole text of a control token also
        stands for that token, whose text is never a part of an answer.

        ``restore``: what it has in common with the prompt need not be computed, but for the prompt's last token.  A
        state that does not load counts as none, and is logged; :attr:`Tokens.restored` tells.  ``keep_state``: let
        :meth:`Tokens.saved_state` give what was in cells when the sequence ended.

        Raises :class:`ContextOverflowError` or :class:`InvalidRequestError` for what can never run, before anything
        has changed.
        """
        request = self._request
        model = request.model
        request.check_home()
        loop = model.decode_loop
        if request.closing:
            raise trio.ClosedResourceError(f"the handler of request {request.id!r} has ended, and its permit with it")
        if loop is None:
            raise ModelNotLoadedError(model.name, "it has no decoder")
        model.check_prompt(prompt)
        model.check_sampling(sampling)
        if max_tokens is not None and max_tokens < 1:
            raise InvalidRequestError(f"must be at least 1, or None, not {max_tokens!r}", "max_tokens")
        if not all(stop):
            raise InvalidRequestError("an empty stop string would stop everything at once", "stop")
        try:
            stop_tokens = control_tokens(stop, model.tokenizer)
        except InvalidRequestError as error:
            raise InvalidRequestError(error.reason, "stop") from None
        sequence = Sequence(
            ticket=request.number,
            index=next(self._indexes),
            prompt=tuple(prompt),
            sampling=sampling,
            max_tokens=max_tokens,
            stop=stop,
            stop_tokens=stop_tokens,
        )
        if restore is not None:
            sequence.restorable = min(common_prefix(restore.tokens, sequence.prompt), len(prompt) - 1)
            if not sequence.restorable:
                restore = None
        return Tokens(loop, sequence, request, deliver, restore=restore, keep_state=keep_state)

    def claim(self, key: Hashable) -> bool:
        """Try to hold one more key until the request ends; False if somebody else does (rule A13)."""
        request = self._request
        request.check_home()
        if request.ticket is None:
            return False
        return request.model.lanes.try_claim(request.ticket, key)

    def cache_turn(self, plan: CachePlan, prompt: list[int]) -> CacheTurn:
        """A turn on the cache file that ``plan`` found, for the length of a block (rule K3).

        ``prepare`` made the plan, and its :class:`Prepared` named the plan's keys and gate.
        """
        self._request.check_home()
        loop = self._request.model.decode_loop
        kept = () if loop is None else tuple(loop.scheduler.kept.values())
        in_memory = max((common_prefix(tokens, tuple(prompt)) for tokens in kept), default=0)
        return CacheTurn(plan, prompt, self.claim, self._note_cache, in_memory)

    def _note_cache(self, report: CacheReport) -> None:
        self._request.cache = report

    async def close(self) -> None:
        """Drop every sequence that the handler left behind, and wait until their slots are free."""
        self._request.closing = True
        for tokens in self._request.streams:
            tokens.drop()
        for tokens in self._request.streams:
            await tokens.freed.wait()
            tokens.forget_states()
