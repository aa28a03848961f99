"""Nested runs that would wait for the handler that opens them, through the lanes of any number of models: rule R6."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from laneway._admission import TicketState
from laneway._declarations import Scope, Use
from laneway._errors import InvalidRequestError
from laneway._lifecycle import State
from laneway._wait_graph import Node, Place, blocked, circle

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping

    from laneway._declarations import Operation, Prepared
    from laneway._model import Model
    from laneway._request import Request

NEWCOMER = ""
"""The name of the request that is about to arrive.  The others go by their numbers, for ids repeat between engines."""


def check_circle(
    live: Iterable[Request], operation: Operation, model: Model, prepared: Prepared, parent: Request
) -> None:
    """Raise :class:`InvalidRequestError` if a run that ``parent``'s handler opens closes a circle of requests.

    Only the arrival of a nested run can close one.  Every other event in a lane starts a request, ends one, or puts one
    without nested runs behind all others.

    :param live: the live requests of the engine, in order of arrival.  ``parent`` may belong to another engine.
    """
    weight = prepared.weight if model.admission == "slots" else 1
    exclusive = operation.use is Use.EXCLUSIVE
    lanes, lane = model.lanes, operation.lane_group
    if prepared.gate is None and lanes.starts_now(exclusive=exclusive, weight=weight, keys=prepared.keys, lane=lane):
        return
    requests = {_name(request): request for request in live}
    around = list(_around(parent, requests))
    if not around:
        return  # no handler of this engine waits for it
    nested: dict[str, list[str]] = {_name(around[0]): [NEWCOMER]}
    leaving: set[str] = set()
    for name, request in requests.items():
        above = next(_around(request.parent, requests), None)
        if above is not None and request.attached and not above.closing:
            nested.setdefault(_name(above), []).append(name)
        if _is_leaving(request, above, leaving):
            leaving.add(name)
    # A cancelled handler cancels its nested runs.  One that opens another all the same (in a shield) waits for it.
    leaving.difference_update(map(_name, around))
    nodes = [
        Node(name=name, place=_place(request), nested=tuple(nested.get(name, ())))
        for name, request in requests.items()
        if name not in leaving
    ]
    cap = lanes.cap(lane)
    place = Place(
        model=id(model),
        lane=lane,
        cap=cap,
        number=math.inf,
        running=False,
        exclusive=exclusive,
        weight=weight if weight <= cap else int(cap),
        keys=prepared.keys,
    )
    nodes.append(Node(name=NEWCOMER, place=place))
    waits = blocked(nodes)
    if NEWCOMER not in waits:
        return
    way = circle(waits, NEWCOMER)[1:]
    steps = ", which waits for ".join(
        f"{requests[name].kind} request {requests[name].id!r} on model {requests[name].model.name!r}" for name in way
    )
    raise InvalidRequestError(
        f"a {operation.kind} request on model {model.name!r} opened inside the handler of {parent.kind} request "
        f"{parent.id!r} would wait for {steps}, which waits for this one: none of them could go on; run it after "
        "the handler has returned, load the model with a larger parallel, or use overflow='reject'"
    )


def _name(request: Request) -> str:
    return str(request.number)


def _around(request: Request | None, requests: Mapping[str, Request]) -> Iterator[Request]:
    """``request`` and those in whose handlers it runs, the innermost first, as far as they are among ``requests``."""
    while request is not None:
        if requests.get(_name(request)) is request:
            yield request
        request = request.parent


def _is_leaving(request: Request, above: Request | None, leaving: Container[str]) -> bool:
    """Whether it has been cancelled, or a request that waits for it has, so that it does not stay."""
    if request.operation.scope is Scope.NONE and request.state is not State.WAITING:
        return False
    if request.state is State.CANCELLING:
        return True
    return above is not None and request.attached and _name(above) in leaving


def _place(request: Request) -> Place | None:
    ticket = request.ticket
    if ticket is None or ticket.state is TicketState.GONE:
        return None
    return Place(
        model=id(request.model),
        lane=ticket.lane,
        cap=request.model.lanes.cap(ticket.lane),
        number=ticket.number,
        running=ticket.state is TicketState.RUNNING,
        exclusive=ticket.exclusive,
        weight=ticket.weight,
        keys=ticket.keys,
    )
