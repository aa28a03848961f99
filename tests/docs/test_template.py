"""The plugin package that authors start from: it builds, installs beside Laneway's wheel, and passes its own tests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "docs" / "plugins" / "template"
SOURCES = ("engine/laneway", "engine/laneway_pytest", "plugins/laneway_plugins", "native/laneway_native")

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """The standard output of a command that sees nothing of this run's environment for Python; it must succeed."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LANEWAY_"))}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env={**inherited, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel() -> Path:
    """The wheel of Laneway, as `make wheel` builds it."""
    wheels = sorted(ROOT.glob("build/dist/*.whl"))
    if not wheels:
        pytest.skip("no wheel was built here: make wheel")
    newest = max((path for source in SOURCES for path in (ROOT / source).rglob("*.py")), key=_modified)
    if _modified(newest) > _modified(wheels[0]):
        pytest.skip(f"the wheel is older than {newest.relative_to(ROOT)}: make wheel")
    return wheels[0]


def _modified(path: Path) -> float:
    return path.stat().st_mtime


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, as an author makes one."""
    folder = tmp_path_factory.mktemp("template") / "laneway-summarise"
    return Path(shutil.copytree(TEMPLATE, folder, ignore=shutil.ignore_patterns("__pycache__", ".*_cache")))


@pytest.fixture(scope="module")
def installed(wheel: Path, template: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts of an environment that holds the wheel, the template, and what its tests need."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    scripts = folder / "bin"
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    pip += ["--python", scripts / "python"]
    # The project's own pip: the environment needs none, and the one that comes with Python may not know groups.  What
    # is imported will be compiled then; most of it never is.
    run(*pip, "install", "--quiet", "--no-compile", wheel, ".", "--group", "test", cwd=template)
    return scripts


def test_it_passes_its_own_tests_in_an_environment_of_its_own(installed: Path, template: Path) -> None:
    out = run(installed / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=template)
    assert " passed" in out
    assert "skipped" not in out


def test_it_is_listed_beside_the_built_in_plugins(installed: Path, template: Path) -> None:
    records = json.loads(run(installed / "laneway", "plugins", "--json", "--strict", cwd=template))
    record = {record["name"]: record for record in records}["summarise"]
    assert (record["state"], record["origin"], record["distribution"]) == ("loaded", "installed", "laneway-summarise")
    (operation,) = record["operations"]
    assert (operation["kind"], operation["scope"], operation["use"]) == ("summarise", "request", "shared")


def test_the_environment_holds_nothing_of_the_source_tree(installed: Path, template: Path) -> None:
    code = "import laneway, laneway_summarise; print(laneway.__file__); print(laneway_summarise.__file__)"
    files = run(installed / "python", "-c", code, cwd=template).splitlines()
    assert len(files) == 2
    assert all(Path(file).is_relative_to(installed.parent) for file in files)


def test_it_passes_its_own_tests_beside_the_source_tree(template: Path, tmp_path: Path) -> None:
    # What an editable install is made of, so that this runs without a wheel and without the package index.
    project = tomllib.loads((template / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    metadata = tmp_path / "laneway_summarise-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n", encoding="utf-8"
    )
    points = [f"{name} = {value}" for name, value in project["entry-points"]["laneway"].items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[laneway]", *points]), encoding="utf-8")
    paths = [tmp_path, template / "src", *(ROOT / name for name in ("engine", "plugins", "native"))]
    # The finder of Laneway's own editable install is at work before pytest looks at it.
    known = "ignore:Module already imported so cannot be rewritten:pytest.PytestAssertRewriteWarning"
    out = run(
        sys.executable,
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", known),
        cwd=template,
        PYTHONPATH=os.pathsep.join(map(str, paths)),
    )
    assert " passed" in out
    assert "skipped" not in out
