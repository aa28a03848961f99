"""What counts as a number in the arguments of this package."""

from __future__ import annotations

import math
from typing import TypeGuard


def is_finite(value: object) -> TypeGuard[float]:
    """Whether ``value`` is an int or a float that C's doubles can hold: no bool, no NaN, nothing beyond all floats."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
