"""A trainer without processes and without training, in virtual time: it speaks as the real one does."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from laneway import FinetuneError, Model
from laneway_plugins import _finetune_child, finetune
from laneway_plugins._finetune_child import Child
from laneway_plugins.finetune import FinetuneRequest, Plan

STEP_SECONDS = 1.0
TOKENS = 64
"""Of a step."""

Behaviour = Callable[["ScriptedChild"], Awaitable[None]]


def loss_of(step: int) -> float:
    """Of every scripted training."""
    return 8.0 / step


class ScriptedChild:
    """A process as far as anybody can tell."""

    def __init__(self, behave: Behaviour, *, steps: int, deaf: bool = False) -> None:
        self.steps = steps
        self.deaf = deaf
        """Whether it goes on when its standard input ends, and when it is told to pause."""
        self.late_log = ""
        """What comes out of the pipe when it has ended."""
        self.job: dict[str, Any] = {}
        self.returncode: int | None = None
        self.started_at = trio.current_time()
        self.ended_at: float | None = None
        self.pause_wanted = trio.Event()
        self._behave = behave
        self._ended = trio.Event()
        self._scope = trio.CancelScope()
        self.stdin, self._hears = trio.testing.memory_stream_one_way_pair()
        self._says, self.stdout = trio.testing.memory_stream_one_way_pair()
        self._logs, self.stderr = trio.testing.memory_stream_one_way_pair()

    # What of it a parent sees, beside the streams.

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        self.die(9)

    # What it is made of.

    def die(self, signal: int) -> None:
        """End at once, by a signal."""
        if self.returncode is None:
            self.returncode = -signal
            self._scope.cancel()

    async def run(self) -> None:
        """Its whole life."""
        with self._scope:
            async with trio.open_nursery() as nursery:
                started = trio.Event()
                nursery.start_soon(self._listen, started)
                await started.wait()
                await self._behave(self)
                nursery.cancel_scope.cancel()
        if self.returncode is None:
            self.returncode = 0
        self.ended_at = trio.current_time()
        await self._says.aclose()
        self._ended.set()
        if self.late_log:
            await trio.sleep(0.5)
            await self.log(self.late_log)
        await self._logs.aclose()

    async def _listen(self, started: trio.Event) -> None:
        text = b""
        while chunk := await self._hears.receive_some():
            text += chunk
            *lines, text = text.split(b"\n")
            for line in lines:
                if not started.is_set():
                    self.job = json.loads(line)
                    started.set()
                else:
                    assert line == b"pause"
                    self.pause_wanted.set()
        if not self.deaf:
            self.returncode = 1
            self._scope.cancel()

    async def say(self, event: str, **fields: Any) -> None:
        """Report an event."""
        await self.write(json.dumps({"event": event, **fields}).encode() + b"\n")

    async def write(self, data: bytes) -> None:
        """Write to standard output whatever it is."""
        try:
            await self._says.send_all(data)
        except trio.BrokenResourceError:
            self.die(13)  # SIGPIPE
            await trio.sleep_forever()

    async def close_output(self) -> None:
        """Say no more, but live on."""
        await self._says.aclose()

    async def log(self, text: str) -> None:
        """Write a line to standard error."""
        await self._logs.send_all(text.encode() + b"\n")

    @property
    def checkpoint(self) -> Path:
        """The folder."""
        return Path(self.job["checkpoint"])

    def save(self, step: int) -> None:
        """Write a checkpoint."""
        self.checkpoint.mkdir(exist_ok=True)
        (self.checkpoint / "state.json").write_text(json.dumps({"step": step}))

    def load(self) -> int:
        """The step of the checkpoint, or 0."""
        if not self.job["resume"]:
            return 0
        step: int = json.loads((self.checkpoint / "state.json").read_text())["step"]
        return step

    def write_adapter(self) -> None:
        """Not one that anybody could load."""
        Path(self.job["output"]).write_bytes(b"GGUF" + repr(self.job["seed"]).encode())

    def read_data(self) -> list[Any]:
        """What it is to learn."""
        return [json.loads(line) for line in Path(self.job["data"]).read_text().splitlines()]

    async def begin(self) -> int:
        """Say that it has started; from which step on."""
        start = self.load()
        await self.say("started", steps=self.steps, start_step=start, base="f32", parameters=100, memory=1000)
        return start

    async def step(self, step: int) -> None:
        """Take one step, which takes a second."""
        await trio.sleep(STEP_SECONDS)
        epoch = (step - 1) * self.job["epochs"] // self.steps
        await self.say(
            "step", epoch=epoch, step=step, loss=loss_of(step), learning_rate=0.1, tokens=TOKENS, seconds=STEP_SECONDS
        )

    async def train(self) -> None:
        """The life of a healthy one."""
        start = await self.begin()
        for step in range(start + 1, self.steps + 1):
            await self.step(step)
            if step % self.job["checkpoint_every"] == 0:
                self.save(step)
                await self.say("checkpoint", step=step)
            if self.job["validation"] is not None:
                await self.say("validation", step=step, loss=loss_of(step) + 1)
            if self.pause_wanted.is_set() and not self.deaf and step < self.steps:
                self.save(step)
                await self.say("checkpoint", step=step)
                await self.say("paused", step=step)
                return
        self.write_adapter()
        await self.say("done", step=self.steps, adapter=self.job["output"])


class ScriptedTrainer:
    """Stands in for the native one.  ``behave`` is what each child does."""

    def __init__(self, *, steps: int = 4) -> None:
        self.steps = steps
        self.behave: Behaviour = ScriptedChild.train
        self.deaf = False
        self.shortage: str | None = None
        self.fail_to_open: OSError | None = None
        self.children: list[ScriptedChild] = []
        self.weights = "digest of the weights"
        self.planned: list[tuple[FinetuneRequest, int | None]] = []
        """What was planned, with the longest sequence."""

    @property
    def child(self) -> ScriptedChild:
        """The newest."""
        return self.children[-1]

    async def plan(self, model: Model, request: FinetuneRequest, longest: int | None = None) -> Plan:
        await trio.lowlevel.checkpoint()
        self.planned.append((request, longest))
        return Plan(model_path="scripted.gguf", fingerprint=model.name, threads=2, need=1000)

    async def digest_weights(self, plan: Plan) -> str:
        await trio.lowlevel.checkpoint()
        return self.weights

    async def check_memory(self, plan: Plan) -> None:
        await trio.lowlevel.checkpoint()
        if self.shortage is not None:
            raise FinetuneError(self.shortage)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Child]:
        if self.fail_to_open is not None:
            raise self.fail_to_open
        child = ScriptedChild(self.behave, steps=self.steps, deaf=self.deaf)
        self.children.append(child)
        trio.lowlevel.spawn_system_task(child.run)
        try:
            yield child
        finally:
            with trio.CancelScope(shield=True):
                await _finetune_child._end(child)

    def assert_all_ended(self) -> None:
        """No process is left."""
        assert [child for child in self.children if child.returncode is None] == []


async def on_the_loop(function: Callable[..., Any], *args: Any) -> Any:
    """What otherwise a thread does: virtual time would run on while it works."""
    await trio.lowlevel.checkpoint()
    return function(*args)


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> ScriptedTrainer:
    """Takes the place of the native trainer, and keeps the operation off threads."""
    trainer = ScriptedTrainer()
    monkeypatch.setattr(finetune, "_trainer", trainer)
    monkeypatch.setattr(finetune, "_off_loop", on_the_loop)
    return trainer
