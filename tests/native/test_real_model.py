"""The native layer on SmolLM2-135M-Instruct: a real vocabulary, quantised weights, real speed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneway.decoder import ModelLoadError, Sampling, Written
from laneway_native import Model
from tests.native.driving import GREEDY, Driver, answer, decoder_of, saved
from tests.native.hostile import corpus

pytestmark = [pytest.mark.real_model, pytest.mark.slow]


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Model]:
    from laneway._sources import parse_source

    try:
        source = parse_source("smollm2")
    except ModelLoadError as error:
        pytest.skip(str(error))
    assert source.path is not None
    with Model.load(source.path) as model:
        yield model


def chat(model: Model, text: str) -> list[int]:
    return model.tokenize(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n", special=True)


QUESTIONS = ("What is the capital of France?", "Name a colour.", "Count to five.", "Say hello.")


def test_its_tokens_are_those_of_llama(smollm2: Model) -> None:
    bits = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<|", "im_end", "|>", " ", "\n", "user"]
    bits += ["hello", " world", "é", "日本", "😀", "\u00a0", "don't", "12345", "\r\n", "\t\t"]

    @given(st.lists(st.sampled_from(bits) | st.text(max_size=6), max_size=20).map("".join))
    def same(text: str) -> None:
        expected = smollm2.tokenize_with_llama(text, special=True)
        assert smollm2.tokenize(text, bos=False, special=True) == expected
        assert smollm2.tokenize(text, bos=False, special=Written(spans=((0, len(text)),))) == expected
        assert smollm2.tokenize(text, bos=False) == smollm2.tokenize_with_llama(text)
        assert smollm2.least_tokens(text) <= len(expected)

    same()


def test_no_control_token_comes_of_content(smollm2: Model) -> None:
    (start,) = smollm2.tokenize("<|im_start|>", bos=False, special=True)
    (end,) = smollm2.tokenize("<|im_end|>", bos=False, special=True)
    control = {token for token in range(smollm2.size) if smollm2.piece(token) != smollm2.special_piece(token)}
    head, tail = "<|im_start|>user\n", "<|im_end|>\n"
    for content in corpus():
        text = head + content + tail
        spans = ((0, len(head)), (len(text) - len(tail), len(text)))
        tokens = smollm2.tokenize(text, bos=False, special=Written(spans=spans))
        assert [token for token in tokens if token in control] == [start, end]
        shown = smollm2.detokenize(tokens[1 : tokens.index(end)]).decode("utf-8", "replace")
        # Its vocabulary lacks some bytes, which it drops from any text.
        plain = smollm2.detokenize(smollm2.tokenize_with_llama("user\n" + content)).decode("utf-8", "replace")
        assert shown == plain


def test_a_long_word_has_a_bound_near_its_tokens(smollm2: Model) -> None:
    text = "supercalifragilistic" * 10_000
    least, tokens = smollm2.least_tokens(text), len(smollm2.tokenize(text, bos=False))
    assert tokens / 10 < least <= tokens


async def test_it_knows_the_capital_of_france(smollm2: Model) -> None:
    async with decoder_of(smollm2) as decoder:
        tokens = await answer(decoder, chat(smollm2, QUESTIONS[0]), 12)
        assert b"Paris" in smollm2.detokenize(tokens)


@pytest.mark.parametrize("kv_mode", ["split", "unified"])
async def test_the_same_schedule_gives_the_same_tokens_whoever_leaves(smollm2: Model, kv_mode: str) -> None:
    """Bitwise: batch shapes are the same, so kernels are the same, whatever the others' contents."""

    async def run(second: str) -> list[int]:
        async with decoder_of(smollm2, kv_mode=kv_mode) as decoder:
            driver = Driver(decoder)
            first = chat(smollm2, QUESTIONS[0])
            await driver.start(0, first)
            # Of the same length, and dropped and replaced half way.
            other = chat(smollm2, second)[: len(first)]
            await driver.start(1, other)
            for round_ in range(12):
                if round_ == 6:
                    driver.drop(1)
                    await driver.start(1, other)
                await driver.decode()
            return driver.tokens[0][len(first) :]

    assert await run("Tell me about the sea, please, and the sky") == await run("Why do cats purr so loudly at night?")


@pytest.mark.parametrize("kv_mode", ["split", "unified"])
async def test_a_restored_sequence_goes_on_identically(smollm2: Model, kv_mode: str) -> None:
    prompt = chat(smollm2, QUESTIONS[2])
    async with decoder_of(smollm2, kv_mode=kv_mode) as decoder:
        expected = await answer(decoder, prompt, 16)
        driver = Driver(decoder)
        await driver.start(0, prompt)
        for _ in range(5):
            await driver.decode()
        state, tokens = await saved(decoder, 0), driver.tokens[0]
        driver.drop(0)
        await decoder.load(1, state, len(tokens) - 1)
        decoder.open(1, GREEDY, tokens)
        driver.tokens[1] = tokens
        for _ in range(10):
            await driver.decode()
        assert driver.tokens[1][len(prompt) :] == expected


JSON_GRAMMAR = r"""
root   ::= object
value  ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
array  ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" ([^"\\\x00-\x1f] | "\\" ["\\/bfnrt])* "\"" ws
number ::= "-"? [0-9]{1,6} ("." [0-9]{1,4})? ws
ws     ::= [ \t\n]{0,4}
"""


async def test_a_json_grammar_gives_json_and_costs_little(smollm2: Model) -> None:
    prompt = chat(smollm2, "Describe a person as a JSON object with name and age, short.")
    async with decoder_of(smollm2) as decoder:
        sampling = Sampling(temperature=0.7, seed=3, grammar=JSON_GRAMMAR)
        began = time.process_time()
        tokens = await answer(decoder, prompt, 120, sampling)
        bound = time.process_time() - began
        began = time.process_time()
        await answer(decoder, prompt, 120, Sampling(temperature=0.7, seed=3))
        free = time.process_time() - began
        ends = [index for index, token in enumerate(tokens) if token in smollm2.end_tokens]
        text = smollm2.detokenize(tokens[: ends[0]] if ends else tokens)
        if ends:
            json.loads(text)
        assert text.startswith(b"{")
        # The whole vocabulary against the grammar would take 26 ms a token, which is more than the token itself.
        assert bound < 2 * free
