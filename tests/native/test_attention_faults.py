"""What is no number stays visible: NaN and infinities on their way through attention to an error."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Literal

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneway.decoder import DecodeError, ModelLoadError
from laneway_native import Model, has_attention_kernel
from tests.native.attention_reference import (
    Case,
    Fault,
    KvName,
    Shape,
    cases,
    compute,
    draw,
    errors,
    expected,
    kernel,
    reached,
)
from tests.native.driving import answer, decoder_of
from tests.tiny_model import Tensor, TensorType, tiny_model_parts, write_gguf

needs_kernel = pytest.mark.skipif(not has_attention_kernel(), reason="this build has llama.cpp's attention kernel only")


@st.composite
def faulty(draw_: st.DrawFn) -> tuple[Case, Fault]:
    """A case, and a number in it that is none."""
    case = draw_(cases())
    shape = case.shape
    tensors: list[Literal["q", "k", "v", "mask"]] = ["q", "k", "v"]
    if case.mask is not None:
        tensors.append("mask")
    tensor = draw_(st.sampled_from(tensors))
    rows = {"q": case.q, "k": case.k, "v": case.v, "mask": case.mask or []}[tensor]
    # In a mask, minus infinity hides a cell.
    values = (math.nan, math.inf) if tensor == "mask" else (math.nan, math.inf, -math.inf)
    return case, Fault(
        tensor,
        draw_(st.integers(0, len(rows) - 1)),
        draw_(st.integers(0, (shape.cells if tensor == "mask" else shape.size) - 1)),
        draw_(st.sampled_from(values)),
    )


@needs_kernel
@given(drawn=faulty(), threads=st.integers(1, 3))
def test_a_row_that_sees_a_fault_shows_it_and_no_other_row_does(drawn: tuple[Case, Fault], threads: int) -> None:
    case, fault = drawn
    with kernel(True):
        clean = compute(case, threads=threads)
        spoiled = compute(case, threads=threads, faults=[fault])
    seeing = reached(case, fault)
    for index, values in enumerate(spoiled):
        if index not in seeing:
            # A value in the mask keeps its row from being computed together with others, which moves a rounding.
            assert fault.tensor == "mask" or values == clean[index]
        elif fault.tensor == "v":
            assert not all(map(math.isfinite, values))
        else:
            assert all(map(math.isnan, values))
    if fault.tensor == "mask":
        right = expected(case)
        found = errors([clean[i] if i in seeing else values for i, values in enumerate(spoiled)], right)
        assert all(error <= bound for error, bound in zip(found, right.bounds, strict=True))


@needs_kernel
@pytest.mark.parametrize("kv", ["f16", "f32", "q8_0"])
@pytest.mark.parametrize("tensor", ["k", "v"])
def test_the_last_token_of_a_prompt_reaches_no_row_before_it(tensor: Literal["k", "v"], kv: KvName) -> None:
    # Rows that see mostly the same are computed together, as products of matrices.
    case = draw(Shape(64, 1, 2, 12, 100, 100, 1, kv), 2)
    assert case.mask is not None
    for row, values in enumerate(case.mask):
        values[:] = [0.0 if cell <= 88 + row else -math.inf for cell in range(100)]
    fault = Fault(tensor, 99, 7, math.nan)
    with kernel(True):
        clean = compute(case)
        spoiled = compute(case, faults=[fault])
    assert spoiled[:22] == clean[:22]
    assert not any(math.isfinite(values[7]) for values in spoiled[22:])


@needs_kernel
@pytest.mark.parametrize("rows", [1, 12])
@pytest.mark.parametrize("cap", [0.0, 15.0])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("kv", ["f16", "f32", "q8_0"])
def test_scores_that_overflow_are_no_answer(kv: KvName, sign: float, cap: float, rows: int) -> None:
    # All scores of the first row are infinite: minus infinity everywhere gives exp(-inf + inf).
    case = draw(Shape(64, 1, 2, rows, 200, 200, 1, kv, cap, with_sinks=True), 1)
    case.k[:] = [[3.0] * 64 for _ in case.k]
    case.q[0][:] = [sign * 3e38] * 64
    with kernel(True):
        for threads in (1, 3):
            found = compute(case, threads=threads)
            assert all(map(math.isnan, found[0]))
            assert all(all(map(math.isfinite, values)) for values in found[1:])


@needs_kernel
@pytest.mark.parametrize("rows", [1, 12])
@pytest.mark.parametrize("cell", [0, 70, 8999])
def test_a_fault_survives_the_merging_of_spans(cell: int, rows: int) -> None:
    case = draw(Shape(32, 1, 2, rows, 9000, 9000, 1), 3)
    for tensor in ("k", "v"):
        fault = Fault(tensor, cell, 5, math.nan)
        with kernel(True):
            for threads in (1, 4):
                spoiled = compute(case, threads=threads, faults=[fault])
                assert not any(math.isfinite(values[5]) for values in spoiled)


@needs_kernel
def test_a_sink_that_is_no_number_shows() -> None:
    case = draw(Shape(32, 1, 2, 2, 100, 100, 1, with_sinks=True), 4)
    for bad in (math.nan, math.inf):
        with kernel(True):
            spoiled = compute(attrs.evolve(case, sinks=[0.0, bad]))
        assert [all(map(math.isnan, values)) for values in spoiled] == [False, True] * 2


def spoiled_tensor(tensor: Tensor, bad: float) -> Tensor:
    """Every 97th number, or the scale of every third block of 32, is ``bad``."""
    data = bytearray(tensor.data)
    if tensor.type == TensorType.Q8_0:
        step, form = 3 * 34, "<e"
    else:
        step, form = (4 * 97, "<f") if tensor.type == TensorType.F32 else (2 * 97, "<e")
    for at in range(0, len(data), step):
        struct.pack_into(form, data, at, bad)
    return attrs.evolve(tensor, data=bytes(data))


TENSORS = [tensor.name for tensor in tiny_model_parts(layers=1)[1]]


async def ends_in_an_error(path: Path, *, flash_attention: bool, kv_type: str) -> None:
    with Model.load(path) as model:
        prompt = model.tokenize("hello world and you, it is what it is, is it not?")
        async with decoder_of(model, flash_attention=flash_attention, kv_type=kv_type) as decoder:
            with pytest.raises(DecodeError, match="not numbers"):
                await answer(decoder, prompt, 8)


@pytest.mark.slow
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", ["f32", "f16", "q8_0"])
async def test_a_model_with_a_fault_in_any_tensor_never_answers(
    dtype: Literal["f32", "f16", "q8_0"], bad: float, tmp_path: Path
) -> None:
    metadata, tensors = tiny_model_parts(dtype=dtype, layers=1, heads=2, kv_heads=1)
    for index in range(len(tensors)):
        parts = list(tensors)
        parts[index] = spoiled_tensor(tensors[index], bad)
        path = write_gguf(tmp_path / "model.gguf", metadata, parts)
        if math.isnan(bad) and "norm" in tensors[index].name:
            with pytest.raises(ModelLoadError, match="holds NaN"):
                Model.load(path)
            continue
        for kv_type in ("f16", "q8_0"):
            for on in (True, False):
                with kernel(on):
                    await ends_in_an_error(path, flash_attention=True, kv_type=kv_type)
        await ends_in_an_error(path, flash_attention=False, kv_type="f32")


async def test_keys_and_values_that_overflow_f16_are_no_answer(tmp_path: Path) -> None:
    metadata, tensors = tiny_model_parts(layers=1)
    for name in ("blk.0.attn_k.weight", "blk.0.attn_v.weight"):
        # The weights are numbers, and what they make of an activation is more than 65,504.
        parts = [
            attrs.evolve(tensor, data=struct.pack(f"<{len(tensor.data) // 4}f", *[1e6] * (len(tensor.data) // 4)))
            if tensor.name == name
            else tensor
            for tensor in tensors
        ]
        path = write_gguf(tmp_path / "model.gguf", metadata, parts)
        for on in (True, False):
            with kernel(on):
                await ends_in_an_error(path, flash_attention=True, kv_type="f16")


@pytest.mark.parametrize("name", [name for name in TENSORS if "norm" in name])
def test_nan_in_a_norm_is_found_before_the_model_is_loaded(name: str, tmp_path: Path) -> None:
    metadata, tensors = tiny_model_parts(layers=1)
    for place in (0, 63):
        parts = []
        for tensor in tensors:
            data = bytearray(tensor.data)
            if tensor.name == name:
                struct.pack_into("<f", data, 4 * place, math.nan)
            parts.append(attrs.evolve(tensor, data=bytes(data)))
        with pytest.raises(ModelLoadError, match=f"tensor '{name}' holds NaN: the file is damaged"):
            Model.load(write_gguf(tmp_path / "model.gguf", metadata, parts))
