"""What one rendering of a chat template may use: steps of work, and the size of one value.  Pure.

A step is about a microsecond of work on a slow machine: one round, one call, one entry of a list that is looked at, or
:data:`CHARACTERS_A_STEP` characters that one call of C code passes over.  Work is charged by the size of its values
before it is done.  Python code can be stopped between two charges; one call of C code cannot, and it holds the
interpreter, so one value is bounded, too.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from typing import Any, final

import attrs
import jinja2

from laneway_plugins._written import spans_of

MAX_STEPS = 500_000
"""Steps of one rendering, beside those that the chat adds: less than a second of work."""
MAX_STEPS_AT_ONCE = 5_000
"""Steps of a rendering on the event loop: less than 10 ms, and enough for chats of some dozen messages."""
STEPS_A_MESSAGE = 20_000
"""What each message adds: a template may look at all messages for each of them."""
STEPS_A_CHARACTER = 2
"""What each character of the chat adds."""
CHARACTERS_A_STEP = 64

MAX_VALUE = 1 << 20
"""Characters of one text, beside as many as the chat has: a message is one text."""
MAX_ENTRIES = 1 << 17
"""Entries of one list or mapping, beside those that the chat adds: 1 MiB of pointers."""
MAX_TEXT = 4_000_000
"""Characters of the whole prompt, or four times those of the chat if that is more.  It is not one value: it is put
together once, at the end."""
MAX_BITS = 1000
"""Of a whole number."""
MAX_NUMBER = 100_000
"""The largest number that may be given to a filter or to what makes text longer."""
MAX_DEPTH = 64
"""Lists and mappings in each other, where all of a value is looked at."""
MAX_COSTLY = 8192
"""Characters and entries that a filter may get whose work can grow with their square."""


class OverBudget(jinja2.TemplateError):
    """The template has used up what it may use, or would make something too large."""


class OutOfSteps(OverBudget):
    """It has used up its steps.  With more of them it might have ended."""


@attrs.frozen
class Limits:
    """How much one rendering may use."""

    steps: int
    characters: int = MAX_VALUE
    entries: int = MAX_ENTRIES
    text: int = MAX_TEXT

    @classmethod
    def of_chat(cls, messages: int, characters: int, *, at_once: bool = False) -> Limits:
        """The limits for a chat of so many messages and characters; ``at_once``: on the event loop."""
        return cls(
            MAX_STEPS_AT_ONCE if at_once else MAX_STEPS + messages * STEPS_A_MESSAGE + characters * STEPS_A_CHARACTER,
            MAX_VALUE + characters,
            MAX_ENTRIES + messages + characters // 8,
            max(MAX_TEXT, 4 * characters),
        )


@attrs.frozen
class Measure:
    """How large a value is.

    ``characters`` is about the length of the value as a text.  Escapes (``\\n``, ``\\u0001``) are counted as the one
    character that they stand for, so the text is at most twelve times as long.  ``entries`` are those of all lists and
    mappings in it, ``depth`` is how many of them stand in each other.
    """

    characters: int
    entries: int = 0
    depth: int = 0


_PLAIN = Measure(MAX_BITS // 3 + 2)


@final
class Budget:
    """The rest of one rendering's limits.  Only :meth:`stop` may be called from another thread."""

    __slots__ = ("_left", "_stopped", "limits")

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._left = limits.steps
        self._stopped = False

    @property
    def spent(self) -> int:
        """The steps charged so far."""
        return self.limits.steps - self._left

    def stop(self) -> None:
        """End the rendering at its next step."""
        self._stopped = True

    def spend(self, steps: int = 1) -> None:
        """Charge ``steps``.  Raises :class:`OutOfSteps`."""
        self._left -= steps
        if self._left < 0 or self._stopped:
            self._left = -1  # what was too much has not been done
            raise OutOfSteps(f"it ran for more than {self.limits.steps:,} steps of work")

    def pass_over(self, characters: int) -> None:
        """Charge one call of C code that passes over so many characters."""
        self.spend(1 + characters // CHARACTERS_A_STEP)

    def allow(self, characters: int) -> None:
        """Raise :class:`OverBudget` if that is too many for one text."""
        if characters > self.limits.characters:
            raise OverBudget(f"it makes a text of more than {self.limits.characters:,} characters")

    def allow_entries(self, count: int) -> None:
        """Raise :class:`OverBudget` if that is too many for one list."""
        if count > self.limits.entries:
            raise OverBudget(f"it makes a list of more than {self.limits.entries:,} entries")

    def allow_bits(self, bits: int) -> None:
        """Raise :class:`OverBudget` if that is too many for one number."""
        if bits > MAX_BITS:
            raise OverBudget(f"it computes with numbers of more than {MAX_BITS} bits")

    def each(self, items: Iterable[Any], steps: int = 1) -> Iterator[Any]:
        """The items, charged one by one with so many steps each."""
        for item in items:
            self.spend(steps)
            yield item

    def collect(self, items: Iterable[Any]) -> list[Any]:
        """The items in a list."""
        out: list[Any] = []
        for item in items:
            self.spend()
            out.append(item)
            self.allow_entries(len(out))
        return out

    def sized(self, value: Any) -> Any:
        """``value``, which has just been made, if it is not too large."""
        if isinstance(value, str):
            self.pass_over(len(value))
            self.allow(len(value))
        elif isinstance(value, (list, tuple, dict)):
            self.spend(1 + len(value) // CHARACTERS_A_STEP)
            self.allow_entries(len(value))
        elif isinstance(value, int):
            self.allow_bits(value.bit_length())
        return value

    def measure(self, value: Any) -> Measure:
        """How large a value is with all that is in it.

        Each entry is charged before it is looked at, as often as it occurs: lists may share entries, and be small in
        memory and endless as a text.
        """
        if isinstance(value, str):
            self.pass_over(len(value))
            self.spend(len(spans_of(value)))
            return Measure(len(value))
        if not is_container(value):
            self.spend()
            return _PLAIN
        characters = entries = depth = 0
        open_ones = [self._enter(value)]
        while open_ones:
            depth = max(depth, len(open_ones))
            if depth > MAX_DEPTH:
                raise OverBudget(f"it works on lists or mappings that are nested more than {MAX_DEPTH} deep")
            for item in open_ones[-1]:
                self.spend()
                entries += 1
                characters += 4
                if is_container(item):
                    open_ones.append(self._enter(item))
                    break
                if isinstance(item, str):
                    self.pass_over(len(item))
                    characters += len(item)
                elif isinstance(item, int):
                    characters += item.bit_length() // 3 + 1
                else:
                    characters += 16
            else:
                open_ones.pop()
        return Measure(characters + 16, entries, depth)

    def _enter(self, value: Any) -> Iterator[Any]:
        self.spend()
        if isinstance(value, Mapping):
            return (part for pair in value.items() for part in pair)
        return iter(value)


def is_container(value: object) -> bool:
    """Whether a value has others in it, which are worked on when it is."""
    return isinstance(value, (list, tuple, dict, set, frozenset, KeysView, ValuesView, ItemsView))
