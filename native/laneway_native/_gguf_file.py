"""The GGUF container: header, metadata, tensor table and the layout of the data, read without believing any of it.

No length and no count is believed before it has been compared with the size of the file.  What the contents mean is not
looked at here: see :mod:`laneway_native._gguf` for models and :mod:`laneway_native._adapters` for adapters.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import math
import mmap
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_HEADER = struct.Struct("<4sIQQ")  # magic, version, tensors, metadata entries
_SMALLEST_ENTRY = 8 + 1 + 4 + 1  # length, a key of one byte, type, a value of one byte
_SMALLEST_TENSOR = 8 + 1 + 4 + 8 + 4 + 8  # length, a name of one byte, dimensions, one of them, type, offset

# Far beyond any model, near enough that counting to it takes no time.
_MOST_ENTRIES = 1 << 16
_MOST_TENSORS = 1 << 20
_MOST_STRINGS = 1 << 24

_LONGEST_TENSOR_NAME = 63
_MOST_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32

U32 = struct.Struct("<I").unpack_from
_U64 = struct.Struct("<Q").unpack_from


class ValueType(enum.IntEnum):
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
    ValueType.U8: "B",
    ValueType.I8: "b",
    ValueType.U16: "H",
    ValueType.I16: "h",
    ValueType.U32: "I",
    ValueType.I32: "i",
    ValueType.F32: "f",
    ValueType.BOOL: "?",
    ValueType.U64: "Q",
    ValueType.I64: "q",
    ValueType.F64: "d",
}
_SIZE = {kind: struct.calcsize(code) for kind, code in _FORMAT.items()}

TENSOR_TYPES = {
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
NO_MATRIX = frozenset({9, 15, 24, 25, 26, 27, 28})
"""llama.cpp has no product for these: as a weight matrix they would make it call a null pointer."""

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


class Refused(Exception):  # noqa: N818 - a verdict, which never leaves the checks
    """Why a file is refused; becomes a ModelLoadError, which also names the file."""


def os_reason(error: OSError) -> str:
    if error.errno == errno.ENOENT:
        return "there is no such file"
    if error.errno == errno.EACCES:
        return "permission denied: this user may not read it"
    return error.strerror or type(error).__name__


def facts_of(path: Path) -> os.stat_result:
    """What the file system says of a file.  Raises :class:`Refused` for a name that no file can have."""
    try:
        return path.stat()
    except ValueError:
        raise Refused("its name has a null character in it") from None


@contextlib.contextmanager
def opened(path: Path) -> Iterator[mmap.mmap]:
    """A file's bytes, mapped, so that what is not looked at is not read."""
    # Looked at before it is opened: opening a pipe would wait for its other end.
    mode = facts_of(path).st_mode
    if stat.S_ISDIR(mode):
        raise Refused("it is a directory; name the .gguf file in it")
    if not stat.S_ISREG(mode):
        raise Refused("it is no regular file")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            raise Refused("the file is empty")
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as data:
            yield data


# --- reading ----------------------------------------------------------------------------------------------------------


@attrs.frozen
class ArrayInfo:
    """An array in the file: where its items begin, and where they end."""

    type: ValueType
    count: int
    start: int
    end: int


@attrs.frozen
class TensorInfo:
    name: str
    dims: tuple[int, ...]
    """ggml's order: the contiguous dimension first."""
    type: int
    offset: int
    size: int

    @property
    def type_name(self) -> str:
        return TENSOR_TYPES[self.type][0]


@attrs.frozen
class File:
    data: mmap.mmap
    """Closed already for the parts of a split file but the first."""
    version: int
    entries: dict[str, tuple[ValueType, Any]]
    tensors: dict[str, TensorInfo]
    table_end: int
    """Where the tensor table ends, before padding."""
    alignment: int
    file_size: int

    @property
    def header_size(self) -> int:
        """Bytes before the weights."""
        end = padded(self.table_end, self.alignment) if self.tensors else self.table_end
        return min(end, self.file_size)

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Begin and length of each tensor's data, in bytes from the file's beginning."""
        start = padded(self.table_end, self.alignment)
        return tuple((start + tensor.offset, tensor.size) for tensor in self.tensors.values())

    @property
    def tensor_bytes(self) -> int:
        return sum(tensor.size for tensor in self.tensors.values())


def padded(size: int, alignment: int) -> int:
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
            raise Refused(
                f"the file ends after {self.size:,} bytes, inside {what}: it was cut off or damaged; fetch it again"
            )
        self.at = start + count
        return start

    def u32(self, what: str) -> int:
        value: int = U32(self.data, self._take(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        value: int = _U64(self.data, self._take(8, what))[0]
        return value

    def string(self, what: str) -> bytes:
        length = self.u64(what)
        if length > self.left:
            raise Refused(
                f"{what} claims {length:,} bytes where {self.left:,} are left in the file: "
                "it was cut off or damaged; fetch it again"
            )
        start = self._take(length, what)
        return self.data[start : self.at]

    def skip_items(self, kind: ValueType, count: int, what: str) -> None:
        if kind is ValueType.STRING:
            self._skip_strings(count, what)
            return
        if count * _SIZE[kind] > self.left:
            raise Refused(self._too_many(count, what))
        self.at += count * _SIZE[kind]

    def _skip_strings(self, count: int, what: str) -> None:
        if count > _MOST_STRINGS or count * 8 > self.left:
            raise Refused(self._too_many(count, what))
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
        raise Refused(f"the file ends after {size:,} bytes, inside {what}: it was cut off or damaged; fetch it again")

    def _too_many(self, count: int, what: str) -> str:
        return (
            f"{what} claims {count:,} items where {self.left:,} bytes are left in the file: "
            "it was cut off or damaged; fetch it again"
        )


def read_file(data: mmap.mmap) -> File:
    version, tensor_count, entry_count = _read_header(data)
    cursor = _Cursor(data, _HEADER.size)
    if entry_count > _MOST_ENTRIES or entry_count * _SMALLEST_ENTRY > cursor.left:
        raise Refused(
            f"its header claims {entry_count:,} metadata entries, which its {cursor.size:,} bytes cannot hold: "
            "it was cut off or damaged; fetch it again"
        )
    entries: dict[str, tuple[ValueType, Any]] = {}
    for index in range(entry_count):
        key = _text(cursor.string(f"metadata key {index}"), f"metadata key {index}")
        if not key:
            raise Refused(f"metadata key {index} is empty")
        if key in entries:
            raise Refused(f"metadata key {key!r} is there twice")
        entries[key] = _read_value(cursor, key)
    if tensor_count > _MOST_TENSORS or tensor_count * _SMALLEST_TENSOR > cursor.left:
        raise Refused(
            f"its header claims {tensor_count:,} tensors, which the {cursor.left:,} bytes behind the metadata "
            "cannot describe: it was cut off or damaged; fetch it again"
        )
    tensors: dict[str, TensorInfo] = {}
    for index in range(tensor_count):
        tensor = _read_tensor(cursor, index)
        if tensor.name in tensors:
            raise Refused(f"tensor {tensor.name!r} is there twice")
        tensors[tensor.name] = tensor
    return File(data, version, entries, tensors, cursor.at, _alignment(entries), cursor.size)


def _read_header(data: mmap.mmap) -> tuple[int, int, int]:
    if data[:4] != _MAGIC:
        raise Refused(f"it is not a GGUF file: {_what_else(data)}")
    if len(data) < _HEADER.size:
        raise Refused(f"it has {len(data)} bytes, fewer than the header of a GGUF file: it was cut off; fetch it again")
    _, version, tensor_count, entry_count = _HEADER.unpack_from(data)
    if version & 0xFFFF == 0 and version:
        raise Refused("it is a big-endian GGUF file, for another kind of processor; get the little-endian one")
    if version not in _VERSIONS:
        known = " and ".join(map(str, _VERSIONS))
        raise Refused(f"it is GGUF version {version}; versions {known} can be read")
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
        raise Refused(f"{what} is not valid UTF-8 ({raw[:40]!r}): the file is damaged") from None
    if "\0" in text:
        raise Refused(f"{what} has a null character in it ({raw[:40]!r}): the file is damaged")
    return text


def _read_type(cursor: _Cursor, key: str) -> ValueType:
    number = cursor.u32(f"metadata {key!r}")
    try:
        return ValueType(number)
    except ValueError:
        raise Refused(f"metadata {key!r} has type {number}, which GGUF does not have: the file is damaged") from None


def _read_value(cursor: _Cursor, key: str) -> tuple[ValueType, Any]:
    what = f"metadata {key!r}"
    kind = _read_type(cursor, key)
    if kind is ValueType.ARRAY:
        item = _read_type(cursor, key)
        if item is ValueType.ARRAY:
            raise Refused(f"{what} is an array of arrays, which llama.cpp cannot read")
        count = cursor.u64(what)
        start = cursor.at
        cursor.skip_items(item, count, what)
        return kind, ArrayInfo(item, count, start, cursor.at)
    if kind is ValueType.STRING:
        # Only keys and names must be right: a model may well carry a description in Latin-1.
        return kind, cursor.string(what).decode(errors="replace")
    start = cursor.at
    cursor.skip_items(kind, 1, what)
    return kind, struct.unpack_from("<" + _FORMAT[kind], cursor.data, start)[0]


def _read_tensor(cursor: _Cursor, index: int) -> TensorInfo:
    what = f"the description of tensor {index}"
    name = _text(cursor.string(what), f"the name of tensor {index}")
    if len(name.encode()) > _LONGEST_TENSOR_NAME:
        raise Refused(f"tensor {index} has a name of {len(name)} characters; {_LONGEST_TENSOR_NAME} can be read")
    if not name:
        raise Refused(f"tensor {index} has no name")
    count = cursor.u32(what)
    if not 1 <= count <= _MOST_DIMENSIONS:
        raise Refused(f"tensor {name!r} has {count} dimensions; 1 to {_MOST_DIMENSIONS} can be")
    dims = tuple(cursor.u64(what) for _ in range(count))
    number = cursor.u32(what)
    offset = cursor.u64(what)
    if number in _REMOVED_TENSOR_TYPES:
        raise Refused(f"tensor {name!r} has type {number}, which llama.cpp has dropped; get a newer file of the model")
    if number not in TENSOR_TYPES:
        raise Refused(f"tensor {name!r} has type {number}, which this llama.cpp does not know")
    label, block, block_bytes = TENSOR_TYPES[number]
    if not all(dims):
        raise Refused(f"tensor {name!r} has a dimension of 0")
    elements = math.prod(dims)
    if elements >= 1 << 62:
        raise Refused(
            f"tensor {name!r} has the shape {shape_text(dims)}, more than memory can hold: the file is damaged"
        )
    if dims[0] % block:
        raise Refused(f"tensor {name!r} has rows of {dims[0]} weights, which are no multiple of {label}'s {block}")
    return TensorInfo(name, dims, number, offset, elements // block * block_bytes)


def shape_text(dims: tuple[int, ...]) -> str:
    return " x ".join(f"{dim:,}" for dim in dims)


def trimmed(dims: tuple[int, ...]) -> tuple[int, ...]:
    """Dimensions without the ones at the end, which say nothing."""
    count = len(dims)
    while count and dims[count - 1] == 1:
        count -= 1
    return dims[:count]


def _alignment(entries: dict[str, tuple[ValueType, Any]]) -> int:
    if "general.alignment" not in entries:
        return _DEFAULT_ALIGNMENT
    kind, value = entries["general.alignment"]
    if kind is not ValueType.U32:
        raise Refused(f"metadata 'general.alignment' is stored as {kind.label}; it must be u32")
    if value <= 0 or value & (value - 1):
        raise Refused(f"general.alignment is {value}, which is no power of two")
    return int(value)


# --- the layout of the weights ----------------------------------------------------------------------------------------


def check_layout(file: File) -> None:
    """Tensors follow one another without gap or overlap, and all of them are there."""
    start = padded(file.table_end, file.alignment)
    expected = end = 0
    for tensor in file.tensors.values():
        if tensor.offset % file.alignment:
            raise Refused(
                f"tensor {tensor.name!r} begins at offset {tensor.offset:,}, which is not aligned to {file.alignment}"
            )
        if tensor.offset < expected:
            raise Refused(f"tensor {tensor.name!r} begins at offset {tensor.offset:,}, inside the one before it")
        if tensor.offset > expected:
            raise Refused(
                f"tensor {tensor.name!r} begins at offset {tensor.offset:,} and not at {expected:,}, where the one "
                "before it ends"
            )
        end = tensor.offset + tensor.size
        expected = padded(end, file.alignment)
    if not file.tensors:
        return
    missing = start + end - file.file_size
    if missing > 0:
        raise Refused(
            f"{missing:,} of {start + end:,} bytes are missing at its end: the download was cut off; fetch it again"
        )


# --- metadata ---------------------------------------------------------------------------------------------------------


def entry(file: File, key: str, kind: ValueType) -> Any:
    """The value of a key that is there, which must be stored as llama.cpp expects it."""
    found, value = file.entries[key]
    if found is not kind:
        raise Refused(f"metadata {key!r} is stored as {found.label}; it must be {kind.label}")
    return value


def scalar(file: File, key: str, kind: ValueType, default: Any) -> Any:
    return entry(file, key, kind) if key in file.entries else default


def required(file: File, key: str, kind: ValueType) -> Any:
    if key not in file.entries:
        raise Refused(f"metadata {key!r} is missing: the file is incomplete, or no model")
    return entry(file, key, kind)


def items(file: File, array: ArrayInfo) -> tuple[Any, ...]:
    if array.type is ValueType.STRING:
        return tuple(raw.decode(errors="replace") for raw in strings(file.data, array))
    return struct.unpack_from(f"<{array.count}{_FORMAT[array.type]}", file.data, array.start)


def strings(data: mmap.mmap, array: ArrayInfo) -> Iterator[bytes]:
    # Every length was checked when the array was read.
    at, length_at = array.start, _U64
    for _ in range(array.count):
        start = at + 8
        at = start + length_at(data, at)[0]
        yield data[start:at]
