"""The training process under Trio's care.

llama.cpp ends the process it is in when it meets an operation that has no backward pass, and memory may run out: so the
training has a process of its own.  That has a session of its own too, for Ctrl-C is ours to understand, and it ends
when its standard input does, whatever became of us.  However it ends, nobody goes on before it has ended.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Protocol, final

import trio

from laneway import FinetuneError
from laneway.processes import open_process
from laneway_plugins._finetune_events import (
    ChildEvent,
    Failed,
    Finished,
    NotAnEventError,
    Paused,
    Started,
    Stepped,
    Validated,
    parse_event,
)

log = logging.getLogger("laneway.finetune")

MODULE = "laneway_native.training"
"""What the process runs."""

GRACE_SECONDS = 2.0
"""How long a process that is not wanted any more may take to end by itself."""
EXIT_SECONDS = 15.0
"""How long one may take to end after its last word."""
LOG_LINES = 50
"""How many of its last lines of log are kept."""
LONGEST_LOG_LINE = 500
"""Characters of a line of log beyond which it is cut: it ends up in errors."""
LONGEST_LINE = 1 << 20
"""Bytes of a line beyond which it is cut; an event has some hundred."""
_CHUNK = 1 << 16
_HINTS = {6: ": llama.cpp met something that it cannot compute", 9: ", perhaps because memory ran out"}


class Child(Protocol):
    """A training process: what of :class:`laneway.processes.Process` is used."""

    @property
    def stdin(self) -> trio.abc.SendStream | None:
        """Takes the job, and then words; when it is closed the process ends."""

    @property
    def stdout(self) -> trio.abc.ReceiveStream | None:
        """Events, a line each."""

    @property
    def stderr(self) -> trio.abc.ReceiveStream | None:
        """The log."""

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative: the number of the signal that has ended it."""

    async def wait(self) -> int:
        """Wait for its end."""

    def kill(self) -> None:
        """End it now."""


@asynccontextmanager
async def open_child(arguments: tuple[str, ...] = ("-m", MODULE)) -> AsyncIterator[Child]:
    """A new process of this Python for the length of a block.  Raises :class:`OSError`."""
    process = await open_process(
        # Not what lies in the directory that we happen to be in.
        [sys.executable, "-P", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        # Or ggml would start a debugger when it aborts.
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
    )
    try:
        _offer_to_the_oom_killer(process.pid)
        yield process
    finally:
        with trio.CancelScope(shield=True):
            await _end(process)


def _offer_to_the_oom_killer(pid: int) -> None:
    """Where memory runs out after all, this process should go, and not the one that holds everybody's model."""
    try:
        with open(f"/proc/{pid}/oom_score_adj", "w", encoding="ascii") as file:
            file.write("900")
    except OSError:  # not on this system, or it has ended
        return


async def _end(child: Child) -> None:
    """See to its end, and close its pipes."""
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            await trio.aclose_forcefully(stream)
    if child.returncode is None:
        with trio.move_on_after(GRACE_SECONDS):
            await child.wait()
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.stderr is not None:
        await trio.aclose_forcefully(child.stderr)


@final
class Conversation:
    """Sends a job to a process and listens until its last word.

    ``pause`` is set by whoever wants it to pause.  ``on_event`` hears everything but the last word.  ``silence`` is how
    many seconds may go by without an event.
    """

    def __init__(
        self,
        child: Child,
        job: bytes,
        *,
        pause: trio.Event,
        on_event: Callable[[ChildEvent], None],
        silence: float = math.inf,
    ) -> None:
        self._child = child
        self._job = job
        self._pause = pause
        self._on_event = on_event
        self._silence = silence
        self._log: deque[str] = deque(maxlen=LOG_LINES)
        self._log_ended = trio.Event()
        self.step: int | None = None
        """The last step that was heard of."""

    async def run(self) -> Paused | Finished:
        """Raises :class:`FinetuneError` for every other end; the process may then still run."""
        verdict: Paused | Finished | Exception | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._collect_log)
            nursery.start_soon(self._talk)
            try:
                verdict = await self._listen()
            except Exception as error:
                # Not through the nursery, which would put it in a group.
                verdict = error
            # A cancel from now on comes too late: what there is to know is known.
            nursery.cancel_scope.shield = True
            nursery.cancel_scope.cancel()
        assert verdict is not None
        if isinstance(verdict, Exception):
            raise verdict
        return verdict

    @trio.lowlevel.enable_ki_protection
    async def _talk(self) -> None:
        stdin = self._child.stdin
        assert stdin is not None
        try:
            await stdin.send_all(self._job + b"\n")
            await self._pause.wait()
            await stdin.send_all(b"pause\n")
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            # It has ended.  Its last words, or its exit status, say why.
            return

    @trio.lowlevel.enable_ki_protection
    async def _collect_log(self) -> None:
        stderr = self._child.stderr
        assert stderr is not None
        try:
            lines = _Lines(stderr)
            while (line := await lines.next()) is not None:
                text = _printable(line)
                if text:
                    self._log.append(text)
                    log.debug("%s", text)
        finally:
            self._log_ended.set()

    async def _listen(self) -> Paused | Finished:
        last: Paused | Finished | Failed | None = None
        stdout = self._child.stdout
        assert stdout is not None
        lines = _Lines(stdout)
        try:
            with trio.fail_after(self._silence) as patience:
                while last is None and (line := await lines.next()) is not None:
                    if line.strip():
                        patience.deadline = trio.current_time() + self._silence
                        last = self._hear(parse_event(line))
        except trio.TooSlowError:
            raise await self._error(f"the training process said nothing for {self._silence:g} s") from None
        except NotAnEventError as error:
            raise await self._error(f"the training process said what is no event: {error}") from None
        except FinetuneError as error:
            raise await self._error(error.reason) from None
        return await self._judge(last)

    def _hear(self, event: ChildEvent) -> Paused | Finished | Failed | None:
        if not isinstance(event, Started) and event.step is not None:
            self.step = event.step
        if isinstance(event, (Paused, Finished, Failed)):
            return event
        if isinstance(event, (Stepped, Validated)) and not math.isfinite(event.loss):
            raise FinetuneError(f"the loss is {event.loss}, which is not finite; a lower learning_rate may help")
        self._on_event(event)
        return None

    async def _judge(self, last: Paused | Finished | Failed | None) -> Paused | Finished:
        """What its end means."""
        code: int | None = None
        # After its last word it ends by itself: shielded, or a cancel would make nothing of what is done.
        with trio.CancelScope(shield=last is not None, deadline=trio.current_time() + EXIT_SECONDS):
            code = await self._child.wait()
        if isinstance(last, Failed):
            raise await self._error(last.message)
        if last is None:
            raise await self._error(_how_it_ended(code))
        if code != 0:
            # What it says is done is on the disk.
            log.warning("the training had come to its end; then %s", _how_it_ended(code))
        return last

    async def _error(self, reason: str) -> FinetuneError:
        # If it has ended, the end of its log is on its way; if it runs, the last line so far will have to do.
        if self._child.returncode is not None:
            with trio.move_on_after(1):
                await self._log_ended.wait()
        return FinetuneError(reason, self.step, self._log[-1] if self._log else "")


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return f"the training process closed its output and did not end within {EXIT_SECONDS:g} s"
    if code < 0:
        return f"the training process was ended by signal {-code} ({_signal_name(-code)}){_HINTS.get(-code, '')}"
    return f"the training process ended with status {code} and without a result"


def _printable(line: bytes) -> str:
    """What of a line of log may be shown in an error, whatever the terminal."""
    text = line[: 4 * LONGEST_LOG_LINE].decode("utf-8", "replace")
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())[:LONGEST_LOG_LINE]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


@final
class _Lines:
    """The lines of a stream, the last one also without its end."""

    def __init__(self, stream: trio.abc.ReceiveStream) -> None:
        self._stream = stream
        self._whole: deque[bytes] = deque()
        self._rest = b""
        self._ended = False

    async def next(self) -> bytes | None:
        """The next line, or None at the end.  One that is too long comes in parts."""
        while not self._whole:
            if self._ended:
                line, self._rest = self._rest, b""
                return line or None
            try:
                chunk = await self._stream.receive_some(_CHUNK)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                chunk = b""
            self._ended = not chunk
            *whole, self._rest = (self._rest + chunk).split(b"\n")
            self._whole.extend(whole)
            if len(self._rest) > LONGEST_LINE:
                self._whole.append(self._rest)
                self._rest = b""
        return self._whole.popleft()


def job_line(job: Mapping[str, object]) -> bytes:
    """A job as the process takes it."""
    return json.dumps(job, separators=(",", ":")).encode()
