"""Waiting for what a process outside holds: no permit, a place in the line, nothing left behind.  Rules A3, A13, K2."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

import laneway
from laneway import InferenceCancelledError, Prepared, RequestRejectedByPolicyError
from laneway._admission import Admission, Refused, Ticket, TicketState, TicketStateError
from laneway._lane import Lanes
from tests.engine.kit import Bench, Body, Generate, bench
from tests.kvcache.kit import threads_at_once
from tests.program_threads import HANG_SECONDS, Held, one_thread_of_each_kind


@attrs.define(eq=False)
class Door:
    """A gate, and who holds what is behind it: one of ours, or somebody outside."""

    world: dict[str, object]
    name: str = "file"
    calls: int = 0

    def enter(self) -> bool:
        self.calls += 1
        return self.world.setdefault(self.name, self) is self

    def leave(self) -> None:
        if self.world.get(self.name) is self:
            del self.world[self.name]


OUTSIDE = object()


def make(parallel: int = 1, queue_limit: int = 64) -> Lanes:
    return Lanes(Admission(parallel, queue_limit))


def arrive(lanes: Lanes, world: dict[str, object], **how: Any) -> Ticket:
    return lanes.arrive("turn", keys=["file"], gate=Door(world), **how)


def knock(lanes: Lanes, ticket: Ticket) -> bool:
    """Try the gate of a ticket once more; whether it still has to be opened."""
    gate = lanes.begin_knock(ticket)
    if gate is not None:
        assert not lanes.end_knock(ticket, gate.enter())
    return ticket.gated


# On the lanes.


def test_K2_a_gate_that_is_free_costs_nothing() -> None:
    lanes, world = make(), dict[str, object]()
    ticket = arrive(lanes, world)
    assert ticket.state is TicketState.RUNNING
    assert list(world) == ["file"]
    lanes.leave(ticket)
    assert world == {}
    assert lanes.idle


def test_K2_A13_who_waits_at_a_gate_holds_no_permit_and_is_passed() -> None:
    lanes, world = make(parallel=1), {"file": OUTSIDE}
    waiter = arrive(lanes, world)
    plain = lanes.arrive("completion")
    assert (waiter.state, plain.state) == (TicketState.WAITING, TicketState.RUNNING)
    assert knock(lanes, waiter)
    second = lanes.arrive("completion")
    del world["file"]
    assert not knock(lanes, waiter)
    assert waiter.state is TicketState.WAITING  # it has the lock now, and waits for the permit like all others
    lanes.leave(plain)
    assert (waiter.state, second.state) == (TicketState.RUNNING, TicketState.WAITING)  # it kept its place
    lanes.leave(waiter)
    lanes.leave(second)
    assert world == {}
    assert lanes.idle


def test_A3_a_key_that_is_handed_on_takes_its_gate_with_it_before_anybody_younger_starts() -> None:
    lanes, world = make(parallel=1), dict[str, object]()
    first, second = arrive(lanes, world), arrive(lanes, world)
    younger = lanes.arrive("completion")
    lanes.leave(first)
    assert (second.state, younger.state) == (TicketState.RUNNING, TicketState.WAITING)
    lanes.leave(second)
    assert younger.state is TicketState.RUNNING
    lanes.leave(younger)
    assert lanes.idle
    assert world == {}


def test_K2_nobody_tries_a_gate_before_it_is_first_for_its_key() -> None:
    # Or it would have the file, and the one before it the key, each waiting for the other for ever.
    lanes, world = make(parallel=2), {"file": OUTSIDE}
    first, second = arrive(lanes, world), arrive(lanes, world)
    del world["file"]
    assert knock(lanes, second)
    assert world == {}
    assert not knock(lanes, first)
    assert (first.state, second.state) == (TicketState.RUNNING, TicketState.WAITING)
    lanes.leave(first)
    assert second.state is TicketState.RUNNING
    lanes.leave(second)
    assert lanes.idle


@pytest.mark.parametrize("held", [False, True])
def test_K2_a_waiter_that_leaves_leaves_nothing_behind(held: bool) -> None:
    lanes = make(parallel=1)
    world: dict[str, object] = {} if held else {"file": OUTSIDE}
    plain = lanes.arrive("completion")
    waiter, heir = arrive(lanes, world), arrive(lanes, world)
    assert (world["file"] is OUTSIDE) is not held
    lanes.leave(waiter)
    if not held:
        assert world == {"file": OUTSIDE}
        del world["file"]
        assert not knock(lanes, heir)
    assert isinstance(world["file"], Door)
    lanes.leave(plain)
    assert heir.state is TicketState.RUNNING
    lanes.leave(heir)
    assert world == {}
    assert lanes.idle


def test_A7_what_is_held_outside_cannot_start_at_once() -> None:
    lanes, world = make(), {"file": OUTSIDE}
    with pytest.raises(Refused, match="overflow"):
        arrive(lanes, world, nowait=True)
    del world["file"]
    ticket = arrive(lanes, world, nowait=True)
    lanes.leave(ticket)
    assert world == {}


def test_A4_a_refused_arrival_gives_the_lock_back() -> None:
    lanes, world = make(parallel=1, queue_limit=0), dict[str, object]()
    plain = lanes.arrive("completion")
    for how in ({}, {"nowait": True}):
        with pytest.raises(Refused):
            arrive(lanes, world, **how)
        assert world == {}
    lanes.leave(plain)
    assert lanes.idle


def test_A6_an_exclusive_ticket_has_no_gate() -> None:
    lanes, world = make(), {"file": OUTSIDE}
    with pytest.raises(ValueError, match="has no gate"):
        arrive(lanes, world, exclusive=True)
    assert lanes.idle


def test_A6_a_writer_passes_those_who_wait_at_gates_and_nobody_passes_the_writer() -> None:
    lanes, world = make(parallel=2), {"file": OUTSIDE}
    waiter = arrive(lanes, world)
    writer = lanes.arrive("finetune", exclusive=True)
    del world["file"]
    assert not knock(lanes, waiter)
    assert (waiter.state, writer.state) == (TicketState.WAITING, TicketState.RUNNING)
    lanes.leave(writer)
    assert waiter.state is TicketState.RUNNING
    lanes.leave(waiter)
    assert lanes.idle


def test_a_gate_opens_once() -> None:
    core = Admission(1)
    ticket, _ = core.arrive("turn", keys=["file"], gated=True)
    assert core.at_gate(ticket)
    assert core.open_gate(ticket) == [ticket]
    assert not core.at_gate(ticket)
    with pytest.raises(TicketStateError, match="open the gate"):
        core.open_gate(ticket)
    core.finish(ticket)
    assert core.idle


class Rules:
    """The rule of the contract, written down as slowly as can be: who runs, of those who are there."""

    def __init__(self, parallel: int) -> None:
        self.parallel = parallel
        self.line: list[tuple[int, frozenset[str], bool]] = []  # number, keys, whether it has a gate
        self.running: list[tuple[int, frozenset[str], bool]] = []

    def first(self, number: int, keys: frozenset[str]) -> bool:
        return all(other >= number or not keys & theirs for other, theirs, _ in self.running + self.line)

    def admit(self, closed: bool) -> None:
        while len(self.running) < self.parallel:
            ready = [entry for entry in self.line if self.first(entry[0], entry[1]) and not (entry[2] and closed)]
            if not ready:
                return
            self.line.remove(ready[0])
            self.running.append(ready[0])


@given(
    st.integers(1, 3),
    st.lists(
        st.tuples(st.just("arrive"), st.sets(st.sampled_from("abc"), max_size=2))
        | st.tuples(st.just("gated"), st.sets(st.sampled_from("abc"), max_size=2))
        | st.tuples(st.just("leave"), st.integers(0, 9))
        | st.tuples(st.sampled_from(["close", "open"]), st.none()),
        max_size=40,
    ),
)
def test_A13_gates_are_keys_that_somebody_outside_may_hold(parallel: int, script: list[tuple[str, Any]]) -> None:
    """With one door that is shut and opened from outside, and which any number of ours may go through together."""

    class Shared:
        def enter(self) -> bool:
            return not shut

        def leave(self) -> None:
            pass

    shut = False
    lanes, rules = make(parallel), Rules(parallel)
    live: list[Ticket] = []
    entered: set[int] = set()
    for what, value in script:
        if what in ("arrive", "gated"):
            ticket = lanes.arrive("turn", keys=sorted(value), gate=Shared() if what == "gated" else None)
            live.append(ticket)
            rules.line.append((ticket.number, frozenset(value), what == "gated"))
        elif what == "leave" and live:
            ticket = live.pop(value % len(live))
            lanes.leave(ticket)
            rules.line = [entry for entry in rules.line if entry[0] != ticket.number]
            rules.running = [entry for entry in rules.running if entry[0] != ticket.number]
        elif what in ("close", "open"):
            shut = what == "close"
            for ticket in live:
                knock(lanes, ticket)
        # Whoever was let in stays in.
        if not shut:
            entered |= {number for number, keys, gated in rules.line if gated and rules.first(number, keys)}
        rules.line = [(number, keys, gated and number not in entered) for number, keys, gated in rules.line]
        rules.admit(shut)
        if not shut:
            entered |= {number for number, keys, gated in rules.line if gated and rules.first(number, keys)}
            rules.line = [(number, keys, gated and number not in entered) for number, keys, gated in rules.line]
        running = sorted(ticket.number for ticket in live if ticket.state is TicketState.RUNNING)
        assert running == sorted(number for number, _, _ in rules.running)
    for ticket in reversed(live):
        lanes.leave(ticket)
    assert lanes.idle


# In the engine.


@attrs.frozen(eq=False)
class Behind:
    """A request whose gate is the given one."""

    door: Door


async def _prepare(model: laneway.Model, request: Behind) -> Prepared:
    return Prepared(keys=(request.door.name,), gate=request.door)


async def _handle(ctx: laneway.RequestContext, prepared: Prepared) -> str:
    await trio.sleep(1)
    return ctx.request_id


BEHIND = laneway.PluginSpec(
    name="behind",
    operations=(laneway.Operation(kind="behind", request_type=Behind, prepare=_prepare, handler=_handle),),
)


def waiting(b: Bench) -> list[str]:
    return [request.request_id for request in b.lane().waiting]


async def test_K2_a_request_waits_for_a_process_outside_and_lets_others_pass(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads_at_once(monkeypatch)
    async with bench(1, plugins=[BEHIND]) as b:
        world: dict[str, object] = {"file": OUTSIDE}
        door = Door(world)
        async with b.run("behind", Behind(door), request_id="turn") as turn:
            for _ in range(3):
                async with b.run("body", Body(lambda ctx: trio.sleep(10))) as plain:
                    await plain.result()
            assert waiting(b) == ["turn"]
            assert door.calls < 150, "it should knock ever more seldom"
            del world["file"]
            assert await turn.result() == "turn"
            assert trio.current_time() <= 30 + 0.25 + 1
        assert world == {}
        b.nothing_left()


async def test_K2_the_callers_scope_rules_the_wait_and_a_cancelled_waiter_leaves_nothing(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads_at_once(monkeypatch)
    async with bench(1, plugins=[BEHIND]) as b:
        world: dict[str, object] = {"file": OUTSIDE}
        before = trio.lowlevel.current_statistics().tasks_living
        with trio.move_on_after(5) as scope:
            async with b.run("behind", Behind(Door(world))) as turn:
                await turn.result()
        assert scope.cancelled_caught
        with pytest.raises(InferenceCancelledError):
            async with b.run("behind", Behind(Door(world)), request_id="turn") as turn:
                assert b.engine.cancel("turn") == 1
                await turn.result()
        with pytest.raises(RequestRejectedByPolicyError, match="queue_timeout"):
            async with b.run("behind", Behind(Door(world)), queue_timeout=3) as turn:
                await turn.result()
        with pytest.raises(RequestRejectedByPolicyError, match="overflow"):
            async with b.run("behind", Behind(Door(world)), overflow="reject"):
                pass
        await trio.testing.wait_all_tasks_blocked()
        assert world == {"file": OUTSIDE}
        assert trio.lowlevel.current_statistics().tasks_living == before
        assert trio.lowlevel.current_statistics().seconds_to_next_deadline == math.inf
        b.nothing_left()


class SlowDoor(Door):
    """A gate that another process holds at first, and whose disk then hangs until the test lets it go."""

    def __init__(self, world: dict[str, object], disk: Held) -> None:
        super().__init__(world)
        self.disk = disk

    def enter(self) -> bool:
        if self.calls:
            self.disk()
        return super().enter()


async def test_K2_a_gate_that_hangs_holds_up_its_own_request_only() -> None:
    with Held() as disk, trio.fail_after(HANG_SECONDS):
        async with bench(1, plugins=[BEHIND], seconds_per_step=0.0) as b:
            world: dict[str, object] = {"file": OUTSIDE}
            async with b.run("behind", Behind(SlowDoor(world, disk)), request_id="turn") as turn:
                await disk.begun.wait()
                for _ in range(3):
                    async with b.run("generate", Generate((1, 2), 4)) as plain:
                        assert len((await plain.result()).tokens) == 4
                assert waiting(b) == ["turn"]
                del world["file"]
                disk.release()
                assert await turn.result() == "turn"
            assert world == {}
            b.nothing_left()


@pytest.mark.parametrize("free", [True, False])
async def test_K2_C3_a_waiter_that_is_cancelled_while_its_gate_is_tried_keeps_nothing(free: bool) -> None:
    with Held() as disk, trio.fail_after(HANG_SECONDS):
        async with bench(1, plugins=[BEHIND], seconds_per_step=0.0) as b:
            world: dict[str, object] = {"file": OUTSIDE}
            async with b.run("behind", Behind(SlowDoor(world, disk)), request_id="turn") as turn:
                await disk.begun.wait()
                assert b.engine.cancel("turn") == 1
                assert waiting(b) == []
                if free:
                    del world["file"]
                with pytest.raises(InferenceCancelledError):
                    await turn.result()
            await b.engine.wait_ended("turn")  # which a disk that hangs does not hold up
            disk.release()
        assert world == ({} if free else {"file": OUTSIDE})
        assert b.model.lanes.idle


async def test_K2_a_gate_that_is_given_back_waits_for_no_other_gate_that_hangs() -> None:
    given_back = trio.Event()

    class Told(SlowDoor):
        def leave(self) -> None:
            super().leave()
            trio.from_thread.run_sync(given_back.set)

    world: dict[str, object] = {"file": OUTSIDE, "other": OUTSIDE}
    with one_thread_of_each_kind(), trio.fail_after(HANG_SECONDS), Held() as disk, Held() as other_disk:
        async with bench(2, plugins=[BEHIND], seconds_per_step=0.0) as b:
            async with b.run("behind", Behind(Told(world, disk)), request_id="turn") as turn:
                await disk.begun.wait()
                other = SlowDoor(world, other_disk)
                other.name = "other"
                async with b.run("behind", Behind(other), request_id="behind it"):
                    await trio.testing.wait_all_tasks_blocked()
                    assert not other_disk.begun.is_set()  # the one thread is taken
                    b.engine.cancel("turn")
                    with pytest.raises(InferenceCancelledError):
                        await turn.result()
                    del world["file"]
                    disk.release()
                    await other_disk.begun.wait()
                    await given_back.wait()
                    assert world == {"other": OUTSIDE}
                    other_disk.release()
        assert world == {"other": OUTSIDE}


async def test_a_gate_is_something_to_enter_and_leave() -> None:
    with pytest.raises(TypeError, match="enter and leave"):
        Prepared(gate="file")  # type: ignore[arg-type]
