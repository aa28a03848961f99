"""Data files of every usual form are read as chats, or refused; never trained on as prose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from laneway import InvalidRequestError
from laneway_plugins._finetune_data import Chat, decode, parse_chats
from laneway_plugins._finetune_formats import looks_like_chats, read_entries
from laneway_plugins._messages import Message
from tests.plugins.scripted import scripted
from tests.plugins.test_finetune_data import read, written

USER, ANSWER, SYSTEM = Message("user", "Hi?"), Message("assistant", "Yes."), Message("system", "Be brief.")
SHAPES: list[tuple[Any, tuple[Message, ...]]] = [
    ({"messages": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}]}, (USER, ANSWER)),
    (
        {"id": 7, "messages": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}]},
        (USER, ANSWER),
    ),
    ({"conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Yes."}]}, (USER, ANSWER)),
    (
        {
            "conversations": [{"from": "Human ", "value": "Hi?"}, {"from": "GPT", "value": "Yes."}],
            "system": "Be brief.",
        },
        (SYSTEM, USER, ANSWER),
    ),
    (
        {
            "conversations": [
                {"from": "system", "value": "Be brief."},
                {"from": "user", "value": "Hi?"},
                {"from": "chatgpt", "value": "Yes."},
            ]
        },
        (SYSTEM, USER, ANSWER),
    ),
    ({"conversations": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}]}, (USER, ANSWER)),
    ({"instruction": "Hi?", "output": "Yes."}, (USER, ANSWER)),
    ({"instruction": "Hi?", "input": "", "output": "Yes.", "text": "Below is an instruction"}, (USER, ANSWER)),
    ({"instruction": "Hi?", "input": None, "output": "Yes.", "system": None}, (USER, ANSWER)),
    (
        {"instruction": "Add.", "input": "1, 2", "output": "3"},
        (Message("user", "Add.\n\n1, 2"), Message("assistant", "3")),
    ),
    ({"instruction": "", "input": "Hi?", "output": "Yes.", "system": "Be brief."}, (SYSTEM, USER, ANSWER)),
    ({"prompt": "Hi?", "completion": "Yes."}, (USER, ANSWER)),
    (
        {"prompt": [{"role": "user", "content": "Hi?"}], "completion": [{"role": "assistant", "content": "Yes."}]},
        (USER, ANSWER),
    ),
    ([{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}], (USER, ANSWER)),
]
IDS = [str(number) for number in range(len(SHAPES))]


@pytest.mark.parametrize(("value", "messages"), SHAPES, ids=IDS)
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_every_shape_in_every_layout(value: Any, messages: tuple[Message, ...], ending: str) -> None:
    layouts: dict[str, tuple[str, str]] = {
        "one line": (json.dumps(value), "line"),
        "lines": (ending.join(["", json.dumps(value), "  ", json.dumps(value), ""]), "line"),
        "array": (json.dumps([value, value]), "entry"),
        "array of lines": (json.dumps([value, value], indent=2).replace("\n", ending), "entry"),
        "one value on several lines": (json.dumps(value, indent=2).replace("\n", ending), "entry"),
    }
    for layout, (text, unit) in layouts.items():
        numbers = {"lines": [2, 4], "array": [1, 2], "array of lines": [1, 2]}.get(layout, [1])
        for mark in ("", "\ufeff"):
            plain = decode((mark + text).encode(), "d")
            assert parse_chats(plain, "d") == [Chat(number, messages, unit) for number in numbers], layout
            for suffix in (".txt", "", ".JSONL", ".json", ".ndjson"):
                assert looks_like_chats(plain, suffix), (layout, suffix)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Once upon a time.\n",
        "[Verse 1]\nla la\n",
        "[1] A footnote.\n[2] Another.\n",
        "{curly} braces\nand more\n",
        "{{ template }}\n",
        '"Hello," she said.\n"Well," he said.\n',
        '{ "quoted" }\n',
        "{\n",
        "[\n",
        "3\n4\n5\n",
        'He wrote {"messages": []} on the wall.\n',
        'A text\nwith an example:\n{"messages": []}\nand more\nof it.\n',
        "[" * 100_000,
    ],
)
def test_text_is_text(text: str) -> None:
    assert not looks_like_chats(text, ".txt")
    assert not looks_like_chats(text, ".md")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": 1, "b": 2}', "line 1: no chat, but an object with the keys 'a', 'b'"),
        ('{"text": "once"}\n{"text": "twice"}\n', "line 2: no chat, but an object with the keys 'text'"),
        ("[1, 2]", "entry 1: no chat, but a number"),
        ('[["a", "b"]]', "entry 1: no chat, but a list"),
        ("{}", "line 1: no chat, but an object without a key"),
        ('[{"messages": []}, {"messages"', "the array is no JSON: Expecting|line 1: no JSON: Expecting"),
        ('[\n{"messages": []},\n{"messages"', r"the array is no JSON: .*\(line 3\)"),
        ('{\n  "messages": [\n', "line 1: no JSON"),
        ('# a comment\n{"text": "a"}\n{"text": "b"}\n', "line 1: no JSON.*line 2: no chat"),
        (json.dumps({"a": 1}, indent=2) + "\n" + json.dumps({"a": 1}, indent=2), "no JSON"),
    ],
)
def test_json_of_another_kind_is_refused_with_what_to_do(text: str, reason: str) -> None:
    assert looks_like_chats(text, ".txt")
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        parse_chats(text, "data")
    for word in ('"messages"', '"conversations"', '"instruction"', '"completion"', "--format text"):
        assert word in caught.value.reason


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "tool", "value": "b"}]}, "turn 2 is from 'tool'"),
        ({"conversations": [{"from": "human"}]}, "turn 1 has no value"),
        ({"conversations": [{"from": "human", "value": "a", "weight": 0}]}, "nothing else such as 'weight'"),
        ({"conversations": [{"from": "human", "value": 5}]}, "content of a message must be a str"),
        ({"conversations": ["a"]}, "a message is a mapping"),
        ({"conversations": "a"}, "conversations must be a list"),
        ({"conversations": [], "tools": "[]"}, "nothing else such as 'tools'"),
        ({"instruction": "a", "output": ["b"]}, "output must be text, not a list"),
        ({"instruction": "a", "output": "b", "history": []}, "nothing else such as 'history'"),
        ({"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]}, "prompt must be a list"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "no chat, but an object with the keys 'prompt', 'chosen'"),
        (
            {"messages": [{"role": "user", "content": "\ud800"}, {"role": "assistant", "content": "b"}]},
            "lone surrogate",
        ),
    ],
)
def test_a_wrong_entry_is_named_by_its_number(value: Any, reason: str) -> None:
    text = json.dumps([SHAPES[0][0], value, SHAPES[2][0]], indent=1)
    with pytest.raises(InvalidRequestError, match=f"data: entry 2: .*{reason}"):
        parse_chats(text, "data")


def test_many_wrong_entries_are_counted() -> None:
    with pytest.raises(InvalidRequestError, match=r"and 2 more entries \(7 of 8 entries are wrong\)$"):
        parse_chats(json.dumps([5] * 7 + [SHAPES[0][0]]), "d")


@given(st.text(alphabet='{}[]",:\\ \n\r\tabt1\ufeff') | st.text())
def test_no_text_is_too_odd_to_be_looked_at(text: str) -> None:
    for suffix in ("", ".json"):
        if looks_like_chats(text, suffix):
            try:
                entries = read_entries(text)
            except InvalidRequestError:
                continue
            # Only what is blank has no entry, or an empty array.
            assert entries.values or not text.strip() or text.strip().startswith("[")


@pytest.mark.parametrize("name", ["chats.json", "CHATS.JSONL", "chats.ndjson", "chats", "chats.txt"])
@pytest.mark.parametrize("layout", ["lines", "array"])
async def test_chats_are_learned_as_chats_whatever_the_name(
    tmp_path: Path, name: str, layout: str, autojump_clock: trio.testing.MockClock
) -> None:
    values = [value for value, messages in SHAPES if messages == (USER, ANSWER)]
    text = json.dumps(values) if layout == "array" else "".join(json.dumps(value) + "\n" for value in values)
    async with scripted() as s:
        usual = await read(s, written(tmp_path, json.dumps(SHAPES[0][0]), "usual.jsonl"))
        data = await read(s, written(tmp_path, text, name))
        assert [example.tokens for example in data.train] == [usual.train[0].tokens] * len(values)
        assert {example.mask for example in data.train} == {usual.train[0].mask}
        plain = await read(s, written(tmp_path, text, name), format="text", length=10_000)
        assert plain.train[0].tokens.tolist() == s.tokenizer.tokenize(text)


async def test_an_entry_that_the_template_refuses_is_named(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    long = {"prompt": "a", "completion": "Yes. " * 50}
    async with scripted() as s:
        with pytest.raises(InvalidRequestError, match=r"d.json: entry 2: the chat has \d+ tokens"):
            await read(s, written(tmp_path, json.dumps([SHAPES[0][0], long]), "d.json"))
