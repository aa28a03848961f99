"""A decoder without a model: every token is a hash of what its slot really holds.

An engine that mixes up two slots, loses a cell, decodes one twice or lets a cancelled request disturb a peer gets other
tokens than :func:`expected_answer` says.  What breaks the protocol of :mod:`laneway.decoder` raises at once.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter, deque
from typing import TYPE_CHECKING, NoReturn

import attrs
import trio

from laneway.decoder import BatchPolicy, DecodeError, InvalidRequestError, StepInterrupted, StepResult
from laneway.testing._scripted_model import DEFAULT_END_EVERY, Cells, Sampler, ScriptedAnswer, ScriptedModel
from laneway.testing._tokenizer import ScriptedTokenizer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

    from laneway.decoder import Chunk, Sampling, StepBatch, TokenLogprob
    from laneway.testing._scripted_model import Script

SCRIPTED_POLICY = BatchPolicy(chunk_quantum=4, chunk_min=4, chunk_max=16, chunk_probe=8)
"""Small chunks, so that prompts which fit a test's window still take several."""

_STATE_MAGIC = b"laneway scripted cells 1\n"
_STATE_HEAD = struct.Struct("<II")  # vocabulary size, number of cells
_STATE_CELL = struct.Struct("<QQ")  # token, position
_CHECKSUM_SIZE = 16


class ProtocolViolation(AssertionError):  # noqa: N818 - what happened, like the assertion that it is
    """The decoder's user broke the protocol of :mod:`laneway.decoder`: a bug of the engine, never of a request."""


@attrs.frozen
class Call:
    """One call that a scripted decoder took, for assertions about order.

    ``name`` is the method's; ``slot`` the slot it was about (None for ``step`` and ``aclose``); ``detail`` is the
    batch of a step, ``(source, length)`` of a copy, the length of a cut or load and the prompt of an open, else
    None; ``time`` is in the run's seconds, None outside of a run.
    """

    name: str
    slot: int | None
    detail: object
    time: float | None


@attrs.frozen(kw_only=True)
class ScriptedStatistics:
    """Counts since a scripted decoder was made.  ``tokens`` are cells decoded; seconds are of the run's clock."""

    steps: int
    decode_steps: int
    prefill_steps: int
    interrupts: int
    failures: int
    opens: int
    drops: int
    copies: int
    cuts: int
    moves: int
    saves: int
    loads: int
    tokens: int
    step_seconds: float
    max_concurrency: int
    """The most slots that one decode step held."""
    max_used: int
    """The most slots in use at once."""


@attrs.define(eq=False)
class _Slot:
    sampler: Sampler | None = None
    cells: Cells = attrs.field(factory=Cells)
    broken: str | None = None
    kept: bool = False  # cells that were cut, and await a sampler

    @property
    def used(self) -> bool:
        return self.sampler is not None or (len(self.cells) > 0 and not self.kept)


@attrs.define(eq=False)
class _UnderWay:
    """The one call that holds the decoder for longer than a moment."""

    name: str
    token: trio.lowlevel.TrioToken
    interrupted: bool = False
    last_round: bool = False
    wake: trio.Event = attrs.field(factory=trio.Event)


class ScriptedDecoder:
    """Implements :class:`laneway.decoder.FingerprintedDecoder` in virtual time, without threads and without a model.

    A step costs ``seconds_per_step + seconds_per_token * tokens`` of the run's clock (put a
    :class:`trio.testing.MockClock` under it); at no cost it is one checkpoint.  Like a native call it cannot be cut
    short by cancelling its awaiter, only by :meth:`interrupt`.

    Each sampled token is a hash of the (token, position) pairs in its slot, of the sampler's settings and of the prompt
    that the sampler has seen: the same history gives the same tokens in any slot and beside any peers.  A ``seed`` of
    None counts as a seed of its own and repeats, too.

    Arguments that steer it, all of them attributes which may be changed at any time:

    :param fail_at: errors by number of the step that raises them, after its time; the first step is 1
    :param hang_at: steps that end by :meth:`interrupt` only
    :param fail_drop: errors by number of the drop (of a slot in use) that raises them, the slot then staying in use
    :param fail_save: the same for :meth:`save`
    :param fail_load: the same for :meth:`load`
    :param fail_copy: the same for :meth:`copy`
    :param fail_cut: the same for :meth:`cut`
    :param no_token: called with a sequence's prompt and how many tokens were picked for it; an error that it returns
        ends that sequence alone, instead of its next token
    :param at_step: called with the step's number and batch when a step has begun, from inside it

    And what it is:

    :param slots: sequences at once
    :param window: tokens that one slot holds
    :param vocabulary: a :class:`ScriptedTokenizer`; its ``answer_tokens`` and ``end_tokens`` are what is sampled
    :param policy: how batches should look; default :data:`SCRIPTED_POLICY`
    :param seconds_per_step: cost of a step before its tokens
    :param seconds_per_token: cost of each token of a step
    :param seconds_per_state: cost of one :meth:`save` or :meth:`load`
    :param seconds_per_seal: cost of sealing a saved state, and of :meth:`verify`, beside steps
    :param end_every: one sampled token in so many, by hash, is an end token; None for never
    :param cuttable: False: like a recurrent model, whose sequences cannot be copied or cut in part
    :param script: answers written beforehand (see :data:`Script`); cells that leave the script are answered by hash
    :param history: how many of the newest calls :attr:`history` keeps
    """

    def __init__(
        self,
        slots: int = 4,
        window: int = 64,
        *,
        vocabulary: ScriptedTokenizer | None = None,
        policy: BatchPolicy | None = None,
        seconds_per_step: float = 0.0,
        seconds_per_token: float = 0.0,
        seconds_per_state: float = 0.0,
        seconds_per_seal: float = 0.0,
        end_every: int | None = DEFAULT_END_EVERY,
        cuttable: bool = True,
        script: Script | None = None,
        fail_at: Mapping[int, Exception] | None = None,
        hang_at: Collection[int] = (),
        fail_drop: Mapping[int, Exception] | None = None,
        fail_save: Mapping[int, Exception] | None = None,
        fail_load: Mapping[int, Exception] | None = None,
        fail_copy: Mapping[int, Exception] | None = None,
        fail_cut: Mapping[int, Exception] | None = None,
        no_token: Callable[[tuple[int, ...], int], DecodeError | None] | None = None,
        at_step: Callable[[int, StepBatch], object] | None = None,
        history: int = 1000,
    ) -> None:
        if slots < 1 or window < 2:
            raise ValueError(f"at least 1 slot and a window of at least 2 tokens are needed, not {slots} and {window}")
        self.vocabulary = vocabulary or ScriptedTokenizer()
        self.seconds_per_step = seconds_per_step
        self.seconds_per_token = seconds_per_token
        self.seconds_per_state = seconds_per_state
        self.seconds_per_seal = seconds_per_seal
        self.fail_at = dict(fail_at or {})
        self.hang_at = set(hang_at)
        self.fail_drop = dict(fail_drop or {})
        self.fail_save = dict(fail_save or {})
        self.fail_load = dict(fail_load or {})
        self.fail_copy = dict(fail_copy or {})
        self.fail_cut = dict(fail_cut or {})
        self.no_token = no_token
        self.at_step = at_step
        self.history: deque[Call] = deque(maxlen=history)
        self.violations: list[ProtocolViolation] = []
        """Every violation raised so far: an engine may catch the exception, but not this."""
        self.left_at_close: frozenset[int] = frozenset()
        """The slots that were still in use when :meth:`aclose` came."""
        self._model = ScriptedModel(vocabulary=self.vocabulary, end_every=end_every, script=script)
        self._window = window
        self._policy = policy or SCRIPTED_POLICY
        self._cuttable = cuttable
        self._slots = [_Slot() for _ in range(slots)]
        self._under_way: _UnderWay | None = None
        self._closed = False
        self._counts: Counter[str] = Counter()
        self._tokens = 0
        self._step_seconds = 0.0
        self._max_concurrency = 0
        self._max_used = 0

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self._under_way.name} under way" if self._under_way else "at rest"
        used = f"{len(self.used)}/{len(self._slots)} slots in use"
        return f"<laneway.testing.ScriptedDecoder {used}, {self._counts['step']} steps, {state}>"

    # What a decoder is.

    @property
    def slots(self) -> int:
        """Sequences at once."""
        return len(self._slots)

    @property
    def window(self) -> int:
        """Tokens that one slot holds."""
        return self._window

    @property
    def policy(self) -> BatchPolicy:
        """How batches should look."""
        return self._policy

    @property
    def shares_prefixes(self) -> bool:
        """Whether cells can be cut and are shared: unified KV, and slots in any order, by the policy."""
        return self._cuttable and self._policy.unified_kv and not self._policy.contiguous

    async def state_fingerprint(self, folder: str | None = None) -> bytes:
        """What two decoders share if one can :meth:`load` what the other saved."""
        await trio.lowlevel.checkpoint()
        return hashlib.blake2b(_STATE_MAGIC + _STATE_HEAD.pack(self.vocabulary.size, 0)).digest()[:32]

    def check(self, sampling: Sampling) -> None:
        """Raise :class:`InvalidRequestError` for biases beyond the vocabulary, for biases that forbid every answer, and
        for a grammar whose first rule is not ``root``.  (Otherwise a grammar is a part of the hash, no more.)"""
        if self._closed:
            self._violate("check() after aclose()")
        self._model.check(sampling)

    def open(self, slot: int, sampling: Sampling, prompt: Sequence[int]) -> None:
        """Give a slot a sampler.  Cells may have come before it, by :meth:`copy`, :meth:`load` or :meth:`cut`, a
        sampler not."""
        entry = self._at_rest("open", slot)
        if entry.sampler is not None:
            self._violate(f"open({slot}): the slot is in use{self._describe(slot)}; drop it first")
        if entry.broken:
            self._violate(f"open({slot}): the slot's cells are {entry.broken}; drop it first")
        if not 0 < len(prompt) <= self._window:
            self._violate(f"open({slot}): a prompt of {len(prompt)} tokens, the window is {self._window}")
        self._check_tokens(f"open({slot})", prompt)
        try:
            self._model.check(sampling)
        except InvalidRequestError as error:
            self._violate(f"open({slot}): check() refuses this sampling: {error}")
        self._note("open", slot, tuple(prompt))
        if len(entry.cells) >= len(prompt):
            self._violate(f"open({slot}): the slot has {len(entry.cells)} cells and the prompt {len(prompt)} tokens")
        entry.sampler = self._model.sampler(sampling, prompt)
        entry.kept = False
        self._count_used()

    def drop(self, slot: int) -> None:
        """Forget a slot's cells and sampler.  Dropping an empty slot does nothing."""
        entry = self._at_rest("drop", slot)
        if entry.used or entry.kept or entry.broken:
            self._note("drop", slot)
            self._fail("drop", self.fail_drop)
            self._slots[slot] = _Slot()

    def copy(self, source: int, target: int, length: int) -> None:
        """Give ``target``, which must hold no cells, the first ``length`` cells of ``source``.

        Raises :class:`DecodeError` where :attr:`shares_prefixes` says no.
        """
        entry = self._at_rest("copy", target)
        cells = self._whole_cells("copy", source)
        if entry.broken or len(entry.cells):
            self._violate(f"copy({source}, {target}, {length}): the target holds cells{self._describe(target)}")
        if not 0 < length <= len(cells):
            self._violate(f"copy({source}, {target}, {length}): the source has {len(cells)} cells")
        self._note("copy", target, (source, length))
        if not self.shares_prefixes:
            raise DecodeError("prefixes can be shared in unified KV only")
        self._fail("copy", self.fail_copy)
        entry.cells = cells.first(length)
        self._count_used()

    def cut(self, slot: int, length: int) -> None:
        """Forget a slot's sampler, and its cells but the first ``length``.  It then counts as no longer :attr:`used`.

        Raises :class:`DecodeError` if it is not cuttable.
        """
        entry = self._at_rest("cut", slot)
        cells = self._whole_cells("cut", slot)
        if not 0 < length <= len(cells):
            self._violate(f"cut({slot}, {length}): the slot has {len(cells)} cells")
        self._note("cut", slot, length)
        if not self._cuttable:
            raise DecodeError("this scripted model cannot be cut")
        self._fail("cut", self.fail_cut)
        self._slots[slot] = _Slot(cells=entry.cells.first(length), kept=True)

    async def step(self, batch: StepBatch) -> StepResult:
        """Move, decode and sample, in virtual time.  See :meth:`laneway.decoder.Decoder.step`."""
        self._at_rest("step")
        slots = self._after_moves(batch)
        self._check_chunks(batch, slots)
        await trio.lowlevel.checkpoint_if_cancelled()
        self._note("step", None, batch)
        number = self._counts["step"]
        self._counts["move"] += len(batch.moves)
        self._slots = slots
        count = sum(len(chunk.tokens) for chunk in batch.chunks)
        seconds = self.seconds_per_step + self.seconds_per_token * count
        started = trio.current_time()
        call = self._under_way = _UnderWay("step", trio.lowlevel.current_trio_token())
        try:
            if self.at_step is not None:
                self.at_step(number, batch)
            await self._spend(call, None if number in self.hang_at else seconds)
            result = self._first_round(batch, count, seconds)
            while self._goes_on(call, batch, result):
                await self._spend(call, seconds)
                result = self._later_round(batch, result, seconds)
            self._fail("step", self.fail_at)
        except BaseException as error:
            what = "interrupted" if isinstance(error, StepInterrupted) else "failed"
            for chunk in batch.chunks:
                self._slots[chunk.slot].broken = f"of step {number}, which was {what}"
            raise
        finally:
            self._under_way = None
            self._step_seconds += trio.current_time() - started
        self._counts["prefill" if self._is_prefill(batch) else "decode"] += 1
        return result

    def interrupt(self) -> None:
        """End the step under way with :class:`StepInterrupted`.  Without one, nothing happens, then or later."""
        call = self._under_way
        if call is None or call.name != "step":
            return
        call.interrupted = True
        try:
            inside = trio.lowlevel.current_trio_token() is call.token
        except RuntimeError:
            inside = False
        if inside:
            call.wake.set()
            return
        try:
            call.token.run_sync_soon(call.wake.set)
        except trio.RunFinishedError:
            # The run, and with it the step, ended between the two lines above: nothing is left to interrupt.
            return

    def end_round(self) -> None:
        """End the step under way after the round that it is in.  Without one, nothing happens, then or later."""
        call = self._under_way
        if call is not None:
            call.last_round = True

    async def save(self, slot: int) -> Callable[[], Awaitable[bytes]]:
        """The cells of a slot as bytes, with a checksum once they are sealed.  The sampler is not part of them."""
        self._at_rest("save", slot)
        cells = self._whole_cells("save", slot)
        self._note("save", slot)
        await self._occupy("save")
        self._fail("save", self.fail_save)
        head = _STATE_HEAD.pack(self.vocabulary.size, len(cells))
        pairs = zip(cells.tokens, cells.positions, strict=True)
        body = _STATE_MAGIC + head + b"".join(_STATE_CELL.pack(token, position) for token, position in pairs)

        async def seal() -> bytes:
            await trio.sleep(self.seconds_per_seal)
            return body + _checksum(body)

        return seal

    async def verify(self, state: bytes) -> None:
        """Raise :class:`DecodeError` for bytes that are not whole, or of another vocabulary."""
        await trio.sleep(self.seconds_per_seal)
        self._parse(state)

    async def load(self, slot: int, state: bytes, length: int, *, verified: bool = False) -> None:
        """Fill a slot that holds no cells with the first ``length`` of saved ones.

        Raises :class:`DecodeError` for bytes that are not whole, or of another vocabulary, or with too few cells or
        more than the window holds, and for fewer than all if it is not cuttable; the slot then holds no cells.
        The checksum is always looked at.
        """
        entry = self._at_rest("load", slot)
        if entry.broken or len(entry.cells):
            self._violate(f"load({slot}): the slot holds cells{self._describe(slot)}; drop it first")
        if length < 1:
            self._violate(f"load({slot}): {length} cells of a state are none")
        self._note("load", slot, length)
        await self._occupy("load")
        self._fail("load", self.fail_load)
        cells = self._parse(state)
        if len(cells) > self._window:
            raise DecodeError(f"the saved state has {len(cells)} cells and the window is {self._window}")
        if length > len(cells):
            raise DecodeError(f"the saved state has {len(cells)} cells, {length} are wanted")
        if length < len(cells) and not self._cuttable:
            raise DecodeError("this scripted model cannot be cut")
        entry.cells = cells.first(length)
        self._count_used()

    async def aclose(self) -> None:
        """Forget everything.  What comes after it, :meth:`interrupt` apart, is a violation."""
        self._at_rest("aclose")
        self._note("aclose", None)
        self.left_at_close = self.used
        self._closed = True
        self._slots = [_Slot() for _ in self._slots]
        await trio.lowlevel.cancel_shielded_checkpoint()

    # What tests ask and say.

    @property
    def used(self) -> frozenset[int]:
        """The slots that hold a sampler, or cells which no :meth:`cut` has left there for later."""
        return frozenset(index for index, slot in enumerate(self._slots) if slot.used or slot.broken)

    @property
    def kept(self) -> dict[int, tuple[int, ...]]:
        """The tokens in the slots that a :meth:`cut` has left for later: prefixes that others may share."""
        return {index: tuple(slot.cells.tokens) for index, slot in enumerate(self._slots) if slot.kept}

    @property
    def prompts(self) -> dict[int, tuple[int, ...]]:
        """The prompt of every slot that was opened and not dropped since: whose slot it is."""
        return {index: slot.sampler.prompt for index, slot in enumerate(self._slots) if slot.sampler is not None}

    @property
    def step_under_way(self) -> bool:
        """Whether a step has begun and not ended."""
        return self._under_way is not None and self._under_way.name == "step"

    def cells(self, slot: int) -> tuple[tuple[int, int], ...]:
        """The (token, position) pairs in a slot, oldest first."""
        cells = self._slots[slot].cells
        return tuple(zip(cells.tokens, cells.positions, strict=True))

    def expected(self, prompt: Sequence[int], sampling: Sampling, max_tokens: int | None = None) -> ScriptedAnswer:
        """:func:`expected_answer` with this decoder's window, vocabulary, end tokens and script."""
        return self._model.answer(prompt, sampling, max_tokens, self._window)

    def fail_next(self, error: Exception) -> None:
        """Let the next step that begins end with ``error``."""
        self.fail_at[self._counts["step"] + 1] = error

    def hang_next(self) -> None:
        """Let the next step that begins hang until it is interrupted."""
        self.hang_at.add(self._counts["step"] + 1)

    def statistics(self) -> ScriptedStatistics:
        """Counts and seconds, frozen."""
        return ScriptedStatistics(
            steps=self._counts["step"],
            decode_steps=self._counts["decode"],
            prefill_steps=self._counts["prefill"],
            interrupts=self._counts["interrupt"],
            failures=self._counts["failure"],
            opens=self._counts["open"],
            drops=self._counts["drop"],
            copies=self._counts["copy"],
            cuts=self._counts["cut"],
            moves=self._counts["move"],
            saves=self._counts["save"],
            loads=self._counts["load"],
            tokens=self._tokens,
            step_seconds=self._step_seconds,
            max_concurrency=self._max_concurrency,
            max_used=self._max_used,
        )

    def assert_obeyed(self) -> None:
        """Raise AssertionError if the protocol was ever broken, whoever has caught the violation since."""
        if self.violations:
            raise AssertionError(
                f"the decoder protocol was broken {len(self.violations)} times, first: {self.violations[0]}"
            ) from self.violations[0]

    def assert_idle(self) -> None:
        """Raise AssertionError unless no slot is used, nothing is under way and the protocol was never broken.

        Prefixes that are :attr:`kept` are in nobody's use.
        """
        self.assert_obeyed()
        if self._under_way is not None:
            raise AssertionError(f"a {self._under_way.name} is still under way")
        if self.used:
            raise AssertionError(
                "still in use: " + "; ".join(f"slot {s}{self._describe(s)}" for s in sorted(self.used))
            )

    # The rest is how.

    def _violate(self, text: str) -> NoReturn:
        violation = ProtocolViolation(text)
        self.violations.append(violation)
        raise violation

    def _at_rest(self, name: str, slot: int | None = None) -> _Slot:
        """The slot, if ``name`` may be called now."""
        call = name + ("()" if slot is None else f"({slot})")
        if self._closed:
            self._violate(f"{call} after aclose()")
        if self._under_way is not None:
            self._violate(f"{call} while a {self._under_way.name} is under way")
        if slot is None:
            return _Slot()
        if not 0 <= slot < len(self._slots):
            self._violate(f"{call}: slots are 0 to {len(self._slots) - 1}")
        return self._slots[slot]

    def _describe(self, slot: int) -> str:
        entry = self._slots[slot]
        if entry.sampler is None:
            prompt = "no sampler"
        else:
            prompt = f"a sampler for the prompt {self.vocabulary.text(entry.sampler.prompt)!r}"
        return f" ({len(entry.cells)} cells, {prompt}{', ' + entry.broken if entry.broken else ''})"

    def _check_tokens(self, call: str, tokens: Sequence[int]) -> None:
        for token in tokens:
            if not 0 <= token < self.vocabulary.size:
                self._violate(f"{call}: token {token} is beyond the vocabulary of {self.vocabulary.size}")

    def _whole_cells(self, call: str, slot: int) -> Cells:
        if not 0 <= slot < len(self._slots):
            self._violate(f"{call}({slot}): slots are 0 to {len(self._slots) - 1}")
        entry = self._slots[slot]
        if entry.broken or not len(entry.cells):
            self._violate(f"{call}({slot}): the slot has no whole cells{self._describe(slot)}")
        return entry.cells

    def _after_moves(self, batch: StepBatch) -> list[_Slot]:
        slots = list(self._slots)
        for source, target in batch.moves:
            if not (0 <= source < len(slots) and 0 <= target < len(slots)):
                self._violate(f"move {source} -> {target}: slots are 0 to {len(slots) - 1}")
            if not slots[source].used or slots[source].broken:
                self._violate(f"move {source} -> {target}: slot {source} holds no whole sequence")
            if slots[target].used or slots[target].kept or slots[target].broken:
                self._violate(f"move {source} -> {target}: slot {target} is in use")
            slots[source], slots[target] = _Slot(), slots[source]
        return slots

    def _check_chunks(self, batch: StepBatch, slots: list[_Slot]) -> None:
        if not batch.chunks:
            self._violate("a step of no chunks")
        order = [chunk.slot for chunk in batch.chunks]
        if len(set(order)) < len(order):
            self._violate(f"a step with several chunks for one slot: {order}")
        if order != sorted(order):
            self._violate(f"a step whose slots do not ascend: {order}")
        if batch.rounds < 1:
            self._violate(f"a step of {batch.rounds} rounds")
        for chunk in batch.chunks:
            self._check_chunk(chunk, slots, batch.rounds)
        self._check_company(batch, slots)

    def _check_company(self, batch: StepBatch, slots: list[_Slot]) -> None:
        prompts = [slots[chunk.slot].sampler.prompt for chunk in batch.chunks]  # type: ignore[union-attr]
        starts = [chunk.position < len(prompt) for chunk, prompt in zip(batch.chunks, prompts, strict=True)]
        if not any(starts):
            return
        if not (all(starts) and (len(starts) == 1 or self._policy.joint_prompts)):
            first = prompts[starts.index(True)]
            self._violate(f"a part of a prompt ({len(first)} tokens) in one step with other slots")
        if (total := sum(len(chunk.tokens) for chunk in batch.chunks)) > self._policy.chunk_max:
            self._violate(f"a step of {total} tokens of prompts: chunks have at most {self._policy.chunk_max} tokens")

    def _check_chunk(self, chunk: Chunk, slots: list[_Slot], rounds: int) -> None:
        where = f"a chunk of {len(chunk.tokens)} tokens at position {chunk.position} of slot {chunk.slot}"
        if not 0 <= chunk.slot < len(slots):
            self._violate(f"{where}: slots are 0 to {len(slots) - 1}")
        entry = slots[chunk.slot]
        if entry.broken:
            self._violate(f"{where}: the slot's cells are {entry.broken}; it can only be dropped")
        if entry.sampler is None:
            self._violate(f"{where}: the slot was not opened")
        if not chunk.tokens:
            self._violate(f"{where}: nothing to decode")
        if chunk.position != len(entry.cells):
            self._violate(f"{where}: the slot has {len(entry.cells)} cells, the next position is {len(entry.cells)}")
        end = chunk.position + len(chunk.tokens)
        if end + rounds - 1 > self._window:
            self._violate(f"{where}: beyond the window of {self._window}")
        self._check_tokens(where, chunk.tokens)
        prompt = len(entry.sampler.prompt)
        if rounds > 1 and (chunk.position < prompt or not chunk.sample or entry.sampler.sampling.logprobs):
            self._violate(f"{where}: {rounds} rounds are for decoding without log-probabilities")
        if chunk.position >= prompt:
            if len(chunk.tokens) != 1:
                self._violate(f"{where}: decoding is by one token, the prompt has {prompt}")
            return
        if end > prompt:
            self._violate(f"{where}: beyond the prompt's {prompt} tokens")
        if chunk.sample and end < prompt:
            self._violate(f"{where}: sampled before the end of the prompt's {prompt} tokens")

    async def _spend(self, call: _UnderWay, seconds: float | None) -> None:
        """Let ``seconds`` pass, or wait for an interrupt (None), whatever becomes of the awaiting task."""
        if seconds is None:
            with trio.CancelScope(shield=True):
                await call.wake.wait()
        elif seconds > 0:
            with trio.move_on_after(seconds, shield=True):
                await call.wake.wait()
        else:
            await trio.lowlevel.cancel_shielded_checkpoint()
        if call.interrupted:
            self._counts["interrupt"] += 1
            raise StepInterrupted

    async def _occupy(self, name: str) -> None:
        call = self._under_way = _UnderWay(name, trio.lowlevel.current_trio_token())
        try:
            await self._spend(call, self.seconds_per_state)
        finally:
            self._under_way = None

    def _is_prefill(self, batch: StepBatch) -> bool:
        return any(not self._generates(chunk) for chunk in batch.chunks)

    def _generates(self, chunk: Chunk) -> bool:
        sampler = self._slots[chunk.slot].sampler
        assert sampler is not None
        return chunk.position >= len(sampler.prompt)

    def _goes_on(self, call: _UnderWay, batch: StepBatch, result: StepResult) -> bool:
        before = result.later[-1] if result.later else result.tokens
        ended = self.vocabulary.end_tokens.issuperset(before.values())
        return len(result.later) + 1 < batch.rounds and not ended and not call.last_round

    def _first_round(self, batch: StepBatch, count: int, seconds: float) -> StepResult:
        tokens: dict[int, int] = {}
        logprobs: dict[int, TokenLogprob] = {}
        failures: dict[int, DecodeError] = {}
        if not self._is_prefill(batch):
            self._max_concurrency = max(self._max_concurrency, len(batch.chunks))
        self._tokens += count
        for chunk in batch.chunks:
            entry = self._slots[chunk.slot]
            assert entry.sampler is not None
            for offset, token in enumerate(chunk.tokens):
                entry.cells.append(token, chunk.position + offset)
            if not chunk.sample:
                continue
            failure = self._failure(entry.sampler, entry.cells)
            if failure is not None:
                failures[chunk.slot] = failure
                continue
            tokens[chunk.slot], logprob = self._model.next_token(entry.sampler, entry.cells)
            if logprob is not None:
                logprobs[chunk.slot] = logprob
        return StepResult(tokens, seconds, logprobs, failures=failures)

    def _failure(self, sampler: Sampler, cells: Cells) -> DecodeError | None:
        return None if self.no_token is None else self.no_token(sampler.prompt, len(cells) - len(sampler.prompt))

    def _later_round(self, batch: StepBatch, result: StepResult, seconds: float) -> StepResult:
        """One more round, in which those go on that have not ended."""
        number = 1 + len(result.later)
        before = result.later[-1] if result.later else result.tokens
        tokens: dict[int, int] = {}
        failures = dict(result.failures)
        for chunk in batch.chunks:
            entry = self._slots[chunk.slot]
            assert entry.sampler is not None
            token = before.get(chunk.slot)
            if token is None or token in self.vocabulary.end_tokens:
                continue
            entry.cells.append(token, chunk.position + number)
            self._tokens += 1
            failure = self._failure(entry.sampler, entry.cells)
            if failure is not None:
                failures[chunk.slot] = failure
            else:
                tokens[chunk.slot], _ = self._model.next_token(entry.sampler, entry.cells)
        return StepResult(result.tokens, result.seconds + seconds, result.logprobs, (*result.later, tokens), failures)

    def _parse(self, state: bytes) -> Cells:
        body, checksum = state[:-_CHECKSUM_SIZE], state[-_CHECKSUM_SIZE:]
        start = len(_STATE_MAGIC) + _STATE_HEAD.size
        if not body.startswith(_STATE_MAGIC) or len(body) < start or checksum != _checksum(body):
            raise DecodeError("the saved state is truncated, damaged or not of a scripted decoder")
        size, count = _STATE_HEAD.unpack_from(body, len(_STATE_MAGIC))
        if size != self.vocabulary.size or len(body) != start + count * _STATE_CELL.size:
            raise DecodeError(f"the saved state is of a vocabulary of {size} tokens, not {self.vocabulary.size}")
        cells = Cells()
        for token, position in _STATE_CELL.iter_unpack(body[start:]):
            cells.append(token, position)
        return cells

    def _fail(self, name: str, errors: dict[int, Exception]) -> None:
        error = errors.get(self._counts[name])
        if error is not None:
            self._counts["failure"] += 1
            raise error

    def _note(self, name: str, slot: int | None, detail: object = None) -> None:
        self._counts[name] += 1
        try:
            now: float | None = trio.current_time()
        except RuntimeError:
            now = None
        self.history.append(Call(name, slot, detail, now))

    def _count_used(self) -> None:
        self._max_used = max(self._max_used, len(self.used))


def _checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_CHECKSUM_SIZE).digest()
