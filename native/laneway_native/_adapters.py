"""LoRA adapter files, read and checked against their model before llama.cpp is asked to load them.

For a pair of matrices A and B llama.cpp adds ``scale * B (A x)`` to the product ``W x`` of one of the model's matrices.
It compares two sides of the matrices and trusts the file in all else: a number stored as another type, a third
dimension or a type without a product ends the whole process, and no tensors at all is an adapter without effect.
:func:`check_adapters` refuses such files first.  The reader of GGUF files is that of :mod:`laneway_native._gguf`.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from laneway.decoder import ModelLoadError
from laneway_native import _architectures as architectures
from laneway_native._gguf import GgufHeader
from laneway_native._gguf_file import (
    NO_MATRIX,
    ArrayInfo,
    File,
    Refused,
    TensorInfo,
    ValueType,
    check_layout,
    items,
    opened,
    os_reason,
    padded,
    read_file,
    shape_text,
    trimmed,
)
from laneway_native._log import logger

__all__ = ["check_adapters"]

_SUFFIXES = (".lora_a", ".lora_b")
_NORM = "_norm.weight"
"""llama.cpp passes over tensors of these names: norms that were trained beside the matrices."""

_NVFP4 = 40
_NODES_OF_PAIR = 4
"""Two products, a scaling and an addition in the graph."""
_NODES_OF_TENSOR = 16
"""Half of what llama.cpp grants a graph of a fixed size for each tensor of the model; the model needs the rest."""

_LONGEST_QUOTED = 80


@attrs.frozen
class _Pair:
    """The tensors of one matrix: its change is their product."""

    target: TensorInfo
    """The model's matrix."""
    a: TensorInfo
    b: TensorInfo

    @property
    def rank(self) -> int:
        return self.b.dims[0]


def check_adapters(model: GgufHeader, lora: Sequence[tuple[str, float]]) -> None:
    """Check adapters, as pairs of a path and a scale, for a model of this header.

    Blocks on the file system: the numbers of the tensors are looked at too.  Raises
    :class:`laneway.decoder.ModelLoadError`, which names the adapter and what is wrong with it.
    """
    pairs = 0
    for path, scale in lora:
        try:
            with opened(Path(path)) as data:
                file = read_file(data)
                check_layout(file)
                alpha = _check_metadata(file, model)
                found = _pairs(file, model)
                for pair in found:
                    _check_pair(pair, model)
                    _check_scale(pair, alpha, scale)
                _check_numbers(file)
        except Refused as refused:
            raise _error(model, path, str(refused)) from None
        except OSError as error:
            raise _error(model, path, os_reason(error)) from None
        pairs += len(found)
        if model.architecture in architectures.FIXED_GRAPH:
            most = _NODES_OF_TENSOR * model.tensor_count // _NODES_OF_PAIR
            if pairs > most:
                raise _error(
                    model,
                    path,
                    f"with it the adapters change {pairs:,} matrices; a model of architecture {model.architecture!r} "
                    f"and {model.tensor_count:,} tensors has room for {most:,}",
                )
        if norms := sum(name.endswith(_NORM) for name in file.tensors):
            logger.warning("adapter %s: llama.cpp does not apply its %d norm vectors", path, norms)
        if "adapter.alora.invocation_tokens" in file.entries:
            logger.warning(
                "adapter %s was trained to act from its invocation tokens on; here it acts on the whole prompt", path
            )


def _error(model: GgufHeader, path: str, reason: str) -> ModelLoadError:
    return ModelLoadError(os.fspath(model.path), f"adapter {path!r}: {reason}")


# --- metadata ---------------------------------------------------------------------------------------------------------


def _check_metadata(file: File, model: GgufHeader) -> float:
    """Returns alpha; 0 where the file has none, as llama.cpp takes it."""
    architecture = file.entries.get("general.architecture", (None, None))[1]
    if architecture == "controlvector":
        raise Refused("it is a control vector, not a LoRA adapter")
    if "adapter.type" not in file.entries and (
        f"{architecture}.block_count" in file.entries or "token_embd.weight" in file.tensors
    ):
        raise Refused("it is a model, not an adapter: its source is the first argument of load_model")
    _check_word(file, "general.type", "adapter")
    _check_word(file, "adapter.type", "lora")
    if _text(file, "general.architecture") != model.architecture:
        raise Refused(
            f"it is for models of architecture {_quoted(architecture)}, and this one is {model.architecture!r}"
        )
    _check_invocation(file, model)
    alpha: float = _value(file, "adapter.lora.alpha", ValueType.F32, 0.0)
    if not math.isfinite(alpha):
        raise Refused(f"adapter.lora.alpha is {alpha}; it must be a finite number")
    return alpha


def _check_word(file: File, key: str, wanted: str) -> None:
    found = _text(file, key)
    if found != wanted:
        raise Refused(f"{key} is {_quoted(found)}; it must be {wanted!r} in a LoRA adapter")


def _text(file: File, key: str) -> str:
    if key not in file.entries:
        raise Refused(f"metadata {key!r} is missing: the file is incomplete, or no adapter")
    text: str = _value(file, key, ValueType.STRING, "")
    return text


def _value(file: File, key: str, wanted: ValueType, default: Any) -> Any:
    kind, value = file.entries.get(key, (wanted, default))
    if kind is not wanted:
        found = f"an array of {value.type.label}" if isinstance(value, ArrayInfo) else kind.label
        raise Refused(f"metadata {key!r} is stored as {found}; it must be {wanted.label}")
    return value


def _check_invocation(file: File, model: GgufHeader) -> None:
    key = "adapter.alora.invocation_tokens"
    kind, array = file.entries.get(key, (None, None))
    if kind is None:
        return
    if not isinstance(array, ArrayInfo) or array.type is not ValueType.U32:
        found = f"an array of {array.type.label}" if isinstance(array, ArrayInfo) else kind.label
        raise Refused(f"metadata {key!r} is stored as {found}; it must be an array of u32")
    beyond = max(items(file, array), default=0)
    if beyond >= model.vocabulary_size:
        raise Refused(f"{key} has the token {beyond:,}; the model's vocabulary has {model.vocabulary_size:,} entries")


def _quoted(text: object) -> str:
    return repr(text[:_LONGEST_QUOTED] if isinstance(text, str) else text)


# --- tensors ----------------------------------------------------------------------------------------------------------


def _pairs(file: File, model: GgufHeader) -> list[_Pair]:
    if not file.tensors:
        raise Refused("it has no tensors, so it would change nothing")
    halves: dict[str, dict[str, TensorInfo]] = {}
    for name, tensor in file.tensors.items():
        suffix = name[-len(_SUFFIXES[0]) :]
        if suffix in _SUFFIXES:
            halves.setdefault(name.removesuffix(suffix), {})[suffix] = tensor
        elif not name.endswith(_NORM):
            raise Refused(f"tensor {name!r} is none of a LoRA adapter: their names end in .lora_a or .lora_b")
    if not halves:
        raise Refused("it has no pair of a .lora_a and a .lora_b tensor, so it would change nothing")
    return [_pair(name, half, model.tensors) for name, half in halves.items()]


def _pair(name: str, half: Mapping[str, TensorInfo], tensors: Mapping[str, TensorInfo]) -> _Pair:
    some = next(iter(half.values()))
    target = tensors.get(name)
    if target is None:
        raise Refused(
            f"tensor {some.name!r} changes {name!r}, which the model does not have: the adapter is of another model"
        )
    if len(half) == 1:
        absent = next(name + suffix for suffix in _SUFFIXES if suffix not in half)
        raise Refused(f"tensor {some.name!r} is there without the other one of the pair, {absent!r}")
    if len(trimmed(target.dims)) < 2:
        raise Refused(f"tensor {some.name!r} changes {name!r}, a vector of the model; a pair changes a matrix")
    a, b = (half[suffix] for suffix in _SUFFIXES)
    return _Pair(target, a, b)


def _check_pair(pair: _Pair, model: GgufHeader) -> None:
    for tensor in (pair.a, pair.b):
        if tensor.type in NO_MATRIX:
            raise Refused(
                f"tensor {tensor.name!r} is stored as {tensor.type_name}, which no matrix of an adapter can be; "
                "F32, F16, BF16 and Q8_0 can"
            )
    name = pair.target.name
    columns, rows, *others = (*pair.target.dims, 1)[: max(2, len(pair.target.dims))]
    # The embeddings are looked up by row instead of multiplied, so their pair lies the other way round.
    looked_up = name.endswith("token_embd.weight")
    a = (pair.rank, rows, *others) if looked_up else (columns, pair.rank, *others)
    b = (pair.rank, columns, *others) if looked_up else (pair.rank, rows, *others)
    for tensor, wanted in ((pair.a, a), (pair.b, b)):
        if trimmed(tensor.dims) != trimmed(wanted):
            raise Refused(
                f"tensors {pair.a.name!r} and {pair.b.name!r} have the shapes {shape_text(pair.a.dims)} and "
                f"{shape_text(pair.b.dims)}; of rank {pair.rank:,} they must be {shape_text(a)} and {shape_text(b)} to "
                f"change a matrix of {shape_text(pair.target.dims)}"
            )
    if name == "token_embd.weight" and _makes_logits(model):
        raise Refused(
            f"tensor {pair.a.name!r} changes the embeddings, which make the logits too in this model; "
            "llama.cpp cannot do that"
        )
    scale = f"{name.removesuffix('.weight')}.scale"
    if pair.target.type == _NVFP4 and ".ffn_" in name and scale in model.tensors:
        raise Refused(f"tensor {pair.a.name!r} changes {name!r}, which is stored as NVFP4; llama.cpp cannot do that")


def _makes_logits(model: GgufHeader) -> bool:
    if model.architecture == "bitnet":
        return True
    return "output.weight" not in model.tensors and model.architecture not in architectures.BARE_OUTPUT


def _check_scale(pair: _Pair, alpha: float, scale: float) -> None:
    """The factor of a pair's product, worked out in single precision as llama.cpp does, is a finite number."""
    try:
        factor = _single(_single(scale) * alpha) / pair.rank if alpha else scale
        _single(factor)
    except OverflowError:
        raise Refused(
            f"a scale of {scale:g} with adapter.lora.alpha {alpha:g} is beyond the numbers that llama.cpp computes with"
        ) from None


def _single(value: float) -> float:
    number: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return number


# --- numbers ----------------------------------------------------------------------------------------------------------

_PIECE = 1 << 22
_F16 = 1
_NUMBERS = {
    0: (0, 4, (0,)),
    1: (1, 2, (0,)),
    30: (30, 2, (0,)),
    2: (1, 18, (0,)),
    3: (1, 20, (0, 2)),
    6: (1, 22, (0,)),
    7: (1, 24, (0, 2)),
    8: (1, 34, (0,)),
    20: (1, 18, (0,)),
}
"""By type of tensor: what its floating-point numbers are (0: F32, 1: F16, 30: BF16), bytes from one to the next, and
where in these they are.  F32, F16 and BF16 hold nothing else; Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 and IQ4_NL hold a scale a
block, and some of them an offset."""


def _check_numbers(file: File) -> None:
    """No number is NaN or infinite, and no scale of a block, in the types of :data:`_NUMBERS`.

    Where a product works on quantised activations, NaN can become an ordinary number there.  It would spoil answers
    without an error, so it is looked for here.
    """
    start = padded(file.table_end, file.alignment)
    for tensor in file.tensors.values():
        numbers = _NUMBERS.get(tensor.type)
        if numbers is None or tensor.name.endswith(_NORM):
            continue
        kind, stride, places = numbers
        pieces = _pieces(file, start + tensor.offset, tensor.size, _PIECE // stride * stride)
        if any(_holds_non_finite(raw, kind, stride, place) for raw in pieces for place in places):
            raise Refused(f"tensor {tensor.name!r} holds NaN or infinity: the file is damaged; fetch it again")


def _pieces(file: File, begin: int, size: int, step: int) -> Iterator[bytes]:
    for at in range(begin, begin + size, step):
        yield file.data[at : min(at + step, begin + size)]


_F16_FULL = bytes((byte & 0x7C) == 0x7C for byte in range(256))
"""Whether the upper byte of an F16 number has an exponent of ones only, by that byte."""
_F32_FULL = bytes((byte & 0x7F) == 0x7F for byte in range(256))
"""The same of F32 and BF16, whose exponent has one more bit in the next byte."""


def _holds_non_finite(raw: bytes, kind: int, stride: int, place: int) -> bool:
    last = place + (3 if kind == 0 else 1)
    upper = raw[last::stride]
    if kind == _F16:
        return 1 in upper.translate(_F16_FULL)
    full = upper.translate(_F32_FULL)
    at = full.find(1)
    while at >= 0:
        if raw[at * stride + last - 1] & 0x80:
            return True
        at = full.find(1, at + 1)
    return False
