"""Text for a terminal, without anything that the terminal would obey.

What a model says, and what a file says of itself, may hold escape sequences.  A terminal obeys them: one writes the
clipboard, another one renames the window, a third overwrites lines that were shown before.  So text of such origin
goes through :func:`harmless` before it is shown.  Pipes and files get the text as it is.
"""

from __future__ import annotations

import sys
from typing import IO, final

__all__ = ["TerminalText", "echo", "for_stream", "harmless", "is_terminal"]

_KEPT = "\n\t"
_CONTROLS = [*range(0x20), 0x7F, *range(0x80, 0xA0)]
"""C0, DEL and C1: everything that begins an escape sequence or moves the cursor."""
_DIRECTIONS = [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]
"""Embeddings, overrides and isolates: they show signs in another order than the one that they stand in."""
_SURROGATES = range(0xD800, 0xE000)
"""No encoding has them; names of files that are not UTF-8 bring them."""


def _escaped(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


_TABLE = {code: _escaped(code) for code in (*_CONTROLS, *_DIRECTIONS, *_SURROGATES) if chr(code) not in _KEPT}
_ONE_LINE_TABLE = {**_TABLE, **{ord(character): _escaped(ord(character)) for character in _KEPT + "\u2028\u2029"}}


def harmless(text: str, *, one_line: bool = False) -> str:
    r"""``text`` as a terminal may be given it.

    Control characters (C0, DEL, C1), characters that reverse the direction of writing, and surrogates become ``\x1b``,
    ``\u202e`` and the like.  Line feeds and tabs stay, and a carriage return before a line feed is dropped.

    :param one_line: for a field of a table or a title: line feeds and tabs are escaped as well
    """
    if one_line:
        return text.translate(_ONE_LINE_TABLE)
    return text.replace("\r\n", "\n").translate(_TABLE)


@final
class TerminalText:
    """A growing text as a terminal may be given it.

    What :meth:`push` and :meth:`end` return, joined, is ``harmless(text)``, wherever the text was cut.
    """

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> str:
        """What can be shown now.  A carriage return is held back: a line feed may follow it."""
        text = self._held + text
        self._held = "\r" if text.endswith("\r") else ""
        return harmless(text[: len(text) - len(self._held)])

    def end(self) -> str:
        """What was held back."""
        held, self._held = self._held, ""
        return harmless(held)


def is_terminal(stream: IO[str] | None) -> bool:
    """Whether a person reads what is written to ``stream``."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # it is closed
        return False


def for_stream(text: str, stream: IO[str] | None, *, one_line: bool = False) -> str:
    """``text`` for ``stream``: :func:`harmless` where that is a terminal, else as it is."""
    return harmless(text, one_line=one_line) if is_terminal(stream) else text


def echo(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    """Write ``text`` and a line feed to standard output at once; harmlessly where that is a terminal.

    :param err: write to standard error
    :param nl: write the line feed

    Raises :class:`OSError` that names standard output where it takes nothing more.  A message for standard error that
    cannot be written is dropped: there is no other place to tell of it, and the work goes on without it.
    """
    stream = sys.stderr if err else sys.stdout
    whole = text + "\n" if nl else text
    if stream is None:
        return
    try:
        stream.write(for_stream(whole, stream))
        stream.flush()
    except OSError as error:
        if not err:
            raise OSError(error.errno, error.strerror or str(error), "standard output") from error
