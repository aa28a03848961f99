"""Damaged files: the check raises ModelLoadError and nothing else, and what it lets pass does not end the process."""

from __future__ import annotations

import functools
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import attrs
import hypothesis
import pytest
from hypothesis import strategies as st

from laneway.decoder import ModelLoadError
from laneway_native import _architectures as architectures
from laneway_native._gguf import GgufHeader, check_gguf
from tests.tiny_model import Array, Plain, Tensor, ValueType, gguf_bytes, tiny_model_parts

CHILD = Path(__file__).with_name("load_models.py")
EXAMPLES = int(os.environ.get("LANEWAY_FUZZ_FILES", "150"))
"""How many damaged files that pass the check are loaded, in as many tests as keep each of them short."""
PARTS = 5

INTERESTING = (
    0,
    1,
    2,
    3,
    7,
    31,
    32,
    33,
    63,
    64,
    255,
    256,
    416,
    512,
    1 << 16,
    1 << 31,
    (1 << 32) - 1,
    1 << 62,
    (1 << 64) - 1,
)


@functools.cache
def small_file() -> tuple[bytes, int]:
    """A valid file, and how many of its bytes precede the weights."""
    metadata, tensors = tiny_model_parts(layers=1, embd=32, heads=2, kv_heads=1, ff=32, dtype="q8_0")
    content = gguf_bytes(metadata, tensors)
    return content, len(content) - sum(-(-len(tensor.data) // 32) * 32 for tensor in tensors)


def checked(content: bytes | bytearray) -> GgufHeader | None:
    """The header, or None if the file is refused.  Any other outcome is an error of the test's subject."""
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        file.write(content)
        file.flush()
        try:
            return check_gguf(file.name)
        except ModelLoadError as error:
            reason = error.reason
    assert reason
    assert "\n" not in reason
    return None


def test_the_small_file_is_valid() -> None:
    content, header = small_file()
    assert checked(content) is not None
    assert checked(content[:header]) is None


position = st.integers(0, small_file()[1] + 64)
edit = st.one_of(
    st.tuples(st.just("set"), position, st.binary(min_size=1, max_size=8)),
    st.tuples(st.just("insert"), position, st.binary(min_size=1, max_size=40)),
    st.tuples(st.just("delete"), position, st.integers(1, 40)),
    st.tuples(st.just("number"), position, st.sampled_from(INTERESTING)),
    st.tuples(st.just("copy"), position, position),
)


@hypothesis.given(edits=st.lists(edit, min_size=1, max_size=4), cut=st.none() | st.integers(0, 20_000))
def test_damage_of_any_kind_is_told(edits: list[tuple[str, int, bytes | int]], cut: int | None) -> None:
    content = bytearray(small_file()[0])
    for kind, at, what in edits:
        if isinstance(what, bytes):
            end = at + len(what) if kind == "set" else at
            content[at:end] = what
        elif kind == "delete":
            del content[at : at + what]
        elif kind == "number":
            size = 8 if what > 0xFFFFFFFF else 4
            content[at : at + size] = what.to_bytes(size, "little")
        else:
            content[at : at + 24] = content[what : what + 24]
    checked(content[:cut])


@hypothesis.given(content=st.binary(max_size=400))
def test_noise_is_told(content: bytes) -> None:
    assert checked(content) is None
    assert checked(b"GGUF\3\0\0\0" + content) is None


# --- files that pass, loaded for real ---------------------------------------------------------------------------------


class Damage:
    """Draws files that are wrong in ways that only a careful reader, or a crash, would notice."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def file(self) -> bytes:
        rng = self.rng
        metadata, tensors = tiny_model_parts(
            layers=rng.choice((1, 2)), dtype=rng.choice(("f32", "q8_0")), tokenizer=rng.choice(("spm", "bpe"))
        )
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            rng.choice(
                (
                    self.change_value,
                    self.change_value,
                    self.drop_value,
                    self.add_value,
                    self.change_array,
                    self.change_text,
                    self.change_tensor,
                    self.change_tensor,
                    self.change_hyperparameters_and_shapes,
                    self.rename,
                )
            )(metadata, tensors)
        content = bytearray(gguf_bytes(metadata, tensors))
        if rng.random() < 0.3:
            weights = sum(-(-len(tensor.data) // 32) * 32 for tensor in tensors)
            for _ in range(rng.choice((1, 2, 8))):
                at = rng.randrange(24, len(content) - weights)
                content[at] ^= 1 << rng.randrange(8)
        if rng.random() < 0.2:
            # Weights are anybody's: not-a-numbers and infinities included.
            content[-20_000:-10_000] = rng.randbytes(10_000)
        return bytes(content)

    def number(self) -> int:
        rng = self.rng
        return rng.choice((rng.choice(INTERESTING) & 0xFFFFFFFF, rng.randrange(600), rng.getrandbits(32)))

    def change_value(self, metadata: dict[str, Plain], _tensors: list[Tensor]) -> None:
        rng = self.rng
        key = rng.choice([key for key, value in metadata.items() if not isinstance(value, Array)])
        value = metadata[key]
        if isinstance(value, bool):
            metadata[key] = not value
        elif isinstance(value, int):
            metadata[key] = self.number()
        elif isinstance(value, float):
            metadata[key] = rng.choice((0.0, -1.0, 1e-38, 1e38, float("nan"), float("inf"), rng.gauss(0, 1)))
        elif isinstance(value, str):
            metadata[key] = rng.choice(
                ("", "phi-3", "llama", "gpt2", "t5", "plamo2", "whitespace", "{% for %}", "x" * 3000)
            )

    def drop_value(self, metadata: dict[str, Plain], _tensors: list[Tensor]) -> None:
        del metadata[self.rng.choice(list(metadata))]

    def add_value(self, metadata: dict[str, Plain], _tensors: list[Tensor]) -> None:
        rng = self.rng
        name = rng.choice(
            (
                "attention.key_length",
                "attention.value_length",
                "attention.sliding_window",
                "attention.causal",
                "attention.max_alibi_bias",
                "attention.clamp_kqv",
                "attention.scale",
                "attn_logit_softcapping",
                "expert_count",
                "expert_used_count",
                "expert_group_count",
                "expert_shared_count",
                "logit_scale",
                "nextn_predict_layers",
                "pooling_type",
                "rope.scaling.factor",
                "rope.scaling.type",
                "rope.scaling.original_context_length",
                "rope.scaling.attn_factor",
                "embedding_length_out",
                "residual_scale",
                "embedding_scale",
            )
        )
        value: Plain = rng.choice((self.number(), rng.gauss(0, 10), "yarn", "longrope", True))
        metadata[f"llama.{name}"] = value
        if rng.random() < 0.3:
            metadata[f"tokenizer.ggml.{rng.choice(('fim_pre', 'fim_pad', 'eom', 'mask', 'seperator'))}_token_id"] = (
                self.number()
            )
        if rng.random() < 0.2:
            items = [rng.randrange(-5, 500) for _ in range(rng.randrange(5))]
            metadata["tokenizer.ggml.suppress_tokens"] = Array(ValueType.I32, items)
        if rng.random() < 0.2:
            metadata["general.tensor_extra.name"] = Array(ValueType.STRING, ["token_embd.weight"])
        if rng.random() < 0.2:
            metadata["general.alignment"] = rng.choice((16, 32, 64, 1 << 31))

    def change_array(self, metadata: dict[str, Plain], _tensors: list[Tensor]) -> None:
        rng = self.rng
        key = rng.choice([key for key, value in metadata.items() if isinstance(value, Array)])
        value = metadata[key]
        assert isinstance(value, Array)
        items = list(value.items)
        for _ in range(rng.choice((1, 5, 100))):
            at = rng.randrange(max(len(items), 1))
            if value.type is ValueType.STRING:
                items[at : at + 1] = [
                    rng.choice((b"", b" ", b"<0x", b"<0xZZ>", b"\xff", b"a b c", b"\xe2\x96\x81", rng.randbytes(6)))
                ]
            elif value.type is ValueType.F32:
                items[at : at + 1] = [rng.choice((float("nan"), float("inf"), 1e38, 0.0))]
            else:
                items[at : at + 1] = [rng.randrange(-3, 12)]
        metadata[key] = Array(value.type, items)

    def change_text(self, metadata: dict[str, Plain], _tensors: list[Tensor]) -> None:
        rng = self.rng
        array = metadata.get("tokenizer.ggml.tokens")
        if isinstance(array, Array):
            items = list(array.items)
            items[rng.randrange(len(items))] = rng.choice(
                ("<|endoftext|>", "<|end|>", "<|return|>", "<|call|>", "<mask>", "<PAD>")
            )
            metadata["tokenizer.ggml.tokens"] = Array(array.type, items)

    def change_tensor(self, _metadata: dict[str, Plain], tensors: list[Tensor]) -> None:
        rng = self.rng
        at = rng.randrange(len(tensors))
        tensor = tensors[at]
        dims, kind = tensor.dims, tensor.type
        what = rng.randrange(5)
        if what == 0:
            kind = rng.choice((0, 1, 2, 3, 6, 7, 8, 9, 10, 12, 15, 16, 20, 24, 25, 26, 27, 28, 30, 34, 39, 40, 41, 42))
        elif what == 1:
            dims = rng.choice((dims[::-1], (*dims, 1), (*dims, 1, 1), (*dims, 2), (math.prod(dims),), (1, *dims)))
        elif what == 2:
            dims = tuple(max(1, dim + rng.choice((-32, -1, 1, 32, 64))) for dim in dims)
        elif what == 3:
            del tensors[at]
            return
        else:
            other = rng.choice(("weight_2", "bias", "scale", "input_scale"))
            tensors.append(Tensor(f"blk.0.attn_q.{other}", rng.choice(((1,), (64,), (64, 64))), 0, b""))
            at = len(tensors) - 1
            dims, kind = tensors[at].dims, rng.choice((0, 0, 1))
        tensors[at] = attrs.evolve(tensors[at], dims=dims, type=kind, data=bytes(stored_size(dims, kind)))

    def change_hyperparameters_and_shapes(self, metadata: dict[str, Plain], tensors: list[Tensor]) -> None:
        """A number that shapes follow, with the shapes: the file agrees with itself."""
        rng = self.rng
        key, old = rng.choice(
            (
                ("llama.attention.head_count", 4),
                ("llama.attention.head_count_kv", 2),
                ("llama.feed_forward_length", 128),
                ("llama.embedding_length", 64),
            )
        )
        new = rng.choice((1, 2, 3, 5, 8, 16, 32, 64, 96, 128, 192))
        metadata[key] = new
        head = 16
        if key.endswith("head_count"):
            head = max(1, 64 // new)
            metadata["llama.rope.dimension_count"] = head
        sizes = {
            "llama.attention.head_count": ({"attn_k": 32, "attn_v": 32}, head * 2),
            "llama.attention.head_count_kv": ({"attn_k": 32, "attn_v": 32}, head * new),
        }.get(key)
        for at, tensor in enumerate(tensors):
            name = str(tensor.name)
            dims = tensor.dims
            if sizes is not None:
                if any(part in name for part in sizes[0]):
                    dims = (dims[0], sizes[1])
            else:
                dims = tuple(new if dim == old else dim for dim in dims)
            kind = tensor.type if dims[0] % 32 == 0 or tensor.type == 0 else 0
            tensors[at] = attrs.evolve(tensor, dims=dims, type=kind, data=bytes(stored_size(dims, kind)))

    def rename(self, metadata: dict[str, Plain], tensors: list[Tensor]) -> None:
        rng = self.rng
        if rng.random() < 0.5:
            name = rng.choice(sorted(architectures.SUPPORTED))
            for key in list(metadata):
                if key.startswith("llama."):
                    metadata[key.replace("llama.", f"{name}.")] = metadata.pop(key)
            metadata["general.architecture"] = name
            metadata[f"{name}.attention.layer_norm_epsilon"] = 1e-5
        else:
            at = rng.randrange(len(tensors))
            name = str(tensors[at].name)
            new = rng.choice(
                (name.replace("blk.0", "blk.7"), name.replace("weight", "bias"), name + "x", "rope_freqs.weight")
            )
            tensors[at] = attrs.evolve(tensors[at], name=new)


def stored_size(dims: tuple[int, ...], kind: int) -> int:
    blocks = {0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 36)}
    blocks |= {10: (256, 84), 12: (256, 144), 15: (256, 292), 16: (256, 66), 20: (32, 18), 24: (1, 1), 25: (1, 2)}
    blocks |= {
        26: (1, 4),
        27: (1, 8),
        28: (1, 8),
        30: (1, 2),
        34: (256, 54),
        39: (32, 17),
        40: (64, 36),
        41: (128, 18),
        42: (64, 18),
    }
    block, size = blocks[kind]
    return math.prod(dims) // block * size


def passing(folder: Path, count: int, seed: int) -> Iterator[Path]:
    damage = Damage(seed)
    found = 0
    while found < count:
        content = damage.file()
        if checked(content) is not None:
            path = folder / f"{found}.gguf"
            path.write_bytes(content)
            found += 1
            yield path


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_what_passes_does_not_end_the_process(part: int, tmp_path: Path) -> None:
    pytest.importorskip("laneway_native._llama", reason="the native module is not built")
    seed = int(os.environ.get("LANEWAY_FUZZ_SEED", "0")) * PARTS + part
    count = -(-EXAMPLES // PARTS)
    paths = list(passing(tmp_path, count, seed))
    done = subprocess.run(
        [sys.executable, str(CHILD)],
        input="".join(f"{path}\n" for path in paths),
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert said, done.stderr
    assert done.returncode == 0, f"ended by {said[-1]['path']}:\n{done.stderr[-3000:]}"
    outcomes = {line["path"]: line["outcome"] for line in said if "outcome" in line}
    assert list(outcomes) == list(map(str, paths))
    # The drawing is no use if nearly nothing, or nearly everything, is fit for use.
    used = sum(outcome == "used" for outcome in outcomes.values())
    assert 0.1 * count < used < 0.95 * count
