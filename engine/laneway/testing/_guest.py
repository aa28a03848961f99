"""One Trio run that synchronous code drives, a step at a time, in virtual time.

Hypothesis' rules and invariants are synchronous functions, so a state machine cannot await.  Here it is the host of a
Trio guest run instead: each call lets the run go on until every task is blocked, and then nothing moves until the next
call.  Between two calls the state can be looked at in peace.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import math
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar, final, overload

import trio
from outcome import Error, Outcome, Value, acapture
from trio.testing import MockClock, active_thread_count, wait_all_tasks_blocked, wait_all_threads_completed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType

T = TypeVar("T")
V = TypeVar("V")

_TRIO = Path(trio.__file__).parent


class GuestRunError(Exception):
    """The run cannot do what was asked: it is over, it does not come to rest, or it waits for what never comes.

    Where tasks are to blame, the message shows all of them and where each of them waits.
    Errors of the code under test are not of this type: they come as they are.
    """


class _Killed(BaseException):
    """Thrown into tasks that can no longer end by themselves, so that the thread can host another run."""


@final
class GuestTask(Generic[T]):
    """A task of a :class:`GuestRun`, as its driver sees it.  Made by :meth:`GuestRun.start`."""

    def __init__(self, run: GuestRun[Any], name: str) -> None:
        self.name = name
        self.scope = trio.CancelScope()
        """Around the task; :meth:`cancel` cancels it and lets the run settle."""
        self._run = run
        self._outcome: Outcome[T] | None = None
        self._seen = False

    def __repr__(self) -> str:
        return f"<laneway.testing.GuestTask {self.name} {self._state()}>"

    def _state(self) -> str:
        if self._outcome is None:
            return "running"
        if not isinstance(self._outcome, Error):
            return "returned"
        return "cancelled" if self.cancelled else f"raised {self._outcome.error!r}"

    @property
    def done(self) -> bool:
        """Whether it has returned, raised or been cancelled."""
        return self._outcome is not None

    @property
    def cancelled(self) -> bool:
        """Whether it ended with :class:`trio.Cancelled`."""
        return isinstance(self._outcome, Error) and isinstance(self._outcome.error, trio.Cancelled)

    @property
    def outcome(self) -> Outcome[T] | None:
        """What its function returned or raised, the same object; None while it runs.

        Looking at it, here or by :meth:`result`, counts as having seen a failure: see :meth:`GuestRun.close`.
        """
        self._seen = self._seen or self._outcome is not None
        return self._outcome

    def result(self) -> T:
        """What its function returned; raises what it raised.  Raises :class:`GuestRunError` while it runs."""
        if self._outcome is None:
            raise GuestRunError(self._run._report(f"task {self.name} has not ended"))
        self._seen = True
        # Not unwrap(), which may be called but once.
        if isinstance(self._outcome, Error):
            raise self._outcome.error
        assert isinstance(self._outcome, Value)
        value: T = self._outcome.value
        return value

    def cancel(self) -> None:
        """Cancel the task and let the run settle."""
        self._run.step(self.scope.cancel)


@final
class GuestRun(Generic[V]):
    """A Trio run under a :class:`trio.testing.MockClock`, driven from outside by the thread that made it.

    .. code-block:: python

        with GuestRun(lambda: laneway.open_engine(plugins=[scripted_loader_plugin()])) as run:
            engine = run.value
            model = run.call(engine.load_model, "scripted:a")
            answer = run.start(complete, model, "Hello")
            run.advance(2.5)
            assert answer.done

    Every method returns when all tasks are blocked again, and none of them on a worker thread.  Time stands still but
    for :meth:`advance`, :meth:`advance_until` and :meth:`call`.  If the run crashes, the call that let it run raises
    the original exception (not a group of one).  A thread can host one run at a time, and none inside ``trio.run``.

    :param main: makes a context manager that is open for the length of the run, :attr:`value` being what it gives
    :param max_ticks: rounds of Trio's scheduler that one call may take to come to rest
    :param thread_timeout: real seconds that a worker thread may take
    """

    value: V
    """What ``main``'s context manager gave."""

    @overload
    def __init__(
        self: GuestRun[None], main: None = None, *, max_ticks: int = ..., thread_timeout: float = ...
    ) -> None: ...

    @overload
    def __init__(
        self, main: Callable[[], AbstractAsyncContextManager[V]], *, max_ticks: int = ..., thread_timeout: float = ...
    ) -> None: ...

    def __init__(
        self,
        main: Callable[[], AbstractAsyncContextManager[Any]] | None = None,
        *,
        max_ticks: int = 200_000,
        thread_timeout: float = 60.0,
    ) -> None:
        self.clock = MockClock()
        self.cancel_scope = trio.CancelScope()
        """Around everything, ``main``'s block included: cancelling it is what the end of the whole program would do."""
        self.tasks: list[GuestTask[Any]] = []
        """All tasks that were started, oldest first."""
        self._inbox: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._max_ticks = max_ticks
        self._thread_timeout = thread_timeout
        self._end: Outcome[None] | None = None
        self._surfaced = False
        self._main_task: trio.lowlevel.Task | None = None
        self._nursery: trio.Nursery | None = None
        try:
            trio.lowlevel.start_guest_run(
                self._main,
                main or contextlib.nullcontext,
                run_sync_soon_threadsafe=self._inbox.put,
                done_callback=self._note_end,
                # The host has no signals of its own; Ctrl-C interrupts it wherever it is, in the pump as well.
                host_uses_signal_set_wakeup_fd=True,
                clock=self.clock,
            )
        except RuntimeError as error:
            raise GuestRunError(f"this thread has a Trio run already, close it first: {error}") from error
        try:
            self._advance_until(lambda: self._nursery is not None, math.inf, "main's block cannot be entered")
        except GuestRunError:
            self._kill()
            raise

    def __repr__(self) -> str:
        running = sum(not task.done for task in self.tasks)
        state = "over" if self._end is not None else f"{running} of {len(self.tasks)} tasks running"
        return f"<laneway.testing.GuestRun at {self.clock.current_time():g} s, {state}>"

    def __enter__(self) -> GuestRun[V]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception as second:
            error.add_note(f"closing the guest run failed as well: {second!r}")

    @property
    def now(self) -> float:
        """The run's time, in seconds since it began."""
        return self.clock.current_time()

    @property
    def over(self) -> bool:
        """Whether the run has ended: by :meth:`close`, by a crash, or because :attr:`cancel_scope` was cancelled."""
        return self._end is not None

    # Driving it.

    def step(self, fn: Callable[..., T], *args: Any) -> T:
        """Call a synchronous function inside the run, let the run settle, and return what the function returned.

        What ``fn`` raises is raised here; the run lives on.
        """

        async def call() -> T:
            value = fn(*args)
            if inspect.iscoroutine(value):
                value.close()
                raise TypeError(f"{fn!r} is async: use start() or call()")
            return value

        return self._drive(call)

    def settle(self) -> None:
        """Let the run go on until every task is blocked, without letting time pass."""
        self._drive(_nothing)

    def start_soon(self, async_fn: Callable[..., Awaitable[T]], *args: Any, name: str | None = None) -> GuestTask[T]:
        """Start a task, which first runs when the run next settles.  May also be used inside :meth:`step`.

        The task sees the caller's context variables.  What it raises stays in its handle.
        """
        self._check_alive()
        assert self._nursery is not None
        task: GuestTask[T] = GuestTask(self, name or _name(async_fn))
        self.tasks.append(task)
        self._nursery.start_soon(self._run_task, task, async_fn, args, name=task.name)
        return task

    def start(self, async_fn: Callable[..., Awaitable[T]], *args: Any, name: str | None = None) -> GuestTask[T]:
        """Start a task and let the run settle."""
        task = self.start_soon(async_fn, *args, name=name)
        self.settle()
        return task

    def call(self, async_fn: Callable[..., Awaitable[T]], *args: Any, limit: float = 3600.0) -> T:
        """Run an async function to its end, letting up to ``limit`` seconds pass, and return what it returned."""
        task = self.start(async_fn, *args)
        self._advance_until(lambda: task.done, limit, f"task {task.name} does not end")
        return task.result()

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass.  Time stops at every deadline on the way, in order, until all tasks are blocked again:
        what happens at one deadline may set the next."""
        if not 0 <= seconds < math.inf:
            raise ValueError(f"time advances by a finite number of seconds, not {seconds!r}")
        self._check_alive()
        self._pump(self._pass_time, self.clock.current_time() + seconds, _never)
        self._surface()

    def advance_until(self, condition: Callable[[], object], limit: float = 3600.0) -> None:
        """Let time pass, deadline by deadline, until ``condition`` holds; it is asked whenever all tasks are blocked.

        Raises :class:`GuestRunError`, showing the tasks, if it does not hold within ``limit`` seconds, or if no
        deadline is left that could change anything.
        """
        self._advance_until(condition, limit, "the awaited condition does not hold")

    def close(self) -> None:
        """End the run: cancel the tasks, leave ``main``'s block, and let time pass if that needs some.

        Raises what the run raised, if no call has raised it before; else the failure of a task whose outcome nobody has
        looked at.  Raises :class:`GuestRunError` if the run cannot end.  May be called again.
        """
        if self._end is None:
            if self._nursery is not None:
                self._nursery.cancel_scope.cancel()
            try:
                self._pump(self._pass_time, math.inf, _never)
            except GuestRunError:
                self._kill()
                raise
            if self._end is None:
                # Every task is blocked, no deadline is left, and this is the end: nothing can happen any more.
                stuck = self._report("the run cannot end: these tasks wait for what never comes")
                self._kill()
                raise GuestRunError(stuck)
        self._surface()
        unseen = [task for task in self.tasks if not task._seen and not task.cancelled]
        failures = []
        for task in unseen:
            task._seen = True
            if isinstance(task._outcome, Error):
                failures.append(task._outcome.error)
        if len(failures) == 1:
            raise failures[0]
        if failures:
            raise BaseExceptionGroup("tasks failed, and nobody looked", failures)

    # Inside the run.

    async def _main(self, main: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
        self._main_task = trio.lowlevel.current_task()
        with self.cancel_scope:
            async with main() as value:
                async with trio.open_nursery() as nursery:
                    self.value = value
                    self._nursery = nursery
                    await trio.sleep_forever()

    async def _run_task(self, task: GuestTask[T], async_fn: Callable[..., Awaitable[T]], args: tuple[Any, ...]) -> None:
        try:
            with task.scope:
                try:
                    value = await async_fn(*args)
                except BaseException as error:
                    task._outcome = Error(error)
                    raise
                task._outcome = Value(value)
        except Exception:
            # It is in the handle.  What is no Exception (a Ctrl-C, the cancellation of the whole run) goes on.
            return

    async def _pass_time(self, target: float, condition: Callable[[], object]) -> bool:
        """Go from deadline to deadline until ``condition`` holds (True) or ``target`` is reached (False).

        A target at infinity is reached when no deadline is left."""
        while True:
            await _all_blocked()
            if condition():
                return True
            wait = self._next_deadline()
            left = target - self.clock.current_time()
            if wait > left or wait == math.inf:
                if left != math.inf:
                    self.clock.jump(left)
                return False
            self.clock.jump(max(wait, 0.0))

    # The host's side.

    def _drive(self, async_fn: Callable[..., Awaitable[T]], *args: Any) -> T:
        self._check_alive()
        end = self._pump(async_fn, *args)
        self._surface()
        if end is None:
            raise GuestRunError("the run has ended before this did")
        return end.unwrap()

    def _pump(self, async_fn: Callable[..., Awaitable[T]], *args: Any) -> Outcome[T] | None:
        """Run ``async_fn`` inside, and Trio's callbacks until all tasks are blocked or the run has ended.

        Returns None if the run ended before the function did.
        """
        ends: list[Outcome[T]] = []
        settled: list[bool] = []

        async def turn() -> None:
            end = await acapture(async_fn, *args)
            if isinstance(end, Error) and isinstance(end.error, trio.Cancelled):
                raise end.error
            ends.append(end)
            await _all_blocked()
            settled.append(True)

        # A system task: cancelling the run, or everything in it, does not reach it before the end.
        trio.lowlevel.spawn_system_task(turn, name="GuestRun driver", context=contextvars.copy_context())
        for _ in range(self._max_ticks):
            if settled or self._end is not None:
                return ends[0] if ends else None
            try:
                callback = self._inbox.get(timeout=self._thread_timeout)
            except Empty:
                what = f"nothing happened for {self._thread_timeout:g} s: does a worker thread not end?"
                raise GuestRunError(self._report(what)) from None
            callback()
        raise GuestRunError(self._report(f"the run did not come to rest within {self._max_ticks} ticks"))

    def _advance_until(self, condition: Callable[[], object], limit: float, what: str) -> None:
        self._check_alive()
        end = self._pump(self._pass_time, self.clock.current_time() + limit, condition)
        self._surface()
        if end is not None and end.unwrap():
            return
        if self._end is not None:
            if not condition():
                raise GuestRunError(f"{what}, and the run has ended")
            return
        why = "and no deadline is left" if self._next_deadline() == math.inf else f"within {limit:g} s"
        raise GuestRunError(self._report(f"{what} {why}"))

    @staticmethod
    def _next_deadline() -> float:
        return trio.lowlevel.current_statistics().seconds_to_next_deadline

    def _note_end(self, end: Outcome[None]) -> None:
        self._end = end

    def _check_alive(self) -> None:
        if self._end is not None:
            self._surface()
            raise GuestRunError("the run is over")

    def _surface(self) -> None:
        """Raise what the run ended with, once."""
        if isinstance(self._end, Error) and not self._surfaced:
            self._surfaced = True
            error = self._end.error
            while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
                error = error.exceptions[0]
            raise error

    def _kill(self) -> None:
        """End a run that cannot end by itself.  What its tasks were waiting for is broken afterwards."""
        self._surfaced = True
        for running in self.tasks:
            running._seen = running._seen or not running.done
        for _ in range(1000):
            try:
                self._pump(_nothing)
            except GuestRunError:
                return  # its tasks do not even block: nothing more can be done from here
            if self._end is not None or self._main_task is None:
                return
            for task in _leaves(self._main_task):
                trio.lowlevel.reschedule(task, Error(_Killed()))

    def _report(self, what: str) -> str:
        """``what``, with the time and the tasks and where each of them waits."""
        lines = [f"{what} (at {self.clock.current_time():g} s of the run)"]
        if self._end is None and self._main_task is not None:
            lines.extend(_tree(self._main_task, 1))
        return "\n".join(lines)


async def _all_blocked() -> None:
    """Wait until every task is blocked, and none of them on a worker thread."""
    await wait_all_tasks_blocked()
    while active_thread_count():
        await wait_all_threads_completed()
        await wait_all_tasks_blocked()


async def _nothing() -> None:
    """What :meth:`GuestRun.settle` runs."""


def _never() -> bool:
    return False


def _name(fn: Callable[..., object]) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__qualname__", repr(fn))


def _leaves(task: trio.lowlevel.Task) -> Iterator[trio.lowlevel.Task]:
    children = [child for nursery in task.child_nurseries for child in nursery.child_tasks]
    if not children:
        yield task
    for child in children:
        yield from _leaves(child)


def _tree(task: trio.lowlevel.Task, depth: int) -> Iterator[str]:
    frames = list(task.iter_await_frames())
    ours = [entry for entry in frames if _TRIO not in Path(entry[0].f_code.co_filename).parents]
    where = "nowhere"
    if ours:
        frame, line = ours[-1]
        where = f"{Path(frame.f_code.co_filename).name}:{line} in {frame.f_code.co_qualname}"
        inner = frames[frames.index(ours[-1]) + 1 :]
        if inner:
            where += f", awaiting {inner[0][0].f_code.co_qualname}"
    yield f"{'  ' * depth}{task.name}: {where}"
    for nursery in task.child_nurseries:
        for child in nursery.child_tasks:
            yield from _tree(child, depth + 1)
