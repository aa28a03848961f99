"""What a model thinks before it answers is no part of the answer."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneway_plugins._thoughts import MARKERS, THOUGHTS, SpelledOut, WithoutThought, opened_by, thinks

FAMILIES = sorted(THOUGHTS.items())


def answer(text: str, close: str | None = None) -> tuple[str, bool]:
    filter_ = WithoutThought(close)
    return filter_.push(text) + filter_.end(), filter_.thinking


@pytest.mark.parametrize(("begin", "close"), FAMILIES)
def test_a_thought_at_the_beginning_is_dropped(begin: str, close: str) -> None:
    assert answer(f"{begin}I wonder.\n{close}Good morning") == ("Good morning", False)
    assert answer(f"\n {begin}{close}Good morning") == ("Good morning", False)
    assert answer(f"{begin}one{close}\n{begin}two{close}Good morning") == ("Good morning", False)
    assert answer(f"{begin}I wonder") == ("", True)
    assert answer(f"I wonder{close}Good morning", close) == ("Good morning", False)
    assert answer("I wonder", close) == ("", True)


@pytest.mark.parametrize(
    "text", ["", "Good morning", "<b>Good</b>", "<thin ice", "<", "[", "x <think>y</think>", " \n"]
)
def test_everything_else_is_the_answer(text: str) -> None:
    assert answer(text) == (text, False)


def test_an_answer_without_a_thought_in_a_form_of_channels() -> None:
    assert answer("<|channel|>final<|message|>Hi") == ("Hi", False)
    thought = "<|channel|>analysis<|message|>User wants it.<|end|><|start|>assistant"
    assert answer(f"{thought}<|channel|>final<|message|>Hi") == ("Hi", False)


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<thi", "nk>", "[THINK]", "[/THINK]", " ", "\n", "<", "word"])),
    st.data(),
)
def test_it_does_not_matter_where_the_answer_was_cut(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    filter_ = WithoutThought()
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    shown = "".join([*map(filter_.push, pieces), filter_.end()])
    assert (shown, filter_.thinking) == answer(text)


@pytest.mark.parametrize(("begin", "close"), FAMILIES)
def test_a_prompt_may_open_the_thought(begin: str, close: str) -> None:
    assert opened_by(f"<|assistant|>{begin}\n") == close
    assert opened_by(f"<|assistant|>{begin}\n\n{close}\n\n") is None
    assert thinks("{{ '" + begin + "' }}")


def test_a_usual_template_knows_of_no_thoughts() -> None:
    assert not thinks("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}")
    assert not thinks(None)


@given(st.lists(st.sampled_from(["a", "é", "🙂", "word", *MARKERS[:4]])), st.data())
def test_control_tokens_are_written_out_where_they_stand(parts: list[str], data: st.DataObject) -> None:
    names = dict(enumerate(MARKERS))
    vocabulary: dict[int, bytes] = dict.fromkeys(names, b"")
    tokens: list[int] = []
    for part in parts:
        if part in MARKERS:
            tokens.append(MARKERS.index(part))
            continue
        for byte in part.encode():
            tokens.append(1000 + byte)
            vocabulary[1000 + byte] = bytes([byte])
    text = "".join(part for part in parts if part not in MARKERS)
    # A step may make several tokens, and text is held back where it may become a stop string.
    spelled = SpelledOut(vocabulary.__getitem__, names)
    shown, at = [], 0
    for count in sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=5))):
        made = b"".join(vocabulary[token] for token in tokens[:count]).decode("utf-8", "ignore")
        until = max(at, len(made) - data.draw(st.integers(0, 2)))
        shown.append(spelled.push(text[at:until], tokens[:count]))
        at = until
    shown.append(spelled.push(text[at:], tokens))
    assert "".join(shown) == "".join(parts)
