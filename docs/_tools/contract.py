"""Writes, under each rule of the contract, links to the files that hold its tests.

    python docs/_tools/contract.py [--check]

A test belongs to each rule that its name carries: ``test_K2_A13_...`` to K2 and to A13.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "contract.md"
RULE = re.compile(r"^### (?P<number>[ARCSK]\d+)\. (?P<title>.+)$", re.MULTILINE)
_TESTS = re.compile(r"\n*^Tests: .*\n(?:\[.*\n)*", re.MULTILINE)
_WIDTH = 120


def rules(page: str) -> dict[str, str]:
    """The text of each rule by its number, without title and links."""
    found = {}
    for match in RULE.finditer(page):
        rest = page[match.end() :]
        end = re.search(r"^##", rest, re.MULTILINE)
        body = rest[: end.start()] if end else rest
        assert match["number"] not in found, f"rule {match['number']} is there twice"
        found[match["number"]] = _TESTS.sub("\n", body).strip()
    return found


def named_by_tests(folder: Path) -> dict[str, dict[Path, int]]:
    """For each rule the files whose tests name it, and how many of their tests do."""
    named: dict[str, Counter[Path]] = {}
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_"):
                for rule in set(re.findall(r"(?<=_)[ARCSK]\d+(?=_|$)", node.name)):
                    named.setdefault(rule, Counter())[path] += 1
    return {rule: dict(files) for rule, files in named.items()}


def with_links(page: str) -> str:
    """The page with a line of links at the end of each rule that has tests."""
    named = named_by_tests(ROOT / "tests")
    out = []
    at = 0
    for match in RULE.finditer(page):
        out.append(page[at : match.end()])
        rest = page[match.end() :]
        end = re.search(r"^##", rest, re.MULTILINE)
        length = end.start() if end else len(rest)
        body = _TESTS.sub("\n", rest[:length]).strip()
        out.append(f"\n\n{body}\n\n{_links(named.get(match['number'], {}))}\n")
        if end:
            out.append("\n")
        at = match.end() + length
    out.append(page[at:])
    return "".join(out)


def _links(files: dict[Path, int]) -> str:
    words = ["Tests:"]
    for path, count in files.items():
        inside = path.relative_to(ROOT).as_posix()
        words.append(f"[{inside.removeprefix('tests/')} ({count})](../{inside}),")
    words[-1] = words[-1].rstrip(",")
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + 1 + len(word) > _WIDTH and lines[-1] != "Tests:":
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Write the links, or with ``--check`` say whether they are up to date."""
    page = PAGE.read_text("utf-8")
    wanted = with_links(page)
    if page == wanted:
        return 0
    if "--check" in arguments:
        print(f"{PAGE.name} is not up to date: run python docs/_tools/contract.py")
        return 1
    PAGE.write_text(wanted, "utf-8")
    print(f"{PAGE.name} written")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
