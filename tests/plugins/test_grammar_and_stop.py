"""Grammars, control tokens as stop strings and penalties, through the whole engine on a tiny GGUF model."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

import laneway
from laneway_plugins import batch, completion
from tests.tiny_model import IM_END, IM_START, write_tiny_model


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf")


@asynccontextmanager
async def loaded(path: Path) -> AsyncIterator[laneway.Model]:
    async with laneway.open_engine() as engine:
        yield await engine.load_model(str(path), parallel=4, context_size=1024, threads=1)


OPTIONAL = "root ::= " + '"a"? ' * 255 + '"b"'


async def test_an_answer_of_optional_parts_is_whole(tiny_file: Path) -> None:
    """However likely its end is after the first "a"."""
    async with loaded(tiny_file) as model:
        (a,) = model.tokenizer.tokenize("a", bos=False)
        bias = {a: 50.0} | dict.fromkeys(model.tokenizer.end_tokens, 100.0)
        answer = await completion.complete(
            model, "x", grammar=OPTIONAL, logit_bias=bias, temperature=0.0, max_tokens=200
        )
        assert answer.stop_reason == "length"
        assert set(answer.text) == {"a"}
        answer = await completion.complete(model, "x", grammar=OPTIONAL, temperature=0.0, seed=1)
        assert answer.stop_reason == "eos"
        assert answer.text.endswith("b")


async def test_C10_a_grammar_that_runs_into_a_wall_hurts_nobody_else(tiny_file: Path) -> None:
    async with loaded(tiny_file) as model:
        alone = await completion.complete(model, "peer", temperature=0.0, max_tokens=40)
        wall = dict.fromkeys(tokens_with(model, "d"), -math.inf)
        found: list[completion.Completion] = []

        async def peer() -> None:
            found.append(await completion.complete(model, "peer", temperature=0.0, max_tokens=40))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(peer)
            with pytest.raises(laneway.DecodeError, match="no token may come next") as caught:
                await completion.complete(model, "x", temperature=0.0, grammar='root ::= "abc" "d"', logit_bias=wall)
            assert caught.value.sequences == 1
        assert found[0].tokens == alone.tokens
        assert model.state == "loaded"


async def test_an_item_of_a_batch_fails_alone(tiny_file: Path) -> None:
    async with loaded(tiny_file) as model:
        outcomes = await batch.complete(
            model,
            ["one", "two"],
            temperature=0.0,
            grammar='root ::= "abc" "d"',
            logit_bias=dict.fromkeys(tokens_with(model, "d"), -math.inf),
        )
        assert [(outcome.stop_reason, outcome.text) for outcome in outcomes] == [("error", "abc")] * 2
        assert all(isinstance(outcome.error, laneway.DecodeError) for outcome in outcomes)


@pytest.mark.parametrize("grammar", ["root ::= [z-a]", 'root ::= "a" root', "root ::= "])
async def test_A10_a_grammar_that_allows_nothing_is_refused(tiny_file: Path, grammar: str) -> None:
    async with loaded(tiny_file) as model:
        if grammar == "root ::= ":
            # This one allows just the empty answer.
            answer = await completion.complete(model, "x", grammar=grammar)
            assert (answer.text, answer.stop_reason) == ("", "eos")
            return
        with pytest.raises(laneway.InvalidRequestError, match="allows no answer") as caught:
            await completion.complete(model, "x", grammar=grammar)
        assert caught.value.field == "grammar"


@pytest.mark.parametrize("tokenizer", ["spm", "bpe"])
@pytest.mark.parametrize(("text", "token"), [("<|im_start|>", IM_START), ("<|im_end|>", IM_END)])
async def test_a_control_token_ends_the_answer(tmp_path: Path, tokenizer: str, text: str, token: int) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf", tokenizer=tokenizer)  # type: ignore[arg-type]
    async with loaded(path) as model:
        (h,) = model.tokenizer.tokenize("h", bos=False)
        # The grammar leads to the token, so that the answer does not hang on what a random model says.
        grammar = f'root ::= "h" {text} "h"?' if token == IM_START else f'root ::= "h" {text}'
        answer = await completion.complete(model, "x", stop=[text], grammar=grammar)
        assert (answer.text, answer.stop_reason, answer.tokens) == ("h", "stop", (h,))
        answer = await completion.complete(model, "x", stop=["never"], grammar=grammar)
        assert answer.stop_reason == "eos"
        assert answer.tokens[1:2] == ((IM_START,) if token == IM_START else ())


async def test_a_chat_ends_in_spite_of_a_repeat_penalty(tiny_file: Path) -> None:
    """The prompt of a chat holds an end token for every message."""
    chat = [{"role": role, "content": "hello"} for role in ("user", "assistant", "user")]
    async with loaded(tiny_file) as model:
        prompt = await completion.prepare_job(model, completion.CompletionRequest(chat))
        assert IM_END in prompt.prompt
        # An end token is just likely enough, as long as nothing is taken from it.
        bias = {IM_END: 25.0}
        for penalties in ({}, {"repeat_penalty": 10.0}, {"frequency_penalty": 2.0, "presence_penalty": 2.0}):
            answer = await completion.complete(model, chat, temperature=0.0, max_tokens=5, logit_bias=bias, **penalties)  # type: ignore[arg-type]
            assert (answer.text, answer.stop_reason) == ("", "eos")


def tokens_with(model: laneway.Model, text: str) -> list[int]:
    """Every token whose piece has that text in it."""
    return [token for token in range(model.tokenizer.size) if text.encode() in model.tokenizer.piece(token)]
