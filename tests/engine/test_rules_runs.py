"""Rules R1 to R6, S1 and S2 on a whole engine with a scripted decoder."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import logging
from typing import Any

import pytest
import trio
import trio.testing

import laneway
from tests.engine.kit import GREEDY, Bench, Body, Generate, bench, forever

PROMPT = (5, 6, 7)


async def _read(run: laneway.Run) -> list[Any]:
    return [event async for event in run]


async def test_R1_entering_lets_the_request_arrive_and_does_not_wait(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(parallel=1) as b, b.run("body", Body(forever)) as first:
        await first.admitted()
        with trio.fail_after(0):
            async with b.run("generate", Generate(PROMPT)) as second:
                assert second.state == "waiting"
                assert [waiter.position for waiter in b.lane().waiting] == [1]
                assert first.request_id != second.request_id


async def test_R1_admitted_waits_for_the_permit(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(parallel=1) as b, b.run("body", Body(lambda ctx: trio.sleep(3))) as first:
        async with b.run("generate", Generate(PROMPT)) as second:
            await second.admitted()
            assert trio.current_time() == pytest.approx(3)
            assert first.state == "completed"


async def test_R1_context_variables_are_the_callers(autojump_clock: trio.testing.MockClock) -> None:
    who = contextvars.ContextVar("who", default="nobody")

    async def tell(ctx: laneway.RequestContext) -> str:
        return who.get()

    async with bench() as b:
        who.set("the caller")
        async with b.run("body", Body(tell)) as run:
            assert await run.result() == "the caller"


async def test_R1_refusals_raise_on_entering_and_change_nothing(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(parallel=1, queue_limit=0) as b, b.run("body", Body(forever)):
        before = b.engine.snapshot()
        with pytest.raises(laneway.RequestRejectedByPolicyError, match="queue holds 0") as refused:
            async with b.run("generate", Generate(PROMPT), request_id="late"):
                pytest.fail("the block of a refused run was entered")
        assert refused.value.request_id == "late"
        assert (refused.value.kind, refused.value.model, refused.value.reason) == ("generate", "a", "queue_full")
        assert (refused.value.waiting, refused.value.limit) == (0, 0)
        assert b.engine.snapshot() == before


@pytest.mark.parametrize(
    ("kind", "request_", "options", "message"),
    [
        ("generate", "a string", {}, "request: a generate request is a Generate, not str"),
        ("generate", Generate(PROMPT), {"overflow": "drop"}, "'drop' is not a valid Overflow"),
        ("generate", Generate(PROMPT), {"queue_timeout": -1}, "queue_timeout must be seconds of at least 0"),
        ("generate", Generate(PROMPT), {"queue_timeout": float("nan")}, "queue_timeout must be seconds"),
        ("generate", Generate(PROMPT), {"cap": "many"}, "a cap is an int or a float"),
        ("generate", Generate(PROMPT), {"cap": float("nan")}, "a cap cannot be NaN"),
        ("generate", Generate(PROMPT), {"backpressure": "none"}, "backpressure must be 'merge' or 'pause'"),
        ("generate", Generate(PROMPT), {"request_id": ""}, "request_id must be a non-empty str"),
        ("generate", Generate(PROMPT), {"request_id": 7}, "request_id must be a non-empty str"),
        ("generate", Generate(()), {}, "the prompt has no tokens"),
    ],
)
async def test_R1_malformed_calls_are_invalid_requests(
    kind: str, request_: Any, options: dict[str, Any], message: str, autojump_clock: trio.testing.MockClock
) -> None:
    async with bench() as b:
        with pytest.raises(laneway.InvalidRequestError, match=message):
            async with b.run(kind, request_, **options):
                pytest.fail("entered")
        b.nothing_left()


async def test_R1_an_unknown_kind_is_told_with_the_known_ones(autojump_clock: trio.testing.MockClock) -> None:
    async with bench() as b:
        with pytest.raises(laneway.OperationNotFoundError, match=r"no operation 'sing'.*generate") as unknown:
            async with b.run("sing", Generate(PROMPT)):
                pytest.fail("entered")
        assert "generate" in unknown.value.known


async def test_R2_a_failing_handler_fails_its_run_alone(autojump_clock: trio.testing.MockClock) -> None:
    async def fail(ctx: laneway.RequestContext) -> None:
        raise KeyError("lost")

    async with bench() as b, b.run("generate", Generate(PROMPT)) as peer:
        async with b.run("body", Body(fail)) as run:
            with pytest.raises(KeyError, match="lost"):
                await run.result()
        assert run.state == "failed"
        assert (await peer.result()).stop_reason == "length"
        b.nothing_left()


async def test_R2_a_group_from_the_handlers_own_nursery_comes_as_it_is(autojump_clock: trio.testing.MockClock) -> None:
    async def boom() -> None:
        raise ValueError("boom")

    async def crowd(ctx: laneway.RequestContext) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(boom)
            nursery.start_soon(boom)

    async with bench() as b, b.run("body", Body(crowd)) as run:
        with pytest.raises(ExceptionGroup) as group:
            await run.result()
        assert [type(leaf) for leaf in group.value.exceptions] == [ValueError, ValueError]


async def test_R3_leaving_the_block_cancels_and_waits_for_teardown(autojump_clock: trio.testing.MockClock) -> None:
    ends = []

    async def slow_to_leave(ctx: laneway.RequestContext) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(5)
            ends.append(trio.current_time())

    async with bench() as b:
        async with b.run("body", Body(slow_to_leave)) as run:
            await trio.sleep(1)
        assert ends == [6.0] == [trio.current_time()]
        assert run.state == "cancelled"
        b.nothing_left()


async def test_R3_a_cancelled_caller_still_waits_for_the_teardown(autojump_clock: trio.testing.MockClock) -> None:
    async with bench() as b:
        with trio.move_on_after(0.35) as scope:
            async with b.run("generate", Generate(PROMPT, None)) as run:
                await run.result()
        assert scope.cancelled_caught
        assert run.state == "cancelled"
        b.nothing_left()


async def test_R3_break_alone_does_not_end_a_run(autojump_clock: trio.testing.MockClock) -> None:
    async with bench() as b, b.run("generate", Generate(PROMPT, 6)) as run:
        async for _event in run:
            break
        assert run.state == "running"
        assert len((await run.result()).tokens) == 6


async def test_R3_a_run_that_was_never_entered_has_taken_nothing(autojump_clock: trio.testing.MockClock) -> None:
    async with bench() as b:
        b.run("generate", Generate(PROMPT), request_id="never")
        async with b.run("generate", Generate(PROMPT), request_id="never") as run:
            await run.result()
        b.nothing_left()


async def test_R3_a_run_is_entered_once(autojump_clock: trio.testing.MockClock) -> None:
    async with bench() as b:
        opening = b.run("generate", Generate(PROMPT))
        async with opening as run:
            await run.result()
        with pytest.raises(RuntimeError, match="entered once"):
            async with opening:
                pytest.fail("entered")


async def test_R4_a_good_end_is_one_done_after_the_text(autojump_clock: trio.testing.MockClock) -> None:
    async with bench() as b, b.run("generate", Generate(PROMPT, 5)) as run:
        *deltas, done = await _read(run)
        assert {type(event) for event in deltas} == {laneway.TextDelta}
        assert isinstance(done, laneway.Done)
        assert done.stop_reason == "length"
        assert done.stats.generated_tokens == 5
        assert await _read(run) == []
        assert (await run.result()).stats == done.stats


async def test_R4_a_bad_end_is_one_error_from_the_iteration_and_the_result(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with bench(fail_at={1: laneway.DecodeError("broken", status=-3)}) as b:
        async with b.run("generate", Generate(PROMPT)) as run:
            with pytest.raises(laneway.DecodeError, match="broken") as first:
                await _read(run)
            with pytest.raises(laneway.DecodeError) as again:
                await run.result()
            assert again.value is first.value
        assert run.state == "failed"


async def test_R4_a_failure_that_nobody_saw_is_raised_on_leaving(autojump_clock: trio.testing.MockClock) -> None:
    async def fail(ctx: laneway.RequestContext) -> None:
        raise KeyError("lost")

    async with bench() as b:
        with pytest.raises(KeyError, match="lost"):
            async with b.run("body", Body(fail)):
                await trio.sleep(1)


async def test_R4_the_bodys_own_error_goes_on_and_ours_is_logged(
    caplog: pytest.LogCaptureFixture, autojump_clock: trio.testing.MockClock
) -> None:
    async def fail(ctx: laneway.RequestContext) -> None:
        raise KeyError("lost")

    mine = ValueError("mine")
    async with bench() as b:
        with caplog.at_level(logging.ERROR, "laneway.run"), pytest.raises(ValueError, match="mine") as raised:
            async with b.run("body", Body(fail), request_id="logged"):
                await trio.sleep(1)
                raise mine
    assert raised.value is mine
    assert "'logged' failed as well" in caplog.text


async def test_R5_a_second_reader_is_told_that_the_run_is_busy(autojump_clock: trio.testing.MockClock) -> None:
    async with bench() as b, b.run("body", Body(forever)) as run:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run.result)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(trio.BusyResourceError):
                await run.result()
            with pytest.raises(trio.BusyResourceError):
                await anext(run)
            nursery.cancel_scope.cancel()


async def test_R5_the_result_works_after_the_block_and_again(autojump_clock: trio.testing.MockClock) -> None:
    async with bench() as b:
        async with b.run("generate", Generate(PROMPT, 4)) as run:
            first = await run.result()
        assert await run.result() is first
        assert [type(event) for event in await _read(run)] == [laneway.Done]


async def test_R6_a_run_that_would_wait_for_its_own_handler_is_refused(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(parallel=2) as b:
        other = await b.engine.load_model("scripted:b", parallel=1)

        async def nested(ctx: laneway.RequestContext) -> list[str]:
            seen = []
            for model, kind in [(b.model, "generate"), (b.model, "writer"), (other, "generate")]:
                request = Generate(PROMPT, 2) if kind == "generate" else Body(forever)
                try:
                    async with b.engine.run(model, kind, request) as run:
                        seen.append((await run.result()).stop_reason)
                except laneway.InvalidRequestError as error:
                    seen.append("wait for the permit" if "wait for the permit" in str(error) else str(error))
            return seen

        async with b.run("body", Body(nested)) as run:
            assert await run.result() == ["wait for the permit", "wait for the permit", "length"]

        # A lane of another group has permits of its own, and an operation without a lane needs none.
        async def reach_out(ctx: laneway.RequestContext) -> list[Any]:
            results = []
            for kind in ("grouped", "beside"):
                async with b.run(kind, Body(lambda ctx: trio.lowlevel.checkpoint())) as run:
                    results.append(await run.result())
            return results

        async with b.run("body", Body(reach_out)) as run:
            assert await run.result() == [None, None]
        b.nothing_left()


async def test_R6_a_request_that_has_ended_holds_nothing(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(parallel=1) as b, trio.open_nursery() as nursery:
        done = trio.Event()

        async def later() -> None:
            await done.wait()
            async with b.run("generate", Generate(PROMPT, 2)) as run:
                assert (await run.result()).stop_reason == "length"

        async def spawn(ctx: laneway.RequestContext) -> None:
            nursery.start_soon(later)

        async with b.run("body", Body(spawn)) as run:
            await run.result()
        done.set()


async def test_S1_deltas_joined_are_the_final_text(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(context_size=512) as b, b.run("generate", Generate(PROMPT, 200)) as run:
        events = await _read(run)
        text = "".join(event.text for event in events if isinstance(event, laneway.TextDelta))
        assert text == (await run.result()).text
        pieces = b"".join(map(b.model.tokenizer.piece, (await run.result()).tokens))
        assert text == pieces.decode("utf-8", "replace")


async def test_S2_unread_text_merges_and_slows_nobody(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(parallel=2) as b:
        async with b.run("generate", Generate(PROMPT, 40)) as unread, b.run("generate", Generate((9, 9), 40)) as peer:
            await peer.result()
            await b.engine.wait_ended(unread.request_id)
            assert unread.state == "completed"
            b.nothing_left()
            delta, done = await _read(unread)
            assert delta.text == (await unread.result()).text
            assert done.stats.generated_tokens == 40


async def test_S2_a_paused_run_keeps_its_permit_and_goes_on(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(parallel=2) as b, b.run("generate", Generate(PROMPT, 50), backpressure="pause") as run:
        await trio.sleep(10)
        (stalled,) = b.engine.snapshot().model("a").stalled
        assert stalled.request_id == run.request_id
        assert stalled.paused_seconds is not None
        assert 5 < stalled.paused_seconds < 10
        assert stalled.slots == 1
        assert b.lane().used == 1
        steps = b.decoder.statistics().steps
        await trio.sleep(10)
        assert b.decoder.statistics().steps == steps
        events = await _read(run)
        assert "".join(e.text for e in events[:-1]) == (await run.result()).text
        assert events[-1].stats.generated_tokens == 50


async def test_S2_stall_timeout_ends_a_paused_run(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(parallel=1, stall_timeout=4) as b:
        async with b.run("generate", Generate(PROMPT, 50), backpressure="pause") as run:
            await b.engine.wait_ended(run.request_id)
            b.nothing_left()
            with pytest.raises(laneway.InferenceCancelledError, match=r"paused for 4 s \(stall_timeout\)") as ended:
                await run.result()
            assert len(ended.value.tokens) > 10


async def test_S2_a_reader_that_comes_back_is_not_timed_out(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(parallel=1, stall_timeout=4) as b:
        async with b.run("generate", Generate(PROMPT, 50), backpressure="pause") as run:
            count = 0
            async for event in run:
                count += isinstance(event, laneway.TextDelta)
                await trio.sleep(1)
            assert (await run.result()).stats.generated_tokens == 50
            assert count > 40


async def test_S2_emit_waits_only_while_the_run_is_paused(autojump_clock: trio.testing.MockClock) -> None:
    async def emit(ctx: laneway.RequestContext) -> float:
        for number in range(100):
            await ctx.emit(number)
        return trio.current_time()

    async with bench() as b:
        async with b.run("body", Body(emit)) as run:
            assert await run.result() == 0
        async with b.run("body", Body(emit), backpressure="pause") as run:
            await trio.sleep(7)
            assert [e async for e in run][:-1] == list(range(100))
            assert await run.result() == 7
        assert isinstance(b, Bench)


async def test_R4_leaving_the_block_in_the_teardown_raises_a_failure_that_came_before(
    autojump_clock: trio.testing.MockClock,
) -> None:
    failing = trio.Event()

    async def fails(ctx: laneway.RequestContext) -> None:
        # It leaves its sequence to the teardown.
        await anext(await ctx.generate(list(PROMPT), GREEDY).__aenter__())
        failing.set()
        raise ValueError("a bug")

    async with bench(parallel=1) as b:
        with pytest.raises(ValueError, match="a bug"):
            async with b.run("body", Body(fails)) as run:
                await failing.wait()
                assert run.state == "running"
        b.nothing_left()


@pytest.mark.parametrize("backpressure", ["merge", "pause"])
@pytest.mark.parametrize("held_by", ["nothing", "an exit stack", "a cycle"])
async def test_R3_a_run_that_is_dropped_without_leaving_its_block_ends(
    backpressure: str, held_by: str, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with bench(parallel=1) as b:

        async def begin() -> None:
            opening = b.run("generate", Generate(PROMPT, None), backpressure=backpressure, request_id="dropped")
            if held_by == "an exit stack":
                await contextlib.AsyncExitStack().enter_async_context(opening)
                return
            run = await opening.__aenter__()
            if held_by == "a cycle":
                cycle: list[Any] = [run]
                cycle.append(cycle)

        await begin()
        await trio.sleep(10)
        # Nothing that the loop does before this may end it: an object in a cycle lives until it is collected.
        gc.collect()
        await b.engine.wait_ended("dropped")
        b.nothing_left()
        assert "dropped" in caplog.text
        async with b.run("generate", Generate(PROMPT, 3), overflow="reject") as run:
            await run.result()


@pytest.mark.parametrize("seen", [False, True])
async def test_R3_R4_the_failure_of_a_run_that_is_dropped_is_logged_unless_a_reader_has_seen_it(
    seen: bool, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(ctx: laneway.RequestContext) -> None:
        raise ValueError("a bug")

    async with bench(parallel=1) as b:
        runs = [await b.run("body", Body(fails), request_id="dropped").__aenter__()]
        await b.engine.wait_ended("dropped")
        if seen:
            with pytest.raises(ValueError, match="a bug"):
                await runs[0].result()
        runs.clear()
        gc.collect()
        await trio.testing.wait_all_tasks_blocked()
        logged = [record for record in caplog.records if record.exc_info and "dropped" in record.getMessage()]
        assert [str(record.exc_info[1]) for record in logged if record.exc_info] == ([] if seen else ["a bug"])


async def test_R4_a_failure_that_leaving_the_block_has_raised_is_not_logged_again(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(ctx: laneway.RequestContext) -> None:
        raise ValueError("a bug")

    async with bench(parallel=1) as b:
        with pytest.raises(ValueError, match="a bug"):
            async with b.run("body", Body(fails), request_id="left"):
                await b.engine.wait_ended("left")
        gc.collect()
        await trio.testing.wait_all_tasks_blocked()
        assert not [record for record in caplog.records if record.exc_info]


async def test_R3_a_run_that_is_dropped_in_another_thread_ends(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(parallel=1) as b:
        runs = [await b.run("generate", Generate(PROMPT, None), request_id="dropped").__aenter__()]
        await trio.to_thread.run_sync(runs.clear)
        await b.engine.wait_ended("dropped")
        b.nothing_left()


async def test_R3_a_run_that_is_kept_after_its_block_drops_nothing(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with bench(parallel=1) as b:
        async with b.run("stubborn", Body(lambda ctx: trio.sleep(9))) as run:
            await run.admitted()
        # Scope `none`: the caller has left, the work goes on.
        assert run.state == "cancelling"
        del run
        gc.collect()
        await trio.testing.wait_all_tasks_blocked()
        assert "was dropped" not in caplog.text


def test_R3_a_run_that_outlives_its_loop_is_silent() -> None:
    runs: list[laneway.Run] = []

    async def main() -> None:
        async with bench(parallel=1) as b:
            runs.append(await b.run("generate", Generate(PROMPT, None)).__aenter__())

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert runs[0].state == "cancelled"
    runs.clear()
    gc.collect()
