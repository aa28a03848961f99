"""How a language model is asked to translate: a table of prompt forms that any plugin may add to."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import attrs

from laneway import InvalidRequestError
from laneway_plugins._languages import Language
from laneway_plugins._messages import Messages
from laneway_plugins._written import Traced, concat, plain, spans_of, written


@attrs.frozen
class Wanted:
    """One text to translate, as a form is given it.  ``text`` has no white space at its ends."""

    text: str
    source: Language
    target: Language
    context: str | None = None
    """What the caller says of the text; None if nothing."""


@attrs.frozen(kw_only=True)
class PromptForm:
    """A way of asking.

    ``models`` is a regular expression that is looked for in each name of a model (its own, those of its metadata, its
    file's), case aside and ``_`` read as ``-``; None: the form is taken only where it is named.  ``ask`` makes a chat,
    or a str that goes to the model as it is; special tokens that the form writes count there, and those in the text and
    its context do not.  ``stop`` ends an answer and is no part of it.
    """

    name: str
    models: str | None
    ask: Callable[[Wanted], Messages]
    stop: tuple[str, ...] = ()


def prompt_of(form: PromptForm, wanted: Wanted) -> Messages:
    """What ``form`` asks.  A str is :class:`Traced`: the text and its context are content, the rest is the form's.

    The form is asked once more, with one character for the text and another for the context.  If putting both in their
    places does not give the same prompt, the form did something else with them, and then all of it counts as content.
    """
    asked = form.ask(wanted)
    if not isinstance(asked, str):
        return asked
    unused = (character for character in map(chr, range(0xE000, 0xF900)) if character not in asked)
    text, context = next(unused, ""), next(unused, "")
    if not context:
        return Traced(plain(asked))
    outline = form.ask(attrs.evolve(wanted, text=text, context=wanted.context and context))
    parts = re.split(f"([{text}{context}])", outline) if isinstance(outline, str) else []
    content = {text: plain(wanted.text), context: plain(wanted.context or "")}
    traced = concat([content[part] if part in content else written(part) for part in parts])
    return Traced(plain(asked), spans_of(traced) if traced == asked else ())


def _user(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def _general(wanted: Wanted) -> Messages:
    order = (
        f"Translate from {wanted.source.name} into {wanted.target.name}. Answer with the translation and nothing else."
    )
    if wanted.context:
        order += f"\n\nWhat is known of the text: {wanted.context}"
    return _user(f"{order}\n\n{wanted.text}")


def _plain(wanted: Wanted) -> Messages:
    """For models that do not chat: a pattern that they can go on with."""
    known = f"({wanted.context})\n" if wanted.context else ""
    return f"{known}{wanted.source.name}: {wanted.text}\n{wanted.target.name}:"


def _tower(wanted: Wanted) -> Messages:
    known = f"Context: {wanted.context}\n" if wanted.context else ""
    source, target = wanted.source.name, wanted.target.name
    order = f"Translate the following text from {source} into {target}."
    return _user(f"{known}{order}\n{source}: {wanted.text}\n{target}:")


def _alma(wanted: Wanted) -> Messages:
    known = f"{wanted.context}\n" if wanted.context else ""
    source, target = wanted.source.name, wanted.target.name
    return f"{known}Translate this from {source} to {target}:\n{source}: {wanted.text}\n{target}:"


def _hunyuan(wanted: Wanted) -> Messages:
    known = f"{wanted.context}\n" if wanted.context else ""
    return _user(
        f"{known}Translate the following segment into {wanted.target.name}, without additional explanation.\n\n"
        f"{wanted.text}"
    )


def _seed_x(wanted: Wanted) -> Messages:
    known = f"{wanted.context}\n" if wanted.context else ""
    source, target = wanted.source.name, wanted.target.name
    return f"{known}Translate the following {source} sentence into {target}:\n{wanted.text} <{wanted.target.base}>"


GENERAL = PromptForm(name="general", models=None, ask=_general)
"""For every model that chats and that no other form knows."""
PLAIN = PromptForm(name="plain", models=None, ask=_plain, stop=("\n",))
"""For every model without a chat template that no other form knows."""

_forms: dict[str, PromptForm] = {
    form.name: form
    for form in (
        PromptForm(name="tower", models=r"\btower|\bsalamandra-?ta", ask=_tower),
        PromptForm(name="alma", models=r"\b(x-)?alma\b", ask=_alma, stop=("\n",)),
        PromptForm(name="hunyuan", models=r"\b(hunyuan|hy)-?mt", ask=_hunyuan),
        PromptForm(name="seed-x", models=r"\bseed-?x\b", ask=_seed_x, stop=("\n",)),
        GENERAL,
        PLAIN,
    )
}


def add_form(form: PromptForm) -> Callable[[], None]:
    """Add a form, which is asked before those that are there.  Returns what takes it away again.

    Raises :class:`InvalidRequestError` if the name is taken or ``models`` is no regular expression.
    """
    global _forms
    if form.name in _forms:
        raise InvalidRequestError(f"there is a prompt form {form.name!r} already", "form")
    if form.models is not None:
        try:
            re.compile(form.models)
        except re.error as error:
            raise InvalidRequestError(f"the models of form {form.name!r} are no regular expression: {error}") from error
    _forms = {form.name: form, **_forms}

    def remove() -> None:
        _forms.pop(form.name, None)

    return remove


def known_forms() -> tuple[PromptForm, ...]:
    """Every form, in the order in which they are asked."""
    return tuple(_forms.values())


def named_form(name: str) -> PromptForm:
    """The form of this name.  Raises :class:`InvalidRequestError`."""
    if name not in _forms:
        raise InvalidRequestError(f"there is no prompt form {name!r}; there are: {', '.join(_forms)}", "form")
    return _forms[name]


def form_for(name: str, metadata: Mapping[str, str], *, chats: bool) -> PromptForm:
    """The form for a model: what its metadata names as ``laneway.translation_form``, else by what it is called.

    :param name: the model's name
    :param metadata: the model's metadata, of which the names and the file's are looked at
    :param chats: whether it has a chat template
    """
    told = metadata.get("laneway.translation_form")
    if told is not None:
        return named_form(told)
    called = [name, *(metadata.get(key, "") for key in ("general.name", "general.basename", "general.finetune"))]
    called.append(re.split(r"[/\\]", metadata.get("path", ""))[-1])
    for form in _forms.values():
        for one in called:
            if form.models is not None and re.search(form.models, one.replace("_", "-"), re.IGNORECASE):
                return form
    return GENERAL if chats else PLAIN
