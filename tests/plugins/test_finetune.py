"""The operation ``finetune``, on a scripted model with a scripted trainer, in virtual time."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing

import laneway
from laneway import (
    Done,
    FinetuneError,
    InferenceCancelledError,
    InvalidRequestError,
    RequestRejectedByPolicyError,
    Run,
)
from laneway.testing import check_plugin
from laneway_plugins import batch, completion, finetune, llm_translate
from laneway_plugins._finetune_child import GRACE_SECONDS
from laneway_plugins._finetune_files import TrainingFiles
from laneway_plugins.finetune import FinetuneProgress, FinetuneRequest, FinetuneResult, Loss, Training
from tests.plugins import nmt_models
from tests.plugins.finetune_trainer import STEP_SECONDS, TOKENS, ScriptedChild, ScriptedTrainer, loss_of
from tests.plugins.finetune_trainer import trainer as trainer
from tests.plugins.scripted import STEP, Scripted, scripted

CHAT = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "a world"}]}


@attrs.frozen
class Bench:
    """A model, and a place for data and adapters."""

    s: Scripted
    trainer: ScriptedTrainer
    data: Path
    output: Path

    def start(self, **fields: Any) -> AbstractAsyncContextManager[Training]:
        """A training with the usual data."""
        return finetune.start(
            self.s.model, **{"dataset": self.data, "output": self.output, "checkpoint_every": 2, **fields}
        )

    def resume(self, **fields: Any) -> AbstractAsyncContextManager[Training]:
        """The paused one."""
        return finetune.resume(self.s.model, output=self.output, **fields)

    async def train(self, **fields: Any) -> FinetuneResult:
        """A training from its start to its end."""
        async with self.start(**fields) as training:
            return await training.result()

    @property
    def files(self) -> TrainingFiles:
        return TrainingFiles(self.output)

    def left(self) -> list[str]:
        """What lies beside the data."""
        return sorted(path.name for path in self.output.parent.iterdir() if path != self.data)

    def state(self) -> str:
        """What is told of it, and what the disk tells alone, which must agree if nothing runs."""
        told = finetune.state(self.output)
        if told.state != "running":
            assert self.files.state() == told
        return told.state

    async def assert_free(self) -> None:
        """The lane is idle and no process is left: a request that will not wait gets in."""
        self.s.assert_idle()
        self.trainer.assert_all_ended()
        await completion.complete(self.s.model, "x", max_tokens=1, overflow="reject")


@asynccontextmanager
async def bench(trainer: ScriptedTrainer, folder: Path, parallel: int = 2, **options: Any) -> AsyncIterator[Bench]:
    data = folder / "data.jsonl"
    data.write_text(json.dumps(CHAT) + "\n")
    async with scripted(parallel, **options) as s:
        yield Bench(s, trainer, data, folder / "adapter.gguf")
    trainer.assert_all_ended()


@pytest.fixture
async def b(trainer: ScriptedTrainer, tmp_path: Path, autojump_clock: trio.testing.MockClock) -> AsyncIterator[Bench]:
    async with bench(trainer, tmp_path) as made:
        yield made


# Requests.


def request(**fields: Any) -> FinetuneRequest:
    return FinetuneRequest(**{"dataset": "data.jsonl", "output": "a.gguf", **fields})


def test_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = request(validation="v.jsonl")
    assert (made.dataset, made.output) == (tmp_path / "data.jsonl", tmp_path / "a.gguf")
    assert made.validation == tmp_path / "v.jsonl"


def test_defaults_and_forms() -> None:
    assert request().scaling == 2 * request().rank
    assert request(alpha=4).scaling == 4
    assert request().modules == finetune.MODULES
    assert request(modules="ffn_up, attn_q").modules == ("attn_q", "ffn_up")
    assert request(modules=["attn_q"]) == request(modules=("attn_q",))
    assert request(validation=0.25).validation == 0.25
    assert hash(request()) == hash(request())
    names = {field.name for field in attrs.fields(FinetuneRequest)} - {"dataset", "output"}
    assert set(finetune.FinetuneFields.__annotations__) == names


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("dataset", "", "must be a path"),
        ("dataset", 5, "must be a path"),
        ("dataset", None, "must be a path"),
        ("dataset", b"x", "must be a path"),
        ("dataset", "a\0b", "a path of text"),
        ("output", "", "must be a path"),
        ("output", "/", "must name a file"),
        ("validation", 0, "a share of the data"),
        ("validation", 1, "a share of the data"),
        ("validation", True, "a share of the data"),
        ("validation", math.nan, "a share of the data"),
        ("validation", [], "must be a path"),
        ("format", "csv", "must be one of"),
        ("truncate", 1, "must be bool"),
        ("rank", 0, "from 1 to 256"),
        ("rank", 257, "from 1 to 256"),
        ("rank", 8.0, "an integer"),
        ("rank", True, "an integer"),
        ("alpha", 0, "a number"),
        ("alpha", math.inf, "a number"),
        ("modules", "", "no module"),
        ("modules", [], "must be names"),
        ("modules", ["attn_x"], "'attn_x' is no module"),
        ("modules", 5, "must be names"),
        ("epochs", 0, "an integer"),
        ("context_length", 15, "an integer"),
        ("batch", 0, "an integer"),
        ("learning_rate", 0, "more than 0"),
        ("learning_rate", math.nan, "a number"),
        ("learning_rate", 1.1, "from 0 to 1"),
        ("schedule", "step", "must be one of"),
        ("warmup", -0.1, "a number"),
        ("weight_decay", -1, "a number"),
        ("seed", -1, "an integer"),
        ("seed", 2**63, "an integer"),
        ("threads", 0, "an integer"),
        ("base", "q8", "must be one of"),
        ("checkpoint_every", 0, "an integer"),
        ("silence_timeout", 0, "more than 0"),
        ("resume", "yes", "must be bool"),
    ],
)
def test_wrong_requests_name_the_field(field: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        request(**{field: value})
    assert caught.value.field == field


# A whole training.


async def test_from_start_to_end(b: Bench, autojump_clock: trio.testing.MockClock) -> None:
    assert b.state() == "idle"
    events = []
    async with b.start(rank=4, epochs=2, seed=5, validation=None) as training:
        assert training.request.rank == 4
        async for event in training:
            events.append(event)
            # The end comes at once after the last step.
            if isinstance(event, FinetuneProgress) and event.done < 4:
                assert finetune.state(b.output) == finetune.TrainingState("running", b.output, event.done, event.total)
        result = await training.result()
        assert training.state == "completed"
    assert isinstance(events[-1], Done)
    assert events[-1].stop_reason == "stop"
    # What is said in one moment may come as one event.
    assert list(dict.fromkeys(event.done for event in events[:-1])) == [0, 1, 2, 3, 4]
    assert result == FinetuneResult(
        state="completed",
        output=b.output,
        step=4,
        steps=4,
        base="f32",
        curve=tuple(Loss(step, loss_of(step)) for step in range(1, 5)),
        tokens=4 * TOKENS,
        seconds=4 * STEP_SECONDS,
    )
    assert (result.loss, result.validation_loss) == (loss_of(4), None)
    assert b.output.read_bytes() == b"GGUF5"
    assert b.left() == ["adapter.gguf"]
    assert b.state() == "completed"
    await b.assert_free()


async def test_the_job_says_what_was_asked_for(b: Bench, autojump_clock: trio.testing.MockClock) -> None:
    wanted = {
        "rank": 4,
        "epochs": 2,
        "context_length": 100,
        "batch": 3,
        "learning_rate": 0.5,
        "schedule": "linear",
        "warmup": 7,
        "weight_decay": 0.25,
        "seed": 11,
        "checkpoint_every": 3,
        "base": "native",
    }
    await b.train(**wanted, alpha=5, modules="attn_v")
    folder = b.output.with_name("adapter.gguf.training")
    assert b.trainer.child.job == {
        **wanted,
        "alpha": 5,
        "modules": ["attn_v"],
        "threads": 2,
        "model": "scripted.gguf",
        "weights": "digest of the weights",
        "data": str(folder / "train.jsonl"),
        "validation": None,
        "output": str(b.output),
        "checkpoint": str(folder / "checkpoint"),
        "resume": False,
    }


async def test_the_data_are_tokens_with_the_assistants_part_marked(
    b: Bench, autojump_clock: trio.testing.MockClock
) -> None:
    seen: list[Any] = []

    async def look(child: ScriptedChild) -> None:
        seen.extend(child.read_data())
        await child.train()

    b.trainer.behave = look
    await b.train()
    (example,) = seen
    words = b.s.tokenizer
    before = words.tokenize("<|turn|>user\nHello<|turn_end|>\n<|turn|>assistant\n", special=True)
    answer = words.tokenize("a world<|turn_end|>", bos=False, special=True)
    after = words.tokenize("\n", bos=False)
    assert example["tokens"] == before + answer + after
    assert example["mask"] == [0] * len(before) + [1] * len(answer) + [0] * len(after)


async def test_progress_has_the_figures(b: Bench, autojump_clock: trio.testing.MockClock) -> None:
    b.data.write_text(f"{json.dumps(CHAT)}\n" * 4)
    events = []
    async with b.start(epochs=2, validation=0.5) as training:
        async for event in training:
            if isinstance(event, FinetuneProgress):
                events.append(event)
        result = await training.result()
    first, last = events[0], events[-1]
    assert (first.done, first.total, first.loss, first.epoch, first.seconds_left) == (0, 4, None, None, None)
    assert (last.done, last.total, last.unit, last.epoch) == (4, 4, "step", 2)
    assert (last.loss, last.validation_loss, last.learning_rate) == (loss_of(4), loss_of(4) + 1, 0.1)
    assert (last.tokens_per_second, last.seconds_left) == (TOKENS / STEP_SECONDS, 0)
    assert last.metrics["loss"] == last.loss
    left = {event.done: event.seconds_left for event in events if event.loss is not None}
    assert left == {1: 3 * STEP_SECONDS, 2: 2 * STEP_SECONDS, 3: STEP_SECONDS, 4: 0}
    assert result.validation_loss == loss_of(4) + 1
    assert [point.step for point in result.curve if point.validation] == [1, 2, 3, 4]


async def test_a_slow_reader_sees_the_newest_progress(b: Bench, autojump_clock: trio.testing.MockClock) -> None:
    async with b.start() as training:
        await b.s.engine.wait_ended(training.request_id)
        events = [event async for event in training]
    assert [getattr(event, "done", "end") for event in events] == [4, "end"]


async def test_a_second_training_of_an_output_replaces_the_adapter_in_the_end(
    b: Bench, autojump_clock: trio.testing.MockClock
) -> None:
    await b.train(seed=1)
    async with b.start(seed=2) as training:
        async for event in training:
            if isinstance(event, FinetuneProgress):
                assert b.output.read_bytes() == b"GGUF1"
                break
        await training.result()
    assert b.output.read_bytes() == b"GGUF2"


# The lane.


async def complete(b: Bench, log: list[str], name: str, **fields: Any) -> None:
    await completion.complete(b.s.model, name, max_tokens=4, **fields)
    log.append(name)


async def settled() -> None:
    await trio.testing.wait_all_tasks_blocked()


async def test_A6_it_waits_for_those_before_it_and_those_behind_it_wait(
    b: Bench, autojump_clock: trio.testing.MockClock
) -> None:
    log: list[str] = []
    b.trainer.behave = logging_into(log)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(complete, b, log, "before")
        await settled()
        async with b.start() as training:
            assert training.state == "waiting"
            await settled()
            # There is room for two, and still nobody overtakes it.
            nursery.start_soon(complete, b, log, "behind")
            await settled()
            assert [one.kind for one in b.s.lane.waiting] == ["finetune", "completion"]
            await training.admitted()
            await settled()
            assert log == ["before", "training began"]
            assert [one.kind for one in b.s.lane.running] == ["finetune"]
            await training.result()
    assert log == ["before", "training began", "training ended", "behind"]
    await b.assert_free()


def logging_into(log: list[str]) -> Callable[[ScriptedChild], Any]:
    async def behave(child: ScriptedChild) -> None:
        log.append("training began")
        await child.train()
        log.append("training ended")

    return behave


async def test_A6_nothing_of_the_model_runs_beside_it(b: Bench, autojump_clock: trio.testing.MockClock) -> None:
    log: list[str] = []
    b.trainer.behave = logging_into(log)
    async with b.start() as training:
        await training.admitted()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(complete, b, log, "completion")
            nursery.start_soon(complete_batch, b, log)
            nursery.start_soon(translate, b, log)
            await settled()
            steps = b.s.engine.snapshot().model(b.s.model.name).steps
            with trio.move_on_after(2.5 * STEP_SECONDS):
                await trio.sleep_forever()
            snapshot = b.s.engine.snapshot().model(b.s.model.name)
            assert (snapshot.steps, snapshot.sequences) == (steps, 0)
            assert sorted(one.kind for one in snapshot.lanes[0].waiting) == ["batch", "completion", "translate"]
            await training.result()
    assert log[:2] == ["training began", "training ended"]
    assert sorted(log[2:]) == ["batch", "completion", "translate"]


async def complete_batch(b: Bench, log: list[str]) -> None:
    await batch.complete(b.s.model, ["one", "two"], max_tokens=4)
    log.append("batch")


async def translate(b: Bench, log: list[str]) -> None:
    async with llm_translate.stream(b.s.model, "eins", source="de", target="en") as run:
        await run.result()
    log.append("translate")


async def test_A6_other_models_go_on(b: Bench, autojump_clock: trio.testing.MockClock) -> None:
    other = await b.s.engine.load_model("scripted:other")
    async with b.start() as training:
        await training.admitted()
        with trio.fail_after(STEP_SECONDS / 2):
            await completion.complete(other, "x", max_tokens=4)
        assert training.state == "running"
        await training.result()


async def test_A6_translations_by_models_without_a_lane_go_on(
    trainer: ScriptedTrainer, tmp_path: Path, mock_clock: trio.testing.MockClock
) -> None:
    nmt_models.need_nmt()
    from laneway_plugins import nmt

    words = nmt_models.make_model(tmp_path / "words")
    async with bench(trainer, tmp_path) as b:
        translator = await b.s.engine.load_model(words, threads=1)
        async with b.start() as training:
            await training.admitted()
            async with completion.stream(b.s.model, "x", max_tokens=1) as waiting:
                # Time stands still: whatever ends now has not waited for the training.
                assert await nmt.translate(translator, "w1 w2 w3 w4")
                assert (training.state, waiting.state) == ("running", "waiting")
                mock_clock.autojump_threshold = 0
                await training.result()
                await waiting.result()
        await b.assert_free()


async def test_A6_a_second_one_is_busy_while_one_waits_runs_or_ends(
    b: Bench, autojump_clock: trio.testing.MockClock
) -> None:
    async def refused() -> None:
        with pytest.raises(RequestRejectedByPolicyError) as caught:
            async with b.start(output=b.output.with_name("other.gguf")):
                pass
        assert caught.value.reason == "busy"

    b.trainer.deaf = True
    async with trio.open_nursery() as nursery:
        nursery.start_soon(complete, b, [], "before")
        await settled()
        async with b.start() as training:
            assert training.state == "waiting"
            await refused()
            await training.admitted()
            await settled()
            await refused()
            training.cancel()
            await settled()
            assert training.state == "cancelling"
            await refused()
            with pytest.raises(InferenceCancelledError):
                await training.result()
    await b.train()
    assert len(b.trainer.children) == 2


async def test_A6_cancelled_while_it_waits_it_lets_those_behind_go_and_has_trained_nothing(
    b: Bench, autojump_clock: trio.testing.MockClock
) -> None:
    log: list[str] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(complete, b, log, "before")
        await settled()
        async with b.start() as training:
            nursery.start_soon(complete, b, log, "behind")
            await settled()
            assert len(b.s.lane.waiting) == 2
            assert training.cancel() == 1
            assert [one.kind for one in b.s.lane.running] == ["completion", "completion"]
            with pytest.raises(InferenceCancelledError):
                await training.result()
            assert training.cancel() == 0
    assert sorted(log) == ["before", "behind"]
    assert b.trainer.children == []
    assert b.left() == []
    assert b.state() == "idle"


async def test_a_cancel_counts_although_the_model_is_unloaded_before_the_process_has_ended(
    b: Bench, autojump_clock: trio.testing.MockClock
) -> None:
    async def behave(child: ScriptedChild) -> None:
        await child.begin()
        child.save(1)
        await trio.sleep_forever()

    b.trainer.behave = behave
    b.trainer.deaf = True
    async with b.start() as training:
        await training.admitted()
        await settled()
        training.cancel()
        await trio.sleep(GRACE_SECONDS / 2)
        assert training.state == "cancelling"
        await b.s.engine.unload_model(b.s.model)
        with pytest.raises(InferenceCancelledError):
            await training.result()
    assert b.state() == "cancelled"


async def test_A5_a_deadline_while_it_waits(b: Bench, autojump_clock: trio.testing.MockClock) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(complete, b, [], "before")
        await settled()
        with trio.move_on_after(STEP) as deadline:
            await b.train()
        assert deadline.cancelled_caught
    assert b.trainer.children == []
    await b.assert_free()


async def test_A7_it_may_be_asked_not_to_wait(b: Bench, autojump_clock: trio.testing.MockClock) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(complete, b, [], "before")
        await settled()
        with pytest.raises(RequestRejectedByPolicyError) as caught:
            async with b.start(overflow="reject"):
                pass
        assert caught.value.reason == "overflow"
    await b.train(overflow="reject")


async def test_A8_the_permit_goes_back_only_when_the_process_has_ended(
    b: Bench, autojump_clock: trio.testing.MockClock
) -> None:
    async def behave(child: ScriptedChild) -> None:
        await child.begin()
        await trio.sleep_forever()

    b.trainer.behave = behave
    b.trainer.deaf = True
    async with trio.open_nursery() as nursery:
        async with b.start() as training:
            await training.admitted()
            await trio.sleep(STEP_SECONDS / 2)
            log: list[str] = []
            nursery.start_soon(complete, b, log, "behind")
            await settled()
            training.cancel()
            cancelled_at = trio.current_time()
            await trio.sleep(GRACE_SECONDS * 0.9)
            # It does not end by itself, and nobody may go on before it has.
            assert b.trainer.child.returncode is None
            assert [one.state for one in b.s.lane.running] == ["cancelling"]
            assert b.output.with_name("adapter.gguf.training").is_dir()
            with pytest.raises(InferenceCancelledError):
                await training.result()
            assert b.trainer.child.returncode == -9
            assert b.trainer.child.ended_at == pytest.approx(cancelled_at + GRACE_SECONDS)
    assert log == ["behind"]


async def test_two_models_cannot_write_one_adapter(b: Bench, autojump_clock: trio.testing.MockClock) -> None:
    other = await b.s.engine.load_model("scripted:other")
    async with b.start() as training:
        await training.admitted()
        await settled()
        with pytest.raises(FinetuneError, match="another training writes to"):
            async with finetune.start(other, dataset=b.data, output=b.output) as second:
                await second.result()
        with pytest.raises(FinetuneError, match="another training writes to"):
            finetune.discard(b.output)
        assert (await training.result()).state == "completed"
    assert len(b.trainer.children) == 1


# Pausing, resuming, cancelling, leaving.


async def test_pause_frees_the_lane_and_resume_goes_on_as_if_unbroken(
    b: Bench, autojump_clock: trio.testing.MockClock
) -> None:
    unbroken = await b.train(output=b.output.with_name("whole.gguf"))
    async with b.start() as training:
        await training.admitted()
        await trio.sleep(0.5 * STEP_SECONDS)
        assert await training.pause() == "paused"
        assert trio.current_time() == b.trainer.child.ended_at
        await b.assert_free()
        assert b.state() == "paused"
        assert finetune.state(b.output) == finetune.TrainingState("paused", b.output, 1, 4)
        result = await training.result()
        assert (result.state, result.step, result.steps, training.state) == ("paused", 1, 4, "paused")
        assert [event async for event in training][-1].stop_reason == "stop"
    assert not b.output.exists()

    async with b.resume() as resumed:
        whole = await resumed.result()
    assert b.trainer.child.job["resume"]
    assert b.trainer.child.job["base"] == "f32"
    assert (whole.state, whole.step, whole.tokens) == ("completed", 4, 3 * TOKENS)
    assert whole.curve == unbroken.curve
    assert b.left() == ["adapter.gguf", "whole.gguf"]
    assert b.state() == "completed"


async def test_what_is_planned(b: Bench, autojump_clock: trio.testing.MockClock) -> None:
    """Once early, to refuse what cannot be, then with the data that there are; what goes on, as it was begun."""
    await paused(b)
    (first, unknown), (second, longest) = b.trainer.planned
    assert first == second
    assert unknown is None
    assert longest == len(b.s.tokenizer.tokenize("<|turn|>user\nHello<|turn_end|>\n", special=True)) + len(
        b.s.tokenizer.tokenize("<|turn|>assistant\na world<|turn_end|>\n", bos=False, special=True)
    )
    async with b.resume() as training:
        await training.result()
    assert [request.base for request, _ in b.trainer.planned[2:]] == ["auto", "f32"]


async def test_a_resumed_training_queues_like_any_other(b: Bench, autojump_clock: trio.testing.MockClock) -> None:
    await paused(b)
    log: list[str] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(complete, b, log, "before")
        await settled()
        async with b.resume() as training:
            assert training.state == "waiting"
            assert b.state() == "paused"
            await training.result()
        assert log == ["before"]


async def paused(b: Bench, steps: float = 0.5, **fields: Any) -> None:
    """Pause a training in the middle of its first step, or later."""
    async with b.start(**fields) as training:
        await training.admitted()
        await trio.sleep(steps * STEP_SECONDS)
        assert await training.pause() == "paused"


async def test_it_can_be_paused_again_and_again(b: Bench, autojump_clock: trio.testing.MockClock) -> None:
    await paused(b)
    for step in (2, 3):
        async with b.resume() as training:
            await training.admitted()
            await trio.sleep(0.5 * STEP_SECONDS)
            assert await training.pause() == "paused"
            assert (await training.result()).step == step
    async with b.resume() as training:
        result = await training.result()
    assert result.curve == tuple(Loss(step, loss_of(step)) for step in range(1, 5))


async def test_a_pause_that_comes_too_late(b: Bench, autojump_clock: trio.testing.MockClock) -> None:
    async with b.start() as training:
        await training.admitted()
        await trio.sleep(3.5 * STEP_SECONDS)
        assert await training.pause() == "completed"
        assert (await training.result()).state == "completed"
        assert await training.pause() == "completed"


async def test_a_pause_may_be_asked_for_by_many(b: Bench, autojump_clock: trio.testing.MockClock) -> None:
    said = []

    async def pause(training: Training) -> None:
        said.append(await training.pause())

    async with b.start() as training:
        await training.admitted()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pause, training)
            nursery.start_soon(pause, training)
        assert said == ["paused", "paused"]
        assert await training.pause() == "paused"
        # There is nothing left that a cancel could reach.
        assert training.cancel() == 0
    assert b.state() == "paused"


async def test_a_pause_finds_its_training_whatever_had_its_id_before(
    b: Bench, autojump_clock: trio.testing.MockClock
) -> None:
    first = b.start(request_id="mine")
    training = await first.__aenter__()
    await training.result()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(complete, b, [], "before")
        await settled()
        async with b.start(request_id="mine") as second:
            assert second.state == "waiting"
            await first.__aexit__(None, None, None)
            await second.admitted()
            assert await second.pause() == "paused"


async def test_a_pause_at_the_very_beginning(b: Bench, autojump_clock: trio.testing.MockClock) -> None:
    async with b.start() as training:
        # It has its permit, and its handler has not yet taken a step.
        assert training.state == "running"
        assert await training.pause() == "paused"
    assert b.state() == "paused"


async def test_a_pause_while_it_waits_is_a_cancel(b: Bench, autojump_clock: trio.testing.MockClock) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(complete, b, [], "before")
        await settled()
        async with b.start() as training:
            assert await training.pause() == "cancelled"
            with pytest.raises(InferenceCancelledError, match="paused before it began"):
                await training.result()
    assert (b.trainer.children, b.state()) == ([], "idle")


async def test_a_resumed_one_that_is_paused_or_cancelled_while_it_waits_stays_paused(
    b: Bench, autojump_clock: trio.testing.MockClock
) -> None:
    await paused(b)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(complete, b, [], "before")
        await settled()
        for end in ("pause", "cancel"):
            async with b.resume() as training:
                if end == "pause":
                    assert await training.pause() == "cancelled"
                else:
                    assert training.cancel() == 1
                with pytest.raises(InferenceCancelledError):
                    await training.result()
            assert b.state() == "paused"
    assert len(b.trainer.children) == 1


async def test_starting_anew_over_a_paused_training_is_refused(
    b: Bench, autojump_clock: trio.testing.MockClock
) -> None:
    await paused(b)
    with pytest.raises(FinetuneError, match=r"there is a paused training .*resume.*discard"):
        async with b.start():
            pass
    assert b.state() == "paused"
    finetune.discard(b.output)
    assert (b.state(), b.left()) == ("idle", [])
    assert (await b.train()).state == "completed"


async def test_what_came_about_while_it_waited_is_seen(
    trainer: ScriptedTrainer, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """Both were well when they arrived; when the second one's turn comes, the first has been paused."""
    async with bench(trainer, tmp_path, seconds_per_step=10 * STEP_SECONDS) as b:
        other = await b.s.engine.load_model("scripted:other")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(complete, b, [], "before")
            await settled()
            async with b.start() as waiting:
                async with finetune.start(other, dataset=b.data, output=b.output) as first:
                    assert await first.pause() == "paused"
                assert waiting.state == "waiting"
                with pytest.raises(FinetuneError, match="there is a paused training"):
                    await waiting.result()
        assert finetune.state(b.output) == finetune.TrainingState("paused", b.output, 1, 4)


async def test_resuming_without_a_checkpoint_is_refused(b: Bench, autojump_clock: trio.testing.MockClock) -> None:
    with pytest.raises(FinetuneError, match="no checkpoint"):
        b.resume()
    with pytest.raises(FinetuneError, match="no checkpoint"):
        async with b.start(resume=True):
            pass
    await b.train()
    with pytest.raises(FinetuneError, match="no checkpoint"):
        b.resume()
    b.s.assert_idle()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": 1}',
        '{"format": 1, "state": "odd"}',
        '{"format": 1, "state": "paused", "settings": []}',
        '{"format": 1, "state": "paused", "step": "2"}',
    ],
)
async def test_a_checkpoint_whose_record_is_damaged_is_not_thrown_away_unasked(
    b: Bench, autojump_clock: trio.testing.MockClock, text: str
) -> None:
    await paused(b)
    b.files.folder.joinpath("training.json").write_text(text)
    for opening in (b.start, b.resume):
        with pytest.raises(FinetuneError, match=r"what was written down of it cannot be read.*\(discard, "):
            async with opening():
                pass
    assert b.files.has_checkpoint
    finetune.discard(b.output)
    assert (await b.train()).state == "completed"


async def test_a_record_of_settings_that_are_not_known_is_told_of(
    b: Bench, autojump_clock: trio.testing.MockClock
) -> None:
    await paused(b)
    record = b.files.read()
    assert record is not None
    b.files.write(attrs.evolve(record, settings={**record.settings, "of_a_later_version": 1}))
    with pytest.raises(FinetuneError, match="cannot be read, so it cannot go on"):
        b.resume()


async def test_what_is_thrown_away_in_part_is_no_checkpoint(
    b: Bench, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever ends the program between one file and the next."""
    await paused(b)
    removed: list[Path] = []

    def remove(path: Path) -> None:
        if removed:
            raise OSError(4, "interrupted")
        removed.append(path)
        remove_really(path)

    remove_really = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", remove)
    with pytest.raises(OSError, match="interrupted"):
        finetune.discard(b.output)
    assert b.files.folder.is_dir()
    assert not b.files.has_checkpoint
    monkeypatch.undo()


async def test_losses_are_kept_where_there_is_no_room_for_them_twice(
    b: Bench, autojump_clock: trio.testing.MockClock
) -> None:
    await paused(b, 1.5)
    # As good as a full disk: what is to be written cannot be.
    in_the_way = b.files.folder / "losses.part"
    in_the_way.mkdir()
    with pytest.raises(FinetuneError, match="the training cannot go on"):
        async with b.resume() as training:
            await training.result()
    in_the_way.rmdir()
    async with b.resume() as training:
        result = await training.result()
    assert [point.step for point in result.curve] == [1, 2, 3, 4]


async def test_resuming_with_other_settings_is_refused_by_name(
    b: Bench, autojump_clock: trio.testing.MockClock
) -> None:
    await paused(b, rank=4)
    for field, value in (("rank", 8), ("learning_rate", 0.5), ("dataset", __file__), ("modules", "attn_q")):
        with pytest.raises(InvalidRequestError, match="cannot be resumed with") as caught:
            async with b.start(**{"rank": 4, "resume": True, field: value}):
                pass
        assert caught.value.field == field
    # What makes no difference to the losses may differ, and is kept for the next time.
    async with b.start(rank=4, resume=True, threads=7, checkpoint_every=1) as training:
        assert await training.pause() == "paused"
    kept = finetune.stored_request(b.output)
    assert (kept.rank, kept.threads, kept.checkpoint_every, kept.resume) == (4, 7, 1, True)
    async with b.resume(threads=3) as training:
        assert training.request == attrs.evolve(kept, threads=3)
        assert (await training.result()).step == 4


async def test_resuming_on_another_model_is_refused(b: Bench, autojump_clock: trio.testing.MockClock) -> None:
    await paused(b)
    other = await b.s.engine.load_model("scripted:other")
    with pytest.raises(FinetuneError, match="of another model"):
        async with finetune.resume(other, output=b.output):
            pass


async def test_resuming_on_other_weights_is_refused(b: Bench, autojump_clock: trio.testing.MockClock) -> None:
    await paused(b)
    digest, b.trainer.weights = b.trainer.weights, "another digest"
    children = len(b.trainer.children)
    with pytest.raises(FinetuneError, match="of other weights"):
        async with b.resume():
            pass
    assert len(b.trainer.children) == children
    assert b.state() == "paused"
    b.trainer.weights = digest
    async with b.resume() as training:
        assert (await training.result()).state == "completed"


async def test_a_paused_training_of_which_no_weights_are_recorded_is_refused(
    b: Bench, autojump_clock: trio.testing.MockClock
) -> None:
    await paused(b)
    path = b.output.with_name("adapter.gguf.training") / "training.json"
    record = json.loads(path.read_text())
    del record["weights"]
    path.write_text(json.dumps(record))
    with pytest.raises(FinetuneError, match="earlier version of Laneway"):
        async with b.resume():
            pass
    assert b.state() == "paused"


async def test_resuming_needs_the_data_no_more(b: Bench, autojump_clock: trio.testing.MockClock) -> None:
    await paused(b)
    b.data.unlink()
    async with b.resume() as training:
        assert (await training.result()).state == "completed"


@pytest.mark.parametrize("how", ["training", "engine", "all"])
async def test_cancel_removes_the_checkpoint(b: Bench, autojump_clock: trio.testing.MockClock, how: str) -> None:
    async with b.start() as training:
        await training.admitted()
        await trio.sleep(2.5 * STEP_SECONDS)
        assert b.files.has_checkpoint
        if how == "training":
            assert training.cancel() == 1
        elif how == "engine":
            assert b.s.engine.cancel(training.request_id) == 1
        else:
            assert b.s.engine.cancel_all(kind="finetune") == 1
        with pytest.raises(InferenceCancelledError):
            await training.result()
        assert training.state == "cancelled"
        await b.assert_free()
    assert b.state() == "cancelled"
    assert not b.files.has_checkpoint
    assert not b.output.exists()
    with pytest.raises(FinetuneError, match="no checkpoint"):
        b.resume()
    assert (await b.train()).state == "completed"
    assert b.left() == ["adapter.gguf"]


@pytest.mark.parametrize("how", ["leaves", "deadline", "unload"])
async def test_C1_a_training_that_engine_run_opened_keeps_its_checkpoint_unless_it_is_cancelled(
    b: Bench, autojump_clock: trio.testing.MockClock, how: str
) -> None:
    request = finetune.FinetuneRequest(dataset=b.data, output=b.output, checkpoint_every=2)
    with trio.move_on_after(2.5 * STEP_SECONDS if how == "deadline" else math.inf):
        async with b.s.engine.run(b.s.model, "finetune", request) as run:
            await run.admitted()
            await trio.sleep(2.5 * STEP_SECONDS)
            assert b.files.has_checkpoint
            if how == "unload":
                await b.s.engine.unload_model(b.s.model)
                with pytest.raises(InferenceCancelledError):
                    await run.result()
    assert b.state() == "paused"
    assert b.files.has_checkpoint


async def test_C3_a_cancel_of_a_training_that_is_leaving_costs_no_checkpoint(
    b: Bench, autojump_clock: trio.testing.MockClock
) -> None:
    request = finetune.FinetuneRequest(dataset=b.data, output=b.output, checkpoint_every=2)
    counts: list[int] = []

    async def cancel_late(run: Run) -> None:
        while run.state != "cancelling":
            await trio.lowlevel.checkpoint()
        counts.append(b.s.engine.cancel("training"))

    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            async with b.s.engine.run(b.s.model, "finetune", request, request_id="training") as run:
                await run.admitted()
                await trio.sleep(2.5 * STEP_SECONDS)
                nursery.start_soon(cancel_late, run)
                scope.cancel()
                await trio.sleep_forever()
    assert counts == [0]
    assert b.files.has_checkpoint
    assert b.state() == "paused"


async def test_a_cancel_removes_what_there_is_of_an_adapter(b: Bench, autojump_clock: trio.testing.MockClock) -> None:
    async def behave(child: ScriptedChild) -> None:
        await child.begin()
        b.output.with_name("adapter.gguf.part").write_bytes(b"GGUF")
        await trio.sleep_forever()

    b.trainer.behave = behave
    async with b.start() as training:
        await training.admitted()
        await settled()
        training.cancel()
        with pytest.raises(InferenceCancelledError):
            await training.result()
    assert b.left() == ["adapter.gguf.training"]


async def test_a_resumed_training_can_be_cancelled(b: Bench, autojump_clock: trio.testing.MockClock) -> None:
    await paused(b)
    async with b.resume() as training:
        await training.admitted()
        await trio.sleep(0.5 * STEP_SECONDS)
        b.s.engine.cancel(training.request_id)
        with pytest.raises(InferenceCancelledError):
            await training.result()
    assert b.state() == "cancelled"


@pytest.mark.parametrize(("steps", "state"), [(2.5, "paused"), (0.5, "idle")])
async def test_C1_leaving_the_block_ends_it_and_keeps_the_last_checkpoint(
    b: Bench, autojump_clock: trio.testing.MockClock, steps: float, state: str
) -> None:
    with trio.move_on_after(steps * STEP_SECONDS):
        async with b.start() as training:
            await training.result()
    await b.assert_free()
    assert b.state() == state
    if state == "paused":
        assert finetune.state(b.output).step == 2
        async with b.resume() as training:
            assert (await training.result()).curve == tuple(Loss(step, loss_of(step)) for step in range(1, 5))
    else:
        assert b.left() == []


async def test_an_error_of_the_block_keeps_the_last_checkpoint_too(
    b: Bench, autojump_clock: trio.testing.MockClock
) -> None:
    with pytest.raises(ZeroDivisionError):
        async with b.start() as training:
            await training.admitted()
            await trio.sleep(2.5 * STEP_SECONDS)
            raise ZeroDivisionError
    assert b.state() == "paused"


async def test_leaving_after_a_cancel_is_a_cancel(b: Bench, autojump_clock: trio.testing.MockClock) -> None:
    async with b.start() as training:
        await training.admitted()
        await trio.sleep(2.5 * STEP_SECONDS)
        training.cancel()
    assert b.state() == "cancelled"


async def test_C8_unloading_the_model_ends_it_and_keeps_the_last_checkpoint(
    b: Bench, autojump_clock: trio.testing.MockClock
) -> None:
    other = await b.s.engine.load_model("scripted:other")
    async with finetune.start(other, dataset=b.data, output=b.output, checkpoint_every=2) as training:
        await training.admitted()
        await trio.sleep(2.5 * STEP_SECONDS)
        await b.s.engine.unload_model(other)
        b.trainer.assert_all_ended()
        with pytest.raises(InferenceCancelledError, match="was unloaded"):
            await training.result()
    assert b.state() == "paused"


async def test_C8_closing_the_engine_ends_it_and_keeps_the_last_checkpoint(
    trainer: ScriptedTrainer, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        async with bench(trainer, tmp_path) as b:

            async def train(task_status: trio.TaskStatus[None]) -> None:
                with pytest.raises(InferenceCancelledError, match="closed"):
                    async with b.start() as training:
                        await training.admitted()
                        task_status.started()
                        await training.result()

            await nursery.start(train)
            await trio.sleep(2.5 * STEP_SECONDS)
        trainer.assert_all_ended()
        assert TrainingFiles(b.output).state().state == "paused"


async def test_a_cancelled_program_keeps_the_last_checkpoint(
    trainer: ScriptedTrainer, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    with trio.move_on_after(2.5 * STEP_SECONDS):
        async with bench(trainer, tmp_path) as b:
            await b.train()
    trainer.assert_all_ended()
    assert TrainingFiles(tmp_path / "adapter.gguf").state().state == "paused"


async def test_a_cancelled_engine_whose_block_goes_on_keeps_the_last_checkpoint(
    trainer: ScriptedTrainer, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """The model is as it was, and the caller is there; but nobody has asked for an end of this training."""
    async with trio.open_nursery() as nursery:

        async def train(b: Bench, task_status: trio.TaskStatus[None]) -> None:
            with pytest.raises(InferenceCancelledError, match="the engine was cancelled"):
                async with b.start() as training:
                    await training.admitted()
                    task_status.started()
                    await training.result()

        with trio.CancelScope() as scope:
            async with bench(trainer, tmp_path) as b:
                await nursery.start(train, b)
                with trio.CancelScope(shield=True):
                    await trio.sleep(2.5 * STEP_SECONDS)
                    scope.cancel()
                    await trio.sleep(STEP_SECONDS)
                    trainer.assert_all_ended()
                    assert b.s.model.state == "loaded"
                    assert finetune.state(b.output).state == "paused"


async def test_the_state_of_a_training_that_vanished_is_told_by_the_disk(
    b: Bench, autojump_clock: trio.testing.MockClock
) -> None:
    """As a process leaves it that was killed: the record says that it runs, and nobody holds the lock."""
    await paused(b)
    record = b.files.read()
    assert record is not None
    b.files.write(attrs.evolve(record, state="running"))
    assert b.state() == "paused"
    other = b.files
    other.lock()
    assert b.state() == "running"
    with pytest.raises(FinetuneError, match="another training writes to"):
        async with b.resume() as training:
            await training.result()
    other.unlock()
    async with b.resume() as training:
        assert (await training.result()).state == "completed"


async def test_whoever_only_looks_is_waited_for(
    b: Bench, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asking the disk for the state holds the lock for an instant."""
    looking = b.files
    looking.lock()
    monkeypatch.setattr(time, "sleep", lambda seconds: looking.unlock())
    assert (await b.train()).state == "completed"


async def test_the_state_where_no_lock_can_be_had(b: Bench, autojump_clock: trio.testing.MockClock) -> None:
    await paused(b)
    record = b.files.read()
    assert record is not None
    b.files.write(attrs.evolve(record, state="running"))
    lock = b.output.with_name(".adapter.gguf.lock")
    lock.mkdir()
    assert finetune.state(b.output).state == "running"
    lock.rmdir()
    assert finetune.state(b.output).state == "paused"


# What is refused before anything runs.


async def test_too_little_memory(b: Bench, autojump_clock: trio.testing.MockClock) -> None:
    b.trainer.shortage = "needs 3 GiB and 1 GiB is free"
    with pytest.raises(FinetuneError, match="needs 3 GiB"):
        await b.train()
    assert (b.trainer.children, b.left()) == ([], [])
    await b.assert_free()


@pytest.mark.parametrize(
    ("field", "place", "message"),
    [
        ("output", "data.jsonl", "is the dataset itself"),
        ("output", ".", "is a directory"),
        ("output", "nowhere/a.gguf", "no directory"),
        ("dataset", "nowhere.jsonl", "No such file"),
        ("dataset", ".", "Is a directory"),
        ("validation", "nowhere.jsonl", "No such file"),
    ],
)
async def test_paths_that_are_wrong(
    b: Bench, autojump_clock: trio.testing.MockClock, field: str, place: str, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        await b.train(**{field: b.data.parent / place})
    assert caught.value.field == field
    assert (b.trainer.children, b.left()) == ([], [])


async def test_an_output_that_is_no_file_is_not_replaced(b: Bench, autojump_clock: trio.testing.MockClock) -> None:
    """Or it would be gone for everybody who knows it by this name."""
    os.mkfifo(b.output)
    with pytest.raises(InvalidRequestError, match="no file that could be replaced") as caught:
        await b.train()
    assert caught.value.field == "output"
    assert b.output.is_fifo()


async def test_data_are_not_taken_from_where_they_would_be_removed(
    b: Bench, autojump_clock: trio.testing.MockClock
) -> None:
    b.files.folder.mkdir()
    data = b.files.folder / "train.jsonl"
    data.write_bytes(b.data.read_bytes())
    for field in ("dataset", "validation"):
        with pytest.raises(InvalidRequestError, match="which the training clears") as caught:
            await b.train(**{field: data})
        assert caught.value.field == field
    assert data.exists()


async def test_a_name_that_is_too_long_with_what_is_put_behind_it(
    b: Bench, autojump_clock: trio.testing.MockClock
) -> None:
    for name in ("x" * 300, "x" * 250):
        with pytest.raises(InvalidRequestError, match="File name too long") as caught:
            await b.train(output=b.output.with_name(name))
        assert caught.value.field == "output"
    assert b.left() == []


async def test_a_model_without_a_file_cannot_be_trained(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    data = tmp_path / "data.txt"
    data.write_text("text")
    async with scripted() as s:
        with pytest.raises(InvalidRequestError, match="not loaded from a GGUF file"):
            async with finetune.start(s.model, dataset=data, output=tmp_path / "a.gguf"):
                pass


# What may happen to the process.


async def failed(b: Bench, behave: Callable[[ScriptedChild], Any], **fields: Any) -> FinetuneError:
    """The error of a training whose process does this; nothing may be left of it, and the next one be well."""
    b.trainer.behave = behave
    with pytest.raises(FinetuneError) as caught:
        await b.train(**fields)
    await b.assert_free()
    b.trainer.behave = ScriptedChild.train
    return caught.value


async def test_an_error_that_it_tells(b: Bench, autojump_clock: trio.testing.MockClock) -> None:
    async def behave(child: ScriptedChild) -> None:
        await child.begin()
        await child.step(1)
        await child.log("llama: something")
        await child.log("ggml: the last line")
        await child.say("error", kind="memory", message="no memory is left", step=1)
        child.returncode = 1

    error = await failed(b, behave)
    assert (error.reason, error.step, error.log_line) == ("no memory is left", 1, "ggml: the last line")
    assert str(error) == "no memory is left (at step 1); its log ends with: ggml: the last line"
    assert (b.state(), b.left()) == ("idle", [])
    assert (await b.train()).state == "completed"


@pytest.mark.parametrize(
    ("signal", "message"),
    [
        (9, r"signal 9 \(SIGKILL\), perhaps because memory ran out"),
        (6, r"signal 6 \(SIGABRT\): llama.cpp met something"),
        (11, r"signal 11 \(SIGSEGV\)"),
        (100, r"signal 100 \(unknown\)"),
    ],
)
async def test_death_by_a_signal(b: Bench, autojump_clock: trio.testing.MockClock, signal: int, message: str) -> None:
    async def behave(child: ScriptedChild) -> None:
        await child.begin()
        await child.step(1)
        await child.step(2)
        await child.log("GGML_ASSERT: it aborts")
        child.die(signal)
        await trio.sleep_forever()

    error = await failed(b, behave)
    assert (error.step, error.log_line) == (2, "GGML_ASSERT: it aborts")
    with pytest.raises(FinetuneError, match=message):
        raise error


async def test_the_end_of_the_log_is_waited_for(b: Bench, autojump_clock: trio.testing.MockClock) -> None:
    async def behave(child: ScriptedChild) -> None:
        await child.begin()
        await child.log("so far")
        child.late_log = "the last words"
        child.die(6)
        await trio.sleep_forever()

    assert (await failed(b, behave)).log_line == "the last words"


async def test_a_log_is_told_in_few_words_that_any_terminal_shows(
    b: Bench, autojump_clock: trio.testing.MockClock
) -> None:
    async def behave(child: ScriptedChild) -> None:
        await child.begin()
        await child.log("\x1b[31mred\a and\rmore " + "x" * 5000)
        child.die(6)

    b.trainer.behave = behave
    with pytest.raises(FinetuneError) as caught:
        await b.train()
    assert caught.value.log_line.startswith("[31mred and more xxx")
    assert len(caught.value.log_line) == 500


async def test_death_before_it_has_begun(b: Bench, autojump_clock: trio.testing.MockClock) -> None:
    async def behave(child: ScriptedChild) -> None:
        await child.log("ImportError: no extension")
        child.returncode = 3

    error = await failed(b, behave)
    assert error.reason == "the training process ended with status 3 and without a result"
    assert (error.step, error.log_line) == (None, "ImportError: no extension")


async def test_an_end_without_a_result(b: Bench, autojump_clock: trio.testing.MockClock) -> None:
    async def behave(child: ScriptedChild) -> None:
        await child.begin()
        await child.step(1)

    error = await failed(b, behave)
    assert error.reason == "the training process ended with status 0 and without a result"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"Segmentation fault\n", "'Segmentation fault' is no JSON"),
        (b"\xff\xfe\n", "is no JSON"),
        (b"[1]\n", "is no object"),
        (b'{"step": 1}\n', "is none of started, step"),
        (b'{"event": "unheard"}\n', "is none of started, step"),
        (b'{"event": ["step"]}\n', "is none of started, step"),
        (b'{"event": "step", "step": 2}\n', "lacks something"),
        (b'{"event": "step", "step": "2", "loss": 1.0}\n', "its step is '2'"),
        (b'{"event": "step", "step": -2, "loss": 1.0}\n', "its step is -2"),
        (b'{"event": "step", "step": 2, "loss": null}\n', "its loss is None"),
        (b"x" * (1 << 21), "is no JSON"),
        (b'{"event": "ste', "is no JSON"),
        (b"[" * 100_000 + b"\n", "is no JSON"),
    ],
)
async def test_what_is_no_event(b: Bench, autojump_clock: trio.testing.MockClock, line: bytes, message: str) -> None:
    async def behave(child: ScriptedChild) -> None:
        await child.begin()
        await child.step(1)
        await child.write(line)
        await child.close_output()
        await trio.sleep_forever()

    error = await failed(b, behave)
    assert message in error.reason
    assert error.step == 1
    assert len(str(error)) < 400


async def test_a_step_before_it_has_started(b: Bench, autojump_clock: trio.testing.MockClock) -> None:
    error = await failed(b, lambda child: child.step(1))
    assert "before it has started" in error.reason


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("event", ["step", "validation"])
async def test_a_loss_that_is_not_finite_keeps_the_last_checkpoint(
    b: Bench, autojump_clock: trio.testing.MockClock, loss: float, event: str
) -> None:
    async def behave(child: ScriptedChild) -> None:
        await child.begin()
        for step in (1, 2):
            await child.step(step)
        child.save(2)
        await child.say("checkpoint", step=2)
        await child.say(event, step=3, loss=loss)
        await trio.sleep_forever()

    error = await failed(b, behave)
    assert "not finite" in error.reason
    assert error.step == 3
    assert finetune.state(b.output) == finetune.TrainingState("paused", b.output, 2, 4)
    async with b.resume() as training:
        assert (await training.result()).curve[2:] == (Loss(3, loss_of(3)), Loss(4, loss_of(4)))


async def test_silence(b: Bench, autojump_clock: trio.testing.MockClock) -> None:
    async def behave(child: ScriptedChild) -> None:
        await child.begin()
        await child.step(1)
        await child.log("computing")
        await trio.sleep_forever()

    start = trio.current_time()
    error = await failed(b, behave, silence_timeout=100)
    assert error.reason == "the training process said nothing for 100 s"
    assert (error.step, error.log_line) == (1, "computing")
    assert b.trainer.child.ended_at == pytest.approx(start + STEP_SECONDS + 100)


async def test_a_slow_one_is_not_silent(b: Bench, autojump_clock: trio.testing.MockClock) -> None:
    assert (await b.train(silence_timeout=1.5 * STEP_SECONDS)).step == 4


async def test_one_that_closes_its_output_and_lives_on(b: Bench, autojump_clock: trio.testing.MockClock) -> None:
    async def behave(child: ScriptedChild) -> None:
        await child.begin()
        await child.close_output()
        await trio.sleep_forever()

    error = await failed(b, behave)
    assert "closed its output and did not end" in error.reason


async def test_one_that_is_done_and_does_not_end(
    b: Bench, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def behave(child: ScriptedChild) -> None:
        await child.train()
        await trio.sleep_forever()

    b.trainer.behave = behave
    b.trainer.deaf = True
    assert (await b.train()).state == "completed"
    assert b.trainer.child.returncode == -9
    assert "did not end" in caplog.text


async def test_one_that_is_done_and_falls_over_its_own_feet(
    b: Bench, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def behave(child: ScriptedChild) -> None:
        await child.train()
        child.die(11)
        await trio.sleep_forever()

    b.trainer.behave = behave
    assert (await b.train()).state == "completed"
    assert "SIGSEGV" in caplog.text


async def test_one_that_lies_about_the_adapter(b: Bench, autojump_clock: trio.testing.MockClock) -> None:
    async def behave(child: ScriptedChild) -> None:
        await child.begin()
        await child.say("done", step=4, adapter=child.job["output"])

    error = await failed(b, behave)
    assert "there is no adapter" in error.reason


async def test_one_that_lies_about_the_checkpoint(b: Bench, autojump_clock: trio.testing.MockClock) -> None:
    async def behave(child: ScriptedChild) -> None:
        await child.begin()
        await child.say("paused", step=1)

    error = await failed(b, behave)
    assert "there is no checkpoint" in error.reason
    assert (b.state(), b.left()) == ("idle", [])


async def test_a_cancel_after_its_last_word_comes_too_late(b: Bench, autojump_clock: trio.testing.MockClock) -> None:
    async def behave(child: ScriptedChild) -> None:
        await child.train()
        await trio.sleep(1)

    b.trainer.behave = behave
    async with b.start() as training:
        await training.admitted()
        await trio.sleep(4 * STEP_SECONDS + 0.5)
        assert training.cancel() == 1
        assert (await training.result()).state == "completed"
        assert training.state == "completed"
    assert b.left() == ["adapter.gguf"]


async def test_one_whose_leavings_cannot_be_removed_is_done_all_the_same(
    b: Bench, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def behave(child: ScriptedChild) -> None:
        await child.begin()

        def refuse(files: TrainingFiles) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(TrainingFiles, "discard", refuse)
        child.write_adapter()
        await child.say("done", step=4, adapter=child.job["output"])

    b.trainer.behave = behave
    assert (await b.train()).state == "completed"
    (record,) = [record for record in caplog.records if "cannot be put in order" in record.getMessage()]
    assert (record.levelname, record.exc_info) == ("WARNING", None)
    assert b.state() == "completed"


async def test_a_process_that_cannot_be_started(b: Bench, autojump_clock: trio.testing.MockClock) -> None:
    b.trainer.fail_to_open = OSError(12, "Cannot allocate memory")
    with pytest.raises(FinetuneError, match="Cannot allocate memory"):
        await b.train()
    await b.assert_free()
    assert b.left() == []


async def test_a_full_disk_while_it_trains(b: Bench, autojump_clock: trio.testing.MockClock) -> None:
    async def behave(child: ScriptedChild) -> None:
        await child.begin()
        await child.step(1)
        # As good as a full disk: what is to be written cannot be.
        b.files.folder.joinpath("training.part").mkdir()
        child.save(1)
        await child.say("checkpoint", step=1)
        await trio.sleep_forever()

    b.trainer.behave = behave
    with pytest.raises(FinetuneError, match="the training cannot go on") as caught:
        await b.train()
    assert caught.value.step == 1
    await b.assert_free()


async def test_events_that_are_not_known_in_every_field_are_taken(
    b: Bench, autojump_clock: trio.testing.MockClock
) -> None:
    async def behave(child: ScriptedChild) -> None:
        await child.write(b"\n")
        await child.say("started", steps=1, start_step=0, base="f32", parameters=1, of_a_later_version=True)
        await child.say("step", step=1, loss=1, epoch=0)
        child.write_adapter()
        await child.say("done", step=1, adapter="")

    b.trainer.behave = behave
    assert (await b.train()).loss == 1


async def test_the_choice_of_the_base_is_logged(
    b: Bench, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "laneway.finetune"):
        await b.train()
    assert "base=f32" in caplog.text


def test_the_plugin_declares_what_the_rules_ask_for() -> None:
    (operation,) = finetune.laneway_plugin().operations
    assert (operation.kind, operation.scope, operation.use, operation.unique) == (
        "finetune",
        laneway.Scope.MODEL,
        laneway.Use.EXCLUSIVE,
        True,
    )


def test_C7_it_keeps_its_promises_when_it_is_cancelled_anywhere(trainer: ScriptedTrainer, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps(CHAT) + "\n")
    trainer.steps = 2
    numbers = itertools.count()
    (checked,) = check_plugin(
        finetune,
        requests={
            "finetune": lambda: FinetuneRequest(
                dataset=data, output=tmp_path / f"{next(numbers)}.gguf", checkpoint_every=1
            )
        },
        wrong={"finetune": [FinetuneRequest(dataset=tmp_path / "nowhere.txt", output=tmp_path / "a.gguf")]},
    )
    assert checked.checkpoints > 5
    assert checked.cancels >= checked.checkpoints
    trainer.assert_all_ended()
    left = [path.name for path in tmp_path.iterdir() if path.name.endswith(".lock")]
    assert left == []
