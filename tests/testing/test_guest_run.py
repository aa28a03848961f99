from __future__ import annotations

import contextlib
import contextvars
import re
import threading
from collections.abc import AsyncIterator, Callable

import pytest
import trio
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from laneway.testing import GuestRun, GuestRunError, GuestTask


class BoomError(Exception):
    pass


async def fail() -> None:
    await trio.sleep(1)
    raise BoomError


async def stuck() -> None:
    with trio.CancelScope(shield=True):
        await trio.Event().wait()


# Stepping.


def test_a_step_lets_everything_run_until_it_blocks() -> None:
    order: list[str] = []

    async def follow(event: trio.Event, name: str) -> None:
        await event.wait()
        for _ in range(3):
            await trio.lowlevel.checkpoint()
        order.append(name)
        await trio.sleep_forever()

    with GuestRun() as run:
        events = run.step(lambda: [trio.Event(), trio.Event()])
        for index, event in enumerate(events):
            run.start(follow, event, f"task {index}")
        assert order == []
        run.step(events[1].set)
        assert order == ["task 1"]
        run.step(events[0].set)
        assert order == ["task 1", "task 0"]


def test_a_step_returns_raises_and_lives_on() -> None:
    def boom() -> None:
        raise BoomError

    with GuestRun() as run:
        assert run.step(divmod, 7, 3) == (2, 1)
        with pytest.raises(BoomError):
            run.step(boom)
        assert run.step(trio.current_time) == 0


def test_an_async_function_is_no_step() -> None:
    no_step: Callable[[float], object] = trio.sleep
    with GuestRun() as run:
        with pytest.raises(TypeError, match=r"use start\(\) or call\(\)"):
            run.step(no_step, 1)


def test_tasks_started_in_one_step_run_together() -> None:
    seen: list[tuple[str, int]] = []

    async def look(name: str) -> None:
        await trio.lowlevel.checkpoint()
        seen.append((name, len(run.tasks)))

    with GuestRun() as run:
        run.step(lambda: [run.start_soon(look, "a"), run.start_soon(look, "b")])
        # Both were there before either ran on.
        assert sorted(seen) == [("a", 2), ("b", 2)]
        run.start_soon(look, "c")
        assert len(seen) == 2
        run.settle()
        assert len(seen) == 3


def test_a_task_has_the_callers_context() -> None:
    variable = contextvars.ContextVar[str]("variable")

    async def read() -> str:
        return variable.get("unset")

    with GuestRun() as run:
        variable.set("mine")
        assert run.start(read).result() == "mine"
        assert run.step(variable.get) == "mine"


def test_time_stands_still_between_calls() -> None:
    with GuestRun() as run:
        task = run.start(trio.sleep, 1e-9)
        for _ in range(10):
            run.settle()
        assert not task.done
        assert run.now == 0


# Tasks.


def test_a_task_keeps_its_outcome() -> None:
    async def answer() -> int:
        await trio.sleep(1)
        return 42

    with GuestRun() as run:
        good, bad, cut = run.start(answer), run.start(fail), run.start(trio.sleep_forever, name="sleeper")
        assert good.outcome is None
        with pytest.raises(GuestRunError, match=r"task test_a_task.*answer has not ended"):
            good.result()
        run.advance(1)
        cut.cancel()
        assert all(task.done for task in run.tasks)
        assert (good.result(), good.result()) == (42, 42)
        assert [task.cancelled for task in run.tasks] == [False, False, True]
        for _ in range(2):
            with pytest.raises(BoomError):
                bad.result()
        assert repr(good).endswith("answer returned>")
        assert repr(bad).endswith("fail raised BoomError()>")
        assert repr(cut) == "<laneway.testing.GuestTask sleeper cancelled>"


def test_cancelling_a_task_before_it_ran() -> None:
    with GuestRun() as run:
        task = run.start_soon(trio.sleep_forever)
        task.cancel()
        assert task.cancelled


def test_a_task_that_swallows_its_cancel_has_its_own_result() -> None:
    async def stubborn() -> str:
        with trio.move_on_after(5):
            await trio.sleep_forever()
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            return "cleaned up"

    with GuestRun() as run:
        task = run.start(stubborn)
        run.advance(5)
        task.cancel()
        assert task.result() == "cleaned up"


def test_an_unseen_failure_is_raised_at_the_end() -> None:
    run = GuestRun()
    run.start(fail)
    run.advance(1)
    with pytest.raises(BoomError):
        run.close()
    run.close()
    run = GuestRun()
    run.start(fail)
    run.start(fail)
    run.advance(1)
    with pytest.raises(ExceptionGroup) as caught:
        run.close()
    assert [type(error) for error in caught.value.exceptions] == [BoomError, BoomError]


def test_a_group_with_a_cancel_in_it_does_not_escape() -> None:
    async def mixed() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            try:
                await trio.sleep_forever()
            finally:
                raise BoomError

    with GuestRun() as run:
        task = run.start(mixed)
        task.cancel()
        with pytest.raises(BaseExceptionGroup) as caught:
            task.result()
        assert caught.group_contains(BoomError)
        assert run.step(trio.current_time) == 0


# Time.


def test_advancing_stops_at_every_deadline_in_order() -> None:
    fired: list[tuple[str, float]] = []

    async def chain(name: str, *waits: float) -> None:
        for wait in waits:
            await trio.sleep(wait)
            fired.append((name, trio.current_time()))

    with GuestRun() as run:
        run.start(chain, "a", 1, 2, 4)
        run.start(chain, "b", 2, 0.5)
        run.start(chain, "c", 0, 100)
        run.advance(5)
        assert fired == [("c", 0), ("a", 1), ("b", 2), ("b", 2.5), ("a", 3)]
        assert run.now == 5
        run.advance(0)
        run.advance(2)
        assert fired[5:] == [("a", 7)]
        assert run.now == 7


def test_a_deadline_at_the_target_fires() -> None:
    with GuestRun() as run:
        run.advance(0.1)
        task = run.start(trio.sleep, 0.2)
        run.advance(0.2)
        assert task.done
        task = run.start(trio.sleep, 0.3)
        run.advance(0.1)
        assert not task.done


@pytest.mark.parametrize("seconds", [-1, float("inf"), float("nan")])
def test_time_advances_by_finite_seconds(seconds: float) -> None:
    with GuestRun() as run:
        with pytest.raises(ValueError, match="finite"):
            run.advance(seconds)


def test_advancing_until_a_condition_stops_there() -> None:
    ticks: list[float] = []

    async def tick() -> None:
        while True:
            await trio.sleep(1)
            ticks.append(trio.current_time())

    with GuestRun() as run:
        run.start(tick)
        run.advance_until(lambda: len(ticks) == 3)
        assert run.now == 3
        run.advance_until(lambda: True)
        assert run.now == 3
        with pytest.raises(GuestRunError, match=r"does not hold within 2\.5 s"):
            run.advance_until(lambda: False, limit=2.5)
        assert run.now == 5.5


def test_waiting_for_what_never_comes_shows_who_waits_where() -> None:
    async def wait_for(event: trio.Event) -> None:
        await event.wait()

    with GuestRun() as run:
        run.start(wait_for, trio.Event(), name="the waiter")
        with pytest.raises(GuestRunError) as caught:
            run.advance_until(lambda: False)
        assert "no deadline is left" in str(caught.value)
        assert re.search(r"the waiter: test_guest_run.py:\d+ in .*wait_for, awaiting Event.wait", str(caught.value))


def test_call_runs_to_the_end_in_its_time() -> None:
    async def add(a: int, b: int) -> int:
        await trio.sleep(10)
        return a + b

    with GuestRun() as run:
        assert run.call(add, 1, 2) == 3
        assert run.now == 10
        with pytest.raises(BoomError):
            run.call(fail)
        with pytest.raises(GuestRunError, match="task sleep does not end within 3 s"):
            run.call(trio.sleep, 5, limit=3)


# Crashes.


@contextlib.asynccontextmanager
async def service(*, crash_after: float | None = None, log: list[str] | None = None) -> AsyncIterator[str]:
    async def crash(seconds: float) -> None:
        await trio.sleep(seconds)
        raise BoomError

    log = [] if log is None else log
    log.append("open")
    async with trio.open_nursery() as nursery:
        if crash_after is not None:
            nursery.start_soon(crash, crash_after)
        try:
            yield "the service"
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(2)
            log.append("closed")
        nursery.cancel_scope.cancel()


def test_main_is_open_for_the_length_of_the_run() -> None:
    log: list[str] = []
    with GuestRun(lambda: service(log=log)) as run:
        assert run.value == "the service"
        run.start(trio.sleep_forever)
        assert log == ["open"]
        assert repr(run) == "<laneway.testing.GuestRun at 0 s, 1 of 1 tasks running>"
    assert log == ["open", "closed"]
    assert run.now == 2
    assert run.over
    assert run.tasks[0].cancelled
    assert repr(run) == "<laneway.testing.GuestRun at 2 s, over>"


def test_a_crash_surfaces_at_once_as_itself() -> None:
    run = GuestRun(lambda: service(crash_after=3))
    run.advance(2)
    with pytest.raises(BoomError):
        run.advance(10)
    assert run.over
    with pytest.raises(GuestRunError, match="over"):
        run.settle()
    with pytest.raises(GuestRunError, match="over"):
        run.start(trio.sleep, 1)
    run.close()


def test_a_crash_while_closing_surfaces() -> None:
    run = GuestRun(lambda: service(crash_after=1))
    with pytest.raises(BoomError):
        run.close()
    run.close()


def test_a_failing_start_surfaces() -> None:
    @contextlib.asynccontextmanager
    async def broken() -> AsyncIterator[None]:
        await trio.sleep(1)
        raise BoomError
        yield

    with pytest.raises(BoomError):
        GuestRun(broken)
    with GuestRun():
        pass


def test_entering_main_may_take_time() -> None:
    @contextlib.asynccontextmanager
    async def slow() -> AsyncIterator[float]:
        await trio.sleep(4)
        yield trio.current_time()

    with GuestRun(slow) as run:
        assert run.value == 4


def test_cancelling_everything_is_the_end_of_the_program() -> None:
    log: list[str] = []
    run = GuestRun(lambda: service(log=log))
    run.step(run.cancel_scope.cancel)
    assert log == ["open"]  # its shielded teardown takes 2 s
    assert not run.over
    run.advance(2)
    assert log == ["open", "closed"]
    assert run.over
    run.close()


def test_calls_that_the_end_of_the_run_overtakes() -> None:
    run = GuestRun(service)
    task = run.start_soon(trio.sleep, 9)
    run.cancel_scope.cancel()
    run.advance(5)
    assert run.over
    assert task.cancelled
    run = GuestRun(service)
    run.cancel_scope.cancel()
    with pytest.raises(GuestRunError, match="does not hold, and the run has ended"):
        run.advance_until(lambda: False)
    run = GuestRun(service)
    run.cancel_scope.cancel()
    run.advance_until(lambda: run.over)
    bare = GuestRun()
    bare.cancel_scope.cancel()
    assert bare.step(divmod, 7, 3) == (2, 1)
    assert bare.over


def test_the_bodys_own_error_goes_on() -> None:
    body, late = BoomError(), BoomError()

    async def fail_late() -> None:
        raise late

    with pytest.raises(BoomError) as caught:
        with GuestRun() as run:
            run.start(fail_late)
            raise body
    assert caught.value is body
    assert body.__notes__ == ["closing the guest run failed as well: BoomError()"]
    assert run.over


# Ends that do not come.


def test_a_run_that_cannot_end_says_who_is_stuck_and_frees_the_thread() -> None:
    run = GuestRun(service)
    run.start(trio.sleep_forever)
    run.start(stuck, name="the culprit")
    with pytest.raises(GuestRunError) as caught:
        run.close()
    assert "cannot end" in str(caught.value)
    assert re.search(r"the culprit: test_guest_run.py:\d+ in stuck, awaiting Event.wait", str(caught.value))
    assert "sleep_forever:" not in str(caught.value)
    assert run.over
    run.close()
    with GuestRun() as other:
        other.settle()


def test_a_start_that_does_not_come_frees_the_thread() -> None:
    @contextlib.asynccontextmanager
    async def never() -> AsyncIterator[None]:
        await trio.Event().wait()
        yield

    with pytest.raises(GuestRunError, match="main's block cannot be entered and no deadline is left"):
        GuestRun(never)
    with GuestRun():
        pass


def test_a_run_that_does_not_come_to_rest_is_told_apart() -> None:
    async def spin() -> None:
        while True:
            await trio.lowlevel.checkpoint()

    run = GuestRun(max_ticks=500)
    with pytest.raises(GuestRunError, match="did not come to rest within 500 ticks") as caught:
        run.start(spin, name="the spinner")
    assert "the spinner" in str(caught.value)
    run.close()  # it can still be cancelled


def test_one_run_at_a_time_and_none_inside_another() -> None:
    with GuestRun():
        with pytest.raises(GuestRunError, match="close it first"):
            GuestRun()

    async def inside() -> None:
        GuestRun()

    with pytest.raises(GuestRunError, match="close it first"):
        trio.run(inside)


def test_threads_do_not_share_runs() -> None:
    times: list[float] = []

    def other() -> None:
        with GuestRun() as run:
            run.advance(1)
            times.append(run.now)

    with GuestRun() as run:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert run.now == 0
    assert times == [1]


def test_a_step_waits_for_worker_threads() -> None:
    async def work() -> list[int]:
        return [await trio.to_thread.run_sync(threading.get_ident) for _ in range(3)]

    with GuestRun() as run:
        task = run.start(work)
        assert threading.get_ident() not in task.result()


def test_a_worker_thread_that_does_not_end_is_named() -> None:
    gate = threading.Event()
    run = GuestRun(thread_timeout=0.01)
    with pytest.raises(GuestRunError, match=r"does a worker thread not end\?[^$]*to_thread_run_sync"):
        run.start(trio.to_thread.run_sync, gate.wait)
    gate.set()
    run.close()
    assert run.tasks[0].result() is True


# Under Hypothesis.


class Sleepers(RuleBasedStateMachine):
    """Tasks that sleep; the model knows when each must wake."""

    @initialize()
    def open(self) -> None:
        self.run = GuestRun()
        self.due: list[tuple[float, GuestTask[None]]] = []

    @rule(seconds=st.integers(0, 8))
    def sleep(self, seconds: int) -> None:
        self.due.append((self.run.now + seconds, self.run.start(trio.sleep, seconds)))

    @rule(seconds=st.integers(0, 8))
    def advance(self, seconds: int) -> None:
        self.run.advance(seconds)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.due:
            self.due.pop(data.draw(st.integers(0, len(self.due) - 1)))[1].cancel()

    @invariant()
    def all_woke_in_time(self) -> None:
        for due, task in getattr(self, "due", ()):
            assert task.done == (due <= self.run.now)

    def teardown(self) -> None:
        if hasattr(self, "run"):
            self.run.close()


TestSleepers = Sleepers.TestCase


@pytest.mark.parametrize("use", [lambda run: run.settle(), lambda run: run.step(int), lambda run: run.advance(1)])
def test_a_closed_run_refuses(use: Callable[[GuestRun[None]], object]) -> None:
    run = GuestRun()
    run.close()
    with pytest.raises(GuestRunError, match="over"):
        use(run)
