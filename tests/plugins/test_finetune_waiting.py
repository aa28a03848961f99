"""What other requests can do while a training has their model: the advice of the page about training."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing

import laneway
from laneway_plugins import batch, completion, finetune, llm_translate
from laneway_plugins.finetune import Training
from tests.plugins.finetune_trainer import ScriptedChild, ScriptedTrainer
from tests.plugins.finetune_trainer import trainer as trainer
from tests.plugins.scripted import Scripted, scripted

LONG = 3 * 3600.0
CHAT = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "a world"}]}


@attrs.frozen
class Bench:
    """A model, and the opening of a training on it that takes long."""

    s: Scripted
    start: Callable[[], AbstractAsyncContextManager[Training]]


@pytest.fixture
async def b(trainer: ScriptedTrainer, tmp_path: Path, autojump_clock: trio.testing.MockClock) -> AsyncIterator[Bench]:
    async def behave(child: ScriptedChild) -> None:
        await trio.sleep(LONG)
        await child.train()

    trainer.behave = behave
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps(CHAT) + "\n")
    async with scripted(parallel=2) as s:
        yield Bench(
            s,
            lambda: finetune.start(s.model, dataset=data, output=tmp_path / "a.gguf", silence_timeout=2 * LONG),
        )
    trainer.assert_all_ended()


async def ask(model: laneway.Model, **fields: Any) -> str:
    return (await completion.complete(model, "Hello", max_tokens=4, **fields)).text


CALLS: dict[str, Callable[[laneway.Model], Any]] = {
    "completion": ask,
    "batch": lambda model: batch.complete(model, ["Hello"], max_tokens=4),
    "translate": lambda model: llm_translate.translate(model, "Hello", source="en", target="de", max_tokens=4),
}


@pytest.mark.parametrize("kind", CALLS)
async def test_requests_wait_as_long_as_a_training_takes(
    kind: str, b: Bench, autojump_clock: trio.testing.MockClock
) -> None:
    async with b.start() as training:
        await training.admitted()
        await CALLS[kind](b.s.model)
        assert trio.current_time() > LONG
        assert training.state == "completed"


async def test_a_deadline_around_the_call_ends_the_wait(b: Bench, autojump_clock: trio.testing.MockClock) -> None:
    async with b.start() as training:
        await training.admitted()
        began = trio.current_time()
        with trio.move_on_after(20) as scope:
            await ask(b.s.model)
        assert scope.cancelled_caught
        assert trio.current_time() == began + 20
        assert (training.state, b.s.lane.waiting) == ("running", ())


async def test_a_queue_timeout_ends_the_wait(b: Bench, autojump_clock: trio.testing.MockClock) -> None:
    async with b.start() as training:
        await training.admitted()
        began = trio.current_time()
        with pytest.raises(laneway.RequestRejectedByPolicyError) as caught:
            await ask(b.s.model, queue_timeout=20)
        assert (caught.value.reason, trio.current_time()) == ("queue_timeout", began + 20)
        assert training.state == "running"


async def test_a_request_may_ask_not_to_wait(b: Bench, autojump_clock: trio.testing.MockClock) -> None:
    async with b.start() as training:
        await training.admitted()
        with pytest.raises(laneway.RequestRejectedByPolicyError) as caught:
            await ask(b.s.model, overflow="reject")
        assert (caught.value.reason, training.state) == ("overflow", "running")


async def test_a_second_copy_of_the_model_answers_meanwhile(b: Bench, autojump_clock: trio.testing.MockClock) -> None:
    copy = await b.s.engine.load_model("scripted:model", 2, name="copy")
    async with b.start() as training:
        await training.admitted()
        began = trio.current_time()
        assert await ask(copy)
        assert trio.current_time() < began + 60
        assert training.state == "running"


async def test_a_cancel_of_the_training_ends_no_request_behind_it(
    b: Bench, autojump_clock: trio.testing.MockClock
) -> None:
    answers: list[str] = []

    async def wait_behind() -> None:
        answers.append(await ask(b.s.model))

    async with trio.open_nursery() as nursery:
        with pytest.raises(laneway.InferenceCancelledError):
            async with b.start() as training:
                await training.admitted()
                nursery.start_soon(wait_behind)
                await trio.testing.wait_all_tasks_blocked()
                assert b.s.engine.cancel(training.request_id) == 1
                await training.result()
    assert len(answers) == 1
