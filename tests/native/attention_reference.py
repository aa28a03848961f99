"""One attention operation: drawn, computed by the CPU backend, and computed in double precision.

Values are drawn so that the type of keys and values holds them exactly: what differs then is arithmetic alone.
"""

from __future__ import annotations

import math
import operator
import random
import struct
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import attrs
from hypothesis import strategies as st

from laneway_native import attention_kernel, use_attention_kernel
from laneway_native._errors import check, new_error
from laneway_native._ffi import ffi, lib

KvName = Literal["f32", "f16", "q8_0"]

NUMBERS: dict[KvName, int] = {"f32": 0, "f16": 1, "q8_0": 8}
ROUND = 2.0**-24
"""The largest relative error of one rounded F32 operation."""


@contextmanager
def kernel(on: bool) -> Iterator[None]:
    """Laneway's attention on or off for a while."""
    before = attention_kernel()
    use_attention_kernel(on)
    try:
        yield
    finally:
        use_attention_kernel(before)


@attrs.frozen
class Shape:
    """The sizes of an operation.  ``capacity``: cells of a stream in memory, of which ``cells`` are seen."""

    size: int
    heads_kv: int
    group: int
    rows: int
    cells: int
    capacity: int
    streams: int
    kv: KvName = "f16"
    cap: float = 0.0
    max_bias: float = 0.0
    """Of ALiBi; 0: none."""
    with_sinks: bool = False

    @property
    def heads(self) -> int:
        return self.heads_kv * self.group

    @property
    def scale(self) -> float:
        # A float, as C sees it.
        scale: float = struct.unpack("f", struct.pack("f", self.size**-0.5))[0]
        return scale


@attrs.frozen
class Case:
    """Tensors.  Lists of rows of values: ``q`` by stream, row and head, ``k`` and ``v`` by stream, cell and head."""

    shape: Shape
    q: list[list[float]]
    k: list[list[float]]
    v: list[list[float]]
    mask: list[list[float]] | None
    """By stream and row, a value for each cell."""
    sinks: list[float] | None = None
    """One for each head."""


def _exact(random_: random.Random, kv: KvName, size: int) -> list[float]:
    if kv == "q8_0":
        values: list[float] = []
        for _ in range(size // 32):
            scale = random_.randint(1, 40) / 1024
            values += [scale * random_.randint(-127, 127) for _ in range(32)]
        return values
    halves = struct.pack(f"{size}e", *[random_.gauss(0, 1) for _ in range(size)])
    return list(struct.unpack(f"{size}e", halves))


def _packed(rows: Sequence[Sequence[float]], kv: KvName) -> bytes:
    if kv != "q8_0":
        return b"".join(struct.pack(f"{len(row)}{'f' if kv == 'f32' else 'e'}", *row) for row in rows)
    blocks = []
    for row in rows:
        for start in range(0, len(row), 32):
            part = row[start : start + 32]
            # Every scale is a whole number of 1024ths, which the values tell: the largest that makes all of them whole.
            scale = next(
                number / 1024
                for number in range(40, 0, -1)
                if all((value * 1024 / number).is_integer() and abs(value) * 1024 / number <= 127 for value in part)
            )
            blocks.append(struct.pack("<e32b", scale, *[int(value / scale) for value in part]))
    return b"".join(blocks)


def draw(shape: Shape, seed: int, *, holes: float = 0.0, biased: bool = False, loud: float = 1.0) -> Case:
    """A case.  ``holes``: the share of masked cells; ``biased``: others have a value there; ``loud``: of q."""
    random_ = random.Random(seed)

    def cell() -> float:
        if random_.random() < holes:
            return -math.inf
        return random_.randint(-64, 64) / 16 if biased else 0.0

    rows = shape.streams * shape.rows
    q = [list(array("f", [loud * random_.gauss(0, 1) for _ in range(shape.size)])) for _ in range(rows * shape.heads)]
    k, v = (
        [_exact(random_, shape.kv, shape.size) for _ in range(shape.streams * shape.capacity * shape.heads_kv)]
        for _ in range(2)
    )
    mask = [[cell() for _ in range(shape.cells)] for _ in range(rows)]
    sinks = [random_.randint(-32, 32) / 8 for _ in range(shape.heads)] if shape.with_sinks else None
    return Case(shape, q, k, v, mask, sinks)


@st.composite
def cases(draw_: st.DrawFn) -> Case:
    """Operations of all kinds that the kernel takes."""
    kv: KvName = draw_(st.sampled_from(("f16", "f16", "f32", "q8_0")))
    cells = draw_(st.integers(1, 40) | st.integers(41, 330))
    shape = Shape(
        size=draw_(st.sampled_from((32, 64, 96, 128) if kv == "q8_0" else (16, 32, 48, 64, 80, 128, 256))),
        heads_kv=draw_(st.integers(1, 3)),
        group=draw_(st.sampled_from((1, 2, 3, 4, 5, 8, 17))),
        rows=draw_(st.integers(1, 5) | st.integers(6, 24)),
        cells=cells,
        capacity=cells + draw_(st.integers(0, 20)),
        streams=draw_(st.integers(1, 3)),
        kv=kv,
        cap=draw_(st.sampled_from((0.0, 0.0, 0.0, 15.0))),
        max_bias=draw_(st.sampled_from((0.0, 0.0, 0.0, 8.0))),
        with_sinks=draw_(st.integers(0, 3)) == 0,
    )
    # What takes long in Python is left to the sizes that need it.
    if shape.heads * shape.rows * shape.streams * cells * shape.size > 3_000_000:
        fewer = min(cells, 100)
        shape = attrs.evolve(
            shape,
            heads_kv=1,
            group=min(shape.group, 3),
            streams=1,
            cells=fewer,
            capacity=min(shape.capacity, fewer + 7),
        )
    case = draw(
        shape,
        draw_(st.integers(0, 2**32)),
        holes=draw_(st.sampled_from((0.0, 0.1, 0.5, 0.95, 1.0))),
        biased=draw_(st.booleans()),
        loud=draw_(st.sampled_from((1.0, 4.0))),
    )
    if not shape.max_bias and draw_(st.integers(0, 9)) == 0:
        case = attrs.evolve(case, mask=None)
    return case


@attrs.frozen
class Fault:
    """A number that is put in the place of another.  ``row`` and ``column`` are those of the case's list.

    In q8_0 it is the scale of the column's block of 32.
    """

    tensor: Literal["q", "k", "v", "mask"]
    row: int
    column: int
    value: float


def reached(case: Case, fault: Fault) -> set[int]:
    """Which rows of the result see a fault: by stream, row and head."""
    shape = case.shape
    if fault.tensor == "q":
        mask = case.mask[fault.row // shape.heads] if case.mask else [0.0]
        return {fault.row} if any(value != -math.inf for value in mask) else set()
    if fault.tensor == "mask":
        return set(range(fault.row * shape.heads, (fault.row + 1) * shape.heads))
    stream, place = divmod(fault.row, shape.capacity * shape.heads_kv)
    cell, head_kv = divmod(place, shape.heads_kv)
    if cell >= shape.cells:
        return set()
    rows = range(stream * shape.rows, (stream + 1) * shape.rows)
    heads = range(head_kv * shape.group, (head_kv + 1) * shape.group)
    return {
        row * shape.heads + head
        for row in rows
        for head in heads
        if case.mask is None or case.mask[row][cell] != -math.inf
    }


def _spoiled(packed: bytes, kv: KvName, width: int, faults: list[Fault]) -> bytes:
    """Packed rows of ``width`` values with the faults in them."""
    spoiled = bytearray(packed)
    for fault in faults:
        at = fault.row * width + fault.column
        place = {"f32": 4 * at, "f16": 2 * at, "q8_0": at // 32 * 34}[kv]
        struct.pack_into("<f" if kv == "f32" else "<e", spoiled, place, fault.value)
    return bytes(spoiled)


def compute(case: Case, *, threads: int = 1, faults: Sequence[Fault] = ()) -> list[list[float]]:
    """What the CPU backend makes of it: by stream, row and head."""
    shape = case.shape
    given = ffi.new("laneway_attention_case *")
    given.size, given.heads, given.heads_kv = shape.size, shape.heads, shape.heads_kv
    given.rows, given.cells, given.capacity, given.streams = shape.rows, shape.cells, shape.capacity, shape.streams
    given.threads, given.type, given.repeats = threads, NUMBERS[shape.kv], 1
    given.scale, given.max_bias, given.cap = shape.scale, shape.max_bias, shape.cap

    def packed(tensor: str, rows: list[list[float]], kv: KvName) -> bytes:
        own = [fault for fault in faults if fault.tensor == tensor]
        return _spoiled(_packed(rows, kv), kv, len(rows[0]), own)

    q = ffi.from_buffer("float[]", packed("q", case.q, "f32"))
    k = ffi.from_buffer("char[]", packed("k", case.k, shape.kv))
    v = ffi.from_buffer("char[]", packed("v", case.v, shape.kv))
    given.q, given.k, given.v = q, k, v
    mask = ffi.NULL if case.mask is None else ffi.from_buffer("uint16_t[]", packed("mask", case.mask, "f16"))
    given.mask = mask
    sinks = ffi.NULL if case.sinks is None else ffi.new("float[]", case.sinks)
    given.sinks = sinks
    out = ffi.new("float[]", len(case.q) * shape.size)
    error = new_error()
    check(lib.laneway_attention_run(given, out, ffi.new("double *"), error), error)
    values = ffi.unpack(out, len(case.q) * shape.size)
    return [values[start : start + shape.size] for start in range(0, len(values), shape.size)]


def count() -> int:
    """Operations that the kernel has computed so far."""
    return lib.laneway_attention_count()


@attrs.frozen
class Expected:
    """The result in double precision, and how far a computation in F32 may be from it."""

    values: list[list[float]]
    bounds: list[float]


def expected(case: Case) -> Expected:
    """Attention by its definition.

    The bound of a row of values: a score is a sum of ``size`` products and is off by at most (size + 4) roundings of
    the sum of its products' sizes, whatever the order.  Taking off the largest and exp add a few roundings of the
    score's own size, a cap the error of tanh.  The weighted mean of n values adds n + 8 roundings above and below the
    line.
    """
    shape = case.shape
    values, bounds = [], []
    for index, query in enumerate(case.q):
        row, head = divmod(index, shape.heads)
        stream = row // shape.rows
        first = stream * shape.capacity * shape.heads_kv + head // shape.group
        mask = case.mask[row] if case.mask else [0.0] * shape.cells
        slope = _slope(shape, head)
        seen = [cell for cell in range(shape.cells) if mask[cell] != -math.inf]
        if not seen:
            values.append([0.0] * shape.size)
            bounds.append(0.0)
            continue
        scores, loudest = [], 0.0
        for cell in seen:
            products = list(map(operator.mul, query, case.k[first + cell * shape.heads_kv]))
            score = math.fsum(products) * shape.scale
            loudest = max(loudest, sum(map(abs, products)) * shape.scale)
            if shape.cap:
                score = shape.cap * math.tanh(score / shape.cap)
            scores.append(score + slope * mask[cell])
        largest = max(scores)
        weights = [math.exp(score - largest) for score in scores]
        total = math.fsum(weights)
        if case.sinks is not None:
            total += math.exp(case.sinks[head] - largest)
            scores.append(case.sinks[head])
        columns = zip(*[case.v[first + cell * shape.heads_kv] for cell in seen], strict=True)
        values.append([math.fsum(map(operator.mul, weights, column)) / total for column in columns])
        own = max(map(abs, scores)) + abs(largest) + 4
        off = ROUND * ((shape.size + 4) * loudest + 4 * own + 8 * shape.cap)
        high = max(abs(value) for cell in seen for value in case.v[first + cell * shape.heads_kv])
        bounds.append(2 * (math.expm1(off) + (len(seen) + 8) * ROUND) * high)
    return Expected(values, bounds)


def _slope(shape: Shape, head: int) -> float:
    """ALiBi: 2^(-b/n), 2^(-2b/n), ... for n heads, n a power of two; of the rest, every other item for 2n heads."""
    if not shape.max_bias:
        return 1.0
    power = 1 << (shape.heads.bit_length() - 1)
    step = head + 1 if head < power else head - power + 0.5
    return math.pow(2.0, -shape.max_bias * step / power)


def errors(computed: list[list[float]], right: Expected) -> list[float]:
    """The largest error of each row and head."""
    return [max(map(abs, map(operator.sub, ours, theirs))) for ours, theirs in zip(computed, right.values, strict=True)]
