"""Worker threads for the engine and its plugins, apart from those of the program.

Trio's default limiter belongs to the program: its worker threads may hold all tokens of it while they wait for an
answer of this engine.  What the engine itself needs a thread for would then wait for ever, so it uses a limiter of its
own.  A function that runs here must not wait for a task or for another thread, or the same circle closes here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, TypeVarTuple, Unpack

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["THREADS", "run_sync"]

Args = TypeVarTuple("Args")
Result = TypeVar("Result")

THREADS = 40
"""How many functions may run at a time, as many as by Trio's own default."""

_limiter: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("laneway worker threads")


async def run_sync(function: Callable[[Unpack[Args]], Result], *args: *Args, abandon_on_cancel: bool = False) -> Result:
    """Run a function that blocks in a worker thread, and return what it returns.

    A cancel ends the wait for a thread.  A function that has begun is waited for, unless ``abandon_on_cancel``.
    Raises what the function raises.
    """
    try:
        limiter = _limiter.get()
    except LookupError:
        limiter = trio.CapacityLimiter(THREADS)
        _limiter.set(limiter)
    return await trio.to_thread.run_sync(function, *args, abandon_on_cancel=abandon_on_cancel, limiter=limiter)
