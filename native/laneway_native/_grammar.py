"""Grammars as the tables that the C code follows, without what can lead nowhere.

Pure: no I/O, no llama.cpp.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import attrs

from laneway.decoder import InvalidRequestError
from laneway_native._gbnf import CHARS, NOT_TOKEN, RULE, parse_gbnf

if TYPE_CHECKING:
    from collections.abc import Callable

    from laneway_native._gbnf import Gbnf, Item, Ranges

MOST_ELEMENTS = 100_000
"""Items of all rules, repetitions written out."""

MOST_BEGINNINGS = 10_000
"""Items that an alternative can begin with, of all rules together.  A search looks at each of them once for a
character, however ambiguous the grammar is; with so many of them one character takes about a millisecond."""

MOST_WORK = 20_000_000
"""Places in a grammar that the search for one token may look at.  To hold a vocabulary of 256,000 tokens against the
text of a JSON string takes less than half of it."""

MOST_SECONDS = 0.25
"""Processor time that the search for one token may take: all sequences of the step wait for it."""

_END = 0


@attrs.frozen(kw_only=True)
class GrammarLimits:
    """What one sequence's grammar may cost in one step: see :data:`MOST_WORK` and :data:`MOST_SECONDS`."""

    work: int = MOST_WORK
    seconds: float = MOST_SECONDS


@attrs.frozen(eq=False)
class GrammarTables:
    """A grammar for C: see ``laneway_grammar`` in ``csrc/llama.cdef.h``."""

    root: int
    rules: array[int]
    alternatives: array[int]
    elements: array[int]
    sets: array[int]
    ranges: array[int]


def grammar_tables(grammar: str, *, vocabulary: int, tokenize: Callable[[str], list[int]]) -> GrammarTables:
    """Read a GBNF grammar and make its tables.

    ``vocabulary`` is the number of tokens; ``tokenize`` reads the text of special tokens, for ``<token>`` items.
    Raises :class:`InvalidRequestError` for a text that is no grammar, for a grammar that no answer can be of, and for
    one that is too large to be searched in time.
    """
    gbnf = parse_gbnf(grammar, vocabulary=vocabulary, tokenize=tokenize)
    rules = _trimmed(gbnf, vocabulary)
    elements = sum(len(items) for rule in rules.values() for items in rule)
    if elements > MOST_ELEMENTS:
        raise InvalidRequestError(
            f"has {elements:,} items, repetitions written out, and {MOST_ELEMENTS:,} are allowed; "
            "make rules of what occurs several times",
            "grammar",
        )
    beginnings = _beginnings(rules)
    if beginnings > MOST_BEGINNINGS:
        raise InvalidRequestError(
            f"its alternatives begin in {beginnings:,} ways and {MOST_BEGINNINGS:,} are allowed, because one character "
            "may have to be held against all of them; let alternatives that begin alike share that part, "
            "and put fewer optional parts one after the other",
            "grammar",
        )
    return _tables(rules, gbnf.sets, gbnf.root)


def _trimmed(gbnf: Gbnf, vocabulary: int) -> dict[int, list[list[Item]]]:
    """The rules that an answer may go through, without the alternatives that can never be completed."""

    def exists(item: Item) -> bool:
        kind, value = item
        return bool(gbnf.sets[value]) if kind == CHARS else kind != NOT_TOKEN or vocabulary > 1

    productive = _closed(gbnf.rules, exists)
    rules: dict[int, list[list[Item]]] = {}
    todo = [gbnf.root]
    while todo:
        number = todo.pop()
        if number in rules:
            continue
        rules[number] = [
            items
            for items in gbnf.rules[number]
            if all(productive[value] if kind == RULE else exists((kind, value)) for kind, value in items)
        ]
        todo += [value for items in rules[number] for kind, value in items if kind == RULE]
    if not rules[gbnf.root]:
        raise InvalidRequestError(
            "allows no answer at all: every way through rule 'root' never ends, or needs a character that does not "
            "exist, as [z-a] does",
            "grammar",
        )
    return rules


def _closed(rules: list[list[list[Item]]], holds: Callable[[Item], bool]) -> list[bool]:
    """For each rule, whether some alternative of it consists of items that hold, and of such rules, alone."""
    found = [False] * len(rules)
    users: list[list[tuple[int, int]]] = [[] for _ in rules]
    missing: dict[tuple[int, int], int] = {}
    ready = []
    for number, rule in enumerate(rules):
        for place, items in enumerate(rule):
            if not all(kind == RULE or holds((kind, value)) for kind, value in items):
                continue
            called = {value for kind, value in items if kind == RULE}
            missing[number, place] = len(called)
            for value in called:
                users[value].append((number, place))
            if not called:
                ready.append(number)
    while ready:
        number = ready.pop()
        if found[number]:
            continue
        found[number] = True
        for user in users[number]:
            missing[user] -= 1
            if not missing[user]:
                ready.append(user[0])
    return found


def _beginnings(rules: dict[int, list[list[Item]]]) -> int:
    """How many items an alternative can begin with, of all of them: the first, and those after what may be empty."""
    numbers = {number: index for index, number in enumerate(rules)}
    renumbered = [
        [[(kind, numbers[value] if kind == RULE else value) for kind, value in items] for items in rule]
        for rule in rules.values()
    ]
    empty = _closed(renumbered, lambda _: False)
    count = 0
    for rule in renumbered:
        for items in rule:
            for kind, value in items:
                count += 1
                if kind != RULE or not empty[value]:
                    break
    return count


def _tables(rules: dict[int, list[list[Item]]], sets: list[Ranges], root: int) -> GrammarTables:
    numbers = {number: index for index, number in enumerate(rules)}
    starts, alternatives, elements = array("i", [0]), array("i"), array("i")
    for rule in rules.values():
        for items in rule:
            alternatives.append(len(elements) // 2)
            for kind, value in items:
                elements.extend((kind, numbers[value] if kind == RULE else value))
            elements.extend((_END, 0))
        starts.append(len(alternatives))
    firsts, ranges = array("i", [0]), array("I")
    for each in sets:
        for low, high in each:
            ranges.extend((low, high))
        firsts.append(len(ranges) // 2)
    return GrammarTables(numbers[root], starts, alternatives, elements, firsts, ranges)
