"""The envelope around a sequence's state.

llama.cpp trusts state bytes: a truncated state ends the process and a flipped bit may load silently.  So length,
checksum and fingerprint are verified before it sees a byte.

Layout, little-endian: magic (8 bytes), format version (u32), CRC-32 of all the rest (u32), length of the state (u64),
fingerprint (32 bytes), then the state.  The checksum is against damage, not against malice, and a stronger one would
hold up the next step: a sequence of 400 tokens of a small model has 9 MB.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from typing import TYPE_CHECKING

from laneway.decoder import DecodeError

if TYPE_CHECKING:
    from collections.abc import Iterable

MAGIC = b"LANEWAYS"
VERSION = 1
_MARK = struct.Struct("<8sI")
_CHECKSUM = struct.Struct("<I")
_FACTS = struct.Struct("<Q32s")
OVERHEAD = _MARK.size + _CHECKSUM.size + _FACTS.size
"""Bytes before the state."""


def fingerprint(**facts: object) -> bytes:
    """32 bytes that differ whenever one of the facts does."""
    text = "\n".join(f"{name}={facts[name]!r}" for name in sorted(facts))
    return hashlib.blake2b(text.encode(), digest_size=32).digest()


def seal(state: Iterable[bytes], print_: bytes) -> bytes:
    """The state of a context with this fingerprint, which comes in pieces, in its envelope."""
    pieces = tuple(state)
    facts = _FACTS.pack(sum(map(len, pieces)), print_)
    checksum = zlib.crc32(facts)
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
    return b"".join((_MARK.pack(MAGIC, VERSION), _CHECKSUM.pack(checksum), facts, *pieces))


def unseal(sealed: bytes, print_: bytes, *, checksum: bool = True) -> memoryview:
    """The state inside, if nothing is wrong with it.  Raises :class:`DecodeError` with the reason.

    ``checksum``: False leaves it out, which takes most of the time.
    """
    if len(sealed) < OVERHEAD:
        raise DecodeError(f"the saved state is truncated: {len(sealed)} bytes, its header alone has {OVERHEAD}")
    magic, version = _MARK.unpack_from(sealed)
    if magic != MAGIC:
        raise DecodeError("these bytes are no saved state: they do not begin with its mark")
    if version != VERSION:
        raise DecodeError(f"the saved state has format {version}, this version reads {VERSION}")
    (expected,) = _CHECKSUM.unpack_from(sealed, _MARK.size)
    length, theirs = _FACTS.unpack_from(sealed, _MARK.size + _CHECKSUM.size)
    if length != len(sealed) - OVERHEAD:
        raise DecodeError(f"the saved state is truncated: {len(sealed) - OVERHEAD} of {length} bytes")
    view = memoryview(sealed)
    if checksum and zlib.crc32(view[_MARK.size + _CHECKSUM.size :]) != expected:
        raise DecodeError("the saved state is damaged: its checksum is wrong")
    if theirs != print_:
        raise DecodeError("the saved state is of another model, adapter or context setting")
    return view[OVERHEAD:]
