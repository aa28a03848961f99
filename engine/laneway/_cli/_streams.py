"""Standard streams that a command can rely on, also where the program was started without them.

A stream may be closed (``<&-``), may lead to a full disk, and may have an encoding that lacks most characters.  Here is
the one place where this is dealt with, before a command begins and after it has ended.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, NoReturn, final

_ESCAPING = "laneway.escape"


@final
class ClosedStream(io.TextIOBase):
    """Stands for a standard stream that is closed.  Reading and writing raise :class:`OSError`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self) -> NoReturn:
        raise OSError(errno.EBADF, f"it is closed; open it, or redirect it, such as to {os.devnull}", self._name)

    @property
    def encoding(self) -> str:  # type: ignore[override]  # io.TextIOBase has None
        """No character is lost for lack of an encoding: every one is refused."""
        return "utf-8"

    @property
    def buffer(self) -> NoReturn:
        """The bytes below, which are closed as well."""
        self._refuse()

    def read(self, size: int | None = -1, /) -> str:
        """Refused."""
        self._refuse()

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]  # as above
        """Refused."""
        self._refuse()

    def write(self, text: str, /) -> int:
        """Refused."""
        self._refuse()


def _escape(error: UnicodeError) -> tuple[str | bytes, int]:
    """An error handler: bytes that came as surrogates go out as bytes, other characters as escapes."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    code = ord(error.object[error.start])
    if 0xDC80 <= code <= 0xDCFF:
        return bytes([code - 0xDC00]), error.start + 1
    one = UnicodeEncodeError(error.encoding, error.object, error.start, error.start + 1, error.reason)
    return codecs.backslashreplace_errors(one)


codecs.register_error(_ESCAPING, _escape)


@contextmanager
def prepared() -> Iterator[None]:
    """Standard streams for the length of a block: none of them is None, and no character ends a command.

    A character that the encoding lacks is written as an escape, unless ``PYTHONIOENCODING`` says what to do with it.
    """
    _fill_descriptors()
    before = sys.stdin, sys.stdout, sys.stderr
    nowhere: IO[str] | None = None
    if sys.stdin is None:
        sys.stdin = ClosedStream("standard input")
    if sys.stdout is None:
        sys.stdout = ClosedStream("standard output")
    if sys.stderr is None:
        nowhere = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - closed below
    errors = [(stream, stream.errors) for stream in (sys.stdout, sys.stderr) if isinstance(stream, io.TextIOWrapper)]
    for stream, how in errors:
        if how in ("strict", "surrogateescape"):
            stream.reconfigure(errors="backslashreplace" if how == "strict" else _ESCAPING)
    try:
        yield
    finally:
        for stream, how in errors:
            settle(stream)
            if not stream.closed:
                stream.reconfigure(errors=how)
        sys.stdin, sys.stdout, sys.stderr = before
        if nowhere is not None:
            nowhere.close()


def _fill_descriptors() -> None:
    """Give 0, 1 and 2 to the null device where they are closed.

    The next file that is opened would get the number otherwise, and the output of C code would be written into it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)


def is_broken(stream: IO[str] | None) -> bool:
    """Whether ``stream`` holds text that it cannot get rid of."""
    try:
        if stream is not None:
            stream.flush()
    except (OSError, ValueError):
        return True
    return False


def settle(stream: IO[str] | None) -> None:
    """Flush ``stream``, and drop what it does not take.

    The interpreter flushes once more at its end.  It would complain of the same error again, and change the status.
    """
    if is_broken(stream):
        discard(stream)


def discard(stream: IO[str] | None) -> None:
    """Let what ``stream`` still holds, and all that it is given from now on, go nowhere."""
    try:
        descriptor = -1 if stream is None else stream.fileno()
    except (OSError, ValueError):
        return  # not a real file, as under a test
    if descriptor < 0:
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
