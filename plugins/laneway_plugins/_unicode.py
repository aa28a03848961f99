"""Text that is no text: lone surrogates, which come of bytes that were not UTF-8.  Pure."""

from __future__ import annotations


def surrogate_in(text: str) -> str | None:
    """What is wrong with ``text`` if no encoding has it; None for a text.

    :returns: such as ``"character 3 is a lone surrogate (U+DCFF): ..."``, characters being counted from 1
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return (
            f"character {error.start + 1} is a lone surrogate (U+{ord(text[error.start]):04X}), which no text has; "
            "it was read from bytes that are not UTF-8"
        )
    return None
