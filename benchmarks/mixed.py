"""One long prompt is taken in while streams run: how long they have to wait, and what it costs the prompt.

    python -m benchmarks.mixed [--model smollm2] [--streams 7] [--prompt 4000] [--rounds 3]

Per round: the prompt alone, then the streams alone for a moment, then both.  What is looked at is the longest gap
between two tokens of one stream while the prompt is taken in, and the prompt's speed as a share of its speed alone.
The gap should stay below the chunk target plus one decode step plus 50 ms, the share above 0.7.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from pathlib import Path

import attrs
import trio

import laneway
from benchmarks import _machine
from benchmarks.ours import prompt_of
from laneway_plugins import completion

SLACK = 0.05
"""Seconds on top of chunk and step."""
LEAST_SHARE = 0.7


@attrs.frozen(kw_only=True)
class Round:
    """Seconds, and tokens a second."""

    idle_rate: float
    rate: float
    step: float
    """The median gap of a stream without the prompt: one decode step."""
    gap: float
    """The longest gap while the prompt was taken in."""
    gaps_99: float
    """99 of 100 gaps were shorter."""

    @property
    def share(self) -> float:
        """Of the speed alone."""
        return self.rate / self.idle_rate


class Streams:
    """Answers that go on until they are told to stop, and when each of their tokens came."""

    def __init__(self, model: laneway.Model) -> None:
        self._model = model
        self._no_end = dict.fromkeys(model.tokenizer.end_tokens, -math.inf)
        self._silent = 0
        self.all_begun = trio.Event()
        self.times: list[list[float]] = []

    async def run(self, prompt: str) -> None:
        """One stream."""
        times: list[float] = []
        self.times.append(times)
        self._silent += 1
        # With log-probabilities there is a delta for every token, also for one without text.
        async with completion.stream(
            self._model, prompt, temperature=0.0, logit_bias=self._no_end, logprobs=True
        ) as run:
            async for event in run:
                if isinstance(event, laneway.TextDelta):
                    self._silent -= not times
                    times.append(trio.current_time())
                    if not self._silent:
                        self.all_begun.set()

    def gaps(self, since: float, until: float) -> list[float]:
        """Between two tokens of a stream, the later one in the interval."""
        return [
            later - earlier
            for times in self.times
            for earlier, later in itertools.pairwise(times)
            if since < later <= until
        ]


async def seconds_to_first_text(model: laneway.Model, prompt: str) -> float:
    """How long the intake of a prompt takes, from its arrival."""
    began = trio.current_time()
    async with completion.stream(model, prompt, max_tokens=1, temperature=0.0) as run:
        async for _ in run:
            break
        return trio.current_time() - began


async def measure(model: laneway.Model, options: argparse.Namespace) -> Round:
    """One round."""
    prompt = await prompt_of(model, options.prompt, 1)
    idle = await seconds_to_first_text(model, prompt)
    streams = Streams(model)
    async with trio.open_nursery() as nursery:
        for text in [await prompt_of(model, 64, number) for number in range(options.streams)]:
            nursery.start_soon(streams.run, text)
        await streams.all_begun.wait()
        quiet = trio.current_time()
        await trio.sleep(1.0)
        began = trio.current_time()
        busy = await seconds_to_first_text(model, prompt)
        ended = trio.current_time()
        nursery.cancel_scope.cancel()
    gaps = sorted(streams.gaps(began, ended))
    return Round(
        idle_rate=options.prompt / idle,
        rate=options.prompt / busy,
        step=statistics.median(streams.gaps(quiet, began)),
        gap=gaps[-1],
        gaps_99=gaps[int(0.99 * (len(gaps) - 1))],
    )


async def main(options: argparse.Namespace) -> int:
    """Measure, print, and say by the exit status whether the targets are met."""
    slots = options.streams + 1
    window = options.prompt + 256
    async with laneway.open_engine() as engine:
        model = await engine.load_model(
            options.model,
            parallel=slots,
            context_size=slots * window,
            threads=options.threads,
            chunk_target=options.chunk_target,
            prefix_cache=False,  # the same prompt comes again and again
        )
        # Pages and caches are there from now on, and the speed of chunks is known.
        await seconds_to_first_text(model, await prompt_of(model, options.prompt, 0))
        rounds = []
        for number in range(options.rounds):
            load = _machine.load()
            rounds.append(done := await measure(model, options))
            print(
                f"round {number + 1}: prompt alone {done.idle_rate:.0f} tokens/s, beside {options.streams} streams "
                f"{done.rate:.0f} ({done.share:.2f}); longest gap {done.gap * 1000:.0f} ms (99%: "
                f"{done.gaps_99 * 1000:.0f}), a step without the prompt {done.step * 1000:.0f} ms; load {load}",
                flush=True,
            )

    figures: dict[str, float] = {
        name: statistics.median([getattr(done, name) for done in rounds])
        for name in ("idle_rate", "rate", "share", "step", "gap", "gaps_99")
    }
    figures["limit"] = limit = options.chunk_target + figures["step"] + SLACK
    print(
        f"medians: share {figures['share']:.2f} (at least {LEAST_SHARE}), longest gap {figures['gap'] * 1000:.0f} ms "
        f"(at most {limit * 1000:.0f})"
    )
    if options.json:
        document = {"machine": _machine.describe(), "medians": figures, "rounds": [attrs.asdict(one) for one in rounds]}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    missed = figures["share"] < LEAST_SHARE or figures["gap"] > limit
    return 1 if options.check and missed else 0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, default=7)
    parser.add_argument("--prompt", type=int, default=4000, help="tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--chunk-target", type=float, default=0.1)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--check", action="store_true", help="fail if a target is missed")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(trio.run(main, parse()))
