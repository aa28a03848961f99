from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.abc
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from laneway.decoder import (
    BatchPolicy,
    Chunk,
    DecodeError,
    Decoder,
    InvalidRequestError,
    Sampling,
    StepBatch,
    StepInterrupted,
)
from laneway.testing import (
    SCRIPTED_POLICY,
    ProtocolViolation,
    Script,
    ScriptedDecoder,
    ScriptedTokenizer,
    expected_answer,
    expected_tokens,
)

GREEDY = Sampling(temperature=0)
END = min(ScriptedTokenizer().end_tokens)
WIDE = BatchPolicy(chunk_max=512)


def prefill(slot: int, tokens: list[int], position: int = 0, *, sample: bool = True) -> StepBatch:
    return StepBatch((Chunk(slot, position, tokens, sample),))


async def run_alone(
    decoder: ScriptedDecoder,
    prompt: list[int],
    sampling: Sampling = GREEDY,
    *,
    slot: int = 0,
    chunk: int = 16,
    max_tokens: int = 64,
) -> list[int]:
    """Prefill in chunks, then decode to an end token or to the window, and leave the slot in use."""
    decoder.open(slot, sampling, prompt)
    tokens: list[int] = []
    last = (len(prompt) - 1) // chunk * chunk
    for at in range(0, last, chunk):
        await decoder.step(prefill(slot, prompt[at : at + chunk], at, sample=False))
    result = await decoder.step(prefill(slot, prompt[last:], last))
    room = min(max_tokens, decoder.window - len(prompt))
    while (token := result.tokens[slot]) not in decoder.vocabulary.end_tokens:
        tokens.append(token)
        if len(tokens) == room:
            break
        result = await decoder.step(prefill(slot, [token], len(prompt) + len(tokens) - 1))
    return tokens


def test_implements_the_protocol() -> None:
    decoder = ScriptedDecoder()
    assert isinstance(decoder, Decoder)
    for name, member in inspect.getmembers(Decoder, inspect.isfunction):
        if not name.startswith("_"):
            ours = getattr(ScriptedDecoder, name)
            assert inspect.iscoroutinefunction(member) == inspect.iscoroutinefunction(ours), name
            assert list(inspect.signature(member).parameters) == list(inspect.signature(ours).parameters), name


def test_has_what_it_was_made_with() -> None:
    decoder = ScriptedDecoder(3, 20)
    assert (decoder.slots, decoder.window, decoder.policy) == (3, 20, SCRIPTED_POLICY)
    assert ScriptedDecoder(policy=WIDE).policy is WIDE
    for arguments in [(0, 64), (4, 1)]:
        with pytest.raises(ValueError, match="at least"):
            ScriptedDecoder(*arguments)
    with pytest.raises(ValueError, match="end_every"):
        ScriptedDecoder(end_every=0)


# What is sampled.


@given(
    prompt=st.lists(st.integers(0, 255), min_size=1, max_size=40),
    seed=st.none() | st.integers(0, 9),
    slot=st.integers(0, 3),
    chunk=st.sampled_from([1, 3, 16]),
)
def test_a_sequence_alone_gets_the_expected_tokens(prompt: list[int], seed: int | None, slot: int, chunk: int) -> None:
    sampling = Sampling(seed=seed)
    decoder = ScriptedDecoder()
    expected = expected_tokens(prompt, sampling)
    assert trio.run(lambda: run_alone(decoder, prompt, sampling, slot=slot, chunk=chunk)) == expected
    assert decoder.expected(prompt, sampling).tokens == tuple(expected)


async def test_peers_and_slots_do_not_matter() -> None:
    prompts = {0: [1, 2, 3], 1: [1, 2, 4], 3: [9]}
    decoder = ScriptedDecoder(end_every=None)
    made: dict[int, list[int]] = {}
    for slot, prompt in prompts.items():
        decoder.open(slot, GREEDY, prompt)
        made[slot] = [(await decoder.step(prefill(slot, prompt))).tokens[slot]]
    for _ in range(9):
        chunks = tuple(Chunk(s, len(prompts[s]) + len(made[s]) - 1, made[s][-1:], True) for s in sorted(made))
        result = await decoder.step(StepBatch(chunks))
        for slot, token in result.tokens.items():
            made[slot].append(token)
    for slot, prompt in prompts.items():
        assert made[slot] == expected_tokens(prompt, GREEDY, 10, end_every=None)
    statistics = decoder.statistics()
    assert (statistics.prefill_steps, statistics.decode_steps, statistics.max_concurrency) == (3, 9, 3)
    assert (statistics.tokens, statistics.max_used) == (7 + 27, 3)


async def test_swapped_tokens_show_at_once() -> None:
    first, second = [1, 2, 3], [4, 5, 6]
    decoder = ScriptedDecoder(end_every=None)
    decoder.open(0, GREEDY, first)
    decoder.open(1, GREEDY, second)
    one = (await decoder.step(prefill(0, first))).tokens[0]
    two = (await decoder.step(prefill(1, second))).tokens[1]
    assert one != two
    swapped = await decoder.step(StepBatch((Chunk(0, 3, [two], True), Chunk(1, 3, [one], True))))
    assert swapped.tokens[0] != expected_tokens(first, GREEDY, 2, end_every=None)[1]
    assert swapped.tokens[1] != expected_tokens(second, GREEDY, 2, end_every=None)[1]


def test_every_cell_and_every_position_counts() -> None:
    # Through the pure half: the decoder itself refuses wrong positions.
    from laneway.testing._scripted_model import Cells

    pairs = [(7, 0), (7, 1), (8, 2), (9, 3)]
    histories = {
        "right": pairs,
        "missing": pairs[:-1],
        "missing inside": [pairs[0], *pairs[2:]],
        "doubled": [*pairs, pairs[-1]],
        "swapped": [pairs[0], (8, 1), (7, 2), pairs[3]],
        "shifted": [(token, position + 1) for token, position in pairs],
        "order": [pairs[1], pairs[0], *pairs[2:]],
    }
    digests = {}
    for name, history in histories.items():
        cells = Cells()
        for token, position in history:
            cells.append(token, position)
        digests[name] = cells.digest(b"")
    assert len(set(digests.values())) == len(histories)


@pytest.mark.parametrize(
    "other",
    [
        Sampling(seed=8),
        Sampling(seed=7, temperature=0.7),
        Sampling(seed=7, top_k=3),
        Sampling(seed=7, top_p=0.5),
        Sampling(seed=7, min_p=0.5),
        Sampling(seed=7, repeat_penalty=1.5),
        Sampling(seed=7, frequency_penalty=1.0),
        Sampling(seed=7, presence_penalty=1.0),
        Sampling(seed=7, logit_bias={97: 1.0}),
        Sampling(seed=7, grammar="root ::= [a-z]+"),
        Sampling(temperature=0),
    ],
)
def test_another_sampling_gives_other_tokens(other: Sampling) -> None:
    assert expected_tokens([1, 2, 3], other, end_every=None) != expected_tokens(
        [1, 2, 3], Sampling(seed=7), end_every=None
    )


def test_a_seed_does_not_matter_to_greedy_sampling_and_no_seed_repeats() -> None:
    assert expected_tokens([1], Sampling(temperature=0, seed=1)) == expected_tokens(
        [1], Sampling(temperature=0, seed=2)
    )
    assert expected_tokens([1], Sampling()) == expected_tokens([1], Sampling())


async def test_a_sampler_that_saw_another_prompt_shows() -> None:
    decoder = ScriptedDecoder(end_every=None)
    decoder.open(0, GREEDY, [1, 2, 9])
    await decoder.step(prefill(0, [1, 2], sample=False))
    token = (await decoder.step(prefill(0, [3], 2))).tokens[0]
    assert [token] != expected_tokens([1, 2, 3], GREEDY, 1, end_every=None)


def test_answers_end_as_often_as_asked() -> None:
    def reasons(end_every: int | None) -> list[str]:
        return [expected_answer([n], GREEDY, window=80, end_every=end_every).stop_reason for n in range(200)]

    assert reasons(None) == ["length"] * 200
    assert reasons(1) == ["eos"] * 200
    # 79 draws at 1 in 24 miss with probability 0.035, so about 193 of 200 end.
    assert 180 <= reasons(24).count("eos") < 200
    ends = {expected_answer([n], GREEDY, end_every=2).end_token for n in range(50)}
    assert ends >= ScriptedTokenizer().end_tokens


def test_max_tokens_and_window_bound_an_answer() -> None:
    assert len(expected_tokens([1] * 60, GREEDY, end_every=None)) == 4
    assert len(expected_tokens([1] * 60, GREEDY, 3, end_every=None)) == 3
    for length in (0, 64):
        with pytest.raises(ValueError, match="from 1 to 63"):
            expected_tokens([1] * length)


def test_forbidden_tokens_are_never_sampled() -> None:
    tokenizer = ScriptedTokenizer()
    forbidden = [*tokenizer.end_tokens, *tokenizer.answer_tokens[1:]]
    sampling = Sampling(logit_bias=dict.fromkeys(forbidden, -math.inf))
    assert expected_tokens([1], sampling, 20, end_every=2) == [tokenizer.answer_tokens[0]] * 20


def test_check_refuses_what_cannot_be_sampled() -> None:
    decoder = ScriptedDecoder()
    everything = dict.fromkeys(decoder.vocabulary.answer_tokens, -math.inf)
    for sampling, field in [
        (Sampling(logit_bias={decoder.vocabulary.size: 1.0}), "logit_bias"),
        (Sampling(logit_bias={-1: 1.0}), "logit_bias"),
        (Sampling(logit_bias=everything), "logit_bias"),
        (Sampling(grammar="start ::= x"), "grammar"),
        (Sampling(grammar=""), "grammar"),
    ]:
        with pytest.raises(InvalidRequestError) as caught:
            decoder.check(sampling)
        assert caught.value.field == field
    decoder.check(Sampling(grammar='root ::= "yes" | "no"'))
    assert decoder.violations == []


async def test_logprobs_come_when_asked_for() -> None:
    sampling = Sampling(temperature=0, logprobs=True, top_logprobs=3)
    decoder = ScriptedDecoder(end_every=None)
    decoder.open(0, sampling, [5])
    result = await decoder.step(prefill(0, [5]))
    answer = decoder.expected([5], sampling, 1)
    (logprob,) = answer.logprobs
    assert result.logprobs == {0: logprob}
    assert logprob.token == result.tokens[0] == logprob.top[0][0]
    assert logprob.logprob == logprob.top[0][1]
    assert len({token for token, _ in logprob.top}) == 3
    assert [p for _, p in logprob.top] == sorted((p for _, p in logprob.top), reverse=True)
    assert sum(math.exp(p) for _, p in logprob.top) < 1
    decoder.open(1, GREEDY, [5])
    assert (await decoder.step(prefill(1, [5]))).logprobs == {}


async def test_a_script_is_followed_and_then_ends() -> None:
    vocabulary = ScriptedTokenizer()
    prompt = vocabulary.tokenize("Hello")
    script: Script = {"Hello": "café", (9, 9): [65, 66], 7: "first"}
    decoder = ScriptedDecoder(script=script)
    assert vocabulary.text(await run_alone(decoder, prompt)) == "café"
    assert await run_alone(decoder, [9, 9], slot=1) == [65, 66]
    assert vocabulary.text(await run_alone(decoder, [7, 1], slot=2)) == "first"
    assert decoder.expected([9, 9], GREEDY).stop_reason == "eos"
    assert await run_alone(decoder, [8], slot=3) == expected_tokens([8], GREEDY)
    called = ScriptedDecoder(script=lambda prompt: "yes" if prompt[-1] == 1 else None)
    assert vocabulary.text(await run_alone(called, [7, 1])) == "yes"
    assert await run_alone(called, [7, 2], slot=1) == expected_tokens([7, 2], GREEDY)


async def test_a_mixed_up_slot_leaves_its_script() -> None:
    decoder = ScriptedDecoder(script={(9, 9): [65, 66, 67]}, end_every=None)
    decoder.open(0, GREEDY, [9, 9])
    assert (await decoder.step(prefill(0, [9, 9]))).tokens[0] == 65
    assert (await decoder.step(prefill(0, [77], 2))).tokens[0] != 66


# Cells that come from elsewhere.


async def test_a_copied_prefix_continues_as_if_prefilled() -> None:
    prompt = list(range(20))
    decoder = ScriptedDecoder(policy=WIDE)
    await run_alone(decoder, prompt)
    decoder.open(2, GREEDY, prompt)
    decoder.copy(0, 2, 19)
    assert decoder.cells(2) == tuple((n, n) for n in range(19))
    result = await decoder.step(prefill(2, prompt[19:], 19))
    assert result.tokens[2] == (*expected_tokens(prompt, GREEDY, 1), END)[0]
    split = ScriptedDecoder(policy=BatchPolicy(unified_kv=False))
    await run_alone(split, prompt, max_tokens=1)
    with pytest.raises(DecodeError, match="unified"):
        split.copy(0, 1, 5)
    assert split.violations == []


async def test_a_saved_slot_continues_in_another_decoder() -> None:
    prompt = list(range(12))
    decoder = ScriptedDecoder()
    decoder.open(0, GREEDY, prompt)
    await decoder.step(prefill(0, prompt[:11], sample=False))
    state = await (await decoder.save(0))()
    other = ScriptedDecoder(slots=2, window=40)
    await other.load(1, state, 11)
    other.open(1, GREEDY, prompt)
    assert other.cells(1) == decoder.cells(0)
    result = await other.step(prefill(1, prompt[11:], 11))
    assert result.tokens[1] == (*expected_tokens(prompt, GREEDY, 1), END)[0]
    assert (decoder.statistics().saves, other.statistics().loads) == (1, 1)


async def test_a_state_that_does_not_fit_leaves_the_slot_empty() -> None:
    decoder = ScriptedDecoder()
    await run_alone(decoder, [1, 2, 3], max_tokens=1)
    state = await (await decoder.save(0))()
    damaged = bytearray(state)
    damaged[len(state) // 2] ^= 1
    for wrong in [b"", state[:-1], state + b"x", bytes(damaged), b"other" + state]:
        with pytest.raises(DecodeError, match="truncated, damaged"):
            await decoder.load(1, wrong, 3)
    small = ScriptedDecoder(window=2)
    with pytest.raises(DecodeError, match="3 cells and the window is 2"):
        await small.load(0, state, 2)
    assert small.used == frozenset()
    assert decoder.used == {0}
    assert decoder.violations == []


async def test_a_move_takes_the_whole_sequence() -> None:
    decoder = ScriptedDecoder(end_every=None)
    made = await run_alone(decoder, [1, 2, 3], slot=3, max_tokens=2)
    result = await decoder.step(StepBatch((Chunk(0, 4, made[1:], True),), moves=((3, 0),)))
    assert [*made, result.tokens[0]] == expected_tokens([1, 2, 3], GREEDY, 3, end_every=None)
    assert decoder.used == {0}
    assert decoder.statistics().moves == 1


# Time.


async def test_steps_cost_virtual_time(autojump_clock: trio.testing.MockClock) -> None:
    decoder = ScriptedDecoder(seconds_per_step=0.25, seconds_per_token=0.5, seconds_per_state=2.0)
    decoder.open(0, GREEDY, [1, 2, 3])
    result = await decoder.step(prefill(0, [1, 2, 3]))
    assert trio.current_time() == result.seconds == 1.75
    assert decoder.statistics().step_seconds == 1.75
    await decoder.save(0)
    assert trio.current_time() == 3.75
    assert [(call.name, call.time) for call in decoder.history] == [("open", 0), ("step", 0), ("save", 1.75)]


class CountRounds(trio.abc.Instrument):
    """How often the scheduler has run the task that made this."""

    def __init__(self) -> None:
        self.task = trio.lowlevel.current_task()
        self.count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += task is self.task


async def test_a_step_at_no_cost_is_one_checkpoint() -> None:
    decoder = ScriptedDecoder()
    decoder.open(0, GREEDY, [1])
    rounds = CountRounds()
    trio.lowlevel.add_instrument(rounds)
    with trio.testing.assert_checkpoints():
        result = await decoder.step(prefill(0, [1]))
    assert rounds.count == 1
    assert result.seconds == 0


@pytest.mark.parametrize("seconds", [0.0, 3.0])
async def test_cancelling_the_awaiter_does_not_end_a_step_early(
    seconds: float, autojump_clock: trio.testing.MockClock
) -> None:
    decoder = ScriptedDecoder(seconds_per_step=seconds)
    decoder.open(0, GREEDY, [1])
    with trio.CancelScope() as scope:
        decoder.at_step = lambda number, batch: scope.cancel()
        result = await decoder.step(prefill(0, [1]))
        assert result.seconds == seconds
        assert decoder.cells(0) == ((1, 0),)
    with trio.CancelScope() as scope:
        scope.cancel()
        await decoder.step(prefill(0, [2], 1))
        raise AssertionError("a step begun under a cancelled scope must not start")
    assert decoder.statistics().steps == 1


async def test_an_interrupt_ends_the_step_under_way(autojump_clock: trio.testing.MockClock) -> None:
    decoder = ScriptedDecoder(seconds_per_step=10, hang_at={2})
    decoder.open(0, GREEDY, [1, 2])
    decoder.interrupt()  # nothing is under way, and nothing is remembered
    await decoder.step(prefill(0, [1], sample=False))
    assert trio.current_time() == 10

    async def later() -> None:
        await trio.sleep(3)
        assert decoder.step_under_way
        decoder.interrupt()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(later)
        with pytest.raises(StepInterrupted):
            await decoder.step(prefill(0, [2], 1))
    assert trio.current_time() == 13
    assert not decoder.step_under_way
    assert decoder.cells(0) == ((1, 0),)
    assert decoder.statistics().interrupts == 1
    with pytest.raises(ProtocolViolation, match="step 2, which was interrupted; it can only be dropped"):
        await decoder.step(prefill(0, [2], 1))
    decoder.drop(0)
    assert decoder.used == frozenset()


@pytest.mark.parametrize("seconds", [0.0, 1.0])
async def test_an_interrupt_from_within_the_step(seconds: float, autojump_clock: trio.testing.MockClock) -> None:
    decoder = ScriptedDecoder(seconds_per_step=seconds)
    decoder.at_step = lambda number, batch: decoder.interrupt()
    decoder.open(0, GREEDY, [1])
    with pytest.raises(StepInterrupted):
        await decoder.step(prefill(0, [1]))
    assert trio.current_time() == 0


async def test_an_interrupt_from_another_thread() -> None:
    decoder = ScriptedDecoder(hang_at={1})
    decoder.open(0, GREEDY, [1])
    async with trio.open_nursery() as nursery:
        decoder.at_step = lambda number, batch: nursery.start_soon(trio.to_thread.run_sync, decoder.interrupt)
        with pytest.raises(StepInterrupted):
            await decoder.step(prefill(0, [1]))


# Failures.


async def test_a_failing_step_takes_its_time_and_breaks_its_slots(autojump_clock: trio.testing.MockClock) -> None:
    error = DecodeError("as told", status=-3)
    decoder = ScriptedDecoder(seconds_per_step=2, fail_at={2: error})
    decoder.open(0, GREEDY, [1])
    decoder.open(1, GREEDY, [2])
    await decoder.step(prefill(0, [1]))
    with pytest.raises(DecodeError) as caught:
        await decoder.step(prefill(1, [2]))
    assert caught.value is error
    assert trio.current_time() == 4
    with pytest.raises(ProtocolViolation, match="no whole cells"):
        decoder.copy(1, 2, 1)
    with pytest.raises(ProtocolViolation, match="in use"):
        decoder.open(1, GREEDY, [2])
    decoder.drop(1)
    decoder.open(1, GREEDY, [2])
    await decoder.step(prefill(1, [2]))
    assert decoder.cells(0) == ((1, 0),)
    decoder.fail_next(error)
    with pytest.raises(DecodeError):
        await decoder.step(prefill(1, [3], 1))
    assert decoder.statistics().failures == 2


async def test_a_failing_move_step_leaves_the_moved_sequence_where_it_went() -> None:
    decoder = ScriptedDecoder(fail_at={1: DecodeError("as told")})
    decoder.open(3, GREEDY, [1, 2])
    with pytest.raises(DecodeError):
        await decoder.step(StepBatch((Chunk(0, 0, [1, 2], True),), moves=((3, 0),)))
    assert decoder.used == {0}


async def test_drops_saves_and_loads_fail_when_told() -> None:
    error = DecodeError("as told")
    decoder = ScriptedDecoder(fail_drop={2: error}, fail_save={1: error}, fail_load={1: error})
    for slot in (0, 1):
        await run_alone(decoder, [1], slot=slot, max_tokens=1)
    with pytest.raises(DecodeError):
        await decoder.save(0)
    state = await (await decoder.save(0))()
    with pytest.raises(DecodeError):
        await decoder.load(2, state, 1)
    assert decoder.cells(2) == ()
    decoder.drop(2)  # empty: not counted
    decoder.drop(0)
    with pytest.raises(DecodeError):
        decoder.drop(1)
    assert decoder.used == {1}
    decoder.drop(1)
    decoder.assert_idle()


async def test_rounds_are_as_many_steps_in_one(autojump_clock: trio.testing.MockClock) -> None:
    decoder = ScriptedDecoder(2, 40, seconds_per_step=1.0, end_every=5)
    prompts = [[1, 2], [12, 13]]
    answers = [list(decoder.expected(prompt, GREEDY).tokens) for prompt in prompts]
    # One of them ends within the rounds, long before the other.
    assert [len(answer) for answer in answers] == [10, 5]
    chunks = []
    for slot, prompt in enumerate(prompts):
        decoder.open(slot, GREEDY, prompt)
        first = (await decoder.step(prefill(slot, prompt))).tokens[slot]
        assert first == answers[slot][0]
        chunks.append(Chunk(slot, 2, [first], True))
    begin = trio.current_time()
    result = await decoder.step(StepBatch(tuple(chunks), rounds=9))
    assert trio.current_time() - begin == result.seconds == 9
    got = [[tokens[slot] for tokens in (result.tokens, *result.later) if slot in tokens] for slot in range(2)]
    assert got[0] == answers[0][1:]
    assert got[1][:-1] == answers[1][1:]
    assert got[1][-1] in decoder.vocabulary.end_tokens
    # The last token that was picked has no cell yet.
    assert [len(decoder.cells(slot)) for slot in range(2)] == [11, 7]


async def test_a_step_ends_with_the_round_that_it_is_in(autojump_clock: trio.testing.MockClock) -> None:
    decoder = ScriptedDecoder(1, 40, seconds_per_step=1.0, end_every=None)
    decoder.end_round()  # nothing to end: forgotten
    decoder.open(0, GREEDY, [1, 2])
    token = (await decoder.step(prefill(0, [1, 2]))).tokens[0]
    begin = trio.current_time()
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def later() -> None:
            await trio.sleep(2.5)
            decoder.end_round()

        result = await decoder.step(StepBatch((Chunk(0, 2, [token], True),), rounds=9))
        assert trio.current_time() - begin == result.seconds == 3
    assert len(result.later) == 2
    assert len(decoder.cells(0)) == 2 + 3


async def test_prompts_are_taken_in_together_where_the_policy_says_so(autojump_clock: trio.testing.MockClock) -> None:
    policy = BatchPolicy(joint_prompts=True, chunk_max=8)
    decoder = ScriptedDecoder(3, 40, policy=policy, seconds_per_step=1.0)
    for slot, prompt in enumerate([[1, 2], [3, 4, 5], [6, 7, 8, 9, 10, 11]]):
        decoder.open(slot, GREEDY, prompt)
    both = StepBatch((Chunk(0, 0, [1, 2], True), Chunk(1, 0, [3, 4, 5], True)))
    result = await decoder.step(both)
    for slot, prompt in enumerate([[1, 2], [3, 4, 5]]):
        assert result.tokens[slot] == decoder.expected(prompt, GREEDY).tokens[0]
    assert decoder.statistics().prefill_steps == 1
    with pytest.raises(ProtocolViolation, match="in one step with other slots"):
        await decoder.step(StepBatch((Chunk(0, 2, [1], True), Chunk(2, 0, [6], False))))
    decoder.drop(0)
    decoder.open(0, GREEDY, [1] * 5)
    with pytest.raises(ProtocolViolation, match="a step of 9 tokens of prompts: chunks have at most 8 tokens"):
        await decoder.step(StepBatch((Chunk(0, 0, [1] * 5, True), Chunk(2, 0, [6, 7, 8, 9], False))))


# Misuse.


async def _opened() -> ScriptedDecoder:
    """Slot 0 decodes after the prompt [1, 2], slot 1 is open for [3, 4, 5] and empty, 2 and 3 are free."""
    decoder = ScriptedDecoder(window=20)
    decoder.open(0, GREEDY, [1, 2])
    await decoder.step(prefill(0, [1, 2]))
    decoder.open(1, GREEDY, [3, 4, 5])
    return decoder


BAD_BATCHES: dict[str, tuple[StepBatch, str]] = {
    "no chunks": (StepBatch(()), "no chunks"),
    "no tokens": (prefill(1, []), "nothing to decode"),
    "unopened": (prefill(2, [1]), "not opened"),
    "no such slot": (prefill(4, [1]), "slots are 0 to 3"),
    "negative slot": (prefill(-1, [1]), "slots are 0 to 3"),
    "gap": (prefill(0, [1], 3), "the slot has 2 cells, the next position is 2"),
    "again": (prefill(0, [1], 1), "the next position is 2"),
    "beyond the window": (prefill(0, [1] * 19, 2), "beyond the window of 20"),
    "two chunks for a slot": (StepBatch((Chunk(0, 2, [1], True), Chunk(0, 3, [1], True))), "several chunks"),
    "descending": (StepBatch((Chunk(1, 0, [3], False), Chunk(0, 2, [1], True))), "do not ascend"),
    "mixed": (StepBatch((Chunk(0, 2, [1], True), Chunk(1, 0, [3], False))), "in one step with other slots"),
    "no rounds": (StepBatch((Chunk(0, 2, [1], True),), rounds=0), "a step of 0 rounds"),
    "rounds of a prompt": (StepBatch((Chunk(1, 0, [3, 4, 5], True),), rounds=2), "2 rounds are for decoding"),
    "rounds without tokens": (StepBatch((Chunk(0, 2, [1], False),), rounds=2), "2 rounds are for decoding"),
    "rounds beyond the window": (StepBatch((Chunk(0, 2, [1], True),), rounds=19), "beyond the window of 20"),
    "two tokens decoded": (prefill(0, [1, 2], 2), "by one token"),
    "beyond the prompt": (prefill(1, [3, 4, 5, 6]), "beyond the prompt's 3 tokens"),
    "sampled early": (prefill(1, [3, 4]), "sampled before the end"),
    "beyond the vocabulary": (prefill(0, [10_000], 2), "beyond the vocabulary"),
    "move of nothing": (StepBatch((Chunk(0, 2, [1], True),), moves=((2, 3),)), "holds no whole sequence"),
    "move into use": (StepBatch((Chunk(0, 2, [1], True),), moves=((1, 0),)), "slot 0 is in use"),
    "move out of range": (StepBatch((Chunk(0, 2, [1], True),), moves=((1, 4),)), "slots are 0 to 3"),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
async def test_a_wrong_batch_is_a_violation_and_changes_nothing(name: str) -> None:
    batch, match = BAD_BATCHES[name]
    decoder = await _opened()
    before = [decoder.cells(slot) for slot in range(4)], decoder.used, decoder.statistics()
    with pytest.raises(ProtocolViolation, match=match) as caught:
        await decoder.step(batch)
    assert ([decoder.cells(slot) for slot in range(4)], decoder.used, decoder.statistics()) == before
    assert decoder.violations == [caught.value]
    await decoder.step(prefill(1, [3, 4, 5]))
    decoder.drop(0)
    decoder.drop(1)
    with pytest.raises(AssertionError, match="broken 1 times"):
        decoder.assert_idle()


async def test_a_chunk_over_the_policys_size_is_a_violation() -> None:
    decoder = ScriptedDecoder()
    decoder.open(0, GREEDY, [1] * 30)
    with pytest.raises(ProtocolViolation, match="at most 16"):
        await decoder.step(prefill(0, [1] * 17, sample=False))


BAD_CALLS: dict[str, tuple[Callable[[ScriptedDecoder], object], str]] = {
    "open used": (lambda d: d.open(0, GREEDY, [1]), r"in use \(2 cells"),
    "open twice": (lambda d: d.open(1, GREEDY, [1]), r"in use \(0 cells"),
    "open out of range": (lambda d: d.open(4, GREEDY, [1]), "slots are 0 to 3"),
    "open without a prompt": (lambda d: d.open(2, GREEDY, []), "a prompt of 0 tokens"),
    "open beyond the window": (lambda d: d.open(2, GREEDY, [1] * 21), "a prompt of 21 tokens"),
    "open beyond the vocabulary": (lambda d: d.open(2, GREEDY, [-1]), "beyond the vocabulary"),
    "open unchecked": (lambda d: d.open(2, Sampling(grammar="x"), [1]), "check\\(\\) refuses"),
    "drop out of range": (lambda d: d.drop(-1), "slots are 0 to 3"),
    "copy from empty": (lambda d: d.copy(1, 2, 1), "no whole cells"),
    "copy into used": (lambda d: d.copy(0, 0, 1), "target holds cells"),
    "copy too much": (lambda d: d.copy(0, 2, 3), "the source has 2 cells"),
    "copy nothing": (lambda d: d.copy(0, 2, 0), "the source has 2 cells"),
    "copy out of range": (lambda d: d.copy(9, 2, 1), "slots are 0 to 3"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
async def test_a_wrong_call_is_a_violation(name: str) -> None:
    call, match = BAD_CALLS[name]
    decoder = await _opened()
    with pytest.raises(ProtocolViolation, match=match):
        call(decoder)
    assert len(decoder.violations) == 1


async def test_saving_nothing_and_loading_into_use_are_violations() -> None:
    decoder = await _opened()
    state = await (await decoder.save(0))()
    with pytest.raises(ProtocolViolation, match="no whole cells"):
        await decoder.save(2)
    with pytest.raises(ProtocolViolation, match="holds cells"):
        await decoder.load(0, state, 2)
    await decoder.load(1, state, 2)
    decoder.drop(1)
    with pytest.raises(ProtocolViolation, match="0 cells of a state are none"):
        await decoder.load(1, state, 0)


async def test_a_saved_slot_can_be_loaded_in_part() -> None:
    decoder = ScriptedDecoder()
    await run_alone(decoder, [1, 2, 3, 4, 5], max_tokens=1)
    state = await (await decoder.save(0))()
    await decoder.verify(state)
    await decoder.load(1, state, 3, verified=True)
    assert decoder.cells(1) == ((1, 0), (2, 1), (3, 2))
    assert decoder.used == {0, 1}
    with pytest.raises(DecodeError, match="5 cells, 6 are wanted"):
        await decoder.load(2, state, 6)
    with pytest.raises(DecodeError, match="damaged"):
        await decoder.verify(state[:-1])
    rigid = ScriptedDecoder(cuttable=False)
    with pytest.raises(DecodeError, match="cannot be cut"):
        await rigid.load(0, state, 3)
    await rigid.load(0, state, 5)
    assert decoder.violations == rigid.violations == []


async def test_a_cut_slot_keeps_its_first_cells_and_is_in_nobodys_use() -> None:
    decoder = ScriptedDecoder(slots=2)
    await run_alone(decoder, [1, 2, 3, 4, 5], max_tokens=1)
    decoder.cut(0, 4)
    assert (decoder.used, decoder.kept) == (frozenset(), {0: (1, 2, 3, 4)})
    decoder.assert_idle()
    decoder.copy(0, 1, 2)
    assert decoder.used == {1}
    decoder.cut(0, 2)
    decoder.open(0, GREEDY, [1, 2, 9])
    assert decoder.used == {0, 1}
    assert not decoder.kept
    result = await decoder.step(prefill(0, [9], 2))
    assert result.tokens[0] == (*expected_tokens([1, 2, 9], GREEDY, 1), END)[0]
    assert (decoder.statistics().cuts, decoder.statistics().drops) == (2, 0)
    with pytest.raises(ProtocolViolation, match="has 3 cells"):
        decoder.cut(0, 4)
    with pytest.raises(ProtocolViolation, match="has 3 cells"):
        decoder.cut(0, 0)
    decoder.cut(0, 1)
    decoder.drop(0)
    assert not decoder.kept


async def test_nothing_is_opened_on_cells_that_leave_nothing_to_compute() -> None:
    decoder = ScriptedDecoder()
    await run_alone(decoder, [1, 2, 3], max_tokens=1)
    decoder.cut(0, 3)
    with pytest.raises(ProtocolViolation, match="3 cells and the prompt 3 tokens"):
        decoder.open(0, GREEDY, [1, 2, 3])


async def test_copies_and_cuts_fail_when_told() -> None:
    error = DecodeError("as told")
    decoder = ScriptedDecoder(fail_copy={1: error}, fail_cut={1: error})
    await run_alone(decoder, [1, 2, 3], max_tokens=1)
    with pytest.raises(DecodeError, match="as told"):
        decoder.copy(0, 1, 2)
    with pytest.raises(DecodeError, match="as told"):
        decoder.cut(0, 2)
    assert decoder.used == {0}
    assert not decoder.kept
    rigid = ScriptedDecoder(cuttable=False)
    await run_alone(rigid, [1, 2, 3], max_tokens=1)
    assert not rigid.shares_prefixes
    with pytest.raises(DecodeError, match="cannot be cut"):
        rigid.cut(0, 2)


async def test_sealing_and_verifying_take_time_of_their_own(autojump_clock: trio.testing.MockClock) -> None:
    decoder = ScriptedDecoder(seconds_per_state=1.0, seconds_per_seal=4.0)
    await run_alone(decoder, [1, 2, 3], max_tokens=1)
    seal = await decoder.save(0)
    assert trio.current_time() == 1.0
    decoder.drop(0)
    await decoder.aclose()
    state = await seal()
    assert trio.current_time() == 5.0
    await decoder.verify(state)
    assert trio.current_time() == 9.0


@pytest.mark.parametrize("name", ["open", "drop", "copy", "cut", "step", "save", "load", "aclose"])
@pytest.mark.parametrize("during", ["step", "save"])
async def test_nothing_may_be_called_during_a_step_or_save(
    name: str, during: str, autojump_clock: trio.testing.MockClock
) -> None:
    decoder = await _opened()
    decoder.seconds_per_step = decoder.seconds_per_state = 1
    batch = prefill(0, [7], 2)
    async with trio.open_nursery() as nursery:
        if during == "step":
            nursery.start_soon(decoder.step, batch)
        else:
            nursery.start_soon(decoder.save, 0)
        await trio.testing.wait_all_tasks_blocked()
        decoder.check(GREEDY)  # may come at any time
        with pytest.raises(ProtocolViolation, match=f"{name}.* while a {during} is under way"):
            match name:
                case "open":
                    decoder.open(2, GREEDY, [1])
                case "drop":
                    decoder.drop(2)
                case "copy":
                    decoder.copy(0, 2, 1)
                case "cut":
                    decoder.cut(0, 1)
                case "step":
                    await decoder.step(batch)
                case "save":
                    await decoder.save(0)
                case "load":
                    await decoder.load(2, b"", 1)
                case "aclose":
                    await decoder.aclose()
        with pytest.raises(AssertionError, match="broken 1 times"):
            decoder.assert_idle()


async def test_nothing_may_be_called_after_aclose() -> None:
    decoder = await _opened()
    await decoder.aclose()
    assert decoder.left_at_close == {0, 1}
    decoder.interrupt()
    calls: list[Callable[[], object]] = [
        lambda: decoder.check(GREEDY),
        lambda: decoder.open(2, GREEDY, [1]),
        lambda: decoder.drop(2),
        lambda: decoder.copy(0, 2, 1),
        lambda: decoder.cut(0, 1),
    ]
    for call in calls:
        with pytest.raises(ProtocolViolation, match="after aclose"):
            call()
    methods: list[Callable[[], Awaitable[object]]] = [
        decoder.aclose,
        lambda: decoder.step(prefill(0, [1], 2)),
        lambda: decoder.save(0),
        lambda: decoder.load(2, b"", 1),
    ]
    for method in methods:
        with pytest.raises(ProtocolViolation, match="after aclose"):
            await method()


async def test_assert_idle_names_what_is_left() -> None:
    decoder = await _opened()
    with pytest.raises(AssertionError, match=r"slot 0 \(2 cells.*slot 1 \(0 cells"):
        decoder.assert_idle()
    decoder.drop(0)
    decoder.drop(1)
    decoder.assert_idle()
    assert repr(decoder) == "<laneway.testing.ScriptedDecoder 0/4 slots in use, 1 steps, at rest>"


async def test_history_is_bounded_and_in_order() -> None:
    decoder = ScriptedDecoder(history=3)
    await run_alone(decoder, [1, 2], chunk=1, max_tokens=1)
    decoder.drop(0)
    assert [call.name for call in decoder.history] == ["step", "step", "drop"]
    assert [call.slot for call in decoder.history] == [None, None, 0]


@pytest.mark.parametrize("error", [None, DecodeError("as told")])
async def test_an_error_of_at_step_is_the_steps_error(error: Exception | None) -> None:
    seen: list[int] = []

    def at_step(number: int, batch: StepBatch) -> None:
        seen.append(number)
        if error is not None:
            raise error

    decoder = ScriptedDecoder(at_step=at_step)
    decoder.open(0, GREEDY, [1])
    if error is None:
        await decoder.step(prefill(0, [1]))
    else:
        with pytest.raises(DecodeError):
            await decoder.step(prefill(0, [1]))
    assert seen == [1]
    assert not decoder.step_under_way
