"""What the engine asks of a decoder backend.

A backend holds the token memory (KV cells) of a fixed number of *slots*.  The decode loop of a model is its only
user: every call but :meth:`Decoder.interrupt`, :meth:`Decoder.end_round`, :meth:`Decoder.verify` and
:meth:`FingerprintedDecoder.state_fingerprint` comes from one Trio task, and none comes while a step, a save or a load
is under way.
``laneway_native.LlamaDecoder`` and ``laneway.testing.ScriptedDecoder`` implement this protocol; a backend of your own
needs nothing else from the engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import attrs

# What a backend raises: re-exported, so that this module is all a backend needs to know.
from laneway._errors import DecodeError as DecodeError
from laneway._errors import InvalidRequestError as InvalidRequestError
from laneway._errors import ModelLoadError as ModelLoadError
from laneway._events import TokenLogprob as TokenLogprob
from laneway.validators import is_number, is_whole, number, of_type, optional, shown, whole

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence

__all__ = [
    "BatchPolicy",
    "Chunk",
    "DecodeError",
    "Decoder",
    "FingerprintedDecoder",
    "InvalidRequestError",
    "LongTextTokenizer",
    "ModelLoadError",
    "Sampling",
    "StepBatch",
    "StepInterrupted",
    "StepResult",
    "TokenLogprob",
    "Tokenizer",
    "TokenizingStopped",
    "Written",
]


class StepInterrupted(Exception):  # noqa: N818 - an outcome that was asked for, not an error
    """A step was stopped by :meth:`Decoder.interrupt`: no token came of it, its sequences must be dropped."""


class TokenizingStopped(Exception):  # noqa: N818 - an outcome that was asked for, not an error
    """The caller of :meth:`LongTextTokenizer.tokenize` has stopped it: there are no tokens."""


def _bias_pairs(value: Mapping[int, float] | Sequence[tuple[int, float]] | None) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    pairs = value.items() if isinstance(value, Mapping) else value
    try:
        return tuple(sorted({_token_id(token): _bias(bias) for token, bias in pairs}.items()))
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"must map token ids to numbers: {error}", "logit_bias") from None


_MOST_DIGITS = 10  # of a token id


def _token_id(value: object) -> int:
    # JSON knows only string keys, so the field's usual clients send "123".
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= _MOST_DIGITS:
        value = int(value)
    if not is_whole(value) or not -(2**31) <= value < 2**31:
        raise ValueError(f"{shown(value)} is no token id")
    return value


def _bias(value: object) -> float:
    if not is_number(value) or value == math.inf:
        raise ValueError(f"a bias is a finite number, or -inf to forbid the token, not {shown(value)}")
    return float(value)


@attrs.frozen(kw_only=True)
class Sampling:
    """How the next token is picked.  Names follow the OpenAI API, the rest of the field's names elsewhere.

    The order: ``logit_bias``; ``repeat_penalty`` (over prompt and answer; a positive logit is divided by it, a negative
    one multiplied, as in the CTRL paper, arXiv:1909.05858), ``frequency_penalty`` times the count and
    ``presence_penalty`` (over the answer alone); then, at ``temperature`` 0, the largest logit, the lowest id among
    equals; else the logits are divided by ``temperature`` and cut by ``top_k``, ``top_p`` (nucleus, arXiv:1904.09751)
    and ``min_p`` (arXiv:2407.01082), in that order, and one token is drawn.  ``logprobs`` are of the model's own
    distribution, before all of this.

    The penalties spare end tokens: the prompt of a chat is full of them, and the answer must be able to end.

    A ``grammar`` (GBNF) forbids what it does not derive.  An end token may come where the answer is complete, and
    nowhere else.  A sequence for which grammar and bias leave no token ends with :class:`DecodeError`, alone.

    Raises :class:`InvalidRequestError` when made with a value out of range.
    """

    temperature: float = attrs.field(default=0.8, validator=number(0.0, 100.0))
    top_k: int = attrs.field(default=40, validator=whole(0, 2**31 - 1))
    """0 keeps all."""
    top_p: float = attrs.field(default=0.95, validator=number(0.0, 1.0))
    min_p: float = attrs.field(default=0.05, validator=number(0.0, 1.0))
    seed: int | None = attrs.field(default=None, validator=optional(whole(0, 2**64 - 1)))
    """None draws one.  The same seed gives the same tokens for the same schedule: the same batches, each with as many
    tokens of each sequence, on one build and processor.  The engine does not promise the same schedule twice, since it
    sizes the chunks of a prompt by time.
    """
    frequency_penalty: float = attrs.field(default=0.0, validator=number(-2.0, 2.0))
    presence_penalty: float = attrs.field(default=0.0, validator=number(-2.0, 2.0))
    repeat_penalty: float = attrs.field(default=1.0, validator=number(0.01, 10.0))
    logit_bias: tuple[tuple[int, float], ...] = attrs.field(default=(), converter=_bias_pairs)
    logprobs: bool = attrs.field(default=False, validator=of_type(bool))
    top_logprobs: int = attrs.field(default=0, validator=whole(0, 20))
    grammar: str | None = attrs.field(default=None, validator=optional(of_type(str)))


@attrs.frozen(kw_only=True)
class BatchPolicy:
    """How a backend wants its batches, and its numbers: the one place where the scheduler looks them up.

    ``contiguous``: a step is fast only if the slots of its decoding sequences are consecutive, so holes are filled by
    moving the last one (split KV).  ``chunk_target`` is the time, in seconds, that one prefill chunk may take while
    others decode; ``idle_chunk_target`` the time while nobody does, and that of a burst of short prompts altogether.
    Chunk sizes, in tokens, are ``chunk_min`` or multiples of ``chunk_quantum`` up to ``chunk_max``: what is computed in
    tiles takes as long for a part of one.  ``chunk_probe`` is the first size, before any was timed.  A chunk may take
    ``chunk_overrun`` of its target more where that fills a tile or ends its prompt: a short rest would cost a pass over
    all weights.

    ``joint_prompts``: a step may take in several prompts at once, together no more than one chunk.

    A decode step makes several tokens of each sequence, at most ``rounds_max``, as many as take about ``rounds_target``
    seconds together: going from step to step costs time that is missed where steps are short.  With 0 it makes one.
    """

    contiguous: bool = False
    joint_prompts: bool = False
    unified_kv: bool = True
    flash_attention: bool = True
    chunk_target: float = 0.1
    idle_chunk_target: float = 0.4
    chunk_quantum: int = 32
    chunk_min: int = 16
    chunk_max: int = 512
    chunk_probe: int = 32
    chunk_overrun: float = 0.3
    rounds_target: float = 0.0
    rounds_max: int = 32

    def choose_slot(self, free: Collection[int]) -> int:
        """The slot for a new sequence: the lowest, so that the slots in use stay close together."""
        return min(free)

    def fill_holes(self, taken: Collection[int]) -> list[tuple[int, int]]:
        """Moves ``(from, to)`` that make the taken slots consecutive from 0; none where holes cost nothing."""
        if not self.contiguous:
            return []
        holes = sorted(set(range(len(taken))).difference(taken))
        beyond = sorted((slot for slot in taken if slot >= len(taken)), reverse=True)
        return list(zip(beyond, holes, strict=True))

    def chunk_size(self, remaining: int, rate: float | None, streams: int) -> int:
        """Tokens of the next prefill chunk.

        ``remaining`` is what the prompt still lacks, ``rate`` the last measured prefill speed in tokens a second (None
        before the first chunk), ``streams`` how many sequences are decoding and wait meanwhile.
        """
        if rate is None:
            wanted = most = float(self.chunk_probe)
        else:
            wanted = rate * (self.chunk_target if streams else self.idle_chunk_target)
            most = wanted * (1 + self.chunk_overrun)
        most = min(most, self.chunk_max)
        if remaining <= most:
            return remaining
        size = round(wanted / self.chunk_quantum) * self.chunk_quantum
        if size > most:
            size = int(most) // self.chunk_quantum * self.chunk_quantum
        return min(remaining, max(self.chunk_min, size))

    def takes_in_burst(self, prompts: int, streams: int, seconds: float) -> bool:
        """Whether one more short prompt may be taken in before the next decode step.

        ``prompts`` are pending and ``streams`` wait; ``seconds`` is what it would make of the intake since the last
        decode step.
        """
        return 2 * prompts >= streams and seconds <= self.idle_chunk_target

    def rounds(self, seconds: float) -> int:
        """Tokens that a decode step should make of each sequence, if one of each takes so many seconds."""
        return (
            max(1, round(min(self.rounds_max, self.rounds_target / seconds))) if seconds else 1
        )  # 0: too short for the clock


@attrs.frozen
class Chunk:
    """One sequence's part of a step: ``tokens`` go into ``slot`` at ``position`` (of the first of them).

    ``sample`` asks for the token after the last of them.
    """

    slot: int
    position: int
    tokens: Sequence[int]
    sample: bool


@attrs.frozen
class StepBatch:
    """One native call: either one decode token of each of several slots, or one chunk of one prompt or, with the
    policy's ``joint_prompts``, of several.

    ``moves`` come first: ``(from, to)`` takes a whole sequence, sampler included, to an empty slot.  Chunks are in
    ascending order of their slots after the moves.  With more than one of ``rounds``, which only decode steps have, the
    tokens that were picked are decoded in turn to pick the next, again and again; a sequence that has picked an end
    token takes part no longer.
    """

    chunks: tuple[Chunk, ...]
    moves: tuple[tuple[int, int], ...] = ()
    rounds: int = 1


@attrs.frozen
class StepResult:
    """What a step gave: the sampled token of each slot that asked for one, and the seconds that the step took.

    ``later`` has the tokens of the rounds after the first.  Where log-probabilities are wanted there is one round.

    ``failures``: slots that could be given no token in the round after their last one, and why; a sequence whose
    grammar and bias leave no token, for example.  Such a sequence ends alone.  Its cells are right, so its peers, which
    have their tokens, go on.
    """

    tokens: Mapping[int, int]
    seconds: float
    logprobs: Mapping[int, TokenLogprob] = attrs.field(factory=dict)
    later: tuple[Mapping[int, int], ...] = ()
    failures: Mapping[int, DecodeError] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Written:
    """Which parts of a text a chat template wrote itself: only there is the text of a control token that token.

    ``spans`` are ranges of characters, the end excluded, in order and apart from each other.  A marker counts if one
    span holds it whole.  ``markers`` are user-defined tokens that this template writes as markers; they are treated
    like control tokens.  Other user-defined tokens are found everywhere, as in any text.
    """

    spans: tuple[tuple[int, int], ...]
    markers: frozenset[int] = frozenset()


@runtime_checkable
class Tokenizer(Protocol):
    """Text to tokens and back.  May be used from any thread, beside a step."""

    @property
    def size(self) -> int:
        """Entries of the vocabulary; token ids are below it."""

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end an answer."""

    @property
    def chat_template(self) -> str | None:
        """The model's jinja2 template for chats, or None if it has none."""

    def special_text(self, name: str) -> str:
        """The text of the special token ``bos`` or ``eos``, as chat templates want it; empty if there is none."""

    @property
    def user_defined(self) -> Mapping[str, int]:
        """The tokens that were added to the vocabulary as whole texts, by their text, without control tokens."""

    def tokenize(self, text: str, *, bos: bool = True, special: bool | Written = False) -> list[int]:
        """Tokens of ``text``.

        ``bos``: begin with what the model wants at a beginning.  ``special``: where the text of a control token is that
        token: nowhere, everywhere (True), or in the parts that a template has written.
        """

    def piece(self, token: int) -> bytes:
        """The bytes that ``token`` stands for in an answer: maybe half a character, empty for special tokens."""


@runtime_checkable
class LongTextTokenizer(Tokenizer, Protocol):
    """A tokenizer that is prepared for long texts, which the engine gives to a worker thread.

    A tokenizer need not be one.  Then the length of a text decides whether it is long, it is not refused before its
    tokens are counted, and a thread that is left behind works to its end.
    """

    def is_long(self, text: str) -> bool:
        """Whether tokenising ``text`` may take longer than the event loop can wait.  Answers in well under 1 ms."""

    def least_tokens(self, text: str) -> int:
        """How few tokens ``text`` can have at the least, found in a small part of the time that tokenising takes.

        0 if nothing is known, as where a tokenizer drops or joins characters.
        """

    def tokenize(
        self, text: str, *, bos: bool = True, special: bool | Written = False, stop: bytearray | None = None
    ) -> list[int]:
        """See :meth:`Tokenizer.tokenize`.

        ``stop`` is one byte.  Another thread may set it to anything but 0, and the call ends soon.
        Raises :class:`TokenizingStopped` then.
        """


@runtime_checkable
class Decoder(Protocol):
    """Token memory and the step.  See the module's text for who may call what, when."""

    @property
    def slots(self) -> int:
        """Sequences that can be held at once, numbered from 0."""

    @property
    def window(self) -> int:
        """Tokens that one slot is promised to hold."""

    @property
    def policy(self) -> BatchPolicy:
        """How batches should look."""

    @property
    def shares_prefixes(self) -> bool:
        """Whether :meth:`copy` and :meth:`cut` work here at all: slots share their cells, and each cell stands alone.

        Either may still refuse a single slot, some of whose cells are gone (a window that slides)."""

    def check(self, sampling: Sampling) -> None:
        """Raise :class:`InvalidRequestError` if this backend cannot sample so.

        A token id may be beyond the vocabulary, a grammar may not parse.  May come at any time.
        """

    def open(self, slot: int, sampling: Sampling, prompt: Sequence[int]) -> None:
        """Take a slot into use that has no sampler: its own begins anew and has seen ``prompt``.

        Cells may be there already, of the prompt's first tokens: from :meth:`copy`, :meth:`load` or :meth:`cut`.
        """

    def drop(self, slot: int) -> None:
        """Forget a slot's cells and sampler.  Dropping an empty slot does nothing."""

    def copy(self, source: int, target: int, length: int) -> None:
        """Give ``target``, an empty slot, the first ``length`` cells of ``source``.

        Raises :class:`DecodeError` where the backend cannot share prefixes, ``target`` then being empty.
        """

    def cut(self, slot: int, length: int) -> None:
        """Forget a slot's sampler, and its cells but the first ``length``, which is at least 1.

        Raises :class:`DecodeError` where the backend cannot cut there; the slot can then only be dropped.
        """

    async def step(self, batch: StepBatch) -> StepResult:
        """Decode the batch and sample.  Never returns before the backend has stopped touching its memory.

        Raises :class:`StepInterrupted` after :meth:`interrupt`, :class:`DecodeError` for a failure.  Cancelling the
        awaiting task does not end it early.
        """

    def interrupt(self) -> None:
        """Stop the step under way, if there is one, as soon as can be.  Safe from any thread."""

    def end_round(self) -> None:
        """Let the step under way, if there is one, end with the round that it is in; what it has made by then counts.

        Somebody has come or left.  A backend whose steps always have one round need do nothing.  Safe from any thread.
        """

    async def save(self, slot: int) -> Callable[[], Awaitable[bytes]]:
        """Copy the whole state of a slot's cells, and return what seals the copy: into bytes that :meth:`load` takes.

        Sealing (a checksum over all of it, say) may take long, so it may be done by any task, beside steps, also after
        :meth:`aclose`.  Both raise :class:`DecodeError` for a failure.
        """

    async def verify(self, state: bytes) -> None:
        """Raise :class:`DecodeError` unless these bytes are whole, undamaged and of this model and its settings.

        May come from any task, beside steps.
        """

    async def load(self, slot: int, state: bytes, length: int, *, verified: bool = False) -> None:
        """Fill an empty slot from saved bytes, and keep the first ``length`` of their cells, which is at least 1.

        ``verified``: :meth:`verify` took these bytes, so their checksum need not be computed again.
        Raises :class:`DecodeError` if they do not fit, or cannot be cut there, the slot then being empty.
        """

    async def aclose(self) -> None:
        """Free everything.  Called once, after the last step."""


@runtime_checkable
class FingerprintedDecoder(Decoder, Protocol):
    """A decoder that says which states are of use to it.  Without that, states are not kept on disk (rule K4)."""

    async def state_fingerprint(self, folder: str | None = None) -> bytes:
        """What two decoders share if one can :meth:`load` what the other saved; the weights are a part of it.

        It may take long, so it must not hold up the event loop; it is asked for by every request that keeps its state
        on disk, and comes from any task, beside steps.  A cancel ends the wait.  ``folder`` is the path
        of a folder in which the backend may keep what it has worked out about its files; it need not be there, and None
        stands for nowhere.
        """
