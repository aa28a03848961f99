"""A conversation is resumed from disk: how long until its first token, and how much of it is reading.

    python -m benchmarks.kvcache [--model smollm2] [--tokens 2000] [--rounds 3]

Per round: a turn that makes a conversation of so many tokens and commits it; then, each in an engine of its own with
nothing in memory, the next turn without a cache and with it.  What is looked at is the time to the first token of the
latter as a share of the former, which should be at most 0.1.  Whether both gave the same tokens is told: a quantised
model may round otherwise where its chunks have other sizes.  The file lies in the system's page cache, as that of a
conversation that goes on mostly does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import trio

import laneway
from benchmarks import _machine
from benchmarks.ours import prompt_of
from laneway._sources import parse_source
from laneway_plugins import completion

TARGET = 0.1


@attrs.frozen(kw_only=True)
class Round:
    """Seconds, bytes and tokens."""

    cold: float
    """To the first token, all of the prompt computed."""
    warm: float
    """To the first token, with the file."""
    commit: float
    """From the answer's last token until its file is durable."""
    size: int
    prompt: int
    cached: int
    same: bool

    @property
    def share(self) -> float:
        """Of the cold time."""
        return self.warm / self.cold


@asynccontextmanager
async def load(options: argparse.Namespace, cache_dir: Path) -> AsyncIterator[laneway.Model]:
    """A model in an engine of its own."""
    # The cache directory is one of its own, so a model's name is looked up first.
    path = parse_source(options.model).path
    assert path is not None, "a model in a file"
    async with laneway.open_engine(cache_dir=cache_dir) as engine:
        model = await engine.load_model(path, context_size=options.tokens + 512, threads=options.threads)
        # Pages and threads are there from now on, and the speed of chunks is known.
        await completion.complete(model, await prompt_of(model, 128, 99), max_tokens=4)
        yield model


async def measure(options: argparse.Namespace, seed: int) -> Round:
    """One round."""
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        top = Path(directory)
        async with load(options, top) as model:
            messages = [{"role": "user", "content": await prompt_of(model, options.tokens - 60, seed)}]
            async with completion.stream(
                model, messages, kv_cache="talk", max_tokens=24, temperature=0.0, logprobs=True
            ) as run:
                answered = trio.current_time()
                async for event in run:
                    # With log-probabilities there is a delta for every token, also for one without text.
                    if isinstance(event, laneway.TextDelta):
                        answered = trio.current_time()
                first = await run.result()
                committed = trio.current_time()
            (entry,) = await model.engine.kv_caches.list()
        stats = first.stats
        assert stats.cache is not None, "a cache was asked for"
        assert stats.cache.ended == "commit", stats.cache.reason
        messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "Say more."}]

        async def next_turn(kv_cache: str | None) -> completion.Completion:
            async with load(options, top) as model:
                return await completion.complete(model, messages, kv_cache=kv_cache, max_tokens=16, temperature=0.0)

        cold, warm = await next_turn(None), await next_turn("talk")
        assert cold.stats.time_to_first_token is not None
        assert warm.stats.time_to_first_token is not None
        return Round(
            cold=cold.stats.time_to_first_token,
            warm=warm.stats.time_to_first_token,
            commit=committed - answered,
            size=entry.bytes,
            prompt=warm.stats.prompt_tokens,
            cached=warm.stats.cached_tokens,
            same=cold.tokens == warm.tokens,
        )


async def main(options: argparse.Namespace) -> int:
    """Measure, print, and say by the exit status whether the target is met."""
    rounds = []
    for number in range(options.rounds):
        load = _machine.load()
        rounds.append(done := await measure(options, number))
        print(
            f"round {number + 1}: first token after {done.warm * 1000:.0f} ms instead of {done.cold * 1000:.0f} "
            f"({done.share:.3f}); {done.cached} of {done.prompt} tokens from a file of {done.size / 1e6:.1f} MB, "
            f"written in {done.commit * 1000:.0f} ms; {'the same' if done.same else 'other'} tokens; load {load}",
            flush=True,
        )
    share = statistics.median(done.share for done in rounds)
    print(f"median: {share:.3f} (at most {TARGET})")
    if options.json:
        document = {"machine": _machine.describe(), "share": share, "rounds": [attrs.asdict(one) for one in rounds]}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if options.check and share > TARGET else 0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=2000, help="of the conversation")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--directory", type=Path, help="where the caches are made; a temporary one by default")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--check", action="store_true", help="fail if the target is missed")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(trio.run(main, parse()))
