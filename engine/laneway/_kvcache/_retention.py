"""What has to go, and in which order: rule K6."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import attrs

from laneway._errors import shown

GIB = 2**30
DAY = 24 * 3600.0


def _not_negative(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ValueError(f"{attribute.name} is a number of at least 0, or None, not {shown(value)}")


@attrs.frozen(kw_only=True)
class CacheRetention:
    """How much automatic caches may keep, and for how long: rule K6.  None is no bound.

    Caches with a key are the user's: they stay until they are deleted.
    """

    max_bytes: int | None = attrs.field(default=8 * GIB, validator=_not_negative)
    """Bytes of all automatic caches together."""
    max_idle: float | None = attrs.field(default=7 * DAY, validator=_not_negative)
    """Seconds since a cache was last used."""


@attrs.frozen
class Candidate:
    """A file that may have to go: its size in bytes, and when it was last used, in seconds of the wall clock."""

    name: str
    size: int
    used_at: float


_Item = TypeVar("_Item", bound=Candidate)


def evict(
    files: Iterable[_Item], retention: CacheRetention, now: float, remove: Callable[[_Item], bool]
) -> list[_Item]:
    """Call ``remove`` for what has to go, longest unused first, and return what went.

    ``remove`` says False for a file in use, whose place the next one has to make good.
    """
    oldest_first = sorted(files, key=lambda file: (file.used_at, file.name))
    total = sum(file.size for file in oldest_first)
    gone = []
    for file in oldest_first:
        expired = retention.max_idle is not None and now - file.used_at > retention.max_idle
        too_much = retention.max_bytes is not None and total > retention.max_bytes
        if (expired or too_much) and remove(file):
            total -= file.size
            gone.append(file)
    return gone
