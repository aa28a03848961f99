"""What the pages say holds: their code is that of tested files, their links lead somewhere, their commands exist."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from laneway._cli import CORE_COMMANDS
from laneway._plugins import RESERVED_COMMANDS
from laneway._sources import CATALOGUE
from tests.docs.pages import DOCS, ROOT
from tests.test_architecture import PURE

PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
TEMPLATE_README = "plugins/template/README.md"
SIGNATURES = {"reference/api.md", "reference/hooks.md", "reference/testing.md"}
"""Pages with tests of their own for the code that they show."""


@attrs.frozen
class Block:
    """A fenced block: its language, its text, and the file that it says it is from."""

    line: int
    language: str
    text: str
    source: str | None


def blocks(page: str) -> Iterator[Block]:
    text = (DOCS / page).read_text(encoding="utf-8")
    pattern = r"(?:^<!-- from (?P<source>\S+) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$"
    for match in re.finditer(pattern, text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, match.start()) + 1
        yield Block(line, match["language"], match["text"], match["source"])


def _holds(file: Path, wanted: str) -> bool:
    """Whether the lines stand together in the file, at whatever indentation."""
    lines, block = file.read_text(encoding="utf-8").splitlines(), textwrap.dedent(wanted).splitlines()
    for start in range(len(lines) - len(block) + 1):
        part = textwrap.dedent("\n".join(lines[start : start + len(block)]))
        if part.splitlines() == block:
            return True
    return False


FROM_FILES = [(page, block) for page in PAGES for block in blocks(page) if block.source is not None]


@pytest.mark.parametrize(("page", "block"), FROM_FILES, ids=[f"{page}:{block.line}" for page, block in FROM_FILES])
def test_code_is_that_of_the_file_that_it_names(page: str, block: Block) -> None:
    assert block.source is not None
    file = ROOT / block.source
    assert file.is_file()
    assert _holds(file, block.text), f"docs/{page}:{block.line} differs from {block.source}"


def test_a_block_that_differs_is_found() -> None:
    file = DOCS / "examples" / "quickstart.py"
    assert _holds(file, "nursery.start_soon(ask, model, name, 64)\n")
    assert not _holds(file, "nursery.start_soon(ask, model, name, 65)\n")
    assert len(FROM_FILES) > 15


@pytest.mark.parametrize("page", [page for page in PAGES if page not in {*SIGNATURES, TEMPLATE_README}])
def test_all_python_on_a_page_is_from_a_file(page: str) -> None:
    assert [block.line for block in blocks(page) if block.language == "python" and block.source is None] == []


def test_the_readme_of_the_template_is_python() -> None:
    (program,) = [block for block in blocks(TEMPLATE_README) if block.language == "python"]
    compile(program.text, TEMPLATE_README, "exec")


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as common renderers make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    file = DOCS / page
    # Code may hold brackets and parentheses of its own.
    text = re.sub(r"```.*?```|`[^`\n]*`", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
    bad = []
    for target in re.findall(r"\]\(([^)]*)\)", text):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        there = (file.parent / path).resolve() if path else file
        if not there.exists() or (anchor and anchor not in _anchors(there)):
            bad.append(target)
    assert bad == []


def test_every_page_is_reached_from_the_index() -> None:
    reached, todo = set(), [DOCS / "index.md"]
    while todo:
        page = todo.pop()
        if page in reached or not page.is_file():
            continue
        reached.add(page)
        for target in re.findall(r"\]\(([^)#]+\.md)", page.read_text(encoding="utf-8")):
            todo.append((page.parent / target).resolve())
    assert {DOCS / page for page in PAGES} - reached - {DOCS / TEMPLATE_README} == set()


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist(page: str) -> None:
    text = "\n".join(block.text for block in blocks(page) if block.language in ("", "console", "sh", "text"))
    text += "\n".join(re.findall(r"`([^`\n]+)`", (DOCS / page).read_text(encoding="utf-8")))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    assert set(re.findall(r"(?<![\w/-])make ([a-z]+)", text)) <= targets
    commands = set(re.findall(r"^(?:\$ )?laneway (?:--\w+ )*([a-z]+)\b", text, re.MULTILINE))
    assert commands <= {*CORE_COMMANDS, *RESERVED_COMMANDS, "translate", "finetune"}


def test_the_house_lists_every_module_of_the_engine() -> None:
    text = (DOCS / "explanation" / "design.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*`) \| (core|shell) \|", text, re.MULTILINE)
    listed = {name: kind for names, kind in rows for name in re.findall(r"`(\w+)`", names)}
    modules = {path.stem for path in (ROOT / "engine" / "laneway").glob("*.py")} - {"__init__", "hookspecs"}
    packages = {path.parent.name for path in (ROOT / "engine" / "laneway").glob("_*/__init__.py")} - {"_cli"}
    assert set(listed) == modules | packages
    for module in PURE:
        name = module.removeprefix("laneway.")
        assert name not in listed or listed[name] == "core"


def test_files_that_the_design_names_exist() -> None:
    text = (DOCS / "explanation" / "design.md").read_text(encoding="utf-8")
    files = set(re.findall(r"`((?:engine|plugins|native|tests)/[\w./]+\.\w+)`", text))
    assert len(files) > 10
    assert {name for name in files if not (ROOT / name).is_file()} == set()
    # Modules that are named without their folder.
    named = set(re.findall(r"`(_[a-z_]+)`", text))
    folders = ("engine/laneway", "plugins/laneway_plugins", "native/laneway_native")
    there = {path.stem for folder in folders for path in (ROOT / folder).glob("_*")}
    assert named <= there


def test_the_catalogue_is_listed() -> None:
    text = (DOCS / "howto" / "models.md").read_text(encoding="utf-8")
    assert set(CATALOGUE) <= set(re.findall(r"^\| `([\w-]+)` \|", text, re.MULTILINE))
