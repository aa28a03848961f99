"""Many turns with chance against them: cancels, edits, damaged files, other processes that are killed as they write.

Every answer that comes to its end is compared with what a sequence alone would say to the same messages.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import trio

from laneway import InferenceCancelledError
from laneway._kvcache import _files
from laneway_plugins import completion
from tests.kvcache.kit import GREEDY, cached, cold
from tests.plugins.scripted import Scripted

ROOT = Path(__file__).parents[2]
WORDS = ("Hello", " world", "café", "日本", "on", "a longer message that says little", "")
KEYS = ("a", "a/b", "c", True)
FATES = ("whole", "whole", "whole", "cancelled by id", "cancelled by scope", "left", "early")


@attrs.define
class Counts:
    """What happened."""

    turns: int = 0
    compared: int = 0
    warm: int = 0
    """Of those compared, how many had taken up something."""
    cancelled: int = 0
    harmed: int = 0
    ended: dict[str, int] = attrs.field(factory=dict)


class Conversations:
    """Turns on one model and one directory, drawn from a seeded source of chance."""

    def __init__(self, s: Scripted, directory: Path, seed: int) -> None:
        self.counts = Counts()
        self._s = s
        self._directory = directory / "kv"
        self._chance = random.Random(seed)
        self._talks: list[tuple[str | bool, list[dict[str, str]]]] = [(key, []) for key in KEYS for _ in range(2)]

    async def round(self, turns: int, *, tasks: int = 3) -> None:
        """So many turns, some at a time."""
        left = iter(range(turns))

        async def caller() -> None:
            for _ in left:
                await self.turn()

        async with trio.open_nursery() as nursery:
            for _ in range(tasks):
                nursery.start_soon(caller)

    async def turn(self) -> None:
        """One turn and its fate."""
        chance = self._chance
        if chance.random() < 0.15:
            self._harm()
        key, history = chance.choice(self._talks)
        self._edit(history)
        messages = [*history, {"role": "user", "content": chance.choice(WORDS)}]
        fields: dict[str, Any] = {**GREEDY, "max_tokens": 1 + chance.randrange(14)}
        self.counts.turns += 1
        answer = await self._run(messages, chance.choice(FATES), kv_cache=key, **fields)
        if answer is None:
            self.counts.cancelled += 1
            return
        said = [*messages, {"role": "assistant", "content": answer.text}]
        expected = cold(self._s, said, max_tokens=fields["max_tokens"])
        assert answer.tokens == expected, f"a wrong continuation of {messages!r} with {answer.stats!r}"
        cache = answer.stats.cache
        assert cache is not None
        self.counts.compared += 1
        self.counts.warm += answer.stats.cached_tokens > 0
        self.counts.ended[cache.ended] = self.counts.ended.get(cache.ended, 0) + 1
        history[:] = said

    async def _run(self, messages: list[dict[str, str]], fate: str, **fields: Any) -> completion.Completion | None:
        patience = self._chance.randrange(8)
        answer: completion.Completion | None = None
        with trio.CancelScope() as scope:
            try:
                async with completion.stream(self._s.model, messages, **fields) as run:
                    if fate == "early":
                        self._s.engine.cancel(run.request_id)
                    elif fate != "whole":
                        async for _ in run:
                            patience -= 1
                            if patience < 0:
                                break
                        if fate == "cancelled by id":
                            self._s.engine.cancel(run.request_id)
                        elif fate == "cancelled by scope":
                            scope.cancel()
                        else:
                            return None
                    answer = await run.result()
            except InferenceCancelledError:
                assert fate in ("early", "cancelled by id")
        return answer

    def _edit(self, history: list[dict[str, str]]) -> None:
        """Go back some turns now and then, or change what was said; and begin anew before the window is full."""
        chance = self._chance
        if len(history) > 8 or sum(len(message["content"]) for message in history) > 100:
            history.clear()
        elif history and chance.random() < 0.2:
            del history[2 * chance.randrange(len(history) // 2) :]
        elif history and chance.random() < 0.1:
            history[2 * chance.randrange(len(history) // 2)] = {"role": "user", "content": chance.choice(WORDS)}

    def _harm(self) -> None:
        chance = self._chance
        files = [path for path in _files.walk(self._directory) if not path.name.endswith(_files.TEMPORARY)]
        if not files:
            return
        path = chance.choice(files)
        try:
            data = bytearray(path.read_bytes())
            what = chance.randrange(5)
            if what == 0:
                path.unlink()
            elif what == 1:
                path.write_bytes(data[: chance.randrange(len(data) + 1)])
            elif what == 2 and data:
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
                path.write_bytes(data)
            elif what == 3:
                path.write_bytes(chance.randbytes(chance.randrange(300)))
            else:
                # Another whole file, which is of another conversation.
                path.write_bytes(chance.choice(files).read_bytes())
        except FileNotFoundError:
            return  # a turn of our own or of another process was quicker
        self.counts.harmed += 1


async def child(directory: Path, seed: int) -> None:
    """Turns in a process of its own, which stands still somewhere in the middle of a write, to be killed."""
    chance = random.Random(seed)
    number, part = 1 + chance.randrange(12), 1 + chance.randrange(20)
    whole = _files.write

    def write(path: Path, facts: Any, state: bytes, checkpoint: Any) -> int:
        nonlocal number
        number -= 1
        left = part

        def look() -> None:
            nonlocal left
            left -= 1
            if number <= 0 and left <= 0:
                print("here", flush=True)  # noqa: T201 - the other process reads it
                sys.stdin.read()
            checkpoint()

        return whole(path, facts, state, look)

    _files.write = write
    _files._BLOCK = 100
    async with cached(directory, 2) as s:
        conversations = Conversations(s, directory, seed)
        while True:
            await conversations.turn()


async def kill_in_the_middle_of_a_write(directory: Path, seed: int) -> None:
    """Let another process do turns on the directory, and kill it while it writes."""
    code = (
        "import sys, trio; from tests.kvcache import conversations as c; "
        "trio.run(c.child, c.Path(sys.argv[1]), int(sys.argv[2]))"
    )
    process = await trio.lowlevel.open_process(
        [sys.executable, "-c", code, str(directory), str(seed)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout is not None
    try:
        said = await process.stdout.receive_some(100)
        assert said.startswith(b"here"), f"the other process ended by itself: {said!r}"
    finally:
        process.send_signal(signal.SIGKILL)
        with trio.CancelScope(shield=True):
            await process.wait()
        await process.stdout.aclose()
        assert process.stdin is not None
        await process.stdin.aclose()
