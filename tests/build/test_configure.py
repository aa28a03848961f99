"""What CMake says when something that a build needs is missing: one line, with the command that mends it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent

CMAKE = shutil.which("cmake", path=f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}")
NINJA = shutil.which("ninja", path=f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CMAKE is None or NINJA is None, reason="needs cmake and ninja: make env"),
    pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler"),
]


def configure(build: Path, *definitions: str, **environment: str) -> str:
    """Configures, which must fail, and returns the reason: one line of ours."""
    assert CMAKE is not None
    command = [CMAKE, "-S", str(ROOT / "native"), "-B", str(build), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={NINJA}"]
    command += [f"-DPython_EXECUTABLE={sys.executable}", "-DSKBUILD_SABI_VERSION=3.11"]
    command += [f"-D{definition}" for definition in definitions]
    clean = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX", "LANEWAY_LLAMA_SOURCE")}
    done = subprocess.run(command, env=clean | environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    reasons = re.findall(r"^ *laneway: .*$", done.stderr, re.MULTILINE)
    assert reasons, done.stderr
    return str(reasons[-1]).strip()


@pytest.mark.parametrize(("variable", "language"), [("CC", "C"), ("CXX", "CXX")])
def test_compiler_that_is_not_there(tmp_path: Path, variable: str, language: str) -> None:
    said = configure(tmp_path, **{variable: "/nowhere/compiler"})
    assert said.startswith(f"laneway: no working {language} compiler was found; install one ")


def test_no_compiler_at_all(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    said = configure(tmp_path / "build", PATH=str(tmp_path / "empty"))
    assert said.startswith("laneway: no working C compiler was found; install one ")
    assert "apt-get install g++" in said


def test_failed_download(tmp_path: Path) -> None:
    offline = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": tmp_path.as_uri()}
    said = configure(tmp_path / "build", LANEWAY_CACHE_DIR=str(tmp_path / "cache"), **offline)
    assert said.startswith("laneway: cannot download llama-cpp-python ")
    assert "LANEWAY_LLAMA_SOURCE=/path/to/llama.cpp make build" in said


@pytest.mark.parametrize("way", ["definition", "environment"])
def test_checkout_that_is_none(tmp_path: Path, way: str) -> None:
    if way == "definition":
        said = configure(tmp_path / "build", f"LANEWAY_LLAMA_SOURCE_DIR={tmp_path}")
    else:
        said = configure(tmp_path / "build", LANEWAY_LLAMA_SOURCE=str(tmp_path))
    assert said.startswith(f"laneway: {tmp_path} is no llama.cpp checkout")


def test_system_llama_that_is_not_there(tmp_path: Path) -> None:
    said = configure(tmp_path / "build", "LANEWAY_USE_SYSTEM_LLAMA=ON", "CMAKE_FIND_USE_CMAKE_SYSTEM_PATH=OFF")
    assert said.startswith("laneway: LANEWAY_USE_SYSTEM_LLAMA is on, but CMake finds no installed llama.cpp")


def _installed(prefix: Path, version: str, header: str) -> str:
    package, include = prefix / "lib/cmake/llama", prefix / "include"
    package.mkdir(parents=True)
    include.mkdir()
    (include / "llama.h").write_text(header)
    (package / "llama-config.cmake").write_text(
        f'set(LLAMA_VERSION "{version}")\nset(LLAMA_LIB_DIR "{prefix}/lib")\nset(LLAMA_INCLUDE_DIR "{include}")\n'
    )
    return f"CMAKE_PREFIX_PATH={prefix}"


def test_system_llama_of_another_version_is_refused_by_name(tmp_path: Path) -> None:
    prefix = _installed(tmp_path / "prefix", "0.0.1234", "")
    said = configure(tmp_path / "build", "LANEWAY_USE_SYSTEM_LLAMA=ON", prefix)
    assert said.startswith("laneway: the system's llama.cpp is version 0.0.1234 ")
    assert "Laneway needs " in said


def test_system_llama_with_other_structs_is_refused_by_name(tmp_path: Path) -> None:
    pinned = re.search(r'^version = "(\S+-dev)"$', (ROOT / "native/llama_source.toml").read_text(), re.MULTILINE)
    assert pinned is not None
    prefix = _installed(tmp_path / "prefix", pinned[1], "struct ggml_threadpool_params { int one; };\n")
    said = configure(tmp_path / "build", "LANEWAY_USE_SYSTEM_LLAMA=ON", prefix)
    assert "struct ggml_threadpool_params of the system's llama.h" in said
    assert "has 4 bytes" in said
