"""A sequence that can be given no token ends alone: its peers, its slot and the model are as if it had ended well."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

import laneway
from laneway.decoder import BatchPolicy, DecodeError
from tests.engine.kit import GREEDY, Body, Generate, bench

DOOMED = (7, 7, 7)
PEERS = ((1, 2), (3, 4, 5), (6,))
SEVERAL = BatchPolicy(chunk_min=4, chunk_max=16, chunk_probe=8, rounds_target=1.0)
"""Decode steps of ten rounds, as soon as their time is known."""


def no_token_after(made: int) -> Any:
    """A decoder's hook: the doomed sequence gets so many tokens and no more."""

    def no_token(prompt: tuple[int, ...], picked: int) -> DecodeError | None:
        return DecodeError("the grammar ran out", 113, 1) if prompt == DOOMED and picked == made else None

    return no_token


@pytest.mark.parametrize("policy", [None, SEVERAL])
@pytest.mark.parametrize("made", [0, 1, 4, 13])
async def test_C10_a_sequence_without_a_token_ends_alone(
    made: int, policy: BatchPolicy | None, autojump_clock: trio.testing.MockClock
) -> None:
    texts: list[str] = []
    answers: dict[tuple[int, ...], laneway.Answer] = {}

    async def doomed(ctx: laneway.RequestContext) -> None:
        async with ctx.generate(
            list(DOOMED), GREEDY, max_tokens=20, deliver=lambda delta: texts.append(delta.text)
        ) as t:
            await t.finish()

    async with bench(parallel=4, policy=policy, no_token=no_token_after(made)) as b:

        async def peer(prompt: tuple[int, ...]) -> None:
            async with b.run("generate", Generate(prompt, 20)) as run:
                answers[prompt] = await run.result()

        async with trio.open_nursery() as nursery:
            for prompt in PEERS:
                nursery.start_soon(peer, prompt)
            with pytest.raises(DecodeError) as caught:
                async with b.run("body", Body(doomed)) as run:
                    await run.result()
            assert (caught.value.reason, caught.value.status, caught.value.sequences) == ("the grammar ran out", 113, 1)
        assert "".join(texts) == b.expected_text(DOOMED, made) if made else texts == []
        for prompt in PEERS:
            assert list(answers[prompt].tokens) == list(b.decoder.expected(prompt, GREEDY, 20).tokens)
        assert b.model.state == "loaded"
        b.nothing_left()


async def test_C11_sequences_that_end_alone_are_no_failed_steps(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(parallel=1, no_token=no_token_after(2)) as b:
        for _ in range(5):
            with pytest.raises(DecodeError, match="ran out"):
                async with b.run("generate", Generate(DOOMED, 20)) as run:
                    await run.result()
        assert b.model.state == "loaded"
        b.nothing_left()


async def test_the_cells_of_a_sequence_that_ended_alone_are_shared(autojump_clock: trio.testing.MockClock) -> None:
    """They are right: what it had been given up to then is in them, and nothing else."""
    prompt = tuple(range(20))
    async with bench(
        parallel=2, no_token=lambda given, made: DecodeError("no") if (given, made) == (prompt, 6) else None
    ) as b:
        with pytest.raises(DecodeError):
            async with b.run("generate", Generate(prompt, 20)) as run:
                await run.result()
        answered = tuple(b.decoder.expected(prompt, GREEDY, 6).tokens)
        assert list(b.decoder.kept.values()) == [prompt + answered]
        longer = (*prompt, *answered, 1, 2, 3)
        async with b.run("generate", Generate(longer, 5)) as run:
            answer = await run.result()
        assert answer.stats.cached_tokens == len(prompt) + len(answered)
        assert list(answer.tokens) == list(b.decoder.expected(longer, GREEDY, 5).tokens)


async def test_an_answer_that_had_ended_before_is_an_answer(autojump_clock: trio.testing.MockClock) -> None:
    """A step of several rounds may look for tokens beyond a stop string, and find none."""
    script = {DOOMED: [ord("a"), ord("b"), ord("c"), ord("d"), ord("e"), ord("f")]}

    async def body(ctx: laneway.RequestContext) -> laneway.Answer:
        async with ctx.generate(list(DOOMED), GREEDY, stop=("d",)) as tokens:
            return await tokens.finish()

    async with bench(parallel=1, policy=SEVERAL, script=script, no_token=no_token_after(5)) as b:
        async with b.run("body", Body(body)) as run:
            answer = await run.result()
        assert (answer.text, answer.stop_reason) == ("abc", "stop")
        # Five tokens were picked in vain or not, and all of them are in cells.
        assert b.decoder.statistics().tokens == len(DOOMED) + 5
        b.nothing_left()
