"""The filters and tests of chat templates: jinja2's, each charged before it runs.

A few are replaced.  jinja2's own would lose which part of a text the template wrote, or do work that cannot be told
beforehand.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.filters
import jinja2.nodes
import jinja2.runtime
import jinja2.tests
from markupsafe import Markup

from laneway_plugins import _template_work as work
from laneway_plugins._template_budget import Budget, is_container
from laneway_plugins._written import concat, join

if TYPE_CHECKING:
    from laneway_plugins._template_sandbox import Sandbox

EACH = "laneway each"
"""The filter that charges the rounds of a loop.  No template can write its name."""
SPEND = "laneway spend"
"""The filter that charges as many steps as its value says.  No template can write its name."""

MAX_ROUNDING = 1000
"""The largest precision of the filter ``round``."""

Charge = Callable[[Budget, Any, tuple[Any, ...]], Any]
"""What a filter costs: takes its value and its other arguments, and returns the value that it is to be given."""


def metered_filters(environment: Sandbox) -> dict[str, Callable[..., Any]]:
    """The filters of a template's environment."""
    filters: dict[str, Callable[..., Any]] = {
        **jinja2.filters.FILTERS,
        "indent": _indent,
        "join": _join,
        "sum": _sum,
        "title": _title,
        "tojson": _to_json,
    }
    metered = {
        name: _metered(environment, name, function, _FILTERS.get(name, _costly)) for name, function in filters.items()
    }
    metered[EACH] = lambda items, steps: environment.budget.each(items, steps)
    metered[SPEND] = lambda steps: environment.budget.spend(steps)
    return metered


def metered_tests(environment: Sandbox) -> dict[str, Callable[..., Any]]:
    """The tests of a template's environment."""
    tests: Mapping[str, Any] = jinja2.tests.TESTS
    metered = {name: _metered(environment, name, function, _TESTS.get(name, _free)) for name, function in tests.items()}
    metered["in"] = lambda item, items: environment.contains(items, item)
    return metered


def _metered(environment: Sandbox, name: str, function: Callable[..., Any], charge: Charge) -> Callable[..., Any]:
    # Filters of some kinds are handed the context or the environment before the value.
    place = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def metered(*args: Any, **kwargs: Any) -> Any:
        budget = environment.budget
        budget.spend()
        before, value, rest = args[:place], args[place], args[place + 1 :]
        given = (*rest, *kwargs.values())
        if name in _WITH_WIDTHS:
            for number in given:
                work.check_number(f"the filter {name}", number)
        value = charge(budget, value, given)
        result = function(*before, value, *rest, **kwargs)
        # What is made bit by bit is charged bit by bit.
        return budget.each(result) if isinstance(result, Iterator) else budget.sized(result)

    return metered


# What filters cost.


def _free(budget: Budget, value: Any, given: tuple[Any, ...]) -> Any:
    return value


def _rounding(budget: Budget, value: Any, given: tuple[Any, ...]) -> Any:
    if any(isinstance(number, int) and abs(number) > MAX_ROUNDING for number in given):
        raise jinja2.TemplateError(f"it rounds to more than {MAX_ROUNDING} places")
    return value


def _lazy(budget: Budget, value: Any, given: tuple[Any, ...]) -> Any:
    """Filters that take one item after the other."""
    for arg in given:
        budget.measure(arg)
    # An empty list must stay one: it counts as false.
    if isinstance(value, Iterator) or ((is_container(value) or isinstance(value, (str, range))) and len(value)):
        return budget.each(value)
    return value


def _batch(budget: Budget, value: Any, given: tuple[Any, ...]) -> Any:
    budget.spend(sum(number for number in given if isinstance(number, int) and number > 0) // 8)
    return _lazy(budget, value, given)


def _collected(budget: Budget, value: Any, given: tuple[Any, ...]) -> Any:
    """Filters that look at each entry once."""
    if isinstance(value, Iterator):
        return budget.collect(value)
    if is_container(value) or isinstance(value, (str, range)):
        budget.spend(len(value))
        budget.allow_entries(len(value))
    return value


def _sliced(budget: Budget, value: Any, given: tuple[Any, ...]) -> Any:
    budget.spend(sum(number for number in given if isinstance(number, int) and number > 0))
    return _collected(budget, value, given)


def _reversed(budget: Budget, value: Any, given: tuple[Any, ...]) -> Any:
    if isinstance(value, str):
        budget.pass_over(len(value))
        return value
    # The result is an iterator, which is charged as it goes.  A value without an order is put into a list.
    return budget.each(value) if isinstance(value, Iterator) else value


def _sorted(budget: Budget, value: Any, given: tuple[Any, ...]) -> Any:
    value = _collected(budget, value, given)
    work.charge_sorting(budget, value)
    return value


def _numbers(budget: Budget, value: Any, given: tuple[Any, ...]) -> Any:
    work.charge_printing(budget, value)
    return value


def _text(method: str) -> Charge:
    """Filters that turn their value into text and do what a method of ``str`` does."""

    def charge(budget: Budget, value: Any, given: tuple[Any, ...]) -> Any:
        for one in (value, *given):
            work.charge_printing(budget, one)
        text = value if isinstance(value, str) else str(value)
        if method:
            given = tuple(str(one) if is_container(one) else one for one in given)
            work.charge_method(budget, text, method, given, {})
        if isinstance(value, Markup):
            budget.allow(6 * len(value))
        return text

    return charge


def _title_cost(budget: Budget, value: Any, given: tuple[Any, ...]) -> Any:
    value = _text("")(budget, value, given)
    budget.spend(len(value))
    return value


def _escape(budget: Budget, value: Any, given: tuple[Any, ...]) -> Any:
    work.charge_printing(budget, value)
    if isinstance(value, str):
        budget.allow(6 * len(value))
    return value


def _percent(budget: Budget, value: Any, given: tuple[Any, ...]) -> Any:
    # The names of keywords are lost here, so each place counts as if it took all values.
    text = value if isinstance(value, str) else str(_numbers(budget, value, ()))
    work.charge_percent(budget, text, given)
    size = sum(budget.measure(one).characters for one in given)
    if "%(" in text:
        budget.allow(len(text) + text.count("%(") * size)
        budget.pass_over(text.count("%(") * size)
    return text


def _indented(budget: Budget, value: Any, given: tuple[Any, ...]) -> Any:
    if isinstance(value, str):
        for width in given[:1] or (4,):
            work.charge_indent(budget, value, max([width, *given], key=_width))
    return value


def _width(value: Any) -> int:
    return len(value) if isinstance(value, str) else value if isinstance(value, int) else 0


def _truncated(budget: Budget, value: Any, given: tuple[Any, ...]) -> Any:
    return _escape(budget, value, given)


def _parsed(budget: Budget, value: Any, given: tuple[Any, ...]) -> Any:
    if isinstance(value, str):
        budget.pass_over(8 * len(value))
    return value


def _json_cost(budget: Budget, value: Any, given: tuple[Any, ...]) -> Any:
    return value  # it knows its arguments by their names, and charges for them itself


def _costly(budget: Budget, value: Any, given: tuple[Any, ...]) -> Any:
    if isinstance(value, Iterator):
        value = budget.collect(value)
    work.charge_costly(budget, (value, *given))
    return value


_FILTERS: dict[str, Charge] = {
    **dict.fromkeys(("abs", "attr", "count", "d", "default", "first", "items", "last", "length"), _free),
    **dict.fromkeys(("map", "reject", "rejectattr", "select", "selectattr"), _lazy),
    **dict.fromkeys(("dictsort", "groupby", "max", "min", "sort", "unique"), _sorted),
    **dict.fromkeys(("e", "escape", "forceescape"), _escape),
    "batch": _batch,
    "capitalize": _text("capitalize"),
    "center": _text("center"),
    "float": _parsed,
    "format": _percent,
    "indent": _indented,
    "int": _parsed,
    "join": _free,
    "list": _collected,
    "lower": _text("lower"),
    "random": _free,
    "replace": _text("replace"),
    "reverse": _reversed,
    "round": _rounding,
    "safe": _numbers,
    "slice": _sliced,
    "string": _numbers,
    "sum": _free,
    "title": _title_cost,
    "tojson": _json_cost,
    "trim": _text("strip"),
    "truncate": _truncated,
    "upper": _text("upper"),
    "wordcount": _title_cost,
}
"""The filters that chats use.  Others are costly."""


_WITH_WIDTHS = frozenset({"batch", "center", "indent", "slice", "truncate", "urlize", "wordwrap"})


def _equality(budget: Budget, value: Any, given: tuple[Any, ...]) -> Any:
    for other in given:
        work.charge_equality(budget, value, other)
    return value


_TESTS: dict[str, Charge] = {
    **dict.fromkeys(("lower", "upper"), _numbers),
    **dict.fromkeys(
        ("==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", ">=", "ge", "<", "lt", "lessthan", "<=", "le"),
        _equality,
    ),
}


# The filters that are replaced.


@jinja2.pass_eval_context
def _join(
    context: jinja2.nodes.EvalContext, value: Iterable[Any], d: Any = "", attribute: str | int | None = None
) -> Any:
    budget = _budget_of(context.environment)
    items = budget.collect(value)
    if attribute is not None:
        items = list(map(jinja2.filters.make_attrgetter(context.environment, attribute), items))
    for item in (d, *items):
        work.charge_printing(budget, item)
    if context.autoescape:
        return jinja2.filters.sync_do_join(context, items, d)
    parts = list(map(str, items))
    work.charge_joined(budget, parts, str(d))
    return join(str(d), parts)


@jinja2.pass_environment
def _sum(
    environment: jinja2.Environment, iterable: Iterable[Any], attribute: str | int | None = None, start: Any = 0
) -> Any:
    budget = _budget_of(environment)
    items = budget.collect(iterable)
    if attribute is not None:
        items = list(map(jinja2.filters.make_attrgetter(environment, attribute), items))
    # Only lists grow from one sum to the next; others are as fast as they are many.
    total = start
    if isinstance(start, (list, tuple)):
        for item in items:
            work.charge_sum(budget, total, item)
            total = total + item
        return total
    return sum(items, start)


def _budget_of(environment: Any) -> Budget:
    budget: Budget = environment.budget
    return budget


_WORD = re.compile(r"[-\s({\[<]+")


def _title(value: str) -> str:
    if isinstance(value, Markup):
        return jinja2.filters.do_title(value)
    parts: list[str] = []
    at = 0
    for found in _WORD.finditer(value):
        parts += (value[at : found.start()], value[found.start() : found.end()])
        at = found.end()
    parts.append(value[at:])
    return concat(part[0].upper() + part[1:].lower() for part in parts if part)


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> Any:
    if isinstance(s, Markup) or not isinstance(s, str):
        return jinja2.filters.do_indent(s, width, first, blank)
    indention = width if isinstance(width, str) else " " * width
    # The line break makes a last line that is empty count.
    lines = (s + "\n").splitlines()
    rest = [indention + line if line or blank else line for line in lines[1:]]
    text = join("\n", [lines[0], *rest])
    return indention + text if first else text


@jinja2.pass_environment
def _to_json(
    environment: jinja2.Environment,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Unlike jinja2's own: prompts are no HTML, so nothing is escaped for it.
    work.charge_json(_budget_of(environment), value, indent, separators)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
