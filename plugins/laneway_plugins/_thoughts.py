"""What a model thinks before it answers: where that begins and ends, so that only the answer is shown.  Pure."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import final

THOUGHTS: Mapping[str, str] = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<reasoning>": "</reasoning>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "◁think▷": "◁/think▷",
    "<unused94>": "<unused95>",
    # Channels: the answer begins where the last one does.
    "<|channel>thought": "<channel|>",
    "<|channel|>": "final<|message|>",
}
"""What begins a thought, by family of models, and what ends it."""
MARKERS = (
    *(marker for pair in THOUGHTS.items() for marker in pair if "channel" not in marker and "message" not in marker),
    *("<|channel>", "<channel|>", "<|channel|>", "<|message|>"),
)
"""Texts that may be one control token each.  Such a token is no part of an answer's text."""
THOUGHT_TOKENS = 1024
"""Tokens that a thought may take, beside those of the answer, where a model's template knows of thoughts."""


def thinks(template: str | None) -> bool:
    """Whether a chat template has a marker of thoughts."""
    return template is not None and any(marker in template for marker in MARKERS)


def opened_by(prompt: str) -> str | None:
    """What ends the thought that ``prompt`` has opened at its end; None if there is none."""
    end = prompt.rstrip()
    return next((close for begin, close in THOUGHTS.items() if end.endswith(begin)), None)


@final
class WithoutThought:
    """A growing answer without the thoughts at its beginning.

    What :meth:`push` and :meth:`end` return, joined, does not depend on where the answer was cut.
    """

    def __init__(self, close: str | None = None) -> None:
        """:param close: what ends the thought that the prompt has opened"""
        self._close = close
        self._held = ""
        self._answering = False

    @property
    def thinking(self) -> bool:
        """Whether a thought has begun and not ended."""
        return self._close is not None

    def push(self, text: str) -> str:
        """What of the answer can be shown now."""
        if self._answering:
            return text
        self._held += text
        while True:
            if self._close is not None:
                _, found, behind = self._held.partition(self._close)
                if not found:
                    # All but what may be the beginning of the end.
                    self._held = self._held[-(len(self._close) - 1) :]
                    return ""
                self._held, self._close = behind, None
            begun = self._held.lstrip()
            opening = next((opening for opening in THOUGHTS if begun.startswith(opening)), None)
            if opening is not None:
                self._held, self._close = begun[len(opening) :], THOUGHTS[opening]
                continue
            if not begun or any(opening.startswith(begun) for opening in THOUGHTS):
                return ""
            self._answering = True
            text, self._held = self._held, ""
            return text

    def end(self) -> str:
        """What was held back, and is no thought after all."""
        text = "" if self._answering or self.thinking else self._held
        self._answering, self._held = True, ""
        return text


@final
class SpelledOut:
    """A growing answer with some control tokens written out, which its text leaves out."""

    def __init__(self, piece: Callable[[int], bytes], names: Mapping[int, str]) -> None:
        """:param piece: the bytes of a token in an answer
        :param names: control tokens, and what is written for them
        """
        self._piece = piece
        self._names = names
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._seen = 0
        self._made = 0
        self._shown = 0
        self._places: list[tuple[int, str]] = []

    def push(self, text: str, tokens: Sequence[int]) -> str:
        """``text``, which is next in the answer, with names; ``tokens`` are all so far."""
        for token in tokens[self._seen :]:
            name = self._names.get(token)
            if name is None:
                self._made += len(self._decode(self._piece(token)))
            else:
                self._places.append((self._made, name))
        self._seen = len(tokens)
        out = []
        start = self._shown
        self._shown += len(text)
        while self._places and self._places[0][0] <= self._shown:
            place, name = self._places.pop(0)
            cut = max(0, place - start)
            out += [text[:cut], name]
            text, start = text[cut:], start + cut
        return "".join([*out, text])
