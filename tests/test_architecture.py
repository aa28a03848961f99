"""The rules of the house: which module may import which, read from the source of every file.

Arrows point down only: plugins use the engine's public names, the engine knows its decoder protocol and never the
native code, the native code knows that protocol and nothing else, and pure modules know no loop, no clock, no files.
"""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

ROOT = Path(__file__).parents[1]

TEST_MODELS = ROOT / "tests/data/nmt"
"""Translation models that tests need: the only large files."""

PURE = {
    "laneway._admission",
    "laneway._errors",
    "laneway._events",
    "laneway._kvcache._format",
    "laneway._kvcache._history",
    "laneway._kvcache._keys",
    "laneway._kvcache._retention",
    "laneway._lifecycle",
    "laneway._scheduler",
    "laneway._text",
    "laneway._wait_graph",
    "laneway.decoder",
    "laneway.validators",
}
"""Told what happened, they answer; see the design.  Each may import the others."""

PURE_STANDARD_LIBRARY = {
    "__future__",
    "abc",
    "bisect",
    "codecs",
    "collections",
    "collections.abc",
    "enum",
    "functools",
    "hashlib",
    "heapq",
    "itertools",
    "json",
    "math",
    "operator",
    "struct",
    "typing",
    "unicodedata",
    "zlib",
}

PUBLIC = {
    "laneway",
    "laneway.decoder",
    "laneway.hookspecs",
    "laneway.processes",
    "laneway.terminal",
    "laneway.testing",
    "laneway.threads",
    "laneway.validators",
}
"""What a plugin, ours or anybody's, may import of the engine."""


@attrs.frozen
class Import:
    """One imported name.  ``from a.b import c`` has module ``a.b`` and name ``c``; ``import a.b`` has no name."""

    file: Path
    line: int
    module: str
    name: str | None = None

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]

    def __str__(self) -> str:
        what = f"import {self.module}" if self.name is None else f"from {self.module} import {self.name}"
        return f"{self.file.relative_to(ROOT)}:{self.line}: {what}"


def files(folder: str) -> list[Path]:
    return sorted(path for pattern in ("*.py", "*.pyi") for path in (ROOT / folder).rglob(pattern))


def imports(file: Path) -> Iterator[Import]:
    """All imports of a file, those for type checkers and those inside functions included."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: imports are absolute here"
            for alias in node.names:
                yield Import(file, node.lineno, node.module or "", alias.name)


def within(module: str, parent: str) -> bool:
    return module == parent or module.startswith(parent + ".")


def module_file(module: str) -> Path:
    return ROOT / "engine" / f"{module.replace('.', '/')}.py"


def offenders(found: Iterator[Import] | list[Import]) -> list[str]:
    return [str(each) for each in found]


@pytest.mark.parametrize("module", sorted(PURE))
def test_pure_modules_import_no_loop_no_shell_and_no_clock(module: str) -> None:
    file = module_file(module)
    assert (
        offenders(
            each for each in imports(file) if each.module not in PURE | PURE_STANDARD_LIBRARY and each.top != "attrs"
        )
        == []
    )


@pytest.mark.parametrize("module", sorted(PURE))
def test_pure_modules_do_no_input_or_output(module: str) -> None:
    file = module_file(module)
    tree = ast.parse(file.read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    names = {call.func.id for call in calls if isinstance(call.func, ast.Name)}
    assert names.isdisjoint({"open", "print", "input", "exec", "eval", "__import__"})
    assert not [node for node in ast.walk(tree) if isinstance(node, (ast.AsyncFunctionDef, ast.Await))] or (
        # The protocol declares async methods; it runs none.
        module == "laneway.decoder"
    )


def test_engine_knows_neither_native_code_nor_plugins() -> None:
    found = [each for file in files("engine") for each in imports(file)]
    assert len(found) > 50
    assert offenders(each for each in found if each.top in ("laneway_native", "laneway_plugins")) == []


def test_native_code_knows_the_decoder_protocol_only() -> None:
    found = [each for file in files("native/laneway_native") for each in imports(file)]
    assert (
        offenders(
            each for each in found if each.top in ("laneway", "laneway_plugins") and each.module != "laneway.decoder"
        )
        == []
    )


def test_plugins_use_public_names_only() -> None:
    bad = []
    for file in files("plugins"):
        for each in imports(file):
            if each.top == "laneway" and (each.module not in PUBLIC or (each.name or "").startswith("_")):
                bad.append(str(each))
        tree = ast.parse(file.read_text(encoding="utf-8"))
        bad += [
            f"{file.relative_to(ROOT)}:{node.lineno}: laneway.{node.attr}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "laneway"
            and node.attr.startswith("_")
        ]
    assert bad == []


def test_only_the_llama_and_finetune_plugins_know_the_native_code() -> None:
    allowed = [ROOT / "plugins/laneway_plugins" / name for name in ("llama", "llama.py", "finetune", "finetune.py")]
    found = [
        each
        for file in files("plugins")
        if not any(file.is_relative_to(place) for place in allowed)
        for each in imports(file)
    ]
    assert offenders(each for each in found if each.top == "laneway_native") == []


def test_only_the_plugin_host_touches_pluggy() -> None:
    # hookspecs.py beside it holds the marks that pluggy reads.
    allowed = [ROOT / "engine/laneway" / name for name in ("_plugins.py", "hookspecs.py")]
    everything = files("engine") + files("plugins") + files("native")
    found = [each for file in everything if file not in allowed for each in imports(file)]
    assert offenders(each for each in found if each.top == "pluggy") == []


def test_only_the_native_package_imports_the_extension() -> None:
    found = [each for folder in ("engine", "plugins") for file in files(folder) for each in imports(file)]
    assert offenders(each for each in found if within(each.module, "laneway_native._llama")) == []


def test_no_asyncio_anywhere() -> None:
    found = [each for folder in ("engine", "plugins", "native") for file in files(folder) for each in imports(file)]
    assert offenders(each for each in found if each.top in ("asyncio", "anyio")) == []


OF_THE_DEFAULT_LIMITER = {
    "trio.Path",
    "trio.PosixPath",
    "trio.WindowsPath",
    "trio.lowlevel.open_process",
    "trio.open_file",
    "trio.open_ssl_over_tcp_stream",
    "trio.open_tcp_listeners",
    "trio.open_tcp_stream",
    "trio.run_process",
    "trio.serve_tcp",
    "trio.socket",
    "trio.to_thread.current_default_thread_limiter",
    "trio.to_thread.run_sync",
    "trio.wrap_file",
}
"""What of Trio may take a token of its default limiter.  ``run_sync`` does not if it is given another."""


def _dotted(node: ast.expr) -> str:
    """``trio.to_thread.run_sync`` as it is written; empty for what is no plain name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return ""


def _brings_a_limiter(call: ast.Call) -> bool:
    given = [keyword.value for keyword in call.keywords if keyword.arg == "limiter"]
    return any(not (isinstance(value, ast.Constant) and value.value is None) for value in given)


def default_limiter_uses(source: str) -> list[str]:
    """The lines of a source that use threads of Trio's default limiter, or name what does."""
    tree = ast.parse(source)
    good = {
        node.func
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _dotted(node.func) == "trio.to_thread.run_sync" and _brings_a_limiter(node)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node not in good and _dotted(node) in OF_THE_DEFAULT_LIMITER:
            found.append(f"{node.lineno}: {_dotted(node)}")
        elif isinstance(node, ast.ImportFrom) and within(node.module or "", "trio"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            # A module under another name would hide what is taken from it.
            found += [
                f"{node.lineno}: {name}" for name in names if any(within(each, name) for each in OF_THE_DEFAULT_LIMITER)
            ]
        elif isinstance(node, ast.Import):
            found += [
                f"{node.lineno}: import {alias.name} as {alias.asname}"
                for alias in node.names
                if within(alias.name, "trio") and alias.asname is not None
            ]
    return found


@pytest.mark.parametrize(
    "source",
    [
        "await trio.to_thread.run_sync(work)",
        "await trio.to_thread.run_sync(work, limiter=None)",
        "await trio.to_thread.run_sync(work, 1, abandon_on_cancel=True)",
        "task = functools.partial(trio.to_thread.run_sync, work, limiter=mine)",
        "limiter = trio.to_thread.current_default_thread_limiter()",
        "from trio import to_thread",
        "from trio.to_thread import run_sync",
        "from trio import Path",
        "from trio import lowlevel",
        "import trio as t",
        "import trio.to_thread as threads",
        "await trio.Path('x').mkdir()",
        "file = await trio.open_file('x')",
        "await nursery.start(trio.run_process, ['true'])",
        "await trio.lowlevel.open_process(['true'])",
        "await trio.socket.getaddrinfo('host', 80)",
    ],
)
def test_a_use_of_the_default_limiter_is_found(source: str) -> None:
    assert len(default_limiter_uses(source)) == 1
    assert len(default_limiter_uses(f"async def function():\n    {source}\n")) == 1


def test_a_limiter_of_the_callers_own_is_none_of_its_uses() -> None:
    source = "import trio\nfrom trio.testing import MockClock\nawait trio.to_thread.run_sync(work, 1, limiter=mine)"
    assert default_limiter_uses(source) == []


def test_no_thread_is_taken_from_the_programs_own_limiter() -> None:
    """The program may hold all of it while it waits for this engine: see laneway.threads."""
    bad = [
        f"{file.relative_to(ROOT)}:{use}"
        for folder in ("engine", "plugins", "native")
        for file in files(folder)
        for use in default_limiter_uses(file.read_text(encoding="utf-8"))
    ]
    assert bad == []


def test_the_package_itself_only_re_exports() -> None:
    tree = ast.parse((ROOT / "engine/laneway/__init__.py").read_text(encoding="utf-8"))
    kinds = (ast.Import, ast.ImportFrom, ast.Expr, ast.Assign, ast.AnnAssign, ast.If, ast.Delete)
    assert not [node.lineno for node in tree.body if not isinstance(node, kinds)]


@pytest.mark.parametrize("folder", ["engine", "plugins", "native"])
def test_source_roots_are_no_packages(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


def _committed() -> list[Path]:
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def _text(file: Path) -> str:
    data = file.read_bytes()
    return "" if b"\0" in data else data.decode("utf-8", errors="replace")


def test_no_file_names_a_machine_or_an_index_host() -> None:
    # Put together from parts, so that this file does not name them.
    hosts = [r"py" + r"pi\.org", r"python" + r"hosted\.org", r"py" + r"pi-more", r"registry\." + r"npmjs"]
    places = [r"(?<![\w.$}-])/" + place + r"/\w" for place in ("work", "root", "home", "Users")]
    pattern = re.compile("|".join(hosts + places))
    bad = []
    for file in _committed():
        for number, line in enumerate(_text(file).splitlines(), 1):
            if match := pattern.search(line):
                bad.append(f"{file.relative_to(ROOT)}:{number}: {match[0]}")
    assert bad == []


def test_no_file_is_large_or_a_model() -> None:
    files = _committed()
    assert [str(file) for file in files if file.suffix in (".gguf", ".so", ".whl")] == []
    large = [file for file in files if file.stat().st_size > 1_000_000]
    assert [str(file) for file in large if file.parent != TEST_MODELS or file.stat().st_size > 4_000_000] == []


def test_the_models_of_the_tests_have_their_notices_and_are_not_distributed() -> None:
    told = (TEST_MODELS / "README.md").read_text(encoding="utf-8")
    for path in TEST_MODELS.iterdir():
        assert path.name == "README.md" or f"`{path.name}{'/' if path.is_dir() else ''}`" in told
    for notice in ("CC-BY 2.0 FR", "https://creativecommons.org/licenses/by/2.0/fr/", "Permission is hereby granted"):
        assert notice in told
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["scikit-build"]
    assert str(TEST_MODELS.relative_to(ROOT)) in settings["sdist"]["exclude"]
    assert not [root for root in settings["wheel"]["packages"] if TEST_MODELS.is_relative_to(ROOT / root)]
