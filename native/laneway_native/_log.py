"""llama.cpp's log lines, as records of the logger ``laneway.llama``.

C keeps them in a ring, because llama.cpp logs on threads where Python cannot run; here they are taken out after calls
that may have logged.
"""

from __future__ import annotations

import logging

from laneway_native._ffi import ffi, lib

logger = logging.getLogger("laneway.llama")

_LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}
_NATIVE_LEVELS = {level: native for native, level in _LEVELS.items()}


def follow_level() -> None:
    """Let C drop what the logger would drop.  Called before loads: that is when llama.cpp has much to say."""
    level = logger.getEffectiveLevel()
    lib.laneway_log_level(min((native for python, native in _NATIVE_LEVELS.items() if python >= level), default=5))


def drain() -> None:
    """Take all waiting lines."""
    if not lib.laneway_log_waiting():
        return
    text = ffi.new("char[2000]")
    while level := lib.laneway_log_take(text, 2000):
        # llama.cpp calls "error" what its caller handles: the exception tells, the log need not shout.
        python = min(_LEVELS.get(level, logging.DEBUG), logging.WARNING)
        logger.log(python, "%s", ffi.string(text).decode("utf-8", "replace"))
