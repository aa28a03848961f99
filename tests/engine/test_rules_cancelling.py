"""Rules C1 to C11 on a whole engine with a scripted decoder."""

from __future__ import annotations

import codecs
import functools
from typing import Any

import attrs
import pytest
import trio
import trio.testing

import laneway
from laneway.testing import ScriptedLoader
from tests.engine.kit import GREEDY, PLUGIN, Body, Generate, bench, forever

PROMPT = (5, 6, 7)


async def _outcome(run: laneway.Run) -> Any:
    try:
        return await run.result()
    except laneway.LanewayError as error:
        return error


async def _end_of(b: Any, kind: str, request: Any, ends: dict[str, Any], name: str, **options: Any) -> None:
    """Run a request and note how it ended, and when."""
    try:
        async with b.run(kind, request, request_id=name, **options) as run:
            ends[name] = (await _outcome(run), trio.current_time())
    except trio.Cancelled:
        ends[name] = ("cancelled from outside", trio.current_time())
        raise


async def test_C1_scope_request_ends_one_alone(autojump_clock: trio.testing.MockClock) -> None:
    async with bench() as b, b.run("body", Body(forever)) as one, b.run("body", Body(forever)) as other:
        await other.admitted()
        assert b.engine.cancel(one.request_id) == 1
        await b.engine.wait_ended(one.request_id)
        assert (one.state, other.state) == ("cancelled", "running")
        assert isinstance(await _outcome(one), laneway.InferenceCancelledError)


async def test_C1_scope_model_ends_all_of_the_operation_on_the_model(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(parallel=3) as b:
        other = await b.engine.load_model("scripted:b")
        async with (
            b.run("common", Body(forever)) as one,
            b.run("common", Body(forever)) as two,
            b.run("body", Body(forever)) as plain,
            b.engine.run(other, "common", Body(forever)) as elsewhere,
        ):
            await elsewhere.admitted()
            assert b.engine.cancel(one.request_id) == 2
            await b.engine.wait_ended(two.request_id)
            states = (one.state, two.state, plain.state, elsewhere.state)
            assert states == ("cancelled", "cancelled", "running", "running")
            assert isinstance(await _outcome(two), laneway.InferenceCancelledError)
            assert isinstance(await _outcome(one), laneway.InferenceCancelledError)


async def test_C1_scope_model_a_caller_that_leaves_detaches_and_the_last_cancels(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with bench() as b:
        async with b.run("common", Body(forever)) as stays:
            async with b.run("common", Body(forever)) as leaves:
                await leaves.admitted()
            assert (stays.state, leaves.state) == ("running", "running")
        await b.engine.wait_ended(leaves.request_id)
        assert (stays.state, leaves.state) == ("cancelled", "cancelled")
        b.nothing_left()


async def test_C1_a_waiters_cancel_reaches_nobody_else(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(parallel=1) as b, b.run("common", Body(forever)) as runs:
        async with b.run("common", Body(forever)) as waits:
            assert b.engine.cancel(waits.request_id) == 1
            assert isinstance(await _outcome(waits), laneway.InferenceCancelledError)
        async with b.run("common", Body(forever)):
            pass
        assert runs.state == "running"


async def test_C1_scope_none_lets_the_caller_go_and_the_work_end(autojump_clock: trio.testing.MockClock) -> None:
    async def native(ctx: laneway.RequestContext) -> str:
        await trio.sleep(5)
        return "made for nobody"

    async with bench(parallel=1) as b:
        async with b.run("stubborn", Body(native), request_id="s") as run:
            await run.admitted()
            await trio.sleep(1)
        assert trio.current_time() == 1
        assert run.state == "cancelling"
        with pytest.raises(laneway.RequestIdConflictError, match="cancelling"):
            async with b.run("body", Body(forever), request_id="s"):
                pytest.fail("entered")
        with pytest.raises(laneway.RequestRejectedByPolicyError):
            async with b.run("body", Body(forever), overflow="reject"):
                pytest.fail("the permit was given back before the work had ended")
        await b.engine.wait_ended("s")
        assert trio.current_time() == 5
        assert run.state == "cancelled"
        assert isinstance(await _outcome(run), laneway.InferenceCancelledError)
        b.nothing_left()


async def test_C1_scope_none_cancelled_by_id_answers_at_once(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(parallel=1) as b:
        async with b.run("stubborn", Body(lambda ctx: trio.sleep(5))) as run:
            await trio.sleep(1)
            assert b.engine.cancel(run.request_id) == 1
            assert isinstance(await _outcome(run), laneway.InferenceCancelledError)
            assert trio.current_time() == 1
        assert trio.current_time() == 1


@pytest.mark.parametrize("how", ["id", "scope", "leave", "deadline"])
async def test_C2_peers_have_the_tokens_of_a_run_without_the_cancelled_one(
    how: str, autojump_clock: trio.testing.MockClock
) -> None:
    prompts = {"one": (1, 2, 3), "two": (4, 5), "three": (6, 7, 8, 9)}
    ends: dict[str, Any] = {}

    async def victim(b: Any) -> None:
        with trio.CancelScope() as scope:
            if how == "deadline":
                scope.deadline = trio.current_time() + 1.35
            async with b.run("generate", Generate((99, 98, 97), None), request_id="victim") as run:
                await trio.sleep(1.05)
                if how == "id":
                    b.engine.cancel("victim")
                elif how == "scope":
                    scope.cancel()
                elif how == "leave":
                    return
                await _outcome(run)

    async with bench(parallel=4) as b:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(victim, b)
            for name, prompt in prompts.items():
                nursery.start_soon(_end_of, b, "generate", Generate(prompt, 25), ends, name)
        for name, prompt in prompts.items():
            assert list(ends[name][0].tokens) == list(b.decoder.expected(prompt, GREEDY, 25).tokens), name
        b.nothing_left()


async def test_C2_who_a_deadline_cuts_has_a_prefix(autojump_clock: trio.testing.MockClock) -> None:
    made = []
    async with bench(parallel=2) as b:
        with trio.move_on_after(1.25):
            async with b.run("generate", Generate(PROMPT, None)) as run:
                async for event in run:
                    made.append(event.text)
        assert len(made) > 5
        assert b.expected_text(PROMPT, 40).startswith("".join(made))


async def test_C3_cancel_is_synchronous_and_counts(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(parallel=1) as b, b.run("body", Body(forever)) as runs, b.run("body", Body(forever)) as waits:
        async with b.run("generate", Generate(PROMPT)) as behind:
            assert b.engine.cancel("nobody") == 0
            assert b.engine.cancel(waits.request_id) == 1
            assert [waiter.request_id for waiter in b.lane().waiting] == [behind.request_id]
            assert b.engine.cancel(runs.request_id) == 1
            assert runs.state == "cancelling"
            assert isinstance(await _outcome(waits), laneway.InferenceCancelledError)
            assert isinstance(await _outcome(runs), laneway.InferenceCancelledError)
            assert (await behind.result()).stop_reason == "length"
            assert b.engine.cancel(behind.request_id) == 0


async def test_C3_a_cancelling_request_counts_no_more_and_keeps_its_first_reason(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def linger(ctx: laneway.RequestContext) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(1)

    async with bench(parallel=3) as b:
        async with (
            b.run("body", Body(linger)) as alone,
            b.run("common", Body(linger)) as one,
            b.run("common", Body(linger)) as two,
        ):
            await two.admitted()
            assert b.engine.cancel(alone.request_id, "first") == 1
            assert b.engine.cancel(alone.request_id, "second") == 0
            assert b.engine.cancel(one.request_id, "both") == 2
            assert b.engine.cancel(two.request_id, "again") == 0
            assert b.engine.cancel_all(reason="everything") == 0
            assert [run.state for run in (alone, one, two)] == ["cancelling"] * 3
            for run, reason in ((alone, "first"), (one, "both"), (two, "both")):
                error = await _outcome(run)
                assert isinstance(error, laneway.InferenceCancelledError)
                assert error.reason == reason
            name = alone.request_id
        # Nothing was armed by any of it (rule C5).
        async with b.run("generate", Generate(PROMPT, 1), request_id=name) as run:
            await run.result()


async def test_C3_cancel_all_counts_those_that_it_ends(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(parallel=1) as b, b.run("body", Body(forever)) as runs, b.run("body", Body(forever)) as waits:
        await runs.admitted()
        assert b.engine.cancel(runs.request_id) == 1
        assert b.engine.cancel_all(kind="body") == 1
        assert isinstance(await _outcome(runs), laneway.InferenceCancelledError)
        assert isinstance(await _outcome(waits), laneway.InferenceCancelledError)


@pytest.mark.parametrize("scope", ["body", "common", "stubborn"])
@pytest.mark.parametrize("fails", [False, True])
async def test_C3_C7_a_request_in_its_teardown_counts_no_more_and_keeps_its_outcome(
    scope: str, fails: bool, autojump_clock: trio.testing.MockClock
) -> None:
    returned = trio.Event()

    async def early(ctx: laneway.RequestContext) -> str:
        # It leaves its sequence to the teardown.
        await anext(await ctx.generate(list(PROMPT), GREEDY).__aenter__())
        returned.set()
        if fails:
            raise ValueError("a bug")
        return "made"

    async with bench(parallel=1) as b:
        async with b.run(scope, Body(early)) as run:
            await returned.wait()
            # Its slot is not free yet, for a step is under way.
            assert run.state == "running"
            assert b.engine.cancel(run.request_id) == 0
            assert b.engine.cancel_all() == 0
            if fails:
                with pytest.raises(ValueError, match="a bug"):
                    await run.result()
            else:
                assert await run.result() == "made"
        assert run.state == ("failed" if fails else "completed")
        b.nothing_left()


async def test_C3_cancel_all_takes_a_model_and_a_kind(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(parallel=2) as b:
        other = await b.engine.load_model("scripted:b", 2)
        ends: dict[str, Any] = {}
        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(_end_of, b, "body", Body(forever), ends, f"a body {number}")
                await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(_end_of, b, "generate", Generate(PROMPT, 5), ends, "a generate")
            await trio.testing.wait_all_tasks_blocked()
            async with b.engine.run(other, "body", Body(forever)) as elsewhere:
                assert b.engine.cancel_all(model=other, kind="generate") == 0
                assert b.engine.cancel_all(model=b.model, kind="body") == 3
                assert [waiter.kind for waiter in b.lane().waiting] == ["generate"]
                assert b.engine.cancel_all() == 2  # the other three are cancelling already
                assert isinstance(await _outcome(elsewhere), laneway.InferenceCancelledError)
        assert all(isinstance(end, laneway.InferenceCancelledError) for end, _ in ends.values())
        b.nothing_left()


async def test_C3_a_mass_cancel_grants_nobody_that_it_cancels(autojump_clock: trio.testing.MockClock) -> None:
    started = []

    async def note(ctx: laneway.RequestContext) -> None:
        started.append(ctx.request_id)
        await trio.sleep_forever()

    ends: dict[str, Any] = {}
    async with bench(parallel=1, queue_limit=300) as b, trio.open_nursery() as nursery:
        for number in range(200):
            nursery.start_soon(_end_of, b, "body", Body(note), ends, f"r{number}")
        await trio.testing.wait_all_tasks_blocked()
        assert b.engine.cancel_all(kind="body") == 200
        assert b.lane().waiting == ()
    assert len(started) == 1
    assert len(ends) == 200
    assert all(isinstance(end, laneway.InferenceCancelledError) for end, _ in ends.values())


async def test_C4_when_wait_ended_returns_the_slot_is_free(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(parallel=1) as b, b.run("generate", Generate(PROMPT, None)) as run:
        await trio.sleep(0.55)
        b.engine.cancel(run.request_id)
        assert b.decoder.used
        await b.engine.wait_ended(run.request_id)
        b.nothing_left()
        async with b.run("generate", Generate(PROMPT, 1), overflow="reject") as next_one:
            assert (await next_one.result()).stop_reason == "length"
        assert isinstance(await _outcome(run), laneway.InferenceCancelledError)


async def test_C4_a_handler_never_awaits_its_own_end(autojump_clock: trio.testing.MockClock) -> None:
    async with bench() as b:
        async with b.run("body", Body(lambda ctx: b.engine.wait_ended(ctx.request_id))) as run:
            with pytest.raises(laneway.InvalidRequestError, match="its own end"):
                await run.result()
        await b.engine.wait_ended("nobody")


async def test_C5_a_cancel_that_comes_first_is_remembered(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(parallel=1) as b:
        assert b.engine.cancel("early") == 0
        await trio.sleep(29.9)
        with pytest.raises(laneway.InferenceCancelledError, match="before it began"):
            async with b.run("generate", Generate(PROMPT), request_id="early"):
                pytest.fail("entered")
        b.nothing_left()
        # It was used up.
        async with b.run("generate", Generate(PROMPT, 1), request_id="early") as run:
            await run.result()


async def test_C5_it_is_forgotten_after_30_seconds(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(parallel=1) as b:
        b.engine.cancel("early")
        await trio.sleep(30)
        async with b.run("generate", Generate(PROMPT, 1), request_id="early") as run:
            await run.result()


async def test_C5_only_128_are_kept_and_the_oldest_goes_first(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(parallel=1) as b:
        for number in range(129):
            b.engine.cancel(f"early-{number}")
        async with b.run("generate", Generate(PROMPT, 1), request_id="early-0") as run:
            await run.result()
        for number in (1, 128):
            with pytest.raises(laneway.InferenceCancelledError):
                async with b.run("generate", Generate(PROMPT, 1), request_id=f"early-{number}"):
                    pytest.fail("entered")


async def test_C5_an_id_that_lives_or_has_just_ended_arms_nothing(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(parallel=1) as b:
        async with b.run("generate", Generate(PROMPT, 1), request_id="x") as run:
            await run.result()
        await trio.sleep(29)
        assert b.engine.cancel("x") == 0
        async with b.run("body", Body(forever), request_id="x") as run:
            await run.admitted()
            assert run.state == "running"
            assert b.engine.cancel("x") == 1
            assert b.engine.cancel("x") == 0  # cancelling already, but live: nothing is armed
            assert isinstance(await _outcome(run), laneway.InferenceCancelledError)
        async with b.run("generate", Generate(PROMPT, 1), request_id="x") as run:
            await run.result()


@pytest.mark.parametrize("how", ["cancelled before it began", "refused"])
async def test_C5_an_id_that_ended_on_its_arrival_arms_nothing(
    how: str, autojump_clock: trio.testing.MockClock
) -> None:
    async with bench(parallel=2) as b:
        if how == "refused":
            async with b.run("writer", Body(forever)):
                with pytest.raises(laneway.RequestRejectedByPolicyError):
                    async with b.run("generate", Generate(PROMPT), request_id="x", overflow="reject"):
                        pytest.fail("entered")
        else:
            b.engine.cancel("x")
            with pytest.raises(laneway.InferenceCancelledError):
                async with b.run("generate", Generate(PROMPT), request_id="x"):
                    pytest.fail("entered")
        assert b.engine.cancel("x") == 0
        async with b.run("generate", Generate(PROMPT, 1), request_id="x") as run:
            await run.result()


async def test_C6_the_error_holds_what_had_been_made(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(parallel=1) as b, b.run("generate", Generate(PROMPT, None), request_id="mine") as run:
        await trio.sleep(1.05)
        b.engine.cancel("mine", "enough")
        with pytest.raises(laneway.InferenceCancelledError, match=r"'mine' was cancelled \(enough\) after") as ended:
            await run.result()
        error = ended.value
        whole = b.decoder.expected(PROMPT, GREEDY, 40)
        assert 5 < len(error.tokens) < 15
        assert list(error.tokens) == list(whole.tokens[: len(error.tokens)])
        assert b.expected_text(PROMPT, 40).startswith(error.text)
        assert error.stats is not None
        assert error.stats.generated_tokens == len(error.tokens)


async def test_C6_the_error_holds_what_was_held_back_for_a_stop_string(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(parallel=1) as b:
        whole = b.expected_text(PROMPT, 40)
        # The whole answer may become this stop string, which is one character longer: all of it is held back.
        stop = (whole + "!",)
        async with b.run("generate", Generate(PROMPT, None, stop=stop), request_id="mine") as run:
            await trio.sleep(1.05)
            b.engine.cancel("mine")
            error = await _outcome(run)
        assert isinstance(error, laneway.InferenceCancelledError)
        made = codecs.getincrementaldecoder("utf-8")("replace").decode(
            b"".join(map(b.model.tokenizer.piece, error.tokens))
        )
        assert len(made) > 3
        assert error.text == made


async def test_C6_the_error_holds_what_a_handler_without_sequences_has_handed_out(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def say(ctx: laneway.RequestContext) -> None:
        for item, text in (("1", "a"), ("2", "b"), ("1", "c")):
            await ctx.emit(laneway.BatchEvent(item, laneway.TextDelta(text)))
        await ctx.emit(laneway.Progress(1, 2, "item"))
        await trio.sleep_forever()

    async with bench() as b, b.run("body", Body(say), request_id="mine") as run:
        await trio.sleep(1)
        b.engine.cancel("mine")
        error = await _outcome(run)
    assert isinstance(error, laneway.InferenceCancelledError)
    assert (error.text, error.tokens) == ("acb", ())


async def test_C6_the_error_also_holds_what_came_before_the_first_sequence(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def say(ctx: laneway.RequestContext) -> None:
        await ctx.emit(laneway.TextDelta("Answer: "))
        async with ctx.generate(list(PROMPT), GREEDY, deliver=ctx.put) as tokens:
            await tokens.finish()

    async with bench() as b, b.run("body", Body(say), request_id="mine") as run:
        await trio.sleep(1.05)
        b.engine.cancel("mine")
        error = await _outcome(run)
        assert isinstance(error, laneway.InferenceCancelledError)
        assert len(error.tokens) > 3
        assert error.text == "Answer: " + b.expected_text(PROMPT, len(error.tokens))


@pytest.mark.parametrize("how", ["cancel", "cancel_all", "leave", "deadline", "unload"])
async def test_C6_a_handler_is_told_whether_its_end_was_asked_for(
    how: str, autojump_clock: trio.testing.MockClock
) -> None:
    told: list[bool] = []

    async def body(ctx: laneway.RequestContext) -> None:
        assert not ctx.cancel_asked
        try:
            await trio.sleep_forever()
        finally:
            told.append(ctx.cancel_asked)

    async with bench() as b:
        with trio.move_on_after(1 if how == "deadline" else 10):
            async with b.run("body", Body(body), request_id="mine") as run:
                await run.admitted()
                await trio.testing.wait_all_tasks_blocked()
                if how == "cancel":
                    b.engine.cancel("mine")
                elif how == "cancel_all":
                    b.engine.cancel_all()
                elif how == "unload":
                    await b.engine.unload_model(b.model)
                if how != "leave":
                    await _outcome(run)
    assert told == [how in ("cancel", "cancel_all")]


async def test_C6_the_callers_own_cancel_comes_untouched_and_wins(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(parallel=1) as b:
        with trio.CancelScope() as scope:
            async with b.run("body", Body(forever), request_id="both") as run:
                await run.admitted()
                b.engine.cancel("both")
                await b.engine.wait_ended("both")
                scope.cancel()
                await run.result()
        assert scope.cancelled_caught


async def test_C6_errors_of_the_engines_body_come_bare() -> None:
    error = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as raised:
        async with bench(parallel=1) as b, b.run("body", Body(forever)):
            raise error
    assert raised.value is error


async def test_C6_a_cancelled_engine_body_is_just_cancelled(autojump_clock: trio.testing.MockClock) -> None:
    ends: dict[str, Any] = {}
    with trio.move_on_after(2) as scope:
        async with bench(parallel=1) as b, b.run("generate", Generate(PROMPT, 1)) as run:
            await run.result()
            await _end_of(b, "body", Body(forever), ends, "x")
    assert scope.cancelled_caught
    assert ends == {"x": ("cancelled from outside", 2.0)}


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
async def test_C6_an_exception_for_the_program_reaches_it_bare(
    error: type[BaseException], autojump_clock: trio.testing.MockClock
) -> None:
    async def stop(ctx: laneway.RequestContext) -> None:
        raise error

    with pytest.raises(error):
        async with bench(parallel=2) as b, b.run("body", Body(stop)) as run:
            await run.result()
    assert run.state == "cancelled"


async def test_C7_a_cancel_that_comes_too_late_is_completed(autojump_clock: trio.testing.MockClock) -> None:
    finishing = trio.Event()

    async def nearly_done(ctx: laneway.RequestContext) -> str:
        with trio.CancelScope(shield=True):
            finishing.set()
            await trio.sleep(1)
        return "made"

    async with bench(parallel=1) as b, b.run("body", Body(nearly_done)) as run:
        await finishing.wait()
        assert b.engine.cancel(run.request_id) == 1
        assert run.state == "cancelling"
        assert await run.result() == "made"
        assert run.state == "completed"


@pytest.mark.parametrize("after", [0.0, 0.05, 0.15, 0.35, 0.55])
async def test_C7_a_cancelled_handler_gives_back_everything(
    after: float, autojump_clock: trio.testing.MockClock
) -> None:
    """In the queue, in the wait for a key, in prefill or while decoding: two permits, two keys, one slot waiter."""
    ends: dict[str, Any] = {}

    async def two_sequences(ctx: laneway.RequestContext) -> None:
        assert ctx.claim("found later")
        one, two = ctx.generate(list(range(1, 20)), GREEDY), ctx.generate([1, 2], GREEDY)
        async with one, two:
            await one.finish()

    async with bench(parallel=2, seconds_per_token=0.01) as b:
        for kind in ("body", "writer"):
            async with trio.open_nursery() as nursery:
                for name in ("r1", "r2", "r3"):
                    body = Body(two_sequences if name == "r1" else forever, keys=("k",))
                    nursery.start_soon(_end_of, b, kind, body, ends, name)
                await trio.testing.wait_all_tasks_blocked()
                await trio.sleep(after)
                for name in ("r2", "r1", "r3"):
                    assert b.engine.cancel(name) == 1
            assert all(isinstance(end, laneway.InferenceCancelledError) for end, _ in ends.values())
            b.nothing_left()


async def test_C7_sequences_that_a_handler_forgot_are_dropped(autojump_clock: trio.testing.MockClock) -> None:
    async def forgetful(ctx: laneway.RequestContext) -> str:
        tokens = ctx.generate(list(PROMPT), GREEDY)
        await tokens.__aenter__()
        await trio.sleep(1)
        ctx.generate(list(PROMPT), GREEDY)  # never entered: takes nothing
        return "gone"

    async with bench(parallel=1) as b, b.run("body", Body(forgetful)) as run:
        assert await run.result() == "gone"
        b.nothing_left()


async def test_C8_unload_ends_waiters_and_runners_and_frees_the_model(autojump_clock: trio.testing.MockClock) -> None:
    ends: dict[str, Any] = {}
    async with bench(parallel=1) as b, trio.open_nursery() as nursery:
        nursery.start_soon(_end_of, b, "generate", Generate(PROMPT, None), ends, "runs")
        nursery.start_soon(_end_of, b, "generate", Generate(PROMPT, None), ends, "waits")
        await trio.sleep(1)
        await b.engine.unload_model(b.model)
        assert b.model.state == "unloaded"
        assert b.engine.models == ()
        with pytest.raises(laneway.ModelNotLoadedError, match="unloaded"):
            async with b.run("generate", Generate(PROMPT)):
                pytest.fail("entered")
        again = await b.engine.load_model("scripted:a")
        async with b.engine.run(again, "generate", Generate(PROMPT, 1)) as run:
            await run.result()
    for end, _ in ends.values():
        assert isinstance(end, laneway.InferenceCancelledError)
        assert "model 'a' was unloaded" in str(end)


async def test_C8_an_unload_runs_to_its_end_without_its_caller(autojump_clock: trio.testing.MockClock) -> None:
    async def slow_to_leave(ctx: laneway.RequestContext) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(10)

    ends: dict[str, Any] = {}
    async with bench(parallel=1) as b, trio.open_nursery() as nursery:
        nursery.start_soon(_end_of, b, "body", Body(slow_to_leave), ends, "slow")
        await trio.sleep(1)
        with trio.move_on_after(1) as patience:
            await b.engine.unload_model(b.model)
        assert patience.cancelled_caught
        assert b.model.state == "unloading"
        with pytest.raises(laneway.ModelNotLoadedError, match="unloading"):
            async with b.run("generate", Generate(PROMPT)):
                pytest.fail("entered")
        await b.engine.unload_model(b.model)
        assert trio.current_time() == 11
        assert b.model.state == "unloaded"


async def test_C8_leaving_the_engine_ends_runs_of_other_tasks(autojump_clock: trio.testing.MockClock) -> None:
    ends: dict[str, Any] = {}
    async with trio.open_nursery() as nursery:
        async with bench(parallel=1) as b:
            nursery.start_soon(_end_of, b, "generate", Generate(PROMPT, None), ends, "runs")
            nursery.start_soon(_end_of, b, "generate", Generate(PROMPT, None), ends, "waits")
            await trio.sleep(1)
        with pytest.raises(laneway.EngineClosedError):
            async with b.run("generate", Generate(PROMPT)):
                pytest.fail("entered")
        with pytest.raises(laneway.EngineClosedError):
            await b.engine.load_model("scripted:b")
    for end, _ in ends.values():
        assert isinstance(end, laneway.InferenceCancelledError)
        assert "the engine was closed" in str(end)


async def test_C8_a_cancelled_program_tears_down_on_a_living_loop(autojump_clock: trio.testing.MockClock) -> None:
    """Requests of other tasks end as well, and their sequences are dropped by a decode loop that still runs."""
    ends: dict[str, Any] = {}
    loader = ScriptedLoader(seconds_per_step=0.1, end_every=None)

    async def program() -> None:
        async with laneway.open_engine(plugins=[loader.plugin, PLUGIN]) as engine:
            model = await engine.load_model("scripted:a", 2)
            async with trio.open_nursery() as inner:
                for name in ("one", "two", "three"):
                    run = functools.partial(engine.run, model)
                    fake = type("B", (), {"run": staticmethod(run)})
                    inner.start_soon(_end_of, fake, "generate", Generate(PROMPT, None), ends, name)

    with trio.move_on_after(1) as scope:
        await program()
    assert scope.cancelled_caught
    assert {end for end, _ in ends.values()} == {"cancelled from outside"}
    loader.assert_idle()


async def test_C8_a_cancelled_load_frees_the_model(autojump_clock: trio.testing.MockClock) -> None:
    async with bench() as b:
        with trio.move_on_after(1) as scope:
            await b.engine.load_model("scripted:slow", name="slow", seconds_to_load=5)
        assert scope.cancelled_caught
        assert [model.name for model in b.engine.models] == ["a"]
        assert (await b.engine.load_model("scripted:slow", name="slow")).name == "slow"


async def test_C9_a_prefill_that_nobody_wants_is_interrupted(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(parallel=2, context_size=2000, seconds_per_token=1.0) as b:
        with trio.move_on_after(10) as scope:
            async with b.run("generate", Generate(tuple(range(1, 200)))) as run:
                await run.result()
        assert scope.cancelled_caught
        assert trio.current_time() == pytest.approx(10)
        assert b.decoder.statistics().interrupts == 1
        b.nothing_left()


async def test_C9_a_call_that_a_peer_is_in_runs_to_its_end(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(parallel=2, seconds_per_step=10) as b:
        async with b.run("generate", Generate(PROMPT, 3)) as peer, b.run("generate", Generate(PROMPT, 3)) as other:
            await trio.sleep(35)  # one chunk, one token, the other's chunk: now both decode together
            b.engine.cancel(other.request_id)
            assert (await peer.result()).stop_reason == "length"
            assert isinstance(await _outcome(other), laneway.InferenceCancelledError)
        assert b.decoder.statistics().interrupts == 0


async def test_C10_a_plugin_that_misbehaves_hurts_only_its_own_request(autojump_clock: trio.testing.MockClock) -> None:
    async def bad_delivery(ctx: laneway.RequestContext) -> Any:
        def deliver(delta: laneway.TextDelta) -> None:
            raise ZeroDivisionError("the callback broke")

        async with ctx.generate(list(PROMPT), GREEDY, deliver=deliver) as tokens:
            return await tokens.finish()

    async def bad_teardown(ctx: laneway.RequestContext) -> None:
        try:
            await trio.lowlevel.checkpoint()
        finally:
            raise RuntimeError("the teardown broke")

    async def bad_prepare(model: laneway.Model, request: Body) -> Any:
        return "not a Prepared"

    async def handler(ctx: laneway.RequestContext, prepared: laneway.Prepared) -> None:
        pytest.fail("ran")

    async with bench(parallel=2) as b, b.run("generate", Generate(PROMPT, 30)) as peer:
        for body, error in ((bad_delivery, ZeroDivisionError), (bad_teardown, RuntimeError)):
            async with b.run("body", Body(body)) as run:
                with pytest.raises(error):
                    await run.result()
        assert (await peer.result()).stop_reason == "length"
        b.nothing_left()

    bad = laneway.PluginSpec(
        name="bad",
        operations=(laneway.Operation(kind="bad", request_type=Body, prepare=bad_prepare, handler=handler),),
    )
    loader = ScriptedLoader()
    async with laneway.open_engine(plugins=[loader.plugin, bad]) as engine:
        model = await engine.load_model("scripted:a")
        with pytest.raises(TypeError, match="must return a Prepared"):
            async with engine.run(model, "bad", Body(forever)):
                pytest.fail("entered")
        assert model.lanes.idle


async def test_C10_a_loader_that_fails_to_look_stands_in_nobodys_way(caplog: pytest.LogCaptureFixture) -> None:
    def accepts(source: laneway.ModelSource) -> bool:
        raise OSError("the share is gone")

    async def load(source: laneway.ModelSource, parallel: int, options: Any) -> Any:
        pytest.fail("loaded")

    @attrs.frozen
    class NoOptions:
        pass

    bad = laneway.Loader(name="bad", accepts=accepts, load=load, options_type=NoOptions)
    good = ScriptedLoader()
    plugins = [laneway.PluginSpec(name="bad", loaders=(bad,)), good.plugin]
    async with laneway.open_engine(plugins=plugins) as engine:
        assert (await engine.load_model("scripted:a")).state == "loaded"
        with pytest.raises(laneway.ModelLoadError, match=r"loaders: .*; bad failed: OSError.*the share is gone"):
            await engine.load_model("elsewhere:a")
    assert "loader 'bad' could not look at scripted:a" in caplog.text


async def test_C11_a_failed_step_ends_its_own_sequences(autojump_clock: trio.testing.MockClock) -> None:
    ends: dict[str, Any] = {}
    cause = laneway.DecodeError("cells were lost", status=-1)
    async with bench(parallel=2, fail_at={6: cause}) as b:
        async with trio.open_nursery() as nursery:
            for name in ("one", "two", "three"):
                nursery.start_soon(_end_of, b, "generate", Generate(PROMPT, 6), ends, name)
        failed = [end for end, _ in ends.values() if isinstance(end, laneway.DecodeError)]
        assert len(failed) == 2
        for error in failed:
            assert error.__cause__ is cause
            assert (error.reason, error.status, error.sequences) == ("cells were lost", -1, 2)
        (survivor,) = [end for end, _ in ends.values() if not isinstance(end, laneway.LanewayError)]
        assert list(survivor.tokens) == list(b.decoder.expected(PROMPT, GREEDY, 6).tokens)
        assert b.model.state == "loaded"
        b.nothing_left()


async def test_C11_three_failed_steps_in_a_row_fail_the_model(autojump_clock: trio.testing.MockClock) -> None:
    ends: dict[str, Any] = {}
    error = laneway.DecodeError("the device is gone")
    async with bench(parallel=1, fail_at={1: error, 2: error, 3: error}) as b:
        healthy = await b.engine.load_model("scripted:healthy", fail_at=None)
        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(_end_of, b, "generate", Generate(PROMPT, 6), ends, f"r{number}")
        kinds = sorted(type(end).__name__ for end, _ in ends.values())
        assert kinds == ["DecodeError"] * 3 + ["ModelNotLoadedError"] * 2
        assert b.model.state == "failed"
        with pytest.raises(laneway.ModelNotLoadedError, match=r"3 decode steps in a row failed.*the device is gone"):
            async with b.run("generate", Generate(PROMPT)):
                pytest.fail("entered")
        assert b.model.lanes.idle
        async with b.engine.run(healthy, "generate", Generate(PROMPT, 2)) as run:
            assert (await run.result()).stop_reason == "length"
        await b.engine.unload_model(b.model)


async def test_C11_every_sequence_that_goes_with_the_model_is_told_the_same_number(
    autojump_clock: trio.testing.MockClock,
) -> None:
    ends: dict[str, Any] = {}
    async with bench(parallel=4, fail_drop={1: laneway.DecodeError("cannot drop")}, prefix_cache=False) as b:
        async with trio.open_nursery() as nursery:
            for name, max_tokens in (("ends", 3), ("one", 30), ("two", 30), ("three", 30)):
                nursery.start_soon(_end_of, b, "generate", Generate(PROMPT, max_tokens), ends, name)
        failed = [end for end, _ in ends.values() if isinstance(end, laneway.DecodeError)]
        # The one whose slot could not be dropped had its answer, but it was in the loop as well.
        assert [error.sequences for error in failed] == [4, 4, 4]
        assert b.model.state == "failed"


async def test_C11_four_runs_of_one_failed_call_are_told_the_same_number(
    autojump_clock: trio.testing.MockClock,
) -> None:
    ends: dict[str, Any] = {}

    def explode(number: int, batch: laneway.decoder.StepBatch) -> None:
        if len(batch.chunks) == 4:
            raise AssertionError("a bug")

    async with bench(parallel=4, at_step=explode) as b:
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(_end_of, b, "generate", Generate((number + 1, 2, 3), 30), ends, str(number))
        errors = [end for end, _ in ends.values()]
        assert [(type(error), error.sequences) for error in errors] == [(laneway.DecodeError, 4)] * 4


async def test_C11_failures_that_are_not_in_a_row_do_not(autojump_clock: trio.testing.MockClock) -> None:
    error = laneway.DecodeError("a hiccup")
    async with bench(parallel=1, fail_at={1: error, 2: error, 5: error, 6: error}) as b:
        ends: dict[str, Any] = {}
        for number in range(6):
            await _end_of(b, "generate", Generate(PROMPT, 2), ends, f"r{number}")
        assert sum(isinstance(end, laneway.DecodeError) for end, _ in ends.values()) == 4
        assert b.model.state == "loaded"


async def test_C11_a_drop_that_fails_fails_the_model(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(parallel=2, fail_drop={1: laneway.DecodeError("cannot drop")}, prefix_cache=False) as b:
        ends: dict[str, Any] = {}
        async with trio.open_nursery() as nursery:
            for name, max_tokens in (("ends", 3), ("runs", 30), ("waits", 30)):
                nursery.start_soon(_end_of, b, "generate", Generate(PROMPT, max_tokens), ends, name)
                await trio.testing.wait_all_tasks_blocked()
        assert b.model.state == "failed"
        assert ends["ends"][0].stop_reason == "length"
        assert isinstance(ends["runs"][0], laneway.DecodeError)
        assert isinstance(ends["waits"][0], laneway.ModelNotLoadedError)
        assert "slot 0 could not be dropped" in str(ends["waits"][0])
        assert b.model.lanes.idle


async def test_C11_an_error_of_our_own_in_the_loop_fails_the_model(
    caplog: pytest.LogCaptureFixture, autojump_clock: trio.testing.MockClock
) -> None:
    def explode(number: int, batch: object) -> None:
        if number == 3:
            raise AssertionError("a bug")

    async with bench(parallel=1, at_step=explode) as b:
        ends: dict[str, Any] = {}
        await _end_of(b, "generate", Generate(PROMPT, 30), ends, "one")
        assert isinstance(ends["one"][0], laneway.DecodeError)
        assert "its decode loop broke" in str(ends["one"][0])
        assert b.model.state == "failed"
    assert "the decode loop of model 'a' broke" in caplog.text
