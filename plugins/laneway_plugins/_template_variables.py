"""More names for a chat template, such as ``enable_thinking``.  Pure.

They are checked, and copied, so that they stay as they were when the request was made.  What stands behind a name is
like JSON.  It is handed in, so to the template's text it is content like the messages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from laneway import InvalidRequestError
from laneway_plugins._templates import FUNCTIONS, GIVEN

FIELD = "chat_template_kwargs"
MAX_VARIABLES = 64
"""Names."""
MAX_SIZE = 1 << 20
"""Characters and entries of all values together."""
MAX_DEPTH = 32
"""Lists and mappings in each other."""
MAX_BITS = 64
"""Of a whole number."""

NONE: Mapping[str, Any] = MappingProxyType({})
"""No variables."""


def to_variables(value: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """``value`` checked and copied; None gives no variables.

    Raises :class:`InvalidRequestError`.
    """
    if value is None:
        return NONE
    if not isinstance(value, Mapping):
        raise _wrong(f"must be a mapping of names to values, not {type(value).__name__}")
    if len(value) > MAX_VARIABLES:
        raise _wrong(f"at most {MAX_VARIABLES} names are taken, not {len(value)}")
    copy = _Copy()
    out: dict[str, Any] = {}
    for name, part in value.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise _wrong(f"a name that a template can use is an identifier, not {_short(name)}")
        if name in GIVEN:
            raise _wrong(f"the engine itself sets {name!r}, from the messages and from the model")
        if name in FUNCTIONS:
            raise _wrong(f"{name!r} is a function that templates call")
        out[name] = copy.of(part, name, 1)
    return MappingProxyType(out)


class _Copy:
    def __init__(self) -> None:
        self._left = MAX_SIZE

    def of(self, value: object, name: str, depth: int) -> Any:
        self._spend(len(value) + 1 if isinstance(value, (str, list, tuple, Mapping)) else 1)
        if depth > MAX_DEPTH:
            raise _wrong(f"{name!r} has lists or mappings that are nested more than {MAX_DEPTH} deep")
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return "".join((value,))
        if isinstance(value, int):
            if value.bit_length() > MAX_BITS:
                raise _wrong(f"{name!r} has a whole number of more than {MAX_BITS} bits")
            return int(value)
        if isinstance(value, float):
            if not math.isfinite(value):
                raise _wrong(f"{name!r} has the number {value}, which JSON cannot say")
            return float(value)
        if isinstance(value, (list, tuple)):
            return [self.of(part, name, depth + 1) for part in value]
        if isinstance(value, Mapping):
            return {self._key(key, name): self.of(part, name, depth + 1) for key, part in value.items()}
        raise _wrong(
            f"{name!r} has a {type(value).__name__}; there may be None, bool, int, float, str, lists, mappings"
        )

    def _key(self, key: object, name: str) -> str:
        if not isinstance(key, str):
            raise _wrong(f"{name!r} has a mapping with the key {_short(key)}, which is no str")
        self._spend(len(key))
        return "".join((key,))

    def _spend(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise _wrong(f"its values have more than {MAX_SIZE:,} characters and entries")


def _wrong(what: str) -> InvalidRequestError:
    return InvalidRequestError(what, FIELD)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
