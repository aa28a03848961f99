"""Every rule of the contract has a test that names it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROW = re.compile(r"^\| (?P<rule>[A-Z]\d+) \| (?P<title>[^|]+) \| (?P<state>held|planned) \|$", re.MULTILINE)


def rules() -> dict[str, str]:
    """Rule number to state, as the documentation lists them."""
    found = {row["rule"]: row["state"] for row in ROW.finditer((ROOT / "docs/contract.md").read_text("utf-8"))}
    assert len(found) == 40, "the table of the contract has lost or gained rules, or a row is malformed"
    return found


def named_by_tests() -> dict[str, list[str]]:
    """Rule number to the test functions that carry it in their name."""
    named: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_"):
                for rule in re.findall(r"(?<=_)[ARCSK]\d+(?=_|$)", node.name):
                    named.setdefault(rule, []).append(f"{path.relative_to(ROOT)}::{node.name}")
    return named


@pytest.mark.parametrize("rule", [rule for rule, state in rules().items() if state == "held"])
def test_a_rule_that_is_held_has_a_test(rule: str) -> None:
    assert named_by_tests().get(rule), f"no test is named test_{rule}_...: write one, or call the rule planned"


def test_tests_name_only_rules_that_there_are() -> None:
    unknown = {rule: tests for rule, tests in named_by_tests().items() if rule not in rules()}
    assert not unknown
