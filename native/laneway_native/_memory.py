"""How much memory a context needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from laneway_native._machine import Available

_KV_TYPES = {
    # name: (ggml's number, bytes of a block, values in a block)
    "f32": (0, 4, 1),
    "f16": (1, 2, 1),
    "bf16": (30, 2, 1),
    "q8_0": (8, 34, 32),
    "q5_1": (7, 24, 32),
    "q5_0": (6, 22, 32),
    "q4_1": (3, 20, 32),
    "q4_0": (2, 18, 32),
    "iq4_nl": (20, 18, 32),
}


@attrs.frozen
class KvType:
    """How keys and values are stored."""

    name: str
    number: int
    block_bytes: int
    block_values: int

    @property
    def quantised(self) -> bool:
        """Whether values share a scale; llama.cpp then needs flash attention."""
        return self.block_values > 1

    @property
    def bytes_per_value(self) -> float:
        """Bytes, on average."""
        return self.block_bytes / self.block_values


KV_TYPES = {name: KvType(name, *figures) for name, figures in _KV_TYPES.items()}
"""The types that llama.cpp's KV cache takes, by name."""


@attrs.frozen(kw_only=True)
class Need:
    """Bytes of a context, estimated from the model's facts."""

    kv: int
    compute: int

    @property
    def context(self) -> int:
        """All that is allocated when the context is made."""
        return self.kv + self.compute


def context_need(
    *,
    cells: int,
    kv_bytes_per_cell: int,
    batch: int,
    slots: int,
    slot_cells: int,
    vocabulary: int,
    embedding: int,
    feed_forward: int,
    heads: int,
    flash_attention: bool,
) -> Need:
    """Estimate what a context allocates.

    ``cells`` is the number of KV cells over all slots, ``batch`` the tokens of one micro-batch, ``slot_cells`` the
    cells that one row of attention looks at.
    """
    # Activations live a few at a time; logits are one row a slot, computed and copied out; one mask.
    compute = 4 * batch * (8 * embedding + 3 * feed_forward) + 2 * 4 * slots * vocabulary + 4 * batch * slot_cells
    if not flash_attention:
        # The scores of every head against every cell exist at once.
        compute += 4 * heads * batch * slot_cells
    return Need(kv=cells * kv_bytes_per_cell, compute=compute)


def shortage(need: Need, model_bytes: int, there: Available) -> str | None:
    """What is lacking for a context beside a model, as the end of a sentence; None if it fits."""
    if there.now is not None and need.context > there.now:
        return f"needs about {size_text(need.context)} and {size_text(there.now)} of memory are free"
    if there.total is not None and need.context + model_bytes > there.total:
        return (
            f"needs about {size_text(need.context)} beside the model's {size_text(model_bytes)}, "
            f"and there are {size_text(there.total)} of memory in all"
        )
    return None


def size_text(count: int) -> str:
    """Bytes as a person reads them."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.0f} MiB"
