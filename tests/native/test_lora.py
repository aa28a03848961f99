"""Adapters: their effect, and files that are none."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import pytest

from laneway.decoder import DecodeError, ModelLoadError
from laneway_native import LlamaDecoder, Model
from tests.native.driving import Driver, answer, decoder_of, prompts, saved
from tests.tiny_model import Plain, Tensor, TensorType, write_gguf

RANK = 4


def write_adapter(path: Path, *, seed: int, architecture: str = "llama", embd: int = 64, layer: int = 0) -> Path:
    """An adapter of one layer's query and output matrices, with random numbers."""
    rng = random.Random(seed)

    def tensor(name: str, columns: int, rows: int) -> Tensor:
        values = [rng.uniform(-0.5, 0.5) for _ in range(columns * rows)]
        return Tensor(name, (columns, rows), TensorType.F32, struct.pack(f"<{len(values)}f", *values))

    tensors = []
    for matrix in ("attn_q", "attn_output"):
        tensors.append(tensor(f"blk.{layer}.{matrix}.weight.lora_a", embd, RANK))
        tensors.append(tensor(f"blk.{layer}.{matrix}.weight.lora_b", RANK, embd))
    metadata: dict[str, Plain] = {
        "general.architecture": architecture,
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": 8.0,
    }
    return write_gguf(path, metadata, tensors)


async def test_an_adapter_changes_answers_by_its_scale(tiny: Model, tmp_path: Path) -> None:
    prompt = prompts(tiny)[0]
    one, two = write_adapter(tmp_path / "1.gguf", seed=1), write_adapter(tmp_path / "2.gguf", seed=2, layer=1)

    async def answer_with(*lora: tuple[Path, float]) -> list[int]:
        async with decoder_of(tiny, lora=lora) as decoder:
            return await answer(decoder, prompt, 16)

    plain = await answer_with()
    assert await answer_with((one, 0.0)) == plain
    answers = [plain, await answer_with((one, 1.0)), await answer_with((one, -1.0)), await answer_with((two, 1.0))]
    answers.append(await answer_with((one, 1.0), (two, 1.0)))
    assert len({tuple(each) for each in answers}) == len(answers)
    # Nothing of it stays on the model.
    assert await answer_with() == plain


async def test_K4_states_are_of_their_adapters(tiny: Model, tmp_path: Path) -> None:
    one, two = write_adapter(tmp_path / "1.gguf", seed=1), write_adapter(tmp_path / "2.gguf", seed=2)
    moved = tmp_path / "moved.gguf"
    moved.write_bytes(one.read_bytes())
    prints, state = [], b""
    for lora in ((), ((one, 1.0),), ((one, 0.5),), ((two, 1.0),), ((one, 1.0), (two, 1.0))):
        async with decoder_of(tiny, lora=lora) as decoder:
            prints.append(decoder.state_fingerprint)
            await Driver(decoder).start(0, prompts(tiny)[0])
            state = await saved(decoder, 0)
    assert len(set(prints)) == len(prints)
    async with decoder_of(tiny, lora=((moved, 1.0),)) as decoder:
        assert decoder.state_fingerprint == prints[1]
        with pytest.raises(DecodeError, match="another model, adapter"):
            await decoder.load(0, state, 1)


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda path: path.unlink(), "no such file"),
        (lambda path: path.write_bytes(b""), "adapter"),
        (lambda path: path.write_text("<html>"), "adapter"),
        (lambda path: path.write_bytes(path.read_bytes()[:200]), "adapter"),
        (lambda path: path.write_bytes(path.read_bytes()[:-64]), "adapter"),
        (lambda path: write_adapter(path, seed=1, architecture="qwen2"), "arch mismatch"),
        (lambda path: write_adapter(path, seed=1, embd=32), "incorrect shape"),
        (lambda path: write_adapter(path, seed=1, layer=7), "does not exist in base model"),
    ],
)
def test_what_is_no_adapter_of_this_model_is_a_load_error(tiny: Model, tmp_path: Path, spoil: Any, match: str) -> None:
    path = write_adapter(tmp_path / "adapter.gguf", seed=1)
    spoil(path)
    with pytest.raises(ModelLoadError, match=match):
        LlamaDecoder(tiny, context_size=512, parallel=2, threads=1, lora=[(path, 1.0)])


def test_a_model_is_no_adapter(tiny: Model, tiny_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="adapter"):
        LlamaDecoder(tiny, context_size=512, parallel=2, threads=1, lora=[(tiny_path, 1.0)])


@pytest.mark.parametrize("lora", [["adapter.gguf"], [("a.gguf", "1")], [("a.gguf", float("nan"))], [(1, 1.0)], [None]])
def test_bad_options(tiny: Model, lora: Any) -> None:
    with pytest.raises(ModelLoadError, match=r"lora is a list of pairs|the scale of adapter"):
        LlamaDecoder(tiny, context_size=512, parallel=2, threads=1, lora=lora)
