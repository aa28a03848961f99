"""What is in a cache file, and how damage is told from content.

Little-endian::

    mark          8 bytes
    format        u32
    facts         u32: bytes of the facts
    tokens        u32: how many
    state         u64: bytes of the state
    checksum      u32: CRC-32 of the state
    digest        16 bytes: of all that comes before the state, the digest itself left out
    facts         JSON: key, model, fingerprint, digests of the history
    tokens        u32 each
    state         what the decoder saved, to the end of the file

Whatever is not exactly that is a miss, never an error: such a file is worth no more than none.  The checksum is against
damage, not against malice, and it has a part in the time to the first token: a state may have a hundred megabytes.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from typing import Any

import attrs

MARK = b"LANEWAYK"
FORMAT = 1

_MARKS = struct.Struct("<8sIIIQI")
_DIGEST = 16
PREAMBLE = _MARKS.size + _DIGEST
"""Bytes that say how many there are."""
_MAX_FACTS = 2**24
_MAX_TOKENS = 2**26


class Miss(Exception):  # noqa: N818 - an answer, not an error
    """There is nothing to take up; ``str()`` says why."""


@attrs.frozen(kw_only=True)
class Facts:
    """What a file says of itself."""

    key: str
    """As it was given; empty for an automatic one."""
    model: str
    fingerprint: bytes
    tokens: tuple[int, ...] = attrs.field(repr=False)
    """Those whose cells are in the state."""
    digests: tuple[str, ...] = ()
    """The history of an automatic one."""


@attrs.frozen
class Head:
    """All but the state."""

    facts: Facts
    size: int
    """Bytes before the state."""
    state_size: int
    checksum: int
    """Of the state."""


@attrs.frozen
class Preamble:
    """The sizes of the parts."""

    facts: int
    tokens: int
    state: int
    checksum: int
    marks: bytes
    digest: bytes

    @property
    def head(self) -> int:
        """Bytes between preamble and state."""
        return self.facts + 4 * self.tokens


def digest_of(*parts: bytes) -> bytes:
    """What damage to the head is found by."""
    digest = hashlib.blake2b(digest_size=_DIGEST)
    for part in parts:
        digest.update(part)
    return digest.digest()


def pack_head(facts: Facts, state: bytes) -> bytes:
    """All that comes before ``state`` in a file."""
    text = {
        "key": facts.key,
        "model": facts.model,
        "fingerprint": facts.fingerprint.hex(),
        "digests": list(facts.digests),
    }
    encoded = json.dumps(text, separators=(",", ":")).encode()
    tokens = struct.pack(f"<{len(facts.tokens)}I", *facts.tokens)
    marks = _MARKS.pack(MARK, FORMAT, len(encoded), len(facts.tokens), len(state), zlib.crc32(state))
    return b"".join((marks, digest_of(marks, encoded, tokens), encoded, tokens))


def parse_preamble(data: bytes, file_size: int) -> Preamble:
    """The first :data:`PREAMBLE` bytes of a file.  Raises :class:`Miss`."""
    if len(data) < PREAMBLE:
        raise Miss("the file is truncated" if data else "the file is empty")
    mark, version, facts, tokens, state, checksum = _MARKS.unpack_from(data)
    if mark != MARK:
        raise Miss("the file is no cache")
    if version != FORMAT:
        raise Miss(f"the file has format {version}, and this version reads {FORMAT}")
    if facts > _MAX_FACTS or tokens > _MAX_TOKENS:
        raise Miss("the file is damaged: it claims more than a cache can have")
    preamble = Preamble(facts, tokens, state, checksum, data[: _MARKS.size], data[_MARKS.size : PREAMBLE])
    wanted = PREAMBLE + preamble.head + state
    if file_size != wanted:
        raise Miss(f"the file is truncated or damaged: it has {file_size} bytes and should have {wanted}")
    return preamble


def parse_head(preamble: Preamble, data: bytes) -> Head:
    """The bytes between the preamble and the state.  Raises :class:`Miss`."""
    if len(data) != preamble.head or digest_of(preamble.marks, data) != preamble.digest:
        raise Miss("the file is damaged: the checksum of its head is wrong")
    try:
        text = json.loads(data[: preamble.facts])
        facts = Facts(
            key=_is(str, text["key"]),
            model=_is(str, text["model"]),
            fingerprint=bytes.fromhex(_is(str, text["fingerprint"])),
            digests=tuple(_is(str, digest) for digest in _is(list, text["digests"])),
            tokens=struct.unpack_from(f"<{preamble.tokens}I", data, preamble.facts),
        )
    except (ValueError, KeyError, TypeError) as error:
        # Whole, and yet not of ours: another program has used our mark.
        raise Miss(f"the file is no cache: {error}") from None
    return Head(facts, PREAMBLE + preamble.head, preamble.state, preamble.checksum)


def check_state(head: Head, state: bytes) -> None:
    """Raises :class:`Miss` if ``state`` is not what was written."""
    if len(state) != head.state_size or zlib.crc32(state) != head.checksum:
        raise Miss("the file is damaged: the checksum of its state is wrong")


def common(stored: tuple[int, ...], wanted: tuple[int, ...] | list[int]) -> int:
    """How many tokens two sequences begin with alike."""
    count = 0
    for ours, theirs in zip(stored, wanted, strict=False):
        if ours != theirs:
            break
        count += 1
    return count


def _is(kind: type[Any], value: object) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value
