"""Laneway's attention against llama.cpp's, on one library in one process.

    python -m benchmarks.attention MODEL [--counts 1,4,8] [--prompt 160] [--generate 64] [--rounds 3] [--json FILE]

A job is K prompts, one call each, and then K sequences that decode together, greedily.  Each way of running it takes
its turn in each round, so that what else the machine does hits all of them; the medians of the rounds are compared.
``--cpu`` counts the process's processor time instead, with one thread: what other programs take does not count then.
"all in" is generated tokens over the whole job's seconds.  "one of 16" is the step of a single sequence while fifteen
other slots are full and idle, over its step when it is alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import trio

from laneway.decoder import Chunk, Sampling, StepBatch
from laneway_native import LlamaDecoder, Model, has_attention_kernel, use_attention_kernel
from laneway_native._policy import KvMode


@attrs.frozen
class Way:
    """One way to run a job."""

    name: str
    ours: bool
    kv_mode: KvMode
    flash_attention: bool


WAYS = (
    Way("stock, split", ours=False, kv_mode="split", flash_attention=False),
    Way("stock, split, flash", ours=False, kv_mode="split", flash_attention=True),
    Way("stock, unified, flash", ours=False, kv_mode="unified", flash_attention=True),
    Way("ours, split", ours=True, kv_mode="split", flash_attention=True),
    Way("ours, unified", ours=True, kv_mode="unified", flash_attention=True),
)


@attrs.frozen
class Job:
    """Seconds that a job took."""

    prefill: float
    decode: float


class Stepper:
    """A decoder whose steps are timed, by the wall or by the process's processor time."""

    def __init__(self, decoder: LlamaDecoder, *, cpu: bool) -> None:
        self.decoder = decoder
        self._cpu = cpu

    async def step(self, *chunks: Chunk) -> tuple[Mapping[int, int], float]:
        """The tokens and the seconds."""
        began = time.process_time()
        result = await self.decoder.step(StepBatch(chunks))
        return result.tokens, time.process_time() - began if self._cpu else result.seconds

    async def start(self, slot: int, prompt: Sequence[int]) -> tuple[int, float]:
        """Take in a prompt: the first token and the seconds."""
        self.decoder.open(slot, Sampling(temperature=0.0), prompt)
        seconds, token = 0.0, -1
        for position in range(0, len(prompt), 512):
            tokens, more = await self.step(Chunk(slot, position, prompt[position : position + 512], True))
            seconds += more
            token = tokens[slot]
        return token, seconds


async def run_job(stepper: Stepper, prompts: Sequence[Sequence[int]], generate: int) -> Job:
    """All prompts, then all sequences in lockstep; the slots are empty before and after."""
    last: list[int] = []
    prefill = decode = 0.0
    for slot, prompt in enumerate(prompts):
        token, seconds = await stepper.start(slot, prompt)
        last.append(token)
        prefill += seconds
    for step in range(generate - 1):
        chunks = [Chunk(slot, len(prompts[slot]) + step, [token], True) for slot, token in enumerate(last)]
        tokens, seconds = await stepper.step(*chunks)
        decode += seconds
        last = [tokens[slot] for slot in range(len(last))]
    for slot in range(len(prompts)):
        stepper.decoder.drop(slot)
    return Job(prefill, decode)


async def one_among(stepper: Stepper, prompts: Sequence[Sequence[int]], steps: int) -> float:
    """Median seconds of a step of the last slot while the others are full."""
    token = slot = 0
    for slot, prompt in enumerate(prompts):
        token, _ = await stepper.start(slot, prompt)
    seconds = []
    for step in range(steps):
        tokens, more = await stepper.step(Chunk(slot, len(prompts[slot]) + step, [token], True))
        token = tokens[slot]
        seconds.append(more)
    for number in range(len(prompts)):
        stepper.decoder.drop(number)
    return statistics.median(seconds)


def made_prompts(model: Model, count: int, length: int) -> list[list[int]]:
    """Different prompts of one length."""
    words = ["the", "lane", "was", "quiet", "and", "the", "boats", "went", "down", "to", "the", "sea", "while"]
    made = []
    for number in range(count):
        text = " ".join(words[(i * (number + 2) + number) % len(words)] for i in range(2 * length))
        made.append(model.tokenize(text)[:length])
    return made


async def measure_jobs(model: Model, counts: Sequence[int], ways: Sequence[Way], options: argparse.Namespace) -> Any:
    """{K: {way: {"all_in": tokens/s, "prefill": tokens/s, "decode": tokens/s}}}."""
    table: dict[int, dict[str, dict[str, float]]] = {}
    window = options.prompt + options.generate
    for count in counts:
        prompts = made_prompts(model, count, options.prompt)
        jobs: dict[str, list[Job]] = {way.name: [] for way in ways}
        decoders: dict[str, LlamaDecoder] = {}
        for way in ways:
            use_attention_kernel(way.ours)
            decoders[way.name] = LlamaDecoder(
                model,
                context_size=count * window,
                parallel=count,
                threads=options.threads,
                poll=50,
                kv_mode=way.kv_mode,
                flash_attention=way.flash_attention,
            )
        for round_ in range(options.rounds + 1):
            for way in ways:
                use_attention_kernel(way.ours)
                job = await run_job(Stepper(decoders[way.name], cpu=options.cpu), prompts, options.generate)
                if round_ > 0:
                    jobs[way.name].append(job)
        for decoder in decoders.values():
            await decoder.aclose()
        table[count] = {}
        for way in ways:
            prefill = statistics.median(job.prefill for job in jobs[way.name])
            decode = statistics.median(job.decode for job in jobs[way.name])
            whole = statistics.median(job.prefill + job.decode for job in jobs[way.name])
            table[count][way.name] = {
                "all_in": count * options.generate / whole,
                "prefill": count * options.prompt / prefill,
                "decode": count * (options.generate - 1) / decode,
            }
        show(count, table[count])
    return table


def show(count: int, rows: dict[str, dict[str, float]]) -> None:
    """One K's rows, and ours over the stock library's best."""
    print(f"K={count:<4d}{'all in':>28s}{'prefill':>10s}{'decode':>10s}   tokens/s")
    for name, row in rows.items():
        print(f"  {name:24s}{row['all_in']:8.0f}{row['prefill']:10.0f}{row['decode']:10.0f}")
    for name, row in rows.items():
        if name.startswith("ours"):
            ratios = [
                row[figure] / max(other[figure] for key, other in rows.items() if key.startswith("stock"))
                for figure in ("all_in", "prefill", "decode")
            ]
            print(f"  {name + ' / best stock':24s}{ratios[0]:8.2f}{ratios[1]:10.2f}{ratios[2]:10.2f}")
    sys.stdout.flush()


async def measure_one_among(model: Model, options: argparse.Namespace) -> dict[str, float]:
    """Seconds of a step: alone, and among 16 filled slots, in unified mode with our attention."""
    use_attention_kernel(True)
    window = options.prompt + options.generate
    async with LlamaDecoder(
        model,
        context_size=16 * window,
        parallel=16,
        threads=options.threads,
        poll=50,
        kv_mode="unified",
        flash_attention=True,
    ) as decoder:
        prompts = made_prompts(model, 16, options.prompt)
        stepper = Stepper(decoder, cpu=options.cpu)
        alone, among = [], []
        for _ in range(options.rounds):
            alone.append(await one_among(stepper, prompts[:1], options.generate))
            among.append(await one_among(stepper, prompts, options.generate))
    figures = {"alone": statistics.median(alone), "among": statistics.median(among)}
    print(
        f"one of 16: {figures['among'] * 1e3:.2f} ms a step, alone {figures['alone'] * 1e3:.2f} ms, "
        f"ratio {figures['among'] / figures['alone']:.3f}"
    )
    return figures


async def main(options: argparse.Namespace) -> int:
    if not has_attention_kernel():
        print("this build of laneway has no attention kernel of its own", file=sys.stderr)
        return 1
    counts = [int(count) for count in options.counts.split(",")]
    ways = [way for way in WAYS if not options.ways or any(part in way.name for part in options.ways.split(";"))]
    with Model.load(options.model) as model:
        print(
            f"{Path(options.model).name}, {options.prompt} + {options.generate} tokens, {options.threads} threads, "
            f"load {os.getloadavg()[0]:.1f}"
        )
        jobs = await measure_jobs(model, counts, ways, options)
        among = await measure_one_among(model, options)
        print(f"load {os.getloadavg()[0]:.1f}")
    if options.json:
        await trio.Path(options.json).write_text(json.dumps({"jobs": jobs, "one_among_16": among}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--counts", default="1,4,8,16,32")
    parser.add_argument("--prompt", type=int, default=160)
    parser.add_argument("--generate", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ways", default="", help="parts of names, between semicolons; all if empty")
    parser.add_argument("--json", default="")
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args()
    if given.cpu:
        given.threads = 1
    sys.exit(trio.run(main, given))
