"""Which file belongs to a history: named by what was said, nothing else.

A history is a chain of digests, one for each message, each of which covers the model's fingerprint and all that was
said up to there.  A file is named by the last digest of its history and lies in a directory named by the digest of the
opening (up to the first message that is no system prompt), where all histories are that can share much with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import attrs

from laneway._kvcache._keys import AUTOMATIC, SUFFIX

_SIZE = 16  # bytes of a digest: histories are told apart, nobody is kept from making two of one name

_Name = TypeVar("_Name")


@attrs.frozen
class History:
    """The digests of the messages so far, and how many of them are the opening: 0 if all are system prompts."""

    digests: tuple[str, ...] = attrs.field(validator=attrs.validators.min_len(1))
    opening: int

    @property
    def folder(self) -> str:
        """The directory of all histories with this opening, with ``/`` between its parts."""
        return f"{AUTOMATIC}/{self.digests[(self.opening or len(self.digests)) - 1]}"

    @property
    def path(self) -> str:
        """The file of this history, with ``/`` between its parts."""
        return f"{self.folder}/{self.digests[-1]}{SUFFIX}"

    def longer(self, role: str, content: str) -> History:
        """This history and one more message."""
        digests = (*self.digests, _digest(self.digests[-1], role, content))
        return History(digests, self.opening or _opening(role, len(digests)))

    def shared(self, digests: Sequence[str]) -> int:
        """How many messages another history has in common with this one, from the beginning."""
        count = 0
        for ours, theirs in zip(self.digests, digests, strict=False):
            if ours != theirs:
                break
            count += 1
        return count


def history_of(fingerprint: bytes, messages: Iterable[tuple[str, str]]) -> History:
    """The history of messages, as pairs of a role and a content, on a model of this fingerprint.

    Raises :class:`ValueError` for no messages: they say nothing that a file could be named by.
    """
    digests: list[str] = []
    opening = 0
    last = fingerprint.hex()
    for role, content in messages:
        last = _digest(last, role, content)
        digests.append(last)
        opening = opening or _opening(role, len(digests))
    if not digests:
        raise ValueError("a history has at least one message")
    return History(tuple(digests), opening)


def _opening(role: str, count: int) -> int:
    return 0 if role == "system" else count


def nearest(history: History, others: Mapping[_Name, Sequence[str]]) -> tuple[_Name | None, bool]:
    """Which of the other histories shares the most messages with this one, and whether this one goes on from there.

    Among equals, the one that was wholly used, then the first.
    """
    best: tuple[int, bool] = (0, False)
    found: _Name | None = None
    for name, digests in others.items():
        count = history.shared(digests)
        rank = (count, count == len(digests))
        if rank > best:
            best, found = rank, name
    return found, best[1]


def _digest(before: str, role: str, content: str) -> str:
    digest = hashlib.blake2b(digest_size=_SIZE)
    for part in (before, role, content):
        data = part.encode("utf-8", "surrogatepass")
        # The length in front: no two lists of texts run together to the same bytes.
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()
