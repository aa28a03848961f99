"""Checks a GBNF grammar before llama.cpp parses it.

llama.cpp's parser prints what it does not like to standard error and says nothing to its caller; deep nesting overflows
its stack, hidden left recursion eats all memory, and ambiguous grammars take time that grows without bound.  Any of
that would hurt every request of the process, so a grammar passes here first.  What passes may still be refused by
llama.cpp; the other way round, this refuses nothing that a sensible grammar needs.

Pure: no I/O, no llama.cpp.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NoReturn

import attrs

from laneway.decoder import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MOST_CHARACTERS = 65_536
"""Longer grammars would hold up the event loop while they are checked."""

MOST_NESTING = 100
"""Parentheses inside each other: llama.cpp's parser recurses."""

MOST_RULES = 10_000
"""Rules, those that groups and repetitions make included: llama.cpp recurses through them."""

MOST_REPEATS = 2000
"""llama.cpp's own limit for the rules that one repetition makes."""

MOST_BEGINNINGS = 10_000
"""Ways to begin one rule, such as the words of a list."""

MOST_SKIPS = 256
"""Ways to begin what follows optional parts.  llama.cpp's time grows with the third power of it."""

_NAME = re.compile(r"[a-zA-Z0-9-]+")
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NUMBER = re.compile(r"[0-9]{1,9}(?![0-9])")
_CHARACTER = r"(?:\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[trn\\\"\[\]-])|[^\\%s\0])"
_LITERAL = re.compile(r'"' + _CHARACTER % '"' + r'*"')
_CLASS = re.compile(r"\[\^?" + _CHARACTER % r"\]" + r"*\]")
_TOKEN = re.compile(r"!?<(?:\[([0-9]{1,9})\]|(?!\[)[^>]*)>")

_CHARS = -1
"""An item that takes a character or a token; other items are numbers of rules."""

_MANY = 10**9


@attrs.frozen
class _Rule:
    """What a rule may be: alternatives, each a list of items."""

    alternatives: list[list[int]]


def check_gbnf(grammar: str, *, vocabulary: int, tokenize: Callable[[str], list[int]]) -> None:
    """Raise :class:`InvalidRequestError`, with line and column, for a grammar that llama.cpp should not be given.

    ``vocabulary`` is the number of tokens; ``tokenize`` reads the text of special tokens, for ``<token>`` items.
    """
    if len(grammar) > MOST_CHARACTERS:
        raise InvalidRequestError(f"has {len(grammar):,} characters, {MOST_CHARACTERS:,} are allowed", "grammar")
    parser = _Parser(grammar, vocabulary, tokenize)
    rules = parser.parse()
    names = {number: name for name, number in parser.numbers.items()}
    for number, rule in enumerate(rules):
        if rule is None:
            raise InvalidRequestError(f"rule {names[number]!r} is used and never defined", "grammar")
    if "root" not in parser.numbers:
        raise InvalidRequestError("has no rule 'root', with which every answer begins", "grammar")
    _Weigher([rule for rule in rules if rule is not None], names).weigh()


class _Parser:
    """Reads rules as llama.cpp does: groups and repetitions become rules of their own."""

    def __init__(self, text: str, vocabulary: int, tokenize: Callable[[str], list[int]]) -> None:
        self.text = text
        self.at = 0
        self.numbers: dict[str, int] = {}
        self.rules: list[_Rule | None] = []
        self._vocabulary = vocabulary
        self._tokenize = tokenize

    def parse(self) -> list[_Rule | None]:
        self._skip(_SPACE_AND_LINES)
        while self.at < len(self.text):
            self._rule()
        return self.rules

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

    def _new_rule(self) -> int:
        if len(self.rules) >= MOST_RULES:
            self._fail(f"too many rules; groups and repetitions included, {MOST_RULES:,} are allowed")
        self.rules.append(None)
        return len(self.rules) - 1

    def _number(self, name: str) -> int:
        if name not in self.numbers:
            self.numbers[name] = self._new_rule()
        return self.numbers[name]

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

    def _alternatives(self, depth: int) -> _Rule:
        alternatives = [self._sequence(depth)]
        while self._peek() == "|":
            self.at += 1
            self._skip(_SPACE_AND_LINES)
            alternatives.append(self._sequence(depth))
        return _Rule(alternatives)

    def _sequence(self, depth: int) -> list[int]:
        space = _SPACE_AND_LINES if depth else _SPACE
        items: list[int] = []
        last = 0
        """Where the item that a repetition is about begins."""
        made = 1
        """Rules that this item has made so far."""
        while True:
            begin = self._peek()
            if begin in ("*", "+", "?", "{"):
                if last == len(items):
                    self._fail(f"{begin!r} repeats what stands before it, and nothing does")
                made = self._repeat(items, last, made, space)
                continue
            start = len(items)
            made_now = 1
            if begin == '"':
                literal = self._take(_LITERAL, "the text has no closing quote, or an escape that does not exist in it")[
                    0
                ]
                if len(literal) > 2:
                    items.append(_CHARS)
            elif begin == "[":
                taken = self._take(
                    _CLASS, "the characters have no closing ']', or an escape that does not exist in them"
                )
                if taken[0] not in ("[]", "[^]"):
                    items.append(_CHARS)
            elif begin == ".":
                self.at += 1
                items.append(_CHARS)
            elif begin in ("<", "!"):
                self._token()
                items.append(_CHARS)
            elif begin == "(":
                before = len(self.rules)
                items.append(self._group(depth))
                made_now = max(1, len(self.rules) - before)
            elif begin and _NAME.match(begin):
                items.append(self._number(self._take(_NAME, "")[0]))
            else:
                return items
            last, made = start, made_now
            self._skip(space)

    def _group(self, depth: int) -> int:
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
        return number

    def _token(self) -> None:
        start = self.at
        match = self._take(_TOKEN, "a token is written <text> or <[number]>")
        if match[1] is not None:
            if int(match[1]) >= self._vocabulary:
                self._fail(f"token {match[1]} is not in the vocabulary of {self._vocabulary} entries", start)
        elif len(self._tokenize(match[0].removeprefix("!"))) != 1:
            self._fail(f"{match[0]} is not one token of this model", start)

    def _repeat(self, items: list[int], last: int, made: int, space: re.Pattern[str]) -> int:
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
                number = _NUMBER.match(self.text, self.at)
                most = int(number[0]) if number else None
                self.at = number.end() if number else self.at
                self._skip(space)
            if self._peek() != "}":
                self._fail("a '}' must end the repetition")
            self.at += 1
            if most is not None and most < least:
                self._fail(f"from {least} to {most} is nothing", start)
            if least > MOST_REPEATS:
                self._fail(f"{least} repetitions are more than the {MOST_REPEATS} that are allowed", start)
            if most is not None and most > MOST_REPEATS:
                most = None  # as llama.cpp does
        else:
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
        self._skip(space)
        total = most or least or 1
        if made * total > MOST_REPEATS:
            self._fail(
                f"{total} repetitions of something with {made} rules in it make more than {MOST_REPEATS} rules", start
            )
        repeated = items[last:]
        if least == 0:
            del items[last:]
        else:
            items += repeated * (least - 1)
        tail: int | None = None
        for _ in range(1 if most is None else most - least):
            number_ = self._new_rule()
            after = [number_] if most is None else [] if tail is None else [tail]
            self.rules[number_] = _Rule([[*repeated, *after], []])
            tail = number_
        if tail is not None:
            items.append(tail)
        return made * total


class _Weigher:
    """Follows what a rule can begin with: for left recursion, and for how many ways there are."""

    def __init__(self, rules: list[_Rule], names: dict[int, str]) -> None:
        self.rules = rules
        self.names = names
        self.nullable = self._find_nullable()
        self.ends = [0] * len(rules)
        """Ways through a rule that take nothing."""
        self.begins = [0] * len(rules)
        """Ways to the first character of a rule."""

    def weigh(self) -> None:
        for number in self._innermost_first():
            rule = self.rules[number]
            ends = begins = 0
            for items in rule.alternatives:
                alternative_ends, alternative_begins = self._weigh_alternative(number, items)
                ends += alternative_ends
                begins += alternative_begins
            self.ends[number], self.begins[number] = min(ends, _MANY), min(begins, _MANY)
            if self.begins[number] > MOST_BEGINNINGS:
                self._fail(number, f"can begin in more than {MOST_BEGINNINGS:,} ways")
            if self.ends[number] > MOST_BEGINNINGS:
                self._fail(number, f"can be empty in more than {MOST_BEGINNINGS:,} ways")

    def _fail(self, number: int, problem: str) -> NoReturn:
        name = self.names.get(number)
        what = f"rule {name!r}" if name is not None else "a group or repetition"
        raise InvalidRequestError(f"{what} {problem}: the grammar is too ambiguous to follow", "grammar")

    def _weigh_alternative(self, number: int, items: list[int]) -> tuple[int, int]:
        """Empty ways, and ways to a first character; from the end, since what follows an empty item counts too."""
        ends, begins = 1, 0
        for item in reversed(items):
            if item == _CHARS:
                ends, begins = 0, 1
            else:
                skipped = min(self.ends[item] * begins, _MANY)
                if skipped > MOST_SKIPS:
                    self._fail(number, f"can go on in more than {MOST_SKIPS} ways after its optional parts")
                ends, begins = min(self.ends[item] * ends, _MANY), min(self.begins[item] + skipped, _MANY)
        return ends, begins

    def _find_nullable(self) -> list[bool]:
        nullable = [False] * len(self.rules)
        users: list[list[int]] = [[] for _ in self.rules]
        for number, rule in enumerate(self.rules):
            for item in {item for items in rule.alternatives for item in items if item != _CHARS}:
                users[item].append(number)
        todo = list(range(len(self.rules)))
        while todo:
            number = todo.pop()
            if not nullable[number] and any(
                all(item != _CHARS and nullable[item] for item in items) for items in self.rules[number].alternatives
            ):
                nullable[number] = True
                todo += users[number]
        return nullable

    def _corners(self, number: int) -> Iterator[tuple[int, bool]]:
        """Rules that a rule can begin with, and whether something of the rule is left to do after them."""
        for items in self.rules[number].alternatives:
            for index, item in enumerate(items):
                if item == _CHARS:
                    break
                yield item, index + 1 < len(items)
                if not self.nullable[item]:
                    break

    def _innermost_first(self) -> list[int]:
        """All rules, each after those that it can begin with; raises for left recursion.

        A cycle in which nothing is left to do after any of its rules does not grow, and is let pass: ``("a"*)*``.
        """
        order: list[int] = []
        state = bytearray(len(self.rules))  # 0: not seen, 1: on the path, 2: done
        for root in range(len(self.rules)):
            if state[root]:
                continue
            path: list[tuple[int, bool, Iterator[tuple[int, bool]]]] = [(root, False, self._corners(root))]
            state[root] = 1
            while path:
                number, _, corners = path[-1]
                for corner, more in corners:
                    if state[corner] == 1:
                        # Back on the path: the steps from there to here, and this one.
                        depth = next(index for index, entry in enumerate(path) if entry[0] == corner)
                        if more or any(entry[1] for entry in path[depth + 1 :]):
                            self._recursive(corner, [entry[0] for entry in path[depth:]])
                    elif state[corner] == 0:
                        state[corner] = 1
                        path.append((corner, more, self._corners(corner)))
                        break
                else:
                    state[number] = 2
                    order.append(number)
                    path.pop()
        return order

    def _recursive(self, number: int, cycle: list[int]) -> NoReturn:
        named = next((self.names[rule] for rule in [number, *cycle] if rule in self.names), None)
        what = f"rule {named!r}" if named is not None else "a repetition"
        raise InvalidRequestError(f"{what} can begin with itself; write the recursion at its end", "grammar")
