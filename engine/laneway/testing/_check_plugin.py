"""One call that tries whether a plugin keeps what it declares, in the spirit of ``trio.testing.check_two_way_stream``.

Each operation runs on a scripted model in a Trio run of its own, in virtual time, again and again: undisturbed,
cancelled at each of its checkpoints and at each step of the decoder, with steps that fail, and with nobody reading.

How a checkpoint is found: the handler is not awaited but driven.  Everything that it awaits comes up, sooner or later,
as a value that its coroutine yields to Trio, so whoever drives the coroutine sees each point at which the task lets go,
and may cancel the request just then; and sees, afterwards, whether Cancelled was thrown in and what came of it.  Only
the handler's own task is driven.  What it starts in nurseries is met by the cancels at the decoder's steps.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import threading
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, NoReturn

import attrs
import trio

import laneway
from laneway.testing._backend import ScriptedLoader
from laneway.testing._decoder import ScriptedDecoder
from laneway.testing._guest import GuestRun, GuestRunError, GuestTask

LOAD: Mapping[str, Any] = {"parallel": 2, "context_size": 2048, "seconds_per_step": 1 / 64}
"""How the scripted model is loaded, unless something else is asked for."""

MAX_TICKS = 50_000


@attrs.define(slots=False, eq=False)
class BrokenPromise(AssertionError):  # noqa: N818 - what happened, like the assertion that it is
    """A plugin does not keep what it declares.  The cause, if there is one, is chained."""

    plugin: str
    kind: str | None
    promise: str
    """What an operation has to keep, as a sentence."""
    what: str
    """What happened instead."""

    def __str__(self) -> str:
        where = f"plugin {self.plugin!r}" if self.kind is None else f"plugin {self.plugin!r}, operation {self.kind!r}"
        return f"{where}: {self.promise}; but {self.what}"


@attrs.frozen(kw_only=True)
class CheckedOperation:
    """What :func:`check_plugin` has done with one operation."""

    kind: str
    checkpoints: int
    """At which its handler lets go, in an undisturbed run."""
    steps: int
    """Steps of the decoder in that run."""
    cancels: int
    """Runs that were cancelled, each at another point."""
    failed_steps: int
    """Runs in which a step failed, each time another one."""


def check_plugin(
    plugin: Any,
    *,
    requests: Mapping[str, Any],
    wrong: Mapping[str, Sequence[Any]] | None = None,
    load: Mapping[str, Any] | Callable[[laneway.Engine], Awaitable[laneway.Model]] | None = None,
    plugins: Iterable[Any] = (),
    patience: float = 3600.0,
    grace: float = 1.0,
    most: int = 100,
) -> tuple[CheckedOperation, ...]:
    """Try each operation of a plugin, and raise :class:`BrokenPromise` where it does not do what it declares.

    A plain function, for plain and for async tests alike: it runs Trio itself, in a thread of its own if the caller's
    has a run already.  Nothing sleeps for real.  What is tried:

    - The plugin loads with ``strict_plugins=True``.
    - ``prepare`` returns a :class:`laneway.Prepared`, changes nothing, lets a cancel through, and refuses a request
      of another type, and those in ``wrong``, with :class:`laneway.InvalidRequestError` or
      :class:`laneway.ContextOverflowError`.
    - A request starts and completes; what it emits is delivered, ``Done`` comes from the engine alone, and
      :class:`laneway.TextDelta` events, joined, are the ``text`` of the result if that has one.
    - With ``use="none"`` it generates nothing; with ``"exclusive"`` nobody runs beside it, with ``"shared"`` others do.
    - A cancel by id ends it within ``grace``, at every checkpoint and every step, whether a reader is there or not:
      ``Cancelled`` is neither swallowed nor turned into another error.  With ``scope="model"`` the others of its scope
      end with it.  With ``scope="none"`` its caller is let go at once, and it runs to its end.
    - A decode step that fails ends it with a bare error, or not at all, but never makes it hang.
    - Nobody has to read for it to end.
    - After each of these runs its permit, its slots, its tasks and its timers are gone.

    :param plugin: a :class:`laneway.PluginSpec`, or a module or object that has the hook ``laneway_plugin``
    :param requests: for each kind of operation a good request, or a function without arguments that makes one
    :param wrong: requests that ``prepare`` has to refuse, by kind
    :param load: options of the scripted loader that differ from :data:`laneway.testing.ScriptedOptions`, ``parallel``
        included; or an async function that loads the model, for operations that work on a service
    :param plugins: what else the engine needs, such as a plugin with a loader
    :param patience: virtual seconds that one request may take
    :param grace: virtual seconds that a cancelled one may take to tear down, beside the step that is under way
    :param most: runs for each way of disturbing it; where there are more points than that, they are spread out
    :returns: what was tried, an item for each operation
    :raises BrokenPromise: with a sentence that names the plugin, the operation and the promise
    :raises ValueError: ``requests`` lacks one of the plugin's kinds, or has others
    :raises TypeError: a request is not of the operation's ``request_type``
    """
    spec = plugin if isinstance(plugin, laneway.PluginSpec) else plugin.laneway_plugin()
    kinds = {operation.kind for operation in spec.operations}
    if requests.keys() != kinds or (wrong and wrong.keys() - kinds):
        named = {*requests, *(wrong or ())}
        raise ValueError(
            f"plugin {spec.name!r} has the operations {', '.join(sorted(kinds)) or 'none'}; give a request for each of "
            f"them, not for {', '.join(sorted(named)) or 'none'}"
        )

    def check() -> tuple[CheckedOperation, ...]:
        _check_that_it_loads(plugin, spec.name, plugins)
        return tuple(
            _Check(
                spec,
                operation,
                requests[operation.kind],
                tuple((wrong or {}).get(operation.kind, ())),
                load=load,
                plugins=tuple(plugins),
                patience=patience,
                grace=grace,
                most=most,
            ).all()
            for operation in spec.operations
        )

    return _in_a_thread(check) if trio.lowlevel.in_trio_run() else check()


def _in_a_thread(check: Callable[[], tuple[CheckedOperation, ...]]) -> tuple[CheckedOperation, ...]:
    """A thread can host one run at a time, and the caller's has one."""
    done: list[tuple[CheckedOperation, ...]] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            done.append(check())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="check_plugin")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return done[0]


@contextlib.contextmanager
def _alone(name: str) -> Iterator[None]:
    """Keep installed plugins out, and a built-in one of this name: the one that was given is meant."""
    before = {key: os.environ.get(key) for key in ("LANEWAY_PLUGINS", "LANEWAY_DISABLE_PLUGINS")}
    os.environ["LANEWAY_PLUGINS"] = ""
    os.environ["LANEWAY_DISABLE_PLUGINS"] = name
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def _check_that_it_loads(plugin: Any, name: str, plugins: Iterable[Any]) -> None:
    async def load() -> None:
        async with laneway.open_engine(plugins=[*plugins, plugin], strict_plugins=True):
            await trio.lowlevel.checkpoint()

    with _alone(name):
        try:
            trio.run(load)
        except laneway.PluginDeclarationError as error:
            raise BrokenPromise(name, None, "it loads with strict_plugins=True", str(error)) from error


# Seeing what a handler does


class _Watch:
    """One call of a handler, or of a prepare, as it is seen from outside."""

    def __init__(self, at: int | None = None, act: Callable[[], object] | None = None) -> None:
        self.points = 0
        self.entered = self.left = False
        self.cancels_thrown_in = 0
        self.generated = 0
        self.put: list[object] = []
        self.put_late: list[object] = []
        self._at = at
        self._act = act

    def lets_go(self) -> None:
        """It is about to wait for something."""
        self.points += 1
        if self.points == self._at and self._act is not None:
            self._act()

    async def over(self, call: Awaitable[Any]) -> Any:
        """Await ``call``, and watch it."""
        self.entered = True
        try:
            return await _Driven(call, self)
        finally:
            self.left = True


class _Driven:
    def __init__(self, call: Awaitable[Any], watch: _Watch) -> None:
        self._call = call
        self._watch = watch

    def __await__(self) -> Generator[Any, Any, Any]:
        call: Any = self._call.__await__()
        value: Any = None
        error: BaseException | None = None
        while True:
            try:
                trap = call.send(value) if error is None else call.throw(error)
            except StopIteration as over:
                return over.value
            self._watch.lets_go()
            value, error = None, None
            try:
                value = yield trap
            except BaseException as thrown:
                self._watch.cancels_thrown_in += isinstance(thrown, trio.Cancelled)
                error = thrown


class _WatchedContext:
    """The engine's context, with a note of what the handler asks of it."""

    def __init__(self, ctx: laneway.RequestContext, watch: _Watch) -> None:
        self._ctx = ctx
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def put(self, event: object) -> None:
        (self._watch.put_late if self._watch.left else self._watch.put).append(event)
        self._ctx.put(event)

    async def emit(self, event: object) -> None:
        (self._watch.put_late if self._watch.left else self._watch.put).append(event)
        await self._ctx.emit(event)

    def generate(self, *args: Any, **how: Any) -> AbstractAsyncContextManager[laneway.Tokens]:
        self._watch.generated += 1
        return self._ctx.generate(*args, **how)


# Trying it


@attrs.frozen
class _Stranger:
    """A request that is nobody's."""


@attrs.frozen
class _Probe:
    """A request that only wants a permit."""


_PROBE = "check_plugin_probe"


def _probes(operation: laneway.Operation) -> laneway.PluginSpec:
    """Others, in the lane of this operation."""

    async def prepare(model: laneway.Model, request: _Probe) -> laneway.Prepared:
        return laneway.Prepared()

    async def handler(ctx: laneway.RequestContext, prepared: laneway.Prepared) -> None:
        await trio.lowlevel.checkpoint()

    probe = laneway.Operation(
        kind=_PROBE,
        request_type=_Probe,
        prepare=prepare,
        handler=handler,
        lane_group=operation.lane_group,
        overflow="reject",
        needs_decoder=operation.needs_decoder,
    )
    return laneway.PluginSpec(name=_PROBE, operations=(probe,))


@attrs.define
class _Seen:
    """How a run has gone, as its caller knows."""

    request_id: str
    watch: _Watch = attrs.field(factory=_Watch)
    run: laneway.Run | None = None
    """None: it was refused, or has not arrived yet."""
    events: list[Any] = attrs.field(factory=list)
    result: Any = None
    error: BaseException | None = None
    """What came out of the block."""
    cancelled_at: float | None = None
    task: GuestTask[None] = attrs.field(init=False)


class _Check:
    """Everything that is tried with one operation."""

    def __init__(
        self,
        spec: laneway.PluginSpec,
        operation: laneway.Operation,
        request: Any,
        wrong: Sequence[Any],
        *,
        load: Mapping[str, Any] | Callable[[laneway.Engine], Awaitable[laneway.Model]] | None,
        plugins: Sequence[Any],
        patience: float,
        grace: float,
        most: int,
    ) -> None:
        self.spec = spec
        self.operation = operation
        self.kind = operation.kind
        self._request = request
        self._wrong = wrong
        self._load = load
        self._plugins = plugins
        self._patience = patience
        self._grace = grace
        self._most = most
        self._watches: dict[str, _Watch] = {}  # by request id
        self._prepare_watch: _Watch | None = None
        self._steps = self._tasks = 0
        self._numbers = itertools.count(1)
        self.run: GuestRun[laneway.Engine]
        self.model: laneway.Model
        self.decoder: ScriptedDecoder | None = None
        self.loader = ScriptedLoader()

    def all(self) -> CheckedOperation:
        """Try everything, or raise :class:`BrokenPromise`."""
        given = [self.loader.plugin, *self._plugins, self._watched_spec(), _probes(self.operation)]
        with (
            _alone(self.spec.name),
            GuestRun(lambda: laneway.open_engine(plugins=given, strict_plugins=True), max_ticks=MAX_TICKS) as self.run,
        ):
            self.model = self.run.call(self._load_model)
            self.decoder = next(iter(self.loader.decoders.values()), None)
            self._tasks = _tasks()
            self.prepares()
            first = self.starts_and_ends()
            self.keeps_to_its_use(first)
            cancels = self.keeps_to_its_scope(first)
            failed = self.takes_a_failed_step_as_an_outcome()
            self.needs_no_reader()
            return CheckedOperation(
                kind=self.kind,
                checkpoints=first.watch.points,
                steps=self._steps,
                cancels=cancels,
                failed_steps=failed,
            )

    # What is promised

    def prepares(self) -> None:
        """Rule A10: what can never run is refused before anything has changed."""
        promise = "prepare returns a Prepared and changes nothing"
        request = self.make()
        before, shown = self._state(), repr(request)
        prepared = []
        for _ in range(2):
            try:
                prepared.append(self.run.call(self.operation.prepare, self.model, request, limit=self._patience))
            except GuestRunError as error:
                self._broken(promise, "it does not come to an end", error)
            except Exception as error:
                self._broken(promise, f"it raised {error!r} for a good request", error)
        for each in prepared:
            if not isinstance(each, laneway.Prepared):
                self._broken(promise, f"it returned {each!r}")
        self.run.settle()
        if self._state() != before:
            self._broken(promise, f"there were {before} before, and there are {self._state()} now")
        if repr(request) != shown:
            self._broken(promise, f"the request was {shown} before, and is {request!r} now")
        one, two = ((each.weight, each.keys) for each in prepared)
        if one != two:
            self._broken(promise, f"one call gave weight and keys {one}, the next {two}")
        self._nothing_left("its prepare")
        self._refuses(_Stranger(), "it refuses a request of another type with InvalidRequestError")
        for wrong in self._wrong:
            self._refuses(wrong, "prepare refuses what can never run")
        self._prepare_lets_a_cancel_through()

    def _refuses(self, request: Any, promise: str) -> None:
        seen = self._start(request)
        self._wait(seen, promise)
        if not isinstance(seen.error, (laneway.InvalidRequestError, laneway.ContextOverflowError)) or seen.run:
            how = f"it raised {seen.error!r}" if seen.run is None else "it let it in"
            self._broken(promise, f"given {request!r}, {how}", seen.error)
        self._nothing_left(f"refusing {request!r}")

    def _prepare_lets_a_cancel_through(self) -> None:
        """A caller that is cancelled meanwhile has taken nothing."""
        promise = "prepare lets a cancel through"
        self._prepare_watch = _Watch()
        self.run.call(self._prepare, self.model, self.make(), limit=self._patience)
        for point in _spread(self._prepare_watch.points, self._most):
            scope = trio.CancelScope()
            self._prepare_watch = _Watch(point, scope.cancel)
            seen = self._start(self.make(), scope=scope)
            self._wait(seen, promise)
            if self._prepare_watch.cancels_thrown_in and not isinstance(seen.error, trio.Cancelled):
                end = "with a request" if seen.run else f"to {seen.error!r}"
                self._broken(promise, f"cancelled at its checkpoint {point}, it went on {end}", seen.error)
            self._nothing_left("a cancel of its prepare")
        self._prepare_watch = None

    def starts_and_ends(self) -> _Seen:
        """Rules R1, R4 and S1."""
        promise = "a good request completes"
        before = self._steps_so_far()
        seen = self._start(self.make())
        self._wait(seen, promise)
        self._steps = self._steps_so_far() - before
        if seen.error is not None:
            self._broken(promise, f"it ended with {seen.error!r}", seen.error)
        self._nothing_left("a run that completed")
        self._delivers(seen)
        return seen

    def _delivers(self, seen: _Seen) -> None:
        promise = "what it emits is delivered, and Done comes from the engine alone"
        emitted = [event for event in seen.watch.put if isinstance(event, laneway.Done)]
        if emitted:
            self._broken(promise, "its handler emits one; let it return a result that has a stop_reason instead")
        if seen.watch.put_late:
            self._broken(promise, f"its handler had returned when {seen.watch.put_late[0]!r} came")
        items: dict[str, list[bool]] = {}
        for event in seen.events:
            if isinstance(event, laneway.BatchEvent):
                items.setdefault(event.id, []).append(isinstance(event.event, laneway.Done))
        for item, done in items.items():
            if any(done[:-1]):
                self._broken(promise, f"item {item!r} has more events after its Done")
        text = getattr(seen.result, "text", None)
        deltas = [event.text for event in seen.events if isinstance(event, laneway.TextDelta)]
        if deltas and isinstance(text, str) and "".join(deltas) != text:
            promise = "its TextDelta events, joined, are the text of its result"
            self._broken(promise, f"they make {''.join(deltas)!r} and the text is {text!r}")

    def keeps_to_its_use(self, first: _Seen) -> None:
        """Rules A1 and A6."""
        use = self.operation.use
        if use is laneway.Use.NONE and first.watch.generated:
            self._broken(
                "with use='none' it takes nothing for which others need a permit",
                "it generates, in slots that are theirs; declare use='shared'",
            )
        if first.watch.points == 0 or use is laneway.Use.NONE:
            return
        probe, room = _Seen("probe"), []

        def act() -> None:
            lane = next(lane for lane in self._lanes() if lane.group == self.operation.lane_group)
            room.append(lane.used < lane.cap)
            self.run.start_soon(self._ask_beside, probe, seen)

        seen = self._start(self.make(), point=1, act=act)
        promise = "with use='exclusive' nobody runs beside it"
        self._wait(seen, promise)
        if use is laneway.Use.EXCLUSIVE and probe.run is not None:
            self._broken(promise, "another request was admitted while it ran")
        if use is laneway.Use.SHARED and room == [True] and probe.error is not None:
            self._broken("with use='shared' others run beside it", f"one was refused: {probe.error}", probe.error)
        self._nothing_left("a run beside others")

    async def _ask_beside(self, probe: _Seen, seen: _Seen) -> None:
        """Try for a permit, and note what came of it if the other handler was at work all the time."""
        if seen.watch.left:
            return
        try:
            async with self.run.value.run(self.model, _PROBE, _Probe()) as run:
                probe.run = None if seen.watch.left else run
                await run.result()
        except laneway.RequestRejectedByPolicyError as error:
            probe.error = error

    def keeps_to_its_scope(self, first: _Seen) -> int:
        """Rules C1, C3, C7: at every checkpoint, and at every step."""
        points = _spread(first.watch.points, self._most)
        if self.operation.scope is laneway.Scope.NONE:
            for point in points:
                self._lets_its_caller_go(point)
            return len(points)
        for point in points:
            self._cancel_at(f"at checkpoint {point} of {first.watch.points}", point=point)
        steps = _spread(self._steps, self._most)
        for step in steps:
            self._cancel_at(f"at step {step} of {self._steps}", step=step)
        if points and self.operation.scope is laneway.Scope.MODEL:
            self._takes_its_scope_along()
        return len(points) + len(steps)

    def _cancel_at(self, where: str, *, point: int | None = None, step: int | None = None) -> None:
        seen = self._start(self.make(), point=point, step=step)
        self._end_of_cancelled(seen, where)
        self._nothing_left(f"a cancel {where}")

    def _end_of_cancelled(self, seen: _Seen, where: str) -> None:
        scope = f"with scope={self.operation.scope.value!r} a cancel ends it"
        self._wait_until(lambda: seen.cancelled_at is not None or seen.task.done, "a good request completes")
        try:
            self.run.advance_until(lambda: seen.task.done, self._grace)
        except GuestRunError as error:
            self._broken(scope, f"cancelled {where}, it goes on for more than {self._grace:g} s", error)
        promise = "it lets Cancelled through"
        if seen.error is None:
            if seen.watch.cancels_thrown_in:
                self._broken(promise, f"cancelled {where}, it swallowed that and returned a result")
            return  # the cancel came too late (rule C7)
        if not isinstance(seen.error, laneway.InferenceCancelledError):
            self._broken(promise, f"cancelled {where}, it ended with {seen.error!r}", seen.error)
        cause = seen.error.__cause__
        if cause is not None:
            self._broken(promise, f"cancelled {where}, it raised {cause!r} instead", cause)

    def _takes_its_scope_along(self) -> None:
        """Rule C1, ``model``, where two can run at all."""
        if self.operation.use is laneway.Use.EXCLUSIVE or self.operation.unique or self.model.parallel < 2:
            return
        promise = "with scope='model' a cancel ends all of its scope"
        at_work: list[bool] = []

        def act() -> None:
            at_work.append(other.watch.entered and not other.watch.left)
            self._cancel(one)

        other = self._start(self.make(), point=None)
        one = self._start(self.make(), point=1, act=act)
        self._wait(one, promise)
        self._wait(other, promise)
        if at_work == [True] and not isinstance(other.error, laneway.InferenceCancelledError):
            self._broken(promise, f"another one of it ended with {other.error!r}", other.error)
        self._nothing_left("a cancel of its whole scope")

    def _lets_its_caller_go(self, point: int) -> None:
        """Rule C1, ``none``: the caller leaves at once, the work goes on to its end."""
        promise = "with scope='none' its caller is let go at once, and it runs to its end"
        seen = self._start(self.make(), point=point)
        self._wait_until(lambda: seen.cancelled_at is not None or seen.task.done, promise)
        self.run.settle()
        if not seen.task.done:
            self._broken(promise, f"cancelled at checkpoint {point}, its caller waits")
        self._wait_until(lambda: seen.watch.left, promise)
        if seen.watch.cancels_thrown_in:
            self._broken(promise, f"cancelled at checkpoint {point}, its handler was cancelled")
        self._nothing_left(f"a cancel at checkpoint {point}")

    def takes_a_failed_step_as_an_outcome(self) -> int:
        """Rules C10 and C11."""
        promise = "a decode step that fails is an outcome"
        numbers = _spread(self._steps, self._most)
        for number in numbers:
            assert self.decoder is not None
            failing = self._steps_so_far() + number
            self.decoder.fail_at[failing] = laneway.DecodeError("check_plugin let this step fail", status=-1)
            seen = self._start(self.make())
            self._wait(seen, promise, f"step {number} of {self._steps} failed, and it does not come to an end")
            if seen.error is not None and not isinstance(seen.error, laneway.LanewayError):
                self._broken(
                    promise, f"when step {number} of {self._steps} failed, it raised {seen.error!r}", seen.error
                )
            del self.decoder.fail_at[failing]
            self._nothing_left(f"a failure of step {number}")
        return len(numbers)

    def needs_no_reader(self) -> None:
        """Rule S2."""
        promise = "nobody has to read for it to end"
        seen = self._start(self.make(), reads=False)
        self._wait(seen, promise)
        if seen.error is not None:
            self._broken(promise, f"without a reader it ended with {seen.error!r}", seen.error)
        self._nothing_left("a run that nobody read")
        # Paused by its reader, it may wait as long as it likes; but not once it is cancelled.
        seen = self._start(self.make(), reads=False, backpressure="pause")
        self.run.advance(min(self._patience, 60.0))
        if not seen.task.done:
            self.run.step(self._cancel, seen)
            if self.operation.scope is laneway.Scope.NONE:
                self._wait_until(lambda: seen.watch.left, promise)
            else:
                self._end_of_cancelled(seen, "while its reader kept it paused")
        self._nothing_left("a run that its reader kept paused")

    # How it is done

    def make(self) -> Any:
        """A good request."""
        request = self._request
        if not isinstance(request, self.operation.request_type) and callable(request):
            request = request()
        if not isinstance(request, self.operation.request_type):
            wanted = self.operation.request_type.__name__
            raise TypeError(f"the request for {self.kind!r} must be a {wanted}, or make one, not {request!r}")
        return request

    async def _load_model(self) -> laneway.Model:
        engine = self.run.value
        if callable(self._load):
            return await self._load(engine)
        return await engine.load_model("scripted:check_plugin", **{**LOAD, **(self._load or {})})

    def _watched_spec(self) -> laneway.PluginSpec:
        operations = [
            attrs.evolve(operation, prepare=self._prepare, handler=self._handle)
            if operation is self.operation
            else operation
            for operation in self.spec.operations
        ]
        return attrs.evolve(self.spec, operations=operations)

    async def _prepare(self, model: laneway.Model, request: Any) -> laneway.Prepared:
        watch = self._prepare_watch or _Watch()
        prepared: laneway.Prepared = await watch.over(self.operation.prepare(model, request))
        return prepared

    async def _handle(self, ctx: laneway.RequestContext, prepared: laneway.Prepared) -> Any:
        watch = self._watches[ctx.request_id]
        watched: Any = _WatchedContext(ctx, watch)
        return await watch.over(self.operation.handler(watched, prepared))

    def _start(
        self,
        request: Any,
        *,
        point: int | None = None,
        step: int | None = None,
        act: Callable[[], object] | None = None,
        reads: bool = True,
        backpressure: Literal["merge", "pause"] = "merge",
        scope: trio.CancelScope | None = None,
    ) -> _Seen:
        """Let somebody ask for it.  At a checkpoint of its handler, or a step from now, cancel it or do ``act``."""
        seen = _Seen(f"check-plugin-{next(self._numbers)}")
        seen.watch = self._watches[seen.request_id] = _Watch(point, act or (lambda: self._cancel(seen)))
        if self.decoder is not None:
            number = None if step is None else self._steps_so_far() + step
            self.decoder.at_step = lambda begun, batch: self._cancel(seen) if begun == number else None
        seen.task = self.run.start(self._call, seen, request, reads, backpressure, scope or trio.CancelScope())
        return seen

    async def _call(
        self,
        seen: _Seen,
        request: Any,
        reads: bool,
        backpressure: Literal["merge", "pause"],
        scope: trio.CancelScope,
    ) -> None:
        engine = self.run.value
        opening = engine.run(self.model, self.kind, request, request_id=seen.request_id, backpressure=backpressure)
        try:
            with scope:
                try:
                    async with opening as seen.run:
                        if reads:
                            async for event in seen.run:
                                seen.events.append(event)
                        else:
                            await engine.wait_ended(seen.request_id)
                        seen.result = await seen.run.result()
                except trio.Cancelled as error:
                    seen.error = error
                    raise
        except Exception as error:
            seen.error = error

    def _cancel(self, seen: _Seen) -> None:
        seen.cancelled_at = trio.current_time()
        self.run.value.cancel(seen.request_id, "check_plugin cancelled it")

    def _wait(self, seen: _Seen, promise: str, otherwise: str = "it does not come to an end") -> None:
        self._wait_until(lambda: seen.task.done, promise, otherwise)

    def _wait_until(
        self, condition: Callable[[], object], promise: str, otherwise: str = "it does not come to an end"
    ) -> None:
        try:
            self.run.advance_until(condition, self._patience)
        except GuestRunError as error:
            self._broken(promise, otherwise, error)
        except SystemExit as error:
            self._broken("it leaves the program alone", f"it raised {error!r}", error)

    def _nothing_left(self, after: str) -> None:
        """Rules A8, A11, C4."""
        self.run.settle()
        promise = "its permit, its slots, its tasks and its timers are gone when it has ended"
        used = [lane for lane in self._lanes() if lane.used or lane.waiting]
        if used:
            self._broken(promise, f"after {after} {len(used)} lanes are still in use")
        if self.decoder is not None:
            try:
                self.decoder.assert_idle()
            except AssertionError as error:
                self._broken(promise, f"after {after} of the decoder: {error}", error)
        if self.model.state != "loaded":
            self._broken("a model lives on, whatever a plugin does", f"after {after} it is {self.model.state}")
        tasks = _tasks() - self._tasks
        if tasks > 0:
            self._broken(promise, f"after {after} there are {tasks} more tasks than before")
        seconds = trio.lowlevel.current_statistics().seconds_to_next_deadline
        if seconds != math.inf:
            self._broken(promise, f"after {after} a timer is left that goes off in {seconds:g} s")

    def _lanes(self) -> tuple[laneway.LaneSnapshot, ...]:
        return self.run.value.snapshot().model(self.model.name).lanes

    def _state(self) -> str:
        snapshot = self.run.value.snapshot().model(self.model.name)
        used = sum(lane.used for lane in snapshot.lanes)
        waiting = sum(len(lane.waiting) for lane in snapshot.lanes)
        slots = 0 if self.decoder is None else len(self.decoder.used)
        counts = {"permits": used, "waiters": waiting, "slots": slots, "steps": self._steps_so_far(), "tasks": _tasks()}
        return ", ".join(f"{count} {name}" for name, count in counts.items())

    def _steps_so_far(self) -> int:
        return 0 if self.decoder is None else self.decoder.statistics().steps

    def _broken(self, promise: str, what: str, cause: BaseException | None = None) -> NoReturn:
        raise BrokenPromise(self.spec.name, self.kind, promise, what) from cause


def _tasks() -> int:
    return trio.lowlevel.current_statistics().tasks_living


def _spread(count: int, most: int) -> list[int]:
    """At most so many of 1 to ``count``, the first and the last among them, evenly spread."""
    if count <= most:
        return list(range(1, count + 1))
    return sorted({1 + index * (count - 1) // (most - 1) for index in range(most)})
