"""Broken adapters: each one is refused with a reason, or it is applied.  None of them ends the process."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest

from laneway.decoder import ModelLoadError
from laneway_native import check_gguf
from laneway_native._gguf_adapter import check_adapter
from laneway_native._gguf_file import NO_MATRIX, TENSOR_TYPES
from tests.tiny_model import Array, Plain, Tensor, Value, ValueType, gguf_bytes, tiny_model_parts, write_gguf

CHILD = Path(__file__).with_name("load_models.py")
RANK = 32
WIDTH = 64
FLIPPED = 100

Metadata = dict[str, Plain]
Damage = Callable[[Metadata, list[Tensor]], None]


def stored(name: str, dims: tuple[int, ...], kind: int = 0, fill: float = 0.01) -> Tensor:
    """A tensor of any type: F32 numbers, and for the other types zero bytes."""
    _, block, size = TENSOR_TYPES[kind]
    count = math.prod(dims)
    data = struct.pack("<f", fill) * count if kind == 0 else bytes(-(-count // block) * size)
    return Tensor(name, dims, kind, data)


def parts(base: str = "blk.0.attn_q.weight", kind: int = 0) -> tuple[Metadata, list[Tensor]]:
    """A valid adapter of one matrix."""
    metadata: Metadata = {
        "general.architecture": "llama",
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": 8.0,
    }
    return metadata, [
        stored(f"{base}.lora_a", (WIDTH, RANK), kind),
        stored(f"{base}.lora_b", (RANK, WIDTH), kind),
    ]


def metadata_damage() -> Iterator[tuple[str, Damage]]:
    """Each value that llama.cpp reads, missing, of every other type, and wrong."""

    def put(key: str, value: Plain) -> Damage:
        return lambda metadata, tensors: metadata.update({key: value})

    def drop(key: str) -> Damage:
        return lambda metadata, tensors: metadata.__delitem__(key)

    texts = ("general.type", "general.architecture", "adapter.type")
    for key in (*texts, "adapter.lora.alpha"):
        right = ValueType.F32 if key == "adapter.lora.alpha" else ValueType.STRING
        for kind in ValueType:
            if kind in (right, ValueType.ARRAY):
                continue
            value: Plain = "x" if kind is ValueType.STRING else Value(kind, True if kind is ValueType.BOOL else 1)
            yield f"{key} as {kind.name}", put(key, value)
        yield f"{key} as an array", put(key, Array(ValueType.U32, [1, 2]))
    for key in texts:
        yield f"no {key}", drop(key)
        for text in ("", "model", "qwen2", "loha"):
            yield f"{key} {text!r}", put(key, text)
    for number in (math.nan, math.inf, -math.inf):
        yield f"alpha {number}", put("adapter.lora.alpha", number)
    for tokens in (Array(ValueType.U32, [1, 2]), Array(ValueType.I32, [1]), Array(ValueType.STRING, ["x"]), 7):
        yield f"activated by {tokens}", put("adapter.alora.invocation_tokens", tokens)
    yield "alignment 0", put("general.alignment", 0)
    yield "alignment 8", put("general.alignment", 8)


def tensor_damage() -> Iterator[tuple[str, Damage]]:
    """Each tensor with every wrong type, shape and name."""

    def change(index: int, **changes: object) -> Damage:
        def damage(metadata: Metadata, tensors: list[Tensor]) -> None:
            old = tensors[index]
            dims = changes.get("dims", old.dims)
            kind = changes.get("kind", old.type)
            assert isinstance(dims, tuple)
            assert isinstance(kind, int)
            tensors[index] = stored(str(changes.get("name", old.name)), dims, kind)

        return damage

    def without(*indices: int) -> Damage:
        def damage(metadata: Metadata, tensors: list[Tensor]) -> None:
            tensors[:] = [tensor for index, tensor in enumerate(tensors) if index not in indices]

        return damage

    def add(*more: Tensor) -> Damage:
        return lambda metadata, tensors: tensors.extend(more)

    def at(index: int, other: str) -> str:
        return f"{other}.lora_{'ab'[index]}"

    for index in (0, 1):
        half = "ab"[index]
        dims = ((WIDTH, RANK), (RANK, WIDTH))[index]
        for kind in sorted(NO_MATRIX):
            # Wide enough for the largest blocks, so that the type alone is what is wrong.
            yield (
                f"{half} as {TENSOR_TYPES[kind][0]}",
                change(index, kind=kind, dims=(256, 256) if kind == 15 else dims),
            )
        for shape in (
            (*dims, 2),
            (*dims, 1, 2),
            (*dims, 2, 2),
            dims[::-1],
            (dims[0],),
            (dims[1],),
            (dims[0], dims[1] + 1),
            (dims[0] + 32, dims[1]),
            (1, 1),
            (dims[0] * dims[1],),
            (dims[0], dims[1] * 2),
        ):
            yield f"{half} of {shape}", change(index, dims=shape)
        yield f"no {half}", without(index)
        for name in (
            f"blk.0.attn_q.weight.lora_{half}.lora_{half}",
            f".lora_{half}",
            f"blk.9.attn_q.weight.lora_{half}",
            f"blk.0.attn_q.weight.LORA_{half.upper()}",
            f"blk.0.attn_q.weight.lora_{half}x",
            "blk.0.attn_q.weight",
        ):
            yield f"{half} called {name}", change(index, name=name)
    yield "no tensors", without(0, 1)
    yield "two of one name", add(stored("blk.0.attn_q.weight.lora_a", (WIDTH, RANK)))
    yield "a stranger", add(stored("direction.1", (WIDTH,)))
    yield (
        "a norm alone",
        lambda metadata, tensors: tensors.__setitem__(slice(None), [stored("blk.0.attn_norm.weight", (WIDTH,))]),
    )
    yield (
        "rank 0",
        lambda metadata, tensors: tensors.__setitem__(
            slice(None),
            [
                Tensor(at(0, "blk.0.attn_q.weight"), (WIDTH, 0), 0, b""),
                Tensor(at(1, "blk.0.attn_q.weight"), (0, WIDTH), 0, b""),
            ],
        ),
    )
    for base, shapes in (
        ("blk.0.attn_q.weight", ((WIDTH, 4096), (4096, WIDTH))),  # a rank beyond all sense
        ("blk.7.attn_q.weight", ((WIDTH, RANK), (RANK, WIDTH))),
        ("blk.0.attn_norm.weight", ((WIDTH, RANK), (RANK, 1))),
        ("output_norm.weight", ((WIDTH, RANK), (RANK, 1))),
        ("blk.0.ffn_up.weight", ((WIDTH, RANK), (RANK, WIDTH))),
        ("token_embd.weight", ((WIDTH, RANK), (RANK, 416))),  # laid out as if it were multiplied
        ("token_embd.weight", ((RANK, 416), (RANK + 32, WIDTH))),
    ):

        def of(base: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> Damage:
            return lambda metadata, tensors: tensors.__setitem__(
                slice(None), [stored(at(index, base), dims) for index, dims in enumerate(shapes)]
            )

        yield f"{base} {shapes}", of(base, shapes)


def systematic() -> Iterator[tuple[str, bytes]]:
    """What each damage makes of the valid adapter."""
    for name, damage in itertools.chain(metadata_damage(), tensor_damage()):
        metadata, tensors = parts()
        damage(metadata, tensors)
        yield name, gguf_bytes(metadata, tensors)
    content = gguf_bytes(*parts())
    yield "nothing", b""
    yield "a web page", b"<html></html>"
    for cut in (3, 24, 100, 300, len(content) - 64, len(content) - 4000):
        yield f"cut at {cut}", content[:cut]
    yield "a whole model", gguf_bytes(*tiny_model_parts(layers=1, embd=32, heads=2, kv_heads=1, ff=32))


def flipped(count: int) -> Iterator[tuple[str, bytes]]:
    """The valid adapter with some bits of its header and table turned over."""
    content = gguf_bytes(*parts())
    header = len(content) - sum(len(tensor.data) for tensor in parts()[1])
    for seed in range(count):
        rng = random.Random(seed)
        damaged = bytearray(content)
        for _ in range(rng.choice((1, 1, 2, 6))):
            damaged[rng.randrange(header)] ^= 1 << rng.randrange(8)
        yield f"flip {seed}", bytes(damaged)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with an output matrix that is not its embeddings."""
    metadata, tensors = tiny_model_parts(layers=1)
    return write_gguf(tmp_path_factory.mktemp("adapters") / "base.gguf", metadata, tensors)


def apply_all(base: Path, paths: list[Path]) -> dict[str, str]:
    """How applying each adapter went, in a child process that none of them may end."""
    done = subprocess.run(
        [sys.executable, str(CHILD), str(base)],
        input="".join(f"{path}\n" for path in paths),
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert said, done.stderr
    assert done.returncode == 0, f"ended by {said[-1]['path']}:\n{done.stderr[-3000:]}"
    outcomes = {line["path"]: line["outcome"] for line in said if "outcome" in line}
    assert list(outcomes) == list(map(str, paths))
    return outcomes


def written(folder: Path, files: Iterator[tuple[str, bytes]]) -> dict[str, Path]:
    named = {}
    for number, (name, content) in enumerate(files):
        named[name] = folder / f"{number}.gguf"
        named[name].write_bytes(content)
    return named


C_FUNCTION = re.compile(r"\b(?:llama|ggml|gguf)_\w+: ")


@pytest.mark.slow
def test_every_broken_adapter_is_refused_and_ends_nothing(base: Path, tmp_path: Path) -> None:
    named = written(tmp_path, systematic())
    assert len(named) >= 130
    outcomes = apply_all(base, list(named.values()))
    for name, path in named.items():
        outcome = outcomes[str(path)]
        assert outcome.startswith("ModelLoadError"), f"{name}: {outcome}"
        assert str(path) in outcome, f"{name}: {outcome}"
        assert not C_FUNCTION.search(outcome), f"{name}: {outcome}"


@pytest.mark.slow
def test_flipped_bits_are_refused_or_harmless(base: Path, tmp_path: Path) -> None:
    named = written(tmp_path, flipped(FLIPPED))
    outcomes = apply_all(base, list(named.values()))
    kinds = {outcome.partition(":")[0] for outcome in outcomes.values()}
    assert kinds <= {"used", "ModelLoadError"}
    assert len(kinds) == 2, "the drawing is no use if nothing, or everything, is fit for use"


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_adapters_of_every_type_that_can_be_multiplied_are_applied(tmp_path: Path, tied: bool) -> None:
    metadata, tensors = tiny_model_parts(layers=1, embd=256, heads=4, kv_heads=2, ff=256)
    if tied:
        tensors = [tensor for tensor in tensors if tensor.name != "output.weight"]
    base = write_gguf(tmp_path / "base.gguf", metadata, tensors)
    paths = []
    for kind in sorted(set(TENSOR_TYPES) - NO_MATRIX):
        adapter, _ = parts()
        both = [
            stored("blk.0.attn_q.weight.lora_a", (256, 256), kind),
            stored("blk.0.attn_q.weight.lora_b", (256, 256), kind),
        ]
        paths.append(write_gguf(tmp_path / f"{TENSOR_TYPES[kind][0]}.gguf", adapter, both))
    if not tied:
        adapter, _ = parts()
        both = [stored("token_embd.weight.lora_a", (8, 416)), stored("token_embd.weight.lora_b", (8, 256))]
        paths.append(write_gguf(tmp_path / "embeddings.gguf", adapter, both))
        both = [stored("output.weight.lora_a", (256, 8)), stored("output.weight.lora_b", (8, 416))]
        paths.append(write_gguf(tmp_path / "output.gguf", adapter, both))
    # Converters write norms beside the pairs; llama.cpp passes them over.
    adapter, both = parts()
    both = [stored(str(tensor.name), (256, 4) if "lora_a" in str(tensor.name) else (4, 256)) for tensor in both]
    paths.append(write_gguf(tmp_path / "norm.gguf", adapter, [*both, stored("blk.0.attn_norm.weight", (256,))]))
    assert set(apply_all(base, paths).values()) == {"used"}


def test_embeddings_that_are_the_output_too_cannot_be_adapted(tmp_path: Path) -> None:
    metadata, tensors = tiny_model_parts(layers=1)
    tensors = [tensor for tensor in tensors if tensor.name != "output.weight"]
    base = check_gguf(write_gguf(tmp_path / "base.gguf", metadata, tensors))
    adapter, _ = parts()
    both = [stored("token_embd.weight.lora_a", (8, 416)), stored("token_embd.weight.lora_b", (8, WIDTH))]
    with pytest.raises(ModelLoadError, match="output matrix too"):
        check_adapter(write_gguf(tmp_path / "adapter.gguf", adapter, both), base)


def test_numbers_that_are_none_end_in_a_decode_error(base: Path, tmp_path: Path) -> None:
    paths = []
    for name, bad in (("nan", math.nan), ("inf", math.inf)):
        adapter, both = parts("blk.0.attn_output.weight")
        both = [attrs.evolve(tensor, data=struct.pack("<f", bad) * (WIDTH * RANK)) for tensor in both]
        paths.append(write_gguf(tmp_path / f"{name}.gguf", adapter, both))
    for outcome in apply_all(base, paths).values():
        assert outcome.startswith("DecodeError")


def test_a_file_that_is_gone_or_a_folder_is_told(base: Path, tmp_path: Path) -> None:
    header = check_gguf(base)
    with pytest.raises(ModelLoadError, match="there is no such file"):
        check_adapter(tmp_path / "gone.gguf", header)
    with pytest.raises(ModelLoadError, match="it is a directory"):
        check_adapter(tmp_path, header)
