"""Which chats a data file holds, and in which of the usual forms.  Pure.

Chats come as JSON Lines, one value a line, or as one JSON array.  Each value has one of four shapes:

- ``{"messages": [{"role": ..., "content": ...}, ...]}``, or the list of messages alone;
- ShareGPT: ``{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}``;
- Alpaca: ``{"instruction": ..., "input": ..., "output": ...}``;
- pairs: ``{"prompt": ..., "completion": ...}``, both text or both lists of messages.

The content decides, and not the name of the file: a training on JSON as if it were prose ends without an error and
with a falling loss, and teaches a model to write JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs

from laneway import InvalidRequestError

SUFFIXES = frozenset({".json", ".jsonl", ".jsonlines", ".ndjson"})
"""Endings of the names of JSON files, in lower case."""
SHAPES = (
    'a chat is {"messages": [...]}, {"conversations": [...]} (ShareGPT), {"instruction": ..., "output": ...} (Alpaca) '
    'or {"prompt": ..., "completion": ...}, one a line or all in one array; format="text" (--format text) trains on '
    "the file as plain text, its JSON signs included"
)
"""What an error says to a file that holds no chats."""

LOOKED_AT = 20
"""Lines of a text that are tried, to see whether it is JSON Lines."""
_KEYS_SHOWN = 6
_ABOUT = frozenset({"id", "source", "dataset", "category"})
"""Keys that say where an entry is from.  They are no part of the chat and are passed over."""
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "system": "system",
}
_OBJECT = re.compile(r'\s*(?:\[\s*)?\{\s*"(?:[^"\\\n]|\\.)*"\s*:')
"""The beginning of an object with a key: prose does not begin so."""


@attrs.frozen
class NoJson:
    """Stands for a value that could not be read."""

    reason: str


@attrs.frozen
class Entries:
    """The values of a file, each with its number: of its line, or of its place in the array."""

    unit: Literal["line", "entry"]
    values: tuple[tuple[int, Any], ...] = attrs.field(repr=False)


def looks_like_chats(text: str, suffix: str) -> bool:
    """Whether a file is to be read as chats, by its content and by the ``suffix`` of its name.

    True for everything that is JSON, chats or not: the reading tells what is wrong with it.  A text that merely begins
    with a brace or a bracket is text.
    """
    if suffix.lower() in SUFFIXES or _OBJECT.match(text):
        return True
    if text.lstrip()[:1] in ("[", "{") and not isinstance(_read(text), NoJson):
        return True
    lines = _lines(text, LOOKED_AT)
    objects = sum(_OBJECT.match(line) is not None for _, line in lines)
    return 2 * objects > len(lines)


def read_entries(text: str) -> Entries:
    """The values of a JSON array, of JSON Lines, or of one JSON value alone.

    A line that is no JSON becomes :class:`NoJson`.  Raises :class:`InvalidRequestError` for an array that is broken.
    """
    begin = text.lstrip()[:1]
    if begin in ("[", "{"):
        whole = _read(text)
        if isinstance(whole, list) and not _is_messages(whole):
            return Entries("entry", tuple(enumerate(whole, 1)))
        several = "\n" in text.strip()
        if not isinstance(whole, NoJson) and several:
            return Entries("entry", ((1, whole),))
        if begin == "[" and several and isinstance(_read(_lines(text, 1)[0][1]), NoJson):
            assert isinstance(whole, NoJson)
            raise InvalidRequestError(f"the array is no JSON: {whole.reason}")
    return Entries("line", tuple((number, _read(line)) for number, line in _lines(text)))


def _lines(text: str, most: int | None = None) -> list[tuple[int, str]]:
    # Not splitlines(): a JSON string may hold characters that it takes for the end of a line.
    found: list[tuple[int, str]] = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            found.append((number, line))
            if len(found) == most:
                break
    return found


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f" (line {error.lineno})" if "\n" in text.strip() else ""
        return NoJson(f"{error.msg}{where}")
    except (ValueError, RecursionError) as error:
        return NoJson(str(error))


def chat_of(value: Any) -> list[Any]:
    """The messages of a value in any of the shapes, with ``role`` and ``content``; what is in them is not checked.

    Raises :class:`InvalidRequestError` that says what was found instead.
    """
    if isinstance(value, NoJson):
        raise InvalidRequestError(f"no JSON: {value.reason}")
    if isinstance(value, list) and _is_messages(value):
        return value
    if not isinstance(value, dict):
        raise InvalidRequestError(f"no chat, but {_described(value)}")
    # What exports fill up with null is not there.
    entry = {key: item for key, item in value.items() if item is not None}
    if "messages" in entry:
        _check_keys(entry, {"messages"}, "a chat has messages")
        return _list(entry, "messages")
    if "conversations" in entry:
        _check_keys(entry, {"conversations", "system"}, "a chat of ShareGPT has conversations and system")
        turns = [_turn(turn, number) for number, turn in enumerate(_list(entry, "conversations"), 1)]
        return [*_system(entry), *turns]
    if "instruction" in entry and "output" in entry:
        # The usual export has the prompt once more, written out in a template of its time, as "text".
        entry.pop("text", None)
        known = {"instruction", "input", "output", "system"}
        _check_keys(entry, known, "an entry of Alpaca has instruction, input, output and system")
        asked = [_text(entry, "instruction"), _text(entry, "input") if "input" in entry else ""]
        question = "\n\n".join(part for part in asked if part.strip())
        return [*_system(entry), _message("user", question), _message("assistant", _text(entry, "output"))]
    if "prompt" in entry and "completion" in entry:
        _check_keys(entry, {"prompt", "completion", "system"}, "a pair has prompt, completion and system")
        if isinstance(entry["prompt"], list) or isinstance(entry["completion"], list):
            return [*_system(entry), *_list(entry, "prompt"), *_list(entry, "completion")]
        asked_text, answer = _text(entry, "prompt"), _text(entry, "completion")
        return [*_system(entry), _message("user", asked_text), _message("assistant", answer)]
    raise InvalidRequestError(f"no chat, but {_described(value)}")


def _is_messages(value: Sequence[Any]) -> bool:
    return bool(value) and all(isinstance(item, dict) and "role" in item for item in value)


def _check_keys(entry: Mapping[str, Any], known: set[str], what: str) -> None:
    others = sorted(entry.keys() - known - _ABOUT)
    if others:
        raise InvalidRequestError(f"{what}, and nothing else such as {others[0]!r}")


def _list(entry: Mapping[str, Any], key: str) -> list[Any]:
    if not isinstance(entry[key], list):
        raise InvalidRequestError(f"{key} must be a list")
    found: list[Any] = entry[key]
    return found


def _text(entry: Mapping[str, Any], key: str) -> str:
    if not isinstance(entry[key], str):
        raise InvalidRequestError(f"{key} must be text, not {_described(entry[key])}")
    found: str = entry[key]
    return found


def _system(entry: Mapping[str, Any]) -> list[dict[str, str]]:
    text = _text(entry, "system") if "system" in entry else ""
    return [_message("system", text)] if text else []


def _turn(turn: Any, number: int) -> Any:
    if not isinstance(turn, dict) or "from" not in turn:
        return turn  # with a role and content, or wrong in a way that is told with the messages
    others = sorted(turn.keys() - {"from", "value"})
    if others:
        raise InvalidRequestError(f"turn {number} has from and value, and nothing else such as {others[0]!r}")
    if "value" not in turn:
        raise InvalidRequestError(f"turn {number} has no value")
    role = _ROLES.get(str(turn["from"]).strip().lower())
    if role is None:
        raise InvalidRequestError(f"turn {number} is from {turn['from']!r}, which is none of: {', '.join(_ROLES)}")
    return {"role": role, "content": turn["value"]}


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _described(value: Any) -> str:
    if isinstance(value, dict):
        keys = ", ".join(repr(key) for key in list(value)[:_KEYS_SHOWN])
        more = ", ..." if len(value) > _KEYS_SHOWN else ""
        return f"an object with the keys {keys}{more}" if value else "an object without a key"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str):
        return "a string"
    return "null" if value is None else "true or false" if isinstance(value, bool) else "a number"
