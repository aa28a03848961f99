"""Everything here runs on a scripted model: no model file, no threads, no real time.

The plugin has to be installed, as it is for its users: the engine finds it by its entry point.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import laneway_summarise
import pytest
import trio
from laneway_summarise import SummariseRequest, halve, stream, summarise

import laneway
from laneway.testing import ScriptedLoader, ScriptedTokenizer, check_plugin

STORY = "".join(f"On day {day} the ship sailed on. Nobody saw land.\n\n" for day in range(1, 9))
TWO_PARTS = {"parallel": 2, "context_size": 640}
"""A window of 320 tokens, for a story of 345."""

OpenModel = Callable[..., AbstractAsyncContextManager[laneway.Model]]

_tokenizer = ScriptedTokenizer()


def answer(prompt: tuple[int, ...]) -> str:
    """What the model says to a prompt: one thing to a part of the story, another to summaries of parts."""
    return "A long voyage." if "At sea." in _tokenizer.text(prompt) else "At sea."


@pytest.fixture
def open_model(scripted_loader: ScriptedLoader, autojump_clock: trio.testing.MockClock) -> OpenModel:
    """``async with open_model(parallel=2, ...) as model``: a scripted model, which must be idle in the end."""

    @asynccontextmanager
    async def open_model(**options: Any) -> AsyncIterator[laneway.Model]:
        options = {"script": answer, "seconds_per_step": 0.01, **options}
        async with laneway.open_engine([scripted_loader.plugin], strict_plugins=True) as engine:
            yield await engine.load_model("scripted:model", **options)
            scripted_loader.assert_idle()

    return open_model


def test_it_keeps_what_it_declares() -> None:
    (checked,) = check_plugin(
        laneway_summarise,
        requests={"summarise": SummariseRequest(STORY, max_tokens=16)},
        wrong={"summarise": [SummariseRequest(STORY * 20, max_tokens=16), SummariseRequest(STORY, max_tokens=300)]},
        load={"script": answer, **TWO_PARTS},
        most=20,
    )
    assert checked.steps > 0


async def test_a_short_text_is_summarised_at_once(open_model: OpenModel) -> None:
    async with open_model() as model:
        summary = await summarise(model, "On day 1 the ship sailed on.", max_tokens=20)
    assert (summary.text, summary.parts, summary.stop_reason) == ("At sea.", 1, "eos")


async def test_a_long_text_is_summarised_in_parts_and_then_as_a_whole(open_model: OpenModel) -> None:
    async with open_model(**TWO_PARTS) as model, stream(model, STORY, max_tokens=16) as run:
        events = [event async for event in run]
        summary = await run.result()
    progress = [event for event in events if isinstance(event, laneway.Progress)]
    assert [(event.done, event.total) for event in progress] == [(1, 2), (2, 2)]
    text = "".join(event.text for event in events if isinstance(event, laneway.TextDelta))
    assert text == summary.text == "A long voyage."
    assert isinstance(events[-1], laneway.Done)


async def test_parts_are_answered_together(open_model: OpenModel) -> None:
    async with open_model(**TWO_PARTS) as model:
        summary = await summarise(model, STORY, max_tokens=16)
    assert summary.stats.average_concurrent_sequences is not None
    assert summary.stats.average_concurrent_sequences > 1


async def test_a_model_without_a_chat_template_gets_a_raw_prompt(open_model: OpenModel) -> None:
    async with open_model(chat_template=None) as model:
        summary = await summarise(model, "On day 1 the ship sailed on.", max_tokens=20)
    assert summary.text == "At sea."


@pytest.mark.parametrize("moment", [0.0, 0.005, 0.1, 0.25, 0.35])
async def test_cancelling_frees_every_slot(open_model: OpenModel, moment: float) -> None:
    # The moments: before anything, in the first step, with one part and with both under way, in the last summary.
    async with open_model(**TWO_PARTS) as model:
        with trio.move_on_after(moment) as scope:
            await summarise(model, STORY, max_tokens=16)
        assert scope.cancelled_caught
        assert model.engine.snapshot().model(model.name).lanes[0].used == 0


async def test_a_failing_part_fails_the_request_with_its_own_error(open_model: OpenModel) -> None:
    fault = laneway.DecodeError("out of luck")
    async with open_model(**TWO_PARTS, fail_at={20: fault}) as model:
        with pytest.raises(laneway.DecodeError, match="out of luck"):
            await summarise(model, STORY, max_tokens=16)


@pytest.mark.parametrize(("text", "max_tokens", "why"), [(" \n", 16, "blank"), (7, 16, "str"), ("a", 0, "integer")])
def test_a_wrong_request_cannot_be_made(text: Any, max_tokens: int, why: str) -> None:
    with pytest.raises(laneway.InvalidRequestError, match=why):
        SummariseRequest(text, max_tokens=max_tokens)


async def test_what_can_never_fit_is_refused(open_model: OpenModel) -> None:
    async with open_model(**TWO_PARTS) as model:
        with pytest.raises(laneway.InvalidRequestError, match="makes 32 parts, and a slot holds the summaries of 13"):
            await summarise(model, STORY * 20, max_tokens=16)
        with pytest.raises(laneway.InvalidRequestError, match="lower max_tokens"):
            await summarise(model, STORY, max_tokens=300)


@pytest.mark.parametrize(
    ("text", "head"),
    [
        ("One two.\n\nThree. Four\nfive", "One two.\n\n"),
        ("One two.\nThree. Four five", "One two.\n"),
        ("One two. Three four five", "One two. "),
        ("One two three four", "One two "),
        ("abcdefgh", "abcd"),
        ("a", ""),
    ],
)
def test_texts_are_cut_where_something_ends(text: str, head: str) -> None:
    assert halve(text) == (head, text[len(head) :])
