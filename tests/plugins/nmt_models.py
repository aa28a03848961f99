"""CTranslate2 models with random weights, made when a test needs them, and packages of such."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parents[1] / "data" / "nmt"
"""Small real models and sentences; its README says where they come from."""

SPECIALS = ("<unk>", "<s>", "</s>")
WORDS = tuple(f"w{number}" for number in range(61))
CHARACTERS = tuple("abcdefghijklmnopqrstuvwxyz .,!?-0123456789'")


def need_nmt() -> None:
    """Skip the test where the extra is not installed."""
    for module in ("ctranslate2", "sentencepiece", "sentencex"):
        pytest.importorskip(module, reason=f"{module} is not installed (the extra nmt)")


def real_package(name: str) -> Path:
    """A small real model."""
    need_nmt()
    return DATA / name


def make_model(
    directory: Path,
    vocabulary: Sequence[str] = WORDS,
    *,
    seed: int = 1,
    layers: int = 1,
    width: int = 16,
    end_bias: float = 1.5,
) -> Path:
    """Write a Transformer with random weights and a shared vocabulary.

    ``end_bias`` is added to the logit of the end token: a large one gives short translations, a very small one
    translations without an end.
    """
    import ctranslate2
    import numpy as np

    random = np.random.default_rng(seed)
    spec = ctranslate2.specs.TransformerSpec.from_config(num_layers=layers, num_heads=2)
    tokens = [*SPECIALS, *vocabulary]

    def matrix(rows: int, columns: int) -> Any:
        return (random.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)

    def linear(part: Any, rows: int, columns: int) -> None:
        part.weight = matrix(rows, columns)
        part.bias = np.zeros(rows, np.float32)

    def norm(part: Any) -> None:
        part.gamma = np.ones(width, np.float32)
        part.beta = np.zeros(width, np.float32)

    def attention(part: Any, sizes: Sequence[int]) -> None:
        norm(part.layer_norm)
        for piece, rows in zip(part.linear, sizes, strict=True):
            linear(piece, rows, width)

    def feed_forward(part: Any) -> None:
        norm(part.layer_norm)
        linear(part.linear_0, 2 * width, width)
        linear(part.linear_1, width, 2 * width)

    embedding = matrix(len(tokens), width)
    encoder, decoder = spec.encoder, spec.decoder
    encoder.embeddings[0].weight = embedding
    decoder.embeddings.weight = embedding
    for half in (encoder, decoder):
        half.scale_embeddings = True
        half.position_encodings.encodings = matrix(512, width)
        norm(half.layer_norm)
    for layer in encoder.layer:
        attention(layer.self_attention, (3 * width, width))
        feed_forward(layer.ffn)
    for layer in decoder.layer:
        attention(layer.self_attention, (3 * width, width))
        attention(layer.attention, (width, 2 * width, width))
        feed_forward(layer.ffn)
    decoder.projection.weight = matrix(len(tokens), width)
    decoder.projection.bias = np.zeros(len(tokens), np.float32)
    decoder.projection.bias[tokens.index("</s>")] = end_bias
    decoder.projection.bias[tokens.index("<unk>")] = -100.0
    decoder.projection.bias[tokens.index("<s>")] = -100.0
    spec.register_source_vocabulary(tokens)
    spec.register_target_vocabulary(tokens)
    spec.config.add_source_eos = True
    spec.validate()
    spec.optimize()
    directory.mkdir(parents=True, exist_ok=True)
    spec.save(str(directory))
    return directory


def make_sentencepiece(text: Sequence[str], size: int = 120) -> bytes:
    """A SentencePiece model of some lines of text, with pieces for single bytes."""
    import sentencepiece

    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text),
        model_writer=out,
        vocab_size=size,
        model_type="bpe",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return out.getvalue()


def make_package(
    path: Path,
    pair: str,
    model: Path,
    *,
    metadata: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
    root: str | None = None,
) -> Path:
    """Write an Argos package of a model directory; ``pair`` is as in ``en-de``."""
    source, target = pair.split("-")
    folder = f"translate-{source}_{target}-1_0/" if root is None else root
    described = {"from_code": source, "to_code": target, "package_version": "1.0", **(metadata or {})}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{folder}metadata.json", json.dumps(described))
        for file in sorted(model.iterdir()):
            archive.write(file, f"{folder}model/{file.name}")
        for name, data in (files or {}).items():
            archive.writestr(f"{folder}{name}", data)
    return path
