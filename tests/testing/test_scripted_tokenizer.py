from __future__ import annotations

import jinja2.sandbox
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneway.decoder import InvalidRequestError, Tokenizer, Written
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


MARKED = ScriptedTokenizer(user_defined=("<think>", "<think><|end|>", "|>", "\n\n\n"))
ALL = frozenset(MARKED.user_defined.values())
BITS = st.lists(st.sampled_from([*MARKED.user_defined, "<|turn|>", "<|end|>", "<|", "end|>", "think", "a", "é"])).map(
    "".join
)


def test_user_defined_tokens_are_found_everywhere_and_spelled_out() -> None:
    think = MARKED.user_defined["<think>"]
    assert MARKED.size == ScriptedTokenizer().size + 4
    for special in (False, True, Written(spans=())):
        tokens = MARKED.tokenize("a<think>b", bos=False, special=special)
        assert tokens == [ord("a"), think, ord("b")]
    assert MARKED.piece(think) == b"<think>"
    assert MARKED.name(think) == "<think>"
    with pytest.raises(ValueError, match="differ from each other"):
        ScriptedTokenizer(user_defined=("<|end|>",))
    with pytest.raises(ValueError, match="differ from each other"):
        ScriptedTokenizer(user_defined=("",))


def test_the_longest_whole_text_is_taken_first() -> None:
    long = MARKED.user_defined["<think><|end|>"]
    assert MARKED.tokenize("<think><|end|>", bos=False) == [long]
    # Over the whole text, not from the left.
    tokenizer = ScriptedTokenizer(user_defined=("ab", "bcd"))
    assert tokenizer.tokenize("abcd", bos=False) == [ord("a"), tokenizer.user_defined["bcd"]]


@given(BITS)
def test_what_a_template_wrote_whole_is_what_is_written(text: str) -> None:
    everything = Written(spans=((0, len(text)),), markers=ALL)
    assert MARKED.tokenize(text, special=everything) == MARKED.tokenize(text, special=True)
    assert MARKED.tokenize(text, special=Written(spans=())) == MARKED.tokenize(text)


@given(BITS, BITS, BITS)
def test_content_is_spelled_as_it_is(head: str, content: str, tail: str) -> None:
    text = head + content + tail
    spans = ((0, len(head)), (len(text) - len(tail), len(text)))
    tokens = MARKED.tokenize(text, bos=False, special=Written(spans=spans, markers=ALL))
    written = [MARKED.tokenize(part, bos=False, special=True) for part in (head, tail)]
    assert tokens[: len(written[0])] == written[0]
    assert tokens[len(tokens) - len(written[1]) :] == written[1]
    between = tokens[len(written[0]) : len(tokens) - len(written[1])]
    assert MARKED.text(between) == content
    assert not set(between).intersection(range(ScriptedTokenizer().size - 4, MARKED.size))


def test_a_marker_counts_only_if_one_span_holds_it_whole() -> None:
    tokenizer = ScriptedTokenizer()
    (turn,) = tokenizer.tokenize("<|turn|>", bos=False, special=True)
    for spans, count in ((((0, 8),), 1), (((0, 4), (4, 8)), 0), (((0, 7),), 0), (((1, 8),), 0), (((0, 8), (8, 16)), 2)):
        tokens = tokenizer.tokenize("<|turn|><|turn|>", bos=False, special=Written(spans=spans))
        assert tokens.count(turn) == count
