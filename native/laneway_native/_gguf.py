"""What a GGUF file says of itself, read and checked in Python before llama.cpp is asked to load it.

llama.cpp trusts a file in places: there a wrong one ends the whole process (an assertion, a division by zero, a null
pointer) instead of the load.  :func:`check_gguf` refuses such files first, and says what is wrong in words that a
person can act on.  It reads the header, the table of tensors and the vectors (norms and biases, a thousandth of the
weights), never a matrix, and believes no length or count before it has been compared with the size of the file.

The order of the checks is the order of the file: header, metadata, tensor table, layout of the data, vectors; then what
the model needs: hyperparameters, matrices, tokenizer.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import struct
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import attrs

from laneway.decoder import ModelLoadError
from laneway_native import _architectures as architectures
from laneway_native._gguf_file import (
    NO_MATRIX,
    U32,
    ArrayInfo,
    File,
    Refused,
    TensorInfo,
    ValueType,
    check_layout,
    entry,
    items,
    opened,
    os_reason,
    read_file,
    required,
    scalar,
    shape_text,
    strings,
    trimmed,
)

__all__ = ["GgufArray", "GgufHeader", "check_gguf"]

_LONGEST_LISTED = 64
_MEMORY_ALIGNMENT = 32  # of the memory that llama.cpp hands to its kernels, mapped files included
_MOST_LAYERS = 512
_MOST_EXPERTS = 1024
_LONGEST_VECTOR = 1 << 18  # values; longer ones are no norm and no bias
_F32 = 0
_MATRIX = re.compile(
    r"(?:token_embd|output|blk\.\d+\.(?:attn_(?:q|k|v|qkv|output)|ffn_(?:up|down|gate)(?:_exps|_shexp)?))\.weight"
)
_VECTOR = re.compile(
    r".*(?:norm(?:_\d)?\.weight|\.bias|\.scale|\.input_scale|rope_freqs\.weight|rope_factors_\w+\.weight)"
)
_INTEGERS = frozenset({24, 25, 26, 27})
"""llama.cpp adds vectors to F32 activations, or multiplies them: numbers of another type are an assertion there."""
_SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@attrs.frozen
class GgufArray:
    """An array in the metadata that is too long to be listed: the type of its items and their number."""

    type: str
    count: int


@attrs.frozen(kw_only=True)
class GgufHeader:
    """What a model file says of itself.  Sizes are in bytes; of a split file they are sums over its parts."""

    path: Path
    parts: tuple[Path, ...]
    """All files, the first among them; one unless the model is split."""
    version: int
    architecture: str
    name: str
    """``general.name``, or the file's name without its suffix."""
    tensor_count: int
    tensor_bytes: int
    file_size: int
    alignment: int
    metadata: Mapping[str, Any] = attrs.field(repr=False)
    """Scalars as they are, arrays of up to 64 items as tuples, longer ones as :class:`GgufArray`."""
    context_length: int
    """Tokens that the model was trained for."""
    block_count: int
    embedding_length: int
    head_count: int
    """Attention heads of the layer that has most; 0 if nothing attends."""
    head_count_kv: int
    """The same for heads that have keys and values of their own."""
    key_length: int
    """Numbers in one head's key."""
    value_length: int
    sliding_window: int | None
    vocabulary_size: int
    file_type: int | None
    """llama.cpp's number for the mix of tensor types."""
    chat_template: str | None = attrs.field(repr=False)
    kv_heads: int
    """Sum over the layers of the heads that have keys and values."""
    sha256: str
    """Of every byte before the weights: metadata, names, shapes and types, the same wherever the file lies."""
    tensors: Mapping[str, TensorInfo] = attrs.field(repr=False)
    """The table of tensors, of all parts."""

    def kv_bytes_per_token(self, bytes_per_value: float = 2.0) -> int:
        """Bytes of keys and values that one token takes in all layers, at most; a sliding window needs less."""
        return math.ceil(self.kv_heads * (self.key_length + self.value_length) * bytes_per_value)


def check_gguf(path: str | os.PathLike[str]) -> GgufHeader:
    """Read and check a GGUF file, all parts of it if it is split.

    Blocks on the file system; the time depends on the vocabulary, not on the weights (about a tenth of a second for
    262,144 tokens).  Raises :class:`laneway.decoder.ModelLoadError` with the reason.
    """
    first = Path(path)
    source = os.fspath(path)
    try:
        return _check(first)
    except Refused as refused:
        raise ModelLoadError(source, str(refused)) from None
    except OSError as error:
        raise ModelLoadError(source, os_reason(error)) from None


def _check(first: Path) -> GgufHeader:
    with opened(first) as data:
        main = read_file(data)
        _check_mappable(main)
        check_layout(main)
        _check_vectors(main)
        parts = [first, *_other_parts(first, main)]
        tensors = dict(main.tensors)
        digest = hashlib.sha256(data[: main.header_size])
        file_size, tensor_bytes = main.file_size, main.tensor_bytes
        for number, part in enumerate(parts[1:], start=1):
            try:
                with opened(part) as other_data:
                    other = read_file(other_data)
                    _check_mappable(other)
                    check_layout(other)
                    _check_vectors(other)
                    _check_part(other, number)
                    digest.update(other_data[: other.header_size])
            except Refused as refused:
                raise Refused(f"part {part.name}: {refused}") from None
            except OSError as error:
                raise Refused(f"part {part.name}: {os_reason(error)}") from None
            if twice := tensors.keys() & other.tensors.keys():
                raise Refused(f"part {part.name}: tensor {min(twice)!r} is in another part too")
            tensors.update(other.tensors)
            file_size += other.file_size
            tensor_bytes += other.tensor_bytes
        _check_count(main, len(parts), len(tensors))
        shape = _check_model(main, tensors)
        vocabulary_size = _check_tokenizer(main)
        _check_tensors(tensors, shape, vocabulary_size)
        return _header(first, parts, main, shape, vocabulary_size, tensors, tensor_bytes, file_size, digest.hexdigest())


def _check_mappable(file: File) -> None:
    """Weights that stay where the file has them lie where kernels can read them.  (Adapters are copied.)"""
    if file.alignment % _MEMORY_ALIGNMENT:
        raise Refused(
            f"general.alignment is {file.alignment}; llama.cpp maps the weights and needs {_MEMORY_ALIGNMENT} or more"
        )


def _check_vectors(file: File) -> None:
    """No norm and no bias holds NaN.

    NaN in a matrix shows in the logits.  NaN that a norm puts into one activation can vanish: a matrix product with
    quantised weights turns its activations into whole numbers, and NaN into one of those.
    """
    for tensor, (begin, size) in zip(file.tensors.values(), file.ranges, strict=True):
        count = size // 4
        if tensor.type != _F32 or len(trimmed(tensor.dims)) > 1 or count > _LONGEST_VECTOR:
            continue
        values = struct.unpack_from(f"<{count}f", file.data, begin)
        # A sum is NaN where a term is, or where there are infinities of both signs.
        if math.isnan(sum(values)) and any(map(math.isnan, values)):
            raise Refused(f"tensor {tensor.name!r} holds NaN: the file is damaged; fetch it again")


def _other_parts(first: Path, main: File) -> list[Path]:
    """The paths of a split file's other parts; none for a model in one file."""
    count = scalar(main, "split.count", ValueType.U16, 0)
    if count <= 1:
        return []
    number = scalar(main, "split.no", ValueType.U16, 0)
    match = _SPLIT_NAME.fullmatch(first.name)
    if match is None or int(match["count"]) != count or int(match["number"]) != number + 1:
        raise Refused(
            f"it is part {number + 1} of a model in {count} files, whose names must end in "
            f"-{number + 1:05}-of-{count:05}.gguf: rename all parts so"
        )
    names = [f"{match['stem']}-{part:05}-of-{count:05}.gguf" for part in range(1, count + 1)]
    if number != 0:
        raise Refused(f"it is part {number + 1} of {count}; name the first one, {names[0]}")
    paths = [first.with_name(name) for name in names[1:]]
    absent = [path.name for path in paths if not path.exists()]
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise Refused(f"the model is in {count} files, of which {absent[0]}{more} is not beside the first")
    return paths


def _check_part(part: File, number: int) -> None:
    if "split.no" not in part.entries:
        raise Refused("it does not say which part it is (metadata 'split.no')")
    found = scalar(part, "split.no", ValueType.U16, 0)
    if found != number:
        raise Refused(f"it says that it is part {found + 1}, and its name that it is part {number + 1}")


def _check_count(main: File, parts: int, tensors: int) -> None:
    if parts == 1:
        return
    if "split.tensors.count" not in main.entries:
        raise Refused("metadata 'split.tensors.count' is missing")
    promised = scalar(main, "split.tensors.count", ValueType.I32, 0)
    if promised != tensors:
        raise Refused(f"its {parts} parts have {tensors} tensors, and it promises {promised}")


# --- hyperparameters --------------------------------------------------------------------------------------------------


@attrs.frozen
class _Shape:
    """The hyperparameters that everything else is compared with."""

    architecture: str
    context_length: int
    block_count: int
    embedding_length: int
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    key_length: int
    value_length: int


def _check_model(file: File, tensors: Mapping[str, TensorInfo]) -> _Shape:
    kind = file.entries.get("general.type", (ValueType.STRING, "model"))[1]
    if kind == "adapter" or "adapter.type" in file.entries:
        raise Refused("it is an adapter, not a model: load the model that it belongs to with lora=[(path, scale)]")
    if kind in ("mmproj", "imatrix"):
        raise Refused(f"it is no language model: its metadata say that it is {kind!r}")
    name = _architecture(file)
    if not tensors:
        raise Refused("it has no weights: a vocabulary or a template without a model")

    context_length = required(file, f"{name}.context_length", ValueType.U32)
    embedding_length = required(file, f"{name}.embedding_length", ValueType.U32)
    layers = required(file, f"{name}.block_count", ValueType.U32)
    if context_length == 0:
        raise Refused(f"{name}.context_length is 0")
    if embedding_length == 0:
        raise Refused(f"{name}.embedding_length is 0")
    if not 1 <= layers <= _MOST_LAYERS:
        raise Refused(f"{name}.block_count is {layers:,}; llama.cpp takes 1 to {_MOST_LAYERS}")
    predicted = scalar(file, f"{name}.nextn_predict_layers", ValueType.U32, 0)
    if predicted >= layers:
        raise Refused(f"{name}.nextn_predict_layers is {predicted:,} of {layers} layers")

    heads, kv_heads = _check_heads(file, name, layers)
    key_length, value_length = _head_sizes(file, name, embedding_length, heads[0])
    _check_rotation(file, name, key_length)
    _check_norms(file, name)
    _check_experts(file, name, layers)
    _check_divisors(file, name)
    _check_particular(file, name, layers, embedding_length, key_length)
    return _Shape(name, context_length, layers, embedding_length, heads, kv_heads, key_length, value_length)


def _architecture(file: File) -> str:
    name: str = required(file, "general.architecture", ValueType.STRING)
    if name in architectures.REFUSED:
        raise Refused(f"its architecture, {name!r}, cannot answer a prompt: {architectures.REFUSED[name]}")
    if name not in architectures.SUPPORTED:
        raise Refused(
            f"its architecture, {name[:80]!r}, is not one that this llama.cpp knows; a newer build may know it"
        )
    return name


def _per_layer(file: File, key: str, layers: int, default: tuple[int, ...]) -> tuple[int, ...]:
    """One number for all layers, or an array with one for each."""
    if key not in file.entries:
        return default
    kind, value = file.entries[key]
    if kind is not ValueType.ARRAY:
        return (int(entry(file, key, ValueType.U32)),) * layers
    if value.type not in (ValueType.U32, ValueType.I32, ValueType.BOOL):
        raise Refused(f"metadata {key!r} is an array of {value.type.label}; it must hold u32 or i32")
    if value.count != layers:
        raise Refused(f"metadata {key!r} has {value.count:,} numbers for {layers} layers")
    numbers = tuple(map(int, items(file, value)))
    if min(numbers) < 0:
        raise Refused(f"metadata {key!r} has the number {min(numbers)} for a layer")
    return numbers


def _check_heads(file: File, name: str, layers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    key = f"{name}.attention.head_count"
    heads = _per_layer(file, key, layers, (0,) * layers)
    kv_heads = _per_layer(file, f"{key}_kv", layers, heads)
    if name in architectures.RECURRENT:
        return heads, kv_heads
    if key not in file.entries:
        raise Refused(f"metadata {key!r} is missing: the file is incomplete, or no model")
    if max(heads) == 0:
        raise Refused(f"{key} is 0")
    for layer, (count, kv_count) in enumerate(zip(heads, kv_heads, strict=True)):
        if kv_count and (count % kv_count or kv_count > count > 0):
            raise Refused(f"layer {layer} has {count} attention heads, which {kv_count} key-value heads cannot share")
    return heads, kv_heads


def _head_sizes(file: File, name: str, embedding_length: int, heads: int) -> tuple[int, int]:
    if heads == 0:
        return 0, 0
    keys = [f"{name}.attention.{part}_length" for part in ("key", "value")]
    if embedding_length % heads and not all(key in file.entries for key in keys):
        raise Refused(f"{name}.embedding_length is {embedding_length:,}, which {heads} attention heads cannot share")
    default = embedding_length // heads
    sizes = [int(scalar(file, key, ValueType.U32, default)) for key in keys]
    for key, size in zip(keys, sizes, strict=True):
        if not 1 <= size <= 1 << 16:
            raise Refused(f"{key} is {size:,}")
    if name in architectures.EQUAL_HEADS and sizes[0] != sizes[1]:
        raise Refused(f"its keys have {sizes[0]} numbers a head and its values {sizes[1]}; {name} needs the same")
    return sizes[0], sizes[1]


def _check_rotation(file: File, name: str, key_length: int) -> None:
    key = f"{name}.rope.dimension_count"
    count = scalar(file, key, ValueType.U32, key_length)
    if key in file.entries or name in architectures.FULL_ROTATION:
        if count % 2 or (key_length and count > key_length):
            raise Refused(f"{key} is {count:,}; it must be even and at most the size of a head, {key_length}")
        if name in architectures.FULL_ROTATION and count != key_length:
            raise Refused(f"{key} is {count:,}; {name} needs the size of a head, {key_length}")
    base = scalar(file, f"{name}.rope.freq_base", ValueType.F32, 10_000.0)
    if not (math.isfinite(base) and base > 0):
        raise Refused(f"{name}.rope.freq_base is {base:g}")
    for part in ("rope.scaling.factor", "rope.scale_linear"):
        factor = scalar(file, f"{name}.{part}", ValueType.F32, 1.0)
        if not (math.isfinite(factor) and factor >= 0):
            raise Refused(f"{name}.{part} is {factor:g}")
    scaling = scalar(file, f"{name}.rope.scaling.type", ValueType.STRING, "linear")
    if scaling not in ("none", "linear", "yarn", "longrope"):
        raise Refused(f"{name}.rope.scaling.type is {scaling[:80]!r}, which llama.cpp does not know")


def _check_norms(file: File, name: str) -> None:
    for part, needed in (
        ("layer_norm_rms_epsilon", name in architectures.RMS_NORM),
        ("layer_norm_epsilon", name in architectures.LAYER_NORM),
        ("group_norm_epsilon", False),
    ):
        key = f"{name}.attention.{part}"
        if not needed and key not in file.entries:
            continue
        epsilon = required(file, key, ValueType.F32)
        if not 0 <= epsilon <= 1:
            raise Refused(f"{key} is {epsilon:g}; it must be a small positive number")


def _check_experts(file: File, name: str, layers: int) -> None:
    experts = scalar(file, f"{name}.expert_count", ValueType.U32, 0)
    used = max(_per_layer(file, f"{name}.expert_used_count", layers, (0,) * layers))
    groups = scalar(file, f"{name}.expert_group_count", ValueType.U32, 0)
    used_groups = scalar(file, f"{name}.expert_group_used_count", ValueType.U32, 0)
    if name in ("hunyuan_vl", "hunyuan-dense") and experts <= 1:
        experts = used = 0
    if experts > _MOST_EXPERTS:
        raise Refused(f"{name}.expert_count is {experts:,}; llama.cpp takes up to {_MOST_EXPERTS}")
    if used > experts or bool(used) != bool(experts):
        raise Refused(f"{name}.expert_used_count is {used:,} of {experts} experts")
    if groups and groups >= experts:
        raise Refused(f"{name}.expert_group_count is {groups:,} for {experts} experts")
    if groups > 1 and (experts % groups or not 1 <= used_groups < groups):
        raise Refused(f"{experts} experts in {groups} groups, {used_groups} of them used, cannot be")


_DIVISORS = (
    "attention.output_group_count",
    "experts_per_group",
    "full_attention_interval",
    "kda.head_dim",
    "shortconv.l_cache",
    "ssm.conv_kernel",
    "ssm.group_count",
    "ssm.inner_size",
    "ssm.state_size",
    "ssm.time_step_rank",
    "wkv.head_size",
)


def _check_divisors(file: File, name: str) -> None:
    """llama.cpp divides by these without a look."""
    for part in _DIVISORS:
        key = f"{name}.{part}"
        if key in file.entries and file.entries[key][0] is not ValueType.ARRAY and not entry(file, key, ValueType.U32):
            raise Refused(f"{key} is 0")


def _check_particular(file: File, name: str, layers: int, embedding_length: int, key_length: int) -> None:
    """What single architectures assert, beyond what all do."""

    def number(part: str, default: int = 0) -> int:
        return int(scalar(file, f"{name}.{part}", ValueType.U32, default))

    def need(holds: bool, part: str, what: str) -> None:
        if not holds:
            raise Refused(f"{name}.{part} must be {what}")

    if name in architectures.EXPERTS:
        need(number("expert_count") > 0, "expert_count", "there and above 0")
    if name in architectures.SECTIONS:
        array = file.entries.get(f"{name}.rope.dimension_sections", (None, None))[1]
        listed = isinstance(array, ArrayInfo) and array.type in (ValueType.I32, ValueType.U32) and array.count == 4
        sections = items(file, array)[:3] if listed and isinstance(array, ArrayInfo) else (0,)
        need(max(sections) > 0, "rope.dimension_sections", "four numbers, the first three not all 0")
    if name in architectures.LATENT:
        rotated = number("rope.dimension_count", key_length)
        need(number("attention.key_length_mla", key_length) > rotated, "rope.dimension_count", "smaller than a key")
    if name in ("granitehybrid", "jamba"):
        need(number("ssm.inner_size") == 2 * embedding_length, "ssm.inner_size", "twice the embedding_length")
    if name == "ernie4_5-moe":
        need(number("interleave_moe_layer_step") > 0, "interleave_moe_layer_step", "there and above 0")
    if name == "minimax-m3":
        need(number("attention.indexer.block_size") > 0, "attention.indexer.block_size", "there and above 0")
    if name == "nanbeige":
        need(
            1 <= number("num_loops", 1) * layers <= _MOST_LAYERS,
            "num_loops",
            f"1 or more, {_MOST_LAYERS} layers in all",
        )
    if name == "hrm_text":
        slots = number("hrm.layers_per_stack") * number("hrm.h_cycles") * (number("hrm.l_cycles") + 1)
        need(slots == layers and number("hrm.l_cycles") > 0, "hrm.l_cycles", "such that the cycles make up block_count")
    if name == "bailingmoe3":
        need(scalar(file, f"{name}.kda.safe_gate", ValueType.BOOL, True), "kda.safe_gate", "true")
        need(scalar(file, f"{name}.kda.gate_lower_bound", ValueType.F32, 0.0) < 0, "kda.gate_lower_bound", "below 0")
    if name == "glm5-next":
        pool = number("attention.indexer.kpool")
        need(
            pool > 1 and number("attention.indexer.top_k") % pool == 0, "attention.indexer.kpool", "a divisor of top_k"
        )
        need(number("hyper_connection.count") == 4, "hyper_connection.count", "4")


def _check_tensors(tensors: Mapping[str, TensorInfo], shape: _Shape, vocabulary_size: int) -> None:
    for name, tensor in tensors.items():
        vector = len(trimmed(tensor.dims)) <= 1 and tensor.type not in _INTEGERS
        if tensor.type != _F32 and (vector or _VECTOR.fullmatch(name)):
            raise Refused(f"tensor {name!r} is stored as {tensor.type_name}; llama.cpp needs F32 there")
        if tensor.type in NO_MATRIX and _MATRIX.fullmatch(name):
            raise Refused(f"tensor {name!r} is stored as {tensor.type_name}, which no weight matrix can be")
    embeddings = tensors.get("token_embd.weight")
    if embeddings is None:
        raise Refused("tensor 'token_embd.weight', the embeddings, is missing: the file is incomplete, or no model")
    needed = (shape.embedding_length, vocabulary_size)
    for matrix in (embeddings, tensors.get("output.weight", embeddings)):
        if trimmed(matrix.dims) != trimmed(needed):
            raise Refused(
                f"tensor {matrix.name!r} has the shape {shape_text(matrix.dims)}; an embedding of {needed[0]:,} and a "
                f"vocabulary of {needed[1]:,} tokens need {shape_text(needed)}"
            )


# --- the tokenizer ----------------------------------------------------------------------------------------------------

_REFUSED_TOKENIZERS = {
    "bert": "embedding models have it",
    "no_vocab": "it means that there is no vocabulary",
    "none": "it means that there is no vocabulary",
    "test": "it is for llama.cpp's own tests",
}
# Tokens that stand in where the file names none, and whether a beginning and an end are put on by default.
_DEFAULTS: dict[str, tuple[int | None, int | None, bool, bool]] = {
    "gemma4": (None, None, True, False),
    "gpt2": (11, 11, True, False),
    "hybriddna": (11, 11, True, False),
    "llama": (1, 2, True, False),
    "plamo2": (1, 2, False, False),
    "rwkv": (None, None, False, False),
    "t5": (None, 1, False, True),
    "whitespace": (11, 11, True, False),
}
_MERGED = ("gpt2", "hybriddna", "whitespace", "gemma4")
_BYTE_LEVEL = ("gpt2", "hybriddna", "whitespace")
# Tokens that open or end an answer: a wrong one is a model that never stops.
_STEERING = ("bos", "eos", "eot", "eom")


def _check_tokenizer(file: File) -> int:
    """Returns the size of the vocabulary."""
    model: str = required(file, "tokenizer.ggml.model", ValueType.STRING)
    if model in _REFUSED_TOKENIZERS:
        raise Refused(f"its tokenizer is {model!r}, which cannot answer a prompt: {_REFUSED_TOKENIZERS[model]}")
    if model not in _DEFAULTS:
        raise Refused(f"its tokenizer, {model[:80]!r}, is not one that this llama.cpp knows")
    tokens = _tokenizer_array(file, "tokens", (ValueType.STRING,), needed=True)
    assert tokens is not None
    size = tokens.count
    if size == 0:
        raise Refused("its vocabulary is empty")
    for name, kinds in (("scores", (ValueType.F32, ValueType.I32)), ("token_type", (ValueType.I32,))):
        array = _tokenizer_array(file, name, kinds, needed=model == "llama")
        if array is not None and array.count != size:
            raise Refused(f"metadata 'tokenizer.ggml.{name}' has {array.count:,} items for {size:,} tokens")
    if model in _MERGED:
        pre = scalar(file, "tokenizer.ggml.pre", ValueType.STRING, "")
        _tokenizer_array(file, "merges", (ValueType.STRING,), needed=pre != "kimi-k2")
        if pre == "whitespace" and model not in ("whitespace", "gemma4"):
            # llama.cpp asserts that no space comes to the merges; only the tokenizer of this name drops them before.
            raise Refused(
                f"its pre-tokenizer is 'whitespace' and its tokenizer {model!r}: two spaces would end the process"
            )
    if model == "t5":
        _check_charsmap(file)
    _check_texts(file, model, tokens)
    _check_special(file, model, size)
    return size


def _tokenizer_array(file: File, name: str, kinds: tuple[ValueType, ...], *, needed: bool) -> ArrayInfo | None:
    key = f"tokenizer.ggml.{name}"
    if key not in file.entries:
        if needed:
            raise Refused(f"metadata {key!r} is missing: the file has no usable tokenizer")
        return None
    kind, value = file.entries[key]
    if kind is not ValueType.ARRAY or value.type not in kinds:
        found = f"an array of {value.type.label}" if kind is ValueType.ARRAY else kind.label
        raise Refused(f"metadata {key!r} is {found}; it must be an array of {kinds[0].label}")
    array: ArrayInfo = value
    return array


def _check_texts(file: File, model: str, array: ArrayInfo) -> None:
    texts = list(strings(file.data, array))
    unique = set(texts)
    if len(unique) != len(texts) or b"" in unique or b"\0" in b"".join(texts):
        # llama.cpp cuts texts at a null character and names empty ones; then it asserts that all differ.
        texts = [text.partition(b"\0")[0] or b"[EMPTY_%d]" % token for token, text in enumerate(texts)]
        unique = set(texts)
        if len(unique) != len(texts):
            _refuse_twins(texts)
    if model == "llama":
        absent = [byte for byte in range(256) if not _has_byte(unique, byte)]
        if absent:
            raise Refused(
                f"its vocabulary has no token for byte 0x{absent[0]:02X} ({len(absent)} of 256 are missing), "
                "so there are texts that it cannot read"
            )
    if model in _BYTE_LEVEL:
        try:
            b"\n".join(texts).decode()
        except UnicodeDecodeError:
            wrong = next(token for token, text in enumerate(texts) if not _is_utf8(text))
            raise Refused(f"the text of token {wrong}, {texts[wrong][:40]!r}, is not valid UTF-8") from None
    if model == "rwkv":
        _check_rwkv(texts)


def _refuse_twins(texts: list[bytes]) -> NoReturn:
    seen: dict[bytes, int] = {}
    for token, text in enumerate(texts):
        if text in seen:
            shown = text[:40].decode(errors="replace")
            raise Refused(f"tokens {seen[text]} and {token} of its vocabulary have the same text, {shown!r}")
        seen[text] = token
    raise AssertionError("no twins")


def _has_byte(texts: set[bytes], byte: int) -> bool:
    return b"<0x%02X>" % byte in texts or (0 < byte < 0x80 and bytes([byte]) in texts)


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _check_rwkv(texts: list[bytes]) -> None:
    """Every byte that begins a token must be a token: from one that is not, the search never comes back."""
    begins: set[int] = set()
    whole: set[int] = set()
    escapes = {0x74: 0x09, 0x6E: 0x0A, 0x72: 0x0D}
    for token, text in enumerate(texts):
        if text[0] != 0x5C:
            first, length = text[0], 1
        elif text[1:2] == b"x":
            try:
                first, length = int(text[2:4], 16), 4
            except ValueError:
                raise Refused(f"the text of token {token}, {text[:40]!r}, has a broken escape") from None
        elif len(text) > 1:
            first, length = escapes.get(text[1], text[1]), 2
        else:
            raise Refused(f"the text of token {token} ends inside an escape")
        begins.add(first)
        if len(text) == length:
            whole.add(first)
    if begins - whole:
        raise Refused(f"its vocabulary has no token for byte 0x{min(begins - whole):02X} alone")


def _check_charsmap(file: File) -> None:
    array = _tokenizer_array(file, "precompiled_charsmap", (ValueType.U8, ValueType.I8), needed=False)
    if array is None:
        return
    if array.count < 4 or U32(file.data, array.start)[0] + 4 >= array.count:
        raise Refused("metadata 'tokenizer.ggml.precompiled_charsmap' is damaged")


def _check_special(file: File, model: str, size: int) -> None:
    bos, eos, adds_bos, adds_eos = _DEFAULTS[model]
    ids: dict[str, int | None] = {"bos": bos, "eos": eos}
    for name in _STEERING:
        key = f"tokenizer.ggml.{name}_token_id"
        if key in file.entries:
            ids[name] = found = entry(file, key, ValueType.U32)
            if found >= size:
                raise Refused(f"{key} is {found:,}, and the vocabulary has {size:,} tokens")
    for name, by_default in (("bos", adds_bos), ("eos", adds_eos)):
        key = f"tokenizer.ggml.add_{name}_token"
        added = scalar(file, key, ValueType.BOOL, by_default)
        # gemma4 begins with one whatever the file says; rwkv and plamo2 never add any.
        added = (added or (model == "gemma4" and name == "bos")) and model not in ("rwkv", "plamo2")
        token = ids[name]
        if added and (token is None or token >= size):
            raise Refused(
                f"every prompt should get a {name} token, and tokenizer.ggml.{name}_token_id does not say which"
            )


# --- the result -------------------------------------------------------------------------------------------------------


def _header(
    first: Path,
    parts: list[Path],
    main: File,
    shape: _Shape,
    vocabulary_size: int,
    tensors: Mapping[str, TensorInfo],
    tensor_bytes: int,
    file_size: int,
    digest: str,
) -> GgufHeader:
    template_kind, template = main.entries.get("tokenizer.chat_template", (ValueType.BOOL, None))
    window = main.entries.get(f"{shape.architecture}.attention.sliding_window", (None, None))[1]
    name = scalar(main, "general.name", ValueType.STRING, "")
    return GgufHeader(
        path=first,
        parts=tuple(parts),
        version=main.version,
        architecture=shape.architecture,
        name=name or first.stem,
        tensor_count=len(tensors),
        tensor_bytes=tensor_bytes,
        file_size=file_size,
        alignment=main.alignment,
        metadata=types.MappingProxyType(
            {key: _public(main, kind, value) for key, (kind, value) in main.entries.items()}
        ),
        context_length=shape.context_length,
        block_count=shape.block_count,
        embedding_length=shape.embedding_length,
        head_count=max(shape.heads),
        head_count_kv=max(shape.kv_heads),
        key_length=shape.key_length,
        value_length=shape.value_length,
        sliding_window=window if isinstance(window, int) and window else None,
        vocabulary_size=vocabulary_size,
        file_type=scalar(main, "general.file_type", ValueType.U32, None),
        chat_template=template if template_kind is ValueType.STRING else None,
        kv_heads=sum(shape.kv_heads),
        sha256=digest,
        tensors=types.MappingProxyType(dict(tensors)),
    )


def _public(file: File, kind: ValueType, value: Any) -> Any:
    if kind is not ValueType.ARRAY:
        return value
    if value.count > _LONGEST_LISTED:
        return GgufArray(value.type.label, value.count)
    return items(file, value)
