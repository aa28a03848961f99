"""Training an adapter, pausing and resuming it, and answering with it.

::

    laneway pull smollm2
    python training.py smollm2 chats.jsonl adapter.gguf
"""

from __future__ import annotations

import sys
from os import PathLike

import trio

import laneway
from laneway_plugins import completion, finetune


async def train(
    model: laneway.Model, data: str | PathLike[str], output: str | PathLike[str]
) -> finetune.FinetuneResult:
    """From the start to the end, with a line for each step."""
    async with finetune.start(model, dataset=data, output=output, rank=8, validation=0.1) as training:
        async for event in training:
            if isinstance(event, finetune.FinetuneProgress) and event.loss is not None:
                print(f"step {event.done} of {event.total}: loss {event.loss:.3f}, {event.seconds_left:.0f} s left")
        return await training.result()


async def train_for(
    model: laneway.Model, data: str | PathLike[str], output: str | PathLike[str], seconds: float
) -> str:
    """Train for so long, then let others have the model; what is paused goes on the next time."""
    if finetune.state(output).state == "paused":
        opening = finetune.resume(model, output=output)
    else:
        opening = finetune.start(model, dataset=data, output=output)
    async with opening as training:
        await training.admitted()
        with trio.move_on_after(seconds):
            await training.result()
        return await training.pause()


async def answer(engine: laneway.Engine, source: str, adapter: str | PathLike[str], question: str) -> str:
    """What the model says with the adapter."""
    model = await engine.load_model(source, lora=[(adapter, 1.0)])
    answer = await completion.complete(model, [{"role": "user", "content": question}], max_tokens=64, temperature=0.0)
    return answer.text


async def main(source: str, data: str, output: str) -> None:
    """Train, then answer."""
    async with laneway.open_engine() as engine:
        model = await engine.load_model(source, context_size=512)
        result = await train(model, data, output)
        print(f"{result.output}: loss {result.loss}")
        await engine.unload_model(model)
        print(await answer(engine, source, output, "Who are you?"))


if __name__ == "__main__":
    trio.run(main, sys.argv[1], sys.argv[2], sys.argv[3])
