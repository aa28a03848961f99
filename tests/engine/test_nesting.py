"""Rule R6 over several models: the nested run that would close a circle is refused, and no other one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
import trio.testing

import laneway
from laneway._context import Context
from laneway.testing import ScriptedLoader
from tests.engine.kit import PLUGIN, Body, Generate, body_operation


class Shut:
    """A gate that another process never opens."""

    def enter(self) -> bool:
        return False

    def leave(self) -> None:
        pass


async def _prepare_shut(model: laneway.Model, request: Body) -> laneway.Prepared:
    return laneway.Prepared(weight=request.weight, keys=request.keys, gate=Shut(), payload=request)


async def _never(ctx: laneway.RequestContext, prepared: laneway.Prepared) -> None:
    raise AssertionError("its gate is shut")


EXTRA = laneway.PluginSpec(
    name="nesting",
    operations=(
        body_operation("keyed", lane_group="keyed"),
        body_operation("impatient", overflow="reject"),
        laneway.Operation(kind="shut", request_type=Body, prepare=_prepare_shut, handler=_never),
    ),
)


@attrs.define
class Nest:
    """Several models, and requests whose handlers open others when they are told to."""

    engine: laneway.Engine
    models: dict[str, laneway.Model]
    nursery: trio.Nursery
    ends: dict[str, str] = attrs.field(factory=dict)
    """{request id: ``done``, or the name of its error}"""
    errors: dict[str, Exception] = attrs.field(factory=dict)
    _mail: dict[str, trio.MemorySendChannel[Callable[[], Awaitable[None]] | None]] = attrs.field(factory=dict)

    async def open(self, name: str, model: str, kind: str = "body", under: str | None = None, **how: Any) -> str:
        """Open a request, in the handler of ``under``, and return its state once nothing more happens."""
        keys = how.pop("keys", ())
        weight = how.pop("weight", 1)
        send, receive = trio.open_memory_channel[Callable[[], Awaitable[None]] | None](9)
        self._mail[name] = send

        async def handler(ctx: laneway.RequestContext) -> None:
            async with trio.open_nursery() as nursery:
                while (act := await receive.receive()) is not None:
                    nursery.start_soon(act)

        async def run() -> None:
            try:
                request = Body(handler, keys=keys, weight=weight)
                async with self.engine.run(self.models[model], kind, request, request_id=name, **how) as run:
                    await run.result()
                self.ends[name] = "done"
            except laneway.LanewayError as error:
                self.ends[name] = type(error).__name__
                self.errors[name] = error

        if under is None:
            self.nursery.start_soon(run)
        else:
            await self._mail[under].send(run)
        await trio.testing.wait_all_tasks_blocked()
        return self.state(name)

    def state(self, name: str) -> str:
        if name in self.ends:
            return self.ends[name]
        live = {
            request.request_id: request.state
            for model in self.engine.snapshot().models
            for lane in model.lanes
            for request in (*lane.running, *lane.waiting)
        } | {each.request_id: each.state for model in self.engine.snapshot().models for each in model.without_lane}
        return live[name]

    async def let_end(self, *names: str) -> None:
        """Let handlers return once what they have opened has ended."""
        for name in names:
            await self._mail[name].send(None)
        await trio.testing.wait_all_tasks_blocked()


@asynccontextmanager
async def nest(admission: Any = "requests", **parallel: int) -> AsyncIterator[Nest]:
    loader = ScriptedLoader(context_size=64)
    async with laneway.open_engine(plugins=[loader.plugin, PLUGIN, EXTRA]) as engine:
        models = {
            name: await engine.load_model(f"scripted:{name}", slots, name=name, admission=admission)
            for name, slots in parallel.items()
        }
        async with trio.open_nursery() as nursery:
            yield Nest(engine, models, nursery)
    # Not before: a thread may still be trying the gate of a request that was cancelled.
    assert all(model.lanes.idle for model in models.values())


async def test_R6_the_run_that_closes_a_circle_over_two_models_is_refused() -> None:
    async with nest(a=1, b=1) as n:
        assert await n.open("p", "a") == await n.open("q", "b") == "running"
        assert await n.open("c", "b", under="p") == "waiting"
        # That circle would close long after c has come.
        assert await n.open("d", "a", under="q") == "InvalidRequestError"
        said = str(n.errors["d"])
        assert "a body request on model 'a' opened inside the handler of body request 'q' would wait for" in said
        assert (
            "body request 'p' on model 'a', which waits for body request 'c' on model 'b', "
            "which waits for body request 'q' on model 'b', which waits for this one" in said
        )
        assert (n.state("p"), n.state("q"), n.state("c")) == ("running", "running", "waiting")
        await n.let_end("q", "c", "p")
        assert n.ends == {"d": "InvalidRequestError", "q": "done", "c": "done", "p": "done"}


async def test_R6_a_nested_run_that_can_go_on_is_not_refused() -> None:
    async with nest(a=2, b=1) as n:
        await n.open("p", "a")
        await n.open("q", "b")
        assert await n.open("c", "b", under="p") == "waiting"
        assert await n.open("d", "a", under="q") == "running"  # a has a permit to spare
        assert await n.open("e", "a", under="q") == "waiting"  # for d's, which comes back
        await n.let_end("d", "e", "q", "c", "p")
        assert set(n.ends.values()) == {"done"}
        assert len(n.ends) == 5


async def test_R6_an_older_request_in_the_line_counts() -> None:
    async with nest(a=2, b=1) as n:
        await n.open("p", "a")
        await n.open("q", "b")
        assert await n.open("c", "b", under="p") == "waiting"
        assert await n.open("w", "a", "writer") == "waiting"  # for p
        assert await n.open("d", "a", under="q") == "InvalidRequestError"  # no request passes a writer
        assert "writer request 'w' on model 'a', which waits for body request 'p'" in str(n.errors["d"])
        assert n.engine.cancel("w") == 1
        assert await n.open("e", "a", under="q") == "running"
        await n.let_end("e", "q", "c", "p")


async def test_R6_a_circle_over_three_models_keys_and_a_request_without_a_lane() -> None:
    async with nest(a=2, b=1, c=3) as n:
        await n.open("p", "a", keys=["file"])
        assert await n.open("n", "b", "beside", under="p") == "running"
        await n.open("q", "b")
        assert await n.open("r", "b", under="n") == "waiting"
        await n.open("s", "c")
        assert await n.open("t", "c", "writer", under="q") == "waiting"
        assert await n.open("u", "a", under="s", keys=["other"]) == "running"
        assert await n.open("v", "a", under="s", keys=["file"]) == "InvalidRequestError"
        assert await n.open("v2", "a", "keyed", under="s", keys=["file"]) == "InvalidRequestError"
        assert await n.open("v3", "a", "keyed", under="s", keys=["another"]) == "running"
        await n.let_end("u", "v3", "s", "t", "q", "r", "n", "p")
        assert [name for name, end in n.ends.items() if end != "done"] == ["v", "v2"]


async def test_R6_A12_a_heavy_run_may_close_a_circle_that_a_light_one_does_not() -> None:
    async with nest(admission="slots", a=2, b=1) as n:
        await n.open("p", "a")
        await n.open("q", "b")
        await n.open("c", "b", under="p")
        assert await n.open("d", "a", under="q", weight=9) == "InvalidRequestError"
        assert await n.open("e", "a", under="q") == "running"
        await n.let_end("e", "q", "c", "p")


async def test_R6_A7_a_run_that_would_not_wait_closes_no_circle() -> None:
    async with nest(a=1, b=1) as n:
        await n.open("p", "a")
        await n.open("q", "b")
        await n.open("c", "b", under="p")
        assert await n.open("d", "a", under="q", overflow="reject") == "RequestRejectedByPolicyError"
        assert await n.open("e", "a", "impatient", under="q") == "RequestRejectedByPolicyError"
        await n.let_end("q", "c", "p")


async def test_R6_a_request_that_is_being_cancelled_closes_no_circle() -> None:
    async with nest(a=1, b=1) as n:
        await n.open("p", "a")
        await n.open("q", "b")
        await n.open("c", "b", under="p")
        opened: list[str] = []

        async def cancel_and_open() -> None:
            # In one tick: p and c have not noticed yet.
            assert n.engine.cancel("p") == 1
            async with n.engine.run(n.models["a"], "generate", Generate((1, 2), 1)) as run:
                opened.append((await run.result()).stop_reason)

        await n._mail["q"].send(cancel_and_open)
        await n.let_end("q")
        assert opened == ["length"]
        assert n.ends == {"p": "InferenceCancelledError", "q": "done"}


async def test_R6_C1_a_handler_that_has_left_a_request_does_not_wait_for_it() -> None:
    async with nest(a=1, b=1, c=1) as n:
        opened = trio.Event()

        async def stubborn(ctx: laneway.RequestContext) -> None:
            async with n.engine.run(n.models["c"], "generate", Generate((1, 2), 1)) as run:
                opened.set()
                await run.result()

        async def leave() -> None:
            async with n.engine.run(n.models["b"], "stubborn", Body(stubborn), request_id="s"):
                await opened.wait()

        await n.open("p", "a")
        await n.open("q", "c")
        await n._mail["p"].send(leave)
        await trio.testing.wait_all_tasks_blocked()
        assert n.state("s") == "cancelling"  # it waits for q, and p not for it any more
        assert await n.open("d", "a", under="q") == "waiting"
        await n.let_end("p", "d", "q")
        assert n.ends == {"p": "done", "d": "done", "q": "done"}


async def test_R6_requests_of_two_engines_are_told_apart_by_more_than_their_ids() -> None:
    async with nest(a=1) as n, nest(a=1) as other:
        assert await n.open("same", "a") == await other.open("same", "a") == "running"
        seen: list[str] = []

        async def open_in_the_other_engine() -> None:
            async with other.engine.run(other.models["a"], "generate", Generate((1, 2), 1)) as run:
                seen.append(run.state)
                seen.append((await run.result()).stop_reason)

        await n._mail["same"].send(open_in_the_other_engine)
        await n.let_end("same")
        assert seen == ["waiting"]
        await other.let_end("same")
        assert seen == ["waiting", "length"]


async def test_R6_a_circle_of_one_engine_is_found_through_a_request_of_another_engine() -> None:
    async with nest(a=1, b=1) as n, nest(x=1) as other:
        await n.open("p", "a")
        await n.open("q", "b")
        await n.open("c", "b", under="p")
        refused: list[str] = []

        async def between(ctx: laneway.RequestContext) -> None:
            with pytest.raises(laneway.InvalidRequestError) as caught:
                async with n.engine.run(n.models["a"], "generate", Generate((1, 2), 1)):
                    pass
            refused.append(str(caught.value))

        async def open_through_the_other_engine() -> None:
            async with other.engine.run(other.models["x"], "body", Body(between)) as run:
                await run.result()

        await n._mail["q"].send(open_through_the_other_engine)
        await n.let_end("q")
        assert "would wait for body request 'p' on model 'a', which waits for body request 'c'" in refused[0]
        await n.let_end("c", "p")


async def test_R6_A12_a_run_that_starts_at_once_beside_a_heavy_one_at_its_gate_waits_for_nothing() -> None:
    async with nest(admission="slots", a=4, b=1) as n:
        await n.open("p", "a", weight=2)
        await n.open("q", "b")
        assert await n.open("c", "b", under="p") == "waiting"
        assert await n.open("h", "a", "shut", weight=3) == "waiting"
        assert await n.open("d", "a", under="q") == "running"
        assert n.engine.cancel("h") == 1
        await n.let_end("d", "q", "c", "p")


async def test_R6_a_task_that_outlives_its_handler_opens_no_nested_run() -> None:
    """The teardown of the handler's request waits for no task that the handler has left behind."""
    async with nest(a=1) as n:
        seen: list[str] = []

        async def left_behind(task_status: trio.TaskStatus[None]) -> None:
            task_status.started()
            await closing.wait()
            try:
                async with n.engine.run(n.models["a"], "generate", Generate((1, 2), 1)) as run:
                    seen.append(run.state)
                    closed.set()
                    await run.result()
                seen.append("done")
            finally:
                closed.set()

        async def handler(ctx: laneway.RequestContext) -> None:
            # The task begins in the context of this handler, in a nursery that the handler does not wait for.
            await n.nursery.start(left_behind)

        closing, closed = trio.Event(), trio.Event()

        async def slow_close(self: Context) -> None:
            await close(self)
            closing.set()
            await closed.wait()

        close = Context.close
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Context, "close", slow_close)
            async with n.engine.run(n.models["a"], "body", Body(handler)) as run:
                await run.result()
        await trio.testing.wait_all_tasks_blocked()
        assert seen == ["waiting", "done"]


@pytest.mark.parametrize("depth", [2, 3, 5])
async def test_R6_circles_of_any_length(depth: int) -> None:
    async with nest(**{f"m{level}": 1 for level in range(depth)}) as n:
        for level in range(depth):
            await n.open(f"p{level}", f"m{level}")
        for level in range(depth - 1):
            assert await n.open(f"c{level}", f"m{level + 1}", under=f"p{level}") == "waiting"
        assert await n.open("last", "m0", under=f"p{depth - 1}") == "InvalidRequestError"
        assert str(n.errors["last"]).count("which waits for") == 2 * depth - 1
        for level in reversed(range(depth)):
            await n.let_end(f"p{level}")
            if level:
                await n.let_end(f"c{level - 1}")
