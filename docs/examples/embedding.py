"""What a program that embeds the engine does with it, one function for each task.

::

    laneway pull smollm2
    python embedding.py
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio

import laneway
from laneway_plugins import batch, completion


class EndCounter:
    """Counts how requests end: a plugin that only looks on."""

    def __init__(self) -> None:
        self.ends: Counter[tuple[str, str | None]] = Counter()

    @laneway.hookimpl
    def laneway_request_ended(self, record: laneway.RequestRecord) -> None:
        self.ends[record.kind, record.outcome] += 1


@asynccontextmanager
async def open_app(source: str, plugins: Sequence[Any] = ()) -> AsyncIterator[tuple[laneway.Model, trio.Nursery]]:
    """The engine outside, the program's own tasks inside: they end first."""
    async with laneway.open_engine(plugins) as engine:
        model = await engine.load_model(source, parallel=2, queue_limit=16)
        async with trio.open_nursery() as nursery:
            yield model, nursery


async def answer_in_time(model: laneway.Model, question: str, seconds: float) -> str | None:
    """One deadline for the queue, the prompt and the answer."""
    with trio.move_on_after(seconds):
        answer = await completion.complete(model, question, max_tokens=32)
        return answer.text
    return None


async def first_sentence(model: laneway.Model, question: str) -> str:
    """Leaving the block ends the request: no token is decoded that is not wanted."""
    text = ""
    async with completion.stream(model, question, max_tokens=200) as run:
        async for event in run:
            if isinstance(event, laneway.TextDelta):
                text += event.text
                if "." in text:
                    break
    return text.partition(".")[0] + "."


async def answer_or_refuse(model: laneway.Model, question: str) -> str:
    """Answer at once or not at all."""
    try:
        answer = await completion.complete(model, question, max_tokens=32, overflow="reject")
    except laneway.RequestRejectedByPolicyError as error:
        return f"busy: {error.reason}"
    return answer.text


async def answer_all(model: laneway.Model, questions: Iterable[str]) -> list[str]:
    """Many prompts under one permit.  A fault of one prompt is the outcome of that one."""
    outcomes = await batch.complete(model, questions, max_tokens=32)
    return [outcome.text if outcome.error is None else f"({outcome.error})" for outcome in outcomes]


async def answer_without_thinking(model: laneway.Model, question: str) -> str:
    """Tell the template not to let the model think first.  A template without this name ignores it."""
    chat = [{"role": "user", "content": question}]
    answer = await completion.complete(model, chat, max_tokens=32, chat_template_kwargs={"enable_thinking": False})
    return answer.text


async def stop_everything(model: laneway.Model, kind: str) -> int:
    """Cancel by kind, and return when the slots are free."""
    engine = model.engine
    ids = [request.request_id for lane in lanes(model) for request in (*lane.running, *lane.waiting)]
    cancelled = engine.cancel_all(model=model, kind=kind, reason="stopped by an operator")
    for request_id in ids:
        await engine.wait_ended(request_id)
    return cancelled


def describe_queue(model: laneway.Model) -> list[str]:
    """Who waits, and for how long."""
    return [
        f"{waiter.position}. {waiter.kind} {waiter.request_id}, {waiter.age:.1f} s"
        for lane in lanes(model)
        for waiter in lane.waiting
    ]


def lanes(model: laneway.Model) -> tuple[laneway.LaneSnapshot, ...]:
    """The lanes of a model at this moment."""
    return model.engine.snapshot().model(model.name).lanes


async def main(source: str = "smollm2") -> None:
    """A little of everything."""
    counter = EndCounter()
    async with open_app(source, [counter]) as (model, nursery):
        print(await first_sentence(model, "The capital of France is"))
        print(await answer_in_time(model, "Once upon a time", seconds=0.01))
        print(await answer_all(model, ["One, two, three,", "", "Monday, Tuesday,"]))
        for _ in range(3):
            nursery.start_soon(answer_in_time, model, "Once upon a time", 60.0)
        await trio.sleep(0.1)
        print(describe_queue(model))
        print(await answer_or_refuse(model, "Is there room?"))
    print(dict(counter.ends))


if __name__ == "__main__":
    trio.run(main, sys.argv[1] if len(sys.argv) > 1 else "smollm2")
