"""A loaded model: its facts, its lanes, its decode loop, and the checks that come before anything runs."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, Literal, final

import trio

from laneway._admission import Admission
from laneway._decode_loop import DecodeLoop
from laneway._errors import ContextOverflowError, InvalidRequestError, ModelNotLoadedError
from laneway._lane import Lanes
from laneway._tokenizing import Tokenizing, TooManyTokens
from laneway.decoder import LongTextTokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from laneway._admission import Ticket
    from laneway._declarations import Backend
    from laneway._engine import Engine
    from laneway.decoder import Sampling, Tokenizer, Written

LONG_TEXT = 20_000
"""Characters from which tokenising leaves the event loop: about 5 ms of work at SmolLM2's speed."""
SHORT_TEXT = 256
"""Characters below which it never does."""


@final
class Model:
    """What :meth:`Engine.load_model` returns.  It knows its engine, and is of no use after that has closed."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        backend: Backend,
        *,
        parallel: int,
        admission: Literal["requests", "slots"],
        queue_limit: int,
        queue_timeout: float | None,
        on_start: Callable[[Ticket], None],
        on_failed: Callable[[Model, str], None],
    ) -> None:
        self.engine = engine
        self.name = name
        self.parallel = parallel
        self.admission = admission
        self.queue_timeout = queue_timeout
        self.lanes = Lanes(Admission(parallel, queue_limit), name, on_start=on_start)
        self.decode_loop: DecodeLoop | None = None
        self.gone = trio.Event()
        """Set when the model has been unloaded and freed."""
        self._backend = backend
        self._closed: str | None = None
        self._freed = False
        self._tokenizing = Tokenizing()
        if backend.decoder is not None:
            assert backend.tokenizer is not None, "a backend with a decoder has a tokenizer"
            self.decode_loop = DecodeLoop(
                backend.decoder,
                backend.tokenizer,
                model=name,
                on_failed=lambda reason: on_failed(self, reason),
                prefix_cache=backend.prefix_cache,
            )

    def __repr__(self) -> str:
        return f"<laneway.Model {self.name!r} {self.state}>"

    @property
    def state(self) -> str:
        """``loaded``, ``unloading``, ``unloaded`` or ``failed``."""
        if self.gone.is_set():
            return "unloaded"
        if self._closed is not None:
            return "unloading"
        if self.decode_loop is not None and self.decode_loop.failure is not None:
            return "failed"
        return "loaded"

    @property
    def metadata(self) -> Mapping[str, str]:
        """What the loader says of the model: architecture, size, quantisation and the like."""
        return self._backend.metadata

    @property
    def service(self) -> Any:
        """What operations without a decoder work with, as the loader made it; None for language models."""
        return self._backend.service

    @property
    def has_decoder(self) -> bool:
        """Whether this is a language model."""
        return self._backend.decoder is not None

    @property
    def stall_timeout(self) -> float | None:
        """Seconds for which a run may stay paused by its reader."""
        return self._backend.stall_timeout

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to tokens and back.  Raises :class:`InvalidRequestError` on a model that has none."""
        if self._freed:
            raise ModelNotLoadedError(self.name, "it was unloaded")
        if self._backend.tokenizer is None:
            raise InvalidRequestError(f"model {self.name!r} is no language model: it has no tokenizer")
        return self._backend.tokenizer

    @property
    def window(self) -> int:
        """Tokens that one slot holds, prompt and answer together: floor(context_size / parallel), rule A10."""
        decoder = self._backend.decoder
        if decoder is None:
            raise InvalidRequestError(f"model {self.name!r} is no language model: it has no window")
        return decoder.window

    @property
    def context_size(self) -> int:
        """Tokens that all slots hold together."""
        return self._backend.context_size or self.window * self.parallel

    async def state_fingerprint(self, folder: str | None = None) -> bytes | None:
        """What a kept state must come from to be of use here; None if the backend keeps none.

        It covers the weights.  Working it out may take as long as reading them.  A cancel ends the wait.

        :param folder: where the backend may keep what it has worked out about its files; it need not be there
        """
        self.engine._home.check()
        work_out = getattr(self._backend.decoder, "state_fingerprint", None)
        if not callable(work_out):
            return None
        fingerprint: bytes = await work_out(folder)
        return fingerprint

    async def tokenize(
        self, text: str, *, bos: bool = True, special: bool | Written = False, prompt: bool = False
    ) -> list[int]:
        """Tokens of ``text``; a long one is worked on in a thread, and a cancel ends the wait for it at once.

        :param bos: begin with what the model wants at a beginning
        :param special: where the text of a special token, such as a chat marker, is that token: nowhere, everywhere
            (True), or in the parts that a template has written
        :param prompt: the text is a whole prompt: if it certainly has more tokens than a slot can hold, raise
            :class:`ContextOverflowError` instead of working them out (rule A10)
        """
        self.engine._home.check()
        tokenizer = self.tokenizer
        if not self._is_long(tokenizer, text):
            await trio.lowlevel.checkpoint_if_cancelled()
            return tokenizer.tokenize(text, bos=bos, special=special)
        try:
            return await self._tokenizing.run(
                tokenizer, text, bos=bos, special=special, limit=self.window if prompt else None
            )
        except TooManyTokens as error:
            least = error.least
        raise ContextOverflowError(least, self.window, self.context_size, self.parallel, at_least=True)

    def _is_long(self, tokenizer: Tokenizer, text: str) -> bool:
        # A text of many parts is long as well, which some tokenizers can tell.
        if len(text) >= LONG_TEXT or len(text) < SHORT_TEXT:
            return len(text) >= LONG_TEXT
        return isinstance(tokenizer, LongTextTokenizer) and tokenizer.is_long(text)

    def check_prompt(self, prompt: Sequence[int]) -> None:
        """Raise :class:`ContextOverflowError` for a prompt that can never run (rule A10).

        Raises :class:`InvalidRequestError` for what is no prompt at all: a backend that is handed a token which it does
        not know would break for everybody.
        """
        if not prompt:
            raise InvalidRequestError("the prompt has no tokens", "prompt")
        if len(prompt) >= self.window:
            raise ContextOverflowError(len(prompt), self.window, self.context_size, self.parallel)
        try:
            tokens = array("i", list(prompt))  # a list, for bytes would be taken as the array's own memory
        except (TypeError, OverflowError) as error:
            raise InvalidRequestError(f"must be token ids: {error}", "prompt") from None
        size = self.tokenizer.size
        for token in (min(tokens), max(tokens)):
            if not 0 <= token < size:
                raise InvalidRequestError(f"token {token} is not in the vocabulary of {size} entries", "prompt")

    def check_sampling(self, sampling: Sampling) -> None:
        """Raise :class:`InvalidRequestError` if this model cannot sample so (a grammar that does not parse, say)."""
        if self._backend.decoder is None:
            raise InvalidRequestError(f"model {self.name!r} is no language model: it cannot generate")
        if self._freed:
            raise ModelNotLoadedError(self.name, "it was unloaded")
        self._backend.decoder.check(sampling)

    # The engine's side.

    def check_open(self) -> None:
        """Raise :class:`ModelNotLoadedError` if new requests are not taken."""
        if self._closed is not None:
            raise ModelNotLoadedError(self.name, self._closed)
        if self.decode_loop is not None and self.decode_loop.failure is not None:
            raise ModelNotLoadedError(self.name, self.decode_loop.failure)

    def close_door(self, reason: str) -> bool:
        """Take no more requests; whether this was the call that closed it."""
        first = self._closed is None
        if first:
            self._closed = reason
        return first

    async def free(self) -> None:
        """Stop the decode loop, then free the backend, whatever happens."""
        try:
            if self.decode_loop is not None:
                await self.decode_loop.stop()
        finally:
            self._freed = True
            # No request lives any more, but a prompt may be on its way to one, its tokens being made in a thread.
            await self._tokenizing.until_idle()
            try:
                if self._backend.aclose is not None:
                    await self._backend.aclose()
            finally:
                self._closed = "it was unloaded"
