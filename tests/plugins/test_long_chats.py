"""Chats that take long to render do so beside the event loop; short ones keep their place."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing

from laneway import InvalidRequestError, TextDelta
from laneway.testing import SCRIPTED_CHAT_TEMPLATE
from laneway_plugins import _prompts, completion
from laneway_plugins._messages import Message
from laneway_plugins._prompts import LONG_SOURCE, MANY_MESSAGES, to_tokens
from laneway_plugins._template_budget import Budget, Limits
from laneway_plugins._templates import ChatTemplate, Rendered
from tests.plugins.scripted import scripted

SHORT = (Message("user", "Hi"),)
LONG = SHORT * (MANY_MESSAGES + 1)
ENDLESS = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
LONG_TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}" + "{# nothing #}" * LONG_SOURCE


class Held:
    """Holds what is done in a thread until it is let go, and says when it has begun and ended."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.begun = threading.Event()
        self.go = threading.Event()
        self.ended = threading.Event()
        self.threads: list[int] = []

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.threads.append(threading.get_ident())
        self.begun.set()
        try:
            assert self.go.wait(60)
            return self._function(*args, **options)
        finally:
            self.ended.set()


async def until(event: threading.Event) -> None:
    assert await trio.to_thread.run_sync(event.wait, 60)


def hold_rendering(monkeypatch: pytest.MonkeyPatch) -> Held:
    held = Held(ChatTemplate.render)
    # Not `held` itself: a method must know its object.
    monkeypatch.setattr(ChatTemplate, "render", lambda template, *args, **options: held(template, *args, **options))
    return held


async def test_A3_a_short_chat_becomes_tokens_without_giving_anybody_a_turn() -> None:
    async with scripted() as s, trio.open_nursery() as nursery:
        turns = 0

        async def other() -> None:
            nonlocal turns
            turns += 1

        nursery.start_soon(other)
        prompt = await to_tokens(s.model, SHORT)
        assert turns == 0
        assert prompt == s.tokenizer.tokenize("<|turn|>user\nHi<|turn_end|>\n<|turn|>assistant\n", special=True)


@pytest.mark.parametrize("reason", ["many messages", "many steps"])
async def test_other_streams_go_on_while_a_long_chat_is_rendered(
    reason: str, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    held = hold_rendering(monkeypatch)
    messages, template = LONG, SCRIPTED_CHAT_TEMPLATE
    if reason == "many steps":
        messages = (Message("user", "Hello"),)
        template = "{% if 'Hello' in messages[0].content %}{% for i in range(9000) %}{% endfor %}{% endif %}" + template
    async with scripted(parallel=2, context_size=50_000, chat_template=template) as s, trio.open_nursery() as nursery:
        prompts: list[list[int]] = []

        async def long() -> None:
            prompts.append(await to_tokens(s.model, messages))

        nursery.start_soon(long)
        await until(held.begun)
        async with completion.stream(s.model, SHORT, max_tokens=20) as run:
            deltas = [event async for event in run if isinstance(event, TextDelta)]
        assert deltas
        assert prompts == []
        held.go.set()
    assert held.threads != [threading.get_ident()]
    content = messages[0].content
    text = f"<|turn|>user\n{content}<|turn_end|>\n" * len(messages) + "<|turn|>assistant\n"
    assert prompts == [s.tokenizer.tokenize(text, special=True)]


async def test_a_deadline_ends_the_wait_and_then_the_rendering(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    held = hold_rendering(monkeypatch)
    held.go.set()
    # Without an end to it, the thread would go on for hours.
    monkeypatch.setattr(_prompts, "limits_of", lambda *args: Limits(10**12))
    async with scripted(chat_template=ENDLESS) as s:
        with pytest.raises(trio.TooSlowError), trio.fail_after(0.5):
            await completion.complete(s.model, SHORT)
        await until(held.ended)
        s.assert_idle()


async def test_a_thousand_messages_are_taken(autojump_clock: trio.testing.MockClock) -> None:
    messages = tuple(Message("user" if n % 2 == 0 else "assistant", "a") for n in range(1001))
    async with scripted(context_size=100_000) as s:
        answer = await completion.complete(s.model, messages, max_tokens=1)
        assert answer.stats.prompt_tokens > 1001


async def test_what_a_thread_finds_wrong_reaches_the_caller(autojump_clock: trio.testing.MockClock) -> None:
    async with scripted(chat_template="{{ raise_exception('No.') }}") as s:
        with pytest.raises(InvalidRequestError, match="refuses them: No"):
            await completion.complete(s.model, LONG)
    async with scripted(chat_template=ENDLESS) as s:
        with pytest.raises(InvalidRequestError, match="steps of work"):
            await completion.complete(s.model, SHORT)


async def test_A3_requests_keep_their_order_while_a_long_template_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(ChatTemplate)
    monkeypatch.setattr(_prompts, "ChatTemplate", held)
    order: list[int] = []
    async with scripted(chat_template=LONG_TEMPLATE) as s, trio.open_nursery() as nursery:

        async def request(number: int) -> None:
            await to_tokens(s.model, SHORT)
            order.append(number)
            if number == 0:
                # The template is there now, but those who came before this one still wait in line.
                nursery.start_soon(request, 9)

        nursery.start_soon(request, 0)
        await until(held.begun)
        for number in range(1, 6):
            nursery.start_soon(request, number)
            await trio.testing.wait_all_tasks_blocked()
        assert order == []
        held.go.set()
    assert order == [0, 1, 2, 3, 4, 5, 9]
    assert len(held.threads) == 1
    assert held.threads != [threading.get_ident()]


async def test_a_cancel_while_a_template_is_compiled_leaves_the_next_one_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = Held(ChatTemplate)
    monkeypatch.setattr(_prompts, "ChatTemplate", held)
    async with scripted(chat_template=LONG_TEMPLATE) as s:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(to_tokens, s.model, SHORT)
            await until(held.begun)
            nursery.cancel_scope.cancel()
        held.go.set()
        prompt = await to_tokens(s.model, SHORT)
        assert prompt == s.tokenizer.tokenize("user:Hi")


def test_threads_render_one_template_beside_each_other() -> None:
    template = ChatTemplate(
        "{% for m in messages %}<|turn|>{{ m.content | title }}{% endfor %}{{ add_generation_prompt }}"
    )
    chats = [tuple(Message("user", f"chat {number} ") for _ in range(200 + number)) for number in range(8)]
    expected = [template.render(chat) for chat in chats]
    start = threading.Barrier(len(chats))
    found: list[Rendered | None] = [None] * len(chats)
    refused: list[int] = []

    def render(number: int) -> None:
        start.wait(60)
        for _ in range(20):
            found[number] = template.render(chats[number])
            try:
                template.render(chats[number], budget=Budget(Limits(300 + number)))
            except InvalidRequestError:
                refused.append(number)

    threads = [threading.Thread(target=render, args=(number,)) for number in range(len(chats))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected
    assert len(refused) == 20 * len(chats)
