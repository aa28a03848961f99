"""Adapter files for tests: good ones, and a corpus of broken ones with what each is refused for."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

import attrs

from tests.tiny_model import Array, Plain, Tensor, TensorType, Value, ValueType, gguf_bytes, tiny_model_parts

EMBD = 64
RANK = 32
"""A multiple of the blocks of Q8_0, so that both matrices of a pair can be of that type."""

Metadata = dict[str, Plain]

ALPHA = "adapter.lora.alpha"
INVOCATION = "adapter.alora.invocation_tokens"
Q8_1, Q8_K, I8, I16, I32, I64, F64 = 9, 15, 24, 25, 26, 27, 28
BF16 = 30
Q4_1 = 3
A, B = "blk.0.attn_q.weight.lora_a", "blk.0.attn_q.weight.lora_b"

BYTES = {0: 4, 1: 2, BF16: 2, I8: 1, I16: 2, I32: 4, I64: 8, F64: 8}
"""Bytes of a number."""
BLOCKS = {2: (32, 18), Q4_1: (32, 20), 8: (32, 34), Q8_1: (32, 36), Q8_K: (256, 292), 12: (256, 144)}


def size_of(dims: tuple[int, ...], kind: int) -> int:
    block, size = BLOCKS.get(kind, (1, BYTES.get(kind, 4)))
    return -(-math.prod(dims) // block) * size


def matrix(name: str, dims: tuple[int, ...], kind: int = TensorType.F32, *, seed: int = 0) -> Tensor:
    """A tensor of small random numbers; of zeros if it is neither F32 nor F16."""
    count = math.prod(dims)
    if kind not in (TensorType.F32, TensorType.F16):
        return Tensor(name, dims, kind, bytes(size_of(dims, kind)))
    rng = random.Random(f"{name}{seed}")
    values = [rng.uniform(-0.5, 0.5) for _ in range(count)]
    return Tensor(name, dims, kind, struct.pack(f"<{count}{'f' if kind == TensorType.F32 else 'e'}", *values))


def adapter_parts(*, kind: int = TensorType.F32, rank: int = RANK, seed: int = 0) -> tuple[Metadata, list[Tensor]]:
    """A good adapter of one layer's query and output matrices of the tiny model."""
    metadata: Metadata = {
        "general.architecture": "llama",
        "general.type": "adapter",
        "adapter.type": "lora",
        ALPHA: 8.0,
    }
    tensors = []
    for name in ("attn_q", "attn_output"):
        tensors.append(matrix(f"blk.0.{name}.weight.lora_a", (EMBD, rank), kind, seed=seed))
        tensors.append(matrix(f"blk.0.{name}.weight.lora_b", (rank, EMBD), kind, seed=seed))
    return metadata, tensors


@attrs.frozen
class Broken:
    """A file that is no adapter of the tiny model, and a regular expression of what the error says."""

    name: str
    content: bytes = attrs.field(repr=False)
    match: str


def _with(change: Callable[[Metadata, list[Tensor]], None], **options: Any) -> bytes:
    metadata, tensors = adapter_parts()
    change(metadata, tensors)
    return gguf_bytes(metadata, tensors, **options)


def _set(key: str, value: Plain) -> bytes:
    return _with(lambda metadata, _: metadata.update({key: value}))


def _replace(*changed: Tensor) -> bytes:
    """The file with tensors of these names in the place of the old ones; a new name comes at the end."""

    def change(_: Metadata, tensors: list[Tensor]) -> None:
        for tensor in changed:
            at = next((at for at, old in enumerate(tensors) if old.name == tensor.name), len(tensors))
            tensors[at : at + 1] = [tensor]

    return _with(change)


_ONE: dict[ValueType, object] = dict.fromkeys(ValueType, 1) | {
    ValueType.F32: 1.0,
    ValueType.F64: 1.0,
    ValueType.BOOL: True,
    ValueType.STRING: "lora",
}


def _wrong_types() -> Iterator[Broken]:
    keys = {
        "general.architecture": ValueType.STRING,
        "general.type": ValueType.STRING,
        "adapter.type": ValueType.STRING,
        ALPHA: ValueType.F32,
    }
    for key, right in keys.items():
        for kind, value in _ONE.items():
            if kind is ValueType.ARRAY:
                content, found = _set(key, Array(right, [_ONE[right]])), f"an array of {right.name.lower()}"
            elif kind is right:
                continue
            else:
                content, found = _set(key, Value(kind, value)), kind.name.lower()
            yield Broken(f"{key} as {found}", content, rf"metadata '{key}' is stored as {found}; it must be")
    for kind in (ValueType.I32, ValueType.U64, ValueType.F32, ValueType.STRING):
        content = _set(INVOCATION, Array(kind, [_ONE[kind]]))
        yield Broken(
            f"invocation tokens of {kind.name}", content, rf"stored as an array of {kind.name.lower()}; it must"
        )
    yield Broken("invocation tokens as a number", _set(INVOCATION, 1), "is stored as u32; it must be an array of u32")


def _wrong_values() -> Iterator[Broken]:
    for key in ("general.architecture", "general.type", "adapter.type"):
        content = _with(lambda metadata, _, key=key: metadata.pop(key))  # type: ignore[misc]
        yield Broken(f"no {key}", content, f"metadata '{key}' is missing")
        for word in ("", "x", "LORA", "\ufffd" * 400):
            match = "is for models of architecture" if key == "general.architecture" else f"{key} is '.*'; it must be"
            yield Broken(f"{key} {word[:4]!r}", _set(key, word), match)
    for number in (math.nan, math.inf, -math.inf):
        yield Broken(f"alpha {number}", _set(ALPHA, number), "adapter.lora.alpha is .*; it must be a finite number")
    yield Broken(
        "architecture of another family", _set("general.architecture", "qwen2"), "'qwen2', and this one is 'll"
    )
    yield Broken("invocation of no token", _set(INVOCATION, Array(ValueType.U32, [1, 1 << 31])), "has the token 2,147,")
    yield Broken("odd alignment", _set("general.alignment", 24), "is no power of two")
    yield Broken("alignment as text", _set("general.alignment", "32"), "must be u32")


def _wrong_tensor_types() -> Iterator[Broken]:
    for kind, label in ((I8, "I8"), (I16, "I16"), (I32, "I32"), (I64, "I64"), (F64, "F64"), (Q8_1, "Q8_1")):
        a, b = matrix(A, (EMBD, RANK), kind), matrix(B, (RANK, EMBD), kind)
        for name, tensors in (("a", (a,)), ("b", (b,)), ("a and b", (a, b))):
            yield Broken(f"{name} of {label}", _replace(*tensors), f"is stored as {label}, which no matrix")
    wide = matrix(A, (256, RANK), Q8_K)
    yield Broken("a of Q8_K", _replace(wide), "is stored as Q8_K, which no matrix")
    for kind in (4, 5, 31, 36, 38):
        yield Broken(f"type {kind}", _replace(matrix(A, (EMBD, RANK), kind)), f"has type {kind}, which llama.cpp has")
    for kind in (43, 99, 1 << 31):
        yield Broken(f"type {kind}", _replace(matrix(A, (EMBD, RANK), kind)), f"has type {kind}, which this llama.cpp")
    yield Broken("rank beside blocks", _replace(matrix(B, (20, EMBD), 8)), "no multiple of Q8_0's 32")
    yield Broken("rows beside blocks", _replace(matrix(A, (EMBD, RANK), 12)), "no multiple of Q4_K's 256")


def _wrong_shapes() -> Iterator[Broken]:
    shapes: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = [
        ("third dimension of a", (EMBD, RANK, 2), (RANK, EMBD)),
        ("third dimension of b", (EMBD, RANK), (RANK, EMBD, 2)),
        ("third dimension of both", (EMBD, RANK, 2), (RANK, EMBD, 2)),
        ("fourth dimension of a", (EMBD, RANK, 1, 3), (RANK, EMBD)),
        ("fourth dimension of both", (EMBD, RANK, 2, 2), (RANK, EMBD, 2, 2)),
        ("a transposed", (RANK, EMBD), (RANK, EMBD)),
        ("b transposed", (EMBD, RANK), (EMBD, RANK)),
        ("both transposed", (RANK, EMBD), (EMBD, RANK)),
        ("ranks apart", (EMBD, RANK), (RANK * 2, EMBD)),
        ("rank 1 and more", (EMBD, 1), (RANK, EMBD)),
        ("a vector as a", (EMBD,), (RANK, EMBD)),
        ("a vector as b", (EMBD, RANK), (RANK,)),
        ("vectors", (EMBD * RANK,), (EMBD * RANK,)),
        ("narrow a", (EMBD - 1, RANK), (RANK, EMBD)),
        ("wide a", (EMBD * 2, RANK), (RANK, EMBD)),
        ("short b", (EMBD, RANK), (RANK, EMBD - 1)),
        ("long b", (EMBD, RANK), (RANK, EMBD * 2)),
    ]
    for name, a, b in shapes:
        yield Broken(name, _replace(matrix(A, a), matrix(B, b)), "have the shapes .* they must be")
    k, v = (f"blk.0.attn_k.weight.lora_{half}" for half in "ab")
    yield Broken("rows of another matrix", _replace(matrix(k, (EMBD, 4)), matrix(v, (4, EMBD))), "they must be 64 x 4")
    embeddings = [f"token_embd.weight.lora_{half}" for half in "ab"]
    vocabulary = 3 * EMBD  # not the model's
    for name, a, b in (
        ("embeddings multiplied", (EMBD, RANK), (RANK, vocabulary)),
        ("embeddings of another vocabulary", (RANK, vocabulary), (RANK, EMBD)),
        ("embeddings, ranks apart", (RANK, vocabulary), (2 * RANK, EMBD)),
        ("embeddings, b transposed", (RANK, vocabulary), (EMBD, RANK)),
    ):
        pair = [matrix(half, dims) for half, dims in zip(embeddings, (a, b), strict=True)]
        yield Broken(name, _replace(*pair), "'token_embd.weight.lora_b' have the shapes .* they must be")
    for name, dims, match in (
        ("no columns", (0, RANK), "has a dimension of 0"),
        ("no rank", (EMBD, 0), "has a dimension of 0"),
        ("no dimensions", (), "has 0 dimensions"),
        ("five dimensions", (EMBD, RANK, 1, 1, 1), "has 5 dimensions"),
        ("rank beyond the file", (EMBD, 1 << 20), "inside the one before it"),
        ("rank beyond memory", (EMBD, 1 << 60), "more than memory can hold"),
        ("rank beyond 63 bits", (EMBD, (1 << 64) - 1), "more than memory can hold"),
    ):
        yield Broken(name, _replace(Tensor(A, dims, 0, bytes(EMBD * RANK * 4))), match)


def _wrong_names() -> Iterator[Broken]:
    a, b = adapter_parts()[1][:2]

    def named(*names: str | bytes) -> bytes:
        tensors = [attrs.evolve((a, b)[at % 2], name=name) for at, name in enumerate(names)]
        return gguf_bytes(adapter_parts()[0], tensors)

    yield Broken("no tensors", gguf_bytes(adapter_parts()[0]), "has no tensors")
    yield Broken("a norm alone", named("blk.0.attn_norm.weight"), "has no pair")
    yield Broken("a alone", named(A), "without the other one of the pair")
    yield Broken("b alone", gguf_bytes(adapter_parts()[0], [b]), "without the other one")
    yield Broken("a of one and b of another", named(A, B.replace("_q", "_k")), "without the other one of the pair")
    yield Broken("a twice", named(A, A), "is there twice")
    yield Broken("no suffix", named(A.removesuffix(".lora_a"), B), "is none of a LoRA adapter")
    yield Broken("capital suffix", named(A.upper(), B), "is none of a LoRA adapter")
    yield Broken("another suffix", named(A + ".weight", B), "is none of a LoRA adapter")
    yield Broken("PEFT's names", named("base_model.model.layers.0.q_proj.lora_A.weight", B), "is none of a LoRA")
    yield Broken("suffix twice", named(A + ".lora_a", B + ".lora_b"), "which the model does not have")
    yield Broken("suffix inside", named("blk.0.lora_a.attn_q.weight.lora_a", B), "which the model does not have")
    yield Broken("a suffix alone", named(".lora_a", ".lora_b"), "which the model does not have")
    yield Broken("a layer too many", named(A.replace("0", "9"), B.replace("0", "9")), "which the model does not have")
    yield Broken("a bias", named(A.replace("weight", "bias"), B.replace("weight", "bias")), "model does not have")
    norm = "blk.0.attn_norm.weight"
    yield Broken("a pair of a norm", named(f"{norm}.lora_a", f"{norm}.lora_b"), "a vector of the model")
    yield Broken("no name", named("", B), "has no name")
    yield Broken("a long name", named("x" * 57 + ".lora_a", B), "has a name of 64 characters")
    yield Broken("a name in Latin-1", named(b"\xe9.lora_a", B), "is not valid UTF-8")
    yield Broken("a name with a null", named(b"\0.lora_a", B), "has a null character")


def _wrong_layout() -> Iterator[Broken]:
    a, b = adapter_parts()[1][:2]

    def at(first: int, second: int) -> bytes:
        moved = [attrs.evolve(a, offset=first), attrs.evolve(b, offset=second)]
        return gguf_bytes(adapter_parts()[0], moved)

    size = len(a.data)
    yield Broken("offset unaligned", at(0, size + 4), "is not aligned to 32")
    yield Broken("tensors overlap", at(0, size - 32), "inside the one before it")
    yield Broken("one place for two", at(0, 0), "inside the one before it")
    yield Broken("a gap", at(0, size + 32), "and not at")
    yield Broken("offset beyond the file", at(0, 1 << 40), "and not at")
    yield Broken("offset of 64 bits", at(0, (1 << 64) - 32), "and not at")
    yield Broken("first not at the start", at(32, size + 32), "and not at")
    whole = _with(lambda *_: None)
    for share in (0.02, 0.05, 0.5, 0.999):
        yield Broken(f"cut at {share}", whole[: int(len(whole) * share)], "cut off")
    yield Broken("counts lie", _with(lambda *_: None, tensor_count=1 << 40), "cannot describe")
    yield Broken("more tensors", _with(lambda *_: None, tensor_count=9), "damaged|name|dimensions|bytes|type|twice")
    yield Broken("entries lie", _with(lambda *_: None, entry_count=1 << 50), "cannot hold")
    yield Broken("fewer entries", _with(lambda *_: None, entry_count=3), ".")
    yield Broken("version 1", _with(lambda *_: None, version=1), "GGUF version 1")
    yield Broken("version 4", _with(lambda *_: None, version=4), "GGUF version 4")
    yield Broken("big-endian", _with(lambda *_: None, version=3 << 24), "big-endian")


def _wrong_numbers() -> Iterator[Broken]:
    for kind, numbers in (
        (0, (b"\0\0\xc0\x7f", b"\1\0\x80\xff", b"\0\0\x80\x7f", b"\0\0\x80\xff")),
        (1, (b"\0\x7e", b"\0\x7c", b"\1\xfc")),
        (BF16, (b"\xc0\x7f", b"\x80\xff")),
    ):
        for number in numbers:
            for tensor in (matrix(A, (EMBD, RANK), kind), matrix(B, (RANK, EMBD), kind)):
                data = bytearray(tensor.data)
                at = len(data) // 2 // len(number) * len(number)
                data[at : at + len(number)] = number
                name = f"{number.hex()} in {tensor.name!s}"
                yield Broken(name, _replace(attrs.evolve(tensor, data=bytes(data))), "holds NaN or infinity")
    for kind, places in ((2, (0,)), (Q4_1, (0, 2)), (8, (0,))):
        for place in places:
            for tensor in (matrix(A, (EMBD, RANK), kind), matrix(B, (RANK, EMBD), kind)):
                data = bytearray(tensor.data)
                at = len(data) - BLOCKS[kind][1] + place
                data[at : at + 2] = b"\1\x7e"
                name = f"a block of type {kind} with NaN at {place} in {tensor.name!s}"
                yield Broken(name, _replace(attrs.evolve(tensor, data=bytes(data))), "holds NaN or infinity")


def _other_files() -> Iterator[Broken]:
    metadata, tensors = tiny_model_parts()
    yield Broken("a model", gguf_bytes(metadata, tensors), "it is a model, not an adapter")
    yield Broken("a model that says so", gguf_bytes(metadata | {"general.type": "model"}, tensors), "it is a model")
    direction = [Tensor(f"direction.{layer}", (EMBD,), 0, bytes(EMBD * 4)) for layer in (1, 2)]
    control: Metadata = {"general.architecture": "controlvector", "controlvector.model_hint": "llama"}
    yield Broken("a control vector", gguf_bytes(control, direction), "it is a control vector")
    projector: Metadata = {"general.architecture": "clip", "general.type": "mmproj"}
    yield Broken("a projector", gguf_bytes(projector, direction), "general.type is 'mmproj'")
    yield Broken("nothing", b"", "the file is empty")
    yield Broken("zeros", bytes(4096), "its first 1024 bytes are zero")
    yield Broken("a web page", b"<html><body>404</body></html>", "it looks like a web page")
    yield Broken("a zip archive", b"PK\x03\x04" + bytes(60), "it looks like a zip archive")
    yield Broken("an old adapter", b"algg" + bytes(60), "a LoRA adapter from before GGUF")
    yield Broken("a Git LFS pointer", b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer")
    yield Broken("safetensors", struct.pack("<Q", 20) + b'{"a":{"dtype":"F32"}}' + bytes(60), "safetensors")


def systematic() -> list[Broken]:
    """One broken file for each way in which one can be broken."""
    parts = (
        _wrong_types,
        _wrong_values,
        _wrong_tensor_types,
        _wrong_shapes,
        _wrong_names,
        _wrong_layout,
        _wrong_numbers,
        _other_files,
    )
    return [broken for part in parts for broken in part()]


def flipped(count: int, seed: int) -> Iterator[bytes]:
    """Good adapters with flipped bits in header and tensor table; some stay good."""
    rng = random.Random(seed)
    for _ in range(count):
        metadata, tensors = adapter_parts(kind=rng.choice((0, 1, 8)))
        if rng.random() < 0.3:
            metadata[INVOCATION] = Array(ValueType.U32, [3, 4])
        content = bytearray(gguf_bytes(metadata, tensors))
        header = len(content) - sum(-(-len(tensor.data) // 32) * 32 for tensor in tensors)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            content[rng.randrange(header)] ^= 1 << rng.randrange(8)
        yield bytes(content)
