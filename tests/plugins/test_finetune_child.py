"""The care for a training process, on real processes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from laneway import FinetuneError
from laneway.processes import Process
from laneway_plugins import _finetune_child
from laneway_plugins._finetune_child import Child, Conversation, job_line, open_child
from laneway_plugins._finetune_events import ChildEvent, Finished, Paused, Started

PROGRAM = str(Path(__file__).with_name("finetune_child.py"))
PATIENCE = 600
"""Seconds after which something hangs."""


class Talk:
    """One process and what it has said."""

    def __init__(self, tmp_path: Path, how: str) -> None:
        self.job = {"how": how, "output": str(tmp_path / "adapter.gguf")}
        self.events: list[ChildEvent] = []
        self.heard = trio.Event()
        self.pause = trio.Event()
        self.process: Child

    def hear(self, event: ChildEvent) -> None:
        self.events.append(event)
        self.heard.set()

    async def run(self) -> Paused | Finished:
        with trio.fail_after(PATIENCE):
            async with open_child((PROGRAM,)) as self.process:
                talk = Conversation(self.process, job_line(self.job), pause=self.pause, on_event=self.hear)
                return await talk.run()

    async def beside(self, act: Callable[[], Awaitable[Any]]) -> FinetuneError | None:
        """Run it, and ``act`` once it has been heard of."""
        error: FinetuneError | None = None
        async with trio.open_nursery() as nursery:

            async def wait_and_act() -> None:
                await self.heard.wait()
                await act()

            nursery.start_soon(wait_and_act)
            try:
                await self.run()
            except FinetuneError as caught:
                error = caught
            nursery.cancel_scope.cancel()
        return error


def gone(pid: int) -> bool:
    """Whether no process has this number, one that has ended and waits to be asked for its status aside."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def pid_of(child: Child) -> int:
    assert isinstance(child, Process)
    return child.pid


async def test_to_its_end(tmp_path: Path) -> None:
    talk = Talk(tmp_path, "well")
    assert await talk.run() == Finished(step=3, adapter=talk.job["output"])
    assert isinstance(talk.events[0], Started)
    assert len(talk.events) == 4
    assert talk.process.returncode == 0
    assert gone(pid_of(talk.process))


async def test_what_it_is_started_with(tmp_path: Path) -> None:
    with pytest.raises(FinetuneError) as caught:
        await Talk(tmp_path, "look").run()
    backtrace, here, score = caught.value.log_line.split(" ")
    assert (backtrace, here) == ("1", "False")
    assert score in ("900", "") or not sys.platform.startswith("linux")


async def test_paused(tmp_path: Path) -> None:
    talk = Talk(tmp_path, "pausing")
    talk.pause.set()
    assert await talk.run() == Paused(step=2)


async def test_an_abort_is_an_error_with_the_last_line_of_the_log(tmp_path: Path) -> None:
    talk = Talk(tmp_path, "abort")
    with pytest.raises(FinetuneError, match="SIGABRT") as caught:
        await talk.run()
    assert caught.value.log_line == "GGML_ASSERT(false) failed"


async def test_a_kill_from_outside_is_an_error(tmp_path: Path) -> None:
    talk = Talk(tmp_path, "forever")

    async def act() -> None:
        os.kill(pid_of(talk.process), signal.SIGKILL)

    error = await talk.beside(act)
    assert error is not None
    assert "SIGKILL" in error.reason
    assert gone(pid_of(talk.process))


async def test_garbage_ends_it(tmp_path: Path) -> None:
    talk = Talk(tmp_path, "garbage")
    with pytest.raises(FinetuneError, match="'no event at all' is no JSON"):
        await talk.run()
    assert gone(pid_of(talk.process))


async def test_a_long_log_holds_nothing_up(tmp_path: Path) -> None:
    assert await Talk(tmp_path, "talkative").run() == Finished(step=3, adapter=str(tmp_path / "adapter.gguf"))


async def test_it_has_a_session_of_its_own(tmp_path: Path) -> None:
    talk = Talk(tmp_path, "forever")
    seen = []

    async def act() -> None:
        seen.append(os.getsid(pid_of(talk.process)))
        os.kill(pid_of(talk.process), signal.SIGKILL)

    await talk.beside(act)
    assert seen == [pid_of(talk.process)]
    assert seen != [os.getsid(0)]


@pytest.mark.parametrize("how", ["forever", "deaf"])
async def test_a_cancelled_scope_ends_it_surely(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The one goes when its input ends, the other has to be killed.
    monkeypatch.setattr(_finetune_child, "GRACE_SECONDS", 0.2 if how == "deaf" else PATIENCE)
    talk = Talk(tmp_path, how)
    with trio.CancelScope() as scope:

        async def act() -> None:
            scope.cancel()

        await talk.beside(act)
    assert scope.cancelled_caught
    assert talk.process.returncode == (-signal.SIGKILL if how == "deaf" else 7)
    assert gone(pid_of(talk.process))


async def test_a_program_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(FileNotFoundError):
        async with open_child():
            pass


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="no way to wait for a process that is not our child")
def test_it_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    """The pipe closes with the parent, whatever has become of that."""
    program = f"""
        import os, sys, trio
        from laneway_plugins._finetune_child import Conversation, job_line, open_child

        async def main():
            async with open_child(({PROGRAM!r},)) as child:
                def hear(event):
                    print(child.pid, flush=True)
                job = job_line({{"how": "forever", "output": ""}})
                await Conversation(child, job, pause=trio.Event(), on_event=hear).run()

        trio.run(main)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        watch = os.pidfd_open(child)
        try:
            parent.kill()
            parent.wait(PATIENCE)
            ready, _, _ = select.select([watch], [], [], PATIENCE)
            assert ready
        finally:
            os.close(watch)
