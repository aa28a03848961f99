"""Who may run next on a model: tickets, permits, the bounded queue, writers, weights and keys.

Rule 1: every transition of a ticket happens in this file.

Rule 2: this file does no I/O, knows no clock and never imports trio.  It is told what happened (somebody arrived, left
the queue, has finished) and answers with the tickets that it has started on account of it, oldest first.  Whoever told
it has to wake them; until it does, they hold their permits all the same.

One :class:`Admission` serves one model.  A *lane* is one queue with one cap.  Most models have a single lane, ``""``;
an operation that names a lane group of its own gets another (rule A14).  Ticket numbers, keys, writers and ``unique``
belong to the model and reach across its lanes; the queue, its limit, the cap and the permits in use belong to a lane.

Questions that the contract decides, and the answers
-----------------------------------------------------

*Who is next?*  The oldest ready ticket of the lane.  A ticket is ready if it is exclusive, or first in the claim queue
of each of its keys; without keys that is always.  (Or gated: see below.)  Once ready, it stays ready.

*What if the oldest ready ticket does not fit?*  It blocks its lane: nobody behind it starts, however light (A12).

*Whom may a ticket pass?*  Only those that are not ready (A13).  They keep their place, and count against the limit.

*When does an exclusive ticket start?*  When nothing of the model runs in any lane and no older ticket can.  It is
always ready: a key that it lacks is held by something that runs or claimed by somebody older, and it waits for those
anyway.  When it starts, it is therefore first for each of its keys.

*Who may start while an exclusive ticket waits?*  Ready ones with a lower number, in any lane.  Nobody with a higher
number, in any lane, even if the two lanes have nothing else in common: otherwise it could starve.

*What weighs a ticket?*  ``min(weight, cap)`` of its lane, fixed on arrival; with a cap of ``math.inf``, its weight.
So whatever is next fits into a lane where nothing runs.  All of it is granted at once.

*Which cap holds?*  That of the ticket that finds its lane idle (nothing runs, nothing waits), or ``parallel`` if that
ticket brings none.  It holds until the lane is idle again; caps that later tickets bring are checked and ignored.  In
lane ``""`` it is never above ``parallel``.  A ticket that is refused leaves no cap behind.

*When is an arrival refused?*  In this order.  ``busy``: it is unique and a live ticket of its kind, waiting or running,
is on the model, in whatever lane.  Then, only if it cannot start at once: ``overflow`` with ``nowait``, and
``queue_full`` if as many wait in its lane as may.  The limit never keeps out who can start.

*What does a refusal change?*  Nothing, ticket numbers included.

*Can an arrival start somebody else?*  No.  It adds claims and takes none away, so everybody who waited still has to.

*What about a key that is found later?*  A running ticket gets it if nobody holds it or waits for it, else not.  It
never waits for it, so no two tickets can wait for each other.

*What is a gated ticket?*  One that needs something outside the model as well, such as the lock of a file that another
process may hold.  Until :meth:`Admission.open_gate` it is not ready, as if it lacked one more key.  ``at_gate`` tells
when that is all it lacks: who opens gates need not hold what is outside for somebody whose turn it is not.  A ticket
that may inherit a key is told of beforehand (``heirs``), so that its gate can be open when the key comes, and nobody
younger starts in between.  An exclusive ticket has no gate.

*What if keys are named twice?*  They count once.  Claiming a key that the ticket holds already is granted.

*When does a ticket end?*  ``withdraw`` ends one that waits, ``finish`` one that runs.  The caller finishes a ticket
only when its teardown is over, so that all that is said here of running tickets holds for those in teardown as well.

*What stays behind when nothing is live?*  Nothing but the next ticket's number.

Cost
----
Arriving, leaving, finishing and claiming take O(log n) amortised time in the number n of waiters, and O(k) in the k
keys of the ticket itself.  Where an exclusive ticket leaves, each lane is looked at once.
"""

from __future__ import annotations

import enum
import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import TYPE_CHECKING, Final, final

import attrs

from laneway.validators import is_whole, shown

if TYPE_CHECKING:
    from laneway._errors import RejectionReason

MAX_PARALLEL: Final = 256
"""The most requests that one model may run at a time: rule A2."""

QUEUE_LIMIT: Final = 64
"""How many may wait in a lane unless the model says otherwise: rule A4."""

SPARE_VOID: Final = 16
"""Void numbers that a heap of ready waiters may hold beyond twice the line's length before it is gone through."""

LARGEST_QUEUE_LIMIT: Final = 2**63 - 1
"""More than any lane can hold, so it bounds nothing."""


class TicketState(enum.Enum):
    """Where a ticket is in its life.  It only ever moves down this list."""

    WAITING = "waiting"
    """In the line, holding no permit."""
    RUNNING = "running"
    """Holding its permit, its whole weight and its keys; teardown included."""
    GONE = "gone"
    """Withdrawn or finished.  Nothing here knows it any more."""


# Members of an enum are looked up through a descriptor, which is slow enough to show in every transition.
_WAITING: Final = TicketState.WAITING
_RUNNING: Final = TicketState.RUNNING
_GONE: Final = TicketState.GONE


@final
@attrs.define(eq=False)
class Ticket:
    """A place in a lane, made by :meth:`Admission.arrive`.  To be read only."""

    number: int
    """Its place in the order of arrival on the model.  Never used twice."""
    kind: str
    exclusive: bool
    unique: bool
    weight: int
    """The permits that it takes: what was asked for, but no more than the cap of its lane."""
    keys: tuple[Hashable, ...]
    """What it claimed on arrival, and after that what :meth:`Admission.try_claim` gave it."""
    lane: str
    state: TicketState = _WAITING
    gated: bool = False
    """Whether it also waits for its gate to be opened."""
    _missing: int = attrs.field(default=0, init=False, repr=False)
    """For how many of its keys somebody else is first, and one more if it is gated."""


@final
@attrs.define(slots=False, eq=False)
class Refused(Exception):  # noqa: N818 -- an answer, not an error
    """The policy lets this arrival neither start nor wait.  Nothing has changed.

    ``waiting`` is how many wait in its lane and ``limit`` how many may.  Contrast :class:`TicketStateError`: that is a
    mistake of the caller, this is an answer.
    """

    reason: RejectionReason
    waiting: int
    limit: int

    def __str__(self) -> str:
        return f"{self.reason} ({self.waiting} waiting, limit {self.limit})"


@final
@attrs.define(slots=False, eq=False)
class TicketStateError(RuntimeError):
    """Something was asked of a ticket that its state does not allow: a bug in the caller.  Nothing has changed.

    ``state`` is None for a ticket of another model.
    """

    action: str
    number: int
    kind: str
    state: TicketState | None
    advice: str

    def __str__(self) -> str:
        state = "not of this model" if self.state is None else self.state.value
        return f"cannot {self.action} ticket {self.number} ({self.kind}): it is {state}; {self.advice}"


def check_parallel(value: object) -> int:
    """Return ``value`` if it can be a model's ``parallel``: an int from 1 to 256 (rule A2).

    :raises ValueError: it is anything else, True and whole floats included.  The message names the range.
    """
    if not is_whole(value) or not 1 <= value <= MAX_PARALLEL:
        raise ValueError(f"parallel must be an int from 1 to {MAX_PARALLEL}, not {shown(value)}")
    return value


def check_queue_limit(value: object) -> int:
    """Return ``value`` if it can be how many wait in a lane: an int of at least 0 (rule A4).

    :raises ValueError: it is anything else.  The message names the range.
    """
    if not is_whole(value) or not 0 <= value <= LARGEST_QUEUE_LIMIT:
        raise ValueError(f"queue_limit must be an int from 0 to {LARGEST_QUEUE_LIMIT}, not {shown(value)}")
    return value


def normalise_cap(value: float) -> float:
    """Return the cap that a plugin or a request means by ``value`` (rule A2).

    An int of at least 1, the next lower one if ``value`` is not whole; or ``math.inf`` for no cap at all.

    :raises TypeError: it is no int and no float.
    :raises ValueError: it is NaN, which no rounding mends.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"a cap is an int or a float, not {shown(value)}; use math.inf for none")
    if isinstance(value, int):
        return max(1, value)  # which may be beyond every float
    if math.isnan(value):
        raise ValueError("a cap cannot be NaN; use math.inf for none")
    if math.isinf(value):
        return math.inf if value > 0 else 1
    return max(1, math.floor(value))


@attrs.define(eq=False)
class _Lane:
    """What one lane holds while it is not idle."""

    cap: float
    used: int = 0
    running: dict[int, Ticket] = attrs.field(factory=dict)
    """{number: ticket}, in the order in which they started."""
    # What is wanted is a queue that gives up any member at once.  A dict almost is one, but finding the first member
    # of a dict steps over all that were deleted in front of it, so that emptying it from the front is quadratic.
    line: OrderedDict[int, Ticket] = attrs.field(factory=OrderedDict)
    """{number: ticket} of all that wait, in the order of arrival."""
    # A second queue will not do here: a key may make ready a ticket that is older than those that already are.  Numbers
    # whose tickets have been withdrawn stay until they come up or until they are the greater part.
    ready: list[int] = attrs.field(factory=list)
    """Heap of the numbers of ready waiters that are not exclusive.  What is not in the line any more is void."""


class Admission:
    """The lanes of one model.  The module's docstring says what it decides.

    :param parallel: the model's own cap, checked by :func:`check_parallel`
    :param queue_limit: how many may wait in each lane, 0 for none
    """

    __slots__ = (
        "_behind",
        "_first",
        "_kinds",
        "_lanes",
        "_next_number",
        "_running",
        "_writer",
        "_writers",
        "parallel",
        "queue_limit",
    )

    def __init__(self, parallel: int, queue_limit: int = QUEUE_LIMIT) -> None:
        self.parallel: Final = check_parallel(parallel)
        self.queue_limit: Final = check_queue_limit(queue_limit)
        self._next_number = 1
        self._running = 0  # tickets, in all lanes
        self._writer: Ticket | None = None  # the exclusive ticket that runs
        self._writers: OrderedDict[int, Ticket] = OrderedDict()  # {number: ticket} of exclusive waiters in all lanes
        self._lanes: dict[str, _Lane] = {}  # {name: lane}, those that are not idle
        self._kinds: dict[str, int] = {}  # {kind: number of live tickets}
        self._first: dict[Hashable, Ticket] = {}  # {key: who holds it, or is the first to wait for it}
        self._behind: dict[Hashable, OrderedDict[int, Ticket]] = {}  # {key: {number: ticket} of those after the first}

    def __repr__(self) -> str:
        waiting = sum(len(place.line) for place in self._lanes.values())
        return f"<laneway.Admission parallel={self.parallel}, {self._running} running, {waiting} waiting>"

    # What may happen

    def arrive(
        self,
        kind: str,
        *,
        exclusive: bool = False,
        unique: bool = False,
        weight: int = 1,
        keys: Iterable[Hashable] = (),
        nowait: bool = False,
        cap: float | None = None,
        lane: str = "",
        gated: bool = False,
    ) -> tuple[Ticket, list[Ticket]]:
        """Take a ticket.

        :param exclusive: run alone on the model
        :param unique: refuse if a ticket of this kind is live on the model
        :param weight: permits wanted at once, at least 1
        :param keys: what it must hold alone to run
        :param nowait: refuse if it cannot start at once
        :param cap: the lane's cap, if the lane is idle; see :func:`normalise_cap`
        :param lane: the lane group, ``""`` for the model's own lane
        :param gated: not ready before :meth:`open_gate`
        :returns: the ticket, and what has started: the ticket itself, or nothing
        :raises Refused: it may neither start nor wait; nothing has changed
        :raises ValueError: the weight or the cap is no such thing; nothing has changed
        """
        if weight < 1:
            raise ValueError(f"the weight of a ticket is at least 1, not {weight}")
        if gated and exclusive:
            raise ValueError("an exclusive ticket has no gate: it is always ready")
        if cap is not None:
            cap = normalise_cap(cap)
        keys = tuple(dict.fromkeys(keys)) if keys else ()
        place = self._lanes.get(lane)
        idle = place is None
        if place is None:
            place = _Lane(self._cap_found_idle(lane, cap))
        if unique and kind in self._kinds:
            raise Refused("busy", len(place.line), self.queue_limit)
        if weight > place.cap:
            weight = int(place.cap)
        starts = not gated and self._can_start_now(place, exclusive, weight, keys)
        if not starts:
            if nowait:
                raise Refused("overflow", len(place.line), self.queue_limit)
            if len(place.line) >= self.queue_limit:
                raise Refused("queue_full", len(place.line), self.queue_limit)

        number = self._next_number
        self._next_number = number + 1
        ticket = Ticket(number, kind, exclusive, unique, weight, keys, lane)
        if gated:
            ticket.gated = True
            ticket._missing = 1
        if idle:
            self._lanes[lane] = place
        self._kinds[kind] = self._kinds.get(kind, 0) + 1
        if keys:
            self._claim(ticket)
        if starts:
            self._start(ticket, place)
            return ticket, [ticket]
        place.line[number] = ticket
        if exclusive:
            self._writers[number] = ticket
        elif not ticket._missing:
            heappush(place.ready, number)
        return ticket, []

    def withdraw(self, ticket: Ticket) -> list[Ticket]:
        """Take a waiting ticket out of the line, wherever it stands in it.

        :returns: what has started on account of it, oldest first
        :raises TicketStateError: it does not wait here; nothing has changed
        """
        place = self._lanes.get(ticket.lane)
        if place is None or place.line.get(ticket.number) is not ticket:
            raise self._misuse("withdraw", ticket, _WAITING)
        number = ticket.number
        del place.line[number]
        ticket.state = _GONE
        review: Iterable[_Lane]
        if ticket.exclusive:
            del self._writers[number]
            self._forget(ticket)
            review = self._lanes.values()
        else:
            review = (place, *self._forget(ticket))
            # A lane that fills and empties while its head stays put would otherwise pile up void numbers for ever.  At
            # least half of what is gone through here was withdrawn since the last time, so it costs each of them O(1).
            if len(place.ready) > 2 * len(place.line) + SPARE_VOID:
                self._compact(place)
        started = self._admit(review)
        self._close_if_idle(ticket.lane, place)
        return started

    def finish(self, ticket: Ticket) -> list[Ticket]:
        """Give a running ticket's weight and keys back, its teardown being over.

        :returns: what has started on account of it, oldest first
        :raises TicketStateError: it does not run here; nothing has changed
        """
        place = self._lanes.get(ticket.lane)
        if place is None or place.running.get(ticket.number) is not ticket:
            raise self._misuse("finish", ticket, _RUNNING)
        del place.running[ticket.number]
        place.used -= ticket.weight
        self._running -= 1
        ticket.state = _GONE
        review: Iterable[_Lane]
        if ticket.exclusive:
            self._writer = None
            self._forget(ticket)
            review = self._lanes.values()
        else:
            review = (place, *self._forget(ticket))
        started = self._admit(review)
        self._close_if_idle(ticket.lane, place)
        return started

    def try_claim(self, ticket: Ticket, key: Hashable) -> bool:
        """Let a running ticket hold one more key if nobody holds it or waits for it.

        :returns: whether it holds the key now; True as well if it did before
        :raises TicketStateError: it does not run here; nothing has changed
        """
        place = self._lanes.get(ticket.lane)
        if place is None or place.running.get(ticket.number) is not ticket:
            raise self._misuse("claim a key for", ticket, _RUNNING)
        first = self._first.setdefault(key, ticket)
        if first is not ticket:
            return False
        if key not in ticket.keys:
            ticket.keys += (key,)
        return True

    def open_gate(self, ticket: Ticket) -> list[Ticket]:
        """Let a gated ticket be ready as soon as it is first for its keys.

        :returns: what has started on account of it: the ticket itself, or nothing
        :raises TicketStateError: it does not wait here behind a gate; nothing has changed
        """
        place = self._lanes.get(ticket.lane)
        if place is None or place.line.get(ticket.number) is not ticket or not ticket.gated:
            raise self._misuse("open the gate of", ticket, _WAITING)
        ticket.gated = False
        ticket._missing -= 1
        if ticket._missing:
            return []
        heappush(place.ready, ticket.number)
        return self._admit((place,))

    # What can be asked

    def free(self, keys: Iterable[Hashable]) -> bool:
        """Whether nobody holds any of these keys, or waits for it."""
        return not any(key in self._first for key in keys)

    def starts_now(self, *, exclusive: bool, weight: int, keys: Iterable[Hashable], lane: str) -> bool:
        """Whether a ticket that is not gated would start on its arrival.  In an idle lane its cap does not matter."""
        place = self._lanes.get(lane)
        if place is None:
            place = _Lane(self.parallel)
        if weight > place.cap:
            weight = int(place.cap)
        return self._can_start_now(place, exclusive, weight, tuple(keys))

    def at_gate(self, ticket: Ticket) -> bool:
        """Whether a waiting ticket lacks nothing but that its gate is opened."""
        return ticket.state is _WAITING and ticket.gated and ticket._missing == 1

    def heirs(self, ticket: Ticket) -> list[Ticket]:
        """The gated tickets that will be at their gates once ``ticket`` is gone, oldest first."""
        gains: dict[Ticket, int] = {}
        for key in ticket.keys:
            behind = self._behind.get(key)
            if behind and self._first[key] is ticket:
                heir = next(iter(behind.values()))
                gains[heir] = gains.get(heir, 0) + 1
        found = [heir for heir, count in gains.items() if heir.gated and heir._missing == count + 1]
        return sorted(found, key=_BY_NUMBER)

    @property
    def idle(self) -> bool:
        """Whether nothing is live and nothing is left of what was."""
        return not (self._lanes or self._kinds or self._first or self._behind or self._writers or self._running)

    @property
    def writer_waits(self) -> bool:
        """Whether an exclusive ticket waits, in whatever lane."""
        return bool(self._writers)

    @property
    def lanes(self) -> tuple[str, ...]:
        """The names of the lanes that are not idle, sorted; the model's own, ``""``, comes first."""
        return tuple(sorted(self._lanes))

    def running(self, lane: str = "") -> tuple[Ticket, ...]:
        """What runs in a lane, oldest ticket first."""
        place = self._lanes.get(lane)
        return () if place is None else tuple(sorted(place.running.values(), key=_BY_NUMBER))

    def waiting(self, lane: str = "") -> tuple[Ticket, ...]:
        """What waits in a lane, oldest ticket first, ready or not."""
        place = self._lanes.get(lane)
        return () if place is None else tuple(place.line.values())

    def position(self, ticket: Ticket) -> int:
        """The place of a waiting ticket in its lane's line; 1 is the oldest.  Takes O(n).

        :raises TicketStateError: it does not wait here
        """
        place = self._lanes.get(ticket.lane)
        if place is None or place.line.get(ticket.number) is not ticket:
            raise self._misuse("tell the position of", ticket, _WAITING)
        return next(position for position, other in enumerate(place.line.values(), 1) if other is ticket)

    def cap(self, lane: str = "") -> float:
        """The cap that holds in a lane; in an idle one, that of a ticket that brings none."""
        place = self._lanes.get(lane)
        return self.parallel if place is None else place.cap

    def used(self, lane: str = "") -> int:
        """The weight of what runs in a lane."""
        place = self._lanes.get(lane)
        return 0 if place is None else place.used

    # How it is decided

    def _cap_found_idle(self, lane: str, cap: float | None) -> float:
        if cap is None:
            return self.parallel
        return cap if lane else min(cap, self.parallel)

    def _can_start_now(self, place: _Lane, exclusive: bool, weight: int, keys: tuple[Hashable, ...]) -> bool:
        """Whether a newcomer would be the next to start, and fit."""
        if exclusive:
            # Where nothing runs, nothing waits either: the oldest waiter of all would have started.
            return not self._running
        return (
            self._writer is None
            and not self._writers
            and place.used + weight <= place.cap
            and self._head(place) is None
            and not (keys and any(key in self._first for key in keys))
        )

    def _head(self, place: _Lane) -> Ticket | None:
        """The oldest ready waiter of a lane that is not exclusive, its number on top of the heap."""
        ready = place.ready
        while ready:
            ticket = place.line.get(ready[0])
            if ticket is not None:
                return ticket
            heappop(ready)
        return None

    def _compact(self, place: _Lane) -> None:
        """Remove the void numbers from the heap of a lane.  The numbers of those that wait stay."""
        place.ready = [number for number in place.ready if number in place.line]
        heapify(place.ready)

    def _admit(self, review: Iterable[_Lane]) -> list[Ticket]:
        """Start all that can start.  ``review`` holds at least each lane where something has changed.

        Lanes may be looked at in any order: what starts in one takes no key and no permit that another waits for.
        The exclusive ones come last, for they need everybody older to have had their chance.
        """
        started: list[Ticket] = []
        if self._writer is not None:
            return started
        # Nobody younger than the oldest exclusive waiter may start.  Exclusive ones need no place in the heaps for it.
        barrier = next(iter(self._writers)) if self._writers else math.inf
        for place in review:
            while (ticket := self._head(place)) is not None:
                if ticket.number > barrier or place.used + ticket.weight > place.cap:
                    break
                heappop(place.ready)
                del place.line[ticket.number]
                self._start(ticket, place)
                started.append(ticket)
        if self._writers and not self._running:
            number, ticket = self._writers.popitem(last=False)
            place = self._lanes[ticket.lane]
            del place.line[number]
            self._start(ticket, place)
            started.append(ticket)
        if len(started) > 1:
            started.sort(key=_BY_NUMBER)
        return started

    def _start(self, ticket: Ticket, place: _Lane) -> None:
        ticket.state = _RUNNING
        place.running[ticket.number] = ticket
        place.used += ticket.weight
        self._running += 1
        if ticket.exclusive:
            self._writer = ticket

    def _claim(self, ticket: Ticket) -> None:
        """Put a new ticket at the end of the claim queue of each of its keys."""
        for key in ticket.keys:
            if self._first.setdefault(key, ticket) is ticket:
                continue
            ticket._missing += 1
            behind = self._behind.get(key)
            if behind is None:
                behind = self._behind[key] = OrderedDict()
            behind[ticket.number] = ticket

    def _forget(self, ticket: Ticket) -> list[_Lane]:
        """Give up the claims of a ticket that is gone.  Return the lanes in which that makes somebody ready."""
        kind = ticket.kind
        left = self._kinds[kind] - 1
        if left:
            self._kinds[kind] = left
        else:
            del self._kinds[kind]
        review: list[_Lane] = []
        for key in ticket.keys:
            behind = self._behind.get(key)
            if self._first[key] is not ticket:
                assert behind is not None
                del behind[ticket.number]
            elif behind is None:
                del self._first[key]
                continue
            else:
                _, heir = behind.popitem(last=False)
                self._first[key] = heir
                heir._missing -= 1
                if not heir._missing and not heir.exclusive:
                    place = self._lanes[heir.lane]
                    heappush(place.ready, heir.number)
                    review.append(place)
            if not behind:
                del self._behind[key]
        return review

    def _close_if_idle(self, lane: str, place: _Lane) -> None:
        if not place.running and not place.line:
            del self._lanes[lane]

    def _misuse(self, action: str, ticket: Ticket, wanted: TicketState) -> TicketStateError:
        if ticket.state is wanted:
            advice = "it has to go to the Admission that made it"
            return TicketStateError(action, ticket.number, ticket.kind, None, advice)
        advice = {
            _WAITING: "withdraw() ends a ticket that waits",
            _RUNNING: "finish() ends a ticket that runs",
            _GONE: "a ticket ends only once",
        }[ticket.state]
        return TicketStateError(action, ticket.number, ticket.kind, ticket.state, advice)


_BY_NUMBER: Final = attrgetter("number")
