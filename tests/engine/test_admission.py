"""The pure core of admission, scripted by rule number.  Its state machine is in tests/stateful."""

from __future__ import annotations

import gc
import math
import sys
import tracemalloc
import weakref
from collections.abc import Callable, Sized
from types import FrameType
from typing import Any

import pytest

from laneway import _admission
from laneway._admission import (
    SPARE_VOID,
    Admission,
    Refused,
    Ticket,
    TicketState,
    TicketStateError,
    check_parallel,
    normalise_cap,
)


def arrive(core: Admission, kind: str = "completion", **how: Any) -> Ticket:
    """Arrive, and check that the answer and the ticket agree on whether it has started."""
    ticket, started = core.arrive(kind, **how)
    assert started == ([ticket] if ticket.state is TicketState.RUNNING else [])
    return ticket


def numbers(tickets: list[Ticket] | tuple[Ticket, ...]) -> list[int]:
    return [ticket.number for ticket in tickets]


def leftovers(core: Admission) -> dict[str, int]:
    """{attribute: size} of whatever the core still holds in a container."""
    held = {name: getattr(core, name) for name in Admission.__slots__}
    return {name: len(value) for name, value in held.items() if isinstance(value, Sized) and len(value)}


# A2


@pytest.mark.parametrize("parallel", [1, 4, 256])
def test_A2_parallel_is_an_int_from_1_to_256(parallel: int) -> None:
    assert check_parallel(parallel) == parallel
    core = Admission(parallel)
    for _ in range(parallel):
        arrive(core)
    assert core.used() == core.cap() == parallel
    assert arrive(core).state is TicketState.WAITING


@pytest.mark.parametrize("parallel", [0, -1, 257, 2.7, 2.0, math.nan, math.inf, True, False, "4", None])
def test_A2_any_other_parallel_is_refused_and_the_range_named(parallel: Any) -> None:
    with pytest.raises(ValueError, match=r"from 1 to 256, not " + repr(parallel).replace(".", r"\.")):
        check_parallel(parallel)
    with pytest.raises(ValueError, match="from 1 to 256"):
        Admission(parallel)


@pytest.mark.parametrize(
    ("given", "cap"),
    [
        (1, 1),
        (7, 7),
        (2.7, 2),
        (1e300, int(1e300)),
        (0, 1),
        (0.3, 1),
        (-5, 1),
        (-math.inf, 1),
        (math.inf, math.inf),
    ],
)
def test_A2_caps_are_normalised(given: float, cap: float) -> None:
    assert normalise_cap(given) == cap
    assert cap == math.inf or isinstance(normalise_cap(given), int)
    assert Admission(1).arrive("embed", cap=given, lane="embed")
    core = Admission(1)
    arrive(core, cap=given, lane="embed")
    assert core.cap("embed") == cap


@pytest.mark.parametrize(("given", "error"), [(math.nan, ValueError), ("4", TypeError), (True, TypeError)])
def test_A2_what_is_no_cap_is_refused_and_changes_nothing(given: Any, error: type[Exception]) -> None:
    core = Admission(1)
    with pytest.raises(error, match=r"math\.inf"):
        core.arrive("completion", cap=given)
    assert core.idle
    assert arrive(core).number == 1
    with pytest.raises(error):
        core.arrive("completion", cap=given)  # looked at even where it would be ignored


@pytest.mark.parametrize("limit", [-1, 1.5, True, "64", None])
def test_a_queue_limit_is_an_int_of_at_least_0(limit: Any) -> None:
    with pytest.raises(ValueError, match="queue_limit"):
        Admission(1, limit)


# A3


def test_A3_a_freed_permit_goes_to_the_oldest_whatever_its_kind() -> None:
    core = Admission(1)
    first = arrive(core)
    line = [arrive(core, kind) for kind in ["batch", "completion", "batch", "translate", "completion"]]
    assert core.waiting() == tuple(line)
    assert [core.position(ticket) for ticket in line] == [1, 2, 3, 4, 5]
    running = first
    for ticket in line:
        assert core.finish(running) == [ticket]
        running = ticket
    assert core.finish(running) == []


def test_A3_a_batch_takes_one_permit() -> None:
    core = Admission(2)
    arrive(core, "batch")
    assert arrive(core).state is TicketState.RUNNING
    assert arrive(core).state is TicketState.WAITING


def test_A3_a_newcomer_never_barges() -> None:
    core = Admission(2)
    single = arrive(core)
    heavy = arrive(core, weight=2)
    # One permit is unused, and the newcomer would need no more than that.
    assert core.used() == 1
    newcomer = arrive(core)
    assert newcomer.state is TicketState.WAITING
    assert core.finish(single) == [heavy]
    assert core.finish(heavy) == [newcomer]


# A4


def test_A4_64_wait_and_the_next_is_refused() -> None:
    core = Admission(4)
    for _ in range(4 + 64):
        arrive(core)
    with pytest.raises(Refused, match="queue_full") as refused:
        core.arrive("completion")
    assert (refused.value.reason, refused.value.waiting, refused.value.limit) == ("queue_full", 64, 64)
    assert len(core.waiting()) == 64


def test_A4_a_waiter_that_leaves_frees_its_place_at_once() -> None:
    core = Admission(1)
    arrive(core)
    line = [arrive(core) for _ in range(64)]
    for ticket in [line[0], line[31], line[-1]]:
        with pytest.raises(Refused):
            core.arrive("completion")
        core.withdraw(ticket)
        arrive(core)
    with pytest.raises(Refused):
        core.arrive("completion")
    core.finish(core.running()[0])
    arrive(core)
    with pytest.raises(Refused):
        core.arrive("completion")


def test_A4_the_limit_never_keeps_out_who_can_start() -> None:
    core = Admission(3, queue_limit=1)
    arrive(core, keys=["a"])
    not_ready = arrive(core, keys=["a"])
    with pytest.raises(Refused):
        core.arrive("completion", keys=["a"])
    assert arrive(core).state is TicketState.RUNNING
    assert core.waiting() == (not_ready,)


def test_A4_a_limit_of_0_lets_nobody_wait() -> None:
    core = Admission(1, queue_limit=0)
    first = arrive(core)
    with pytest.raises(Refused, match=r"queue_full \(0 waiting, limit 0\)"):
        core.arrive("completion")
    core.finish(first)
    arrive(core)


def test_A4_a_refusal_changes_nothing() -> None:
    core = Admission(1, queue_limit=1)
    running, waiting = arrive(core, "finetune", keys=["a"]), arrive(core, keys=["b"])
    for kind, unique, nowait in [("finetune", True, False), ("batch", False, True), ("batch", False, False)]:
        with pytest.raises(Refused):
            core.arrive(kind, unique=unique, nowait=nowait, exclusive=True, keys=["c"], cap=1)
    with pytest.raises(Refused):
        core.arrive("batch", nowait=True, keys=["a"], cap=3, lane="side")
    assert (core.running(), core.waiting(), core.lanes) == ((running,), (waiting,), ("",))
    assert core.cap("side") == 1
    assert core.try_claim(running, "c")
    assert arrive(core, "batch", unique=True, lane="side").number == 3


# A6


def test_A6_an_exclusive_ticket_runs_alone() -> None:
    core = Admission(4)
    readers = [arrive(core) for _ in range(2)]
    writer = arrive(core, "finetune", exclusive=True)
    assert core.finish(readers[0]) == []
    assert core.finish(readers[1]) == [writer]
    late = [arrive(core) for _ in range(2)]
    assert core.running() == (writer,)
    assert core.finish(writer) == late


def test_A6_an_exclusive_ticket_starts_at_once_on_an_idle_model_only() -> None:
    core = Admission(4)
    reader = arrive(core)
    with pytest.raises(Refused, match="overflow"):
        core.arrive("finetune", exclusive=True, nowait=True)
    core.finish(reader)
    assert arrive(core, "finetune", exclusive=True, nowait=True).state is TicketState.RUNNING


def test_A6_nobody_overtakes_an_exclusive_waiter() -> None:
    core = Admission(2)
    reader = arrive(core)
    writer = arrive(core, "finetune", exclusive=True)
    behind = arrive(core)
    assert (core.used(), behind.state) == (1, TicketState.WAITING)
    with pytest.raises(Refused, match="overflow"):
        core.arrive("completion", nowait=True)
    assert core.finish(reader) == [writer]


def test_A6_those_behind_an_exclusive_waiter_go_at_once_when_it_leaves() -> None:
    core = Admission(3)
    arrive(core)
    writer = arrive(core, "finetune", exclusive=True)
    behind = [arrive(core) for _ in range(3)]
    assert core.withdraw(writer) == behind[:2]


def test_A6_of_two_exclusive_waiters_the_second_still_holds_back_those_behind_it() -> None:
    core = Admission(3)
    reader = arrive(core)
    first = arrive(core, "finetune", exclusive=True)
    between = arrive(core)
    second = arrive(core, "merge", exclusive=True)
    behind = arrive(core)
    assert core.withdraw(first) == [between]
    assert core.finish(reader) == []
    assert core.finish(between) == [second]
    assert core.finish(second) == [behind]


def test_A6_exclusive_tickets_follow_one_another() -> None:
    core = Admission(3)
    first, second = (arrive(core, "finetune", exclusive=True) for _ in range(2))
    reader = arrive(core)
    assert core.finish(first) == [second]
    assert core.finish(second) == [reader]


def test_A6_older_ready_tickets_pass_an_exclusive_one() -> None:
    """The exception that A13 makes: an older ticket that was not ready when the exclusive one came goes first."""
    core = Admission(2)
    holder = arrive(core, keys=["a"])
    older = arrive(core, keys=["a"])
    writer = arrive(core, "finetune", exclusive=True)
    assert core.finish(holder) == [older]
    assert core.finish(older) == [writer]


def test_A6_an_exclusive_ticket_is_ready_without_its_keys() -> None:
    """It blocks those behind it although somebody who runs holds its key."""
    core = Admission(3)
    holder, other = arrive(core, keys=["a"]), arrive(core)
    writer = arrive(core, "finetune", exclusive=True, keys=["a"])
    behind = arrive(core)
    assert core.finish(other) == []
    assert core.finish(holder) == [writer]
    assert core.finish(writer) == [behind]


@pytest.mark.parametrize("live", ["waits", "runs"])
def test_A6_unique_is_refused_while_one_of_its_kind_is_live(live: str) -> None:
    core = Admission(2)
    blocker = arrive(core) if live == "waits" else None
    tune = arrive(core, "finetune", exclusive=True, unique=True)
    assert tune.state is (TicketState.WAITING if live == "waits" else TicketState.RUNNING)
    for lane in ["", "side"]:
        with pytest.raises(Refused, match="busy"):
            core.arrive("finetune", exclusive=True, unique=True, nowait=True, lane=lane)
    arrive(core, "merge", exclusive=True, unique=True)
    if blocker is not None:
        core.finish(blocker)
    core.finish(tune)
    arrive(core, "finetune", exclusive=True, unique=True)


# A7


def test_A7_nowait_is_refused_by_cap_queue_key_and_writer() -> None:
    core = Admission(2)
    ticket = arrive(core, keys=["a"], nowait=True)
    with pytest.raises(Refused) as refused:
        core.arrive("completion", keys=["a"], nowait=True)
    assert (refused.value.reason, refused.value.waiting) == ("overflow", 0)
    other = arrive(core, nowait=True)
    with pytest.raises(Refused, match="overflow"):
        core.arrive("completion", nowait=True)
    heavy = arrive(core, weight=2)
    core.finish(other)
    with pytest.raises(Refused, match=r"overflow \(1 waiting"):
        core.arrive("completion", nowait=True)
    core.withdraw(heavy)
    arrive(core, "finetune", exclusive=True)
    with pytest.raises(Refused, match="overflow"):
        core.arrive("completion", nowait=True)
    assert core.running() == (ticket,)


def test_A7_a_full_queue_is_an_overflow_too() -> None:
    core = Admission(1, queue_limit=0)
    arrive(core)
    with pytest.raises(Refused, match="overflow"):
        core.arrive("completion", nowait=True)


# A11


def test_A11_an_idle_lane_leaves_nothing_behind() -> None:
    core = Admission(2)
    assert core.idle
    assert leftovers(core) == {}
    tickets = [
        arrive(core, weight=3, keys=["a", "b"], cap=1),
        arrive(core, keys=["b", "c"], lane="side", cap=math.inf),
        arrive(core, "finetune", exclusive=True, unique=True, keys=["c"]),
        arrive(core, "embed", keys=["c"], lane="side"),
        arrive(core, "batch"),
    ]
    core.try_claim(tickets[0], "z")
    assert not core.idle
    assert len(leftovers(core)) == 5
    for ticket in reversed(tickets):
        if ticket.state is TicketState.RUNNING:
            core.finish(ticket)
        else:
            core.withdraw(ticket)
    assert core.idle
    assert leftovers(core) == {}
    assert (core.lanes, core.running(), core.waiting(), core.used(), core.cap()) == ((), (), (), 0, 2)


def test_A11_a_ticket_that_is_gone_is_not_held() -> None:
    core = Admission(1)
    arrive(core, keys=["a"])
    gone = weakref.ref(arrive(core, keys=["a", "b"]))
    exclusive = weakref.ref(arrive(core, exclusive=True))
    core.withdraw(core.waiting()[0])
    core.withdraw(core.waiting()[0])
    gc.collect()
    assert (gone(), exclusive()) == (None, None)


def test_A3_what_is_forgotten_of_those_who_left_is_nothing_of_those_who_wait() -> None:
    """Those that have left are cleared out of the heap of ready tickets when they are the greater part of it."""
    core = Admission(1)
    running = arrive(core)
    staying = []
    for _ in range(5):
        staying.append(arrive(core))
        gone = [arrive(core) for _ in range(3 * SPARE_VOID)]
        staying.append(arrive(core))
        gone += [arrive(core, exclusive=True) for _ in range(2)]
        for ticket in gone[1::2] + gone[::2]:
            assert core.withdraw(ticket) == []
    assert len(core._lanes[""].ready) <= 2 * len(staying) + SPARE_VOID  # it was cleared, that is
    assert core.waiting() == tuple(staying)
    for ticket in staying:
        assert core.finish(running) == [ticket]
        running = ticket
    assert core.finish(running) == []
    assert core.idle


@pytest.mark.parametrize("keys", [[], ["a"]], ids=["no keys", "one key"])
def test_A11_a_queue_that_never_empties_does_not_grow(keys: list[str]) -> None:
    """What is withdrawn leaves marks in the heap of ready tickets; they must not outlive the queue's size."""
    core = Admission(1)
    arrive(core)
    head = arrive(core, weight=1)

    def churn(times: int) -> None:
        for _ in range(times):
            line = [arrive(core, keys=keys) for _ in range(63)]
            with pytest.raises(Refused):
                core.arrive("completion")
            for ticket in line[::2] + line[1::2]:
                core.withdraw(ticket)

    churn(10)
    tracemalloc.start()
    try:
        churn(10)
        before, _ = tracemalloc.get_traced_memory()
        churn(150)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert core.waiting() == (head,)
    # Kept for good, the numbers of those withdrawn would take 200 kB.
    assert after - before < 10_000


# A12


def test_A12_a_batch_weighs_what_it_asks_for_but_no_more_than_the_cap() -> None:
    core = Admission(4)
    batch = arrive(core, weight=3)
    assert (batch.weight, core.used()) == (3, 3)
    assert arrive(core).state is TicketState.RUNNING
    assert arrive(core).state is TicketState.WAITING
    core = Admission(4)
    batch = arrive(core, weight=100)
    assert (batch.weight, core.used(), batch.state) == (4, 4, TicketState.RUNNING)


def test_A12_nobody_passes_a_heavy_head() -> None:
    core = Admission(4)
    singles = [arrive(core) for _ in range(4)]
    heavy = arrive(core, weight=3)
    light = arrive(core)
    assert core.finish(singles[0]) == []
    assert core.finish(singles[1]) == []
    assert core.finish(singles[2]) == [heavy]
    assert core.finish(singles[3]) == [light]


def test_A12_a_heavy_head_that_leaves_lets_the_next_ones_go() -> None:
    core = Admission(4)
    arrive(core)
    heavy = arrive(core, weight=4)
    light = [arrive(core) for _ in range(4)]
    assert core.withdraw(heavy) == light[:3]


def test_A12_all_of_a_weight_is_given_back_at_once() -> None:
    core = Admission(4)
    batch = arrive(core, weight=4)
    line = [arrive(core, weight=weight) for weight in [2, 1, 1, 1]]
    assert core.finish(batch) == line[:3]


def test_A12_a_lane_where_nothing_runs_starts_its_head_whatever_its_weight() -> None:
    core = Admission(2)
    arrive(core)
    assert arrive(core, weight=50, cap=1, lane="side").weight == 1
    assert arrive(core, weight=50, cap=math.inf, lane="other").weight == 50
    assert arrive(core, weight=50, lane="other").state is TicketState.RUNNING
    assert core.used("other") == 100


@pytest.mark.parametrize("weight", [0, -1])
def test_A12_a_weight_is_at_least_1(weight: int) -> None:
    core = Admission(2)
    with pytest.raises(ValueError, match="at least 1"):
        core.arrive("batch", weight=weight)
    assert core.idle


# A13


def test_A13_a_waiter_without_its_key_keeps_its_place_and_may_be_passed() -> None:
    core = Admission(2)
    holder = arrive(core, keys=["a"])
    same_key = arrive(core, keys=["a"])
    assert same_key.state is TicketState.WAITING
    single = arrive(core)
    assert single.state is TicketState.RUNNING
    behind = arrive(core)
    assert core.waiting() == (same_key, behind)
    assert core.finish(holder) == [same_key]
    assert core.finish(single) == [behind]


def test_A13_a_ticket_that_becomes_ready_goes_before_younger_ones() -> None:
    core = Admission(1)
    first = arrive(core, keys=["a"])
    second = arrive(core, keys=["a"])
    third = arrive(core)
    assert core.finish(first) == [second]
    assert core.finish(second) == [third]


def test_A13_keys_are_claimed_together_and_in_ticket_order() -> None:
    core = Admission(4)
    a, b = arrive(core, keys=["a"]), arrive(core, keys=["b"])
    both = arrive(core, keys=["b", "a"])
    only_b = arrive(core, keys=["b"])
    assert core.finish(b) == []  # `both` is first for b now, and waits for a
    assert core.finish(a) == [both]
    assert core.finish(both) == [only_b]


def test_A13_a_waiter_that_leaves_gives_up_its_claims() -> None:
    core = Admission(4)
    a = arrive(core, keys=["a"])
    both = arrive(core, keys=["a", "b"])
    only_b = arrive(core, keys=["b"])
    assert only_b.state is TicketState.WAITING
    assert core.withdraw(both) == [only_b]
    again = arrive(core, keys=["a"])
    assert core.finish(a) == [again]


def test_A13_a_key_reaches_across_the_lanes_of_a_model_and_no_further() -> None:
    core = Admission(1)
    holder = arrive(core, keys=["a"])
    side = arrive(core, keys=["a"], lane="side")
    assert core.waiting("side") == (side,)
    assert core.finish(holder) == [side]
    assert arrive(Admission(1), keys=["a"]).state is TicketState.RUNNING


def test_A13_a_key_that_is_named_twice_counts_once() -> None:
    core = Admission(2)
    first = arrive(core, keys=["a", "a"])
    second = arrive(core, keys=["a", "a"])
    assert (first.keys, second.keys) == (("a",), ("a",))
    assert core.finish(first) == [second]
    core.finish(second)
    assert core.idle


def test_A13_a_key_found_later_is_only_tried() -> None:
    core = Admission(3)
    first, second = arrive(core, keys=["a"]), arrive(core)
    assert not core.try_claim(second, "a")
    assert core.try_claim(second, "b")
    assert core.try_claim(second, "b")
    assert second.keys == ("b",)
    assert core.try_claim(first, "a")
    waiter = arrive(core, keys=["b"])
    assert core.finish(second) == [waiter]
    # Somebody who waits for it, though nobody holds it, is enough.
    heavy = arrive(core, weight=3, keys=["c"])
    assert heavy.state is TicketState.WAITING
    assert not core.try_claim(first, "c")


def test_A13_an_unhashable_key_changes_nothing() -> None:
    core = Admission(1)
    with pytest.raises(TypeError, match="unhashable"):
        core.arrive("completion", keys=[[]])  # type: ignore[list-item]
    assert core.idle


# A14


def test_A14_each_lane_has_its_own_queue_and_cap() -> None:
    core = Admission(1, queue_limit=1)
    for lane in ["", "embed"]:
        arrive(core, lane=lane)
        arrive(core, lane=lane)
        with pytest.raises(Refused, match=r"queue_full \(1 waiting"):
            core.arrive("completion", lane=lane)
    assert core.lanes == ("", "embed")


def test_A14_the_cap_of_the_ticket_that_finds_the_lane_idle_holds_until_it_is_idle() -> None:
    core = Admission(4)
    first = arrive(core, cap=2.9)
    assert core.cap() == 2
    second = arrive(core, cap=4)
    assert core.cap() == 2
    third = arrive(core)
    assert third.state is TicketState.WAITING
    core.finish(first)
    core.finish(second)
    assert core.cap() == 2  # the third one runs
    core.finish(third)
    assert core.cap() == 4


@pytest.mark.parametrize("cap", [5, 1000.5, math.inf])
def test_A14_the_models_own_lane_never_exceeds_parallel(cap: float) -> None:
    core = Admission(3)
    arrive(core, cap=cap)
    assert core.cap() == 3
    arrive(core, cap=cap, lane="embed")
    assert core.cap("embed") == normalise_cap(cap)


def test_A14_an_ungated_lane_never_waits_for_permits() -> None:
    core = Admission(1, queue_limit=0)
    for _ in range(300):
        arrive(core, cap=math.inf, lane="embed")
    assert core.used("embed") == 300


def test_A14_a_ticket_can_wait_in_a_lane_where_nothing_runs() -> None:
    """A writer or a key elsewhere holds it; the lane is not idle then, and its cap holds."""
    core = Admission(2)
    writer = arrive(core, "finetune", exclusive=True)
    waiter = arrive(core, cap=1, lane="side")
    assert (core.waiting("side"), core.cap("side")) == ((waiter,), 1)
    second = arrive(core, cap=7, lane="side")
    assert core.finish(writer) == [waiter]
    assert core.finish(waiter) == [second]


def test_A14_an_exclusive_ticket_waits_for_every_lane_and_holds_back_every_lane() -> None:
    core = Admission(2)
    own, side = arrive(core), arrive(core, lane="side")
    writer = arrive(core, "finetune", exclusive=True)
    behind = [arrive(core, lane="side"), arrive(core), arrive(core, lane="other")]
    assert [ticket.state for ticket in behind] == [TicketState.WAITING] * 3
    assert core.finish(own) == []
    assert core.finish(side) == [writer]
    with pytest.raises(Refused, match="overflow"):
        core.arrive("embed", nowait=True, lane="fourth")
    assert core.finish(writer) == behind


def test_A14_an_exclusive_waiter_that_leaves_lets_every_lane_go_on() -> None:
    core = Admission(2)
    arrive(core)
    writer = arrive(core, "finetune", exclusive=True, lane="side")
    behind = [arrive(core, lane="side"), arrive(core), arrive(core, lane="other")]
    assert core.withdraw(writer) == behind


def test_A14_older_tickets_of_other_lanes_pass_an_exclusive_waiter() -> None:
    core = Admission(1)
    own, side = arrive(core), arrive(core, cap=1, lane="side")
    older = arrive(core, lane="side")
    writer = arrive(core, "finetune", exclusive=True)
    younger = arrive(core, lane="side")
    assert core.finish(side) == [older]
    assert core.finish(own) == []
    assert core.finish(older) == [writer]
    assert core.finish(writer) == [younger]


# What is not allowed


def test_tickets_are_numbered_in_the_order_of_arrival_on_the_model() -> None:
    core = Admission(1)
    tickets = [arrive(core, lane=lane) for lane in ["", "side", "", "other"]]
    assert numbers(tickets) == [1, 2, 3, 4]
    assert core.running() + core.running("side") + core.running("other") == (tickets[0], tickets[1], tickets[3])


def test_running_tickets_are_listed_in_ticket_order_even_if_they_started_in_another() -> None:
    core = Admission(3)
    holder = arrive(core, keys=["a"])
    passed, passing = arrive(core, keys=["a"]), arrive(core)
    core.finish(holder)
    assert core.running() == (passed, passing)


Call = Callable[[Admission, Ticket], object]


def withdraw(core: Admission, ticket: Ticket) -> object:
    return core.withdraw(ticket)


def finish(core: Admission, ticket: Ticket) -> object:
    return core.finish(ticket)


def claim(core: Admission, ticket: Ticket) -> object:
    return core.try_claim(ticket, "z")


def position(core: Admission, ticket: Ticket) -> object:
    return core.position(ticket)


@pytest.mark.parametrize(
    ("call", "state", "message"),
    [
        (withdraw, "running", r"cannot withdraw ticket \d+ \(completion\): it is running; finish\(\) ends"),
        (position, "running", r"cannot tell the position of ticket \d+ .*: it is running"),
        (finish, "waiting", r"cannot finish ticket \d+ .*: it is waiting; withdraw\(\) ends"),
        (claim, "waiting", r"cannot claim a key for ticket \d+ .*: it is waiting"),
        (withdraw, "finished", "it is gone; a ticket ends only once"),
        (finish, "finished", "it is gone"),
        (claim, "finished", "it is gone"),
        (position, "finished", "it is gone"),
        (withdraw, "withdrawn", "it is gone"),
        (finish, "withdrawn", "it is gone"),
        (finish, "running elsewhere", "it is not of this model; it has to go to the Admission that made it"),
        (claim, "running elsewhere", "it is not of this model"),
        (withdraw, "waiting elsewhere", "it is not of this model"),
        (position, "waiting elsewhere", "it is not of this model"),
        (finish, "waiting elsewhere", "it is waiting"),
    ],
)
def test_an_illegal_call_is_an_error_and_changes_nothing(call: Call, state: str, message: str) -> None:
    def fill(core: Admission) -> dict[str, Ticket]:
        finished, running, waiting, withdrawn = (arrive(core, keys=[name]) for name in "abcd")
        core.finish(finished)
        core.withdraw(withdrawn)
        return {"finished": finished, "running": running, "waiting": waiting, "withdrawn": withdrawn}

    core, elsewhere = Admission(1), Admission(1)
    tickets = fill(core)
    tickets |= {f"{name} elsewhere": ticket for name, ticket in fill(elsewhere).items()}
    with pytest.raises(TicketStateError, match=message):
        call(core, tickets[state])
    assert core.running() == (tickets["running"],)
    assert core.waiting() == (tickets["waiting"],)
    assert tickets["running"].keys == ("b",)
    assert [tickets[name].state.value for name in ["finished", "running", "waiting", "withdrawn"]] == [
        "gone",
        "running",
        "waiting",
        "gone",
    ]
    assert core.finish(tickets["running"]) == [tickets["waiting"]]
    core.finish(tickets["waiting"])
    assert leftovers(core) == {}


def test_repr_counts() -> None:
    core = Admission(1)
    for lane in ["", "", "", "side"]:
        arrive(core, lane=lane)
    assert repr(core) == "<laneway.Admission parallel=1, 2 running, 2 waiting>"


# How long it takes


def lines_executed(call: Callable[[], object]) -> int:
    """How many lines of the core run in a call.  Unlike a time, the same on every machine."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename != _admission.__file__:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("keys", [[], ["a"]], ids=["no keys", "one key"])
def test_no_operation_goes_through_the_queue(keys: list[str]) -> None:
    def cost(waiters: int) -> list[int]:
        core = Admission(2, queue_limit=waiters + 1)
        arrive(core, keys=["a"])
        arrive(core)
        line = [arrive(core, keys=keys) for _ in range(waiters)]
        return [
            lines_executed(lambda: core.arrive("completion", keys=keys)),
            lines_executed(lambda: core.withdraw(line[waiters // 2])),
            lines_executed(lambda: core.withdraw(line[0])),
            lines_executed(lambda: core.finish(core.running()[0])),
            lines_executed(lambda: core.try_claim(core.running()[0], "b")),
        ]

    assert cost(20) == cost(2_000)
