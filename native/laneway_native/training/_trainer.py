"""The native trainer: one adapter on one model, in this process.  Training proper runs it in a child."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Self

import attrs

from laneway_native._errors import new_error, text_of
from laneway_native._ffi import ffi, lib
from laneway_native._log import drain
from laneway_native.training._job import MODULES, Settings, TrainingError

if TYPE_CHECKING:
    from types import TracebackType

    from laneway_native._llama import Error, TrainerHandle

SMALLEST_PASS = 512
"""Tokens that one pass has room for, at least: shorter sequences share a pass, which is quicker than one each."""

_KINDS = {
    lib.LANEWAY_OUT_OF_MEMORY: "memory",
    lib.LANEWAY_NOT_FINITE: "not_finite",
    lib.LANEWAY_UNSUPPORTED: "model",
    lib.LANEWAY_LOAD_FAILED: "model",
}


@attrs.frozen
class Sample:
    """A sequence to learn from.

    ``mask`` says for each token, 0 or 1, whether the prediction of it counts; the first is not predicted.
    """

    tokens: Sequence[int]
    mask: bytes

    @property
    def counted(self) -> int:
        """Predictions that count."""
        return sum(self.mask[1:])


@attrs.frozen(kw_only=True)
class TrainerFacts:
    """What a trainer needs and has.  Sizes are in bytes."""

    copied: int
    """Of weights that are set aside: matrices as F32."""
    mapped: int
    """Of the model's file that every pass reads."""
    activations: int
    """Of the largest pass."""
    state: int
    """Of the adapter, its gradient and its two moments."""
    parameters: int
    layers: int
    vocabulary: int
    context_train: int


@attrs.frozen
class TensorPlace:
    """A tensor of the adapter: ``rows`` rows of ``columns`` numbers, from ``offset`` on."""

    name: str
    columns: int
    rows: int
    offset: int


def pass_tokens(settings: Settings, longest: int | None = None) -> int:
    """Tokens that one pass has room for.  ``longest``: of the sequences that there are, if that is known."""
    most = settings.context_length if longest is None else min(longest, settings.context_length)
    return max(most, SMALLEST_PASS)


class Trainer:
    """An adapter under training.  One thread at a time; a context manager.

    Making it reads the file's header and works out the memory; :meth:`load` sets it aside and reads the weights.
    ``recompute``: the backward pass computes each layer anew instead of reading what was kept of it, with the same
    result.  Raises :class:`TrainingError`, of kind ``model`` if such a model cannot be trained.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        settings: Settings,
        *,
        base: Literal["f32", "native"],
        threads: int = 1,
        recompute: bool = False,
        most_tokens: int | None = None,
    ) -> None:
        encoded = ffi.new("char[]", os.fsencode(path))
        wanted = ffi.new("laneway_training *")
        wanted.path = encoded
        wanted.threads = threads
        wanted.rank = settings.rank
        wanted.alpha = settings.alpha
        wanted.modules = sum(1 << MODULES.index(name) for name in settings.modules)
        wanted.seed = settings.seed
        wanted.copies = base == "f32"
        wanted.recompute = recompute
        wanted.most_tokens = most_tokens or pass_tokens(settings)
        made = ffi.new("laneway_trainer **")
        error = new_error()
        _check(lib.laneway_trainer_new(wanted, made, error), error)
        self._handle: TrainerHandle = made[0]
        self.most_tokens: int = wanted.most_tokens
        """Of one pass."""
        facts = ffi.new("laneway_trainer_facts *")
        lib.laneway_trainer_describe(self._handle, facts)
        self._numbers: int = facts.numbers
        self.facts = TrainerFacts(**{field.name: getattr(facts, field.name) for field in attrs.fields(TrainerFacts)})
        place = ffi.new("laneway_trainer_tensor *")
        places = []
        for index in range(facts.tensors):
            lib.laneway_trainer_describe_tensor(self._handle, index, place)
            places.append(TensorPlace(ffi.string(place.name).decode(), place.columns, place.rows, place.offset))
        self.tensors = tuple(places)
        """Of the adapter, in the order of its numbers."""

    def close(self) -> None:
        """Free everything.  May be called more than once."""
        handle, self._handle = self._handle, ffi.NULL
        if handle:
            lib.laneway_trainer_free(handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def load(self) -> None:
        """Set the memory aside and read the weights.  The adapter is new: it changes nothing yet."""
        error = new_error()
        _check(lib.laneway_trainer_load(self._handle, error), error)

    def numbers(self, which: Literal["adapter", "first", "second", "gradient"]) -> memoryview[float]:
        """The adapter's numbers, their moments, or their gradient since the last update: floats that can be written.

        Not to be used after :meth:`close`.
        """
        index = ("adapter", "first", "second", "gradient").index(which)
        found = lib.laneway_trainer_numbers(self._handle, index)
        if not found:
            raise ValueError("the trainer was not loaded")
        return memoryview(ffi.buffer(found, 4 * self._numbers)).cast("B").cast("f")

    def run(self, samples: Sequence[Sample], *, weight: float = 0.0, learn: bool = True) -> tuple[float, int]:
        """One pass; returns the sum of the losses and how many predictions they are of.

        ``learn`` adds the gradient of ``weight`` times that sum to what there is.
        """
        lengths = ffi.new("int32_t[]", [len(sample.tokens) for sample in samples])
        tokens = ffi.new("int32_t[]", [token for sample in samples for token in sample.tokens])
        counted = ffi.from_buffer("uint8_t[]", b"".join(sample.mask for sample in samples))
        given = ffi.new("laneway_pass *")
        given.sequences, given.lengths, given.tokens, given.counted = len(samples), lengths, tokens, counted
        given.weight, given.learn = weight, learn
        error = new_error()
        _check(lib.laneway_trainer_run(self._handle, given, error), error)
        return given.loss, given.predictions

    def passes(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """The samples, in their order, in as few passes as have room for them."""
        passes: list[list[Sample]] = []
        room = 0
        for sample in samples:
            taken = len(sample.tokens) - 1
            if taken > room:
                passes.append([])
                room = self.most_tokens
            passes[-1].append(sample)
            room -= taken
        return passes

    def step(self, samples: Sequence[Sample], step: int, rate: float, decay: float) -> float:
        """One step of the optimiser, number ``step`` (from 1 on), on the mean loss of a batch, which is returned.

        Raises :class:`TrainingError` of kind ``not_finite``; the adapter is then as it was before.
        """
        weight = 1.0 / sum(sample.counted for sample in samples)
        loss = sum(self.run(some, weight=weight)[0] for some in self.passes(samples)) * weight
        if not math.isfinite(loss):
            raise TrainingError("not_finite", f"the loss is {loss}; lower the learning rate or alpha")
        self.update(step, rate, decay)
        return loss

    def update(self, step: int, rate: float, decay: float) -> float:
        """Let AdamW move the adapter by the gradient, which is zero then; returns the length that the gradient had."""
        given = ffi.new("laneway_update *")
        given.step, given.rate, given.decay = step, rate, decay
        given.beta1, given.beta2, given.epsilon, given.most_norm = 0.9, 0.999, 1e-8, 1.0
        error = new_error()
        _check(lib.laneway_trainer_update(self._handle, given, error), error)
        norm: float = given.norm
        return norm

    def mean_loss(self, samples: Sequence[Sample]) -> float:
        """The mean over all predictions that count; nothing is learned."""
        total, count = 0.0, 0
        for some in self.passes(samples):
            loss, predictions = self.run(some, learn=False)
            total += loss
            count += predictions
        return total / count


def _check(status: int, error: Error) -> None:
    drain(failed=status != lib.LANEWAY_OK)
    if status != lib.LANEWAY_OK:
        raise TrainingError(_KINDS.get(status, "internal"), text_of(error))
