"""What the training process says, a JSON object a line.  Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import attrs

SHOWN = 100
"""Characters of a line that an error shows."""


class NotAnEventError(Exception):
    """A line that is no event; the text says why."""


def _whole(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise NotAnEventError(f"its {attribute.name} is {value!r}")


def _number(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise NotAnEventError(f"its {attribute.name} is {value!r}")


def _text(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, str):
        raise NotAnEventError(f"its {attribute.name} is {value!r}")


@attrs.frozen(kw_only=True)
class Started:
    """It has begun.  ``steps`` are those of the whole training, ``start_step`` have been made before."""

    steps: int = attrs.field(validator=_whole)
    start_step: int = attrs.field(default=0, validator=_whole)
    base: str = attrs.field(default="", validator=_text)
    parameters: int = attrs.field(default=0, validator=_whole)


@attrs.frozen(kw_only=True)
class Stepped:
    """One optimiser step, counted from 1; ``epoch`` is from 0 on; ``tokens`` and ``seconds`` are the step's own."""

    step: int = attrs.field(validator=_whole)
    loss: float = attrs.field(validator=_number)
    epoch: int = attrs.field(default=0, validator=_whole)
    learning_rate: float = attrs.field(default=0.0, validator=_number)
    tokens: int = attrs.field(default=0, validator=_whole)
    seconds: float = attrs.field(default=0.0, validator=_number)


@attrs.frozen(kw_only=True)
class Validated:
    """The loss on the data that are not learned from, after ``step`` steps."""

    step: int = attrs.field(validator=_whole)
    loss: float = attrs.field(validator=_number)


@attrs.frozen(kw_only=True)
class Checkpointed:
    """A checkpoint is on the disk."""

    step: int = attrs.field(validator=_whole)


@attrs.frozen(kw_only=True)
class Paused:
    """The last word: a checkpoint is on the disk, and it ends."""

    step: int = attrs.field(validator=_whole)


@attrs.frozen(kw_only=True)
class Finished:
    """The last word: the adapter is on the disk."""

    step: int = attrs.field(validator=_whole)
    adapter: str = attrs.field(default="", validator=_text)


@attrs.frozen(kw_only=True)
class Failed:
    """The last word: it cannot go on.  ``kind`` is one of a few words, ``message`` is for people."""

    message: str = attrs.field(validator=_text)
    kind: str = attrs.field(default="", validator=_text)
    step: int | None = attrs.field(default=None, validator=attrs.validators.optional(_whole))


ChildEvent = Started | Stepped | Validated | Checkpointed | Paused | Finished | Failed

_EVENTS: Mapping[str, type[ChildEvent]] = {
    "started": Started,
    "step": Stepped,
    "validation": Validated,
    "checkpoint": Checkpointed,
    "paused": Paused,
    "done": Finished,
    "error": Failed,
}


def parse_event(line: bytes) -> ChildEvent:
    """The event of a line.  Raises :class:`NotAnEventError`; fields that are not known are passed over."""
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise NotAnEventError(f"{shown(line)} is no JSON") from None
    if not isinstance(value, dict):
        raise NotAnEventError(f"{shown(line)} is no object")
    kind = _EVENTS.get(value.pop("event", None)) if isinstance(value.get("event"), str) else None
    if kind is None:
        raise NotAnEventError(f"{shown(line)} is none of {', '.join(_EVENTS)}")
    known = {field.name for field in attrs.fields(kind)}
    try:
        return kind(**{name: given for name, given in value.items() if name in known})
    except NotAnEventError as error:
        raise NotAnEventError(f"{shown(line)}: {error}") from None
    except TypeError as error:
        raise NotAnEventError(f"{shown(line)} lacks something: {error}") from None


def shown(line: bytes) -> str:
    """A line as an error may show it."""
    text = line.decode("utf-8", "replace").strip()
    return repr(text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}...")
