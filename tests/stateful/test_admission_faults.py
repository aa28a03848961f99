"""Seeded faults: the machine that holds the core to the contract has to notice each of them.

Each fault is a core with one mistake that somebody could make.  A machine that never saw the states in which the
mistake shows would pass all of them, and would prove as little about the core itself.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis.stateful import run_state_machine_as_test

from laneway._admission import Admission, Refused, Ticket, TicketState, _Lane, normalise_cap
from laneway.testing._admission_machine import AdmissionMachine
from tests.stateful import finding

# Over 12 seeds, every fault was found within 24 examples on average and 112 at worst.
BUDGET = finding.budget(300, derandomize=True)


class GrantsTheNewest(Admission):
    """A4, A3: last in, first out."""

    __slots__ = ()

    def _admit(self, review: Iterable[_Lane]) -> list[Ticket]:
        started = []
        for place in review:
            for number in sorted(place.ready, reverse=True):
                ticket = place.line.get(number)
                if ticket is None or self._writer or self._writers or place.used + ticket.weight > place.cap:
                    continue
                place.ready.remove(number)
                del place.line[number]
                self._start(ticket, place)
                started.append(ticket)
        return sorted([*started, *super()._admit(review)], key=lambda ticket: ticket.number)


class LetsNewcomersBarge(Admission):
    """A3: who arrives takes whatever permits there are, past those that wait for more of them."""

    __slots__ = ("_arriving",)

    def arrive(self, kind: str, **how: Any) -> tuple[Ticket, list[Ticket]]:
        self._arriving = True
        try:
            return super().arrive(kind, **how)
        finally:
            self._arriving = False

    def _head(self, place: _Lane) -> Ticket | None:
        return None if getattr(self, "_arriving", False) else super()._head(place)


class LosesTheWakeUpOfACancelledHead(Admission):
    """A6, A12: what waited behind a head that leaves keeps waiting."""

    __slots__ = ("_withdrawing",)

    def withdraw(self, ticket: Ticket) -> list[Ticket]:
        self._withdrawing = True
        try:
            return super().withdraw(ticket)
        finally:
            self._withdrawing = False

    def _admit(self, review: Iterable[_Lane]) -> list[Ticket]:
        return [] if getattr(self, "_withdrawing", False) else super()._admit(review)


class ForgetsToWithdraw(Admission):
    """A4: whoever is cancelled in the queue stays in it."""

    __slots__ = ()

    def withdraw(self, ticket: Ticket) -> list[Ticket]:
        if ticket not in self.waiting(ticket.lane):
            return super().withdraw(ticket)
        return []


class TakesOneTooMany(Admission):
    """A4: 65 wait where 64 may."""

    __slots__ = ()

    def __init__(self, parallel: int, queue_limit: int) -> None:
        super().__init__(parallel, queue_limit + 1)


class LetsNewcomersOvertakeAWriter(Admission):
    """A6: an arrival looks at what runs, and not at the exclusive ticket that waits."""

    __slots__ = ()

    def _can_start_now(self, place: _Lane, exclusive: bool, weight: int, keys: tuple[Any, ...]) -> bool:
        writers, self._writers = self._writers, OrderedDict()
        try:
            return super()._can_start_now(place, exclusive, weight, keys)
        finally:
            self._writers = writers


class LetsOtherLanesOvertakeAWriter(Admission):
    """A6 with A14: an exclusive waiter holds back its own lane only."""

    __slots__ = ()

    def _admit(self, review: Iterable[_Lane]) -> list[Ticket]:
        started: list[Ticket] = []
        for place in [*review]:
            writers = self._writers
            self._writers = OrderedDict((n, t) for n, t in writers.items() if self._lanes[t.lane] is place)
            started += super()._admit([place])
            for number in [n for n, t in writers.items() if t.state is not TicketState.WAITING]:
                del writers[number]
            self._writers = writers
        return sorted([*started, *super()._admit(())], key=lambda ticket: ticket.number)


class PassesAHeavyHead(Admission):
    """A12: who fits starts, whoever stands in front."""

    __slots__ = ()

    def _admit(self, review: Iterable[_Lane]) -> list[Ticket]:
        started = super()._admit(review)
        barrier = next(iter(self._writers), math.inf)
        for place in review:
            for number in sorted(place.ready):
                ticket = place.line.get(number)
                if ticket and not self._writer and number < barrier and place.used + ticket.weight <= place.cap:
                    place.ready.remove(number)
                    place.ready.sort()
                    del place.line[number]
                    self._start(ticket, place)
                    started.append(ticket)
        return sorted(started, key=lambda ticket: ticket.number)


class GivesAKeyToTwo(Admission):
    """A13: claims are taken down and not looked at."""

    __slots__ = ()

    def _can_start_now(self, place: _Lane, exclusive: bool, weight: int, keys: tuple[Any, ...]) -> bool:
        return super()._can_start_now(place, exclusive, weight, ())


class StealsAKey(Admission):
    """A13: a key found later is taken from those who wait for it."""

    __slots__ = ()

    def try_claim(self, ticket: Ticket, key: Any) -> bool:
        first = self._first.get(key)
        if first is not None and first.state is TicketState.WAITING:
            return True
        return super().try_claim(ticket, key)


class ForgetsTheLaneOfAnHeir(Admission):
    """A13 with A14: a key that is given up makes somebody ready in a lane at which nobody looks."""

    __slots__ = ()

    def _forget(self, ticket: Ticket) -> list[_Lane]:
        super()._forget(ticket)
        return []


class RunsAWriterBesideOtherLanes(Admission):
    """A6 with A14: an exclusive arrival looks at its own lane only."""

    __slots__ = ()

    def _can_start_now(self, place: _Lane, exclusive: bool, weight: int, keys: tuple[Any, ...]) -> bool:
        if exclusive and not place.running and not self._writers and self._writer is None:
            return True
        return super()._can_start_now(place, exclusive, weight, keys)


class WakesOneLaneBehindAWriter(Admission):
    """A6 with A14: when an exclusive ticket is gone, only its own lane goes on."""

    __slots__ = ("_only",)

    def finish(self, ticket: Ticket) -> list[Ticket]:
        self._only = self._lanes.get(ticket.lane) if ticket.exclusive else None
        try:
            return super().finish(ticket)
        finally:
            self._only = None

    def _admit(self, review: Iterable[_Lane]) -> list[Ticket]:
        only: _Lane | None = getattr(self, "_only", None)
        return super()._admit(review if only is None else [only])


class QueuesWhoWouldNotWait(Admission):
    """A7: ``nowait`` is heeded where permits lack, and forgotten where a key does."""

    __slots__ = ()

    def arrive(self, kind: str, *, nowait: bool = False, **how: Any) -> tuple[Ticket, list[Ticket]]:
        lacks_a_key = any(key in self._first for key in how.get("keys", ()))
        return super().arrive(kind, nowait=nowait and not lacks_a_key, **how)


class KeepsACap(Admission):
    """A14: a lane that has been idle keeps the cap that a request brought."""

    __slots__ = ("_caps",)

    def _cap_found_idle(self, lane: str, cap: float | None) -> float:
        if not hasattr(self, "_caps"):
            self._caps: dict[str, float] = {}
        if cap is not None:
            self._caps[lane] = super()._cap_found_idle(lane, cap)
        return self._caps.get(lane, self.parallel)


class LiftsTheModelsOwnCap(Admission):
    """A14: a request raises its model's own cap above ``parallel``."""

    __slots__ = ()

    def _cap_found_idle(self, lane: str, cap: float | None) -> float:
        return self.parallel if cap is None else cap


class GivesBackOnePermit(Admission):
    """A12: a ticket of weight 3 gives back 1."""

    __slots__ = ()

    def finish(self, ticket: Ticket) -> list[Ticket]:
        if ticket in self.running(ticket.lane) and len(self.running(ticket.lane)) > 1:
            self._lanes[ticket.lane].used += ticket.weight - 1
        return super().finish(ticket)


class ForgetsUniqueWaiters(Admission):
    """A6: only what runs counts as live to a unique arrival."""

    __slots__ = ()

    def arrive(self, kind: str, *, unique: bool = False, **how: Any) -> tuple[Ticket, list[Ticket]]:
        running = any(ticket.kind == kind for lane in self.lanes for ticket in self.running(lane))
        ticket, started = super().arrive(kind, unique=unique and running, **how)
        ticket.unique = unique
        return ticket, started


class CountsReadyWaitersOnly(Admission):
    """A13 with A4: a waiter without its key takes no place in the queue."""

    __slots__ = ()

    def arrive(self, kind: str, *, lane: str = "", **how: Any) -> tuple[Ticket, list[Ticket]]:
        limit = self.queue_limit
        self.queue_limit = limit + sum(ticket._missing > 0 for ticket in self.waiting(lane))  # type: ignore[misc]
        try:
            return super().arrive(kind, lane=lane, **how)
        finally:
            self.queue_limit = limit  # type: ignore[misc]


class LeavesTheCapOfARefusedTicket(Admission):
    """A14, A11: a ticket that is refused in an idle lane leaves its cap there."""

    __slots__ = ()

    def arrive(self, kind: str, *, cap: float | None = None, lane: str = "", **how: Any) -> tuple[Ticket, list[Ticket]]:
        try:
            return super().arrive(kind, cap=cap, lane=lane, **how)
        except Refused:
            if lane not in self._lanes:
                self._lanes[lane] = _Lane(self._cap_found_idle(lane, None if cap is None else normalise_cap(cap)))
            raise


class DropsAWaiterWithTheVoid(Admission):
    """A3: clearing the numbers of those that have left loses the number of a waiter."""

    __slots__ = ()

    def _compact(self, place: _Lane) -> None:
        super()._compact(place)
        if place.ready:
            place.ready.pop()


class ForgetsTheOrderOfTheHeap(Admission):
    """A3: clearing the numbers of those that have left loses the order of the rest."""

    __slots__ = ()

    def _compact(self, place: _Lane) -> None:
        super()._compact(place)
        place.ready.sort(reverse=True)


FAULTS = [
    GrantsTheNewest,
    LetsNewcomersBarge,
    LosesTheWakeUpOfACancelledHead,
    ForgetsToWithdraw,
    TakesOneTooMany,
    LetsNewcomersOvertakeAWriter,
    LetsOtherLanesOvertakeAWriter,
    RunsAWriterBesideOtherLanes,
    WakesOneLaneBehindAWriter,
    ForgetsUniqueWaiters,
    PassesAHeavyHead,
    GivesBackOnePermit,
    GivesAKeyToTwo,
    StealsAKey,
    ForgetsTheLaneOfAnHeir,
    CountsReadyWaitersOnly,
    QueuesWhoWouldNotWait,
    KeepsACap,
    LiftsTheModelsOwnCap,
    LeavesTheCapOfARefusedTicket,
    DropsAWaiterWithTheVoid,
    ForgetsTheOrderOfTheHeap,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_machine_finds(fault: type[Admission]) -> None:
    class Machine(AdmissionMachine):
        @staticmethod
        def make_admission(parallel: int, queue_limit: int) -> Admission:
            return fault(parallel, queue_limit)

    with pytest.raises(AssertionError) as found:
        run_state_machine_as_test(Machine, settings=BUDGET)
    # A core that trips over itself would prove nothing about the machine.
    assert str(found.traceback[-1].path).endswith("_admission_machine.py")
