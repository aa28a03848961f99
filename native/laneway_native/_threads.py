"""Worker threads for this package, apart from those of the program.

Trio's default limiter belongs to the program, whose worker threads may hold all tokens of it while they wait for a
model.  So native calls never wait for that limiter.

There is no bound: loads, checksums and copies of states are as many as the loads and slots that the caller has.  So no
short one waits behind a long one, and none can wait for a thread that is never free.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple, Unpack

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

Args = TypeVarTuple("Args")
Result = TypeVar("Result")

_limiter: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("laneway_native threads")


async def run_sync(function: Callable[[Unpack[Args]], Result], *args: *Args) -> Result:
    """Run a function in a worker thread and return what it returns.  What has begun is waited for."""
    return await trio.to_thread.run_sync(function, *args, limiter=limiter_of(_limiter, math.inf))


def limiter_of(variable: trio.lowlevel.RunVar[trio.CapacityLimiter], threads: float) -> trio.CapacityLimiter:
    """The limiter that ``variable`` has in this ``trio.run``, made for so many threads on its first use."""
    try:
        return variable.get()
    except LookupError:
        limiter = trio.CapacityLimiter(threads)
        variable.set(limiter)
        return limiter
