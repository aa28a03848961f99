"""The ``trio.run`` that an engine lives in, and the refusal of calls from anywhere else.

Tasks of two runs wait in two event loops on two threads.  A request that is admitted in one and served in the other
wakes a task from the wrong thread, which neither loop survives.
"""

from __future__ import annotations

from typing import final

import trio


@final
class Home:
    """Made in the ``trio.run`` that it stands for."""

    __slots__ = ("_token",)

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()

    def check(self) -> None:
        """Raise :class:`RuntimeError` unless this is called in the same ``trio.run``.

        It is no :class:`laneway.LanewayError`, because it is a mistake in the program and not the refusal of a request.
        Code that handles refused requests must not hide it.  Trio also raises RuntimeError when it is misused.
        """
        try:
            here = trio.lowlevel.current_trio_token()
        except RuntimeError:
            raise RuntimeError(
                "this engine was called from outside of its trio.run; a worker thread reaches it with "
                "trio.from_thread.run or trio.from_thread.run_sync"
            ) from None
        if here is not self._token:
            raise RuntimeError(
                "this engine belongs to another trio.run, and so do its models and runs; use them there (a worker "
                "thread reaches it with trio.from_thread.run), or open an engine in this trio.run"
            )
