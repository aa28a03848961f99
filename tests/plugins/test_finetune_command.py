"""``laneway finetune``: on a scripted model with a scripted trainer, in virtual time."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import rich.console

from laneway_plugins import finetune
from laneway_plugins.finetune import Plan
from tests.cli.scripted_program import Program
from tests.plugins.finetune_trainer import Behaviour, ScriptedChild, ScriptedTrainer
from tests.plugins.finetune_trainer import trainer as trainer

CHAT = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "a world"}]}


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, trainer: ScriptedTrainer) -> Program:
    return Program(monkeypatch, "laneway_plugins._finetune_command")


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "data.jsonl"
    path.write_text(f"{json.dumps(CHAT)}\n" * 4)
    return str(path)


@pytest.fixture
def output(tmp_path: Path) -> str:
    return str(tmp_path / "adapter.gguf")


def test_it_trains_and_shows_the_curve(program: Program, trainer: ScriptedTrainer, data: str, output: str) -> None:
    result = program("finetune", "scripted:m", data, "-o", output, "--validation", "0.25", "--rank", "4")
    assert result.exit_code == 0, result.output
    assert Path(output).exists()
    assert trainer.child.job["rank"] == 4
    *picture, last = result.stdout.splitlines()
    assert "loss, o: validation" in picture[-1]
    assert last == f"{output} (step 4 of 4, loss 2.0000, validation 3.0000, 0:04)"
    lines = result.stderr.splitlines()
    assert lines[0].startswith("step 1/4  epoch 1  loss 8.0000")
    assert lines[-1].startswith("step 4/4  epoch 3  loss 2.0000  validation ")
    trainer.assert_all_ended()


def test_a_terminal_has_a_bar(program: Program, data: str, output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    console = rich.console.Console(file=screen, force_terminal=True, width=100, height=12, color_system=None)
    monkeypatch.setattr(rich.console, "Console", lambda **options: console)
    result = program("finetune", "scripted:m", data, "-o", output, "--validation", "0.25")
    assert (result.exit_code, result.stderr) == (0, "")
    drawn = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())
    assert re.search(r"adapter\.gguf ━+ 4/4 loss 2\.000  val 3\.000  64 tok/s 0:00 left", drawn)


def test_every_option_reaches_the_request(program: Program, trainer: ScriptedTrainer, data: str, output: str) -> None:
    options = {
        "--rank": 2,
        "--alpha": 3.0,
        "--epochs": 4,
        "--context-length": 99,
        "--batch": 5,
        "--learning-rate": 0.25,
        "--schedule": "linear",
        "--warmup": 0.5,
        "--weight-decay": 0.125,
        "--seed": 6,
        "--base": "native",
        "--checkpoint-every": 7,
    }
    given = [text for name, value in options.items() for text in (name, str(value))]
    result = program("finetune", "scripted:m", data, "-o", output, *given, "--modules", "attn_q,attn_v", "--truncate")
    assert result.exit_code == 0, result.output
    job = trainer.child.job
    assert {name: job[name.strip("-").replace("-", "_")] for name in options} == options
    assert job["modules"] == ["attn_q", "attn_v"]


def test_a_plot_is_written_as_svg(program: Program, data: str, output: str, tmp_path: Path) -> None:
    plot = tmp_path / "curve.svg"
    assert program("finetune", "scripted:m", data, "-o", output, "--plot", str(plot)).exit_code == 0
    ET.fromstring(plot.read_text())
    result = program("finetune", "scripted:m", data, "-o", output, "--plot", "curve.png")
    assert result.exit_code == 2
    assert "ends in .svg" in result.stderr


def test_a_plot_that_cannot_be_written_is_told_of_before_the_training(
    program: Program, trainer: ScriptedTrainer, data: str, output: str, tmp_path: Path
) -> None:
    result = program("finetune", "scripted:m", data, "-o", output, "--plot", str(tmp_path / "nowhere" / "curve.svg"))
    assert result.exit_code == 2
    assert "nowhere is no directory that can be written to" in result.stderr
    same = str(tmp_path / "a.svg")
    result = program("finetune", "scripted:m", data, "-o", same, "--plot", same)
    assert (result.exit_code, "a name of its own" in result.stderr) == (2, True)
    assert trainer.children == []


def test_a_plot_that_fails_in_the_end_hides_nothing(
    program: Program, data: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plot = tmp_path / "curve.svg"

    def full(*args: object, **options: object) -> str:
        raise OSError(28, "No space left on device", str(plot))

    monkeypatch.setattr("laneway_plugins._finetune_curve.plot_svg", full)
    result = program("finetune", "scripted:m", data, "-o", output, "--plot", str(plot))
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1].startswith(f"{output} (step 4 of 4")
    assert result.stderr.splitlines()[-1] == f"laneway: error: {plot}: No space left on device"


def test_ctrl_c_before_there_is_anything_to_pause_ends_the_program(
    program: Program, trainer: ScriptedTrainer, data: str, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = trainer.plan

    async def interrupted(*args: Any) -> Plan:
        os.kill(os.getpid(), signal.SIGINT)
        return await plan(*args)

    monkeypatch.setattr(trainer, "plan", interrupted)
    result = program("finetune", "scripted:m", data, "-o", output)
    assert (result.exit_code, result.stderr) == (130, "laneway: interrupted\n")
    assert trainer.children == []
    assert os.listdir(Path(output).parent) == [Path(data).name]


def interrupted_at(step: int) -> Behaviour:
    """A training in whose step Ctrl-C comes."""

    async def behave(child: ScriptedChild) -> None:
        start = await child.begin()
        for number in range(start + 1, child.steps + 1):
            if number == step:
                os.kill(os.getpid(), signal.SIGINT)
            await child.step(number)
            if child.pause_wanted.is_set():
                child.save(number)
                await child.say("checkpoint", step=number)
                await child.say("paused", step=number)
                return

    return behave


def test_ctrl_c_pauses_and_resume_goes_on(program: Program, trainer: ScriptedTrainer, data: str, output: str) -> None:
    trainer.behave = interrupted_at(2)
    result = program("finetune", "scripted:m", data, "-o", output, "--rank", "4")
    assert result.exit_code == 130, result.output
    assert "pausing after the step under way" in result.stderr
    assert f"go on with: laneway finetune scripted:m --output {shlex.quote(output)} --resume" in result.stderr
    assert finetune.state(output).state == "paused"
    assert not Path(output).exists()

    both = program("finetune", "scripted:m", data, "-o", output, "--resume", "--restart")
    assert (both.exit_code, "give one of them" in both.stderr) == (2, True)

    trainer.behave = ScriptedChild.train
    refused = program("finetune", "scripted:m", data, "-o", output)
    assert refused.exit_code == 1
    assert "there is a paused training" in refused.stderr
    other = program("finetune", "scripted:m", "-o", output, "--resume", "--rank", "8")
    assert other.exit_code == 1
    assert "rank: the training was begun with 4" in other.stderr
    result = program("finetune", "scripted:m", "-o", output, "--resume")
    assert result.exit_code == 0, result.output
    assert trainer.child.job["resume"]
    assert trainer.child.job["rank"] == 4
    assert "step 4 of 4" in result.stdout


def test_restart_throws_the_paused_one_away(program: Program, trainer: ScriptedTrainer, data: str, output: str) -> None:
    trainer.behave = interrupted_at(2)
    assert program("finetune", "scripted:m", data, "-o", output).exit_code == 130
    trainer.behave = ScriptedChild.train
    result = program("finetune", "scripted:m", data, "-o", output, "--restart", "--rank", "2")
    assert result.exit_code == 0, result.output
    assert (trainer.child.job["resume"], trainer.child.job["rank"]) == (False, 2)


def test_restart_throws_nothing_away_for_what_cannot_begin(
    program: Program, trainer: ScriptedTrainer, data: str, output: str, tmp_path: Path
) -> None:
    trainer.behave = interrupted_at(2)
    assert program("finetune", "scripted:m", data, "-o", output).exit_code == 130
    wrong = (["scripted:m", data, "--rank", "0"], ["scripted:m", str(tmp_path / "no")], ["no-such-model", data])
    for arguments in wrong:
        assert program("finetune", *arguments, "-o", output, "--restart").exit_code == 1
        assert finetune.state(output).state == "paused"


def test_a_second_ctrl_c_leaves_at_once(program: Program, trainer: ScriptedTrainer, data: str, output: str) -> None:
    async def behave(child: ScriptedChild) -> None:
        await child.begin()
        os.kill(os.getpid(), signal.SIGINT)
        await child.pause_wanted.wait()
        os.kill(os.getpid(), signal.SIGINT)
        while True:
            await child.step(1)

    trainer.behave = behave
    result = program("finetune", "scripted:m", data, "-o", output)
    assert result.exit_code == 130
    assert "laneway: interrupted" in result.stderr
    trainer.assert_all_ended()
    assert finetune.state(output).state == "idle"


def test_what_goes_wrong_is_one_line(program: Program, trainer: ScriptedTrainer, data: str, output: str) -> None:
    async def behave(child: ScriptedChild) -> None:
        await child.begin()
        await child.log("the last line")
        child.die(11)

    trainer.behave = behave
    result = program("finetune", "scripted:m", data, "-o", output)
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("laneway: error: the training process was ended by signal 11 (SIGSEGV)")
    assert line.endswith("its log ends with: the last line")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["m"], 2, "Missing option"),
        (["m", "-o", "a.gguf"], 2, "say what to train on"),
        (["scripted:m", "-o", "a.gguf", "--resume"], 1, "no checkpoint"),
        (["scripted:m", "nowhere.jsonl", "-o", "a.gguf"], 1, "No such file"),
        (["scripted:m", "x", "-o", "a.gguf", "--rank", "0"], 1, "rank: must be an integer from 1 to 256"),
        (["scripted:m", "x", "-o", "a.gguf", "--validation", "2"], 1, "a share of the data"),
    ],
)
def test_wrong_use(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], status: int, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = program("finetune", *arguments)
    assert result.exit_code == status
    assert message in result.stderr


def test_the_program_lists_the_command() -> None:
    from click.testing import CliRunner

    from laneway._cli import main

    assert "Train a LoRA adapter" in CliRunner().invoke(main, ["--help"]).output
    listed = CliRunner().invoke(main, ["plugins"]).output
    assert any(line.startswith("finetune") and "exclusive" in line for line in listed.splitlines())
