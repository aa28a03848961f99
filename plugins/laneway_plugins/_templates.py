"""Chat templates: jinja2 programs that come with a model file, and so from strangers.

They run in jinja2's immutable sandbox, which keeps them away from Python's insides, and on a budget.  Each operation is
charged by the size of its values before it runs, and one value is bounded, so no template holds the interpreter for
long or fills the memory.  The text that comes out knows which of its characters the template wrote: everything that is
handed in, the messages and the variables, is content.

Pure but for ``strftime_now``, a function that some templates call: it reads the date.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, final

import attrs
import jinja2

from laneway import InvalidRequestError
from laneway.decoder import Written
from laneway_plugins._messages import Message
from laneway_plugins._template_budget import MAX_TEXT as MAX_TEXT
from laneway_plugins._template_budget import Budget, Limits, OutOfSteps, OverBudget
from laneway_plugins._template_sandbox import Sandbox
from laneway_plugins._written import Spans, clipped, concat, plain, spans_of, written

MAX_SOURCE = 1 << 18
"""Characters of a template: several times the longest known."""

GIVEN = frozenset({"messages", "add_generation_prompt", "bos_token", "eos_token"})
"""Names of what a template is handed by this module."""
FUNCTIONS = frozenset({"range", "dict", "cycler", "joiner", "namespace", "raise_exception", "strftime_now"})
"""Names of what a template may call."""

ROLES = frozenset(
    {
        *("assistant", "available_tools", "context", "developer", "document", "documents", "environment", "function"),
        *("ipython", "knowledge", "memory", "model", "observation", "system", "tool", "tool_response", "tools", "user"),
    }
)
"""Roles that count as the template's own words.

Some templates make a control token of a role: ``'<|' + message.role + '|>'``.  No other word may complete one.
"""


@attrs.frozen
class Rendered:
    """A text, and the ranges of its characters that the template wrote."""

    text: str
    spans: Spans = ()

    def cut(self, start: int, stop: int) -> Rendered:
        """A part of it."""
        return Rendered(self.text[start:stop], clipped(self.spans, start, stop))

    def writes(self, start: int, stop: int) -> bool:
        """Whether the template wrote all characters of this range."""
        return any(first <= start and stop <= last for first, last in self.spans)

    def special(self, markers: frozenset[int]) -> Written:
        """What a tokenizer is told about it."""
        return Written(spans=self.spans, markers=markers)


@final
class ChatTemplate:
    """One model's template, compiled.  May be used from several threads at a time."""

    def __init__(self, source: str, *, bos: str = "", eos: str = "") -> None:
        """Raises :class:`InvalidRequestError` if ``source`` does not parse."""
        if len(source) > MAX_SOURCE:
            raise _fault(f"has {len(source):,} characters, more than the {MAX_SOURCE:,} that are read")
        self._environment = Sandbox()
        self._environment.offer("raise_exception", _raise_exception)
        self._environment.offer("strftime_now", _strftime_now)
        self._constants: dict[str, Any] = {
            "bos_token": written(bos),
            "eos_token": written(eos),
            "tools": None,
            "documents": None,
        }
        try:
            self._template = self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise _fault(f"does not parse: {error.message} (its line {error.lineno})") from error
        except Exception as error:
            raise _fault(f"cannot be compiled: {_describe(error)}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        budget: Budget | None = None,
    ) -> Rendered:
        """The prompt for ``messages``, up to where the assistant's answer begins.

        Without ``generation_prompt`` it ends where the last message does.  ``variables`` are more names for the
        template.  ``budget`` is what the rendering may use, by default as much as :func:`limits_of` says.

        Raises :class:`InvalidRequestError` if the template refuses the messages, fails, or goes over its budget.
        """
        try:
            return self._render(
                messages, generation_prompt, variables or {}, budget or Budget(limits_of(messages, variables))
            )
        except OutOfSteps as error:
            raise _fault(f"failed: {_describe(error)}") from error

    def render_at_once(
        self, messages: Sequence[Message], *, variables: Mapping[str, Any] | None = None
    ) -> Rendered | None:
        """The same within the few steps that may be spent on an event loop; None if they are too few."""
        try:
            return self._render(messages, True, variables or {}, Budget(limits_of(messages, variables, at_once=True)))
        except OutOfSteps:
            return None

    def _render(
        self, messages: Sequence[Message], generation_prompt: bool, variables: Mapping[str, Any], budget: Budget
    ) -> Rendered:
        self._environment.budget = budget
        parts: list[str] = []
        size = 0
        try:
            budget.spend(len(messages))
            names: dict[str, Any] = {
                **self._constants,
                **_content(variables),
                "messages": [_handed_in(message) for message in messages],
                "add_generation_prompt": generation_prompt,
            }
            for part in self._template.root_render_func(self._template.new_context(names)):
                size += len(part)
                if size > budget.limits.text:
                    raise OverBudget(f"its text is longer than {budget.limits.text:,} characters")
                parts.append(part)
        except _Refused as error:
            raise InvalidRequestError(f"the model's chat template refuses them: {error.message}", "messages") from error
        except OutOfSteps:
            raise
        except Exception as error:
            raise _fault(f"failed: {_describe(error)}") from error
        text = concat(parts)
        return Rendered(plain(text), spans_of(text))

    def markers(self, user_defined: Mapping[str, int]) -> frozenset[int]:
        """The user-defined tokens that this template writes as markers, such as ``<think>``.

        They are those whose text stands in the template's source as a literal, or is made there of two literals with a
        role between them, and has the form of a marker: in angle or square brackets, without white space.  Tokens of
        another form are ordinary text (words, line breaks, indentation).

        The beginning and the end of a text are markers in any form, for a template writes them by their variables.
        """
        candidates = {text: token for text, token in user_defined.items() if is_marker(text)}
        lengths = {len(text) for text in candidates}
        ends = (self._constants["bos_token"], self._constants["eos_token"])
        found = {user_defined[text] for text in ends if text in user_defined and not text.isspace()}
        before: set[str] = set()
        behind: set[str] = set()
        for literal in self._environment.literals:
            for bracket in _OPENING.finditer(literal):
                start = bracket.start()
                found.update(
                    candidates[literal[start : start + length]]
                    for length in lengths
                    if literal[start : start + length] in candidates
                )
            before.update(_LAST_OPENING.findall(literal))
            behind.update(_FIRST_CLOSING.findall(literal))
        for start_text in before:
            for end_text in behind:
                found.update(
                    candidates[start_text + role + end_text]
                    for role in _ROLE_FORMS
                    if start_text + role + end_text in candidates
                )
        return frozenset(found)


_ROLE_FORMS = frozenset(form for role in ROLES for form in (role, role.upper(), role.capitalize(), role.title()))
_MARKER = re.compile(r"<\S+>|\[(?=[^\]]*[^\W\d_])\S+\]")
_OPENING = re.compile(r"[<\[]")
_LAST_OPENING = re.compile(r"[<\[][^<\[\s]{0,40}\Z")
_FIRST_CLOSING = re.compile(r"\A[^>\]\s]{0,40}[>\]]")


def is_marker(text: str) -> bool:
    """Whether a user-defined token of this text has the form of a marker: in brackets, without white space."""
    return _MARKER.fullmatch(text) is not None


def limits_of(
    messages: Sequence[Message], variables: Mapping[str, Any] | None = None, *, at_once: bool = False
) -> Limits:
    """What a rendering of this chat may use; ``at_once``: on an event loop.  The steps grow with the chat."""
    characters = sum(len(message.role) + len(message.content) for message in messages)
    return Limits.of_chat(len(messages), characters + size_of(variables or {}), at_once=at_once)


def size_of(value: Any) -> int:
    """The characters of all texts in a value that is like JSON."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(size_of(part) for pair in value.items() for part in pair)
    return sum(map(size_of, value)) if isinstance(value, (list, tuple)) else 1


def _handed_in(message: Message) -> dict[str, Any]:
    """A message as a template sees it.  Its fields are content, except for a role of :data:`ROLES`."""
    fields: dict[str, Any] = _content(attrs.asdict(message))
    if message.role in ROLES:
        fields["role"] = written(message.role)
    return fields


def _content(value: Any) -> Any:
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, Mapping):
        return {_content(key): _content(part) for key, part in value.items()}
    return [_content(part) for part in value] if isinstance(value, (list, tuple)) else value


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


# What templates expect beside the variables.


class _Refused(jinja2.TemplateError):
    """The template itself called ``raise_exception``."""


def _raise_exception(message: object) -> NoReturn:
    raise _Refused(str(message))


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 100:
        raise OverBudget("strftime_now takes a pattern of at most 100 characters")
    return dt.datetime.now().astimezone().strftime(plain(pattern))
