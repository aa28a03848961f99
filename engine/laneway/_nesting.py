"""Nested runs that would wait for the handler that opens them, over however many models: rule R6."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from laneway._admission import TicketState
from laneway._declarations import Scope, Use
from laneway._errors import InvalidRequestError
from laneway._lifecycle import TERMINAL, State
from laneway._wait_graph import Node, Place, blocked, circle

if TYPE_CHECKING:
    from collections.abc import Iterable

    from laneway._declarations import Operation, Prepared
    from laneway._model import Model
    from laneway._request import Request

NEWCOMER = ""
"""The name of the request that is about to arrive, which no live request has."""


def check_circle(
    live: Iterable[Request], operation: Operation, model: Model, prepared: Prepared, parent: Request
) -> None:
    """Raise :class:`InvalidRequestError` if a run that ``parent``'s handler opens closes a circle of requests.

    Only the arrival of a nested run can close one.  Every other event in a lane starts a request, ends one, or puts one
    without nested runs behind all others.
    """
    requests = list(live)
    around = {id(request) for request in _around(parent)}
    nested: dict[str, list[str]] = {}
    nodes: list[Node] = []
    for request in requests:
        above = _above(request)
        if above is not None and request.attached:
            nested.setdefault(above.id, []).append(request.id)
    nested.setdefault(parent.id, []).append(NEWCOMER)
    for request in requests:
        # A cancelled handler cancels its nested runs.  One that opens another all the same (in a shield) waits for it.
        if id(request) in around or not _is_leaving(request):
            nodes.append(Node(name=request.id, place=_place(request), nested=tuple(nested.get(request.id, ()))))
    cap = model.lanes.cap(operation.lane_group)
    weight = prepared.weight if model.admission == "slots" else 1
    place = Place(
        model=id(model),
        lane=operation.lane_group,
        cap=cap,
        number=math.inf,
        running=False,
        exclusive=operation.use is Use.EXCLUSIVE,
        weight=weight if weight <= cap else int(cap),
        keys=prepared.keys,
    )
    nodes.append(Node(name=NEWCOMER, place=place))
    waits = blocked(nodes)
    if NEWCOMER not in waits:
        return
    way = circle(waits, NEWCOMER)[1:]
    by_id = {request.id: request for request in requests}
    steps = ", which waits for ".join(
        f"{by_id[name].kind} request {name!r} on model {by_id[name].model.name!r}" for name in way
    )
    raise InvalidRequestError(
        f"a {operation.kind} request on model {model.name!r} opened inside the handler of {parent.kind} request "
        f"{parent.id!r} would wait for {steps}, which waits for this one: none of them could ever end; run it after "
        "the handler has returned, load the model with a larger parallel, or use overflow='reject'"
    )


def _around(request: Request | None) -> Iterable[Request]:
    while request is not None:
        yield request
        request = _above(request)


def _above(request: Request) -> Request | None:
    """The innermost live request whose handler has opened this one."""
    above = request.parent
    while above is not None and above.state in TERMINAL:
        above = above.parent
    return above


def _is_leaving(request: Request) -> bool:
    """Whether it, or what waits for it, has been cancelled, so that it does not stay."""
    if request.operation.scope is Scope.NONE and request.state is not State.WAITING:
        return False
    if request.state is State.CANCELLING:
        return True
    above = _above(request)
    return above is not None and request.attached and _is_leaving(above)


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
