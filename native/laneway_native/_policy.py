"""The rules that choose KV mode and flash attention, with the numbers behind them.

Measured on SmolLM2-135M Q4_1; ``docs/benchmarks.md`` says how such numbers are taken.
"""

from __future__ import annotations

from typing import Literal

from laneway.decoder import BatchPolicy

KvMode = Literal["split", "unified"]

MOST_SCORE_BYTES = 512 * 2**20
"""Memory that attention scores may take before flash attention, which never stores them, is worth its price."""

MOST_UNIFIED_CELLS = 65_536
"""Cells that are kept in one stream by choice.  The mask of a chunk of 512 tokens has a value for each of them: 64 MiB
here, written anew for each chunk."""

ROUNDS_TARGET = 0.08
"""Seconds that the rounds of one decode step take together, about: 12 deltas a second are a stream to any reader, and
what lies between two steps takes less than a hundredth of it."""


def plan(
    *,
    slots: int,
    window: int,
    heads: int,
    kv_mode: KvMode | None = None,
    flash_attention: bool | None = None,
    quantised_kv: bool = False,
    on_gpu: bool = False,
    own_kernel: bool = False,
    chunk_target: float = 0.1,
    rounds_target: float = ROUNDS_TARGET,
    most_tokens: int = 512,
) -> BatchPolicy:
    """Choose how the context keeps its cells and how batches should look.

    ``window`` is what one slot holds, in tokens, ``heads`` the attention heads of the model's widest layer; ``kv_mode``
    and ``flash_attention`` are the caller's wishes, None leaves the choice to the rules; ``most_tokens`` is the most
    that one call takes.

    ``own_kernel``: the attention of :mod:`laneway_native` takes this model's heads and cells.

    With it, unified cells and flash attention.  A row costs what it sees, wherever that lies, so any slots can be in
    use, prefixes can be shared, and prompts of any lengths can share a step: 8 sequences of 2,000 tokens take 99 ms a
    step unified and 97 ms split, one of them beside 7 idle ones 13.6 and 13.4 ms, a chunk of 512 tokens beside those
    796 and 813 ms.  Whole jobs of 160 tokens of prompt and 64 of answer, over the fastest that llama.cpp's own
    attention allows, for 1, 4, 8, 16 and 32 sequences: 1.23, 1.41, 1.39, 1.46 and 1.32 unified.  Step for step split is
    a few hundredths faster, which is the price of slots in any order: split pays a whole pass for a hole.  Beyond
    ``MOST_UNIFIED_CELLS`` each slot has cells of its own again.

    Without it, on a CPU:

    KV mode.  *Split* gives every slot cells of its own, so a row of attention scans its own sequence alone; *unified*
    keeps all cells in one stream, where every row scans what all sequences use: 8 sequences of 500 tokens take 45 ms a
    step split and 89 ms unified, of 2,000 tokens 119 ms and 350 ms (one thread).  Split is fast only while the slots in
    use are consecutive (0..7: 13.6 ms, 0,2,..14: 41 ms, two threads), which the scheduler sees to (``contiguous``).
    Sequences can share a prefix in unified mode only: ask for it where that matters.

    Flash attention.  llama.cpp's CPU kernel takes prompts faster with it and decodes slower: at 500 tokens 626 against
    502 tokens/s of prompt and 114 ms against 45 ms a step of 8 sequences, at 4,000 tokens 199 against 160 tokens/s and
    972 ms against 212 ms.  A prompt of 4,000 with 64 tokens of answer takes the same time either way, anything shorter
    is faster without.  So it is off on a CPU until the scores of one chunk against the whole window would take too much
    memory.  Quantised cells need it, and on a GPU it is the faster way.
    """
    if kv_mode is None:
        any_order = own_kernel and flash_attention is not False and slots * window <= MOST_UNIFIED_CELLS
        unified = slots == 1 or any_order
    else:
        unified = kv_mode == "unified"
    chunk_max = min(512, most_tokens)
    if flash_attention is None:
        columns = window * slots if unified else window
        flash_attention = own_kernel or on_gpu or quantised_kv or 4 * heads * chunk_max * columns > MOST_SCORE_BYTES
    return BatchPolicy(
        contiguous=not unified and slots > 1,
        # In split mode llama.cpp would make a pass for each length.
        joint_prompts=unified and slots > 1,
        unified_kv=unified,
        flash_attention=flash_attention,
        chunk_target=chunk_target,
        chunk_max=chunk_max,
        rounds_target=rounds_target,
    )
