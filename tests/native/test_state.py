"""Saved states: whatever is wrong with one, llama.cpp never sees it."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from laneway.decoder import Chunk, DecodeError, StepBatch
from laneway_native import LlamaDecoder, Model
from laneway_native._state import MAGIC, OVERHEAD, fingerprint, seal, unseal
from tests.native.driving import GREEDY, Driver, answer, decoder_of, prompts, saved
from tests.tiny_model import write_tiny_model

PRINT = fingerprint(model="m", window=7)


@given(st.lists(st.binary(max_size=300)))
def test_what_was_sealed_comes_back(pieces: list[bytes]) -> None:
    state = b"".join(pieces)
    assert bytes(unseal(seal(pieces, PRINT), PRINT)) == state
    assert seal(pieces, PRINT) == seal([state], PRINT)


@given(st.binary(max_size=100), st.data())
def test_one_flipped_bit_is_found(state: bytes, data: st.DataObject) -> None:
    damaged = bytearray(seal([state], PRINT))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(DecodeError, match="saved state"):
        unseal(bytes(damaged), PRINT)


@given(st.binary(max_size=100), st.data())
def test_a_missing_or_added_end_is_found(state: bytes, data: st.DataObject) -> None:
    whole = seal([state], PRINT)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(DecodeError, match="truncated"):
        unseal(whole[:cut], PRINT)
    with pytest.raises(DecodeError, match="truncated"):
        unseal(whole + data.draw(st.binary(min_size=1, max_size=9)), PRINT)


@given(st.binary(max_size=400))
def test_any_bytes_are_refused(junk: bytes) -> None:
    with pytest.raises(DecodeError):
        unseal(junk, PRINT)


def test_another_format_version_is_named() -> None:
    other = bytearray(seal([b"sta", b"te"], PRINT))
    struct.pack_into("<I", other, len(MAGIC), 2)
    with pytest.raises(DecodeError, match="has format 2, this version reads 1"):
        unseal(bytes(other), PRINT)


def test_another_fingerprint_is_refused() -> None:
    with pytest.raises(DecodeError, match="of another model, adapter or context setting"):
        unseal(seal([b"state"], fingerprint(model="n", window=7)), PRINT)


def test_a_fingerprint_tells_facts_apart() -> None:
    facts: list[dict[str, object]] = [{"a": value} for value in (1, 2, "1", (1,), 1.0)]
    facts += [{"b": 1}, {"a": 1, "b": 1}]
    assert len({fingerprint(**each) for each in facts}) == len(facts)
    assert fingerprint(a=1, b=2) == fingerprint(b=2, a=1)


# On a decoder.


async def test_every_corruption_is_refused_and_the_slot_stays_empty(tiny: Model) -> None:
    prompt = prompts(tiny)[0]
    async with decoder_of(tiny) as decoder:
        expected = await answer(decoder, prompt, 6)
        driver = Driver(decoder)
        await driver.start(0, prompt)
        state = await saved(decoder, 0)
        flipped = bytearray(state)
        flipped[len(flipped) // 2] ^= 4
        for bad in (b"", state[:10], state[: OVERHEAD + 5], state[:-1], state + b"\0", bytes(flipped), b"GGUF" + state):
            with pytest.raises(DecodeError):
                await decoder.load(1, bad, 1)
            assert decoder.length(1) == 0
        await decoder.load(1, state, len(prompt))
        decoder.open(1, GREEDY, driver.tokens[0])
        driver.tokens[1] = list(driver.tokens[0])
        for _ in range(5):
            await driver.decode()
        assert driver.tokens[0][len(prompt) :] == driver.tokens[1][len(prompt) :] == expected


@pytest.mark.parametrize("kv_mode", ["split", "unified"])
async def test_a_state_that_llama_refuses_leaves_the_slot_empty(tiny: Model, kv_mode: Any) -> None:
    """The seal is right and the contents are not: cut inside a tensor."""
    prompt = prompts(tiny)[0]
    async with decoder_of(tiny, kv_mode=kv_mode) as decoder:
        expected = await answer(decoder, prompt, 4)
        driver = Driver(decoder)
        await driver.start(0, prompt)
        state = await saved(decoder, 0)
        for cut in (1, 100, len(state) - OVERHEAD - 20):
            with pytest.raises(DecodeError):
                await decoder.load(1, seal([state[OVERHEAD:-cut]], await decoder.state_fingerprint()), 1)
            assert decoder.length(1) == 0
        for _ in range(3):
            await driver.decode()
        assert driver.tokens[0][len(prompt) :] == expected


async def test_what_may_not_be_saved_or_loaded(tiny: Model) -> None:
    prompt = prompts(tiny)[0]
    async with decoder_of(tiny) as decoder:
        with pytest.raises(DecodeError, match="slot 2 is empty"):
            await decoder.save(2)
        for slot in (-1, 4):
            with pytest.raises(DecodeError, match="does not exist"):
                await decoder.save(slot)
        driver = Driver(decoder)
        await driver.start(0, prompt)
        state = await saved(decoder, 0)
        with pytest.raises(DecodeError, match="still holds"):
            await decoder.load(0, state, 1)
        with pytest.raises(DecodeError, match="does not exist"):
            await decoder.load(9, state, 1)
        await driver.decode()


async def test_an_open_slot_without_cells_can_be_loaded(tiny: Model) -> None:
    prompt = prompts(tiny)[0]
    async with decoder_of(tiny) as decoder:
        driver = Driver(decoder)
        await driver.start(0, prompt)
        state = await saved(decoder, 0)
        decoder.open(1, GREEDY, driver.tokens[0])
        await decoder.load(1, state, len(prompt))
        driver.tokens[1] = list(driver.tokens[0])
        picked = await driver.decode()
        assert picked[0] == picked[1]


async def test_a_cancelled_caller_waits_for_save_and_load(tiny: Model) -> None:
    prompt = prompts(tiny)[0]
    async with decoder_of(tiny) as decoder:
        await Driver(decoder).start(0, prompt)
        with trio.CancelScope() as scope:
            scope.cancel()
            seal_it = await decoder.save(0)
        state = await seal_it()
        with trio.CancelScope() as scope:
            scope.cancel()
            await decoder.load(1, state, len(prompt))
        assert decoder.length(1) == len(prompt)


async def test_K4_the_fingerprint_covers_model_and_settings(tiny: Model, tiny_path: Path, tmp_path: Path) -> None:
    async def print_of(model: Model, **options: Any) -> bytes:
        async with decoder_of(model, **{"flash_attention": True, "kv_mode": "unified", **options}) as decoder:
            return await decoder.state_fingerprint()

    same = await print_of(tiny)
    assert await print_of(tiny) == same
    copy, longer = tmp_path / "elsewhere.gguf", tmp_path / "longer.gguf"
    raw = await trio.Path(tiny_path).read_bytes()
    await trio.Path(copy).write_bytes(raw)
    await trio.Path(longer).write_bytes(raw + b"\0" * 32)
    with Model.load(copy) as moved:
        assert await print_of(moved) == same  # the path is no part of it
    prints = [same]
    for path in (write_tiny_model(tmp_path / "other.gguf", n_vocab=480), longer):
        with Model.load(path) as other:
            prints.append(await print_of(other))
    for options in (
        {"kv_type": "f32"},
        {"flash_attention": False},
        {"kv_mode": "split"},
        {"context_size": 2048},
        {"parallel": 2, "context_size": 512},
        {"rope_freq_base": 5000.0},
        {"rope_freq_scale": 0.5},
    ):
        prints.append(await print_of(tiny, **options))
    assert len(set(prints)) == len(prints)
    # The rest does not matter to the cells.
    assert await print_of(tiny, threads=2, chunk_target=0.05) == same


async def test_a_state_is_refused_by_another_setting(tiny: Model) -> None:
    prompt = prompts(tiny)[0]
    base: dict[str, Any] = {"flash_attention": True, "kv_mode": "unified"}
    async with decoder_of(tiny, **base) as decoder:
        await Driver(decoder).start(0, prompt)
        state = await saved(decoder, 0)
    for options in ({"kv_type": "f32"}, {"flash_attention": False}, {"kv_mode": "split"}, {"context_size": 512}):
        async with decoder_of(tiny, **{**base, **options}) as decoder:
            with pytest.raises(DecodeError, match="another model, adapter or context setting"):
                await decoder.load(0, state, 1)
            assert decoder.length(0) == 0


async def test_a_state_goes_on_in_a_decoder_of_its_own_later(tiny: Model) -> None:
    prompt = prompts(tiny)[3]
    async with decoder_of(tiny) as decoder:
        expected = await answer(decoder, prompt, 12)
        driver = Driver(decoder)
        await driver.start(2, prompt)
        for _ in range(5):
            await driver.decode()
        tokens = driver.tokens[2]
        state = await saved(decoder, 2)
    async with decoder_of(tiny) as decoder:
        await decoder.load(0, state, len(tokens) - 1)
        later = Driver(decoder)
        decoder.open(0, GREEDY, tokens)
        later.tokens[0] = tokens
        for _ in range(6):
            await later.decode()
        assert later.tokens[0][len(prompt) :] == expected


def test_more_of_a_state_than_the_window_is_refused(tiny: Model) -> None:
    """Cells are rounded up to 256, so llama.cpp would take it."""

    async def main() -> None:
        tokens = [5 + i % 90 for i in range(60)]
        async with decoder_of(tiny, context_size=240) as decoder:
            decoder.open(0, GREEDY, tokens)
            await decoder.step(StepBatch((Chunk(0, 0, tokens, False),)))
            state = await saved(decoder, 0)
        async with decoder_of(tiny, context_size=200) as smaller:
            forged = seal([state[OVERHEAD:]], await smaller.state_fingerprint())
            with pytest.raises(DecodeError, match="are more than the 50 of a slot"):
                await smaller.load(0, forged, 60)
            assert smaller.length(0) == 0
            await smaller.load(0, forged, 50)
            assert smaller.length(0) == 50

    trio.run(main)


@pytest.mark.parametrize("kv_mode", ["split", "unified"])
async def test_the_first_tokens_of_a_state_are_enough(tiny: Model, kv_mode: Any) -> None:
    """An edited history: what comes before the edit is taken, the rest is computed."""
    prompt = prompts(tiny)[3]
    for length in (1, 7, len(prompt) - 1):
        other = [*prompt[:length], *prompts(tiny)[1]]
        async with decoder_of(tiny, kv_mode=kv_mode) as decoder:
            expected = await answer(decoder, other, 8)
            driver = Driver(decoder)
            await driver.start(0, prompt)
            state = await saved(decoder, 0)
            await decoder.verify(state)
            await decoder.load(2, state, length, verified=True)
            assert decoder.length(2) == length
            await driver.start(2, other, done=length)
            for _ in range(7):
                await driver.decode()
            assert driver.tokens[2][len(other) :] == expected


async def test_more_tokens_than_a_state_has_are_refused(tiny: Model) -> None:
    prompt = prompts(tiny)[0]
    async with decoder_of(tiny) as decoder:
        await Driver(decoder).start(0, prompt)
        state = await saved(decoder, 0)
        for length in (0, len(prompt) + 1):
            with pytest.raises(DecodeError, match="cannot be kept"):
                await decoder.load(1, state, length)
            assert decoder.length(1) == 0


async def test_verifying_finds_damage_and_loading_what_was_verified_does_not_look_again(tiny: Model) -> None:
    prompt = prompts(tiny)[0]
    async with decoder_of(tiny) as decoder:
        await Driver(decoder).start(0, prompt)
        state = await saved(decoder, 0)
        flipped = bytearray(state)
        flipped[-1] ^= 1  # in the last value
        with pytest.raises(DecodeError, match="damaged"):
            await decoder.verify(bytes(flipped))
        await decoder.load(1, bytes(flipped), len(prompt), verified=True)
        assert decoder.length(1) == len(prompt)
        with pytest.raises(DecodeError, match="truncated"):
            await decoder.load(2, state[:-1], len(prompt), verified=True)


async def test_a_copy_is_sealed_after_its_slot_was_dropped(tiny: Model) -> None:
    prompt = prompts(tiny)[0]
    async with decoder_of(tiny) as decoder:
        driver = Driver(decoder)
        await driver.start(0, prompt)
        expected = await saved(decoder, 0)
        seal_it = await decoder.save(0)
        driver.drop(0)
        await driver.start(0, prompts(tiny)[3])
        await decoder.save(0)  # uses the buffer that the first copy came through
    assert await seal_it() == expected


def test_making_a_decoder_needs_no_trio(tiny: Model) -> None:
    """Loaders make it in a worker thread."""
    decoder = LlamaDecoder(tiny, context_size=512, parallel=2, threads=1)
    trio.run(decoder.aclose)
