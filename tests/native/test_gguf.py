"""check_gguf: what a good file says, and one clear reason for each way of being wrong."""

from __future__ import annotations

import hashlib
import math
import os
import pickle
import re
import struct
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from time import process_time

import attrs
import pytest

from laneway.decoder import ModelLoadError
from laneway_native import _architectures as architectures
from laneway_native._gguf import GgufArray, check_gguf
from tests.tiny_model import (
    Array,
    Plain,
    Tensor,
    TensorType,
    Value,
    ValueType,
    gguf_bytes,
    tiny_model_parts,
    write_gguf,
    write_tiny_model,
)

Metadata = dict[str, Plain]
Spoil = Callable[[Metadata, list[Tensor]], None]


def refusal(path: str | Path) -> str:
    """The reason why a file is refused."""
    with pytest.raises(ModelLoadError) as caught:
        check_gguf(path)
    assert caught.value.source == str(path)
    assert "\n" not in caught.value.reason
    return caught.value.reason


def refusal_of(tmp_path: Path, content: bytes) -> str:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return refusal(path)


# --- good files -------------------------------------------------------------------------------------------------------


def test_header_of_a_good_file(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf", seed=3, chat_template="{{ messages }}")
    header = check_gguf(path)
    metadata, tensors = tiny_model_parts(seed=3)
    assert header.path == path
    assert header.parts == (path,)
    assert header.version == 3
    assert header.architecture == "llama"
    assert header.name == "tiny llama, seed 3"
    assert header.tensor_count == len(tensors)
    assert header.tensor_bytes == sum(len(tensor.data) for tensor in tensors)
    assert header.file_size == path.stat().st_size
    assert header.alignment == 32
    assert (header.context_length, header.block_count, header.embedding_length) == (512, 2, 64)
    assert (header.head_count, header.head_count_kv, header.key_length, header.value_length) == (4, 2, 16, 16)
    assert header.sliding_window is None
    assert header.vocabulary_size == 416
    assert header.file_type == 0
    assert header.chat_template == "{{ messages }}"
    assert header.metadata["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    assert header.metadata["tokenizer.ggml.add_bos_token"] is True
    assert header.metadata["tokenizer.ggml.tokens"] == GgufArray("string", 416)
    assert header.metadata.keys() == metadata.keys()
    # Two layers, two heads each, keys and values of 16 numbers, two bytes a number.
    assert header.kv_bytes_per_token() == 2 * 2 * 32 * 2
    assert header.kv_bytes_per_token(1.0625) == 2 * 2 * 32 * 1.0625


@pytest.mark.parametrize("dtype", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize("tokenizer", ["spm", "bpe"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_variant_of_the_tiny_model_passes(tmp_path: Path, dtype: str, tokenizer: str, tied: bool) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf", dtype=dtype, tokenizer=tokenizer, tied=tied)  # type: ignore[arg-type]
    assert check_gguf(path).tensor_count == 21 - tied


def test_short_arrays_are_listed_and_long_ones_counted(tmp_path: Path) -> None:
    metadata, tensors = tiny_model_parts()
    metadata["general.tags"] = Array(ValueType.STRING, ["a", "b"])
    metadata["general.numbers"] = Array(ValueType.F64, [0.5] * 64)
    metadata["general.more"] = Array(ValueType.U8, [1] * 65)
    shown = check_gguf(write_gguf(tmp_path / "m.gguf", metadata, tensors)).metadata
    assert shown["general.tags"] == ("a", "b")
    assert shown["general.numbers"] == (0.5,) * 64
    assert shown["general.more"] == GgufArray("u8", 65)


def test_metadata_in_another_encoding_is_no_reason_to_refuse(tmp_path: Path) -> None:
    metadata, tensors = tiny_model_parts()
    metadata["general.description"] = Value(ValueType.STRING, "Müller".encode("latin-1"))
    header = check_gguf(write_gguf(tmp_path / "m.gguf", metadata, tensors))
    assert header.metadata["general.description"] == "M�ller"


def test_a_nameless_model_is_called_like_its_file(tmp_path: Path) -> None:
    metadata, tensors = tiny_model_parts()
    del metadata["general.name"]
    assert check_gguf(write_gguf(tmp_path / "some-model.gguf", metadata, tensors)).name == "some-model"


def test_heads_may_differ_by_layer(tmp_path: Path) -> None:
    metadata, tensors = tiny_model_parts()
    metadata["llama.attention.head_count_kv"] = Array(ValueType.I32, [2, 4])
    header = check_gguf(write_gguf(tmp_path / "m.gguf", metadata, tensors))
    assert header.head_count_kv == 4
    assert header.kv_heads == 6


def test_sliding_window_and_key_sizes(tmp_path: Path) -> None:
    metadata, tensors = tiny_model_parts()
    metadata = {key.replace("llama.", "gemma2."): value for key, value in metadata.items()}
    metadata["general.architecture"] = "gemma2"
    metadata["gemma2.attention.sliding_window"] = 128
    metadata["gemma2.attention.key_length"] = 24
    metadata["gemma2.attention.value_length"] = 8
    header = check_gguf(write_gguf(tmp_path / "m.gguf", metadata, tensors))
    assert header.sliding_window == 128
    assert (header.key_length, header.value_length) == (24, 8)


def test_sha256_is_of_what_precedes_the_weights(tmp_path: Path) -> None:
    metadata, tensors = tiny_model_parts()
    content = gguf_bytes(metadata, tensors)
    weights = sum(len(tensor.data) for tensor in tensors)
    header = check_gguf(write_gguf(tmp_path / "a.gguf", metadata, tensors))
    assert header.sha256 == hashlib.sha256(content[:-weights]).hexdigest()
    tensors[0] = attrs.evolve(tensors[0], data=bytes(len(tensors[0].data)))
    assert check_gguf(write_gguf(tmp_path / "b.gguf", metadata, tensors)).sha256 == header.sha256
    metadata["llama.rope.freq_base"] = 9999.0
    assert check_gguf(write_gguf(tmp_path / "c.gguf", metadata, tensors)).sha256 != header.sha256


def test_larger_alignment(tmp_path: Path) -> None:
    metadata, tensors = tiny_model_parts()
    metadata["general.alignment"] = 256
    assert check_gguf(write_gguf(tmp_path / "m.gguf", metadata, tensors, alignment=256)).alignment == 256


def test_version_2_is_read(tmp_path: Path) -> None:
    metadata, tensors = tiny_model_parts()
    assert check_gguf(write_gguf(tmp_path / "m.gguf", metadata, tensors, version=2)).version == 2


def test_a_large_vocabulary_takes_a_fraction_of_a_second(tmp_path: Path) -> None:
    size = 262_144
    metadata, tensors = tiny_model_parts(tokenizer="bpe")
    for name, kind, items in (
        ("tokens", ValueType.STRING, [b"token %d" % token for token in range(size)]),
        ("token_type", ValueType.I32, [1] * size),
        ("merges", ValueType.STRING, [b"to ken%d" % merge for merge in range(size)]),
    ):
        metadata[f"tokenizer.ggml.{name}"] = Array(kind, items)
    for index in (0, -1):
        tensors[index] = attrs.evolve(tensors[index], dims=(64, size), data=bytes(64 * 4 * size))
    path = write_gguf(tmp_path / "m.gguf", metadata, tensors)
    start = process_time()
    header = check_gguf(path)
    seconds = process_time() - start
    assert header.vocabulary_size == size
    # A tenth of that on an idle machine.
    assert seconds < 2.0


# --- no model at all --------------------------------------------------------------------------------------------------


def test_missing(tmp_path: Path) -> None:
    assert refusal(tmp_path / "nothing.gguf") == "there is no such file"


def test_directory(tmp_path: Path) -> None:
    assert refusal(tmp_path) == "it is a directory; name the .gguf file in it"


def test_pipe_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert refusal(tmp_path / "pipe") == "it is no regular file"


def test_empty(tmp_path: Path) -> None:
    assert refusal_of(tmp_path, b"") == "the file is empty"


def test_null_character_in_the_name() -> None:
    assert refusal("a\0b") == "its name has a null character in it"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_permission(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf")
    path.chmod(0)
    assert refusal(path) == "permission denied: this user may not read it"


def test_permission_is_told_whoever_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stat_result(_path: Path) -> os.stat_result:
        raise PermissionError(13, "Permission denied")

    path = write_tiny_model(tmp_path / "m.gguf")
    monkeypatch.setattr(Path, "stat", stat_result)
    assert refusal(path) == "permission denied: this user may not read it"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"x" * 37, "it is not a GGUF file: it begins with b'xxxx', not with b'GGUF' (37 bytes)"),
        (b"GG", "it is not a GGUF file: it begins with b'GG', not with b'GGUF' (2 bytes)"),
        (b"GGUF" + bytes(10), "it has 14 bytes, fewer than the header of a GGUF file: it was cut off; fetch it again"),
        (b"\n<!DOCTYPE html><title>Not found</title>", "it looks like a web page, saved instead of the model"),
        (b"<HTML><body>Sign in</body></HTML>", "it looks like a web page, saved instead of the model"),
        (b'<?xml version="1.0"?><html xmlns="x">', "it looks like a web page, saved instead of the model"),
        (b'<?xml version="1.0"?><Error>', "it looks like an XML document, saved instead of the model"),
        (b'{"error": "Unauthorized"}', "it looks like JSON text"),
        (b"version https://git-lfs\noid sha256:00", "it looks like a Git LFS pointer"),
        (struct.pack("<Q", 2) + b"{}", "it begins with"),
        (struct.pack("<Q", 20) + b'{"a":{"dtype":"F32"}' + bytes(64), "it looks like a safetensors file"),
        (bytes(2000), "its first 1024 bytes are zero: an unfinished download, perhaps"),
        (pickle.dumps([1, 2], protocol=2), "it looks like a Python pickle"),
        (pickle.dumps([1, 2], protocol=4), "it looks like a Python pickle"),
        (b"\x1f\x8b\x08" + bytes(40), "it looks like a gzip archive"),
        (b"\x7fELF" + bytes(40), "it looks like a program or library"),
        (b"tjgg" + bytes(40), "it looks like a GGML file from before GGUF"),
        (b"a" * 257 + b"ustar" + bytes(300), "it looks like a tar archive"),
    ],
)
def test_other_files(tmp_path: Path, content: bytes, reason: str) -> None:
    assert reason in refusal_of(tmp_path, content)


def test_zip(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.gguf", "w") as archive:
        archive.writestr("model.bin", b"1234")
    assert "it looks like a zip archive" in refusal(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (0, "it is GGUF version 0; versions 2 and 3 can be read"),
        (1, "it is GGUF version 1; versions 2 and 3 can be read"),
        (4, "it is GGUF version 4; versions 2 and 3 can be read"),
        (0x03000000, "it is a big-endian GGUF file, for another kind of processor; get the little-endian one"),
    ],
)
def test_versions(tmp_path: Path, version: int, reason: str) -> None:
    metadata, tensors = tiny_model_parts()
    assert refusal_of(tmp_path, gguf_bytes(metadata, tensors, version=version)) == reason


# --- cut off, or counts that lie --------------------------------------------------------------------------------------


def test_every_truncation_is_told(tmp_path: Path) -> None:
    metadata, tensors = tiny_model_parts(layers=1, embd=32, heads=2, kv_heads=1, ff=32)
    path = write_gguf(tmp_path / "m.gguf", metadata, tensors)
    weights = sum(len(tensor.data) for tensor in tensors)
    size = path.stat().st_size
    inside_header = range(4, size - weights, 31)
    for cut in [*inside_header, size - weights, size - 1000, size - 1][::-1]:
        os.truncate(path, cut)
        assert "fetch it again" in refusal(path), cut


def test_truncated_download_says_how_much_is_missing(tmp_path: Path) -> None:
    metadata, tensors = tiny_model_parts()
    content = gguf_bytes(metadata, tensors)
    reason = refusal_of(tmp_path, content[:-1000])
    assert reason == f"1,000 of {len(content):,} bytes are missing at its end: the download was cut off; fetch it again"
    # Right behind the tensor table, where not even the padding is there.
    weights = sum(len(tensor.data) for tensor in tensors)
    assert f"{weights + 3:,} of" in refusal_of(tmp_path, content[: -weights - 3])


def test_truncated_inside_the_vocabulary(tmp_path: Path) -> None:
    metadata, tensors = tiny_model_parts()
    content = gguf_bytes(metadata, tensors)
    reason = refusal_of(tmp_path, content[: content.index(b"<unused415>") + 2])
    assert "inside metadata 'tokenizer.ggml.tokens': it was cut off or damaged; fetch it again" in reason


def test_truncated_inside_the_tensor_table(tmp_path: Path) -> None:
    metadata, tensors = tiny_model_parts()
    content = gguf_bytes(metadata, tensors)
    reason = refusal_of(tmp_path, content[: content.index(b"blk.0.attn_q") + 4])
    assert reason.startswith("its header claims 21 tensors, which the 123 bytes behind the metadata cannot describe")
    reason = refusal_of(tmp_path, content[: content.rindex(b"output.weight") + 20])
    assert "inside the description of tensor 20: it was cut off or damaged; fetch it again" in reason


def test_counts_that_the_file_cannot_hold(tmp_path: Path) -> None:
    metadata, tensors = tiny_model_parts()
    for count in (1 << 63, (1 << 64) - 1, 1 << 40, 1 << 20):
        assert f"claims {count:,} tensors" in refusal_of(tmp_path, gguf_bytes(metadata, tensors, tensor_count=count))
        assert f"claims {count:,} metadata" in refusal_of(tmp_path, gguf_bytes(metadata, tensors, entry_count=count))


@pytest.mark.parametrize("kind", [kind for kind in ValueType if kind is not ValueType.ARRAY])
def test_array_lengths_that_the_file_cannot_hold(tmp_path: Path, kind: ValueType) -> None:
    head = gguf_bytes({"a": Array(kind, [])}, entry_count=2)[:-8]
    for count in (1 << 63, 1 << 40, 1000):
        reason = refusal_of(tmp_path, head + struct.pack("<Q", count) + bytes(100))
        assert reason.startswith(f"metadata 'a' claims {count:,} items where 100 bytes are left")


def test_string_lengths_that_the_file_cannot_hold(tmp_path: Path) -> None:
    head = gguf_bytes({"a": Value(ValueType.STRING, b"")}, entry_count=2)[:-8]
    for length in ((1 << 64) - 1, 1 << 62, 101):
        reason = refusal_of(tmp_path, head + struct.pack("<Q", length) + bytes(100))
        assert reason.startswith(f"metadata 'a' claims {length:,} bytes where 100 are left")
    array = gguf_bytes({"a": Array(ValueType.STRING, [b"x"])}, entry_count=2)
    reason = refusal_of(tmp_path, array[:-9] + struct.pack("<Q", (1 << 64) - 8) + bytes(100))
    assert "inside metadata 'a'" in reason


# --- metadata and tensor table ----------------------------------------------------------------------------------------


def test_wrong_keys_and_types(tmp_path: Path) -> None:
    def reason(*pairs: tuple[str | bytes, Plain]) -> str:
        return refusal_of(tmp_path, gguf_bytes(pairs) + bytes(64))

    assert reason(("a", 1), ("a", 2)) == "metadata key 'a' is there twice"
    assert reason(("", 1)) == "metadata key 0 is empty"
    assert "metadata key 0 is not valid UTF-8" in reason((b"\xff\xfe", 1))
    assert "metadata key 0 has a null character in it" in reason(("a\0", 1))
    nested = gguf_bytes([("a", Array(ValueType.U8, [0] * 100))]).replace(
        struct.pack("<II", 9, 0), struct.pack("<II", 9, 9)
    )
    assert refusal_of(tmp_path, nested) == "metadata 'a' is an array of arrays, which llama.cpp cannot read"
    unknown = gguf_bytes([("a", 1)]).replace(struct.pack("<II", 4, 1), struct.pack("<II", 13, 1))
    assert "metadata 'a' has type 13, which GGUF does not have" in refusal_of(tmp_path, unknown)


@pytest.mark.parametrize("value", [0, 24, 3, (1 << 32) - 1])
def test_alignment_that_is_none(tmp_path: Path, value: int) -> None:
    metadata, tensors = tiny_model_parts()
    metadata["general.alignment"] = value
    assert (
        refusal_of(tmp_path, gguf_bytes(metadata, tensors)) == f"general.alignment is {value}, which is no power of two"
    )


def test_alignment_below_what_llama_cpp_maps(tmp_path: Path) -> None:
    metadata, tensors = tiny_model_parts()
    metadata["general.alignment"] = 8
    assert "general.alignment is 8; llama.cpp" in refusal_of(tmp_path, gguf_bytes(metadata, tensors, alignment=8))
    metadata["general.alignment"] = Value(ValueType.U64, 32)
    assert "stored as u64; it must be u32" in refusal_of(tmp_path, gguf_bytes(metadata, tensors))


def change(index: int, **changes: object) -> Spoil:
    def spoil(_metadata: Metadata, tensors: list[Tensor]) -> None:
        tensors[index] = attrs.evolve(tensors[index], **changes)  # type: ignore[arg-type]

    return spoil


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (change(1, name="token_embd.weight"), "tensor 'token_embd.weight' is there twice"),
        (change(1, name=b"\xff"), "the name of tensor 1 is not valid UTF-8"),
        (change(1, name=""), "tensor 1 has no name"),
        (change(1, name="a" * 64), "tensor 1 has a name of 64 characters; 63 can be read"),
        (change(1, dims=()), "has 0 dimensions; 1 to 4 can be"),
        (change(1, dims=(1, 1, 1, 1, 64)), "has 5 dimensions; 1 to 4 can be"),
        (change(1, dims=(64, 0)), "has a dimension of 0"),
        (change(1, dims=(1 << 32, 1 << 31)), "more than memory can hold"),
        (change(1, dims=((1 << 64) - 1,)), "more than memory can hold"),
        (change(1, type=99), "has type 99, which this llama.cpp does not know"),
        (change(1, type=(1 << 32) - 1), "has type 4294967295, which this llama.cpp does not know"),
        (change(1, type=4), "has type 4, which llama.cpp has dropped"),
        (change(1, type=12), "has rows of 64 weights, which are no multiple of Q4_K's 256"),
        (change(2, offset=7), "begins at offset 7, which is not aligned to 32"),
        (change(2, offset=64), "begins at offset 64, inside the one before it"),
        (change(2, offset=1 << 40), "and not at 106,752, where the one before it ends"),
        (change(-1, dims=(64, 4160)), "bytes are missing at its end"),
        (change(1, type=TensorType.F16), "begins at offset 106,752 and not at 106,624, where the one before it ends"),
    ],
)
def test_tensor_table(tmp_path: Path, spoil: Spoil, reason: str) -> None:
    metadata, tensors = tiny_model_parts()
    spoil(metadata, tensors)
    assert reason in refusal_of(tmp_path, gguf_bytes(metadata, tensors))


# --- what the model needs ---------------------------------------------------------------------------------------------


def put(key: str, value: Plain) -> Spoil:
    def spoil(metadata: Metadata, _tensors: list[Tensor]) -> None:
        metadata[key] = value

    return spoil


def drop(key: str) -> Spoil:
    def spoil(metadata: Metadata, _tensors: list[Tensor]) -> None:
        del metadata[key]

    return spoil


def both(*spoils: Spoil) -> Spoil:
    def spoil(metadata: Metadata, tensors: list[Tensor]) -> None:
        for one in spoils:
            one(metadata, tensors)

    return spoil


def drop_tensor(name: str) -> Spoil:
    def spoil(_metadata: Metadata, tensors: list[Tensor]) -> None:
        tensors[:] = [tensor for tensor in tensors if tensor.name != name]

    return spoil


def add_tensor(name: str, dims: tuple[int, ...], kind: TensorType) -> Spoil:
    def spoil(_metadata: Metadata, tensors: list[Tensor]) -> None:
        tensors.append(Tensor(name, dims, kind, bytes(2 * math.prod(dims))))

    return spoil


def store(name: str, kind: int, size: float) -> Spoil:
    def spoil(_metadata: Metadata, tensors: list[Tensor]) -> None:
        for index, tensor in enumerate(tensors):
            if tensor.name == name:
                weights = len(tensor.data) // 4
                tensors[index] = attrs.evolve(tensor, type=kind, data=bytes(int(weights * size)))

    return spoil


HYPERPARAMETERS: list[tuple[Spoil, str]] = [
    (drop("general.architecture"), "metadata 'general.architecture' is missing"),
    (put("general.architecture", 3), "metadata 'general.architecture' is stored as u32; it must be string"),
    (put("general.architecture", "llama9"), "its architecture, 'llama9', is not one that this llama.cpp knows"),
    (put("general.architecture", "bert"), "its architecture, 'bert', cannot answer a prompt: it makes embeddings"),
    (put("general.architecture", "clip"), "cannot answer a prompt: it is the image or sound encoder of another model"),
    (put("general.type", "adapter"), "it is an adapter, not a model: load the model that it belongs to with lora=["),
    (put("general.type", "mmproj"), "it is no language model: its metadata say that it is 'mmproj'"),
    (drop("llama.context_length"), "metadata 'llama.context_length' is missing"),
    (put("llama.context_length", 0), "llama.context_length is 0"),
    (put("llama.context_length", Value(ValueType.U64, 512)), "'llama.context_length' is stored as u64; it must be u32"),
    (put("llama.context_length", Array(ValueType.U32, [512])), "'llama.context_length' is stored as array"),
    (put("llama.embedding_length", 0), "llama.embedding_length is 0"),
    (put("llama.embedding_length", 66), "llama.embedding_length is 66, which 4 attention heads cannot share"),
    (
        both(put("llama.embedding_length", 128), put("llama.rope.dimension_count", 32)),
        "has the shape 64 x 416; an embedding of 128 and a vocabulary of 416 tokens need 128 x 416",
    ),
    (put("llama.block_count", 0), "llama.block_count is 0; llama.cpp takes 1 to 512"),
    (put("llama.block_count", 513), "llama.block_count is 513; llama.cpp takes 1 to 512"),
    (put("llama.nextn_predict_layers", 2), "llama.nextn_predict_layers is 2 of 2 layers"),
    (drop("llama.attention.head_count"), "metadata 'llama.attention.head_count' is missing"),
    (put("llama.attention.head_count", 0), "llama.attention.head_count is 0"),
    (put("llama.attention.head_count_kv", 3), "layer 0 has 4 attention heads, which 3 key-value heads cannot share"),
    (put("llama.attention.head_count_kv", 8), "layer 0 has 4 attention heads, which 8 key-value heads cannot share"),
    (put("llama.attention.head_count", Array(ValueType.U32, [4])), "has 1 numbers for 2 layers"),
    (put("llama.attention.head_count", Array(ValueType.I32, [4, -4])), "has the number -4 for a layer"),
    (put("llama.attention.head_count", Array(ValueType.F32, [4, 4])), "is an array of f32; it must hold u32 or i32"),
    (put("llama.attention.key_length", 0), "llama.attention.key_length is 0"),
    (put("llama.attention.key_length", 32), "its keys have 32 numbers a head and its values 16; llama needs the same"),
    (put("llama.rope.dimension_count", 15), "llama.rope.dimension_count is 15; it must be even"),
    (put("llama.rope.dimension_count", 32), "llama.rope.dimension_count is 32; it must be even and at most"),
    (put("llama.rope.dimension_count", 8), "llama.rope.dimension_count is 8; llama needs the size of a head, 16"),
    (put("llama.rope.freq_base", 0.0), "llama.rope.freq_base is 0"),
    (put("llama.rope.freq_base", float("nan")), "llama.rope.freq_base is nan"),
    (put("llama.rope.scaling.factor", -1.0), "llama.rope.scaling.factor is -1"),
    (put("llama.rope.scaling.type", "magic"), "llama.rope.scaling.type is 'magic', which llama.cpp does not know"),
    (drop("llama.attention.layer_norm_rms_epsilon"), "'llama.attention.layer_norm_rms_epsilon' is missing"),
    (put("llama.attention.layer_norm_rms_epsilon", -1e-5), "rms_epsilon is -1e-05; it must be a small positive number"),
    (put("llama.attention.layer_norm_rms_epsilon", float("nan")), "rms_epsilon is nan"),
    (put("llama.expert_count", 1025), "llama.expert_count is 1,025; llama.cpp takes up to 1024"),
    (put("llama.expert_count", 8), "llama.expert_used_count is 0 of 8 experts"),
    (put("llama.expert_used_count", 2), "llama.expert_used_count is 2 of 0 experts"),
    (put("llama.expert_group_count", 2), "llama.expert_group_count is 2 for 0 experts"),
    (
        both(put("llama.expert_count", 8), put("llama.expert_used_count", 2), put("llama.expert_group_count", 3)),
        "8 experts in 3 groups, 0 of them used, cannot be",
    ),
    (put("llama.ssm.time_step_rank", 0), "llama.ssm.time_step_rank is 0"),
    (drop_tensor("token_embd.weight"), "tensor 'token_embd.weight', the embeddings, is missing"),
    (
        store("blk.0.attn_norm.weight", TensorType.F16, 2),
        "'blk.0.attn_norm.weight' is stored as F16; llama.cpp needs F32",
    ),
    (
        store("output_norm.weight", TensorType.Q8_0, 34 / 32),
        "'output_norm.weight' is stored as Q8_0; llama.cpp needs F32",
    ),
    (add_tensor("blk.1.attn_q.input_scale", (1,), TensorType.F16), "'blk.1.attn_q.input_scale' is stored as F16"),
    (
        add_tensor("blk.1.anything", (64, 1, 1), TensorType.F16),
        "'blk.1.anything' is stored as F16; llama.cpp needs F32",
    ),
    (store("blk.1.attn_q.weight", 26, 4), "'blk.1.attn_q.weight' is stored as I32, which no weight matrix can be"),
    (store("token_embd.weight", 28, 8), "'token_embd.weight' is stored as F64, which no weight matrix can be"),
]


@pytest.mark.parametrize(("spoil", "reason"), HYPERPARAMETERS, ids=[reason[:50] for _, reason in HYPERPARAMETERS])
def test_hyperparameters(tmp_path: Path, spoil: Spoil, reason: str) -> None:
    metadata, tensors = tiny_model_parts()
    spoil(metadata, tensors)
    assert reason in refusal_of(tmp_path, gguf_bytes(metadata, tensors))


def test_a_vocabulary_without_a_model(tmp_path: Path) -> None:
    metadata, _ = tiny_model_parts()
    assert refusal_of(tmp_path, gguf_bytes(metadata)) == "it has no weights: a vocabulary or a template without a model"


def test_recurrent_models_need_no_heads(tmp_path: Path) -> None:
    metadata, tensors = tiny_model_parts()
    metadata = {key.replace("llama.", "mamba."): value for key, value in metadata.items() if "head_count" not in key}
    metadata["general.architecture"] = "mamba"
    header = check_gguf(write_gguf(tmp_path / "m.gguf", metadata, tensors))
    assert (header.head_count, header.kv_heads, header.kv_bytes_per_token()) == (0, 0, 0)


def texts(*changes: tuple[int, str | bytes]) -> Spoil:
    def spoil(metadata: Metadata, _tensors: list[Tensor]) -> None:
        array = metadata["tokenizer.ggml.tokens"]
        assert isinstance(array, Array)
        items = list(array.items)
        for token, text in changes:
            items[token] = text
        metadata["tokenizer.ggml.tokens"] = Array(ValueType.STRING, items)

    return spoil


TOKENIZERS: list[tuple[Spoil, str]] = [
    (drop("tokenizer.ggml.model"), "metadata 'tokenizer.ggml.model' is missing"),
    (put("tokenizer.ggml.model", "abacus"), "its tokenizer, 'abacus', is not one that this llama.cpp knows"),
    (put("tokenizer.ggml.model", "none"), "its tokenizer is 'none', which cannot answer a prompt"),
    (put("tokenizer.ggml.model", "gpt2"), "metadata 'tokenizer.ggml.merges' is missing"),
    (drop("tokenizer.ggml.tokens"), "metadata 'tokenizer.ggml.tokens' is missing: the file has no usable tokenizer"),
    (put("tokenizer.ggml.tokens", 3), "metadata 'tokenizer.ggml.tokens' is u32; it must be an array of string"),
    (put("tokenizer.ggml.tokens", Array(ValueType.U8, [])), "is an array of u8; it must be an array of string"),
    (put("tokenizer.ggml.tokens", Array(ValueType.STRING, [])), "its vocabulary is empty"),
    (drop("tokenizer.ggml.scores"), "metadata 'tokenizer.ggml.scores' is missing"),
    (drop("tokenizer.ggml.token_type"), "metadata 'tokenizer.ggml.token_type' is missing"),
    (put("tokenizer.ggml.scores", Array(ValueType.F32, [0.0] * 415)), "'tokenizer.ggml.scores' has 415 items for 416"),
    (put("tokenizer.ggml.token_type", Array(ValueType.I32, [1] * 417)), "has 417 items for 416 tokens"),
    (
        put("tokenizer.ggml.token_type", Array(ValueType.U32, [1] * 416)),
        "is an array of u32; it must be an array of i32",
    ),
    (texts((300, "<s>")), "tokens 1 and 300 of its vocabulary have the same text, '<s>'"),
    (texts((300, b"a\0b"), (301, b"a\0c")), "tokens 300 and 3"),
    (texts((300, ""), (301, "[EMPTY_300]")), "tokens 300 and 301 of its vocabulary have the same text, '[EMPTY_300]'"),
    (
        texts((300, "\0"), (301, "[EMPTY_300]")),
        "tokens 300 and 301 of its vocabulary have the same text, '[EMPTY_300]'",
    ),
    (texts((5 + 0xC3, "gone")), "its vocabulary has no token for byte 0xC3 (1 of 256 are missing)"),
    (put("tokenizer.ggml.bos_token_id", 416), "tokenizer.ggml.bos_token_id is 416, and the vocabulary has 416 tokens"),
    (put("tokenizer.ggml.eos_token_id", (1 << 32) - 1), "tokenizer.ggml.eos_token_id is 4,294,967,295"),
    (put("tokenizer.ggml.eot_token_id", Value(ValueType.I32, -1)), "is stored as i32; it must be u32"),
]


@pytest.mark.parametrize(("spoil", "reason"), TOKENIZERS, ids=[reason[:50] for _, reason in TOKENIZERS])
def test_tokenizers(tmp_path: Path, spoil: Spoil, reason: str) -> None:
    metadata, tensors = tiny_model_parts()
    spoil(metadata, tensors)
    assert reason in refusal_of(tmp_path, gguf_bytes(metadata, tensors))


def test_two_empty_tokens_are_no_twins(tmp_path: Path) -> None:
    metadata, tensors = tiny_model_parts()
    texts((300, ""), (301, ""))(metadata, tensors)
    assert check_gguf(write_gguf(tmp_path / "m.gguf", metadata, tensors)).vocabulary_size == 416


def test_an_ascii_byte_may_be_its_own_token(tmp_path: Path) -> None:
    metadata, tensors = tiny_model_parts()
    texts((5 + 0x41, "gone"))(metadata, tensors)  # "A" is a token too
    check_gguf(write_gguf(tmp_path / "m.gguf", metadata, tensors))


def test_byte_level_texts_must_be_utf8(tmp_path: Path) -> None:
    metadata, tensors = tiny_model_parts(tokenizer="bpe")
    texts((300, b"\xff"))(metadata, tensors)
    assert "the text of token 300, b'\\xff', is not valid UTF-8" in refusal_of(tmp_path, gguf_bytes(metadata, tensors))


def as_tokenizer(model: str, vocabulary: list[bytes], **more: Plain) -> bytes:
    metadata, tensors = tiny_model_parts()
    for key in ("scores", "token_type", "bos_token_id", "eos_token_id", "eot_token_id", "add_bos_token"):
        del metadata[f"tokenizer.ggml.{key}"]
    size = 416
    vocabulary = vocabulary + [b"fill%d" % n for n in range(size - len(vocabulary))]
    metadata["tokenizer.ggml.model"] = model
    metadata["tokenizer.ggml.tokens"] = Array(ValueType.STRING, vocabulary)
    metadata.update({f"tokenizer.ggml.{key}": value for key, value in more.items()})
    return gguf_bytes(metadata, tensors)


def test_a_pre_tokenizer_that_keeps_spaces_needs_its_own_tokenizer(tmp_path: Path) -> None:
    for model, fits in (("gpt2", False), ("hybriddna", False), ("whitespace", True)):
        content = as_tokenizer(model, [], merges=Array(ValueType.STRING, []), pre="whitespace", bos_token_id=2)
        if fits:
            (tmp_path / "m.gguf").write_bytes(content)
            check_gguf(tmp_path / "m.gguf")
        else:
            assert "two spaces would end the process" in refusal_of(tmp_path, content)


def test_rwkv_bytes_that_begin_a_token_must_be_tokens(tmp_path: Path) -> None:
    letters = [bytes([byte]) for byte in range(0x20, 0x7F) if byte != 0x5C]
    escapes = [b"\\n", b"\\t", b"\\xff", b"\\\\"]
    (tmp_path / "m.gguf").write_bytes(as_tokenizer("rwkv", letters + escapes))
    check_gguf(tmp_path / "m.gguf")
    assert "has no token for byte 0x0A alone" in refusal_of(tmp_path, as_tokenizer("rwkv", [*letters, b"\\n\\n"]))
    assert "has no token for byte 0x66 alone" in refusal_of(tmp_path, as_tokenizer("rwkv", []))
    assert "has a broken escape" in refusal_of(tmp_path, as_tokenizer("rwkv", [*letters, b"\\xzz"]))
    assert "ends inside an escape" in refusal_of(tmp_path, as_tokenizer("rwkv", [*letters, b"\\"]))


def test_tokens_put_on_by_default_must_be_there(tmp_path: Path) -> None:
    merges = Array(ValueType.STRING, [])
    assert "should get a bos token" in refusal_of(tmp_path, as_tokenizer("gemma4", [], merges=merges))
    assert "should get a bos token" in refusal_of(
        tmp_path, as_tokenizer("gemma4", [], merges=merges, add_bos_token=False)
    )
    (tmp_path / "m.gguf").write_bytes(as_tokenizer("gemma4", [], merges=merges, bos_token_id=2))
    check_gguf(tmp_path / "m.gguf")
    assert "should get a bos token" in refusal_of(tmp_path, as_tokenizer("t5", [], add_bos_token=True))
    charsmap = Array(ValueType.U8, [200, 0, 0, 0, 1, 2])
    assert "precompiled_charsmap' is damaged" in refusal_of(
        tmp_path, as_tokenizer("t5", [], precompiled_charsmap=charsmap)
    )


# --- split files ------------------------------------------------------------------------------------------------------


def write_split(folder: Path, count: int = 3, stem: str = "tiny") -> list[Path]:
    metadata, tensors = tiny_model_parts()
    share = -(-len(tensors) // count)
    paths = []
    for number in range(count):
        part: Metadata = dict(metadata) if number == 0 else {}
        part["split.no"] = Value(ValueType.U16, number)
        part["split.count"] = Value(ValueType.U16, count)
        part["split.tensors.count"] = Value(ValueType.I32, len(tensors))
        path = folder / f"{stem}-{number + 1:05}-of-{count:05}.gguf"
        paths.append(write_gguf(path, part, tensors[number * share : (number + 1) * share]))
    return paths


def respoil(path: Path, spoil: Callable[[bytes], bytes]) -> None:
    path.write_bytes(spoil(path.read_bytes()))


def test_split_model(tmp_path: Path) -> None:
    whole = check_gguf(write_tiny_model(tmp_path / "whole.gguf"))
    paths = write_split(tmp_path)
    header = check_gguf(paths[0])
    assert header.parts == tuple(paths)
    assert header.tensor_count == whole.tensor_count
    assert header.tensor_bytes == whole.tensor_bytes
    assert header.file_size == sum(path.stat().st_size for path in paths)
    assert header.sha256 != whole.sha256


def test_split_model_that_is_not_whole(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    assert refusal(paths[1]) == f"it is part 2 of 3; name the first one, {paths[0].name}"
    other = paths[0].rename(tmp_path / "renamed.gguf")
    assert "rename all parts so" in refusal(other)
    other.rename(paths[0])

    paths[2].unlink()
    assert refusal(paths[0]) == f"the model is in 3 files, of which {paths[2].name} is not beside the first"
    paths[1].unlink()
    assert f"{paths[1].name} and 1 more is not beside" in refusal(paths[0])


def test_split_model_with_a_damaged_part(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    content = paths[1].read_bytes()
    paths[1].write_bytes(content[:-10])
    assert refusal(paths[0]).startswith(f"part {paths[1].name}: 10 of ")
    paths[1].write_bytes(b"<html>")
    assert "part tiny-00002-of-00003.gguf: it is not a GGUF file: it looks like a web page" in refusal(paths[0])
    paths[1].write_bytes(paths[2].read_bytes())
    assert "it says that it is part 3, and its name that it is part 2" in refusal(paths[0])
    # The number as another type ends the process in llama.cpp.
    paths[1].write_bytes(gguf_bytes({"split.no": 1}))
    assert "metadata 'split.no' is stored as u32; it must be u16" in refusal(paths[0])
    paths[1].write_bytes(gguf_bytes({"split.no": Value(ValueType.U16, 1)}))
    assert "its 3 parts have 14 tensors, and it promises 21" in refusal(paths[0])
    _, tensors = tiny_model_parts()
    write_gguf(paths[1], {"split.no": Value(ValueType.U16, 1)}, tensors[:3])
    assert "is in another part too" in refusal(paths[0])


# --- the architecture table -------------------------------------------------------------------------------------------


def test_architecture_table_is_consistent() -> None:
    assert not architectures.SUPPORTED & architectures.REFUSED.keys()
    for group in ("RECURRENT", "RMS_NORM", "LAYER_NORM", "EQUAL_HEADS", "FULL_ROTATION"):
        assert getattr(architectures, group) <= architectures.SUPPORTED, group
    assert architectures.FULL_ROTATION <= architectures.EQUAL_HEADS
    assert not architectures.RMS_NORM & architectures.LAYER_NORM


def pinned_tree() -> Path | None:
    pins = tomllib.loads((Path(__file__).parents[2] / "native" / "llama_source.toml").read_text())
    base = os.environ.get("LANEWAY_CACHE_DIR") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "laneway"
    named = os.environ.get("LANEWAY_LLAMA_SOURCE")
    roots = [Path(named)] if named else [*Path(base).expanduser().glob(f"*{pins['llama']['commit'][:12]}*")]
    return next((root for root in roots if (root / "src" / "llama-arch.cpp").is_file()), None)


def test_architecture_table_matches_the_pinned_source() -> None:
    tree = pinned_tree()
    if tree is None:
        pytest.skip("llama.cpp's source is not in the cache")
    text = (tree / "src" / "llama-arch.cpp").read_text()
    table = text.split("LLM_ARCH_NAMES")[1].split("};")[0]
    names = set(re.findall(r'\{\s*LLM_ARCH_\w+,\s*"([^"]+)"', table)) - {"(unknown)"}
    assert len(names) > 100
    assert architectures.SUPPORTED | architectures.REFUSED.keys() == names
