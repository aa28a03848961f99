"""One call that tries whether a plugin keeps what it declares, in the spirit of ``trio.testing.check_two_way_stream``.

Each operation runs on a scripted model in a Trio run of its own, in virtual time, again and again: undisturbed,
cancelled at each of its checkpoints and at each step of the decoder, with steps that fail, and with nobody reading.

How a checkpoint is found: the handler is not awaited but driven.  Everything that it awaits comes up, sooner or later,
as a value that its coroutine yields to Trio, so whoever drives the coroutine sees each point at which the task lets go,
may cancel the request just then, and sees afterwards whether Cancelled came in and what came of it.  Only the handler's
own task is driven.  What it starts in nurseries is met by the cancels at the decoder's steps.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import itertools
import os
import threading
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from typing import Any, Literal, NoReturn

import attrs
import outcome
import trio

import laneway
from laneway._errors import PROGRAM_ENDS, holds
from laneway.testing._backend import ScriptedLoader
from laneway.testing._decoder import ScriptedDecoder
from laneway.testing._guest import GuestRun, GuestRunError, GuestTask, _leaves

LOAD: Mapping[str, Any] = {"parallel": 2, "context_size": 2048, "seconds_per_step": 1 / 64, "prefix_cache": False}
"""How the scripted model is loaded, unless something else is asked for.  Prefixes are not shared: each run has to take
the steps that the first one took."""

MAX_TICKS = 50_000
"""Rounds of Trio's scheduler after which a task that never blocks counts as one that goes on for ever."""

REASON = "check_plugin cancelled it"


class Promise(enum.Enum):
    """What a plugin has to keep, as sentences."""

    LOADS = "it loads with strict_plugins=True"
    PREPARES = "prepare returns a Prepared for a good request, and changes nothing"
    REFUSES = "prepare refuses a wrong request with InvalidRequestError or ContextOverflowError"
    COMPLETES = "a good request completes"
    DONE = "the engine alone ends a run with Done, and each item of a batch ends with one"
    TEXT = "its TextDelta events, joined, are the text of its result"
    USE = "what its use declares is what happens"
    SCOPE = "what its scope declares is what happens"
    CANCELLED = "it lets Cancelled through"
    FAILED_STEP = "a decode step that fails is an outcome, and the error comes bare"
    READER = "nobody has to read for it to end"
    LEAVES_NOTHING = "its permit, its slots and its tasks are gone when it has ended"
    PROGRAM = "it does not end the program"


@attrs.define(slots=False, eq=False)
class BrokenPromise(AssertionError):  # noqa: N818 - what happened, like the assertion that it is
    """A plugin does not keep what it declares.  The error that showed it, if there is one, is chained."""

    plugin: str
    kind: str | None
    """The operation; None for the plugin as a whole."""
    promise: Promise
    what: str
    """What happened instead."""

    def __str__(self) -> str:
        where = f"plugin {self.plugin!r}" if self.kind is None else f"plugin {self.plugin!r}, operation {self.kind!r}"
        return f"{where}: {self.promise.value}; but {self.what}"


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
    most: int = 50,
) -> tuple[CheckedOperation, ...]:
    """Try each operation of a plugin, and raise :class:`BrokenPromise` where it does not do what it declares.

    A plain function, for plain and for async tests alike: it runs Trio itself, in a thread of its own.  Time is
    virtual, installed plugins are left out.  What is tried:

    - The plugin loads with ``strict_plugins=True``.
    - ``prepare`` returns a :class:`laneway.Prepared`, changes nothing, lets a cancel through, and refuses a request
      of another type, and those in ``wrong``, with :class:`laneway.InvalidRequestError` or
      :class:`laneway.ContextOverflowError`.
    - A good request starts and completes, ``Done`` comes from the engine alone, and :class:`laneway.TextDelta` events,
      joined, are the ``text`` of the result if that has one.
    - With ``use="none"`` it generates nothing, with ``"exclusive"`` it runs alone, and with ``"shared"`` two that have
      their permits generate side by side.
    - A cancel by id ends it within ``grace``, at every checkpoint and every step, whether a reader is there or not:
      ``Cancelled`` is neither swallowed nor turned into another error.  With ``scope="request"`` another one goes on,
      with ``"model"`` it ends too.  With ``"none"`` the caller is let go at once, and the handler runs to its end.
    - A decode step that fails ends it with a bare error, or not at all, but never makes it hang.
    - Nobody has to read for it to end.
    - After each of these runs its permit, its slots and its tasks are gone.

    :param plugin: a :class:`laneway.PluginSpec`, or a module or object that has the hook ``laneway_plugin``
    :param requests: for each kind of operation a good request, or a function without arguments that makes one.  A short
        one is best: each step of its answer is one more place to cancel it at
    :param wrong: requests that ``prepare`` has to refuse, by kind
    :param load: options of the scripted loader (:class:`laneway.testing.ScriptedOptions`), ``parallel`` included, where
        ``parallel=2, context_size=2048, seconds_per_step=1/64, prefix_cache=False`` will not do; or an async function
        that loads the model, for operations that work on a service
    :param plugins: what else the engine needs, such as a plugin with a loader
    :param patience: virtual seconds that one request may take
    :param grace: virtual seconds that a cancelled one may take to tear down
    :param most: runs for each way of disturbing it, at least 2; where there are more points, they are spread out
    :returns: what was tried, an item for each operation
    :raises BrokenPromise: with a sentence that names the plugin, the operation, the promise, and what happened instead
    :raises ValueError: ``requests`` lacks one of the plugin's kinds, or has others
    :raises TypeError: a request is not of the operation's ``request_type``
    """
    if most < 2:
        raise ValueError(f"most must be at least 2, the first point and the last, not {most!r}")

    def check() -> tuple[CheckedOperation, ...]:
        others = tuple(plugins)
        spec = _declared(plugin, others)
        _check_arguments(spec, requests, wrong or {}, load)
        return tuple(
            _Check(
                spec,
                operation,
                requests[operation.kind],
                tuple((wrong or {}).get(operation.kind, ())),
                load=load,
                plugins=others,
                patience=patience,
                grace=grace,
                most=most,
            ).all()
            for operation in spec.operations
        )

    return _in_a_thread(check)


def _check_arguments(
    spec: laneway.PluginSpec, requests: Mapping[str, Any], wrong: Mapping[str, Sequence[Any]], load: Any
) -> None:
    kinds = {operation.kind for operation in spec.operations}
    if requests.keys() != kinds or wrong.keys() - kinds:
        raise ValueError(
            f"plugin {spec.name!r} has the operations {', '.join(sorted(kinds)) or 'none'}; give a request for each of "
            f"them, not for {', '.join(sorted({*requests, *wrong})) or 'none'}"
        )
    for operation in spec.operations:
        if not operation.needs_decoder and not callable(load):
            raise ValueError(
                f"operation {operation.kind!r} works on a service, which scripted models have none of; let load be an "
                "async function that loads a model for it"
            )


def _in_a_thread(check: Callable[[], tuple[CheckedOperation, ...]]) -> tuple[CheckedOperation, ...]:
    """A thread can host one run at a time, and the caller's may have one; and a run that cannot be ended, on account of
    what it was to find out, must not keep the caller's thread."""
    ends: list[outcome.Outcome[tuple[CheckedOperation, ...]]] = []
    thread = threading.Thread(target=lambda: ends.append(outcome.capture(check)), name="check_plugin", daemon=True)
    thread.start()
    thread.join()
    return ends[0].unwrap()


_abandoned: list[GuestRun[Any]] = []
"""Runs that could not be ended.  To collect one would be to end whatever run the collecting thread has."""


@contextlib.contextmanager
def _alone(name: str) -> Iterator[None]:
    """Keep installed plugins out, and a built-in one of this name: the one that was given is meant."""
    wanted = {"LANEWAY_PLUGINS": "", "LANEWAY_DISABLE_PLUGINS": name}
    before = {key: os.environ.get(key) for key in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def _declared(plugin: Any, others: Sequence[Any]) -> laneway.PluginSpec:
    """What a plugin declares, after an engine has taken it."""
    spec = plugin
    if not isinstance(plugin, laneway.PluginSpec):
        try:
            spec = plugin.laneway_plugin()
        except (Exception, SystemExit):
            # The engine is about to ask again, and to say what is wrong.
            spec = None
    name: str = spec.name if isinstance(spec, laneway.PluginSpec) else ""

    async def load() -> None:
        async with laneway.open_engine(plugins=[*others, plugin], strict_plugins=True):
            await trio.lowlevel.checkpoint()

    with _alone(name):
        try:
            trio.run(load)
        except laneway.PluginDeclarationError as error:
            raise BrokenPromise(error.plugin, None, Promise.LOADS, error.reason) from error
    if not isinstance(spec, laneway.PluginSpec):
        raise BrokenPromise(repr(plugin), None, Promise.LOADS, "it declares nothing that could be checked")
    return spec


# Seeing what a handler does


class _GivenUp(BaseException):
    """Thrown into a handler that cannot be made to end otherwise."""


_moments = itertools.count(1)


@attrs.define(eq=False)
class _Watch:
    """One call of a handler, or of a prepare, as it is seen from outside."""

    at: int | None = None
    """The checkpoint at which to ``act``."""
    act: Callable[[], object] | None = None
    points: int = 0
    entered: int | None = None
    """When: in the order of all that is noted, as time may stand still.  None: not yet."""
    generated: int | None = None
    left: int | None = None
    cancelled: bool = False
    """Cancelled has come in, and it was ours: a handler may well cancel scopes of its own."""
    task: trio.lowlevel.Task | None = None
    given_up: bool = False

    def lets_go(self) -> None:
        """It is about to wait for something."""
        self.points += 1
        if self.points == self.at and self.act is not None:
            self.act()

    def hears(self, answer: object) -> None:
        """What it waited for has come."""
        if isinstance(answer, outcome.Error) and isinstance(answer.error, trio.Cancelled):
            self.cancelled = self.cancelled or answer.error.reason == REASON

    @property
    def at_work(self) -> bool:
        """Whether it has begun and not ended."""
        return self.entered is not None and self.left is None

    async def over(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Await ``call``, and watch it."""
        self.entered = next(_moments)
        self.task = trio.lowlevel.current_task()
        try:
            return await _drive(call, self)
        finally:
            self.left = next(_moments)


@types.coroutine
def _drive(call: Coroutine[Any, Any, Any], watch: _Watch) -> Generator[Any, Any, Any]:
    go_on: Callable[[], Any] = functools.partial(call.send, None)
    while True:
        try:
            trap = go_on()
        except StopIteration as over:
            return over.value
        watch.lets_go()
        try:
            answer = yield trap
        except BaseException as error:
            go_on = functools.partial(call.throw, error)
        else:
            watch.hears(answer)
            go_on = functools.partial(call.send, answer)
            if watch.given_up:
                go_on = functools.partial(call.throw, _GivenUp())


class _WatchedContext:
    """The engine's context, with a note of whether the handler generates."""

    def __init__(self, ctx: laneway.RequestContext, watch: _Watch) -> None:
        self._ctx = ctx
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def generate(self, *args: Any, **how: Any) -> AbstractAsyncContextManager[laneway.Tokens]:
        self._watch.generated = self._watch.generated or next(_moments)
        return self._ctx.generate(*args, **how)


@attrs.define(eq=False)
class _Seen:
    """How a run goes, as its caller knows."""

    request_id: str
    preparing: _Watch = attrs.field(factory=_Watch)
    handling: _Watch = attrs.field(factory=_Watch)
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    """The caller's."""
    run: laneway.Run | None = None
    """None: it was refused, or has not arrived yet."""
    events: list[Any] = attrs.field(factory=list)
    result: Any = None
    error: BaseException | None = None
    """What came out of the block."""
    cancelled: bool = False
    """By id."""
    task: GuestTask[None] = attrs.field(init=False)

    @property
    def over(self) -> bool:
        """Whether its caller has left the block."""
        return self.task.done


_call: ContextVar[_Seen] = ContextVar("laneway_check_plugin_call")
"""Whose ``prepare`` and whose handler run in this task."""


# Trying it


@attrs.frozen
class _Stranger:
    """A request that is nobody's."""


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
        self._request = request
        self._wrong = wrong
        self._load = load
        self._plugins = plugins
        self._patience = patience
        self._grace = grace
        self._most = most
        self._numbers = itertools.count(1)
        self._started: list[_Seen] = []
        self._steps = 0
        self._tasks: set[trio.lowlevel.Task] = set()
        self.loader = ScriptedLoader()
        self.decoder: ScriptedDecoder | None = None
        self.run: GuestRun[laneway.Engine]
        self.model: laneway.Model

    def all(self) -> CheckedOperation:
        """Try everything, or raise :class:`BrokenPromise`."""
        given = [self.loader.plugin, *self._plugins, self._watched_spec()]
        with _alone(self.spec.name):
            self.run = GuestRun(lambda: laneway.open_engine(plugins=given, strict_plugins=True), max_ticks=MAX_TICKS)
        try:
            with self.run:
                try:
                    return self._all()
                except BaseException:
                    self._give_up()
                    raise
        except (KeyboardInterrupt, SystemExit) as error:
            self._broken(Promise.PROGRAM, f"it raised {error!r}", error)
        except GuestRunError as error:
            self._broken(Promise.COMPLETES, "it does not come to rest", error)
        finally:
            if not self.run.over:
                _abandoned.append(self.run)

    def _all(self) -> CheckedOperation:
        self.model = self.run.call(self._load_model)
        self.decoder = next(iter(self.loader.decoders.values()), None)
        self._tasks = _tasks()
        self.prepares()
        first = self.completes()
        self.keeps_to_its_use(first)
        cancels = self.keeps_to_its_scope(first)
        failed_steps = self.takes_a_failed_step_as_an_outcome()
        self.needs_no_reader()
        return CheckedOperation(
            kind=self.operation.kind,
            checkpoints=first.handling.points,
            steps=self._steps,
            cancels=cancels,
            failed_steps=failed_steps,
        )

    def _give_up(self) -> None:
        """See to it that the run can end, whatever the handlers would rather do."""
        watches = [watch for seen in self._started for watch in (seen.preparing, seen.handling)]
        for watch in watches:
            watch.given_up = True
        if self.run.over:
            return
        try:
            self.run.step(self._leave)
            with contextlib.suppress(GuestRunError):
                self.run.advance_until(lambda: not any(watch.at_work for watch in watches), self._patience)
            for _ in range(10):
                # Raises if they never rest: they end at their next checkpoint, as their driver sees to.
                self.run.settle()
                for watch in watches:
                    if watch.at_work and watch.task is not None:
                        for task in _leaves(watch.task):
                            trio.lowlevel.reschedule(task, outcome.Error(_GivenUp()))
        except GuestRunError:
            return

    def _leave(self) -> None:
        """All callers leave."""
        for seen in self._started:
            seen.scope.cancel()

    # What is promised

    def prepares(self) -> None:
        """Rule A10: what can never run is refused before anything has changed."""
        promise, request = Promise.PREPARES, self.make()
        before, shown = self._state(), repr(request)
        try:
            prepared = self.run.call(self.operation.prepare, self.model, request, limit=self._patience)
        except GuestRunError as error:
            self._broken(promise, "it does not come to an end", error)
        except Exception as error:
            self._broken(promise, f"it raised {error!r}", error)
        if not isinstance(prepared, laneway.Prepared):
            self._broken(promise, f"it returned {prepared!r}")
        self.run.settle()
        if self._state() != before:
            self._broken(promise, f"there were {before} before, and there are {self._state()} now")
        if repr(request) != shown:
            self._broken(promise, f"the request was {shown} before, and is {request!r} now")
        for wrong in (_Stranger(), *self._wrong):
            self._refuses(wrong)

    def _refuses(self, request: Any) -> None:
        seen = self._start(request)
        self._wait(seen, Promise.REFUSES, f"given {request!r}, it does not come to an end")
        if seen.run is not None:
            self._broken(Promise.REFUSES, f"it let {request!r} in", seen.error)
        if not isinstance(seen.error, (laneway.InvalidRequestError, laneway.ContextOverflowError)):
            self._broken(Promise.REFUSES, f"given {request!r}, it raised {seen.error!r}", seen.error)
        self._nothing_left(f"refusing {request!r}")

    def completes(self) -> _Seen:
        """Rules R1, R4 and S1."""
        before = self._steps_so_far()
        seen = self._start(self.make())
        self._wait(seen, Promise.COMPLETES)
        self._steps = self._steps_so_far() - before
        if seen.error is not None:
            self._broken(Promise.COMPLETES, f"it ended with {seen.error!r}", seen.error)
        self._nothing_left("a run that completed")
        done = sum(isinstance(event, laneway.Done) for event in seen.events)
        if done != 1:
            self._broken(Promise.DONE, f"it emits {done - 1} of its own; let the result have a stop_reason instead")
        items: dict[str, list[bool]] = {}
        for event in seen.events:
            if isinstance(event, laneway.BatchEvent):
                items.setdefault(event.id, []).append(isinstance(event.event, laneway.Done))
        for item, ends in items.items():
            if sum(ends) != 1 or not ends[-1]:
                self._broken(Promise.DONE, f"item {item!r} has {sum(ends)} among {len(ends)} events")
        text = getattr(seen.result, "text", None)
        deltas = [event.text for event in seen.events if isinstance(event, laneway.TextDelta)]
        if deltas and isinstance(text, str) and "".join(deltas) != text:
            self._broken(Promise.TEXT, f"they make {''.join(deltas)!r}, and the text is {text!r}")
        return seen

    def keeps_to_its_use(self, first: _Seen) -> None:
        """Rules A1 and A6."""
        use = self.operation.use
        if use is laneway.Use.NONE and first.handling.generated is not None:
            self._broken(
                Promise.USE,
                "with use='none' it generates, in slots that belong to those who wait for a permit; declare 'shared'",
            )
        if use is laneway.Use.NONE or self.operation.unique:
            return
        one, other = self._start(self.make()), self._start(self.make())
        otherwise = "two of it, asked for at once, do not come to an end"
        self._wait(one, Promise.USE, otherwise)
        self._wait(other, Promise.USE, otherwise)
        for seen in (one, other):
            if seen.error is not None:
                self._broken(Promise.USE, f"one of two, asked for at once, ended with {seen.error!r}", seen.error)
        a, b = one.handling, other.handling
        # Otherwise one had no permit, or needed no time.
        both_at_work = _before(a.entered, b.left) and _before(b.entered, a.left)
        if both_at_work and use is laneway.Use.EXCLUSIVE:
            self._broken(Promise.USE, "with use='exclusive' another one ran beside it")
        if both_at_work and not (_before(a.generated, b.left) and _before(b.generated, a.left)):
            self._broken(
                Promise.USE,
                "with use='shared' two of it had their permits, and one generated nothing until the other had ended; "
                "let prepare name what they must not share in keys, or declare 'exclusive'",
            )
        self._nothing_left("two at once")

    def keeps_to_its_scope(self, first: _Seen) -> int:
        """Rules C1 to C3 and C7: at every checkpoint, and at every step."""
        preparing = _spread(first.preparing.points, self._most)
        for point in preparing:
            self._cancel_prepare(f"at checkpoint {point} of {first.preparing.points}", point)
        points = _spread(first.handling.points, self._most)
        for point in points:
            self._cancel_at(f"at checkpoint {point} of {first.handling.points}", point=point)
        # Nobody hears of such a one any more: whatever its caller's moment, it runs to its end.
        steps = [] if self.operation.scope is laneway.Scope.NONE else _spread(self._steps, self._most)
        for step in steps:
            self._cancel_at(f"at step {step} of {self._steps}", step=step)
        if points:
            self._cancel_beside_another((first.handling.points + 1) // 2)
        return len(preparing) + len(points) + len(steps)

    def _cancel_prepare(self, where: str, point: int) -> None:
        """A caller that is cancelled before its request has arrived has taken nothing."""
        seen = self._start(self.make(), prepare_at=point)
        self._wait(seen, Promise.CANCELLED, f"its prepare, cancelled {where}, does not come to an end")
        if seen.preparing.cancelled and (seen.run is not None or seen.error is not None):
            how = "returned" if seen.run is not None else f"raised {seen.error!r}"
            self._broken(Promise.CANCELLED, f"its prepare, cancelled {where}, {how}", seen.error)
        self._nothing_left(f"a cancel of its prepare {where}")

    def _cancel_at(self, where: str, *, point: int | None = None, step: int | None = None) -> None:
        seen = self._start(self.make(), at=point, at_step=step)
        self._ends_of_a_cancel(seen, where)
        self._nothing_left(f"a cancel {where}")

    def _ends_of_a_cancel(self, seen: _Seen, where: str) -> None:
        declared = f"with scope={self.operation.scope.value!r}, cancelled {where},"
        endless = f"{declared} it does not come to an end"
        self._wait_until(lambda: seen.cancelled or seen.over, Promise.SCOPE, endless)
        if self.operation.scope is laneway.Scope.NONE:
            if not seen.over:
                self._broken(Promise.SCOPE, f"{declared} its caller still waits")
            self._wait_until(lambda: not seen.handling.at_work, Promise.SCOPE, endless)
            return
        try:
            self.run.advance_until(lambda: seen.over, self._grace)
        except GuestRunError as error:
            self._broken(Promise.SCOPE, f"{declared} it goes on for more than {self._grace:g} s", error)
        if seen.error is None:
            if seen.handling.cancelled:
                self._broken(Promise.CANCELLED, f"cancelled {where}, it swallowed that and returned {seen.result!r}")
            return  # the cancel came too late (rule C7)
        cause = seen.error.__cause__ if isinstance(seen.error, laneway.InferenceCancelledError) else seen.error
        if cause is not None:
            self._broken(Promise.CANCELLED, f"cancelled {where}, it raised {cause!r} instead", cause)

    def _cancel_beside_another(self, point: int) -> None:
        """What becomes of another one that runs when this one is cancelled."""
        if self.operation.unique or self.operation.use is laneway.Use.EXCLUSIVE:
            return
        scope = self.operation.scope
        beside: list[bool] = []

        def act() -> None:
            beside.append(other.handling.at_work)
            self._cancel(one)

        other = self._start(self.make())
        self.run.settle()
        one = self._start(self.make(), at=point, act=act)
        for seen in (one, other):
            self._wait(seen, Promise.SCOPE, "when one of two is cancelled, they do not come to an end")
        ends_too = scope is laneway.Scope.MODEL
        if any(beside) and (other.error is not None) is not ends_too:
            self._broken(
                Promise.SCOPE,
                f"with scope={scope.value!r}, one was cancelled, and another ended with {other.error!r}",
                other.error,
            )
        self._nothing_left("a cancel of one of two")

    def takes_a_failed_step_as_an_outcome(self) -> int:
        """Rules C10 and C11."""
        promise = Promise.FAILED_STEP
        numbers = _spread(self._steps, self._most)
        for number in numbers:
            assert self.decoder is not None
            where = f"step {number} of {self._steps} failed"
            failing = self._steps_so_far() + number
            fault = laneway.DecodeError("check_plugin let it fail", status=-1)
            self.decoder.fail_at[failing] = fault
            seen = self._start(self.make())
            self._wait(seen, promise, f"when {where}, it does not come to an end")
            if seen.error is not None and not _stems_from_an_error_of_ours(seen.error):
                self._broken(promise, f"when {where}, it raised {seen.error!r}", seen.error)
            del self.decoder.fail_at[failing]
            self._nothing_left(f"a run in which {where}")
        return len(numbers)

    def needs_no_reader(self) -> None:
        """Rule S2."""
        seen = self._start(self.make(), reads=False)
        self._wait(seen, Promise.READER)
        if seen.error is not None:
            self._broken(Promise.READER, f"without a reader it ended with {seen.error!r}", seen.error)
        self._nothing_left("a run that nobody read")
        # Paused by its reader, it may wait as long as it likes; but not once it is cancelled.
        seen = self._start(self.make(), reads=False, backpressure="pause")
        self.run.advance(min(self._patience, 60.0))
        if not seen.over:
            self.run.step(self._cancel, seen)
            if self.operation.scope is laneway.Scope.NONE:
                self._wait(seen, Promise.SCOPE)
            else:
                self._ends_of_a_cancel(seen, "while its reader kept it paused")
        self._nothing_left("a run that its reader kept paused")

    # How it is done

    def make(self) -> Any:
        """A good request."""
        request, wanted = self._request, self.operation.request_type
        if not isinstance(request, wanted) and callable(request):
            request = request()
        if not isinstance(request, wanted):
            raise TypeError(
                f"the request for {self.operation.kind!r} must be a {wanted.__name__}, or make one, not {request!r}"
            )
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
        call: Any = self.operation.prepare(model, request)
        seen = _call.get(None)
        # The handler's task has inherited this, and may ask for more of its kind.
        if seen is not None and seen.preparing.entered is None:
            call = seen.preparing.over(call)
        prepared: laneway.Prepared = await call
        return prepared

    async def _handle(self, ctx: laneway.RequestContext, prepared: laneway.Prepared) -> Any:
        seen = _call.get(None)
        if seen is None or seen.request_id != ctx.request_id:
            return await self.operation.handler(ctx, prepared)
        watched: Any = _WatchedContext(ctx, seen.handling)
        call: Any = self.operation.handler(watched, prepared)
        return await seen.handling.over(call)

    def _start(
        self,
        request: Any,
        *,
        at: int | None = None,
        act: Callable[[], object] | None = None,
        at_step: int | None = None,
        prepare_at: int | None = None,
        reads: bool = True,
        backpressure: Literal["merge", "pause"] = "merge",
    ) -> _Seen:
        """Let somebody ask for it when the run goes on, and cancel it, or do ``act``, at a checkpoint of its handler;
        or cancel it at a step from now, or at a checkpoint of its ``prepare``."""
        seen = _Seen(f"check-plugin-{next(self._numbers)}")
        seen.handling = _Watch(at, act or (lambda: self._cancel(seen)))
        seen.preparing = _Watch(prepare_at, lambda: seen.scope.cancel(reason=REASON))
        if self.decoder is not None:
            number = None if at_step is None else self._steps_so_far() + at_step
            self.decoder.at_step = lambda begun, batch: self._cancel(seen) if begun == number else None
        self._started.append(seen)
        seen.task = self.run.start_soon(self._ask, seen, request, reads, backpressure)
        return seen

    async def _ask(self, seen: _Seen, request: Any, reads: bool, backpressure: Literal["merge", "pause"]) -> None:
        engine = self.run.value
        _call.set(seen)
        opening = engine.run(
            self.model,
            self.operation.kind,
            request,
            request_id=seen.request_id,
            overflow="queue",
            backpressure=backpressure,
        )
        try:
            with seen.scope:
                async with opening as seen.run:
                    if reads:
                        seen.events.extend([event async for event in seen.run])
                    else:
                        await engine.wait_ended(seen.request_id)
                    seen.result = await seen.run.result()
        except BaseException as error:
            # What a handler raises is its request's affair, whatever it is.
            if holds(error, (trio.Cancelled, *PROGRAM_ENDS)):
                raise
            seen.error = error

    def _cancel(self, seen: _Seen) -> None:
        seen.cancelled = True
        self.run.value.cancel(seen.request_id, REASON)

    def _wait(self, seen: _Seen, promise: Promise, otherwise: str = "it does not come to an end") -> None:
        self._wait_until(lambda: seen.over, promise, otherwise)

    def _wait_until(
        self, condition: Callable[[], object], promise: Promise, otherwise: str = "it does not come to an end"
    ) -> None:
        try:
            self.run.advance_until(condition, self._patience)
        except GuestRunError as error:
            self._broken(promise, otherwise, error)

    def _nothing_left(self, after: str) -> None:
        """Rules A8, A11, C4."""
        promise = Promise.LEAVES_NOTHING
        # With scope='none' it may go on after its caller has left.
        self._wait_until(lambda: all(seen.over and not seen.handling.at_work for seen in self._started), promise)
        self._started.clear()
        snapshot = self.run.value.snapshot().model(self.model.name)
        live = [*snapshot.without_lane]
        for lane in snapshot.lanes:
            live += [*lane.running, *lane.waiting]
        if live:
            left = ", ".join(f"{request.kind} {request.request_id!r} ({request.state})" for request in live)
            self._broken(promise, f"after {after} there are still {left}")
        if any(lane.used for lane in snapshot.lanes):
            self._broken(promise, f"after {after} a permit is still in use")
        if self.decoder is not None:
            try:
                self.decoder.assert_idle()
            except AssertionError as error:
                self._broken(promise, f"after {after} of the decoder: {error}", error)
        if snapshot.state != "loaded":
            self._broken(promise, f"after {after} the model is {snapshot.state}")
        tasks = _tasks()
        # By number: what the plugins beside it keep running may well be replaced.
        if len(tasks) > len(self._tasks):
            names = ", ".join(sorted(task.name for task in tasks - self._tasks))
            self._broken(promise, f"after {after} there are more tasks than before, among them {names}")

    def _state(self) -> str:
        snapshot = self.run.value.snapshot().model(self.model.name)
        counts = {
            "permits": sum(lane.used for lane in snapshot.lanes),
            "waiters": sum(len(lane.waiting) for lane in snapshot.lanes),
            "slots": 0 if self.decoder is None else len(self.decoder.used),
            "steps": self._steps_so_far(),
            "tasks": len(_tasks()),
        }
        return ", ".join(f"{count} {name}" for name, count in counts.items())

    def _steps_so_far(self) -> int:
        return 0 if self.decoder is None else self.decoder.statistics().steps

    def _broken(self, promise: Promise, what: str, cause: BaseException | None = None) -> NoReturn:
        raise BrokenPromise(self.spec.name, self.operation.kind, promise, what) from cause


def _before(one: int | None, other: int | None) -> bool:
    """Whether one moment was before another; True where one of them never came."""
    return one is None or other is None or one < other


def _stems_from_an_error_of_ours(error: BaseException | None) -> bool:
    """Whether an error, or what it was explicitly raised from, is one of Laneway's."""
    while error is not None and not isinstance(error, laneway.LanewayError):
        error = None if isinstance(error, BaseExceptionGroup) else error.__cause__
    return error is not None


def _tasks() -> set[trio.lowlevel.Task]:
    """All tasks of the run."""
    root = trio.lowlevel.current_root_task()
    assert root is not None
    found, todo = set(), [root]
    while todo:
        task = todo.pop()
        found.add(task)
        todo.extend(child for nursery in task.child_nurseries for child in nursery.child_tasks)
    return found


def _spread(count: int, most: int) -> list[int]:
    """At most so many of 1 to ``count``, the first and the last among them, evenly spread."""
    if count <= most:
        return list(range(1, count + 1))
    return sorted({1 + index * (count - 1) // (most - 1) for index in range(most)})
