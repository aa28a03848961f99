"""What of a text is translated and what is kept as it is.  Pure.

A text is cut into lines, a line into sentences, a sentence that is too long into chunks.  What stands between them,
line breaks, indentation, blank lines, comes back exactly; so does a sentence without a letter in it, and so do the list
marks and emoji at a sentence's edges.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import attrs

from laneway_plugins._signs import has_letters, is_chinese, is_unspaced, peel

_LINE_BREAK = re.compile(r"(\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029])")
_EDGES = re.compile(r"(\s*)(.*?)(\s*)", re.DOTALL)


@attrs.frozen
class Verbatim:
    """Text that is kept as it is."""

    text: str


@attrs.frozen
class Gap:
    """What stands between two sentences of a line: kept, but for the habits of the target language's script."""

    text: str


@attrs.frozen
class Sentence:
    """Text to translate, without white space at its ends."""

    text: str


Part = Verbatim | Gap | Sentence


def split_text(text: str, segment: Callable[[str], Sequence[str]]) -> list[Part]:
    """The parts of a text, in order; joined, they are the text.

    ``segment`` cuts a line into sentences.  One that gives back anything but the line, cut, is not followed: the line
    is then one sentence.
    """
    parts: list[Part] = []
    for index, piece in enumerate(_LINE_BREAK.split(text)):
        if index % 2:
            _keep(parts, piece)
        elif piece:
            _split_line(parts, piece, segment)
    return parts


def _split_line(parts: list[Part], line: str, segment: Callable[[str], Sequence[str]]) -> None:
    match = _EDGES.fullmatch(line)
    assert match is not None
    before, core, after = match.groups()
    _keep(parts, before)
    if core:
        if has_letters(core):
            _split_core(parts, core, segment)
        else:
            _keep(parts, core)
    _keep(parts, after)


def _split_core(parts: list[Part], core: str, segment: Callable[[str], Sequence[str]]) -> None:
    pieces = [piece for piece in segment(core) if piece]
    if "".join(pieces) != core:
        pieces = [core]
    gap: str | None = None
    begins_line = True
    for piece in pieces:
        match = _EDGES.fullmatch(piece)
        assert match is not None
        before, sentence, after = match.groups()
        if not sentence:
            gap = (gap or "") + piece
            continue
        if gap is not None:
            parts.append(Gap(gap + before))
        else:
            _keep(parts, before)
        signs_before, inner, signs_after = peel(sentence, begins_line=begins_line)
        if has_letters(inner):
            _keep(parts, signs_before)
            parts.append(Sentence(inner))
            _keep(parts, signs_after)
            begins_line = False
        else:
            # A number or a mark: what comes is still the beginning of the line.
            parts.append(Verbatim(sentence))
        gap = after
    if gap:
        _keep(parts, gap)


def _keep(parts: list[Part], text: str) -> None:
    if text:
        parts.append(Verbatim(text))


def gap_between(before: str, gap: str, after: str, *, spaced: bool) -> str:
    """What stands between two texts that were sentences of one line.

    :param before: the last character of the first
    :param gap: what stood between the two in the source
    :param after: the first character of the second
    :param spaced: whether spaces stand between sentences of the target language

    The scripts of both count as well as the language: a sentence that the model knows nothing of is kept as it is.
    """
    if not gap:
        return " " if spaced and not is_unspaced(before) and not is_unspaced(after) else ""
    return "" if gap == " " and not spaced and (is_chinese(before) or is_chinese(after)) else gap


# Sentences that are too long.


@attrs.frozen
class Chunk:
    """Pieces that are translated together, and what stands before their translation."""

    pieces: tuple[str, ...]
    joint: str = ""


_FULL_WIDTH_BREAKS = ("，", "；", "：", "、", "。", "！", "？")
_BREAKS = (",", ";", ":", "—", "–", ")", "，", "；", "：", "、", "،", "؛", ".", "!", "?", "。")


def split_pieces(pieces: Sequence[str], longest: int, starts_word: Callable[[str], bool], spaced: bool) -> list[Chunk]:
    """Cut ``pieces`` into chunks of at most ``longest``, of about one length; none is lost.

    ``spaced``: whether spaces stand between words of the target language.

    The cut is made behind a punctuation mark if there is one in the second half of a chunk, else between two words, and
    inside a word only where a word fills a whole chunk.
    """
    chunks: list[Chunk] = []
    start, joint = 0, ""
    while len(pieces) - start > longest:
        rest = len(pieces) - start
        wanted = -(-rest // -(-rest // longest))
        end = _cut(pieces, start, start + wanted, start + longest, starts_word)
        chunks.append(Chunk(tuple(pieces[start:end]), joint))
        between_words = starts_word(pieces[end]) or is_unspaced(pieces[end][:1])
        joint = " " if spaced and between_words else ""
        start = end
    chunks.append(Chunk(tuple(pieces[start:]), joint))
    return chunks


def _cut(pieces: Sequence[str], start: int, wanted: int, most: int, starts_word: Callable[[str], bool]) -> int:
    words = [
        end
        for end in range(start + 1, most + 1)
        if starts_word(pieces[end]) or pieces[end - 1].endswith(_FULL_WIDTH_BREAKS)
    ]
    half = (start + most) // 2
    marks = [end for end in words if end > half and pieces[end - 1].endswith(_BREAKS)]
    if marks:
        return marks[-1]
    late = [end for end in words if end <= wanted]
    return late[-1] if late else (words[0] if words else wanted)


# Putting it together again.


@attrs.define
class _Slot:
    """The place of one sentence: its chunks' joints and texts, as far as they have come."""

    joints: list[str] = attrs.field(factory=list)
    texts: list[str] = attrs.field(factory=list)
    done: list[bool] = attrs.field(factory=list)


class Assembly:
    """One text's translation while it grows.

    :meth:`take` gives what has come since the last call and stands in an unbroken row from the beginning, so that all
    that was taken, joined, is :attr:`text` in the end.
    """

    def __init__(self, parts: Iterable[Part], *, spaced: bool) -> None:
        self._row: list[str | Gap | _Slot] = []
        self._spaced = spaced
        self._last = ""
        self._slots: list[_Slot] = []
        for part in parts:
            if isinstance(part, Sentence):
                slot = _Slot()
                self._slots.append(slot)
                self._row.append(slot)
            else:
                self._row.append(part if isinstance(part, Gap) else part.text)
        self._taken: list[str] = []
        self._place = (0, 0, 0)  # in the row, in the slot's chunks, in the chunk's text

    def cut(self, sentence: int, joints: Sequence[str]) -> None:
        """Say of how many chunks a sentence consists, and what stands before each."""
        slot = self._slots[sentence]
        slot.joints = list(joints)
        slot.texts = [""] * len(joints)
        slot.done = [False] * len(joints)

    def grow(self, sentence: int, chunk: int, text: str) -> None:
        """A chunk's translation so far; each begins with the one before."""
        self._slots[sentence].texts[chunk] = text

    def finish(self, sentence: int, chunk: int, text: str) -> None:
        """A chunk's whole translation, which begins with what it has grown to."""
        self.grow(sentence, chunk, text)
        self._slots[sentence].done[chunk] = True

    def take(self) -> str:
        """What has come in order and was not taken yet."""
        out: list[str] = []
        row, chunk, offset = self._place
        while row < len(self._row):
            here = self._row[row]
            if isinstance(here, str):
                out.append(here)
            elif isinstance(here, Gap):
                after = self._first_after(row)
                if after is None:
                    break
                out.append(gap_between(_last_of(out) or self._last, here.text, after, spaced=self._spaced))
            else:
                chunk, offset, whole = self._take_slot(here, chunk, offset, out)
                if not whole:
                    break
            row, chunk, offset = row + 1, 0, 0
        self._place = (row, chunk, offset)
        text = "".join(out)
        self._last = text[-1:] or self._last
        self._taken.append(text)
        return text

    def _first_after(self, gap: int) -> str | None:
        """The first character behind a gap; empty if there is none, None while that cannot be told."""
        for here in self._row[gap + 1 :]:
            if isinstance(here, _Slot):
                for text, done in zip(here.texts, here.done, strict=True):
                    if text:
                        return text[0]
                    if not done:
                        return None
                if not here.texts:
                    return None
            elif isinstance(here, str):
                return here[0]
        return ""

    @staticmethod
    def _take_slot(slot: _Slot, chunk: int, offset: int, out: list[str]) -> tuple[int, int, bool]:
        while chunk < len(slot.texts):
            text = slot.texts[chunk]
            if offset == 0 and text:
                # Only before text: a chunk that says nothing leaves no double space behind.
                out.append(slot.joints[chunk])
            out.append(text[offset:])
            offset = len(text)
            if not slot.done[chunk]:
                return chunk, offset, False
            chunk, offset = chunk + 1, 0
        return chunk, 0, bool(slot.texts)

    @property
    def text(self) -> str:
        """Everything that was taken."""
        return "".join(self._taken)

    @property
    def complete(self) -> bool:
        """Whether everything has come and was taken."""
        return self._place[0] == len(self._row)


def _last_of(texts: Sequence[str]) -> str:
    return next((text[-1] for text in reversed(texts) if text), "")
