"""What the engine adds to a request: arrival, id, lane, task, outcome and end, with a handler that does nothing.

    python -m benchmarks.registry [--check] [--json FILE]

Three things, on a scripted decoder that nobody asks for anything:

- an uncontended request from the call to its result and out of its block, in microseconds of wall and processor time
- 64 waiters behind one: that they are granted in the order of their arrival, and what each takes
- a storm: 2,000 requests, of which 4 run and the others wait, all cancelled at once

Figures are the best of several windows: the others measured what else the machine was doing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import attrs
import trio

import laneway
from benchmarks import _machine
from laneway.testing import ScriptedLoader

MOST_US = 150.0
"""For an uncontended request."""
WINDOWS = 15
REQUESTS = 400
"""Of one window."""
WAITERS = 64
STORM = 2_000


@attrs.frozen
class Nothing:
    """A request whose handler returns at once, or when ``until`` is set."""

    until: trio.Event | None = None
    admitted: list[int] | None = None
    number: int = 0


async def _prepare(model: laneway.Model, request: Nothing) -> laneway.Prepared:
    return laneway.Prepared(payload=request)


async def _handle(ctx: laneway.RequestContext, prepared: laneway.Prepared) -> None:
    request: Nothing = prepared.payload
    if request.admitted is not None:
        request.admitted.append(request.number)
    if request.until is not None:
        await request.until.wait()


PLUGIN = laneway.PluginSpec(
    name="nothing",
    operations=(laneway.Operation(kind="nothing", request_type=Nothing, prepare=_prepare, handler=_handle),),
)


async def uncontended(engine: laneway.Engine, model: laneway.Model) -> dict[str, float]:
    """One request after another; microseconds each."""
    request = Nothing()
    wall = cpu = float("inf")
    for _ in range(WINDOWS):
        began, began_cpu = time.perf_counter(), time.thread_time()
        for _ in range(REQUESTS):
            async with engine.run(model, "nothing", request) as run:
                await run.result()
        wall = min(wall, (time.perf_counter() - began) / REQUESTS)
        cpu = min(cpu, (time.thread_time() - began_cpu) / REQUESTS)
    return {"wall_us": wall * 1e6, "cpu_us": cpu * 1e6}


class Crowd:
    """Requests that are all under way at once."""

    def __init__(self, engine: laneway.Engine, model: laneway.Model) -> None:
        self.admitted: list[int] = []
        self.cancelled = 0
        self._engine = engine
        self._model = model

    async def one(
        self, number: int, until: trio.Event | None, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Tell that it has arrived, and wait for its end."""
        async with self._engine.run(self._model, "nothing", Nothing(until, self.admitted, number)) as run:
            task_status.started()
            try:
                await run.result()
            except laneway.InferenceCancelledError:
                self.cancelled += 1


async def waiters(engine: laneway.Engine, model: laneway.Model) -> dict[str, Any]:
    """Waiters behind one that holds the only permit; microseconds each, from its leaving to the last one's end."""
    best, in_order = float("inf"), True
    for _ in range(WINDOWS):
        crowd, leave = Crowd(engine, model), trio.Event()
        async with trio.open_nursery() as nursery:
            await nursery.start(crowd.one, 0, leave)
            for number in range(1, WAITERS + 1):
                await nursery.start(crowd.one, number, None)
            began = time.perf_counter()
            leave.set()
        best = min(best, (time.perf_counter() - began) / (WAITERS + 1))
        in_order = in_order and crowd.admitted == list(range(WAITERS + 1))
    return {"wall_us": best * 1e6, "in_order": in_order}


async def storm(engine: laneway.Engine, model: laneway.Model) -> dict[str, Any]:
    """Everything is cancelled at once; microseconds each, for the call and until all have ended."""
    call = end = float("inf")
    for _ in range(3):
        crowd, never = Crowd(engine, model), trio.Event()
        async with trio.open_nursery() as nursery:
            for number in range(STORM):
                await nursery.start(crowd.one, number, never)
            began = time.perf_counter()
            assert engine.cancel_all(model=model) == STORM
            call = min(call, (time.perf_counter() - began) / STORM)
        end = min(end, (time.perf_counter() - began) / STORM)
        assert crowd.cancelled == STORM
        assert model.lanes.idle
    return {"call_us": call * 1e6, "wall_us": end * 1e6}


async def main(options: argparse.Namespace) -> int:
    """Measure, print, and say by the exit status whether the targets are met."""
    loader = ScriptedLoader()
    async with laneway.open_engine(plugins=[loader.plugin, PLUGIN]) as engine:
        narrow = await engine.load_model("scripted:narrow", parallel=1, queue_limit=WAITERS)
        wide = await engine.load_model("scripted:wide", parallel=4, queue_limit=STORM)
        figures: dict[str, dict[str, Any]] = {
            "uncontended": await uncontended(engine, wide),
            "waiters": await waiters(engine, narrow),
            "storm": await storm(engine, wide),
        }
    alone, line, all_off = figures.values()
    print(f"uncontended request: {alone['wall_us']:.0f} us, {alone['cpu_us']:.0f} us of processor time")
    order = "in the order of arrival" if line["in_order"] else "OUT OF ORDER"
    print(f"{WAITERS} waiters behind one: granted {order}, {line['wall_us']:.0f} us each")
    call, end = all_off["call_us"], all_off["wall_us"]
    print(f"{STORM:,} cancelled at once: {call:.1f} us each in the call, {end:.0f} us until all have ended")
    if options.json:
        document = {"machine": _machine.describe(), "load": _machine.load(), "figures": figures}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    missed = alone["wall_us"] > MOST_US or not line["in_order"]
    return 1 if options.check and missed else 0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if a target is missed")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(trio.run(main, parse()))
