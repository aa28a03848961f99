"""Tokens' bytes to text: characters and stop strings that lie across token borders (rule S1).

Pure: no I/O, no clock, no Trio.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from laneway.decoder import Tokenizer

__all__ = ["TextAssembler", "control_tokens"]

LONGEST_CONTROL_TEXT = 256
"""Characters.  The texts of control tokens are shorter, so longer stop strings are not tokenised to find out."""

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


def control_tokens(stop: Iterable[str], tokenizer: Tokenizer) -> frozenset[int]:
    """The control tokens whose whole text is one of the ``stop`` strings.

    Such a token has no bytes, so its text never comes up in an answer.  A stop string that contains more than the text
    of one control token names no token, because the rest of it cannot be matched with text.
    """
    found = set()
    for string in stop:
        if len(string) > LONGEST_CONTROL_TEXT:
            continue
        tokens = tokenizer.tokenize(string, bos=False, special=True)
        if len(tokens) != 1 or tokenizer.piece(tokens[0]):
            continue
        # A text that is not in the vocabulary may be the unknown token, which has no bytes either.
        if tokenizer.tokenize(string, bos=False, special=False) != tokens:
            found.add(tokens[0])
    return frozenset(found)


@final
class TextAssembler:
    """Turns the pieces of one answer into text that never has to be taken back.

    The text is that of all bytes at once, ``bytes.decode("utf-8", "replace")``, up to the first place where one of the
    ``stop`` strings is complete; of several that are complete there the longest counts, and nothing of it is given
    out.  That place is found character by character, so it does not depend on how the tokens cut the text.

    Raises :class:`ValueError` for an empty stop string, which would be complete before anything was said.
    """

    __slots__ = ("_automaton", "_decode", "_held", "_state", "stopped")

    def __init__(self, stop: Iterable[str] = ()) -> None:
        words = tuple(stop)
        self.stopped: str | None = None
        """The stop string that was found."""
        self._decode = _Utf8Decoder("replace").decode
        self._automaton = _StopAutomaton(words) if words else None
        self._state = 0
        self._held = ""  # the end of the text that may yet become a stop string

    @property
    def held(self) -> str:
        """What is held back because it may yet become a stop string, in whole characters."""
        return self._held

    def push(self, piece: bytes) -> str:
        """Take the bytes of one more token and return the text that is safe now, maybe none.

        Bytes that come after a stop string are ignored.
        """
        return self._release(self._decode(piece))

    def finish(self) -> str:
        """Return what was held back; half a character at the end becomes one U+FFFD.

        That last character may complete a stop string like any other.  Nothing may be pushed afterwards; finishing
        again returns nothing.
        """
        text = self._release(self._decode(b"", True)) + self._held
        self._held = ""
        return text

    def _release(self, new: str) -> str:
        automaton = self._automaton
        if automaton is None:
            return new
        if self.stopped is not None:
            return ""
        self._state, used = automaton.scan(self._state, new)
        self.stopped = automaton.words[self._state]
        keep = automaton.depths[self._state] if self.stopped is None else len(self.stopped)
        text = self._held + new[:used]
        safe = len(text) - keep
        self._held = text[safe:] if self.stopped is None else ""
        return text[:safe]


@final
class _StopAutomaton:
    """Finds the first of several words in a text that comes bit by bit (Aho and Corasick, 1975).

    A state is the longest end of the text so far that begins one of the words.  Its depth, that end's length, is thus
    also what must be held back.  Time is linear in the text, however long the words are and however they overlap.
    States are numbers in parallel lists: objects that point at one another would be garbage in cycles.
    """

    __slots__ = ("depths", "fallbacks", "steps", "words")

    def __init__(self, words: Iterable[str]) -> None:
        self.steps: list[dict[str, int]] = [{}]  # state -> {next character: state}
        self.depths = [0]
        self.fallbacks = [0]  # state -> the next shorter end that begins a word
        self.words: list[str | None] = [None]  # state -> the longest word that ends here
        for word in words:
            self._insert(word)
        self._link()

    def scan(self, state: int, text: str) -> tuple[int, int]:
        """The state after ``text``, or after its beginning that completes a word, and the characters read."""
        steps, fallbacks, words = self.steps, self.fallbacks, self.words
        for used, char in enumerate(text, 1):
            while (following := steps[state].get(char)) is None and state:
                state = fallbacks[state]
            state = following or 0
            if words[state] is not None:
                return state, used
        return state, len(text)

    def _insert(self, word: str) -> None:
        if not word:
            raise ValueError("a stop string must not be empty")
        state = 0
        for depth, char in enumerate(word, 1):
            following = self.steps[state].get(char)
            if following is None:
                following = self.steps[state][char] = len(self.steps)
                self.steps.append({})
                self.depths.append(depth)
                self.fallbacks.append(0)
                self.words.append(None)
            state = following
        self.words[state] = word

    def _link(self) -> None:
        # Breadth first: a fallback is shorter, so it is complete before it is looked at.
        queue = deque(self.steps[0].values())
        while queue:
            state = queue.popleft()
            if self.words[state] is None:
                self.words[state] = self.words[self.fallbacks[state]]
            for char, following in self.steps[state].items():
                shorter = self.fallbacks[state]
                while (target := self.steps[shorter].get(char)) is None and shorter:
                    shorter = self.fallbacks[shorter]
                self.fallbacks[following] = target or 0
                queue.append(following)
