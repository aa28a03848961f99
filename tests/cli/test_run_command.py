"""``laneway run``: answers on standard output, errors in one line."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import rich.console

from laneway import DecodeError, Sampling
from laneway._cli import _answers
from laneway._cli._answers import LabelledLines, Pane
from laneway.testing import ScriptedTokenizer
from tests.cli.scripted_program import Program

WORDS = ScriptedTokenizer()
CHAT = "<|turn|>user\n{}<|turn_end|>\n<|turn|>assistant\n"

SCRIPT = {
    tuple(WORDS.tokenize(prompt, special=True)): answer
    for prompt, answer in {
        "one": "1 and on",
        "two": "2\nand\n\nmore",
        CHAT.format("one"): "chat 1",
        CHAT.format("two"): "chat 2\nlast",
        "<|turn|>system\nBe brief.<|turn_end|>\n" + CHAT.format("one"): "brief",
        "three lines\nof\ntext": "yes",
    }.items()
}


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    return Program(monkeypatch, "laneway._cli._run", script=SCRIPT)


@pytest.mark.parametrize(
    ("args", "stdin", "output"),
    [
        (["one"], None, "chat 1\n"),
        (["--raw", "one"], None, "1 and on\n"),
        (["--raw", "two"], None, "2\nand\n\nmore\n"),
        (["--system", "Be brief.", "one"], None, "brief\n"),
        (["--raw", "--stop", "and", "one"], None, "1 \n"),
        (["--raw", "--stop", "nope", "--stop", " and", "one"], None, "1\n"),
        (["--raw", "-n", "1", "one"], None, "1\n"),
        (["--raw", "-"], "three lines\nof\ntext\n", "yes\n"),
        (["--raw", "--", "one"], None, "1 and on\n"),
    ],
)
def test_one_answer_is_printed_as_it_is(program: Program, args: list[str], stdin: str | None, output: str) -> None:
    result = program("run", "scripted:m", *args, stdin=stdin)
    assert (result.exit_code, result.stdout, result.stderr) == (0, output, "")


def test_several_answers_are_labelled_lines(program: Program) -> None:
    result = program("run", "scripted:m", "--raw", "one", "two", "-", stdin="one")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    for label, texts in {"[1]": ["1 and on"], "[2]": ["2", "and", "", "more"], "[3]": ["1 and on"]}.items():
        assert [line[4:] for line in lines if line.startswith(label)] == texts


@pytest.mark.parametrize(
    ("options", "at_once"), [([], 3), (["--parallel", "1"], 1), (["-p", "2"], 2), (["--parallel", "5"], 3)]
)
def test_parallel_says_how_many_run_at_a_time(program: Program, options: list[str], at_once: int) -> None:
    result = program("run", "scripted:m", *options, "--context-size", "1000", "a", "b", "c")
    assert result.exit_code == 0
    assert program.loader.decoders["scripted:m"].statistics().max_used == at_once


def test_more_prompts_than_the_queue_usually_holds(program: Program) -> None:
    result = program("run", "scripted:m", "--raw", "-n", "1", "--context-size", "800", *["one"] * 100)
    assert result.exit_code == 0
    assert sorted(result.stdout.splitlines()) == sorted(f"[{number}] 1" for number in range(1, 101))


def test_sampling_options_reach_the_request(program: Program) -> None:
    result = program("run", "scripted:m", "--raw", "-t", "0.5", "--seed", "7", "-n", "9", "free")
    decoder = program.loader.decoders["scripted:m"]
    expected = decoder.expected(WORDS.tokenize("free"), Sampling(temperature=0.5, seed=7), 9)
    assert result.stdout == WORDS.text(expected.tokens) + "\n"


def test_a_model_without_a_template_continues_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program(monkeypatch, "laneway._cli._run", script=SCRIPT, chat_template=None)
    assert program("run", "scripted:m", "one").stdout == "1 and on\n"
    result = program("run", "scripted:m", "--system", "Be brief.", "one")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "model m has no chat template" in result.stderr


@pytest.mark.parametrize(
    ("args", "status", "reason"),
    [
        (["/no/such/model.gguf", "x"], 1, "cannot load model '/no/such/model.gguf': there is no such file"),
        (["smollm2", "x"], 1, "run: laneway pull smollm2"),
        (["scripted:m", "x", "--parallel", "0"], 1, "from 1 to 256, not 0"),
        (["scripted:m", "x", "--parallel", "300"], 1, "from 1 to 256, not 300"),
        (["scripted:m", "x", "--context-size", "0"], 1, "context_size"),
        (["scripted:m", "x", "--threads", "2"], 1, "the scripted loader has no option threads"),
        (["scripted:m", "x", "-t", "-1"], 1, "temperature: must be a number from 0 to 100"),
        (["scripted:m", "x", "--seed", "-1"], 1, "seed: must be an integer from 0"),
        (["scripted:m", "x", "--stop", ""], 1, "a stop string must not be empty"),
        (["scripted:m", "x" * 400], 1, "the prompt has"),
        (["scripted:m", "x", "-n", "0"], 2, "0 is not in the range"),
        (["scripted:m"], 2, "Missing argument"),
        ([], 2, "Missing argument"),
        (["scripted:m", "x", "--raw", "--system", "y"], 2, "--raw asks for none"),
        (["scripted:m", "-", "-"], 2, "more than once"),
        (["scripted:m", "-"], 2, "nothing on standard input"),
    ],
)
def test_errors_are_one_line(
    program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, args: list[str], status: int, reason: str
) -> None:
    monkeypatch.setenv("LANEWAY_CACHE_DIR", str(tmp_path))
    result = program("run", *args)
    assert (result.exit_code, result.stdout) == (status, "")
    assert reason in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_file_that_is_no_model_is_one_line(program: Program, tmp_path: Path) -> None:
    pytest.importorskip("laneway_native", reason="the native part is not built (make build)", exc_type=ImportError)
    file = tmp_path / "page.gguf"
    file.write_text("<!DOCTYPE html>")
    result = program("run", str(file), "x")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert "not a GGUF file" in result.stderr


def test_one_prompt_that_cannot_be_answered_costs_the_others_nothing(program: Program) -> None:
    result = program("run", "scripted:m", "--raw", "one", "x" * 400, "two")
    assert result.exit_code == 1
    assert [line for line in result.stdout.splitlines() if line[1] != "2"] == result.stdout.splitlines()
    assert "[1] 1 and on" in result.stdout
    assert "[3] more" in result.stdout
    first, last = result.stderr.splitlines()
    assert first.startswith("[2] the prompt has 401 tokens")
    assert last == "laneway: error: 1 of 3 prompts could not be answered"


def test_an_answer_that_breaks_off_ends_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program(monkeypatch, "laneway._cli._run", script=SCRIPT, fail_at={4: DecodeError("gone")})
    result = program("run", "scripted:m", "--raw", "one")
    assert (result.exit_code, result.stdout) == (1, "1 an\n")
    assert result.stderr.splitlines()[-1].startswith("laneway: error: the decode step failed: gone")


# A terminal.


def test_on_a_terminal_answers_stand_side_by_side(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    console = rich.console.Console(file=screen, force_terminal=True, width=90, height=12, color_system=None)
    monkeypatch.setattr(_answers, "wants_live_view", lambda: True)
    monkeypatch.setattr(rich.console, "Console", lambda: console)
    result = program("run", "scripted:m", "--raw", "one", "[two]", "two", "x" * 400)
    assert result.exit_code == 1
    assert "1 of 4 prompts could not be answered" in result.stderr
    text = screen.getvalue()
    top = next(line for line in text.splitlines() if "╭" in line)
    assert "─ one ─" in top
    assert "─ [two] ─" in top
    tail = text[text.rindex("[1] one") :]
    assert tail.index("1 and on") < tail.index("[3] two") < tail.index("more") < tail.index("the prompt has 401 tokens")


def test_panes_show_the_end_of_long_texts_and_take_brackets_literally() -> None:
    console = rich.console.Console(file=io.StringIO(), width=60, height=20, color_system=None)
    panes = [
        Pane("[red]title", "\n".join(f"line {number}" for number in range(50)), "status"),
        Pane("other", "[bold]word[/bold] " * 3),
        Pane("third"),
    ]
    with console.capture() as capture:
        console.print(_answers.side_by_side(panes, console, 16))
    lines = capture.get().rstrip("\n").split("\n")
    assert len(lines) == 16, "two rows of two panes"
    assert all(len(line.rstrip()) <= 60 for line in lines)
    text = "\n".join(lines)
    assert "[red]title" in text
    assert "[bold]word[/bold]" in text
    assert "line 49" in text
    assert "line 43" not in text
    assert "status" in text


def test_labelled_lines() -> None:
    out: list[str] = []
    lines = LabelledLines(out.append)
    lines.add("a", "one ")
    lines.add("b", "x\n")
    lines.add("a", "two\nthree\n\nfo")
    assert out == ["b x", "a one two", "a three", "a"]
    lines.end("a")
    lines.end("a")
    lines.end("b")
    assert out[4:] == ["a fo"]


@pytest.mark.parametrize("pieces", [1, 3, 100])
def test_long_lines_are_broken_between_words_as_they_come(pieces: int) -> None:
    out: list[str] = []
    lines = LabelledLines(out.append, width=10)
    text = "four score and seven years, unbelievably ago"
    for start in range(0, len(text), pieces):
        lines.add(">", text[start : start + pieces])
    lines.end(">")
    assert out == ["> four score", "> and seven", "> years,", "> unbelievab", "> ly ago"]


def test_a_plugin_that_is_switched_off_is_named(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANEWAY_DISABLE_PLUGINS", "completion")
    result = program("run", "scripted:m", "x")
    assert result.exit_code == 1
    assert "no operation 'completion' for model 'm'" in result.stderr
