"""The rules of admission on a whole engine; the core and the lane have tests of their own."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import trio
import trio.testing

import laneway
from laneway.testing import ScriptedTokenizer
from tests.engine.kit import GREEDY, Body, Generate, bench, forever

PROMPT = (5, 6, 7)
HUGE = 10**400
"""Larger than any float."""
DIGITS = 10**5000
"""More digits than Python writes."""


async def test_A1_two_models_never_share_a_lane(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(parallel=1) as b:
        other = await b.engine.load_model("scripted:b")
        async with b.run("writer", Body(forever)) as writer:
            await writer.admitted()
            async with b.engine.run(other, "generate", Generate(PROMPT, 2), overflow="reject") as run:
                await run.result()
            assert writer.state == "running"


async def test_A1_an_operation_without_a_lane_is_never_queued_or_counted(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with bench(parallel=1, queue_limit=0) as b, b.run("writer", Body(forever)) as writer:
        await writer.admitted()
        async with b.run("beside", Body(forever), overflow="reject") as beside:
            await beside.admitted()
            model = b.engine.snapshot().model("a")
            assert [request.request_id for request in model.without_lane] == [beside.request_id]
            assert model.lanes[0].used == 1


@pytest.mark.parametrize("parallel", [0, -1, 2.7, math.nan, math.inf, True, "4", 257, None])
async def test_A2_a_wrong_parallel_is_refused_when_the_model_is_loaded(parallel: Any) -> None:
    async with bench() as b:
        with pytest.raises(laneway.ModelLoadError, match="from 1 to 256"):
            await b.engine.load_model("scripted:b", parallel)
        assert len(b.engine.models) == 1


async def test_A2_parallel_is_one_by_default(autojump_clock: trio.testing.MockClock) -> None:
    async with bench() as b:
        assert (await b.engine.load_model("scripted:b")).parallel == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"queue_limit": -1}, "queue_limit must be an int from 0"),
        ({"queue_limit": 1.5}, "queue_limit must be an int"),
        ({"queue_timeout": -1}, "queue_timeout must be seconds"),
        ({"queue_timeout": math.nan}, "queue_timeout must be seconds"),
        ({"queue_timeout": "1"}, "queue_timeout must be seconds of at least 0, or None, not '1'"),
        ({"queue_timeout": HUGE}, "queue_timeout must be seconds"),
        ({"queue_timeout": -HUGE}, "queue_timeout must be seconds of at least 0, or None, not -1000"),
        ({"queue_timeout": 10 * DIGITS}, "queue_timeout must be seconds of at least 0, or None, not an int of .* bits"),
        ({"queue_timeout": -10 * DIGITS}, "not an int of .* bits"),
        ({"queue_limit": HUGE}, "queue_limit must be an int from 0 to 9223372036854775807, not 1000"),
        ({"queue_limit": DIGITS}, "queue_limit must be an int .* not an int of .* bits"),
        ({"parallel": DIGITS}, "parallel must be an int from 1 to 256, not an int of .* bits"),
        ({"context_size": DIGITS}, "a wrong option: context_size: must be an integer .* not an int of .* bits"),
        ({"admission": "tokens"}, "admission must be 'requests' or 'slots'"),
        ({"name": "a"}, "the name 'a' is in use"),
        ({"name": ""}, "a non-empty str"),
        ({"contextsize": 3}, "the scripted loader has no option contextsize; it has: .*context_size"),
        ({"context_size": "big"}, "a wrong option: context_size: must be an integer"),
    ],
)
async def test_A10_a_wrong_option_is_refused_before_anything_is_loaded(options: dict[str, Any], message: str) -> None:
    async with bench() as b:
        with pytest.raises(laneway.ModelLoadError, match=message):
            await b.engine.load_model("scripted:b", **options)
        assert "scripted:b" not in b.loader.decoders


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"queue_timeout": -1}, "queue_timeout must be seconds"),
        ({"queue_timeout": math.nan}, "queue_timeout must be seconds"),
        ({"queue_timeout": HUGE}, "queue_timeout must be seconds"),
        ({"queue_timeout": DIGITS}, "queue_timeout must be seconds"),
        ({"queue_timeout": -DIGITS}, "queue_timeout must be seconds"),
        ({"cap": math.nan}, "a cap cannot be NaN"),
        ({"cap": "4"}, "a cap is an int or a float"),
        ({"backpressure": DIGITS}, "backpressure must be 'merge' or 'pause'"),
        ({"request_id": DIGITS}, "request_id must be a non-empty str"),
    ],
)
async def test_A10_a_number_that_a_run_cannot_use_is_refused_before_it_arrives(
    options: dict[str, Any], message: str, autojump_clock: trio.testing.MockClock
) -> None:
    async with bench() as b:
        with pytest.raises(laneway.InvalidRequestError, match=message):
            async with b.run("generate", Generate(PROMPT), **options):
                pytest.fail("it was admitted")
        assert b.decoder.statistics().steps == 0
        b.nothing_left()


@pytest.mark.parametrize("seconds", [math.inf, 1e308, 10**300, 0.0, None])
async def test_A5_any_other_number_of_seconds_bounds_a_wait(
    seconds: float | None, autojump_clock: trio.testing.MockClock
) -> None:
    async with bench() as b, b.run("generate", Generate(PROMPT, max_tokens=2), queue_timeout=seconds) as run:
        assert len((await run.result()).tokens) == 2


async def test_A3_grants_follow_arrival_and_nobody_barges(autojump_clock: trio.testing.MockClock) -> None:
    granted = []

    class Observer:
        @laneway.hookimpl
        def laneway_request_admitted(self, record: laneway.RequestRecord) -> None:
            granted.append((record.request_id, record.started_at))

    async def one(b: Any, name: str) -> None:
        async with b.run("body", Body(lambda ctx: trio.sleep(1)), request_id=name) as run:
            await run.result()

    async with bench(parallel=2, plugins=[Observer()]) as b, trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(one, b, f"r{number}")
            while f"r{number}" not in {request.request_id for request in (*b.lane().running, *b.lane().waiting)}:
                await trio.lowlevel.checkpoint()
        # Arrives in the very instant in which permits are freed, behind all who wait.
        await trio.sleep(1)
        nursery.start_soon(one, b, "newcomer")
    assert granted == [(f"r{number}", number // 2) for number in range(20)] + [("newcomer", 10)]


async def test_A4_64_wait_and_the_65th_is_refused(autojump_clock: trio.testing.MockClock) -> None:
    async def wait(b: Any) -> None:
        async with b.run("body", Body(forever)) as run:
            with contextlib.suppress(laneway.InferenceCancelledError):
                await run.result()

    async with bench(parallel=3) as b, trio.open_nursery() as nursery:
        for _ in range(3 + 64):
            nursery.start_soon(wait, b)
        await trio.testing.wait_all_tasks_blocked()
        assert (b.lane().used, len(b.lane().waiting), b.lane().queue_limit) == (3, 64, 64)
        with pytest.raises(laneway.RequestRejectedByPolicyError, match="64 requests wait and the queue holds 64"):
            async with b.run("body", Body(forever)):
                pytest.fail("entered")
        # A waiter that leaves frees its place at once.
        b.engine.cancel(b.lane().waiting[30].request_id)
        async with b.run("body", Body(forever)) as late:
            assert late.state == "waiting"
            assert b.lane().waiting[-1].request_id == late.request_id
            assert [waiter.position for waiter in b.lane().waiting] == list(range(1, 65))
            with pytest.raises(laneway.RequestRejectedByPolicyError):
                async with b.run("body", Body(forever)):
                    pytest.fail("entered")
        nursery.cancel_scope.cancel()


async def test_A5_the_callers_scope_rules_the_wait(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(parallel=1) as b, b.run("body", Body(forever)):
        with pytest.raises(trio.TooSlowError), trio.fail_after(2):
            async with b.run("generate", Generate(PROMPT)) as run:
                await run.result()
        assert trio.current_time() == 2
        assert run.state == "cancelled"
        assert b.lane().waiting == ()


@pytest.mark.parametrize("by", ["model", "call", "call over model"])
async def test_A5_a_queue_timeout_refuses(by: str, autojump_clock: trio.testing.MockClock) -> None:
    model_timeout = {"model": 3.0, "call": None, "call over model": 9.0}[by]
    call_timeout = {"model": None, "call": 3.0, "call over model": 3.0}[by]
    async with bench(parallel=1, queue_timeout=model_timeout) as b, b.run("body", Body(forever)):
        async with b.run("generate", Generate(PROMPT), queue_timeout=call_timeout) as run:
            with pytest.raises(laneway.RequestRejectedByPolicyError, match="queue_timeout") as refused:
                await run.admitted()
            assert trio.current_time() == 3
            assert refused.value.reason == "queue_timeout"
            with pytest.raises(laneway.RequestRejectedByPolicyError):
                await run.result()
        assert run.state == "rejected"
        assert b.lane().waiting == ()


async def test_A5_a_queue_timeout_does_not_bound_the_running(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(parallel=1, queue_timeout=1) as b, b.run("body", Body(lambda ctx: trio.sleep(5))) as run:
        await run.result()
        assert trio.current_time() == 5


async def test_A6_a_writer_runs_alone_and_is_not_overtaken(autojump_clock: trio.testing.MockClock) -> None:
    seen: list[tuple[str, float]] = []

    async def note(ctx: laneway.RequestContext) -> None:
        seen.append((ctx.request_id, trio.current_time()))
        await trio.sleep(1)

    async def one(b: Any, kind: str, name: str) -> None:
        async with b.run(kind, Body(note), request_id=name) as run:
            await run.result()

    async with bench(parallel=2) as b, trio.open_nursery() as nursery:
        for kind, name in (("body", "r1"), ("writer", "w"), ("body", "r2"), ("grouped", "g"), ("body", "r3")):
            nursery.start_soon(one, b, kind, name)
            await trio.testing.wait_all_tasks_blocked()
    assert seen[:2] == [("r1", 0.0), ("w", 1.0)]
    assert sorted(seen[2:]) == [("g", 2.0), ("r2", 2.0), ("r3", 2.0)]


async def test_A6_a_unique_operation_is_refused_beside_another(autojump_clock: trio.testing.MockClock) -> None:
    async def slow_to_leave(ctx: laneway.RequestContext) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(5)

    async with bench(parallel=1) as b, trio.open_nursery() as nursery:

        async def train() -> None:
            async with b.run("training", Body(slow_to_leave), request_id="t"):
                await trio.sleep(2)

        nursery.start_soon(train)
        for moment in (1, 4):  # running, tearing down
            await trio.sleep(moment - trio.current_time())
            with pytest.raises(laneway.RequestRejectedByPolicyError, match="only one may be") as busy:
                async with b.run("training", Body(forever)):
                    pytest.fail("entered")
            assert busy.value.reason == "busy"
        await b.engine.wait_ended("t")
        async with b.run("training", Body(forever)) as run:
            await run.admitted()


async def test_A7_reject_refuses_what_cannot_start_now(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(parallel=2) as b:
        async with b.run("body", Body(forever, keys=("k",))) as one:
            await one.admitted()
            for kind, request in (("writer", Body(forever)), ("body", Body(forever, keys=("k",)))):
                with pytest.raises(laneway.RequestRejectedByPolicyError, match="asked not to wait") as refused:
                    async with b.run(kind, request, overflow="reject"):
                        pytest.fail("entered")
                assert refused.value.reason == "overflow"
            async with b.run("body", Body(forever), overflow="reject") as two:
                await two.admitted()
                with pytest.raises(laneway.RequestRejectedByPolicyError):
                    async with b.run("body", Body(forever), overflow="reject"):
                        pytest.fail("entered")
        b.nothing_left()


async def test_A8_a_permit_goes_back_after_teardown_even_if_that_raises(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def bad_teardown(ctx: laneway.RequestContext) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(5)
            raise RuntimeError("teardown broke")

    async with bench(parallel=1) as b, trio.open_nursery() as nursery:

        async def next_one() -> None:
            async with b.run("generate", Generate(PROMPT, 1)) as run:
                await run.admitted()
                assert trio.current_time() == 6
                await run.result()

        async with b.run("body", Body(bad_teardown)) as run:
            await run.admitted()
            nursery.start_soon(next_one)
            await trio.sleep(1)
            b.engine.cancel(run.request_id)
            with pytest.raises(laneway.InferenceCancelledError) as ended:
                await run.result()
            assert isinstance(ended.value.__cause__, RuntimeError)


async def test_A9_a_request_id_is_unique_until_teardown_has_ended(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(parallel=1) as b:
        async with b.run("body", Body(forever), request_id="same") as run:
            for state in ("running", "cancelling"):
                with pytest.raises(
                    laneway.RequestIdConflictError, match=f"'same' belongs to a request that is {state}"
                ):
                    async with b.run("generate", Generate(PROMPT), request_id="same"):
                        pytest.fail("entered")
                b.engine.cancel("same")
            await b.engine.wait_ended("same")
            async with b.run("generate", Generate(PROMPT, 1), request_id="same") as again:
                await again.result()
            with pytest.raises(laneway.InferenceCancelledError):
                await run.result()


async def test_A9_minted_ids_avoid_those_in_use(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(parallel=4) as b, b.run("body", Body(forever), request_id="body-1"):
        async with b.run("body", Body(forever)) as one, b.run("body", Body(forever)) as two:
            assert len({"body-1", one.request_id, two.request_id}) == 3


async def test_A10_a_prompt_of_the_windows_size_is_refused(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(parallel=3, context_size=100) as b:
        assert b.model.window == 33
        with pytest.raises(laneway.ContextOverflowError, match="33 tokens and one slot holds 33") as overflow:
            async with b.run("generate", Generate(tuple(range(33)))):
                pytest.fail("entered")
        error = overflow.value
        assert (error.prompt_tokens, error.window, error.context_size, error.parallel) == (33, 33, 100, 3)
        async with b.run("generate", Generate(tuple(range(32)), None)) as run:
            answer = await run.result()
        assert (answer.stop_reason, len(answer.tokens)) == ("length", 1)
        b.nothing_left()


async def test_A10_a_run_that_reaches_its_window_ends_with_length(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(parallel=2, context_size=40) as b, b.run("generate", Generate(PROMPT, None)) as run:
        answer = await run.result()
        assert (answer.stop_reason, len(answer.tokens)) == ("length", 17)


async def test_A10_generate_checks_what_prepare_did_not(autojump_clock: trio.testing.MockClock) -> None:
    async def too_long(ctx: laneway.RequestContext) -> None:
        ctx.generate(list(range(64)), GREEDY)

    async def empty(ctx: laneway.RequestContext) -> None:
        ctx.generate([], GREEDY)

    async def no_tokens(ctx: laneway.RequestContext) -> None:
        ctx.generate([1], GREEDY, max_tokens=0)

    async def stop_at_once(ctx: laneway.RequestContext) -> None:
        ctx.generate([1], GREEDY, stop=("",))

    async with bench() as b:
        for body in (too_long, empty, no_tokens, stop_at_once):
            error = laneway.ContextOverflowError if body is too_long else laneway.InvalidRequestError
            async with b.run("body", Body(body)) as run:
                with pytest.raises(error):
                    await run.result()


async def test_A11_an_idle_engine_leaves_nothing_behind(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(parallel=2) as b:
        await trio.testing.wait_all_tasks_blocked()
        tasks = trio.lowlevel.current_statistics().tasks_living
        for _ in range(20):
            async with b.run("generate", Generate(PROMPT, 3)) as run:
                await run.result()
        await trio.testing.wait_all_tasks_blocked()
        now = trio.lowlevel.current_statistics()
        assert now.tasks_living == tasks
        assert now.seconds_to_next_deadline == math.inf
        b.nothing_left()


async def test_A12_a_batch_weighs_its_slots_if_the_model_says_so(autojump_clock: trio.testing.MockClock) -> None:
    for admission, beside in (("requests", "running"), ("slots", "waiting")):
        async with bench(parallel=4, admission=admission) as b:
            async with b.run("body", Body(forever, weight=3)), b.run("body", Body(forever, weight=2)) as second:
                assert second.state == beside
                async with b.run("body", Body(forever)) as third:
                    assert third.state == beside  # a heavy head is never passed


async def test_A13_who_waits_for_a_key_holds_no_permit_and_may_be_passed(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with bench(parallel=2) as b, b.run("body", Body(lambda ctx: trio.sleep(5), keys=("k",))) as first:
        async with b.run("body", Body(forever, keys=("k",))) as waits, b.run("generate", Generate(PROMPT, 3)) as plain:
            await plain.result()
            assert waits.state == "waiting"
            assert b.lane().used == 1
            await first.result()
            await waits.admitted()
            assert trio.current_time() == pytest.approx(5)


async def test_A13_a_key_found_later_is_tried_and_given_back(autojump_clock: trio.testing.MockClock) -> None:
    async def claim(ctx: laneway.RequestContext) -> bool:
        return ctx.claim("k")

    async with bench(parallel=2) as b:
        async with b.run("body", Body(forever, keys=("k",))), b.run("body", Body(claim)) as late:
            assert await late.result() is False
        async with b.run("body", Body(claim)) as again:
            assert await again.result() is True
        async with b.run("body", Body(claim)) as again:
            assert await again.result() is True


async def test_A14_a_lane_group_has_a_queue_and_a_cap_of_its_own(autojump_clock: trio.testing.MockClock) -> None:
    async with (
        bench(parallel=1) as b,
        b.run("body", Body(forever)) as own,
        b.run("grouped", Body(forever), cap=2) as g1,
    ):
        async with b.run("grouped", Body(forever)) as g2, b.run("grouped", Body(forever)) as g3:
            states = [run.state for run in (own, g1, g2, g3)]
            assert states == ["running", "running", "running", "waiting"]
            lanes = {lane.group: lane for lane in b.engine.snapshot().model("a").lanes}
            assert (lanes[""].cap, lanes["others"].cap) == (1, 2)


async def test_A14_the_first_requests_cap_holds_until_the_lane_is_idle(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(parallel=3) as b:
        async with b.run("body", Body(forever), cap=1.9) as one, b.run("body", Body(forever), cap=3) as two:
            assert (one.state, two.state, b.lane().cap) == ("running", "waiting", 1)
        assert b.lane().cap == 3
        async with b.run("body", Body(forever), cap=99):
            assert b.lane().cap == 3


async def test_A15_slots_go_to_the_request_that_holds_the_fewest(autojump_clock: trio.testing.MockClock) -> None:
    opened: list[tuple[str, int]] = []

    async def many(ctx: laneway.RequestContext) -> None:
        sequences = [ctx.generate([number + 1, 7], GREEDY, max_tokens=20) for number in range(4)]
        for tokens in sequences:
            await tokens.__aenter__()
        for number, tokens in enumerate(sequences):
            await tokens.finish()
            opened.append((ctx.request_id, number))

    async def slots(b: Any) -> dict[str, int]:
        return {request.request_id: request.slots for request in b.lane().running}

    async with bench(parallel=2) as b, b.run("body", Body(many), request_id="first") as first:
        await trio.sleep(0.35)
        assert await slots(b) == {"first": 2}
        assert b.engine.snapshot().model("a").slot_waiters == 2
        async with b.run("body", Body(many), request_id="second") as second:
            await trio.sleep(2.5)  # the first two answers of "first" are over, their slots were given out anew
            assert await slots(b) == {"first": 1, "second": 1}
            await first.result()
            await second.result()
        for name in ("first", "second"):
            assert [number for who, number in opened if who == name] == [0, 1, 2, 3]
        b.nothing_left()


async def test_A15_queue_seconds_end_with_the_first_prefill_chunk(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(parallel=1) as b, b.run("body", Body(lambda ctx: trio.sleep(4))):
        async with b.run("generate", Generate(PROMPT, 3)) as run:
            stats = (await run.result()).stats
    assert stats.queue_seconds == pytest.approx(4)
    assert stats.time_to_first_token == pytest.approx(4.1)
    assert stats.tokens_per_second == pytest.approx(10)
    assert stats.average_concurrent_sequences == 1


async def test_A15_an_empty_answer_has_no_time_to_first_token(autojump_clock: trio.testing.MockClock) -> None:
    end = min(ScriptedTokenizer().end_tokens)
    async with bench(script={PROMPT: [end]}) as b:
        async with b.run("generate", Generate(PROMPT)) as run:
            answer = await run.result()
    assert (answer.tokens, answer.text, answer.stop_reason) == ((), "", "eos")
    assert answer.stats.time_to_first_token is None
    assert answer.stats.tokens_per_second is None
