"""Reads the text of a GBNF grammar.

The language is llama.cpp's, as its pinned version reads it, with one difference: a repetition keeps its upper bound,
however large it is.  Groups and repetitions become rules.

Pure: no I/O, no llama.cpp.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NoReturn

import attrs

from laneway.decoder import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_CHARACTERS = 131_072
"""Longer grammars would hold up the event loop while they are checked."""

MOST_NESTING = 100
"""Parentheses inside each other: the parser recurses."""

MOST_RULES = 10_000
"""Rules, those that groups and repetitions make included."""

MOST_WRITTEN_OUT = 32
"""So many repetitions are written out one after the other; more are halved, so that they take few rules."""

MOST_UNICODE = 0x10FFFF

RULE, CHARS, TOKEN, NOT_TOKEN = 1, 2, 3, 4
"""Kinds of items, as the C code numbers them."""

Item = tuple[int, int]
"""A kind, and the number of the rule, the character set or the token."""

Ranges = tuple[tuple[int, int], ...]
"""A set of characters: the lowest and the highest of each run, ascending and apart from each other."""

_NAME = re.compile(r"[a-zA-Z0-9-]+")
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NUMBER = re.compile(r"[0-9]{1,9}(?![0-9])")
_ESCAPE = r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[trn\\\"\[\]-])"
_CHARACTER = rf"(?:{_ESCAPE}|[^\\%s\0])"
_LITERAL = re.compile(r'"' + _CHARACTER % '"' + r'*"')
_CLASS = re.compile(r"\[\^?" + _CHARACTER % r"\]" + r"*\]")
_TOKEN = re.compile(r"!?<(?:\[([0-9]{1,9})\]|(?!\[)[^>]*)>")

_DIGITS = {"x": 2, "u": 4, "U": 8}
_SHORT_ESCAPES = {"t": "\t", "r": "\r", "n": "\n"}
_SURROGATES = (0xD800, 0xDFFF)


@attrs.frozen
class Gbnf:
    """A grammar as it was written: rules of alternatives of items, by number."""

    rules: list[list[list[Item]]]
    sets: list[Ranges]
    names: dict[int, str]
    """Rules that have one."""
    root: int


def parse_gbnf(grammar: str, *, vocabulary: int, tokenize: Callable[[str], list[int]]) -> Gbnf:
    """Read a grammar.  Raise :class:`InvalidRequestError`, with line and column, for what is none.

    ``vocabulary`` is the number of tokens; ``tokenize`` reads the text of special tokens, for ``<token>`` items.
    """
    if len(grammar) > MOST_CHARACTERS:
        raise InvalidRequestError(f"has {len(grammar):,} characters, {MOST_CHARACTERS:,} are allowed", "grammar")
    parser = _Parser(grammar, vocabulary, tokenize)
    parser.parse()
    names = {number: name for name, number in parser.numbers.items()}
    rules = []
    for number, rule in enumerate(parser.rules):
        if rule is None:
            raise InvalidRequestError(f"rule {names[number]!r} is used and never defined", "grammar")
        rules.append(rule)
    if "root" not in parser.numbers:
        raise InvalidRequestError("has no rule 'root', with which every answer begins", "grammar")
    return Gbnf(rules, list(parser.sets), names, parser.numbers["root"])


def character_set(ranges: list[tuple[int, int]], *, inverted: bool = False) -> Ranges:
    """The characters in any of ``ranges``, or in none of them; a range that ends before it begins holds none.

    Halves of surrogate pairs are no characters.
    """
    merged: list[tuple[int, int]] = []
    for low, high in sorted((low, high) for low, high in ranges if low <= high):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(merged[-1][1], high)
        else:
            merged.append((low, high))
    if inverted:
        edges = [-1, *(edge for pair in merged for edge in pair), MOST_UNICODE + 1]
        merged = [(edges[i] + 1, edges[i + 1] - 1) for i in range(0, len(edges), 2)]
    out = []
    for low, high in merged:
        for first, last in ((low, min(high, _SURROGATES[0] - 1)), (max(low, _SURROGATES[1] + 1), high)):
            last = min(last, MOST_UNICODE)
            if first <= last:
                out.append((first, last))
    return tuple(out)


class _Parser:
    """Reads rules as llama.cpp does."""

    def __init__(self, text: str, vocabulary: int, tokenize: Callable[[str], list[int]]) -> None:
        self.text = text
        self.at = 0
        self.numbers: dict[str, int] = {}
        self.rules: list[list[list[Item]] | None] = []
        self.sets: dict[Ranges, int] = {}
        self._single: dict[int, Item] = {}
        self._repeated: dict[tuple[str, Item, int], Item] = {}
        self._vocabulary = vocabulary
        self._tokenize = tokenize

    def parse(self) -> None:
        self._skip(_SPACE_AND_LINES)
        while self.at < len(self.text):
            self._rule()

    def _fail(self, problem: str, at: int | None = None) -> NoReturn:
        at = self.at if at is None else at
        line = self.text.count("\n", 0, at) + 1
        column = at - (self.text.rfind("\n", 0, at) + 1) + 1
        raise InvalidRequestError(f"line {line}, column {column}: {problem}", "grammar")

    def _skip(self, pattern: re.Pattern[str]) -> None:
        match = pattern.match(self.text, self.at)
        assert match is not None
        self.at = match.end()

    def _take(self, pattern: re.Pattern[str], problem: str) -> re.Match[str]:
        match = pattern.match(self.text, self.at)
        if match is None:
            self._fail(problem)
        self.at = match.end()
        return match

    def _peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def _new_rule(self, rule: list[list[Item]] | None = None) -> int:
        if len(self.rules) >= MOST_RULES:
            self._fail(f"too many rules; groups and repetitions included, {MOST_RULES:,} are allowed")
        self.rules.append(rule)
        return len(self.rules) - 1

    def _number(self, name: str) -> int:
        if name not in self.numbers:
            self.numbers[name] = self._new_rule()
        return self.numbers[name]

    def _chars(self, ranges: Ranges) -> Item:
        return CHARS, self.sets.setdefault(ranges, len(self.sets))

    def _rule(self) -> None:
        number = self._number(self._take(_NAME, "a rule's name must stand here: letters, digits and '-'")[0])
        self._skip(_SPACE)
        if not self.text.startswith("::=", self.at):
            self._fail("'::=' must follow a rule's name")
        self.at += 3
        self._skip(_SPACE_AND_LINES)
        self.rules[number] = self._alternatives(0)
        if self._peek() not in ("", "\r", "\n"):
            self._fail(f"{self._peek()!r} begins nothing that may stand here")
        self._skip(_SPACE_AND_LINES)

    def _alternatives(self, depth: int) -> list[list[Item]]:
        alternatives = [self._sequence(depth)]
        while self._peek() == "|":
            self.at += 1
            self._skip(_SPACE_AND_LINES)
            alternatives.append(self._sequence(depth))
        return alternatives

    def _sequence(self, depth: int) -> list[Item]:
        space = _SPACE_AND_LINES if depth else _SPACE
        items: list[Item] = []
        last = 0
        """Where the item that a repetition is about begins."""
        while True:
            begin = self._peek()
            if begin in ("*", "+", "?", "{"):
                if last == len(items):
                    self._fail(f"{begin!r} repeats what stands before it, and nothing does")
                self._repeat(items, last, space)
                continue
            start = len(items)
            if begin == '"':
                items += self._literal()
            elif begin == "[":
                items += self._class()
            elif begin == ".":
                self.at += 1
                items.append(self._chars(character_set([], inverted=True)))
            elif begin in ("<", "!"):
                items.append(self._token())
            elif begin == "(":
                items.append(self._group(depth))
            elif begin and _NAME.match(begin):
                items.append((RULE, self._number(self._take(_NAME, "")[0])))
            else:
                return items
            last = start
            self._skip(space)

    def _literal(self) -> list[Item]:
        literal = self._take(_LITERAL, "the text has no closing quote, or an escape that does not exist in it")[0]
        return [self._single.get(code) or self._one(code) for code in _codes(literal[1:-1])]

    def _one(self, code: int) -> Item:
        item = self._single[code] = self._chars(character_set([(code, code)]))
        return item

    def _class(self) -> list[Item]:
        taken = self._take(_CLASS, "the characters have no closing ']', or an escape that does not exist in them")[0]
        inverted = taken.startswith("[^")
        inside = taken[2 if inverted else 1 : -1]
        if not inside:
            return []  # llama.cpp reads [] and [^] as nothing to take
        ranges = []
        at = 0
        while at < len(inside):
            low, at = _code_at(inside, at)
            high = low
            if inside.startswith("-", at) and at + 1 < len(inside):
                high, at = _code_at(inside, at + 1)
            ranges.append((low, high))
        return [self._chars(character_set(ranges, inverted=inverted))]

    def _group(self, depth: int) -> Item:
        opened = self.at
        if depth >= MOST_NESTING:
            self._fail(f"parentheses stand more than {MOST_NESTING} deep inside each other")
        self.at += 1
        self._skip(_SPACE_AND_LINES)
        number = self._new_rule()
        self.rules[number] = self._alternatives(depth + 1)
        if self._peek() != ")":
            self._fail("this parenthesis is never closed", opened)
        self.at += 1
        return RULE, number

    def _token(self) -> Item:
        start = self.at
        match = self._take(_TOKEN, "a token is written <text> or <[number]>")
        kind = NOT_TOKEN if match[0].startswith("!") else TOKEN
        if match[1] is not None:
            if int(match[1]) >= self._vocabulary:
                self._fail(f"token {match[1]} is not in the vocabulary of {self._vocabulary} entries", start)
            return kind, int(match[1])
        tokens = self._tokenize(match[0].removeprefix("!"))
        if len(tokens) != 1:
            self._fail(f"{match[0]} is not one token of this model", start)
        return kind, tokens[0]

    def _repeat(self, items: list[Item], last: int, space: re.Pattern[str]) -> None:
        start = self.at
        sign = self._peek()
        self.at += 1
        least: int
        most: int | None
        if sign == "{":
            self._skip(space)
            least = int(self._take(_NUMBER, "a number of repetitions must stand here")[0])
            most = least
            self._skip(space)
            if self._peek() == ",":
                self.at += 1
                self._skip(space)
                most = None
                if self._peek().isdecimal():
                    most = int(self._take(_NUMBER, "a number of repetitions has at most nine digits")[0])
                self._skip(space)
            if self._peek() != "}":
                self._fail("a '}' must end the repetition")
            self.at += 1
            if most is not None and most < least:
                self._fail(f"from {least} to {most} is nothing", start)
        else:
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
        self._skip(space)
        repeated = items[last:]
        del items[last:]
        item = repeated[0] if len(repeated) == 1 else (RULE, self._new_rule([repeated]))
        items += self._exactly(item, least)
        if most is None:
            items.append(self._made("any", item, 0, lambda rule: [[item, rule], []]))
        else:
            items += self._at_most(item, most - least)

    # Repetitions of one item, each made once.

    def _made(self, kind: str, item: Item, count: int, make: Callable[[Item], list[list[Item]]]) -> Item:
        key = kind, item, count
        rule = self._repeated.get(key)
        if rule is None:
            rule = self._repeated[key] = RULE, self._new_rule()
            self.rules[rule[1]] = make(rule)
        return rule

    def _exactly(self, item: Item, count: int) -> list[Item]:
        if count <= MOST_WRITTEN_OUT:
            return [item] * count
        half = count // 2
        return [
            self._made(
                "exactly", item, count, lambda _: [2 * self._exactly(item, half) + self._exactly(item, count % 2)]
            )
        ]

    def _at_most(self, item: Item, count: int) -> list[Item]:
        if count == 0:
            return []
        if count <= MOST_WRITTEN_OUT:
            return [self._made("at most", item, count, lambda _: [[item, *self._at_most(item, count - 1)], []])]
        # Half of them and more, or fewer than half: each number in one way.
        half = (count + 1) // 2
        return [
            self._made(
                "at most",
                item,
                count,
                lambda _: [
                    self._exactly(item, half) + self._at_most(item, count - half),
                    self._at_most(item, half - 1),
                ],
            )
        ]


def _codes(text: str) -> list[int]:
    """The characters of a literal, escapes read."""
    if "\\" not in text:
        return list(map(ord, text))
    out = []
    at = 0
    while at < len(text):
        code, at = _code_at(text, at)
        out.append(code)
    return out


def _code_at(text: str, at: int) -> tuple[int, int]:
    """The character that stands at ``at``, maybe escaped, and where the next one stands."""
    if text[at] != "\\":
        return ord(text[at]), at + 1
    escaped = text[at + 1]
    digits = _DIGITS.get(escaped)
    if digits is None:
        return ord(_SHORT_ESCAPES.get(escaped, escaped)), at + 2
    end = at + 2 + digits
    return int(text[at + 2 : end], 16), end
