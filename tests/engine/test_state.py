"""Sequences whose cells are saved when they end, and restored where another begins as they did."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import pytest
import trio

import laneway
from laneway.decoder import BatchPolicy, DecodeError
from tests.engine.kit import GREEDY, Bench, Body, bench

PROMPT = tuple(range(10, 30))
ROUNDS = BatchPolicy(chunk_quantum=4, chunk_min=4, chunk_max=16, chunk_probe=8, rounds_target=1.0, rounds_max=4)


async def handle(b: Bench, body: Callable[[laneway.RequestContext], Awaitable[Any]]) -> Any:
    async with b.run("body", Body(body)) as run:
        return await run.result()


async def answered(
    ctx: laneway.RequestContext, prompt: tuple[int, ...] = PROMPT, max_tokens: int = 5, **how: Any
) -> tuple[laneway.Tokens, laneway.Answer]:
    async with ctx.generate(list(prompt), GREEDY, max_tokens=max_tokens, **how) as tokens:
        return tokens, await tokens.finish()


async def saved(b: Bench, prompt: tuple[int, ...] = PROMPT, max_tokens: int = 5, **how: Any) -> laneway.SavedState:
    async def body(ctx: laneway.RequestContext) -> laneway.SavedState | None:
        tokens, _ = await answered(ctx, prompt, max_tokens, keep_state=True, **how)
        return await tokens.saved_state()

    state = await handle(b, body)
    assert state is not None
    return state  # type: ignore[no-any-return]


async def restored(
    b: Bench, state: laneway.SavedState, prompt: tuple[int, ...], max_tokens: int = 5
) -> tuple[int, laneway.Stats]:
    """How many tokens were restored, after a look at the answer."""

    async def body(ctx: laneway.RequestContext) -> tuple[int, laneway.Stats]:
        tokens, answer = await answered(ctx, prompt, max_tokens, restore=state)
        assert answer.tokens == b.decoder.expected(prompt, GREEDY, max_tokens).tokens
        return tokens.restored, answer.stats

    return await handle(b, body)  # type: ignore[no-any-return]


def answer_of(b: Bench, prompt: tuple[int, ...] = PROMPT, max_tokens: int = 5) -> tuple[int, ...]:
    return b.decoder.expected(prompt, GREEDY, max_tokens).tokens


async def test_a_state_has_prompt_and_answer_but_for_the_last_token(autojump_clock: trio.testing.MockClock) -> None:
    async with bench() as b:
        state = await saved(b)
        assert state.tokens == PROMPT + answer_of(b)[:-1]
        assert state.size == len(state.data) > 0
        b.nothing_left()


async def test_the_next_turn_computes_only_what_is_new(autojump_clock: trio.testing.MockClock) -> None:
    async with bench() as b:
        state = await saved(b)
    async with bench() as b:  # another engine: nothing in memory
        prompt = (*PROMPT, *answer_of(b), 40, 41)
        count, stats = await restored(b, state, prompt)
        assert count == stats.cached_tokens == len(state.tokens)
        assert stats.prompt_tokens == len(prompt)
        assert b.decoder.statistics().tokens == len(prompt) - count + 4
        b.nothing_left()


@pytest.mark.parametrize(
    ("prompt", "count"),
    [
        ((*PROMPT[:12], 99, *PROMPT[13:]), 12),
        (PROMPT, len(PROMPT) - 1),
        (PROMPT[:7], 6),
        ((*PROMPT, 99), len(PROMPT)),
        ((99, *PROMPT), 0),
        ((10,), 0),
    ],
    ids=["edited", "the same", "shorter", "longer", "another", "one token"],
)
async def test_only_what_both_begin_with_is_restored(
    prompt: tuple[int, ...], count: int, autojump_clock: trio.testing.MockClock
) -> None:
    async with bench() as b:
        state = await saved(b)
    async with bench() as b:
        assert (await restored(b, state, prompt))[0] == count
        assert b.decoder.statistics().loads == (count > 0)
        b.nothing_left()


async def test_a_model_that_cannot_be_cut_takes_whole_states_only(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with bench(cuttable=False) as b:
        state = await saved(b)
        assert (await restored(b, state, (*state.tokens, 40)))[0] == len(state.tokens)
        assert not caplog.records
        assert (await restored(b, state, (*state.tokens[:-2], 40)))[0] == 0
        assert len(caplog.records) == 1
        b.nothing_left()


@pytest.mark.parametrize("wrong", ["truncated", "damaged", "empty", "fails in the slot"])
async def test_a_state_that_does_not_load_is_a_miss(
    wrong: str, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with bench() as b:
        state = await saved(b)
    data = {
        "truncated": state.data[:-3],
        "damaged": state.data[:40] + bytes([state.data[40] ^ 1]) + state.data[41:],
        "empty": b"",
        "fails in the slot": state.data,
    }[wrong]
    async with bench(fail_load={1: DecodeError("as told")}) as b:
        with caplog.at_level(logging.WARNING, "laneway"):
            count, stats = await restored(b, laneway.SavedState(state.tokens, data), (*PROMPT, 50))
        assert count == stats.cached_tokens == 0
        assert [record.name for record in caplog.records] == ["laneway.decode"]
        assert "anew" in caplog.text
        b.nothing_left()


async def test_one_that_leaves_early_keeps_what_was_in_cells(autojump_clock: trio.testing.MockClock) -> None:
    async with bench() as b:

        async def body(ctx: laneway.RequestContext) -> laneway.SavedState | None:
            async with ctx.generate(list(PROMPT), GREEDY, keep_state=True) as tokens:
                async for _ in tokens:
                    break
            return await tokens.saved_state()

        state = await handle(b, body)
        # The step that was under way when it left is not cut short: it is the one after the prompt.
        assert state.tokens == PROMPT + answer_of(b)[:1]
        assert b.decoder.statistics().interrupts == 0
        b.nothing_left()


async def test_what_a_step_decoded_after_a_stop_string_is_part_of_the_state(
    autojump_clock: trio.testing.MockClock,
) -> None:
    text = "0123456789"
    async with bench(policy=ROUNDS, script=lambda prompt: text) as b:
        state = await saved(b, max_tokens=10, stop=("4",))
        # "0" comes with the prompt, "1" is a step of its own, then there are steps of four.
        script = tuple(b.decoder.vocabulary.tokenize(text, bos=False))
        assert state.tokens == PROMPT + script[:5]
    async with bench(policy=ROUNDS) as b:
        assert (await restored(b, state, (*state.tokens[:-1], 50, 51)))[0] == len(state.tokens) - 1


async def test_a_copy_that_fails_is_none_and_frees_the_slot(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with bench(fail_save={1: DecodeError("as told")}) as b:

        async def body(ctx: laneway.RequestContext) -> None:
            tokens, answer = await answered(ctx, keep_state=True)
            assert answer.tokens == answer_of(b)
            assert await tokens.saved_state() is None

        await handle(b, body)
        assert "could not be saved" in caplog.text
        b.nothing_left()


async def test_a_step_that_fails_leaves_no_state(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(fail_at={3: DecodeError("as told")}) as b:

        async def body(ctx: laneway.RequestContext) -> None:
            async with ctx.generate(list(PROMPT), GREEDY, keep_state=True) as tokens:
                with pytest.raises(DecodeError, match="as told"):
                    await tokens.finish()
                assert await tokens.saved_state() is None

        await handle(b, body)
        assert b.decoder.statistics().saves == 0
        b.nothing_left()


@pytest.mark.parametrize("hangs", [False, True], ids=["between", "in a step"])
async def test_one_that_is_cancelled_leaves_no_state_and_is_not_waited_for(
    hangs: bool, autojump_clock: trio.testing.MockClock
) -> None:
    async with bench(hang_at={3} if hangs else ()) as b:

        async def body(ctx: laneway.RequestContext) -> None:
            with trio.move_on_after(0.35):
                async with ctx.generate(list(PROMPT), GREEDY, keep_state=True) as tokens:
                    await trio.sleep_forever()
            assert trio.current_time() < 1
            assert await tokens.saved_state() is None
            assert (b.decoder.statistics().interrupts, b.decoder.statistics().saves) == (1, 0)

        await handle(b, body)
        b.nothing_left()


async def test_one_that_never_had_a_slot_has_no_state(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(1) as b:

        async def body(ctx: laneway.RequestContext) -> None:
            async with ctx.generate(list(PROMPT), GREEDY, max_tokens=20) as first:
                async with ctx.generate(list(PROMPT), GREEDY, keep_state=True) as second:
                    await trio.sleep(0.1)
                assert await second.saved_state() is None
                assert not first.ended

        await handle(b, body)
        b.nothing_left()


async def test_a_peer_waits_for_the_copy_and_not_for_the_seal(autojump_clock: trio.testing.MockClock) -> None:
    """A step takes 0.1 s, the copy 2 s, sealing and verifying 30 s."""
    async with bench(3, seconds_per_state=2.0, seconds_per_seal=30.0, prefix_cache=False) as b:
        deliveries: list[float] = []
        times: dict[str, float] = {}

        async def peer(ctx: laneway.RequestContext) -> laneway.Answer:
            deliver = lambda delta: deliveries.append(trio.current_time())  # noqa: E731
            async with ctx.generate([1, 2, 3], GREEDY, max_tokens=50, deliver=deliver) as tokens:
                return await tokens.finish()

        async def body(ctx: laneway.RequestContext) -> laneway.SavedState | None:
            tokens, _ = await answered(ctx, keep_state=True)
            times["answer"] = trio.current_time()
            assert not tokens.freed.is_set()
            await tokens.freed.wait()
            times["freed"] = trio.current_time()
            state = await tokens.saved_state()
            times["state"] = trio.current_time()
            return state

        async with b.run("body", Body(peer)) as run:
            state = await handle(b, body)
            answer = await run.result()
        assert times["freed"] - times["answer"] == pytest.approx(2.0)
        assert times["state"] - times["freed"] == pytest.approx(30.0)
        gaps = [later - earlier for earlier, later in pairwise(deliveries)]
        assert max(gaps) == pytest.approx(2.1)
        assert sum(gap > 0.5 for gap in gaps) == 1
        assert answer.tokens == answer_of(b, (1, 2, 3), 50)

        async with b.run("body", Body(peer)) as run:
            deliveries.clear()
            assert (await restored(b, state, (*PROMPT, 50)))[0] == len(PROMPT)
            await run.result()
        gaps = [later - earlier for earlier, later in pairwise(deliveries)]
        assert max(gaps) < 2.5
        b.nothing_left()


async def test_a_cancel_while_a_state_is_verified_leaves_nothing(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(seconds_per_seal=10.0) as b:
        state = await saved(b)

        async def body(ctx: laneway.RequestContext) -> None:
            with trio.move_on_after(3):
                await answered(ctx, (*PROMPT, 50), restore=state)
                pytest.fail("it was not cancelled")

        before = b.decoder.statistics().opens
        await handle(b, body)
        assert b.decoder.statistics().opens == before
        b.nothing_left()


async def test_a_cancelled_seal_can_be_asked_for_again(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(seconds_per_seal=10.0) as b:

        async def body(ctx: laneway.RequestContext) -> list[laneway.SavedState | None]:
            tokens, _ = await answered(ctx, keep_state=True)
            with trio.move_on_after(3) as scope:
                await tokens.saved_state()
            assert scope.cancelled_caught
            states: list[laneway.SavedState | None] = []

            async def ask() -> None:
                states.append(await tokens.saved_state())

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                nursery.start_soon(ask)
            return states

        first, second = await handle(b, body)
        assert first is second is not None
        b.nothing_left()


async def test_a_request_that_is_cancelled_during_the_copy_waits_for_it(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with bench(1, seconds_per_state=5.0) as b:

        async def body(ctx: laneway.RequestContext) -> None:
            await answered(ctx, keep_state=True)
            await trio.sleep_forever()

        with pytest.raises(laneway.InferenceCancelledError):
            async with b.run("body", Body(body), request_id="turn") as run:
                await trio.sleep(1.5)
                assert b.decoder.statistics().saves == 1
                started = trio.current_time()
                b.engine.cancel("turn")
                await b.engine.wait_ended("turn")
                assert 3 < trio.current_time() - started < 5
                b.nothing_left()
                await run.result()


async def test_what_nobody_asks_for_any_more_is_not_copied(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(2, seconds_per_state=5.0, prefix_cache=False) as b:

        def turn(prompt: tuple[int, ...]) -> Body:
            async def body(ctx: laneway.RequestContext) -> laneway.SavedState | None:
                async with ctx.generate(list(prompt), GREEDY, max_tokens=5, keep_state=True) as tokens:
                    await tokens.finish()
                    return await tokens.saved_state()

            return Body(body)

        # They begin together and end in one step; the second is cancelled while the first is copied.
        async with b.run("body", turn((1, 2, 3))) as first:
            with pytest.raises(laneway.InferenceCancelledError):
                async with b.run("body", turn((4, 5, 6)), request_id="second") as second:
                    await trio.sleep(3)
                    assert b.decoder.statistics().saves == 1
                    b.engine.cancel("second")
                    await second.result()
            assert await first.result() is not None
        assert b.decoder.statistics().saves == 1
        b.nothing_left()


async def test_a_sequence_may_leave_while_another_is_loaded(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(2, seconds_per_state=5.0, prefix_cache=False) as b:
        state = await saved(b)

        async def loading(ctx: laneway.RequestContext) -> None:
            async with ctx.generate([*PROMPT, 50], GREEDY, restore=state) as tokens:
                await trio.sleep(1)
            await tokens.freed.wait()

        before = b.decoder.statistics().steps
        await handle(b, loading)
        assert b.decoder.statistics().steps == before  # nobody was left to step for
        b.nothing_left()


async def test_wrong_uses_are_named(autojump_clock: trio.testing.MockClock) -> None:
    async with bench() as b:

        async def body(ctx: laneway.RequestContext) -> None:
            tokens = ctx.generate(list(PROMPT), GREEDY, keep_state=True)
            with pytest.raises(RuntimeError, match="has not joined"):
                await tokens.saved_state()
            tokens, _ = await answered(ctx)
            with pytest.raises(RuntimeError, match="keep_state=True"):
                await tokens.saved_state()

        await handle(b, body)


async def test_a_state_that_does_not_load_leaves_a_shorter_prefix_in_memory_of_use(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with bench(parallel=2, policy=ROUNDS) as b:
        state = await saved(b)
    prompt = (*state.tokens, 40, 41)
    shorter = state.tokens[:12]
    async with bench(parallel=2, policy=ROUNDS) as b:

        async def broken(slot: int, state: bytes, length: int, *, verified: bool = False) -> None:
            raise DecodeError("no memory for it")

        await handle(b, lambda ctx: answered(ctx, (*shorter, 50), 1))
        monkeypatch.setattr(b.decoder, "load", broken)
        count, stats = await restored(b, state, prompt)
        assert (count, stats.cached_tokens) == (0, len(shorter))
        assert "could not be loaded" in caplog.text
        b.nothing_left()


async def test_a_state_that_does_not_load_leaves_a_leader_of_use_and_is_not_kept(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(parallel=1, context_size=128) as b:
        state = await saved(b, tuple(range(10, 80)))
    # A state of 70 tokens is worth more than a leader that will have 60 of them.
    common = state.tokens[:60]
    async with bench(parallel=2, context_size=256) as b:

        async def broken(slot: int, state: bytes, length: int, *, verified: bool = False) -> None:
            raise DecodeError("no memory for it")

        monkeypatch.setattr(b.decoder, "load", broken)

        async def body(ctx: laneway.RequestContext) -> laneway.Answer:
            async with ctx.generate([*common, 90], GREEDY, max_tokens=1):
                await leader_has_begun()
                async with ctx.generate([*state.tokens, 91], GREEDY, max_tokens=5, restore=state) as follower:
                    scheduler = b.model.decode_loop.scheduler  # type: ignore[union-attr]
                    while not scheduler.follows(follower.sequence):
                        assert not follower.ended
                        await trio.sleep(0.05)
                    assert follower.restore is None
                    return await follower.finish()

        async def leader_has_begun() -> None:
            while b.decoder.statistics().tokens == 0:  # noqa: ASYNC110 - in virtual time
                await trio.sleep(0.05)

        answer = await handle(b, body)
        assert answer.tokens == answer_of(b, (*state.tokens, 91))
        assert (answer.stats.cached_tokens, b.decoder.statistics().copies) == (60, 1)
        b.nothing_left()
