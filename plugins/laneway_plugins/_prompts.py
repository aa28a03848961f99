"""Messages to tokens, through the model's own chat template."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from laneway import InvalidRequestError, Model
from laneway_plugins._messages import Message
from laneway_plugins._templates import ChatTemplate

_templates: WeakKeyDictionary[Model, ChatTemplate] = WeakKeyDictionary()


async def to_tokens(model: Model, messages: str | tuple[Message, ...]) -> list[int]:
    """The prompt that ``messages`` make on ``model``, as tokens.

    Special tokens that the text spells out are read as such: templates write their markers so, and so may whoever
    writes a raw prompt.  What the model wants at a beginning is put there, unless the text begins with it already, as
    those of many templates do.

    Raises :class:`InvalidRequestError` if the template refuses or is broken, or if the model has none.
    """
    text = messages if isinstance(messages, str) else template_of(model).render(messages)
    return await text_to_tokens(model, text, prompt=True)


async def text_to_tokens(model: Model, text: str, *, prompt: bool = False) -> list[int]:
    """A text that begins where a prompt does, as tokens; see :func:`to_tokens` and :meth:`Model.tokenize`."""
    begin = model.tokenizer.special_text("bos")
    written = bool(begin) and text.startswith(begin)
    return await model.tokenize(text, bos=not written, special=True, prompt=prompt)


def template_of(model: Model) -> ChatTemplate:
    """The model's chat template, compiled once.

    Raises :class:`InvalidRequestError` if there is none, or if it is broken.
    """
    template = _templates.get(model)
    if template is None:
        template = _templates[model] = new_template_of(model)
    return template


def new_template_of(model: Model) -> ChatTemplate:
    """The same for one user alone, who may be in another thread."""
    tokenizer = model.tokenizer
    if not tokenizer.chat_template:
        raise InvalidRequestError(
            f"model {model.name!r} has no chat template, so it takes raw prompts only: give messages as one str",
            "messages",
        )
    return ChatTemplate(tokenizer.chat_template, bos=tokenizer.special_text("bos"), eos=tokenizer.special_text("eos"))
