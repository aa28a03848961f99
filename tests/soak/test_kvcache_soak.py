"""Many turns, with cancels, damaged files and processes that are killed as they write: none goes on wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from tests.kvcache.conversations import Conversations, kill_in_the_middle_of_a_write
from tests.kvcache.kit import Directory, cached

pytestmark = pytest.mark.slow

TURNS_A_KILL = 100


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.long)])
async def test_K3_K4_no_turn_of_many_yields_a_wrong_continuation(kills: int, tmp_path: Path) -> None:
    async with cached(tmp_path, 2) as s:
        conversations = Conversations(s, tmp_path, 7)
        for seed in range(kills):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(kill_in_the_middle_of_a_write, tmp_path, 100 + seed)
                await conversations.round(TURNS_A_KILL)
        s.assert_idle()
        counts = conversations.counts
        assert counts.turns == kills * TURNS_A_KILL
        assert counts.compared > 0.4 * counts.turns
        assert counts.warm > 0.15 * counts.turns
        assert counts.cancelled > 0.15 * counts.turns
        assert counts.harmed > 0.05 * counts.turns
        assert (await s.engine.kv_caches.prune()).in_use == ()
        assert not (await s.engine.kv_caches.delete_everything()).in_use
    assert [name for name in Directory(tmp_path).files() if not name.startswith("locks")] == []
