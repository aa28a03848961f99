"""Adapters: their effect, and files that are none."""

from __future__ import annotations

import os
import random
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from laneway.decoder import DecodeError, ModelLoadError
from laneway_native import LlamaDecoder, Model
from laneway_native._adapters import check_adapters
from laneway_native._gguf import check_gguf
from tests.native import adapters
from tests.native.driving import Driver, answer, decoder_of, prompts, saved
from tests.tiny_model import Array, Plain, Tensor, TensorType, ValueType, write_gguf, write_tiny_model

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
            prints.append(await decoder.state_fingerprint())
            await Driver(decoder).start(0, prompts(tiny)[0])
            state = await saved(decoder, 0)
    assert len(set(prints)) == len(prints)
    async with decoder_of(tiny, lora=((moved, 1.0),)) as decoder:
        assert await decoder.state_fingerprint() == prints[1]
        with pytest.raises(DecodeError, match="another model, adapter"):
            await decoder.load(0, state, 1)


def load_error(model: Model, *lora: tuple[Path, float]) -> str:
    """What is said of adapters that cannot be loaded; nothing of them stays."""
    with pytest.raises(ModelLoadError) as caught:
        LlamaDecoder(model, context_size=512, parallel=2, threads=1, lora=lora)
    assert model.decoders == 0
    return caught.value.reason


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda path: path.unlink(), "there is no such file"),
        (lambda path: path.write_bytes(b""), "the file is empty"),
        (lambda path: path.write_text("<html>"), "it looks like a web page"),
        (lambda path: path.write_bytes(path.read_bytes()[:200]), "it was cut off"),
        (lambda path: path.write_bytes(path.read_bytes()[:-64]), "64 of .* bytes are missing at its end"),
        (lambda path: write_adapter(path, seed=1, architecture="qwen2"), "of architecture 'qwen2', .* is 'llama'"),
        (lambda path: write_adapter(path, seed=1, embd=32), r"have the shapes 32 x 4 and 4 x 32; .* 64 x 4 and 4 x 64"),
        (lambda path: write_adapter(path, seed=1, layer=7), "which the model does not have"),
    ],
)
def test_what_is_no_adapter_of_this_model_is_a_load_error(tiny: Model, tmp_path: Path, spoil: Any, match: str) -> None:
    path, good = (write_adapter(tmp_path / name, seed=1) for name in ("adapter.gguf", "good.gguf"))
    spoil(path)
    for lora in ([(path, 1.0)], [(good, 1.0), (path, 1.0)]):
        reason = load_error(tiny, *lora)
        assert reason.startswith(f"adapter '{path}': ")
        assert re.search(match, reason)


def test_directories_pipes_and_impossible_names_are_no_adapters(tiny: Model, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "it is a directory; name the .gguf file in it" in load_error(tiny, (tmp_path, 1.0))
    assert "it is no regular file" in load_error(tiny, (tmp_path / "pipe.gguf", 1.0))
    assert "a null character" in load_error(tiny, (Path("a\0b"), 1.0))


def test_a_model_is_no_adapter(tiny: Model, tiny_path: Path) -> None:
    assert "it is a model, not an adapter" in load_error(tiny, (tiny_path, 1.0))


def test_an_error_of_llama_itself_names_no_function(
    tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is wrong with the file only after it was checked."""
    path = write_adapter(tmp_path / "adapter.gguf", seed=1)
    monkeypatch.setattr("laneway_native._decoder.check_adapters", lambda *_: None)
    path.write_bytes(path.read_bytes()[:-64])
    reason = load_error(tiny, (path, 1.0))
    assert reason.startswith(f"adapter '{path}': failed to apply lora adapter: LoRA tensor ")
    path.unlink()
    assert load_error(tiny, (path, 1.0)).startswith(f"adapter '{path}': failed to open ")


@pytest.mark.parametrize(("alpha", "scale"), [(3.4e38, 2.0), (8.0, 1e38), (0.0, 1e39), (-3e38, 1e300)])
def test_a_factor_beyond_single_precision_is_a_load_error(
    tiny: Model, tmp_path: Path, alpha: float, scale: float
) -> None:
    metadata, tensors = adapters.adapter_parts()
    path = write_gguf(tmp_path / "adapter.gguf", metadata | {adapters.ALPHA: alpha}, tensors)
    assert f"a scale of {scale:g} with adapter.lora.alpha" in load_error(tiny, (path, scale))


# Of the types that adapters come in, and one that llama.cpp can compute all the same.
@pytest.mark.parametrize("kind", [0, 1, adapters.BF16, 8, 2])
async def test_adapters_of_each_type_load(tiny: Model, tmp_path: Path, kind: int) -> None:
    path = write_gguf(tmp_path / "adapter.gguf", *adapters.adapter_parts(kind=kind))
    plain, changed = [await answers_of(tiny, lora) for lora in ((), ((path, 4.0),))]
    # The random numbers change the answer; those types that the test writes zeros in do not.
    assert (changed != plain) == (kind in (0, 1))


async def answers_of(model: Model, lora: Sequence[tuple[Path, float]]) -> list[int]:
    async with decoder_of(model, lora=lora) as decoder:
        return await answer(decoder, prompts(model)[0], 16)


async def test_what_an_adapter_may_also_have(tiny: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No alpha, norms, an invocation, a small alignment, other metadata; ones behind the two sides."""
    metadata, tensors = adapters.adapter_parts()
    del metadata[adapters.ALPHA]
    metadata |= {
        adapters.INVOCATION: Array(ValueType.U32, [3, 4]),
        "general.alignment": 8,
        "general.name": "mine",
        "adapter.lora.prompt_prefix": "x",
    }
    tensors[0] = attrs.evolve(tensors[0], dims=(*tensors[0].dims, 1, 1))
    tensors.append(adapters.matrix("blk.0.attn_norm.weight", (64,)))
    path = write_gguf(tmp_path / "adapter.gguf", metadata, tensors, alignment=8)
    with caplog.at_level("WARNING", "laneway.llama"):
        assert await answers_of(tiny, [(path, 4.0)]) != await answers_of(tiny, [])
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "does not apply its 1 norm vectors" in said[0]
    assert "it acts on the whole prompt" in said[1]


def embedding_adapter(path: Path, vocabulary: int) -> Path:
    metadata, _ = adapters.adapter_parts()
    a, b = (f"token_embd.weight.lora_{half}" for half in "ab")
    return write_gguf(path, metadata, [adapters.matrix(a, (4, vocabulary)), adapters.matrix(b, (4, 64))])


async def test_embeddings_are_changed_where_they_do_not_make_the_logits(tiny: Model, tmp_path: Path) -> None:
    path = embedding_adapter(tmp_path / "adapter.gguf", tiny.size)
    assert await answers_of(tiny, [(path, 1.0)]) != await answers_of(tiny, [])
    with Model.load(write_tiny_model(tmp_path / "tied.gguf", tied=True)) as tied:
        assert "make the logits too in this model" in load_error(tied, (path, 1.0))


async def test_numbers_that_give_nan_are_a_decode_error(tmp_path: Path) -> None:
    """Finite numbers, which the check lets through, can be too large together."""
    with Model.load(write_tiny_model(tmp_path / "tiny.gguf")) as model:
        metadata, tensors = adapters.adapter_parts()
        large = [attrs.evolve(tensor, data=struct.pack("<f", 3e38) * (len(tensor.data) // 4)) for tensor in tensors[2:]]
        huge = write_gguf(tmp_path / "huge.gguf", metadata, large)
        with pytest.raises(DecodeError, match="NaN"):
            await answers_of(model, [(huge, 1.0)])


def test_adapters_have_their_share_of_a_graph_of_fixed_size(tiny_path: Path, tmp_path: Path) -> None:
    header = check_gguf(tiny_path)
    paths = [(str(write_adapter(tmp_path / f"{layer}.gguf", seed=1, layer=layer)), 1.0) for layer in (0, 1)]
    check_adapters(header, paths * 60)
    # As if its graph were one of those; the model has 21 tensors, and each adapter changes two matrices.
    fixed = attrs.evolve(header, architecture="qwen35")
    for number, (path, _) in enumerate(paths):
        metadata = adapters.adapter_parts()[0] | {"general.architecture": "qwen35"}
        tensors = [adapters.matrix(f"blk.{number}.attn_q.weight.lora_{half}", (64, 64)) for half in "ab"]
        write_gguf(path, metadata, tensors)
    check_adapters(fixed, paths * 42)
    with pytest.raises(ModelLoadError, match=r"change 85 matrices; a model of architecture 'qwen35' .* room for 84"):
        check_adapters(fixed, paths * 43)


@pytest.mark.parametrize("lora", [["adapter.gguf"], [("a.gguf", "1")], [("a.gguf", float("nan"))], [(1, 1.0)], [None]])
def test_bad_options(tiny: Model, lora: Any) -> None:
    with pytest.raises(ModelLoadError, match=r"lora is a list of pairs|the scale of adapter"):
        LlamaDecoder(tiny, context_size=512, parallel=2, threads=1, lora=lora)
