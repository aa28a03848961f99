"""Prompts that begin alike, taken in with and without sharing what they have in common.

    python -m benchmarks.prefix [--model smollm2] [--prompts 16] [--common 512] [--rest 32] [--rounds 5]

A round takes all prompts at once, from their arrival to the first token of the last one, in a model that shares
prefixes and in one that does not.  No two rounds have a token sequence in common, so nothing is left of the one before.
The ratio of the two should be at most 0.25.  Then a chat: the time to the first token of its second turn, with the
first one in memory, as a share of the time without.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from pathlib import Path
from typing import Any

import attrs
import trio

import laneway
from benchmarks import _machine

MOST = 0.25
"""Of the time without sharing."""

GREEDY = laneway.Sampling(temperature=0.0)


@attrs.frozen(eq=False)
class Prompts:
    """Token sequences that are asked for together."""

    tokens: list[list[int]]


async def _prepare(model: laneway.Model, request: Prompts) -> laneway.Prepared:
    for tokens in request.tokens:
        model.check_prompt(tokens)
    return laneway.Prepared(payload=request)


async def _first_tokens(ctx: laneway.RequestContext, prepared: laneway.Prepared) -> list[int]:
    """One token for each prompt; how many tokens of each were cached."""
    cached = []

    async def one(prompt: list[int]) -> None:
        async with ctx.generate(prompt, GREEDY, max_tokens=1) as tokens:
            answer = await tokens.finish()
        cached.append(answer.stats.cached_tokens)

    async with trio.open_nursery() as nursery:
        for tokens in prepared.payload.tokens:
            nursery.start_soon(one, tokens)
    return cached


PLUGIN = laneway.PluginSpec(
    name="prefix-benchmark",
    operations=(laneway.Operation(kind="first_tokens", request_type=Prompts, prepare=_prepare, handler=_first_tokens),),
)


async def take_in(engine: laneway.Engine, model: laneway.Model, prompts: list[list[int]]) -> tuple[float, int]:
    """Seconds, and tokens that were not computed."""
    began = trio.current_time()
    async with engine.run(model, "first_tokens", Prompts(prompts)) as run:
        cached = await run.result()
        return trio.current_time() - began, sum(cached)


async def main(options: argparse.Namespace) -> int:
    """Measure, print, and say by the exit status whether the target is met."""
    window = options.common + options.rest + 64
    tokens = random.Random(1)

    def fresh(count: int) -> list[int]:
        return [tokens.randrange(1000, 20_000) for _ in range(count)]

    def prompts() -> list[list[int]]:
        common = fresh(options.common)
        return [common + fresh(options.rest) for _ in range(options.prompts)]

    async with laneway.open_engine(plugins=[PLUGIN]) as engine:
        models = {
            shares: await engine.load_model(
                options.model,
                parallel=options.prompts,
                name=f"{options.model}-{shares}",
                context_size=options.prompts * window,
                threads=options.threads,
                prefix_cache=shares,
            )
            for shares in (True, False)
        }
        for model in models.values():
            await take_in(engine, model, prompts())  # pages are there, and the speed of chunks is known
        rounds: list[dict[str, Any]] = []
        for number in range(options.rounds):
            figures: dict[str, Any] = {"load": _machine.load()}
            # Taken in turns, so that neither always has the machine as the other leaves it.
            for shares in (True, False) if number % 2 else (False, True):
                asked = prompts()
                seconds, cached = await take_in(engine, models[shares], asked)
                turn = [asked[0] + fresh(options.rest)]
                second, _ = await take_in(engine, models[shares], turn)
                figures["shared" if shares else "alone"] = seconds
                figures["turn_shared" if shares else "turn_alone"] = second
                assert cached == (options.common * (options.prompts - 1) if shares else 0)
            rounds.append(figures)
            print(
                f"round {number + 1}: {options.prompts} prompts in {figures['shared']:.2f} s, without sharing in "
                f"{figures['alone']:.2f} s ({figures['shared'] / figures['alone']:.3f}); a second turn in "
                f"{figures['turn_shared'] * 1000:.0f} and {figures['turn_alone'] * 1000:.0f} ms; "
                f"load {figures['load']}",
                flush=True,
            )
    ratio = statistics.median([each["shared"] / each["alone"] for each in rounds])
    turn_ratio = statistics.median([each["turn_shared"] / each["turn_alone"] for each in rounds])
    print(f"medians: prompts {ratio:.3f} (at most {MOST}), second turn {turn_ratio:.3f}")
    if options.json:
        document = {"machine": _machine.describe(), "ratio": ratio, "turn_ratio": turn_ratio, "rounds": rounds}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if options.check and ratio > MOST else 0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--common", type=int, default=512, help="tokens that all begin with")
    parser.add_argument("--rest", type=int, default=32, help="tokens in which each differs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--check", action="store_true", help="fail if the target is missed")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(trio.run(main, parse()))
