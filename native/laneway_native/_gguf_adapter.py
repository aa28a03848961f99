"""LoRA adapters, read and checked in Python before llama.cpp is asked to load them.

llama.cpp reads four metadata values without a look at their types, and builds its graph of whatever matrices it finds:
a wrong file ends the process, in an assertion or at a null pointer.  :func:`check_adapter` refuses such files first.

For a matrix ``W`` of ``columns`` inputs and ``rows`` outputs the file has ``W.lora_a`` of ``columns x rank`` and
``W.lora_b`` of ``rank x rows``; the answer of the layer becomes ``W x + scale * B (A x)`` (arXiv:2106.09685), where
``scale`` is the caller's, times ``alpha / rank`` unless alpha is 0.  Dimensions are in ggml's order, the contiguous one
first.  The embeddings are looked up instead of multiplied, so their ``lora_a`` is ``rank x tokens`` and their
``lora_b`` is ``rank x width``.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from laneway.decoder import ModelLoadError
from laneway_native._gguf import GgufHeader
from laneway_native._gguf_file import (
    NO_MATRIX,
    File,
    Refused,
    TensorInfo,
    ValueType,
    check_layout,
    opened,
    os_reason,
    read_file,
    required,
    scalar,
    shape_text,
    trimmed,
)

__all__ = ["check_adapter"]

_PART = re.compile(r"(?P<base>.+)\.lora_(?P<half>[ab])")
_EMBEDDINGS = "token_embd.weight"
_OUTPUT = "output.weight"
_NVFP4 = 40
_SCALED = re.compile(r".*\.ffn_(?:up|gate|down)\.weight")


@attrs.define
class _Pair:
    a: TensorInfo | None = None
    b: TensorInfo | None = None


def check_adapter(path: str | os.PathLike[str], model: GgufHeader) -> None:
    """Read and check an adapter for ``model``.

    Reads the header and the table of tensors, not the weights.  Blocks on the file system.
    Raises :class:`laneway.decoder.ModelLoadError`, with the model as its source, and with the file and the reason.
    """
    try:
        with opened(Path(path)) as data:
            file = read_file(data)
            _check_kind(file, model)
            check_layout(file)
            pairs = _pairs(file.tensors)
            for base, pair in pairs.items():
                _check_pair(base, pair, model.tensors)
    except Refused as refused:
        reason = str(refused)
    except OSError as error:
        reason = os_reason(error)
    else:
        return
    raise ModelLoadError(os.fspath(model.path), f"adapter {os.fspath(path)!r}: {reason}")


def _check_kind(file: File, model: GgufHeader) -> None:
    if "general.type" not in file.entries and "adapter.type" not in file.entries:
        raise Refused("it is no adapter: its metadata have no 'general.type' that says so; is it a model?")
    _expect(file, "general.type", "adapter", "it is no adapter")
    _expect(file, "adapter.type", "lora", "llama.cpp applies LoRA adapters only")
    _expect(file, "general.architecture", model.architecture, "it was made for a model of another architecture")
    alpha = scalar(file, "adapter.lora.alpha", ValueType.F32, 0.0)
    if not math.isfinite(alpha):
        raise Refused(f"adapter.lora.alpha is {alpha}; it must be a finite number")
    if "adapter.alora.invocation_tokens" in file.entries:
        raise Refused(
            "it is an activated LoRA, which acts only after certain tokens (adapter.alora.invocation_tokens); "
            "Laneway applies an adapter to every token"
        )


def _expect(file: File, key: str, wanted: str, otherwise: str) -> None:
    found: Any = required(file, key, ValueType.STRING)
    if found != wanted:
        raise Refused(f"{otherwise}: {key} is {found[:80]!r}; it must be {wanted!r}")


def _pairs(tensors: Mapping[str, TensorInfo]) -> dict[str, _Pair]:
    pairs: dict[str, _Pair] = {}
    for name, tensor in tensors.items():
        # llama.cpp passes them over: some converters write them beside the pairs.
        if name.endswith("_norm.weight"):
            continue
        part = _PART.fullmatch(name)
        if part is None or _PART.search(part["base"]):
            raise Refused(f"tensor {name!r} is no part of an adapter: names end in .lora_a or .lora_b")
        setattr(pairs.setdefault(part["base"], _Pair()), part["half"], tensor)
    if not pairs:
        raise Refused("it has no matrices: there is nothing to apply")
    return pairs


def _check_pair(base: str, pair: _Pair, model: Mapping[str, TensorInfo]) -> None:
    a, b = pair.a, pair.b
    if a is None or b is None:
        raise Refused(
            f"tensor '{base}.lora_{'b' if a else 'a'}' is missing: the file has the other half of the pair only"
        )
    for half in (a, b):
        if half.type in NO_MATRIX:
            raise Refused(f"tensor {half.name!r} is stored as {half.type_name}, which no weight matrix can be")
    matrix = model.get(base)
    if matrix is None:
        raise Refused(f"tensor {a.name!r} is for {base!r}, which the model does not have; is it the right base model?")
    if len(trimmed(matrix.dims)) < 2:
        raise Refused(f"tensor {a.name!r} is for {base!r}, which is a vector; adapters change matrices only")
    if matrix.type == _NVFP4 and _SCALED.fullmatch(base):
        raise Refused(f"tensor {a.name!r} is for {base!r}, which is stored as NVFP4; llama.cpp cannot adapt it")
    if base == _EMBEDDINGS and _OUTPUT not in model:
        raise Refused(
            f"tensor {a.name!r} changes the embeddings, which this model uses as its output matrix too; "
            "llama.cpp cannot apply it there: train an adapter without the embeddings"
        )
    columns, rows, *more = _four(matrix.dims)
    # B is as wide as A is long.
    rank = b.dims[0]
    if base == _EMBEDDINGS:
        wanted_a, wanted_b = (rank, rows, *more), (rank, columns, *more)
    else:
        wanted_a, wanted_b = (columns, rank, *more), (rank, rows, *more)
    for half, wanted in ((a, wanted_a), (b, wanted_b)):
        if _four(half.dims) != wanted:
            raise Refused(
                f"tensor {half.name!r} has the shape {shape_text(half.dims)}; rank {rank:,} and the model's matrix of "
                f"{shape_text(matrix.dims)} need {shape_text(trimmed(wanted))}: is it the right base model?"
            )
    if rank > max(columns, rows):
        raise Refused(f"tensor {b.name!r} has rank {rank:,}, more than the model's matrix of {shape_text(matrix.dims)}")


def _four(dims: tuple[int, ...]) -> tuple[int, ...]:
    return (*dims, *(1,) * (4 - len(dims)))
