"""Prompts that begin alike compute it once; what is kept for that is never in anybody's way."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import trio

import laneway
from laneway.decoder import BatchPolicy, DecodeError
from tests.engine.kit import GREEDY, Bench, Body, Generate, bench

COMMON = tuple(range(1, 33))


def prompts(count: int, rest: int = 8, common: tuple[int, ...] = COMMON) -> list[tuple[int, ...]]:
    """So many prompts with a common beginning."""
    return [(*common, *range(100 + 10 * number, 100 + 10 * number + rest)) for number in range(count)]


async def ask(b: Bench, prompt: tuple[int, ...], max_tokens: int = 4) -> laneway.Stats:
    """The figures of an answer, which is the right one."""
    async with b.run("generate", Generate(prompt, max_tokens)) as run:
        answer = await run.result()
    assert answer.tokens == b.decoder.expected(prompt, GREEDY, max_tokens).tokens
    return answer.stats  # type: ignore[no-any-return]


async def ask_all(b: Bench, all_: list[tuple[int, ...]], max_tokens: int = 4) -> list[laneway.Stats]:
    """The same, all of them at once, by one request."""
    stats: list[laneway.Stats] = []

    async def body(ctx: laneway.RequestContext) -> None:
        async def one(prompt: tuple[int, ...]) -> None:
            async with ctx.generate(list(prompt), GREEDY, max_tokens=max_tokens) as tokens:
                answer = await tokens.finish()
            assert answer.tokens == b.decoder.expected(prompt, GREEDY, max_tokens).tokens
            stats.append(answer.stats)

        async with trio.open_nursery() as nursery:
            for prompt in all_:
                nursery.start_soon(one, prompt)

    async with b.run("body", Body(body)) as run:
        await run.result()
    return stats


def prefilled(b: Bench, max_tokens: int, answers: int) -> int:
    """Tokens of prompts that were computed."""
    return b.decoder.statistics().tokens - answers * (max_tokens - 1)


async def test_a_burst_computes_its_common_beginning_once(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(16) as b:
        stats = await ask_all(b, prompts(16))
        assert prefilled(b, 4, 16) == 32 + 16 * 8
        assert sorted(each.cached_tokens for each in stats) == [0] + [32] * 15
        assert b.decoder.statistics().copies == 15
        b.nothing_left()
        assert len(b.decoder.kept) == 16


async def test_without_it_everybody_computes_all(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(16, prefix_cache=False) as b:
        stats = await ask_all(b, prompts(16))
        assert prefilled(b, 4, 16) == 16 * 40
        assert {each.cached_tokens for each in stats} == {0}
        assert (b.decoder.statistics().copies, b.decoder.kept) == (0, {})


@pytest.mark.parametrize(
    "options",
    [
        {"cuttable": False},
        {"policy": BatchPolicy(unified_kv=False, contiguous=True, chunk_min=4, chunk_max=16)},
    ],
    ids=["not cuttable", "split"],
)
async def test_what_cannot_share_shares_nothing(
    options: dict[str, Any], autojump_clock: trio.testing.MockClock
) -> None:
    async with bench(4, **options) as b:
        await ask_all(b, prompts(4))
        await ask_all(b, prompts(4))
        assert prefilled(b, 4, 8) == 8 * 40
        assert (b.decoder.statistics().cuts, b.decoder.kept) == (0, {})


async def test_one_that_comes_later_takes_it_from_one_that_decodes(autojump_clock: trio.testing.MockClock) -> None:
    one, two = prompts(2)
    async with bench(2) as b, trio.open_nursery() as nursery:
        nursery.start_soon(ask, b, one, 20)
        await trio.sleep(1)
        stats = await ask(b, two)
        assert stats.cached_tokens == 32
        assert b.decoder.prompts == {0: one}


async def test_the_next_turn_of_a_chat_stays_in_its_slot(autojump_clock: trio.testing.MockClock) -> None:
    """Also where there is but one slot."""
    async with bench(1) as b:
        prompt = COMMON[:10]
        await ask(b, prompt)
        for _ in range(3):
            known = (*prompt, *b.decoder.expected(prompt, GREEDY, 4).tokens[:-1])
            prompt = (*known, 77, 78, 79)
            assert (await ask(b, prompt)).cached_tokens == len(known)
        assert (b.decoder.statistics().copies, b.decoder.statistics().drops) == (0, 0)
        b.nothing_left()


async def test_with_one_slot_an_edited_prompt_keeps_what_comes_before_the_edit(
    autojump_clock: trio.testing.MockClock,
) -> None:
    one, two = prompts(2)
    async with bench(1) as b:
        await ask(b, one)
        assert (await ask(b, two)).cached_tokens == 32
        assert (await ask(b, two)).cached_tokens == 39
        assert (await ask(b, (99, *two))).cached_tokens == 0


async def test_the_longest_unused_goes_first(autojump_clock: trio.testing.MockClock) -> None:
    one, two, three, four = [tuple(range(begin, begin + 12)) for begin in (10, 40, 70, 100)]
    async with bench(3) as b:
        for prompt in (one, two, three):
            await ask(b, prompt)
        assert (await ask(b, (*one, 5))).cached_tokens == 12  # in the slot of two, the oldest
        assert sorted(tokens[0] for tokens in b.decoder.kept.values()) == [10, 10, 70]
        await ask(b, four)  # in the slot of three: one was of use since
        assert sorted(tokens[0] for tokens in b.decoder.kept.values()) == [10, 10, 100]


async def test_A10_what_is_kept_takes_no_slot_and_no_cell_from_anybody(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Every slot keeps something; then as many come as there are slots, who share nothing and fill their windows."""
    async with bench(4) as b:
        await ask_all(b, prompts(4))
        assert len(b.decoder.kept) == 4
        strangers = [tuple(range(begin, begin + 50)) for begin in (60, 110, 160, 200)]
        before = b.decoder.statistics().steps
        stats = await ask_all(b, strangers, 14)
        assert all(each.generated_tokens == 14 for each in stats)
        assert all(each.cached_tokens == 0 for each in stats)
        assert {each.average_concurrent_sequences for each in stats} != {1.0}
        assert b.decoder.statistics().max_used == 4
        assert b.decoder.statistics().steps > before
        b.nothing_left()


async def test_whoever_waits_for_a_beginning_goes_on_when_its_owner_is_cancelled(
    autojump_clock: trio.testing.MockClock,
) -> None:
    first, second, third = prompts(3)
    async with bench(3) as b:

        async def body(ctx: laneway.RequestContext) -> None:
            async with trio.open_nursery() as nursery:
                for prompt in (second, third):
                    nursery.start_soon(follow, ctx, prompt)

        async def follow(ctx: laneway.RequestContext, prompt: tuple[int, ...]) -> None:
            async with ctx.generate(list(prompt), GREEDY, max_tokens=4) as tokens:
                answer = await tokens.finish()
            assert answer.tokens == b.decoder.expected(prompt, GREEDY, 4).tokens

        with pytest.raises(laneway.InferenceCancelledError):
            async with b.run("generate", Generate(first), request_id="first") as leading:
                async with b.run("body", Body(body)) as run:
                    await trio.sleep(0.15)  # one chunk of the first prompt is done, the second is under way
                    assert b.decoder.statistics().prefill_steps == 1
                    b.engine.cancel("first")
                    await run.result()
                await leading.result()
        # What had been computed before is not lost; the rest of the beginning is computed by one of the two.
        assert prefilled(b, 4, 2) <= 40 + 8 + 8 + 16
        b.nothing_left()


@pytest.mark.parametrize("what", ["fail_copy", "fail_cut"])
async def test_what_cannot_be_shared_after_all_is_computed(
    what: str, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "laneway"):
        async with bench(2, **{what: {1: DecodeError("as told")}}) as b:
            one, two = prompts(2)
            await ask(b, one)
            stats = await ask(b, two)
            assert stats.cached_tokens == 0
            assert "as told" in caplog.text
            assert (await ask(b, two)).cached_tokens == 39
            b.nothing_left()


async def test_a_slot_that_cannot_be_cut_is_dropped_and_used_all_the_same(
    autojump_clock: trio.testing.MockClock,
) -> None:
    one, two = prompts(2)
    async with bench(1, fail_cut={2: DecodeError("as told")}) as b:
        await ask(b, one)
        assert (await ask(b, two)).cached_tokens == 0
        assert b.decoder.statistics().drops == 1
        b.nothing_left()


async def test_a_failed_or_interrupted_step_leaves_nothing_to_share(autojump_clock: trio.testing.MockClock) -> None:
    (prompt,) = prompts(1)
    async with bench(1, fail_at={4: DecodeError("as told")}, hang_at={8}) as b:
        with pytest.raises(DecodeError):
            await ask(b, prompt, 10)
        assert b.decoder.kept == {}
        with trio.move_on_after(3):
            await ask(b, prompt, 10)
        assert b.decoder.statistics().interrupts == 1
        assert b.decoder.kept == {}
        assert (await ask(b, prompt)).cached_tokens == 0
        b.nothing_left()


async def test_one_that_left_early_is_shared_as_far_as_it_came(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(2) as b, trio.open_nursery() as nursery:
        nursery.start_soon(ask, b, (9, 9, 9), 40)  # so that the step under way is not interrupted
        await trio.sleep(1)
        one, two = prompts(2)
        with trio.move_on_after(1.05):
            await ask(b, one, 20)
        stats = await ask(b, two)
        assert 16 <= stats.cached_tokens < 32


async def test_a_saved_state_counts_where_it_is_longer_than_what_is_in_memory(
    autojump_clock: trio.testing.MockClock,
) -> None:
    (prompt,) = prompts(1)
    async with bench(2) as b:
        states: list[laneway.SavedState] = []
        restored: list[int] = []

        async def save(ctx: laneway.RequestContext) -> None:
            async with ctx.generate(list(prompt), GREEDY, max_tokens=4, keep_state=True) as tokens:
                await tokens.finish()
            state = await tokens.saved_state()
            assert state is not None
            states.append(state)

        async def restore(ctx: laneway.RequestContext) -> None:
            async with ctx.generate([*prompt, 50], GREEDY, max_tokens=4, restore=states[0]) as tokens:
                answer = await tokens.finish()
            assert answer.tokens == b.decoder.expected((*prompt, 50), GREEDY, 4).tokens
            assert answer.stats.cached_tokens == len(prompt)
            restored.append(tokens.restored)

        for body in (save, restore):
            async with b.run("body", Body(body)) as run:
                await run.result()
        for begin in (60, 160):
            await ask(b, tuple(range(begin, begin + 20)))  # takes the slots of both
        async with b.run("body", Body(restore)) as run:
            await run.result()
        # From memory, where it is as good; from the state, once memory has forgotten.
        assert restored == [0, len(prompt)]
        assert b.decoder.statistics().loads == 1
        b.nothing_left()


async def test_a_saved_state_is_taken_up_when_whoever_was_to_have_more_is_cancelled(
    autojump_clock: trio.testing.MockClock,
) -> None:
    first, second = prompts(2)

    async def save(ctx: laneway.RequestContext) -> laneway.SavedState | None:
        async with ctx.generate(list(COMMON[:24]), GREEDY, max_tokens=1, keep_state=True) as tokens:
            await tokens.finish()
        return await tokens.saved_state()

    async with bench(1) as b, b.run("body", Body(save)) as run:
        state = await run.result()
    assert len(state.tokens) == 24
    async with bench(2) as b:

        async def follow(ctx: laneway.RequestContext) -> int:
            async with ctx.generate(list(second), GREEDY, max_tokens=4, restore=state) as tokens:
                answer = await tokens.finish()
            assert answer.tokens == b.decoder.expected(second, GREEDY, 4).tokens
            return tokens.restored

        with pytest.raises(laneway.InferenceCancelledError):
            async with b.run("generate", Generate(first), request_id="first") as leading:
                async with b.run("body", Body(follow)) as run:
                    await trio.sleep(0.15)
                    assert (b.decoder.statistics().prefill_steps, b.decoder.statistics().loads) == (1, 0)
                    b.engine.cancel("first")
                    assert await run.result() == 24
                await leading.result()
        assert b.decoder.statistics().loads == 1
        b.nothing_left()


async def test_S2_a_paused_sequence_is_shared_and_shares(autojump_clock: trio.testing.MockClock) -> None:
    one, two = prompts(2)
    async with bench(2) as b:

        async def body(ctx: laneway.RequestContext) -> None:
            async with ctx.generate(list(one), GREEDY, max_tokens=10) as first:
                async for _ in first:
                    first.pause()
                    break
                async with ctx.generate(list(two), GREEDY, max_tokens=4) as second:
                    answer = await second.finish()
                assert answer.stats.cached_tokens == 32
                first.resume()
                answer = await first.finish()
                assert answer.tokens == b.decoder.expected(one, GREEDY, 10).tokens

        async with b.run("body", Body(body)) as run:
            await run.result()
        b.nothing_left()
