"""The program as a whole: its help, its version, and how commands fail."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

import laneway
from laneway._cli import CORE_COMMANDS, main
from laneway._plugins import RESERVED_COMMANDS
from tests.plugins_host.fake_site import FakeSite, fake_site

FAILING = """
    import errno, logging, os, signal, sys

    import click
    import laneway
    import trio

    @click.command()
    @click.argument("how")
    def fail(how):
        "Fail in one of many ways."
        if how == "laneway":
            raise laneway.ModelLoadError("x.gguf", "the file has 37 bytes\\n  and no header")
        if how == "missing file":
            open("/no/such/file")
        if how == "bare os error":
            raise OSError("the disk is on fire")
        if how == "value":
            raise ValueError("parallel must be an integer from 1 to 256, not 0")
        if how == "bug":
            raise KeyError("x")
        if how == "usage":
            raise click.BadParameter("must be odd")
        if how == "click":
            raise click.ClickException("no such thing")
        if how == "ctrl-c":
            raise KeyboardInterrupt
        if how == "end of input":
            raise EOFError
        if how == "exit 7":
            click.get_current_context().exit(7)
        if how == "returns":
            return 9
        if how == "group":
            errors = [laneway.ModelLoadError("a", "gone"), OSError(errno.ENOSPC, "No space left on device", "/tmp/x")]
            raise ExceptionGroup("two", [errors[0], ExceptionGroup("one", [errors[1]])])
        if how == "group with a bug":
            raise ExceptionGroup("two", [laneway.ModelLoadError("a", "gone"), KeyError("x")])
        if how == "warn":
            logging.getLogger("laneway.engine").warning("something %s", "odd")
            logging.getLogger("laneway.engine").debug("a detail")
        if how == "flood":
            for _ in range(100_000):
                print("x" * 100)
        if how == "one line":
            print("x")
        if how == "signal":
            async def run():
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(trio.sleep_forever)
                    signal.raise_signal(signal.SIGINT)
            trio.run(run)

    @laneway.hookimpl
    def laneway_plugin():
        return laneway.PluginSpec(name="failing", commands=[fail])
"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[FakeSite]:
    with fake_site(tmp_path) as site:
        site.plugin("failing", FAILING)
        yield site


def run(*args: str) -> Result:
    return CliRunner().invoke(main, list(args))


def start(*args: str, site: FakeSite, code: str = "from laneway._cli import main; main()") -> list[str]:
    return [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(site.path)!r}); {code}", *args]


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ("laneway", "laneway: error: cannot load model 'x.gguf': the file has 37 bytes and no header"),
        ("missing file", "laneway: error: /no/such/file: No such file or directory"),
        ("bare os error", "laneway: error: the disk is on fire"),
        ("value", "laneway: error: parallel must be an integer from 1 to 256, not 0 (--debug shows where)"),
        ("click", "laneway: error: no such thing"),
    ],
)
def test_an_error_is_one_line_and_status_1(site: FakeSite, how: str, line: str) -> None:
    result = run("fail", how)
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", line + "\n")


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["fail", "usage"], "laneway: error: Invalid value: must be odd (see: laneway fail --help)"),
        (["fail", "--nope"], "laneway: error: No such option '--nope' (see: laneway fail --help)"),
        (["fail"], "laneway: error: Missing argument 'HOW' (see: laneway fail --help)"),
        (["--nope"], "laneway: error: No such option '--nope' (see: laneway --help)"),
        (["fial"], "laneway: error: no command 'fial'; did you mean fail? (see: laneway --help)"),
        (
            ["xyzzy"],
            "laneway: error: no command 'xyzzy'; there are: cache, demo, fail, plugins, pull, run, translate "
            "(see: laneway --help)",
        ),
    ],
)
def test_a_wrong_use_is_one_line_and_status_2(site: FakeSite, args: list[str], line: str) -> None:
    result = run(*args)
    # Older releases of click put a colon behind "No such option".
    assert result.stderr.replace("option: --nope", "option '--nope'") == line + "\n"
    assert (result.exit_code, result.stdout) == (2, "")


@pytest.mark.parametrize("switch", ["option", "variable"])
def test_debug_shows_the_traceback_above_the_line(site: FakeSite, switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if switch == "variable":
        monkeypatch.setenv("LANEWAY_DEBUG", "1")
    result = run(*(["--debug"] if switch == "option" else []), "fail", "value")
    lines = result.stderr.splitlines()
    assert result.exit_code == 1
    assert "Traceback (most recent call last):" in lines
    assert lines[-2].startswith("ValueError: parallel must be")
    assert lines[-1] == "laneway: error: parallel must be an integer from 1 to 256, not 0"


def test_a_bug_keeps_its_traceback(site: FakeSite) -> None:
    result = run("fail", "bug")
    assert isinstance(result.exception, KeyError)
    assert result.stderr == ""
    result = run("fail", "group with a bug")
    assert isinstance(result.exception, ExceptionGroup)


def test_each_member_of_a_group_gets_its_line(site: FakeSite) -> None:
    result = run("fail", "group")
    assert result.exit_code == 1
    assert result.stderr == (
        "laneway: error: cannot load model 'a': gone\nlaneway: error: /tmp/x: No space left on device\n"
    )


def test_ctrl_c_is_130_without_a_traceback(site: FakeSite) -> None:
    result = run("fail", "ctrl-c")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "laneway: interrupted\n")


def test_ctrl_c_while_plugins_are_imported_is_130_too(site: FakeSite) -> None:
    site.plugin("slow", "raise KeyboardInterrupt")
    result = run("--help")
    assert (result.exit_code, result.stderr.strip()) == (130, "laneway: interrupted")


def test_an_end_of_input_is_an_abort(site: FakeSite) -> None:
    result = run("fail", "end of input")
    assert (result.exit_code, result.stderr.strip()) == (1, "laneway: error: the input ended too early")


def test_a_command_chooses_its_status_by_exit_only(site: FakeSite) -> None:
    assert run("fail", "exit 7").exit_code == 7
    assert run("fail", "returns").exit_code == 0


def test_warnings_are_shown_and_details_with_debug(site: FakeSite) -> None:
    assert run("fail", "warn").stderr == "laneway: warning: something odd\n"
    assert run("--debug", "fail", "warn").stderr.splitlines()[-2:] == [
        "laneway: warning: something odd",
        "laneway: debug: a detail",
    ]


def test_without_a_command_the_help_is_shown(site: FakeSite) -> None:
    result = run()
    assert result.output.startswith("Usage: laneway [OPTIONS] COMMAND")
    assert "error" not in result.output


def test_the_help_lists_the_programs_commands_and_those_of_plugins(site: FakeSite) -> None:
    result = run("--help")
    assert (result.exit_code, result.stderr) == (0, "")
    own, _, others = result.stdout.partition("Commands of plugins:\n")
    assert [line.split()[0] for line in own.partition("Commands:\n")[2].splitlines() if line.strip()] == sorted(
        CORE_COMMANDS
    )
    assert others == "  fail  Fail in one of many ways.\n"


def test_the_help_says_that_a_plugin_is_broken(site: FakeSite) -> None:
    site.plugin("bad", "import no_such_module_anywhere")
    assert run("--help").stdout.endswith("\nNote: 1 plugin is broken, see: laneway plugins.\n")
    assert "(1 plugin is broken, see: laneway plugins)" in run("xyzzy").stderr


def test_a_command_of_the_program_needs_no_plugin(site: FakeSite) -> None:
    site.plugin("slow", "raise KeyboardInterrupt")  # ends whoever imports it
    result = run("plugins", "--help")
    assert (result.exit_code, result.stderr) == (0, "")


def test_the_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"laneway {laneway.__version__}\n")


@pytest.mark.parametrize("name", CORE_COMMANDS)
def test_the_table_of_commands_tells_the_truth(name: str) -> None:
    command = CORE_COMMANDS[name].load()
    assert isinstance(command, click.Command)
    assert command.name == name
    assert command.get_short_help_str(200) == CORE_COMMANDS[name].summary
    assert name in RESERVED_COMMANDS  # or a plugin could declare what is never reached


def test_the_help_imports_neither_a_command_nor_the_native_library(site: FakeSite) -> None:
    code = (
        "import runpy, laneway._cli as cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "own = {'laneway._cli._signals', 'laneway._cli._streams'}\n"
        "names = [name for name in sys.modules if name not in own]\n"
        "print([name for name in names if name.startswith(('laneway_native', 'laneway._cli.', 'rich'))])"
    )
    done = subprocess.run(start(site=site, code=f"exec({code!r})"), capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


posix_only = pytest.mark.skipif(sys.platform == "win32", reason="signals and pipes as POSIX has them")


@posix_only
def test_ctrl_c_in_a_trio_program_is_130(site: FakeSite) -> None:
    done = subprocess.run(start("fail", "signal", site=site), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (130, "laneway: interrupted")


@posix_only
@pytest.mark.parametrize("how", ["flood", "one line"])
def test_a_reader_that_has_gone_is_no_error(site: FakeSite, how: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    # What is printed must wait in the buffer for the last flush: that is the harder case.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = start("fail", how, site=site)
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, env=environment)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")
