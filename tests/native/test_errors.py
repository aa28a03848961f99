"""Native codes, and the exceptions that they become."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from laneway.decoder import DecodeError, InvalidRequestError, ModelLoadError, StepInterrupted
from laneway_native._errors import check, check_load, new_error
from laneway_native._ffi import ffi, lib

if TYPE_CHECKING:
    from laneway_native._llama import Error

NO_ERRORS = {"LANEWAY_OK", "LANEWAY_TOP_LOGPROBS"}
CODES = sorted(getattr(lib, name) for name in dir(lib) if name.startswith("LANEWAY_") and name not in NO_ERRORS)


def error_of(code: int, text: str) -> Error:
    error = new_error()
    error.code = code
    ffi.memmove(error.text, text.encode(), len(text.encode()))
    return error


def test_success_raises_nothing() -> None:
    check(lib.LANEWAY_OK, new_error())
    check_load(lib.LANEWAY_OK, new_error(), "model.gguf")


@pytest.mark.parametrize("code", CODES)
def test_every_code_of_a_step_is_one_typed_error(code: int) -> None:
    expected: type[Exception] = DecodeError
    if code == lib.LANEWAY_INTERRUPTED:
        expected = StepInterrupted
    elif code == lib.LANEWAY_BAD_GRAMMAR:
        expected = InvalidRequestError
    with pytest.raises(Exception, match="what went wrong") as caught:
        check(code, error_of(code, "what went wrong"), sequences=3)
    assert type(caught.value) is expected
    if isinstance(caught.value, DecodeError):
        assert (caught.value.status, caught.value.sequences) == (code, 3)


@pytest.mark.parametrize("code", CODES)
def test_every_code_of_a_load_is_a_load_error(code: int) -> None:
    with pytest.raises(ModelLoadError, match="what went wrong") as caught:
        check_load(code, error_of(code, "what went wrong"), "model.gguf")
    assert caught.value.source == "model.gguf"


def test_codes_are_llamas_where_they_mean_the_same() -> None:
    assert (lib.LANEWAY_CELLS_FULL, lib.LANEWAY_INTERRUPTED, lib.LANEWAY_BAD_BATCH) == (1, 2, -1)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("llama_model_load: error loading model: missing tensor 'x'", "missing tensor 'x'"),
        (
            "llama_model_load: error loading model: error loading model vocabulary: x",
            "error loading model vocabulary: x",
        ),
        ("llama_init_from_model: failed to initialize the context: no", "failed to initialize the context: no"),
        ("adapter /a/b.gguf: no", "adapter /a/b.gguf: no"),
        ("out of memory", "out of memory"),
    ],
)
def test_a_load_error_leaves_out_which_function_speaks(said: str, told: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        check_load(lib.LANEWAY_LOAD_FAILED, error_of(lib.LANEWAY_LOAD_FAILED, said), "model.gguf")
    assert caught.value.reason == told


def test_where_there_is_advice_it_is_given() -> None:
    with pytest.raises(DecodeError, match="larger context_size"):
        check(lib.LANEWAY_CELLS_FULL, error_of(lib.LANEWAY_CELLS_FULL, "no free KV cells"))
