"""What the wheel holds that `make wheel` has built."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("engine/laneway", "engine/laneway_pytest", "plugins/laneway_plugins", "native/laneway_native")


@pytest.fixture(scope="module")
def wheel() -> Path:
    wheels = sorted(ROOT.glob("build/dist/*.whl"))
    if not wheels:
        pytest.skip("no wheel was built here: make wheel")
    assert len(wheels) == 1
    return wheels[0]


@pytest.fixture(scope="module")
def files(wheel: Path) -> dict[PurePosixPath, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {PurePosixPath(name): archive.read(name) for name in archive.namelist()}


def _libraries(files: dict[PurePosixPath, bytes]) -> list[PurePosixPath]:
    return [path for path in files if re.search(r"\.(so|dylib)(\.|$)", path.name)]


def test_one_wheel_serves_every_python_from_3_11(wheel: Path) -> None:
    assert re.fullmatch(r"laneway-[\d.]+-cp311-abi3-\w+\.whl", wheel.name)


def test_each_library_is_there_once_and_under_one_name(files: dict[PurePosixPath, bytes]) -> None:
    libraries = _libraries(files)
    assert PurePosixPath("laneway_native/_llama.abi3.so") in libraries
    assert {path.parent for path in libraries} == {PurePosixPath("laneway_native")}
    # No libx.so.1 beside libx.so: a wheel stores links as copies.
    assert all(path.suffix in (".so", ".dylib") for path in libraries)
    assert len({hashlib.sha256(files[path]).digest() for path in libraries}) == len(libraries)


def test_names_of_libraries_are_ours(files: dict[PurePosixPath, bytes]) -> None:
    # The dynamic linker takes the first library of a name that any package has loaded.
    assert all(path.name.startswith(("_llama.", "liblaneway-")) for path in _libraries(files))


def test_libraries_are_stripped(files: dict[PurePosixPath, bytes]) -> None:
    assert not [path for path in _libraries(files) if b".debug_info" in files[path]]


def test_python_files_are_those_of_the_source(files: dict[PurePosixPath, bytes], wheel: Path) -> None:
    expected = set()
    for source in SOURCES:
        base = (ROOT / source).parent
        expected |= {
            PurePosixPath(path.relative_to(base).as_posix())
            for pattern in ("*.py", "*.pyi", "py.typed")
            for path in (ROOT / source).rglob(pattern)
        }
    built = [path for path in expected if (_source(path)).stat().st_mtime > wheel.stat().st_mtime]
    if built:
        pytest.skip(f"the wheel is older than {built[0]}: make wheel")
    packed = {path for path in files if path.suffix in (".py", ".pyi") or path.name == "py.typed"}
    assert packed == expected


def _source(path: PurePosixPath) -> Path:
    root = next(root for root in SOURCES if root.endswith("/" + path.parts[0]))
    return (ROOT / root).parent / path


def test_nothing_else_is_packed(files: dict[PurePosixPath, bytes]) -> None:
    tops = {path.parts[0] for path in files if not path.parts[0].endswith(".dist-info")}
    assert tops == {"laneway", "laneway_plugins", "laneway_native", "laneway_pytest"}
    assert not [path for path in files if path.parts[0] in tops and path.suffix in (".c", ".h", ".gguf", ".txt", ".md")]


def test_licences_travel_along(files: dict[PurePosixPath, bytes]) -> None:
    assert PurePosixPath("laneway_native/LICENSE.llama.cpp") in files
    assert any(path.name == "LICENSE" and path.parts[0].endswith(".dist-info") for path in files)


@pytest.mark.slow
def test_unpacked_wheel_imports_by_itself(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    # -I -S: neither the source tree nor the editable install's finder can help.
    paths = [str(tmp_path), sysconfig.get_path("platlib"), sysconfig.get_path("purelib")]
    code = (
        f"import sys; sys.path += {paths!r}\n"
        "import laneway, laneway_plugins, laneway_native, laneway_native._llama as native\n"
        "for module in (laneway, laneway_plugins, laneway_native, native): print(module.__file__)\n"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(Path(line).is_relative_to(tmp_path) for line in done.stdout.splitlines())
