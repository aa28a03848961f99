"""Shared prefixes on llama.cpp, through the whole engine: an F32 model answers as it does without sharing."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

import laneway
from laneway_plugins import completion
from tests.tiny_model import write_tiny_model

SYSTEM = "you are a parrot that says again what it has heard, and again, and again. "
ENDINGS = ("hello", "on and on", "zebra", "it is what it is", "a b c", "the quick brown fox")


async def answers(path: Path, rounds: int, **options: Any) -> tuple[list[str], float]:
    """Texts of answers to prompts that begin alike, asked for together, and how often their beginning was cached."""
    texts: dict[tuple[int, str], str] = {}
    cached = 0
    async with laneway.open_engine() as engine:
        model = await engine.load_model(path, 4, context_size=4 * 160, threads=1, **options)

        async def ask(number: int, ending: str) -> None:
            nonlocal cached
            prompt = SYSTEM + ending
            for turn in range(2):  # the second goes on with all of the first
                answer = await completion.complete(model, prompt, max_tokens=8, temperature=0.0)
                texts[2 * number + turn, ending] = answer.text
                cached += answer.stats.cached_tokens
                prompt += answer.text + ending

        for number in range(rounds):
            async with trio.open_nursery() as nursery:
                for ending in ENDINGS:
                    nursery.start_soon(ask, number, ending)
        common = len(await model.tokenize(SYSTEM)) - 1  # its last token may be another with what comes after it
    return [texts[key] for key in sorted(texts)], cached / common


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("prefixes") / "tiny.gguf")


async def test_answers_are_those_without_sharing(path: Path) -> None:
    expected, none = await answers(path, 1, prefix_cache=False)
    assert none == 0
    texts, cached = await answers(path, 1)
    assert texts == expected
    assert cached >= 2 * len(ENDINGS) - 1  # for every prompt but the first
    again, cached_again = await answers(path, 2)
    assert again[: len(expected)] == again[len(expected) :] == expected
    # How much more than the common beginning a prompt finds depends on who came first.
    assert cached_again >= 4 * len(ENDINGS) - 1


async def test_split_cells_share_nothing(path: Path) -> None:
    expected, _ = await answers(path, 1, prefix_cache=False)
    assert await answers(path, 1, kv_mode="split") == (expected, 0)


async def test_A10_windows_are_whole_whatever_slots_keep(path: Path) -> None:
    """All slots keep cells, and then all are filled to the end of their windows at once."""
    async with laneway.open_engine() as engine:
        model = await engine.load_model(path, 4, context_size=4 * 64, threads=1)

        forbidden = dict.fromkeys(model.tokenizer.end_tokens, float("-inf"))
        ends: list[str] = []

        async def fill(text: str, **how: Any) -> None:
            answer = await completion.complete(model, text, temperature=0.0, **how)
            ends.append(answer.stop_reason)

        for letters in ("abcd", "efgh"):
            async with trio.open_nursery() as nursery:
                for letter in letters:
                    nursery.start_soon(fill, letter * 40)
            ends.clear()
            async with trio.open_nursery() as nursery:
                for letter in letters.upper():
                    nursery.start_soon(partial(fill, letter * 30, logit_bias=forbidden))
            assert ends == ["length"] * 4
