"""What a scripted decoder says: the next token as a pure function of cells and sampler.

Pure: no trio, no clock.  The decoder keeps cells and asks here; :func:`expected_answer` plays one sequence alone and
asks here too, so the two can differ only by what the cells really held.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import attrs

from laneway.decoder import InvalidRequestError, Sampling, TokenLogprob
from laneway.testing._tokenizer import ScriptedTokenizer

Script = Mapping[Any, Sequence[int] | str] | Callable[[tuple[int, ...]], Sequence[int] | str | None]
"""Answers written beforehand.  A mapping's keys are whole prompts (tuples of tokens), prompt texts (tokenised with
``bos``, without special tokens), or single first tokens, looked up in that order; a callable gets the prompt's tokens
and returns None where it has nothing to say.  Answers are tokens or text; an end token follows them."""

DEFAULT_END_EVERY = 24
"""On average one sampled token in so many is an end token."""


@attrs.frozen
class ScriptedAnswer:
    """What one sequence, alone, gets: the tokens without the end token, and how it ends."""

    tokens: tuple[int, ...]
    stop_reason: Literal["eos", "length"]
    end_token: int | None
    """The end token that was sampled last; None when the length ended the answer."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of ``tokens`` if the sampling asked for them."""


class Cells:
    """The cells of one slot, oldest first, with a running hash over every (token, position) pair."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self._hash = hashlib.blake2b(digest_size=16)

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, token: int, position: int) -> None:
        """Put one more cell at the end."""
        self.tokens.append(token)
        self.positions.append(position)
        self._hash.update(token.to_bytes(8, "little") + position.to_bytes(8, "little"))

    def first(self, length: int) -> Cells:
        """A copy of the first ``length`` cells."""
        out = Cells()
        for token, position in zip(self.tokens[:length], self.positions[:length], strict=True):
            out.append(token, position)
        return out

    def digest(self, salt: bytes) -> int:
        """The hash of the cells and ``salt`` as a number."""
        state = self._hash.copy()
        state.update(salt)
        return int.from_bytes(state.digest(), "little")


@attrs.frozen
class Sampler:
    """What one slot's sampler was made with."""

    sampling: Sampling
    prompt: tuple[int, ...]
    salt: bytes = attrs.field(repr=False)
    answers: tuple[int, ...] = attrs.field(repr=False)
    ends: tuple[int, ...]
    script: tuple[int, ...] | None


def _salt(sampling: Sampling, prompt: Sequence[int]) -> bytes:
    s = sampling
    seen = (s.repeat_penalty, s.frequency_penalty, s.presence_penalty, s.logit_bias, s.grammar, tuple(prompt))
    # At temperature 0 nothing is drawn, so neither the seed nor what cuts the distribution can matter.
    drawn = None if s.temperature == 0 else (s.temperature, s.top_k, s.top_p, s.min_p, s.seed)
    return repr((seen, drawn)).encode()


@attrs.frozen(kw_only=True)
class ScriptedModel:
    """The pure half of a scripted decoder."""

    vocabulary: ScriptedTokenizer = attrs.field(factory=ScriptedTokenizer)
    end_every: int | None = DEFAULT_END_EVERY
    script: Script | None = None

    def __attrs_post_init__(self) -> None:
        if self.end_every is not None and self.end_every < 1:
            raise ValueError(f"end_every is a whole number of at least 1, or None for no end, not {self.end_every}")

    def check(self, sampling: Sampling) -> None:
        """Raise :class:`InvalidRequestError` for what cannot be sampled."""
        for token, _ in sampling.logit_bias:
            if not 0 <= token < self.vocabulary.size:
                raise InvalidRequestError(
                    f"token {token} is beyond the vocabulary of {self.vocabulary.size}", "logit_bias"
                )
        if sampling.grammar is not None and "root" not in sampling.grammar.split("::=")[0].split():
            raise InvalidRequestError("the grammar does not begin with a rule named root", "grammar")
        forbidden = self._forbidden(sampling)
        if forbidden.issuperset(self.vocabulary.answer_tokens):
            raise InvalidRequestError("every token that an answer is made of is forbidden", "logit_bias")

    def sampler(self, sampling: Sampling, prompt: Sequence[int]) -> Sampler:
        """A sampler that has seen ``prompt`` and nothing else."""
        forbidden = self._forbidden(sampling)
        return Sampler(
            sampling,
            tuple(prompt),
            _salt(sampling, prompt),
            tuple(token for token in self.vocabulary.answer_tokens if token not in forbidden),
            tuple(sorted(self.vocabulary.end_tokens - forbidden)),
            self._answer_for(tuple(prompt)),
        )

    def next_token(self, sampler: Sampler, cells: Cells) -> tuple[int, TokenLogprob | None]:
        """The token after the last of ``cells``, with its probability if the sampling asked for it."""
        number = cells.digest(sampler.salt)
        token = self._scripted(sampler, cells)
        if token is None:
            token = self._hashed(sampler, number)
        return token, self._logprob(sampler, number, token) if sampler.sampling.logprobs else None

    def answer(self, prompt: Sequence[int], sampling: Sampling, max_tokens: int | None, window: int) -> ScriptedAnswer:
        """Play one sequence alone: at most ``max_tokens``, and prompt and answer together at most ``window``."""
        if not 0 < len(prompt) < window:
            raise ValueError(f"a prompt has from 1 to {window - 1} tokens here, not {len(prompt)}")
        room = window - len(prompt)
        limit = room if max_tokens is None else min(max_tokens, room)
        sampler, cells = self.sampler(sampling, prompt), Cells()
        for position, token in enumerate(prompt):
            cells.append(token, position)
        tokens: list[int] = []
        logprobs: list[TokenLogprob] = []
        while len(tokens) < limit:
            token, logprob = self.next_token(sampler, cells)
            if token in self.vocabulary.end_tokens:
                return ScriptedAnswer(tuple(tokens), "eos", token, tuple(logprobs))
            tokens.append(token)
            if logprob is not None:
                logprobs.append(logprob)
            cells.append(token, len(cells))
        return ScriptedAnswer(tuple(tokens), "length", None, tuple(logprobs))

    @staticmethod
    def _forbidden(sampling: Sampling) -> frozenset[int]:
        return frozenset(token for token, bias in sampling.logit_bias if bias == -math.inf)

    def _answer_for(self, prompt: tuple[int, ...]) -> tuple[int, ...] | None:
        if self.script is None:
            return None
        written: Sequence[int] | str | None = None
        if callable(self.script):
            written = self.script(prompt)
        else:
            for key, value in self.script.items():
                if key == prompt or (isinstance(key, str) and tuple(self.vocabulary.tokenize(key)) == prompt):
                    written = value
                    break
            else:
                written = self.script.get(prompt[0]) if prompt else None
        if written is None:
            return None
        return tuple(self.vocabulary.tokenize(written, bos=False) if isinstance(written, str) else written)

    def _scripted(self, sampler: Sampler, cells: Cells) -> int | None:
        if sampler.script is None:
            return None
        made = len(cells) - len(sampler.prompt)
        expected = [*sampler.prompt, *sampler.script[:made]] if made >= 0 else None
        # Cells that are not what the script led to leave it: a mixed-up slot must show in scripted text too.
        if cells.tokens != expected or cells.positions != list(range(len(cells))):
            return None
        return sampler.script[made] if made < len(sampler.script) else min(self.vocabulary.end_tokens)

    def _hashed(self, sampler: Sampler, number: int) -> int:
        if self.end_every is not None and sampler.ends:
            number, rest = divmod(number, self.end_every)
            if rest == 0:
                return sampler.ends[number % len(sampler.ends)]
        return sampler.answers[number % len(sampler.answers)]

    def _logprob(self, sampler: Sampler, number: int, token: int) -> TokenLogprob:
        # Each entry is half as likely as the one before it, so they never add up to more than 1.
        nudge = (number >> 64) % 1000 / 10000
        wanted = min(sampler.sampling.top_logprobs, self.vocabulary.size)
        others = (rank for rank in range(self.vocabulary.size) if rank != token)
        tops = [token, *(next(others) for _ in range(wanted - 1))][:wanted]
        ranked = tuple((entry, -math.log(2) * (rank + 1) - nudge) for rank, entry in enumerate(tops))
        return TokenLogprob(token, -math.log(2) - nudge, ranked)


def expected_answer(
    prompt: Sequence[int],
    sampling: Sampling | None = None,
    max_tokens: int | None = None,
    *,
    window: int = 64,
    vocabulary: ScriptedTokenizer | None = None,
    end_every: int | None = DEFAULT_END_EVERY,
    script: Script | None = None,
) -> ScriptedAnswer:
    """What a sequence that runs alone on a :class:`ScriptedDecoder` made with the same arguments is answered.

    Slot, peers, chunk sizes and speed do not enter.  ``prompt`` and answer together hold at most ``window`` tokens.
    """
    model = ScriptedModel(vocabulary=vocabulary or ScriptedTokenizer(), end_every=end_every, script=script)
    return model.answer(prompt, sampling or Sampling(), max_tokens, window)


def expected_tokens(
    prompt: Sequence[int],
    sampling: Sampling | None = None,
    max_tokens: int | None = None,
    *,
    window: int = 64,
    vocabulary: ScriptedTokenizer | None = None,
    end_every: int | None = DEFAULT_END_EVERY,
    script: Script | None = None,
) -> list[int]:
    """The tokens of :func:`expected_answer`, without the end token."""
    return list(
        expected_answer(
            prompt, sampling, max_tokens, window=window, vocabulary=vocabulary, end_every=end_every, script=script
        ).tokens
    )
