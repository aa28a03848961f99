"""What the contract says of a whole engine, told naively: the judge of :mod:`laneway.testing._engine_machine`.

:class:`EngineModel` knows what was asked for, is told what happened, in the order in which it happened, and raises
AssertionError at the first thing that the contract does not allow.  It predicts what it can (who is refused and why,
who is granted next, whom a cancel reaches) and accepts what the contract leaves open (which of two things at one
instant comes first).  What it is told comes from the engine's public face: observers, runs, outcomes and snapshots; and
from handlers, callers and decoders of the machine's own.

It is meant to be read beside the contract, and shares no code with the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import attrs
import trio

import laneway
from laneway.testing._admission_machine import AdmissionModel, ModelRefusal, ModelTicket

if TYPE_CHECKING:
    from collections.abc import Iterable

    from laneway.testing._decoder import ScriptedDecoder
    from laneway.testing._guest import GuestTask

REMEMBERED = 30.0
"""C5: seconds for which a cancel waits for its request, and for which an id that has ended arms none."""
REMEMBERED_IDS = 128
"""C5: how many such cancels are kept."""

ENDS = ("completed", "cancelled", "failed", "rejected")


# What is asked for


@attrs.frozen(repr=False)
class Prompt:
    """One sequence of a request: its prompt begins with tokens that no other has, and goes on with ``rest``."""

    rest: tuple[int, ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    overlong: bool = False
    """Leave ``rest`` as it is, whatever the window."""

    def __repr__(self) -> str:
        return _brief(self)


@attrs.frozen(repr=False)
class Work:
    """What a handler does: generate, let time pass, then wait to be told how to end."""

    prompts: tuple[Prompt, ...] = ()
    take: Literal["put", "iterate", "finish"] = "put"
    """Let the decode loop deliver to the reader, iterate over the tokens, or only await their end."""
    leaves: Literal["tidy", "early", "forgetful"] = "tidy"
    """``early``: after the first text; ``forgetful``: without leaving the blocks of its sequences."""
    seconds: float = 0.0
    held: bool = False
    """Wait to be told."""
    lingers: bool = False
    """Let no cancel disturb that wait."""

    def __repr__(self) -> str:
        return _brief(self)


@attrs.frozen(repr=False)
class Ask:
    """One way to make a request.  Drawn as one value, so that a crowd of equals can be drawn as well."""

    kind: str = "shared"
    work: Work = Work(held=True)
    name: Literal["fresh", "minted"] = "fresh"
    """The request's id: a new one, or none."""
    keys: tuple[str, ...] = ()
    weight: int = 1
    overflow: Literal["reject", "queue"] | None = None
    queue_timeout: float | None = None
    cap: float | None = None
    backpressure: Literal["merge", "pause"] = "merge"
    reads: Literal["result", "events", "slowly", "admitted", "one", "never"] = "result"
    deadline: float | None = None
    """Of the caller's own scope, in seconds from now."""
    prepares: float = 0.0
    """Seconds that validating takes."""

    def __repr__(self) -> str:
        return _brief(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(_brief(self))


def _brief(value: Any) -> str:
    """The fields that are not at their defaults: a failing example is read by people."""
    fields = [field for field in attrs.fields(type(value)) if getattr(value, field.name) != field.default]
    said = ", ".join(f"{field.name}={getattr(value, field.name)!r}" for field in fields)
    return f"{type(value).__name__}({said})"


class BodyError(Exception):
    """What a caller's block raises."""


class HandlerError(Exception):
    """What a handler raises."""


@attrs.frozen(eq=False)
class Result:
    """What a handler returns: an object of its own, so that nobody else's can pass for it."""

    job: Job
    answers: tuple[laneway.Answer, ...] = ()


@attrs.define(eq=False, repr=False)
class Job:
    """One request: what was asked for, what the contract says has become of it, and what was seen of it."""

    number: int
    ask: Ask
    operation: laneway.Operation
    on: LoadedModel
    id: str | None
    prompts: tuple[tuple[int, ...], ...] = ()

    # The contract's side.
    state: str = "asked"
    """``asked`` until it arrives, then a state of a run; ``refused`` if entering raised."""
    ticket: ModelTicket | None = None
    arrived_at: float = 0.0
    ended_at: float = 0.0
    queue_deadline: float | None = None
    left_queue: bool = False
    """Its queue_timeout is known to have taken it out of the line; it has yet to end."""
    doom: str | None = None
    """Why it must end as cancelled."""
    doomed_at: float = 0.0
    attached: bool = True
    """Whether its caller may still be in the block."""
    refusal: tuple[type[Exception], dict[str, Any]] | None = None
    """What entering must raise, and with which fields."""
    settled: bool = False
    """Its outcome is known to its reader, maybe before the end (C1, ``none``)."""

    # What was seen.
    handler: Literal["not entered", "inside", "left"] = "not entered"
    how: str = ""
    """How the handler was left: ``returned``, ``raised`` or ``cancelled``."""
    made: Any = None
    """What it returned or raised."""
    answers: dict[int, laneway.Answer | Exception] = attrs.field(factory=dict)
    caller: Literal["outside", "inside", "leaving", "gone"] = "outside"
    leaves_with: BaseException | None = None
    events: list[Any] = attrs.field(factory=list)
    """What its reader was given."""
    said: dict[int, list[str]] = attrs.field(factory=dict)
    """What its sequences delivered, for each of them."""
    deliveries: list[float] = attrs.field(factory=list)
    reads: list[float] = attrs.field(factory=list)
    """When its reader came into the block, and when it took an event."""
    iteration_error: BaseException | None = None
    scope_cancelled: bool = False
    """The machine has cancelled the caller's own scope."""
    caller_dies_with_it: bool = False
    """The machine cancels the caller's own scope in the instant in which the request ends."""
    left_at: float = 0.0
    owes_failure: bool = False
    """Its caller leaves the block, and nobody has seen the failure that it ended with (R4)."""
    rests: bool = False
    """Its caller waits in the block for :attr:`leave`."""
    judged: bool = False

    # What the machine plays with.
    task: GuestTask[Any] | None = None
    run: laneway.Run | None = None
    ctx: Any = None
    orders: trio.Event = attrs.field(default=None)
    order: Literal["return", "raise", "notice"] = "return"
    leave: trio.Event = attrs.field(default=None)
    leave_how: Literal["leave", "raise", "read"] = "leave"
    reads_late: bool = False
    """Its caller began to read when it had ended."""
    body_error: BodyError = attrs.field(factory=BodyError)

    def __repr__(self) -> str:
        return f"j{self.number}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(f"{self} ({self.ask.kind} {self.state}{', lingering' * self.ask.work.lingers})")

    @property
    def live(self) -> bool:
        """Between arrival and the end of teardown."""
        return self.state in ("waiting", "running", "cancelling")

    @property
    def has_permit(self) -> bool:
        """Granted and not ended."""
        return self.state in ("running", "cancelling") and self.ticket is not None and self.ticket.state == "running"

    @property
    def keeps_its_scope(self) -> bool:
        """Whether a cancel ends its handler."""
        return self.operation.scope is not laneway.Scope.NONE and not self.ask.work.lingers

    @property
    def held(self) -> bool:
        """Its handler waits to be told."""
        return self.handler == "inside" and self.ask.work.held and not self.orders.is_set()

    def texts(self, index: int) -> list[str]:
        """What its reader was given of one sequence."""
        mine = [each.event for each in self.events if isinstance(each, laneway.BatchEvent) and each.id == str(index)]
        return [delta.text for delta in mine if isinstance(delta, laneway.TextDelta)]

    def same_scope(self, other: Job) -> bool:
        """C1, ``model``: one scope for all requests of that operation on that model."""
        return self.operation is other.operation and self.on is other.on


@attrs.define(eq=False)
class LoadedModel:
    """One loaded model."""

    name: str
    real: laneway.Model
    decoder: ScriptedDecoder
    admission: AdmissionModel
    by_slots: bool
    queue_timeout: float | None
    stall_timeout: float | None
    seconds_per_step: float
    door: Literal["open", "unloading", "unloaded"] = "open"
    failed: bool = False
    unloader: GuestTask[Any] | None = None
    last_asked: float = -1.0
    """When the newest request was made."""
    steps: dict[int, frozenset[Job]] = attrs.field(factory=dict)
    """{number of a step that has begun: whose sequences are in it}."""
    drop_failure: int | None = None
    """The number of the drop that fails."""
    interrupted: bool = False
    """The machine has interrupted a step that hung, whoever wanted it."""

    def __repr__(self) -> str:
        return f"model {self.name}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))

    @property
    def stuck(self) -> bool:
        """A step is under way: what left waits for its end."""
        return self.decoder.step_under_way

    @property
    def hangs(self) -> bool:
        """The step under way ends by an interrupt only."""
        return self.stuck and max(self.steps) in self.decoder.hang_at

    @property
    def may_fail(self) -> bool:
        """C11: three failed steps in a row, or a drop that failed."""
        if self.drop_failure is not None and self.decoder.statistics().drops >= self.drop_failure:
            return True
        in_a_row = 0
        for number in self.steps:
            if number in self.decoder.hang_at:
                in_a_row += self.interrupted  # one that nobody waited for tells nothing
            else:
                in_a_row = in_a_row + 1 if number in self.decoder.fail_at else 0
            if in_a_row >= 3:
                return True
        return False


@attrs.frozen
class Entry:
    """Something that happened, as it was noted down on the spot."""

    what: str
    about: tuple[Any, ...]
    now: float
    holding: frozenset[Job] = frozenset()
    """The jobs that had sequences in slots."""
    failed: tuple[LoadedModel, ...] = ()
    """The models that said that they had failed."""

    def __str__(self) -> str:
        return f"{self.now:8.5f} {self.what} {', '.join(map(_short, self.about))}"


def _short(value: Any) -> str:
    if isinstance(value, laneway.RequestRecord):
        return f"{value.request_id} ({value.state}{f': {value.error}' if value.error else ''})"
    if isinstance(value, frozenset):
        return f"of {sorted(map(repr, value))}"
    return repr(value)


# The judge


@attrs.define(eq=False)
class EngineModel:
    """One engine, from its opening until nothing of it is left."""

    models: dict[str, LoadedModel] = attrs.field(factory=dict)
    jobs: list[Job] = attrs.field(factory=list)
    """All of them, in the order in which they were asked for."""
    closed: bool = False
    collapsed: bool = False
    """The program around the engine was cancelled: everything ends, and in no order that the contract would tell."""
    armed: dict[str, float] = attrs.field(factory=dict)
    ended: dict[str, float] = attrs.field(factory=dict)
    _arriving: Job | None = None
    _due: list[Job] = attrs.field(factory=list)
    """Whose permits were free before anything else can have happened."""
    _early: list[Entry] = attrs.field(factory=list)
    """Grants that only the end of a request explains.  The record of that end comes right behind them."""

    @property
    def live(self) -> list[Job]:
        """In the order in which they were asked for."""
        return [job for job in self.jobs if job.live]

    def by_id(self, request_id: str) -> Job | None:
        """The live request of this id."""
        return next((job for job in self.live if job.id == request_id), None)

    def by_ticket(self, ticket: ModelTicket) -> Job:
        """Whose ticket it is."""
        return next(job for job in self.jobs if job.ticket is ticket)

    # What somebody does to the engine: told before it is done.  Returns whom it reaches.

    def cancel(self, request_id: str, reason: str, now: float) -> list[Job]:
        """C3, C5: by id."""
        job = self.by_id(request_id)
        if job is not None:
            return self._explicit_cancel(job, reason, now)
        self._forget(now)
        if request_id not in self.ended:
            self.armed.pop(request_id, None)
            self.armed[request_id] = now
            while len(self.armed) > REMEMBERED_IDS:
                del self.armed[next(iter(self.armed))]
        return []

    def cancel_all(self, model: LoadedModel | None, kind: str | None, reason: str, now: float) -> list[Job]:
        """C3: the broad form."""
        chosen = [job for job in self.live if model in (None, job.on) and kind in (None, job.ask.kind)]
        return self._doom(chosen, reason, now)

    def unload(self, model: LoadedModel, now: float) -> None:
        """C8: the barrier goes up, everything on the model ends."""
        model.door = "unloading"
        self._doom([job for job in self.live if job.on is model], f"model {model.name!r} was unloaded", now)

    def close(self, now: float) -> None:
        """C8: the engine's block ends."""
        self.closed = True
        self._doom(self.live, "the engine was closed", now)

    def collapse(self, now: float) -> None:
        """C8: the program around the engine is cancelled."""
        self.closed = self.collapsed = True
        self._doom(self.live, "the engine was ", now)  # closed or cancelled, whichever came to it first

    def _explicit_cancel(self, job: Job, reason: str, now: float) -> list[Job]:
        """C1: whom a cancel reaches."""
        reached = [job]
        if job.state == "running" and job.operation.scope is laneway.Scope.MODEL:
            reached = [other for other in self.live if other.same_scope(job)]
        return self._doom(reached, reason, now)

    def _doom(self, jobs: Iterable[Job], reason: str, now: float) -> list[Job]:
        """C3: a request that is cancelling already keeps its first reason, and one in its teardown its outcome.

        Returns those that end because of this.
        """
        reached = [job for job in jobs if job.live and job.doom is None and job.handler != "left"]
        for job in reached:
            job.doom, job.doomed_at = reason, now
        return reached

    # What was seen to happen, in order.

    def judge(self, entry: Entry) -> None:
        """Take in what happened, and see whether it may."""
        for model in entry.failed:
            self._fail(model)
        ended_now = entry.what == "ended" and not self._is_arriving(entry.about[0])
        if self._early and entry.what != "admitted" and not ended_now:
            raise AssertionError(f"granted without a free permit, or out of turn: {self._early[0].about[0].request_id}")
        getattr(self, f"_on_{entry.what}")(entry, *entry.about)

    def _fail(self, model: LoadedModel) -> None:
        """C11: who waits will never run."""
        if model.failed:
            return
        assert model.may_fail, f"C11: {model} has failed, and had no reason to"
        model.failed = True
        for job in self.live:
            if job.on is model and job.state == "waiting" and job.ticket and job.ticket.state == "waiting":
                job.left_queue = True
                model.admission.remove(job.ticket)

    def _on_arriving(self, entry: Entry, job: Job) -> None:
        """Its validation is over: what the contract says now is what must come."""
        self._arriving = job
        job.refusal = self._refusal(job, entry.now)
        if job.refusal is None:
            return
        error, _ = job.refusal
        if error not in (laneway.InferenceCancelledError, laneway.RequestRejectedByPolicyError):
            self._arriving = None

    def _refusal(self, job: Job, now: float) -> tuple[type[Exception], dict[str, Any]] | None:
        """A3, the order of things: barrier, id, ticket."""
        self._leave_after_timeouts(now)
        if self.closed:
            return laneway.EngineClosedError, {}
        if job.on.door != "open" or job.on.failed:
            return laneway.ModelNotLoadedError, {"model": job.on.name}
        other = None if job.id is None else self.by_id(job.id)
        if other is not None:
            return laneway.RequestIdConflictError, {"request_id": job.id, "state": other.state}
        self._forget(now)
        if job.id in self.armed:
            del self.armed[job.id]
            return laneway.InferenceCancelledError, {"request_id": job.id, "tokens": (), "text": ""}
        job.arrived_at = now
        if job.operation.use is laneway.Use.NONE:
            self._due.append(job)
            return None
        ask, admission = job.ask, job.on.admission
        overflow = ask.overflow or job.operation.overflow.value
        try:
            ticket, started = admission.arrive(
                ask.kind,
                exclusive=job.operation.use is laneway.Use.EXCLUSIVE,
                unique=job.operation.unique,
                weight=ask.weight if job.on.by_slots else 1,
                keys=ask.keys,
                nowait=overflow == "reject",
                cap=ask.cap,
                lane=job.operation.lane_group,
            )
        except ModelRefusal as refusal:
            fields = {
                "reason": refusal.reason,
                "waiting": refusal.waiting,
                "limit": admission.queue_limit,
                "kind": ask.kind,
                "model": job.on.name,
            }
            return laneway.RequestRejectedByPolicyError, fields
        job.ticket = ticket
        timeout = job.on.queue_timeout if ask.queue_timeout is None else ask.queue_timeout
        if timeout is not None:
            job.queue_deadline = now + timeout
        self._due += [job] * bool(started)
        return None

    def _is_arriving(self, record: laneway.RequestRecord) -> bool:
        job = self._arriving
        return job is not None and job.state == "asked" and (job.id is None or job.id == record.request_id)

    def _on_queued(self, entry: Entry, record: laneway.RequestRecord) -> None:
        job, self._arriving = self._arriving, None
        assert job is not None, f"{record.request_id} arrived, and nobody has asked for it"
        assert job.refusal is None, f"{job} was let in, should be refused with {job.refusal}"
        if job.id is None:
            assert self.by_id(record.request_id) is None, "A9: a minted id is in use"
            job.id = record.request_id
        assert (record.request_id, record.state, record.queued_at) == (job.id, "waiting", entry.now)
        job.state = "waiting"

    def _on_admitted(self, entry: Entry, record: laneway.RequestRecord) -> None:
        job = self._live_job(record)
        assert job.state == "waiting", f"{job} was granted a permit while {job.state}"
        assert record.started_at == entry.now
        if self.collapsed:
            job.state = "running"
            return
        assert job.doom is None, f"C3: {job} was granted a permit after it was cancelled ({job.doom})"
        if job not in self._due:
            self._leave_after_timeouts(entry.now)
        if job not in self._due:
            self._early.append(entry)
            return
        assert self._due[0] is job, f"A3: {job} was granted before {self._due[0]}"
        self._grant(self._due.pop(0), entry)

    def _grant(self, job: Job, entry: Entry) -> None:
        job.state = "running"
        if job.ticket is None:
            return
        # The core of A8: no permit is given that somebody's teardown still needs.
        permits = [other for other in self.jobs if other.ticket is not None and other.ticket.state == "running"]
        stale = [other for other in entry.holding if other.ticket is not None and other not in permits]
        assert not stale, (
            f"A8: {job} was granted while sequences of {stale} were in their slots, their permits given on"
        )

    def _leave_after_timeouts(self, now: float) -> None:
        """A5: a waiter leaves when its queue_timeout is over; its own end is told a moment later."""
        for job in sorted(self.live, key=lambda job: job.queue_deadline or 0.0):
            if job.state == "waiting" and job.queue_deadline is not None and job.queue_deadline <= now:
                self._leave_queue(job)

    def _leave_queue(self, job: Job) -> None:
        if not job.left_queue and job.ticket is not None and job.ticket.state == "waiting":
            job.left_queue = True
            self._freed(job)

    def _freed(self, job: Job) -> None:
        """A3: a freed permit goes to whom the rule says, at once."""
        if job.ticket is not None and job.ticket.state != "gone":
            self._due += map(self.by_ticket, job.on.admission.leave(job.ticket))

    def _on_cancelled(self, entry: Entry, record: laneway.RequestRecord) -> None:
        job = self._live_job(record)
        if job.doom is None and self._stalled_for_too_long(job, entry.now):
            self._doom([job], "stall_timeout", entry.now)
        assert job.doom is not None, f"C2: {job} was cancelled, and nobody has asked for that ({record.error})"
        assert job.state in ("waiting", "running"), f"{job} was cancelled while {job.state}"
        was_waiting = job.state == "waiting"
        job.state = "cancelling"
        if not was_waiting and job.operation.scope is laneway.Scope.NONE:
            job.settled = True  # C1: the caller is let go at once
        if was_waiting and not self.collapsed:
            self._freed(job)  # C3: a waiter has left the queue

    @staticmethod
    def _stalled_for_too_long(job: Job, now: float) -> bool:
        """S2: a stall_timeout ends a run whose reader keeps it paused."""
        timeout = job.on.stall_timeout
        if job.ask.backpressure != "pause" or timeout is None:
            return False
        return not any(now - timeout < when < now for when in job.reads)

    def _on_entered(self, entry: Entry, job: Job) -> None:
        assert job.handler == "not entered", f"the handler of {job} was run twice"
        assert job.state in ("running", "cancelling"), f"the handler of {job} runs while it is {job.state}"
        job.handler = "inside"
        if self.collapsed or job.operation.use is laneway.Use.NONE:
            return
        beside = [
            other
            for other in self.live
            if other.handler == "inside" and other.on is job.on and other.operation.use is not laneway.Use.NONE
        ]
        alone = any(other.operation.use is laneway.Use.EXCLUSIVE for other in beside)
        assert len(beside) == 1 or not alone, f"A6: {beside} run beside each other"
        lane = job.operation.lane_group
        weight = sum(job.on.admission.permits(o.ticket) for o in beside if o.ticket and o.ticket.lane == lane)
        assert weight <= job.on.admission.caps[lane], (
            f"A2: {beside} run in a lane with a cap of {job.on.admission.caps}"
        )
        keys = [key for other in beside if other.ticket for key in other.ticket.keys]
        assert len(keys) == len(set(keys)), f"A13: two of {beside} hold one key"

    def _on_left_handler(self, entry: Entry, job: Job, how: str, made: Any) -> None:
        job.handler, job.how, job.made = "left", how, made
        if how == "cancelled":
            assert job.doom is not None, f"C2: the handler of {job} was cancelled, and nobody has asked for that"
            assert job.operation.scope is not laneway.Scope.NONE, f"C1: the handler of {job} was cancelled, scope none"

    def _on_ended(self, entry: Entry, record: laneway.RequestRecord) -> None:
        if self._is_arriving(record):
            self._ended_on_arrival(record, entry.now)
            return
        job = self._live_job(record)
        before = job.state
        assert job.handler != "inside", f"A8: {job} has ended while its handler runs"
        assert job not in entry.holding, f"A8: {job} has ended while its sequences are in their slots"
        assert record.ended_at == entry.now
        expected = self._ends_of(job, entry.now)
        outcome = record.outcome
        assert outcome in expected, f"C6: {job} ended as {outcome}, should be {expected}: {record.error}"
        assert outcome is not None
        job.state, job.ended_at, job.settled = outcome, entry.now, True
        self._remember_end(record.request_id, entry.now)
        if job.operation.scope is laneway.Scope.MODEL:
            self._doom_the_unheard(job, entry.now)
        if self.collapsed:
            return
        if before == "waiting":
            self._leave_queue(job)
        else:
            self._freed(job)
        early, self._early = self._early, []
        for grant in early:
            granted = self._live_job(grant.about[0])
            assert self._due[:1] == [granted], f"A3: {granted} was granted, should be {self._due}"
            self._grant(self._due.pop(0), grant)

    def _ends_of(self, job: Job, now: float) -> set[str]:
        """C6, C7: how a request may end now."""
        if job.how == "returned":
            # C7: a cancel that comes too late.  C1: with scope none the caller was told otherwise long ago.
            return {"cancelled" if job.operation.scope is laneway.Scope.NONE and job.settled else "completed"}
        if job.how == "raised":
            return {"failed" if job.state == "running" else "cancelled"}
        if job.doom is not None:
            return {"cancelled"}
        assert job.state == "waiting", f"{job} has ended without its handler, while {job.state}"
        timed_out = job.queue_deadline is not None and job.queue_deadline <= now
        return {*["failed"] * job.on.failed, *["rejected"] * timed_out}

    def _ended_on_arrival(self, record: laneway.RequestRecord, now: float) -> None:
        job, self._arriving = self._arriving, None
        assert job is not None
        assert job.refusal is not None, f"{job} was refused ({record.error}), should not be"
        expected = "rejected" if job.refusal[0] is laneway.RequestRejectedByPolicyError else "cancelled"
        assert record.outcome == expected, f"{job}: {record.outcome}, should be {expected}"
        self._remember_end(record.request_id, now)

    def _on_refused(self, entry: Entry, job: Job, error: BaseException) -> None:
        """Entering the block has raised."""
        job.state, job.caller = "refused", "gone"
        if job.refusal is None:
            # It never came as far as its ticket.
            if isinstance(error, laneway.EngineClosedError):
                assert self.closed
            elif isinstance(error, laneway.ModelNotLoadedError):
                assert job.on.door != "open" or job.on.failed or job.on.may_fail, f"C8: {job} was refused: {error}"
            elif isinstance(error, laneway.ContextOverflowError):
                assert max(map(len, job.prompts)) >= job.on.decoder.window, f"A10: {job} was refused: {error}"
            else:
                assert _is_cancelled(error), f"{job} was refused: {error!r}"
            return
        wanted, fields = job.refusal
        assert type(error) is wanted, f"{job} was refused with {error!r}, should be {job.refusal}"
        for name, value in fields.items():
            assert getattr(error, name) == value, f"{job} was refused with {error!r}, {name} should be {value!r}"

    def _on_inside(self, entry: Entry, job: Job) -> None:
        """Its caller is in the block."""
        assert job.refusal is None
        assert job.live or job.state in ENDS
        job.caller = "inside"

    def _on_leaving(self, entry: Entry, job: Job, error: BaseException | None) -> None:
        """Its caller is about to leave the block, with this error."""
        job.caller, job.leaves_with, job.attached, job.left_at = "leaving", error, False, entry.now
        assert job.task is not None
        if not _is_cancelled(error):
            # C6: when both are pending, the caller's own cancel wins.
            assert not job.scope_cancelled, f"C6: the caller of {job} was cancelled and saw {error!r}"
            assert job.task.scope.deadline >= entry.now, f"C6: {job} came to {error!r} after its caller's deadline"
        job.owes_failure = error is None and job.settled and job.state != "completed"
        if not job.live:
            return
        # R4: the caller waits for the teardown of a handler that has failed.
        waits = job.operation.scope is laneway.Scope.REQUEST or (
            job.operation.scope is laneway.Scope.MODEL and not self._is_heard(job)
        )
        job.owes_failure |= error is None and job.how == "raised" and job.doom is None and waits
        if job.operation.scope is not laneway.Scope.MODEL:
            self._doom([job], "its caller left the block", entry.now)
            return
        if job.state == "waiting":
            self._doom([job], "its caller left the block", entry.now)  # C1: which reaches nobody else
        self._doom_the_unheard(job, entry.now)

    def _doom_the_unheard(self, job: Job, now: float) -> None:
        """C1: a caller that leaves only detaches, and the last to leave cancels."""
        if not self._is_heard(job):
            self._doom([other for other in self.live if other.same_scope(job)], "its caller left the block", now)

    def _is_heard(self, job: Job) -> bool:
        """Whether a caller is left of those that share its scope."""
        return any(other.attached for other in self.live if other.same_scope(job) and other.doom is None)

    def _on_left_block(self, entry: Entry, job: Job) -> None:
        """R3: no request outlives its block, but C1's none and model."""
        job.caller = "gone"
        if not job.live:
            assert job not in entry.holding, f"R3: {job} has left its block while its sequences are in their slots"
            return
        scope = job.operation.scope
        assert scope is not laneway.Scope.REQUEST, f"R3: {job} has left its block and is {job.state}"
        if scope is laneway.Scope.MODEL:
            assert job.doom is None or self.collapsed, f"R3: {job} has left its block, cancelled, before its end"
        elif not self.collapsed and job.ticket is not None:
            assert job.ticket.state == "running", f"R3: {job} has left its block and has never run"

    def _on_wait_ended(self, entry: Entry, job: Job) -> None:
        """C4: when ``wait_ended`` returns, the slot is really free."""
        assert not job.live, f"C4: wait_ended({job.id}) returned while it is {job.state}"
        assert job not in entry.holding, f"C4: wait_ended({job.id}) returned while its sequences are in their slots"

    def _on_step(self, entry: Entry, model: LoadedModel, number: int, jobs: frozenset[Job]) -> None:
        """A step has begun."""
        for job in jobs:
            assert job.handler != "not entered"
            late = job.doom is not None and job.doomed_at < entry.now and job.keeps_its_scope and not self.collapsed
            assert not late, f"C3: {job} was cancelled at {job.doomed_at} and takes part in a step"

    def _on_answered(self, entry: Entry, job: Job, index: int, end: laneway.Answer | Exception) -> None:
        """C2: one sequence has come to its end."""
        if isinstance(end, laneway.Answer):
            self._judge_answer(job, index, end)
        elif isinstance(end, laneway.DecodeError):
            cause = end.__cause__
            failed = [number for number, error in job.on.decoder.fail_at.items() if error is cause]
            here = job.on.interrupted or any(job in job.on.steps.get(number, ()) for number in failed)
            assert here or job.on.may_fail, f"C11: a sequence of {job} failed ({end}), and no step of its has failed"
        else:
            gone = isinstance(end, laneway.ModelNotLoadedError) and (job.on.may_fail or job.on.door != "open")
            assert gone, f"a sequence of {job} ended with {end!r}"

    @staticmethod
    def expected_answer(job: Job, index: int) -> tuple[tuple[int, ...], str, str]:
        """C2, S1: tokens, text and stop reason of a sequence that nobody disturbs."""
        prompt = job.ask.work.prompts[index]
        alone = job.on.decoder.expected(job.prompts[index], SAMPLING, prompt.max_tokens)
        vocabulary = job.on.decoder.vocabulary
        for length in range(1, len(alone.tokens) + 1):
            text = vocabulary.text(alone.tokens[:length])
            found = [text.index(stop) for stop in prompt.stop if stop in text]
            if found:
                return alone.tokens[:length], text[: min(found)], "stop"
        return alone.tokens, vocabulary.text(alone.tokens), alone.stop_reason

    def _judge_answer(self, job: Job, index: int, answer: laneway.Answer) -> None:
        tokens, text, reason = self.expected_answer(job, index)
        assert answer.tokens == tokens, f"C2: {job} has other tokens than alone: {answer.tokens}, should be {tokens}"
        assert answer.stop_reason == reason, f"C2: {job} ended by {answer.stop_reason}, should be {reason}"
        assert answer.text == text, f"S1: the text of {job} is {answer.text!r}, should be {text!r}"
        if job.ask.work.take != "finish":
            said = "".join(job.said.get(index, []))
            assert said == text, f"S1: {job} was delivered {said!r}, the text is {text!r}"

    def _on_rest(self, entry: Entry) -> None:
        """Nothing happens any more."""

    # When everything has come to rest

    def at_rest(self, now: float) -> None:
        """What had to happen has happened."""
        assert not self._early, f"granted without a free permit: {[entry.about[0].request_id for entry in self._early]}"
        assert self._arriving is None, f"{self._arriving} has neither arrived nor been refused"
        for job in self.live:
            if job.state == "waiting" and job.queue_deadline is not None and not job.doom:
                assert job.queue_deadline > now, f"A5: {job} waits beyond its queue_timeout"
        assert not self._due, f"A3: a permit is free and {self._due} is not granted"
        for job in self.jobs:
            if job.live:
                self._job_at_rest(job)
            if job.caller in ("inside", "leaving"):
                self._caller_at_rest(job, now)

    def _job_at_rest(self, job: Job) -> None:
        if job.state == "waiting":
            assert job.doom is None, f"C3: {job} still waits, cancelled ({job.doom})"
            assert not job.on.failed, f"C11: {job} waits for a model that has failed"
            return
        if job.doom is not None and not self.collapsed:
            assert job.state == "cancelling", f"{job} is {job.state}, cancelled ({job.doom})"
        assert job.handler != "not entered", f"{job} has its permit, and its handler does not run"
        assert job.handler == "inside" or job.on.stuck, f"A8: {job} does not end, its handler has"
        if job.doom is not None and job.keeps_its_scope:
            assert job.on.stuck, f"C7: {job} goes on, cancelled ({job.doom})"
        if job.doom is None and job.operation.scope is laneway.Scope.MODEL and job.handler != "left":
            assert self._is_heard(job), f"C1: {job} runs for nobody: the last of its callers has left"

    def _caller_at_rest(self, job: Job, now: float) -> None:
        if job.caller == "leaving":
            ends = job.operation.scope is laneway.Scope.REQUEST or job.doom is not None or job.handler == "left"
            waits = job.live and ends
            assert waits, f"R3: {job} is {job.state}, and its caller does not come out of the block"
            return
        assert not job.scope_cancelled, f"C6: the caller of {job} was cancelled and sits there"
        assert job.task is not None
        assert job.task.scope.deadline > now, f"A5: the caller of {job} waits beyond its deadline"
        reads_on = job.ask.reads not in ("one", "never") or (job.leave.is_set() and job.leave_how == "read")
        if job.settled and reads_on and job.ask.reads != "slowly":
            raise AssertionError(f"R4: {job} is {job.state}, and its reader has not been told")

    # How a caller has fared

    def judge_caller(self, job: Job) -> None:
        """R4, C6: the caller's task has ended."""
        assert job.task is not None
        outcome = job.task.outcome
        assert outcome is not None
        if job.state == "refused":
            return
        assert job.caller == "gone", f"the caller of {job} has ended without leaving its block: {outcome}"
        error, value = getattr(outcome, "error", None), getattr(outcome, "value", None)
        if job.leaves_with is not None:
            assert error is job.leaves_with, f"R4: the block of {job} raised {job.leaves_with!r}, its caller {outcome}"
        if _is_cancelled(error):
            own = job.scope_cancelled or job.task.scope.deadline <= job.left_at
            assert own, f"C6: the caller of {job} saw Cancelled, and nobody has cancelled it"
        elif error is job.body_error:
            return
        elif error is not None:
            if job.leaves_with is None:
                assert job.owes_failure, f"R4: leaving the block of {job} raised {error!r}, which it has seen"
            assert job.iteration_error in (None, error), f"R4: {job} raised {job.iteration_error!r}, then {error!r}"
            self._judge_error(job, error)
        elif job.ask.reads in ("one", "never") and job.leave_how != "read":
            assert not job.owes_failure, f"R4: {job} is {job.state}, and leaving its block did not raise that"
        else:
            assert job.state == "completed", f"R4: {job} is {job.state} and gave {value!r}"
            assert value is job.made, f"R4: {job} gave {value!r}, its handler {job.made!r}"
            self._judge_events(job)

    def _judge_error(self, job: Job, error: BaseException) -> None:
        if isinstance(error, laneway.InferenceCancelledError):
            told = job.state == "cancelled" or (job.operation.scope is laneway.Scope.NONE and job.settled)
            assert told, f"C6: {job} is {job.state} and raised {error!r}"
            assert error.request_id == job.id
            assert job.doom is not None
            assert job.doom in error.reason, f"C6: {job} was cancelled for {job.doom!r}, and told {error.reason!r}"
            self._judge_partial(job, error)
            if job.how == "raised" and job.operation.scope is not laneway.Scope.NONE:
                assert error.__cause__ is job.made, f"C6: {job} hides what its handler raised: {error.__cause__!r}"
            return
        if isinstance(error, laneway.RequestRejectedByPolicyError):
            assert job.state == "rejected", f"C6: {job} is {job.state} and raised {error!r}"
            assert (error.reason, error.request_id, error.kind) == ("queue_timeout", job.id, job.ask.kind)
            return
        assert job.state == "failed", f"C6: {job} is {job.state} and raised {error!r}"
        if job.handler == "left":
            assert error is job.made, f"R2: {job} raised {error!r}, its handler {job.made!r}"
        else:
            assert isinstance(error, laneway.ModelNotLoadedError), f"C11: {job} raised {error!r}"

    def _judge_partial(self, job: Job, error: laneway.InferenceCancelledError) -> None:
        """C2, C6: what a cancelled request had made is the beginning of what it would have made."""
        if len(job.prompts) != 1:
            return
        tokens, text, _ = self.expected_answer(job, 0)
        assert tokens[: len(error.tokens)] == error.tokens, f"C2: {job} had made {error.tokens}, alone {tokens}"
        assert text.startswith(error.text), f"S1: {job} had said {error.text!r}, the text is {text!r}"
        # C6: all of it, but for half a character at its end; nothing of a stop string that is whole.
        so_far = job.on.decoder.vocabulary.text(error.tokens)
        if not any(stop in so_far for stop in job.ask.work.prompts[0].stop):
            lacks = len(so_far) - len(error.text)
            assert lacks <= 1, f"C6: {job} had made {so_far!r} when it was cancelled, and is told {error.text!r}"

    def _judge_events(self, job: Job) -> None:
        """R4, S1: text, then one Done."""
        if not job.events:
            assert job.ask.reads in ("result", "admitted"), f"R4: {job} ended without an event"
            return
        *deltas, done = job.events
        if job.ask.reads == "one" and not isinstance(done, laneway.Done):
            return
        assert isinstance(done, laneway.Done), f"R4: the last event of {job} is {done!r}"
        assert not any(isinstance(delta, laneway.Done) for delta in deltas), f"R4: {job} was done twice"
        for index, answer in job.answers.items():
            if isinstance(answer, laneway.Answer) and job.ask.work.take == "put":
                texts = job.texts(index)
                assert "".join(texts) == answer.text, f"S1: {job} read {texts}, the text is {answer.text!r}"
                if job.reads_late and job.ask.backpressure == "merge":
                    assert len(texts) <= 1, f"S2: unread text of {job} did not merge: {texts}"

    # Small things

    def _live_job(self, record: laneway.RequestRecord) -> Job:
        job = self.by_id(record.request_id)
        assert job is not None, f"{record.request_id} is {record.state}, and there is no such request"
        return job

    def _remember_end(self, request_id: str, now: float) -> None:
        """C5: it came and has ended, so a cancel that comes now is too late for it and means no other."""
        self._forget(now)
        self.ended.pop(request_id, None)
        self.ended[request_id] = now

    def _forget(self, now: float) -> None:
        for remembered in (self.armed, self.ended):
            for request_id, when in list(remembered.items()):
                if now - when >= REMEMBERED:
                    del remembered[request_id]


def _is_cancelled(error: BaseException | None) -> bool:
    return isinstance(error, trio.Cancelled)


SAMPLING = laneway.Sampling(temperature=0.0)
"""What every sequence is sampled with."""
