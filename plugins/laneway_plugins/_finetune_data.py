"""What a model is trained on: values of a file to chats, chats to texts with the assistant's part marked, tokens to
windows.  Pure.

Where the assistant's words are in a rendered chat is found by rendering the chat twice for each of its answers: up to
where the answer begins, which is what the model is shown when it is to answer, and with the answer.  The one must begin
with the other, and what is between them is what the model is to write.
"""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs

from laneway import InvalidRequestError
from laneway_plugins._finetune_formats import SHAPES, chat_of, read_entries
from laneway_plugins._messages import Message, to_messages
from laneway_plugins._templates import Rendered

SHOWN_FAULTS = 5
"""How many wrong lines an error tells of."""

Render = Callable[[Sequence[Message], bool], Rendered]
"""A chat's text; the second argument: up to where the assistant's answer begins."""


@attrs.frozen
class Example:
    """One sequence to learn.  ``mask`` has a byte for each token, 1 where the model is to predict this very token."""

    tokens: array[int] = attrs.field(repr=False)
    mask: bytes = attrs.field(repr=False)
    line: int | None = None

    @property
    def counted(self) -> int:
        """How many tokens the loss is of."""
        return self.mask.count(1)

    def to_json(self) -> str:
        """A line of the file that the trainer reads."""
        return json.dumps({"tokens": self.tokens.tolist(), "mask": list(self.mask)}, separators=(",", ":"))


@attrs.frozen
class Loss:
    """One point of the curve."""

    step: int
    loss: float
    validation: bool = False


@attrs.frozen
class Chat:
    """A chat, and the line that it stands on, or the number of its entry in an array."""

    line: int
    messages: tuple[Message, ...]
    unit: str = "line"


@attrs.frozen
class Marked:
    """A rendered chat with the places, in characters, that the assistant has written."""

    rendered: Rendered
    spans: tuple[tuple[int, int], ...]


class Faults:
    """What is wrong with which line or entry of a file."""

    def __init__(self, name: str, lines: int, unit: str = "line") -> None:
        self._name = name
        self._lines = lines
        self._unit = unit
        self._units = "entries" if unit == "entry" else f"{unit}s"
        self._found: list[str] = []

    def add(self, line: int, what: str) -> None:
        """Note a wrong one."""
        self._found.append(f"{self._unit} {line}: {what}")

    def check(self, advice: str = "") -> None:
        """Raise :class:`InvalidRequestError`, with ``advice`` at its end, if there was one."""
        if self._found:
            count = len(self._found)
            some = "; ".join(self._found[:SHOWN_FAULTS])
            more = f"; and {count - SHOWN_FAULTS} more {self._units}" if count > SHOWN_FAULTS else ""
            of = f" ({count} of {self._lines} {self._units} are wrong)" if count > 1 else ""
            raise InvalidRequestError(f"{self._name}: {some}{more}{of}" + (f"; {advice}" if advice else ""), "dataset")


def decode(data: bytes, name: str) -> str:
    """The text of a file.  Raises :class:`InvalidRequestError`, with the line, where it is not UTF-8."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InvalidRequestError(
            f"{name}: line {line}: not UTF-8 (the byte {data[error.start]:#04x} at {error.start})", "dataset"
        ) from None


def parse_chats(text: str, name: str) -> list[Chat]:
    """The chats of a file, in any form of :mod:`laneway_plugins._finetune_formats`.

    Blank lines are passed over, and so is what comes after a chat's last answer.  Raises :class:`InvalidRequestError`
    that names the wrong lines, or the wrong entries of an array.
    """
    try:
        found = read_entries(text)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{name}: {error.reason}; {SHAPES}", "dataset") from None
    faults = Faults(name, len(found.values), found.unit)
    chats = []
    for number, value in found.values:
        try:
            chats.append(Chat(number, _parse_chat(value), found.unit))
        except InvalidRequestError as error:
            faults.add(number, error.reason)
    faults.check("" if chats else SHAPES)
    if not chats:
        raise InvalidRequestError(f"{name}: there is no chat in it", "dataset")
    return chats


def _parse_chat(value: Any) -> tuple[Message, ...]:
    messages = to_messages(chat_of(value))
    assert not isinstance(messages, str)
    answers = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if not answers:
        raise InvalidRequestError("there is no message of the assistant to learn from")
    if answers[0] == 0:
        raise InvalidRequestError("the first message is the assistant's: it must answer something")
    return messages[: answers[-1] + 1]


def mark(render: Render, messages: Sequence[Message]) -> list[Marked]:
    """The texts to learn from one chat.

    One text with all answers marked; or, where the template writes earlier turns in another way when later ones follow,
    a text for each answer, just as the model would have been asked for it.

    Raises :class:`InvalidRequestError` if the template does not let an answer be told from what is around it.
    """
    whole = render(messages, False)
    answers = []
    in_one = True
    behind = 0
    for index, message in enumerate(messages):
        if message.role == "assistant":
            before = render(messages[:index], True)
            after = whole if index == len(messages) - 1 else render(messages[: index + 1], False)
            if not after.text.startswith(before.text) or len(after.text) == len(before.text):
                raise InvalidRequestError(
                    f"the model's chat template writes message {index + 1} in such a way that the assistant's words "
                    "cannot be told from what is before them: a chat with the answer does not begin like the one that "
                    "asks for it; train on plain text in the form that the model wants",
                )
            in_one = in_one and whole.text.startswith(after.text) and behind <= len(before.text)
            behind = len(after.text)
            answers.append((after, (len(before.text), len(after.text))))
    if in_one:
        return [Marked(whole, tuple(span for _, span in answers))]
    return [Marked(rendered, (span,)) for rendered, span in answers]


def pieces(marked: Marked) -> list[tuple[Rendered, bool]]:
    """The text cut at the borders of its spans, each piece with whether it is the assistant's."""
    cut: list[tuple[Rendered, bool]] = []
    at = 0
    for start, end in marked.spans:
        if start > at:
            cut.append((marked.rendered.cut(at, start), False))
        cut.append((marked.rendered.cut(start, end), True))
        at = end
    if at < len(marked.rendered.text):
        cut.append((marked.rendered.cut(at, len(marked.rendered.text)), False))
    return cut


Parts = Sequence[tuple[Sequence[int], bool]]
"""Tokens of a chat, piece by piece, each with whether it is the assistant's."""


def ending_at(tokens: Sequence[int], ends: frozenset[int], is_blank: Callable[[int], bool]) -> list[int]:
    """The first end token of ``tokens`` and what is before it, if that is white space; else nothing."""
    for index, token in enumerate(tokens):
        if token in ends:
            return list(tokens[: index + 1])
        if not is_blank(token):
            break
    return []


def close_answers(
    parts: Parts, ends: frozenset[int], closing: Sequence[int], is_blank: Callable[[int], bool]
) -> tuple[list[tuple[list[int], bool]], int]:
    """Give each answer that has no end token the one that follows it.  Returns the parts, and how many have none.

    In some templates nothing but the marker of the next turn ends an answer.  There the model has to learn to write
    that marker.  ``closing`` is what the template would write behind a last answer, up to its end token.
    """
    closed = [(list(tokens), answer) for tokens, answer in parts if tokens]
    unclosed = 0
    for index, (tokens, answer) in enumerate(closed):
        if not answer or not ends.isdisjoint(tokens):
            continue
        if index == len(closed) - 1:
            ending = list(closing)
        else:
            following, is_answer = closed[index + 1]
            ending = [] if is_answer else ending_at(following, ends, is_blank)
            del following[: len(ending)]
        tokens += ending
        unclosed += not ending
    return closed, unclosed


def masked(parts: Iterable[tuple[Sequence[int], bool]], ends: frozenset[int]) -> tuple[array[int], bytes]:
    """Tokens and mask of parts that are the assistant's or not.

    Nothing after an answer's end token is learned, such as the line break that many templates put there: no answer
    gets that far.  ``ends`` are the model's end tokens.
    """
    tokens = array("i")
    mask = bytearray()
    for part, answer in parts:
        counted = 0
        if answer:
            last = max((index for index, token in enumerate(part) if token in ends), default=len(part) - 1)
            counted = last + 1
        tokens.extend(part)
        mask += b"\1" * counted + bytes(len(part) - counted)
    # Nothing comes before the first token that it could be predicted from.
    mask[:1] = b"\0" * min(1, len(mask))
    return tokens, bytes(mask)


def windows(tokens: Sequence[int], length: int) -> list[Example]:
    """A long text as sequences of ``length`` tokens at most.

    Each begins with the last token of the one before, so that every token but the first is learned once.
    """
    examples = []
    for start in range(0, len(tokens) - 1, length - 1):
        part = array("i", tokens[start : start + length])
        examples.append(Example(part, b"\0" + b"\1" * (len(part) - 1)))
    return examples


def split(examples: Sequence[Example], share: float, seed: int) -> tuple[list[Example], list[Example]]:
    """Examples to learn and examples to measure with, drawn by ``seed``, both in their order.

    Raises :class:`InvalidRequestError` if there are too few for both.
    """
    count = max(1, round(len(examples) * share))
    if count >= len(examples):
        raise InvalidRequestError(
            f"{share:g} of {len(examples)} examples leaves none to learn from or none to measure with; "
            "give more data, or a file of its own for the validation",
            "validation",
        )
    chosen = set(random.Random(seed).sample(range(len(examples)), count))
    return (
        [example for index, example in enumerate(examples) if index not in chosen],
        [example for index, example in enumerate(examples) if index in chosen],
    )
