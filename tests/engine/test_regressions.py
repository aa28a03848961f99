"""Faults that the state machines have found, one test each, named after the rule that was broken."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

import laneway
from tests.engine.kit import GREEDY, Body, bench, forever

PROMPT = (5, 6, 7)


async def _hold(b: Any, kind: str, request: Any, name: str, **options: Any) -> None:
    """A caller that stays in its block until the run ends, whatever it ends with."""
    async with b.run(kind, request, request_id=name, **options) as run:
        try:
            await run.result()
        except laneway.LanewayError:
            return


async def test_C1_the_last_to_leave_cancels_when_callers_leave_together(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A waiter that was cancelled a moment ago is nobody who stays: the one that runs must not go on for it."""
    for order in (("one", "two"), ("two", "one")):
        async with bench(parallel=1) as b, trio.open_nursery() as nursery:
            scopes = {"one": trio.CancelScope(), "two": trio.CancelScope()}

            async def call(name: str, b: Any = b, scopes: Any = scopes) -> None:
                with scopes[name]:
                    await _hold(b, "common", Body(forever), name)

            for name in ("one", "two"):
                nursery.start_soon(call, name)
                await trio.testing.wait_all_tasks_blocked()
            for name in order:
                scopes[name].cancel()
            await trio.testing.wait_all_tasks_blocked()
            assert not b.lane().running
            b.nothing_left()


async def test_C1_a_waiter_that_leaves_last_ends_those_who_run_for_nobody(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with bench(parallel=1) as b:
        async with b.run("common", Body(forever)) as runs:
            await runs.admitted()
            waits = b.run("common", Body(forever))
            await waits.__aenter__()
        assert runs.state == "running"  # somebody of its scope is still there
        await waits.__aexit__(None, None, None)
        await b.engine.wait_ended(runs.request_id)
        assert runs.state == "cancelled"
        b.nothing_left()


async def test_C1_a_cancelled_request_that_lingers_keeps_nobody_running(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def linger(ctx: laneway.RequestContext) -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(10)

    async with bench(parallel=2) as b, trio.open_nursery() as nursery:
        nursery.start_soon(_hold, b, "common", Body(linger), "lingers")
        await trio.testing.wait_all_tasks_blocked()
        b.engine.cancel("lingers")
        async with b.run("common", Body(forever)) as late:
            await late.admitted()
        assert late.state == "cancelled"
        assert trio.current_time() == 0


@pytest.mark.parametrize("how", ["completed", "cancelled while it waits"])
async def test_C1_nobody_runs_on_when_the_last_that_was_heard_has_ended(
    how: str, autojump_clock: trio.testing.MockClock
) -> None:
    """One runs although its caller has left, because another of its scope is there; then that one ends."""
    parallel = 2 if how == "completed" else 1
    body = Body(lambda ctx: trio.sleep(5)) if how == "completed" else Body(forever)
    async with bench(parallel) as b:
        leaves = b.run("common", Body(forever))
        alone = await leaves.__aenter__()
        async with b.run("common", body) as stays:
            await leaves.__aexit__(None, None, None)
            assert alone.state == "running"
            if how == "completed":
                await stays.result()
            else:
                assert b.engine.cancel(stays.request_id) == 1
                with pytest.raises(laneway.InferenceCancelledError):
                    await stays.result()
            await b.engine.wait_ended(alone.request_id)
            assert alone.state == "cancelled"
            b.nothing_left()


async def test_C3_a_common_cancel_grants_nobody_that_it_cancels(autojump_clock: trio.testing.MockClock) -> None:
    """Of one scope: one runs, a heavy one waits, and behind it a light one that must not be let in on the way out."""
    started = []

    async def note(ctx: laneway.RequestContext) -> None:
        started.append(ctx.request_id)
        await trio.sleep_forever()

    async with bench(parallel=3, admission="slots") as b, trio.open_nursery() as nursery:
        for name, weight in (("runs", 1), ("heavy", 3), ("light", 1)):
            nursery.start_soon(_hold, b, "common", Body(note, weight=weight), name)
            await trio.testing.wait_all_tasks_blocked()
        assert [waiter.request_id for waiter in b.lane().waiting] == ["heavy", "light"]
        assert b.engine.cancel("runs") == 3
        assert not b.lane().waiting
        assert [running.request_id for running in b.lane().running] == ["runs"]
    assert started == ["runs"]


async def test_C7_who_is_cancelled_when_granted_does_not_begin(autojump_clock: trio.testing.MockClock) -> None:
    begun = []
    victims: list[str] = []

    async def note(ctx: laneway.RequestContext) -> None:
        begun.append(ctx.request_id)
        await trio.sleep_forever()

    class Observer:
        @laneway.hookimpl
        def laneway_request_admitted(self, record: laneway.RequestRecord) -> None:
            if record.request_id in victims:
                b.engine.cancel(record.request_id)

    async with bench(parallel=1, plugins=[Observer()]) as b, trio.open_nursery() as nursery:
        victims += ["at once", "later"]
        nursery.start_soon(_hold, b, "body", Body(note), "at once")
        await trio.testing.wait_all_tasks_blocked()
        async with b.run("body", Body(forever)) as runs:
            nursery.start_soon(_hold, b, "body", Body(note), "later")
            await trio.testing.wait_all_tasks_blocked()
            assert len(b.lane().waiting) == 1
        assert runs.state == "cancelled"
    assert begun == []
    b.loader.assert_idle()


async def test_C9_a_request_leaves_with_all_its_sequences_at_once(autojump_clock: trio.testing.MockClock) -> None:
    """Nested blocks are left one inside the other; a long step that they all leave is cut short all the same."""

    async def two(ctx: laneway.RequestContext) -> None:
        async with ctx.generate(list(range(1, 200)), GREEDY) as one, ctx.generate([1, 2], GREEDY) as other:
            await one.finish()
            await other.finish()

    async with bench(parallel=1, context_size=400, seconds_per_token=1.0) as b:
        with trio.move_on_after(10.5) as scope:
            async with b.run("body", Body(two)) as run:
                await run.result()
        assert scope.cancelled_caught
        assert trio.current_time() == pytest.approx(10.5)
        assert b.decoder.statistics().interrupts == 1
        b.nothing_left()


async def test_C11_a_model_that_fails_grants_nobody(autojump_clock: trio.testing.MockClock) -> None:
    """Who waits is told so; none of them is let in because another one leaves the queue."""
    ends: dict[str, Any] = {}

    async def hold(ctx: laneway.RequestContext) -> None:
        await trio.sleep_forever()

    async def call(b: Any, kind: str, request: Any, name: str) -> None:
        async with b.run(kind, request, request_id=name) as run:
            try:
                ends[name] = await run.result()
            except laneway.LanewayError as error:
                ends[name] = error

    failures = {number: laneway.DecodeError("the device is gone") for number in (1, 2, 3)}
    async with bench(parallel=2, fail_at=failures) as b, trio.open_nursery() as nursery:

        async def fail_three_times(ctx: laneway.RequestContext) -> None:
            for _ in range(3):
                async with ctx.generate(list(PROMPT), GREEDY) as tokens:
                    with pytest.raises(laneway.DecodeError):
                        await tokens.finish()
            await trio.sleep(5)

        nursery.start_soon(call, b, "body", Body(fail_three_times), "breaks")
        await trio.testing.wait_all_tasks_blocked()
        for kind, name in (("writer", "writer"), ("body", "reader")):
            nursery.start_soon(call, b, kind, Body(hold), name)
            await trio.testing.wait_all_tasks_blocked()
        await trio.sleep(2)
        assert b.model.state == "failed"
        assert [running.request_id for running in b.lane().running] == ["breaks"]
        assert {name: type(end) for name, end in ends.items()} == {
            "writer": laneway.ModelNotLoadedError,
            "reader": laneway.ModelNotLoadedError,
        }
    assert ends["breaks"] is None
