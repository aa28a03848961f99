"""``laneway translate``: files and standard input, with either kind of model."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
import rich.console
from click.testing import CliRunner, Result

from laneway._cli import _answers, main
from laneway.testing import ScriptedTokenizer
from tests.cli.scripted_program import Program
from tests.plugins import nmt_models
from tests.plugins.nmt_models import make_model, make_package

WORDS = ScriptedTokenizer()


def asked(text: str, context: str = "") -> tuple[int, ...]:
    known = f"\n\nWhat is known of the text: {context}" if context else ""
    order = f"Translate from German into English. Answer with the translation and nothing else.{known}\n\n{text}"
    return tuple(WORDS.tokenize(f"<|turn|>user\n{order}<|turn_end|>\n<|turn|>assistant\n", special=True))


SCRIPT = {asked("eins"): "one and more", asked("zwei"): " two\n", asked("zwei", "sums"): "2"}
TEXT = "eins\r\n\r\n\tzwei\nzwei"
ENGLISH = "one and more\r\n\r\n\ttwo\ntwo"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    return Program(monkeypatch, "laneway._cli._translate", script=SCRIPT, context_size=2048)


def written(tmp_path: Path, text: str = TEXT) -> str:
    path = tmp_path / "text.txt"
    path.write_bytes(text.encode())
    return str(path)


# Language models.


def test_standard_input_keeps_its_lines(program: Program) -> None:
    result = program("translate", "scripted:m", "--from", "de", "--to", "en", stdin=TEXT)
    assert (result.exit_code, result.stdout_bytes.decode(), result.stderr) == (0, ENGLISH, "")


def test_a_file_goes_to_a_file(program: Program, tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    result = program("translate", "scripted:m", "--from", "de", "--to", "en", written(tmp_path), "-o", str(out))
    assert (result.exit_code, result.output) == (0, "")
    assert out.read_bytes().decode() == ENGLISH


@pytest.mark.parametrize(("parallel", "at_once"), [([], 3), (["-p", "1"], 1)])
def test_lines_are_translated_side_by_side_and_written_in_order(
    program: Program, parallel: list[str], at_once: int
) -> None:
    result = program("translate", "scripted:m", "--from", "de", "--to", "en", *parallel, stdin=TEXT)
    assert result.stdout_bytes.decode() == ENGLISH
    assert program.loader.decoders["scripted:m"].statistics().max_used == at_once


def test_more_lines_than_one_request_takes(program: Program) -> None:
    result = program("translate", "scripted:m", "--from", "de", "--to", "en", stdin="zwei\n" * 150)
    assert result.stdout == "two\n" * 150


def test_context(program: Program) -> None:
    result = program("translate", "scripted:m", "--from", "de", "--to", "en", "--context", "sums", stdin="zwei\n")
    assert result.stdout == "2\n"


def test_nothing_is_translated_into_nothing(program: Program) -> None:
    assert program("translate", "scripted:m", "--to", "en", stdin="").stdout == ""


@pytest.mark.parametrize(
    ("args", "status", "reason"),
    [
        (["scripted:m"], 2, "say which language to translate into: --to de"),
        (["scripted:m", "--to", "English", "--from", "de"], 1, "a language is given by its code: 'en'"),
        (["scripted:m", "--to", "en", "--from", "xx"], 1, "source: 'xx' is no ISO"),
        (["scripted:m", "--to", "en", "--beam-size", "4"], 2, "--beam-size is for translation models"),
        (["scripted:m", "--to", "en", "/no/such/file"], 1, "/no/such/file: No such file"),
        (["/no/such.argosmodel", "--to", "en"], 1, "there is no such file"),
        ([], 2, "Missing argument"),
    ],
)
def test_errors_are_one_line(program: Program, args: list[str], status: int, reason: str) -> None:
    result = program("translate", *args, stdin="eins\n")
    assert (result.exit_code, result.stdout) == (status, "")
    assert reason in result.stderr
    assert result.stderr.count("\n") == 1


def test_what_is_no_text_is_refused(program: Program, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"abc\xff")
    result = program("translate", "scripted:m", "--to", "en", str(path))
    assert (result.exit_code, result.stdout) == (1, "")
    assert "is not UTF-8: byte 3 (0xff)" in result.stderr


# Translation models.


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    nmt_models.need_nmt()
    folder = tmp_path_factory.mktemp("packages")
    for number, pair in enumerate(("fr-en", "en-de")):
        model = make_model(tmp_path_factory.mktemp("models") / pair, seed=10 + number)
        make_package(folder / f"{pair}.argosmodel", pair, model)
    return folder


def translate(*args: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, ["translate", *args], input=stdin)


def test_translation_models_translate_line_by_line(packages: Path, tmp_path: Path) -> None:
    text = "w1 w2 w3\r\n\r\n\tw4 w5\n12"
    options = ["--from", "en", "--to", "de", "--threads", "1"]
    result = translate(str(packages / "en-de.argosmodel"), *options, stdin=text)
    assert (result.exit_code, result.stderr) == (0, "")
    assert re.fullmatch(r"[^\n]+\r\n\r\n\t[^\n]+\n12", result.stdout_bytes.decode())
    again = translate(str(packages), *options, written(tmp_path, text), "--beam-size", "1")
    assert again.stdout_bytes == result.stdout_bytes


def test_pairs_are_gone_through(packages: Path) -> None:
    french, german = str(packages / "fr-en.argosmodel"), str(packages / "en-de.argosmodel")
    both = translate(french, "--package", german, "--from", "fr", "--to", "de", stdin="w1 w2\n")
    middle = translate(french, stdin="w1 w2\n")
    last = translate(german, stdin=middle.stdout)
    assert both.exit_code == middle.exit_code == last.exit_code == 0
    assert both.stdout == last.stdout
    result = translate(french, "--to", "ja", stdin="w1\n")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no installed pairs lead from 'fr' to 'ja'; there are: fr to en" in result.stderr


@pytest.mark.parametrize("option", ["--context", "--parallel", "--max-tokens"])
def test_options_for_the_other_kind_are_refused(packages: Path, option: str) -> None:
    result = translate(str(packages / "en-de.argosmodel"), option, "3", stdin="w1\n")
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{option} is for language models" in result.stderr


def test_a_translation_without_an_end_is_warned_of(tmp_path: Path) -> None:
    nmt_models.need_nmt()
    model = make_model(tmp_path / "endless", end_bias=-100.0)
    result = translate(str(model), stdin="w1\n")
    assert result.exit_code == 1
    assert result.stdout.endswith("\n")
    assert result.stderr == (
        "laneway: error: the translation is not whole: the model came to no end of a sentence, which was cut at the "
        "longest length\n"
    )


@pytest.mark.parametrize("where", ["screen", "file"])
def test_lines_that_were_cut_are_named_and_the_status_tells(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    script = {
        **SCRIPT,
        asked("drei"): "This line is never to end. " * 400,
        asked("vier"): " ".join(f"{number}." for number in range(3000)),
        asked("denk"): "<think>I wonder, and I wonder, and no end",
    }
    program = Program(monkeypatch, "laneway._cli._translate", script=script, context_size=8192)
    options = ["-o", str(tmp_path / "out")] if where == "file" else []
    text = "eins\ndrei\n\nvier\nzwei\ndenk\n"
    result = program("translate", "scripted:m", "--from", "de", "--to", "en", *options, stdin=text)
    assert result.exit_code == 1
    assert result.stderr == (
        "laneway: error: the translation is not whole: 3 lines were cut: 2 (the model repeated itself), "
        "4 (the model came to no end), 6 (the model thought and gave no answer)\n"
    )
    out = (tmp_path / "out").read_text() if where == "file" else result.stdout
    lines = out.split("\n")
    assert len(lines) == 7
    assert (lines[0], lines[2], lines[4], lines[5]) == ("one and more", "", "two", "")
    assert len(lines[1]) < 300
    assert lines[3].startswith("0. 1. 2. ")
    assert "wonder" not in out


def test_a_longest_translation_can_be_said(program: Program) -> None:
    result = program("translate", "scripted:m", "--from", "de", "--to", "en", "-n", "1", stdin="eins\nzwei\n")
    assert result.exit_code == 1
    assert "2 lines were cut: 1 (the model came to no end), 2 (the model came to no end)" in result.stderr


def test_many_lines_that_were_cut_are_counted(program: Program) -> None:
    result = program("translate", "scripted:m", "--from", "de", "--to", "en", "-n", "1", stdin="eins\n" * 100)
    assert "100 lines were cut: 1 (the" in result.stderr
    assert result.stderr.endswith("10 (the model came to no end) and 90 more\n")


# A terminal.


@pytest.mark.parametrize("redirected", [False, True])
def test_files_have_a_progress_bar_on_a_terminal(
    packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redirected: bool
) -> None:
    screen = io.StringIO()
    console = rich.console.Console(file=screen, force_terminal=True, width=90, height=12, color_system=None)
    monkeypatch.setattr(_answers, "wants_live_view", lambda: not redirected)
    monkeypatch.setattr(rich.console, "Console", lambda **options: console)
    text = "".join(f"w{number} [w2]\n" for number in range(30))
    result = translate(str(packages / "en-de.argosmodel"), written(tmp_path, text))
    assert (result.exit_code, result.stderr) == (0, "")
    shown = screen.getvalue()
    assert "text.txt" in shown
    assert "30/30 sentences" in shown
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", result.stdout if redirected else shown)
    assert len(re.findall(r"^w[0-9]", plain.replace("\r", "\n"), re.MULTILINE)) == 30
    # Standard input has none: nobody knows how much of it there is.
    screen.truncate(0)
    assert translate(str(packages / "en-de.argosmodel"), stdin=text).exit_code == 0
    assert "sentences" not in screen.getvalue()
