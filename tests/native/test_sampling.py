"""The sampler in C against a plain one in Python."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneway.decoder import DecodeError, Sampling
from laneway_native import Model
from laneway_native._ffi import lib
from tests.native.samplers import native_sampler
from tests.native.sampling_reference import Random, Reference, float32
from tests.tiny_model import EOS, FIRST_BYTE, IM_END

BLOCK = 256
"""The C code works in blocks of so many logits."""

# A few values that come again and again make ties; signed zeros are equal; -inf is forbidden.
_palette = st.sampled_from([-3.0, -1.0, -0.0, 0.0, 0.5, 1.0, 7.25, -math.inf])
_logit = st.one_of(_palette, st.floats(-40, 40, width=32), st.floats(-4, 4, width=32))


@st.composite
def rows(draw: st.DrawFn, size: int | None = None) -> list[float]:
    """A row of logits with at least one token that is not forbidden."""
    if size is None:
        size = draw(st.one_of(st.integers(1, 12), st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK - 5])))
    few = draw(st.lists(_logit, min_size=1, max_size=24))
    # A long row repeats a short one with small steps, so that examples stay small and shrink well.
    step = draw(st.sampled_from([0.0, 2.0**-6, -(2.0**-5)]))
    row = [float32(few[i % len(few)] + step * (i // len(few))) for i in range(size)]
    if max(row) == -math.inf:
        row[draw(st.integers(0, size - 1))] = 1.0
    return row


@st.composite
def samplings(draw: st.DrawFn, /, size: int, **fixed: object) -> Sampling:
    """Any sampling that leaves a token in a vocabulary of ``size``."""
    fields: dict[str, object] = {
        "temperature": draw(st.one_of(st.just(0.0), st.floats(0.05, 5.0), st.sampled_from([1.0, 0.8]))),
        "top_k": draw(st.one_of(st.just(0), st.integers(1, 5), st.integers(1, 2 * size))),
        "top_p": draw(st.one_of(st.just(1.0), st.just(0.0), st.floats(0.01, 1.0))),
        "min_p": draw(st.one_of(st.just(0.0), st.just(1.0), st.floats(0.001, 1.0))),
        "seed": draw(st.integers(0, 2**64 - 1)),
        "repeat_penalty": draw(st.sampled_from([1.0, 1.0, 1.1, 2.0, 0.5])),
        "frequency_penalty": draw(st.sampled_from([0.0, 0.0, 0.7, -0.4])),
        "presence_penalty": draw(st.sampled_from([0.0, 0.0, 1.5, -1.0])),
        "logit_bias": draw(st.dictionaries(st.integers(0, size - 1), st.floats(-20, 20, width=32), max_size=3)),
    }
    return Sampling(**{**fields, **fixed})  # type: ignore[arg-type]


def assert_same(
    sampling: Sampling, prompt: Sequence[int], given_rows: Sequence[Sequence[float]], model: Model | None = None
) -> None:
    """Pick once from each row, in C and in Python, and compare."""
    reference = Reference(sampling, prompt, frozenset() if model is None else model.end_tokens)
    with native_sampler(sampling, prompt, model) as sampler:
        for row in given_rows:
            token = sampler.pick(row)
            assert token in reference.pick(row)
            # Where rounding decides, the reference follows: what comes later depends on it.
            reference.answer.append(token)


@given(st.data())
def test_picks_what_the_reference_picks(data: st.DataObject) -> None:
    row = data.draw(rows())
    sampling = data.draw(samplings(len(row)))
    prompt = data.draw(st.lists(st.integers(0, len(row) - 1), max_size=6))
    assert_same(sampling, prompt, [row] * data.draw(st.integers(1, 5)))


@given(st.data())
def test_picks_from_changing_rows(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 40))
    sampling = data.draw(samplings(size))
    given_rows = data.draw(st.lists(rows(size=size), min_size=1, max_size=8))
    assert_same(sampling, [0, 1, 1], given_rows)


@given(st.data())
def test_large_vocabulary(data: st.DataObject) -> None:
    row = data.draw(rows(size=20 * BLOCK + 7))
    sampling = data.draw(samplings(len(row), logit_bias={}))
    assert_same(sampling, [], [row, row])


@given(st.data())
def test_end_tokens_are_never_penalised(tiny: Model, data: st.DataObject) -> None:
    """The tiny model's end tokens are among its first few, so the prompts are full of them."""
    row = data.draw(rows(size=12))
    sampling = data.draw(samplings(12, repeat_penalty=data.draw(st.sampled_from([1.3, 5.0, 0.2]))))
    prompt = data.draw(st.lists(st.integers(0, 6), max_size=6))
    assert_same(sampling, prompt, [row] * 4, tiny)


def test_a_chat_full_of_end_tokens_can_still_end(tiny: Model) -> None:
    row = [0.0] * tiny.size
    row[IM_END], row[FIRST_BYTE] = 4.0, 3.0
    for prompt in ([IM_END] * 5, [EOS, IM_END]):
        sampling = Sampling(temperature=0.0, repeat_penalty=10.0, frequency_penalty=2.0, presence_penalty=2.0)
        with native_sampler(sampling, prompt, tiny) as sampler:
            assert sampler.pick(row) == IM_END


@given(rows(), st.data())
def test_greedy_takes_the_lowest_id_among_the_largest(row: list[float], data: st.DataObject) -> None:
    size = len(row)
    largest = max(row)
    row[data.draw(st.integers(0, size - 1))] = largest
    with native_sampler(Sampling(temperature=0.0)) as sampler:
        assert sampler.pick(row) == row.index(largest)


@pytest.mark.parametrize("first", [0.0, -0.0])
def test_signed_zeros_are_equal(first: float) -> None:
    row = [-1.0] * (2 * BLOCK)
    row[3], row[BLOCK + 3] = first, -first
    with native_sampler(Sampling(temperature=0.0)) as sampler:
        assert sampler.pick(row) == 3


def test_top_k_keeps_the_lowest_ids_among_equals() -> None:
    row = [1.0] * (3 * BLOCK)
    with native_sampler(Sampling(temperature=1.0, top_k=2, top_p=1.0, min_p=0.0, seed=5)) as sampler:
        assert {sampler.pick(row) for _ in range(64)} == {0, 1}


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"top_k": 1}, {2}),
        ({"top_k": 3}, {0, 2, 4}),
        ({"top_p": 0.0}, {2}),
        # exp: 1.0, 0.5, 0.25, 0.25 of 2: half of it is the first alone, a little more needs the second.
        ({"top_p": 0.49}, {2}),
        ({"top_p": 0.51}, {2, 4}),
        ({"top_p": 0.76}, {0, 2, 4}),
        ({"min_p": 1.0}, {2}),
        ({"min_p": 0.49}, {2, 4}),
        ({"min_p": 0.24}, {0, 1, 2, 4}),
        # top_p is a share of what top_k has left: the first has two thirds of 1.5.
        ({"top_k": 2, "top_p": 0.66}, {2}),
        ({"top_k": 2, "top_p": 0.67}, {2, 4}),
        ({}, {0, 1, 2, 4}),
    ],
)
def test_cuts(fields: dict[str, float], kept: set[int]) -> None:
    row = [math.log(weight) if weight else -math.inf for weight in (0.25, 0.25, 1.0, 0.0, 0.5)]
    sampling = Sampling(**{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1, **fields})  # type: ignore[arg-type]
    with native_sampler(sampling) as sampler:
        assert {sampler.pick(row) for _ in range(200)} == kept


def test_draws_follow_the_distribution() -> None:
    weights = [0.1, 0.2, 0.3, 0.4]
    row = [math.log(weight) for weight in weights]
    for fields in ({}, {"top_k": 4}, {"min_p": 0.01}):
        sampling = Sampling(**{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 9, **fields})  # type: ignore[arg-type]
        with native_sampler(sampling) as sampler:
            picks = [sampler.pick(row) for _ in range(4000)]
        for token, weight in enumerate(weights):
            # Four standard deviations; the seed is fixed, so this cannot flake.
            assert abs(picks.count(token) / 4000 - weight) < 4 * math.sqrt(weight * (1 - weight) / 4000)


def test_one_draw_a_token() -> None:
    row = [0.0, 0.0]
    random = Random(77)
    with native_sampler(Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=77)) as sampler:
        for _ in range(200):
            assert sampler.pick(row) == int(random.next() >= 0.5)


@given(rows(), st.integers(0, 2**64 - 1))
def test_same_seed_same_tokens(row: list[float], seed: int) -> None:
    sampling = Sampling(temperature=1.5, top_p=0.9, seed=seed)
    with native_sampler(sampling) as one, native_sampler(sampling) as two:
        assert [one.pick(row) for _ in range(20)] == [two.pick(row) for _ in range(20)]


def test_without_a_seed_two_samplers_differ() -> None:
    row = [0.0] * 1000
    sampling = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    with native_sampler(sampling) as one, native_sampler(sampling) as two:
        assert [one.pick(row) for _ in range(20)] != [two.pick(row) for _ in range(20)]


def test_repeat_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    with native_sampler(Sampling(temperature=0.0, repeat_penalty=2.0), prompt=[0]) as sampler:
        assert sampler.pick([4.0, 2.1]) == 1  # 4 becomes 2
    with native_sampler(Sampling(temperature=0.0, repeat_penalty=2.0), prompt=[0]) as sampler:
        assert sampler.pick([-1.0, -1.9]) == 1  # -1 becomes -2


def test_frequency_counts_the_answer_and_not_the_prompt() -> None:
    with native_sampler(Sampling(temperature=0.0, frequency_penalty=0.4), prompt=[0, 0, 0]) as sampler:
        assert [sampler.pick([1.0, 0.0]) for _ in range(5)] == [0, 0, 0, 1, 0]


def test_presence_counts_once() -> None:
    with native_sampler(Sampling(temperature=0.0, presence_penalty=0.4)) as sampler:
        assert [sampler.pick([1.0, 0.5]) for _ in range(4)] == [0, 0, 0, 0]


def test_bias_of_minus_infinity_forbids() -> None:
    row = [5.0, 4.0, 3.0]
    with native_sampler(Sampling(temperature=0.0, logit_bias={0: -math.inf})) as sampler:
        assert sampler.pick(row) == 1
    sampling = Sampling(temperature=1.0, logit_bias={0: -math.inf}, seed=3)
    with native_sampler(sampling) as sampler:
        assert 0 not in {sampler.pick(row) for _ in range(100)}


@pytest.mark.parametrize("bias", [1e300, 3e38, -1e300])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_enormous_bias_is_only_a_bias(bias: float, temperature: float) -> None:
    sampling = Sampling(temperature=temperature, logit_bias={1: bias}, repeat_penalty=0.01, seed=1)
    with native_sampler(sampling, prompt=[1]) as sampler:
        assert sampler.pick([1.0, 1.0, -500.0]) == (1 if bias > 0 else 0)


def test_min_p_keeps_what_rounds_to_the_same_weight() -> None:
    row = [-3.0, -3.0, 0.0, -3.0, -3.0, 0.0, -3.0, -3.0, 0.0]
    for seed in range(10):
        sampling = Sampling(
            temperature=1.0, top_k=0, top_p=1.0, min_p=1.0, seed=seed, logit_bias={2: 1.1754943508222875e-38}
        )
        assert_same(sampling, [], [row] * 3)


def test_a_tiny_temperature_is_nearly_greedy() -> None:
    for temperature in (1e-320, 1e-30, 1e-6):
        for fields in ({}, {"top_k": 0, "top_p": 1.0, "min_p": 0.0}, {"top_k": 0}):
            with native_sampler(Sampling(temperature=temperature, seed=1, **fields)) as sampler:
                assert {sampler.pick([1.0, 2.0, 1.5] * 200) for _ in range(10)} <= set(range(1, 600, 3))


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 5, BLOCK + 1, 2 * BLOCK + 9])
@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.0), Sampling(seed=1), Sampling(temperature=0.0, logprobs=True)]
)
def test_logits_that_are_not_numbers_are_an_error(bad: float, place: int, sampling: Sampling) -> None:
    row = [1.0] * (2 * BLOCK + 10)
    row[place] = bad
    with native_sampler(sampling) as sampler:
        with pytest.raises(DecodeError, match="not numbers"):
            sampler.pick(row)


def test_a_bias_does_not_hide_logits_that_are_not_numbers() -> None:
    sampling = Sampling(temperature=0.0, logit_bias={0: 5.0}, repeat_penalty=2.0)
    for bad in (math.nan, math.inf):
        with native_sampler(sampling, prompt=[0]) as sampler:
            with pytest.raises(DecodeError, match="not numbers"):
                sampler.pick([bad, 1.0])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_everything_forbidden_is_an_error_and_no_end_token(tiny: Model, temperature: float) -> None:
    sampling = Sampling(temperature=temperature, logit_bias={0: -math.inf, 1: -math.inf})
    for model in (None, tiny):
        with native_sampler(sampling, model=model) as sampler:
            with pytest.raises(DecodeError, match="no token may come next") as caught:
                sampler.pick([1.0, 2.0])
            assert caught.value.status == lib.LANEWAY_NO_TOKEN
            assert sampler.pick([1.0, 2.0, 3.0]) == 2  # the sampler itself is as it was


@given(st.data())
def test_logprobs_are_of_the_models_own_distribution(data: st.DataObject) -> None:
    row = data.draw(rows())
    sampling = data.draw(samplings(len(row), logprobs=True, top_logprobs=data.draw(st.integers(0, 20))))
    prompt = data.draw(st.lists(st.integers(0, len(row) - 1), max_size=4))
    expected = Reference(sampling, prompt).logprobs(row)
    with native_sampler(sampling, prompt) as sampler:
        for _ in range(2):
            token = sampler.pick(row)
            found = sampler.logprob
            assert found.token == token
            assert found.logprob == pytest.approx(expected[token], abs=2e-5)
            allowed = [token for token in range(len(row)) if row[token] > -math.inf]
            order = sorted(allowed, key=lambda token: (-row[token], token))[: sampling.top_logprobs]
            assert [token for token, _ in found.top] == order
            assert [logprob for _, logprob in found.top] == pytest.approx([expected[t] for t in order], abs=2e-5)


def test_logprobs_do_not_change_what_is_picked() -> None:
    row = [math.sin(i) for i in range(1000)]
    fields = {"temperature": 1.0, "seed": 4, "repeat_penalty": 1.3, "frequency_penalty": 0.5}
    with (
        native_sampler(Sampling(**fields)) as plain,  # type: ignore[arg-type]
        native_sampler(Sampling(**fields, logprobs=True, top_logprobs=5)) as told,  # type: ignore[arg-type]
    ):
        assert [plain.pick(row) for _ in range(50)] == [told.pick(row) for _ in range(50)]
