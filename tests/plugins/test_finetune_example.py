"""The example of the documentation, on a scripted model with a scripted trainer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trio
import trio.testing

from laneway_plugins import finetune
from tests.docs.pages import DOCS, load
from tests.plugins.finetune_trainer import STEP_SECONDS, ScriptedTrainer
from tests.plugins.finetune_trainer import trainer as trainer
from tests.plugins.scripted import scripted

training = load(DOCS / "examples" / "training.py")
CHAT = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "a world"}]}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text(f"{json.dumps(CHAT)}\n" * 10)
    return path


async def test_train(
    trainer: ScriptedTrainer,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with scripted() as s:
        result = await training.train(s.model, data, tmp_path / "a.gguf")
    assert (result.state, result.validation_loss) == ("completed", 3.0)
    assert "step 1 of 4: loss 8.000, 3 s left" in capsys.readouterr().out


async def test_train_for_a_while_again_and_again(
    trainer: ScriptedTrainer, data: Path, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    output = tmp_path / "a.gguf"
    async with scripted() as s:
        states = [await training.train_for(s.model, data, output, 1.5 * STEP_SECONDS) for _ in range(2)]
    assert states == ["paused", "completed"]
    assert finetune.state(output).state == "completed"
