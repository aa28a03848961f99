"""Which installed pairs lead from one language to another.  Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from laneway_plugins._nmt_package import Pair

PIVOT = "en"
"""The language in the middle that is taken first among routes of one length."""


def same_language(wanted: str, offered: str) -> bool:
    """Whether a pair for ``offered`` does for ``wanted``: the same, or the same but for script and region."""
    return wanted == offered or wanted == offered.partition("-")[0] or wanted.partition("-")[0] == offered


def find_route(pairs: Sequence[Pair], source: str, target: str) -> list[int] | None:
    """Indexes of the pairs to go through: as few as there can be; None if there is no way.

    Among routes of one length those over :data:`PIVOT` come first, then those whose pairs are listed first.
    """
    starts: list[tuple[int, ...]] = [(index,) for index, pair in enumerate(pairs) if same_language(source, pair.source)]
    starts.sort(key=lambda way: (pairs[way[0]].source != source, *_preference(pairs, way[0])))
    line = deque(starts)
    seen = {pairs[way[0]].source for way in starts}
    while line:
        way = line.popleft()
        here = pairs[way[-1]].target
        if same_language(target, here):
            exact = [other for other in (way, *line) if len(other) == len(way) and pairs[other[-1]].target == target]
            return list(exact[0] if exact else way)
        if here in seen:
            continue
        seen.add(here)
        onward = [index for index, pair in enumerate(pairs) if pair.source == here]
        line.extend((*way, index) for index in sorted(onward, key=lambda index: _preference(pairs, index)))
    return None


def _preference(pairs: Sequence[Pair], index: int) -> tuple[bool, int]:
    return pairs[index].target != PIVOT, index


def languages(pairs: Sequence[Pair], way: Sequence[int]) -> tuple[str, ...]:
    """The languages of a route: ``("fr", "en", "de")``."""
    return (pairs[way[0]].source, *(pairs[index].target for index in way))


def unlabelled(pairs: Sequence[Pair]) -> bool:
    """Whether there is one pair alone, and nothing says which languages it is for."""
    return len(pairs) == 1 and not (pairs[0].source and pairs[0].target)
