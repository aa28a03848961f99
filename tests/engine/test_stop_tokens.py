"""Control tokens as stop strings: nothing of them is in the text, so the tokens themselves must end the answer."""

from __future__ import annotations

from typing import Any

import pytest
import trio.testing

import laneway
from laneway._text import LONGEST_CONTROL_TEXT, control_tokens
from laneway.decoder import BatchPolicy, Sampling
from laneway.testing import ScriptedTokenizer
from tests.engine.kit import GREEDY, Body, bench

TOKENIZER = ScriptedTokenizer()
BEGIN, END, TURN, TURN_END = (
    TOKENIZER.tokenize(text, bos=False, special=True)[0]
    for text in ("<|begin|>", "<|end|>", "<|turn|>", "<|turn_end|>")
)
PROMPT = [1, 2, 3]
SEVERAL = BatchPolicy(chunk_min=4, chunk_max=16, chunk_probe=8, rounds_target=1.0)


def letters(text: str) -> list[int]:
    return TOKENIZER.tokenize(text, bos=False)


async def answer(
    script: list[int], stop: tuple[str, ...], sampling: Sampling = GREEDY, **options: Any
) -> laneway.Answer:
    """The answer where the decoder says ``script``, then an end token."""

    async def body(ctx: laneway.RequestContext) -> laneway.Answer:
        async with ctx.generate(PROMPT, sampling, stop=stop) as tokens:
            return await tokens.finish()

    async with bench(parallel=1, script={tuple(PROMPT): script}, **options) as b:
        async with b.run("body", Body(body)) as run:
            result = await run.result()
        assert isinstance(result, laneway.Answer)
        b.nothing_left()
    return result


@pytest.mark.parametrize(
    ("stop", "tokens"),
    [
        ((), set()),
        (("<|turn|>",), {TURN}),
        (("<|turn|>", "<|end|>", "x", "<|begin|>"), {TURN, END, BEGIN}),
        (("<|turn|",), set()),
        (("<|turn|> ",), set()),
        (("\n<|turn|>",), set()),
        (("<|turn|><|end|>",), set()),
        (("a",), set()),
        (("x" * LONGEST_CONTROL_TEXT + "<|turn|>",), set()),
    ],
)
def test_a_stop_string_that_is_a_control_tokens_whole_text_names_it(stop: tuple[str, ...], tokens: set[int]) -> None:
    assert control_tokens(stop, TOKENIZER) == tokens


def test_a_text_that_is_not_in_the_vocabulary_names_no_token() -> None:
    """Some tokenizers give the unknown token for it, which has no bytes either."""

    class Knows(ScriptedTokenizer):
        def tokenize(self, text: str, *, bos: bool = True, special: Any = False) -> list[int]:
            return [BEGIN] if text == "€" else super().tokenize(text, bos=bos, special=special)

    assert control_tokens(("€",), Knows()) == frozenset()


@pytest.mark.parametrize("policy", [None, SEVERAL])
async def test_the_answer_ends_at_the_token(policy: BatchPolicy | None, autojump_clock: trio.testing.MockClock) -> None:
    script = [*letters("hello"), TURN, *letters("never")]
    found = await answer(script, ("<|turn|>",), policy=policy)
    assert (found.text, found.stop_reason, list(found.tokens)) == ("hello", "stop", letters("hello"))
    assert found.stats.generated_tokens == len(letters("hello"))
    # Without the stop string the token is no end, and no text.
    found = await answer(script, (), policy=policy)
    assert (found.text, found.stop_reason) == ("hellonever", "eos")


async def test_the_text_of_the_token_still_counts_where_it_is_spelled(autojump_clock: trio.testing.MockClock) -> None:
    found = await answer([*letters("say <|turn|> so"), TURN], ("<|turn|>",))
    assert (found.text, found.stop_reason) == ("say ", "stop")


async def test_a_stop_string_wins_over_the_end_token_that_it_names(autojump_clock: trio.testing.MockClock) -> None:
    """What the caller has asked for is what it is told."""
    for token, text in ((END, "<|end|>"), (TURN_END, "<|turn_end|>")):
        assert (await answer([*letters("hi"), token], (text,))).stop_reason == "stop"
        assert (await answer([*letters("hi"), token], ("<|turn|>",))).stop_reason == "eos"


async def test_the_first_of_several_ends_it(autojump_clock: trio.testing.MockClock) -> None:
    stop = ("<|turn|>", "lo", "<|begin|>")
    assert (await answer([*letters("hel"), BEGIN, *letters("lo"), TURN], stop)).text == "hel"
    assert (await answer([*letters("hello"), BEGIN], stop)).text == "hel"


async def test_held_back_text_comes_before_the_token(autojump_clock: trio.testing.MockClock) -> None:
    """What might have become another stop string is text of the answer, and half a character is one U+FFFD."""
    found = await answer([*letters("ab"), TURN], ("abc", "<|turn|>"))
    assert (found.text, found.stop_reason) == ("ab", "stop")
    found = await answer([ord("a"), 0xC3, TURN], ("<|turn|>",))
    assert (found.text, found.stop_reason) == ("a\ufffd", "stop")


async def test_an_answer_may_be_empty(autojump_clock: trio.testing.MockClock) -> None:
    found = await answer([TURN, *letters("x")], ("<|turn|>",), Sampling(temperature=0.0, logprobs=True))
    assert (found.text, found.tokens, found.logprobs, found.stop_reason) == ("", (), (), "stop")


async def test_a_stop_string_that_is_no_unicode_is_refused(autojump_clock: trio.testing.MockClock) -> None:
    with pytest.raises(laneway.InvalidRequestError) as caught:
        await answer(letters("x"), ("\ud800",))
    assert caught.value.field == "stop"
