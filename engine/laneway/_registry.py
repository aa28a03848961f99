"""Ids, life cycles and cancel scopes of all live requests of an engine.

A request's own task lives in the registry's nursery, is spawned from its caller's task (so that context variables are
the caller's), and does four things: wait for its turn, run the handler, tear down, give the permit back.  Whatever the
handler does, its outcome is kept for the reader and nothing of it reaches the nursery.
"""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NoReturn

import trio

from laneway import threads
from laneway._admission import Refused, TicketState
from laneway._context import Context
from laneway._declarations import Overflow, Scope, Use
from laneway._errors import (
    PROGRAM_ENDS,
    EngineClosedError,
    InferenceCancelledError,
    InvalidRequestError,
    ModelNotLoadedError,
    RequestIdConflictError,
    RequestRejectedByPolicyError,
    holds,
)
from laneway._lifecycle import TERMINAL, Happening, State, advance
from laneway._nesting import check_circle
from laneway._outbox import Outbox
from laneway._records import RequestRecord
from laneway._request import Request
from laneway._run import collect_stats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from laneway._admission import Ticket
    from laneway._declarations import Gate, Operation, Prepared
    from laneway._lane import Lanes
    from laneway._model import Model
    from laneway._plugins import PluginHost

log = logging.getLogger("laneway.requests")

REMEMBERED_SECONDS = 30.0
"""How long a cancel waits for its request, and how long an ended id cannot arm one: rule C5."""
REMEMBERED_CANCELS = 128
"""How many such cancels are kept, the oldest going first: rule C5."""

KNOCK_SECONDS = 0.02
"""How soon a gate that somebody outside has closed is tried again; every further pause is twice as long, up to"""
KNOCK_SECONDS_AT_MOST = 0.25
"""this."""

_current: ContextVar[Request | None] = ContextVar("laneway_current_request", default=None)


class Registry:
    """All live requests of one engine."""

    def __init__(self, host: PluginHost, on_fatal: Callable[[BaseException], None]) -> None:
        self.closed = False
        self.start_soon: Callable[..., None]
        """Starts the requests' tasks; set once, by the engine."""
        self._host = host
        self._on_fatal = on_fatal
        self._live: dict[str, Request] = {}
        self._by_ticket: dict[Ticket, Request] = {}
        self._armed: OrderedDict[str, float] = OrderedDict()
        self._ended: OrderedDict[str, float] = OrderedDict()
        self._minted = itertools.count(1)
        self._numbers = itertools.count(1)
        self._ends = trio.lowlevel.ParkingLot()
        self._token = trio.lowlevel.current_trio_token()

    def __repr__(self) -> str:
        return f"<laneway.Registry {len(self._live)} live requests>"

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._live.values()))

    def of_model(self, model: Model) -> list[Request]:
        """The live requests on ``model``, in order of arrival."""
        return [request for request in self._live.values() if request.model is model]

    # Arrival.

    @trio.lowlevel.enable_ki_protection
    def admit(
        self,
        operation: Operation,
        model: Model,
        prepared: Prepared,
        *,
        request_id: str | None,
        overflow: Overflow | None,
        queue_timeout: float | None,
        cap: float | None,
        merging: bool,
    ) -> Request:
        """Let a validated request arrive: barrier, id, ticket and task, with no checkpoint in between (rule A3).

        Raises :class:`EngineClosedError`, :class:`ModelNotLoadedError`, :class:`InvalidRequestError` (R6),
        :class:`RequestIdConflictError`, :class:`InferenceCancelledError` (C5) or
        :class:`RequestRejectedByPolicyError`; then nothing has changed.
        """
        if self.closed:
            raise EngineClosedError
        model.check_open()
        parent = self._handler_around()
        self._check_not_waiting_for_itself(operation, model, prepared, parent)
        waits = operation.use is not Use.NONE and (overflow or operation.overflow) is not Overflow.REJECT
        if parent is not None and waits:
            check_circle(self._live.values(), operation, model, prepared, parent)
        now = trio.current_time()
        request = Request(
            id=self._mint(operation.kind) if request_id is None else request_id,
            operation=operation,
            model=model,
            prepared=prepared,
            arrived_at=now,
            parent=parent,
            queue_timeout=model.queue_timeout if queue_timeout is None else queue_timeout,
            outbox=Outbox(merging=merging),
            pausing=not merging,
            number=next(self._numbers),
        )
        other = self._live.get(request.id)
        if other is not None:
            raise RequestIdConflictError(request.id, other.state.value)
        if self._take_armed(request.id, now):
            request.error = InferenceCancelledError(request.id, "cancelled before it began")
            self._end_on_arrival(request, Happening.END_CANCELLED)
        if operation.use is not Use.NONE:
            self._take_ticket(request, overflow or operation.overflow, cap)
        self._live[request.id] = request
        self._advance(request, Happening.ARRIVE)
        self._tell(request, self._host.notify_queued)
        # An observer may have cancelled it, in which case it never starts.
        if request.state is State.WAITING and (request.ticket is None or request.ticket.state is TicketState.RUNNING):
            self._start(request)
        self.start_soon(self._serve, request, name=f"laneway request {request.id}")
        if request.ticket is not None and request.ticket.gated:
            self.start_soon(self._knock, request, name=f"laneway gate of request {request.id}")
        return request

    def _take_ticket(self, request: Request, overflow: Overflow, cap: float | None) -> None:
        operation, model = request.operation, request.model
        try:
            request.ticket = model.lanes.arrive(
                operation.kind,
                exclusive=operation.use is Use.EXCLUSIVE,
                unique=operation.unique,
                weight=request.prepared.weight if model.admission == "slots" else 1,
                keys=request.prepared.keys,
                nowait=overflow is Overflow.REJECT,
                cap=cap,
                lane=operation.lane_group,
                gate=request.prepared.gate,
            )
        except Refused as refused:
            request.error = self._rejection(request, refused.reason, refused.waiting, refused.limit)
            self._end_on_arrival(request, Happening.REFUSE)
        self._by_ticket[request.ticket] = request

    def _end_on_arrival(self, request: Request, happening: Happening) -> NoReturn:
        """A request that was never live: observers hear of its end alone."""
        request.ended_at = request.arrived_at
        self._remember_end(request.id, request.arrived_at)
        self._advance(request, happening)
        self._tell(request, self._host.notify_ended)
        assert request.error is not None
        raise request.error from None

    def _rejection(self, request: Request, reason: Any, waiting: int, limit: int) -> RequestRejectedByPolicyError:
        return RequestRejectedByPolicyError(request.id, request.kind, request.model.name, reason, waiting, limit)

    def _mint(self, kind: str) -> str:
        while True:
            minted = f"{kind}-{next(self._minted)}"
            if minted not in self._live and minted not in self._armed:
                return minted

    @staticmethod
    def _handler_around() -> Request | None:
        """The innermost live request in whose handler this task runs; ``parent`` leads to those around it.

        Those that have ended are left out of the chain, and out of memory: a handler may start a task that outlives it,
        which runs a request whose handler starts another, for ever.
        """
        innermost = _live(_current.get())
        request = innermost
        while request is not None:
            request.parent = _live(request.parent)
            request = request.parent
        return innermost

    def _check_not_waiting_for_itself(
        self, operation: Operation, model: Model, prepared: Prepared, parent: Request | None
    ) -> None:
        """Rule R6, for every handler that this task runs under: the caller's, the caller's caller's, and so on."""
        while parent is not None:
            held = parent.operation
            if parent.model is model and parent.ticket is not None and operation.use is not Use.NONE:
                what = None
                if held.lane_group == operation.lane_group or Use.EXCLUSIVE in (held.use, operation.use):
                    what = "the permit"
                elif not set(parent.ticket.keys).isdisjoint(prepared.keys):
                    what = "a key"
                elif model.lanes.writer_waits:
                    # Nobody passes it, in whatever lane, and it waits for all that run.
                    what = "an exclusive request that waits for the permit"
                if what is not None:
                    raise InvalidRequestError(
                        f"a {operation.kind} request opened inside the handler of {held.kind} request {parent.id!r} "
                        f"would wait for {what} that this handler holds on model {model.name!r}; generate through ctx, "
                        "or run it after the handler has returned"
                    )
            parent = parent.parent

    def check_outside(self, model: Model) -> None:
        """Raise :class:`InvalidRequestError` if this task runs in the handler of a request on ``model`` (rule C4)."""
        request = self._handler_around()
        while request is not None:
            if request.model is model:
                raise InvalidRequestError(
                    f"the handler of request {request.id!r} cannot await the end of model {model.name!r}, which waits "
                    "for the end of this request"
                )
            request = request.parent

    # The request's own task.

    @trio.lowlevel.enable_ki_protection
    async def _serve(self, request: Request) -> None:
        context = Context(request)
        result: Any = None
        error: BaseException | None = None
        outside: BaseException | None = None
        completed = False
        _current.set(request)
        try:
            with request.scope:
                await self._wait_turn(request)
                # Granted and cancelled in one instant: what its handler would do until it noticed is not wanted.
                await trio.lowlevel.checkpoint_if_cancelled()
                self._watch_stalls(request)
                result = await self._handle(request, context)
                completed = True
        except BaseException as caught:
            # Also what is no Exception, such as a panic of an extension module, is the request's own affair (rule C10).
            if holds(caught, (trio.Cancelled, *PROGRAM_ENDS)):
                outside = caught
            else:
                error = caught
        with trio.CancelScope(shield=True):
            try:
                await context.close()
            except Exception as caught:
                log.exception("the teardown of request %s failed", request.id)
                error = error or caught
            finally:
                self._end(request, result, error, outside, completed=completed)
        if outside is not None and holds(outside, PROGRAM_ENDS):
            self._on_fatal(outside)

    async def _wait_turn(self, request: Request) -> None:
        lanes, timeout = request.model.lanes, request.queue_timeout
        if request.ticket is None:
            await trio.lowlevel.checkpoint_if_cancelled()
            return
        if timeout is None:
            await lanes.wait_turn(request.ticket)
        else:
            with trio.move_on_after(timeout) as patience:
                await lanes.wait_turn(request.ticket)
            if patience.cancelled_caught:
                waiting = lanes.waiting(request.operation.lane_group)
                raise self._rejection(request, "queue_timeout", waiting, lanes.queue_limit)

    async def _knock(self, request: Request) -> None:
        """Try the gate of a waiting request now and then, in a thread: no process tells when it lets go."""
        ticket, lanes, pause = request.ticket, request.model.lanes, KNOCK_SECONDS
        assert ticket is not None
        with request.knocking:
            while ticket.gated:
                gate = lanes.begin_knock(ticket)
                if gate is not None:
                    await _try_gate(lanes, ticket, gate)
                await trio.sleep(pause)
                pause = min(2 * pause, KNOCK_SECONDS_AT_MOST)

    @trio.lowlevel.enable_ki_protection
    def granted(self, ticket: Ticket) -> None:
        """A waiter has got its permit; its task is being woken."""
        request = self._by_ticket[ticket]
        # An observer of an earlier grant may have cancelled it meanwhile.
        if request.state is State.WAITING:
            self._start(request)

    def _start(self, request: Request) -> None:
        self._advance(request, Happening.ADMIT)
        request.started_at = trio.current_time()
        request.turned.set()
        request.knocking.cancel()
        self._tell(request, self._host.notify_admitted)

    async def _handle(self, request: Request, context: Context) -> Any:
        # A scope that the handler cannot keep is not sprung on it: it runs to its end (rule C1, `none`).
        with trio.CancelScope(shield=request.operation.scope is Scope.NONE):
            return await _unprotected(request.operation.handler, context, request.prepared)

    def _watch_stalls(self, request: Request) -> None:
        timeout = request.model.stall_timeout
        if request.pausing and timeout is not None:
            request.stall_timeout = timeout
            self.start_soon(self._end_if_stalled, request, name=f"laneway stall of request {request.id}")

    async def _end_if_stalled(self, request: Request) -> None:
        # The scope's deadline is set while the run is paused, and taken back when it goes on.
        with request.stall_scope:
            await trio.sleep_forever()
        if request.state is State.RUNNING:
            # It alone, whoever shares its scope: nobody has called cancel().
            self._cancel_one(request, f"its reader left it paused for {request.stall_timeout:g} s (stall_timeout)")

    @trio.lowlevel.enable_ki_protection
    def _end(
        self,
        request: Request,
        result: Any,
        error: BaseException | None,
        outside: BaseException | None,
        *,
        completed: bool,
    ) -> None:
        """Permit, id and outcome, in this order: whoever reads the outcome finds the place free (rules A8, C4)."""
        if request.ticket is not None:
            request.model.lanes.leave(request.ticket)
            del self._by_ticket[request.ticket]
        request.stall_scope.cancel()
        request.knocking.cancel()
        del self._live[request.id]
        now = trio.current_time()
        request.ended_at = now
        self._remember_end(request.id, now)
        if request.doom is not None and request.state is State.WAITING:
            error = request.doom
            self._advance(request, Happening.FAIL)
        elif isinstance(error, RequestRejectedByPolicyError) and request.state is State.WAITING:
            self._advance(request, Happening.REFUSE)
        elif completed and error is None and not request.settled.is_set():
            self._advance(request, Happening.COMPLETE)
        elif error is not None and request.state is not State.CANCELLING:
            self._advance(request, Happening.FAIL)
        else:
            if outside is not None:
                log.warning("request %s was ended from outside: %r", request.id, outside)
            if request.state is not State.CANCELLING:
                # Nobody called cancel(): the engine's surroundings were cancelled, or the whole program is ending.
                program_ends = outside is not None and holds(outside, PROGRAM_ENDS)
                request.cancel_reason = repr(outside) if program_ends else "the engine was cancelled"
                self._advance(request, Happening.CANCEL)
            self._advance(request, Happening.END_CANCELLED)
            cause = error
            error = self.cancelled_error(request)
            error.__cause__ = cause
        request.settle(result=result if error is None else None, error=error)
        request.ended.set()
        self._tell(request, self._host.notify_ended)
        self._ends.unpark_all()
        if request.operation.scope is Scope.MODEL:
            self._cancel_unheard(request)

    # Cancelling.

    @trio.lowlevel.enable_ki_protection
    def cancel(self, request_id: str, reason: str) -> int:
        """Cancel by id; how many ends that caused (rule C3).  An unknown id is remembered (rule C5)."""
        now = trio.current_time()
        request = self._live.get(request_id)
        if request is not None:
            return self.cancel_request(request, reason, asked=True)
        self._forget_old(now)
        if request_id not in self._ended:
            self._armed[request_id] = now
            self._armed.move_to_end(request_id)
            while len(self._armed) > REMEMBERED_CANCELS:
                self._armed.popitem(last=False)
        return 0

    @trio.lowlevel.enable_ki_protection
    def cancel_request(self, request: Request, reason: str, *, asked: bool = False) -> int:
        """Cancel a live request, and with scope ``model`` all that share its scope (rule C1).

        Returns how many ends that caused: a request that is cancelling already ends for its first reason (rule C3).
        """
        if request.state is State.RUNNING and request.operation.scope is Scope.MODEL:
            group = self._group(request)
        else:
            group = [request]
        return self._cancel_each(group, reason, asked=asked)

    def _cancel_each(self, requests: Iterable[Request], reason: str, *, asked: bool = False) -> int:
        return sum(self._cancel_one(request, reason, asked=asked) for request in _in_order_of_leaving(requests))

    def _cancel_one(self, request: Request, reason: str, *, asked: bool = False) -> bool:
        """Cancel one request and nothing that shares its scope; whether this is what ends it.

        ``asked``: it ends because of a call of ``cancel()``; else it ends with its caller, its model or its engine.
        """
        if request.state not in (State.WAITING, State.RUNNING) or request.closing:
            return False  # it ends for another reason, or has ended but for its teardown
        request.cancel_asked = asked
        was_waiting = request.state is State.WAITING
        request.cancel_reason = reason
        self._advance(request, Happening.CANCEL)
        self._tell(request, self._host.notify_cancelled)
        if was_waiting and request.ticket is not None:
            request.model.lanes.leave(request.ticket)
        if was_waiting or request.operation.scope is not Scope.NONE:
            request.scope.cancel(reason=reason)
        else:
            # The native work goes on under this id, but its reader need not wait for it.
            request.settle(error=self.cancelled_error(request))
        return True

    @trio.lowlevel.enable_ki_protection
    def model_failed(self, model: Model, reason: str) -> None:
        """The model's decode loop has broken: who waits will never run (rule C11).  Who runs hears it from the loop."""
        for request in _in_order_of_leaving(self.of_model(model)):
            if request.state is State.WAITING and request.ticket is not None:
                request.doom = ModelNotLoadedError(model.name, reason)
                model.lanes.leave(request.ticket)
                request.scope.cancel(reason=reason)

    @trio.lowlevel.enable_ki_protection
    def cancel_many(self, requests: Iterable[Request], reason: str, *, asked: bool = False) -> int:
        """Cancel several and return how many ends that caused; none of them is granted a permit on account of it."""
        return sum(self.cancel_request(request, reason, asked=asked) for request in _in_order_of_leaving(requests))

    def shut(self) -> None:
        """Take no more requests."""
        self.closed = True

    def close(self) -> None:
        """Take no more requests and cancel those that live."""
        self.shut()
        self.cancel_many(self, "the engine was closed")

    def _group(self, request: Request) -> list[Request]:
        return [
            other
            for other in self._live.values()
            if other.operation is request.operation and other.model is request.model
        ]

    @trio.lowlevel.enable_ki_protection
    def leave(self, request: Request) -> bool:
        """The caller leaves the block of a live request; whether it has to wait for the end (rule R3)."""
        scope = request.operation.scope
        was_running = request.state is State.RUNNING
        request.attached = False
        if scope is Scope.MODEL and was_running and not self._cancel_unheard(request):
            return False
        self._cancel_one(request, "its caller left the block")
        return scope is not Scope.NONE or request.started_at is None

    def run_dropped(self, request: Request, failure: BaseException | None) -> None:
        """A run was collected as garbage before its block was left, in any thread and at any moment.

        ``failure``: what the request has ended with, if no reader has seen it.
        """
        try:
            self._token.run_sync_soon(self._end_dropped, request, failure)
        except trio.RunFinishedError:
            # The loop has ended, and with it everything that the request could hold.
            return

    @trio.lowlevel.enable_ki_protection
    def _end_dropped(self, request: Request, failure: BaseException | None) -> None:
        if failure is not None and not isinstance(failure, InferenceCancelledError):
            log.error("request=%s was dropped, and no reader has seen its failure", request.id, exc_info=failure)
        if request.ended.is_set():
            return
        log.warning("request=%s was dropped: nothing can read it, and its block was never left", request.id)
        self.leave(request)
        request.discard()

    def _cancel_unheard(self, request: Request) -> bool:
        """Cancel what shares the scope of ``request`` if no caller is left to hear of any of it (rule C1)."""
        # Who has been cancelled already keeps nobody running, whether or not its caller is still there.
        group = [other for other in self._group(request) if other.state in (State.WAITING, State.RUNNING)]
        if any(other.attached for other in group):
            return False
        self._cancel_each(group, "its caller left the block")
        return True

    def cancelled_error(self, request: Request) -> InferenceCancelledError:
        """Rule C6: what the request had made until it was cancelled."""
        text, tokens = request.made()
        return InferenceCancelledError(
            request.id, request.cancel_reason or "cancelled", text, tokens, collect_stats(request)
        )

    async def wait_ended(self, request_id: str) -> None:
        """Return when no live request has this id."""
        request = self._live.get(request_id)
        if request is None:
            await trio.lowlevel.checkpoint()
            return
        inside = self._handler_around()
        while inside is not None:
            if inside is request:
                raise InvalidRequestError(f"the handler of request {request_id!r} cannot await its own end")
            inside = inside.parent
        await request.ended.wait()

    async def wait_none(self, model: Model | None = None) -> None:
        """Return when no request lives (on ``model``)."""
        while any(model is None or request.model is model for request in self._live.values()):
            await self._ends.park()

    # Small things.

    def _tell(self, request: Request, notify: Callable[[RequestRecord], None]) -> None:
        if not self._host.observed:
            return
        try:
            notify(self.record(request))
        except BaseException as error:
            # For the program, but not in the middle of a transition.
            self._on_fatal(error)

    def record(self, request: Request) -> RequestRecord:
        """The request as observers see it."""
        error = request.error
        return RequestRecord(
            request_id=request.id,
            kind=request.kind,
            model=request.model.name,
            state=request.state.value,
            ticket=None if request.ticket is None else request.ticket.number,
            lane=request.operation.lane_group,
            weight=request.prepared.weight,
            queued_at=request.arrived_at,
            started_at=request.started_at,
            ended_at=request.ended_at,
            error=request.cancel_reason if error is None else f"{type(error).__name__}: {error}",
        )

    def _advance(self, request: Request, happening: Happening) -> None:
        before = request.state
        request.state = advance(before, happening)
        log.info(
            "request=%s kind=%s model=%s from=%s to=%s",
            request.id,
            request.kind,
            request.model.name,
            before.value,
            request.state.value,
        )

    def _take_armed(self, request_id: str, now: float) -> bool:
        self._forget_old(now)
        return self._armed.pop(request_id, None) is not None

    def _remember_end(self, request_id: str, now: float) -> None:
        self._forget_old(now)
        self._ended[request_id] = now
        self._ended.move_to_end(request_id)

    def _forget_old(self, now: float) -> None:
        for remembered in (self._armed, self._ended):
            while remembered:
                oldest, when = next(iter(remembered.items()))
                if now - when < REMEMBERED_SECONDS:
                    break
                del remembered[oldest]


def _in_order_of_leaving(requests: Iterable[Request]) -> list[Request]:
    """Waiters before runners, the youngest first: nobody is let in by the leaving of somebody younger."""
    return sorted(requests, key=lambda request: (request.state is not State.WAITING, -request.number))


def _live(request: Request | None) -> Request | None:
    """``request`` or the innermost around it whose handler has not ended: a teardown waits for no nested run."""
    while request is not None and (request.closing or request.state in TERMINAL):
        request = request.parent
    return request


async def _try_gate(lanes: Lanes, ticket: Ticket, gate: Gate) -> None:
    inside = False
    try:
        inside = await threads.run_file(gate.enter)
    finally:
        must_leave = lanes.end_knock(ticket, inside)
    if must_leave:
        with trio.CancelScope(shield=True):
            # Shielded, so it must not wait behind other work on files.
            await threads.run_long(gate.leave)


@trio.lowlevel.disable_ki_protection
async def _unprotected(handler: Callable[..., Any], context: Context, prepared: Prepared) -> Any:
    return await handler(context, prepared)
