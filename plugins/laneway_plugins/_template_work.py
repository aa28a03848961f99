"""What the operations of a chat template cost, charged before they run, and how large their results may become.  Pure.

There is one function for each kind of operation.  It is handed the budget and the values, and raises
:class:`OverBudget` for what must not be done.  Methods that have no entry here are not offered to templates at all.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from laneway_plugins._template_budget import (
    MAX_COSTLY,
    MAX_NUMBER,
    Budget,
    OverBudget,
    is_container,
)
from laneway_plugins._written import Traced, plain

MAX_INDENT = 64
"""Characters by which a line of JSON is indented more than the one around it."""

_PRODUCT = 1024
"""Steps of a naive search, of a text in a text, that count as one."""
_TRACED_PIECE = 6
"""Steps of cutting one piece out of a text with spans, which is Python's work and not C's."""


def charge_printing(budget: Budget, value: Any) -> None:
    """``str(value)``."""
    budget.allow(budget.measure(value).characters)


def charge_equality(budget: Budget, left: Any, right: Any) -> None:
    """One comparison of two values."""
    if isinstance(left, str) and isinstance(right, str):
        budget.pass_over(min(len(left), len(right)))
    elif is_container(left):
        budget.measure(left)
    elif is_container(right):
        budget.measure(right)


def charge_hash(budget: Budget, key: Any) -> None:
    """Looking ``key`` up in a mapping.  A text keeps its hash, a tuple does not."""
    if isinstance(key, tuple):
        budget.measure(key)
    elif isinstance(key, str):
        budget.pass_over(len(key))


def charge_membership(budget: Budget, item: Any, items: Any) -> None:
    """``item in items``, where ``items`` is no iterator."""
    if isinstance(items, str):
        budget.pass_over(len(items) + (len(item) if isinstance(item, str) else 0))
    elif isinstance(items, Mapping):
        charge_hash(budget, item)
    elif isinstance(items, range):
        budget.spend(1 if isinstance(item, int) else 1 + len(items))
    elif hasattr(items, "__len__"):
        size = budget.measure(item).characters if is_container(item) or isinstance(item, str) else 0
        budget.spend(len(items) * (1 + size // 64))


def charge_times(budget: Budget, left: Any, right: Any) -> None:
    """``left * right``."""
    for value, times in ((left, right), (right, left)):
        if isinstance(value, str) and isinstance(times, int):
            budget.allow(len(value) * max(0, times))
            budget.pass_over(len(value) * max(0, times))
        elif isinstance(value, (list, tuple)) and isinstance(times, int):
            budget.allow_entries(len(value) * max(0, times))
            budget.spend(1 + len(value) * max(0, times) // 8)


def charge_power(budget: Budget, left: Any, right: Any) -> None:
    """``left ** right``."""
    if isinstance(left, int) and isinstance(right, int):
        budget.allow_bits(left.bit_length() * abs(right))


def charge_sum(budget: Budget, left: Any, right: Any) -> None:
    """``left + right`` or ``left - right``."""
    if isinstance(left, str) and isinstance(right, str):
        budget.allow(len(left) + len(right))
        charge_joined(budget, (left, right))
    elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        budget.allow_entries(len(left) + len(right))
        budget.spend(1 + (len(left) + len(right)) // 8)
    elif is_container(left) or is_container(right):
        # Views of mappings are sets, which hash what is in them.
        budget.measure(left)
        budget.measure(right)


def charge_joined(budget: Budget, parts: Iterable[str], separator: str = "") -> None:
    """Putting texts together."""
    characters = spans = count = 0
    for part in parts:
        count += 1
        characters += len(part) + len(separator)
        spans += len(part._spans) if isinstance(part, Traced) else 0
    budget.spend(count)
    budget.allow(characters)
    budget.pass_over(characters)
    budget.spend(spans + (count * len(separator._spans) if isinstance(separator, Traced) else 0))


# Formats.

_CONVERSION = re.compile(
    r"%(?:\((?P<name>[^()]{0,100})\))?[#0\- +]*(?P<width>\*|[0-9]*)(?:\.(?P<precision>\*|[0-9]*))?[hlL]?(?P<kind>.?)",
    re.DOTALL,
)


def charge_percent(budget: Budget, text: str, values: Any) -> None:
    """``text % values``."""
    budget.spend(text.count("%"))
    budget.pass_over(len(text))
    # A tuple gives each value to one place; a mapping gives one to each place that names it, or itself to all others.
    named = isinstance(values, Mapping)
    sizes = _sizes(budget, values) if named else {}
    whole = budget.measure(values).characters
    size = len(text) + (0 if named else whole)
    for found in _CONVERSION.finditer(text):
        if found["kind"] == "(":
            raise OverBudget("it formats with a name of more than 100 characters, or with brackets in it")
        size += _width(found["width"]) + _width(found["precision"])
        if named:
            size += whole if found["name"] is None else sizes.get(found["name"], 0)
    budget.allow(size)
    budget.pass_over(size)


def charge_braces(budget: Budget, text: str, values: Mapping[Any, Any]) -> None:
    """``text.format`` with these values by their names; those of the others are numbers."""
    budget.spend(2 * text.count("{"))
    budget.pass_over(len(text))
    sizes = _sizes(budget, values)
    size = len(text)
    count = 0
    for _, field, form, _ in string.Formatter().parse(plain(text)):
        if field is None:
            continue
        if "." in field or "[" in field:
            raise OverBudget("it formats with a field that looks into a value; give it what is there instead")
        if form and "{" in form:
            raise OverBudget("it formats with a width that is computed")
        size += sum(map(_width, re.findall("[0-9]+", form or "")))
        size += sizes.get(int(field) if field.isdecimal() else field or count, 0)
        count += not field
    budget.allow(size)
    budget.pass_over(size)


def _sizes(budget: Budget, values: Mapping[Any, Any]) -> dict[Any, int]:
    return {name: budget.measure(value).characters for name, value in values.items()}


def _width(digits: str | None) -> int:
    if digits == "*" or len(digits or "") > 4:
        raise OverBudget("it formats with a width of more than four digits, or one that is computed")
    return int(digits) if digits else 0


# Methods.


def charge_method(budget: Budget, subject: Any, name: str, args: tuple[Any, ...], values: Mapping[str, Any]) -> bool:
    """A call of a method of a value.  Whether templates may call it at all."""
    if isinstance(subject, str):
        if name in ("format", "format_map"):
            given = args[0] if name == "format_map" and args and isinstance(args[0], Mapping) else values
            charge_braces(budget, subject, given if name == "format_map" else {**dict(enumerate(args)), **given})
            return True
        charge = _TEXT_METHODS.get(name)
        if charge is None:
            return False
        everything = (*args, *values.values())
        if name in ("center", "expandtabs", "ljust", "rjust", "zfill"):
            for number in everything:
                check_number(name, number)
        charge(budget, subject, everything)
        return True
    for kind, names in _OTHER_METHODS:
        if isinstance(subject, kind):
            if name not in names:
                return False
            if name in ("index", "count"):
                charge_membership(budget, args[0] if args else None, subject)
            elif name == "get":
                charge_hash(budget, args[0] if args else None)
            elif name == "copy":
                budget.measure(subject)
            else:
                budget.spend()
            return True
    return False


def check_number(name: str, value: object) -> None:
    """Raise :class:`OverBudget` for a number that no width or count should be."""
    if isinstance(value, int) and abs(value) > MAX_NUMBER:
        raise OverBudget(f"the number {str(value)[:20]} is too large for {name}")


def _linear(budget: Budget, text: str, args: tuple[Any, ...]) -> None:
    budget.pass_over(len(text) + sum(_length(arg) for arg in args))
    budget.spend(len(text._spans) if isinstance(text, Traced) else 0)


def _length(arg: Any) -> int:
    if isinstance(arg, str):
        return len(arg)
    return sum(len(part) for part in arg if isinstance(part, str)) if isinstance(arg, tuple) else 1


def _backwards(budget: Budget, text: str, args: tuple[Any, ...]) -> None:
    """Searches that may compare the whole of what they look for at each place."""
    _linear(budget, text, args)
    if args and isinstance(args[0], str):
        budget.spend(len(text) * len(args[0]) // _PRODUCT)


def _split(budget: Budget, text: str, args: tuple[Any, ...]) -> None:
    _linear(budget, text, args)
    _pieces(budget, text, args)


def _rsplit(budget: Budget, text: str, args: tuple[Any, ...]) -> None:
    _backwards(budget, text, args)
    _pieces(budget, text, args)


def _splitlines(budget: Budget, text: str, args: tuple[Any, ...]) -> None:
    _split(budget, text, ())


def _pieces(budget: Budget, text: str, args: tuple[Any, ...]) -> None:
    most = args[1] if len(args) > 1 and isinstance(args[1], int) and args[1] >= 0 else budget.limits.entries
    if args and isinstance(args[0], str) and args[0]:
        count = min(text.count(args[0]), most) + 1
    else:
        # How many there are is told by trying it: that is one call, and no more than are allowed.
        budget.spend(len(text) // 16)
        count = len(str.split(text, None, min(most, budget.limits.entries)))
    budget.allow_entries(count)
    budget.spend(count * (_TRACED_PIECE if isinstance(text, Traced) else 1))


def _replace(budget: Budget, text: str, args: tuple[Any, ...]) -> None:
    _linear(budget, text, args)
    if len(args) > 1 and isinstance(args[0], str) and isinstance(args[1], str):
        count = text.count(args[0])
        size = len(text) + count * len(args[1])
        budget.allow(size)
        budget.pass_over(size)
        budget.spend(count * _TRACED_PIECE if isinstance(text, Traced) else count // 4)


def _join(budget: Budget, text: str, args: tuple[Any, ...]) -> None:
    if args and isinstance(args[0], (list, tuple)):
        charge_joined(budget, (part for part in args[0] if isinstance(part, str)), text)
    elif args:
        budget.measure(args[0])
        budget.allow(_length(args[0]) * (1 + len(text)))
        budget.pass_over(_length(args[0]) * (1 + len(text)))


def _tabs(budget: Budget, text: str, args: tuple[Any, ...]) -> None:
    width = args[0] if args and isinstance(args[0], int) else 8
    size = len(text) + text.count("\t") * max(0, width)
    budget.allow(size)
    budget.pass_over(size)


_LINEAR = (
    "capitalize casefold center count endswith find index isalnum isalpha isascii isdecimal isdigit isidentifier "
    "islower isnumeric isprintable isspace istitle isupper ljust lower partition removeprefix removesuffix rjust "
    "startswith swapcase title upper zfill"
)
_BACKWARDS = "lstrip rfind rindex rpartition rstrip strip"

_TEXT_METHODS: dict[str, Callable[[Budget, str, tuple[Any, ...]], None]] = {
    **dict.fromkeys(re.findall(r"\w+", _LINEAR), _linear),
    **dict.fromkeys(re.findall(r"\w+", _BACKWARDS), _backwards),
    "split": _split,
    "rsplit": _rsplit,
    "splitlines": _splitlines,
    "replace": _replace,
    "join": _join,
    "expandtabs": _tabs,
}

_OTHER_METHODS: tuple[tuple[type, frozenset[str]], ...] = (
    (dict, frozenset({"copy", "get", "items", "keys", "values"})),
    (list, frozenset({"copy", "count", "index"})),
    (tuple, frozenset({"count", "index"})),
    (int, frozenset({"bit_length"})),
    (float, frozenset({"is_integer"})),
)


# Filters.


def charge_sorting(budget: Budget, items: Any) -> None:
    """Sorting, and what else compares entries with each other."""
    size = budget.measure(items)
    rounds = max(1, size.entries.bit_length())
    budget.spend((size.entries // 4 + size.characters // 64) * rounds)


def charge_costly(budget: Budget, values: Iterable[Any]) -> None:
    """Filters for HTML and for the eye, whose work may grow with the square of a text.  No chat needs them."""
    size = sum(budget.measure(value).characters for value in values)
    if size > MAX_COSTLY:
        raise OverBudget(f"it gives a filter for short texts more than {MAX_COSTLY:,} characters")
    budget.spend(size + size * size // 64)


def charge_json(budget: Budget, value: Any, indent: Any, separators: Any) -> None:
    """JSON of a value."""
    size = budget.measure(value)
    width = len(indent) if isinstance(indent, str) else indent if isinstance(indent, int) else 0
    if width > MAX_INDENT:
        raise OverBudget(f"it indents JSON by more than {MAX_INDENT} characters")
    between = sum(_length(one) for one in separators) if isinstance(separators, (list, tuple)) else 4
    characters = size.characters + size.entries * (between + max(0, width) * size.depth + 1)
    budget.allow(characters)
    budget.pass_over(characters)
    budget.spend(size.entries)


def charge_indent(budget: Budget, text: str, width: Any) -> None:
    """The filter ``indent``."""
    each = len(width) if isinstance(width, str) else width if isinstance(width, int) else 0
    lines = len(text) and text.count("\n") + sum(map(text.count, "\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"))
    size = len(text) + (lines + 2) * max(0, each)
    budget.allow(size)
    budget.pass_over(size)
    budget.spend(4 * lines)
