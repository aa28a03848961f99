from __future__ import annotations

import trio

import laneway
from laneway_plugins import completion


async def main(source: str = "smollm2") -> None:
    async with laneway.open_engine() as engine:
        model = await engine.load_model(source)
        with trio.move_on_after(60):
            async with completion.stream(model, "Once upon a time", max_tokens=100, seed=7) as run:
                async for event in run:
                    if isinstance(event, laneway.TextDelta):
                        print(event.text, end="", flush=True)
                    elif isinstance(event, laneway.Done):
                        print(f"\n[{event.stop_reason}]")


if __name__ == "__main__":
    trio.run(main)
