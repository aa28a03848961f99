"""Chat templates: jinja2 programs that come with a model file, and so from strangers.

They run in jinja2's immutable sandbox, which keeps them away from Python's insides, and on a budget, which keeps them
from holding up the event loop or filling the memory: rounds of loops and calls are counted, and what multiplies text is
looked at before it is done.  That stops what goes wrong by mistake and the usual tricks; it is no proof against
somebody who looks for the gap.

Pure but for ``strftime_now``, a function that some templates call: it reads the date.
"""

from __future__ import annotations

import datetime as dt
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, final

import attrs
import jinja2
import jinja2.ext
import jinja2.nodes as nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.visitor

from laneway import InvalidRequestError
from laneway_plugins._messages import Message

MAX_STEPS = 500_000
"""Rounds of loops and calls of one rendering: a second of work at the very most."""
MAX_TEXT = 4_000_000
"""Characters of the result, and of any text or list on the way to it; more than the largest windows hold."""
MAX_BITS = 1000
"""Of a whole number."""
MAX_NUMBER = 100_000
"""The largest number that may be given to a filter or to what makes text longer."""

_EACH = "laneway each"
_SIZED = "laneway sized"
_GROWING_METHODS = frozenset(
    {"center", "expandtabs", "format", "format_map", "join", "ljust", "replace", "rjust", "zfill"}
)
_LONG_WIDTH = re.compile(r"[0-9]{5}|%[^a-zA-Z%]*\*|\{[^}]*:[^}]*\{")


class _OverBudget(jinja2.TemplateError):
    """The template has used up what it may use."""


class _Refused(jinja2.TemplateError):
    """The template itself called ``raise_exception``."""


@final
class ChatTemplate:
    """One model's template, compiled.  Not to be used from two threads at a time."""

    def __init__(self, source: str, *, bos: str = "", eos: str = "") -> None:
        """Raises :class:`InvalidRequestError` if ``source`` does not parse."""
        self._environment = _Sandbox()
        self._constants = {"bos_token": bos, "eos_token": eos, "tools": None, "documents": None}
        try:
            self._template = self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise _fault(f"does not parse: {error.message} (its line {error.lineno})") from error
        except Exception as error:
            raise _fault(f"cannot be compiled: {_describe(error)}") from error

    def render(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> str:
        """The prompt for ``messages``, up to where the assistant's answer begins.

        Without ``generation_prompt`` it ends where the last message does.

        Raises :class:`InvalidRequestError` if the template refuses the messages, fails, or goes over its budget.
        """
        self._environment.budget = _Budget()
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(
                messages=[attrs.asdict(message) for message in messages],
                add_generation_prompt=generation_prompt,
                **self._constants,
            ):
                size += len(part)
                if size > MAX_TEXT:
                    raise _OverBudget(f"its text is longer than {MAX_TEXT:,} characters")
                parts.append(part)
        except _Refused as error:
            raise InvalidRequestError(f"the model's chat template refuses them: {error.message}", "messages") from error
        except Exception as error:
            raise _fault(f"failed: {_describe(error)}") from error
        return "".join(parts)


def _fault(what: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"the model's chat template {what}; a raw prompt (messages as one str) goes without it", "messages"
    )


def _describe(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it calls itself without an end"
    if isinstance(error, jinja2.TemplateError):
        return error.message or type(error).__name__
    return f"{type(error).__name__}: {error}"


# The budget.


class _Budget:
    def __init__(self) -> None:
        self._left = MAX_STEPS

    def spend(self, steps: int = 1) -> None:
        self._left -= steps
        if self._left < 0:
            raise _OverBudget(f"it ran for more than {MAX_STEPS:,} rounds and calls")

    def each(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.spend()
            yield item


def _sized(value: Any) -> Any:
    """``value``, if it is not too large."""
    _allow(_size(value))
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise _OverBudget(f"it computes with numbers of more than {MAX_BITS} bits")
    return value


def _size(value: object) -> int:
    return len(value) if isinstance(value, (str, bytes, list, tuple, dict)) else 1


def _allow(size: int) -> None:
    if size > MAX_TEXT:
        raise _OverBudget(f"it makes something larger than {MAX_TEXT:,} characters or entries")


def _check_growth(name: str, text: str, values: Sequence[Any]) -> None:
    """Refuse what would make a huge text out of small ones, before it is made.

    ``name`` is a method of ``str`` or the filter of that name, ``text`` its subject, ``values`` its arguments.
    """
    for value in values:
        _check_number(name, value)
    numbers = [value for value in values if isinstance(value, int)]
    texts = [value for value in values if isinstance(value, str)]
    if name == "join" and values and isinstance(values[0], (list, tuple)):
        _allow(sum(_size(part) + len(text) for part in values[0]))
    elif name == "replace" and len(texts) > 1:
        _allow(len(text) + text.count(texts[0]) * len(texts[1]))
    elif name in ("indent", "expandtabs"):
        # The filter may be given the indentation itself instead of its width.
        _allow(len(text) * max([1, *numbers, *map(len, texts)]))
    elif name in ("format", "format_map"):
        _check_format(text)


def _check_number(name: str, value: object) -> None:
    if isinstance(value, int) and abs(value) > MAX_NUMBER:
        raise _OverBudget(f"the number {value} is too large for {name}")


def _check_format(text: str | bytes) -> None:
    """Refuse widths and precisions, of either kind of formatting, that are long or come with the values."""
    if _LONG_WIDTH.search(text if isinstance(text, str) else text.decode("latin-1")):
        raise _OverBudget("it formats with a width of more than four digits, or one that is computed")


# The sandbox.


class _Meter(jinja2.visitor.NodeTransformer):
    """Puts the counters into a template's syntax tree, where the sandbox has no hook for them."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - jinja2's name
        self.generic_visit(node)
        node.iter = _filter(node.iter, _EACH, node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filter(node, _SIZED, node.lineno)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.filter = _filter(node.filter, _SIZED, node.lineno)
        return node


def _filter(node: nodes.Node | None, name: str, line: int) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=line)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self) -> None:
        # The whitespace rules are those under which the templates were written.
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
        self.budget = _Budget()
        self.filters = {name: self._metered(name, function) for name, function in self.filters.items()}
        self.filters["tojson"] = self._metered("tojson", _to_json)
        self.filters[_EACH] = self._each
        self.filters[_SIZED] = _sized
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        return super()._generate(_Meter().visit(source), name, filename, defer_init)

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        __self.budget.spend()
        # The sandbox hands out str.format in a wrapping of its own.
        method = getattr(__obj, "__wrapped__", __obj)
        subject, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(subject, str) and name in _GROWING_METHODS:
            _check_growth(name, subject, (*args, *kwargs.values()))
        return _sized(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            if operator == "**" and left.bit_length() * abs(right) > MAX_BITS:
                raise _OverBudget(f"it computes with numbers of more than {MAX_BITS} bits")
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(times, int):
                    _allow(_size(value) * abs(times))
        elif operator == "%" and isinstance(left, (str, bytes)):
            _check_format(left)
        return _sized(super().call_binop(context, operator, left, right))

    @jinja2.pass_context
    def _each(self, context: jinja2.runtime.Context, items: Iterable[Any]) -> Iterator[Any]:
        return self.budget.each(items)

    def _metered(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        # Filters of some kinds are handed the context or the environment before the value.
        place = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            self.budget.spend()
            before, value, rest = args[:place], args[place], args[place + 1 :]
            if isinstance(value, Iterator):
                value = self.budget.each(value)
                if name == "join":
                    value = list(value)
            given = (*rest, *kwargs.values())
            if name == "join":
                _check_growth(name, str(given[0]) if given else "", (value,))
            elif isinstance(value, str):
                _check_growth(name, value, given)
            for number in given:
                _check_number(f"the filter {name}", number)
            return _sized(function(*before, value, *rest, **kwargs))

        return metered


# What templates expect beside the variables.


def _raise_exception(message: object) -> NoReturn:
    raise _Refused(str(message))


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 100:
        raise _OverBudget("strftime_now takes a pattern of at most 100 characters")
    return dt.datetime.now().astimezone().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Unlike jinja2's own: prompts are no HTML, so nothing is escaped for it.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's words for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 - as its base declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
