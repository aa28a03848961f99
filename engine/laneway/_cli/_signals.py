"""Signals that end the program while a terminal shows something that moves.

A live view hides the cursor, and shows it again when it is left.  A signal that ends the process leaves nothing, so the
cursor would stay hidden in the user's shell.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name))
"""Signals whose usual action ends the process.  Ctrl-C is an exception instead, which leaves every block."""
SHOW_CURSOR = b"\x1b[?25h"


@contextmanager
def cursor_restored() -> Iterator[None]:
    """For the length of a block, a signal of :data:`ENDING` shows the cursor before it ends the process.

    The process still dies of the signal, so its parent sees the usual status: 143 in a shell after SIGTERM, 129 after
    SIGHUP.  A signal that is ignored stays ignored, as ``nohup`` wants it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is told of signals
        return
    replaced = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]
    for number in replaced:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in replaced:
            if signal.getsignal(number) is _end:
                signal.signal(number, signal.SIG_DFL)


def _end(number: int, frame: FrameType | None) -> None:
    if os.environ.get("TERM", "").lower() not in ("dumb", "unknown"):
        for descriptor in (1, 2):
            _show_cursor(descriptor)
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def _show_cursor(descriptor: int) -> None:
    try:
        if os.isatty(descriptor):
            # Past the stream's buffer: the signal may have come while that was being written.
            os.write(descriptor, SHOW_CURSOR)
    except OSError:
        pass  # the terminal is gone, as it is after SIGHUP
