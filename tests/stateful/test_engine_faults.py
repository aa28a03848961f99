"""Seeded faults: the machines that hold the engine to the contract have to notice each of them.

Each fault replaces one method by one with a mistake that somebody could make; some of them were made.  A machine that
never saw the states in which the mistake shows would pass all of them, and would prove as little about the engine.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import attrs
import hypothesis
import pytest
import trio
from hypothesis.stateful import run_state_machine_as_test

import laneway
from laneway import _engine, _registry
from laneway._admission import Ticket, TicketState
from laneway._context import Context
from laneway._declarations import Scope
from laneway._decode_loop import DecodeLoop
from laneway._lane import Lanes
from laneway._lifecycle import State
from laneway._model import Model
from laneway._outbox import Outbox
from laneway._registry import Registry
from laneway._request import Request
from laneway._run import Run
from laneway._scheduler import Output, Scheduler, Sequence, Step
from laneway._tokens import Tokens
from laneway.decoder import StepResult
from laneway.testing._engine_machine import DecodingMachine, EngineMachine, RequestMachine
from tests.stateful import finding

Patch = pytest.MonkeyPatch

# After a dozen examples Hypothesis rather varies what it has drawn, so beginning anew shows more that is new.
BEGINNINGS = 30
SETTINGS = finding.budget(12)

FAULTS: list[tuple[type[EngineMachine], Callable[[Patch], None]]] = []


def seen_by(machine: type[EngineMachine]) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """A fault that this machine has to find."""

    def register(fault: Callable[[Patch], None]) -> Callable[[Patch], None]:
        FAULTS.append((machine, fault))
        return fault

    return register


# Permits and queues


@seen_by(DecodingMachine)
def gives_the_permit_back_before_teardown(patch: Patch) -> None:
    """A8: the next request is let in while sequences of this one are still in their slots."""
    close = Context.close

    async def close_late(self: Context) -> None:
        if self._request.ticket is not None:
            self._request.model.lanes.leave(self._request.ticket)
        await close(self)

    patch.setattr(Context, "close", close_late)


@seen_by(RequestMachine)
def loses_the_wake_up_of_a_cancelled_head(patch: Patch) -> None:
    """A3: whoever could start because a waiter has left is not told."""
    leave = Lanes.leave

    def leave_quietly(self: Lanes, ticket: Ticket) -> None:
        if ticket.state is TicketState.WAITING:
            self._admission.withdraw(ticket)
            self._wake(ticket)
        else:
            leave(self, ticket)

    patch.setattr(Lanes, "leave", leave_quietly)


@seen_by(RequestMachine)
def wakes_in_the_wrong_order(patch: Patch) -> None:
    """A3: several are granted at once, the youngest first."""
    begin = Lanes._begin
    patch.setattr(Lanes, "_begin", lambda self, started: begin(self, started[::-1]))


@seen_by(RequestMachine)
def never_gives_up_waiting(patch: Patch) -> None:
    """A5: a queue_timeout is taken and forgotten."""

    async def wait_turn(self: Registry, request: Request) -> None:
        if request.ticket is not None:
            await request.model.lanes.wait_turn(request.ticket)

    patch.setattr(Registry, "_wait_turn", wait_turn)


@seen_by(RequestMachine)
def forgets_the_keys(patch: Patch) -> None:
    """A13: two requests with one key run side by side."""
    arrive = Lanes.arrive
    patch.setattr(Lanes, "arrive", lambda self, kind, *, keys=(), **how: arrive(self, kind, **how))


@seen_by(RequestMachine)
def weighs_everything_alike(patch: Patch) -> None:
    """A12: a batch takes one permit on a model with slot-accurate admission, too."""
    arrive = Lanes.arrive
    patch.setattr(Lanes, "arrive", lambda self, kind, *, weight=1, **how: arrive(self, kind, **how))


@seen_by(RequestMachine)
def queues_what_wanted_not_to_wait(patch: Patch) -> None:
    """A7: ``overflow='reject'`` is ignored where the queue has room."""
    arrive = Lanes.arrive
    patch.setattr(Lanes, "arrive", lambda self, kind, *, nowait=False, **how: arrive(self, kind, **how))


class _HidesTheCancelling(dict[str, Request]):
    def get(self, key: str, default: Any = None) -> Any:
        request = super().get(key)
        return default if request is None or request.state is State.CANCELLING else request

    def __delitem__(self, key: str) -> None:
        self.pop(key, None)


@seen_by(RequestMachine)
def frees_an_id_too_early(patch: Patch) -> None:
    """A9: an id can be used again while its request tears down."""
    init = Registry.__init__

    def init_hiding(self: Registry, *args: Any) -> None:
        init(self, *args)
        self._live = _HidesTheCancelling()

    patch.setattr(Registry, "__init__", init_hiding)


# Whom a cancel reaches


@seen_by(RequestMachine)
def cancels_a_peer(patch: Patch) -> None:
    """C2: a cancel by id reaches the neighbour of its request as well."""
    cancel_request = Registry.cancel_request

    def cancel_two(self: Registry, request: Request, reason: str, *, asked: bool = False) -> int:
        for other in self._group(request):
            if other is not request and other.state is State.RUNNING:
                self._cancel_one(other, reason)
                break
        return cancel_request(self, request, reason, asked=asked)

    patch.setattr(Registry, "cancel_request", cancel_two)


@seen_by(RequestMachine)
def loses_a_cancel_in_a_crowd(patch: Patch) -> None:
    """C3: of many that are cancelled at once, some stay in the queue."""
    cancel_many = Registry.cancel_many

    def cancel_some(self: Registry, requests: Iterable[Request], reason: str, *, asked: bool = False) -> int:
        chosen = list(requests)
        lost = sum(request.state in (State.WAITING, State.RUNNING) for request in chosen[128:])
        return cancel_many(self, chosen[:128], reason, asked=asked) + lost

    patch.setattr(Registry, "cancel_many", cancel_some)


@seen_by(RequestMachine)
def lets_in_on_the_way_out(patch: Patch) -> None:
    """C3: those of one scope leave the queue oldest first, and let each other in."""

    def cancel_each(self: Registry, requests: Iterable[Request], reason: str, *, asked: bool = False) -> int:
        return sum(self._cancel_one(request, reason, asked=asked) for request in requests)

    patch.setattr(Registry, "_cancel_each", cancel_each)


@seen_by(RequestMachine)
def lets_a_waiter_cancel_those_who_run(patch: Patch) -> None:
    """C1: with scope ``model``, the cancel of a waiter ends its whole scope."""

    def cancel_request(self: Registry, request: Request, reason: str, *, asked: bool = False) -> int:
        common = request.operation.scope is Scope.MODEL
        group = self._group(request) if common else [request]
        return self._cancel_each(group, reason, asked=asked)

    patch.setattr(Registry, "cancel_request", cancel_request)


@seen_by(RequestMachine)
def counts_whom_it_does_not_end(patch: Patch) -> None:
    """C3: a request that is cancelling already counts once more."""
    cancel_request = Registry.cancel_request

    def cancel_counting_all(self: Registry, request: Request, reason: str, *, asked: bool = False) -> int:
        cancelling = request.state is State.CANCELLING
        return cancel_request(self, request, reason, asked=asked) + cancelling

    patch.setattr(Registry, "cancel_request", cancel_counting_all)


@seen_by(RequestMachine)
def gives_a_cancelling_one_another_reason(patch: Patch) -> None:
    """C3: the last reason counts instead of the first one."""
    cancel_one = Registry._cancel_one

    def cancel_again(self: Registry, request: Request, reason: str, *, asked: bool = False) -> bool:
        if request.state is State.CANCELLING:
            request.cancel_reason = reason
        return cancel_one(self, request, reason, asked=asked)

    patch.setattr(Registry, "_cancel_one", cancel_again)


@seen_by(DecodingMachine)
def counts_a_request_in_its_teardown(patch: Patch) -> None:
    """C3: a request whose handler has ended is cancelled all the same."""
    cancel_one = Registry._cancel_one

    def cancel_closing(self: Registry, request: Request, reason: str, *, asked: bool = False) -> bool:
        closing, request.closing = request.closing, False
        try:
            return cancel_one(self, request, reason, asked=asked)
        finally:
            request.closing = closing

    patch.setattr(Registry, "_cancel_one", cancel_closing)


@seen_by(RequestMachine)
def lets_one_caller_end_a_common_scope(patch: Patch) -> None:
    """C1: a caller that leaves does not detach, it cancels all of its scope."""

    def leave(self: Registry, request: Request) -> bool:
        self.cancel_request(request, "its caller left the block")
        return request.operation.scope is not Scope.NONE or request.started_at is None

    patch.setattr(Registry, "leave", leave)


@seen_by(RequestMachine)
def leaves_one_running_for_nobody(patch: Patch) -> None:
    """C1: a request whose caller has left runs on for another that is being cancelled, too."""

    def leave(self: Registry, request: Request) -> bool:
        scope = request.operation.scope
        if request.state is State.RUNNING and scope is Scope.MODEL:
            request.attached = False
            if any(other.attached for other in self._group(request)):
                return False
        self.cancel_request(request, "its caller left the block")
        return scope is not Scope.NONE or request.started_at is None

    patch.setattr(Registry, "leave", leave)
    patch.setattr(Registry, "_cancel_unheard", lambda self, request: False)


@seen_by(RequestMachine)
def keeps_the_caller_of_what_cannot_be_cancelled(patch: Patch) -> None:
    """C1: with scope ``none`` the caller waits for the end all the same."""
    leave = Registry.leave
    patch.setattr(Registry, "leave", lambda self, request: leave(self, request) or True)


@seen_by(RequestMachine)
def remembers_an_early_cancel_for_ever(patch: Patch) -> None:
    """C5: a cancel of long ago ends a request that comes with its id."""

    def take_armed(self: Registry, request_id: str, now: float) -> bool:
        return self._armed.pop(request_id, None) is not None

    def forget_old(self: Registry, now: float) -> None:
        self._ended = OrderedDict((i, when) for i, when in self._ended.items() if now - when < 30)

    patch.setattr(Registry, "_take_armed", take_armed)
    patch.setattr(Registry, "_forget_old", forget_old)


@seen_by(RequestMachine)
def arms_an_id_that_has_just_ended(patch: Patch) -> None:
    """C5: a cancel that comes too late ends the next request of that id."""
    patch.setattr(Registry, "_remember_end", lambda self, request_id, now: None)


# How a run ends


@seen_by(RequestMachine)
def lets_a_run_outlive_its_block(patch: Patch) -> None:
    """R3: leaving the block cancels, and does not wait for the teardown."""
    leave = Registry.leave
    patch.setattr(Registry, "leave", lambda self, request: leave(self, request) and False)


@seen_by(RequestMachine)
def swallows_a_failure_that_nobody_saw(patch: Patch) -> None:
    """R4: leaving the block of a run that has failed raises nothing."""
    patch.setattr(Run, "unseen_error", lambda self: None)


@seen_by(RequestMachine)
def takes_a_second_reader(patch: Patch) -> None:
    """R5: two tasks read one run."""

    async def result(self: Run) -> Any:
        await self._request.settled.wait()
        await trio.lowlevel.checkpoint_if_cancelled()
        self._raise_error()
        return self._request.result

    patch.setattr(Run, "result", result)


@seen_by(RequestMachine)
def tells_two_outcomes(patch: Patch) -> None:
    """R4, C1: with scope ``none``, the result comes after the cancel has been told."""
    end = Registry._end

    def end_again(self: Registry, request: Request, *args: Any, **how: Any) -> None:
        if how["completed"]:
            request.settled = trio.Event()
        end(self, request, *args, **how)

    patch.setattr(Registry, "_end", end_again)


@seen_by(RequestMachine)
def tells_an_outcome_of_the_wrong_type(patch: Patch) -> None:
    """C6: a cancelled request raises something else."""
    patch.setattr(
        Registry, "cancelled_error", lambda self, request: laneway.InvalidRequestError(f"{request.id} was cancelled")
    )


@seen_by(RequestMachine)
def prefers_its_own_cancel(patch: Patch) -> None:
    """C6: the caller's own scope is cancelled, and it sees our error."""

    async def result(self: Run) -> Any:
        if self._busy:
            raise trio.BusyResourceError("busy")
        self._busy = True
        try:
            self._request.discard()
            await self._request.settled.wait()
            self._raise_error()
            return self._request.result
        finally:
            self._busy = False

    patch.setattr(Run, "result", result)


@seen_by(RequestMachine)
def takes_requests_while_unloading(patch: Patch) -> None:
    """C8: there is no barrier."""
    patch.setattr(Model, "check_open", lambda self: None)


@seen_by(DecodingMachine)
def stops_decoding_before_the_requests_have_ended(patch: Patch) -> None:
    """C8: a cancelled program cancels its decode loops together with its requests."""
    init = _engine._Host.__init__

    def unshielded(self: Any, on_fatal: Any, on_cancelled: Any = None) -> None:
        init(self, on_fatal, on_cancelled or (lambda: None))

    patch.setattr(_engine._Host, "__init__", unshielded)


# Tokens, text and steps


@seen_by(DecodingMachine)
def swaps_two_slots(patch: Patch) -> None:
    """C2: two sequences get each other's token."""
    postprocess = Scheduler.postprocess

    def swapped(self: Scheduler, step: Step, result: StepResult) -> list[Output]:
        if len(result.tokens) > 1:
            (one, token), (two, other), *rest = result.tokens.items()
            result = attrs.evolve(result, tokens={one: other, two: token, **dict(rest)})
        return postprocess(self, step, result)

    patch.setattr(Scheduler, "postprocess", swapped)


@seen_by(DecodingMachine)
def drops_text_that_nobody_has_read(patch: Patch) -> None:
    """S1, S2: later text takes the place of what is unread."""
    put = Outbox.put

    def replace(self: Outbox, event: object) -> None:
        last = self._last.get(getattr(event, "id", None))
        if self._merging and last is not None:
            last.event = event
        else:
            put(self, event)

    patch.setattr(Outbox, "put", replace)


@seen_by(DecodingMachine)
def does_not_merge(patch: Patch) -> None:
    """S2: the buffer of a reader who does not read grows by an event a token."""
    patch.setattr(laneway.BatchEvent, "merge", lambda self, later: None)


@seen_by(DecodingMachine)
def waits_for_a_slow_reader(patch: Patch) -> None:
    """S2: a request does not end before its text is read."""
    close = Context.close

    async def close_when_read(self: Context) -> None:
        await close(self)
        while self._request.outbox and self._request.attached:  # noqa: ASYNC110
            await trio.sleep(1 / 64)

    patch.setattr(Context, "close", close_when_read)


@seen_by(DecodingMachine)
def feeds_a_paused_run(patch: Patch) -> None:
    """S2: the pause is noted, and decoding goes on."""
    patch.setattr(DecodeLoop, "pause", lambda self, tokens: None)


@seen_by(DecodingMachine)
def forgets_a_sequence_in_teardown(patch: Patch) -> None:
    """C7: of the sequences that a handler has left behind, only the first is dropped."""

    async def close(self: Context) -> None:
        for tokens in self._request.streams[:1]:
            tokens.drop()
            await tokens.freed.wait()

    patch.setattr(Context, "close", close)


@seen_by(DecodingMachine)
def interrupts_a_step_that_peers_are_in(patch: Patch) -> None:
    """C9: the interrupt does not ask who else is in the call."""
    remove = DecodeLoop.remove

    def remove_rudely(self: DecodeLoop, tokens: Tokens) -> None:
        if self._under_way is not None and not tokens.freed.is_set():
            self.decoder.interrupt()
        remove(self, tokens)

    patch.setattr(DecodeLoop, "remove", remove_rudely)


@seen_by(DecodingMachine)
def keeps_an_interrupt_for_the_next_step(patch: Patch) -> None:
    """C9: an interrupt that came when its step had ended stops the next one, and whoever is in that."""
    execute = DecodeLoop._execute

    async def execute_stale(self: DecodeLoop, step: Step) -> None:
        stale = any(tokens.leaving for tokens in self._streams.values())
        if stale:
            trio.lowlevel.current_trio_token().run_sync_soon(self.decoder.interrupt)
        await execute(self, step)

    sweep = DecodeLoop._sweep

    def sweep_late(self: DecodeLoop) -> None:
        if self._leaving:
            trio.lowlevel.current_trio_token().run_sync_soon(self.decoder.interrupt)
        sweep(self)

    patch.setattr(DecodeLoop, "_execute", execute_stale)
    patch.setattr(DecodeLoop, "_sweep", sweep_late)


@seen_by(DecodingMachine)
def never_interrupts(patch: Patch) -> None:
    """C9: a call that nobody waits for any more runs to its end."""
    patch.setattr(DecodeLoop, "_wanted", lambda self, step: True)


@seen_by(DecodingMachine)
def leaves_nested_blocks_one_by_one(patch: Patch) -> None:
    """C3, C9: a request with several sequences waits for the slot of each before it drops the next."""
    leave = Tokens.__aexit__

    async def leave_slowly(self: Tokens, *error: Any) -> None:
        self.drop()
        with trio.CancelScope(shield=True):
            await self.freed.wait()
        await leave(self, *error)

    patch.setattr(Tokens, "__aexit__", leave_slowly)


@seen_by(DecodingMachine)
def ends_everybody_when_a_step_fails(patch: Patch) -> None:
    """C11: sequences that were not in the failed call end as well."""

    def fail(self: Scheduler, step: Step) -> list[Sequence]:
        ended = [sequence for _, sequence in self._live()]
        for sequence in ended:
            self._retire(sequence)
        return ended

    patch.setattr(Scheduler, "fail", fail)


@seen_by(DecodingMachine)
def counts_failures_that_are_not_in_a_row(patch: Patch) -> None:
    """C11: three failed steps fail a model, however many good ones lie between them."""
    failed = DecodeLoop._step_failed
    counts: dict[int, int] = {}

    def count(self: DecodeLoop, step: Step, error: laneway.DecodeError) -> None:
        counts[id(self)] = counts.get(id(self), 0) + 1
        self._failed_steps = counts[id(self)] - 1
        failed(self, step, error)

    patch.setattr(DecodeLoop, "_step_failed", count)


@seen_by(DecodingMachine)
def lets_in_when_a_model_fails(patch: Patch) -> None:
    """C11: those who wait for a failed model leave the queue oldest first, and let each other in."""
    patch.setattr(_registry, "_in_order_of_leaving", list)


def hunt(machine: type[EngineMachine]) -> None:
    """Let the machine look for what is wrong, the same way every time."""
    for number in range(BEGINNINGS):
        anew = hypothesis.seed(number)(type(machine.__name__, (machine,), {}))
        run_state_machine_as_test(anew, settings=SETTINGS)


@pytest.mark.parametrize(("machine", "fault"), FAULTS, ids=[fault.__name__ for _, fault in FAULTS])
def test_machine_finds(
    machine: type[EngineMachine], fault: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError) as found:
        hunt(machine)
    # An engine that trips over itself would prove nothing about the machine.
    assert Path(found.traceback[-1].path).name.startswith("_engine_")
    assert Path(found.traceback[-1].path).parent.name == "testing"
