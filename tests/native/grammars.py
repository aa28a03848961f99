"""Grammars as trees: made from a seed, written as GBNF, and matched in a way that shares nothing with the engine.

The matcher works out, for each part of a grammar and each place in an answer, where that part may end, until nothing
new comes up.  It knows no stacks, and left recursion and parts that may be empty need no care.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from laneway_native import Model

MOST_CHARACTER = 0x10FFFF


@attrs.frozen(eq=False)
class Text:
    """A quoted text."""

    text: str


@attrs.frozen(eq=False)
class Characters:
    """A class of ranges, or ``.`` for no ranges, inverted."""

    ranges: tuple[tuple[int, int], ...]
    inverted: bool = False

    def has(self, code: int) -> bool:
        return any(low <= code <= high for low, high in self.ranges) != self.inverted


@attrs.frozen(eq=False)
class Rule:
    """The rule of that name."""

    name: str


@attrs.frozen(eq=False)
class Token:
    """One token by number, or any other one."""

    number: int
    inverted: bool = False


@attrs.frozen(eq=False)
class OneOf:
    """Alternatives of parts in a row."""

    alternatives: tuple[tuple[Part, ...], ...]


@attrs.frozen(eq=False)
class Repeated:
    """A part several times; ``most`` None: without bound."""

    part: Part
    least: int
    most: int | None


Part = Text | Characters | Rule | Token | OneOf | Repeated
Grammar = Mapping[str, OneOf]
"""Rules by name."""


# Writing.


def written(grammar: Grammar) -> str:
    """The grammar as GBNF, its rules in order."""
    return "\n".join(f"{name} ::= {_alternatives(rule)}" for name, rule in grammar.items())


def _alternatives(rule: OneOf) -> str:
    return " | ".join(" ".join(_part(part) for part in row) or '""' for row in rule.alternatives)


def _part(part: Part) -> str:
    if isinstance(part, Text):
        return '"' + "".join(_escaped(ord(character)) for character in part.text) + '"'
    if isinstance(part, Characters):
        if not part.ranges:
            return "."
        inside = "".join(f"{_escaped(low)}-{_escaped(high)}" for low, high in part.ranges)
        return f"[{'^' * part.inverted}{inside}]"
    if isinstance(part, Rule):
        return part.name
    if isinstance(part, Token):
        return f"{'!' * part.inverted}<[{part.number}]>"
    if isinstance(part, OneOf):
        return f"({_alternatives(part)})"
    bounds = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((part.least, part.most))
    if bounds is None:
        bounds = f"{{{part.least},{'' if part.most is None else part.most}}}"
    # A repetition of a repetition needs its own parentheses, and so does a text that is not one character.
    inner = _part(part.part)
    return f"({inner}){bounds}" if isinstance(part.part, (Repeated, Text)) else f"{inner}{bounds}"


def _escaped(code: int) -> str:
    if chr(code).isalnum() and code < 128:
        return chr(code)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


# Making.


@attrs.define
class Maker:
    """Makes grammars over few letters, so that many of them are ambiguous and tokens run over the borders of parts."""

    random: random.Random
    letters: str = "thelo"
    names: tuple[str, ...] = ("root", "one", "two", "three")
    tokens: tuple[int, ...] = ()
    """Tokens that the grammar may name."""

    def grammar(self) -> Grammar:
        names = self.names[: self.random.randint(1, len(self.names))]
        return {name: self._one_of(names, 3) for name in names}

    def _one_of(self, names: Sequence[str], depth: int) -> OneOf:
        rows = []
        for _ in range(self.random.choice((1, 1, 2, 2, 3))):
            length = self.random.choice((0, 1, 1, 2, 2, 3)) if depth < 3 else self.random.choice((1, 1, 2, 3))
            rows.append(tuple(self._part(names, depth - 1) for _ in range(length)))
        return OneOf(tuple(rows))

    def _part(self, names: Sequence[str], depth: int) -> Part:
        roll = self.random.random()
        if roll < 0.15 and depth > 0:
            return self._one_of(names, depth)
        if roll < 0.35 and depth > 0:
            least, most = self.random.choice(
                (
                    (0, None),
                    (1, None),
                    (0, 1),
                    (0, 1),
                    (2, 2),
                    (0, 3),
                    (2, None),
                    (1, 4),
                    (33, 40),
                    (0, 70),
                    (0, 100_000),
                )
            )
            return Repeated(self._part(names, depth - 1), least, most)
        if roll < 0.55:
            return Rule(self.random.choice(names))
        if roll < 0.60 and self.tokens:
            return Token(self.random.choice(self.tokens), self.random.random() < 0.3)
        if roll < 0.78:
            return self._characters()
        return Text("".join(self.random.choice(self.letters) for _ in range(self.random.choice((1, 1, 1, 2, 3, 5)))))

    def _characters(self) -> Characters:
        low = ord(self.random.choice(self.letters))
        return self.random.choice(
            (
                Characters(((low, min(low + 3, ord("z"))),)),
                Characters(((low, low), (0xE0, 0xFF))),
                Characters(((low, low),), inverted=True),
                Characters((), inverted=True),
                Characters(((ord("z"), ord("a")),)),
                Characters(((0x20, MOST_CHARACTER),)),
                Characters(((0, MOST_CHARACTER),), inverted=True),
                Characters(((0xD800, 0xDFFF),)),
                Characters(((0x1F600, 0x1F64F), (low, low))),
            )
        )


# Matching.


class Language:
    """Which answers a grammar has."""

    def __init__(self, grammar: Grammar, model: Model) -> None:
        self._grammar = grammar
        self._model = model

    def has(self, answer: Sequence[int], end: int) -> bool:
        """Whether ``answer``, tokens without their end token, is of the grammar, which may also name the ``end``."""
        return _Match(self._grammar, [(token, self._model.piece(token)) for token in answer]).whole() or (
            _Match(self._grammar, [*((token, self._model.piece(token)) for token in answer), (end, b"")]).whole()
        )


class _Match:
    def __init__(self, grammar: Grammar, answer: Sequence[tuple[int, bytes]]) -> None:
        self._grammar = grammar
        self._starts: dict[int, tuple[int, int]] = {}  # place -> token that begins there, place after it
        self._bytes: list[int | None] = []  # place -> byte; None: a token without text
        for token, piece in answer:
            begin = len(self._bytes)
            self._bytes += piece or [None]
            self._starts[begin] = token, len(self._bytes)
        self._ends: dict[tuple[Any, int], set[int]] = {}
        self._changed = True

    def whole(self) -> bool:
        ends: set[int] = set()
        while self._changed:
            self._changed = False
            self._looked: set[tuple[Any, int]] = set()
            ends = self._part(self._grammar["root"], 0)
        return len(self._bytes) in ends

    def _part(self, part: Part, at: int) -> set[int]:
        key = part, at
        known = self._ends.setdefault(key, set())
        if key in self._looked:
            return known
        self._looked.add(key)
        found = self._find(part, at)
        if not found <= known:
            self._changed = True
            known |= found
        return known

    def _find(self, part: Part, at: int) -> set[int]:
        if isinstance(part, Text):
            places = {at}
            for character in part.text:
                places = {
                    end for place in places for end in self._character(Characters(((ord(character),) * 2,)), place)
                }
            return places
        if isinstance(part, Characters):
            return self._character(part, at)
        if isinstance(part, Rule):
            return set(self._part(self._grammar[part.name], at))
        if isinstance(part, Token):
            token, end = self._starts.get(at, (-1, 0))
            return {end} if token >= 0 and (token == part.number) != part.inverted else set()
        if isinstance(part, OneOf):
            return set().union(*(self._row(row, at) for row in part.alternatives))
        return self._repeated(part, at)

    def _row(self, row: Sequence[Part], at: int) -> set[int]:
        places = {at}
        for part in row:
            places = set().union(*(self._part(part, place) for place in places)) if places else places
        return places

    def _repeated(self, part: Repeated, at: int) -> set[int]:
        # More often than there are places, only parts that take nothing can be repeated.
        room = len(self._bytes) + 1
        most = part.least + room if part.most is None else min(part.most, part.least + room)
        places, out = {at}, {at} if part.least == 0 else set()
        for count in range(1, most + 1):
            places = set().union(*(self._part(part.part, place) for place in places)) if places else set()
            if count >= part.least:
                if places <= out and count > part.least:
                    break
                out |= places
            if not places:
                break
        return out

    def _character(self, wanted: Characters, at: int) -> set[int]:
        for length in range(1, 5):
            raw = self._bytes[at : at + length]
            if len(raw) < length or None in raw:
                return set()
            try:
                character = bytes(raw).decode()  # type: ignore[arg-type]
            except UnicodeDecodeError:
                continue
            return {at + length} if wanted.has(ord(character)) else set()
        return set()


# Deriving.


class TooDeep(Exception):  # noqa: N818 - an outcome, not an error
    """A derivation was given up."""


@attrs.define
class Deriver:
    """Derives answers from a grammar at random, as tokens that spell them byte by byte, or as tokens that it names."""

    grammar: Grammar
    model: Model
    first_byte: int
    random: random.Random
    steps: int = 400

    def answer(self) -> list[int]:
        """Tokens of one answer.  Raises :class:`TooDeep` if it does not come to an end in time."""
        return self._derive(self.grammar["root"], 0)

    def _derive(self, part: Part, depth: int) -> list[int]:
        self.steps -= 1
        if depth > 40 or self.steps < 0:
            raise TooDeep
        if isinstance(part, Text):
            return [self.first_byte + byte for byte in part.text.encode()]
        if isinstance(part, Characters):
            return self._character(part)
        if isinstance(part, Rule):
            return self._derive(self.grammar[part.name], depth + 1)
        if isinstance(part, Token):
            return [self._token(part)]
        if isinstance(part, OneOf):
            row = self.random.choice(part.alternatives)
            return [token for each in row for token in self._derive(each, depth + 1)]
        most = part.least + 4 if part.most is None else min(part.most, part.least + 4)
        count = self.random.randint(part.least, most)
        return [token for _ in range(count) for token in self._derive(part.part, depth + 1)]

    def _token(self, part: Token) -> int:
        if not part.inverted:
            return part.number
        # No halves of characters: a token that could also be the beginning of a character counts as that.
        others = (token for token in range(self.model.size) if token != part.number)
        return self.random.choice([token for token in others if token < self.first_byte or self._is_text(token)])

    def _is_text(self, token: int) -> bool:
        try:
            return bool(self.model.piece(token).decode())
        except UnicodeDecodeError:
            return False

    def _character(self, part: Characters) -> list[int]:
        for _ in range(30):
            low, high = self.random.choice(part.ranges or ((0, MOST_CHARACTER),))
            if part.inverted:
                low, high = self.random.choice(((0, 0x7F), (0, MOST_CHARACTER)))
            if low > high:
                continue
            code = self.random.randint(low, high)
            if part.has(code) and not 0xD800 <= code <= 0xDFFF:
                return [self.first_byte + byte for byte in chr(code).encode()]
        raise TooDeep
