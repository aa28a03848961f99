"""Caches of a real decoder, on a tiny model: warm is cold, but for the time.  Rules K1, K2 and K4."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

import laneway
from laneway_plugins import completion
from tests.kvcache.kit import Talk, report
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("laneway_native", reason="the native part is not built (make build)", exc_type=ImportError)
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@asynccontextmanager
async def load(tiny: Path, top: Path, parallel: int = 1, **options: Any) -> AsyncIterator[laneway.Model]:
    async with laneway.open_engine(cache_dir=top) as engine:
        yield await engine.load_model(
            tiny,
            parallel,
            **{"context_size": 512 * parallel, "threads": 1, "kv_type": "f32", "prefix_cache": False, **options},
        )


@pytest.mark.parametrize("kv_mode", ["split", "unified"])
@pytest.mark.parametrize("kv_cache", ["chat", True])
async def test_K1_a_warm_cache_gives_the_tokens_of_a_cold_one(
    tiny: Path, tmp_path: Path, kv_mode: str, kv_cache: str | bool
) -> None:
    texts = ["Hello there", "and again", "once more", "the end"]
    warm: list[completion.Completion] = []
    async with load(tiny, tmp_path, kv_mode=kv_mode) as model:
        cold_talk = Talk(model, None)
        cold = [await cold_talk.say(text, max_tokens=20) for text in texts]
    talk: Talk | None = None
    for text in texts:
        # A new engine each time: nothing but the file goes from one turn to the next.
        async with load(tiny, tmp_path, kv_mode=kv_mode) as model:
            talk = Talk(model, kv_cache) if talk is None else Talk(model, kv_cache, talk.messages)
            warm.append(await talk.say(text, max_tokens=20))
    assert [answer.tokens for answer in warm] == [answer.tokens for answer in cold]
    assert [report(answer).ended for answer in warm] == ["commit"] * 4
    assert warm[0].stats.cached_tokens == 0
    for before, after in itertools.pairwise(warm):
        assert after.stats.cached_tokens >= before.stats.prompt_tokens - 1


async def test_K4_another_window_is_a_miss(tiny: Path, tmp_path: Path) -> None:
    async with load(tiny, tmp_path) as model:
        talk = Talk(model, "chat")
        await talk.say("Hello there")
    async with load(tiny, tmp_path, context_size=256) as model:
        again = Talk(model, "chat", talk.messages)
        answer = await again.say("and again")
        assert answer.stats.cached_tokens == 0
        assert "other settings" in str(report(answer).miss)
        assert report(answer).ended == "commit"


async def test_K2_turns_on_one_key_serialise_and_others_overlap(tiny: Path, tmp_path: Path) -> None:
    prompt = "Once upon a time"
    # The tiny model never ends by itself, so the first answer lasts as long as it is wanted.
    async with load(tiny, tmp_path, 2, kv_mode="unified", context_size=2 * 8192) as model:

        async def beside(first: str | None, second: str | None) -> completion.Completion | None:
            """A turn while another one is being answered; None if it did not come to its end meanwhile."""
            async with completion.stream(model, prompt, kv_cache=first, temperature=0.0) as long:
                async for _ in long:
                    break
                async with completion.stream(model, prompt, kv_cache=second, temperature=0.0, max_tokens=9) as run:
                    lane = model.engine.snapshot().model(model.name).lanes[0]
                    if lane.waiting:
                        return None
                    answer: completion.Completion = await run.result()
                assert long.state == "running"
            return answer

        assert await beside("x", "x") is None
        for first, second in (("x", "y"), ("x", None), (None, "x")):
            answer = await beside(first, second)
            assert answer is not None
            assert answer.stats.average_concurrent_sequences == 2.0
        turns: list[completion.Completion] = []

        async def turn() -> None:
            turns.append(await completion.complete(model, prompt, kv_cache="x", temperature=0.0, max_tokens=40))

        async with trio.open_nursery() as both:
            both.start_soon(turn)
            both.start_soon(turn)
        assert [answer.stats.average_concurrent_sequences for answer in turns] == [1.0, 1.0]
        assert turns[0].tokens == turns[1].tokens
