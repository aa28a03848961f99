"""The lanes as Trio tasks see them: parking, waking, cancelling.  Rules A3, A5, A8, A11 and what lies between them."""

from __future__ import annotations

import math
import random
import signal
from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing

from laneway._admission import Admission, Refused, Ticket, TicketState, TicketStateError
from laneway._lane import Lanes, LaneStatistics, TicketStatistics


def make(parallel: int = 1, queue_limit: int = 64, **how: Any) -> Lanes:
    return Lanes(Admission(parallel, queue_limit), "tiny", **how)


async def hold(lanes: Lanes, ticket: Ticket, log: list[int]) -> None:
    """One request: wait, note the turn, run until the next cancel or for good, leave."""
    try:
        await lanes.wait_turn(ticket)
        log.append(ticket.number)
        await trio.sleep_forever()
    finally:
        lanes.leave(ticket)


async def pass_through(lanes: Lanes, ticket: Ticket, log: list[int]) -> None:
    """One request that ends as soon as it has its turn."""
    try:
        await lanes.wait_turn(ticket)
        log.append(ticket.number)
    finally:
        lanes.leave(ticket)


# A3


@pytest.mark.parametrize("seed", range(5))
async def test_A3_64_waiters_are_granted_in_order_whatever_order_their_tasks_wake_in(seed: int) -> None:
    lanes, log = make(), list[int]()
    first = lanes.arrive("completion")
    tickets = [lanes.arrive("completion") for _ in range(64)]
    random.Random(seed).shuffle(tickets)
    async with trio.open_nursery() as nursery:
        for ticket in tickets:
            nursery.start_soon(pass_through, lanes, ticket, log)
            if ticket.number % 3 == 0:
                await trio.testing.wait_all_tasks_blocked()
        lanes.leave(first)
    assert log == list(range(2, 66))
    assert lanes.idle


async def test_A3_tickets_are_numbered_by_arrival_not_by_who_waits_first() -> None:
    lanes, log = make(), list[int]()
    running, second, third = (lanes.arrive("completion") for _ in range(3))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pass_through, lanes, third, log)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(pass_through, lanes, second, log)
        lanes.leave(running)
    assert log == [2, 3]


async def test_A3_a_permit_is_given_before_its_task_has_come_to_wait() -> None:
    lanes = make()
    first, second = lanes.arrive("completion"), lanes.arrive("completion")
    lanes.leave(first)
    assert second.state is TicketState.RUNNING
    with pytest.raises(Refused, match="overflow"):
        lanes.arrive("completion", nowait=True)
    await lanes.wait_turn(second)
    lanes.leave(second)
    assert lanes.idle


async def test_wait_turn_of_a_running_ticket_lets_others_run() -> None:
    lanes, log = make(), list[str]()

    async def other() -> None:
        log.append("other")

    ticket = lanes.arrive("completion")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        await lanes.wait_turn(ticket)
        await lanes.wait_turn(ticket)  # the order within one tick is Trio's
        log.append("waited")
    assert log == ["other", "waited"]
    lanes.leave(ticket)


# A5


async def test_A5_the_wait_is_not_bounded_by_itself(autojump_clock: trio.testing.MockClock) -> None:
    lanes, log = make(), list[int]()
    first = lanes.arrive("completion")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pass_through, lanes, lanes.arrive("completion"), log)
        await trio.sleep(80_000)
        assert log == []
        lanes.leave(first)
    assert log == [2]


async def test_A5_the_callers_own_scope_rules_the_wait(autojump_clock: trio.testing.MockClock) -> None:
    lanes, log = make(queue_limit=1), list[int]()
    first = lanes.arrive("completion")
    began = trio.current_time()
    with pytest.raises(trio.TooSlowError):
        with trio.fail_after(2):
            await hold(lanes, lanes.arrive("completion"), log)
    assert trio.current_time() - began == 2
    assert lanes.waiting() == 0
    third = lanes.arrive("completion")
    lanes.leave(first)
    assert third.state is TicketState.RUNNING
    assert log == []


# A8


async def test_A8_the_next_one_is_granted_when_teardown_has_ended_and_not_before() -> None:
    lanes, log = make(), list[str]()

    async def run(name: str, ticket: Ticket) -> None:
        try:
            await lanes.wait_turn(ticket)
            log.append(f"{name} runs")
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.testing.wait_all_tasks_blocked()
            log.append(f"{name} torn down")
            lanes.leave(ticket)

    async with trio.open_nursery() as nursery:
        async with trio.open_nursery() as inner:
            inner.start_soon(run, "first", lanes.arrive("completion"))
            nursery.start_soon(run, "second", lanes.arrive("completion"))
            await trio.testing.wait_all_tasks_blocked()
            inner.cancel_scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert log == ["first runs", "first torn down", "second runs", "second torn down"]
    assert lanes.idle


async def test_A8_a_teardown_that_raises_still_gives_the_permit_back() -> None:
    lanes, log = make(), list[int]()

    async def fail(ticket: Ticket) -> None:
        try:
            await lanes.wait_turn(ticket)
            try:
                raise RuntimeError("the handler")
            finally:
                raise OSError("the teardown")
        finally:
            lanes.leave(ticket)

    async with trio.open_nursery() as nursery:
        ticket = lanes.arrive("completion")
        nursery.start_soon(pass_through, lanes, lanes.arrive("completion"), log)
        with pytest.raises(OSError, match="the teardown"):
            await fail(ticket)
    assert log == [2]
    assert lanes.idle


async def test_A8_keys_go_back_with_the_permit() -> None:
    lanes, log = make(2), list[int]()
    holder, finder = lanes.arrive("completion", keys=["a"]), lanes.arrive("completion")
    assert not lanes.try_claim(finder, "a")
    assert lanes.try_claim(finder, "b")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pass_through, lanes, lanes.arrive("completion", keys=["a", "b"]), log)
        lanes.leave(holder)
        await trio.testing.wait_all_tasks_blocked()
        assert log == []
        lanes.leave(finder)
    assert log == [3]


# Leaving and cancelling


async def test_cancelling_a_waiter_frees_its_place_inside_the_call_that_cancels() -> None:
    lanes, log = make(4, queue_limit=3), list[int]()
    running = lanes.arrive("completion")
    async with trio.open_nursery() as nursery:
        async with trio.open_nursery() as doomed:
            doomed.start_soon(hold, lanes, lanes.arrive("batch", weight=4), log)
            behind = [lanes.arrive("completion") for _ in range(2)]
            for ticket in behind:
                nursery.start_soon(hold, lanes, ticket, log)
            await trio.testing.wait_all_tasks_blocked()
            assert (lanes.waiting(), log) == (3, [])
            doomed.cancel_scope.cancel()
            assert lanes.waiting() == 0
            assert [ticket.state for ticket in behind] == [TicketState.RUNNING] * 2
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(log) == [3, 4]
        nursery.cancel_scope.cancel()
    lanes.leave(running)
    assert lanes.idle


async def test_a_cancel_that_is_pending_when_the_task_comes_takes_it_out_of_the_line() -> None:
    lanes = make()
    running, doomed, behind = (lanes.arrive("completion") for _ in range(3))
    with trio.CancelScope() as scope:
        scope.cancel()
        await lanes.wait_turn(doomed)
    assert scope.cancelled_caught
    assert doomed.state is TicketState.GONE
    lanes.leave(doomed)
    lanes.leave(running)
    assert behind.state is TicketState.RUNNING


async def test_a_grant_before_a_cancel_stays_and_the_cancel_comes_at_the_next_checkpoint() -> None:
    lanes, log = make(), list[str]()
    running, second, third = (lanes.arrive("completion") for _ in range(3))
    scope = trio.CancelScope()

    async def wait() -> None:
        try:
            with scope:
                await lanes.wait_turn(second)
                log.append("granted")
                assert second.state is TicketState.RUNNING
                await trio.lowlevel.checkpoint()
                log.append("never")
        finally:
            assert third.state is TicketState.WAITING
            lanes.leave(second)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        lanes.leave(running)  # rescheduled, and not run yet
        scope.cancel()
    assert log == ["granted"]
    assert scope.cancelled_caught
    assert third.state is TicketState.RUNNING


async def test_a_cancel_before_a_grant_lets_the_permit_pass_to_the_next() -> None:
    lanes, log = make(), list[int]()
    running = lanes.arrive("completion")
    async with trio.open_nursery() as nursery:
        async with trio.open_nursery() as doomed:
            doomed.start_soon(hold, lanes, lanes.arrive("completion"), log)
            nursery.start_soon(pass_through, lanes, lanes.arrive("completion"), log)
            await trio.testing.wait_all_tasks_blocked()
            doomed.cancel_scope.cancel()
            lanes.leave(running)
    assert log == [3]
    assert lanes.idle


@pytest.mark.parametrize("holder_first", [True, False])
async def test_a_storm_of_200_cancels_loses_no_permit_and_no_cancel(holder_first: bool) -> None:
    """Every third is so heavy that those behind it are granted while their own cancel is on its way."""
    lanes, log = make(8, queue_limit=200), list[int]()
    async with trio.open_nursery() as outer:
        async with trio.open_nursery() as nursery:
            tickets = [
                lanes.arrive("batch", weight=8 if place % 3 == 1 else 1, keys=[place % 5] if place % 2 else [])
                for place in range(200)
            ]
            random.Random(7).shuffle(tickets)
            for ticket in tickets:
                nursery.start_soon(hold, lanes, ticket, log)
            await trio.testing.wait_all_tasks_blocked()
            survivor = lanes.arrive("completion", keys=[0, 1, 2, 3, 4])
            outer.start_soon(pass_through, lanes, survivor, log)
            await trio.testing.wait_all_tasks_blocked()
            started = len(log)
            if holder_first:
                for ticket in tickets:
                    if ticket.state is TicketState.RUNNING:
                        lanes.leave(ticket)  # grants others, whose tasks are then cancelled before they run
            nursery.cancel_scope.cancel()
        assert len(log) > started or not holder_first
    assert survivor.number in log
    assert {ticket.state for ticket in tickets} == {TicketState.GONE}
    assert lanes.idle


async def test_200_scopes_cancelled_here_and_there_while_permits_change_hands() -> None:
    granted: list[int] = []
    lanes = make(2, queue_limit=200, on_start=lambda ticket: granted.append(ticket.number))
    rng = random.Random(11)

    async def request(ticket: Ticket, scope: trio.CancelScope) -> None:
        with scope:
            try:
                await lanes.wait_turn(ticket)
                await trio.lowlevel.checkpoint()
            finally:
                lanes.leave(ticket)

    scopes = [trio.CancelScope() for _ in range(200)]
    async with trio.open_nursery() as nursery:
        for scope in scopes:
            ticket = lanes.arrive("completion", exclusive=rng.random() < 0.1, weight=rng.choice([1, 1, 2]))
            nursery.start_soon(request, ticket, scope)
        while nursery.child_tasks:
            for scope in rng.sample(scopes, 10):
                scope.cancel()
            await trio.lowlevel.checkpoint()
    assert granted == sorted(granted)
    assert 0 < len(granted) < 198
    assert lanes.idle


@pytest.mark.parametrize("parked", [True, False])
@pytest.mark.parametrize("cancelled", ["before", "after", "never"])
async def test_a_waiter_that_somebody_else_takes_out_of_the_line(parked: bool, cancelled: str) -> None:
    """Cancelled as well, it sees its cancel.  If not, that is an error: it neither runs nor sleeps for ever."""
    lanes = make()
    running, doomed, behind = (lanes.arrive("completion") for _ in range(3))
    scope, errors = trio.CancelScope(), list[Exception]()

    async def wait() -> None:
        with scope:
            try:
                await lanes.wait_turn(doomed)
            except TicketStateError as error:
                errors.append(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        if parked:
            await trio.testing.wait_all_tasks_blocked()
        if cancelled == "before":
            scope.cancel()
        lanes.leave(doomed)
        assert doomed.state is TicketState.GONE
        assert lanes.waiting() == 1
        if cancelled == "after":
            scope.cancel()
    assert scope.cancelled_caught is (cancelled != "never")
    assert [str(error).split(";")[0] for error in errors] == (
        ["cannot wait with ticket 2 (completion): it is gone"] if cancelled == "never" else []
    )
    lanes.leave(running)
    assert behind.state is TicketState.RUNNING


async def test_a_permit_that_is_left_before_its_task_has_run() -> None:
    lanes, log = make(), list[int]()
    running, second, third = (lanes.arrive("completion") for _ in range(3))
    scope = trio.CancelScope()

    async def wait() -> None:
        with scope:
            await pass_through(lanes, second, log)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        lanes.leave(running)
        lanes.leave(second)
        scope.cancel()
        assert third.state is TicketState.RUNNING
    assert (log, scope.cancelled_caught) == ([], True)


async def test_leave_needs_no_knowledge_of_how_far_things_got() -> None:
    lanes = make()
    running, waiting = lanes.arrive("completion"), lanes.arrive("completion")
    for ticket in [waiting, waiting, running, running]:
        lanes.leave(ticket)
    assert lanes.idle


async def test_one_ticket_has_one_waiting_task() -> None:
    lanes, log = make(), list[int]()
    running, waiting = lanes.arrive("completion"), lanes.arrive("completion")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pass_through, lanes, waiting, log)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError, match="ticket 2"):
            await lanes.wait_turn(waiting)
        lanes.leave(running)
    assert log == [2]


async def test_a_refused_arrival_owes_nothing() -> None:
    lanes = make(queue_limit=0)
    ticket = lanes.arrive("completion")
    with pytest.raises(Refused):
        lanes.arrive("completion")
    lanes.leave(ticket)
    assert lanes.idle


# on_start


async def test_on_start_is_told_of_waiters_in_ticket_order_inside_the_call_that_grants() -> None:
    told: list[int] = []
    lanes, log = make(3, on_start=lambda ticket: told.append(ticket.number)), list[int]()
    batch = lanes.arrive("batch", weight=3)
    assert told == []
    tickets = [lanes.arrive("completion") for _ in range(3)]
    async with trio.open_nursery() as nursery:
        for ticket in reversed(tickets):
            nursery.start_soon(pass_through, lanes, ticket, log)
        await trio.testing.wait_all_tasks_blocked()
        lanes.leave(batch)
        assert (told, log) == ([2, 3, 4], [])


async def test_on_start_may_leave_another_ticket_that_was_granted_with_it() -> None:
    told: list[int] = []

    def on_start(ticket: Ticket) -> None:
        told.append(ticket.number)
        if ticket.number == 2:
            lanes.leave(tickets[1])

    lanes = make(2, on_start=on_start)
    batch = lanes.arrive("batch", weight=2)
    tickets = [lanes.arrive("completion") for _ in range(3)]
    lanes.leave(batch)
    assert told == [2, 4]
    assert [ticket.state for ticket in tickets] == [TicketState.RUNNING, TicketState.GONE, TicketState.RUNNING]


# KeyboardInterrupt


class Witness(Admission):
    """Notes of each transition whether a KeyboardInterrupt could break into it."""

    __slots__ = ("seen",)

    def __init__(self, parallel: int) -> None:
        super().__init__(parallel)
        self.seen: list[tuple[str, bool]] = []

    def _note(self, name: str, call: Callable[..., Any], *args: Any, **how: Any) -> Any:
        self.seen.append((name, trio.lowlevel.currently_ki_protected()))
        return call(*args, **how)

    def arrive(self, kind: str, **how: Any) -> Any:
        return self._note("arrive", super().arrive, kind, **how)

    def withdraw(self, ticket: Ticket) -> Any:
        return self._note("withdraw", super().withdraw, ticket)

    def finish(self, ticket: Ticket) -> Any:
        return self._note("finish", super().finish, ticket)

    def try_claim(self, ticket: Ticket, key: object) -> Any:
        return self._note("try_claim", super().try_claim, ticket, key)


async def test_every_transition_holds_KeyboardInterrupt_off(autojump_clock: trio.testing.MockClock) -> None:
    core = Witness(1)
    lanes = Lanes(core, "tiny")
    running = lanes.arrive("completion")
    lanes.try_claim(running, "a")
    with trio.move_on_after(1):
        await lanes.wait_turn(lanes.arrive("completion"))
    with trio.CancelScope() as scope:
        scope.cancel()
        await lanes.wait_turn(lanes.arrive("completion"))
    lanes.leave(lanes.arrive("completion"))
    lanes.leave(running)
    names = "arrive try_claim arrive withdraw arrive withdraw arrive withdraw finish"
    assert core.seen == [(name, True) for name in names.split()]
    assert not trio.lowlevel.currently_ki_protected()


def test_a_KeyboardInterrupt_takes_the_waiter_out_of_the_line() -> None:
    lanes = make()

    async def main() -> None:
        lanes.arrive("completion")
        trio.lowlevel.current_trio_token().run_sync_soon(signal.raise_signal, signal.SIGINT)
        await lanes.wait_turn(lanes.arrive("completion"))

    with pytest.raises(KeyboardInterrupt):
        trio.run(main)
    assert (len(lanes.statistics()[0].running), lanes.waiting()) == (1, 0)


# What can be seen


def test_A11_idle_lanes_show_the_models_own_only() -> None:
    lanes = make(3, queue_limit=5)
    assert lanes.idle
    assert lanes.statistics() == (LaneStatistics(name="", cap=3, used=0, queue_limit=5, running=(), waiting=()),)
    assert repr(lanes) == "<laneway.Lane 'tiny' 0/3 running, 0 waiting>"


def test_statistics_are_a_frozen_picture_of_every_lane() -> None:
    lanes = make(2)
    lanes.arrive("batch", weight=9, keys=["a"])
    writer = lanes.arrive("finetune", exclusive=True)
    lanes.arrive("completion", keys=["a"])
    lanes.arrive("embed", cap=math.inf, lane="embed")

    def figures(number: int, kind: str, position: int | None, **how: Any) -> TicketStatistics:
        how = {"exclusive": False, "weight": 1, "keys": (), **how}
        return TicketStatistics(number=number, kind=kind, position=position, **how)

    before = lanes.statistics()
    assert before == (
        LaneStatistics(
            name="",
            cap=2,
            used=2,
            queue_limit=64,
            running=(figures(1, "batch", None, weight=2, keys=("a",)),),
            waiting=(figures(2, "finetune", 1, exclusive=True), figures(3, "completion", 2, keys=("a",))),
        ),
        LaneStatistics(
            name="embed",
            cap=math.inf,
            used=0,
            queue_limit=64,
            running=(),
            waiting=(figures(4, "embed", 1),),
        ),
    )
    assert repr(lanes) == "<laneway.Lane 'tiny' 1/2 running, 2 waiting; 'embed' 0/inf running, 1 waiting>"
    lanes.leave(writer)
    assert len(before[0].waiting) == 2
    assert lanes.statistics()[0].waiting == (figures(3, "completion", 1, keys=("a",)),)
    assert lanes.statistics()[1].running == (figures(4, "embed", None),)
    assert (lanes.waiting(), lanes.waiting("embed"), lanes.queue_limit) == (1, 0, 64)
