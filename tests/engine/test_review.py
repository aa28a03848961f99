"""Rules in corners: misuse, things at one instant, errors of unusual kinds, and memory."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import trio
import trio.testing

import laneway
from laneway import _model
from laneway._request import Request
from laneway.decoder import Written
from laneway.testing import ScriptedDecoder
from laneway_plugins import batch
from tests.engine.kit import GREEDY, PLUGIN, Bench, Body, Generate, bench, forever

PROMPT = (5, 6, 7)


class OddError(BaseException):
    """What extension modules and other frameworks raise: no Exception, and no affair of the program's either."""


class Observer:
    """Calls functions when something happens to a request."""

    def __init__(self, **calls: Callable[[laneway.RequestRecord], object]) -> None:
        self.calls = calls

    def _call(self, what: str, record: laneway.RequestRecord) -> None:
        if what in self.calls:
            self.calls[what](record)

    @laneway.hookimpl
    def laneway_request_queued(self, record: laneway.RequestRecord) -> None:
        self._call("queued", record)

    @laneway.hookimpl
    def laneway_request_admitted(self, record: laneway.RequestRecord) -> None:
        self._call("admitted", record)

    @laneway.hookimpl
    def laneway_request_cancelled(self, record: laneway.RequestRecord) -> None:
        self._call("cancelled", record)

    @laneway.hookimpl
    def laneway_request_ended(self, record: laneway.RequestRecord) -> None:
        self._call("ended", record)


async def slow_to_leave(ctx: laneway.RequestContext) -> None:
    try:
        await trio.sleep_forever()
    finally:
        with trio.CancelScope(shield=True):
            await trio.sleep(10)


# Admission


async def test_A8_a_handler_that_has_ended_generates_no_more(autojump_clock: trio.testing.MockClock) -> None:
    kept: list[Any] = []

    async def keep(ctx: laneway.RequestContext) -> None:
        kept.extend([ctx, ctx.generate(list(PROMPT), GREEDY)])

    async with bench(parallel=1) as b:
        async with b.run("body", Body(keep)) as run:
            await run.result()
        ctx, tokens = kept
        with pytest.raises(trio.ClosedResourceError, match="its permit with it"):
            ctx.generate(list(PROMPT), GREEDY)
        with pytest.raises(trio.ClosedResourceError, match="its permit with it"):
            async with tokens:
                pytest.fail("entered")
        await trio.sleep(1)
        assert b.decoder.statistics().steps == 0
        b.nothing_left()


async def test_A10_tokens_that_the_model_does_not_know_hurt_nobody_else(autojump_clock: trio.testing.MockClock) -> None:
    bad: list[Any] = [[10**9], [2**40], [-1], [1, 2.5], ["a"], [None]]

    async def generate(ctx: laneway.RequestContext) -> None:
        for prompt in bad:
            with pytest.raises(laneway.InvalidRequestError, match="prompt: "):
                ctx.generate(prompt, GREEDY)
        ctx.model.check_prompt(b"tokens as well")

    async with bench() as b, b.run("generate", Generate(PROMPT, 20)) as peer:
        async with b.run("body", Body(generate)) as run:
            await run.result()
        with pytest.raises(laneway.InvalidRequestError, match=r"token 279 is not in the vocabulary of 279 entries"):
            async with b.run("generate", Generate((1, 279))):
                pytest.fail("entered")
        assert (await peer.result()).stop_reason == "length"
        assert b.model.state == "loaded"


def test_A10_fields_of_a_batch_hold_for_every_item() -> None:
    request = batch.BatchRequest(["a", "b"], stop=(word for word in ["X", "Y"]), logit_bias={3: 1})
    for member in request.members:
        assert member.request is not None
        assert member.request.stop == ("X", "Y")
        assert member.request.logit_bias == ((3, 1.0),)


# Runs


def test_R3_ctrl_c_while_a_block_is_left_waits_for_the_teardown() -> None:
    ends: list[Any] = []

    async def interrupt() -> None:
        await trio.sleep(1)
        signal.raise_signal(signal.SIGINT)

    async def program() -> None:
        trio.lowlevel.spawn_system_task(interrupt)
        async with bench(parallel=1) as b:
            try:
                async with b.run("body", Body(slow_to_leave)) as run:
                    await trio.testing.wait_all_tasks_blocked()
            finally:
                ends.append((run.state, trio.current_time()))

    with pytest.raises(KeyboardInterrupt):
        trio.run(program, clock=trio.testing.MockClock(autojump_threshold=0))
    assert ends == [("cancelled", 10)]


async def test_R4_nothing_comes_after_the_outcome(autojump_clock: trio.testing.MockClock) -> None:
    kept: list[laneway.RequestContext] = []

    async def keep(ctx: laneway.RequestContext) -> str:
        kept.append(ctx)
        return "made"

    async with bench() as b, b.run("body", Body(keep)) as run:
        assert [type(event) async for event in run] == [laneway.Done]
        kept[0].put("late")
        await kept[0].emit("later")
        assert [event async for event in run] == []


async def test_R6_a_run_that_would_wait_for_a_key_of_its_handler_is_refused(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with bench() as b:

        async def nested(ctx: laneway.RequestContext) -> None:
            assert ctx.claim("found later")
            for key in ("k", "found later"):
                with pytest.raises(laneway.InvalidRequestError, match="would wait for a key that this handler holds"):
                    async with b.run("grouped", Body(forever, keys=(key,))):
                        pytest.fail("entered")

        async with b.run("body", Body(nested, keys=("k",))) as run:
            await run.result()


async def test_R6_a_run_that_would_wait_for_a_writer_behind_its_handler_is_refused(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def nothing(ctx: laneway.RequestContext) -> None:
        await trio.lowlevel.checkpoint()

    async with bench() as b:

        async def nested(ctx: laneway.RequestContext) -> None:
            await trio.sleep(1)
            with pytest.raises(laneway.InvalidRequestError, match="would wait for an exclusive request that waits for"):
                async with b.run("grouped", Body(nothing)):
                    pytest.fail("entered")

        async with b.run("body", Body(nested)) as run, b.run("writer", Body(nothing)) as writer:
            await run.result()
            await writer.result()


# Cancelling


async def test_C1_a_stall_ends_one_run_of_a_common_scope(autojump_clock: trio.testing.MockClock) -> None:
    async def talk(ctx: laneway.RequestContext) -> None:
        for number in range(100):
            await ctx.emit(number)

    async with bench(stall_timeout=4) as b, b.run("common", Body(forever)) as peer:
        async with b.run("common", Body(talk), backpressure="pause") as run:
            await b.engine.wait_ended(run.request_id)
            assert (run.state, peer.state) == ("cancelled", "running")
            with pytest.raises(laneway.InferenceCancelledError, match="stall_timeout"):
                await run.result()


async def test_C1_work_that_nobody_hears_of_waits_for_no_reader(autojump_clock: trio.testing.MockClock) -> None:
    async def talk(ctx: laneway.RequestContext) -> None:
        for number in range(100):
            await ctx.emit(number)

    async with bench(parallel=1) as b, b.run("stubborn", Body(talk), backpressure="pause") as run:
        await trio.sleep(1)
        assert b.engine.snapshot().model("a").stalled
        b.engine.cancel(run.request_id)
        await b.engine.wait_ended(run.request_id)
        assert run.state == "cancelled"
        b.nothing_left()
        with pytest.raises(laneway.InferenceCancelledError):
            await run.result()


async def test_C3_a_cancel_in_a_foreign_thread_changes_nothing(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(parallel=1) as b, b.run("body", Body(forever)) as runs, b.run("body", Body(forever)) as waits:
        await runs.admitted()
        for call in (
            lambda: b.engine.cancel(runs.request_id),
            lambda: b.engine.cancel(waits.request_id),
            lambda: b.engine.cancel_all(),
        ):
            with pytest.raises(RuntimeError, match="outside of its"):
                await trio.to_thread.run_sync(call)
        assert (runs.state, waits.state) == ("running", "waiting")


@pytest.mark.parametrize("kind", ["body", "beside", "stubborn"])
async def test_C3_an_observer_may_cancel_what_has_just_arrived(
    kind: str, autojump_clock: trio.testing.MockClock
) -> None:
    started: list[str] = []

    async def note(ctx: laneway.RequestContext) -> None:
        started.append(ctx.request_id)

    def cancel(record: laneway.RequestRecord) -> None:
        b.engine.cancel(record.request_id)

    async with bench(plugins=[Observer(queued=cancel)]) as b:
        async with b.run(kind, Body(note)) as run:
            with pytest.raises(laneway.InferenceCancelledError):
                await run.result()
        await b.engine.wait_ended(run.request_id)
        assert started == []
        b.nothing_left()


@pytest.mark.parametrize("kind", ["body", "stubborn"])
async def test_C4_a_handler_never_awaits_the_end_of_its_own_model(
    kind: str, autojump_clock: trio.testing.MockClock
) -> None:
    async with bench() as b:
        other = await b.engine.load_model("scripted:b")

        async def unload(ctx: laneway.RequestContext) -> None:
            await b.engine.unload_model(other)
            await b.engine.unload_model(b.model)

        async with b.run(kind, Body(unload)) as run:
            with pytest.raises(laneway.InvalidRequestError, match="cannot await the end of model 'a'"):
                await run.result()
        assert b.engine.models == (b.model,)
        assert b.model.state == "loaded"


async def test_C6_text_and_tokens_of_a_cancelled_request_are_the_same_ones(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def plain(ctx: laneway.RequestContext) -> laneway.Answer:
        async with ctx.generate([1, 2], GREEDY, deliver=ctx.put) as tokens:
            return await tokens.finish()

    # Letters alone, so that no text is held back as half a character.
    async with bench(script={(1, 2): [100 + number % 20 for number in range(60)]}) as b:
        for after in range(20):
            async with b.run("body", Body(plain)) as run:
                await trio.sleep(0.25 + after * 0.05)
                b.engine.cancel(run.request_id)
                with pytest.raises(laneway.InferenceCancelledError) as ended:
                    await run.result()
            error = ended.value
            assert b"".join(map(b.model.tokenizer.piece, error.tokens)).decode() == error.text
            assert error.stats is not None
            assert error.stats.generated_tokens == len(error.tokens) > 0


async def test_C6_the_callers_own_cancel_goes_before_an_unseen_failure(
    caplog: pytest.LogCaptureFixture, autojump_clock: trio.testing.MockClock
) -> None:
    async with bench(parallel=1) as b:
        with trio.CancelScope() as scope:
            async with b.run("body", Body(forever)) as run:
                await run.admitted()
                b.engine.cancel(run.request_id)
                await b.engine.wait_ended(run.request_id)
                scope.cancel()
        assert scope.cancelled_caught
    assert f"{run.request_id!r} failed as well" in caplog.text


@pytest.mark.parametrize("where", ["body", "observer", "deliver", "step", "aclose"])
async def test_C6_what_ends_the_program_comes_bare_from_wherever(
    where: str, autojump_clock: trio.testing.MockClock
) -> None:
    error = KeyboardInterrupt("now") if where == "observer" else SystemExit("now")
    ends: list[str] = []

    def explode(*_: object) -> None:
        raise error

    async def body(ctx: laneway.RequestContext) -> None:
        deliver = explode if where == "deliver" else ctx.put
        async with ctx.generate(list(PROMPT), GREEDY, max_tokens=8, deliver=deliver) as tokens:
            await tokens.finish()
            if where == "body":
                explode()

    async def aclose() -> None:
        explode()

    plugins = [Observer(ended=explode)] if where == "observer" else []
    with pytest.raises((KeyboardInterrupt, SystemExit)) as raised:
        async with bench(plugins=plugins, at_step=explode if where == "step" else None) as b:
            other = await b.engine.load_model("scripted:b", at_step=None)
            async with b.engine.run(other, "body", Body(forever), request_id="peer") as peer:
                if where == "aclose":
                    b.model._backend = attrs.evolve(b.model._backend, aclose=aclose)
                    await b.engine.unload_model(b.model)
                else:
                    async with b.run("body", Body(body)) as run:
                        await run.result()
                await trio.sleep_forever()
            ends.append("went on")
    assert raised.value is error
    assert ends == []
    assert peer.state == "cancelled"
    b.loader.assert_idle()


async def test_C8_an_engine_can_be_opened_by_who_is_cancelled_already(autojump_clock: trio.testing.MockClock) -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        async with laneway.open_engine(plugins=[PLUGIN]) as engine:
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert engine.snapshot().closed


async def test_C8_an_engines_block_is_entered_once(autojump_clock: trio.testing.MockClock) -> None:
    opening = laneway.open_engine(plugins=[PLUGIN])
    async with opening:
        with pytest.raises(RuntimeError, match="entered once"):
            async with opening:
                pytest.fail("entered")


def test_C8_ctrl_c_while_the_engine_closes_waits_for_every_teardown() -> None:
    benches: list[Bench] = []
    ends: list[Any] = []

    async def reader(b: Bench) -> None:
        async with b.run("body", Body(slow_to_leave)) as run:
            try:
                await run.result()
            except laneway.InferenceCancelledError as error:
                ends.append((error.reason, trio.current_time()))

    async def interrupt() -> None:
        for _ in range(2):
            await trio.sleep(2)
            signal.raise_signal(signal.SIGINT)

    async def program() -> None:
        trio.lowlevel.spawn_system_task(interrupt)
        async with trio.open_nursery() as nursery:
            try:
                async with bench(parallel=1) as b:
                    benches.append(b)
                    nursery.start_soon(reader, b)
                    await trio.sleep(1)
            except KeyboardInterrupt:
                ends.append(("interrupted", trio.current_time()))

    trio.run(program, clock=trio.testing.MockClock(autojump_threshold=0))
    assert ends == [("the engine was closed", 11), ("interrupted", 11)]
    assert benches[0].model.state == "unloaded"
    benches[0].decoder.assert_idle()


async def test_C8_a_model_that_cannot_be_registered_is_freed(autojump_clock: trio.testing.MockClock) -> None:
    freed: list[str] = []

    @attrs.frozen
    class Options:
        nothing: bool = False

    async def aclose() -> None:
        await trio.lowlevel.checkpoint()
        freed.append("decoder")

    async def load(source: laneway.ModelSource, parallel: int, options: Options) -> Any:
        if options.nothing:
            return None
        return laneway.Backend(name="x", decoder=ScriptedDecoder(1), tokenizer=None, aclose=aclose)

    loader = laneway.Loader(
        name="bad", accepts=lambda source: source.text.startswith("bad:"), load=load, options_type=Options
    )
    async with laneway.open_engine(plugins=[laneway.PluginSpec(name="bad", loaders=(loader,))]) as engine:
        with pytest.raises(AssertionError, match="has a tokenizer"):
            await engine.load_model("bad:x")
        assert freed == ["decoder"]
        with pytest.raises(laneway.ModelLoadError, match="must return a Backend, not None"):
            await engine.load_model("bad:x", nothing=True)
        assert engine.models == ()


async def test_C8_a_model_is_not_freed_under_a_prompt_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    happened: list[str] = []
    monkeypatch.setattr(_model, "LONG_TEXT", 1)

    async with bench() as b:
        backend = b.model._backend
        tokenizer: Any = backend.tokenizer

        class Slow:
            def __getattr__(self, name: str) -> Any:
                return getattr(tokenizer, name)

            def tokenize(self, text: str, *, bos: bool = True, special: bool | Written = False) -> Any:
                begun.set()
                assert go_on.wait(10)
                happened.append("tokenised")
                return tokenizer.tokenize(text, bos=bos, special=special)

        async def aclose() -> None:
            happened.append("freed")
            assert backend.aclose is not None
            await backend.aclose()

        b.model._backend = attrs.evolve(backend, tokenizer=Slow(), aclose=aclose)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(b.model.tokenize, "hello")
            await trio.to_thread.run_sync(begun.wait)
            nursery.start_soon(b.engine.unload_model, b.model)
            await trio.testing.wait_all_tasks_blocked()
            assert happened == []
            with pytest.raises(laneway.ModelNotLoadedError):
                await b.model.tokenize("too late")
            with pytest.raises(laneway.ModelNotLoadedError):
                b.model.check_sampling(GREEDY)
            go_on.set()
        assert happened == ["tokenised", "freed"]


@pytest.mark.parametrize("where", ["handler", "deliver"])
async def test_C10_what_is_no_exception_is_the_requests_own_affair(
    where: str, autojump_clock: trio.testing.MockClock
) -> None:
    error = OddError("from an extension module")

    def explode(delta: object) -> None:
        raise error

    async def body(ctx: laneway.RequestContext) -> None:
        if where == "handler":
            raise error
        async with ctx.generate(list(PROMPT), GREEDY, deliver=explode) as tokens:
            await tokens.finish()

    async with bench() as b, b.run("generate", Generate(PROMPT, 20)) as peer:
        async with b.run("body", Body(body)) as run:
            with pytest.raises(OddError) as raised:
                await run.result()
        assert raised.value is error
        assert run.state == "failed"
        assert (await peer.result()).stop_reason == "length"
        b.nothing_left()


async def test_C10_a_sequence_is_entered_once(autojump_clock: trio.testing.MockClock) -> None:
    async def twice(ctx: laneway.RequestContext) -> laneway.Answer:
        tokens = ctx.generate(list(PROMPT), GREEDY, max_tokens=3)
        tokens.drop()  # it has not joined: nothing to do, and nothing to remember
        for use in (tokens.finish, tokens.__anext__):
            with pytest.raises(RuntimeError, match="async with"):
                await use()
        async with tokens:
            with pytest.raises(RuntimeError, match="entered once"):
                async with tokens:
                    pytest.fail("entered")
            answer = await tokens.finish()
        with pytest.raises(RuntimeError, match="entered once"):
            async with tokens:
                pytest.fail("entered")
        return answer

    async with bench() as b, b.run("generate", Generate(PROMPT, 20)) as peer:
        async with b.run("body", Body(twice)) as run:
            assert (await run.result()).stop_reason == "length"
        assert (await peer.result()).stop_reason == "length"
        b.nothing_left()


@pytest.mark.parametrize("error", [laneway.DecodeError("no room for a sampler"), laneway.InvalidRequestError("no")])
async def test_C10_a_slot_that_cannot_be_opened_fails_its_own_request(
    error: laneway.LanewayError, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    async with bench(parallel=3) as b:
        take = b.decoder.open

        def refuse(slot: int, sampling: Any, prompt: Any) -> None:
            if prompt[0] == 9:
                raise error
            take(slot, sampling, prompt)

        monkeypatch.setattr(b.decoder, "open", refuse)
        async with b.run("generate", Generate(PROMPT, 20)) as peer:
            await trio.sleep(0.55)
            # One of them is opened beside a step of others, the other for a step of its own.
            async with b.run("generate", Generate((9, 1))) as one, b.run("generate", Generate((9, 2))) as two:
                for run in (one, two):
                    with pytest.raises(type(error)) as raised:
                        await run.result()
                    assert raised.value is error
            assert (await peer.result()).stop_reason == "length"
        async with b.run("generate", Generate((9, 3))) as run:
            with pytest.raises(type(error)):
                await run.result()
        assert b.model.state == "loaded"
        b.nothing_left()


async def test_C11_an_odd_error_in_the_loop_fails_its_model_alone(autojump_clock: trio.testing.MockClock) -> None:
    def explode(number: int, batch: object) -> None:
        if number == 3:
            raise OddError("from an extension module")

    async with bench(at_step=explode) as b:
        healthy = await b.engine.load_model("scripted:healthy", at_step=None)
        async with b.run("generate", Generate(PROMPT, 20)) as run:
            with pytest.raises(laneway.DecodeError, match="its decode loop broke"):
                await run.result()
        assert (b.model.state, healthy.state) == ("failed", "loaded")
        async with b.engine.run(healthy, "generate", Generate(PROMPT, 3)) as run:
            await run.result()


async def test_C11_what_a_step_has_made_is_whole_though_a_drop_fails(autojump_clock: trio.testing.MockClock) -> None:
    async with bench(fail_drop={1: laneway.DecodeError("cannot drop")}, prefix_cache=False) as b:
        async with b.run("generate", Generate((1, 2), 6)) as one, b.run("generate", Generate((3, 4), 6)) as two:
            # Both end with the same step, and dropping the first of them fails.
            assert (await one.result()).stop_reason == "length"
            assert (await two.result()).stop_reason == "length"
        assert b.model.state == "failed"


async def test_C9_a_delivery_that_ends_its_step_does_not_wake_a_task_that_is_awake(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """It is delivered from inside the very call that it interrupts, and the time of that call is over meanwhile."""

    def deliver(delta: laneway.TextDelta) -> None:
        autojump_clock.jump(10)
        raise ValueError("the callback broke")

    async def body(ctx: laneway.RequestContext) -> None:
        async with ctx.generate(list(PROMPT), GREEDY, deliver=deliver) as tokens:
            await tokens.finish()

    async with bench(parallel=1) as b:
        async with b.run("body", Body(body)) as run:
            with pytest.raises(ValueError, match="the callback broke"):
                await run.result()
        async with b.run("generate", Generate(PROMPT, 3)) as run:
            assert (await run.result()).stop_reason == "length"
        b.nothing_left()


# Streams and memory


async def test_S2_a_handler_that_only_emits_leaves_others_their_turns(autojump_clock: trio.testing.MockClock) -> None:
    turns: list[int] = []

    async def talk(ctx: laneway.RequestContext) -> None:
        for number in range(50):
            await ctx.emit(number)
            turns.append(number)

    async with bench() as b, b.run("body", Body(talk)) as run:
        while len(turns) < 3:
            await trio.lowlevel.checkpoint()
        assert len(turns) < 10
        await run.result()


async def test_A11_handlers_that_start_their_successors_keep_nobody_in_memory(
    autojump_clock: trio.testing.MockClock,
) -> None:
    alive: list[int] = []

    async with bench() as b, trio.open_nursery() as nursery:

        async def link(number: int) -> None:
            async def start_the_next(ctx: laneway.RequestContext) -> None:
                if number < 30:
                    nursery.start_soon(link, number + 1)
                else:
                    gc.collect()
                    alive.append(sum(isinstance(o, Request) and o.model is b.model for o in gc.get_objects()))

            async with b.run("body", Body(start_the_next)) as run:
                await run.result()

        nursery.start_soon(link, 0)
    assert alive[0] < 5


async def test_A11_a_model_that_a_handler_has_loaded_does_not_keep_its_request(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with bench() as b:

        async def load(ctx: laneway.RequestContext) -> None:
            await b.engine.load_model("scripted:b")

        async with b.run("body", Body(load)) as run:
            await run.result()
        del run
        await trio.testing.wait_all_tasks_blocked()
        gc.collect()
        assert not [item for item in gc.get_objects() if isinstance(item, Request) and item.model is b.model]
