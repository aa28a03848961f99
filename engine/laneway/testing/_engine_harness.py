"""What the state machines of :mod:`laneway.testing._engine_machine` drive: an engine with everybody around it.

Callers, handlers, an observer and scripted models, all of which note down what happens to them, on the spot and in
order.  When everything has come to rest, :class:`laneway.testing._engine_model.EngineModel` judges the notes.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import attrs
import trio
from hypothesis import event

import laneway
from laneway.decoder import BatchPolicy, StepBatch
from laneway.testing._admission_machine import AdmissionModel
from laneway.testing._backend import ScriptedLoader
from laneway.testing._decoder import ScriptedDecoder
from laneway.testing._engine_model import SAMPLING, Ask, EngineModel, Entry, HandlerError, Job, LoadedModel, Result
from laneway.testing._guest import GuestRun, GuestTask

# What the engine is given: operations with every declaration, and an observer


@attrs.frozen(eq=False)
class _Order:
    """A request of the operations below."""

    harness: EngineHarness
    job: Job


async def _prepare(model: laneway.Model, order: _Order) -> laneway.Prepared:
    job, ask = order.job, order.job.ask
    if ask.prepares:
        await trio.sleep(ask.prepares)
    for prompt in job.prompts:
        model.check_prompt(prompt)
    order.harness.note("arriving", job)
    return laneway.Prepared(weight=ask.weight, keys=ask.keys, payload=order)


async def _handle(ctx: laneway.RequestContext, prepared: laneway.Prepared) -> Result:
    order: _Order = prepared.payload
    return await order.harness.handle(ctx, order.job)


def _operation(kind: str, **declared: Any) -> laneway.Operation:
    return laneway.Operation(kind=kind, request_type=_Order, prepare=_prepare, handler=_handle, **declared)


OPERATIONS = {
    operation.kind: operation
    for operation in (
        _operation("shared"),
        _operation("writer", use="exclusive"),
        _operation("training", use="exclusive", scope="model", unique=True),
        _operation("unique", unique=True),
        _operation("common", scope="model"),
        _operation("stubborn", scope="none"),
        _operation("beside", use="none"),
        _operation("beside_stubborn", use="none", scope="none"),
        _operation("side", lane_group="side"),
        _operation("hasty", overflow="reject"),
    )
}
"""One for each declaration that the contract speaks of, by kind."""

PLUGIN = laneway.PluginSpec(name="machine", operations=tuple(OPERATIONS.values()))


class _Observer:
    """Notes down what the engine tells of its requests."""

    def __init__(self, harness: EngineHarness) -> None:
        self._harness = harness

    @laneway.hookimpl
    def laneway_request_queued(self, record: laneway.RequestRecord) -> None:
        self._harness.note("queued", record)

    @laneway.hookimpl
    def laneway_request_admitted(self, record: laneway.RequestRecord) -> None:
        self._harness.note("admitted", record)

    @laneway.hookimpl
    def laneway_request_cancelled(self, record: laneway.RequestRecord) -> None:
        self._harness.note("cancelled", record)

    @laneway.hookimpl
    def laneway_request_ended(self, record: laneway.RequestRecord) -> None:
        self._harness.note("ended", record)
        self._harness.take_the_caller_along(record.request_id)


@attrs.frozen
class Load:
    """How a model is loaded."""

    parallel: int = 2
    queue_limit: int = 5
    by_slots: bool = False
    queue_timeout: float | None = None
    stall_timeout: float | None = None
    window: int = 24
    seconds_per_step: float = 1 / 64
    seconds_to_load: float = 0.0
    contiguous: bool = False
    rounds: int = 1
    """How many tokens of each sequence a step may make."""
    end_every: int | None = 24
    fails_every: int | None = None
    """One step in so many fails."""


@attrs.define(eq=False)
class Loading:
    """A load under way."""

    name: str
    load: Load
    task: GuestTask[laneway.Model]


def fail_step(decoder: ScriptedDecoder, number: int) -> None:
    """Let a step fail, with an error of its own."""
    decoder.fail_at[number] = laneway.DecodeError(f"step {number} was to fail", status=-1)


class EngineHarness:
    """An engine, its models, and all who use it."""

    @staticmethod
    def open_engine(plugins: Sequence[Any]) -> AbstractAsyncContextManager[laneway.Engine]:
        """Open what is tested.  To be overridden."""
        return laneway.open_engine(plugins=plugins)

    def __init__(self) -> None:
        super().__init__()
        self.jobs: list[Job] = []  # those that live, or whose caller is still about
        self.known_ids: list[str] = ["early"]
        self.cancelled_ids: list[str] = []  # when nobody had them
        self.owners: dict[tuple[int, ...], Job] = {}
        self.log: list[Entry] = []
        self.told: list[str] = []
        self.rounds = 0  # of something being done and judged
        self.numbers = itertools.count()
        self.loading: list[Loading] = []
        self.all_models: list[LoadedModel] = []
        self.run: GuestRun[None]
        self.engine: laneway.Engine
        self.host: GuestTask[None]

    def reached(self, entry: Entry) -> None:
        """Something has happened, and was right.  To be overridden, for statistics."""

    # What can be picked.

    @property
    def live(self) -> list[Job]:
        """Those between arrival and the end of their teardown."""
        return self.model.live

    @property
    def models(self) -> list[LoadedModel]:
        """The models that take requests, or have failed."""
        return [] if self.model.closed else [m for m in self.model.models.values() if m.door == "open"]

    @property
    def free_names(self) -> list[str]:
        """Names for another model.  One that is unloading still has its own."""
        taken = {*self.model.models, *(loading.name for loading in self.loading)}
        return [name for name in "abc" if name not in taken]

    @property
    def busy_models(self) -> list[LoadedModel]:
        return [model for model in self.models if model.failed or any(job.on is model for job in self.live)]

    @property
    def unloaders(self) -> list[GuestTask[None]]:
        """Those who wait for the end of an unload."""
        unloaders = [model.unloader for model in self.all_models]
        return [unloader for unloader in unloaders if unloader is not None and not unloader.done]

    @property
    def roomy(self) -> list[LoadedModel]:
        """The models where nobody waits and more than one permit is free."""
        open_ones = [model for model in self.models if not model.failed and not model.admission.waiting]
        return [m for m in open_ones if m.admission.used("") + 1 < m.admission.caps.get("", m.admission.parallel)]

    @property
    def anybody(self) -> list[Job]:
        """All that are there, ended ones whose callers are in their blocks included; the more others may wait for one,
        the more often."""
        tickets = [ticket for model in self.models if not model.failed for ticket in model.admission.blockers]
        blocking = [job for job in self.live if job.state == "waiting" and job.ticket in tickets]
        running = [job for job in self.live if job.state == "running"]
        ended = [job for job in self.inside if not job.live]
        return self.live + ended + running * 3 + blocking * 3

    @property
    def held(self) -> list[Job]:
        return [job for job in self.live if job.held]

    @property
    def inside(self) -> list[Job]:
        """Those whose callers are in their blocks."""
        return [job for job in self.jobs if job.caller == "inside"]

    @property
    def reading(self) -> list[Job]:
        return [job for job in self.inside if not job.rests]

    @property
    def resting(self) -> list[Job]:
        return [job for job in self.inside if job.rests]

    # How it is done.

    def _open(self) -> None:
        self.model = EngineModel()
        self.all_models = []
        self.loader = ScriptedLoader()
        self.stop = trio.Event()
        self.model_tasks = 0
        self.opened_at = self.rounds
        self.host = self.run.start(self._host)
        self.engine_tasks = self._tasks()

    async def _host(self) -> None:
        plugins = [self.loader.plugin, PLUGIN, _Observer(self)]
        async with self.open_engine(plugins) as engine:
            self.engine = engine
            await self.stop.wait()

    def _load(self, name: str, load: Load) -> None:
        policy = BatchPolicy(
            contiguous=load.contiguous,
            unified_kv=not load.contiguous,
            joint_prompts=not load.contiguous,
            chunk_quantum=4,
            chunk_min=4,
            chunk_max=8,
            chunk_probe=4,
            rounds_target=load.seconds_per_step * load.rounds if load.rounds > 1 else 0.0,
            rounds_max=load.rounds,
        )

        async def do() -> laneway.Model:
            return await self.engine.load_model(
                f"scripted:{name}",
                load.parallel,
                name=name,
                queue_limit=load.queue_limit,
                queue_timeout=load.queue_timeout,
                admission="slots" if load.by_slots else "requests",
                context_size=load.parallel * load.window,
                seconds_per_step=load.seconds_per_step,
                seconds_to_load=load.seconds_to_load,
                end_every=load.end_every,
                stall_timeout=load.stall_timeout,
                policy=policy,
            )

        before = self._tasks()
        self.loading.append(Loading(name, load, self.run.start(do)))
        self._judge()
        if not self.model_tasks and not self.loading:
            self.model_tasks = self._tasks() - before

    def _loaded(self, loading: Loading) -> None:
        self.loading.remove(loading)
        if loading.task.cancelled:
            event("a load was cancelled")
            return
        if self.model.closed and isinstance(getattr(loading.task.outcome, "error", None), laneway.EngineClosedError):
            event("the engine closed during a load")
            return
        load, decoder = loading.load, self.loader.decoders[f"scripted:{loading.name}"]
        model = LoadedModel(
            name=loading.name,
            real=loading.task.result(),
            decoder=decoder,
            admission=AdmissionModel(load.parallel, load.queue_limit),
            by_slots=load.by_slots,
            queue_timeout=load.queue_timeout,
            stall_timeout=load.stall_timeout,
            seconds_per_step=load.seconds_per_step,
        )

        def at_step(number: int, batch: StepBatch) -> None:
            slots = decoder.prompts
            jobs = model.steps[number] = frozenset(self.owners[slots[chunk.slot]] for chunk in batch.chunks)
            self.note("step", model, number, jobs)

        decoder.at_step = at_step
        if load.fails_every is not None:
            for number in range(load.fails_every, 1000, load.fails_every):
                fail_step(decoder, number)
        self.model.models[loading.name] = model
        self.all_models.append(model)

    def _ask(self, asks: list[Ask], on: int = 0) -> None:
        """All of them of one of the models, if there is one."""
        models = self.models
        if asks and models:
            self._submit([(ask, models[on % len(models)]) for ask in asks])

    def _submit(self, asks: Iterable[tuple[Ask, LoadedModel]]) -> list[Job]:
        jobs = []

        def submit() -> None:
            for ask, model in asks:
                jobs.append(self._job(ask, model))
                self._start_call(jobs[-1])

        self._do(submit)
        return jobs

    def _start_call(self, job: Job) -> None:
        self._start(job, lambda: self._call(job))

    def _job(self, ask: Ask, model: LoadedModel, request_id: str | None = None) -> Job:
        number = next(self.numbers)
        timeout = ask.queue_timeout
        # No two waits are over in the same instant: in which order they end is not for the contract to say.
        if timeout is None and (ask.prepares or model.last_asked == self.run.now):
            timeout = model.queue_timeout
        model.last_asked = self.run.now
        if timeout is not None:
            ask = attrs.evolve(ask, queue_timeout=timeout + (number + 1) / 2**30)
        if request_id is None and ask.name == "fresh":
            request_id = f"r{number}"
        room = model.decoder.window - 4
        prompts = tuple(
            (number // 200, number % 200, index, *(prompt.rest if prompt.overlong else prompt.rest[:room]))
            for index, prompt in enumerate(ask.work.prompts)
        )
        job = Job(
            number=number,
            ask=ask,
            operation=OPERATIONS[ask.kind],
            on=model,
            id=request_id,
            prompts=prompts,
            orders=trio.Event(),
            leave=trio.Event(),
        )
        if job.id is not None and job.id not in self.known_ids[-10:]:
            self.known_ids.append(job.id)
        self.owners.update(dict.fromkeys(prompts, job))
        self.jobs.append(job)
        self.model.jobs.append(job)
        return job

    def _start(self, job: Job, call: Callable[[], Any]) -> None:
        job.task = self.run.start_soon(call, name=f"caller of {job}")
        if job.ask.deadline is not None:
            job.task.scope.deadline = self.run.now + job.ask.deadline

    async def _call(self, job: Job) -> Any:
        """A caller."""
        ask = job.ask
        manager = self.engine.run(
            job.on.real,
            ask.kind,
            _Order(self, job),
            request_id=job.id,
            overflow=ask.overflow,
            queue_timeout=ask.queue_timeout,
            cap=ask.cap,
            backpressure=ask.backpressure,
        )
        try:
            async with manager as job.run:
                self.note("inside", job)
                job.reads.append(trio.current_time())
                error: BaseException | None = None
                try:
                    return await self._read(job, job.run)
                except BaseException as caught:
                    error = caught
                    raise
                finally:
                    self.note("leaving", job, error)
        except BaseException as error:
            if job.run is None:
                self.note("refused", job, error)
            raise
        finally:
            if job.run is not None:
                self.note("left_block", job)

    async def _read(self, job: Job, run: laneway.Run) -> Any:
        reads = job.ask.reads
        if reads == "admitted":
            await run.admitted()
            assert run.state != "waiting"
        if reads in ("result", "admitted"):
            return await run.result()
        if reads == "one":
            async for each in run:
                self._note_event(job, each)
                break
        if reads in ("one", "never"):
            job.rests = True
            await job.leave.wait()
            job.rests = False
            if job.leave_how == "raise":
                raise job.body_error
            if job.leave_how == "leave":
                return None
        try:
            async for each in run:
                self._note_event(job, each)
                if reads == "slowly":
                    await trio.sleep(1 / 2)
        except Exception as error:
            job.iteration_error = error
        return await run.result()

    def _note_event(self, job: Job, each: Any) -> None:
        job.events.append(each)
        job.reads.append(trio.current_time())

    async def handle(self, ctx: laneway.RequestContext, job: Job) -> Result:
        """A handler: see :class:`Work`."""
        self.note("entered", job)
        job.ctx = ctx
        how = "cancelled"
        made: Result | Exception | None = None
        try:
            result = made = await self._work(ctx, job)
            how = "returned"
            return result
        except Exception as error:
            how, made = "raised", error
            raise
        finally:
            self.note("left_handler", job, how, made)

    async def _work(self, ctx: laneway.RequestContext, job: Job) -> Result:
        work = job.ask.work
        answers = await self._generate(ctx, job) if work.prompts else ()
        await trio.sleep(work.seconds)
        if work.held:
            with trio.CancelScope(shield=work.lingers):
                await job.orders.wait()
            if job.order == "raise":
                raise HandlerError(f"of {job}")
            if job.order == "notice":
                await trio.lowlevel.checkpoint()
        return Result(job, answers)

    async def _generate(self, ctx: laneway.RequestContext, job: Job) -> tuple[laneway.Answer, ...]:
        work = job.ask.work
        async with contextlib.AsyncExitStack() as stack:
            streams = []
            for index, prompt in enumerate(work.prompts):
                tokens = ctx.generate(
                    list(job.prompts[index]),
                    SAMPLING,
                    max_tokens=prompt.max_tokens,
                    stop=prompt.stop,
                    deliver=self._deliver(ctx, job, index) if work.take == "put" else None,
                )
                if work.leaves == "forgetful":
                    streams.append(await tokens.__aenter__())
                else:
                    streams.append(await stack.enter_async_context(tokens))
            if work.leaves == "early":
                await trio.sleep(1 / 64)
                return ()
            try:
                async with trio.open_nursery() as nursery:
                    for index, stream in enumerate(streams):
                        nursery.start_soon(self._finish, job, index, stream)
            except BaseExceptionGroup as group:
                # The machine's own nursery; all that its tasks raise is Cancelled.
                raise group.exceptions[0] from None
        failures = [end for end in job.answers.values() if isinstance(end, Exception)]
        if failures:
            raise failures[0]
        return tuple(job.answers[index] for index in range(len(streams)))  # type: ignore[misc]

    def _deliver(self, ctx: laneway.RequestContext, job: Job, index: int) -> Callable[[laneway.TextDelta], None]:
        said = job.said.setdefault(index, [])

        def deliver(delta: laneway.TextDelta) -> None:
            said.append(delta.text)
            job.deliveries.append(trio.current_time())
            ctx.put(laneway.BatchEvent(str(index), delta))

        return deliver

    async def _finish(self, job: Job, index: int, stream: laneway.Tokens) -> None:
        end: laneway.Answer | Exception
        try:
            if job.ask.work.take == "iterate":
                said = job.said.setdefault(index, [])
                async for delta in stream:
                    said.append(delta.text)
            end = await stream.finish()
        except Exception as error:
            end = error
        job.answers[index] = end
        self.note("answered", job, index, end)

    def _cancel_all(self, model: LoadedModel | None, kind: str | None) -> None:
        reason = f"all of {model} and {kind}"

        def cancel_all() -> None:
            chosen = self.model.cancel_all(model, kind, reason, self.run.now)
            if len(chosen) > 100:
                event("more than a hundred were cancelled at once")
            real = None if model is None else model.real
            count = self.engine.cancel_all(model=real, kind=kind, reason=reason)
            assert count == len(chosen), f"C3: cancel_all ended {count}, should be {chosen}"
            self._check_gone(chosen)

        self._do(cancel_all)

    def _cancel_both(self, job: Job, caller: str) -> None:
        """C6: by id and by the caller's own scope, in one instant."""
        job.caller_dies_with_it = caller == "when it ends"
        if caller == "first":
            self._cancel_scope(job)
        self._cancel_inside(str(job.id))
        if caller == "last":
            self._cancel_scope(job)

    def _cancel_callers_like(self, job: Job) -> None:
        """What surrounds the callers of one operation is cancelled."""
        for other in self.inside:
            if other.ask.kind == job.ask.kind and other.on is job.on:
                self._cancel_scope(other)

    @staticmethod
    def _cancel_scope(job: Job) -> None:
        """The caller's own scope is cancelled."""
        assert job.task is not None
        if not job.task.done:
            job.scope_cancelled = True
            job.task.scope.cancel()

    def take_the_caller_along(self, request_id: str) -> None:
        """C6: the caller's own cancel comes in the instant in which the outcome does."""
        for job in self.jobs:
            if job.id == request_id and job.caller_dies_with_it and job.caller == "inside":
                self._cancel_scope(job)

    def _cancel(self, request_id: str) -> None:
        self._do(self._cancel_inside, request_id)

    def _cancel_inside(self, request_id: str) -> None:
        reason = f"for reason {self.rounds}"
        reached = self.model.cancel(request_id, reason, self.run.now)
        if self.model.by_id(request_id) is None:
            self.cancelled_ids.append(request_id)
        count = self.engine.cancel(request_id, reason)
        assert count == len(reached), f"C3: cancel({request_id!r}) ended {count}, should be {reached}"
        self._check_gone(reached)

    def _check_gone(self, cancelled: Iterable[Job]) -> None:
        """C3: when a cancel returns, a waiter has left the queue."""
        waiting = {request.request_id for lane in self._lanes() for request in lane.waiting}
        left = [job for job in cancelled if job.id in waiting]
        assert not left, f"C3: {left} were cancelled and still wait"

    def note(self, what: str, *about: Any) -> None:
        """Write down what happens, with what can only be seen now."""
        models = self.all_models
        # A model that has failed decodes no more: what is in its slots goes with it.
        sound = [model for model in models if not model.may_fail]
        holding = frozenset(self.owners[prompt] for model in sound for prompt in model.decoder.prompts.values())
        failed = tuple(model for model in models if not model.failed and model.real.state == "failed")
        self.log.append(Entry(what, about, trio.current_time(), holding, failed))

    def _do(self, fn: Callable[..., Any], *args: Any) -> None:
        self.run.step(fn, *args)
        self._judge()

    def _advance(self, seconds: float) -> None:
        self.run.advance(seconds)
        self._judge()

    def _judge(self) -> None:
        """Everything is at rest: was it right?"""
        self.note("rest")
        self.rounds += 1
        entries, self.log = self.log, []
        self.told += [str(entry) for entry in entries if entry.what != "rest"]
        for entry in entries:
            self.model.judge(entry)
            self.reached(entry)
        for loading in list(self.loading):
            if loading.task.done:
                self._loaded(loading)
        self.model.at_rest(self.run.now)
        for job in self.jobs:
            if job.task is not None and job.task.done and not job.judged:
                self.model.judge_caller(job)
                job.judged = True
        self._judge_unloads()
        self._judge_the_end()
        self.jobs = [job for job in self.jobs if job.live or not job.judged]
        self.model.jobs = list(self.jobs)

    def _judge_unloads(self) -> None:
        """C8: an unload ends when the last request on the model has, and frees it; so does the engine's end."""
        for model in self.all_models:
            if model.door == "unloaded" or (model.door == "open" and not self.model.closed):
                continue
            busy = any(job.on is model for job in self.live)
            assert model.real.state == ("unloading" if busy else "unloaded"), f"C8: {model} is {model.real.state}"
            assert busy or model.unloader is None or model.unloader.done, f"C8: {model} is gone, who unloads it waits"
            if not busy:
                self._freed(model)

    def _judge_the_end(self) -> None:
        """C8: an engine has closed when its last request has ended."""
        if self.model.closed:
            assert self.host.done is not bool(self.live), f"C8: {self.live} live, and the engine's block: {self.host}"
            if self.host.done:
                assert self.host.cancelled is self.model.collapsed, f"C6: the engine's block ended with {self.host}"

    def _freed(self, model: LoadedModel) -> None:
        assert model.decoder.history[-1].name == "aclose", f"C8: {model} was not freed"
        assert model.may_fail or not model.decoder.left_at_close, f"C8: {model} was freed with slots in use"
        model.door = "unloaded"
        if self.model.models.get(model.name) is model:
            del self.model.models[model.name]

    def _snapshots(self) -> tuple[laneway.ModelSnapshot, ...]:
        return () if self.host.done else self.engine.snapshot().models

    def _lanes(self) -> list[laneway.LaneSnapshot]:
        return [lane for model in self._snapshots() for lane in model.lanes]

    @staticmethod
    def _tasks() -> int:
        return trio.lowlevel.current_statistics().tasks_living
