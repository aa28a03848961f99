from __future__ import annotations

import trio

import laneway
from laneway_plugins import completion


async def main(source: str = "smollm2") -> None:
    async with laneway.open_engine() as engine:
        model = await engine.load_model(source)
        chat = [{"role": "user", "content": "Why is the sky blue?"}]
        answer = await completion.complete(model, chat, max_tokens=48, temperature=0.0)
        print(answer.text)
        print(answer.stop_reason, answer.stats)


if __name__ == "__main__":
    trio.run(main)
