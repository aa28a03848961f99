"""Many requests, most of which are cancelled somewhere on their way, and what they leave behind: nothing.

    python -m benchmarks.soak [--model smollm2] [--requests 1000] [--rounds 5]

Requests of random lengths come eight at a time more than there are slots.  By lot each is answered to its end, or
cancelled by its id or by its scope, or left by its caller, while it waits, at its first text or in the middle of it.
After each round nothing runs, and this prints how much memory the process holds, its threads and Python's objects.  The
first round warms up; what grows after it is a leak.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import math
import os
import random
import sys
from pathlib import Path
from typing import Any

import attrs
import trio

import laneway
from laneway_plugins import completion

FATES = ("answered", "read", "cancelled by id", "cancelled by scope", "left", "cancelled early")


@attrs.frozen
class Footprint:
    """What a process holds at rest."""

    resident: int
    """Bytes; 0 where the system does not tell."""
    threads: int
    objects: int
    """That Python's garbage collector knows of."""
    tasks: int
    """Of Trio's run."""

    @classmethod
    def now(cls) -> Footprint:
        gc.collect()
        _trim()
        return cls(_resident(), _threads(), len(gc.get_objects()), trio.lowlevel.current_statistics().tasks_living)


def _resident() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 0


def _trim() -> None:
    """Let the C library give back what it keeps for later, or its hoard would look like a leak."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):  # another C library
        return


class Soak:
    """Requests on one model, drawn from a seeded source of chance."""

    def __init__(self, model: laneway.Model, seed: int, *, longest_prompt: int, longest_answer: int) -> None:
        self.fates = dict.fromkeys(FATES, 0)
        self._model = model
        self._chance = random.Random(seed)
        self._longest_prompt = longest_prompt
        self._longest_answer = longest_answer
        self._no_end = dict.fromkeys(model.tokenizer.end_tokens, -math.inf)

    async def round(self, requests: int) -> None:
        """So many requests, some more at a time than the model has slots."""
        left = iter(range(requests))

        async def caller() -> None:
            for _ in left:
                await self.request()

        async with trio.open_nursery() as nursery:
            for _ in range(self._model.parallel + 8):
                nursery.start_soon(caller)

    async def request(self) -> None:
        """One request and its fate."""
        chance = self._chance
        fate = chance.choice(FATES)
        patience = chance.randrange(self._longest_answer)
        prompt = "x" + " of" * chance.randrange(self._longest_prompt)
        fields: dict[str, Any] = {
            "max_tokens": 1 + chance.randrange(self._longest_answer),
            "temperature": chance.choice([0.0, 0.8]),
            "logit_bias": self._no_end,
            "stop": ["zz"] if chance.random() < 0.3 else [],
            "logprobs": chance.random() < 0.2,
        }
        with trio.CancelScope() as scope:
            try:
                async with completion.stream(self._model, prompt, **fields) as run:
                    if fate == "answered":
                        await run.result()
                    elif fate == "cancelled early":
                        self._model.engine.cancel(run.request_id)
                    else:
                        await self._read(run, scope, fate, patience)
            except laneway.InferenceCancelledError:
                assert fate in ("cancelled by id", "cancelled early")
        self.fates[fate] += 1

    async def _read(self, run: laneway.Run, scope: trio.CancelScope, fate: str, patience: int) -> None:
        async for _ in run:
            patience -= 1
            if patience > 0 or fate == "read":
                continue
            if fate == "left":
                return
            if fate == "cancelled by scope":
                scope.cancel()
            else:
                self._model.engine.cancel(run.request_id)

    def check_rest(self) -> None:
        """Nothing lives: no request, no permit, no slot, no sequence, and no cells but those that are kept to share."""
        snapshot = self._model.engine.snapshot().model(self._model.name)
        assert all(lane.used == 0 and not lane.waiting for lane in snapshot.lanes), snapshot
        assert snapshot.sequences == snapshot.slot_waiters == 0, snapshot
        loop = self._model.decode_loop
        assert loop is not None
        assert loop.scheduler.idle, loop.scheduler
        for slot in range(loop.decoder.slots):
            kept = len(loop.scheduler.kept.get(slot, ()))
            length = loop.decoder.length(slot)  # type: ignore[attr-defined]
            assert length == kept, (slot, length, kept)


async def main(options: argparse.Namespace) -> int:
    """Run the rounds; 1 if something was left behind."""
    async with laneway.open_engine() as engine:
        model = await engine.load_model(options.model, parallel=4, context_size=4 * 512, queue_limit=64)
        soak = Soak(model, options.seed, longest_prompt=200, longest_answer=48)
        marks = []
        for number in range(options.rounds + 1):
            began = trio.current_time()
            await soak.round(options.requests)
            soak.check_rest()
            marks.append(mark := Footprint.now())
            print(
                f"{'warm-up' if not number else f'round {number}'}: {mark.resident / 2**20:.1f} MiB, "
                f"{mark.threads} threads, {mark.objects} objects, {mark.tasks} tasks, "
                f"{trio.current_time() - began:.1f} s",
                flush=True,
            )
        print(", ".join(f"{count} {fate}" for fate, count in soak.fates.items()))
        first, last = marks[0], marks[-1]
        grown = last.resident - first.resident
        print(f"grown by {grown / 2**20:.2f} MiB over {options.rounds * options.requests} requests")
        leaked = grown > options.most_mib * 2**20 or last.threads > first.threads or last.tasks > first.tasks
    return 1 if leaked else 0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=1000, help="of one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--most-mib", type=float, default=4.0, help="growth from which it counts as a leak")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(trio.run(main, parse()))
