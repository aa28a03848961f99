"""The two pages at the root of the repository: the program runs, the commands and options exist, the links lead on."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import trio.testing

import laneway
from laneway._cli import CORE_COMMANDS
from laneway._cli import main as program
from laneway.testing import ScriptedLoader
from tests.docs.pages import DOCS, ROOT, load

README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
ROOT_PAGES = ["README.md", "CONTRIBUTING.md"]
PAGES = [*ROOT_PAGES, *sorted(path.relative_to(ROOT).as_posix() for path in DOCS.rglob("*.md"))]


async def test_the_program_runs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    autojump_clock: trio.testing.MockClock,
) -> None:
    loader = ScriptedLoader(context_size=1024, seconds_per_step=0.01, end_every=None)
    open_engine, load_model = laneway.open_engine, laneway.Engine.load_model

    async def load_scripted(engine: laneway.Engine, source: str, **options: Any) -> laneway.Model:
        assert source == "smollm2"
        return await load_model(engine, "scripted:model", **options)

    monkeypatch.setattr(laneway, "open_engine", lambda: open_engine([loader.plugin]))
    monkeypatch.setattr(laneway.Engine, "load_model", load_scripted)
    (block,) = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    source = block.replace("trio.run(main)\n", "")
    assert source != block
    path = tmp_path / "readme_program.py"
    path.write_text(source, encoding="utf-8")
    await load(path).main()
    out = capsys.readouterr().out
    for question in ("Why is the sky blue?", "Name three kinds of fruit.", "What is a lane?"):
        assert re.search(rf"^{re.escape(question)}\n  \S", out, re.MULTILINE)
    loader.assert_idle()


def test_it_asks_for_the_python_that_the_package_asks_for() -> None:
    version = PROJECT["project"]["requires-python"].removeprefix(">=")
    for page in [*ROOT_PAGES, "docs/tutorial/first-answers.md"]:
        assert f"Python {version} or newer" in (ROOT / page).read_text(encoding="utf-8")


def test_the_summary_of_the_tests_says_why_some_were_skipped() -> None:
    # Failures and errors, which are shown by default, and skips.
    assert "-rfEs" in PROJECT["tool"]["pytest"]["addopts"]
    bare = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            called = node.func.attr
            given = {keyword.arg for keyword in node.keywords}
            if (
                (called == "skip" and not node.args and "reason" not in given)
                or (called == "skipif" and "reason" not in given)
                or (called == "importorskip" and "reason" not in given)
            ):
                bare.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert bare == []


@pytest.mark.parametrize("page", ROOT_PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = [target for target in re.findall(r"\]\(([^)]*)\)", text) if not target.startswith("https://")]
    assert [target for target in targets if not (ROOT / target.partition("#")[0]).exists()] == []


@pytest.mark.parametrize("page", ROOT_PAGES)
def test_targets_of_make_exist(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"`(?:\w+=\S+ )*make ([a-z-]+)", (ROOT / page).read_text(encoding="utf-8")))
    named |= set(re.findall(r"^make ([a-z-]+)", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE))
    assert named <= targets


def test_definitions_of_the_build_are_known_to_it() -> None:
    known = "".join(
        path.read_text(encoding="utf-8", errors="replace")
        for pattern in ("CMakeLists.txt", "*.cmake", "fetch_llama.py", "pip_build.py")
        for path in (ROOT / "native").rglob(pattern)
    ) + (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    named = set()
    for page in ["CONTRIBUTING.md", "docs/howto/gpu-and-system-llama.md"]:
        named |= set(re.findall(r"\b(LANEWAY_\w+)", (ROOT / page).read_text(encoding="utf-8")))
    assert named
    # Read by the command and the engine, and not by the build alone.
    assert {name for name in named - {"LANEWAY_HYPOTHESIS_PROFILE"} if name not in known} == set()


def _uses(page: Path) -> list[tuple[str, list[str]]]:
    """The lines of a page that call ``laneway``: the command, and what comes behind it."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```(?:console|sh)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = [line.split("  #")[0] for block in blocks for line in block.splitlines()]
    lines += re.findall(r"`(laneway [^`\n]+)`", text)
    uses = []
    for line in lines:
        words = re.sub(r"'[^']*'|\"[^\"]*\"", "TEXT", line.removeprefix("$ ")).split()
        if words[:1] == ["laneway"]:
            named = [word for word in words[1:] if not word.startswith("-")]
            if named:
                uses.append((named[0], words[1:]))
    return uses


USES = [(page, command, words) for page in PAGES for command, words in _uses(ROOT / page)]


@pytest.mark.parametrize(("page", "name", "words"), USES, ids=[f"{page}: {' '.join(words)}" for page, _, words in USES])
def test_options_of_commands_exist(page: str, name: str, words: list[str]) -> None:
    with click.Context(program, info_name="laneway") as context:
        command: click.Command | None = program.get_command(context, name)
        assert command is not None, f"{page} names the command {name!r}"
        known = {option for parameter in program.params for option in parameter.opts}
        for word in words[words.index(name) + 1 :]:
            if isinstance(command, click.Group) and not word.startswith("-"):
                command = command.get_command(context, word)
                assert command is not None, f"{page} names {name} {word}"
        known |= {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    known |= {"-h", "--help", "--debug", "--version"}
    assert {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)} <= known


def test_every_command_of_the_program_is_used_on_some_page() -> None:
    assert {*CORE_COMMANDS, "finetune"} <= {name for _, name, _ in USES}
