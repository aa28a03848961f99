"""Whether a model can be trained, and what memory that takes: asked before a child process is started."""

from __future__ import annotations

from typing import Literal

import attrs

from laneway_native._gguf import GgufHeader
from laneway_native._machine import available
from laneway_native._memory import size_text
from laneway_native.training._job import SMALLEST_CONTEXT, Settings, TrainingError
from laneway_native.training._trainer import Trainer, pass_tokens

ARCHITECTURES = ("llama", "qwen2", "qwen3", "smollm3")
"""Architectures with a backward pass: llama is also that of Mistral, SmolLM and SmolLM2."""

_PROCESS = 64 * 2**20
"""Of the child itself: interpreter, libraries, data, the scratch memory of its threads."""


@attrs.frozen(kw_only=True)
class Plan:
    """How a run would go about the base model's weights, and the memory it takes.  Sizes are in bytes."""

    base: Literal["f32", "native"]
    copied: int
    """Of the base model's weights as F32."""
    mapped: int
    """Of the model's file; shared with whoever maps it too."""
    activations: int
    state: int
    """Of the adapter, its gradient and its moments."""
    parameters: int

    @property
    def total(self) -> int:
        """At the peak of a run."""
        return _PROCESS + self.copied + self.mapped + self.activations + self.state

    def __str__(self) -> str:
        return (
            f"{self.base} base, about {size_text(self.total)}: weights {size_text(self.copied + self.mapped)}, "
            f"activations {size_text(self.activations)}, adapter and optimiser {size_text(self.state)}"
        )


def trainable(header: GgufHeader) -> None:
    """Raise :class:`TrainingError` of kind ``model``, with the reason, if the model cannot be trained."""
    length = max(SMALLEST_CONTEXT, min(256, header.context_length))
    _plan(header, Settings(rank=1, context_length=length), "native", None)


def plan(
    header: GgufHeader,
    settings: Settings,
    *,
    longest: int | None = None,
    free: int | None = None,
) -> Plan:
    """What a run would take.  ``longest``: tokens of the longest sequence, if that is known.

    A base ``auto`` becomes ``f32`` where that fits into half of ``free`` bytes (None: as many as the system says now,
    without a bound if it does not say), else ``native``.  Raises :class:`TrainingError` of kind ``model`` if the model
    cannot be trained.
    """
    if settings.base != "auto":
        return _plan(header, settings, settings.base, longest)
    quick = _plan(header, settings, "f32", longest)
    if free is None:
        free = available().now
    # Matrices that need no unpacking save a part of the time, a third at most where passes are short, and take several
    # times the memory.
    if free is None or quick.total <= free // 2:
        return quick
    return _plan(header, settings, "native", longest)


def estimate(header: GgufHeader, settings: Settings, *, longest: int | None = None) -> int:
    """Bytes at the peak of a run: :attr:`Plan.total` of :func:`plan`."""
    return plan(header, settings, longest=longest).total


def _plan(header: GgufHeader, settings: Settings, base: Literal["f32", "native"], longest: int | None) -> Plan:
    if header.architecture not in ARCHITECTURES:
        raise TrainingError(
            "model",
            f"models of architecture {header.architecture} cannot be trained; those of {', '.join(ARCHITECTURES)} can",
        )
    if len(header.parts) > 1:
        raise TrainingError("model", "a model that is split into several files cannot be trained; merge them first")
    most = pass_tokens(settings, longest)
    if settings.context_length > header.context_length:
        raise TrainingError(
            "model",
            f"a context_length of {settings.context_length} is more than the {header.context_length} tokens that the "
            "model was made for",
        )
    with Trainer(header.path, settings, base=base, most_tokens=most) as trainer:
        facts = trainer.facts
    return Plan(
        base=base,
        copied=facts.copied,
        mapped=facts.mapped,
        activations=facts.activations,
        state=facts.state,
        parameters=facts.parameters,
    )
