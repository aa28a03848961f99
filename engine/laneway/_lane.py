"""The lanes of a model for Trio tasks: parking, waking, and leaving in every way that a task can leave.

No policy lives here: :mod:`laneway._admission` decides who runs, this module puts tasks to sleep and wakes them.  The
two are kept in step by doing every transition of the core and the wake-ups that follow from it in one synchronous
function, with KeyboardInterrupt held off, so that no task and no signal ever sees one without the other.

A ticket and the task that waits on it are separate things.  ``arrive`` is called in the caller's task, so that tickets
are numbered in the order of the calls; the request's own task comes to ``wait_turn`` later, in whatever order Trio
runs new tasks.  So a ticket may well be granted before its task waits.  Nothing is lost by it: the ticket's state
remembers.

Who takes a ticket owes a ``leave``, whatever happens, once everything that ran under the permit is torn down::

    ticket = lanes.arrive("completion")
    try:
        await lanes.wait_turn(ticket)
        ...
    finally:
        ...  # teardown, shielded
        lanes.leave(ticket)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from laneway._admission import TicketState, TicketStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from laneway._admission import Admission, Ticket
    from laneway._declarations import Gate


@attrs.frozen(kw_only=True)
class TicketStatistics:
    """One live ticket.  ``position`` counts from 1, the oldest waiter of its lane; None means that it runs."""

    number: int
    kind: str
    exclusive: bool
    weight: int
    keys: tuple[Hashable, ...]
    position: int | None


@attrs.frozen(kw_only=True)
class LaneStatistics:
    """One lane at one moment.

    ``name`` is the lane group, ``""`` for the model's own lane; ``cap`` may be ``math.inf``; ``used`` is the weight of
    what runs; ``queue_limit`` is how many may wait.  Both tuples hold the oldest ticket first.
    """

    name: str
    cap: float
    used: int
    queue_limit: int
    running: tuple[TicketStatistics, ...]
    waiting: tuple[TicketStatistics, ...]


@final
class Lanes:
    """The lanes of one model, as tasks use them.

    :param admission: decides who runs; from now on nobody else may tell it that something happened
    :param model: the model's name, for :func:`repr`
    :param on_start: told of every waiter that gets its permit, in the order of the grants and inside the call that
        grants it, abort functions included: it must not raise.  Not told of a ticket that runs from its arrival on,
        for who arrived has it in hand; nor of one that was left again while those before it were told of.
    """

    def __init__(self, admission: Admission, model: str = "", on_start: Callable[[Ticket], None] | None = None) -> None:
        self._admission = admission
        self._model = model
        self._on_start = on_start
        self._parked: dict[Ticket, trio.lowlevel.Task] = {}  # {waiting ticket: the task in its wait_turn}
        self._gates: dict[Ticket, Gate] = {}  # {live ticket: what it needs, or holds, from outside}

    def __repr__(self) -> str:
        core = self._admission
        lanes = []
        for name in _with_own_lane(core.lanes):
            running, waiting = len(core.running(name)), len(core.waiting(name))
            lanes.append(f"{name and f'{name!r} '}{running}/{core.cap(name)} running, {waiting} waiting")
        return f"<laneway.Lane {self._model!r} {'; '.join(lanes)}>"

    @property
    def idle(self) -> bool:
        """Whether nothing is live and nothing is left of what was (rule A11)."""
        return self._admission.idle and not self._parked and not self._gates

    @property
    def queue_limit(self) -> int:
        """How many may wait in each lane."""
        return self._admission.queue_limit

    @property
    def writer_waits(self) -> bool:
        """Whether an exclusive ticket waits, in whatever lane: until it has run, no newcomer starts."""
        return self._admission.writer_waits

    def cap(self, lane: str = "") -> float:
        """How many may run at a time in a lane.  For an idle lane: the cap for a request that brings none."""
        return self._admission.cap(lane)

    def starts_now(self, *, exclusive: bool, weight: int, keys: Iterable[Hashable], lane: str) -> bool:
        """Whether a ticket without a gate would run from its arrival on."""
        return self._admission.starts_now(exclusive=exclusive, weight=weight, keys=keys, lane=lane)

    def waiting(self, lane: str = "") -> int:
        """How many wait in a lane."""
        return len(self._admission.waiting(lane))

    @enable_ki_protection
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
        gate: Gate | None = None,
    ) -> Ticket:
        """Take a ticket now; see :meth:`laneway._admission.Admission.arrive` for what the parameters mean.

        :param gate: what it needs from outside as well; entered when it is first for its keys, left with the ticket.
            Where that fails, because somebody outside is in there, :meth:`knock` tries again
        :returns: the ticket, which may be running already; the caller owes it a :meth:`leave`
        :raises laneway._admission.Refused: it may neither start nor wait; nothing has changed and nothing is owed
        """
        keys = tuple(keys)
        inside = gate is not None and self._admission.free(keys) and gate.enter()
        try:
            ticket, started = self._admission.arrive(
                kind,
                exclusive=exclusive,
                unique=unique,
                weight=weight,
                keys=keys,
                nowait=nowait,
                cap=cap,
                lane=lane,
                gated=gate is not None and not inside,
            )
        except BaseException:
            if gate is not None and inside:
                gate.leave()
            raise
        assert all(other is ticket for other in started), "an arrival starts nobody else"
        if gate is not None:
            self._gates[ticket] = gate
        return ticket

    @enable_ki_protection
    def knock(self, ticket: Ticket) -> bool:
        """Try the gate of a ticket again if it is its turn; whether it still has to be opened.

        Nobody tells when a process outside lets go of something, so somebody has to come and look.
        """
        if ticket.state is not TicketState.WAITING or not ticket.gated:
            return False
        if not self._admission.at_gate(ticket) or not self._gates[ticket].enter():
            return True
        self._begin(self._admission.open_gate(ticket))
        return False

    @enable_ki_protection
    async def wait_turn(self, ticket: Ticket) -> None:
        """Wait until a ticket has its permit.

        When this returns, the ticket runs.  When it raises, the ticket is gone: cancelling takes it out of the line at
        once, inside the call that cancels, and whoever can start on account of it is woken then and there.

        A permit that is there when the task comes, or is granted before the task is cancelled, is never taken away
        here.  Then this returns, after a checkpoint without a cancel, and the task meets its cancel at the next one.

        :raises TicketStateError: :meth:`leave` has taken the ticket out of the line, before or during the wait, and
            the scope of this task is not cancelled.  If it is, that is :exc:`trio.Cancelled` as ever.
        :raises trio.BusyResourceError: another task waits for the same ticket already
        """
        state = ticket.state
        if state is TicketState.RUNNING:
            await trio.lowlevel.cancel_shielded_checkpoint()
            return
        if state is TicketState.WAITING:
            if ticket in self._parked:
                raise trio.BusyResourceError(f"another task waits for ticket {ticket.number} ({ticket.kind}) already")

            def abort(_: object) -> trio.lowlevel.Abort:
                # Still parked means still waiting: a grant and leave() both unpark, and what they reschedule is not
                # aborted any more.
                del self._parked[ticket]
                self._begin(self._end(ticket))
                return trio.lowlevel.Abort.SUCCEEDED

            self._parked[ticket] = trio.lowlevel.current_task()
            # This looks for a cancel that is pending before it sleeps, so none is needed above.
            await trio.lowlevel.wait_task_rescheduled(abort)
            if ticket.state is TicketState.RUNNING:
                return
        await trio.lowlevel.checkpoint_if_cancelled()
        raise TicketStateError(
            "wait with", ticket.number, ticket.kind, ticket.state, "cancel the waiting task's scope as well as leaving"
        )

    @enable_ki_protection
    def try_claim(self, ticket: Ticket, key: Hashable) -> bool:
        """Let a running ticket hold one more key if nobody holds it or waits for it (rule A13).

        :raises TicketStateError: the ticket does not run
        """
        return self._admission.try_claim(ticket, key)

    @enable_ki_protection
    def leave(self, ticket: Ticket) -> None:
        """Give up a ticket in whatever state it is, and wake whoever can start on account of it.

        One that waits leaves the line; a task in its :meth:`wait_turn` is woken, to find its cancel or an error.  One
        that runs gives back its permit and its keys, so call this after teardown (rule A8).  One that is gone needs
        nothing, so that a ``finally`` need not know how far things got.
        """
        if ticket.state is TicketState.GONE:
            return
        started = self._end(ticket)
        self._wake(ticket)
        self._begin(started)

    def statistics(self) -> tuple[LaneStatistics, ...]:
        """What every lane holds at this moment: the model's own first, then those of its groups that are not idle."""
        core = self._admission
        return tuple(
            LaneStatistics(
                name=name,
                cap=core.cap(name),
                used=core.used(name),
                queue_limit=core.queue_limit,
                running=tuple(_figures(ticket, None) for ticket in core.running(name)),
                waiting=tuple(_figures(ticket, place) for place, ticket in enumerate(core.waiting(name), 1)),
            )
            for name in _with_own_lane(core.lanes)
        )

    def _end(self, ticket: Ticket) -> list[Ticket]:
        """Take a ticket out of the core, and return what has started on account of it."""
        gate = self._gates.pop(ticket, None)
        if gate is not None:
            gate.leave()
        if self._gates:
            # Before the keys change hands, or somebody younger would start who needs no gate.
            for heir in self._admission.heirs(ticket):
                if self._gates[heir].enter():
                    started = self._admission.open_gate(heir)
                    assert not started, "it still lacks a key"
        if ticket.state is TicketState.WAITING:
            return self._admission.withdraw(ticket)
        return self._admission.finish(ticket)

    def _begin(self, started: list[Ticket]) -> None:
        # All are woken before anybody is told: what on_start does, leaving other tickets included, comes too late to
        # lose a wake-up.
        for ticket in started:
            self._wake(ticket)
        if self._on_start is not None:
            for ticket in started:
                if ticket.state is TicketState.RUNNING:
                    self._on_start(ticket)

    def _wake(self, ticket: Ticket) -> None:
        task = self._parked.pop(ticket, None)
        if task is not None:
            trio.lowlevel.reschedule(task)


def _with_own_lane(lanes: tuple[str, ...]) -> tuple[str, ...]:
    return lanes if "" in lanes else ("", *lanes)


def _figures(ticket: Ticket, position: int | None) -> TicketStatistics:
    return TicketStatistics(
        number=ticket.number,
        kind=ticket.kind,
        exclusive=ticket.exclusive,
        weight=ticket.weight,
        keys=ticket.keys,
        position=position,
    )
