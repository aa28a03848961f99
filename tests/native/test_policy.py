"""The rules that choose KV mode and flash attention."""

from __future__ import annotations

from typing import Any

import pytest

from laneway_native import plan


@pytest.mark.parametrize(
    ("options", "unified", "flash_attention"),
    [
        # Cells of their own, and the way that decodes fastest on a CPU, at any usual length.
        ({"slots": 4, "window": 512}, False, False),
        ({"slots": 4, "window": 8192}, False, False),
        # 4 bytes * 32 heads * 512 rows * 8,192 cells are the 512 MiB that scores may take.
        ({"slots": 4, "window": 8193}, False, True),
        ({"slots": 4, "window": 8193, "heads": 9}, False, False),
        # In one stream each row looks at everybody's cells.
        ({"slots": 4, "window": 2048, "kv_mode": "unified"}, True, False),
        ({"slots": 4, "window": 2049, "kv_mode": "unified"}, True, True),
        # One slot needs no split.
        ({"slots": 1, "window": 512}, True, False),
        ({"slots": 4, "window": 512, "quantised_kv": True}, False, True),
        ({"slots": 4, "window": 512, "on_gpu": True}, False, True),
        # With the kernel of our own a row costs what it sees, wherever that lies.
        ({"slots": 4, "window": 512, "own_kernel": True}, True, True),
        ({"slots": 1, "window": 512, "own_kernel": True}, True, True),
        ({"slots": 4, "window": 16384, "own_kernel": True}, True, True),
        ({"slots": 4, "window": 16385, "own_kernel": True}, False, True),
        ({"slots": 4, "window": 512, "own_kernel": True, "kv_mode": "split"}, False, True),
        ({"slots": 4, "window": 512, "own_kernel": True, "flash_attention": False}, False, False),
        # Wishes are granted.
        ({"slots": 1, "window": 512, "kv_mode": "split"}, False, False),
        ({"slots": 4, "window": 512, "flash_attention": True}, False, True),
        ({"slots": 4, "window": 65536, "flash_attention": False}, False, False),
    ],
)
def test_choices(options: dict[str, Any], unified: bool, flash_attention: bool) -> None:
    policy = plan(**{"heads": 32, **options})
    assert (policy.unified_kv, policy.flash_attention) == (unified, flash_attention)
    # Holes cost a pass over the weights in split mode only, and one slot has none.
    assert policy.contiguous == (not unified and options["slots"] > 1)


def test_numbers() -> None:
    policy = plan(slots=2, window=512, heads=9, chunk_target=0.05, most_tokens=256)
    assert policy.chunk_target == 0.05
    assert policy.chunk_max == 256
    assert plan(slots=2, window=512, heads=9, most_tokens=4096).chunk_max == 512
