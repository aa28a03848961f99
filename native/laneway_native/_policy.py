"""The rules that choose KV mode and flash attention, with the numbers behind them.

The numbers were measured on SmolLM2-135M Q4_1 with 2 threads; see ``docs/benchmarks.md`` for how.
"""

from __future__ import annotations

from typing import Literal

from laneway.decoder import BatchPolicy

KvMode = Literal["split", "unified"]

FLASH_ATTENTION_FROM = 2048
"""Window, in tokens, from which flash attention pays on the CPU."""


def plan(
    *,
    slots: int,
    window: int,
    kv_mode: KvMode | None = None,
    flash_attention: bool | None = None,
    quantised_kv: bool = False,
    chunk_target: float = 0.1,
    most_tokens: int = 512,
) -> BatchPolicy:
    """Choose how the context keeps its cells and how batches should look.

    ``window`` is what one slot holds; ``kv_mode`` and ``flash_attention`` are the caller's wishes, None leaves the
    choice to the rules; ``most_tokens`` is the most that one call takes.

    KV mode: *split* gives every slot cells of its own, so a decoding row scans only its own sequence's cells; *unified*
    keeps all cells in one stream, where every row scans all cells in use (8 of 16 slots: 31 ms a step against 14).
    Split is fast only while the slots in use are consecutive (0..7: 13.6 ms, 0,2,..14: 41 ms), which the scheduler sees
    to (``contiguous``).  Prefixes can be shared in unified mode only: ask for it where that matters.

    Flash attention: without it decoding is faster on the CPU (8 streams: 841 tokens/s all in, 693 with it), with it
    long prompts are (8 prompts of 500 tokens: 1485 tokens/s, 1061 without), and the scores of a chunk against a long
    window need not exist at once.  Quantised keys and values need it.
    """
    unified = slots == 1 if kv_mode is None else kv_mode == "unified"
    if flash_attention is None:
        flash_attention = quantised_kv or window >= FLASH_ATTENTION_FROM
    return BatchPolicy(
        contiguous=not unified and slots > 1,
        unified_kv=unified,
        flash_attention=flash_attention,
        chunk_target=chunk_target,
        chunk_max=min(512, most_tokens),
    )
