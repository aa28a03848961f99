"""What nmt costs over CTranslate2 alone, how soon it stops, and how it lives with a language model.

    python -m benchmarks.translate [--package FILE] [--sentences FILE] [--model NAME] [--check] [--json FILE]

- *Throughput*: the same sentences through the engine and through a bare loop over ``translate_batch``, tokenising
  included, turn by turn in one process; the median of the ratios.  ``--check`` fails below 0.95.
- *Cancelling*: from ``cancel()`` to the end of the request, on a model of random weights in the size of OPUS-MT's base
  models.
- *Together*: tokens a second of a language model and sentences a second of nmt, each alone and both at once, for each
  number of nmt's threads and each way of CTranslate2's OpenMP threads to wait.  Every case is a process of its own,
  because that way is settled when the library is loaded.

Figures of a machine that does other work say little: the load is printed with them.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import trio

import laneway
from laneway_plugins import completion, nmt
from laneway_plugins._nmt_package import find_pairs, read_files
from laneway_plugins._nmt_worker import Search, import_ctranslate2

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data" / "nmt"
LEAST_RATIO = 0.95
POLICIES = ("passive", "active")


def read_sentences(path: Path, count: int) -> list[str]:
    """The first column of a file of tab-separated columns."""
    return [line.split("\t")[0] for line in path.read_text(encoding="utf-8").splitlines()][:count]


# Throughput.


class Bare:
    """CTranslate2 and SentencePiece without anything of ours."""

    def __init__(self, package: Path, threads: int) -> None:
        import sentencepiece

        files = read_files(find_pairs(package)[0])
        self.pieces = sentencepiece.SentencePieceProcessor(model_proto=files.sentencepiece)
        self.translator = import_ctranslate2().Translator("bare", files=dict(files.model), intra_threads=threads)

    def loop(self, sentences: list[str], beam_size: int) -> list[str]:
        """Batches of the size that nmt takes, in the order of the sentences."""
        size = nmt.GREEDY_BATCH if beam_size == 1 else nmt.BEAM_BATCH
        out: list[str] = []
        for start in range(0, len(sentences), size):
            batch = [self.pieces.encode(text, out_type=str) for text in sentences[start : start + size]]
            out += map(self.text, self.translator.translate_batch(batch, beam_size=beam_size))
        return out

    def sorted(self, sentences: list[str], beam_size: int) -> list[str]:
        """One call for all, which CTranslate2 sorts by length and cuts into the same batches: nothing streams."""
        size = nmt.GREEDY_BATCH if beam_size == 1 else nmt.BEAM_BATCH
        batch = [self.pieces.encode(text, out_type=str) for text in sentences]
        return list(map(self.text, self.translator.translate_batch(batch, beam_size=beam_size, max_batch_size=size)))

    @staticmethod
    def text(result: Any) -> str:
        """The best hypothesis."""
        return "".join(result.hypotheses[0]).replace("▁", " ").strip()


async def throughput(package: Path, sentences: list[str], rounds: int, threads: int) -> dict[str, Any]:
    """Sentences a second of each way, and ratios to the bare loop, for greedy search and a beam of 4."""
    bare = Bare(package, threads)
    figures: dict[str, Any] = {}
    async with laneway.open_engine() as engine:
        model = await engine.load_model(package, threads=threads)
        for beam_size in (1, 4):
            seconds: dict[str, list[float]] = {"loop": [], "sorted": [], "engine": []}
            same = 0
            for number in range(rounds + 1):
                ways = ["loop", "sorted", "engine"]
                random.Random(number).shuffle(ways)
                made: dict[str, list[str]] = {}
                for way in ways:
                    began = time.perf_counter()
                    if way == "engine":
                        made[way] = await nmt.translate(model, sentences, beam_size=beam_size)
                    else:
                        made[way] = getattr(bare, way)(sentences, beam_size)
                    if number:  # the first round warms up
                        seconds[way].append(time.perf_counter() - began)
                same = sum(one == other for one, other in zip(made["loop"], made["engine"], strict=True))
            ratios = [loop / ours for loop, ours in zip(seconds["loop"], seconds["engine"], strict=True)]
            figures[f"beam {beam_size}"] = {
                **{way: round(len(sentences) / statistics.median(taken), 1) for way, taken in seconds.items()},
                "ratio": round(statistics.median(ratios), 3),
                "ratio to sorted": round(
                    statistics.median(
                        best / ours for best, ours in zip(seconds["sorted"], seconds["engine"], strict=True)
                    ),
                    3,
                ),
                "equal translations": f"{same} of {len(sentences)}",
            }
    del bare.translator
    return figures


# Cancelling.


async def cancelling(rounds: int, threads: int) -> dict[str, Any]:
    """Milliseconds from cancel() to the end, and of one micro-batch, on an OPUS-base-sized model."""
    sys.path.insert(0, str(ROOT))
    from tests.plugins.nmt_models import make_model

    words = [f"w{number}" for number in range(32_000)]
    drawn = random.Random(1)
    texts = [" ".join(drawn.choices(words, k=25)) for _ in range(64)]
    figures: dict[str, Any] = {}
    # Random weights know no end: translations are cut where those of 25 words would be about to end.
    patched = functools.partial(Search, longest=35)
    with mock.patch.object(nmt, "Search", patched), tempfile.TemporaryDirectory() as folder:
        path = make_model(Path(folder) / "base", words, width=512, layers=6, end_bias=-100.0)
        async with laneway.open_engine() as engine:
            model = await engine.load_model(path, threads=threads, compute_type="int8", longest=100)
            for beam_size in (1, 4):
                taken = []
                for _ in range(rounds):
                    async with nmt.stream(model, texts, beam_size=beam_size) as run:
                        await trio.sleep(0.3 + 0.4 * drawn.random())
                        began = time.perf_counter()
                        engine.cancel(run.request_id)
                        try:
                            await run.result()
                        except laneway.InferenceCancelledError:
                            pass
                        await engine.wait_ended(run.request_id)
                    taken.append(1000 * (time.perf_counter() - began))
                figures[f"beam {beam_size}"] = {
                    "median ms": round(statistics.median(taken), 1),
                    "longest ms": round(max(taken), 1),
                }
    return figures


# Together.


async def one_case(package: Path, sentences: list[str], llm: str, threads: int, seconds: float) -> dict[str, float]:
    """Tokens and sentences a second: alone, and at once."""
    async with laneway.open_engine() as engine:
        translator = await engine.load_model(package, threads=threads)
        model = await engine.load_model(llm, parallel=1)
        never = {token: float("-inf") for token in model.tokenizer.end_tokens}

        async def generate(until: float) -> float:
            tokens, began = 0, trio.current_time()
            while trio.current_time() < until:
                answer = await completion.complete(
                    model, "Once upon a time", max_tokens=64, temperature=0.0, logit_bias=never
                )
                tokens += len(answer.tokens)
            return tokens / (trio.current_time() - began)

        async def translate(until: float) -> float:
            done, began = 0, trio.current_time()
            while trio.current_time() < until:
                await nmt.translate(translator, sentences[:64])
                done += 64
            return done / (trio.current_time() - began)

        await generate(trio.current_time() + 0.5)
        await translate(trio.current_time() + 0.5)
        figures = {
            "tokens/s alone": await generate(trio.current_time() + seconds),
            "sentences/s alone": await translate(trio.current_time() + seconds),
        }
        until = trio.current_time() + seconds

        async def note(name: str, work: Callable[[float], Any]) -> None:
            figures[name] = await work(until)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(note, "tokens/s at once", generate)
            nursery.start_soon(note, "sentences/s at once", translate)
    return {name: round(value, 1) for name, value in sorted(figures.items())}


def together(args: argparse.Namespace) -> dict[str, Any]:
    """All cases, turn by turn; medians."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cases = [(threads, policy) for threads in sorted({1, cores}) for policy in POLICIES]
    runs: dict[tuple[int, str], list[dict[str, float]]] = {case: [] for case in cases}
    for _ in range(args.rounds_together):
        for threads, policy in cases:
            command = [sys.executable, __file__, "--case", str(threads), "--package", str(args.package)]
            command += ["--sentences", str(args.sentences), "--model", args.model, "--seconds", str(args.seconds)]
            environment = {**os.environ, "OMP_WAIT_POLICY": policy}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
            if done.returncode:
                raise RuntimeError(done.stderr)
            runs[threads, policy].append(json.loads(done.stdout))
    return {
        f"{threads} thread{'s' * (threads > 1)}, {policy}": {
            name: statistics.median(run[name] for run in made) for name in made[0]
        }
        for (threads, policy), made in runs.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, default=DATA / "translate-en_de.argosmodel")
    parser.add_argument("--sentences", type=Path, default=DATA / "tatoeba-en-de-2000.tsv")
    parser.add_argument("--count", type=int, default=1000, help="sentences of the throughput test")
    parser.add_argument("--model", default="smollm2", help="the language model of the test of both at once")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rounds-together", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement of both at once")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=("throughput", "cancelling", "together"))
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    for path in (args.package, args.sentences):
        if not path.exists():
            parser.error(f"there is no {path}")
    if args.case is not None:
        sentences = read_sentences(args.sentences, 200)
        print(json.dumps(trio.run(one_case, args.package, sentences, args.model, args.case, args.seconds)))
        return 0
    figures: dict[str, Any] = {"load": {"before": os.getloadavg()[0]}}
    if args.only in (None, "throughput"):
        sentences = read_sentences(args.sentences, args.count)
        figures["throughput"] = trio.run(throughput, args.package, sentences, args.rounds, args.threads)
    if args.only in (None, "cancelling"):
        figures["cancelling"] = trio.run(cancelling, args.rounds, args.threads)
    if args.only in (None, "together"):
        figures["together"] = together(args)
    figures["load"]["after"] = os.getloadavg()[0]
    for part, lines in figures.items():
        print(part)
        for name, value in lines.items():
            print(f"  {name}: {value}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    low = [name for name, line in figures.get("throughput", {}).items() if line["ratio"] < LEAST_RATIO]
    if args.check and low:
        print(f"below {LEAST_RATIO} of the bare loop: {', '.join(low)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
