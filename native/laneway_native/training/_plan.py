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
    recompute: bool
    """Whether layers are computed anew in the backward pass: a quarter more work, a fraction of the activations."""
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
            f"{self.base} base{', layers computed twice' if self.recompute else ''}, "
            f"about {size_text(self.total)}: weights {size_text(self.copied + self.mapped)}, "
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

    ``free``: bytes that there are (None: as the system says now, and no bound if it does not say).  Layers are computed
    twice where the run would not fit otherwise.  A base ``auto`` becomes ``native``: where passes are full, a copy in
    F32 takes several times the memory and saves no time that could be measured.  Raises :class:`TrainingError` of kind
    ``model`` if the model cannot be trained.
    """
    base: Literal["f32", "native"] = "f32" if settings.base == "f32" else "native"
    found = _plan(header, settings, base, longest)
    if free is None:
        free = available().now
    if free is None or found.total <= free:
        return found
    return _plan(header, settings, base, longest, recompute=True)


def estimate(header: GgufHeader, settings: Settings, *, longest: int | None = None) -> int:
    """Bytes at the peak of a run: :attr:`Plan.total` of :func:`plan`."""
    return plan(header, settings, longest=longest).total


def _plan(
    header: GgufHeader,
    settings: Settings,
    base: Literal["f32", "native"],
    longest: int | None,
    *,
    recompute: bool = False,
) -> Plan:
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
    with Trainer(header.path, settings, base=base, recompute=recompute, most_tokens=most) as trainer:
        facts = trainer.facts
    return Plan(
        base=base,
        recompute=recompute,
        copied=facts.copied,
        mapped=facts.mapped,
        activations=facts.activations,
        state=facts.state,
        parameters=facts.parameters,
    )
