"""Standard streams that are closed, full or narrow; terminals that obey; signals that end the program."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import rich.console

import laneway
from laneway import _cli
from laneway._cli import _cache, _demo, _pull, _signals
from laneway._download import PullProgress
from laneway_plugins import _finetune_command
from tests.cli.real_program import RealProgram, environment, lines, read_all

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="terminals, signals and pipes as POSIX has them")

CLIPBOARD = "\x1b]52;c;Z2l0\x07"
ANSWERS = {
    "clip": f"copy {CLIPBOARD} now",
    "other": "[red]x[/red] \x9b2J end",
    "wide": "é 你 🙂",
    "forever": "word " * 4000,
}
CHAT = "<|turn|>user\n{}<|turn_end|>\n<|turn|>assistant\n"


@pytest.fixture
def program(tmp_path: Path) -> RealProgram:
    return RealProgram.make(tmp_path, {**ANSWERS, **{CHAT.format(ask): say for ask, say in ANSWERS.items()}})


# Terminals.


def test_a_pipe_gets_the_answer_as_it_is(program: RealProgram) -> None:
    done = program.run("run", "scripted:m", "clip")
    assert (done.returncode, done.stdout.decode(), done.stderr) == (0, f"{ANSWERS['clip']}\n", b"")


def test_a_terminal_is_not_told_what_to_do_by_one_answer(program: RealProgram) -> None:
    shown, status = program.on_terminal("run", "scripted:m", "clip")
    assert status == 0
    assert shown.replace(b"\r\n", b"\n").decode() == "copy \\x1b]52;c;Z2l0\\x07 now\n"


def test_a_terminal_is_not_told_what_to_do_by_answers_side_by_side(program: RealProgram) -> None:
    shown, status = program.on_terminal("run", "scripted:m", "clip", "other")
    assert status == 0
    text = shown.decode()
    assert "\\x1b]52;c;Z2l0\\x07" in text
    assert "[red]x[/red] \\x9b2J end" in text
    assert "\x1b]" not in text
    assert "\x9b" not in text
    assert "\x07" not in text


def test_errors_on_a_terminal_are_harmless(program: RealProgram) -> None:
    shown, status = program.on_terminal("run", f"/no/such/{CLIPBOARD}.gguf", "x")
    assert status == 1
    assert b"\\x1b]52;c;Z2l0\\x07.gguf" in shown
    assert b"\x1b" not in shown
    shown, status = program.on_terminal("run", "scripted:m", f"--{CLIPBOARD}")
    assert status == 2
    assert b"\x1b" not in shown


def test_plugins_on_a_terminal_are_harmless(program: RealProgram) -> None:
    program.site.plugin("odd", f"raise ValueError({CLIPBOARD + '[red]'!r})")
    shown, status = program.on_terminal("plugins", "-v")
    assert status == 0
    assert b"\x1b]" not in shown
    assert shown.count(b"\\x1b]52;c;Z2l0\\x07[red]") >= 2


def test_a_bug_on_a_terminal_is_harmless(program: RealProgram) -> None:
    program.site.plugin(
        "failing",
        f"""
        import click, laneway

        @click.command()
        def fail():
            "Fail."
            raise RuntimeError({CLIPBOARD!r})

        @laneway.hookimpl
        def laneway_plugin():
            return laneway.PluginSpec(name="failing", commands=[fail])
        """,
    )
    shown, status = program.on_terminal("fail")
    assert status == 1
    assert b"Traceback (most recent call last):" in shown
    assert b"RuntimeError: copy" not in shown
    assert b"RuntimeError: \\x1b]52;c;Z2l0\\x07" in shown
    assert b"\x1b" not in shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn() -> tuple[rich.console.Console, io.StringIO]:
    """A console without colours that is a terminal, and what it is given."""
    screen = io.StringIO()
    return rich.console.Console(file=screen, force_terminal=True, width=100, height=30, color_system=None), screen


@pytest.mark.parametrize("where", ["file", "standard input"])
def test_a_translation_on_a_terminal_is_harmless(tmp_path: Path, where: str) -> None:
    order = "Translate from German into English. Answer with the translation and nothing else."
    answer = f"[red]one[/red] {CLIPBOARD} :smile:"
    program = RealProgram.make(tmp_path, {CHAT.format(f"{order}\n\neins"): answer})
    path = tmp_path / f"e{CLIPBOARD[:4]}ns"
    path.write_text("eins\r\n")
    args = ["translate", "scripted:m", "--from", "de", "--to", "en"]
    if where == "file":
        shown, status = program.on_terminal(*args, str(path))
    else:
        with path.open("rb") as file:
            shown, status = program.on_terminal(*args, stdin=file)
    assert status == 0
    assert b"[red]one[/red] \\x1b]52;c;Z2l0\\x07 :smile:\r\n" in shown
    assert b"\x1b]" not in shown
    assert b"\\x0d" not in shown


def test_what_is_logged_on_a_terminal_is_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    record = logging.LogRecord("laneway.llama", logging.WARNING, "", 1, "named %s", (CLIPBOARD,), None)
    for stream, line in ((Terminal(), "named \\x1b]52;c;Z2l0\\x07\n"), (io.StringIO(), f"named {CLIPBOARD}\n")):
        monkeypatch.setattr("sys.stderr", stream)
        _cli._StandardError().emit(record)
        assert stream.getvalue() == f"laneway: warning: {line}"


def test_the_demo_on_a_terminal_is_harmless() -> None:
    console, screen = drawn()
    picture = _demo.Picture(console)
    picture.begin([_demo.Chat(f"chat-{number}", "ask", text=CLIPBOARD, status=CLIPBOARD) for number in range(4)])
    picture.happened(1.0, f"an error: {CLIPBOARD}")
    console.print(picture.draw())
    assert "an error: \\x1b]52;c;Z2l0\\x07" in screen.getvalue()
    assert "\x1b]" not in screen.getvalue()
    assert "\x07" not in screen.getvalue()


def test_names_beside_a_bar_are_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    console, screen = drawn()
    with _pull._bar(f"model{CLIPBOARD}", console) as show:
        show(PullProgress(stage="fetching", done=1, total=2, part=1, parts=1))
    monkeypatch.setattr(rich.console, "Console", lambda **options: console)
    with _finetune_command._shown(f"adapter{CLIPBOARD}"):
        pass
    assert "fetching model\\x1b]52" in screen.getvalue()
    assert "adapter\\x1b]52" in screen.getvalue()
    assert "\x1b]" not in screen.getvalue()


def test_a_table_of_caches_on_a_terminal_is_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        key, model, tokens, bytes, age, damage = f"chats/{CLIPBOARD}\n", f"m{CLIPBOARD}", 5, 7, 1.0, None

    monkeypatch.setattr("sys.stdout", Terminal())
    assert _cache._row(Entry())[:2] == ("chats/\\x1b]52;c;Z2l0\\x07\\x0a", "m\\x1b]52;c;Z2l0\\x07")  # type: ignore[arg-type]
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert _cache._row(Entry())[0] == Entry.key  # type: ignore[arg-type]


# Encodings.


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "cp1252"])
def test_an_answer_survives_a_narrow_encoding(program: RealProgram, encoding: str) -> None:
    done = program.run("run", "scripted:m", "wide", env=environment(PYTHONIOENCODING=encoding))
    expected = f"{ANSWERS['wide']}\n".encode(encoding, "backslashreplace")
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, b"")


def test_an_error_handler_of_the_user_holds(program: RealProgram) -> None:
    done = program.run("run", "scripted:m", "wide", env=environment(PYTHONIOENCODING="ascii:replace"))
    assert (done.returncode, done.stdout, done.stderr) == (0, b"? ? ?\n", b"")


def test_answers_side_by_side_survive_a_narrow_terminal(program: RealProgram) -> None:
    shown, status = program.on_terminal("run", "scripted:m", "wide", "clip", PYTHONIOENCODING="latin-1")
    assert status == 0
    assert "é \\u4f60 \\U0001f642".encode("latin-1") in shown


@pytest.mark.parametrize("args", [["run", "scripted:m", "\udcff"], ["run", "scripted:m", "-"]])
def test_a_prompt_that_is_not_utf_8_is_told_where(program: RealProgram, args: list[str]) -> None:
    done = program.run(*args, stdin=None, input=b"one\ntw\xff")
    (line,) = lines(done.stderr)
    assert (done.returncode, done.stdout) == (2, b"")
    what, place = ("standard input", "byte 6") if "-" in args else ("prompt 1", "byte 0")
    assert line.startswith(f"laneway: error: {what} is not UTF-8: {place} (0xff)")


def test_a_prompt_is_read_in_the_encoding_of_standard_input(program: RealProgram) -> None:
    settings = environment(PYTHONIOENCODING="latin-1")
    done = program.run("run", "--raw", "scripted:m", "-", stdin=None, input=b"wide\r\n", env=settings)
    assert (done.returncode, done.stdout.decode("latin-1")) == (0, "é \\u4f60 \\U0001f642\n")


# Streams that are closed or full.


COMMANDS = [
    ["--version"],
    ["--help"],
    ["run", "--help"],
    ["run", "scripted:m", "clip"],
    ["run", "scripted:m", "clip", "other"],
    ["plugins"],
    ["plugins", "--json"],
    ["pull", "--list"],
    ["cache", "list"],
    ["demo", "--model", "scripted:m"],
]


@pytest.mark.parametrize("args", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(
    ("redirection", "what"),
    [(">&-", "it is closed; open it, or redirect it, such as to /dev/null"), (">/dev/full", "No space left on device")],
)
def test_an_output_that_takes_nothing_is_one_line(
    program: RealProgram, tmp_path: Path, args: list[str], redirection: str, what: str
) -> None:
    if "/dev/full" in redirection and not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    done = program.with_redirections(redirection, *args)
    found = lines(done.stderr)
    assert found[-1] == f"laneway: error: standard output: {what}"
    assert "Traceback" not in done.stderr.decode()
    assert "Exception ignored" not in done.stderr.decode()
    assert len(found) == 1
    assert done.returncode == 1


@pytest.mark.parametrize("args", COMMANDS, ids=" ".join)
def test_a_reader_that_has_gone_is_status_1_without_a_word(program: RealProgram, args: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = program.run(*args, stdout=writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


def test_standard_input_that_is_closed_is_one_line(program: RealProgram) -> None:
    for command in (["run", "scripted:m", "-"], ["translate", "scripted:m", "--to", "de"]):
        done = program.with_redirections("<&-", *command)
        assert (done.returncode, done.stdout) == (1, b"")
        assert lines(done.stderr) == [
            "laneway: error: standard input: it is closed; open it, or redirect it, such as to /dev/null"
        ]
    done = program.with_redirections("<&-", "run", "scripted:m", "wide")
    assert (done.returncode, done.stdout.decode(), done.stderr) == (0, "é 你 🙂\n", b"")


@pytest.mark.slow
@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
def test_without_standard_error_the_status_still_tells(program: RealProgram, redirection: str) -> None:
    done = program.with_redirections(redirection, "run", "/no/such/model.gguf", "x")
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"")
    done = program.with_redirections(redirection, "run", "scripted:m", "wide")
    assert (done.returncode, done.stdout.decode()) == (0, "é 你 🙂\n")


def test_no_file_gets_the_number_of_a_stream_that_is_closed(program: RealProgram, tmp_path: Path) -> None:
    program.site.plugin(
        "numbers",
        f"""
        import json
        import click, laneway

        @click.command()
        def numbers():
            "Open a file and tell its number."
            with open({str(tmp_path / "opened")!r}, "w") as file:
                file.write(json.dumps(file.fileno()))

        @laneway.hookimpl
        def laneway_plugin():
            return laneway.PluginSpec(name="numbers", commands=[numbers])
        """,
    )
    done = program.with_redirections("<&- >&- 2>&-", "numbers")
    assert done.returncode == 0
    assert json.loads((tmp_path / "opened").read_text()) > 2


# Signals.


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGQUIT"])
def test_a_signal_in_the_live_view_leaves_the_cursor_shown(tmp_path: Path, name: str) -> None:
    answers = {CHAT.format("forever"): ANSWERS["forever"]}
    program = RealProgram.make(tmp_path, answers, seconds=0.05)
    ours, theirs = pty.openpty()
    settings = environment(TERM="xterm", COLUMNS="100", LINES="30")
    command = program.command("run", "scripted:m", "-n", "100", "--context-size", "2000", "forever", "forever")
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=settings, cwd=tmp_path, start_new_session=True
    ) as process:
        os.close(theirs)
        shown = b""
        while b"word" not in shown:
            block = os.read(ours, 1 << 16)
            assert block
            shown += block
        process.send_signal(getattr(signal, name))
        shown += read_all(ours)
    os.close(ours)
    # It dies of the signal: 128 and its number in a shell.
    assert process.returncode == -getattr(signal, name)
    switches = re.findall(rb"\x1b\[\?25[lh]", shown)
    assert switches[0] == b"\x1b[?25l"
    assert switches[-1] == _signals.SHOW_CURSOR


def test_a_signal_that_is_ignored_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with _signals.cursor_restored():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_version_is_that_of_the_package(program: RealProgram) -> None:
    assert program.run("--version").stdout.decode() == f"laneway {laneway.__version__}\n"


@pytest.mark.parametrize("where", ["option", "variable"])
@pytest.mark.parametrize("args", [["cache", "list"], ["cache", "prune"], ["pull", "--list"], ["pull", "smollm2"]])
def test_a_cache_directory_of_no_user_is_one_line(program: RealProgram, args: list[str], where: str) -> None:
    place = "~nosuchuser/x"
    if where == "option":
        done = program.run(*args, "--cache-dir", place)
    else:
        done = program.run(*args, env=environment(LANEWAY_CACHE_DIR=place))
    (line,) = lines(done.stderr)
    assert (done.returncode, done.stdout) == (1, b"")
    field = "cache_dir" if where == "option" else "LANEWAY_CACHE_DIR"
    assert line.startswith("laneway: error: ")
    assert line.endswith(f"{field}: '{place}' names the home directory of a user that there is not")


def test_a_model_of_no_user_is_one_line(program: RealProgram) -> None:
    for args in (["run", "~nosuchuser/x.gguf", "x"], ["run", "smollm2", "x"]):
        done = program.run(*args, env=environment(LANEWAY_CACHE_DIR="~nosuchuser/x"))
        assert (done.returncode, done.stdout, len(lines(done.stderr))) == (1, b"", 1)
