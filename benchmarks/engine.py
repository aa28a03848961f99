"""The whole engine against a bare C loop and llama.cpp's own benchmark, in one run.

    make bench                                    all of it; minutes
    make bench BENCH_ARGS=--quick                 a short look
    python -m benchmarks --models smollm2 --sequences 1,4,16 --rounds 5 --json FILE

Three programs do the same job on the same shared libraries: so many prompts of 160 tokens, 64 tokens of answer each.

- ours: one ``completion.stream`` a prompt, all of them read to the end; texts in, texts out
- bare: benchmarks/bare_loop.cpp, one ``llama_decode`` a prompt, then lockstep, the largest logit each
- llama.cpp: ``llama-batched-bench``, all prompts in one call, then lockstep, no token picked

They take turns, each a process of its own, for several rounds, each round in another order; figures are medians over
rounds, ratios medians of the ratios within a round.  docs/benchmarks.md says what each figure means.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks import _machine

PROGRAMS = ("ours", "bare", "llama.cpp")
MODELS = ("smollm2", "gemma3-270m")
SEQUENCES = (1, 2, 4, 8, 16, 32)

LEAST_RATIO = 0.97
"""Of the bare loop's speed, at up to 16 sequences: decode and whole job."""
MOST_OUTSIDE_US = {49_152: 30.0, 262_144: 60.0}
"""Microseconds a token outside the native step, at 4 sequences and more, by size of the vocabulary."""


@attrs.frozen(kw_only=True)
class Setting:
    """What all programs are given."""

    model: str
    sequences: int
    prompt: int
    generate: int
    window: int
    threads: int
    poll: int
    kv_mode: str | None
    flash_attention: str


@attrs.frozen(kw_only=True)
class Sample:
    """One process of one program: medians over its jobs."""

    prompt_rate: float
    """Tokens a second."""
    decode_rate: float | None
    """Tokens a second while all sequences decode; None if that never happened."""
    seconds: float
    """The whole job."""
    memory_mib: float
    """The most that was resident, the mapped model included."""
    outside_us: float | None = None
    cpu_us: float | None = None
    job_outside_us: float | None = None
    job_cpu_us: float | None = None


class ProgramError(Exception):
    """A program did not do its job."""


def start(command: Sequence[str | Path], environment: dict[str, str] | None = None) -> tuple[str, float]:
    """Run a program; what it printed, and the most memory that it had resident, in MiB."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdout=out,
            stderr=errors,
            cwd=_machine.ROOT,
            env={**os.environ, **(environment or {})},
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        errors.seek(0)
        if process.returncode != 0:
            last = errors.read().strip().splitlines()[-3:]
            raise ProgramError(f"{Path(command[0]).name} ended with status {process.returncode}: {' | '.join(last)}")
        unit = 1024 if sys.platform != "darwin" else 1024 * 1024  # kilobytes, but bytes on macOS
        return out.read(), usage.ru_maxrss / unit


class Case:
    """One setting, ready to be run by each program."""

    def __init__(self, setting: Setting, programs: Path, libraries: Path, folder: Path) -> None:
        self.setting = setting
        self._programs = programs
        # The very files that the engine loads, not their twins in the build folder.
        self._environment = {"LD_LIBRARY_PATH": str(libraries), "DYLD_LIBRARY_PATH": str(libraries)}
        self._prompts = folder / f"{setting.model}-{setting.sequences}.json"
        self.facts: dict[str, Any] = json.loads(self._ours("prepare", 1)[0])

    def _ours(self, what: str, jobs: int) -> tuple[str, float]:
        setting = self.setting
        command: list[str | Path] = [sys.executable, "-m", "benchmarks.ours", what, setting.model]
        command += [str(setting.sequences), "--prompts", self._prompts, "--prompt", str(setting.prompt)]
        command += ["--generate", str(setting.generate), "--window", str(setting.window), "--jobs", str(jobs)]
        command += ["--threads", str(setting.threads), "--poll", str(setting.poll)]
        command += ["--flash-attention", setting.flash_attention]
        command += ["--kv-mode", setting.kv_mode] if setting.kv_mode else []
        return start(command)

    def run(self, program: str, jobs: int) -> Sample:
        """One process of one program."""
        if program == "ours":
            return self._run_ours(jobs)
        return self._run_bare(jobs) if program == "bare" else self._run_batched_bench(jobs)

    def _run_ours(self, jobs: int) -> Sample:
        text, memory = self._ours("run", jobs)
        done = json.loads(text)["jobs"]
        prompts = self.setting.sequences * self.setting.prompt
        return Sample(
            prompt_rate=prompts / median(job["prompt_seconds"] for job in done),
            decode_rate=median_or_none(job["decode_rate"] for job in done),
            seconds=median(job["seconds"] for job in done),
            memory_mib=memory,
            outside_us=median_or_none(job["outside_us"] for job in done),
            cpu_us=median_or_none(job["cpu_us"] for job in done),
            job_outside_us=median(job["job_outside_us"] for job in done),
            job_cpu_us=median(job["job_cpu_us"] for job in done),
        )

    def _run_bare(self, jobs: int) -> Sample:
        setting, facts = self.setting, self.facts
        command: list[str | Path] = [self._programs / "bare_loop", facts["path"], self._prompts.with_suffix(".ids")]
        options = {
            "context": facts["context"],
            "generate": setting.generate,
            "jobs": jobs,
            "threads": setting.threads,
            "poll": setting.poll,
            "unified": facts["unified"],
            "whole-window": facts["whole_window"],
            "flash-attention": facts["flash_attention"],
        }
        for name, value in options.items():
            command += [f"--{name}", str(int(value))]
        text, memory = start(command, self._environment)
        done = json.loads(text)["jobs"]
        # The first token of an answer comes with its prompt.
        decoded = setting.sequences * (setting.generate - 1)
        return Sample(
            prompt_rate=setting.sequences * setting.prompt / median(job["prompt_seconds"] for job in done),
            decode_rate=decoded / median(job["decode_seconds"] for job in done),
            seconds=median(job["seconds"] for job in done),
            memory_mib=memory,
        )

    def _run_batched_bench(self, jobs: int) -> Sample:
        setting, facts = self.setting, self.facts
        command: list[str | Path] = [self._programs / "llama-batched-bench", "-m", facts["path"]]
        command += ["-c", str(facts["context"]), "-b", "2048", "-ub", "512", "-t", str(setting.threads)]
        command += ["--poll", str(setting.poll), "-fa", "on" if facts["flash_attention"] else "off"]
        command += ["-npp", str(setting.prompt), "-ntg", str(setting.generate)]
        # The first of them warms up.
        command += ["-npl", ",".join([str(setting.sequences)] * (1 + jobs)), "--output-format", "jsonl"]
        command += ["-kvu"] if facts["unified"] else []
        command += ["--swa-full"] if facts["whole_window"] else []
        text, memory = start(command, self._environment)
        done = [json.loads(line) for line in text.splitlines() if line.startswith("{")][1:]
        if len(done) != jobs:
            raise ProgramError(f"llama-batched-bench did {len(done)} of {jobs} jobs")
        return Sample(
            prompt_rate=median(job["speed_pp"] for job in done),
            decode_rate=median(job["speed_tg"] for job in done),
            seconds=median(job["t"] for job in done),
            memory_mib=memory,
        )


def median(values: Iterable[float]) -> float:
    """Of at least one value."""
    return statistics.median(values)


def median_or_none(values: Iterable[float | None]) -> float | None:
    """Of those that are there."""
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None


@attrs.frozen(kw_only=True)
class Result:
    """All rounds of one setting."""

    setting: Setting
    facts: dict[str, Any]
    rounds: list[dict[str, Sample]]
    loads: list[float | None]
    """Load average before each round."""

    def of(self, program: str, figure: str) -> float | None:
        """The median over the rounds."""
        return median_or_none(getattr(each[program], figure) for each in self.rounds)

    def ratio(self, figure: str, program: str = "bare") -> float | None:
        """Ours against another's, within rounds; above 1: ours is faster."""
        ratios = []
        for each in self.rounds:
            mine, other = getattr(each["ours"], figure), getattr(each[program], figure)
            if mine is not None and other is not None:
                ratios.append(other / mine if figure == "seconds" else mine / other)
        return median_or_none(ratios)

    def misses(self) -> list[str]:
        """Which targets were missed."""
        missed = []
        name = f"{self.setting.model}, {self.setting.sequences} sequences"
        if self.setting.sequences <= 16:
            for figure, title in (("decode_rate", "decode"), ("seconds", "whole job")):
                ratio = self.ratio(figure)
                if ratio is not None and ratio < LEAST_RATIO:
                    missed.append(f"{name}: {title} is {ratio:.3f} of the bare loop's speed, {LEAST_RATIO} is wanted")
        most, outside = MOST_OUTSIDE_US.get(self.facts["vocabulary"]), self.of("ours", "outside_us")
        if self.setting.sequences >= 4 and most is not None and outside is not None and outside > most:
            missed.append(f"{name}: {outside:.0f} us a token outside the native step, {most:.0f} are wanted")
        return missed

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "setting": attrs.asdict(self.setting),
            "facts": {name: value for name, value in self.facts.items() if name != "path"},
            "medians": {
                program: {field.name: self.of(program, field.name) for field in attrs.fields(Sample)}
                for program in PROGRAMS
            },
            "ratios_to_bare": {figure: self.ratio(figure) for figure in ("prompt_rate", "decode_rate", "seconds")},
            "rounds": [{program: attrs.asdict(sample) for program, sample in each.items()} for each in self.rounds],
            "loads": self.loads,
        }


def measure(cases: list[Case], rounds: int, most_jobs: int, console: Console) -> list[Result]:
    """Let the programs take turns at each case."""
    results = []
    columns = (
        TextColumn("{task.description:<42}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=len(cases) * rounds * len(PROGRAMS))
        for case in cases:
            # A process does jobs for a second or more, or what is measured is mostly the beginning.
            jobs = max(1, min(most_jobs, 8 // case.setting.sequences))
            done: list[dict[str, Sample]] = []
            loads = []
            for number in range(rounds):
                loads.append(_machine.load())
                samples = {}
                shift = number % len(PROGRAMS)
                for program in PROGRAMS[shift:] + PROGRAMS[:shift]:
                    what = f"{case.setting.model}, {case.setting.sequences} sequences: {program}"
                    progress.update(bar, description=what)
                    samples[program] = case.run(program, jobs)
                    progress.advance(bar)
                done.append(samples)
            results.append(Result(setting=case.setting, facts=case.facts, rounds=done, loads=loads))
    return results


HEADINGS = {
    "sequences": "",
    "prompt": "tok/s",
    "bare prompt": "tok/s",
    "decode": "tok/s",
    "bare decode": "tok/s",
    "ratio": "ours/bare",
    "llama.cpp decode": "tok/s",
    "job": "s",
    "bare job": "s",
    "job ratio": "ours/bare",
    "llama.cpp job": "s",
    "memory": "MiB",
    "bare memory": "MiB",
    "outside": "us/token",
    "cpu": "us/token",
}


def rows(results: Iterable[Result]) -> list[dict[str, str]]:
    """A table's rows: heading to text."""

    def text(value: float | None, digits: int = 0) -> str:
        return "-" if value is None else f"{value:,.{digits}f}"

    return [
        {
            "sequences": str(result.setting.sequences),
            "prompt": text(result.of("ours", "prompt_rate")),
            "bare prompt": text(result.of("bare", "prompt_rate")),
            "decode": text(result.of("ours", "decode_rate")),
            "bare decode": text(result.of("bare", "decode_rate")),
            "ratio": text(result.ratio("decode_rate"), 3),
            "llama.cpp decode": text(result.of("llama.cpp", "decode_rate")),
            "job": text(result.of("ours", "seconds"), 2),
            "bare job": text(result.of("bare", "seconds"), 2),
            "job ratio": text(result.ratio("seconds"), 3),
            "llama.cpp job": text(result.of("llama.cpp", "seconds"), 2),
            "memory": text(result.of("ours", "memory_mib")),
            "bare memory": text(result.of("bare", "memory_mib")),
            "outside": text(result.of("ours", "outside_us")),
            "cpu": text(result.of("ours", "cpu_us")),
        }
        for result in results
    ]


def by_model(results: Iterable[Result]) -> Iterable[tuple[str, list[Result]]]:
    """In the order of measurement, with a title."""
    for model, group in itertools.groupby(results, key=lambda result: result.setting.model):
        several = list(group)
        facts = several[-1].facts
        cells = "unified" if facts["unified"] else "split"
        attention = "on" if facts["flash_attention"] else "off"
        vocabulary = f"{facts['vocabulary']:,} vocabulary entries"
        yield f"{model}: {vocabulary}, {cells} cells, flash attention {attention}", several


def show(results: list[Result], console: Console) -> None:
    """Tables for people."""
    for title, several in by_model(results):
        table = Table(title=title, title_justify="left")
        for heading, unit in HEADINGS.items():
            table.add_column(f"{heading}\n{unit}", justify="right")
        for row in rows(several):
            table.add_row(*row.values())
        console.print(table)


def markdown(results: list[Result]) -> str:
    """The same tables for documents."""
    lines = []
    for title, several in by_model(results):
        lines += [f"### {title}", ""]
        lines.append("| " + " | ".join(f"{heading} {unit}".strip() for heading, unit in HEADINGS.items()) + " |")
        lines.append("|" + " ---: |" * len(HEADINGS))
        lines += ["| " + " | ".join(row.values()) + " |" for row in rows(several)]
        lines.append("")
    return "\n".join(lines)


def build_programs(console: Console) -> tuple[Path, Path]:
    """Build what we compare with, if it is not there; the folders of the programs and of the engine's libraries."""
    import laneway_native._llama as module

    libraries = Path(module.__file__).parent
    for cache in (_machine.ROOT / "build").glob("*/CMakeCache.txt"):
        folder = cache.parent
        cmake = next((path for path in [Path(sys.executable).with_name("cmake")] if path.exists()), Path("cmake"))
        with console.status("building bare_loop and llama-batched-bench (minutes the first time)"):
            start([cmake, "-DLANEWAY_BUILD_BENCH=ON", folder])
            start([cmake, "--build", folder, "--target", "laneway-bench"])
        return folder / "bin", libraries
    raise ProgramError("there is no build folder: run `make build` first")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one model, 1, 4 and 16 sequences, two rounds")
    parser.add_argument("--models", type=lambda text: text.split(","), help=f"default: those pulled of {MODELS}")
    parser.add_argument("--sequences", type=numbers, default=list(SEQUENCES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=4, help="jobs of one process, at most")
    parser.add_argument("--prompt", type=int, default=160, help="tokens of a prompt")
    parser.add_argument("--generate", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--window", type=int, default=256, help="tokens that one slot holds")
    parser.add_argument("--threads", type=int, help="default: what the engine takes")
    parser.add_argument("--poll", type=int, default=0)
    parser.add_argument("--kv-mode", choices=["split", "unified"], help="default: what the engine takes")
    parser.add_argument("--flash-attention", choices=["auto", "on", "off"], default="auto")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    parser.add_argument("--check", action="store_true", help="fail if a target is missed")
    options = parser.parse_args(arguments)
    if options.quick:
        options.models = options.models or ["smollm2"]
        options.rounds = min(options.rounds, 2)
        if options.sequences == list(SEQUENCES):
            options.sequences = [1, 4, 16]
    return options


def choose_models(wanted: list[str] | None, console: Console) -> list[str]:
    """Those asked for, or those of the usual ones that have been pulled."""
    from laneway import ModelLoadError
    from laneway._sources import parse_source

    if wanted:
        return wanted
    chosen = []
    for name in MODELS:
        try:
            parse_source(name)
            chosen.append(name)
        except ModelLoadError as error:
            console.print(f"without {name}: {error}")
    return chosen


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and say by the exit status whether it worked."""
    options = parse(arguments)
    console = Console()
    from laneway_native import default_threads

    machine = _machine.describe()
    console.print(", ".join(f"{name}: {value}" for name, value in machine.items() if name != "build"))
    try:
        programs, libraries = build_programs(console)
        with tempfile.TemporaryDirectory() as folder:
            cases = [
                Case(
                    Setting(
                        model=model,
                        sequences=sequences,
                        prompt=options.prompt,
                        generate=options.generate,
                        window=options.window,
                        threads=options.threads or default_threads(),
                        poll=options.poll,
                        kv_mode=options.kv_mode,
                        flash_attention=options.flash_attention,
                    ),
                    programs,
                    libraries,
                    Path(folder),
                )
                for model in choose_models(options.models, console)
                for sequences in options.sequences
            ]
            results = measure(cases, options.rounds, options.jobs, console)
    except ProgramError as error:
        console.print(f"benchmarks: {error}", style="red")
        return 1
    show(results, console)
    loads = [load for result in results for load in result.loads if load is not None]
    if loads:
        console.print(f"load average while measuring: {min(loads)} to {max(loads)}")
    missed = [line for result in results for line in result.misses()]
    for line in missed:
        console.print(f"missed: {line}", highlight=False)
    if options.json:
        document = {"machine": machine, "results": [result.as_dict() for result in results]}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(markdown(results))
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
