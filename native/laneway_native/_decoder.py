"""The decoder of GGUF models: a llama.cpp context whose slots are stepped and sampled in one native call."""

from __future__ import annotations

import functools
import math
import os
import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import attrs
import trio

from laneway.decoder import (
    BatchPolicy,
    DecodeError,
    InvalidRequestError,
    ModelLoadError,
    Sampling,
    StepResult,
    TokenLogprob,
)
from laneway_native._adapters import check_adapters
from laneway_native._attention import attention_kernel_takes
from laneway_native._errors import check, check_load, failure_of, new_error, text_of
from laneway_native._ffi import ffi, lib
from laneway_native._grammar import GrammarLimits, GrammarTables, grammar_tables
from laneway_native._log import follow_level
from laneway_native._machine import available, default_threads
from laneway_native._memory import KV_TYPES, KvType, Need, context_need, shortage
from laneway_native._numbers import is_finite
from laneway_native._policy import ROUNDS_TARGET, KvMode, plan
from laneway_native._state import fingerprint, seal, unseal
from laneway_native._threads import run_sync
from laneway_native._weights import WeightFile

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence
    from types import TracebackType

    from laneway.decoder import StepBatch
    from laneway_native._llama import DecoderHandle, Error
    from laneway_native._model import Model

MOST_SLOTS = 256
"""Sequences that one llama.cpp context can hold."""

_MOST_TOKENS = 512
"""Tokens of one step, at most: more make prefill no faster."""

_PAGE = 256
"""llama.cpp rounds cells up to a multiple of this, of each slot in split mode."""

_PIECE = 2**20
"""Bytes of a state that are copied at a time."""

_FLOAT_MAX = 3.4e38

_GOOD_GRAMMARS = 64
"""Grammars whose tables are kept: programs use the same few again and again."""


class LlamaDecoder:
    """Implements :class:`laneway.decoder.FingerprintedDecoder` on llama.cpp.

    ``model`` must stay open until this is closed.  Making one allocates its memory and reads adapters, so it blocks:
    make it in a worker thread.  Afterwards its users are one Trio task (and, for :meth:`interrupt` and
    :meth:`end_round`, any thread).

    ``context_size``: tokens over all slots; each is promised ``context_size // parallel``.  ``parallel``: slots, 1 to
    256.  ``threads``: None takes the CPUs that this process may run on.  ``poll``: how long idle threads wait for the
    next step before they sleep, in units of some 0.05 s, 0 to 100.
    ``kv_type``: f16, f32, bf16, q8_0, q5_1, q5_0, q4_1, q4_0 or iq4_nl.  ``kv_mode``: "split" or "unified"; with
    ``flash_attention``, None leaves the choice to :func:`laneway_native.plan`.  ``chunk_target``: seconds that one
    prefill chunk may take while others decode.  ``rounds_target``: seconds, about, that one step decodes for before it
    tells what it has picked; 0: one token of each sequence.  ``lora``: pairs of an adapter file and its scale.
    ``rope_freq_base`` and ``rope_freq_scale``: 0 takes the model's own.

    Raises :class:`ModelLoadError` if llama.cpp cannot make the context, or before anything is allocated if it would not
    fit into memory.
    """

    def __init__(
        self,
        model: Model,
        *,
        context_size: int,
        parallel: int,
        threads: int | None = None,
        poll: int = 0,
        kv_type: str = "f16",
        kv_mode: KvMode | None = None,
        flash_attention: bool | None = None,
        chunk_target: float = 0.1,
        rounds_target: float = ROUNDS_TARGET,
        lora: Sequence[tuple[str | os.PathLike[str], float]] = (),
        rope_freq_base: float = 0.0,
        rope_freq_scale: float = 0.0,
    ) -> None:
        self._handle: DecoderHandle = ffi.NULL
        self._model = model
        source = model.path
        _check_whole(source, "parallel", parallel, 1, MOST_SLOTS)
        _check_whole(source, "context_size", context_size, parallel, 2**31 - 1)
        threads = default_threads() if threads is None else threads
        _check_whole(source, "threads", threads, 1, 512)
        _check_whole(source, "poll", poll, 0, 100)
        if kv_type not in KV_TYPES:
            raise ModelLoadError(source, f"kv_type is one of {', '.join(KV_TYPES)}, not {kv_type!r}")
        if kv_mode not in (None, "split", "unified"):
            raise ModelLoadError(source, f"kv_mode is 'split', 'unified' or None, not {kv_mode!r}")
        if not (is_finite(chunk_target) and chunk_target > 0):
            raise ModelLoadError(source, f"chunk_target is a number of seconds above 0, not {chunk_target!r}")
        if not (is_finite(rounds_target) and rounds_target >= 0):
            raise ModelLoadError(source, f"rounds_target is a number of seconds from 0, not {rounds_target!r}")
        self._kv = KV_TYPES[kv_type]
        self._slots = parallel
        self._window = context_size // parallel
        self._threads = threads
        self._lora = _checked_options(source, lora)
        # llama.cpp copies what it reads of them.
        self._adapter_files = tuple(WeightFile(path, mapped=False) for path, _ in self._lora)
        check_adapters(model.header, self._lora)
        policy = plan(
            slots=parallel,
            window=self._window,
            heads=model.header.head_count,
            quantised_kv=self._kv.quantised,
            on_gpu=model.on_gpu,
            own_kernel=not model.on_gpu
            and attention_kernel_takes(
                key_length=model.header.key_length, value_length=model.header.value_length, kv_type=kv_type
            ),
            chunk_target=chunk_target,
            rounds_target=rounds_target,
            kv_mode=kv_mode,
            flash_attention=flash_attention,
            most_tokens=_MOST_TOKENS,
        )
        if self._kv.quantised and not policy.flash_attention:
            raise ModelLoadError(source, f"kv_type {kv_type!r} needs flash attention")
        if policy.unified_kv:
            cells = _padded(self._window * parallel)
        else:
            cells = _padded(self._window) * parallel
        self._refuse_what_does_not_fit(cells, policy)
        self._open_native(cells, policy, poll, rope_freq_base, rope_freq_scale)
        try:
            self._batch_size = self._checked_batch_size()
            self._policy = attrs.evolve(policy, chunk_max=min(policy.chunk_max, self._batch_size))
            self._settings = self._print_settings(cells, rope_freq_base, rope_freq_scale)
            self._step_ended = lib.laneway_decoder_step_ended(self._handle)
        except BaseException:
            self._free()
            raise
        for file in self._adapter_files:
            file.confirm()
        self._fingerprint: bytes | None = None
        self._folder: str | None = None
        # Own limiter: this decoder never waits for other people's threads, and never has two of its own.
        self._limiter = trio.CapacityLimiter(1)
        self._with_logprobs: set[int] = set()
        self.grammar_limits = GrammarLimits()
        """What a grammar may cost a sequence in one step; holds for sequences that are opened afterwards."""
        self._grammars: dict[str, GrammarTables] = {}
        self._good_beginnings: set[tuple[str | None, tuple[int, ...]]] = set()
        self._error = new_error()
        self._step_error = new_error()
        # Buffers of a step, filled and read again and again.
        self._chunks = ffi.new("int32_t[]", 4 * parallel)
        self._tokens = ffi.new("int32_t[]", self._batch_size)
        self._moves_from = ffi.new("int32_t[]", parallel)
        self._moves_to = ffi.new("int32_t[]", parallel)
        self._picked = ffi.new("int32_t[]", parallel * lib.LANEWAY_MOST_ROUNDS)
        self._choices = ffi.new("laneway_choice[]", parallel)
        self._batch = ffi.new("laneway_batch *")
        self._batch.chunks = ffi.cast("laneway_chunk *", self._chunks)
        self._batch.tokens = self._tokens
        self._batch.moves_from = self._moves_from
        self._batch.moves_to = self._moves_to
        self._batch.picked = self._picked
        self._batch.choices = self._choices
        self._failed = ffi.new("laneway_error[]", parallel)
        self._batch.failed = self._failed

    def _checked_batch_size(self) -> int:
        """The most tokens of a step, which llama.cpp takes from the context's size if that is smaller."""
        facts = ffi.new("laneway_decoder_facts *")
        lib.laneway_decoder_describe(self._handle, facts)
        if facts.slot_cells < self._window or facts.context < self._window * self._slots:
            raise ModelLoadError(
                self._model.path, f"llama.cpp made {facts.slot_cells} cells a slot, {self._window} were asked for"
            )
        size: int = facts.batch
        return size

    def _refuse_what_does_not_fit(self, cells: int, policy: BatchPolicy) -> None:
        need = context_need_of(self._model, cells=cells, slots=self._slots, kv=self._kv, policy=policy)
        problem = shortage(need, self._model.facts.tensor_bytes, available())
        if problem:
            raise ModelLoadError(
                self._model.path,
                f"a context of {self._slots} x {self._window} tokens {problem}; "
                "take a smaller context_size or parallel, or a smaller kv_type such as q8_0",
            )

    def _open_native(self, cells: int, policy: BatchPolicy, poll: int, rope_base: float, rope_scale: float) -> None:
        options = ffi.new("laneway_options *")
        options.context = cells
        options.batch = max(_MOST_TOKENS, self._slots)
        options.slots = self._slots
        options.threads = self._threads
        options.poll = poll
        options.type_k = options.type_v = self._kv.number
        options.unified = policy.unified_kv
        options.flash_attention = policy.flash_attention
        # Shared cells of a sliding-window layer cannot be used again, however far they have slid: keep room for all.
        options.whole_window = policy.unified_kv and self._slots > 1
        options.rope_base = rope_base
        options.rope_scale = rope_scale
        paths = [ffi.new("char[]", os.fsencode(path)) for path, _ in self._lora]
        adapters = ffi.new("laneway_adapter[]", max(1, len(paths)))
        for index, (_, scale) in enumerate(self._lora):
            adapters[index].path = paths[index]
            adapters[index].scale = scale
        options.adapters_count = len(paths)
        options.adapters = adapters
        follow_level()
        out = ffi.new("laneway_decoder **")
        error = new_error()
        check_load(lib.laneway_decoder_new(self._model.handle, options, out, error), error, self._model.path)
        self._handle = out[0]
        self._model.decoders += 1

    def _print_settings(self, cells: int, rope_base: float, rope_scale: float) -> dict[str, object]:
        """What a fingerprint covers beside the weights."""
        header = self._model.header
        return {
            "header": header.sha256,
            "file_size": header.file_size,
            "scales": tuple(scale for _, scale in self._lora),
            "kv_type": self._kv.name,
            "flash_attention": self._policy.flash_attention,
            # Cells are laid out by stream, and each slot has its own in split mode.
            "streams": 1 if self._policy.unified_kv else self._slots,
            "rope": (rope_base, rope_scale),
            "window": self._window,
            "cells": cells,
            "llama_commit": ffi.string(lib.laneway_llama_commit()).decode(),
        }

    def __repr__(self) -> str:
        mode = "unified" if self._policy.unified_kv else "split"
        state = "" if self._handle else ", closed"
        return f"<laneway_native.LlamaDecoder {self._slots} slots of {self._window} tokens, {mode} KV{state}>"

    @property
    def slots(self) -> int:
        """Sequences that can be held at once."""
        return self._slots

    @property
    def window(self) -> int:
        """Tokens that one slot is promised to hold."""
        return self._window

    @property
    def policy(self) -> BatchPolicy:
        """How batches should look."""
        return self._policy

    @property
    def shares_prefixes(self) -> bool:
        """Whether :meth:`copy` and :meth:`cut` work here: unified KV mode, no recurrent and no hybrid model."""
        return bool(lib.laneway_decoder_shares_prefixes(self.handle))

    @property
    def threads(self) -> int:
        """Threads of a step, the calling one included."""
        return self._threads

    async def state_fingerprint(self, folder: str | None = None) -> bytes:
        """32 bytes that two decoders share if one can :meth:`load` what the other saved.

        They cover every byte of the model's and the adapters' files.  The first call reads these in worker threads, at
        about 1 GB/s; later ones only look whether the files have changed.  ``folder``: where digests of files are
        remembered from one process to the next, None for nowhere.  See :mod:`laneway_native._weights`.
        """
        weights = [await file.digest(folder) for file in self._model.files]
        adapters = [await file.digest(folder) for file in self._adapter_files]
        self._folder = folder or self._folder
        self._fingerprint = fingerprint(**self._settings, weights=weights, adapters=adapters)
        return self._fingerprint

    async def _known_fingerprint(self) -> bytes:
        """The one that was worked out last."""
        return self._fingerprint or await self.state_fingerprint()

    # Between steps: quick, from the task that owns the decoder.

    def check(self, sampling: Sampling) -> None:
        """Raise :class:`InvalidRequestError` for what cannot be sampled.

        A token id may be beyond the vocabulary, a grammar may not parse or be too large to be searched in time, and
        grammar and ``logit_bias`` together may leave no token with which an answer could begin.
        """
        size = self._model.size
        for token, _ in sampling.logit_bias:
            if not 0 <= token < size:
                raise InvalidRequestError(f"token {token} is not in the vocabulary of {size} entries", "logit_bias")
        forbidden = tuple(token for token, bias in sampling.logit_bias if bias == -math.inf)
        if sampling.grammar is None and len(forbidden) < size:
            return
        tables = self._tables(sampling.grammar)
        beginning = sampling.grammar, forbidden
        if beginning not in self._good_beginnings:
            check_beginning(self._model, sampling, tables, self.grammar_limits)
            if len(self._good_beginnings) >= _GOOD_GRAMMARS:
                self._good_beginnings.clear()
            self._good_beginnings.add(beginning)

    def _tables(self, grammar: str | None) -> GrammarTables | None:
        if grammar is None:
            return None
        tables = self._grammars.get(grammar)
        if tables is None:
            tables = tables_of(self._model, grammar)
            if len(self._grammars) >= _GOOD_GRAMMARS:
                self._grammars.clear()
            self._grammars[grammar] = tables
        return tables

    def open(self, slot: int, sampling: Sampling, prompt: Sequence[int]) -> None:
        """Give a slot a sampler that has seen ``prompt``.

        It must have none; cells may be there, from :meth:`copy`, :meth:`cut` or :meth:`load`.
        """
        self.check(sampling)
        native = native_sampling(sampling, self._tables(sampling.grammar), self.grammar_limits)
        tokens = ffi.new("int32_t[]", prompt if isinstance(prompt, (list, tuple)) else list(prompt))
        check(lib.laneway_decoder_open(self.handle, slot, native.struct, tokens, len(prompt), self._error), self._error)
        if sampling.logprobs:
            self._with_logprobs.add(slot)

    def drop(self, slot: int) -> None:
        """Forget a slot's cells and sampler.  Dropping an empty slot does nothing."""
        check(lib.laneway_decoder_drop(self.handle, slot, self._error), self._error)
        self._with_logprobs.discard(slot)

    def copy(self, source: int, target: int, length: int) -> None:
        """Let ``target`` share the first ``length`` cells of ``source``.

        Raises :class:`DecodeError` in split KV mode, for recurrent and hybrid models, and where cells that the copy
        needs have slid out of the model's window.
        """
        check(lib.laneway_decoder_copy(self.handle, source, target, length, self._error), self._error)

    def cut(self, slot: int, length: int) -> None:
        """Forget a slot's sampler, and its cells but the first ``length``.

        Raises :class:`DecodeError` for recurrent and hybrid models, and where cells that what is left needs have slid
        out of the model's window; the sampler is gone then, too.
        """
        self._with_logprobs.discard(slot)
        check(lib.laneway_decoder_cut(self.handle, slot, length, self._error), self._error)

    def length(self, slot: int) -> int:
        """Tokens that a slot holds."""
        length: int = lib.laneway_decoder_length(self.handle, slot)
        return length

    # The step.

    async def step(self, batch: StepBatch) -> StepResult:
        """See :meth:`laneway.decoder.Decoder.step`.  ``seconds`` are those of the native call."""
        handle = self.handle
        self._fill(batch)
        # Before the thread is woken: an interrupt that comes meanwhile must count.
        lib.laneway_decoder_arm(handle)
        self._begin_step()
        try:
            await trio.lowlevel.wait_readable(self._step_ended)
        except trio.Cancelled:
            # The thread is still at work.  The caller will meet its cancel at the next checkpoint.
            with trio.CancelScope(shield=True):
                await trio.lowlevel.wait_readable(self._step_ended)
        finally:
            # However the waiting ended: the thread uses the buffers for as long as the step is under way.
            status = lib.laneway_decoder_end_step(handle)
        if batch.moves and self._with_logprobs:
            for source, target in batch.moves:
                if source in self._with_logprobs:
                    self._with_logprobs.remove(source)
                    self._with_logprobs.add(target)
        if status or lib.laneway_log_waiting():
            check(status, self._step_error, sequences=len(batch.chunks))
        return self._result(batch)

    def _begin_step(self) -> None:
        status = lib.laneway_decoder_begin_step(self._handle, self._batch, self._step_error)
        if status:
            check(status, self._step_error)

    def _fill(self, batch: StepBatch) -> None:
        chunks = batch.chunks
        count = len(chunks)
        tokens = (
            [token for chunk in chunks for token in chunk.tokens] if count > 1 else chunks[0].tokens if chunks else ()
        )
        if count > self._slots or len(tokens) > self._batch_size or len(batch.moves) > self._slots:
            raise DecodeError(
                f"a step takes at most {self._slots} chunks and {self._batch_size} tokens, "
                f"not {count} and {len(tokens)}"
            )
        try:
            self._chunks[0 : 4 * count] = [
                number for chunk in chunks for number in (chunk.slot, chunk.position, len(chunk.tokens), chunk.sample)
            ]
            self._tokens[0 : len(tokens)] = tokens
            if batch.moves:
                self._moves_from[0 : len(batch.moves)] = [source for source, _ in batch.moves]
                self._moves_to[0 : len(batch.moves)] = [target for _, target in batch.moves]
        except OverflowError as error:
            raise DecodeError(f"a number of this step is out of range: {error}") from error
        self._batch.count = count
        self._batch.moves = len(batch.moves)
        self._batch.rounds = batch.rounds

    def _result(self, batch: StepBatch) -> StepResult:
        tokens, *later = self._rounds([chunk.slot for chunk in batch.chunks])
        failures = self._failures(batch) if self._batch.failures else {}
        logprobs: dict[int, TokenLogprob] = {}
        if not self._with_logprobs:
            return StepResult(tokens, self._batch.seconds, later=tuple(later), failures=failures)
        for index, chunk in enumerate(batch.chunks):
            if chunk.slot in tokens and chunk.slot in self._with_logprobs:
                choice = self._choices[index]
                top = zip(
                    choice.top_tokens[0 : choice.top_count], choice.top_logprobs[0 : choice.top_count], strict=True
                )
                logprobs[chunk.slot] = TokenLogprob(choice.token, choice.logprob, tuple(top))
        return StepResult(tokens, self._batch.seconds, logprobs, tuple(later), failures)

    def _failures(self, batch: StepBatch) -> dict[int, DecodeError]:
        """Why some sequences have got no token, by slot."""
        return {
            chunk.slot: failure_of(self._failed[index], sequences=1)
            for index, chunk in enumerate(batch.chunks)
            if self._failed[index].code != lib.LANEWAY_OK
        }

    def _rounds(self, slots: list[int]) -> list[dict[int, int]]:
        """The tokens that each round has picked, by slot."""
        count = len(slots)
        if not count:
            return [{}]
        picked = ffi.unpack(self._picked, count * self._batch.rounds)
        rounds = [picked[at : at + count] for at in range(0, len(picked), count)]
        return [{slot: token for slot, token in zip(slots, each, strict=True) if token >= 0} for each in rounds]

    def interrupt(self) -> None:
        """Stop the step under way, within milliseconds.  Safe from any thread; without a step nothing happens."""
        if self._handle:
            lib.laneway_decoder_interrupt(self._handle)

    def end_round(self) -> None:
        """Let the step under way end after the round that it is in.  Safe from any thread."""
        if self._handle:
            lib.laneway_decoder_end_round(self._handle)

    # State.

    async def save(self, slot: int) -> Callable[[], Awaitable[bytes]]:
        """Copy a slot's cells; what is returned seals the copy with length, checksum and fingerprint.

        Raises :class:`DecodeError` if it has none.
        """
        handle = self.handle
        state: list[bytes] = []
        with trio.CancelScope(shield=True):
            state = await trio.to_thread.run_sync(self._copy_out, handle, slot, limiter=self._limiter)
        return functools.partial(self._seal, state)

    async def _seal(self, state: list[bytes]) -> bytes:
        # Worked out anew: the weights may have changed since the request was planned.
        print_ = await self.state_fingerprint(self._folder)

        def work() -> bytes:
            with _memory_for("a saved state"):
                return seal(state, print_)

        return await run_sync(work)

    @staticmethod
    def _copy_out(handle: DecoderHandle, slot: int) -> list[bytes]:
        error = new_error()
        state = ffi.new("uint8_t **")
        size = ffi.new("size_t *")
        check(lib.laneway_decoder_state_get(handle, slot, state, size, error), error)
        if size[0] == 0:
            raise DecodeError(f"slot {slot} is empty: there is nothing to save")
        with _memory_for("a copy of the cells"):
            # In pieces, for each is copied under the interpreter's lock, which the event loop needs.
            return [
                ffi.buffer(state[0] + begin, min(_PIECE, size[0] - begin))[:] for begin in range(0, size[0], _PIECE)
            ]

    async def verify(self, state: bytes) -> None:
        """Raise :class:`DecodeError` if the bytes are not whole, or of another model or setting."""
        await run_sync(unseal, state, await self._known_fingerprint())

    async def load(self, slot: int, state: bytes, length: int, *, verified: bool = False) -> None:
        """Fill a slot that holds no cells, and keep the first ``length`` of them.

        Raises :class:`DecodeError` if the bytes are not whole, of another model or setting, of fewer tokens, or cannot
        be cut there; the slot then holds none.  ``verified`` leaves out the checksum.
        """
        print_ = await self._known_fingerprint()
        load = functools.partial(self._load, self.handle, slot, state, length, print_, checksum=not verified)
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(load, limiter=self._limiter)

    def _load(
        self, handle: DecoderHandle, slot: int, sealed: bytes, length: int, print_: bytes, *, checksum: bool
    ) -> None:
        state = unseal(sealed, print_, checksum=checksum)
        if length > self._window:
            raise DecodeError(f"{length} tokens of a saved state are more than the {self._window} of a slot")
        error = new_error()
        # Let go of by hand: if an error keeps this frame alive, the garbage collector may take the memory first.
        with ffi.from_buffer("uint8_t[]", state) as data:
            check(lib.laneway_decoder_state_set(handle, slot, data, len(state), length, error), error)

    # The end.

    async def aclose(self) -> None:
        """Free the context, its threads and its adapters.  A second call does nothing."""
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(self._free, limiter=self._limiter)

    def _free(self) -> None:
        handle, self._handle = self._handle, ffi.NULL
        if handle:
            lib.laneway_decoder_free(handle)
            self._model.decoders -= 1

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def handle(self) -> DecoderHandle:
        """The native decoder, for this package's own use."""
        if not self._handle:
            raise DecodeError("the decoder is closed")
        return self._handle


class NativeSampling:
    """A ``laneway_sampling`` struct and the buffers that it points to."""

    def __init__(self, sampling: Sampling, tables: GrammarTables | None, limits: GrammarLimits) -> None:
        self.struct = ffi.new("laneway_sampling *")
        struct = self.struct
        struct.temperature = sampling.temperature
        struct.top_k = sampling.top_k
        struct.top_p = sampling.top_p
        struct.min_p = sampling.min_p
        struct.repeat_penalty = sampling.repeat_penalty
        struct.frequency_penalty = sampling.frequency_penalty
        struct.presence_penalty = sampling.presence_penalty
        struct.seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        struct.logprobs = sampling.logprobs
        struct.top_logprobs = sampling.top_logprobs
        self._buffers: list[object] = []
        if sampling.logit_bias:
            tokens = ffi.new("int32_t[]", [token for token, _ in sampling.logit_bias])
            # A finite bias stays finite as a float.
            values = ffi.new(
                "float[]",
                [
                    bias if bias == -math.inf else min(max(bias, -_FLOAT_MAX), _FLOAT_MAX)
                    for _, bias in sampling.logit_bias
                ],
            )
            struct.bias_count = len(sampling.logit_bias)
            struct.bias_tokens = tokens
            struct.bias_values = values
            self._buffers += [tokens, values]
        if tables is not None:
            grammar = ffi.new("laneway_grammar *")
            grammar.rule_count = len(tables.rules) - 1
            grammar.alternative_count = len(tables.alternatives)
            grammar.element_count = len(tables.elements) // 2
            grammar.set_count = len(tables.sets) - 1
            grammar.root = tables.root
            grammar.most_work = limits.work
            grammar.most_seconds = limits.seconds
            for name in ("rules", "alternatives", "elements", "sets"):
                setattr(grammar, name, self._keep(ffi.from_buffer("int32_t[]", getattr(tables, name))))
            grammar.ranges = self._keep(ffi.from_buffer("uint32_t[]", tables.ranges))
            struct.grammar = self._keep(grammar)

    def _keep(self, buffer: Any) -> Any:
        self._buffers.append(buffer)
        return buffer


def native_sampling(
    sampling: Sampling, tables: GrammarTables | None = None, limits: GrammarLimits | None = None
) -> NativeSampling:
    """``sampling`` as C wants it; keep the object for as long as C looks at it.

    ``tables`` are those of its grammar.
    """
    return NativeSampling(sampling, tables, limits or GrammarLimits())


def tables_of(model: Model, grammar: str) -> GrammarTables:
    """The tables of a grammar.  Raises :class:`InvalidRequestError` as :func:`grammar_tables` does."""
    return grammar_tables(
        grammar, vocabulary=model.size, tokenize=lambda text: model.tokenize(text, bos=False, special=True)
    )


def check_beginning(
    model: Model, sampling: Sampling, tables: GrammarTables | None, limits: GrammarLimits | None = None
) -> None:
    """Raise :class:`InvalidRequestError` unless grammar and bias leave a token with which an answer may begin."""
    native = native_sampling(sampling, tables, limits)
    error = new_error()
    out = ffi.new("laneway_sampler **")
    begins = ffi.new("int32_t *")
    # Here a grammar that takes too long to follow is the request's fault: no answer has begun.
    _check_grammar_call(lib.laneway_sampler_new(model.handle, native.struct, ffi.NULL, 0, out, error), error)
    try:
        _check_grammar_call(lib.laneway_sampler_begins(out[0], begins, error), error)
    finally:
        lib.laneway_sampler_free(out[0])
    if begins[0]:
        return
    if tables is None:
        raise InvalidRequestError("forbids every token of the vocabulary", "logit_bias")
    if any(bias == -math.inf for _, bias in sampling.logit_bias):
        raise InvalidRequestError("forbids every token with which an answer of the grammar can begin", "logit_bias")
    raise InvalidRequestError("no token of this model's vocabulary begins an answer that it allows", "grammar")


def _check_grammar_call(status: int, error: Error) -> None:
    if status == lib.LANEWAY_GRAMMAR_LIMIT:
        raise InvalidRequestError(text_of(error), "grammar")
    check(status, error)


@contextmanager
def _memory_for(what: str) -> Iterator[None]:
    try:
        yield
    except MemoryError:
        raise DecodeError(f"there is no memory for {what}") from None


def context_need_of(model: Model, *, cells: int, slots: int, kv: KvType, policy: BatchPolicy) -> Need:
    """What a context of this model would allocate, at most and about."""
    header = model.header
    feed_forward = header.metadata.get(f"{header.architecture}.feed_forward_length", 0)
    widths = feed_forward if isinstance(feed_forward, tuple) else (feed_forward,)
    return context_need(
        cells=cells,
        kv_bytes_per_cell=header.kv_bytes_per_token(kv.bytes_per_value),
        batch=max(_MOST_TOKENS, slots),
        slots=slots,
        slot_cells=cells if policy.unified_kv else cells // slots,
        vocabulary=model.size,
        embedding=model.facts.embedding,
        feed_forward=max((width for width in widths if isinstance(width, int)), default=0),
        heads=header.head_count,
        flash_attention=policy.flash_attention,
    )


def _padded(cells: int) -> int:
    return -(-cells // _PAGE) * _PAGE


def _check_whole(source: str, name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ModelLoadError(source, f"{name} is an integer from {low} to {high}, not {value!r}")


def _checked_options(
    source: str, lora: Sequence[tuple[str | os.PathLike[str], float]]
) -> tuple[tuple[str, float], ...]:
    checked = []
    for adapter in lora:
        try:
            path, scale = adapter
            path = os.fsdecode(path)
        except (TypeError, ValueError):
            raise ModelLoadError(source, f"lora is a list of pairs (path, scale), and {adapter!r} is none") from None
        if not is_finite(scale):
            raise ModelLoadError(source, f"the scale of adapter {path!r} is a number, not {scale!r}")
        checked.append((path, float(scale)))
    return tuple(checked)
