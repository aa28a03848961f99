"""The whole engine with Laneway's attention against the whole engine with llama.cpp's, each way in turn.

    python -m benchmarks.kernels [--model smollm2] [--cases 1x160+64,8x500+64] [--rounds 3] [--json FILE] [--check]

A case is so many requests of prompt + generated tokens each, answered side by side: texts in, texts out.  llama.cpp's
attention is tried in each of its modes (cells split or unified, flash attention on or off), its fastest counts; ours
runs as the engine chooses.  Every run is a process of its own, and they take turns, so that what else the machine does
hits all of them.  Figures are medians over rounds; the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import attrs

from benchmarks import _machine

LEAST_ELSEWHERE = 0.98
"""What another model than SmolLM2 must have of llama.cpp's best, in every case."""
LEAST = {"1x160+64": 1.10, "4x160+64": 1.18, "8x160+64": 1.18, "16x160+64": 1.18, "32x160+64": 1.2}
"""All-in tokens a second over llama.cpp's best."""
LEAST_DECODE = {"8x500+64": 1.2}
"""The same for decoding alone."""


@attrs.frozen
class Way:
    """How the engine attends."""

    name: str
    ours: bool
    options: tuple[str, ...]


WAYS = (
    Way("ours", True, ()),
    Way("llama.cpp, split", False, ("--kv-mode", "split", "--flash-attention", "off")),
    Way("llama.cpp, split, flash", False, ("--kv-mode", "split", "--flash-attention", "on")),
    Way("llama.cpp, unified", False, ("--kv-mode", "unified", "--flash-attention", "off")),
    Way("llama.cpp, unified, flash", False, ("--kv-mode", "unified", "--flash-attention", "on")),
)


@attrs.frozen
class Case:
    """So many requests of so many tokens."""

    sequences: int
    prompt: int
    generate: int

    @classmethod
    def parse(cls, text: str) -> Case:
        sequences, rest = text.split("x")
        prompt, generate = rest.split("+")
        return cls(int(sequences), int(prompt), int(generate))

    def __str__(self) -> str:
        return f"{self.sequences}x{self.prompt}+{self.generate}"


def ask(what: str, model: str, case: Case, prompts: Path, way: Way, jobs: int) -> Any:
    """One process of the engine's benchmark; what it printed."""
    command = [sys.executable, "-m", "benchmarks.ours", what, model, str(case.sequences), "--prompts", str(prompts)]
    command += ["--prompt", str(case.prompt), "--generate", str(case.generate), "--jobs", str(jobs)]
    command += ["--window", str(-(-(case.prompt + case.generate) // 32) * 32), *way.options]
    environment = {**os.environ, "LANEWAY_ATTENTION": "1" if way.ours else "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def measure(model: str, case: Case, rounds: int, jobs: int, folder: Path) -> dict[str, dict[str, float]]:
    """Each way's medians over rounds: all-in and decode tokens a second."""
    prompts = folder / f"{case}.json"
    ask("prepare", model, case, prompts, WAYS[0], 1)
    seen: dict[str, list[tuple[float, float]]] = {way.name: [] for way in WAYS}
    for number in range(rounds):
        for place in range(len(WAYS)):
            way = WAYS[(place + number) % len(WAYS)]
            done = ask("run", model, case, prompts, way, jobs)["jobs"]
            seconds = statistics.median(job["seconds"] for job in done)
            rates = [job["decode_rate"] for job in done if job["decode_rate"] is not None]
            decode = statistics.median(rates) if rates else 0.0
            seen[way.name].append((case.sequences * case.generate / seconds, decode))
    return {
        name: {
            "all_in": statistics.median(all_in for all_in, _ in figures),
            "decode": statistics.median(decode for _, decode in figures),
        }
        for name, figures in seen.items()
    }


def ratio(ways: dict[str, dict[str, float]], figure: str) -> float:
    """Ours over the best of the others."""
    return ways["ours"][figure] / max(values[figure] for name, values in ways.items() if name != "ours")


def main(options: argparse.Namespace) -> int:
    """Measure, print, write; 1 if a target is missed and that matters."""
    results: dict[str, dict[str, dict[str, float]]] = {}
    loads = [os.getloadavg()[0]]
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        for case in map(Case.parse, options.cases.split(",")):
            ways = results[str(case)] = measure(options.model, case, options.rounds, options.jobs, Path(folder))
            loads.append(os.getloadavg()[0])
            print(f"{case}: all in {ratio(ways, 'all_in'):.2f}, decode {ratio(ways, 'decode'):.2f} of llama.cpp's best")
            for name, figures in ways.items():
                print(f"    {name:26s}{figures['all_in']:8.0f}{figures['decode']:8.0f} tokens/s")
            sys.stdout.flush()
            least_all_in = LEAST.get(str(case)) if options.model == "smollm2" else LEAST_ELSEWHERE
            for figure, least in (("all_in", least_all_in), ("decode", LEAST_DECODE.get(str(case)))):
                if least is not None and ratio(ways, figure) < least:
                    missed.append(f"{case}: {figure} is {ratio(ways, figure):.2f}, {least} is wanted")
    print(f"load average {min(loads):.1f} to {max(loads):.1f}")
    for line in missed:
        print(f"missed: {line}")
    if options.json:
        facts = {"model": options.model, "machine": _machine.describe(), "cases": results}
        Path(options.json).write_text(json.dumps(facts, indent=1) + "\n")
    return 1 if missed and options.check else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--cases", default=",".join([*LEAST, *LEAST_DECODE]))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json")
    parser.add_argument("--check", action="store_true", help="fail if a target is missed")
    sys.exit(main(parser.parse_args()))
