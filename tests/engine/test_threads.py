"""The engine's worker threads wait neither for those of the program nor for work that takes long."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

import pytest
import trio
import trio.testing

import laneway
from laneway import threads
from laneway._kvcache import _files
from laneway.processes import open_process
from laneway.testing import ScriptedLoader
from laneway_plugins import completion
from tests.kvcache.kit import GREEDY, Talk, cached
from tests.program_threads import HANG_SECONDS, Held, all_tokens_held, one_thread_of_each_kind

LONG_TEXT = "word " * 5000
"""Long enough to be tokenised in a thread."""


async def test_two_workers_that_hold_all_of_the_programs_threads_each_get_a_turn_on_one_cache(tmp_path: Path) -> None:
    together = threading.Barrier(2)
    answers: list[completion.Completion] = []

    async with cached(tmp_path, parallel=2) as s:

        async def ask() -> completion.Completion:
            return await completion.complete(s.model, "Hello", kv_cache="k", **GREEDY)

        def work() -> None:
            together.wait()  # both tokens are taken from here on
            answers.append(trio.from_thread.run(ask))

        trio.to_thread.current_default_thread_limiter().total_tokens = 2
        with trio.fail_after(HANG_SECONDS):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.to_thread.run_sync, work)
                nursery.start_soon(trio.to_thread.run_sync, work)
    assert len(answers) == 2
    assert answers[0].text == answers[1].text


async def test_all_that_the_engine_does_in_threads_goes_on_while_the_program_holds_its_own(tmp_path: Path) -> None:
    async with all_tokens_held():
        loader = ScriptedLoader(context_size=100_000, seconds_per_step=0.0)
        async with laneway.open_engine(plugins=[loader.plugin], cache_dir=tmp_path) as engine:
            model = await engine.load_model("scripted:model")
            talk = [{"role": "user", "content": LONG_TEXT}]
            for _ in range(2):
                await completion.complete(model, talk, kv_cache="k", **GREEDY)
            await completion.complete(model, talk, kv_cache=True, **GREEDY)
            assert len(await engine.kv_caches.list()) == 2
            await engine.kv_caches.prune()
            await engine.kv_caches.delete("k")
            await engine.kv_caches.delete_automatic()
            assert (await engine.kv_caches.delete_everything()).deleted == ()
            await engine.unload_model(model)
            await engine.load_model("scripted:model")


async def test_a_process_starts_and_ends_while_the_program_holds_its_threads() -> None:
    async with all_tokens_held():
        program = "import sys; print(sys.stdin.read().upper(), end=''); sys.exit(3)"
        process = await open_process([sys.executable, "-c", program], stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stderr is None
            await process.stdin.send_all(b"word")
            await process.stdin.aclose()
            assert b"".join([chunk async for chunk in process.stdout]) == b"WORD"
            assert await process.wait() == 3
            assert process.returncode == 3
        finally:
            await process.end()


DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"


@pytest.mark.parametrize("pidfd", [True, False])
async def test_a_process_that_is_not_wanted_any_more_is_asked_and_then_ended(
    pidfd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not pidfd:
        monkeypatch.delattr("os.pidfd_open", raising=False)  # as it is on other systems than Linux
    for program, grace, status in ("print('x', flush=True); input()", 60.0, -15), (DEAF, 0.0, -9):
        process = await open_process([sys.executable, "-c", program], stdin=PIPE, stdout=PIPE)
        assert process.stdout is not None
        await process.stdout.receive_some()
        with trio.move_on_after(0):
            await process.wait()
        assert process.returncode is None
        with trio.CancelScope() as scope:
            scope.cancel()
            await process.end(grace)
        assert process.returncode == status
        assert await process.wait() == status


async def test_a_program_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await open_process([str(tmp_path / "nothing")], stdin=PIPE)


async def test_a_process_whose_pipes_cannot_be_used_is_ended_again(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Popen[bytes]] = []
    real_dup = os.dup

    class Watched(Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)

    def dup(descriptor: int) -> int:
        if started and descriptor == started[0].stdout.fileno():  # type: ignore[union-attr]
            raise OSError(errno.EMFILE, "Too many open files")
        return real_dup(descriptor)

    monkeypatch.setattr("subprocess.Popen", Watched)
    monkeypatch.setattr("os.dup", dup)
    with pytest.raises(OSError, match="Too many open files"):
        await open_process([sys.executable, "-c", "input()"], stdin=PIPE, stdout=PIPE)
    (process,) = started
    assert process.returncode == -signal.SIGKILL
    assert process.stdin is not None
    assert process.stdin.closed


# What takes long, and the rest.


async def test_everything_goes_on_with_a_single_thread_of_each_kind(tmp_path: Path) -> None:
    with one_thread_of_each_kind(), trio.fail_after(HANG_SECONDS):
        async with cached(tmp_path, parallel=3, context_size=300_000) as s:
            talk = [{"role": "user", "content": LONG_TEXT}]
            async with trio.open_nursery() as nursery:
                for key in ("a", "a", "b", True):
                    nursery.start_soon(partial(completion.complete, s.model, talk, kv_cache=key, **GREEDY))
                nursery.start_soon(s.engine.kv_caches.list)
                nursery.start_soon(s.engine.kv_caches.prune)
            assert len(await s.engine.kv_caches.list()) == 3


async def test_what_takes_long_keeps_no_thread_from_the_rest(tmp_path: Path) -> None:
    with one_thread_of_each_kind(), trio.fail_after(HANG_SECONDS):
        async with cached(tmp_path) as s, trio.open_nursery() as nursery:
            with Held() as load, Held() as lock:
                for blocker in (load, lock):
                    nursery.start_soon(threads.run_long, blocker)
                    await blocker.begun.wait()
                await Talk(s.model, "k").say("Hello")
                assert len(await s.model.tokenize(LONG_TEXT)) > 5000


async def test_a_saved_state_that_cannot_be_read_holds_up_its_own_turn_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, hanging = _files.read, Held()

    def read_slowly(path: Path, wanted: Any) -> Any:
        if "slow" in str(path):
            hanging()
        return read(path, wanted)

    monkeypatch.setattr(_files, "read", read_slowly)
    with one_thread_of_each_kind(), trio.fail_after(HANG_SECONDS), hanging:
        async with cached(tmp_path, parallel=2) as s:
            hanging.release()
            await Talk(s.model, "slow").say("Hello")
            hanging.again()
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(Talk(s.model, "slow").say, "Hello")
                    await hanging.begun.wait()
                    await Talk(s.model, "other").say("Hello")
                    await s.model.tokenize(LONG_TEXT)
                    assert len(await s.engine.kv_caches.list()) == 2
                    scope.cancel()  # which ends the turn, for its reading is given up


async def test_a_disk_that_hangs_keeps_no_thread_from_what_needs_no_disk(tmp_path: Path) -> None:
    with one_thread_of_each_kind(), trio.fail_after(HANG_SECONDS):
        async with cached(tmp_path, context_size=300_000) as s, trio.open_nursery() as nursery:
            with Held() as disk:
                nursery.start_soon(threads.run_file, disk)
                await disk.begun.wait()
                talk = [{"role": "user", "content": LONG_TEXT}]
                assert (await completion.complete(s.model, talk, **GREEDY)).text


async def test_a_cancel_ends_the_wait_for_a_thread(tmp_path: Path) -> None:
    with one_thread_of_each_kind(), trio.fail_after(HANG_SECONDS):
        async with cached(tmp_path, context_size=300_000) as s, trio.open_nursery() as nursery:
            with Held() as first:
                nursery.start_soon(threads.run_sync, first)
                await first.begun.wait()
                for wait in (partial(s.model.tokenize, LONG_TEXT), partial(threads.run_sync, print)):
                    with trio.CancelScope() as scope:
                        async with trio.open_nursery() as inner:
                            inner.start_soon(wait)
                            await trio.testing.wait_all_tasks_blocked()
                            scope.cancel()
                    assert scope.cancelled_caught


@pytest.mark.parametrize("run", [threads.run_sync, threads.run_file, threads.run_long])
async def test_what_has_begun_is_waited_for_or_given_up_as_its_caller_says(run: Any) -> None:
    ends: list[str] = []

    async def wait(held: Held, *, abandon_on_cancel: bool) -> None:
        ends.append(await run(held, abandon_on_cancel=abandon_on_cancel))

    for abandon in (False, True):
        with trio.fail_after(HANG_SECONDS), Held() as held, trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                with held:
                    nursery.start_soon(partial(wait, held, abandon_on_cancel=abandon))
                    await held.begun.wait()
                    scope.cancel()
                    with trio.CancelScope(shield=True):
                        await trio.testing.wait_all_tasks_blocked()
                    assert len(nursery.child_tasks) == (not abandon)
    assert ends == ["done"]


async def test_two_runs_of_trio_share_no_thread() -> None:
    async def second() -> str:
        with one_thread_of_each_kind():
            return await threads.run_sync(str, "second")

    with one_thread_of_each_kind(), trio.fail_after(HANG_SECONDS):
        async with trio.open_nursery() as nursery:
            with Held() as first:
                nursery.start_soon(threads.run_sync, first)
                await first.begun.wait()
                assert await trio.to_thread.run_sync(trio.run, second) == "second"
