"""What a GGUF file says of itself, read and checked in Python before llama.cpp is asked to load it.

llama.cpp trusts a file in places: there a wrong one ends the whole process (an assertion, a division by zero, a null
pointer) instead of the load.  :func:`check_gguf` refuses such files first, and says what is wrong in words that a
person can act on.  It reads the header and the table of tensors, never the weights, and believes no length or count
before it has been compared with the size of the file.

The order of the checks is the order of the file: header, metadata, tensor table, layout of the data; then what the
model needs: hyperparameters, matrices, tokenizer.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import hashlib
import math
import mmap
import os
import re
import stat
import struct
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import attrs

from laneway.decoder import ModelLoadError
from laneway_native import _architectures as architectures

__all__ = ["GgufArray", "GgufHeader", "check_gguf"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_HEADER = struct.Struct("<4sIQQ")  # magic, version, tensors, metadata entries
_SMALLEST_ENTRY = 8 + 1 + 4 + 1  # length, a key of one byte, type, a value of one byte
_SMALLEST_TENSOR = 8 + 1 + 4 + 8 + 4 + 8  # length, a name of one byte, dimensions, one of them, type, offset

# Far beyond any model, near enough that counting to it takes no time.
_MOST_ENTRIES = 1 << 16
_MOST_TENSORS = 1 << 20
_MOST_STRINGS = 1 << 24
_LONGEST_LISTED = 64

_MOST_LAYERS = 512
_MOST_EXPERTS = 1024
_LONGEST_TENSOR_NAME = 63
_MOST_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32
_MEMORY_ALIGNMENT = 32  # of the memory that llama.cpp hands to its kernels, mapped files included

_U32 = struct.Struct("<I").unpack_from
_U64 = struct.Struct("<Q").unpack_from


class _Type(enum.IntEnum):
    """Types of metadata values."""

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

    @property
    def label(self) -> str:
        return self.name.lower()


_FORMAT = {
    _Type.U8: "B",
    _Type.I8: "b",
    _Type.U16: "H",
    _Type.I16: "h",
    _Type.U32: "I",
    _Type.I32: "i",
    _Type.F32: "f",
    _Type.BOOL: "?",
    _Type.U64: "Q",
    _Type.I64: "q",
    _Type.F64: "d",
}
_SIZE = {kind: struct.calcsize(code) for kind, code in _FORMAT.items()}

_TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
    42: ("Q2_0", 64, 18),
}
"""Name, weights in a block, bytes of a block."""

_REMOVED_TENSOR_TYPES = frozenset({4, 5, 31, 32, 33, 36, 37, 38})
_F32 = 0
_NO_MATRIX = frozenset({9, 15, 24, 25, 26, 27, 28})
"""llama.cpp has no product for these: as a weight matrix they would make it call a null pointer."""

_MATRIX = re.compile(
    r"(?:token_embd|output|blk\.\d+\.(?:attn_(?:q|k|v|qkv|output)|ffn_(?:up|down|gate)(?:_exps|_shexp)?))\.weight"
)
_VECTOR = re.compile(
    r".*(?:norm(?:_\d)?\.weight|\.bias|\.scale|\.input_scale|rope_freqs\.weight|rope_factors_\w+\.weight)"
)
_INTEGERS = frozenset({24, 25, 26, 27})
"""llama.cpp adds vectors to F32 activations, or multiplies them: numbers of another type are an assertion there."""

_SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")

_FOREIGN = (
    (b"PK\x03\x04", "a zip archive (a Python wheel or a PyTorch file, perhaps)"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\xfd7zXZ\x00", "an xz archive"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive"),
    (b"7z\xbc\xaf", "a 7z archive"),
    (b"\x7fELF", "a program or library"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x80\x02", "a Python pickle (an old PyTorch file, perhaps)"),
    (b"\x80\x03", "a Python pickle"),
    (b"\x80\x04", "a Python pickle"),
    (b"\x80\x05", "a Python pickle"),
    (b"lmgg", "a GGML file from before GGUF"),
    (b"fmgg", "a GGML file from before GGUF"),
    (b"tjgg", "a GGML file from before GGUF"),
    (b"algg", "a LoRA adapter from before GGUF"),
    (b"version https://git-lfs", "a Git LFS pointer: the file itself has not been fetched (git lfs pull)"),
)


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
    tensors: Mapping[str, _Tensor] = attrs.field(repr=False)
    """The table of tensors, of all parts."""

    def kv_bytes_per_token(self, bytes_per_value: float = 2.0) -> int:
        """Bytes of keys and values that one token takes in all layers, at most; a sliding window needs less."""
        return math.ceil(self.kv_heads * (self.key_length + self.value_length) * bytes_per_value)


class _Refused(Exception):  # noqa: N818 - a verdict, which never leaves this module
    """Why a file is refused; becomes a ModelLoadError, which also names the file."""


def check_gguf(path: str | os.PathLike[str]) -> GgufHeader:
    """Read and check a GGUF file, all parts of it if it is split.

    Blocks on the file system; the time depends on the vocabulary, not on the weights (about a tenth of a second for
    262,144 tokens).  Raises :class:`laneway.decoder.ModelLoadError` with the reason.
    """
    first = Path(path)
    source = os.fspath(path)
    try:
        return _check(first)
    except _Refused as refused:
        raise ModelLoadError(source, str(refused)) from None
    except OSError as error:
        raise ModelLoadError(source, _os_reason(error)) from None


def _check(first: Path) -> GgufHeader:
    with _opened(first) as data:
        main = _read(data)
        _check_mappable(main)
        _check_layout(main)
        parts = [first, *_other_parts(first, main)]
        tensors = dict(main.tensors)
        digest = hashlib.sha256(data[: main.header_size])
        file_size, tensor_bytes = main.file_size, main.tensor_bytes
        for number, part in enumerate(parts[1:], start=1):
            try:
                with _opened(part) as other_data:
                    other = _read(other_data)
                    _check_mappable(other)
                    _check_layout(other)
                    _check_part(other, number)
                    digest.update(other_data[: other.header_size])
            except _Refused as refused:
                raise _Refused(f"part {part.name}: {refused}") from None
            except OSError as error:
                raise _Refused(f"part {part.name}: {_os_reason(error)}") from None
            if twice := tensors.keys() & other.tensors.keys():
                raise _Refused(f"part {part.name}: tensor {min(twice)!r} is in another part too")
            tensors.update(other.tensors)
            file_size += other.file_size
            tensor_bytes += other.tensor_bytes
        _check_count(main, len(parts), len(tensors))
        shape = _check_model(main, tensors)
        vocabulary_size = _check_tokenizer(main)
        _check_tensors(tensors, shape, vocabulary_size)
        return _header(first, parts, main, shape, vocabulary_size, tensors, tensor_bytes, file_size, digest.hexdigest())


def _os_reason(error: OSError) -> str:
    if error.errno == errno.ENOENT:
        return "there is no such file"
    if error.errno == errno.EACCES:
        return "permission denied: this user may not read it"
    return error.strerror or type(error).__name__


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[mmap.mmap]:
    """A file's bytes, mapped, so that what is not looked at is not read."""
    # Looked at before it is opened: opening a pipe would wait for its other end.
    try:
        mode = path.stat().st_mode
    except ValueError:
        raise _Refused("its name has a null character in it") from None
    if stat.S_ISDIR(mode):
        raise _Refused("it is a directory; name the .gguf file in it")
    if not stat.S_ISREG(mode):
        raise _Refused("it is no regular file")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            raise _Refused("the file is empty")
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as data:
            yield data


# --- reading ----------------------------------------------------------------------------------------------------------


@attrs.frozen
class _Array:
    """An array in the file: where its items begin, and where they end."""

    type: _Type
    count: int
    start: int
    end: int


@attrs.frozen
class _Tensor:
    name: str
    dims: tuple[int, ...]
    """ggml's order: the contiguous dimension first."""
    type: int
    offset: int
    size: int

    @property
    def type_name(self) -> str:
        return _TENSOR_TYPES[self.type][0]


@attrs.frozen
class _File:
    data: mmap.mmap
    """Closed already for the parts of a split file but the first."""
    version: int
    entries: dict[str, tuple[_Type, Any]]
    tensors: dict[str, _Tensor]
    table_end: int
    """Where the tensor table ends, before padding."""
    alignment: int
    file_size: int

    @property
    def header_size(self) -> int:
        """Bytes before the weights."""
        padded = _padded(self.table_end, self.alignment) if self.tensors else self.table_end
        return min(padded, self.file_size)

    @property
    def tensor_bytes(self) -> int:
        return sum(tensor.size for tensor in self.tensors.values())


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


class _Cursor:
    """A place in the file that moves forward and never past the end."""

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self.data = data
        self.size = len(data)
        self.at = at

    @property
    def left(self) -> int:
        return self.size - self.at

    def _take(self, count: int, what: str) -> int:
        start = self.at
        if count > self.size - start:
            raise _Refused(
                f"the file ends after {self.size:,} bytes, inside {what}: it was cut off or damaged; fetch it again"
            )
        self.at = start + count
        return start

    def u32(self, what: str) -> int:
        value: int = _U32(self.data, self._take(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        value: int = _U64(self.data, self._take(8, what))[0]
        return value

    def string(self, what: str) -> bytes:
        length = self.u64(what)
        if length > self.left:
            raise _Refused(
                f"{what} claims {length:,} bytes where {self.left:,} are left in the file: "
                "it was cut off or damaged; fetch it again"
            )
        start = self._take(length, what)
        return self.data[start : self.at]

    def skip_items(self, kind: _Type, count: int, what: str) -> None:
        if kind is _Type.STRING:
            self._skip_strings(count, what)
            return
        if count * _SIZE[kind] > self.left:
            raise _Refused(self._too_many(count, what))
        self.at += count * _SIZE[kind]

    def _skip_strings(self, count: int, what: str) -> None:
        if count > _MOST_STRINGS or count * 8 > self.left:
            raise _Refused(self._too_many(count, what))
        # The one loop that runs a million times for a large vocabulary.
        data, size, at, length_at = self.data, self.size, self.at, _U64
        try:
            for _ in range(count):
                at += 8 + length_at(data, at)[0]
                if at > size:
                    break
            else:
                self.at = at
                return
        except struct.error:
            pass
        raise _Refused(f"the file ends after {size:,} bytes, inside {what}: it was cut off or damaged; fetch it again")

    def _too_many(self, count: int, what: str) -> str:
        return (
            f"{what} claims {count:,} items where {self.left:,} bytes are left in the file: "
            "it was cut off or damaged; fetch it again"
        )


def _read(data: mmap.mmap) -> _File:
    version, tensor_count, entry_count = _read_header(data)
    cursor = _Cursor(data, _HEADER.size)
    if entry_count > _MOST_ENTRIES or entry_count * _SMALLEST_ENTRY > cursor.left:
        raise _Refused(
            f"its header claims {entry_count:,} metadata entries, which its {cursor.size:,} bytes cannot hold: "
            "it was cut off or damaged; fetch it again"
        )
    entries: dict[str, tuple[_Type, Any]] = {}
    for index in range(entry_count):
        key = _text(cursor.string(f"metadata key {index}"), f"metadata key {index}")
        if not key:
            raise _Refused(f"metadata key {index} is empty")
        if key in entries:
            raise _Refused(f"metadata key {key!r} is there twice")
        entries[key] = _read_value(cursor, key)
    if tensor_count > _MOST_TENSORS or tensor_count * _SMALLEST_TENSOR > cursor.left:
        raise _Refused(
            f"its header claims {tensor_count:,} tensors, which the {cursor.left:,} bytes behind the metadata "
            "cannot describe: it was cut off or damaged; fetch it again"
        )
    tensors: dict[str, _Tensor] = {}
    for index in range(tensor_count):
        tensor = _read_tensor(cursor, index)
        if tensor.name in tensors:
            raise _Refused(f"tensor {tensor.name!r} is there twice")
        tensors[tensor.name] = tensor
    return _File(data, version, entries, tensors, cursor.at, _alignment(entries), cursor.size)


def _read_header(data: mmap.mmap) -> tuple[int, int, int]:
    if data[:4] != _MAGIC:
        raise _Refused(f"it is not a GGUF file: {_what_else(data)}")
    if len(data) < _HEADER.size:
        raise _Refused(
            f"it has {len(data)} bytes, fewer than the header of a GGUF file: it was cut off; fetch it again"
        )
    _, version, tensor_count, entry_count = _HEADER.unpack_from(data)
    if version & 0xFFFF == 0 and version:
        raise _Refused("it is a big-endian GGUF file, for another kind of processor; get the little-endian one")
    if version not in _VERSIONS:
        known = " and ".join(map(str, _VERSIONS))
        raise _Refused(f"it is GGUF version {version}; versions {known} can be read")
    return version, tensor_count, entry_count


def _what_else(data: mmap.mmap) -> str:
    """A guess at what a file is that should have been GGUF."""
    head = data[:1024]
    for magic, what in _FOREIGN:
        if head.startswith(magic):
            return f"it looks like {what}"
    if data[257:262] == b"ustar":
        return "it looks like a tar archive"
    if head[8:10] == b'{"' and len(head) > 8 and _U64(head)[0] < len(data):
        return "it looks like a safetensors file, which has to be converted first"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<body")) or (text[:1] == b"<" and b"<html" in text):
        return "it looks like a web page, saved instead of the model"
    if text.startswith((b"<?xml", b"<!doctype")):
        return "it looks like an XML document, saved instead of the model"
    if text.startswith((b"{", b"[")):
        return "it looks like JSON text"
    if not head.strip(b"\0"):
        return f"its first {len(head)} bytes are zero: an unfinished download, perhaps"
    return f"it begins with {bytes(head[:4])!r}, not with {_MAGIC!r} ({len(data):,} bytes)"


def _text(raw: bytes, what: str) -> str:
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise _Refused(f"{what} is not valid UTF-8 ({raw[:40]!r}): the file is damaged") from None
    if "\0" in text:
        raise _Refused(f"{what} has a null character in it ({raw[:40]!r}): the file is damaged")
    return text


def _read_type(cursor: _Cursor, key: str) -> _Type:
    number = cursor.u32(f"metadata {key!r}")
    try:
        return _Type(number)
    except ValueError:
        raise _Refused(f"metadata {key!r} has type {number}, which GGUF does not have: the file is damaged") from None


def _read_value(cursor: _Cursor, key: str) -> tuple[_Type, Any]:
    what = f"metadata {key!r}"
    kind = _read_type(cursor, key)
    if kind is _Type.ARRAY:
        item = _read_type(cursor, key)
        if item is _Type.ARRAY:
            raise _Refused(f"{what} is an array of arrays, which llama.cpp cannot read")
        count = cursor.u64(what)
        start = cursor.at
        cursor.skip_items(item, count, what)
        return kind, _Array(item, count, start, cursor.at)
    if kind is _Type.STRING:
        # Only keys and names must be right: a model may well carry a description in Latin-1.
        return kind, cursor.string(what).decode(errors="replace")
    start = cursor.at
    cursor.skip_items(kind, 1, what)
    return kind, struct.unpack_from("<" + _FORMAT[kind], cursor.data, start)[0]


def _read_tensor(cursor: _Cursor, index: int) -> _Tensor:
    what = f"the description of tensor {index}"
    name = _text(cursor.string(what), f"the name of tensor {index}")
    if len(name.encode()) > _LONGEST_TENSOR_NAME:
        raise _Refused(f"tensor {index} has a name of {len(name)} characters; {_LONGEST_TENSOR_NAME} can be read")
    if not name:
        raise _Refused(f"tensor {index} has no name")
    count = cursor.u32(what)
    if not 1 <= count <= _MOST_DIMENSIONS:
        raise _Refused(f"tensor {name!r} has {count} dimensions; 1 to {_MOST_DIMENSIONS} can be")
    dims = tuple(cursor.u64(what) for _ in range(count))
    number = cursor.u32(what)
    offset = cursor.u64(what)
    if number in _REMOVED_TENSOR_TYPES:
        raise _Refused(f"tensor {name!r} has type {number}, which llama.cpp has dropped; get a newer file of the model")
    if number not in _TENSOR_TYPES:
        raise _Refused(f"tensor {name!r} has type {number}, which this llama.cpp does not know")
    label, block, block_bytes = _TENSOR_TYPES[number]
    if not all(dims):
        raise _Refused(f"tensor {name!r} has a dimension of 0")
    elements = math.prod(dims)
    if elements >= 1 << 62:
        raise _Refused(f"tensor {name!r} has the shape {_shape(dims)}, more than memory can hold: the file is damaged")
    if dims[0] % block:
        raise _Refused(f"tensor {name!r} has rows of {dims[0]} weights, which are no multiple of {label}'s {block}")
    return _Tensor(name, dims, number, offset, elements // block * block_bytes)


def _shape(dims: tuple[int, ...]) -> str:
    return " x ".join(f"{dim:,}" for dim in dims)


def _alignment(entries: dict[str, tuple[_Type, Any]]) -> int:
    if "general.alignment" not in entries:
        return _DEFAULT_ALIGNMENT
    kind, value = entries["general.alignment"]
    if kind is not _Type.U32:
        raise _Refused(f"metadata 'general.alignment' is stored as {kind.label}; it must be u32")
    if value <= 0 or value & (value - 1):
        raise _Refused(f"general.alignment is {value}, which is no power of two")
    return int(value)


# --- the layout of the weights ----------------------------------------------------------------------------------------


def _check_mappable(file: _File) -> None:
    """Weights that stay where the file has them lie where kernels can read them.  (Adapters are copied.)"""
    if file.alignment % _MEMORY_ALIGNMENT:
        raise _Refused(
            f"general.alignment is {file.alignment}; llama.cpp maps the weights and needs {_MEMORY_ALIGNMENT} or more"
        )


def _check_layout(file: _File) -> None:
    """Tensors follow one another without gap or overlap, and all of them are there."""
    start = _padded(file.table_end, file.alignment)
    expected = end = 0
    for tensor in file.tensors.values():
        if tensor.offset % file.alignment:
            raise _Refused(
                f"tensor {tensor.name!r} begins at offset {tensor.offset:,}, which is not aligned to {file.alignment}"
            )
        if tensor.offset < expected:
            raise _Refused(f"tensor {tensor.name!r} begins at offset {tensor.offset:,}, inside the one before it")
        if tensor.offset > expected:
            raise _Refused(
                f"tensor {tensor.name!r} begins at offset {tensor.offset:,} and not at {expected:,}, where the one "
                "before it ends"
            )
        end = tensor.offset + tensor.size
        expected = _padded(end, file.alignment)
    if not file.tensors:
        return
    missing = start + end - file.file_size
    if missing > 0:
        raise _Refused(
            f"{missing:,} of {start + end:,} bytes are missing at its end: the download was cut off; fetch it again"
        )


def _other_parts(first: Path, main: _File) -> list[Path]:
    """The paths of a split file's other parts; none for a model in one file."""
    count = _scalar(main, "split.count", _Type.U16, 0)
    if count <= 1:
        return []
    number = _scalar(main, "split.no", _Type.U16, 0)
    match = _SPLIT_NAME.fullmatch(first.name)
    if match is None or int(match["count"]) != count or int(match["number"]) != number + 1:
        raise _Refused(
            f"it is part {number + 1} of a model in {count} files, whose names must end in "
            f"-{number + 1:05}-of-{count:05}.gguf: rename all parts so"
        )
    names = [f"{match['stem']}-{part:05}-of-{count:05}.gguf" for part in range(1, count + 1)]
    if number != 0:
        raise _Refused(f"it is part {number + 1} of {count}; name the first one, {names[0]}")
    paths = [first.with_name(name) for name in names[1:]]
    absent = [path.name for path in paths if not path.exists()]
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise _Refused(f"the model is in {count} files, of which {absent[0]}{more} is not beside the first")
    return paths


def _check_part(part: _File, number: int) -> None:
    if "split.no" not in part.entries:
        raise _Refused("it does not say which part it is (metadata 'split.no')")
    found = _scalar(part, "split.no", _Type.U16, 0)
    if found != number:
        raise _Refused(f"it says that it is part {found + 1}, and its name that it is part {number + 1}")


def _check_count(main: _File, parts: int, tensors: int) -> None:
    if parts == 1:
        return
    if "split.tensors.count" not in main.entries:
        raise _Refused("metadata 'split.tensors.count' is missing")
    promised = _scalar(main, "split.tensors.count", _Type.I32, 0)
    if promised != tensors:
        raise _Refused(f"its {parts} parts have {tensors} tensors, and it promises {promised}")


# --- hyperparameters --------------------------------------------------------------------------------------------------


def _entry(file: _File, key: str, kind: _Type) -> Any:
    """The value of a key that is there, which must be stored as llama.cpp expects it."""
    found, value = file.entries[key]
    if found is not kind:
        raise _Refused(f"metadata {key!r} is stored as {found.label}; it must be {kind.label}")
    return value


def _scalar(file: _File, key: str, kind: _Type, default: Any) -> Any:
    return _entry(file, key, kind) if key in file.entries else default


def _required(file: _File, key: str, kind: _Type) -> Any:
    if key not in file.entries:
        raise _Refused(f"metadata {key!r} is missing: the file is incomplete, or no model")
    return _entry(file, key, kind)


def _items(file: _File, array: _Array) -> tuple[Any, ...]:
    if array.type is _Type.STRING:
        return tuple(raw.decode(errors="replace") for raw in _strings(file.data, array))
    return struct.unpack_from(f"<{array.count}{_FORMAT[array.type]}", file.data, array.start)


def _strings(data: mmap.mmap, array: _Array) -> Iterator[bytes]:
    # Every length was checked when the array was read.
    at, length_at = array.start, _U64
    for _ in range(array.count):
        start = at + 8
        at = start + length_at(data, at)[0]
        yield data[start:at]


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


def _check_model(file: _File, tensors: Mapping[str, _Tensor]) -> _Shape:
    kind = file.entries.get("general.type", (_Type.STRING, "model"))[1]
    if kind == "adapter" or "adapter.type" in file.entries:
        raise _Refused("it is an adapter, not a model: load the model that it belongs to with lora=[(path, scale)]")
    if kind in ("mmproj", "imatrix"):
        raise _Refused(f"it is no language model: its metadata say that it is {kind!r}")
    name = _architecture(file)
    if not tensors:
        raise _Refused("it has no weights: a vocabulary or a template without a model")

    context_length = _required(file, f"{name}.context_length", _Type.U32)
    embedding_length = _required(file, f"{name}.embedding_length", _Type.U32)
    layers = _required(file, f"{name}.block_count", _Type.U32)
    if context_length == 0:
        raise _Refused(f"{name}.context_length is 0")
    if embedding_length == 0:
        raise _Refused(f"{name}.embedding_length is 0")
    if not 1 <= layers <= _MOST_LAYERS:
        raise _Refused(f"{name}.block_count is {layers:,}; llama.cpp takes 1 to {_MOST_LAYERS}")
    predicted = _scalar(file, f"{name}.nextn_predict_layers", _Type.U32, 0)
    if predicted >= layers:
        raise _Refused(f"{name}.nextn_predict_layers is {predicted:,} of {layers} layers")

    heads, kv_heads = _check_heads(file, name, layers)
    key_length, value_length = _head_sizes(file, name, embedding_length, heads[0])
    _check_rotation(file, name, key_length)
    _check_norms(file, name)
    _check_experts(file, name, layers)
    _check_divisors(file, name)
    _check_particular(file, name, layers, embedding_length, key_length)
    return _Shape(name, context_length, layers, embedding_length, heads, kv_heads, key_length, value_length)


def _architecture(file: _File) -> str:
    name: str = _required(file, "general.architecture", _Type.STRING)
    if name in architectures.REFUSED:
        raise _Refused(f"its architecture, {name!r}, cannot answer a prompt: {architectures.REFUSED[name]}")
    if name not in architectures.SUPPORTED:
        raise _Refused(
            f"its architecture, {name[:80]!r}, is not one that this llama.cpp knows; a newer build may know it"
        )
    return name


def _per_layer(file: _File, key: str, layers: int, default: tuple[int, ...]) -> tuple[int, ...]:
    """One number for all layers, or an array with one for each."""
    if key not in file.entries:
        return default
    kind, value = file.entries[key]
    if kind is not _Type.ARRAY:
        return (int(_entry(file, key, _Type.U32)),) * layers
    if value.type not in (_Type.U32, _Type.I32, _Type.BOOL):
        raise _Refused(f"metadata {key!r} is an array of {value.type.label}; it must hold u32 or i32")
    if value.count != layers:
        raise _Refused(f"metadata {key!r} has {value.count:,} numbers for {layers} layers")
    numbers = tuple(map(int, _items(file, value)))
    if min(numbers) < 0:
        raise _Refused(f"metadata {key!r} has the number {min(numbers)} for a layer")
    return numbers


def _check_heads(file: _File, name: str, layers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    key = f"{name}.attention.head_count"
    heads = _per_layer(file, key, layers, (0,) * layers)
    kv_heads = _per_layer(file, f"{key}_kv", layers, heads)
    if name in architectures.RECURRENT:
        return heads, kv_heads
    if key not in file.entries:
        raise _Refused(f"metadata {key!r} is missing: the file is incomplete, or no model")
    if max(heads) == 0:
        raise _Refused(f"{key} is 0")
    for layer, (count, kv_count) in enumerate(zip(heads, kv_heads, strict=True)):
        if kv_count and (count % kv_count or kv_count > count > 0):
            raise _Refused(f"layer {layer} has {count} attention heads, which {kv_count} key-value heads cannot share")
    return heads, kv_heads


def _head_sizes(file: _File, name: str, embedding_length: int, heads: int) -> tuple[int, int]:
    if heads == 0:
        return 0, 0
    keys = [f"{name}.attention.{part}_length" for part in ("key", "value")]
    if embedding_length % heads and not all(key in file.entries for key in keys):
        raise _Refused(f"{name}.embedding_length is {embedding_length:,}, which {heads} attention heads cannot share")
    default = embedding_length // heads
    sizes = [int(_scalar(file, key, _Type.U32, default)) for key in keys]
    for key, size in zip(keys, sizes, strict=True):
        if not 1 <= size <= 1 << 16:
            raise _Refused(f"{key} is {size:,}")
    if name in architectures.EQUAL_HEADS and sizes[0] != sizes[1]:
        raise _Refused(f"its keys have {sizes[0]} numbers a head and its values {sizes[1]}; {name} needs the same")
    return sizes[0], sizes[1]


def _check_rotation(file: _File, name: str, key_length: int) -> None:
    key = f"{name}.rope.dimension_count"
    count = _scalar(file, key, _Type.U32, key_length)
    if key in file.entries or name in architectures.FULL_ROTATION:
        if count % 2 or (key_length and count > key_length):
            raise _Refused(f"{key} is {count:,}; it must be even and at most the size of a head, {key_length}")
        if name in architectures.FULL_ROTATION and count != key_length:
            raise _Refused(f"{key} is {count:,}; {name} needs the size of a head, {key_length}")
    base = _scalar(file, f"{name}.rope.freq_base", _Type.F32, 10_000.0)
    if not (math.isfinite(base) and base > 0):
        raise _Refused(f"{name}.rope.freq_base is {base:g}")
    for part in ("rope.scaling.factor", "rope.scale_linear"):
        factor = _scalar(file, f"{name}.{part}", _Type.F32, 1.0)
        if not (math.isfinite(factor) and factor >= 0):
            raise _Refused(f"{name}.{part} is {factor:g}")
    scaling = _scalar(file, f"{name}.rope.scaling.type", _Type.STRING, "linear")
    if scaling not in ("none", "linear", "yarn", "longrope"):
        raise _Refused(f"{name}.rope.scaling.type is {scaling[:80]!r}, which llama.cpp does not know")


def _check_norms(file: _File, name: str) -> None:
    for part, needed in (
        ("layer_norm_rms_epsilon", name in architectures.RMS_NORM),
        ("layer_norm_epsilon", name in architectures.LAYER_NORM),
        ("group_norm_epsilon", False),
    ):
        key = f"{name}.attention.{part}"
        if not needed and key not in file.entries:
            continue
        epsilon = _required(file, key, _Type.F32)
        if not 0 <= epsilon <= 1:
            raise _Refused(f"{key} is {epsilon:g}; it must be a small positive number")


def _check_experts(file: _File, name: str, layers: int) -> None:
    experts = _scalar(file, f"{name}.expert_count", _Type.U32, 0)
    used = max(_per_layer(file, f"{name}.expert_used_count", layers, (0,) * layers))
    groups = _scalar(file, f"{name}.expert_group_count", _Type.U32, 0)
    used_groups = _scalar(file, f"{name}.expert_group_used_count", _Type.U32, 0)
    if name in ("hunyuan_vl", "hunyuan-dense") and experts <= 1:
        experts = used = 0
    if experts > _MOST_EXPERTS:
        raise _Refused(f"{name}.expert_count is {experts:,}; llama.cpp takes up to {_MOST_EXPERTS}")
    if used > experts or bool(used) != bool(experts):
        raise _Refused(f"{name}.expert_used_count is {used:,} of {experts} experts")
    if groups and groups >= experts:
        raise _Refused(f"{name}.expert_group_count is {groups:,} for {experts} experts")
    if groups > 1 and (experts % groups or not 1 <= used_groups < groups):
        raise _Refused(f"{experts} experts in {groups} groups, {used_groups} of them used, cannot be")


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


def _check_divisors(file: _File, name: str) -> None:
    """llama.cpp divides by these without a look."""
    for part in _DIVISORS:
        key = f"{name}.{part}"
        if key in file.entries and file.entries[key][0] is not _Type.ARRAY and not _entry(file, key, _Type.U32):
            raise _Refused(f"{key} is 0")


def _check_particular(file: _File, name: str, layers: int, embedding_length: int, key_length: int) -> None:
    """What single architectures assert, beyond what all do."""

    def number(part: str, default: int = 0) -> int:
        return int(_scalar(file, f"{name}.{part}", _Type.U32, default))

    def need(holds: bool, part: str, what: str) -> None:
        if not holds:
            raise _Refused(f"{name}.{part} must be {what}")

    if name in architectures.EXPERTS:
        need(number("expert_count") > 0, "expert_count", "there and above 0")
    if name in architectures.SECTIONS:
        array = file.entries.get(f"{name}.rope.dimension_sections", (None, None))[1]
        listed = isinstance(array, _Array) and array.type in (_Type.I32, _Type.U32) and array.count == 4
        sections = _items(file, array)[:3] if listed and isinstance(array, _Array) else (0,)
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
        need(_scalar(file, f"{name}.kda.safe_gate", _Type.BOOL, True), "kda.safe_gate", "true")
        need(_scalar(file, f"{name}.kda.gate_lower_bound", _Type.F32, 0.0) < 0, "kda.gate_lower_bound", "below 0")
    if name == "glm5-next":
        pool = number("attention.indexer.kpool")
        need(
            pool > 1 and number("attention.indexer.top_k") % pool == 0, "attention.indexer.kpool", "a divisor of top_k"
        )
        need(number("hyper_connection.count") == 4, "hyper_connection.count", "4")


def _check_tensors(tensors: Mapping[str, _Tensor], shape: _Shape, vocabulary_size: int) -> None:
    for name, tensor in tensors.items():
        vector = len(_trimmed(tensor.dims)) <= 1 and tensor.type not in _INTEGERS
        if tensor.type != _F32 and (vector or _VECTOR.fullmatch(name)):
            raise _Refused(f"tensor {name!r} is stored as {tensor.type_name}; llama.cpp needs F32 there")
        if tensor.type in _NO_MATRIX and _MATRIX.fullmatch(name):
            raise _Refused(f"tensor {name!r} is stored as {tensor.type_name}, which no weight matrix can be")
    embeddings = tensors.get("token_embd.weight")
    if embeddings is None:
        raise _Refused("tensor 'token_embd.weight', the embeddings, is missing: the file is incomplete, or no model")
    needed = (shape.embedding_length, vocabulary_size)
    for matrix in (embeddings, tensors.get("output.weight", embeddings)):
        if _trimmed(matrix.dims) != _trimmed(needed):
            raise _Refused(
                f"tensor {matrix.name!r} has the shape {_shape(matrix.dims)}; an embedding of {needed[0]:,} and a "
                f"vocabulary of {needed[1]:,} tokens need {_shape(needed)}"
            )


def _trimmed(dims: tuple[int, ...]) -> tuple[int, ...]:
    """Without the ones at the end, which say nothing."""
    count = len(dims)
    while count and dims[count - 1] == 1:
        count -= 1
    return dims[:count]


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


def _check_tokenizer(file: _File) -> int:
    """Returns the size of the vocabulary."""
    model: str = _required(file, "tokenizer.ggml.model", _Type.STRING)
    if model in _REFUSED_TOKENIZERS:
        raise _Refused(f"its tokenizer is {model!r}, which cannot answer a prompt: {_REFUSED_TOKENIZERS[model]}")
    if model not in _DEFAULTS:
        raise _Refused(f"its tokenizer, {model[:80]!r}, is not one that this llama.cpp knows")
    tokens = _tokenizer_array(file, "tokens", (_Type.STRING,), needed=True)
    assert tokens is not None
    size = tokens.count
    if size == 0:
        raise _Refused("its vocabulary is empty")
    for name, kinds in (("scores", (_Type.F32, _Type.I32)), ("token_type", (_Type.I32,))):
        array = _tokenizer_array(file, name, kinds, needed=model == "llama")
        if array is not None and array.count != size:
            raise _Refused(f"metadata 'tokenizer.ggml.{name}' has {array.count:,} items for {size:,} tokens")
    if model in _MERGED:
        needed = _scalar(file, "tokenizer.ggml.pre", _Type.STRING, "") != "kimi-k2"
        _tokenizer_array(file, "merges", (_Type.STRING,), needed=needed)
    if model == "t5":
        _check_charsmap(file)
    _check_texts(file, model, tokens)
    _check_special(file, model, size)
    return size


def _tokenizer_array(file: _File, name: str, kinds: tuple[_Type, ...], *, needed: bool) -> _Array | None:
    key = f"tokenizer.ggml.{name}"
    if key not in file.entries:
        if needed:
            raise _Refused(f"metadata {key!r} is missing: the file has no usable tokenizer")
        return None
    kind, value = file.entries[key]
    if kind is not _Type.ARRAY or value.type not in kinds:
        found = f"an array of {value.type.label}" if kind is _Type.ARRAY else kind.label
        raise _Refused(f"metadata {key!r} is {found}; it must be an array of {kinds[0].label}")
    array: _Array = value
    return array


def _check_texts(file: _File, model: str, array: _Array) -> None:
    texts = list(_strings(file.data, array))
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
            raise _Refused(
                f"its vocabulary has no token for byte 0x{absent[0]:02X} ({len(absent)} of 256 are missing), "
                "so there are texts that it cannot read"
            )
    if model in _BYTE_LEVEL:
        try:
            b"\n".join(texts).decode()
        except UnicodeDecodeError:
            wrong = next(token for token, text in enumerate(texts) if not _is_utf8(text))
            raise _Refused(f"the text of token {wrong}, {texts[wrong][:40]!r}, is not valid UTF-8") from None
    if model == "rwkv":
        _check_rwkv(texts)


def _refuse_twins(texts: list[bytes]) -> NoReturn:
    seen: dict[bytes, int] = {}
    for token, text in enumerate(texts):
        if text in seen:
            shown = text[:40].decode(errors="replace")
            raise _Refused(f"tokens {seen[text]} and {token} of its vocabulary have the same text, {shown!r}")
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
                raise _Refused(f"the text of token {token}, {text[:40]!r}, has a broken escape") from None
        elif len(text) > 1:
            first, length = escapes.get(text[1], text[1]), 2
        else:
            raise _Refused(f"the text of token {token} ends inside an escape")
        begins.add(first)
        if len(text) == length:
            whole.add(first)
    if begins - whole:
        raise _Refused(f"its vocabulary has no token for byte 0x{min(begins - whole):02X} alone")


def _check_charsmap(file: _File) -> None:
    array = _tokenizer_array(file, "precompiled_charsmap", (_Type.U8, _Type.I8), needed=False)
    if array is None:
        return
    if array.count < 4 or _U32(file.data, array.start)[0] + 4 >= array.count:
        raise _Refused("metadata 'tokenizer.ggml.precompiled_charsmap' is damaged")


def _check_special(file: _File, model: str, size: int) -> None:
    bos, eos, adds_bos, adds_eos = _DEFAULTS[model]
    ids: dict[str, int | None] = {"bos": bos, "eos": eos}
    for name in _STEERING:
        key = f"tokenizer.ggml.{name}_token_id"
        if key in file.entries:
            ids[name] = found = _entry(file, key, _Type.U32)
            if found >= size:
                raise _Refused(f"{key} is {found:,}, and the vocabulary has {size:,} tokens")
    for name, by_default in (("bos", adds_bos), ("eos", adds_eos)):
        key = f"tokenizer.ggml.add_{name}_token"
        added = _scalar(file, key, _Type.BOOL, by_default)
        # gemma4 begins with one whatever the file says; rwkv and plamo2 never add any.
        added = (added or (model == "gemma4" and name == "bos")) and model not in ("rwkv", "plamo2")
        token = ids[name]
        if added and (token is None or token >= size):
            raise _Refused(
                f"every prompt should get a {name} token, and tokenizer.ggml.{name}_token_id does not say which"
            )


# --- the result -------------------------------------------------------------------------------------------------------


def _header(
    first: Path,
    parts: list[Path],
    main: _File,
    shape: _Shape,
    vocabulary_size: int,
    tensors: Mapping[str, _Tensor],
    tensor_bytes: int,
    file_size: int,
    digest: str,
) -> GgufHeader:
    template_kind, template = main.entries.get("tokenizer.chat_template", (_Type.BOOL, None))
    window = main.entries.get(f"{shape.architecture}.attention.sliding_window", (None, None))[1]
    name = _scalar(main, "general.name", _Type.STRING, "")
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
        file_type=_scalar(main, "general.file_type", _Type.U32, None),
        chat_template=template if template_kind is _Type.STRING else None,
        kv_heads=sum(shape.kv_heads),
        sha256=digest,
        tensors=types.MappingProxyType(dict(tensors)),
    )


def _public(file: _File, kind: _Type, value: Any) -> Any:
    if kind is not _Type.ARRAY:
        return value
    if value.count > _LONGEST_LISTED:
        return GgufArray(value.type.label, value.count)
    return _items(file, value)
