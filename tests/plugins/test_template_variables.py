"""``chat_template_kwargs``: more names for the model's template."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import trio.testing

from laneway import InvalidRequestError
from laneway.testing import SCRIPTED_CHAT_TEMPLATE
from laneway_plugins import batch, completion
from laneway_plugins._template_variables import MAX_DEPTH, MAX_SIZE, MAX_VARIABLES, to_variables
from laneway_plugins.completion import CompletionRequest
from tests.kvcache.kit import cached
from tests.plugins.scripted import Scripted, scripted

CHAT = [{"role": "user", "content": "Hi"}]
THINKING = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|turn_end|>\n{% endfor %}<|turn|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}No thought.\n{% endif %}"
    "{{ '<|' ~ mark ~ '|>' if mark }}"
)


async def prompt_of(s: Scripted, **fields: Any) -> list[int]:
    job = await completion.prepare_job(s.model, CompletionRequest(CHAT, **fields))
    return job.prompt


async def test_the_template_is_given_them(autojump_clock: trio.testing.MockClock) -> None:
    async with scripted(chat_template=THINKING, context_size=400) as s:
        plain = await prompt_of(s)
        assert await prompt_of(s, chat_template_kwargs=None) == plain
        assert await prompt_of(s, chat_template_kwargs={"enable_thinking": True}) == plain
        quiet = await prompt_of(s, chat_template_kwargs={"enable_thinking": False})
        assert quiet == plain + s.tokenizer.tokenize("No thought.\n", bos=False)
        answer = await completion.complete(s.model, CHAT, max_tokens=3, chat_template_kwargs={"enable_thinking": False})
        assert answer.stats.prompt_tokens == len(quiet)


async def test_what_they_say_is_content(autojump_clock: trio.testing.MockClock) -> None:
    async with scripted(chat_template=THINKING) as s:
        plain = await prompt_of(s)
        for mark in ("turn", "turn_end", "<|turn|>"):
            forged = await prompt_of(s, chat_template_kwargs={"mark": mark})
            assert forged == plain + s.tokenizer.tokenize(f"<|{mark}|>", bos=False)


async def test_items_of_a_batch_may_have_their_own(autojump_clock: trio.testing.MockClock) -> None:
    async with scripted(parallel=4, chat_template=THINKING, context_size=1600) as s:
        outcomes = await batch.complete(
            s.model,
            [
                CHAT,
                batch.BatchItem(CHAT, chat_template_kwargs={"enable_thinking": True}),
                batch.BatchItem("Hi", id="raw"),
                batch.BatchItem(CHAT, id="wrong", chat_template_kwargs={"messages": []}),
            ],
            max_tokens=1,
            chat_template_kwargs={"enable_thinking": False},
        )
        quiet = await prompt_of(s, chat_template_kwargs={"enable_thinking": False})
        assert [outcome.stop_reason for outcome in outcomes] == ["length", "length", "error", "error"]
        assert outcomes[0].stats.prompt_tokens == len(quiet)
        assert outcomes[1].stats.prompt_tokens == len(await prompt_of(s))
        for outcome, reason in zip(outcomes[2:], ("raw prompt", "engine itself sets"), strict=True):
            assert isinstance(outcome.error, InvalidRequestError)
            assert outcome.error.field == "chat_template_kwargs"
            assert reason in outcome.error.reason
        with pytest.raises(InvalidRequestError, match="engine itself sets 'bos_token'"):
            await batch.complete(s.model, [CHAT], chat_template_kwargs={"bos_token": ""})


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([("a", 1)], "must be a mapping of names to values, not list"),
        ("enable_thinking", "must be a mapping"),
        ({1: 2}, "is an identifier, not 1"),
        ({"enable-thinking": 1}, "is an identifier, not 'enable-thinking'"),
        ({"": 1}, "is an identifier"),
        ({"messages": []}, "the engine itself sets 'messages'"),
        ({"add_generation_prompt": False}, "the engine itself sets"),
        ({"bos_token": "<s>"}, "the engine itself sets"),
        ({"eos_token": "</s>"}, "the engine itself sets"),
        ({"raise_exception": 1}, "is a function that templates call"),
        ({"range": 1}, "is a function"),
        ({"x": object()}, "'x' has a object"),
        ({"x": [b"a"]}, "'x' has a bytes"),
        ({"x": {1}}, "'x' has a set"),
        ({"x": {1: 2}}, "with the key 1"),
        ({"x": float("nan")}, "the number nan"),
        ({"x": [float("inf")]}, "the number inf"),
        ({"x": 10**400}, "whole number of more than 64 bits"),
        ({"x": "a" * (MAX_SIZE + 1)}, "more than 1,048,576 characters"),
        ({"x": [["a" * 1000] * 1000, {"b": ["c" * 1000] * 100}]}, "more than 1,048,576"),
        ({f"x{n}": n for n in range(MAX_VARIABLES + 1)}, "at most 64 names are taken, not 65"),
    ],
)
def test_what_no_template_can_be_given_is_refused(value: Any, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        CompletionRequest(CHAT, chat_template_kwargs=value)
    assert caught.value.field == "chat_template_kwargs"


def test_lists_that_hold_themselves_or_go_too_deep_are_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    deep: Any = 1
    for _ in range(MAX_DEPTH):
        deep = [deep]
    for value in (endless, deep):
        with pytest.raises(InvalidRequestError, match="nested more than 32 deep"):
            to_variables({"x": value})
    assert to_variables({"x": deep[0]}) == {"x": deep[0]}


def test_they_are_copied() -> None:
    given: dict[str, Any] = {"a": [1, {"b": (2.5, None, True, "c")}], "d": MappingProxyType({"e": "f"})}
    request = CompletionRequest(CHAT, chat_template_kwargs=given)
    assert request.chat_template_kwargs == {"a": [1, {"b": [2.5, None, True, "c"]}], "d": {"e": "f"}}
    given["a"][1]["b"] = 3
    given["x"] = 1
    assert request.chat_template_kwargs == {"a": [1, {"b": [2.5, None, True, "c"]}], "d": {"e": "f"}}
    assert isinstance(request.chat_template_kwargs, Mapping)
    with pytest.raises(TypeError):
        request.chat_template_kwargs["y"] = 1  # type: ignore[index]
    assert hash(request) == hash(CompletionRequest(CHAT))
    assert CompletionRequest(CHAT).chat_template_kwargs == {}


def test_a_raw_prompt_has_no_template() -> None:
    with pytest.raises(InvalidRequestError, match="goes without the model's chat template") as caught:
        CompletionRequest("Hi", chat_template_kwargs={"enable_thinking": False})
    assert caught.value.field == "chat_template_kwargs"
    assert CompletionRequest("Hi", chat_template_kwargs={}).chat_template_kwargs == {}


@pytest.mark.parametrize("first", [None, "Before all."])
async def test_K3_a_cache_that_messages_find_is_taken_as_far_as_the_tokens_agree(
    first: str | None, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """The file is found without the variables; what it holds of another prompt is not taken."""
    template = "{{ first }}\n" + SCRIPTED_CHAT_TEMPLATE
    greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8}
    async with cached(tmp_path, chat_template=template) as s:
        before = await completion.complete(s.model, CHAT, kv_cache=True, chat_template_kwargs={"first": "x"}, **greedy)
        said = [*CHAT, {"role": "assistant", "content": before.text}, {"role": "user", "content": "And?"}]
        # The same variables: the next turn goes on.  Others at the beginning of the prompt: it begins anew.
        now = {"first": first or "x"}
        request = CompletionRequest(said, chat_template_kwargs=now, **greedy)
        job = await completion.prepare_job(s.model, request)
        answer = await completion.complete(s.model, said, kv_cache=True, chat_template_kwargs=now, **greedy)
        assert answer.tokens == s.decoder.expected(job.prompt, request.sampling, 8).tokens
        if first is None:
            assert answer.stats.cached_tokens > before.stats.prompt_tokens
        else:
            assert answer.stats.cached_tokens <= 1
