"""The operation ``batch``, on a scripted model."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

import laneway
from laneway import (
    BatchEvent,
    ContextOverflowError,
    DecodeError,
    Done,
    InferenceCancelledError,
    InvalidRequestError,
    ModelNotLoadedError,
    TextDelta,
)
from laneway_plugins import batch, completion
from laneway_plugins.batch import BatchItem, BatchOutcome, BatchRequest
from tests.plugins.scripted import STEP, Scripted, scripted

PROMPTS = ["one", "two", "three", "four", "five", "six", "seven"]


def assert_answered(
    s: Scripted, outcome: BatchOutcome, prompt: str, max_tokens: int | None = None, **fields: Any
) -> None:
    """The outcome is what a sequence alone would have got."""
    expected = s.expected(prompt, max_tokens, **fields)
    assert (outcome.text, outcome.tokens, outcome.stop_reason, outcome.error) == (
        s.text(expected),
        expected.tokens,
        expected.stop_reason,
        None,
    )


def dones(events: list[BatchEvent]) -> dict[str, Done]:
    """The end of each item.  Nothing of an item comes after its end."""
    out: dict[str, Done] = {}
    for event in events:
        assert isinstance(event, BatchEvent)
        assert event.id not in out, f"{event} comes after the end of its item"
        if isinstance(event.event, Done):
            out[event.id] = event.event
    return out


def texts(events: list[BatchEvent]) -> dict[str, str]:
    """The joined text of each item."""
    out: dict[str, str] = {}
    for event in events:
        if isinstance(event.event, TextDelta):
            out[event.id] = out.get(event.id, "") + event.event.text
    return out


# Requests.


@pytest.mark.parametrize(
    ("prompts", "field", "reason"),
    [
        ([], "prompts", "at least one prompt"),
        ("one prompt", "prompts", "must be a list of prompts, not str"),
        (b"one prompt", "prompts", "must be a list of prompts"),
        ({"role": "user", "content": "x"}, "prompts", "must be a list of prompts, not dict"),
        (5, "prompts", "must be a list of prompts"),
        (None, "prompts", "must be a list of prompts"),
        ([BatchItem("a", id="x"), BatchItem("b", id="x")], "id", "two items have the id 'x'"),
        ([BatchItem("a", id="")], "id", "must be a str that is not empty"),
        ([BatchItem("a", id=5)], "id", "must be a str that is not empty"),  # type: ignore[arg-type]
        (["a", BatchItem("b", id="batch-7")], "id", "begin with 'batch-'"),
        ([BatchItem("b", id="batch-")], "id", "begin with 'batch-'"),
    ],
)
def test_A9_a_batch_that_is_wrong_as_a_whole_is_refused(prompts: Any, field: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        BatchRequest(prompts)
    assert caught.value.field == field


def test_A10_wrong_common_fields_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="max_tokens: must be an integer"):
        BatchRequest(["a"], max_tokens=0)
    with pytest.raises(InvalidRequestError, match=r"colour: there is no such field; there are: .*max_tokens"):
        BatchRequest(["a"], colour="red")  # type: ignore[call-arg]


def test_a_generator_of_prompts_is_read_once() -> None:
    request = BatchRequest((text for text in PROMPTS), max_tokens=3)
    assert [member.id for member in request.members] == [f"batch-{index}" for index in range(7)]
    assert all(member.request is not None and member.request.max_tokens == 3 for member in request.members)


# Outcomes.


async def test_outcomes_come_in_input_order_whoever_ends_first(autojump_clock: trio.testing.MockClock) -> None:
    async with scripted(parallel=3) as s:
        ended: list[str] = []
        async with batch.stream(s.model, PROMPTS, temperature=0.0) as run:
            async for event in run:
                if isinstance(event, BatchEvent) and isinstance(event.event, Done):
                    ended.append(event.id)
            outcomes = await run.result()
        assert [outcome.id for outcome in outcomes] == [f"batch-{index}" for index in range(7)]
        assert sorted(ended) == [outcome.id for outcome in outcomes] != ended
        for outcome, prompt in zip(outcomes, PROMPTS, strict=True):
            assert_answered(s, outcome, prompt, temperature=0.0)
        s.assert_idle()


async def test_S1_each_item_s_events_joined_are_its_text(autojump_clock: trio.testing.MockClock) -> None:
    async with scripted(parallel=2) as s:
        async with batch.stream(s.model, PROMPTS, seed=5) as run:
            events = [event async for event in run]
            outcomes = await run.result()
        last = events.pop()
        assert isinstance(last, Done)
        assert (last.stop_reason, last.stats.generated_tokens) == (
            "stop",
            sum(outcome.stats.generated_tokens for outcome in outcomes),
        )
        assert texts(events) == {outcome.id: outcome.text for outcome in outcomes if outcome.text}
        assert dones(events) == {
            outcome.id: Done(outcome.stop_reason, outcome.stats, outcome.error) for outcome in outcomes
        }


async def test_items_have_fields_of_their_own(autojump_clock: trio.testing.MockClock) -> None:
    async with scripted(parallel=4, script={"count": "one two three"}) as s:
        outcomes = await batch.complete(
            s.model,
            [
                "count",
                BatchItem("count", id="short", max_tokens=2),
                BatchItem("count", stop="three", logprobs=True),
                [{"role": "user", "content": "Hi"}],
                BatchItem([{"role": "user", "content": "Hi"}], id="chat", seed=3, temperature=1.0),
            ],
            temperature=0.0,
            stop="two",
        )
        assert [outcome.id for outcome in outcomes] == ["batch-0", "short", "batch-2", "batch-3", "chat"]
        assert [(outcome.text, outcome.stop_reason) for outcome in outcomes[:3]] == [
            ("one ", "stop"),
            ("on", "length"),
            ("one two ", "stop"),
        ]
        assert [len(outcome.logprobs) for outcome in outcomes[:2]] == [0, 0]
        assert [entry.token for entry in outcomes[2].logprobs] == list(outcomes[2].tokens)
        chat = "<|turn|>user\nHi<|turn_end|>\n<|turn|>assistant\n"
        assert_answered(s, outcomes[3], chat, temperature=0.0)
        assert_answered(s, outcomes[4], chat, temperature=1.0, seed=3)


BAD: list[tuple[Any, type[Exception], str]] = [
    ({"role": "user", "content": "x"}, InvalidRequestError, "must be a str"),
    (None, InvalidRequestError, "must be a str"),
    ([], InvalidRequestError, "at least one message"),
    ([{"role": "user"}], InvalidRequestError, "no content"),
    (BatchItem("x", temperature=-1.0), InvalidRequestError, "temperature"),
    (BatchItem("x", max_tokens=0), InvalidRequestError, "max_tokens"),
    (BatchItem("x", colour="red"), InvalidRequestError, "colour: there is no such field"),  # type: ignore[call-arg]
    (BatchItem("x", grammar="digits ::= [0-9]"), InvalidRequestError, "grammar"),
    (BatchItem("x", logit_bias={10**6: 1.0}), InvalidRequestError, "beyond the vocabulary"),
    ("x" * 200, ContextOverflowError, "one slot holds 64"),
    ("x\ud800", InvalidRequestError, "UTF-8"),
    ([{"role": "robot", "content": "x"}], InvalidRequestError, "refuses them: robots"),
]


@pytest.mark.parametrize(("item", "error", "reason"), BAD, ids=range(len(BAD)))
async def test_a_bad_item_is_an_outcome_and_costs_its_siblings_nothing(
    autojump_clock: trio.testing.MockClock, item: Any, error: type[Exception], reason: str
) -> None:
    template = "{% for m in messages %}{% if m.role == 'robot' %}{{ raise_exception('robots') }}{% endif %}{% endfor %}"
    async with scripted(parallel=4, chat_template=template) as s:
        async with batch.stream(s.model, ["first", item, "last"], temperature=0.0) as run:
            events = [event async for event in run if isinstance(event, BatchEvent)]
            first, bad, last = await run.result()
        assert (bad.id, bad.stop_reason, bad.text, bad.tokens) == ("batch-1", "error", "", ())
        assert isinstance(bad.error, error)
        assert reason in str(bad.error)
        assert dones(events)["batch-1"] == Done("error", bad.stats, bad.error)
        assert_answered(s, first, "first", temperature=0.0)
        assert_answered(s, last, "last", temperature=0.0)
        assert sum(call.name == "open" for call in s.decoder.history) == 2
        s.assert_idle()


async def test_a_batch_of_nothing_but_bad_items_has_outcomes_too(autojump_clock: trio.testing.MockClock) -> None:
    async with scripted() as s:
        outcomes = await batch.complete(s.model, [[], "x" * 500])
        assert [type(outcome.error) for outcome in outcomes] == [InvalidRequestError, ContextOverflowError]
        assert not s.decoder.history


async def test_C11_a_failed_step_is_the_outcome_of_the_items_in_it(autojump_clock: trio.testing.MockClock) -> None:
    # The first step is the prompt of the first item alone.
    async with scripted(parallel=2, fail_at={1: DecodeError("a bad cell", 3)}) as s:
        outcomes = await batch.complete(s.model, PROMPTS, temperature=0.0)
        assert outcomes[0].stop_reason == "error"
        assert isinstance(outcomes[0].error, DecodeError)
        assert outcomes[0].error.reason == "a bad cell"
        for outcome, prompt in zip(outcomes[1:], PROMPTS[1:], strict=True):
            assert_answered(s, outcome, prompt, temperature=0.0)
        s.assert_idle()


async def test_C11_a_model_that_fails_ends_every_item_with_an_error(autojump_clock: trio.testing.MockClock) -> None:
    failures = {number: DecodeError("gone", 9) for number in range(8, 12)}
    async with scripted(parallel=2, end_every=None, fail_at=failures) as s:
        outcomes = await batch.complete(s.model, PROMPTS)
        assert {outcome.stop_reason for outcome in outcomes} == {"error"}
        assert all(isinstance(outcome.error, DecodeError) for outcome in outcomes)
        assert [outcome.text != "" for outcome in outcomes] == [True, True] + [False] * 5
        with pytest.raises(ModelNotLoadedError, match="in a row"):
            await batch.complete(s.model, PROMPTS)
        # The slots of a failed decoder go with it: only the next run of a test may find them empty.
        s.decoder.fail_at.clear()
        for slot in s.decoder.used:
            s.decoder.drop(slot)


# The lane and the slots.


async def test_A3_a_batch_takes_one_permit_and_its_turn_in_line(autojump_clock: trio.testing.MockClock) -> None:
    async with scripted(parallel=2, end_every=None) as s:
        order: list[str] = []

        async def single(name: str) -> None:
            async with completion.stream(s.model, name, request_id=name, max_tokens=9) as run:
                await run.admitted()
                order.append(name)
                await run.result()

        async def many(name: str) -> None:
            async with batch.stream(s.model, [name] * 3, request_id=name, max_tokens=9) as run:
                await run.admitted()
                order.append(name)
                await run.result()

        async with trio.open_nursery() as nursery:
            for index, function in enumerate((many, single, many, single, many, single)):
                nursery.start_soon(function, f"{index}")
                await trio.testing.wait_all_tasks_blocked()
                assert s.lane.used == min(index + 1, 2)
        assert order == ["0", "1", "2", "3", "4", "5"]
        s.assert_idle()


async def test_A12_with_slot_admission_a_batch_weighs_what_it_can_use(autojump_clock: trio.testing.MockClock) -> None:
    async with scripted(parallel=4, admission="slots", end_every=None) as s:
        # Three items, of which one can never run.
        async with batch.stream(s.model, ["a", "x" * 500, "b"]) as small:
            await small.admitted()
            assert s.lane.used == 2
            async with batch.stream(s.model, ["c"] * 9) as large:
                await trio.testing.wait_all_tasks_blocked()
                assert [waiter.request_id for waiter in s.lane.waiting] == [large.request_id]
                # Nobody passes a heavy head.
                with pytest.raises(laneway.RequestRejectedByPolicyError):
                    await completion.complete(s.model, "d", overflow="reject")
                s.engine.cancel(small.request_id)
                await large.admitted()
                assert s.lane.used == 4
            with pytest.raises(InferenceCancelledError):
                await small.result()
        s.assert_idle()


async def test_A15_more_prompts_than_slots_start_in_input_order(autojump_clock: trio.testing.MockClock) -> None:
    async with scripted(parallel=2) as s:
        await batch.complete(s.model, PROMPTS * 3, temperature=0.0)
        opened = [call.detail for call in s.decoder.history if call.name == "open"]
        assert opened == [tuple(s.tokenizer.tokenize(prompt)) for prompt in PROMPTS * 3]
        assert s.decoder.statistics().max_used == 2


async def test_A15_two_batches_share_the_slots(autojump_clock: trio.testing.MockClock) -> None:
    async with scripted(parallel=4, end_every=None) as s:
        async with batch.stream(s.model, PROMPTS) as first, batch.stream(s.model, PROMPTS) as second:
            shares = []
            for _ in range(80):
                await trio.sleep(STEP)
                shares.append(tuple(running.slots for running in s.lane.running))
            assert shares[0][0] > shares[0][1], "the first one began alone"
            assert shares[-1] == (2, 2)
            assert first.state == second.state == "running"


async def test_S2_a_slow_reader_finds_each_item_in_one_piece(autojump_clock: trio.testing.MockClock) -> None:
    async with scripted(parallel=3) as s:
        async with batch.stream(s.model, PROMPTS, temperature=0.0) as run:
            await s.engine.wait_ended(run.request_id)
            s.assert_idle()
            events = [event async for event in run if isinstance(event, BatchEvent)]
        assert len(events) <= 2 * len(PROMPTS)
        assert texts(events) == {
            f"batch-{index}": s.text(s.expected(prompt, temperature=0.0)) for index, prompt in enumerate(PROMPTS)
        }


async def test_S2_a_paused_batch_goes_on_where_it_was(autojump_clock: trio.testing.MockClock) -> None:
    async with scripted(parallel=3, end_every=None) as s:
        async with batch.stream(s.model, PROMPTS, temperature=0.0, backpressure="pause", max_tokens=30) as run:
            await trio.sleep(5)
            steps = s.decoder.statistics().steps
            await trio.sleep(5)
            assert s.decoder.statistics().steps == steps
            assert s.engine.snapshot().model("model").stalled
            async for _ in run:
                pass
            for outcome, prompt in zip(await run.result(), PROMPTS, strict=True):
                assert_answered(s, outcome, prompt, 30, temperature=0.0)


# Cancelling.


@pytest.mark.parametrize("moment", [0.0, 0.5, 1.0, 1.5, 2.0, 3.5, 6.0, 9.5, 15.0, 40.0, 55.0])
async def test_R4_C6_a_cancelled_batch_ends_every_member_started_or_not(
    autojump_clock: trio.testing.MockClock, moment: float
) -> None:
    async with scripted(parallel=3, end_every=60) as s:
        async with batch.stream(s.model, PROMPTS, request_id="b", temperature=0.0) as run:
            events: list[BatchEvent] = []
            await run.admitted()
            await trio.sleep(moment * STEP)
            assert s.engine.cancel("b", "enough") == 1
            with pytest.raises(InferenceCancelledError) as caught:
                async for event in run:
                    events.append(event)
            await s.engine.wait_ended("b")
            s.assert_idle()
            with pytest.raises(InferenceCancelledError):
                await run.result()
        ends = dones(events)
        if moment:
            assert set(ends) == {f"batch-{index}" for index in range(7)}
        cancelled = [name for name, done in ends.items() if done.stop_reason == "cancelled"]
        assert cancelled == sorted(cancelled), "members are told of in input order"
        assert caught.value.reason == "enough"
        read = texts(events)
        for index, prompt in enumerate(PROMPTS):
            name = f"batch-{index}"
            expected = s.expected(prompt, temperature=0.0)
            if name not in cancelled:
                assert moment == 0 or read[name] == s.text(expected)
                continue
            error = ends[name].error
            assert isinstance(error, InferenceCancelledError)
            assert (error.request_id, error.reason, error.text) == ("b", "enough", read.get(name, ""))
            assert error.tokens == expected.tokens[: len(error.tokens)]
            assert error.stats == ends[name].stats
        made = "".join(read.get(f"batch-{index}", "") for index in range(7))
        assert caught.value.text == made


async def test_C3_a_batch_cancelled_in_the_queue_never_begins(autojump_clock: trio.testing.MockClock) -> None:
    async with scripted(end_every=None) as s:
        async with completion.stream(s.model, "busy"):
            async with batch.stream(s.model, PROMPTS, request_id="b") as run:
                await trio.testing.wait_all_tasks_blocked()
                assert s.engine.cancel("b") == 1
                assert not s.lane.waiting
                with pytest.raises(InferenceCancelledError) as caught:
                    await run.admitted()
                assert caught.value.text == ""
                with pytest.raises(InferenceCancelledError):
                    async for _ in run:
                        pytest.fail("nothing was made")
        assert sum(call.name == "open" for call in s.decoder.history) == 1


async def test_C6_the_caller_s_own_scope_is_trio_s_affair(autojump_clock: trio.testing.MockClock) -> None:
    async with scripted(parallel=2, end_every=None) as s:
        for seconds in (0.0, STEP / 2, 7.5 * STEP):
            with trio.move_on_after(seconds) as scope:
                await batch.complete(s.model, PROMPTS)
            assert scope.cancelled_caught
            s.assert_idle()


async def test_C2_cancelling_one_batch_leaves_the_other_s_tokens_alone(autojump_clock: trio.testing.MockClock) -> None:
    async with scripted(parallel=4) as s:
        async with batch.stream(s.model, PROMPTS, request_id="stays", temperature=0.0) as stays:
            async with batch.stream(s.model, PROMPTS, request_id="goes", temperature=0.0) as goes:
                answered = set()
                async for event in goes:
                    answered.add(event.id)
                    if len(answered) == 2:
                        break
                assert [running.slots for running in s.lane.running] == [2, 2]
                s.engine.cancel("goes")
                with pytest.raises(InferenceCancelledError):
                    await goes.result()
            for outcome, prompt in zip(await stays.result(), PROMPTS, strict=True):
                assert_answered(s, outcome, prompt, temperature=0.0)
        s.assert_idle()


async def test_C7_every_member_leaves_at_the_same_step(autojump_clock: trio.testing.MockClock) -> None:
    async with scripted(parallel=8, context_size=8 * 200, end_every=None) as s:
        async with batch.stream(s.model, PROMPTS, request_id="b") as run:
            await trio.sleep(20.5 * STEP)
            assert s.lane.running[0].slots == 7
            s.engine.cancel("b")
            before = trio.current_time()
            await s.engine.wait_ended("b")
            assert trio.current_time() - before <= STEP
            s.assert_idle()
            with pytest.raises(InferenceCancelledError):
                await run.result()


async def test_C8_unloading_ends_a_batch_like_a_cancel(autojump_clock: trio.testing.MockClock) -> None:
    async with scripted(parallel=2, end_every=None) as s:
        async with batch.stream(s.model, PROMPTS) as run:
            await trio.sleep(5.5 * STEP)
            await s.engine.unload_model(s.model)
            events = []
            with pytest.raises(InferenceCancelledError, match="was unloaded"):
                async for event in run:
                    events.append(event)
            assert [done.stop_reason for done in dones(events).values()] == ["cancelled"] * 7


async def test_R4_nothing_of_a_member_is_heard_after_its_end(autojump_clock: trio.testing.MockClock) -> None:
    # Cancelled in the very step that gives the last token; a peer keeps that step from being cut short.  Whether the
    # token or the teardown comes first is up to Trio, which shuffles: so often enough for both.
    async with scripted(parallel=2, end_every=None, context_size=4000) as s:
        async with completion.stream(s.model, "peer"):
            for _ in range(40):
                events: list[BatchEvent] = []
                async with batch.stream(s.model, ["one"], request_id="b", max_tokens=4) as run:
                    with pytest.raises(InferenceCancelledError) as caught:
                        async for event in run:
                            events.append(event)
                            if len(events) == 3:
                                await trio.sleep(STEP / 2)
                                s.engine.cancel("b")
                assert set(dones(events)) == {"batch-0"}
                assert texts(events) == {"batch-0": caught.value.text}
