"""Attention on the CPU: Laneway's kernel against double precision, and against llama.cpp's own."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneway._sources import find_package
from laneway.decoder import Chunk, Sampling, StepBatch
from laneway_native import LlamaDecoder, Model, attention_kernel, has_attention_kernel, use_attention_kernel
from tests.native.attention_reference import (
    Case,
    KvName,
    Shape,
    cases,
    compute,
    count,
    draw,
    errors,
    expected,
    kernel,
)
from tests.native.driving import Driver, answer, decoder_of, prompts
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.skipif(not has_attention_kernel(), reason="this build has llama.cpp's attention kernel only")


@given(case=cases(), threads=st.integers(1, 4))
def test_it_is_as_exact_as_f32_allows_and_no_less_than_the_stock_kernel(case: Case, threads: int) -> None:
    before = count()
    with kernel(True):
        ours = compute(case, threads=threads)
    assert count() == before + 1
    with kernel(False):
        stock = compute(case, threads=threads)
    assert count() == before + 1
    right = expected(case)
    our_errors = errors(ours, right)
    assert all(error <= bound for error, bound in zip(our_errors, right.bounds, strict=True))
    # Of two that both round at random, one is a little worse now and then: a few roundings of the result are allowed.
    assert max(our_errors) <= max(errors(stock, right)) + 0.05 * max(right.bounds)


@given(case=cases())
def test_the_bits_do_not_depend_on_the_threads(case: Case) -> None:
    with kernel(True):
        alone = compute(case, threads=1)
        for threads in (2, 3, 4):
            assert compute(case, threads=threads) == alone


@given(case=cases(), threads=st.integers(1, 3))
def test_the_bits_of_rows_of_different_sequences_do_not_depend_on_each_other(case: Case, threads: int) -> None:
    shape = case.shape
    mask = case.mask or [[0.0] * shape.cells for _ in range(shape.rows * shape.streams)]
    # Each row sees the cells of its own sequence: rows that see the same are computed together.
    for number, values in enumerate(mask):
        mask[number] = [
            value if cell % shape.rows == number % shape.rows else -math.inf for cell, value in enumerate(values)
        ]
    case = attrs.evolve(case, mask=mask)
    with kernel(True):
        together = compute(case, threads=threads)
        for row in range(shape.rows):
            # The same row of every stream.
            chosen = [stream * shape.rows + row for stream in range(shape.streams)]
            heads = [index for number in chosen for index in range(number * shape.heads, (number + 1) * shape.heads)]
            single = Case(
                attrs.evolve(shape, rows=1),
                [case.q[index] for index in heads],
                case.k,
                case.v,
                [mask[number] for number in chosen],
                case.sinks,
            )
            assert compute(single, threads=threads) == [together[index] for index in heads]


def window_case(kv: KvName, cells: int, past: int, rows: int, seed: int = 0) -> Case:
    """A chunk in a sliding window: row i sees the 100 cells up to ``past + i``."""
    case = draw(Shape(64, 2, 3, rows, cells, cells, 1, kv), seed)
    assert case.mask is not None
    for i, row in enumerate(case.mask):
        for cell in range(cells):
            row[cell] = 0.0 if past + i - 100 < cell <= past + i else -math.inf
    return case


@pytest.mark.parametrize("kv", ["f16", "f32", "q8_0"])
@pytest.mark.parametrize("rows", [1, 7, 30])
def test_sliding_windows(kv: KvName, rows: int) -> None:
    case = window_case(kv, 256, 150, rows)
    right = expected(case)
    before = count()
    with kernel(True):
        computed = compute(case, threads=2)
    assert count() == before + 1
    assert all(error <= bound for error, bound in zip(errors(computed, right), right.bounds, strict=True))


@pytest.mark.slow
def test_a_long_row_is_cut_into_spans_of_more_than_one_block() -> None:
    case = draw(Shape(32, 1, 2, 1, 9000, 9000, 1), 3, holes=0.3)
    right = expected(case)
    with kernel(True):
        alone = compute(case, threads=1)
        assert compute(case, threads=4) == alone
    assert all(error <= bound for error, bound in zip(errors(alone, right), right.bounds, strict=True))


def test_rows_that_see_nothing_are_zero_beside_rows_that_see_all() -> None:
    case = draw(Shape(64, 1, 3, 3, 300, 300, 2), 5)
    assert case.mask is not None
    case.mask[1] = case.mask[3] = [-math.inf] * 300
    with kernel(True):
        for threads in (1, 2, 4):
            computed = compute(case, threads=threads)
            for row in range(6):
                blank = [not any(values) for values in computed[3 * row : 3 * row + 3]]
                assert blank == [row in (1, 3)] * 3


def test_masked_cells_are_not_looked_at() -> None:
    case = draw(Shape(64, 1, 3, 2, 200, 200, 1, "f32"), 6, holes=0.5)
    with kernel(True):
        clean = compute(case, threads=2)
        assert case.mask is not None
        for cell in range(200):
            if all(row[cell] == -math.inf for row in case.mask):
                case.k[cell][:] = case.v[cell][:] = [math.nan] * 64
        assert compute(case, threads=2) == clean


def test_what_it_does_not_do_goes_to_the_stock_kernel() -> None:
    case = draw(Shape(40, 1, 2, 2, 100, 100, 1), 7, holes=0.3, biased=True)
    before = count()
    with kernel(True):
        ours = compute(case, threads=2)
    with kernel(False):
        stock = compute(case, threads=2)
    assert ours == stock
    assert count() == before


def test_the_switch() -> None:
    assert attention_kernel()
    assert not use_attention_kernel(False)
    try:
        assert not attention_kernel()
        assert has_attention_kernel()
    finally:
        assert use_attention_kernel(True)
    assert attention_kernel()


@pytest.mark.parametrize(("value", "on"), [("0", False), ("1", True), ("", True)])
def test_the_environment_turns_it_off(value: str, on: bool) -> None:
    program = "import laneway_native; print(laneway_native.attention_kernel())"
    environment = {**os.environ, "LANEWAY_ATTENTION": value}
    told = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == str(on)


@pytest.mark.parametrize("kv_mode", ["split", "unified"])
async def test_greedy_tokens_of_an_f32_model_are_those_without_flash_attention(tiny: Model, kv_mode: str) -> None:
    async with decoder_of(tiny, flash_attention=False, kv_mode=kv_mode, kv_type="f32") as decoder:
        right = [await answer(decoder, prompt, 30) for prompt in prompts(tiny, 4)]
    before = count()
    async with decoder_of(tiny, flash_attention=True, kv_mode=kv_mode, kv_type="f32", threads=2) as decoder:
        driver = Driver(decoder)
        given = prompts(tiny, 4)
        for slot, prompt in enumerate(given):
            await driver.start(slot, prompt)
        for _ in range(29):
            await driver.decode()
        assert [driver.tokens[slot][len(prompt) :] for slot, prompt in enumerate(given)] == right
    assert count() > before


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
async def test_log_probabilities_are_nearer_to_f32s_than_the_stock_kernels(kv_type: str, tmp_path: Path) -> None:
    # Heads of 32 values, as q8_0 needs.
    path = write_tiny_model(tmp_path / "model.gguf", heads=2, kv_heads=1)

    async def logprobs(kind: str, flash_attention: bool) -> list[dict[int, float]]:
        sampling = Sampling(temperature=0.0, logprobs=True, top_logprobs=20)
        found = []
        with Model.load(path) as model:
            text = model.tokenize("it is what it is, is it not? the quick brown fox") * 4
            async with decoder_of(model, flash_attention=flash_attention, kv_type=kind) as decoder:
                decoder.open(0, sampling, text)
                for position, token in enumerate(text):
                    result = await decoder.step(StepBatch((Chunk(0, position, [token], True),)))
                    found.append(dict(result.logprobs[0].top))
        return found

    def distance(these: list[dict[int, float]]) -> float:
        # The twentieth token may be another one.
        pairs = [
            (one[token], other[token])
            for one, other in zip(these, right, strict=True)
            for token in one.keys() & other.keys()
        ]
        assert len(pairs) > 19 * len(right)
        return math.sqrt(sum((a - b) ** 2 for a, b in pairs) / len(pairs))

    right = await logprobs("f32", False)
    with kernel(True):
        ours = distance(await logprobs(kind=kv_type, flash_attention=True))
    with kernel(False):
        stock = distance(await logprobs(kind=kv_type, flash_attention=True))
    assert ours < stock


@pytest.mark.real_model
@pytest.mark.slow
async def test_perplexity_of_a_real_model_is_the_stock_kernels() -> None:
    package = find_package("smollm2")
    assert package is not None
    if not package.path().exists():
        pytest.skip("the model is not there: laneway pull smollm2")
    text = (
        "The lighthouse keeper climbed the stairs every evening, lit the lamp, and wrote the weather into his book. "
        "Ships came past on their way to the north, and some of them answered with a long note of the horn. In winter "
        "there were weeks in which nobody came to the island, and he read the same letters again and again until he "
        "knew them by heart. When the storm broke the window, he repaired it with a piece of a boat."
    )
    losses: dict[str, float] = {}
    with Model.load(package.path()) as model:
        tokens = model.tokenize(text)
        for name, on, flash in (("ours", True, True), ("stock", False, True), ("none", False, False)):
            with kernel(on):
                async with decoder_of(model, parallel=4, context_size=512, flash_attention=flash, threads=2) as decoder:
                    losses[name] = await cross_entropy(decoder, tokens)
    assert losses["ours"] == pytest.approx(losses["stock"], rel=0.01)
    assert losses["ours"] == pytest.approx(losses["none"], rel=0.01)


async def cross_entropy(decoder: LlamaDecoder, tokens: list[int]) -> float:
    """Nats a token; a token that is not among the twenty likeliest counts as the twentieth.

    Each slot goes on from another place of the text, all of them in the same steps.
    """
    sampling = Sampling(temperature=0.0, logprobs=True, top_logprobs=20)
    ends = [len(tokens) * (slot + 1) // decoder.slots for slot in range(decoder.slots)]
    at = [1, *ends[:-1]]
    losses: list[float] = []

    async def step(*chunks: Chunk) -> None:
        result = await decoder.step(StepBatch(chunks))
        for chunk in chunks:
            top = dict(result.logprobs[chunk.slot].top)
            following = tokens[chunk.position + len(chunk.tokens)]
            losses.append(-top.get(following, min(top.values())))

    for slot, start in enumerate(at):
        decoder.open(slot, sampling, tokens[:start])
        await step(Chunk(slot, 0, tokens[:start], True))
    while going := [slot for slot, end in enumerate(ends) if at[slot] + 1 < end]:
        await step(*(Chunk(slot, at[slot], [tokens[at[slot]]], True) for slot in going))
        for slot in going:
            at[slot] += 1
    assert len(losses) == len(tokens) - 1
    return sum(losses) / len(losses)
