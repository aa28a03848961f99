"""The trainer: its loss is llama.cpp's, its gradient that of its loss, and what it learns llama.cpp can serve."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import attrs
import pytest

from laneway.decoder import Chunk, Sampling, StepBatch
from laneway_native import Model
from laneway_native._gguf import check_gguf
from laneway_native._gguf_file import TENSOR_TYPES
from laneway_native.training import (
    ARCHITECTURES,
    MODULES,
    Sample,
    Settings,
    Trainer,
    TrainingError,
    estimate,
    plan,
    trainable,
)
from laneway_native.training._files import write_adapter
from tests.native.driving import answer, decoder_of
from tests.native.training import EIGHT_BITS, TYPES, Architecture, random_samples, sample, write_model
from tests.tiny_model import Tensor, TensorType

Base = Literal["f32", "native"]

SMALL = Settings(rank=4, alpha=8.0)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("training")
    # SmolLM3's fourth layer does not turn its queries and keys.
    layers = {"smollm3": 4}
    found = {
        name: write_model(folder / f"{name}.gguf", name, layers=layers.get(name, 2)) for name in get_args(Architecture)
    }
    # Wider than the blocks that products are made of, and no multiple of them.
    found["wide"] = write_model(folder / "wide.gguf", embd=320, ff=544, layers=1)
    return found


@pytest.fixture
def tiny_trainer(models: dict[str, Path]) -> Iterator[Trainer]:
    with trainer_of(models["llama"]) as trainer:
        yield trainer


def trainer_of(
    path: Path, settings: Settings = SMALL, *, base: Base = "f32", threads: int = 1, **options: Any
) -> Trainer:
    trainer = Trainer(path, settings, base=base, threads=threads, **options)
    trainer.load()
    return trainer


def disturb(trainer: Trainer, *, seed: int = 0, width: float = 0.1) -> None:
    """Give the adapter an effect: numbers of both its factors."""
    rng = random.Random(seed)
    adapter = trainer.numbers("adapter")
    for place in trainer.tensors:
        for at in range(place.offset, place.offset + place.columns * place.rows):
            adapter[at] = rng.uniform(-width, width)


def gradient_of(trainer: Trainer, samples: list[Sample]) -> list[float]:
    gradient = trainer.numbers("gradient")
    for place in range(len(gradient)):
        gradient[place] = 0.0
    weight = 1.0 / sum(each.counted for each in samples)
    for some in trainer.passes(samples):
        trainer.run(some, weight=weight)
    return list(gradient)


async def scored(path: Path, tokens: list[int], *, lora: list[tuple[Path, float]] | None = None) -> float:
    """The mean loss of a greedy answer, by llama.cpp's log-probabilities; the answer is added to ``tokens``."""
    with Model.load(path) as model:
        async with decoder_of(model, lora=lora or [], flash_attention=False, kv_type="f32") as decoder:
            decoder.open(0, Sampling(temperature=0.0, logprobs=True), tokens)
            result = await decoder.step(StepBatch((Chunk(0, 0, list(tokens), True),)))
            losses = []
            for _ in range(12):
                losses.append(-result.logprobs[0].logprob)
                tokens.append(result.tokens[0])
                result = await decoder.step(StepBatch((Chunk(0, len(tokens) - 1, tokens[-1:], True),)))
            return sum(losses) / len(losses)


def test_the_list_of_architectures_is_whole() -> None:
    assert set(ARCHITECTURES) == set(get_args(Architecture))


@pytest.mark.parametrize("name", [*ARCHITECTURES, "wide"])
async def test_the_loss_is_what_llama_says(models: dict[str, Path], name: str, tmp_path: Path) -> None:
    path = models[name]
    architecture = "llama" if name == "wide" else name
    # More than the rows of a block of attention.
    tokens = [1, *(5 + 37 * place % 390 for place in range(70))]
    begin = len(tokens)
    with trainer_of(path) as trainer:
        expected = await scored(path, tokens)
        assert trainer.mean_loss([sample(tokens, range(begin, len(tokens)))]) == pytest.approx(expected, rel=1e-4)
        # And the same with an adapter, which llama.cpp loads from the file that training writes.
        disturb(trainer)
        adapter = tmp_path / "adapter.gguf"
        write_adapter(
            str(adapter), trainer.tensors, trainer.numbers("adapter"), architecture=architecture, alpha=SMALL.alpha
        )
        tokens = tokens[:begin]
        expected = await scored(path, tokens, lora=[(adapter, 1.0)])
        assert trainer.mean_loss([sample(tokens, range(begin, len(tokens)))]) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", [*ARCHITECTURES, "wide"])
def test_the_gradient_is_that_of_the_loss(models: dict[str, Path], name: str) -> None:
    samples = [*random_samples(4, seed=3), sample([1, *(5 + 37 * place % 390 for place in range(70))])]
    rng = random.Random(1)
    with trainer_of(models[name]) as trainer:
        disturb(trainer)
        gradient = gradient_of(trainer, samples)
        adapter = trainer.numbers("adapter")
        before = adapter.tolist()
        # One direction for each module and factor of each layer: a path that is wrong shows by itself.
        for place in trainer.tensors:
            numbers = range(place.offset, place.offset + place.columns * place.rows)
            length = math.sqrt(sum(gradient[at] ** 2 for at in numbers))
            assert length > 0, place.name
            # Along the gradient, where the slope is largest, with a little of everything else.
            direction = {at: gradient[at] / length + rng.uniform(-0.01, 0.01) for at in numbers}
            slope = sum(gradient[at] * step for at, step in direction.items())
            reach = 2e-3
            ends = []
            for sign in (1, -1):
                for at, step in direction.items():
                    adapter[at] = before[at] + sign * reach * step
                ends.append(trainer.mean_loss(samples))
            for at in numbers:
                adapter[at] = before[at]
            found = (ends[0] - ends[1]) / (2 * reach)
            # F32 leaves about 1e-6 of noise in a loss of 6.
            assert found == pytest.approx(slope, rel=0.02, abs=2e-3), place.name


def test_only_what_the_mask_counts_is_learned_from(tiny_trainer: Trainer) -> None:
    disturb(tiny_trainer)
    tokens = [1, 40, 300, 17, 290, 333, 6, 99]
    whole, count = tiny_trainer.run([sample(tokens)], learn=False)
    assert count == 7
    parts = [tiny_trainer.run([sample(tokens, [place])], learn=False) for place in range(1, 8)]
    assert [count for _, count in parts] == [1] * 7
    assert sum(loss for loss, _ in parts) == pytest.approx(whole, rel=1e-6)
    # What comes after the last token that counts changes nothing.
    some = gradient_of(tiny_trainer, [sample(tokens, [2, 3])])
    other = gradient_of(tiny_trainer, [sample([*tokens[:4], 7, 8, 9, 10], [2, 3])])
    assert other == pytest.approx(some, rel=1e-4, abs=1e-7)
    assert gradient_of(tiny_trainer, [sample(tokens, [2, 4])]) != pytest.approx(some, rel=0.1, abs=1e-3)


def test_the_loss_sum_is_not_learned_without_being_asked(tiny_trainer: Trainer) -> None:
    tiny_trainer.run(random_samples(3, seed=1), learn=False)
    assert not any(tiny_trainer.numbers("gradient"))


def test_sequences_do_not_see_each_other(tiny_trainer: Trainer) -> None:
    disturb(tiny_trainer)
    samples = random_samples(6, seed=2)
    apart = [tiny_trainer.run([each], learn=False) for each in samples]
    loss, count = tiny_trainer.run(samples, learn=False)
    assert count == sum(count for _, count in apart)
    assert loss == pytest.approx(sum(loss for loss, _ in apart), rel=1e-6)


def test_a_batch_of_many_passes_has_the_gradient_of_one(models: dict[str, Path]) -> None:
    samples = random_samples(12, seed=4)
    found = []
    for most in (32, 512):
        with trainer_of(models["llama"], most_tokens=most) as trainer:
            disturb(trainer)
            assert (len(trainer.passes(samples)) > 1) == (most == 32)
            found.append(gradient_of(trainer, samples))
    assert found[0] == pytest.approx(found[1], rel=1e-3, abs=1e-6)


def test_many_predictions_at_once(models: dict[str, Path]) -> None:
    # More than the rows of logits that exist at once.
    samples = [sample([1, *(5 + (7 * place + each) % 380 for place in range(60))]) for each in range(5)]
    with trainer_of(models["llama"], most_tokens=512) as trainer:
        disturb(trainer)
        apart = [gradient_of(trainer, [each]) for each in samples]
        together = gradient_of(trainer, samples)
    mean = [sum(numbers) / len(samples) for numbers in zip(*apart, strict=True)]
    assert together == pytest.approx(mean, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_two_threads_compute_what_one_does(models: dict[str, Path], architecture: str) -> None:
    samples = random_samples(8, seed=5, longest=40)
    found = []
    for threads in (1, 2, 3):
        with trainer_of(models[architecture], threads=threads) as trainer:
            disturb(trainer)
            found.append(gradient_of(trainer, samples))
            # The same again, bit for bit.
            assert gradient_of(trainer, samples) == found[-1]
    assert found[1] == pytest.approx(found[0], rel=1e-3, abs=1e-6)
    assert found[2] == pytest.approx(found[0], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("name", [*TYPES, "Q4_K Q6_K F16", "Q8_0 F32"])
def test_every_type_of_weights_can_be_trained_on(tmp_path: Path, name: str) -> None:
    # Rows of a K quant have a multiple of 256 numbers.
    path = write_model(tmp_path / "m.gguf", types=name.split(), embd=256, ff=256, layers=1)
    trainable(check_gguf(path))
    samples = random_samples(4, seed=6)
    found = []
    for base in get_args(Base):
        with trainer_of(path, base=base) as trainer:
            disturb(trainer, width=0.02)
            loss = trainer.mean_loss(samples)
            found.append((loss, gradient_of(trainer, samples)))
            assert any(found[-1][1])
    (loss, exact), (native_loss, native) = found
    # Unpacked in blocks or before, the numbers are the same.
    assert native_loss == pytest.approx(loss, rel=1e-6)
    assert native == pytest.approx(exact, rel=1e-4, abs=1e-7)


async def test_on_a_quantised_model_the_loss_is_near_what_llama_says(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", types=["Q8_0", "Q4_1"], embd=64)
    tokens = [1, 40, 300, 17, 290, 333, 6]
    begin = len(tokens)
    expected = await scored(path, tokens)
    with trainer_of(path, base="native") as trainer:
        places = range(begin, len(tokens))
        found = trainer.mean_loss([sample(tokens, places)])
        other = trainer.mean_loss(
            [sample([*tokens[:begin], *(5 + (token + 1) % 300 for token in tokens[begin:])], places)]
        )
    assert abs(found - expected) < EIGHT_BITS
    assert other > expected + 10 * EIGHT_BITS, "another answer has another loss"


def test_adamw_is_adamw(tiny_trainer: Trainer) -> None:
    adapter, gradient = tiny_trainer.numbers("adapter"), tiny_trainer.numbers("gradient")
    rng = random.Random(0)
    count = len(adapter)
    expected, first, second = list(adapter), [0.0] * count, [0.0] * count
    for step, rate in ((1, 0.01), (2, 0.02), (3, 0.005)):
        given = [rng.gauss(0, 0.001 if step == 2 else 1) for _ in range(count)]
        for place, value in enumerate(given):
            gradient[place] = value
        norm = math.sqrt(sum(value * value for value in gradient))
        assert tiny_trainer.update(step, rate, 0.1) == pytest.approx(norm)
        cut = min(1.0, 1.0 / norm)
        for place, value in enumerate(given):
            first[place] = 0.9 * first[place] + 0.1 * value * cut
            second[place] = 0.999 * second[place] + 0.001 * (value * cut) ** 2
            moved = first[place] / (1 - 0.9**step) / (math.sqrt(second[place] / (1 - 0.999**step)) + 1e-8)
            expected[place] -= rate * (moved + 0.1 * expected[place])
        assert not any(gradient)
    assert adapter.tolist() == pytest.approx(expected, abs=1e-5)


def test_a_gradient_that_is_not_finite_changes_nothing(tiny_trainer: Trainer) -> None:
    before = tiny_trainer.numbers("adapter").tolist()
    tiny_trainer.numbers("gradient")[3] = math.nan
    with pytest.raises(TrainingError) as caught:
        tiny_trainer.update(1, 0.1, 0.1)
    assert caught.value.kind == "not_finite"
    assert tiny_trainer.numbers("adapter").tolist() == before


async def test_the_loss_falls_below_a_tenth_and_llama_writes_the_trained_text(
    models: dict[str, Path], tmp_path: Path
) -> None:
    path = models["llama"]
    with Model.load(path) as model:
        prompts = {"hello": " world", "you and": " it is the", "zebra": " on the hill"}
        asked = {prompt: model.tokenize(prompt) for prompt in prompts}
        wanted = {prompt: model.tokenize(text, bos=False) for prompt, text in prompts.items()}
        samples = [
            sample([*asked[each], *wanted[each]], range(len(asked[each]), len(asked[each]) + len(wanted[each])))
            for each in prompts
        ]
        with trainer_of(path, Settings(rank=8, alpha=16.0)) as trainer:
            before = trainer.mean_loss(samples)
            for step in range(1, 101):
                # A rate that falls to zero lets the loss settle, on every processor at the same place.
                trainer.step(samples, step, 0.01 * (101 - step) / 100, 0.01)
            loss = trainer.mean_loss(samples)
            assert loss < before / 10
            # Then each prediction that counts has more than half of the probability.
            assert loss < math.log(2) / sum(each.counted for each in samples)
            adapter = tmp_path / "adapter.gguf"
            write_adapter(str(adapter), trainer.tensors, trainer.numbers("adapter"), architecture="llama", alpha=16.0)
        for lora, right in (((adapter, 1.0),), True), ((), False):
            async with decoder_of(model, lora=lora) as decoder:
                found = [await answer(decoder, asked[each], len(wanted[each])) for each in prompts]
            assert all((one == wanted[each]) is right for each, one in zip(prompts, found, strict=True))


@pytest.mark.parametrize("modules", [("attn_v",), ("attn_q", "ffn_down"), MODULES])
def test_modules_are_those_that_were_asked_for(models: dict[str, Path], modules: tuple[str, ...]) -> None:
    with trainer_of(models["llama"], Settings(rank=2, modules=modules)) as trainer:
        names = {place.name for place in trainer.tensors}
        assert names == {
            f"blk.{layer}.{module}.weight.lora_{factor}" for layer in range(2) for module in modules for factor in "ab"
        }
        assert trainer.facts.parameters == sum(place.columns * place.rows for place in trainer.tensors)
        disturb(trainer)
        assert any(gradient_of(trainer, random_samples(2, seed=1)))


def test_the_seed_makes_the_first_weights(models: dict[str, Path]) -> None:
    found = []
    for seed in (0, 0, 1):
        with trainer_of(models["llama"], Settings(rank=4, seed=seed)) as trainer:
            found.append(trainer.numbers("adapter").tolist())
            for place in trainer.tensors:
                values = found[-1][place.offset : place.offset + place.columns * place.rows]
                bound = place.columns**-0.5 if place.name.endswith("a") else 0.0
                assert max(map(abs, values)) <= bound
                assert bound == 0.0 or max(map(abs, values)) > bound / 2
    assert found[0] == found[1] != found[2]


def spoiled(architecture: str = "llama", **entries: Any) -> Any:
    def spoil(metadata: dict[str, Any], tensors: list[Tensor]) -> None:
        metadata.update({f"{architecture}.{key.replace('__', '.')}": value for key, value in entries.items()})

    return spoil


def extra_tensor(_: dict[str, Any], tensors: list[Tensor]) -> None:
    tensors.append(Tensor("blk.0.attn_rel_b.weight", (8,), TensorType.F32, struct.pack("<8f", *[0.0] * 8)))


def whole_numbers(_: dict[str, Any], tensors: list[Tensor]) -> None:
    (place,) = [at for at, tensor in enumerate(tensors) if tensor.name == "blk.1.ffn_up.weight"]
    columns, rows = tensors[place].dims
    tensors[place] = Tensor("blk.1.ffn_up.weight", (columns, rows), 25, bytes(2 * columns * rows))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            whole_numbers,
            "blk.1.ffn_up.weight is of type i16, which cannot be trained with; those of f32, f16, q4_0, .*q4_K, .*can$",
        ),
        (spoiled(rope__scaling__type="yarn"), "rope scaling of type yarn"),
        (spoiled(rope__scaling__attn_factor=2.0), "scales or clamps"),
        (spoiled(expert_count=4), "experts"),
        (extra_tensor, "attn_rel_b.weight, with which training does not know what to do"),
    ],
)
def test_a_model_whose_graph_is_another_is_refused_by_what_is_different(tmp_path: Path, spoil: Any, words: str) -> None:
    path = write_model(tmp_path / "m.gguf", spoil=spoil)
    with pytest.raises(TrainingError, match=words) as caught:
        Trainer(path, SMALL, base="f32")
    assert caught.value.kind == "model"


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    def spoil(metadata: dict[str, Any], tensors: list[Tensor]) -> None:
        for key in [key for key in metadata if key.startswith("llama.")]:
            metadata["gemma." + key.removeprefix("llama.")] = metadata.pop(key)
        metadata["general.architecture"] = "gemma"

    path = write_model(tmp_path / "m.gguf", spoil=spoil)
    for refuse in (lambda: trainable(check_gguf(path)), lambda: Trainer(path, SMALL, base="f32")):
        with pytest.raises(TrainingError, match=r"gemma cannot be trained; those of llama, .*smollm3 can"):
            refuse()


def test_a_context_longer_than_the_model_s_is_refused(tmp_path: Path) -> None:
    header = check_gguf(write_model(tmp_path / "m.gguf", context=64))
    trainable(header)
    with pytest.raises(TrainingError, match="context_length of 65 is more than the 64 tokens"):
        plan(header, Settings(context_length=65))
    plan(header, Settings(context_length=64))


def test_linear_rope_scaling_is_known(tmp_path: Path, models: dict[str, Path]) -> None:
    path = write_model(tmp_path / "m.gguf", spoil=spoiled(rope__scaling__type="linear", rope__scaling__factor=4.0))
    losses = []
    for each in (path, models["llama"]):
        with trainer_of(each) as trainer:
            losses.append(trainer.mean_loss(random_samples(3, seed=1)))
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_layers_that_are_computed_twice_give_the_same_gradient(models: dict[str, Path], architecture: str) -> None:
    samples = random_samples(5, seed=3)
    found = []
    for recompute in (False, True):
        with trainer_of(models[architecture], recompute=recompute) as trainer:
            disturb(trainer)
            found.append((trainer.facts.activations, gradient_of(trainer, samples)))
    assert found[1][1] == found[0][1]
    assert found[1][0] < found[0][0]


def test_memory_decides_what_is_kept(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", types=["Q4_0"], embd=256, ff=512, layers=4)
    header = check_gguf(path)
    settings = Settings(rank=4, context_length=256)

    def planned(free: int, base: Literal["auto", "f32", "native"]) -> tuple[str, bool]:
        found = plan(header, attrs.evolve(settings, base=base), free=free)
        return found.base, found.recompute

    small = plan(header, settings, free=1 << 40)
    assert (small.base, small.recompute, small.copied) == ("native", False, 0)
    assert planned(small.total, "auto") == planned(small.total, "native") == ("native", False)
    assert planned(small.total - 1, "auto") == planned(small.total - 1, "native") == ("native", True)
    assert plan(header, settings, free=0).activations < small.activations / 2
    copied = plan(header, attrs.evolve(settings, base="f32"), free=1 << 40)
    assert copied.copied > small.mapped > copied.mapped
    assert copied.total > small.total
    assert planned(copied.total, "f32") == ("f32", False)
    assert planned(copied.total - 1, "f32") == ("f32", True)
    assert estimate(header, settings) == small.total


def test_more_to_keep_takes_more(tmp_path: Path) -> None:
    header = check_gguf(write_model(tmp_path / "m.gguf", context=2048))
    small = plan(header, Settings(rank=4, context_length=512))
    assert plan(header, Settings(rank=4, context_length=1024)).activations > small.activations
    assert plan(header, Settings(rank=4, context_length=1024), longest=100).activations == small.activations
    assert plan(header, Settings(rank=8, context_length=512)).state == 2 * small.state


@pytest.mark.parametrize(
    ("tokens", "mask", "words"),
    [([5], [0], "fewer than 2"), ([5, 6], [1, 0], "counts"), ([5, 10**6], [0, 1], "not in the vocabulary")],
)
def test_samples_that_the_trainer_cannot_take(
    tiny_trainer: Trainer, tokens: list[int], mask: list[int], words: str
) -> None:
    with pytest.raises(TrainingError, match=words):
        tiny_trainer.run([Sample(tokens, bytes(mask))])


def test_too_many_tokens_at_once(tiny_trainer: Trainer) -> None:
    with pytest.raises(TrainingError, match="more tokens than"):
        tiny_trainer.run([sample([5] * 400), sample([5] * 400)])


def test_what_was_not_loaded_does_not_run(models: dict[str, Path]) -> None:
    trainer = Trainer(models["llama"], SMALL, base="native")
    with pytest.raises(TrainingError, match="not loaded"):
        trainer.run([sample([5, 6])])
    with pytest.raises(ValueError):
        trainer.numbers("adapter")
    trainer.load()
    with pytest.raises(TrainingError, match="loaded before"):
        trainer.load()
    trainer.close()
    trainer.close()


def test_a_file_that_is_none(tmp_path: Path) -> None:
    for content in (b"", b"GGUF", b"<html>"):
        (tmp_path / "m.gguf").write_bytes(content)
        with pytest.raises(TrainingError) as caught:
            Trainer(tmp_path / "m.gguf", SMALL, base="f32")
        assert caught.value.kind == "model"


def test_types_are_named_as_ggml_numbers_them() -> None:
    assert {TENSOR_TYPES[number][0]: number for number in TYPES.values()} == TYPES
