from __future__ import annotations

import inspect
import math
from typing import Any

import attrs
import pytest
import trio
import trio.testing

import laneway
from laneway import ModelLoadError
from laneway.decoder import BatchPolicy, InvalidRequestError, Sampling
from laneway.testing import (
    ScriptedDecoder,
    ScriptedLoader,
    ScriptedOptions,
    ScriptedTokenizer,
    scripted_backend,
    scripted_loader_plugin,
)


async def _prepare(model: laneway.Model, request: list[list[int]]) -> laneway.Prepared:
    for prompt in request:
        model.check_prompt(prompt)
    return laneway.Prepared(payload=request, weight=len(request))


async def _echo(ctx: laneway.RequestContext, prepared: laneway.Prepared) -> list[laneway.Answer]:
    answers: list[laneway.Answer | None] = [None] * len(prepared.payload)

    async def one(index: int, prompt: list[int]) -> None:
        async with ctx.generate(prompt, Sampling(temperature=0)) as tokens:
            answers[index] = await tokens.finish()

    async with trio.open_nursery() as nursery:
        for index, prompt in enumerate(prepared.payload):
            nursery.start_soon(one, index, prompt)
    return [answer for answer in answers if answer is not None]


ANSWERS = laneway.PluginSpec(
    name="answers",
    operations=(laneway.Operation(kind="answers", request_type=list, prepare=_prepare, handler=_echo),),
)


async def test_an_engine_answers_as_a_sequence_alone_is_expected_to(autojump_clock: trio.testing.MockClock) -> None:
    loader = ScriptedLoader(seconds_per_step=0.01)
    prompts = [[1], [1, 2], [3] * 20, [1, 2, 4], [9] * 63, [5] * 17]
    async with laneway.open_engine(plugins=[loader.plugin, ANSWERS]) as engine:
        model = await engine.load_model("scripted:a", parallel=4, context_size=256)
        decoder = loader.decoders["scripted:a"]
        assert (decoder.slots, decoder.window, model.window, model.context_size) == (4, 64, 64, 256)
        async with engine.run(model, "answers", prompts) as run:
            answers = await run.result()
        for prompt, answer in zip(prompts, answers, strict=True):
            expected = decoder.expected(prompt, Sampling(temperature=0))
            assert (answer.tokens, answer.stop_reason) == (expected.tokens, expected.stop_reason)
            assert answer.text == ScriptedTokenizer().text(expected.tokens)
        assert decoder.statistics().max_used == 4
        loader.assert_idle()
    assert decoder.left_at_close == frozenset()
    with pytest.raises(AssertionError, match="after aclose"):
        decoder.drop(0)


async def test_options_reach_the_decoder() -> None:
    policy = BatchPolicy(chunk_max=8)
    loader = ScriptedLoader(end_every=None, context_size=100, policy=policy)
    async with laneway.open_engine(plugins=[loader.plugin]) as engine:
        await engine.load_model("scripted:a", parallel=3, stall_timeout=2.0, chat_template=None)
        model = await engine.load_model("scripted:b", parallel=3, end_every=1, context_size=11)
        a, b = loader.decoders["scripted:a"], loader.decoders["scripted:b"]
        assert (a.window, b.window) == (33, 3)
        assert a.policy is policy
        assert a.expected([1], Sampling()).stop_reason == "length"
        assert b.expected([1], Sampling()).end_token is not None
        assert model.metadata["architecture"] == "scripted"


async def test_wrong_options_are_refused() -> None:
    with pytest.raises(TypeError, match="speed"):
        ScriptedLoader(speed=1)
    with pytest.raises(InvalidRequestError, match="seconds_per_step"):
        ScriptedLoader(seconds_per_step=math.nan)
    async with laneway.open_engine(plugins=[scripted_loader_plugin(end_every=5)]) as engine:
        wrong: list[dict[str, Any]] = [{"speed": 1}, {"context_size": 0}, {"end_every": 0}, {"seconds_to_load": -1}]
        for options in wrong:
            with pytest.raises(ModelLoadError, match=next(iter(options))):
                await engine.load_model("scripted:a", **options)
        with pytest.raises(ModelLoadError, match="context_size 7 leaves 1 tokens for each of 4 slots"):
            await engine.load_model("scripted:a", parallel=4, context_size=7)
        with pytest.raises(ModelLoadError, match="no loader takes it"):
            await engine.load_model("unscripted:a")


async def test_loading_takes_time_and_fails_when_told(autojump_clock: trio.testing.MockClock) -> None:
    loader = ScriptedLoader(seconds_to_load=5.0)
    error = ModelLoadError("scripted:bad", "as told")
    async with laneway.open_engine(plugins=[loader.plugin]) as engine:
        with pytest.raises(ModelLoadError) as caught:
            await engine.load_model("scripted:bad", load_error=error)
        assert caught.value is error
        assert trio.current_time() == 5
        with trio.move_on_after(1) as scope:
            await engine.load_model("scripted:late")
        assert scope.cancelled_caught
        assert trio.current_time() == 10
        assert loader.decoders == {}


async def test_a_backend_of_its_own() -> None:
    backend = scripted_backend(3, name="mine", context_size=96, script={"Hello": "yes"})
    decoder, tokenizer = backend.decoder, backend.tokenizer
    assert isinstance(decoder, ScriptedDecoder)
    assert isinstance(tokenizer, ScriptedTokenizer)
    assert (backend.name, decoder.slots, decoder.window) == ("mine", 3, 32)
    assert tokenizer.text(decoder.expected(tokenizer.tokenize("Hello"), Sampling()).tokens) == "yes"
    assert backend.aclose is not None
    await backend.aclose()
    assert "closed" in repr(decoder)
    with pytest.raises(TypeError, match="speed"):
        scripted_backend(speed=1)


def test_every_decoder_option_can_be_given_to_the_loader() -> None:
    ours = {field.name for field in attrs.fields(ScriptedOptions)}
    decoders = set(inspect.signature(ScriptedDecoder).parameters)
    assert decoders - ours == {"slots", "window", "vocabulary", "history"}
