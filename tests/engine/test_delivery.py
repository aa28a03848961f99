"""When a step's outputs reach their readers: while the next step is under way."""

from __future__ import annotations

from typing import Any

import pytest
import trio

import laneway
from tests.engine.kit import GREEDY, Body, bench

PROMPT = [5, 6, 7]


async def test_a_step_s_outputs_are_delivered_beside_the_next_step(autojump_clock: trio.testing.MockClock) -> None:
    heard: list[tuple[str, float]] = []
    begin = trio.current_time()

    def note(what: str) -> None:
        heard.append((what, round(trio.current_time() - begin, 3)))

    async def body(ctx: laneway.RequestContext) -> laneway.Answer:
        async with ctx.generate(PROMPT, GREEDY, max_tokens=3, deliver=lambda delta: note("text")) as tokens:
            return await tokens.finish()

    async with bench(parallel=1, at_step=lambda number, batch: note(f"step {number}")) as b:
        async with b.run("body", Body(body)) as run:
            await run.result()
    # The last one has no step to wait for.
    assert heard == [("step 1", 0), ("step 2", 0.1), ("text", 0.1), ("step 3", 0.2), ("text", 0.2), ("text", 0.3)]


async def test_what_ends_the_program_in_a_delivery_waits_for_the_step(autojump_clock: trio.testing.MockClock) -> None:
    def deliver(delta: laneway.TextDelta) -> None:
        raise SystemExit("stop")

    async def body(ctx: laneway.RequestContext) -> Any:
        async with ctx.generate(PROMPT, GREEDY, max_tokens=3, deliver=deliver) as tokens:
            return await tokens.finish()

    begin = trio.current_time()
    with pytest.raises(SystemExit, match="stop"):
        async with bench(parallel=1) as b:
            decoder = b.decoder
            async with b.run("body", Body(body)) as run:
                await run.result()
    # It came at 0.1, beside the second step, which nobody wants any more.
    assert trio.current_time() - begin == pytest.approx(0.1)
    assert decoder.statistics().interrupts == 1
    assert not decoder.violations
