"""Every rule of the contract has a text, a test that names it, and links to its tests."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest

from laneway._errors import RejectionReason
from laneway._plugins import PluginHost

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/contract.md").read_text("utf-8")


def _tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("contract_tool", ROOT / "docs" / "_tools" / "contract.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOL = _tool()
RULES: dict[str, str] = TOOL.rules(PAGE)
TESTS: dict[str, dict[Path, int]] = TOOL.named_by_tests(ROOT / "tests")


def test_the_contract_has_all_its_rules_in_order() -> None:
    counts = {"A": 15, "R": 6, "C": 11, "S": 2, "K": 6}
    assert list(RULES) == [f"{letter}{number}" for letter, count in counts.items() for number in range(1, count + 1)]


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_has_a_text(rule: str) -> None:
    # A title alone promises nothing that a test could be compared with.
    assert len(RULES[rule].split()) >= 6, f"rule {rule} has no text"


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_has_a_test(rule: str) -> None:
    assert TESTS.get(rule), f"no test is named test_{rule}_...: write one"


def test_tests_name_only_rules_that_there_are() -> None:
    assert {rule: files for rule, files in TESTS.items() if rule not in RULES} == {}


def test_comments_and_docs_cite_only_rules_that_there_are() -> None:
    cited: dict[str, str] = {}
    files = [path for root in ("engine", "plugins", "native") for path in (ROOT / root).rglob("*.py")]
    files += (ROOT / "docs").rglob("*.md")
    for path in files:
        for citation in re.findall(r"\brules? ((?:[ARCSK]\d+(?:, | and | to |-)?)+)", path.read_text("utf-8")):
            for rule in re.findall(r"[ARCSK]\d+", citation):
                cited[rule] = path.name
    assert len(cited) > 20
    assert {rule: name for rule, name in cited.items() if rule not in RULES} == {}


def test_each_rule_links_to_its_tests() -> None:
    assert TOOL.with_links(PAGE) == PAGE, "run python docs/_tools/contract.py"


def test_the_tool_finds_what_is_stale(capsys: pytest.CaptureFixture[str], monkeypatch: Any, tmp_path: Path) -> None:
    page = tmp_path / "contract.md"
    page.write_text(PAGE.replace("Tests: ", "Tests: [gone.py (1)](../gone.py), "), "utf-8")
    monkeypatch.setattr(TOOL, "PAGE", page)
    assert TOOL.main(["--check"]) == 1
    assert "is not up to date" in capsys.readouterr().out
    assert TOOL.main([]) == 0
    assert page.read_text("utf-8") == PAGE
    assert TOOL.main(["--check"]) == 0


def test_the_built_in_operations_are_those_of_the_table() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| `(\w+)` \| `(\w+)` \| (yes|no) \|$", PAGE, re.MULTILINE)
    table = {kind: (scope, use, overflow, unique == "yes") for kind, scope, use, overflow, unique in rows}
    host = PluginHost.load([], strict=True)
    declared = {
        operation.kind: (operation.scope.value, operation.use.value, operation.overflow.value, operation.unique)
        for record in host.records
        if record.origin == "built-in"
        for operation in record.operations
    }
    assert table == declared


@pytest.mark.parametrize("reason", get_args(RejectionReason))
def test_A4_names_every_reason_of_a_refusal(reason: str) -> None:
    assert f"`{reason}`" in RULES["A4"]
