"""An engine, its models and its runs are used in the trio.run that they belong to, and refused everywhere else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import trio
import trio.testing

import laneway
from laneway_plugins import completion
from tests.engine.kit import Bench, Body, Generate, bench, forever
from tests.kvcache.kit import GREEDY, Talk, cached
from tests.program_threads import HANG_SECONDS

PROMPT = (1, 2, 3)
ELSEWHERE = "belongs to another trio.run"
OUTSIDE = "outside of its trio.run"


async def _enter(b: Bench, run: laneway.Run) -> None:
    async with b.run("generate", Generate(PROMPT)):
        pass


async def _complete(b: Bench, run: laneway.Run) -> None:
    await completion.complete(b.model, "Hello")


async def _load(b: Bench, run: laneway.Run) -> None:
    await b.engine.load_model("scripted:b")


async def _unload(b: Bench, run: laneway.Run) -> None:
    await b.engine.unload_model(b.model)


async def _wait_ended(b: Bench, run: laneway.Run) -> None:
    await b.engine.wait_ended(run.request_id)


async def _wait_for_no_one(b: Bench, run: laneway.Run) -> None:
    await b.engine.wait_ended("nobody")


async def _tokenize(b: Bench, run: laneway.Run) -> None:
    await b.model.tokenize("word")


async def _tokenize_much(b: Bench, run: laneway.Run) -> None:
    await b.model.tokenize("word " * 10_000)


async def _fingerprint(b: Bench, run: laneway.Run) -> None:
    await b.model.state_fingerprint()


async def _plan(b: Bench, run: laneway.Run) -> None:
    await b.engine.kv_caches.plan(b.model, key="k")


async def _admitted(b: Bench, run: laneway.Run) -> None:
    await run.admitted()


async def _iterate(b: Bench, run: laneway.Run) -> None:
    await anext(run)


async def _result(b: Bench, run: laneway.Run) -> None:
    await run.result()


def _cancel(b: Bench, run: laneway.Run) -> None:
    b.engine.cancel(run.request_id)


def _arm(b: Bench, run: laneway.Run) -> None:
    b.engine.cancel("later")


def _cancel_all(b: Bench, run: laneway.Run) -> None:
    b.engine.cancel_all()


def _snapshot(b: Bench, run: laneway.Run) -> None:
    b.engine.snapshot()


WAITING = (
    _enter,
    _complete,
    _load,
    _unload,
    _wait_ended,
    _wait_for_no_one,
    _tokenize,
    _tokenize_much,
    _fingerprint,
    _plan,
    _admitted,
    _iterate,
    _result,
)
AT_ONCE = (_cancel, _arm, _cancel_all, _snapshot)


def without_trio(call: Callable[..., Awaitable[None]], *args: Any) -> None:
    """Begin an async function where no Trio runs."""
    call(*args).__await__().send(None)


async def refused(call: Callable[..., None], sentence: str) -> None:
    """In a worker thread of Trio's."""
    with pytest.raises(RuntimeError, match=sentence) as caught:
        await trio.to_thread.run_sync(call)
    assert not isinstance(caught.value, laneway.LanewayError)


async def in_this_run(call: Callable[..., None], *args: Any) -> None:
    call(*args)


@pytest.mark.parametrize("call", WAITING + AT_ONCE)
async def test_what_is_called_elsewhere_is_refused_and_changes_nothing(
    call: Any, autojump_clock: trio.testing.MockClock
) -> None:
    autojump_clock.autojump_threshold = float("inf")  # a second run's threads take real time
    async with bench(parallel=1) as b, b.run("body", Body(forever)) as runs, b.run("body", Body(forever)) as waits:
        await runs.admitted()
        for run in (runs, waits):
            if call in AT_ONCE:
                await refused(partial(call, b, run), OUTSIDE)
                await refused(partial(trio.run, in_this_run, call, b, run), ELSEWHERE)
            else:
                await refused(partial(without_trio, call, b, run), OUTSIDE)
                await refused(partial(trio.run, call, b, run), ELSEWHERE)
        assert (runs.state, waits.state) == ("running", "waiting")
        assert [model.name for model in b.engine.models] == ["a"]
        assert b.engine.cancel(waits.request_id) == 1
        assert b.engine.cancel(runs.request_id) == 1
        await b.engine.wait_ended(runs.request_id)
        async with b.run("generate", Generate(PROMPT, max_tokens=2), request_id="later") as later:
            autojump_clock.autojump_threshold = 0
            assert len((await later.result()).tokens) == 2
        b.nothing_left()
        for ended in (runs, waits):
            with pytest.raises(laneway.InferenceCancelledError):
                await ended.result()


async def test_the_block_of_a_run_is_left_where_it_was_entered() -> None:
    async def leave(opening: Any) -> None:
        await opening.__aexit__(None, None, None)

    with trio.fail_after(HANG_SECONDS):
        async with bench(parallel=1) as b:
            opening = b.run("body", Body(forever))
            run = await opening.__aenter__()
            await refused(partial(without_trio, leave, opening), OUTSIDE)
            await refused(partial(trio.run, leave, opening), ELSEWHERE)
            assert run.state == "running"
            await leave(opening)
            assert run.state == "cancelled"
            b.nothing_left()


async def test_a_model_in_a_second_run_leaves_the_first_one_whole() -> None:
    async def second(model: laneway.Model) -> str:
        return (await completion.complete(model, "Hello", max_tokens=3)).text

    with trio.fail_after(HANG_SECONDS):
        async with bench(seconds_per_step=0.0) as b:
            first = await second(b.model)
            with pytest.raises(RuntimeError, match=ELSEWHERE):
                await trio.to_thread.run_sync(trio.run, second, b.model)
            assert await second(b.model) == first
            assert await trio.to_thread.run_sync(trio.from_thread.run, second, b.model) == first


async def test_an_engines_block_that_is_left_elsewhere_stays_open() -> None:
    async def leave(block: Any) -> None:
        await block.__aexit__(None, None, None)

    block = laneway.open_engine()
    engine = await block.__aenter__()
    await refused(partial(without_trio, leave, block), OUTSIDE)
    await refused(partial(trio.run, leave, block), ELSEWHERE)
    assert not engine.snapshot().closed
    await leave(block)
    assert engine.snapshot().closed


async def test_an_engine_of_a_run_that_has_ended_is_refused() -> None:
    async def first() -> laneway.Engine:
        async with laneway.open_engine() as engine:
            return engine

    engine = await trio.to_thread.run_sync(trio.run, first)
    with pytest.raises(RuntimeError, match=ELSEWHERE):
        await engine.load_model("scripted:a")


@pytest.mark.parametrize("method", ["put", "emit", "generate", "claim", "cache_turn"])
async def test_a_handlers_context_is_of_no_use_elsewhere(method: str) -> None:
    async def handler(ctx: laneway.RequestContext) -> None:
        calls: dict[str, Callable[[], Any]] = {
            "put": partial(ctx.put, "event"),
            "emit": partial(without_trio, ctx.emit, "event"),
            "generate": partial(ctx.generate, list(PROMPT), laneway.Sampling()),
            "claim": partial(ctx.claim, "key"),
            "cache_turn": partial(ctx.cache_turn, cast("laneway.CachePlan", None), list(PROMPT)),
        }
        await refused(calls[method], OUTSIDE)
        tokens = ctx.generate(list(PROMPT), laneway.Sampling())

        async def enter() -> None:
            async with tokens:
                pytest.fail("it was entered")

        await refused(partial(trio.run, enter), ELSEWHERE)

    with trio.fail_after(HANG_SECONDS):
        async with bench() as b, b.run("body", Body(handler)) as run:
            assert [type(event) async for event in run] == [laneway.Done]


async def test_what_only_looks_can_be_used_anywhere(tmp_path: Path) -> None:
    """Nothing of it waits for a task of the engine or changes anything that one looks at."""
    async with cached(tmp_path) as s:
        await Talk(s.model, "k").say("Hello")
        talk = completion.complete

        def look() -> None:
            assert s.engine.models == (s.model,)
            assert s.engine.operation(s.model, "completion").kind == "completion"
            assert s.model.state == "loaded"
            s.model.check_prompt([1, 2])
            assert s.model.tokenizer.tokenize("word")

        async def in_a_second_run() -> None:
            look()
            assert len(await s.engine.kv_caches.list()) == 1
            assert len((await s.engine.kv_caches.delete("k")).deleted) == 1

        await trio.to_thread.run_sync(look)
        await trio.to_thread.run_sync(trio.run, in_a_second_run)
        assert await s.engine.kv_caches.list() == ()
        assert (await talk(s.model, "Hello", **GREEDY)).text
