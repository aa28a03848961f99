"""What a model is trained on: files to lines, chats to texts with the answers marked, tokens to sequences."""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from laneway import InvalidRequestError
from laneway.testing import ScriptedTokenizer
from laneway_plugins._finetune_data import (
    Chat,
    Example,
    Marked,
    Render,
    close_answers,
    decode,
    mark,
    masked,
    parse_chats,
    pieces,
    split,
    windows,
)
from laneway_plugins._finetune_dataset import Dataset, Reader
from laneway_plugins._messages import Message
from laneway_plugins._templates import ChatTemplate, Rendered
from tests.plugins.scripted import Scripted, scripted
from tests.tiny_model import CHATML

USER, ANSWER = Message("user", "Hi?"), Message("assistant", "Yes.")
TWO_TURNS = (Message("system", "Be brief."), USER, ANSWER, Message("user", "And now?"), Message("assistant", "No."))


def line(*messages: Message) -> str:
    return json.dumps({"messages": [{"role": message.role, "content": message.content} for message in messages]})


# Lines.


def test_a_chat_a_line() -> None:
    text = f"{line(USER, ANSWER)}\n\n  \n{line(*TWO_TURNS)}\r\n"
    assert parse_chats(text, "d") == [Chat(1, (USER, ANSWER)), Chat(4, TWO_TURNS)]


def test_what_comes_after_the_last_answer_is_nothing_to_learn() -> None:
    assert parse_chats(line(USER, ANSWER, USER), "d")[0].messages == (USER, ANSWER)


def test_line_breaks_of_other_alphabets_end_no_line() -> None:
    text = '{"messages": [{"role": "user", "content": "a\u2028b\x85c"}, {"role": "assistant", "content": "d"}]}'
    (chat,) = parse_chats(text, "d")
    assert chat.messages[0].content == "a\u2028b\x85c"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("{", "no JSON"),
        ("nonsense", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[]", "no chat, but a list"),
        ("5", "no chat, but a number"),
        ('{"text": "x"}', "no chat, but an object with the keys 'text'"),
        ('{"messages": [], "weight": 1}', "nothing else such as 'weight'"),
        ('{"messages": "x"}', "must be a list"),
        ('{"messages": {"role": "user", "content": "x"}}', "must be a list"),
        ('{"messages": []}', "at least one message"),
        ('{"messages": [{"role": "user"}]}', "no content"),
        ('{"messages": [{"role": "user", "content": null}]}', "must be a str"),
        ('{"messages": [{"role": "user", "content": "x", "name": "y"}]}', "nothing else such as 'name'"),
        (line(USER), "no message of the assistant"),
        (line(ANSWER), "the first message is the assistant's"),
    ],
)
def test_wrong_lines_are_named_by_number(wrong: str, message: str) -> None:
    text = f"{line(USER, ANSWER)}\n\n{wrong}\n"
    with pytest.raises(InvalidRequestError, match=f"^dataset: chats.jsonl: line 3: .*{message}") as caught:
        parse_chats(text, "chats.jsonl")
    assert "lines are wrong" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_many_wrong_lines_are_counted() -> None:
    text = "\n".join(["{"] * 7 + [line(USER, ANSWER)])
    with pytest.raises(InvalidRequestError) as caught:
        parse_chats(text, "d")
    assert "line 1: no JSON" in caught.value.reason
    assert "line 5: no JSON" in caught.value.reason
    assert "line 6" not in caught.value.reason
    assert caught.value.reason.endswith("and 2 more lines (7 of 8 lines are wrong)")


@pytest.mark.parametrize("text", ["", "\n\n  \n"])
def test_an_empty_file(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="there is no chat in it"):
        parse_chats(text, "d")


def test_bytes_that_are_no_text() -> None:
    assert decode("\ufeffé".encode(), "d") == "é"
    with pytest.raises(InvalidRequestError, match=r"d: line 3: not UTF-8 .*0xff at 5"):
        decode(b"a\nb\nc\xff\n", "d")


# Templates.

LLAMA_2 = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }} {{ eos_token }}"
    "{% else %}<<SYS>>{{ m.content }}<</SYS>>{% endif %}{% endfor %}"
)
"""Without a generation prompt of its own: the answer just follows."""

FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Writes something into the last answer that it leaves out of the earlier ones."""

ENDLESS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

HASTY = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>{% endif %}"
)
"""Asks for an answer in another way than it writes one."""


def render_with(source: str) -> Render:
    template = ChatTemplate(source, bos="<s>", eos="</s>")

    def render(messages: Sequence[Message], asking: bool) -> Rendered:
        return template.render(messages, generation_prompt=asking)

    return render


def words_of(marked: Marked) -> list[str]:
    return [marked.rendered.text[start:end] for start, end in marked.spans]


@pytest.mark.parametrize(
    ("source", "answers"),
    [
        (CHATML, ["Yes.<|im_end|>\n", "No.<|im_end|>\n"]),
        (LLAMA_2, [" Yes. </s>", " No. </s>"]),
        (ENDLESS, ["Yes.\n", "No.\n"]),
    ],
)
def test_the_answers_of_a_chat_are_found(source: str, answers: list[str]) -> None:
    (marked,) = mark(render_with(source), TWO_TURNS)
    assert marked.rendered == render_with(source)(TWO_TURNS, False)
    assert words_of(marked) == answers


def test_the_words_of_others_are_not_taken_for_answers() -> None:
    echo = (Message("user", "Yes."), ANSWER, Message("user", "assistant\nYes."), ANSWER)
    (marked,) = mark(render_with(CHATML), echo)
    assert words_of(marked) == ["Yes.<|im_end|>\n"] * 2
    assert [start for start, _ in marked.spans] == [
        len(render_with(CHATML)(echo[:1], True).text),
        len(render_with(CHATML)(echo[:3], True).text),
    ]


def test_a_template_that_forgets_gives_a_text_for_each_answer() -> None:
    first, second = mark(render_with(FORGETFUL), TWO_TURNS)
    assert words_of(first) == ["<think>\n\n</think>\n\nYes.<|im_end|>\n"]
    assert words_of(second) == ["<think>\n\n</think>\n\nNo.<|im_end|>\n"]
    assert "<think>" not in second.rendered.text[: second.spans[0][0]]
    assert first.rendered == render_with(FORGETFUL)(TWO_TURNS[:3], False)


def test_a_template_whose_answers_cannot_be_told_apart_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="message 2 in such a way that the assistant's words cannot be told"):
        mark(render_with(HASTY), (USER, ANSWER))


def test_a_template_that_leaves_the_answer_out_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="cannot be told"):
        mark(render_with("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"), (USER, ANSWER))


def test_pieces_are_the_text_again() -> None:
    marked = Marked(Rendered("abcdefg", ((0, 2), (4, 6))), ((1, 3), (3, 4), (5, 7)))
    assert pieces(marked) == [
        (Rendered("a", ((0, 1),)), False),
        (Rendered("bc", ((0, 1),)), True),
        (Rendered("d"), True),
        (Rendered("e", ((0, 1),)), False),
        (Rendered("fg", ((0, 1),)), True),
    ]
    assert "".join(piece.text for piece, _ in pieces(marked)) == marked.rendered.text


# Tokens.


def test_nothing_behind_an_end_token_is_learned() -> None:
    tokens, mask = masked([([1, 2], False), ([3, 9, 4], True), ([5], False), ([6, 7], True)], frozenset({9}))
    assert tokens == array("i", [1, 2, 3, 9, 4, 5, 6, 7])
    assert mask == bytes([0, 0, 1, 1, 0, 0, 1, 1])


@pytest.mark.parametrize(
    ("parts", "closed", "unclosed"),
    [
        # The end token is in the answer.
        ([([1], False), ([3, 9, 4], True), ([9, 5], False)], [([1], False), ([3, 9, 4], True), ([9, 5], False)], 0),
        # The next turn's marker ends it.
        ([([1], False), ([3], True), ([9, 5], False)], [([1], False), ([3, 9], True), ([5], False)], 0),
        ([([1], False), ([3], True), ([0, 0, 9, 5], False)], [([1], False), ([3, 0, 0, 9], True), ([5], False)], 0),
        # The last one is given what would follow.
        ([([1], False), ([3], True)], [([1], False), ([3, 0, 9], True)], 0),
        ([([1], False), ([3], True), ([], False)], [([1], False), ([3, 0, 9], True)], 0),
        # Nothing ends it.
        ([([1], False), ([3], True), ([5, 9], False)], [([1], False), ([3], True), ([5, 9], False)], 1),
        ([([3], True), ([9, 4], True)], [([3], True), ([9, 4], True)], 1),
        ([([3], True), ([0], False)], [([3], True), ([0], False)], 1),
    ],
)
def test_an_answer_is_closed_by_the_end_token_that_follows_it(parts: Any, closed: Any, unclosed: int) -> None:
    ends = frozenset({9})
    assert close_answers(parts, ends, [0, 9], lambda token: token == 0) == (closed, unclosed)
    joined = [token for tokens, _ in parts for token in tokens]
    after = [token for tokens, _ in closed for token in tokens]
    assert after[: len(joined)] == joined


def test_a_last_answer_without_anything_behind_it_stays_open() -> None:
    assert close_answers([([1], False), ([3], True)], frozenset({9}), [], lambda token: False)[1] == 1


def test_the_first_token_is_predicted_by_nothing() -> None:
    assert masked([([1, 2], True)], frozenset())[1] == bytes([0, 1])
    assert masked([], frozenset()) == (array("i"), b"")


def test_windows_learn_every_token_once() -> None:
    tokens = list(range(100, 123))
    examples = windows(tokens, 8)
    assert all(2 <= len(example.tokens) <= 8 for example in examples)
    learned = [
        token for example in examples for token, counts in zip(example.tokens, example.mask, strict=True) if counts
    ]
    assert learned == tokens[1:]
    assert windows([1], 8) == []
    assert windows([], 8) == []
    assert [len(example.tokens) for example in windows(list(range(15)), 8)] == [8, 8]
    assert [len(example.tokens) for example in windows(list(range(16)), 8)] == [8, 8, 2]


def examples_of(count: int) -> list[Example]:
    return [Example(array("i", [index, index]), b"\0\1") for index in range(count)]


def test_a_split_is_a_split_and_depends_on_the_seed_alone() -> None:
    examples = examples_of(40)
    train, measured = split(examples, 0.25, 7)
    assert len(measured) == 10
    assert sorted([*train, *measured], key=lambda example: example.tokens[0]) == examples
    assert [example.tokens[0] for example in train] == sorted(example.tokens[0] for example in train)
    assert split(examples, 0.25, 7) == (train, measured)
    assert split(examples, 0.25, 8) != (train, measured)
    assert len(split(examples, 0.0001, 7)[1]) == 1


@pytest.mark.parametrize(("count", "share"), [(1, 0.5), (2, 0.9), (5, 0.99)])
def test_a_split_that_leaves_nothing(count: int, share: float) -> None:
    with pytest.raises(InvalidRequestError, match="leaves none to learn from") as caught:
        split(examples_of(count), share, 0)
    assert caught.value.field == "validation"


def test_an_example_as_the_trainer_reads_it() -> None:
    assert json.loads(Example(array("i", [5, 6]), b"\0\1", 3).to_json()) == {"tokens": [5, 6], "mask": [0, 1]}


# Whole files, on a scripted model.


async def _on_the_loop(function: Any, *args: Any) -> Any:
    await trio.lowlevel.checkpoint()
    return function(*args)


async def read(s: Scripted, path: Path, validation: Any = None, **options: Any) -> Dataset:
    reader = Reader(
        model=s.model, **{"length": 64, "format": "auto", "truncate": False, "off_loop": _on_the_loop, **options}
    )
    return await reader.read(path, validation, 0)


def written(tmp_path: Path, text: str, name: str = "data.jsonl") -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode())
    return path


async def test_text_is_cut_into_windows(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    async with scripted() as s:
        data = await read(s, written(tmp_path, "Hello world. " * 20, "data.txt"), length=16)
        whole = s.tokenizer.tokenize("Hello world. " * 20)
    joined = [token for example in data.train for token in list(example.tokens)[1:]]
    assert [data.train[0].tokens[0], *joined] == whole


@pytest.mark.parametrize("format", ["auto", "text"])
async def test_the_form_is_told_by_the_name_or_said(
    tmp_path: Path, format: str, autojump_clock: trio.testing.MockClock
) -> None:
    async with scripted() as s:
        (example,) = (await read(s, written(tmp_path, line(USER, ANSWER)), format=format, length=200)).train
        assert (example.line == 1) is (format == "auto")
        (chat,) = (await read(s, written(tmp_path, line(USER, ANSWER), "d.txt"), format="chat")).train
        assert chat.line == 1


async def test_special_tokens_in_a_text_are_read_as_such(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with scripted() as s:
        (example,) = (await read(s, written(tmp_path, "<|begin|>a<|end|>", "d.txt"))).train
    assert example.tokens.tolist() == ScriptedTokenizer().tokenize("<|begin|>a<|end|>", bos=False, special=True)


async def test_a_token_over_the_border_is_cut_where_the_model_will_be_asked(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """A space and the answer's first letters make one token together: the prompt ends before it all the same."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    async with scripted(chat_template=template) as s:
        words = s.tokenizer
        (example,) = (await read(s, written(tmp_path, line(Message("user", "x "), Message("assistant", "the"))))).train
        assert example.tokens.tolist() != words.tokenize("x the")
        assert example.tokens.tolist() == words.tokenize("x ") + words.tokenize("the", bos=False)
        assert example.mask == bytes(len(words.tokenize("x "))) + b"\1" * len(words.tokenize("the", bos=False))


async def test_reading_leaves_turns_to_others(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Templates run beside the event loop, and a long chat is tokenised piece by piece."""
    answers = 50
    path = written(tmp_path, line(*[USER, ANSWER] * answers))
    beside = False
    render = ChatTemplate.render

    def watched(template: ChatTemplate, *args: Any, **options: Any) -> Rendered:
        assert beside
        return render(template, *args, **options)

    async def off_loop(function: Any, *args: Any) -> Any:
        nonlocal beside
        await trio.lowlevel.checkpoint()
        beside = True
        try:
            return function(*args)
        finally:
            beside = False

    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    monkeypatch.setattr(ChatTemplate, "render", watched)
    async with scripted() as s, trio.open_nursery() as nursery:
        nursery.start_soon(others)
        await read(s, path, length=100_000, off_loop=off_loop)
        nursery.cancel_scope.cancel()
    assert turns > 2 * answers


async def test_a_chat_that_is_too_long_is_named(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    long = Message("assistant", "Yes. " * 50)
    path = written(tmp_path, f"{line(USER, ANSWER)}\n{line(USER, long)}\n")
    async with scripted() as s:
        with pytest.raises(InvalidRequestError, match=r"line 2: the chat has \d+ tokens and context_length is 64"):
            await read(s, path)
        data = await read(s, path, truncate=True)
        assert [len(example.tokens) for example in data.train][1] == 64
        asked = written(tmp_path, line(Message("user", "Hello? " * 50), ANSWER))
        with pytest.raises(InvalidRequestError, match="line 1: the first 64 tokens hold nothing of an answer"):
            await read(s, asked, truncate=True)


async def test_a_share_or_a_file_to_measure_with(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    path = written(tmp_path, f"{line(USER, ANSWER)}\n" * 10)
    other = written(tmp_path, line(*TWO_TURNS), "other.jsonl")
    async with scripted() as s:
        data = await read(s, path, 0.2)
        assert (len(data.train), len(data.validation)) == (8, 2)
        data = await read(s, path, other, length=200)
        assert (len(data.train), len(data.validation)) == (10, 1)
        with pytest.raises(InvalidRequestError, match="line 1: no JSON") as caught:
            await read(s, path, written(tmp_path, "{", "bad.jsonl"))
        assert caught.value.field == "validation"


async def test_a_model_that_knows_no_chats(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    async with scripted(chat_template=None) as s:
        with pytest.raises(InvalidRequestError, match="has no chat template, so it cannot be trained on chats"):
            await read(s, written(tmp_path, line(USER, ANSWER)))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (HASTY, "line 1: the model's chat template writes message 2"),
        ("{{ raise_exception('no') }}", "line 1: the model's chat template refuses them: no"),
        ("{% for", "does not parse"),
    ],
)
async def test_a_template_that_does_not_do(
    tmp_path: Path, template: str, message: str, autojump_clock: trio.testing.MockClock
) -> None:
    async with scripted(chat_template=template) as s:
        with pytest.raises(InvalidRequestError, match=message) as caught:
            await read(s, written(tmp_path, line(USER, ANSWER)))
        assert caught.value.field == "dataset"


@pytest.mark.parametrize("text", ["", "x"])
async def test_a_text_with_nothing_in_it(tmp_path: Path, text: str, autojump_clock: trio.testing.MockClock) -> None:
    async with scripted(bos=False) as s:
        with pytest.raises(InvalidRequestError, match="nothing in it to learn"):
            await read(s, written(tmp_path, text, "d.txt"))


# Where answers end.

MARKER_ENDS = (
    "{% for m in messages %}{% if m.role == 'user' %}<|end|>{{ m.content }}{% else %}<|turn|>{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|turn|>{% endif %}"
)
"""Nothing but the next user's marker, which is an end token of the model, ends an answer."""


@pytest.mark.parametrize(
    ("template", "learned", "open_answers"),
    [
        (MARKER_ENDS, ["Yes.<|end|>", "No.<|end|>"], 0),
        (MARKER_ENDS.replace("<|end|>", "{{ '\\n' }}<|end|>"), ["Yes.\n<|end|>", "No.\n<|end|>"], 0),
        (MARKER_ENDS.replace("<|end|>", "<|begin|>"), ["Yes.", "No."], 2),
        (MARKER_ENDS.replace("<|end|>", "User: ").replace("<|turn|>", "Bot: "), ["Yes.", "No."], 2),
        # It refuses the chat that would show what follows an answer.
        (
            "{% if messages[0].content == 'a' %}{{ raise_exception('no') }}{% endif %}" + MARKER_ENDS,
            ["Yes.<|end|>", "No."],
            1,
        ),
    ],
)
async def test_the_marker_of_the_next_turn_is_learned_where_it_ends_an_answer(
    tmp_path: Path,
    template: str,
    learned: list[str],
    open_answers: int,
    autojump_clock: trio.testing.MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    chat = [USER, ANSWER, Message("user", "And now?"), Message("assistant", "No.")]
    async with scripted(chat_template=template) as s:
        (example,) = (await read(s, written(tmp_path, line(*chat)), length=200)).train
        words = s.tokenizer
        expected = [words.tokenize(text, bos=False, special=True) for text in learned]
    runs = [
        [token for _, token in run]
        for counted, group in itertools.groupby(enumerate(example.tokens), key=lambda pair: example.mask[pair[0]])
        if counted
        for run in [list(group)]
    ]
    assert runs == expected
    warned = [record.getMessage() for record in caplog.records if record.name == "laneway.finetune"]
    assert len(warned) == bool(open_answers)
    if open_answers:
        assert f"behind {open_answers} of 2 answers, so the adapter may never learn to end" in warned[0]


async def test_a_template_with_end_tokens_is_learned_as_ever(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with scripted() as s:
        (example,) = (await read(s, written(tmp_path, line(USER, ANSWER)))).train
        end = s.tokenizer.tokenize("<|turn_end|>", bos=False, special=True)[0]
    assert [token for token, counts in zip(example.tokens, example.mask, strict=True) if counts][-1] == end
    assert not [record for record in caplog.records if record.name == "laneway.finetune"]
