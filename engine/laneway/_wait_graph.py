"""Which requests can never end, because they wait for each other across the lanes of several models: rule R6.

A request whose handler has opened a nested run waits for that run.  A request in line waits for the holders of the
permits and keys that it lacks.  If these waits form a circle, no request in it can ever end.

This module is told what lives (:class:`Node`) and answers with those that can never end.  It reduces the graph of
waits, as in Holt, "Some Deadlock Properties of Computer Systems" (1972): it removes the requests that can end, until no
other one can.  A running request can end if all its nested runs can; it then gives its permit and keys back.  A request
in line can end if it can start once the removed ones are gone, because it has no nested runs yet.  The order of removal
does not matter: a request that starts gives back all that it takes.

A wait for something outside of this process, such as the gate of a cache file, counts as one that ends.  When it ends
is not known.  A request that would be stuck if some gate opened before another counts as one that can never end.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import final

import attrs


@final
@attrs.frozen(kw_only=True)
class Place:
    """The ticket of a request, as :mod:`laneway._admission` has it."""

    model: Hashable
    lane: str
    cap: float
    """Of its lane."""
    number: float
    """Its place in the order of arrival on the model; ``math.inf`` for one that is about to arrive."""
    running: bool
    exclusive: bool = False
    weight: int = 1
    keys: tuple[Hashable, ...] = ()


@final
@attrs.frozen(kw_only=True)
class Node:
    """A live request.  ``place`` is None for one that uses no lane; ``nested`` are the runs that its handler awaits."""

    name: str
    place: Place | None = None
    nested: tuple[str, ...] = ()


def blocked(nodes: Iterable[Node]) -> dict[str, tuple[str, ...]]:
    """The requests that can never end, and the requests that each of them waits for.

    Nested runs that are not among ``nodes`` have ended.  Takes O(n^2 log n) time for n nodes at worst.
    """
    left = {node.name: node for node in nodes}
    while True:
        waits = _waits(left)
        free = [name for name in left if not waits.get(name)]
        if not free:
            return waits
        for name in free:
            del left[name]


def circle(waits: Mapping[str, Sequence[str]], start: str) -> list[str]:
    """The shortest circle through ``start`` in the result of :func:`blocked`; empty if there is none."""
    paths = [[start]]
    seen = {start}
    for path in paths:
        for name in waits.get(path[-1], ()):
            if name == start:
                return path
            if name not in seen:
                seen.add(name)
                paths.append([*path, name])
    return []


def _waits(left: Mapping[str, Node]) -> dict[str, tuple[str, ...]]:
    """The requests that each of ``left`` waits for, if all others hold nothing any more."""
    waits: dict[str, tuple[str, ...]] = {}
    models: dict[Hashable, list[tuple[Place, str]]] = {}
    for node in left.values():
        if node.place is not None:
            models.setdefault(node.place.model, []).append((node.place, node.name))
        if node.place is None or node.place.running:
            waits[node.name] = tuple(name for name in node.nested if name in left)
    for places in models.values():
        waits.update(_waits_in_line(sorted(places, key=_by_number)))
    return waits


def _waits_in_line(places: Sequence[tuple[Place, str]]) -> dict[str, tuple[str, ...]]:
    """The same for the waiting requests of one model, in the order of arrival.

    It applies the admission rule to a moment at which all running requests stay and all that could start have gone.
    """
    running = [(place, name) for place, name in places if place.running]
    writer = next((name for place, name in running if place.exclusive), None)
    # {key: the request that holds it, or is the first to claim it}
    first = {key: name for place, name in running for key in place.keys}
    used: dict[str, int] = {}
    for place, _ in running:
        used[place.lane] = used.get(place.lane, 0) + place.weight
    barrier: str | None = None  # the oldest exclusive request that waits
    heads: dict[str, str] = {}  # {lane: the ready request that does not fit}
    waits: dict[str, tuple[str, ...]] = {}
    for place, name in places:
        if place.running:
            continue
        held = used.get(place.lane, 0)
        if place.exclusive:
            reasons = [other for _, other in running]
            barrier = barrier or (name if reasons else None)
        elif writer is not None:
            reasons = [writer]
        elif barrier is not None:
            reasons = [barrier]
        elif any(key in first for key in place.keys):
            reasons = list(dict.fromkeys(first[key] for key in place.keys if key in first))
        elif place.lane in heads:
            reasons = [heads[place.lane]]
        elif held and held + place.weight > place.cap:
            reasons = [other for each, other in running if each.lane == place.lane]
            heads[place.lane] = name
        else:
            continue
        if reasons:
            waits[name] = tuple(reasons)
            for key in place.keys:
                first.setdefault(key, name)
    return waits


def _by_number(entry: tuple[Place, str]) -> float:
    return entry[0].number
