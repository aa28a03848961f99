"""Tiny models of every architecture that can be trained, in any type, and data to train them on."""

from __future__ import annotations

import ctypes
import json
import random
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import laneway_native
from laneway_native.training import Event, Job, Sample, event_from_json
from tests.tiny_model import Tensor, TensorType, tiny_model_parts, write_gguf

Architecture = Literal["llama", "qwen2", "qwen3", "smollm3"]

QUANTISED = {
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q2_K": 10,
    "Q3_K": 11,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "IQ3_XXS": 18,
    "IQ4_NL": 20,
    "IQ3_S": 21,
    "IQ4_XS": 23,
}
"""Types that weights are quantised to, by ggml's number."""
TYPES = {"F32": 0, "F16": 1, "BF16": 30, **QUANTISED}


def convert(values: bytes, kind: int, columns: int) -> bytes:
    """F32 numbers as another type, by ggml."""
    if kind == TYPES["F32"]:
        return values
    folder = Path(laneway_native.__file__).parent
    ggml = ctypes.CDLL(str(next(_library_folder(folder).glob("*ggml-base*"))))
    rows = len(values) // 4 // columns
    quantise = ggml.ggml_quantize_chunk
    quantise.restype = ctypes.c_size_t
    quantise.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    out = ctypes.create_string_buffer(len(values) + 1024)
    size = quantise(kind, values, out, 0, rows, columns, None)
    return out.raw[:size]


def _library_folder(package: Path) -> Path:
    from laneway_native import _llama

    return Path(_llama.__file__).parent


def write_model(
    path: Path,
    architecture: Architecture = "llama",
    *,
    types: Sequence[str] = ("F32",),
    seed: int = 0,
    embd: int = 64,
    ff: int = 128,
    layers: int = 2,
    spoil: Any = None,
    **options: Any,
) -> Path:
    """A tiny model.  Matrices take the ``types`` in turn; ``spoil`` may change metadata and tensors first."""
    metadata, tensors = tiny_model_parts(seed=seed, embd=embd, ff=ff, layers=layers, **options)
    rng = random.Random(seed)
    metadata = {key.replace("llama.", architecture + ".", 1): value for key, value in metadata.items()}
    metadata["general.architecture"] = architecture
    extra: list[Tensor] = []

    def vector(name: str, count: int, middle: float) -> None:
        values = [middle + rng.uniform(-0.5, 0.5) for _ in range(count)]
        extra.append(Tensor(name, (count,), TensorType.F32, struct.pack(f"<{count}f", *values)))

    head = embd // 4
    for layer in range(layers):
        if architecture == "qwen2":
            for name, count in (("attn_q", embd), ("attn_k", embd // 2), ("attn_v", embd // 2)):
                vector(f"blk.{layer}.{name}.bias", count, 0.0)
        if architecture == "qwen3":
            vector(f"blk.{layer}.attn_q_norm.weight", head, 1.0)
            vector(f"blk.{layer}.attn_k_norm.weight", head, 1.0)
    if architecture == "llama":
        vector("rope_freqs.weight", head // 2, 1.5)
    turn = 0
    for place, tensor in enumerate(tensors):
        if len(tensor.dims) == 2:
            kind = TYPES[types[turn % len(types)]]
            turn += 1
            tensors[place] = Tensor(tensor.name, tensor.dims, kind, convert(tensor.data, kind, tensor.dims[0]))
        else:
            # Norms that are not all one show whether their gradient is right.
            values = [1.0 + rng.uniform(-0.3, 0.3) for _ in range(tensor.dims[0])]
            data = struct.pack(f"<{len(values)}f", *values)
            tensors[place] = Tensor(tensor.name, tensor.dims, TensorType.F32, data)
    tensors += extra
    if spoil is not None:
        spoil(metadata, tensors)
    return write_gguf(path, metadata, tensors)


def sample(tokens: Sequence[int], counted: Iterable[int] | None = None) -> Sample:
    """A sequence of which the predictions of some tokens count, by their places; None: of all."""
    places = set(range(1, len(tokens)) if counted is None else counted)
    return Sample(list(tokens), bytes(place in places for place in range(len(tokens))))


def random_samples(count: int, *, seed: int, longest: int = 24, vocabulary: int = 400) -> list[Sample]:
    """Sequences of different lengths, of which about half of the predictions count."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        tokens = [rng.randrange(5, vocabulary) for _ in range(rng.randint(2, longest))]
        places = [place for place in range(1, len(tokens)) if rng.random() < 0.5] or [1]
        made.append(sample(tokens, places))
    return made


def write_data(path: Path, samples: Iterable[Sample]) -> Path:
    """The file that a job names."""
    lines = [json.dumps({"tokens": list(each.tokens), "mask": list(each.mask)}) for each in samples]
    path.write_text("\n".join(lines) + "\n")
    return path


EIGHT_BITS = 0.1
"""How far the mean loss of a quantised model may be from what llama.cpp computes, in nats.

llama.cpp rounds what it multiplies quantised weights with to 8 bits, and training does not.  Each number is off by at
most 1/254 of the largest of its block, so a product is off by about a hundredth of its size.  Logits of the size of ten
are off by up to a tenth, on every processor by another one.
"""


COMMAND = [sys.executable, "-m", "laneway_native.training"]


class Child:
    """A child under test; killed at the latest when the test ends."""

    def __init__(self, job: Job | str) -> None:
        self.process = subprocess.Popen(
            COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.tell(job if isinstance(job, str) else job.to_json())

    def tell(self, line: str) -> None:
        self.stdin.write(line.encode() + b"\n")
        self.stdin.flush()

    def events(self, until: Callable[[Event], bool] = lambda event: False) -> list[Event]:
        """Events up to the first that is wanted, or to the end."""
        found = []
        for line in self.stdout:
            found.append(event_from_json(line))
            if until(found[-1]):
                break
        return found

    def end(self) -> tuple[int, str]:
        """Exit status and log, once it has ended by itself."""
        assert self.process.stderr is not None
        log = self.process.stderr.read().decode()
        return self.process.wait(timeout=600), log

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.stdin, self.stdout, self.process.stderr):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:  # a line that it was never to read
                pass


Start = Callable[[Job | str], Child]
