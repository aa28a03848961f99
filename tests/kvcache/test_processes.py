"""Two processes on one cache directory.  Rules K2 and K3, with real locks, real threads and real kills."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

import laneway
from laneway._kvcache import _files
from laneway._kvcache._format import Facts
from laneway_plugins import completion
from tests.kvcache.kit import GREEDY, Directory, Talk, cached, cold, report

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

# Does a turn on key x, and stands still inside of a decode step until a line comes.
CHILD = """
import sys
from pathlib import Path
import trio
from tests.kvcache.kit import Talk, cached

async def main():
    async with cached(Path(sys.argv[1])) as s:
        def stand_still(number, batch):
            if number == 4:
                print("inside", flush=True)
                sys.stdin.readline()
        s.decoder.at_step = stand_still
        answer = await Talk(s.model, "x").say("Hello")
        print(answer.stats.cache.ended, flush=True)

trio.run(main)
"""


HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


class Turn:
    """A turn in a task of its own; starting it returns when it has arrived."""

    def __init__(self, model: laneway.Model, kv_cache: str) -> None:
        self.ended = trio.Event()
        self._model = model
        self._kv_cache = kv_cache
        self._answer: completion.Completion

    async def take(self, task_status: trio.TaskStatus[None]) -> None:
        async with completion.stream(self._model, HELLO, kv_cache=self._kv_cache, **GREEDY) as run:
            task_status.started()
            self._answer = await run.result()
        self.ended.set()

    async def result(self) -> completion.Completion:
        await self.ended.wait()
        return self._answer


@contextmanager
def another_process(top: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that is in the middle of a turn; it is killed at the end of the block, if it is still there."""
    command = [sys.executable, "-c", CHILD, str(top)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "inside\n"
        yield child
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize("killed", [False, True])
async def test_K2_a_turn_waits_for_another_process_and_plain_ones_pass_it(tmp_path: Path, killed: bool) -> None:
    disk = Directory(tmp_path)
    with another_process(tmp_path) as child, trio.fail_after(600):
        async with cached(tmp_path) as s, trio.open_nursery() as nursery:
            turn = Turn(s.model, "x")
            await nursery.start(turn.take)
            assert len(s.lane.waiting) == 1
            for _ in range(3):
                await Talk(s.model, None).say("Hello")
            # One that gives up while it waits leaves the first one its place.
            async with completion.stream(s.model, "Hello", kv_cache="x", **GREEDY):
                assert len(s.lane.waiting) == 2
            assert not turn.ended.is_set()
            assert s.lane.used == 0
            if killed:
                child.send_signal(signal.SIGKILL)
            else:
                out, _ = child.communicate("\n")
                assert out == "commit\n"
            answer = await turn.result()
            assert report(answer).ended == "commit"
            assert answer.tokens == cold(s, [*HELLO, {"role": "assistant", "content": answer.text}])
            # The other one's turn was the same, so its file had all of the prompt; one that is killed leaves no file.
            assert answer.stats.cached_tokens == (0 if killed else answer.stats.prompt_tokens - 1)
            s.assert_idle()
    assert [name for name in disk.files() if name != "named/x/=model.kv"] == []


async def test_K2_turns_on_other_files_do_not_wait(tmp_path: Path) -> None:
    with another_process(tmp_path), trio.fail_after(600):
        async with cached(tmp_path) as s:
            for kv_cache in ("y", True):
                assert report(await Talk(s.model, kv_cache).say("Hello")).ended == "commit"


async def test_K5_what_another_process_uses_is_not_deleted(tmp_path: Path) -> None:
    async with cached(tmp_path) as s:
        await Talk(s.model, "x").say("Hello")
        with another_process(tmp_path):
            done = await s.engine.kv_caches.delete("x")
            assert (len(done.deleted), len(done.in_use)) == (0, 1)
        done = await s.engine.kv_caches.delete("x")
        assert (len(done.deleted), len(done.in_use)) == (1, 0)


async def test_K3_writing_does_not_hold_the_event_loop_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the file is written, in a thread that stands still, another answer is made from beginning to end."""
    standing, gone_on = trio.Event(), trio.Event()
    write = _files.write

    def slow(path: Path, *rest: object) -> int:
        trio.from_thread.run_sync(standing.set)
        trio.from_thread.run(gone_on.wait)
        return write(path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(_files, "write", slow)
    async with cached(tmp_path, 2) as s, trio.open_nursery() as nursery:
        with trio.fail_after(600):
            turn = Turn(s.model, "x")
            await nursery.start(turn.take)
            await standing.wait()
            await Talk(s.model, None).say("Hello")
            assert not turn.ended.is_set()
            gone_on.set()
            assert report(await turn.result()).ended == "commit"


@pytest.mark.parametrize("how", ["by scope", "by unload"])
async def test_K3_a_cancel_in_the_middle_of_a_write_leaves_the_file_byte_for_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    disk = Directory(tmp_path)
    writing, go_on = trio.Event(), trio.Event()
    blocks = _files._blocks

    def slow(head: bytes, state: bytes) -> Iterator[bytes | memoryview]:
        for number, block in enumerate(blocks(head, state)):
            if number == 1:
                trio.from_thread.run_sync(writing.set)
                try:
                    trio.from_thread.run(go_on.wait)
                except trio.Cancelled:
                    yield block
                    raise AssertionError("the write went on after its cancel") from None
            yield block

    async with cached(tmp_path) as s:
        talk = Talk(s.model, "x")
        await talk.say("Hello")
        before = disk.files()

        async def turn() -> None:
            if how == "by scope":
                await talk.say("a turn that is cancelled")
            else:
                with pytest.raises(laneway.InferenceCancelledError, match="unloaded") as caught:
                    await talk.say("a turn that is cancelled")
                assert caught.value.stats is not None
                assert caught.value.stats.cache is not None
                assert caught.value.stats.cache.ended == "release"

        with monkeypatch.context() as patch, trio.fail_after(600):
            patch.setattr(_files, "_blocks", slow)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(turn)
                await writing.wait()
                assert len(disk.files()) == 3  # the file, the lock, and what is being written
                if how == "by scope":
                    nursery.cancel_scope.cancel()
                else:
                    await s.engine.unload_model(s.model)
                    assert disk.files() == before
        assert disk.files() == before
        if how == "by scope":
            s.assert_idle()
            assert (await talk.say("a turn that is not")).stats.cached_tokens > 20


async def test_K3_a_cancel_while_the_file_is_read_is_a_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Directory(tmp_path)
    reading, go_on, done = trio.Event(), threading.Event(), threading.Event()
    read = _files.read

    def slow(path: Path, wanted: Callable[[Facts], None]) -> _files.Stored:
        trio.from_thread.run_sync(reading.set)
        assert go_on.wait(60)
        try:
            return read(path, wanted)
        finally:
            done.set()

    async with cached(tmp_path) as s:
        await Talk(s.model, "x").say("Hello")
        before = disk.files()
        monkeypatch.setattr(_files, "read", slow)
        with trio.fail_after(600), pytest.raises(laneway.InferenceCancelledError) as caught:
            async with completion.stream(s.model, HELLO, kv_cache="x", request_id="turn", **GREEDY) as run:
                await reading.wait()
                s.engine.cancel("turn")
                await run.result()
        go_on.set()
        assert await trio.to_thread.run_sync(done.wait, 60)
        assert caught.value.stats is not None
        assert caught.value.stats.cache is not None
        assert (caught.value.stats.cache.ended, caught.value.stats.cache.reason) == ("release", "it was cancelled")
        assert disk.files() == before
        s.assert_idle()
