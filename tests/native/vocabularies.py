"""Tiny models with vocabularies of every type that llama.cpp knows, and special tokens that are hard to tell apart."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import attrs

from laneway_native import Model, _model
from laneway_native._gguf import check_gguf
from tests.tiny_model import Array, TokenType, ValueType, byte_alphabet, tiny_model_parts, write_gguf

CONTROL = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<mask>", "[MASK]"),
    *("<a>", "<a><b>", "<b><c>", "ab|", "b|a", "|||", " lead", "tail \n", "Ü", "<é日>", "<dna>", "</dna>"),
    "<oov>",
)
USER_DEFINED = ("<think>", "</think>", "<t", "\n\n", "\n\n\n", "|a|", "<tool>", "a b", "日本", "{}", "Q", "worldwide")
"""Those that a template may write as markers: some begin, end or hold each other; a word, and a single character."""

WORDS = (
    "th he in er an on re at en nd or it is ou the and you hello world think tool im start end text mask "
    "_t _a _s _w _i _the _and _is _in _to _of _you _hello _world __ ____ \n\n im_start _<"
)

ASCII = [chr(code) for code in range(0x21, 0x7F)]
LETTERS = [*ASCII, "é", "日", "本", "Ü"]


@attrs.define
class _Builder:
    texts: list[str] = attrs.field(factory=list)
    types: list[TokenType] = attrs.field(factory=list)
    scores: list[float] = attrs.field(factory=list)

    def add(self, text: str, kind: TokenType = TokenType.NORMAL, score: float = 0.0) -> None:
        if text not in self.texts:
            self.texts.append(text)
            self.types.append(kind)
            self.scores.append(score)

    def add_specials(self) -> None:
        self.add("<unk>", TokenType.UNKNOWN)
        for text in CONTROL:
            self.add(text, TokenType.CONTROL)
        for text in USER_DEFINED:
            self.add(text, TokenType.USER_DEFINED)


def _bytes(builder: _Builder) -> None:
    for byte in range(256):
        builder.add(f"<0x{byte:02X}>", TokenType.BYTE)


def _spm(builder: _Builder) -> None:
    _bytes(builder)
    for rank, word in enumerate(WORDS.split(" ")):
        builder.add(word.replace("_", "▁"), score=-1.0 - rank)
    # These lead by merges to texts of control tokens.
    for rank, word in enumerate(("<s", "</", "</s", "<a", "<a>")):
        builder.add(word, score=-100.0 - rank)
    for letter in ("▁", *ASCII, "é"):
        builder.add(letter, score=-1000.0)


def _bpe(builder: _Builder, lacks: str) -> list[str]:
    alphabet = byte_alphabet()
    for letter in alphabet:
        if letter not in lacks:
            builder.add(letter)
    # They lead to texts that are no tokens, if any are lacking.
    merges = [f"{a} {b}" for a, b in ("Zy", "Éx", "ÉÉ")] if lacks else []
    for word in (*WORDS.split(" "), "Q", "{}", "ab|"):
        letters = "".join(alphabet[byte] for byte in word.replace("_", " ").encode())
        for end in range(2, len(letters) + 1):
            merges.append(f"{letters[: end - 1]} {letters[end - 1]}")
            builder.add(letters[:end])
    return list(dict.fromkeys(merges))


def _gemma(builder: _Builder) -> list[str]:
    _bytes(builder)
    for letter in ("▁", *LETTERS, "\n"):
        builder.add(letter)
    merges = []
    for word in WORDS.replace("_", "▁").split(" "):
        for end in range(2, len(word) + 1):
            merges.append(f"{word[: end - 1]} {word[end - 1]}")
            builder.add(word[:end])
    return list(dict.fromkeys(merges))


def _ugm(builder: _Builder) -> None:
    for rank, word in enumerate(WORDS.split(" ")):
        builder.add(word.replace("_", "▁"), score=-2.0 - 0.1 * rank)
    for letter in ("▁", "\n", "\t", *LETTERS):
        builder.add(letter, score=-8.0)


def _wpm(builder: _Builder) -> None:
    for letter in LETTERS:
        builder.add(letter)
        builder.add("▁" + letter)
    for word in WORDS.split(" "):
        builder.add(word.replace("_", "▁").strip("\n") or "▁x")


def _rwkv(builder: _Builder) -> None:
    for byte in range(256):
        character = chr(byte)
        builder.add({"\n": "\\n", "\\": "\\\\"}.get(character, character) if byte < 0x7F else f"\\x{byte:02x}")
    for word in WORDS.split(" "):
        builder.add(word.replace("_", " ").replace("\n", "\\n"))


def _plamo(builder: _Builder) -> None:
    _bytes(builder)
    for rank, word in enumerate(WORDS.replace("_", " ").split(" ")):
        builder.add(word, score=-2.0 - 0.1 * rank)
    for letter in (" ", "\n", *LETTERS):
        builder.add(letter, score=-8.0)


KINDS: dict[str, dict[str, Any]] = {
    "spm": {"model": "llama", "add_space_prefix": False},
    "spm-prefix": {"model": "llama", "add_space_prefix": True},
    "spm-rstrip": {"model": "llama", "add_space_prefix": True, "name": "phi-3"},
    "bpe": {"model": "gpt2", "pre": "smollm"},
    "bpe-whole-words": {"model": "gpt2", "pre": "llama-bpe"},
    "bpe-lacking": {"model": "gpt2", "pre": "smollm", "lacks": "zðŁĤ"},
    "bpe-regex": {"model": "gpt2", "pre": "deepseek-llm"},
    "bpe-lstrip": {"model": "gpt2", "pre": "gpt-2", "name": "modern-bert"},
    "bpe-rstrip": {"model": "gpt2", "pre": "gpt-2", "name": "phi3"},
    "gemma4": {"model": "gemma4"},
    "ugm": {"model": "t5", "add_space_prefix": False},
    "ugm-merging": {"model": "t5", "add_space_prefix": True, "remove_extra_whitespaces": True},
    "wpm": {"model": "bert"},
    "rwkv": {"model": "rwkv"},
    "plamo2": {"model": "plamo2"},
    "whitespace": {"model": "whitespace", "pre": "whitespace"},
    "hybriddna": {"model": "hybriddna", "pre": "gpt-2"},
}
"""What each is made of.  ``name`` is a model's: some tokens of models of this name take whitespace along."""


def load_vocabulary(path: Path, kind: str) -> Model:
    """A tiny model whose vocabulary is of this kind; one that only embedding models have is let in as well."""
    write_vocabulary(path, **KINDS[kind])
    if KINDS[kind]["model"] != "bert":
        return Model.load(path)
    header = check_gguf(os.fspath(write_vocabulary(path.with_suffix(".header"), **KINDS["ugm"])))
    with mock.patch.object(_model, "check_gguf", return_value=header):
        return Model.load(path)


def write_vocabulary(path: Path, **settings: Any) -> Path:
    """A tiny model with a vocabulary; ``settings`` are as in :data:`KINDS`."""
    builder, merges = _Builder(), None
    builder.add_specials()
    match settings["model"]:
        case "llama":
            _spm(builder)
        case "gpt2" | "whitespace" | "hybriddna":
            merges = _bpe(builder, settings.pop("lacks", ""))
        case "gemma4":
            merges = _gemma(builder)
        case "t5":
            _ugm(builder)
        case "bert":
            _wpm(builder)
        case "plamo2":
            _plamo(builder)
        case _:
            _rwkv(builder)
    size = -(-max(len(builder.texts), 600) // 32) * 32
    for token in range(len(builder.texts), size):
        builder.add(f"<unused{token}>", TokenType.UNUSED)
    metadata, tensors = tiny_model_parts(n_vocab=size)
    for key in ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.scores"):
        metadata.pop(key, None)
    name = settings.pop("name", None)
    if name is not None:
        metadata["general.name"] = name
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in settings.items()}
    metadata["tokenizer.ggml.tokens"] = Array(ValueType.STRING, builder.texts)
    metadata["tokenizer.ggml.token_type"] = Array(ValueType.I32, builder.types)
    metadata["tokenizer.ggml.bos_token_id"] = builder.texts.index("<s>")
    metadata["tokenizer.ggml.eos_token_id"] = builder.texts.index("</s>")
    for key in ("seperator_token_id", "mask_token_id", "cls_token_id"):
        metadata[f"tokenizer.ggml.{key}"] = builder.texts.index("[MASK]")
    if merges is None:
        metadata["tokenizer.ggml.scores"] = Array(ValueType.F32, builder.scores)
    else:
        metadata["tokenizer.ggml.merges"] = Array(ValueType.STRING, merges)
    return write_gguf(path, metadata, tensors)
