"""One process of the benchmark: the whole engine, from texts to texts, as a program would use it.

    python -m benchmarks.ours prepare MODEL SEQUENCES --prompts FILE ...    make prompts, say how the context is made
    python -m benchmarks.ours run MODEL SEQUENCES --prompts FILE ...        answer them, several times over

Prints one line of JSON.  ``benchmarks.engine`` starts it; how its figures are defined is said in docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path
from typing import Any

import attrs
import trio

import laneway
from laneway_plugins import completion

# Words that are one token each wherever they stand.
WORDS = "the of and to in is you that it he was for on are as with his they at be this have from or one had by".split()  # noqa: SIM905


async def prompt_of(model: laneway.Model, length: int, seed: int) -> str:
    """A text of exactly ``length`` tokens."""
    words = random.Random(seed)
    text = "Once"
    while (count := len(await model.tokenize(text))) < length:
        text += " " + words.choice(WORDS)
    if count != length:
        raise RuntimeError(f"a text of {length} tokens was wanted and one of {count} came out")
    return text


@attrs.frozen
class Mark:
    """Clocks and counters at one moment."""

    wall: float
    cpu: float
    """Of this thread, which runs the event loop."""
    counts: Any

    @classmethod
    def now(cls, model: laneway.Model) -> Mark:
        assert model.decode_loop is not None
        return cls(time.perf_counter(), time.thread_time(), model.decode_loop.statistics())


@attrs.frozen
class Job:
    """The figures of one job: all prompts answered side by side."""

    seconds: float
    prompt_seconds: float
    """Until every stream had its first text, without the decode steps in between."""
    decode_rate: float | None
    """Tokens a second while all streams were decoding; None if they never were."""
    outside_us: float | None
    """Microseconds a token that were not spent in native steps, in that time."""
    cpu_us: float | None
    """Microseconds a token of the event loop's processor time, in that time."""
    job_outside_us: float
    job_cpu_us: float
    """The same over the whole job."""


async def run_job(model: laneway.Model, prompts: list[str], generate: int, forbidden: dict[int, float]) -> Job:
    """Open a stream for every prompt and read all of them to the end."""
    waiting = len(prompts)
    all_begun: Mark | None = None
    one_ended: Mark | None = None

    async def answer(prompt: str) -> None:
        nonlocal waiting, all_begun, one_ended
        text = ""
        async with completion.stream(model, prompt, max_tokens=generate, temperature=0.0, logit_bias=forbidden) as run:
            async for event in run:
                if not text:
                    waiting -= 1
                    if not waiting:
                        all_begun = Mark.now(model)
                if isinstance(event, laneway.TextDelta):
                    text += event.text
                elif one_ended is None:
                    one_ended = Mark.now(model)
            result = await run.result()
        assert result.text == text
        assert len(result.tokens) == generate

    start = Mark.now(model)
    async with trio.open_nursery() as nursery:
        for prompt in prompts:
            nursery.start_soon(answer, prompt)
    end = Mark.now(model)
    assert all_begun is not None
    assert one_ended is not None

    tokens = len(prompts) * generate
    together = one_ended.counts.tokens - all_begun.counts.tokens
    outside, cpu = _outside(all_begun, one_ended)
    job_outside, job_cpu = _outside(start, end)
    return Job(
        seconds=end.wall - start.wall,
        prompt_seconds=all_begun.wall - start.wall - (all_begun.counts.decode_seconds - start.counts.decode_seconds),
        decode_rate=together / (one_ended.wall - all_begun.wall) if together > 0 else None,
        outside_us=outside / together * 1e6 if together > 0 else None,
        cpu_us=cpu / together * 1e6 if together > 0 else None,
        job_outside_us=job_outside / tokens * 1e6,
        job_cpu_us=job_cpu / tokens * 1e6,
    )


def _outside(since: Mark, until: Mark) -> tuple[float, float]:
    """Seconds that were not spent in native steps, and seconds of this thread's processor time."""
    native = until.counts.step_seconds - since.counts.step_seconds
    return until.wall - since.wall - native, until.cpu - since.cpu


async def main(options: argparse.Namespace) -> None:
    """Load the model, do as asked, print what came out."""
    sequences = options.sequences
    async with laneway.open_engine() as engine:
        model = await engine.load_model(
            options.model,
            parallel=sequences,
            context_size=options.window * sequences,
            threads=options.threads,
            poll=options.poll,
            kv_mode=options.kv_mode,
            prefix_cache=False,  # the same prompts come again and again
            flash_attention={"auto": None, "on": True, "off": False}[options.flash_attention],
        )
        if options.what == "prepare":
            texts = [await prompt_of(model, options.prompt, seed) for seed in range(sequences)]
            options.prompts.write_text(json.dumps(texts))
            lines = [" ".join(map(str, await model.tokenize(text))) for text in texts]
            options.prompts.with_suffix(".ids").write_text("\n".join(lines) + "\n")
            assert model.decode_loop is not None
            policy = model.decode_loop.decoder.policy
            # llama.cpp rounds up to multiples of 256: once, or for each sequence if each has cells of its own.
            stores = 1 if policy.unified_kv else sequences
            facts = {
                "path": model.metadata["path"],
                "vocabulary": model.tokenizer.size,
                "context": -(-options.window * sequences // stores // 256) * 256 * stores,
                "unified": policy.unified_kv,
                "whole_window": policy.unified_kv and sequences > 1,
                "flash_attention": policy.flash_attention,
            }
            print(json.dumps(facts))
            return
        prompts = json.loads(options.prompts.read_text())
        forbidden = dict.fromkeys(model.tokenizer.end_tokens, -math.inf)
        # Pages, caches and threads are there from now on, and the speed of prompts is known.
        await run_job(model, prompts, min(8, options.generate), forbidden)
        jobs = [await run_job(model, prompts, options.generate, forbidden) for _ in range(options.jobs)]
        print(json.dumps({"jobs": [attrs.asdict(job) for job in jobs]}))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["prepare", "run"])
    parser.add_argument("model")
    parser.add_argument("sequences", type=int)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON file of texts; token ids lie beside it")
    parser.add_argument("--prompt", type=int, default=160, help="tokens of a prompt")
    parser.add_argument("--generate", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--window", type=int, default=256, help="tokens that one slot holds")
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--poll", type=int, default=0)
    parser.add_argument("--kv-mode", choices=["split", "unified"])
    parser.add_argument("--flash-attention", choices=["auto", "on", "off"], default="auto")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    trio.run(main, parse())
