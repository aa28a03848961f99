"""``laneway plugins``: what it lists, in which form, and its exit status."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from laneway._cli import main
from tests.plugins_host.fake_site import SHOUT, FakeSite, fake_site

TWO = """
    import attrs
    import click
    import laneway
    from tests.plugins_host.fake_site import operation

    @attrs.frozen
    class Options: ...

    async def load(source, parallel, options): ...

    @click.command()
    def weigh(): ...

    @laneway.hookimpl
    def laneway_plugin():
        return laneway.PluginSpec(
            name="two",
            operations=[
                operation("train", scope="model", use="exclusive", unique=True),
                operation("look", use="none", needs_decoder=False),
            ],
            loaders=[laneway.Loader(name="scales", accepts=lambda source: False, load=load, options_type=Options)],
            commands=[weigh],
        )

    @laneway.hookimpl
    def laneway_request_ended(record): ...
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSite]:
    with fake_site(tmp_path) as site:
        site.plugin("two", TWO, version="2.0")
        site.plugin("shout", SHOUT)
        site.plugin("bad", "import no_such_module_anywhere")
        site.plugin("off", SHOUT)
        monkeypatch.setenv("LANEWAY_DISABLE_PLUGINS", "off")
        yield site


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["plugins", *args])


def test_plain_lines_where_there_is_no_terminal(site: FakeSite) -> None:
    result = run()
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == (
        "name   version  distribution   kinds        scope           use              loaders  state\n"
        "bad    1.0      laneway-bad    -            -               -                -        broken\n"
        "off    1.0      laneway-off    -            -               -                -        disabled\n"
        "shout  1.0      laneway-shout  shout        request         shared           -        loaded\n"
        "two    2.0      laneway-two    train, look  model, request  exclusive, none  scales   loaded\n"
        "\n"
        "bad (from laneway-bad) is broken: it cannot be imported: ModuleNotFoundError: No module named "
        "'no_such_module_anywhere'\n"
    )


def test_verbose_shows_tracebacks_and_why_plugins_are_disabled(site: FakeSite) -> None:
    result = run("-v")
    assert result.exit_code == 0
    assert "\nTraceback (most recent call last):\n" in result.stdout
    assert "    import no_such_module_anywhere\n" in result.stdout
    assert "off (from laneway-off) is disabled: switched off by LANEWAY_DISABLE_PLUGINS\n" in result.stdout


@pytest.mark.parametrize("form", [[], ["--json"], ["-v"]])
def test_strict_is_status_1_where_one_is_broken(
    site: FakeSite, form: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("--strict", *form).exit_code == 1
    assert run("--strict", *form).stdout == run(*form).stdout
    monkeypatch.setenv("LANEWAY_DISABLE_PLUGINS", "off,bad")
    assert run("--strict", *form).exit_code == 0


def test_json_says_everything(site: FakeSite) -> None:
    result = run("--json")
    assert result.exit_code == 0
    bad, off, shout, two = json.loads(result.stdout)
    assert two == {
        "name": "two",
        "origin": "installed",
        "distribution": "laneway-two",
        "version": "2.0",
        "state": "loaded",
        "operations": [
            {
                "kind": "train",
                "scope": "model",
                "use": "exclusive",
                "lane_group": "",
                "unique": True,
                "needs_decoder": True,
            },
            {
                "kind": "look",
                "scope": "request",
                "use": "none",
                "lane_group": "",
                "unique": False,
                "needs_decoder": False,
            },
        ],
        "loaders": ["scales"],
        "commands": ["weigh"],
        "observes": ["laneway_request_ended"],
        "reason": "",
        "traceback": "",
    }
    assert [record["state"] for record in (bad, off, shout)] == ["broken", "disabled", "loaded"]
    assert bad["operations"] == []
    assert bad["reason"].endswith("No module named 'no_such_module_anywhere'")
    assert bad["traceback"].startswith("Traceback (most recent call last):\n")


def test_nothing_installed_is_no_error(tmp_path: Path) -> None:
    with fake_site(tmp_path):
        assert run().stdout.split() == ["name", "version", "distribution", "kinds", "scope", "use", "loaders", "state"]
        assert json.loads(run("--json").stdout) == []


def on_a_terminal(site: FakeSite, columns: int) -> str:
    """What the command prints on a pseudo-terminal of this width."""
    program = f"import sys; sys.path.insert(0, {str(site.path)!r}); from laneway._cli import main; main()"
    ours, theirs = os.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm", "NO_COLOR": "1"}
    process = subprocess.Popen([sys.executable, "-c", program, "plugins"], stdout=theirs, env=environment)
    os.close(theirs)
    output = b""
    try:
        while data := os.read(ours, 65536):
            output += data
    except OSError:
        pass  # how Linux says that the other side has closed
    finally:
        os.close(ours)
    assert process.wait() == 0
    # Without the codes for bold and dim.
    return re.sub(r"\x1b\[[0-9;]*m", "", output.decode())


posix_only = pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")


@posix_only
def test_a_table_on_a_terminal(site: FakeSite) -> None:
    # A name in brackets would be obeyed as markup, were it not kept from rich's parser.
    site.add("laneway-odd", {}, {"[red]odd": "no_such_module_anywhere"})
    lines = [line.split() for line in on_a_terminal(site, 150).splitlines()]
    assert ["two", "2.0", "laneway-two", "train", "model", "exclusive", "scales", "loaded"] in lines
    assert ["look", "request", "none"] in lines
    assert any(line[:1] == ["[red]odd"] and line[-1:] == ["broken"] for line in lines)


@posix_only
def test_a_narrow_terminal_loses_no_letter(site: FakeSite) -> None:
    assert "…" not in on_a_terminal(site, 60)
