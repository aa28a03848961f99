"""Long texts: a thread makes their tokens, a cancel ends the wait for it, and no model is freed under it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import trio
import trio.testing

import laneway
from laneway import _model
from laneway.decoder import LongTextTokenizer, TokenizingStopped, Written
from laneway_plugins import completion
from tests.engine.kit import Bench, bench
from tests.plugins.scripted import scripted

LONG = "a" * _model.LONG_TEXT


@attrs.define
class Fake:
    """A tokenizer that is prepared for long texts, and does nothing until it may."""

    real: Any
    least: int = 0
    parts: int = 0
    deaf: bool = False
    """Does not look whether it was stopped."""
    begun: threading.Event = attrs.field(factory=threading.Event)
    go_on: threading.Event = attrs.field(factory=threading.Event)
    happened: list[str] = attrs.field(factory=list)
    threads: list[int] = attrs.field(factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def is_long(self, text: str) -> bool:
        return self.parts > 64

    def least_tokens(self, text: str) -> int:
        self.happened.append("least")
        return self.least

    def tokenize(
        self, text: str, *, bos: bool = True, special: bool | Written = False, stop: bytearray | None = None
    ) -> Any:
        self.threads.append(threading.get_ident())
        self.begun.set()
        if stop is not None:
            while not self.go_on.wait(0.001):
                if stop[0] and not self.deaf:
                    self.happened.append("stopped")
                    raise TokenizingStopped
        self.happened.append("tokenised")
        return self.real.tokenize(text, bos=bos, special=special)


def fake_of(b: Bench, **settings: Any) -> Fake:
    backend = b.model._backend
    fake = Fake(backend.tokenizer, **settings)
    assert isinstance(fake, LongTextTokenizer)

    async def aclose() -> None:
        fake.happened.append("freed")
        assert backend.aclose is not None
        await backend.aclose()

    b.model._backend = attrs.evolve(backend, tokenizer=fake, aclose=aclose)
    return fake


async def test_a_cancel_ends_the_wait_at_once_and_the_thread_soon() -> None:
    async with bench() as b:
        fake = fake_of(b)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(b.model.tokenize, LONG)
                await trio.to_thread.run_sync(fake.begun.wait)
                scope.cancel()
        assert scope.cancelled_caught
        await b.engine.unload_model(b.model)
        assert fake.happened == ["stopped", "freed"]


async def test_C8_a_model_is_not_freed_under_a_thread_that_was_left_behind() -> None:
    async with bench() as b:
        fake = fake_of(b, deaf=True)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(b.model.tokenize, LONG)
                await trio.to_thread.run_sync(fake.begun.wait)
                scope.cancel()
        assert scope.cancelled_caught
        assert fake.happened == []  # the thread still works
        async with trio.open_nursery() as nursery:
            nursery.start_soon(b.engine.unload_model, b.model)
            await trio.testing.wait_all_tasks_blocked()
            assert fake.happened == []
            fake.go_on.set()
        assert fake.happened == ["tokenised", "freed"]


async def test_a_caller_that_is_cancelled_before_its_thread_begins_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with bench() as b:
        fake = fake_of(b)
        fake.go_on.set()
        with trio.CancelScope() as scope:
            scope.cancel()
            await b.model.tokenize(LONG)
        assert scope.cancelled_caught

        # The thread is there, and has not begun when its caller leaves.
        late: list[Callable[[], Any]] = []

        async def run_sync(work: Callable[[], Any], **_: Any) -> Any:
            late.append(work)
            await trio.sleep_forever()

        monkeypatch.setattr(laneway.threads, "run_sync", run_sync)
        with trio.move_on_after(0) as scope:
            await b.model.tokenize(LONG)
        assert scope.cancelled_caught
        await b.engine.unload_model(b.model)
        assert late[0]() == []
        assert fake.happened == ["freed"]


async def test_long_texts_and_those_of_many_parts_leave_the_event_loop() -> None:
    async with bench() as b:
        fake = fake_of(b)
        fake.go_on.set()
        here = threading.get_ident()
        for text, parts, inline in (
            ("a", 100, True),
            ("a" * (_model.SHORT_TEXT - 1), 100, True),
            ("a" * _model.SHORT_TEXT, 64, True),
            ("a" * _model.SHORT_TEXT, 65, False),
            (LONG[1:], 0, True),
            (LONG, 0, False),
        ):
            fake.parts = parts
            assert await b.model.tokenize(text) == fake.real.tokenize(text)
            assert (fake.threads.pop() == here) is inline


async def test_an_error_of_the_tokenizer_comes_bare() -> None:
    async with bench() as b:
        fake_of(b).go_on.set()
        with pytest.raises(laneway.InvalidRequestError, match="UTF-8"):
            await b.model.tokenize(LONG + "\ud800")


async def test_A10_a_prompt_that_certainly_does_not_fit_is_refused_before_its_tokens_are_made() -> None:
    async with bench(context_size=128) as b:
        fake = fake_of(b, least=64)
        fake.go_on.set()
        with pytest.raises(laneway.ContextOverflowError) as caught:
            await b.model.tokenize(LONG, prompt=True)
        assert fake.happened == ["least"]
        assert caught.value.at_least
        assert (caught.value.prompt_tokens, caught.value.window) == (64, 64)
        assert "the prompt has at least 64 tokens and one slot holds 64 (context_size 128 / parallel 2)" in str(
            caught.value
        )
        # One less may fit, and what is no prompt need not.
        fake.least = 63
        assert len(await b.model.tokenize(LONG, prompt=True)) > 64
        fake.least = 64
        assert len(await b.model.tokenize(LONG)) > 64


async def test_A10_a_completion_is_refused_so() -> None:
    async with scripted() as s:
        s.model._backend = attrs.evolve(s.model._backend, tokenizer=Fake(s.tokenizer, least=10**6))
        with pytest.raises(laneway.ContextOverflowError, match="at least 1000000 tokens"):
            await completion.complete(s.model, LONG)


def test_the_error_counts_exactly_where_the_tokens_are_there() -> None:
    error = laneway.ContextOverflowError(70, 64, 128, 2)
    assert "the prompt has 70 tokens" in str(error)
