"""Tokenising in worker threads, and the wait for the threads that still use a tokenizer."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import trio

from laneway import threads
from laneway.decoder import LongTextTokenizer

if TYPE_CHECKING:
    from laneway.decoder import Tokenizer, Written


class TooManyTokens(Exception):  # noqa: N818 - an outcome, which its caller turns into an error
    """A text has at least ``least`` tokens, and that is too many."""

    def __init__(self, least: int) -> None:
        super().__init__(least)
        self.least = least


class Tokenizing:
    """The threads that use one tokenizer.

    A thread that has begun cannot be ended.  A cancelled caller leaves it behind at once and asks the tokenizer to
    stop.  :meth:`until_idle` waits for it, so that the tokenizer is not freed while a thread uses it.
    """

    def __init__(self) -> None:
        self._threads = 0
        self._idle = trio.lowlevel.ParkingLot()

    async def run(
        self, tokenizer: Tokenizer, text: str, *, bos: bool, special: bool | Written, limit: int | None
    ) -> list[int]:
        """Tokens of ``text``, made in a worker thread.  A cancel ends the wait at once.

        Raises :class:`TooManyTokens`, before the tokens are made, if there are certainly ``limit`` of them or more.
        """
        done = trio.lowlevel.current_trio_token()
        lock = threading.Lock()
        begun = False
        stop = bytearray(1)

        def work() -> list[int]:
            nonlocal begun
            with lock:
                if stop[0]:
                    return []  # the caller has left, and has uncounted this thread
                begun = True
            try:
                return _tokens(tokenizer, text, bos=bos, special=special, limit=limit, stop=stop)
            finally:
                # If the run has ended, no task waits for this thread.
                with contextlib.suppress(trio.RunFinishedError):
                    done.run_sync_soon(self._ended)

        self._threads += 1
        try:
            return await threads.run_sync(work, abandon_on_cancel=True)
        finally:
            with lock:
                stop[0] = 1
                ended = not begun
            if ended:
                self._ended()

    async def until_idle(self) -> None:
        """Wait for the end of every thread that has begun."""
        while self._threads:
            await self._idle.park()

    def _ended(self) -> None:
        self._threads -= 1
        self._idle.unpark_all()


def _tokens(
    tokenizer: Tokenizer, text: str, *, bos: bool, special: bool | Written, limit: int | None, stop: bytearray
) -> list[int]:
    if not isinstance(tokenizer, LongTextTokenizer):
        return tokenizer.tokenize(text, bos=bos, special=special)
    if limit is not None and (least := tokenizer.least_tokens(text)) >= limit:
        raise TooManyTokens(least)
    return tokenizer.tokenize(text, bos=bos, special=special, stop=stop)
