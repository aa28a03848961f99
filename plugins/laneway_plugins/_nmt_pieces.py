"""Text to the pieces that a model knows, and pieces to text.

How pieces become text is pure and done here for all kinds, streams included, so that a stream and its result cannot
differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Protocol

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
UNKNOWN = "<unk>"


class Pieces(Protocol):
    """A model's tokenizer."""

    def encode(self, text: str) -> list[str]:
        """The pieces of ``text``."""

    def starts_word(self, piece: str) -> bool:
        """Whether a text may be cut before ``piece``."""

    def text(self, pieces: Iterable[str]) -> str:
        """The text of ``pieces``, without white space at its ends.  Of more pieces it only gets longer."""


class SentencePieces:
    """SentencePiece: ``▁`` stands for the space before a word."""

    def __init__(self, source: Any) -> None:
        """:param source: a ``SentencePieceProcessor``, already loaded"""
        self._source = source

    def encode(self, text: str) -> list[str]:
        """The pieces of ``text``, those that the model does not know as they stand."""
        pieces: list[str] = self._source.encode(text, out_type=str)
        return pieces

    def starts_word(self, piece: str) -> bool:
        """Whether a space stands before it."""
        return piece.startswith("▁")

    def text(self, pieces: Iterable[str]) -> str:
        """Joined, with bytes that stand for parts of characters put together; a dangling part shows as U+FFFD."""
        return join_sentence_pieces(pieces).strip()


def join_sentence_pieces(pieces: Iterable[str]) -> str:
    """The text of SentencePiece pieces, ``<0xE2>`` and the like read as bytes of UTF-8."""
    out: list[str] = []
    pending = bytearray()
    for piece in pieces:
        match = _BYTE.fullmatch(piece)
        if match is not None:
            pending.append(int(match[1], 16))
            continue
        if pending:
            out.append(pending.decode("utf-8", "replace"))
            pending.clear()
        out.append(piece)
    if pending:
        out.append(pending.decode("utf-8", "replace"))
    return "".join(out).replace("▁", " ")


class Characters:
    """Every character a piece."""

    def encode(self, text: str) -> list[str]:
        """The characters of ``text``."""
        return list(text)

    def starts_word(self, piece: str) -> bool:
        """Whether it is a space."""
        return piece.isspace()

    def text(self, pieces: Iterable[str]) -> str:
        """Joined."""
        return "".join(pieces).strip()


class Words:
    """Every word between spaces a piece."""

    def encode(self, text: str) -> list[str]:
        """The words of ``text``."""
        return text.split()

    def starts_word(self, piece: str) -> bool:
        """Always."""
        return True

    def text(self, pieces: Iterable[str]) -> str:
        """Joined by spaces."""
        return " ".join(pieces)


def growing_text(pieces: Pieces, so_far: list[str]) -> str | None:
    """What a stream may show of ``so_far``; None while that cannot be told.

    An unknown piece may yet be replaced by one of the source, and bytes may be the beginning of a character.
    """
    if UNKNOWN in so_far or (so_far and _BYTE.fullmatch(so_far[-1])):
        return None
    return pieces.text(so_far)
