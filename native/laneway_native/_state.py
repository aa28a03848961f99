"""The envelope around a sequence's state.

llama.cpp trusts state bytes: a truncated state ends the process and a flipped bit may load silently.  So length, digest
and fingerprint are verified before it sees a byte.

Layout, little-endian: magic (8 bytes), format version (u32), reserved (u32, 0), length of the state (u64), fingerprint
(32 bytes), digest (32 bytes, BLAKE2b of all that precedes it and of the state), then the state.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

from laneway.decoder import DecodeError

MAGIC = b"LANEWAYS"
VERSION = 1
_HEAD = struct.Struct("<8sIIQ32s")
_DIGEST_SIZE = 32
OVERHEAD = _HEAD.size + _DIGEST_SIZE
"""Bytes before the state."""


def fingerprint(**facts: object) -> bytes:
    """32 bytes that differ whenever one of the facts does."""
    text = "\n".join(f"{name}={facts[name]!r}" for name in sorted(facts))
    return hashlib.blake2b(text.encode(), digest_size=32).digest()


def seal(buffer: bytearray, print_: bytes) -> None:
    """Fill the first :data:`OVERHEAD` bytes of a buffer whose rest is a state."""
    head = _HEAD.pack(MAGIC, VERSION, 0, len(buffer) - OVERHEAD, print_)
    buffer[: _HEAD.size] = head
    buffer[_HEAD.size : OVERHEAD] = _digest(head, memoryview(buffer)[OVERHEAD:])


def unseal(sealed: bytes, print_: bytes) -> memoryview:
    """The state inside, if nothing is wrong with it.  Raises :class:`DecodeError` with the reason."""
    if len(sealed) < OVERHEAD:
        raise DecodeError(f"the saved state is truncated: {len(sealed)} bytes, its header alone has {OVERHEAD}")
    magic, version, reserved, length, theirs = _HEAD.unpack_from(sealed)
    if magic != MAGIC:
        raise DecodeError("these bytes are no saved state: they do not begin with its mark")
    if version != VERSION or reserved:
        raise DecodeError(f"the saved state has format {version}, this version reads {VERSION}")
    if length != len(sealed) - OVERHEAD:
        raise DecodeError(f"the saved state is truncated: {len(sealed) - OVERHEAD} of {length} bytes")
    state = memoryview(sealed)[OVERHEAD:]
    if not hmac.compare_digest(_digest(sealed[: _HEAD.size], state), sealed[_HEAD.size : OVERHEAD]):
        raise DecodeError("the saved state is damaged: its checksum is wrong")
    if theirs != print_:
        raise DecodeError("the saved state is of another model, adapter or context setting")
    return state


def _digest(head: bytes, state: memoryview) -> bytes:
    digest = hashlib.blake2b(head, digest_size=_DIGEST_SIZE)
    digest.update(state)
    return digest.digest()
