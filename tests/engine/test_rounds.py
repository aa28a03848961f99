"""Steps of several rounds: nobody who comes or leaves waits for more than the round under way."""

from __future__ import annotations

import pytest
import trio
import trio.testing

import laneway
from laneway.decoder import BatchPolicy, StepBatch
from tests.engine.kit import GREEDY, Bench, Body, Generate, bench

STEP = 0.1
SEVERAL = BatchPolicy(chunk_min=4, chunk_max=16, chunk_probe=8, rounds_target=10 * STEP)
"""A decode step makes ten tokens of each stream, as soon as its time is known."""


async def _in_a_long_step(b: Bench, streams: int) -> None:
    """Return within the first round of a step of ten rounds that has so many streams."""
    while (batch := _newest(b)) is None or (batch.rounds, len(batch.chunks)) != (10, streams):  # noqa: ASYNC110
        await trio.sleep(STEP / 4)  # nothing tells of a step's begin


def _newest(b: Bench) -> StepBatch | None:
    """The batch of the newest call, if that was a step."""
    batch = b.decoder.history[-1].detail if b.decoder.history else None
    return batch if isinstance(batch, StepBatch) else None


async def test_who_arrives_joins_after_the_round_under_way(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(policy=SEVERAL) as b, b.run("generate", Generate((1, 2), 40)) as first:
        await _in_a_long_step(b, 1)
        asked = trio.current_time()
        async with b.run("generate", Generate((3, 4, 5), 1)) as second:
            answer = await second.result()
        # What was left of a round, and the prompt's own step.
        assert trio.current_time() - asked <= 2 * STEP
        assert answer.text == b.expected_text((3, 4, 5), 1)
        assert (await first.result()).text == b.expected_text((1, 2), 40)


@pytest.mark.parametrize("how", ["id", "deadline"])
async def test_C9_who_is_cancelled_leaves_after_the_round_under_way(
    how: str, autojump_clock: trio.testing.MockClock
) -> None:
    async with bench(policy=SEVERAL) as b, b.run("generate", Generate((1, 2), 40)) as stays:
        with trio.CancelScope() as scope:
            async with b.run("generate", Generate((3, 4, 5), None)) as leaves:
                await _in_a_long_step(b, 2)
                asked = trio.current_time()
                if how == "id":
                    b.engine.cancel(leaves.request_id)
                    with pytest.raises(laneway.InferenceCancelledError):
                        await leaves.result()
                else:
                    scope.deadline = asked
                    await trio.sleep_forever()
        assert trio.current_time() - asked <= STEP
        assert b.decoder.used == {0}
        assert leaves.state == "cancelled"
        assert (await stays.result()).text == b.expected_text((1, 2), 40)


async def test_who_is_resumed_decodes_after_the_round_under_way(autojump_clock: trio.testing.MockClock) -> None:
    async def pausing(ctx: laneway.RequestContext) -> float:
        async with ctx.generate([3, 4], GREEDY, max_tokens=30) as tokens:
            await _in_a_long_step(b, 2)
            assert b.model.decode_loop is not None
            b.model.decode_loop.pause(tokens)
            await _in_a_long_step(b, 1)
            asked = trio.current_time()
            b.model.decode_loop.resume(tokens)
            while (batch := _newest(b)) is None or len(batch.chunks) < 2:  # noqa: ASYNC110
                await trio.sleep(STEP / 4)
            return trio.current_time() - asked

    async with bench(policy=SEVERAL) as b, b.run("generate", Generate((1, 2), 60)) as other:
        async with b.run("body", Body(pausing)) as run:
            assert await run.result() <= STEP
        assert (await other.result()).text == b.expected_text((1, 2), 60)
