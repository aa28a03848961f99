"""Rule R6 on a whole engine: handlers open runs in each other, everything ends, and nothing is refused in vain."""

from __future__ import annotations

import contextlib
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

import laneway
from laneway._nesting import check_circle
from laneway.testing import ScriptedLoader
from tests.engine.kit import PLUGIN, Body

CHECK = "laneway._registry.check_circle"

VERY_LONG = 1e6
"""Seconds of a clock that jumps: a request that has not ended by then never will."""

KINDS = ("body", "body", "body", "grouped", "common", "writer", "beside")


@attrs.frozen
class Plan:
    """A request, and the requests that its handler opens, one after the other or all at once."""

    model: int
    kind: str
    keys: tuple[str, ...]
    weight: int
    before: int
    at_once: bool
    nested: tuple[Plan, ...]


def plans(depth: int = 3, *, nests: bool = True) -> st.SearchStrategy[Plan]:
    """Plans that nest at least once, for a request without nested runs closes no circle."""
    nested: st.SearchStrategy[Any] = st.just(())
    if depth:
        nested = st.lists(plans(depth - 1, nests=False), min_size=int(nests), max_size=2).map(tuple)
    return st.builds(
        Plan,
        model=st.integers(0, 1) | st.integers(0, 2),
        kind=st.sampled_from(KINDS),
        keys=st.lists(st.sampled_from("xy"), max_size=1).map(tuple),
        weight=st.integers(1, 2),
        before=st.integers(1, 3),
        at_once=st.booleans(),
        nested=nested,
    )


@attrs.define
class World:
    """Runs plans.  With ``trying``, the first run that closes a circle is let in, to see whether it ever starts."""

    engine: laneway.Engine
    models: list[laneway.Model]
    trying: bool = False
    closes: str | None = None
    """What was said of the run that is about to arrive, if it closes a circle."""
    started_all_the_same: list[str] = attrs.field(factory=list)
    over: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    async def run(self, plan: Plan) -> None:
        async def handler(ctx: laneway.RequestContext) -> None:
            await trio.sleep(plan.before)
            if plan.at_once:
                async with trio.open_nursery() as nursery:
                    for each in plan.nested:
                        nursery.start_soon(self.run, each)
            else:
                for each in plan.nested:
                    await self.run(each)

        keys = () if plan.kind in ("writer", "beside") else plan.keys
        request = Body(handler, keys=keys, weight=plan.weight)
        self.closes = None
        with contextlib.suppress(laneway.InvalidRequestError):
            async with self.engine.run(self.models[plan.model], plan.kind, request) as run:
                closes, self.closes = self.closes, None
                if closes is None:
                    await run.result()
                    return
                with trio.move_on_after(VERY_LONG):
                    await run.admitted()
                    self.started_all_the_same.append(closes)
                self.over.cancel()  # the circle is closed: what happens from here on tells nothing


def play(plans: list[Plan], parallel: list[int], admission: Any, *, trying: bool, check: Any = check_circle) -> World:
    """Let the plans run as requests of one engine, and return what there was to see."""

    async def main() -> World:
        loader = ScriptedLoader(context_size=64)
        async with laneway.open_engine(plugins=[loader.plugin, PLUGIN]) as engine:
            names = enumerate(parallel)
            models = [await engine.load_model(f"scripted:{name}", slots, admission=admission) for name, slots in names]
            world = World(engine, models, trying)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(CHECK, check)
                if trying:

                    def note(*args: Any) -> None:
                        try:
                            check(*args)
                        except laneway.InvalidRequestError as error:
                            world.closes = str(error)
                            patch.setattr(CHECK, check)

                    patch.setattr(CHECK, note)
                with trio.fail_after(10 * VERY_LONG), world.over:
                    async with trio.open_nursery() as nursery:
                        for plan in plans:
                            nursery.start_soon(world.run, plan)
            if not trying:
                assert all(model.lanes.idle for model in models)
            return world

    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


MODELS = {
    "plans": st.lists(plans(), min_size=3, max_size=5),
    "parallel": st.lists(st.sampled_from([1, 1, 2]), min_size=3, max_size=3),
    "admission": st.sampled_from(["requests", "slots"]),
}


@pytest.mark.slow
@given(**MODELS)
def test_R6_everything_ends_whatever_handlers_open(plans: list[Plan], parallel: list[int], admission: str) -> None:
    play(plans, parallel, admission, trying=False)


@pytest.mark.slow
@given(**MODELS)
def test_R6_a_run_that_is_refused_could_never_have_started(
    plans: list[Plan], parallel: list[int], admission: str
) -> None:
    assert play(plans, parallel, admission, trying=True).started_all_the_same == []


CIRCLE = [
    Plan(
        model=model,
        kind="body",
        keys=(),
        weight=1,
        before=1,
        at_once=False,
        nested=(Plan(model=1 - model, kind="body", keys=(), weight=1, before=0, at_once=False, nested=()),),
    )
    for model in (0, 1)
]


def test_R6_the_search_itself_notices_a_circle_and_a_refusal_in_vain() -> None:
    def refuse(*args: Any) -> None:
        raise laneway.InvalidRequestError("refused in vain")

    one_slot = [1, 1, 1]
    assert play(CIRCLE, one_slot, "requests", trying=True).started_all_the_same == []
    in_vain = play(CIRCLE[:1], one_slot, "requests", trying=True, check=refuse)
    assert in_vain.started_all_the_same == ["refused in vain"]
    with pytest.raises(trio.TooSlowError):
        play(CIRCLE, one_slot, "requests", trying=False, check=lambda *args: None)
