"""The only importer of the compiled module: starts llama.cpp once and hands out ``ffi`` and ``lib``."""

from __future__ import annotations

import os

from laneway_native import _llama
from laneway_native._llama import ffi, lib

__all__ = ["ffi", "lib"]

# Backends that are loaded at run time, if the build has any, lie beside the module.
lib.laneway_start(os.fsencode(os.path.dirname(_llama.__file__)))
if os.environ.get("LANEWAY_ATTENTION") == "0":
    lib.laneway_attention(0)
