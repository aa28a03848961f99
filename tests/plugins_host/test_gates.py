"""A hook ships with a test and with its exact signature in the reference; the example in there runs."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import attrs
import pytest
import trio

from laneway import hookspecs
from laneway._plugins import RESERVED_COMMANDS, PluginHost
from laneway._records import RequestRecord
from tests.plugins_host.fake_site import FakeSite

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "hooks.md"
HOOKS = [name for name in hookspecs.__all__ if name.startswith("laneway_")]


def _signature(name: str) -> str:
    # Annotations are text here, and are shown in quotes.
    return name + str(inspect.signature(getattr(hookspecs, name))).replace("'", "")


def test_every_hook_of_the_module_is_exported() -> None:
    marked = [name for name, value in vars(hookspecs).items() if hasattr(value, "laneway_spec")]
    assert sorted(marked) == HOOKS
    assert HOOKS


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_is_in_the_reference_with_its_exact_signature(name: str) -> None:
    headings = re.findall(r"^### `(.*)`$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert _signature(name) in headings


def test_the_reference_has_no_hook_that_is_gone() -> None:
    headings = re.findall(r"^### `(.*)`$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(headings) == sorted(_signature(name) for name in HOOKS)


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_has_a_test(name: str) -> None:
    tests = {
        node.name
        for path in Path(__file__).parent.glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert any(test == f"test_hook_{name}" or test.startswith(f"test_hook_{name}_") for test in tests)


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_is_typed_and_documented_with_an_example(name: str) -> None:
    function = getattr(hookspecs, name)
    signature = inspect.signature(function)
    assert signature.return_annotation is not inspect.Signature.empty
    assert all(argument.annotation is not inspect.Parameter.empty for argument in signature.parameters.values())
    text = inspect.getdoc(function) or ""
    assert f"def {name}(" in text
    assert ".. versionadded:: " in text
    assert all(f":param {argument}:" in text for argument in signature.parameters)


def test_every_field_of_the_record_is_in_the_reference() -> None:
    page = PAGE.read_text(encoding="utf-8")
    fields = [field.name for field in attrs.fields(RequestRecord)]
    assert [name for name in [*fields, "outcome"] if f"\n| `{name}` |" not in page] == []


def test_every_reserved_command_is_in_the_reference() -> None:
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert ", ".join(f"`{name}`" for name in sorted(RESERVED_COMMANDS)) in page


async def test_the_example_of_the_reference_works(site: FakeSite) -> None:
    page = PAGE.read_text(encoding="utf-8")
    (toml,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    source = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    entry_points = toml.replace("[project.entry-points.laneway]", "[laneway]").replace('"', "")
    site.add("laneway-shout", {"laneway_shout": source}, raw=entry_points)
    host = PluginHost.load(strict=True)
    shout = host.operation("shout", True, "m")
    prepared = await shout.prepare(None, shout.request_type("hush"))  # type: ignore[arg-type]
    assert await shout.handler(None, prepared) == "HUSH"  # type: ignore[arg-type]
    record = RequestRecord(request_id="r1", kind="shout", model="m", state="completed", queued_at=trio.current_time())
    host.notify_ended(record)
    import laneway_shout  # type: ignore[import-not-found]

    assert laneway_shout.ENDED == ["shout r1 completed"]


def test_the_example_of_the_module_works(site: FakeSite) -> None:
    text = inspect.getdoc(hookspecs) or ""
    example = text.split("A complete plugin::\n", 1)[1].split("An implementation may leave out", 1)[0]
    site.add("laneway-shout", {"laneway_shout": example}, {"shout": "laneway_shout"})
    host = PluginHost.load(strict=True)
    assert list(host.operations) == ["shout"]
    assert host.observed
