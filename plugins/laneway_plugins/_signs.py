"""Signs at the edges of a sentence that no translation model is shown, and scripts that put no spaces.  Pure.

A model was trained on sentences.  It drops list marks and emoji, which are often no part of its vocabulary, so they are
put aside and come back where they stood.  Quotes, brackets and punctuation stay in the sentence: each language has its
own, and the model knows them.
"""

from __future__ import annotations

import re
import unicodedata

_LIST_MARK = re.compile(
    r"""(?:
        [-*+\u2010-\u2015\u2022\u2023\u2043\u2219\u25aa-\u25ab\u25cf\u25cb\u25e6\u00b7\u30fb](?=\s)  # bullets
        | \#{1,6}(?=\s)                                                                                # headings
        | >+(?=\s)                                                                                     # quoted lines
        | \[[ xX]\](?=\s)                                                                              # check boxes
        | (?:\(\d{1,3}\)|\d{1,3}[.)]|\(?[a-zA-Z]\))(?=\s)                                              # numbering
        | [\uff08(]?\d{1,3}[\uff09\uff0e\u3001]                                                        # in full width
        | [\u2460-\u24ff\u2776-\u2793\u3220-\u3229\u3251-\u325f\u32b1-\u32bf]                          # in circles
        | [\u30fb\u2022\u25cf\u25cb\u25a0\u25a1\u25c6\u25c7\u203b]                                     # with no space
    )""",
    re.VERBOSE,
)
_KEYCAP = re.compile(r"[0-9#*]\ufe0f?\u20e3")
_JOINED = frozenset("\u200d\ufe0e\ufe0f\u20e3")
"""What makes one sign of several."""
_ENDING = re.compile(r"[.!?\u2026\u3002\uff01\uff1f]*$")

_UNSPACED = re.compile(
    "["
    "\u0e00-\u0eff"  # Thai, Lao
    "\u0f00-\u0fff"  # Tibetan
    "\u1000-\u109f"  # Burmese
    "\u1780-\u17ff"  # Khmer
    "\u2e80-\u303f\u3040-\u30ff\u3100-\u312f\u31a0-\u31ff\u3200-\u4dbf\u4e00-\ua4cf"  # Chinese, Japanese, Yi
    "\uf900-\ufaff\ufe30-\ufe4f\uff00-\uffef"  # and their compatibility and full-width forms
    "\U0001b000-\U0001b16f\U00020000-\U0003ffff"
    "]"
)
_CHINESE = re.compile(
    "[\u2e80-\u303f\u3040-\u30ff\u3100-\u312f\u31a0-\u31ff\u3200-\u4dbf\u4e00-\u9fff\uf900-\ufaff\ufe30-\ufe4f\uff00-\uffef"
    "\U0001b000-\U0001b16f\U00020000-\U0003ffff]"
)


def has_letters(text: str) -> bool:
    """Whether there is anything to translate: digits, signs and emoji say the same in every language."""
    return any(character.isalpha() for character in text)


def peel(sentence: str, *, begins_line: bool) -> tuple[str, str, str]:
    """``sentence`` cut into signs before it, what is translated, and signs behind it; joined, they are the sentence.

    Signs are emoji and other symbols, invisible marks of direction, and the white space among them.  ``begins_line``:
    list marks and numbering are looked for as well.
    """
    start = 0
    while start < len(sentence):
        mark = _LIST_MARK.match(sentence, start) if begins_line else None
        step = mark.end() if mark is not None else _sign(sentence, start)
        if step == start:
            break
        start = step
        # A space after a sign belongs to it: without the space the mark would be another sign.
        while start < len(sentence) and sentence[start].isspace():
            start += 1
    end = _before_signs(sentence, start)
    return sentence[:start], sentence[start:end], sentence[end:]


def _before_signs(sentence: str, start: int) -> int:
    """Where the signs at the end begin, and the full stop behind them."""
    ending = _ENDING.search(sentence)
    assert ending is not None
    end = ending.start()
    while end > start and (sentence[end - 1].isspace() or _is_sign(sentence[end - 1])):
        end -= 1
        if sentence[end] == "\u20e3" and end > start:
            # The digit of a keycap.
            end -= 1 + (sentence[end - 1] == "\ufe0f" and end - 1 > start)
    if not any(map(_is_sign, sentence[end : ending.start()])):
        return len(sentence)
    return end


def _sign(text: str, place: int) -> int:
    keycap = _KEYCAP.match(text, place)
    if keycap is not None:
        return keycap.end()
    return place + 1 if _is_sign(text[place]) else place


def _is_sign(character: str) -> bool:
    if character in _JOINED or "\u2190" <= character <= "\u21ff" or "\U0001f3fb" <= character <= "\U0001f3ff":
        return True
    return unicodedata.category(character) in ("So", "Cf", "Co")


def is_unspaced(character: str) -> bool:
    """Whether the character is of a script that puts no spaces between words, or of its punctuation."""
    return _UNSPACED.match(character) is not None


def is_chinese(character: str) -> bool:
    """Whether it is of Chinese or Japanese writing: there no spaces stand between sentences either."""
    return _CHINESE.match(character) is not None
