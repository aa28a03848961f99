"""A thousand requests with random cancels, through the whole engine, on a real decoder with a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

import laneway
from benchmarks.soak import FATES, Footprint, Soak
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow


async def test_a_thousand_requests_with_random_cancels_leave_nothing_behind(tmp_path: Path) -> None:
    pytest.importorskip("laneway_native", reason="the native part is not built (make build)", exc_type=ImportError)
    path = write_tiny_model(tmp_path / "tiny.gguf")
    async with laneway.open_engine() as engine:
        model = await engine.load_model(path, parallel=4, context_size=4 * 256, threads=1)
        soak = Soak(model, seed=1, longest_prompt=60, longest_answer=24)
        await soak.round(300)
        soak.check_rest()
        before = Footprint.now()
        await soak.round(1000)
        soak.check_rest()
        after = Footprint.now()
    # A thread of Trio's that had nothing to do may have gone meanwhile.
    assert after.threads <= before.threads
    assert after.tasks == before.tasks
    # What is remembered for a while is bounded, and small: ids of ended requests, parsed grammars and the like.
    assert after.objects - before.objects < 2000
    assert after.resident - before.resident < 4 * 2**20
    assert all(soak.fates[fate] > 100 for fate in FATES)
