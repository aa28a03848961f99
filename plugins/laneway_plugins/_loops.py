"""Answers that do not come to an end: how long one may get, and whether it repeats itself.  Pure."""

from __future__ import annotations

from typing import final

TOKENS_FOR_EACH = 16
"""Tokens of a translation for each token of its source.

Two texts of one meaning differ that much, in languages that a tokenizer knows well and hardly at all: Petrov et al.,
Language Model Tokenizers Introduce Unfairness Between Languages (2023), find up to fifteen times.
"""
LEAST_TOKENS = 64
"""And so many on top: an abbreviation or a proverb may take a sentence."""

LEAST_REPEATS = 4
LEAST_CHARACTERS = 48
"""An end that is one unit, so many times and so many characters in all, is a loop."""
STEP = 32
"""Characters after which is looked again.  Fixed places, so that the result does not depend on how the text came."""
_WINDOW = 2048
"""Characters that are looked at: a loop of a longer unit than a quarter of it ends by its length."""
_PROBE = 6
_LOOKED_AT = 4096
_LONGEST_UNIT = 64


def longest_translation(tokens: int) -> int:
    """How many tokens the translation of a text of ``tokens`` may have."""
    return LEAST_TOKENS + TOKENS_FOR_EACH * tokens


def repeats_at_end(text: str) -> int:
    """How often one unit stands at the end of ``text``, if that is a loop by length and number; else 0."""
    window = text[-_WINDOW:]
    # The last characters of a loop occur as often as its unit.  Counting them is quick, and rules out most texts.
    if window.count(window[-_PROBE:]) < LEAST_REPEATS:
        return 0
    backward = window[::-1]
    most = 0
    for unit, same in enumerate(_common_beginnings(backward)):
        if unit and same + unit >= max(LEAST_CHARACTERS, LEAST_REPEATS * unit):
            most = max(most, (same + unit) // unit)
    return most


def _common_beginnings(text: str) -> list[int]:
    """At each place, how many characters from there on are those that the text begins with (the Z function)."""
    found = [0] * len(text)
    left = right = 0
    for place in range(1, len(text)):
        same = min(right - place, found[place - left]) if place < right else 0
        while place + same < len(text) and text[same] == text[place + same]:
            same += 1
        if place + same > right:
            left, right = place, place + same
        found[place] = same
    return found


def most_repeats(text: str) -> int:
    """How often a unit of up to 64 characters stands in a row, at the most, in the first 4,096 of ``text``."""
    text = text[:_LOOKED_AT]
    most = 1
    for unit in range(1, min(_LONGEST_UNIT, len(text) // 2) + 1):
        run = 0
        for place in range(unit, len(text)):
            run = run + 1 if text[place] == text[place - unit] else 0
            if run >= unit * most:
                most = run // unit + 1
    return most


@final
class LoopWatch:
    """A growing translation, up to where it begins to go round in circles.

    What the source itself repeats, a row of dots or laughter, may be repeated twice as often.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._allowed: int | None = None
        self._text = ""
        self._until_look = STEP
        self.looping = False
        """Whether a loop was found.  The text ends there."""

    def push(self, text: str) -> str:
        """Take more of the text.  Returns it, as far as there was no loop."""
        kept = []
        while text and not self.looping:
            some, text = text[: self._until_look], text[self._until_look :]
            self._text = (self._text + some)[-_WINDOW:]
            self._until_look -= len(some)
            kept.append(some)
            if not self._until_look:
                self._until_look = STEP
                self.looping = self._is_loop()
        return "".join(kept)

    def _is_loop(self) -> bool:
        repeats = repeats_at_end(self._text)
        if not repeats:
            return False
        if self._allowed is None:
            repeated = most_repeats(self._source)
            self._allowed = 2 * repeated if repeated >= LEAST_REPEATS else 0
        return repeats > self._allowed
