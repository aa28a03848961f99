"""Which attention the CPU takes: the kernel that Laneway brings, or llama.cpp's own."""

from __future__ import annotations

from laneway_native._ffi import lib

_KV_TYPES = ("f16", "q8_0")
"""Cells that the kernel reads.  It could take f32 too, but llama.cpp hands flash attention a copy of those in f16, that
it makes anew in each step."""


def has_attention_kernel() -> bool:
    """Whether this build has a kernel of its own: not so on the system's libllama."""
    return lib.laneway_attention(-1) >= 0


def use_attention_kernel(wanted: bool) -> bool:
    """Turn the kernel on or off in the whole process, and return whether it is on now.

    It is on from the start, unless the environment says ``LANEWAY_ATTENTION=0``.  Waits for steps under way.  Decoders
    keep the KV mode that they have chosen: one that is made while the kernel is off chooses without it.
    """
    return lib.laneway_attention(int(wanted)) > 0


def attention_kernel() -> bool:
    """Whether the kernel is there and on."""
    return lib.laneway_attention(-1) > 0


def attention_kernel_takes(*, key_length: int, value_length: int, kv_type: str) -> bool:
    """Whether the kernel, as things are now, computes attention for heads of these sizes and cells of this type."""
    whole = 32 if kv_type == "q8_0" else 16
    return attention_kernel() and kv_type in _KV_TYPES and key_length == value_length and key_length % whole == 0
