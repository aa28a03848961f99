"""What the validators of request classes say about values that they refuse."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import attrs
import pytest

import laneway
from laneway._admission import normalise_cap
from laneway.decoder import Sampling
from laneway.testing import ScriptedLoader
from laneway.validators import number, shown, whole
from laneway_plugins.completion import CompletionRequest


class np_like:  # noqa: N801 - stands for scalars of array libraries
    """Converts to every kind of number, and is none."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __float__(self) -> float:
        return float(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __index__(self) -> int:
        return int(self.value)


def type_name(value: object) -> str:
    return type(value).__name__


@attrs.frozen
class Request:
    count: int = attrs.field(default=1, validator=whole(1, 2**20))
    share: float = attrs.field(default=0.5, validator=number(0, 0.75))


def test_bounds_are_told_to_the_last_digit() -> None:
    with pytest.raises(laneway.InvalidRequestError, match="from 1 to 1048576, not 1048577"):
        Request(count=2**20 + 1)
    with pytest.raises(laneway.InvalidRequestError, match=r"from 0 to 0\.75, not 1"):
        Request(share=1)


NO_NUMBERS = [True, False, "1", b"1", 1 + 0j, None, math.nan, Decimal(1), Fraction(1), [1], np_like(1), np_like(0.5)]
"""What is refused wherever a number is wanted, though some of it could be converted to one."""

HUGE = [10**400, -(10**400), 10**5000]
"""No float holds them, and Python does not even write the last one out."""


@pytest.mark.parametrize("value", [*NO_NUMBERS, *HUGE, math.inf, -math.inf, 1.0], ids=type_name)
def test_whole_takes_ints_alone(value: Any) -> None:
    with pytest.raises(laneway.InvalidRequestError, match="must be an integer from 1 to 1048576, not ") as caught:
        Request(count=value)
    assert caught.value.field == "count"


@pytest.mark.parametrize("value", [*NO_NUMBERS, *HUGE, math.inf, -math.inf], ids=type_name)
def test_number_takes_ints_and_floats_alone(value: Any) -> None:
    with pytest.raises(laneway.InvalidRequestError, match=r"must be a number from 0 to 0\.75, not ") as caught:
        Request(share=value)
    assert caught.value.field == "share"


def test_what_is_shown_is_short() -> None:
    assert shown("x" * 1000) == "'" + "x" * 119 + "... (1002 characters)"
    assert shown(10**5000) == "an int of 16,610 bits"
    assert shown([1.5, None]) == "[1.5, None]"


_ZEROS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "top_k", "top_logprobs")
SAMPLING = dict.fromkeys(_ZEROS, 0) | {"repeat_penalty": 1, "seed": 1}


@pytest.mark.parametrize("name", SAMPLING)
@pytest.mark.parametrize("value", [*NO_NUMBERS, *HUGE, math.inf], ids=type_name)
def test_every_number_of_a_sampling_is_held_to_that(name: str, value: Any) -> None:
    assert getattr(Sampling(**{name: SAMPLING[name]}), name) == SAMPLING[name]  # type: ignore[arg-type]
    if name == "seed" and value is None:
        return
    with pytest.raises(laneway.InvalidRequestError) as caught:
        Sampling(**{name: value})
    assert caught.value.field == name


@pytest.mark.parametrize("value", [*NO_NUMBERS, *HUGE, math.inf], ids=type_name)
def test_a_bias_is_a_number(value: Any) -> None:
    for bias in ({5: value}, [(5, value)], [(4, 1.0), (5, value)]):
        with pytest.raises(laneway.InvalidRequestError, match="a bias is a finite number, or -inf") as caught:
            Sampling(logit_bias=bias)
        assert caught.value.field == "logit_bias"


@pytest.mark.parametrize(
    "token",
    [True, 1.0, "1.0", " 1", "1_0", "+1", "٣", "", "9" * 5000, b"1", None, 10**400, 10**5000, 2**31, np_like(1)],
    ids=type_name,
)
def test_a_biased_token_is_an_int_or_its_digits(token: Any) -> None:
    for bias in ({token: 1.0}, [(token, 1.0)]):
        with pytest.raises(laneway.InvalidRequestError, match="is no token id") as caught:
            Sampling(logit_bias=bias)
        assert caught.value.field == "logit_bias"


@pytest.mark.parametrize("bias", [5, [5], [(1, 2, 3)], "12", [("1", "2")], {1}])
def test_a_bias_is_a_mapping_or_pairs(bias: Any) -> None:
    with pytest.raises(laneway.InvalidRequestError, match="must map token ids to numbers"):
        Sampling(logit_bias=bias)


def test_what_a_bias_may_be() -> None:
    assert Sampling(logit_bias={"7": 1, 3: -math.inf, 5: 0.5}).logit_bias == ((3, -math.inf), (5, 0.5), (7, 1.0))  # type: ignore[dict-item]
    assert Sampling(logit_bias=None).logit_bias == ()


@pytest.mark.parametrize("value", [True, "1", math.nan, -1, 10**400, 10**5000, np_like(1)], ids=type_name)
async def test_a_queue_timeout_is_seconds(value: Any) -> None:
    loader = ScriptedLoader()
    async with laneway.open_engine(plugins=[loader.plugin]) as engine:
        with pytest.raises(
            (laneway.InvalidRequestError, laneway.ModelLoadError, ValueError), match="queue_timeout must be seconds"
        ):
            await engine.load_model("scripted:a", queue_timeout=value)
        model = await engine.load_model("scripted:b")
        with pytest.raises(laneway.InvalidRequestError, match="queue_timeout must be seconds"):
            async with engine.run(model, "completion", CompletionRequest("x"), queue_timeout=value):
                pytest.fail("entered")


async def test_a_cap_beyond_every_float_is_a_cap() -> None:
    assert normalise_cap(10**400) == 10**400
    assert normalise_cap(-(10**400)) == 1
    loader = ScriptedLoader()
    async with laneway.open_engine(plugins=[loader.plugin]) as engine:
        model = await engine.load_model("scripted:a", 2)
        async with engine.run(model, "completion", CompletionRequest("x", max_tokens=2), cap=10**400) as run:
            await run.result()
