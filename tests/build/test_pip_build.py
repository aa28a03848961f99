"""The one line that a failed build ends in, and the line that a machine without Python gets."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pip_build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pip_build_under_test", ROOT / "native" / "pip_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (
            """
  laneway: fetching llama-cpp-python 1.0
  CMake Error at CMakeLists.txt:15 (message):
     laneway: no working C compiler was found; install one

  error: subprocess-exited-with-error
ERROR: Failed to build 'laneway'
""",
            "no working C compiler was found; install one",
        ),
        (
            """
  laneway: fetching llama-cpp-python 1.0
  [3/9] Building CXX object model.cpp.o
  FAILED: model.cpp.o
  model.cpp:3:10: error: 'x' was not declared in this scope
  model.cpp:9:10: fatal error: none.h: No such file or directory
  error: subprocess-exited-with-error
ERROR: Failed to build 'laneway'
""",
            "model.cpp:9:10: fatal error: none.h: No such file or directory",
        ),
        (
            """
  model.cpp:3:10: error: 'x' was not declared in this scope
  error: metadata-generation-failed
""",
            "model.cpp:3:10: error: 'x' was not declared in this scope",
        ),
        (
            """
ERROR: Could not find a version that satisfies the requirement trio
ERROR: No matching distribution found for trio
""",
            "No matching distribution found for trio; check the network and pip's settings and repeat",
        ),
        ("", "pip gave no reason; check the network and pip's settings and repeat"),
    ],
    ids=["ours", "fatal", "compiler", "pip", "nothing"],
)
def test_reason_is_the_most_telling_line(pip_build: ModuleType, log: str, expected: str) -> None:
    assert pip_build.reason(log.splitlines()) == expected


def test_steps_are_shown_and_errors_are_not_shown_twice(
    pip_build: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    for line in (
        "  [0/2] Re-checking globbed directories...",
        "  [12/79] Building CXX object llama.cpp/src/CMakeFiles/llama.dir/llama-vocab.cpp.o",
        "  -- Looking for a needle",
        "  laneway: fetching llama-cpp-python 1.0",
        "     laneway: no working C compiler was found; install one",
    ):
        pip_build._show(line)
    assert capsys.readouterr().out.splitlines() == [
        "  [12/79] Building llama-vocab.cpp.o",
        "laneway: fetching llama-cpp-python 1.0",
    ]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_without_python_says_what_to_install(tmp_path: Path) -> None:
    command = ["make", "--silent", "env", "PYTHON=", f"VENV={tmp_path}/venv"]
    # Not as part of the make that may have started these tests.
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert done.stderr.splitlines()[0].startswith("laneway: no Python 3.11 or newer was found; install it (")
    assert not (tmp_path / "venv").exists()
