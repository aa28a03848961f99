"""attrs validators for request classes: what they refuse, they refuse with :class:`InvalidRequestError`.

A number is an int or a float.  A bool is none, NaN is none, nor is a str or another library's scalar: what a caller got
wrong is told by name, never guessed at.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeGuard

from laneway._errors import InvalidRequestError, shown

__all__ = ["Validator", "is_number", "is_whole", "number", "of_type", "optional", "shown", "whole"]

Validator = Callable[[Any, Any, Any], None]
"""What ``attrs.field(validator=...)`` takes: called with the instance, the attribute and the value."""


def is_whole(value: object) -> TypeGuard[int]:
    """Whether ``value`` is an int, which a bool is not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether ``value`` is an int or a float, infinite ones included, NaN and ints beyond every float excluded."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return not math.isnan(value)
    except OverflowError:
        return False


def number(low: float, high: float) -> Validator:
    """An int or float from ``low`` to ``high``, both included."""
    return _range("a number", is_number, low, high)


def whole(low: int, high: int) -> Validator:
    """An int from ``low`` to ``high``, both included."""
    return _range("an integer", is_whole, low, high)


def of_type(*types: type[Any]) -> Validator:
    """An instance of one of ``types``; a bool counts as a bool only."""

    def check(instance: Any, attribute: Any, value: Any) -> None:
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            wanted = " or ".join(wanted.__name__ for wanted in types)
            raise InvalidRequestError(f"must be {wanted}, not {shown(value)}", attribute.name)

    return check


def optional(validator: Validator) -> Validator:
    """None, or what ``validator`` takes."""

    def check(instance: Any, attribute: Any, value: Any) -> None:
        if value is not None:
            validator(instance, attribute, value)

    return check


def _plain(bound: float) -> str:
    # Whole numbers to the last digit: what is refused may differ from the bound in that one.
    return f"{bound:g}" if isinstance(bound, float) else str(bound)


def _range(noun: str, fits: Callable[[object], bool], low: float, high: float) -> Validator:
    def check(instance: Any, attribute: Any, value: Any) -> None:
        if not fits(value) or not low <= value <= high:
            raise InvalidRequestError(
                f"must be {noun} from {_plain(low)} to {_plain(high)}, not {shown(value)}", attribute.name
            )

    return check
