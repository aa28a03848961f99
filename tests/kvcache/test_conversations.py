"""A few hundred turns with chance against them, in virtual time.  Rules K2 to K4; the long run is in ``tests/soak``."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio.testing

from tests.kvcache.conversations import Conversations
from tests.kvcache.kit import Directory, cached, threads_at_once


@pytest.mark.parametrize("seed", range(4))
async def test_K3_K4_no_turn_ever_goes_on_wrongly(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    threads_at_once(monkeypatch)
    async with cached(tmp_path, 2, prefix_cache=seed % 2 == 1) as s:
        conversations = Conversations(s, tmp_path, seed)
        await conversations.round(150)
        s.assert_idle()
        counts = conversations.counts
        assert counts.compared > 60
        assert counts.warm > 20
        assert counts.cancelled > 20
        assert counts.harmed > 5
        assert counts.ended["commit"] > 50
        done = await s.engine.kv_caches.delete_everything()
        assert not done.in_use
    assert Directory(tmp_path).files() == {}
