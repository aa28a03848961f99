"""The operation ``finetune`` with the native trainer, on a tiny model: real processes, real losses, a real adapter."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

import laneway
from laneway import FinetuneError
from laneway.processes import Process
from laneway_plugins import completion, finetune
from laneway_plugins._finetune_child import open_child
from laneway_plugins.finetune import FinetuneProgress, FinetuneResult, Loss
from tests.docs.pages import DOCS, load
from tests.tiny_model import write_tiny_model

native = pytest.importorskip("laneway_native", reason="the native part is not built (make build)", exc_type=ImportError)

pytestmark = pytest.mark.slow

TEXT = "the hello and the other world is in you of it was he said to the world"
SETTINGS: dict[str, Any] = {
    "rank": 8,
    "batch": 1,
    "context_length": 64,
    "learning_rate": 0.02,
    "schedule": "constant",
    "warmup": 0,
    "weight_decay": 0.0,
    "threads": 1,
}

LEARNED: dict[str, Any] = {"epochs": 100, "learning_rate": 0.01, "schedule": "linear"}
"""What learns a text by heart.

At a constant rate the loss goes up and down in the end, on every processor in another way; at one that falls to zero it
settles."""
CERTAIN = math.log(2) / SETTINGS["context_length"]
"""A mean loss over a window: below it every token of the window has more than half of the probability."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@asynccontextmanager
async def loaded(path: Path, **options: Any) -> AsyncIterator[laneway.Model]:
    async with laneway.open_engine() as engine:
        with trio.fail_after(1200):
            yield await engine.load_model(path, 2, context_size=256, threads=1, **options)


async def train(model: laneway.Model, dataset: Path, output: Path, **fields: Any) -> FinetuneResult:
    async with finetune.start(model, dataset=dataset, output=output, **{**SETTINGS, **fields}) as training:
        return await training.result()


async def continued(model: laneway.Model, count: int = 12) -> str:
    """What the model writes after the first words of the text, and the text itself."""
    begun = TEXT[: len("the hello and the")]
    return begun + (await completion.complete(model, begun, max_tokens=count, temperature=0.0)).text


async def test_the_loss_falls_and_the_adapter_writes_the_text(tiny: Path, text: Path, tmp_path: Path) -> None:
    output = tmp_path / "adapter.gguf"
    async with loaded(tiny) as model:
        assert not TEXT.startswith(await continued(model))
        result = await train(model, text, output, **LEARNED)
        # The model that is loaded is as it was.
        assert not TEXT.startswith(await continued(model))
    assert result.steps == result.step == 100
    assert result.loss is not None
    assert result.loss < CERTAIN < result.curve[0].loss
    assert finetune.state(output).state == "completed"
    async with loaded(tiny, lora=[output]) as model:
        assert TEXT.startswith(await continued(model))


async def test_a_chat_is_answered_as_it_was_learned(tmp_path: Path) -> None:
    # One whose output matrix knows the token that ends an answer.
    tied = write_tiny_model(tmp_path / "tied.gguf", tied=True)
    question, answer = {"role": "user", "content": "hello?"}, "the world"
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": [question, {"role": "assistant", "content": answer}]}) + "\n")
    output = tmp_path / "adapter.gguf"
    async with loaded(tied) as model:
        result = await train(model, path, output, **LEARNED)
        assert result.loss is not None
        assert result.loss < CERTAIN
    async with loaded(tied, lora=[output]) as model:
        told = await completion.complete(model, [question], max_tokens=16, temperature=0.0)
        assert (told.text, told.stop_reason) == (answer, "eos")


async def test_paused_and_resumed_is_as_unbroken(tiny: Path, text: Path, tmp_path: Path) -> None:
    output = tmp_path / "adapter.gguf"
    async with loaded(tiny) as model:
        whole = await train(model, text, tmp_path / "whole.gguf", epochs=40, validation=text)
        async with finetune.start(
            model, dataset=text, output=output, **{**SETTINGS, "epochs": 40, "validation": text}
        ) as training:
            async for event in training:
                if isinstance(event, FinetuneProgress) and event.done >= 5:
                    break
            assert await training.pause() == "paused"
            first = await training.result()
            assert 5 <= first.step < 40
            # The lane is free.
            await completion.complete(model, "hello", max_tokens=2, overflow="reject")
        async with finetune.resume(model, output=output) as training:
            second = await training.result()
    assert second.state == "completed"
    assert steps_of(second) == steps_of(whole)
    assert losses_of(second) == pytest.approx(losses_of(whole), rel=1e-4)
    assert output.stat().st_size == (tmp_path / "whole.gguf").stat().st_size


def changed_weights(path: Path) -> bytes:
    """The file of a model with one bit of its weights turned."""
    raw = path.read_bytes()
    return raw[:-1] + bytes([raw[-1] ^ 1])


async def test_it_is_not_resumed_on_other_weights_under_the_same_header(tiny: Path, text: Path, tmp_path: Path) -> None:
    path, output = tmp_path / "own.gguf", tmp_path / "adapter.gguf"
    shutil.copyfile(tiny, path)
    # So many that it is not done before it is paused.
    endless = {**SETTINGS, "epochs": 100_000}
    async with loaded(path) as model:
        async with finetune.start(model, dataset=text, output=output, **endless) as training:
            await anext(training)
            assert await training.pause() == "paused"
    path.write_bytes(changed_weights(tiny))
    async with loaded(path) as model:
        with pytest.raises(FinetuneError, match="of other weights"):
            async with finetune.resume(model, output=output):
                pass
    shutil.copyfile(tiny, path)
    async with loaded(path) as model, finetune.resume(model, output=output) as training:
        await anext(training)
        assert await training.pause() == "paused"


def steps_of(result: FinetuneResult) -> list[int]:
    return [point.step for point in result.curve if not point.validation]


def losses_of(result: FinetuneResult) -> list[float]:
    return [point.loss for point in result.curve if not point.validation]


async def test_killed_and_resumed(tiny: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "adapter.gguf"
    children: list[Process] = []

    @asynccontextmanager
    async def watched() -> AsyncIterator[Any]:
        async with open_child() as child:
            assert isinstance(child, Process)
            children.append(child)
            yield child

    monkeypatch.setattr(finetune, "open_child", watched)
    async with loaded(tiny) as model:
        whole = await train(model, text, tmp_path / "whole.gguf", epochs=30)
        with pytest.raises(FinetuneError, match="SIGKILL"):
            async with finetune.start(
                model, dataset=text, output=output, **{**SETTINGS, "epochs": 30, "checkpoint_every": 3}
            ) as training:
                async for event in training:
                    if isinstance(event, FinetuneProgress) and event.done >= 7:
                        os.kill(children[-1].pid, signal.SIGKILL)
        assert finetune.state(output).state == "paused"
        assert not output.exists()
        async with finetune.resume(model, output=output) as training:
            resumed = await training.result()
    assert steps_of(resumed) == steps_of(whole)
    assert losses_of(resumed) == pytest.approx(losses_of(whole), rel=1e-4)


async def test_A6_completions_wait_for_it(tiny: Path, text: Path, tmp_path: Path) -> None:
    order = []

    async def complete(model: laneway.Model) -> None:
        await completion.complete(model, "hello", max_tokens=4)
        order.append("completion")

    async with loaded(tiny) as model, trio.open_nursery() as nursery:
        async with finetune.start(
            model, dataset=text, output=tmp_path / "a.gguf", **{**SETTINGS, "epochs": 10}
        ) as training:
            await training.admitted()
            nursery.start_soon(complete, model)
            await training.result()
            order.append("training")
    assert order == ["training", "completion"]


async def test_cancelled_it_leaves_nothing(tiny: Path, text: Path, tmp_path: Path) -> None:
    output = tmp_path / "adapter.gguf"
    async with loaded(tiny) as model:
        async with finetune.start(model, dataset=text, output=output, **{**SETTINGS, "epochs": 10_000}) as training:
            async for event in training:
                if isinstance(event, FinetuneProgress) and event.done >= 2:
                    break
            training.cancel()
            with pytest.raises(laneway.InferenceCancelledError):
                await training.result()
        assert finetune.state(output).state == "cancelled"
        assert not output.exists()
        await completion.complete(model, "hello", max_tokens=2, overflow="reject")


async def test_a_curve_holds_every_step(tiny: Path, text: Path, tmp_path: Path) -> None:
    async with loaded(tiny) as model:
        result = await train(model, text, tmp_path / "a.gguf", epochs=3, validation=text)
    assert steps_of(result) == [1, 2, 3]
    assert any(isinstance(point, Loss) and point.validation for point in result.curve)
    assert result.base in ("f32", "native")


async def test_what_cannot_fit_is_refused_before_it_starts(
    tiny: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with loaded(tiny) as model:
        for there, message in (
            (
                native.Available(1000, 10**12),
                r"needs about \d+ MiB beside the loaded model, and 0 MiB of memory are free",
            ),
            (native.Available(10**12, 1000), r"needs about \d+ MiB, and there are 0 MiB of memory in all"),
        ):
            monkeypatch.setattr(native, "available", lambda there=there: there)
            with pytest.raises(FinetuneError, match=message):
                await train(model, text, tmp_path / "a.gguf")
        await completion.complete(model, "hello", max_tokens=2, overflow="reject")
    assert os.listdir(tmp_path) == [text.name]


async def test_what_the_model_cannot_do_is_refused_by_name(tiny: Path, text: Path, tmp_path: Path) -> None:
    async with loaded(tiny) as model:
        with pytest.raises(FinetuneError, match="a context_length of 1024 is more than the 512 tokens"):
            await train(model, text, tmp_path / "a.gguf", context_length=1024)


async def test_the_example_runs(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = {"messages": [{"role": "user", "content": "hello?"}, {"role": "assistant", "content": "the world"}]}
    path, output = tmp_path / "chats.jsonl", tmp_path / "adapter.gguf"
    path.write_text(f"{json.dumps(chat)}\n" * 10)
    with trio.fail_after(1200):
        await load(DOCS / "examples" / "training.py").main(str(tiny), str(path), str(output))
    lines = capsys.readouterr().out.splitlines()
    # A reader that comes late hears of several steps at once.
    steps = [int(line.split()[1]) for line in lines if line.startswith("step ") and " of 6: loss " in line]
    assert steps == sorted(steps)
    assert steps[-1] == 6
    assert any(line.startswith(f"{output}: loss ") for line in lines)
    assert finetune.state(output).state == "completed"
