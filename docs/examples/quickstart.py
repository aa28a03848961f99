"""Four chats answered together by one model.  One of them is cancelled, and the others go on.

::

    laneway pull smollm2
    python quickstart.py
"""

from __future__ import annotations

import sys

import trio

import laneway
from laneway_plugins import completion

QUESTIONS = {
    "greeting": "Say hello to a new colleague.",
    "fruit": "Name three kinds of fruit.",
    "sky": "Why is the sky blue?",
    "story": "Tell me a very long story about a lighthouse.",
}


async def ask(model: laneway.Model, name: str, max_tokens: int) -> None:
    """Answer one question and print what came of it."""
    chat = [{"role": "user", "content": QUESTIONS[name]}]
    try:
        answer = await completion.complete(model, chat, max_tokens=max_tokens, temperature=0.0, request_id=name)
        print(f"{name}: {answer.text} [{answer.stop_reason}]")
    except laneway.InferenceCancelledError as error:
        print(f"{name}: {error.text} [cancelled after {len(error.tokens)} tokens]")


async def main(source: str = "smollm2") -> None:
    """Ask everything at once, and cancel the story when the greeting is there."""
    async with laneway.open_engine() as engine:
        model = await engine.load_model(source, parallel=4)
        async with trio.open_nursery() as nursery:
            for name in ("fruit", "sky", "story"):
                nursery.start_soon(ask, model, name, 64)
            await ask(model, "greeting", 24)
            engine.cancel("story")


if __name__ == "__main__":
    trio.run(main, sys.argv[1] if len(sys.argv) > 1 else "smollm2")
