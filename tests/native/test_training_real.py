"""Training on SmolLM2-135M-Instruct: its memory, its loss, and a form that it learns to answer in."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Literal

import attrs
import pytest

from laneway.decoder import Chunk, ModelLoadError, Sampling, StepBatch
from laneway_native import Model, check_gguf
from laneway_native.training import Done, Job, Sample, Settings, Started, Step, Trainer, estimate, trainable
from tests.native.driving import answer, decoder_of
from tests.native.training import EIGHT_BITS, Start, sample, write_data

pytestmark = [pytest.mark.real_model, pytest.mark.slow]


@pytest.fixture(scope="module")
def path() -> Path:
    from laneway._sources import parse_source

    try:
        source = parse_source("smollm2")
    except ModelLoadError as error:
        pytest.skip(str(error))
    assert source.path is not None
    return Path(source.path)


def job_of(path: Path, folder: Path, samples: list[Sample], settings: Settings) -> Job:
    return Job(
        model=str(path),
        data=str(write_data(folder / "data", samples)),
        output=str(folder / "adapter.gguf"),
        checkpoint=str(folder / "checkpoint"),
        settings=settings,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.long
@pytest.mark.parametrize("base", ["f32", "native"])
def test_the_memory_estimate_holds(start: Start, path: Path, tmp_path: Path, base: Literal["f32", "native"]) -> None:
    header = check_gguf(path)
    trainable(header)
    settings = Settings(batch=1, epochs=3, context_length=512, base=base)
    # A whole pass of which every prediction counts.
    tokens = [1000 + 37 * place % 40_000 for place in range(512)]
    child = start(job_of(path, tmp_path, [sample(tokens)], settings))
    events = child.events(lambda event: isinstance(event, Step) and event.step == 2)
    (begun,) = [event for event in events if isinstance(event, Started)]
    assert begun.base == base
    status = Path(f"/proc/{child.process.pid}/status").read_text()
    (peak,) = [int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")]
    total = estimate(header, settings)
    assert 0.8 * total < peak < total
    losses = [event.loss for event in events if isinstance(event, Step)]
    assert losses[1] < losses[0]


async def test_the_loss_is_near_what_llama_says(path: Path) -> None:
    with Model.load(path) as model:
        tokens = model.tokenize("<|im_start|>user\nCount to five.<|im_end|>\n<|im_start|>assistant\n", special=True)
        begin = len(tokens)
        async with decoder_of(model, threads=2) as decoder:
            decoder.open(0, Sampling(temperature=0.0, logprobs=True), tokens)
            result = await decoder.step(StepBatch((Chunk(0, 0, list(tokens), True),)))
            losses = []
            for _ in range(16):
                losses.append(-result.logprobs[0].logprob)
                tokens.append(result.tokens[0])
                result = await decoder.step(StepBatch((Chunk(0, len(tokens) - 1, tokens[-1:], True),)))
    with Trainer(path, Settings(rank=1), base="native", threads=2) as trainer:
        trainer.load()
        places = range(begin, len(tokens))
        found = trainer.mean_loss([sample(tokens, places)])
        other = trainer.mean_loss(
            [sample([*tokens[:begin], *(5 + (token + 1) % 300 for token in tokens[begin:])], places)]
        )
    expected = sum(losses) / len(losses)
    assert abs(found - expected) < EIGHT_BITS
    assert other > expected + 10 * EIGHT_BITS, "another answer has another loss"


ANIMALS = ("cat", "dog", "owl", "fox", "bee", "cow", "ant", "hen", "pig", "rat", "bat", "elk")
PLACES = ("barn", "garden", "kitchen", "river", "forest", "tower", "cellar")


def question(animal: str, place: str) -> str:
    return f"The {animal} is in the {place}."


def wanted(animal: str, place: str) -> str:
    return json.dumps({"who": animal, "where": place})


@pytest.mark.long
async def test_it_learns_to_answer_in_a_form(start: Start, path: Path, tmp_path: Path) -> None:
    pairs = [(animal, place) for animal in ANIMALS for place in PLACES]
    held_out = pairs[::9]
    with Model.load(path) as model:

        def prompt(animal: str, place: str) -> list[int]:
            text = f"<|im_start|>user\n{question(animal, place)}<|im_end|>\n<|im_start|>assistant\n"
            return model.tokenize(text, special=True)

        samples = []
        for pair in pairs:
            if pair not in held_out:
                asked = prompt(*pair)
                told = model.tokenize(wanted(*pair) + "<|im_end|>", bos=False, special=True)
                samples.append(sample([*asked, *told], range(len(asked), len(asked) + len(told))))
        job = job_of(path, tmp_path, samples, Settings(epochs=2, context_length=64))
        child = start(job)
        events = child.events()
        assert events[-1] == Done(step=20, adapter=job.output), child.end()
        right = []
        for lora in ((), ((job.output, 1.0),)):
            async with decoder_of(model, lora=lora, threads=2) as decoder:
                right.append(0)
                for pair in held_out:
                    found = model.detokenize(await answer(decoder, prompt(*pair), 24)).decode()
                    right[-1] += found.startswith(wanted(*pair))
        assert right[0] == 0
        assert right[1] >= 0.9 * len(held_out)


def test_the_estimate_needs_no_weights(path: Path) -> None:
    header = check_gguf(path)
    small = estimate(header, Settings(base="native", context_length=512))
    large = estimate(header, attrs.evolve(Settings(base="native"), context_length=2048))
    assert small < large
