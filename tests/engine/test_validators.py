"""What the validators of request classes say about values that they refuse."""

from __future__ import annotations

import attrs
import pytest

import laneway
from laneway.validators import number, whole


@attrs.frozen
class Request:
    count: int = attrs.field(default=1, validator=whole(1, 2**20))
    share: float = attrs.field(default=0.5, validator=number(0, 0.75))


def test_bounds_are_told_to_the_last_digit() -> None:
    with pytest.raises(laneway.InvalidRequestError, match="from 1 to 1048576, not 1048577"):
        Request(count=2**20 + 1)
    with pytest.raises(laneway.InvalidRequestError, match=r"from 0 to 0\.75, not 1"):
        Request(share=1)
