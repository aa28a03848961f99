"""A model whose layers attend to a window of the last tokens, and forget the cells before it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import laneway
from laneway.decoder import Chunk, DecodeError, StepBatch
from laneway_native import LlamaDecoder, Model
from tests.engine.kit import PLUGIN, Generate
from tests.native.driving import GREEDY, Driver, answer, decoder_of, saved
from tests.tiny_model import tiny_model_parts, write_gguf

WINDOW = 8


@pytest.fixture(scope="module")
def sliding_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three of four layers slide (Cohere 2: a llama without a norm before its feed-forward part)."""
    metadata, tensors = tiny_model_parts(layers=4, context=4096, tied=True)
    metadata = {key.replace("llama.", "cohere2."): value for key, value in metadata.items()}
    metadata |= {
        "general.architecture": "cohere2",
        "cohere2.attention.sliding_window": WINDOW,
        "cohere2.attention.layer_norm_epsilon": 1e-5,
        "cohere2.logit_scale": 0.25,
    }
    path = tmp_path_factory.mktemp("models") / "sliding.gguf"
    write_gguf(path, metadata, [tensor for tensor in tensors if "ffn_norm" not in tensor.name])
    return path


@pytest.fixture(scope="module")
def sliding(sliding_path: Path) -> Iterator[Model]:
    with Model.load(sliding_path) as model:
        assert model.facts.window == WINDOW
        yield model


def text(length: int) -> list[int]:
    return [270 + (7 * i + i // 5) % 120 for i in range(length)]


@pytest.mark.parametrize("mode", [{"kv_mode": "split"}, {"kv_mode": "unified"}], ids=["split", "unified"])
async def test_long_sequences_and_their_peers(sliding: Model, mode: dict[str, Any]) -> None:
    async with decoder_of(sliding, context_size=4096, **mode) as decoder:
        long, short = text(900), text(12)
        alone = [await answer(decoder, long, 20, chunk=300), await answer(decoder, short, 20)]
        assert await answer(decoder, long, 20, chunk=128) == alone[0]
        driver = Driver(decoder)
        await driver.start(0, short)
        await driver.start(1, long, chunk=300)
        await driver.start(2, long, chunk=300)
        for _ in range(10):
            await driver.decode()
        driver.drop(0)
        driver.moves.append((2, 0))
        for _ in range(9):
            await driver.decode()
        assert driver.tokens[0][len(long) :] == driver.tokens[1][len(long) :] == alone[0]


@pytest.mark.parametrize("mode", [{"kv_mode": "split"}, {"kv_mode": "unified"}], ids=["split", "unified"])
async def test_a_saved_sequence_goes_on(sliding: Model, mode: dict[str, Any]) -> None:
    async with decoder_of(sliding, context_size=4096, **mode) as decoder:
        prompt = text(900)
        expected = await answer(decoder, prompt, 10, chunk=300)
        driver = Driver(decoder)
        await driver.start(0, prompt, chunk=300)
        for _ in range(4):
            await driver.decode()
        state = await saved(decoder, 0)
        tokens = driver.tokens[0]
        driver.drop(0)
        await decoder.load(3, state, len(tokens) - 1)
        decoder.open(3, GREEDY, tokens)
        driver.tokens[3] = tokens
        for _ in range(5):
            await driver.decode()
        assert driver.tokens[3][len(prompt) :] == expected


async def fill(decoder: LlamaDecoder, slot: int, tokens: list[int]) -> None:
    decoder.open(slot, GREEDY, tokens)
    for position in range(0, len(tokens), 300):
        part = tokens[position : position + 300]
        await decoder.step(StepBatch((Chunk(slot, position, part, False),)))


async def test_prefixes_of_any_length_can_be_shared(sliding: Model) -> None:
    async with decoder_of(sliding, context_size=8192, parallel=2, kv_mode="unified") as decoder:
        prompt = text(3000)
        for length in (2995, 200, 4):
            other = [*prompt[:length], *text(9)[::-1]]
            expected = await answer(decoder, other, 6, chunk=300)
            await fill(decoder, 0, prompt)
            decoder.copy(0, 1, length)
            driver = Driver(decoder)
            await driver.start(1, other, done=length)
            for _ in range(5):
                await driver.decode()
            assert driver.tokens[1][len(other) :] == expected
            decoder.drop(0)
            decoder.drop(1)


async def test_a_copy_is_refused_where_cells_slid_away(sliding: Model) -> None:
    async with decoder_of(sliding, context_size=8192, parallel=2, kv_mode="unified") as decoder:
        await fill(decoder, 0, text(3000))
        state = await saved(decoder, 0)  # which leaves out what the window no longer covers
        decoder.drop(0)
        await decoder.load(0, state, 3000)
        with pytest.raises(DecodeError, match="are gone: they slid out of the model's window"):
            decoder.copy(0, 1, 200)
        assert decoder.length(1) == 0
        decoder.copy(0, 1, 3000)
        assert decoder.length(1) == 3000


@pytest.mark.parametrize("parallel", [1, 3])
@pytest.mark.parametrize("mode", [{"kv_mode": "split"}, {"kv_mode": "unified"}], ids=["split", "unified"])
async def test_A10_every_slot_holds_its_window(sliding: Model, mode: dict[str, Any], parallel: int) -> None:
    async with decoder_of(sliding, context_size=1200 * parallel, parallel=parallel, **mode) as decoder:
        for slot in range(parallel):
            await fill(decoder, slot, text(1200))
        assert [decoder.length(slot) for slot in range(parallel)] == [1200] * parallel


async def test_a_cut_is_refused_where_cells_slid_away(sliding: Model) -> None:
    """A single slot forgets cells as they slide out of the window; shared ones stay, but for a state that was saved."""
    async with decoder_of(sliding, context_size=4096, parallel=1) as decoder:
        await fill(decoder, 0, text(3000))
        with pytest.raises(DecodeError, match="are gone: they slid out of the model's window"):
            decoder.cut(0, 200)
        decoder.drop(0)
        await fill(decoder, 0, text(3000))
        decoder.cut(0, 3000)
        state = await saved(decoder, 0)
        decoder.drop(0)
        with pytest.raises(DecodeError, match="are gone: they slid out of the model's window"):
            await decoder.load(0, state, 200)
        assert decoder.length(0) == 0
        await decoder.load(0, state, 3000)
        assert decoder.length(0) == 3000


async def test_a_cut_within_the_window_goes_on_as_if_computed(sliding: Model) -> None:
    async with decoder_of(sliding, context_size=4096, parallel=1) as decoder:
        prompt = text(900)
        for length in (899, 890):
            other = [*prompt[:length], *text(9)[::-1]]
            expected = await answer(decoder, other, 6, chunk=300)
            await fill(decoder, 0, prompt)
            decoder.cut(0, length)
            driver = Driver(decoder)
            await driver.start(0, other, done=length)
            for _ in range(5):
                await driver.decode()
            assert driver.tokens[0][len(other) :] == expected
            driver.drop(0)


@pytest.mark.parametrize("parallel", [1, 3])
async def test_an_engine_shares_what_is_still_whole(sliding_path: Path, parallel: int) -> None:
    """A single slot forgets what has slid out of the window, and then a prompt that needs it is computed anew."""
    first = text(900)
    edited = [*first[:20], *text(30)[::-1]]
    answers: dict[bool, list[laneway.Answer]] = {True: [], False: []}
    for shares, made in answers.items():
        async with laneway.open_engine(plugins=[PLUGIN]) as engine:
            model = await engine.load_model(
                sliding_path, parallel, context_size=parallel * 1200, threads=1, prefix_cache=shares
            )
            for turn in ("first", "edited", "next"):
                prompt = {"first": first, "edited": edited, "next": [*edited, *(made[-1].tokens if made else ()), 300]}
                async with engine.run(model, "generate", Generate(tuple(prompt[turn]), 6)) as run:
                    made.append(await run.result())
    assert [answer.tokens for answer in answers[True]] == [answer.tokens for answer in answers[False]]
    known = len(edited) + len(answers[True][1].tokens) - (answers[True][1].stop_reason == "length")
    cached = [answer.stats.cached_tokens for answer in answers[True]]
    assert cached == [0, 0 if parallel == 1 else 20, known]
