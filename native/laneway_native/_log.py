"""llama.cpp's log lines, as records of the logger ``laneway.llama``.

C keeps them in a ring, because llama.cpp logs on threads where Python cannot run; here they are taken out after calls
that may have logged.
"""

from __future__ import annotations

import logging

from laneway_native._ffi import ffi, lib

logger = logging.getLogger("laneway.llama")

# llama.cpp warns of much that only its makers mend, and calls "error" what its caller handles.
_LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.INFO, 4: logging.WARNING}
"""By llama.cpp's levels."""


def follow_level() -> None:
    """Let C drop what the logger would drop.  Called before loads: that is when llama.cpp has much to say."""
    level = logger.getEffectiveLevel()
    lib.laneway_log_level(min((native for native, python in _LEVELS.items() if python >= level), default=7))


def drain(*, failed: bool = False) -> None:
    """Take all waiting lines.  ``failed``: an exception is about to tell of them, so they are but details."""
    if not lib.laneway_log_waiting():
        return
    text = ffi.new("char[2000]")
    while level := lib.laneway_log_take(text, 2000):
        python = min(_LEVELS.get(level, logging.DEBUG), logging.INFO if failed else logging.WARNING)
        logger.log(python, "%s", ffi.string(text).decode("utf-8", "replace"))
