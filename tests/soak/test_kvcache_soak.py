"""Two thousand turns with cancels, damaged files and processes that are killed as they write: none goes on wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from tests.kvcache.conversations import Conversations, kill_in_the_middle_of_a_write
from tests.kvcache.kit import Directory, cached

pytestmark = pytest.mark.slow

KILLS = 20


async def test_K3_K4_two_thousand_turns_never_yield_a_wrong_continuation(tmp_path: Path) -> None:
    async with cached(tmp_path, 2) as s:
        conversations = Conversations(s, tmp_path, 7)
        for seed in range(KILLS):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(kill_in_the_middle_of_a_write, tmp_path, 100 + seed)
                await conversations.round(2000 // KILLS)
        s.assert_idle()
        counts = conversations.counts
        assert counts.turns == 2000
        assert counts.compared > 800
        assert counts.warm > 300
        assert counts.cancelled > 300
        assert counts.harmed > 100
        assert (await s.engine.kv_caches.prune()).in_use == ()
        assert not (await s.engine.kv_caches.delete_everything()).in_use
    assert [name for name in Directory(tmp_path).files() if not name.startswith("locks")] == []
