from __future__ import annotations

import jinja2.sandbox
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneway.decoder import InvalidRequestError, Tokenizer
from laneway.testing import ScriptedTokenizer

TEXTS = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("é€日本😀 café!.\n<|>"))


def test_implements_the_protocol() -> None:
    assert isinstance(ScriptedTokenizer(), Tokenizer)


@given(TEXTS)
def test_every_text_reads_back(text: str) -> None:
    tokenizer = ScriptedTokenizer()
    tokens = tokenizer.tokenize(text, bos=False)
    assert b"".join(map(tokenizer.piece, tokens)) == text.encode()
    assert all(0 <= token < tokenizer.size for token in tokens)


@given(TEXTS)
def test_special_text_is_text_unless_asked_for(text: str) -> None:
    tokenizer = ScriptedTokenizer()
    prompt = f"<|turn|>{text}<|end|>"
    assert tokenizer.text(tokenizer.tokenize(prompt)) == prompt
    special = tokenizer.tokenize(prompt, special=True)
    assert special[-1] in tokenizer.end_tokens
    assert tokenizer.name(special[0]) == "<|begin|>"
    assert tokenizer.name(special[1]) == "<|turn|>"


def test_pieces_end_inside_characters() -> None:
    tokenizer = ScriptedTokenizer()
    pieces = [tokenizer.piece(token) for token in tokenizer.tokenize("café €.", bos=False)]
    assert pieces == [b"caf\xc3", b"\xa9 ", b"\xe2", b"\x82", b"\xac."]


def test_a_dangling_half_is_one_replacement() -> None:
    tokenizer = ScriptedTokenizer()
    assert tokenizer.text(tokenizer.tokenize("café", bos=False)[:1]) == "caf�"


def test_begin_only_where_wanted() -> None:
    assert ScriptedTokenizer().tokenize("", bos=True) == ScriptedTokenizer().tokenize(
        "<|begin|>", bos=False, special=True
    )
    assert ScriptedTokenizer(bos=False).tokenize("", bos=True) == []
    assert ScriptedTokenizer(bos=False).special_text("bos") == ""
    assert ScriptedTokenizer().special_text("eos") == "<|end|>"
    assert ScriptedTokenizer().special_text("pad") == ""


def test_surrogates_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="UTF-8"):
        ScriptedTokenizer().tokenize("\ud800")


def test_tokens_beyond_the_vocabulary_are_refused() -> None:
    tokenizer = ScriptedTokenizer()
    assert tokenizer.piece(tokenizer.size - 1) == b""
    for token in (-1, tokenizer.size):
        with pytest.raises(IndexError, match=str(tokenizer.size)):
            tokenizer.piece(token)


def test_the_chat_template_renders_and_its_turns_end_answers() -> None:
    tokenizer = ScriptedTokenizer()
    assert tokenizer.chat_template is not None
    template = jinja2.sandbox.ImmutableSandboxedEnvironment().from_string(tokenizer.chat_template)
    text = template.render(messages=[{"role": "user", "content": "Hello"}], add_generation_prompt=True)
    assert text == "<|turn|>user\nHello<|turn_end|>\n<|turn|>assistant\n"
    tokens = tokenizer.tokenize(text, special=True)
    assert len(tokens) == 8  # begin, turn, "user\n", "Hello", turn end, "\n", turn, "assistant\n"
    assert tokens[4] in tokenizer.end_tokens
    assert ScriptedTokenizer(chat_template=None).chat_template is None
