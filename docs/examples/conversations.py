"""Conversations that are kept on disk: the code of ``docs/howto/conversations.md``."""

from __future__ import annotations

import sys
from pathlib import Path

import trio

import laneway
from laneway_plugins import completion
from laneway_plugins.completion import Message


async def chat_turn(model: laneway.Model, user: str, history: list[Message], text: str) -> str:
    """One turn of the user's chat.  Its cache has the user's name, and the history is the program's own."""
    messages = [*history, Message("user", text)]
    answer = await completion.complete(model, messages, kv_cache=f"chats/{user}", max_tokens=64)
    history[:] = [*messages, Message("assistant", answer.text)]
    return answer.text


async def stateless_turn(model: laneway.Model, messages: list[Message]) -> completion.Completion:
    """A client that sends the whole chat gets its cache, by what has been said in it."""
    return await completion.complete(model, messages, kv_cache=True, max_tokens=64)


def what_was_saved(answer: completion.Completion) -> str:
    """How much of the prompt was there already, and whether the next turn will find this one."""
    stats = answer.stats
    assert stats.cache is not None
    found = f"{stats.cached_tokens} of {stats.prompt_tokens} tokens were there"
    if stats.cache.miss is not None:
        found += f" ({stats.cache.miss})"
    return f"{found}; {stats.cache.ended}" + (f": {stats.cache.reason}" if stats.cache.reason else "")


async def forget(engine: laneway.Engine, user: str) -> int:
    """Delete a user's chat, and say how many bytes that freed."""
    done = await engine.kv_caches.delete(f"chats/{user}")
    return done.bytes


async def main(source: str, cache_dir: Path | None = None) -> None:
    """Two turns of a chat, then two of one that nobody has named."""
    async with laneway.open_engine(cache_dir=cache_dir) as engine:
        model = await engine.load_model(source)
        history: list[Message] = []
        for text in ("Name a planet.", "And another one."):
            print(await chat_turn(model, "anna", history, text))
        print(f"freed {await forget(engine, 'anna')} bytes")
        messages = [Message("user", "Name a planet.")]
        for text in ("And another one.", ""):
            answer = await stateless_turn(model, messages)
            print(what_was_saved(answer))
            messages += [Message("assistant", answer.text), Message("user", text)]


if __name__ == "__main__":
    trio.run(main, sys.argv[1] if len(sys.argv) > 1 else "smollm2")
