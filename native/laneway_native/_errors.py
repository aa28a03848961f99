"""What the C border answers, as the exceptions of :mod:`laneway.decoder`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from laneway.decoder import DecodeError, InvalidRequestError, ModelLoadError, StepInterrupted
from laneway_native._ffi import ffi, lib
from laneway_native._log import drain

if TYPE_CHECKING:
    from laneway_native._llama import Error

_SPEAKER = re.compile(r"^(?:\w+: )+(?:error loading model: )?(?:\w+: (?=\w+ \w+))?")

_ADVICE = {
    lib.LANEWAY_CELLS_FULL: "no slot may pass its window: drop one, or load with a larger context_size",
    lib.LANEWAY_OUT_OF_MEMORY: "free memory, or load with a smaller context_size or parallel",
}


def new_error() -> Error:
    """A buffer for what goes wrong in one call."""
    error: Error = ffi.new("laneway_error *")
    return error


def text_of(error: Error) -> str:
    """The sentence in the buffer, with advice where there is some to give."""
    text = ffi.string(error.text).decode("utf-8", "replace")
    advice = _ADVICE.get(error.code)
    return f"{text}; {advice}" if advice else text


def check(status: int, error: Error, *, sequences: int = 0) -> None:
    """Raise what the status of a decoder's or sampler's call means; do nothing for ``LANEWAY_OK``.

    ``sequences`` is how many took part in the call.  Raises :class:`StepInterrupted`, :class:`InvalidRequestError` for
    a grammar that llama.cpp does not take, :class:`DecodeError` for the rest.
    """
    if lib.laneway_log_waiting():
        drain(failed=status != lib.LANEWAY_OK)
    if status == lib.LANEWAY_OK:
        return
    text = text_of(error)
    if status == lib.LANEWAY_INTERRUPTED:
        raise StepInterrupted(text)
    if status == lib.LANEWAY_BAD_GRAMMAR:
        raise InvalidRequestError(text, "grammar")
    raise DecodeError(text, status, sequences)


def failure_of(error: Error, *, sequences: int) -> DecodeError:
    """What the buffer says as the error that ends ``sequences`` of a step, the others going on."""
    return DecodeError(text_of(error), error.code, sequences)


def check_load(status: int, error: Error, source: str) -> None:
    """Raise :class:`ModelLoadError` unless the status of a call that loads something is ``LANEWAY_OK``."""
    failed = status != lib.LANEWAY_OK
    drain(failed=failed)
    if failed:
        # llama.cpp's lines begin with the function that speaks.
        raise ModelLoadError(source, _SPEAKER.sub("", text_of(error)))
