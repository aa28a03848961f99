"""What training reads and writes: tokenised data, checkpoints, adapters.  Files are written whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs

from laneway_native.training._job import Settings, TrainingError
from laneway_native.training._trainer import Sample, TensorPlace

if TYPE_CHECKING:
    from typing import BinaryIO

_MAGIC = b"LWTRAIN1"
_HEAD = struct.Struct("<8sQ32s")  # magic, bytes of the header, their digest
_LONGEST_HEADER = 1 << 20
_STATE = "state"


def write_whole(path: Path, parts: Iterable[bytes | memoryview[float]]) -> None:
    """Write a file so that, whatever happens, the old one or the new one is there, and after return the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    try:
        with temporary.open("wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        # What is left of it may be what fills the disk.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


# --- data ---


@attrs.frozen
class Data:
    """Samples, and the digest of the file that they come from."""

    samples: Sequence[Sample] = attrs.field(repr=False)
    digest: str

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return max(len(sample.tokens) for sample in self.samples)


def read_data(path: str, *, context_length: int, vocabulary: int) -> Data:
    """The samples of a tokenised file.  Raises :class:`TrainingError` of kind ``data``, which names the line."""
    samples = []
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                digest.update(line)
                if line.strip():
                    samples.append(_sample(line, f"{path}, line {number}", context_length, vocabulary))
    except OSError as error:
        raise TrainingError("data", f"{path} cannot be read: {error.strerror}") from None
    if not samples:
        raise TrainingError("data", f"{path} holds no sequences")
    return Data(samples, digest.hexdigest())


def _sample(line: bytes, where: str, context_length: int, vocabulary: int) -> Sample:
    def refuse(what: str) -> TrainingError:
        return TrainingError("data", f"{where}: {what}")

    try:
        found = json.loads(line)
        tokens, mask = found["tokens"], bytes(found["mask"])
    except (ValueError, TypeError, KeyError) as error:
        raise refuse(f"not an object with tokens and mask ({type(error).__name__}: {error})") from None
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise refuse("tokens are not whole numbers")
    if len(tokens) != len(mask) or any(value > 1 for value in mask):
        raise refuse("the mask is not a 0 or 1 for each token")
    if len(tokens) > context_length:
        raise refuse(f"{len(tokens)} tokens are more than the context_length of {context_length}")
    if not any(mask[1:]):
        raise refuse("no prediction counts: there is nothing to learn")
    if min(tokens) < 0 or max(tokens) >= vocabulary:
        raise refuse(f"a token is not in the model's vocabulary of {vocabulary}")
    return Sample(tokens, mask)


def data_order(seed: int, epoch: int, count: int) -> list[int]:
    """In which order an epoch takes the samples: by draws that every Python makes alike."""
    draw = random.Random(f"{seed}:{epoch}").random
    keys = [draw() for _ in range(count)]
    return sorted(range(count), key=keys.__getitem__)


# --- checkpoints ---


@attrs.frozen(kw_only=True)
class CheckpointInfo:
    """What a checkpoint says of itself."""

    step: int
    """Steps that are done."""
    steps: int
    """Steps of the whole run."""
    base: Literal["f32", "native"]
    settings: dict[str, Any]
    model: str
    """Digest of the model's header."""
    weights: str
    """Digest of the model's whole file."""
    data: str
    """Digest of the data file."""
    numbers: int
    """Of the adapter, and of each of its two moments."""
    digest: str
    """Of these numbers."""

    def check_resumable(self, settings: Settings, *, model: str, weights: str, data: str) -> None:
        """Raise :class:`TrainingError` if a run of these settings would not be the one that was begun."""
        if self.model != model:
            raise TrainingError("checkpoint", "the checkpoint is of another model")
        if self.weights != weights:
            raise TrainingError("checkpoint", "the checkpoint is of other weights of this model")
        if self.data != data:
            raise TrainingError("checkpoint", "the checkpoint is of a run on other data")
        for name, value in settings.as_dict().items():
            if name not in _FREE and self.settings.get(name) != value:
                raise TrainingError(
                    "checkpoint", f"the checkpoint is of a run with {name} {self.settings.get(name)!r}, not {value!r}"
                )
        if settings.base not in ("auto", self.base):
            raise TrainingError("checkpoint", f"the checkpoint is of a run on a {self.base} base, not {settings.base}")


_FREE = frozenset({"threads", "checkpoint_every", "base"})
"""Settings that a resumed run may have otherwise."""


def write_checkpoint(
    folder: str,
    numbers: Sequence[memoryview[float]],
    *,
    step: int,
    steps: int,
    base: Literal["f32", "native"],
    settings: Settings,
    model: str,
    weights: str,
    data: str,
) -> None:
    """Put a checkpoint in the place of the one there is.  ``numbers``: the adapter's, and its two moments'."""
    digest = hashlib.sha256()
    for part in numbers:
        digest.update(part)
    info = CheckpointInfo(
        step=step,
        steps=steps,
        base=base,
        settings=settings.as_dict(),
        model=model,
        weights=weights,
        data=data,
        numbers=len(numbers[0]),
        digest=digest.hexdigest(),
    )
    header = json.dumps(attrs.asdict(info)).encode()
    head = _HEAD.pack(_MAGIC, len(header), hashlib.sha256(header).digest())
    write_whole(Path(folder) / _STATE, [head, header, *numbers])


def checkpoint_info(folder: str | os.PathLike[str]) -> CheckpointInfo | None:
    """What the checkpoint in a folder says of itself; None if there is none.  Its numbers are not read.

    Raises :class:`TrainingError` of kind ``checkpoint`` if it is damaged.
    """
    try:
        with (Path(folder) / _STATE).open("rb") as file:
            return _read_info(file, folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TrainingError("checkpoint", f"the checkpoint in {folder} cannot be read: {error.strerror}") from None


def read_checkpoint(folder: str, numbers: Sequence[memoryview[float]]) -> CheckpointInfo:
    """Fill the numbers from the checkpoint in a folder.

    Raises :class:`TrainingError` of kind ``checkpoint`` if there is none, or if a single bit of it is wrong.
    """
    try:
        with (Path(folder) / _STATE).open("rb") as file:
            info = _read_info(file, folder)
            if info.numbers != len(numbers[0]):
                raise TrainingError("checkpoint", f"the checkpoint in {folder} is of another adapter")
            digest = hashlib.sha256()
            for part in numbers:
                if file.readinto(part.cast("B")) != part.nbytes:
                    raise _damaged(folder)
                digest.update(part)
            if digest.hexdigest() != info.digest or file.read(1):
                raise _damaged(folder)
            return info
    except FileNotFoundError:
        raise TrainingError("checkpoint", f"there is no checkpoint in {folder} to resume from") from None
    except OSError as error:
        raise TrainingError("checkpoint", f"the checkpoint in {folder} cannot be read: {error.strerror}") from None


def remove_checkpoint(folder: str | os.PathLike[str]) -> None:
    """Remove the checkpoint in a folder, and the folder if nothing else is in it."""
    path = Path(folder)
    for name in (_STATE, _STATE + ".part"):
        (path / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not there, or not empty
        path.rmdir()


def _damaged(folder: str | os.PathLike[str]) -> TrainingError:
    return TrainingError("checkpoint", f"the checkpoint in {folder} is damaged; remove it and start anew")


def _read_info(file: BinaryIO, folder: str | os.PathLike[str]) -> CheckpointInfo:
    head = file.read(_HEAD.size)
    if len(head) != _HEAD.size:
        raise _damaged(folder)
    magic, length, digest = _HEAD.unpack(head)
    if magic != _MAGIC or length > _LONGEST_HEADER:
        raise _damaged(folder)
    header = file.read(length)
    if hashlib.sha256(header).digest() != digest:
        raise _damaged(folder)
    try:
        return CheckpointInfo(**json.loads(header))
    except (TypeError, ValueError):
        raise TrainingError(
            "checkpoint", f"the checkpoint in {folder} is of another version of Laneway; remove it and start anew"
        ) from None


# --- adapters ---

_STRING, _FLOAT = 8, 6
_ALIGNMENT = 32


def write_adapter(
    path: str, tensors: Sequence[TensorPlace], numbers: memoryview[float], *, architecture: str, alpha: float
) -> None:
    """Write the adapter as a GGUF file that llama.cpp loads."""

    def text(value: str) -> bytes:
        raw = value.encode()
        return struct.pack("<Q", len(raw)) + raw

    def entry(key: str, value: str | float) -> bytes:
        if isinstance(value, str):
            return text(key) + struct.pack("<I", _STRING) + text(value)
        return text(key) + struct.pack("<If", _FLOAT, value)

    entries = [
        entry("general.architecture", architecture),
        entry("general.type", "adapter"),
        entry("adapter.type", "lora"),
        entry("adapter.lora.alpha", alpha),
    ]
    head = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(entries)), *entries]
    data: list[bytes | memoryview[float]] = []
    offset = 0
    for tensor in tensors:
        size = 4 * tensor.columns * tensor.rows
        head.append(text(tensor.name) + struct.pack("<IQQIQ", 2, tensor.columns, tensor.rows, 0, offset))
        padding = -size % _ALIGNMENT
        data += [numbers[tensor.offset : tensor.offset + tensor.columns * tensor.rows], bytes(padding)]
        offset += size + padding
    head.append(bytes(-sum(map(len, head)) % _ALIGNMENT))
    write_whole(Path(path), [*head, *data])
