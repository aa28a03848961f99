"""The reference has every public name, with the signature that the code has."""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import attrs
import pytest

import laneway
from laneway._errors import RejectionReason
from laneway_plugins import llm_translate
from laneway_plugins.llama import LlamaOptions
from tests.docs.pages import DOCS, ROOT

API = (DOCS / "reference" / "api.md").read_text(encoding="utf-8")
ERRORS = (DOCS / "reference" / "errors.md").read_text(encoding="utf-8")
HOOKS = (DOCS / "reference" / "hooks.md").read_text(encoding="utf-8")
MODELS = (DOCS / "howto" / "models.md").read_text(encoding="utf-8")

NAMES = sorted(name for name in vars(laneway) if not name.startswith("_") and name != "annotations")
PUBLIC = [name for name in NAMES if not inspect.ismodule(getattr(laneway, name))]

MADE_BY_THE_ENGINE = {"CachePlan", "CacheTurn", "Engine", "Gate", "Model", "Run", "Tokens", "RequestContext"}
"""Nobody else calls their constructors."""

ENGINE_SIDE = {
    "KVCaches": {"check_spelling", "evict", "nearest", "root"},
    "Model": {"check_open", "close_door", "free"},
    "Run": {"unseen_error"},
    "Tokens": {"fail", "forget_states", "receive"},
}
"""Methods that one part of the engine calls on another, and users do not."""


@attrs.frozen
class Entry:
    """One signature of the page, taken apart."""

    head: str
    name: str
    arguments: str
    returns: str | None


def _parse(text: str) -> Entry:
    """A signature in the form of the page: ``def Name.method(...) -> type`` or ``class Name(...)``."""
    match = re.fullmatch(r"(async def|def|class) ([\w.]+)(\(.*)", text, re.DOTALL)
    assert match is not None, f"not a signature: {text}"
    (function,) = ast.parse(f"def f{match[3]}: ...").body
    assert isinstance(function, ast.FunctionDef)
    returns = None if function.returns is None else ast.unparse(function.returns)
    return Entry(match[1], match[2], ast.unparse(function.args), returns)


def _entries() -> Iterator[Entry]:
    for block in re.findall(r"^```python\n(.*?)^```$", API, re.MULTILINE | re.DOTALL):
        # A new signature begins at the left edge, unless it is the end of the one before it.
        for text in re.split(r"\n(?=(?:async def|def|class) )", block.rstrip()):
            yield _parse(text)


ENTRIES = {entry.name: entry for entry in _entries()}


def _find(name: str) -> Any:
    """The object of that name, in ``laneway`` unless a module comes first."""
    if name.startswith(("laneway.", "laneway_plugins.")):
        package, module, *path = name.split(".")
        found: Any = importlib.import_module(f"{package}.{module}")
    else:
        found, path = laneway, name.split(".")
    for part in path:
        found = inspect.getattr_static(found, part) if inspect.isclass(found) else getattr(found, part)
    return found


def _shown(default: Any) -> str:
    if default is attrs.NOTHING:
        return "..."
    return f"{type(default).__name__}.{default.name}" if isinstance(default, enum.Enum) else repr(default)


def _real(name: str) -> Entry:
    """The signature that the code has."""
    found = _find(name)
    signature = inspect.signature(found)
    parts, star = [], False
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        if parameter.kind is parameter.VAR_POSITIONAL:
            star = True
        stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(parameter.kind.name, "")
        default = "" if parameter.default is parameter.empty else f" = {_shown(parameter.default)}"
        parts.append(f"{stars}{parameter.name}: {parameter.annotation}{default}")
    head = "class" if inspect.isclass(found) else "async def" if inspect.iscoroutinefunction(found) else "def"
    returns = "" if head == "class" else f" -> {signature.return_annotation}"
    return _parse(f"{head} {name}({', '.join(parts)}){returns}")


def _table(page: str) -> dict[str, list[str]]:
    """The rows of all tables by their first cell, which stands in back ticks."""
    rows = re.findall(r"^\| `([\w.]+)` \|(.*)\|$", page, re.MULTILINE)
    return {name: [cell.strip() for cell in re.split(r"(?<!\\)\|", rest)] for name, rest in rows}


@pytest.mark.parametrize("name", ENTRIES)
def test_the_signature_is_the_one_of_the_code(name: str) -> None:
    assert ENTRIES[name] == _real(name)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_in_the_reference(name: str) -> None:
    found = getattr(laneway, name)
    if inspect.isclass(found) and issubclass(found, Exception):
        assert name == "LanewayError" or name in _table(ERRORS)
    elif name in MADE_BY_THE_ENGINE:
        assert f"\n### `{name}`\n" in API
    elif inspect.isfunction(found) or (inspect.isclass(found) and not issubclass(found, enum.Enum)):
        assert name in ENTRIES
    else:
        assert f"`{name}`" in API
        if isinstance(found, type) and issubclass(found, enum.Enum):
            assert all(f"`{member}`" in API for member in found.__members__)


def _members(name: str) -> Iterator[str]:
    """The public methods and properties that a class defines itself."""
    found = getattr(laneway, name)
    fields = {field.name for field in attrs.fields(found)} if attrs.has(found) else set()
    for member, value in vars(found).items():
        if member.startswith("_") or member in fields or member in ENGINE_SIDE.get(name, ()):
            continue
        if inspect.isfunction(value) or isinstance(value, property):
            yield member


@pytest.mark.parametrize(
    "name", [name for name in PUBLIC if inspect.isclass(getattr(laneway, name)) and not name.endswith("Error")]
)
def test_every_method_and_property_is_in_the_reference(name: str) -> None:
    table = _table(API)
    for member in _members(name):
        full = f"{name}.{member}"
        if inspect.isfunction(getattr(getattr(laneway, name), member)):
            assert full in ENTRIES
        else:
            assert full in table


@pytest.mark.parametrize("name", [name for name in _table(API) if re.search(r"[A-Z]\w*[a-z]\w*\.\w+$", name)])
def test_the_type_of_a_property_is_the_one_of_the_code(name: str) -> None:
    owner, _, member = name.rpartition(".")
    found = inspect.getattr_static(_find(owner), member, None)
    shown = _table(API)[name][0].strip("`").replace("\\|", "|")
    if isinstance(found, property):
        assert found.fget is not None
        assert found.fget.__annotations__["return"] == shown
    else:
        # A plain attribute, set by the constructor from an argument of its name.
        assert inspect.signature(_find(owner)).parameters[member].annotation == shown


def test_engine_side_methods_still_exist() -> None:
    for name, members in ENGINE_SIDE.items():
        assert all(callable(getattr(getattr(laneway, name), member)) for member in members)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_explained_where_they_are_defined(name: str) -> None:
    found = getattr(laneway, name)
    if not (inspect.isclass(found) or inspect.isfunction(found)):
        return
    text = inspect.getdoc(found) or ""
    # attrs writes a signature where there is no text.
    assert text
    assert not text.startswith("Method generated by attrs")
    for member in _members(name) if inspect.isclass(found) else ():
        assert inspect.getdoc(getattr(found, member)), f"{name}.{member}"


@pytest.mark.parametrize("name", [name for name in PUBLIC if name.endswith("Error") and name != "LanewayError"])
def test_every_error_is_listed_with_its_fields(name: str) -> None:
    error = getattr(laneway, name)
    assert issubclass(error, laneway.LanewayError)
    fields = [field.name for field in attrs.fields(error)] if attrs.has(error) else []
    shown = _table(ERRORS)[name][1]
    assert shown == (", ".join(f"`{field}`" for field in fields) or "none")


def _kinds(error: type[laneway.LanewayError]) -> Iterator[type[laneway.LanewayError]]:
    for kind in error.__subclasses__():
        yield kind
        yield from _kinds(kind)


def test_every_error_of_the_family_is_listed() -> None:
    """Those of the plugins too.  What `laneway pull` fails with is seen by its users as one line."""
    for path in _sources():
        if "laneway_plugins" in path.parts and path.stem != "__init__":
            importlib.import_module(f"laneway_plugins.{path.stem}")
    raised = {kind.__name__ for kind in _kinds(laneway.LanewayError) if kind.__module__.startswith("laneway")}
    assert "UndeterminedLanguageError" in raised
    assert raised - {"PullError"} <= set(_table(ERRORS))


def test_the_fields_of_an_error_of_a_plugin_are_listed() -> None:
    fields = [field.name for field in attrs.fields(llm_translate.UndeterminedLanguageError)]
    assert _table(ERRORS)["UndeterminedLanguageError"][1] == ", ".join(f"`{field}`" for field in fields)


@pytest.mark.parametrize("module", ["decoder", "processes", "terminal", "threads", "validators"])
def test_every_name_of_a_public_module_is_in_the_reference(module: str) -> None:
    """By its full name where it is called, else by its own."""
    names = importlib.import_module(f"laneway.{module}").__all__
    missing = []
    for name in names:
        full = f"laneway.{module}.{name}"
        known = any(entry == full or entry.startswith(f"{full}.") for entry in ENTRIES)
        if not known and name not in ENTRIES and not re.search(rf"\b{name}\b", API + ERRORS):
            missing.append(full)
    assert missing == []


@pytest.mark.parametrize("module", ["processes", "terminal", "threads", "validators"])
def test_every_function_of_a_public_module_has_its_signature(module: str) -> None:
    found = importlib.import_module(f"laneway.{module}")
    functions = {f"laneway.{module}.{name}" for name in found.__all__ if inspect.isfunction(getattr(found, name))}
    assert functions
    assert functions <= set(ENTRIES)


def test_every_reason_of_a_refusal_is_listed() -> None:
    assert set(get_args(RejectionReason)) <= set(_table(ERRORS))


def _sources() -> Iterator[Path]:
    for folder in ("engine/laneway", "plugins/laneway_plugins", "native/laneway_native"):
        yield from (ROOT / folder).rglob("*.py")


def test_environment_variables_are_those_of_the_code() -> None:
    # In quotes; what the C code calls its statuses is written with `lib.` in front, or in double back ticks.
    pattern = r"""(?:"|(?<!`)`)(LANEWAY_[A-Z_]+)[="`]"""
    read = {name for path in _sources() for name in re.findall(pattern, path.read_text("utf-8"))}
    section = API.split("## Environment variables")[1].split("\n## ")[0]
    listed = set(re.findall(r"^\| `(LANEWAY_\w+)`", section, re.MULTILINE))
    # Read by the build alone.
    assert listed - {"LANEWAY_LLAMA_SOURCE"} == read


def test_loggers_are_those_of_the_code() -> None:
    made = {
        name for path in _sources() for name in re.findall(r"getLogger\(\"(laneway\.[\w.]+)\"", path.read_text("utf-8"))
    }
    section = API.split("## Loggers")[1]
    assert set(re.findall(r"^\| `(laneway[\w.]+)`", section, re.MULTILINE)) == made


def test_options_of_the_gguf_loader_are_listed_with_their_defaults() -> None:
    rows = _table(MODELS)
    options = {field.name: _shown(field.default) for field in attrs.fields(LlamaOptions)}
    assert {name: cells[0].strip("`") for name, cells in rows.items() if name in options} == options
