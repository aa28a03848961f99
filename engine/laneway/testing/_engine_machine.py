"""State machines that drive a whole engine and hold it to the contract: registry, lanes, scheduler and decode loop.

The engine runs on scripted decoders in a :class:`laneway.testing.GuestRun`, under a mock clock.  A rule does one thing
that somebody can do to an engine.  What follows from it is noted down where it happens, and judged, entry by entry,
when everything has come to rest: see :mod:`laneway.testing._engine_model`, which is the contract told naively.  The
invariants then ask the engine itself.

There are two machines, because what they look for needs different company.  :class:`RequestMachine` is about who runs
when and how requests end: its handlers mostly wait to be told.  :class:`DecodingMachine` is about tokens: its handlers
generate, readers dawdle, steps fail and hang.

To hold an engine that is put together in another way to the same contract::

    class MyMachine(RequestMachine):
        @staticmethod
        def open_engine(plugins):
            return my_open_engine(plugins=plugins)


    TestMine = MyMachine.TestCase
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from typing import Any, Literal

import attrs
import trio
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import laneway
from laneway.testing._engine_harness import OPERATIONS, EngineHarness, Load, Loading, fail_step
from laneway.testing._engine_model import ENDS, Ask, Entry, Job, LoadedModel, Prompt, Work
from laneway.testing._guest import GuestRun, GuestTask
from laneway.testing.strategies import task_orders

# What is drawn


def mostly(usual: Any, *others: Any, odds: int = 7) -> st.SearchStrategy[Any]:
    """``usual`` in all but one of ``odds + 1`` draws."""
    return st.sampled_from([usual] * odds * len(others) + list(others))


def _one(which: str) -> st.SearchStrategy[Any]:
    """One of the machine's own things."""
    return st.runner().flatmap(lambda machine: st.sampled_from(getattr(machine, which)))


def _drawn(which: str) -> st.SearchStrategy[Any]:
    """What the machine's class says is to be drawn."""
    return st.runner().flatmap(lambda machine: getattr(machine, which))


KINDS_IN_LINE = st.sampled_from(["shared", "common"])

WHO_LEAVES_A_LINE = st.sampled_from(["nobody leaves", "the blocker leaves", "who runs leaves", "the callers leave"])


class EngineMachine(EngineHarness, RuleBasedStateMachine):
    """What may happen to any engine.  See :class:`RequestMachine` and :class:`DecodingMachine`."""

    asks: st.SearchStrategy[Ask]
    """The requests that are made."""
    loads: st.SearchStrategy[Load]
    """The models that are loaded."""
    waits: st.SearchStrategy[float]
    """Seconds.  All times are multiples of 1/64 s, so that deadlines, steps and timeouts meet in one instant."""
    someone: Ask
    """A request that takes long."""
    patience = 8
    """How many things are done before somebody ends it all."""

    @initialize(
        orders=task_orders(),
        load=_drawn("loads"),
        asks=st.lists(_drawn("asks"), min_size=1, max_size=4),
        line=st.none() | KINDS_IN_LINE,
        then=WHO_LEAVES_A_LINE,
    )
    def begin(self, orders: object, load: Load, asks: list[Ask], line: str | None, then: str) -> None:
        self.run = GuestRun(max_ticks=10_000)
        self.base_tasks = self._tasks()
        self._open()
        self._load("a", attrs.evolve(load, seconds_to_load=0.0))
        if line is None:
            self._ask(asks)
        else:
            self._line_up(self.models[0], line, asks, then)

    # What somebody may do

    @precondition(lambda self: self.models)
    @rule(asks=st.lists(_drawn("asks"), min_size=1, max_size=4), on=st.integers(0, 3))
    def submit(self, asks: list[Ask], on: int) -> None:
        """Requests that are made in one instant."""
        self._ask(asks, on)

    @precondition(lambda self: self.roomy)
    @rule(
        model=_one("roomy"),
        kind=KINDS_IN_LINE,
        asks=st.lists(_drawn("asks"), max_size=3),
        then=WHO_LEAVES_A_LINE,
    )
    def line_up(self, model: LoadedModel, kind: str, asks: list[Ask], then: str) -> None:
        """Somebody who takes many permits, or all, waits although some are free, and others wait behind."""
        self._line_up(model, kind, asks, then)

    def _line_up(self, model: LoadedModel, kind: str, asks: list[Ask], then: str) -> None:
        patient = attrs.evolve(self.someone, kind=kind)
        heavy = attrs.evolve(patient, weight=9) if model.by_slots else attrs.evolve(patient, kind="writer")
        others = [attrs.evolve(ask, name="fresh", kind=kind, weight=1, keys=()) for ask in asks]
        (runs,) = self._submit([(patient, model)])
        (blocker,) = self._submit([(heavy, model)])
        self._submit([(ask, model) for ask in [*others, patient]])
        if then == "the callers leave":
            self._do(self._cancel_callers_like, runs)
        elif then != "nobody leaves":
            self._cancel(str((blocker if then == "the blocker leaves" else runs).id))

    @precondition(lambda self: self.held)
    @rule(
        job=_one("held"),
        order=st.sampled_from(["return", "return", "raise", "notice"]),
        asks=st.lists(_drawn("asks"), max_size=1),
    )
    def finish(self, job: Job, order: Literal["return", "raise", "notice"], asks: list[Ask]) -> None:
        """A handler that waits goes on to its end.  A newcomer may come in the same instant (A3)."""

        def finish() -> None:
            job.order = order
            job.orders.set()
            for ask in asks:
                if job.on in self.models:
                    self._start_call(self._job(ask, job.on))

        self._do(finish)

    ways_to_cancel: tuple[str, ...] = ("by id", "by id", "by its caller", "all on its model")

    @precondition(lambda self: self.anybody)
    @rule(job=_one("anybody"), how=st.runner().flatmap(lambda machine: st.sampled_from(machine.ways_to_cancel)))
    def cancel(self, job: Job, how: str) -> None:
        event(f"cancel {how}")
        {
            "by id": lambda: self._cancel(str(job.id)),
            "by its caller": lambda: self._do(self._cancel_scope, job),
            "by both, the caller first": lambda: self._do(self._cancel_both, job, "first"),
            "by both, the caller last": lambda: self._do(self._cancel_both, job, "last"),
            "by both, the caller when it ends": lambda: self._do(self._cancel_both, job, "when it ends"),
            "all of its kind": lambda: self._cancel_all(None, job.ask.kind),
            "all on its model": lambda: self._cancel_all(job.on, None),
            "all of its kind on its model": lambda: self._cancel_all(job.on, job.ask.kind),
            "everything": lambda: self._cancel_all(None, None),
            "the callers of its kind": lambda: self._do(self._cancel_callers_like, job),
        }[how]()

    @precondition(lambda self: self.resting)
    @rule(job=_one("resting"), how=st.sampled_from(["leave", "leave", "raise", "read"]))
    def leave(self, job: Job, how: Literal["leave", "raise", "read"]) -> None:
        """A caller that rests in its block leaves it, with or without an error, or reads on."""
        job.leave_how = how
        job.reads_late = not job.live and not job.events
        self._do(job.leave.set)

    @rule(seconds=_drawn("waits"), asks=st.lists(_drawn("asks"), max_size=2), on=st.integers(0, 3))
    def wait(self, seconds: float, asks: list[Ask], on: int) -> None:
        """Time passes, and then somebody comes."""
        self._advance(seconds)
        self._ask(asks, on)

    @precondition(lambda self: self.live)
    @rule(job=_one("live"), ask=_drawn("asks"))
    def follow(self, job: Job, ask: Ask) -> None:
        """C4: somebody awaits the end of a request, and then takes its place without waiting."""
        ask = attrs.evolve(ask, name="fresh", overflow="reject", prepares=0.0)
        follower = self._job(ask, job.on)

        async def follow() -> Any:
            assert job.id is not None
            try:
                await self.engine.wait_ended(job.id)
            except trio.Cancelled as error:
                self.note("refused", follower, error)
                raise
            self.note("wait_ended", job)
            return await self._call(follower)

        self._start(follower, follow)
        self._judge()

    @precondition(lambda self: not self.model.closed and len(self.models) + len(self.loading) < 2 and self.free_names)
    @rule(load=_drawn("loads"))
    def load(self, load: Load) -> None:
        event("a model is loaded beside others" if self.models else "a model is loaded again")
        self._load(self.free_names[0], load)

    def reached(self, entry: Entry) -> None:
        """For Hypothesis' statistics: how often the interesting things happen."""
        if entry.what == "ended":
            record = entry.about[0]
            event(f"a request ended as {record.outcome}{'' if record.ticket is None else ', having had a ticket'}")
        elif entry.what == "refused":
            _, error = entry.about
            policy = isinstance(error, laneway.RequestRejectedByPolicyError)
            event(f"a request was refused: {error.reason if policy else type(error).__name__}")
        elif entry.what == "leaving":
            job, error = entry.about
            if isinstance(error, trio.Cancelled) and not job.scope_cancelled:
                at = "decoding" if job.deliveries else "in its handler" if job.state == "running" else job.state
                event(f"a deadline while {at}")
        elif entry.what == "answered":
            *_, end = entry.about
            event(f"a sequence ended: {getattr(end, 'stop_reason', type(end).__name__)}")
        elif entry.what == "step":
            *_, jobs = entry.about
            event(f"a step of {len(jobs)} requests")

    # An idle engine is shut down at the end of every example, so the next rules wait for something to disturb.

    @precondition(lambda self: self.restless and self.busy_models)
    @rule(model=_one("busy_models"))
    def unload(self, model: LoadedModel) -> None:
        event("unload with requests")

        def unload() -> None:
            self.model.unload(model, self.run.now)
            model.unloader = self.run.start_soon(self.engine.unload_model, model.real)

        self._do(unload)

    @precondition(lambda self: not self.model.closed and (self.live or self.loading) and self.restless)
    @rule()
    def shut_down(self) -> None:
        """The engine's block ends."""
        event("shutdown with requests" if self.live else "shutdown without requests")

        def close() -> None:
            self.model.close(self.run.now)
            self.stop.set()

        self._do(close)

    @precondition(lambda self: not self.model.closed and self.live and self.restless)
    @rule()
    def cancel_program(self) -> None:
        """The program around the engine's block is cancelled."""
        event("the program is cancelled with requests")

        def collapse() -> None:
            self.model.collapse(self.run.now)
            self.host.scope.cancel()

        self._do(collapse)

    @property
    def restless(self) -> bool:
        """Enough has happened for somebody to end it all."""
        return self.rounds - self.opened_at > self.patience

    # Not after the program was cancelled: the order in which Trio cancels all its tasks differs from run to run, and so
    # would all that came after it.
    @precondition(lambda self: not self.model.collapsed)
    @precondition(lambda self: self.model.closed and self.host.done and not self.jobs and not self.loading)
    @rule(load=_drawn("loads"))
    def open_again(self, load: Load) -> None:
        self._open()
        self._load("a", attrs.evolve(load, seconds_to_load=0.0))

    # What must hold whenever everything is at rest, asked of the engine

    @invariant()
    def promises_are_kept(self) -> None:
        """All of them, in one invariant: Hypothesis prints the name of each between any two steps."""
        self.the_snapshot_tells_what_is_so()
        self.caps_and_limits_hold()
        self.an_exclusive_request_runs_alone()
        self.no_lane_idles_while_it_could_work()
        self.every_run_has_one_state()
        self.the_decoder_is_used_as_it_allows()
        self.what_was_read_begins_the_final_text()
        self.slots_are_held_by_those_who_run()
        self.a_paused_run_is_not_fed()
        self.nothing_is_left_when_idle()

    def the_snapshot_tells_what_is_so(self) -> None:
        if self.host.done:
            return
        snapshot = self.engine.snapshot()
        assert snapshot.closed == self.model.closed
        present = [model for model in self.all_models if model.door != "unloaded"]
        assert {model.name for model in snapshot.models} == {model.name for model in present}
        for model in present:
            told = snapshot.model(model.name)
            state = "unloading" if model.door == "unloading" or self.model.closed else "loaded"
            if state == "loaded" and model.failed:
                state = "failed"
            assert told.state == state or self.model.collapsed, f"{model} is {told.state}, should be {state}"
            if not self.model.collapsed:
                self._check_lanes(model, told)
            without = [job.id for job in self.live if job.on is model and job.ticket is None]
            assert sorted(request.request_id for request in told.without_lane) == sorted(map(str, without))

    def _check_lanes(self, model: LoadedModel, told: laneway.ModelSnapshot) -> None:
        caps = {"": float(model.admission.parallel), **model.admission.caps}
        assert {lane.group for lane in told.lanes} == set(caps), f"A11: {told.lanes}"
        for lane in told.lanes:
            running = [ticket for ticket in model.admission.running if ticket.lane == lane.group]
            line = model.admission.line(lane.group)
            assert [r.request_id for r in lane.running] == [self.model.by_ticket(t).id for t in running]
            assert [r.request_id for r in lane.waiting] == [self.model.by_ticket(t).id for t in line]
            assert [r.position for r in lane.waiting] == list(range(1, len(line) + 1))
            assert (lane.cap, lane.used) == (caps[lane.group], model.admission.used(lane.group))
            assert lane.queue_limit == model.admission.queue_limit
            for request in (*lane.running, *lane.waiting):
                job = self.model.by_id(request.request_id)
                assert job is not None
                assert (request.state, request.kind) == (job.state, job.ask.kind)
                assert request.age == self.run.now - job.arrived_at

    def caps_and_limits_hold(self) -> None:
        """A2, A4, without the model's help."""
        for lane in self._lanes():
            assert lane.used <= lane.cap, f"A2: {lane.used} of {lane.cap} permits are given"
            assert len(lane.waiting) <= lane.queue_limit, f"A4: {len(lane.waiting)} wait, {lane.queue_limit} may"

    def an_exclusive_request_runs_alone(self) -> None:
        """A6."""
        for model in self.models:
            running = [job for job in self.live if job.on is model and job.has_permit]
            alone = any(job.operation.use is laneway.Use.EXCLUSIVE for job in running)
            assert len(running) <= 1 or not alone, f"A6: {running} run together"

    def no_lane_idles_while_it_could_work(self) -> None:
        """A3: where nothing of a model runs, nobody waits."""
        for model in self._snapshots():
            running = [request for lane in model.lanes for request in lane.running]
            waiting = [request for lane in model.lanes for request in lane.waiting]
            assert running or not waiting, f"A3: nothing runs on {model.name!r} and {waiting} wait"

    def every_run_has_one_state(self) -> None:
        for job in self.jobs:
            if job.run is None:
                continue
            state = job.run.state
            if not self.model.collapsed:
                assert state == job.state, f"{job} is {state}, should be {job.state}"
            assert (state in ENDS) == (not job.live), f"{job} is {state}, should be {job.state}"

    def the_decoder_is_used_as_it_allows(self) -> None:
        for model in self.all_models:
            model.decoder.assert_obeyed()

    def what_was_read_begins_the_final_text(self) -> None:
        """S1."""
        for job in self.jobs:
            for index in range(len(job.prompts)):
                texts = job.texts(index)
                if texts:
                    _, text, _ = self.model.expected_answer(job, index)
                    assert text.startswith("".join(texts)), f"S1: {job} has read {texts}, the text is {text!r}"

    def slots_are_held_by_those_who_run(self) -> None:
        """A8: whatever is in a slot belongs to somebody who runs."""
        for model in self.all_models:
            if model.may_fail or model.door == "unloaded":
                continue
            for slot, prompt in model.decoder.prompts.items():
                owner = self.owners[prompt]
                assert owner.live, f"A8: slot {slot} holds a sequence of {owner}, which is {owner.state}"

    def a_paused_run_is_not_fed(self) -> None:
        """S2, opt-in: who is paused keeps slot and permit and decodes nothing."""
        for model in self._snapshots():
            for request in model.stalled:
                job = self.model.by_id(request.request_id)
                assert job is not None
                assert job.ask.backpressure == "pause", f"S2: {job} did not ask to be paused"
                event("a run is paused")
                assert request.paused_seconds is not None
                since = self.run.now - request.paused_seconds
                late = sum(when > since for when in job.deliveries)
                # The step under way when it was paused, and what a prompt that was being taken in gave.
                assert late <= 2 * len(job.prompts), f"S2: {job} was given {late} tokens after it was paused"

    def nothing_is_left_when_idle(self) -> None:
        """A11: no slot, no task, no timer."""
        if self.jobs or self.loading:
            return
        for model in self.all_models:
            if not model.may_fail:
                model.decoder.assert_idle()
        if self.host.done:
            assert self._tasks() == self.base_tasks, "A11: tasks are left of an engine that has closed"
        elif not self.model.closed and not any(model.may_fail for model in self.models):
            tasks = self._tasks() - self.engine_tasks - self.model_tasks * len(self.models)
            assert tasks == 0, f"A11: {tasks} tasks are left of requests that have ended"
        assert trio.lowlevel.current_statistics().seconds_to_next_deadline == math.inf, "A11: a timer is left"

    # The end

    def teardown(self) -> None:
        if not hasattr(self, "run"):
            return
        found = sys.exc_info()[1]
        if found is not None or not hasattr(self, "engine"):
            # Something was found, or the example is cut short: nothing more is to be learnt from this run.
            self._tell_the_story(found)
            self._abandon()
            return
        try:
            self._wind_up()
        except BaseException as error:
            self._tell_the_story(error)
            self._abandon()
            raise
        self.run.close()

    def _tell_the_story(self, error: BaseException | None) -> None:
        if isinstance(error, Exception):
            error.add_note("What had happened:\n" + "\n".join(self.told[-60:]))

    def _abandon(self) -> None:
        with contextlib.suppress(Exception):
            self.run.step(self._let_go)
        # A broken engine may break the cancelling, too.  What is left then is killed, so that the thread is free again.
        for _ in range(3):
            if not self.run.over:
                with contextlib.suppress(Exception):
                    self.run.close()

    def _let_go(self) -> None:
        self._release_all()
        for model in self.all_models:
            model.decoder.hang_at.clear()
            model.decoder.interrupt()

    def _wind_up(self) -> None:
        """Let everybody come to an end; nothing may be left."""
        self._do(self._end_hanging)
        if len(self.live) > 50:
            self._cancel_all(None, None)
        while late := [job for job in self.resting if not job.live]:
            self.leave(late[0], "read")
        self._do(self._release_all)
        self._advance(1000.0)
        left = [job for job in self.jobs if job.live]
        assert not left, f"{left} do not end, and nobody keeps them"
        assert not self.jobs, f"the callers of {self.jobs} do not come back"
        self.nothing_is_left_when_idle()
        if not self.model.closed:
            self.shut_down()
        self.nothing_is_left_when_idle()

    def _release_all(self) -> None:
        for job in self.jobs:
            job.orders.set()
            job.leave_how = job.leave_how if job.leave.is_set() else "read"
            job.leave.set()

    def _end_hanging(self) -> None:
        for model in self.all_models:
            if model.hangs:
                model.interrupted = True
                model.decoder.interrupt()
            model.decoder.hang_at.difference_update(range(len(model.steps) + 1, len(model.steps) + 100))


class RequestMachine(EngineMachine):
    """Who runs when, and how requests end.  Handlers wait to be told, or for a while; none generates."""

    someone = Ask()
    waits = st.sampled_from([0.0, 1 / 64, 2 / 64, 1 / 8, 1 / 2, 1.0, 2.0])
    ways_to_cancel = (
        *["by id"] * 3,
        *["by its caller"] * 2,
        "by both, the caller first",
        "by both, the caller last",
        "by both, the caller when it ends",
        "all of its kind",
        "all of its kind on its model",
        "everything",
        "the callers of its kind",
        "the callers of its kind",
    )

    asks = st.builds(
        Ask,
        kind=st.sampled_from(
            ["shared"] * 6
            + ["common"] * 5
            + ["writer"] * 4
            + ["stubborn", "stubborn", "side", "side", "training", "unique", "beside", "beside_stubborn", "hasty"]
        ),
        work=st.builds(
            Work,
            held=st.sampled_from([True, True, True, False]),
            lingers=st.sampled_from([False, False, False, True]),
            seconds=mostly(0.0, 1 / 64, 1 / 2, odds=2),
        ),
        name=st.sampled_from(["fresh", "fresh", "minted"]),
        keys=mostly((), ("a",), ("b",), ("a", "b"), odds=1),
        weight=st.sampled_from([1, 1, 1, 2, 3, 9]),
        overflow=mostly(None, "reject", "queue"),
        queue_timeout=mostly(None, 0.0, 1 / 64, 1 / 2, odds=3),
        cap=mostly(None, 1, 2.7, math.inf),
        reads=st.sampled_from(["result", "result", "events", "admitted", "one", "never", "never"]),
        deadline=mostly(None, 0.0, 1 / 64, 1 / 2, odds=3),
        prepares=mostly(0.0, 1 / 64, 1 / 2),
    )
    loads = st.builds(
        Load,
        parallel=st.sampled_from([1, 2, 3, 3, 4]),
        queue_limit=st.sampled_from([0, 1, 2, 5, 5, 5, 160]),
        by_slots=st.booleans(),
        queue_timeout=mostly(None, 1 / 2, odds=4),
        seconds_to_load=mostly(0.0, 1 / 2, odds=3),
    )

    @precondition(lambda self: self.models)
    @rule(
        asks=st.lists(_drawn("asks"), min_size=1, max_size=3), on=st.integers(0, 3), over=st.sampled_from([-1, 0, 0, 1])
    )
    def crowd(self, asks: list[Ask], on: int, over: int) -> None:
        """One operation is asked for so often that its lane's line is full, lacks one, or should have one too many."""
        model = self.models[on % len(self.models)]
        line = model.admission.line(OPERATIONS[asks[0].kind].lane_group)
        free = model.admission.queue_limit - len(line)
        if free > 20:
            event("a great crowd")
        crowd = [attrs.evolve(ask, kind=asks[0].kind, name="fresh", queue_timeout=None) for ask in asks]
        self._submit([(ask, model) for ask in itertools.islice(itertools.cycle(crowd), max(1, free + over))])

    @precondition(lambda self: self.models)
    @rule(ask=_drawn("asks"), known=st.integers(0, 5), seconds=st.sampled_from([0.0, 0.0, 29.0, 30.0, 31.0]))
    def submit_with_a_known_id(self, ask: Ask, known: int, seconds: float) -> None:
        """A9, C5: with an id that others have or have had, or that was cancelled when nobody had it."""
        ids = [*self.known_ids[-3:], *self.cancelled_ids[-3:]]
        self._advance(seconds)
        self._do(lambda: self._start_call(self._job(ask, self.models[0], ids[-1 - known % len(ids)])))

    @rule(known=st.integers(0, 4))
    def cancel_an_id(self, known: int) -> None:
        """One of long ago, or of a request that is still to come."""
        self._cancel(self.known_ids[-1 - known % len(self.known_ids)])

    @precondition(lambda self: any(job.handler == "inside" for job in self.live))
    @rule(pick=st.integers(0, 9), key=st.sampled_from("abc"))
    def claim(self, pick: int, key: str) -> None:
        """A13: a handler tries for one more key."""
        inside = [job for job in self.live if job.handler == "inside"]
        job = inside[pick % len(inside)]

        def claim() -> None:
            expected = job.ticket is not None and job.on.admission.try_claim(job.ticket, key)
            assert job.ctx.claim(key) is expected, f"A13: {job} claims {key!r}, should be {expected}"

        if not self.model.collapsed:
            self._do(claim)

    @precondition(lambda self: any(job.ask.reads == "result" for job in self.reading))
    @rule(pick=st.integers(0, 9))
    def interfere(self, pick: int) -> None:
        """R5: a second task reads a run."""
        reading = [job for job in self.reading if job.ask.reads == "result"]
        job = reading[pick % len(reading)]
        assert job.run is not None
        second = self.run.start(job.run.result)
        assert isinstance(getattr(second.outcome, "error", None), trio.BusyResourceError), f"R5: {second}"
        self._judge()

    @precondition(lambda self: self.loading)
    @rule(loading=_one("loading"))
    def cancel_load(self, loading: Loading) -> None:
        self._do(loading.task.scope.cancel)

    @precondition(lambda self: self.unloaders)
    @rule(unloader=_one("unloaders"))
    def cancel_unload(self, unloader: GuestTask[None]) -> None:
        """C8: an unload once begun runs to its end; a cancelled caller only stops waiting."""
        unloader.cancel()
        assert unloader.cancelled, f"C8: {unloader} was cancelled and waits on"
        self._judge()


def _rest() -> st.SearchStrategy[tuple[int, ...]]:
    return st.builds(
        lambda token, length: (token,) * length,
        st.sampled_from([ord("a"), ord("b")]),
        st.sampled_from([0, 0, 1, 2, 4, 5, 9, 13, 40]),
    )


def _pausable(ask: Ask) -> Ask:
    """What is to be paused has to say enough."""
    if ask.backpressure == "merge":
        return ask
    prompts = tuple(attrs.evolve(prompt, max_tokens=None, rest=(), stop=()) for prompt in ask.work.prompts)
    return attrs.evolve(ask, work=attrs.evolve(ask.work, prompts=prompts, take="put"))


class DecodingMachine(EngineMachine):
    """Tokens: whatever happens to others, who is left alone gets what it would get alone."""

    someone = Ask(work=Work(prompts=(Prompt(),)))

    asks = st.builds(
        Ask,
        kind=st.sampled_from(["shared"] * 8 + ["writer", "common", "common", "stubborn", "beside", "side"]),
        work=st.builds(
            Work,
            prompts=st.lists(
                st.builds(
                    Prompt,
                    rest=_rest(),
                    max_tokens=st.sampled_from([None, None, 1, 2, 5, 60]),
                    stop=mostly((), ("e",), ("the", "a"), odds=3),
                    overlong=mostly(False, True, odds=15),
                ),
                min_size=1,
                max_size=4,
            ).map(tuple),
            take=st.sampled_from(["put", "put", "iterate", "finish"]),
            leaves=mostly("tidy", "early", "forgetful", odds=3),
            held=mostly(False, True, odds=7),
            lingers=st.booleans(),
        ),
        keys=mostly((), ("a",), odds=5),
        weight=st.sampled_from([1, 1, 2]),
        reads=st.sampled_from(["result", "events", "events", "slowly", "one", "never", "never"]),
        backpressure=mostly("merge", "pause", odds=3),
        deadline=mostly(None, 1 / 64, 3 / 64, 1 / 8, 1 / 2, odds=4),
    ).map(_pausable)
    loads = st.builds(
        Load,
        parallel=st.sampled_from([1, 2, 3, 4, 4]),
        queue_limit=st.sampled_from([1, 5, 5]),
        by_slots=st.booleans(),
        stall_timeout=mostly(None, 1 / 2, odds=2),
        window=st.sampled_from([8, 24, 48, 48]),
        end_every=st.sampled_from([None, 24, 24]),
        seconds_per_step=st.sampled_from([0.0, 1 / 64, 1 / 64, 1 / 8]),
        contiguous=st.booleans(),
        rounds=st.sampled_from([1, 1, 3]),
        fails_every=mostly(None, 3, 5, 9, odds=4),
    )

    patience = 15
    waits = st.sampled_from([1, 2, 3, 5, 8, 13, 21, 34, 64]).map(lambda ticks: ticks / 64)

    @precondition(lambda self: self.decoding)
    @rule(
        model=_one("decoding"),
        how=st.sampled_from(["a step fails"] * 4 + ["three steps fail", "a step hangs", "a drop fails"]),
        ahead=st.integers(1, 4),
    )
    def let_it_go_wrong(self, model: LoadedModel, how: str, ahead: int) -> None:
        """C9, C11: soon, on a model where several sequences are under way."""
        number = model.decoder.statistics().steps + ahead
        if how == "a step hangs":
            model.decoder.hang_at.add(number)
        elif how != "a drop fails":
            for failing in range(number, number + (3 if how == "three steps fail" else 1)):
                fail_step(model.decoder, failing)
        elif model.drop_failure is None:
            model.drop_failure = model.decoder.statistics().drops + 1
            model.decoder.fail_drop[model.drop_failure] = laneway.DecodeError("this drop was to fail")

    @property
    def decoding(self) -> list[LoadedModel]:
        """The models where several sequences are under way."""
        return [model for model in self.models if model.stuck and len(model.decoder.prompts) > 1]

    @invariant()
    def no_step_runs_for_nobody(self) -> None:
        """C9: a call that nobody wants is interrupted."""
        for model in self.models:
            if model.stuck and not self.model.collapsed:
                wanted = [job for job in model.steps[max(model.steps)] if job.doom is None or not job.keeps_its_scope]
                assert wanted, f"C9: {model} decodes for nobody but {model.steps[max(model.steps)]}"

    def reached(self, entry: Entry) -> None:
        super().reached(entry)
        if entry.what != "rest":
            return
        for model in self.models:
            if model.failed:
                event("a model has failed")
            if model.hangs:
                event("a step hangs")
            if model.decoder.statistics().moves:
                event("sequences were moved")
            if model.decoder.statistics().max_concurrency > 2:
                event("three or more were decoded together")
