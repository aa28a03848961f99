"""The operation ``completion``, on a scripted model."""

from __future__ import annotations

import gc
from typing import Any

import attrs
import pytest
import trio
import trio.testing

import laneway
from laneway import ContextOverflowError, Done, InferenceCancelledError, InvalidRequestError, Sampling, TextDelta
from laneway_plugins import _prompts, completion
from laneway_plugins._templates import ChatTemplate
from laneway_plugins.completion import CompletionRequest, Message
from tests.plugins.scripted import STEP, scripted

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello world"}]
CHAT_TEXT = "<|turn|>system\nBe brief.<|turn_end|>\n<|turn|>user\nHello world<|turn_end|>\n<|turn|>assistant\n"


# Requests.


def test_a_request_keeps_what_it_was_made_of_from_later_changes() -> None:
    messages = [dict(message) for message in CHAT]
    stop = ["a"]
    bias = {5: 1.0}
    request = CompletionRequest(messages, stop=stop, logit_bias=bias)
    messages[0]["content"] = "changed"
    messages.clear()
    stop.append("b")
    bias[6] = 2.0
    assert request.messages == (Message("system", "Be brief."), Message("user", "Hello world"))
    assert request.stop == ("a",)
    assert request.logit_bias == request.sampling.logit_bias == ((5, 1.0),)
    assert attrs.evolve(request, temperature=0.0).sampling == attrs.evolve(request.sampling, temperature=0.0)
    assert hash(request) == hash(CompletionRequest(CHAT, stop="a", logit_bias={"5": 1}))  # type: ignore[dict-item]


def test_defaults_are_those_of_sampling() -> None:
    assert CompletionRequest("x").sampling == Sampling()
    own = {"max_tokens", "stop", "kv_cache", "chat_template_kwargs"}
    names = {field.name for field in attrs.fields(CompletionRequest)} - own - {"messages", "sampling"}
    assert names == {field.name for field in attrs.fields(Sampling)}
    assert set(completion.CompletionFields.__annotations__) == names | own


GIVEN: dict[str, Any] = {
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.4,
    "min_p": 0.1,
    "seed": 9,
    "frequency_penalty": -1.0,
    "presence_penalty": 1.5,
    "repeat_penalty": 1.2,
    "logit_bias": ((3, -1.0),),
    "logprobs": True,
    "top_logprobs": 4,
    "grammar": 'root ::= "a"',
}


def test_every_field_reaches_the_sampling() -> None:
    assert CompletionRequest("x", **GIVEN).sampling == Sampling(**GIVEN)


WRONG: list[tuple[str, Any, str]] = [
    ("messages", None, "must be a str"),
    ("messages", b"bytes", "must be a str"),
    ("messages", 5, "must be a str"),
    ("messages", {"role": "user", "content": "x"}, "must be a str"),
    ("messages", [], "at least one message"),
    ("messages", ["text"], "a message is a mapping"),
    ("messages", [{"role": "user"}], "no content"),
    ("messages", [{"content": "x"}], "no role"),
    ("messages", [{"role": "user", "content": None}], "content of a message must be a str"),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}], "content of a message must be a str"),
    ("messages", [{"role": 1, "content": "x"}], "role of a message must be a str"),
    ("messages", [{"role": "", "content": "x"}], "role of a message must not be empty"),
    ("messages", [{"role": "user", "content": "x", "name": "y"}], "nothing else such as 'name'"),
    ("messages", "ab\ud800", r"the prompt is not valid: character 3 is a lone surrogate \(U\+D800\)"),
    (
        "messages",
        [{"role": "user", "content": "x"}, {"role": "user", "content": "a\udcff"}],
        r"the content of message 2 is not valid: character 2 is a lone surrogate \(U\+DCFF\)",
    ),
    ("messages", [{"role": "\udcff", "content": "x"}], "the role of message 1 is not valid"),
    ("max_tokens", 0, "from 1 to"),
    ("max_tokens", -1, "from 1 to"),
    ("max_tokens", 1.5, "an integer"),
    ("max_tokens", True, "an integer"),
    ("max_tokens", "4", "an integer"),
    ("temperature", -0.1, "from 0 to 100"),
    ("temperature", float("nan"), "a number"),
    ("temperature", None, "a number"),
    ("temperature", True, "a number"),
    ("top_k", -1, "an integer"),
    ("top_k", 1.5, "an integer"),
    ("top_p", 1.1, "from 0 to 1"),
    ("top_p", -0.1, "from 0 to 1"),
    ("min_p", 2, "from 0 to 1"),
    ("seed", -1, "an integer"),
    ("seed", 2**64, "an integer"),
    ("seed", "7", "an integer"),
    ("frequency_penalty", 2.1, "from -2 to 2"),
    ("presence_penalty", -2.1, "from -2 to 2"),
    ("repeat_penalty", 0, "from 0.01 to 10"),
    ("repeat_penalty", float("inf"), "from 0.01 to 10"),
    ("stop", "", "must not be empty"),
    ("stop", ["a", ""], "must not be empty"),
    ("stop", [1], "a stop string is a str"),
    ("stop", 5, "must be a str or a list"),
    ("stop", None, "must be a str or a list"),
    ("stop", b"a", "must be a str or a list"),
    ("stop", ["x"] * 17, "at most 16"),
    ("logit_bias", {"a": 1.0}, "must map token ids"),
    ("logit_bias", {1: float("nan")}, "finite number"),
    ("logit_bias", {1: float("inf")}, "finite number"),
    ("logit_bias", 5, "must map token ids"),
    ("logprobs", 1, "must be bool"),
    ("logprobs", None, "must be bool"),
    ("top_logprobs", 21, "from 0 to 20"),
    ("top_logprobs", 3, "needs logprobs=True"),
    ("grammar", 5, "must be str"),
]


@pytest.mark.parametrize(("field", "value", "reason"), WRONG)
def test_A10_wrong_fields_are_refused_by_name(field: str, value: Any, reason: str) -> None:
    given = {"messages": "x", field: value}
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        CompletionRequest(given.pop("messages"), **given)
    assert caught.value.field == field


# Prompts.


async def test_a_raw_prompt_is_taken_as_it_is(autojump_clock: trio.testing.MockClock) -> None:
    async with scripted() as s:
        for text in ("Hello world", "<|turn|>user\nHello<|turn_end|>\n<|turn|>assistant\n", ""):
            answer = await completion.complete(s.model, text, temperature=0.0, max_tokens=20)
            expected = s.expected(text, 20, temperature=0.0)
            assert (answer.text, answer.tokens, answer.stop_reason) == (
                s.text(expected),
                expected.tokens,
                expected.stop_reason,
            )
            assert answer.stats.prompt_tokens == len(s.tokenizer.tokenize(text, special=True))
            assert answer.stats.generated_tokens == len(answer.tokens)
        s.assert_idle()


@pytest.mark.parametrize("bos", [True, False])
async def test_a_chat_goes_through_the_model_s_template(autojump_clock: trio.testing.MockClock, bos: bool) -> None:
    async with scripted(bos=bos) as s:
        answer = await completion.complete(s.model, CHAT, temperature=0.0)
        prompt = s.decoder.history[0].detail
        assert prompt == tuple(s.decoder.vocabulary.tokenize(CHAT_TEXT, special=True))
        assert answer.tokens == s.decoder.expected(prompt, Sampling(temperature=0.0)).tokens


@pytest.mark.parametrize("bos", [True, False])
async def test_a_beginning_that_the_template_writes_is_not_doubled(
    autojump_clock: trio.testing.MockClock, bos: bool
) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    async with scripted(bos=bos, chat_template=template) as s:
        await completion.complete(s.model, [{"role": "user", "content": "Hi"}], max_tokens=1)
        text = "<|begin|>Hi<|end|>" if bos else "Hi<|end|>"
        assert s.decoder.history[0].detail == tuple(s.decoder.vocabulary.tokenize(text, bos=False, special=True))
        if bos:
            # The same goes for whoever writes it into a raw prompt.
            await completion.complete(s.model, "<|begin|>Hi<|end|>", max_tokens=1)
            opened = [call.detail for call in s.decoder.history if call.name == "open"]
            assert opened[0] == opened[1]


async def test_a_model_without_a_template_takes_raw_prompts_only(autojump_clock: trio.testing.MockClock) -> None:
    async with scripted(chat_template=None) as s:
        with pytest.raises(InvalidRequestError, match=r"no chat template.*raw prompts only") as caught:
            await completion.complete(s.model, CHAT)
        assert caught.value.field == "messages"
        assert (await completion.complete(s.model, "Hello", max_tokens=2)).stats.generated_tokens == 2


async def test_A10_a_template_that_raises_changes_nothing(autojump_clock: trio.testing.MockClock) -> None:
    template = "{{ raise_exception('no ' ~ messages[0].role ~ ' here') }}"
    async with scripted(chat_template=template) as s:
        with pytest.raises(InvalidRequestError, match="no system here"):
            await completion.complete(s.model, CHAT, request_id="a")
        s.assert_idle()
        assert not s.decoder.history
        await completion.complete(s.model, "Hello", request_id="a", max_tokens=1)


async def test_a_template_is_compiled_once_a_model_and_goes_with_it(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []

    def counting(source: str, **options: str) -> ChatTemplate:
        compiled.append(source)
        return ChatTemplate(source, **options)

    monkeypatch.setattr(_prompts, "ChatTemplate", counting)
    gc.collect()
    before = len(_prompts._templates)
    async with scripted() as s:
        for _ in range(3):
            await completion.complete(s.model, CHAT, max_tokens=1)
        assert len(compiled) == 1
        other = await s.engine.load_model("scripted:other")
        await completion.complete(other, CHAT, max_tokens=1)
        assert len(compiled) == 2
        assert len(_prompts._templates) == before + 2
        await s.engine.unload_model(other)
        del other
        gc.collect()
        assert len(_prompts._templates) == before + 1


async def test_A10_a_prompt_that_can_never_fit_is_refused_with_its_numbers(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with scripted(parallel=2, context_size=41) as s:
        async with completion.stream(s.model, "x" * 18, max_tokens=1) as busy:
            await busy.admitted()
            before = s.lane
            with pytest.raises(ContextOverflowError) as caught:
                await completion.complete(s.model, "x" * 19 + "y", request_id="long")
            error = caught.value
            assert (error.prompt_tokens, error.window, error.context_size, error.parallel) == (21, 20, 41, 2)
            assert s.lane == before
        # The window's size is already too much, one token less leaves room for one.
        with pytest.raises(ContextOverflowError):
            await completion.complete(s.model, "x" * 19)
        answer = await completion.complete(s.model, "x" * 18, request_id="long", temperature=0.0)
        assert (answer.stop_reason, answer.stats.generated_tokens) == ("length", 1)


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"grammar": "digits ::= [0-9]"}, "grammar"), ({"logit_bias": {100_000: 1.0}}, "logit_bias")],
)
async def test_A10_what_the_model_cannot_sample_is_refused_before_it_arrives(
    autojump_clock: trio.testing.MockClock, fields: dict[str, Any], field: str
) -> None:
    async with scripted() as s:
        with pytest.raises(InvalidRequestError) as caught:
            await completion.complete(s.model, "Hello", **fields)
        assert caught.value.field == field
        assert not s.decoder.history
        s.assert_idle()


async def test_text_without_a_utf8_form_is_an_invalid_request(autojump_clock: trio.testing.MockClock) -> None:
    async with scripted() as s:
        for messages in ("a\ud800", [{"role": "user", "content": "a\ud800"}]):
            with pytest.raises(InvalidRequestError, match="UTF-8"):
                await completion.complete(s.model, messages)
        s.assert_idle()


# Answers.


async def test_S1_the_stream_joined_is_the_text(autojump_clock: trio.testing.MockClock) -> None:
    async with scripted(parallel=3) as s:
        for index in range(20):
            parts = []
            async with completion.stream(s.model, f"prompt {index}", seed=index, max_tokens=30) as run:
                async for event in run:
                    parts.append(event)
                answer = await run.result()
            assert isinstance(parts[-1], Done)
            assert parts[-1] == Done(answer.stop_reason, answer.stats)
            deltas = parts[:-1]
            assert all(isinstance(delta, TextDelta) for delta in deltas)
            assert "".join(delta.text for delta in deltas) == answer.text == s.tokenizer.text(answer.tokens)


async def test_stop_strings_end_an_answer_and_are_no_part_of_it(autojump_clock: trio.testing.MockClock) -> None:
    async with scripted(script={"count": "one two three four"}) as s:
        whole = await completion.complete(s.model, "count")
        assert (whole.text, whole.stop_reason) == ("one two three four", "eos")
        for stop, text in [("three", "one two "), (["four", "two"], "one "), (["nine"], "one two three four")]:
            answer = await completion.complete(s.model, "count", stop=stop)
            assert answer.text == text
            assert answer.stop_reason == ("eos" if stop == ["nine"] else "stop")
        short = await completion.complete(s.model, "count", max_tokens=3)
        assert (short.stop_reason, len(short.tokens), whole.tokens[:3]) == ("length", 3, short.tokens)


async def test_logprobs_come_with_the_text_and_with_the_answer(autojump_clock: trio.testing.MockClock) -> None:
    async with scripted() as s:
        streamed: list[laneway.TokenLogprob] = []
        async with completion.stream(
            s.model, "Hello", temperature=0.0, logprobs=True, top_logprobs=3, max_tokens=12
        ) as run:
            async for event in run:
                if isinstance(event, TextDelta):
                    streamed.extend(event.logprobs)
            answer = await run.result()
        expected = s.expected("Hello", 12, temperature=0.0, logprobs=True, top_logprobs=3)
        assert answer.logprobs == tuple(streamed) == expected.logprobs
        assert [entry.token for entry in answer.logprobs] == list(answer.tokens)
        assert all(len(entry.top) == 3 for entry in answer.logprobs)
        assert (await completion.complete(s.model, "Hello", max_tokens=3)).logprobs == ()


async def test_options_of_the_run_are_passed_on(autojump_clock: trio.testing.MockClock) -> None:
    async with scripted() as s:
        async with completion.stream(s.model, "Hello", request_id="mine", backpressure="pause") as run:
            assert run.request_id == "mine"
            await run.admitted()
            with pytest.raises(laneway.RequestIdConflictError):
                await completion.complete(s.model, "Hello", request_id="mine")
            with pytest.raises(laneway.RequestRejectedByPolicyError) as caught:
                await completion.complete(s.model, "Hello", overflow="reject")
            assert caught.value.reason == "overflow"
            with pytest.raises(laneway.RequestRejectedByPolicyError) as caught:
                await completion.complete(s.model, "Hello", queue_timeout=STEP)
            assert caught.value.reason == "queue_timeout"
        with pytest.raises(InvalidRequestError, match="cap"):
            await completion.complete(s.model, "Hello", cap=float("nan"))
        s.assert_idle()


# Cancelling.


async def test_C6_a_cancel_by_id_brings_what_was_made(autojump_clock: trio.testing.MockClock) -> None:
    async with scripted(parallel=2, end_every=None) as s:
        async with completion.stream(s.model, "Hello", request_id="a", temperature=0.0) as run:
            read = ""
            with pytest.raises(InferenceCancelledError) as caught:
                async for event in run:
                    read += event.text
                    if len(read) >= 5 and run.state == "running":
                        assert s.engine.cancel("a", "enough") == 1
            await s.engine.wait_ended("a")
            s.assert_idle()
        error = caught.value
        assert (error.request_id, error.reason, error.text) == ("a", "enough", read)
        assert 0 < len(error.tokens) < s.model.window - 6
        assert error.tokens == s.expected("Hello", temperature=0.0).tokens[: len(error.tokens)]
        assert error.stats is not None
        assert error.stats.generated_tokens == len(error.tokens)


async def test_A5_the_caller_s_deadline_ends_it_wherever_it_is(autojump_clock: trio.testing.MockClock) -> None:
    async with scripted(end_every=None, context_size=10_000) as s:
        for seconds in (0.0, STEP / 2, STEP * 1.5, 1.0):
            with trio.move_on_after(seconds) as scope:
                await completion.complete(s.model, "Hello")
            assert scope.cancelled_caught
            s.assert_idle()
        async with completion.stream(s.model, "first"):
            began = trio.current_time()
            with pytest.raises(trio.TooSlowError):
                with trio.fail_after(2):
                    await completion.complete(s.model, "queued")
            assert trio.current_time() == began + 2
            assert not s.lane.waiting


async def test_C10_a_failed_step_is_a_decode_error_and_the_next_request_runs(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with scripted(fail_at={3: laneway.DecodeError("the GPU is on fire", 7)}) as s:
        with pytest.raises(laneway.DecodeError, match="on fire") as caught:
            await completion.complete(s.model, "Hello", temperature=0.0)
        assert caught.value.sequences == 1
        answer = await completion.complete(s.model, "Hello", temperature=0.0)
        assert answer.tokens == s.expected("Hello", temperature=0.0).tokens
