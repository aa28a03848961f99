"""Worker threads for the engine and its plugins, apart from those of the program.

Trio's default limiter belongs to the program: its worker threads may hold all tokens of it while they wait for an
answer of this engine.  What the engine needs a thread for would then wait for ever.  So the engine never uses that
limiter.  It has three others, one for each kind of work:

- :func:`run_sync`: short work of the processor, such as tokenising a text.  At most :data:`THREADS` at a time.
- :func:`run_file`: short work on files.  At most :data:`THREADS` at a time.  A disk or a network that hangs delays only
  other work on files.
- :func:`run_long`: work that takes long, or that waits for something outside of this program: loading a model, reading
  a saved state, the lock of a file.  There is no bound, so no work waits for a thread.

A function that runs here must not wait for a task, or for a thread that has not begun: it would hold a token that the
other may need.  A cancel ends the wait for a thread.  A function that has begun is waited for.

Each ``trio.run`` has limiters for itself: two runs in one process share no token.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple, Unpack

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["THREADS", "run_file", "run_long", "run_sync"]

Args = TypeVarTuple("Args")
Result = TypeVar("Result")

THREADS = 40
"""How many functions of one kind may run at a time, as many as by Trio's own default."""

_limiter: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("laneway threads for the processor")
_file_limiter: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("laneway threads for files")
_long_limiter: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("laneway threads for long work")


async def run_sync(function: Callable[[Unpack[Args]], Result], *args: *Args, abandon_on_cancel: bool = False) -> Result:
    """Run short work of the processor in a worker thread, and return what it returns.

    A cancel ends the wait for a thread.  A function that has begun is waited for, unless ``abandon_on_cancel``.
    Raises what the function raises.
    """
    limiter = _of_this_run(_limiter, THREADS)
    return await trio.to_thread.run_sync(function, *args, abandon_on_cancel=abandon_on_cancel, limiter=limiter)


async def run_file(function: Callable[[Unpack[Args]], Result], *args: *Args, abandon_on_cancel: bool = False) -> Result:
    """:func:`run_sync` for short work on files: looking for them, listing, deleting, writing little."""
    limiter = _of_this_run(_file_limiter, THREADS)
    return await trio.to_thread.run_sync(function, *args, abandon_on_cancel=abandon_on_cancel, limiter=limiter)


async def run_long(function: Callable[[Unpack[Args]], Result], *args: *Args, abandon_on_cancel: bool = False) -> Result:
    """:func:`run_sync` for work that takes long or waits for something outside of this program.

    It always gets a thread at once.  The caller bounds the number of threads.
    """
    limiter = _of_this_run(_long_limiter, math.inf)
    return await trio.to_thread.run_sync(function, *args, abandon_on_cancel=abandon_on_cancel, limiter=limiter)


def _of_this_run(limiter: trio.lowlevel.RunVar[trio.CapacityLimiter], tokens: float) -> trio.CapacityLimiter:
    try:
        return limiter.get()
    except LookupError:
        made = trio.CapacityLimiter(tokens)
        limiter.set(made)
        return made
