"""Processes for the engine and its plugins, started on worker threads of the engine.

``trio.run_process`` and ``trio.lowlevel.open_process`` start a process on a thread of Trio's default limiter.  The
program may hold all tokens of that limiter: see :mod:`laneway.threads`.  This module uses none of them.
"""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO, final

import trio

from laneway import threads

__all__ = ["Process", "open_process"]


@final
class Process:
    """A process that :func:`open_process` has started, and its pipes as Trio streams."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen
        self._waiting = trio.Lock()
        self.pid = popen.pid
        self.stdin: trio.abc.SendStream | None = _stream(popen.stdin)
        self.stdout: trio.abc.ReceiveStream | None = _stream(popen.stdout)
        self.stderr: trio.abc.ReceiveStream | None = _stream(popen.stderr)

    def __repr__(self) -> str:
        state = "running" if self.returncode is None else f"ended with status {self.returncode}"
        return f"<laneway.Process {self.pid}: {state}>"

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative: the number of the signal that has ended it."""
        return self._popen.poll()

    async def wait(self) -> int:
        """Wait for its end, and return its status.  A cancel ends the wait and leaves the process alone."""
        async with self._waiting:
            if self.returncode is None:
                await _wait_for(self._popen)
        return self._popen.wait()  # which does not wait any more

    def terminate(self) -> None:
        """Ask it to end (SIGTERM)."""
        self._popen.terminate()

    def kill(self) -> None:
        """End it now (SIGKILL)."""
        self._popen.kill()

    async def end(self, grace: float = math.inf) -> None:
        """Ask it to end, kill it after ``grace`` seconds, and close its pipes.  A cancel does not cut this short."""
        with trio.CancelScope(shield=True):
            if self.returncode is None:
                self.terminate()
                with trio.move_on_after(grace):
                    await self.wait()
            if self.returncode is None:
                self.kill()
                await self.wait()
            for stream in (self.stdin, self.stdout, self.stderr):
                if stream is not None:
                    await trio.aclose_forcefully(stream)


async def open_process(
    command: Sequence[str],
    *,
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    env: Mapping[str, str] | None = None,
    start_new_session: bool = False,
) -> Process:
    """Start a process; the parameters are those of :class:`subprocess.Popen`.

    A pipe (``subprocess.PIPE``) becomes a Trio stream.  A cancel does not interrupt a start that has begun.  The caller
    must end the process, for example with :meth:`Process.end`.

    :raises OSError: it cannot be started, or has been ended again because its pipes cannot be used
    """

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            list(command),
            bufsize=0,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=env,
            start_new_session=start_new_session,
        )

    popen = await threads.run_long(start)
    try:
        return Process(popen)
    except BaseException:
        # No more descriptors, say.  The caller gets no process, so nothing else would end this one.
        with trio.CancelScope(shield=True):
            await threads.run_long(_end_at_once, popen)
        raise


def _end_at_once(popen: subprocess.Popen[bytes]) -> None:
    with popen:
        popen.kill()


def _stream(pipe: IO[bytes] | None) -> trio.lowlevel.FdStream | None:
    if pipe is None:
        return None
    with pipe:
        return trio.lowlevel.FdStream(os.dup(pipe.fileno()))


async def _wait_for(popen: subprocess.Popen[bytes]) -> None:
    try:
        descriptor = os.pidfd_open(popen.pid)
    except (AttributeError, OSError):
        # Not on Linux.  An abandoned thread ends with the process.
        await threads.run_long(popen.wait, abandon_on_cancel=True)
        return
    try:
        await trio.lowlevel.wait_readable(descriptor)
    finally:
        os.close(descriptor)
