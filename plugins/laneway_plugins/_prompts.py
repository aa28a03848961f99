"""Messages to tokens, through the model's own chat template."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import trio

from laneway import InvalidRequestError, Model
from laneway.decoder import Written
from laneway.threads import run_sync
from laneway_plugins._messages import Message
from laneway_plugins._template_budget import Budget
from laneway_plugins._templates import ChatTemplate, Rendered, is_marker, limits_of
from laneway_plugins._written import Traced, plain, spans_of

LONG_SOURCE = 4_000
"""Characters of a template from which compiling it leaves the event loop: 10 to 20 ms of work."""
MANY_MESSAGES = 200
"""Messages from which rendering them leaves the event loop at once, without trying."""


@attrs.frozen
class ModelTemplate:
    """A model's chat template, and the user-defined tokens that it writes as markers."""

    template: ChatTemplate
    markers: frozenset[int]


@attrs.define(eq=False)
class _Kept:
    """What is kept of a model's template.

    While one task has it compiled in a thread the others wait in line at the gate.  Later ones wait behind them, so
    that requests arrive in the order in which they came (rule A3).
    """

    gate: trio.Lock = attrs.field(factory=trio.Lock)
    found: ModelTemplate | None = None


_templates: WeakKeyDictionary[Model, _Kept] = WeakKeyDictionary()


async def to_tokens(
    model: Model, messages: str | tuple[Message, ...], variables: Mapping[str, Any] | None = None
) -> list[int]:
    """The prompt that ``messages`` make on ``model``, as tokens.

    In a raw prompt special tokens that the text spells out are read as such.  In a chat only those are that the
    template itself has written, and in a raw prompt of the type :class:`Traced` only those in its spans.  What the
    model wants at a beginning is put there, unless the text begins with it already, as those of many templates do.
    ``variables`` are more names for the template.

    A short chat is rendered at once, without a checkpoint before the tokenizer's.  A long one is rendered in a thread;
    a cancel ends the wait, and then the rendering.

    Raises :class:`InvalidRequestError` if the template refuses or is broken, or if the model has none.
    """
    if isinstance(messages, Traced):
        raw = Rendered(plain(messages), spans_of(messages))
        return await rendered_to_tokens(model, raw, _markers_in(model, raw), prompt=True)
    if isinstance(messages, str):
        return await text_to_tokens(model, messages, prompt=True)
    kept = await template_of(model)
    rendered = None
    if len(messages) < MANY_MESSAGES:
        rendered = kept.template.render_at_once(messages, variables=variables)
    if rendered is None:
        rendered = await _render_in_thread(kept.template, messages, variables)
    return await rendered_to_tokens(model, rendered, kept.markers, prompt=True)


def _markers_in(model: Model, rendered: Rendered) -> frozenset[int]:
    """The user-defined tokens, marks of a form such as ``<de>``, that are written in a prompt without a template."""
    parts = [rendered.text[start:stop] for start, stop in rendered.spans]
    return frozenset(
        token
        for text, token in model.tokenizer.user_defined.items()
        if is_marker(text) and any(text in part for part in parts)
    )


async def _render_in_thread(
    template: ChatTemplate, messages: tuple[Message, ...], variables: Mapping[str, Any] | None
) -> Rendered:
    budget = Budget(limits_of(messages, variables))
    render = partial(template.render, messages, variables=variables, budget=budget)
    try:
        return await run_sync(render, abandon_on_cancel=True)
    finally:
        budget.stop()  # an abandoned thread ends at its next step


async def text_to_tokens(model: Model, text: str, *, prompt: bool = False) -> list[int]:
    """A raw text that begins where a prompt does, as tokens; see :func:`to_tokens` and :meth:`Model.tokenize`."""
    return await _to_tokens(model, text, True, len(text), prompt)


async def rendered_to_tokens(
    model: Model, rendered: Rendered, markers: frozenset[int], *, prompt: bool = False
) -> list[int]:
    """The same for a text that a template has written; ``markers`` are those of the template."""
    written = next((stop for start, stop in rendered.spans if start == 0), 0)
    return await _to_tokens(model, rendered.text, rendered.special(markers), written, prompt)


async def _to_tokens(model: Model, text: str, special: bool | Written, written: int, prompt: bool) -> list[int]:
    begin = model.tokenizer.special_text("bos")
    there = bool(begin) and len(begin) <= written and text.startswith(begin)
    return await model.tokenize(text, bos=not there, special=special, prompt=prompt)


async def template_of(model: Model) -> ModelTemplate:
    """The model's chat template, compiled once; a long one in a thread.

    Raises :class:`InvalidRequestError` if there is none, or if it is broken.
    """
    kept = _templates.get(model)
    if kept is None:
        kept = _templates[model] = _Kept()
    source = _source_of(model)
    if len(source) >= LONG_SOURCE and (kept.found is None or kept.gate.locked()):
        async with kept.gate:
            if kept.found is None:
                kept.found = _with_markers(model, await run_sync(_compiler_of(model), abandon_on_cancel=True))
            return kept.found
    if kept.found is None:
        kept.found = _with_markers(model, _compiler_of(model)())
    return kept.found


def _source_of(model: Model) -> str:
    source = model.tokenizer.chat_template
    if not source:
        raise InvalidRequestError(
            f"model {model.name!r} has no chat template, so it takes raw prompts only: give messages as one str",
            "messages",
        )
    return source


def _compiler_of(model: Model) -> partial[ChatTemplate]:
    tokenizer = model.tokenizer
    return partial(
        ChatTemplate, _source_of(model), bos=tokenizer.special_text("bos"), eos=tokenizer.special_text("eos")
    )


def _with_markers(model: Model, template: ChatTemplate) -> ModelTemplate:
    # The model may have been freed meanwhile; its tokenizer then says so.
    return ModelTemplate(template, template.markers(model.tokenizer.user_defined))
