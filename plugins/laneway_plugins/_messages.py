"""What a language model is asked: a raw prompt, or the messages of a chat.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from laneway import InvalidRequestError
from laneway_plugins._unicode import surrogate_in


def _text(instance: Any, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, str):
        raise InvalidRequestError(f"the {attribute.name} of a message must be a str, not {value!r}", "messages")


def _not_empty(instance: Any, attribute: attrs.Attribute[Any], value: str) -> None:
    if not value:
        raise InvalidRequestError(f"the {attribute.name} of a message must not be empty", "messages")


@attrs.frozen
class Message:
    """One message of a chat.  Which roles there are, and in which order, is the model's template to say."""

    role: str = attrs.field(validator=[_text, _not_empty])
    content: str = attrs.field(validator=_text)


Messages = str | Iterable[Message | Mapping[str, str]]
"""A raw prompt, or a chat: messages or mappings with the keys ``role`` and ``content``."""


def to_messages(value: object) -> str | tuple[Message, ...]:
    """``value`` checked, and copied so that nobody can change it later.

    Raises :class:`InvalidRequestError`.
    """
    if isinstance(value, str):
        _check_text("the prompt", value)
        return value
    if isinstance(value, (bytes, Mapping)) or not isinstance(value, Iterable):
        raise InvalidRequestError(
            f"must be a str (a raw prompt) or a list of messages with role and content, not {_short(value)}", "messages"
        )
    messages = tuple(map(_to_message, value))
    if not messages:
        raise InvalidRequestError("a chat needs at least one message", "messages")
    for number, message in enumerate(messages, 1):
        _check_text(f"the role of message {number}", message.role)
        _check_text(f"the content of message {number}", message.content)
    return messages


def _check_text(what: str, text: str) -> None:
    wrong = surrogate_in(text)
    if wrong is not None:
        raise InvalidRequestError(f"{what} is not valid: {wrong}", "messages")


def _to_message(value: object) -> Message:
    if isinstance(value, Message):
        return value
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"a message is a mapping with role and content, not {_short(value)}", "messages")
    for key in ("role", "content"):
        if key not in value:
            raise InvalidRequestError(f"a message has no {key}: {_short(dict(value))}", "messages")
    for key in value:
        if key not in ("role", "content"):
            raise InvalidRequestError(f"a message has role and content, and nothing else such as {key!r}", "messages")
    return Message(value["role"], value["content"])


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
