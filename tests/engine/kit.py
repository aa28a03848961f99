"""Operations with every declaration that the rules speak of, for tests of the whole engine on a scripted decoder."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio

import laneway
from laneway.decoder import Sampling
from laneway.testing import ScriptedDecoder, ScriptedLoader

GREEDY = Sampling(temperature=0.0)


@attrs.frozen
class Generate:
    """Tokens for one prompt: what ``completion`` does, without text and templates."""

    prompt: tuple[int, ...]
    max_tokens: int | None = 8
    weight: int = 1
    keys: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()


@attrs.frozen(eq=False)
class Body:
    """A request whose handler is the given function."""

    body: Callable[[laneway.RequestContext], Awaitable[Any]]
    weight: int = 1
    keys: tuple[str, ...] = ()


async def _prepare_generate(model: laneway.Model, request: Generate) -> laneway.Prepared:
    model.check_prompt(list(request.prompt))
    return laneway.Prepared(weight=request.weight, keys=request.keys, payload=request)


async def _generate(ctx: laneway.RequestContext, prepared: laneway.Prepared) -> laneway.Answer:
    request = prepared.payload
    prompt = list(request.prompt)
    async with ctx.generate(
        prompt, GREEDY, max_tokens=request.max_tokens, stop=request.stop, deliver=ctx.put
    ) as tokens:
        return await tokens.finish()


async def _prepare_body(model: laneway.Model, request: Body) -> laneway.Prepared:
    return laneway.Prepared(weight=request.weight, keys=request.keys, payload=request)


async def _run_body(ctx: laneway.RequestContext, prepared: laneway.Prepared) -> Any:
    return await prepared.payload.body(ctx)


def body_operation(kind: str, **declared: Any) -> laneway.Operation:
    """An operation that runs the request's own function."""
    return laneway.Operation(kind=kind, request_type=Body, prepare=_prepare_body, handler=_run_body, **declared)


PLUGIN = laneway.PluginSpec(
    name="kit",
    operations=(
        laneway.Operation(kind="generate", request_type=Generate, prepare=_prepare_generate, handler=_generate),
        body_operation("body"),
        body_operation("writer", use=laneway.Use.EXCLUSIVE),
        body_operation("training", use=laneway.Use.EXCLUSIVE, scope=laneway.Scope.MODEL, unique=True),
        body_operation("common", scope=laneway.Scope.MODEL),
        body_operation("stubborn", scope=laneway.Scope.NONE),
        body_operation("beside", use=laneway.Use.NONE),
        body_operation("grouped", lane_group="others"),
    ),
)


@attrs.define
class Bench:
    """An engine with one scripted model."""

    engine: laneway.Engine
    model: laneway.Model
    loader: ScriptedLoader

    @property
    def decoder(self) -> ScriptedDecoder:
        return self.loader.decoders["scripted:a"]

    def expected_text(self, prompt: tuple[int, ...], max_tokens: int) -> str:
        """The text of a greedy answer that nobody disturbs."""
        tokens = self.decoder.expected(prompt, GREEDY, max_tokens).tokens
        return b"".join(map(self.model.tokenizer.piece, tokens)).decode("utf-8", "replace")

    def run(self, kind: str, request: Any, **options: Any) -> Any:
        return self.engine.run(self.model, kind, request, **options)

    def lane(self) -> laneway.LaneSnapshot:
        return self.engine.snapshot().model(self.model.name).lanes[0]

    def nothing_left(self) -> None:
        """Rule A11: no permit, no slot, no request is left over."""
        assert self.model.lanes.idle
        self.decoder.assert_idle()
        for lane in self.engine.snapshot().model(self.model.name).lanes:
            assert not lane.running
            assert not lane.waiting


@asynccontextmanager
async def bench(parallel: int = 2, *, plugins: Iterable[Any] = (), **options: Any) -> AsyncIterator[Bench]:
    """One engine, one model ``a`` of ``parallel`` slots; a step costs a tenth of a (virtual) second."""
    load = {name: options.pop(name) for name in ("queue_limit", "queue_timeout", "admission") if name in options}
    loader = ScriptedLoader(**{"seconds_per_step": 0.1, "end_every": None, "context_size": 64 * parallel, **options})
    async with laneway.open_engine(plugins=[loader.plugin, PLUGIN, *plugins]) as engine:
        model = await engine.load_model("scripted:a", parallel, **load)
        yield Bench(engine, model, loader)


async def forever(ctx: laneway.RequestContext) -> None:
    """A body that only a cancel ends."""
    await trio.sleep_forever()
