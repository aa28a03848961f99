"""Small GGUF files for tests: a writer of any GGUF, right or wrong, and a seeded random llama model with a tokenizer.

Standard library and attrs only.  Nothing here reads a clock or the network: the same arguments give the same bytes.

The model knows nothing, but it computes: its greedy answers wander over the vocabulary and depend on the whole prompt,
so a sequence that got its neighbour's cells, or lost some of its own, shows in the tokens.  Special tokens have a zero
row in the output matrix, so they are never the largest logit: an answer ends by ``max_tokens``, by a stop string, or
by a ``logit_bias`` on an end token.  Raw bytes, such as halves of characters, come now and then, not most of the time.
"""

from __future__ import annotations

import enum
import math
import random
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

UNKNOWN, BOS, EOS, IM_START, IM_END = range(5)
"""Ids of the special tokens of a tiny model."""

FIRST_BYTE = 5
"""Id of the token of byte 0; the 256 byte tokens follow each other (``tokenizer="spm"``)."""


class ValueType(enum.IntEnum):
    """How a metadata value is stored."""

    U8 = 0
    I8 = 1
    U16 = 2
    I16 = 3
    U32 = 4
    I32 = 5
    F32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    U64 = 10
    I64 = 11
    F64 = 12


class TensorType(enum.IntEnum):
    """The tensor types that the tiny model comes in."""

    F32 = 0
    F16 = 1
    Q8_0 = 8


class TokenType(enum.IntEnum):
    """What kind of token a vocabulary entry is."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_PACK = {
    ValueType.U8: "<B",
    ValueType.I8: "<b",
    ValueType.U16: "<H",
    ValueType.I16: "<h",
    ValueType.U32: "<I",
    ValueType.I32: "<i",
    ValueType.F32: "<f",
    ValueType.BOOL: "<?",
    ValueType.U64: "<Q",
    ValueType.I64: "<q",
    ValueType.F64: "<d",
}


@attrs.frozen
class Value:
    """A metadata value with its stored type.  A list of items for ``Array``."""

    type: ValueType
    value: Any


@attrs.frozen
class Array:
    """A metadata array: the type of its items, and the items."""

    type: ValueType
    items: Sequence[Any]


Plain = bool | int | float | str | bytes | Value | Array


@attrs.frozen
class Tensor:
    """A tensor of a file.  ``dims`` are in ggml's order: the contiguous dimension first.

    ``offset`` is where its data begin in the data section; None lays it behind the one before.
    """

    name: str | bytes
    dims: tuple[int, ...]
    type: int
    data: bytes = attrs.field(repr=False)
    offset: int | None = None


def pack_string(text: str | bytes) -> bytes:
    """A length and the bytes."""
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def pack_value(value: Plain) -> bytes:
    """A type and the value.  A plain bool, int, float or str becomes BOOL, U32, F32 or STRING."""
    if isinstance(value, Array):
        head = struct.pack("<IIQ", ValueType.ARRAY, value.type, len(value.items))
        return head + _pack_items(value.type, value.items)
    if not isinstance(value, Value):
        value = Value(_type_of(value), value)
    return struct.pack("<I", value.type) + _pack_items(value.type, (value.value,))


def _type_of(value: float | str | bytes) -> ValueType:
    if isinstance(value, bool):
        return ValueType.BOOL
    if isinstance(value, int):
        return ValueType.U32
    return ValueType.F32 if isinstance(value, float) else ValueType.STRING


def _pack_items(kind: ValueType, items: Iterable[Any]) -> bytes:
    if kind is ValueType.STRING:
        return b"".join(map(pack_string, items))
    values = list(items)
    return struct.pack(f"<{len(values)}{_PACK[kind][1]}", *values)


def gguf_bytes(
    metadata: Mapping[str, Plain] | Sequence[tuple[str | bytes, Plain]],
    tensors: Sequence[Tensor] = (),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    alignment: int = 32,
    tensor_count: int | None = None,
    entry_count: int | None = None,
) -> bytes:
    """A GGUF file.  Nothing is checked: pairs may repeat, counts, offsets and names may lie.

    ``alignment`` is how data are laid out; a file that means it must also carry ``general.alignment``.
    """
    pairs = list(metadata.items()) if isinstance(metadata, Mapping) else list(metadata)
    out = bytearray(magic)
    out += struct.pack(
        "<IQQ",
        version,
        len(tensors) if tensor_count is None else tensor_count,
        len(pairs) if entry_count is None else entry_count,
    )
    for key, value in pairs:
        out += pack_string(key) + pack_value(value)
    end = 0
    for tensor in tensors:
        offset = end if tensor.offset is None else tensor.offset
        out += pack_string(tensor.name) + struct.pack(f"<I{len(tensor.dims)}Q", len(tensor.dims), *tensor.dims)
        out += struct.pack("<IQ", tensor.type, offset)
        end += _padded(len(tensor.data), alignment)
    if tensors:
        out += bytes(-len(out) % alignment)
    for tensor in tensors:
        out += tensor.data + bytes(-len(tensor.data) % alignment)
    return bytes(out)


def write_gguf(
    path: str | Path,
    metadata: Mapping[str, Plain] | Sequence[tuple[str | bytes, Plain]],
    tensors: Sequence[Tensor] = (),
    **options: Any,
) -> Path:
    """Write :func:`gguf_bytes` to a file and return its path."""
    path = Path(path)
    path.write_bytes(gguf_bytes(metadata, tensors, **options))
    return path


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


@attrs.define
class _Vocabulary:
    tokens: list[str] = attrs.field(factory=list)
    scores: list[float] = attrs.field(factory=list)
    types: list[TokenType] = attrs.field(factory=list)

    def add(self, text: str, score: float = 0.0, kind: TokenType = TokenType.NORMAL) -> None:
        self.tokens.append(text)
        self.scores.append(score)
        self.types.append(kind)


_WORDS = (  # what the vocabulary has beside single characters; _ is a space
    "th he in er an on re at en nd or it is ou es st al ar ll lo ing the and you hello world "
    "_t _a _s _w _o _i _the _and _is _in _to _of _you _he _she _it _was _hello _world"
)


def _specials() -> _Vocabulary:
    vocabulary = _Vocabulary()
    vocabulary.add("<unk>", kind=TokenType.UNKNOWN)
    for text in ("<s>", "</s>", "<|im_start|>", "<|im_end|>"):
        vocabulary.add(text, kind=TokenType.CONTROL)
    return vocabulary


def _spm_vocabulary() -> _Vocabulary:
    vocabulary = _specials()
    for byte in range(256):
        vocabulary.add(f"<0x{byte:02X}>", kind=TokenType.BYTE)
    # Pieces are merged best score first, so the longer ones need the better scores.
    for rank, word in enumerate(_WORDS.split()):
        vocabulary.add(word.replace("_", "\u2581"), -float(rank + 1))
    vocabulary.add("\u2581", -900.0)
    for code in range(0x21, 0x7F):
        vocabulary.add(chr(code), -1000.0 - code)
    return vocabulary


def byte_alphabet() -> list[str]:
    """The character that stands for each of the 256 bytes in the vocabulary of a GPT-2 style tokenizer.

    Printable bytes of Latin-1 stand for themselves, the others are numbered from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _bpe_vocabulary() -> tuple[_Vocabulary, list[str]]:
    vocabulary = _specials()
    for character in byte_alphabet():
        vocabulary.add(character)
    merges = []
    space = byte_alphabet()[0x20]
    for word in _WORDS.split():
        text = word.replace("_", space)
        for end in range(2, len(text) + 1):
            if text[:end] not in vocabulary.tokens:
                merges.append(f"{text[: end - 1]} {text[end - 1]}")
                vocabulary.add(text[:end])
    return vocabulary, merges


def tiny_model_parts(
    *,
    seed: int = 0,
    n_vocab: int | None = None,
    layers: int = 2,
    embd: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    ff: int = 128,
    context: int = 512,
    dtype: Literal["f32", "f16", "q8_0"] = "f32",
    chat_template: str | None = CHATML,
    tokenizer: Literal["spm", "bpe"] = "spm",
    tied: bool = False,
) -> tuple[dict[str, Plain], list[Tensor]]:
    """Metadata and tensors of a tiny llama model, for :func:`write_gguf`, or to be spoiled first.

    ``n_vocab`` None is the tokenizer's own size rounded up to a multiple of 32; a larger one is filled with tokens
    that no text has.  ``tied`` leaves the output matrix out, so that the embeddings serve as it: special tokens may
    then be the largest logit.
    """
    if embd % 32 or ff % 32 or embd % heads or heads % kv_heads or embd // heads % 2:
        raise ValueError("embd and ff must be multiples of 32, embd of 2 * heads, heads of kv_heads")
    merges: list[str] = []
    if tokenizer == "spm":
        vocabulary = _spm_vocabulary()
    else:
        vocabulary, merges = _bpe_vocabulary()
    own = len(vocabulary.tokens)
    size = _padded(own, 32) if n_vocab is None else n_vocab
    if size < own:
        raise ValueError(f"the vocabulary has {own} tokens of its own, n_vocab is {size}")
    for token in range(own, size):
        vocabulary.add(f"<unused{token}>", kind=TokenType.UNUSED)

    head_size = embd // heads
    metadata: dict[str, Plain] = {
        "general.architecture": "llama",
        "general.name": f"tiny llama, seed {seed}",
        "general.file_type": {"f32": 0, "f16": 1, "q8_0": 7}[dtype],
        "general.quantization_version": 2,
        "llama.context_length": context,
        "llama.embedding_length": embd,
        "llama.block_count": layers,
        "llama.feed_forward_length": ff,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": head_size,
        "llama.rope.freq_base": 10000.0,
        "llama.vocab_size": size,
        "tokenizer.ggml.model": "llama" if tokenizer == "spm" else "gpt2",
        "tokenizer.ggml.pre": "default" if tokenizer == "spm" else "gpt-2",
        "tokenizer.ggml.tokens": Array(ValueType.STRING, vocabulary.tokens),
        "tokenizer.ggml.token_type": Array(ValueType.I32, vocabulary.types),
        "tokenizer.ggml.unknown_token_id": UNKNOWN,
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.eot_token_id": IM_END,
        "tokenizer.ggml.padding_token_id": UNKNOWN,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        # Off, so that detokenizing gives back what was tokenized.
        "tokenizer.ggml.add_space_prefix": False,
    }
    if tokenizer == "spm":
        metadata["tokenizer.ggml.scores"] = Array(ValueType.F32, vocabulary.scores)
    else:
        metadata["tokenizer.ggml.merges"] = Array(ValueType.STRING, merges)
    if chat_template is not None:
        metadata["tokenizer.chat_template"] = chat_template

    rng = random.Random(seed)
    matrix_type = {"f32": TensorType.F32, "f16": TensorType.F16, "q8_0": TensorType.Q8_0}[dtype]
    tensors: list[Tensor] = []

    def matrix(name: str, columns: int, rows: int, deviation: float) -> None:
        values = _uniform(rng, rows * columns, deviation)
        tensors.append(Tensor(name, (columns, rows), matrix_type, _stored(values, matrix_type)))

    def norm(name: str, scale: float = 1.0) -> None:
        tensors.append(Tensor(name, (embd,), TensorType.F32, _stored(array("f", [scale]) * embd, TensorType.F32)))

    matrix("token_embd.weight", embd, size, 1.0)
    for layer in range(layers):
        norm(f"blk.{layer}.attn_norm.weight")
        # Sharp attention with a loud voice: the next token must depend on more than the last one.
        matrix(f"blk.{layer}.attn_q.weight", embd, embd, 2.0 * embd**-0.5)
        matrix(f"blk.{layer}.attn_k.weight", embd, kv_heads * head_size, 2.0 * embd**-0.5)
        matrix(f"blk.{layer}.attn_v.weight", embd, kv_heads * head_size, 2.0 * embd**-0.5)
        matrix(f"blk.{layer}.attn_output.weight", embd, embd, 2.0 * embd**-0.5)
        norm(f"blk.{layer}.ffn_norm.weight")
        matrix(f"blk.{layer}.ffn_gate.weight", embd, ff, embd**-0.5)
        matrix(f"blk.{layer}.ffn_up.weight", embd, ff, embd**-0.5)
        matrix(f"blk.{layer}.ffn_down.weight", ff, embd, ff**-0.5)
    norm("output_norm.weight")
    if not tied:
        values = _uniform(rng, size * embd, 4.0 * embd**-0.5)
        for token, kind in enumerate(vocabulary.types):
            row = slice(token * embd, (token + 1) * embd)
            if kind in (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.UNUSED):
                values[row] = array("f", bytes(4 * embd))
            elif kind is TokenType.BYTE or (tokenizer == "bpe" and _is_raw(token - FIRST_BYTE)):
                values[row] = array("f", [0.7 * value for value in values[row]])
        tensors.append(Tensor("output.weight", (embd, size), matrix_type, _stored(values, matrix_type)))
    return metadata, tensors


def write_tiny_model(
    path: str | Path,
    *,
    seed: int = 0,
    n_vocab: int | None = None,
    layers: int = 2,
    embd: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    ff: int = 128,
    context: int = 512,
    dtype: Literal["f32", "f16", "q8_0"] = "f32",
    chat_template: str | None = CHATML,
    tokenizer: Literal["spm", "bpe"] = "spm",
    tied: bool = False,
) -> Path:
    """Write a tiny llama model, see :func:`tiny_model_parts`, and return its path."""
    metadata, tensors = tiny_model_parts(
        seed=seed,
        n_vocab=n_vocab,
        layers=layers,
        embd=embd,
        heads=heads,
        kv_heads=kv_heads,
        ff=ff,
        context=context,
        dtype=dtype,
        chat_template=chat_template,
        tokenizer=tokenizer,
        tied=tied,
    )
    return write_gguf(path, metadata, tensors)


def _is_raw(byte: int) -> bool:
    return 0 <= byte < 0x20 or 0x7F <= byte < 0x100


def _uniform(rng: random.Random, count: int, deviation: float) -> array[float]:
    # random() alone is promised to give the same numbers in every Python version.
    width = deviation * math.sqrt(12.0)
    draw = rng.random
    return array("f", [(draw() - 0.5) * width for _ in range(count)])


def _stored(values: array[float], kind: TensorType) -> bytes:
    if kind is TensorType.F32:
        if sys.byteorder == "big":
            values = values[:]
            values.byteswap()
        return values.tobytes()
    if kind is TensorType.F16:
        return struct.pack(f"<{len(values)}e", *values)
    out = bytearray()
    for start in range(0, len(values), 32):
        block = values[start : start + 32]
        scale = max(map(abs, block)) / 127.0
        inverse = 1.0 / scale if scale else 0.0
        out += struct.pack("<e32b", scale, *[round(value * inverse) for value in block])
    return bytes(out)
