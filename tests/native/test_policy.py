"""The rules that choose KV mode and flash attention."""

from __future__ import annotations

from typing import Any

import pytest

from laneway_native import plan


@pytest.mark.parametrize(
    ("options", "unified", "flash_attention"),
    [
        # Short windows: cells of their own, and the kernel that decodes fastest.
        ({"slots": 4, "window": 512}, False, False),
        ({"slots": 4, "window": 2047}, False, False),
        # Long ones: scores of a whole chunk against the window would take too much.
        ({"slots": 4, "window": 2048}, False, True),
        # One slot needs no split.
        ({"slots": 1, "window": 512}, True, False),
        # Quantised cells need flash attention.
        ({"slots": 4, "window": 512, "quantised_kv": True}, False, True),
        # Wishes are granted.
        ({"slots": 4, "window": 512, "kv_mode": "unified"}, True, False),
        ({"slots": 1, "window": 512, "kv_mode": "split"}, False, False),
        ({"slots": 4, "window": 512, "flash_attention": True}, False, True),
        ({"slots": 4, "window": 8192, "flash_attention": False}, False, False),
    ],
)
def test_choices(options: dict[str, Any], unified: bool, flash_attention: bool) -> None:
    policy = plan(**options)
    assert (policy.unified_kv, policy.flash_attention) == (unified, flash_attention)
    # Holes cost a pass over the weights in split mode only, and one slot has none.
    assert policy.contiguous == (not unified and options["slots"] > 1)


def test_numbers() -> None:
    policy = plan(slots=2, window=512, chunk_target=0.05, most_tokens=256)
    assert policy.chunk_target == 0.05
    assert policy.chunk_max == 256
    assert plan(slots=2, window=512, most_tokens=4096).chunk_max == 512
