"""A program that keeps all of Trio's worker threads for itself, as a program may."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Self

import trio

from laneway import threads

HANG_SECONDS = 300
"""When a test that waits for ever is given up.  It says nothing of how long anything takes."""


@asynccontextmanager
async def all_tokens_held() -> AsyncIterator[None]:
    """The only token of Trio's default limiter is held by a worker thread for the length of the block."""
    limiter = trio.to_thread.current_default_thread_limiter()
    before = limiter.total_tokens
    limiter.total_tokens = 1
    begun, release = trio.Event(), threading.Event()

    def hold() -> None:
        trio.from_thread.run_sync(begun.set)
        # What is shielded would outlast any deadline, so a program that hangs gets its thread in the end.
        assert release.wait(HANG_SECONDS), "something waits for a thread of the program's own"

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, hold)
        await begun.wait()
        try:
            yield
        finally:
            release.set()
    limiter.total_tokens = before


@contextmanager
def one_thread_of_each_kind() -> Iterator[None]:
    """The engine's limiters have one token each, but for the one without a bound."""
    mine = trio.CapacityLimiter(1), trio.CapacityLimiter(1)
    tokens = threads._limiter.set(mine[0]), threads._file_limiter.set(mine[1])
    try:
        yield
    finally:
        threads._limiter.reset(tokens[0])
        threads._file_limiter.reset(tokens[1])
        assert [limiter.borrowed_tokens for limiter in mine] == [0, 0]


class Held:
    """A function that blocks its thread until it is let go, or the block is left."""

    def __init__(self) -> None:
        self.begun = trio.Event()
        self._release = threading.Event()

    def __call__(self, *args: object) -> str:
        trio.from_thread.run_sync(self.begun.set)
        self._release.wait()
        return "done"

    def release(self) -> None:
        self._release.set()

    def again(self) -> None:
        """Block the next call."""
        self.begun = trio.Event()
        self._release.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """A test that fails must not wait for its thread."""
        self.release()
