"""The C sampler on its own, for tests."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from laneway.decoder import Sampling, TokenLogprob
from laneway_native import Model
from laneway_native._decoder import native_sampling, tables_of
from laneway_native._errors import check, new_error
from laneway_native._ffi import ffi, lib
from laneway_native._grammar import GrammarLimits


class NativeSampler:
    """Picks from rows of logits that a test makes up."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._choice = ffi.new("laneway_choice *")
        self._error = new_error()

    def pick(self, logits: Sequence[float]) -> int:
        """The next token; the row is not changed."""
        row = array("f", logits)
        buffer = ffi.from_buffer("float[]", row)
        check(lib.laneway_sampler_pick(self._handle, buffer, len(row), self._choice, self._error), self._error)
        return int(self._choice.token)

    @property
    def work(self) -> int:
        """What following the grammar has cost in the last pick, in places looked at."""
        return int(lib.laneway_sampler_grammar_work(self._handle))

    @property
    def logprob(self) -> TokenLogprob:
        """Of the last pick, if they were asked for."""
        choice = self._choice
        top = zip(choice.top_tokens[0 : choice.top_count], choice.top_logprobs[0 : choice.top_count], strict=True)
        return TokenLogprob(choice.token, choice.logprob, tuple(top))


@contextmanager
def native_sampler(
    sampling: Sampling,
    prompt: Sequence[int] = (),
    model: Model | None = None,
    limits: GrammarLimits | None = None,
) -> Iterator[NativeSampler]:
    """A sampler that has seen ``prompt``; a grammar needs ``model``."""
    tables = None
    if sampling.grammar is not None:
        assert model is not None
        tables = tables_of(model, sampling.grammar)
    native = native_sampling(sampling, tables, limits)
    error = new_error()
    out = ffi.new("laneway_sampler **")
    tokens = ffi.new("int32_t[]", list(prompt))
    handle = ffi.NULL if model is None else model.handle
    check(lib.laneway_sampler_new(handle, native.struct, tokens, len(prompt), out, error), error)
    try:
        yield NativeSampler(out[0])
    finally:
        lib.laneway_sampler_free(out[0])
