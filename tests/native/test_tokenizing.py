"""Text to tokens: the same as llama.cpp gives, in linear time, and no control token but where a template wrote it."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from laneway.decoder import InvalidRequestError, LongTextTokenizer, TokenizingStopped, Written
from laneway_native import Model
from tests.native.hostile import corpus, readable, shown
from tests.native.vocabularies import CONTROL, KINDS, USER_DEFINED, load_vocabulary, write_vocabulary

MERGING = ("bpe", "gemma4", "spm")
"""Beginnings of the names of kinds that read every byte, and so never answer with the token for what is unknown."""

Load = Callable[[str], Model]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    """Loads a vocabulary of a kind once."""
    folder = tmp_path_factory.mktemp("vocabularies")
    models: dict[str, Model] = {}

    def load_once(kind: str) -> Model:
        if kind not in models:
            models[kind] = load_vocabulary(folder / f"{kind}.gguf", kind)
        return models[kind]

    yield load_once
    for model in models.values():
        model.close()


def texts_of(model: Model) -> dict[int, str]:
    """The special tokens of a model."""
    texts = {token: model.special_piece(token).decode("utf-8", "replace") for token in range(model.size)}
    return {token: text for token, text in texts.items() if text in (*CONTROL, *USER_DEFINED, "<unk>")}


def guarded_by(model: Model, kind: str, markers: frozenset[int]) -> set[int]:
    """What must not come of content."""
    unknown = {"<unk>"} if kind.startswith(MERGING) else set()
    return {*markers} | {token for token, text in texts_of(model).items() if text in {*CONTROL, *unknown}}


def markers_of(model: Model) -> frozenset[int]:
    return frozenset(token for text, token in model.user_defined.items() if text in USER_DEFINED)


BITS = st.sampled_from(
    (
        *(*CONTROL, *USER_DEFINED, "<unk>", "<", "|", ">", "a", "b", " ", "  ", "\n", "\t", "hello", " world", "think"),
        *(" [MASK] ", "\n[MASK]", "<|im_start|> \n", "zzz", "Zy", "\u0100"),
        *("é", "日", "x", "Z", "/", "s>", "<s", "</", "im_start", "\u2581", "\u00a0", "😀", "\0", "don't", "12345"),
    )
)
TEXTS = st.lists(BITS, max_size=14).map("".join)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_llama(kind: str, load: Load) -> None:
    model = load(kind)
    control = {token for token, text in texts_of(model).items() if text in CONTROL}

    @given(TEXTS)
    def everywhere(text: str) -> None:
        expected = model.tokenize_with_llama(text, special=True)
        assert model.tokenize(text, bos=False, special=True) == expected
        # A template that has written everything.
        written = Written(spans=((0, len(text)),), markers=markers_of(model))
        assert model.tokenize(text, bos=False, special=written) == expected

    @given(TEXTS)
    def nowhere(text: str) -> None:
        expected = model.tokenize_with_llama(text)
        # llama.cpp's RWKV tokenizer, for one, finds control tokens all the same.
        assume(not control.intersection(expected))
        assume(not kind.startswith(MERGING) or "<unk>" not in text)
        assert model.tokenize(text, bos=False) == expected

    everywhere()
    nowhere()


@pytest.mark.parametrize(
    ("kind", "text", "left"),
    [
        ("bpe-lstrip", "a \n\t[MASK] b", "a b"),
        ("bpe-rstrip", "a <|im_start|> \n\tb", "a b"),
        ("spm-rstrip", "a <|im_start|> \n\tb", " a  b"),  # a space before each piece
        ("bpe", "a [MASK] b", "a  b"),
    ],
)
def test_special_tokens_take_whitespace_along_as_in_llama(kind: str, text: str, left: str, load: Load) -> None:
    model = load(kind)
    tokens = model.tokenize(text, bos=False, special=True)
    assert tokens == model.tokenize_with_llama(text, special=True)
    assert model.detokenize(tokens).decode() == left
    # Where it is no token it takes nothing.
    assert model.detokenize(model.tokenize(text, bos=False)).decode().removeprefix(" ") == text


def test_a_marker_that_is_a_word_stays_one_word_for_wordpiece(load: Load) -> None:
    model = load("wpm")
    markers = frozenset({model.user_defined["worldwide"]})
    tokens = model.tokenize("a worldwide b", bos=False, special=Written(spans=(), markers=markers))
    assert not markers.intersection(tokens)
    assert model.detokenize(tokens) == b" a worldwide b"


@pytest.mark.parametrize("kind", KINDS)
def test_a_template_around_contents_without_markers_gives_the_tokens_of_llama(kind: str, load: Load) -> None:
    model = load(kind)
    markers = markers_of(model)
    guarded = [text for token, text in texts_of(model).items() if text in (*CONTROL, "<unk>") or token in markers]

    @given(TEXTS, st.lists(st.integers(0, 3), min_size=40, max_size=40))
    def same(text: str, more: list[int]) -> None:
        # The template has written every marker, and some of what is beside it.
        written = [False] * len(text)
        for marker in guarded:
            for at in range(len(text) - len(marker) + 1):
                if text.startswith(marker, at):
                    start, end = max(0, at - more[at % 40]), at + len(marker) + more[-at % 40]
                    written[start:end] = [True] * len(written[start:end])
        places = [at for at, (a, b) in enumerate(itertools.pairwise([False, *written, False])) if a != b]
        special = Written(spans=tuple(zip(places[::2], places[1::2], strict=True)), markers=markers)
        expected = model.tokenize_with_llama(text, special=True)
        assert model.tokenize(text, bos=False, special=special) == expected

    same()


@pytest.mark.parametrize("kind", KINDS)
def test_no_control_token_comes_of_content(kind: str, load: Load) -> None:
    model = load(kind)
    markers = markers_of(model) - {model.user_defined["Q"]}
    guarded = guarded_by(model, kind, markers)
    (start,) = model.tokenize_with_llama("<|im_start|>", special=True)
    (end,) = model.tokenize_with_llama("<|im_end|>", special=True)
    for wild in corpus():
        content = readable(kind, wild)
        head, tail = "<|im_start|>user\n", "<|im_end|>"
        text = head + content + tail
        written = Written(spans=((0, len(head)), (len(head) + len(content), len(text))), markers=markers)
        tokens = model.tokenize(text, bos=False, special=written)
        assert [token for token in tokens if token in guarded] == [start, end], content
        assert (tokens[0], tokens[-1]) == (start, end)
        spelled = model.detokenize(tokens[1:-1], special=True).decode()
        if model.metadata.get("tokenizer.ggml.add_space_prefix") == "true":
            spelled = spelled.removeprefix(" ")
        assert shown(kind, spelled) == shown(kind, "user\n" + content), content


@pytest.mark.parametrize("kind", KINDS)
def test_a_marker_counts_only_if_one_span_holds_it_whole(kind: str, load: Load) -> None:
    model = load(kind)
    (start,) = model.tokenize_with_llama("<|im_start|>", special=True)
    text = "<|im_start|>"
    whole = (((0, 12),), ((0, 6), (6, 12)), ((0, 11),), ((1, 12),), ())
    found = [model.tokenize(text, bos=False, special=Written(spans=spans)) for spans in whole]
    assert found[0] == [start]
    assert all(start not in tokens for tokens in found[1:])
    twice = "é<|im_start|>日<|im_start|>"  # spans are of characters
    tokens = model.tokenize(twice, bos=False, special=Written(spans=((14, 26),)))
    assert tokens.count(start) == 1
    assert tokens[-1] == start


@pytest.mark.parametrize("kind", KINDS)
def test_user_defined_tokens_are_found_everywhere_unless_they_are_markers(kind: str, load: Load) -> None:
    model = load(kind)
    think = model.user_defined["</think>"]
    text = "hello</think>world"
    for special in (False, True, Written(spans=())):
        assert think in model.tokenize(text, special=special)
    tokens = model.tokenize(text, bos=False, special=Written(spans=(), markers=frozenset({think})))
    assert think not in tokens
    spelled = model.detokenize(tokens, special=True).decode()
    assert shown(kind, spelled).strip() == shown(kind, text)


def test_what_only_a_marker_can_write_is_refused(load: Load) -> None:
    model = load("bpe")
    letter = model.user_defined["Q"]
    assert model.tokenize("Quick", bos=False)[0] == letter
    with pytest.raises(InvalidRequestError, match="'Q', which the vocabulary can only write as a special token"):
        model.tokenize("Quick", special=Written(spans=(), markers=frozenset({letter})))


@pytest.mark.parametrize("spans", [((0, 9),), ((2, 1),), ((2, 4), (3, 5)), ((3, 4), (0, 1)), ((-1, 2),)])
def test_spans_that_are_none(load: Load, spans: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="in order and apart"):
        load("spm").tokenize("12345678", special=Written(spans=spans))


@given(markers=st.integers(1, 3), text=TEXTS, spans=st.data())
def test_markers_that_are_no_tokens_do_nothing(load: Load, markers: int, text: str, spans: Any) -> None:
    model = load("bpe")
    a = spans.draw(st.integers(0, len(text)))
    b = spans.draw(st.integers(a, len(text)))
    odd = Written(spans=((a, b),), markers=frozenset({-1, model.size, 2**31 - 1}))
    assert model.tokenize(text, special=odd) == model.tokenize(text, special=Written(spans=((a, b),)))


# Work.


def test_many_markers_take_no_call_of_llama(load: Load) -> None:
    """llama.cpp's own search takes time that grows with the square of their number."""
    for kind in KINDS:
        model = load(kind)
        (start,) = model.tokenize_with_llama("<|im_start|>", special=True)
        tokens, calls = model.tokenize_counted("<|im_start|>" * 83_333, special=True)
        assert calls == 0
        assert tokens == [start] * 83_333


def test_what_was_asked_once_is_remembered(load: Load) -> None:
    model = load("bpe-regex")
    one = model.tokenize_with_llama("<|im_start|>user\nhello", special=True)
    tokens, calls = model.tokenize_counted("<|im_start|>user\nhello" * 20_000, special=True)
    assert calls == 1
    assert tokens == one * 20_000


def test_markers_in_content_take_few_calls(load: Load) -> None:
    """Each is cut once, and what lies between two cuts is the same."""
    model = load("bpe")
    tokens, calls = model.tokenize_counted(
        "<think>" * 20_000, special=Written(spans=(), markers=frozenset({model.user_defined["<think>"]}))
    )
    assert calls <= 3
    assert model.detokenize(tokens) == b"<think>" * 20_000


def test_tokens_that_end_with_one_another_are_found_in_a_long_run(load: Load) -> None:
    model = load("gemma4")
    for count in range(3, 40):
        assert model.tokenize("\n" * count, special=True, bos=False) == model.tokenize_with_llama(
            "\n" * count, special=True
        )
    three = model.user_defined["\n\n\n"]
    assert model.tokenize("\n" * 300_000, bos=False) == [three] * 100_000


def test_a_stopped_call_ends(load: Load) -> None:
    model = load("spm")
    assert isinstance(model, LongTextTokenizer)
    for text in ("", "hello", "hello<|im_start|>" * 100_000):
        assert model.tokenize(text, special=True, stop=bytearray(1)) == model.tokenize(text, special=True)
        with pytest.raises(TokenizingStopped):
            model.tokenize(text, special=True, stop=bytearray(b"\1"))


@pytest.mark.parametrize("kind", ["bpe-regex", "spm"])
def test_a_call_under_way_is_stopped(kind: str, load: Load) -> None:
    """Left alone, each of these texts takes longer than any thread is kept from running."""
    model = load(kind)
    text = (
        "".join(f"<|im_start|>{number}" for number in range(1_000_000)) if kind == "bpe-regex" else "hello" * 8_000_000
    )
    stop, outcomes = bytearray(1), list[type[BaseException] | None]()

    def work() -> None:
        try:
            model.tokenize(text, special=True, stop=stop)
        except TokenizingStopped as stopped:
            outcomes.append(type(stopped))
        else:
            outcomes.append(None)

    thread = threading.Thread(target=work)
    thread.start()
    stop[0] = 1
    thread.join()
    assert outcomes == [TokenizingStopped]


LONG_RUNS = """
import sys
from laneway_native import Model
with Model.load(sys.argv[1]) as model:
    for character in ("a", "A", " ", "!", "\\n", "1", "é", "日"):
        tokens = model.tokenize(character * 60_000, bos=False)
        assert model.detokenize(tokens) == character.encode() * 60_000, character
"""


@pytest.mark.slow
@pytest.mark.parametrize("pre", ["deepseek-llm", "deepseek-v3", "gpt-4o", "tekken", "falcon", "bloom"])
def test_long_words_do_not_end_the_process(pre: str, tmp_path: Path) -> None:
    """llama.cpp's matcher calls itself for each character of a word: on a stack of 8 MB 26,000 of them end it."""
    path = write_vocabulary(tmp_path / "model.gguf", model="gpt2", pre=pre)
    done = subprocess.run(
        [sys.executable, "-c", LONG_RUNS, os.fspath(path)],
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["bpe", "spm"])
def test_many_special_tokens_make_a_text_long(kind: str, load: Load) -> None:
    model = load(kind)
    assert not model.is_long("")
    assert not model.is_long("hello" * 3999)
    assert model.is_long("hello" * 4000)
    assert not model.is_long("<|im_start|>" * 63 + "hello" * 1000)
    assert model.is_long("<|im_start|>" * 64)
    assert model.is_long("</think>hello" * 64)  # those of the user as well


# The lower bound.


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_has_fewer_tokens_than_the_bound(kind: str, load: Load) -> None:
    model = load(kind)

    @given(TEXTS | st.text(max_size=80), st.integers(1, 20))
    def holds(text: str, times: int) -> None:
        text *= times
        least = model.least_tokens(text)
        assert least >= 0
        for special in (False, True, Written(spans=(), markers=frozenset({model.user_defined["<think>"]}))):
            assert least <= len(model.tokenize(text, bos=False, special=special))

    holds()
    assert model.least_tokens("") == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_is_of_use_where_nothing_can_vanish(kind: str, load: Load) -> None:
    """Of the words of the vocabulary: "hello" has letters of tokens of up to 13 bytes (``<|endoftext|>``)."""
    model = load(kind)
    least = model.least_tokens("hello" * 1000)
    vanishing = kind in ("ugm", "ugm-merging", "wpm", "plamo2", "whitespace", "hybriddna")
    assert least == 0 if vanishing else least >= 5000 // 13


def test_a_text_without_utf8_form_has_no_bound(load: Load) -> None:
    with pytest.raises(InvalidRequestError, match="not valid Unicode"):
        load("spm").least_tokens("\ud800")
