"""Text that remembers which of its characters a chat template wrote.  Pure.

A plain ``str`` is content: it came with the messages.  :class:`Traced` is a ``str`` with spans, and the characters in
them are the template's.  Each operation keeps the spans where the place of every character is certain.  Where it is
not, the result is a plain ``str``.  So an operation that is not known here turns template text into content, and never
content into template text.
"""

from __future__ import annotations

import re
import string
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, SupportsIndex, final

from markupsafe import Markup

Spans = tuple[tuple[int, int], ...]
"""Ranges of characters, the end excluded, in order; two of them never touch."""


@final
class Traced(str):
    """A text, a part of which a template has written.  Made from a ``str`` alone it has no spans."""

    __slots__ = ("_spans",)
    _spans: Spans

    def __new__(cls, text: str = "", spans: Spans = ()) -> Traced:
        self = super().__new__(cls, text)
        self._spans = spans
        return self

    def __str__(self) -> str:
        # ``str(x)`` takes what this returns, so the spans survive it.
        return self

    def __add__(self, other: str) -> str:
        if isinstance(other, Markup) or not isinstance(other, str):
            return NotImplemented  # Markup escapes its other side
        return concat((self, other))

    def __radd__(self, other: str) -> str:
        if isinstance(other, Markup) or not isinstance(other, str):
            return NotImplemented
        return concat((other, self))

    def __mul__(self, times: SupportsIndex) -> str:
        text = super().__mul__(times)
        return traced(text, shifted(self._spans, range(0, len(text), len(self)))) if text else text

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> str:
        return _verified(str.__mod__(self, values), lambda: _percent(self, values))

    def __getitem__(self, place: SupportsIndex | slice) -> str:
        if isinstance(place, slice):
            start, stop, step = place.indices(len(self))
            return self._cut(start, max(start, stop)) if step == 1 else super().__getitem__(place)
        start = range(len(self))[place]
        return self._cut(start, start + 1)

    def __iter__(self) -> Iterator[str]:
        for start in range(len(self)):
            yield self._cut(start, start + 1)

    def _cut(self, start: int, stop: int) -> str:
        """The characters from ``start`` up to ``stop``."""
        text = super().__getitem__(slice(start, stop))
        if not text:
            return ""
        return traced(text, clipped(self._spans, start, stop))

    def _pieces(self, pieces: Iterable[str], gap: int) -> list[str]:
        """Pieces that stand in this order, with ``gap`` characters between two of them."""
        at = 0
        out = []
        for piece in pieces:
            out.append(self._cut(at, at + len(piece)))
            at += len(piece) + gap
        return out

    def _words(self, words: Iterable[str]) -> list[str]:
        """Pieces that stand in this order, with white space between two of them."""
        at = 0
        out = []
        for word in words:
            # No piece begins with white space that is not its own, so the first place where it is found is its place.
            at = self.index(word, at)
            out.append(self._cut(at, at + len(word)))
            at += len(word)
        return out

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        pieces = super().split(sep, maxsplit)
        return self._words(pieces) if sep is None else self._pieces(pieces, len(sep))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        pieces = super().rsplit(sep, maxsplit)
        return self._words(pieces) if sep is None else self._pieces(pieces, len(sep))

    def splitlines(self, keepends: bool = False) -> list[str]:
        whole = super().splitlines(True)
        starts = accumulate((len(line) for line in whole), initial=0)
        lines = whole if keepends else super().splitlines()
        return [self._cut(start, start + len(line)) for start, line in zip(starts, lines, strict=False)]

    def partition(self, sep: str) -> tuple[str, str, str]:
        head, middle, tail = self._pieces(super().partition(sep), 0)
        return head, middle, tail

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        head, middle, tail = self._pieces(super().rpartition(sep), 0)
        return head, middle, tail

    def strip(self, chars: str | None = None) -> str:
        start = len(self) - len(super().lstrip(chars))
        return self._cut(start, start + len(super().strip(chars)))

    def lstrip(self, chars: str | None = None) -> str:
        return self._cut(len(self) - len(super().lstrip(chars)), len(self))

    def rstrip(self, chars: str | None = None) -> str:
        return self._cut(0, len(super().rstrip(chars)))

    def removeprefix(self, prefix: str) -> str:
        return self._cut(len(self) - len(super().removeprefix(prefix)), len(self))

    def removesuffix(self, suffix: str) -> str:
        return self._cut(0, len(super().removesuffix(suffix)))

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        text = super().replace(old, new, count)
        return _verified(text, lambda: join(new, self.split(old, count))) if old else text

    def join(self, parts: Iterable[str]) -> str:
        return join(self, list(parts))

    def upper(self) -> str:
        return self._recased(super().upper())

    def lower(self) -> str:
        return self._recased(super().lower())

    def title(self) -> str:
        return self._recased(super().title())

    def capitalize(self) -> str:
        return self._recased(super().capitalize())

    def swapcase(self) -> str:
        return self._recased(super().swapcase())

    def casefold(self) -> str:
        return self._recased(super().casefold())

    def _recased(self, text: str) -> str:
        # A character becomes one or more, so with the same length each has kept its place.
        return traced(text, self._spans) if len(text) == len(self) else text

    def ljust(self, width: SupportsIndex, fill: str = " ") -> str:
        return traced(super().ljust(width, fill), self._spans)

    def rjust(self, width: SupportsIndex, fill: str = " ") -> str:
        text = super().rjust(width, fill)
        return traced(text, shifted(self._spans, (len(text) - len(self),)))

    def center(self, width: SupportsIndex, fill: str = " ") -> str:
        text = super().center(width, fill)
        # Where the filling cannot be told from the text, its length on the left is taken from a text that has none.
        left = len(str.center("\0" * len(self), width, "\1").split("\0", 1)[0]) if len(self) else 0
        return traced(text, shifted(self._spans, (left,)))

    def format(self, *args: Any, **kwargs: Any) -> str:
        """As :func:`formatted` says, without a sandbox around it."""
        return formatted(self, str.format(self, *args, **kwargs), args, kwargs)


def traced(text: str, spans: Spans) -> str:
    """``text`` with these spans; plain if there are none."""
    return Traced(text, spans) if spans else plain(text)


def plain(text: str) -> str:
    """``text`` as content, without spans."""
    return text if type(text) is str else "".join((text,))


def written(text: str) -> str:
    """``text`` as the template's from end to end."""
    return Traced(text, ((0, len(text)),)) if text else ""


def spans_of(text: object) -> Spans:
    """Where a text is the template's; nowhere in anything else."""
    return text._spans if isinstance(text, Traced) else ()


def is_written(text: str) -> bool:
    """Whether ``text`` is the template's from end to end."""
    return spans_of(text) == ((0, len(text)),)


def clipped(spans: Spans, start: int, stop: int) -> Spans:
    """The spans of a part of a text, counted from its beginning."""
    found = []
    for index in range(max(0, bisect_right(spans, (start, start)) - 1), len(spans)):
        first, last = spans[index]
        if first >= stop:
            break
        if last > start:
            found.append((max(first, start) - start, min(last, stop) - start))
    return tuple(found)


def shifted(spans: Spans, offsets: Iterable[int]) -> Spans:
    """The spans of a text that stands at each of ``offsets``."""
    return _merged((first + offset, last + offset) for offset in offsets for first, last in spans)


def _merged(spans: Iterable[tuple[int, int]]) -> Spans:
    out: list[tuple[int, int]] = []
    for first, last in spans:
        if out and out[-1][1] == first:
            out[-1] = (out[-1][0], last)
        else:
            out.append((first, last))
    return tuple(out)


def concat(parts: Iterable[str]) -> str:
    """The parts, one after the other."""
    return join("", list(parts))


def join(separator: str, parts: list[str]) -> str:
    """The parts with ``separator`` between two of them.  Raises :class:`TypeError` for a part that is no text."""
    text = str.join(separator, parts)
    between = spans_of(separator)

    def spans() -> Iterator[tuple[int, int]]:
        at = 0
        for index, part in enumerate(parts):
            if index:
                yield from ((at + first, at + last) for first, last in between)
                at += len(separator)
            yield from ((at + first, at + last) for first, last in spans_of(part))
            at += len(part)

    return traced(text, _merged(spans()))


def _verified(text: str, trace: Callable[[], str | None]) -> str:
    """``text``, traced if ``trace`` comes to the same."""
    found = trace()
    return plain(text) if found is None or found != text else found


_CONVERSION = re.compile(r"%(.)", re.DOTALL)


def _percent(template: str, values: Any) -> str | None:
    """``template % values`` where the template wrote all of ``template``, and it has no conversions but ``%s``."""
    if not is_written(template):
        return None
    given = list(values) if isinstance(values, tuple) else [values]
    parts: list[str] = []
    at = 0
    for found in _CONVERSION.finditer(template):
        parts.append(template[at : found.start()])
        if found[1] == "%":
            parts.append(template[found.start() : found.start() + 1])
        elif found[1] == "s" and given:
            parts.append(str(given.pop(0)))
        else:
            return None
        at = found.end()
    return concat([*parts, template[at:]])


def formatted(template: str, text: str, args: Iterable[Any], values: Mapping[str, Any]) -> str:
    """``text``, which is ``template.format(*args, **values)``, with the spans that are certain.

    They are where the template wrote all of ``template`` and its fields are whole arguments, without a format of their
    own.
    """
    return _verified(text, lambda: _braces(template, list(args), values))


def _braces(template: str, args: list[Any], values: Mapping[str, Any]) -> str | None:
    if not is_written(template):
        return None
    parts: list[str] = []
    count = 0
    for literal, field, form, conversion in string.Formatter().parse(plain(template)):
        parts.append(written(literal))
        if field is None:
            continue
        if form or conversion:
            return None
        name: str | int = field
        if field == "":
            name, count = count, count + 1
        elif field.isdecimal():
            name = int(field)
        if isinstance(name, int):
            if name >= len(args):
                return None
            parts.append(str(args[name]))
        elif name in values:
            parts.append(str(values[name]))
        else:
            return None
    return concat(parts)
