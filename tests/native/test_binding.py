"""The stub of the compiled module against the module itself."""

from __future__ import annotations

import ast
from pathlib import Path

import laneway_native
from laneway_native._ffi import ffi, lib

STUB = Path(laneway_native.__file__).with_name("_llama.pyi")


def _declared(name: str) -> dict[str, ast.AST]:
    tree = ast.parse(STUB.read_text())
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    found: dict[str, ast.AST] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.AnnAssign):
            assert isinstance(node.target, ast.Name)
            found[node.target.id] = node
    return found


def test_every_name_of_the_module_is_in_the_stub_and_no_other() -> None:
    assert set(_declared("_Lib")) == set(dir(lib))


def test_constants_have_the_values_that_the_stub_says() -> None:
    for name, node in _declared("_Lib").items():
        if isinstance(node, ast.AnnAssign):
            assert node.value is not None
            assert ast.literal_eval(node.value) == getattr(lib, name)


def test_functions_take_as_many_arguments_as_the_stub_says() -> None:
    for name, node in _declared("_Lib").items():
        if isinstance(node, ast.FunctionDef):
            arguments = len(node.args.posonlyargs or node.args.args) - 1
            assert arguments == len(ffi.typeof(getattr(lib, name)).args), name


def test_the_facts_of_a_model_are_those_of_the_struct() -> None:
    assert list(_declared("ModelFactsStruct")) == [name for name, _ in ffi.typeof("laneway_model_facts").fields]
    assert list(_declared("Error")) == [name for name, _ in ffi.typeof("laneway_error").fields]


def test_the_stub_names_what_ffi_has() -> None:
    for name in _declared("_Ffi"):
        assert hasattr(ffi, name)


def test_only_one_module_imports_the_compiled_one() -> None:
    importers = set()
    for path in STUB.parent.glob("*.py"):
        # At the top level: what stands below `if TYPE_CHECKING` is never run.
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom):
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                if any(name.startswith("laneway_native._llama") for name in names):
                    importers.add(path.name)
    assert importers == {"_ffi.py"}
