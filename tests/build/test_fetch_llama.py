"""How llama.cpp's source is fetched: with the real pip, from a folder that plays the package index."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "native" / "fetch_llama.py"

# A build backend that leaves a trace when it runs: pip runs it for the archive's metadata.
BACKEND = """
import os, pathlib

def prepare_metadata_for_build_wheel(directory, config_settings=None):
    pathlib.Path(os.environ["TRACE"]).touch()
    info = pathlib.Path(directory, "carrier-1.0.dist-info")
    info.mkdir()
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\\nName: carrier\\nVersion: 1.0\\n")
    return info.name
"""

FILES = {
    "carrier-1.0/PKG-INFO": "Metadata-Version: 2.1\nName: carrier\nVersion: 1.0\n",
    "carrier-1.0/pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
    "carrier-1.0/backend.py": BACKEND,
    "carrier-1.0/vendor/llama.cpp/CMakeLists.txt": "project(llama)\n",
    "carrier-1.0/vendor/llama.cpp/include/llama.h": "#pragma once\n",
    "carrier-1.0/vendor/llama.cpp/models/big.gguf": "not wanted",
}


@pytest.fixture(scope="module")
def fetch() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fetch_llama_under_test", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class Index:
    """A package index in a folder, and a cache beside it."""

    def __init__(self, fetch: ModuleType, root: Path) -> None:
        self.fetch = fetch
        self.folder = root / "index"
        self.folder.mkdir()
        self.cache = root / "cache"
        self.trace = root / "backend-ran"
        self.pins: Any = dataclasses.replace(
            fetch.Pins.load(),
            name="carrier",
            version="1.0",
            file="carrier-1.0.tar.gz",
            tree=PurePosixPath("carrier-1.0/vendor/llama.cpp"),
            parts=["CMakeLists.txt", "include"],
        )
        self.archive = self.publish(FILES)

    def publish(self, files: dict[str, str], extra: tuple[tarfile.TarInfo, ...] = ()) -> Path:
        """Puts an archive into the index and pins it."""
        archive: Path = self.folder / self.pins.file
        with tarfile.open(archive, "w:gz") as tar:
            for name, text in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(text.encode())
                member.mtime = 1_500_000_000
                tar.addfile(member, io.BytesIO(text.encode()))
            for member in extra:
                tar.addfile(member, io.BytesIO(b"x" * member.size))
        self.pin(hashlib.sha256(archive.read_bytes()).hexdigest())
        return archive

    def keep(self, files: dict[str, str], extra: tuple[tarfile.TarInfo, ...]) -> None:
        """Puts an archive into the cache, past pip, which has checks of its own."""
        self.cache.mkdir()
        self.publish(files, extra).rename(self.cache / self.pins.file)

    def pin(self, sha256: str) -> None:
        self.pins = dataclasses.replace(self.pins, sha256=sha256)

    def provide(self) -> Path:
        tree = self.fetch.provide(self.pins, self.cache)
        assert isinstance(tree, Path)
        return tree

    def cached(self) -> list[str]:
        return sorted(path.name for path in self.cache.iterdir()) if self.cache.exists() else []


@pytest.fixture
def index(fetch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    made = Index(fetch, tmp_path)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", made.folder.as_uri())
    monkeypatch.setenv("TRACE", str(made.trace))
    return made


def test_wanted_parts_land_in_the_cache_and_are_fetched_once(index: Index) -> None:
    tree = index.provide()
    assert index.cached() == sorted([index.pins.file, tree.name])
    wanted = {"CMakeLists.txt", "include/llama.h", index.fetch.MANIFEST}
    assert {path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()} == wanted
    assert (tree / "include/llama.h").stat().st_mtime == 1_500_000_000
    index.archive.unlink()
    assert index.provide() == tree


def test_wrong_checksum_is_refused_before_anything_of_the_archive_runs(index: Index) -> None:
    found, pinned = index.pins.sha256, "0" * 64
    index.pin(pinned)
    with pytest.raises(index.fetch.FetchError) as caught:
        index.provide()
    assert found in str(caught.value)
    assert pinned in str(caught.value)
    assert index.cached() == []
    assert not index.trace.exists()


def test_right_checksum_lets_pip_read_the_metadata(index: Index) -> None:
    # The counterpart of the test above: the trace does work.
    index.provide()
    assert index.trace.exists()


def test_failed_download_leaves_nothing_and_names_the_way_out(index: Index) -> None:
    index.archive.unlink()
    with pytest.raises(index.fetch.FetchError, match=r"cannot download carrier 1\.0 .*LANEWAY_LLAMA_SOURCE=") as caught:
        index.provide()
    assert "\n" not in str(caught.value)
    assert index.cached() == []


def test_python_without_pip_is_told_how_to_get_one(index: Index) -> None:
    # Isolated from site-packages, the interpreter finds no pip.
    bare = index.folder.parent / "bare-python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(index.fetch.FetchError, match="-m ensurepip"):
        index.fetch.fetch_archive(index.pins, index.cache, str(bare))


def test_damaged_archive_is_fetched_again(index: Index) -> None:
    index.cache.mkdir()
    kept = index.cache / index.pins.file
    kept.write_bytes(index.archive.read_bytes()[:-7])
    index.provide()
    assert kept.read_bytes() == index.archive.read_bytes()


@pytest.mark.parametrize("damage", ["cut", "gone", "no manifest", "other manifest"])
def test_damaged_tree_is_unpacked_again(index: Index, damage: str) -> None:
    tree = index.provide()
    header, manifest = tree / "include/llama.h", tree / index.fetch.MANIFEST
    if damage == "cut":
        header.write_text("")
    elif damage == "gone":
        header.unlink()
    elif damage == "no manifest":
        manifest.unlink()
        header.write_text("")
    else:
        manifest.write_text("[]")
        header.write_text("")
    assert index.provide() == tree
    assert header.read_text() == FILES["carrier-1.0/vendor/llama.cpp/include/llama.h"]
    assert index.cached() == sorted([index.pins.file, tree.name])


def test_other_parts_in_the_pins_unpack_again(index: Index) -> None:
    tree = index.provide()
    index.pins = dataclasses.replace(index.pins, parts=["CMakeLists.txt"])
    assert index.provide() == tree
    assert not (tree / "include").exists()


def test_unpacking_that_breaks_off_leaves_no_tree(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    def disk_full(source: object, target: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(index.fetch.shutil, "copyfileobj", disk_full)
        with pytest.raises(OSError, match="no space left"):
            index.provide()
    assert index.cached() == [index.pins.file]
    assert index.provide().is_dir()


def _plain(name: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size = 1
    return member


def _link(name: str, kind: bytes) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, "/etc/passwd"
    return member


@pytest.mark.parametrize(
    "member",
    [
        _plain("carrier-1.0/vendor/llama.cpp/include/../../../../../escaped"),
        _link("carrier-1.0/vendor/llama.cpp/include/link", tarfile.SYMTYPE),
        _link("carrier-1.0/vendor/llama.cpp/include/hard", tarfile.LNKTYPE),
        _link("carrier-1.0/vendor/llama.cpp/include/pipe", tarfile.FIFOTYPE),
    ],
    ids=["path", "symbolic link", "hard link", "pipe"],
)
def test_member_that_leaves_the_tree_or_is_no_file_is_refused(index: Index, member: tarfile.TarInfo) -> None:
    index.keep(FILES, (member,))
    with pytest.raises(index.fetch.FetchError, match=r"which (leaves its own tree|is no plain file)"):
        index.provide()
    assert index.cached() == [index.pins.file]
    assert not list(index.cache.parent.rglob("escaped"))


def test_absolute_member_is_passed_over(index: Index) -> None:
    target = index.cache.parent / "absolute"
    index.keep(FILES, (_plain(str(target)),))
    index.provide()
    assert not target.exists()


def test_release_that_lacks_a_part_is_refused(index: Index) -> None:
    index.pins = dataclasses.replace(index.pins, parts=["CMakeLists.txt", "src"])
    with pytest.raises(index.fetch.FetchError, match=r"lacks src .*llama_source\.toml does not fit"):
        index.provide()


def _run(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


@pytest.mark.usefixtures("index")
def test_command_ends_in_one_line_and_status_1(tmp_path: Path) -> None:
    done = _run([], LANEWAY_CACHE_DIR=str(tmp_path / "fresh"))
    assert done.returncode == 1
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["laneway:", "laneway:"]
    assert lines[0].startswith("laneway: fetching llama-cpp-python")
    assert lines[1].startswith("laneway: cannot download llama-cpp-python")


def test_cache_that_cannot_be_made_ends_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = _run([], LANEWAY_CACHE_DIR=str(tmp_path / "file" / "cache"))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("laneway: cannot write llama.cpp's source to ")
    assert "Traceback" not in done.stderr


def test_facts_touch_nothing(tmp_path: Path) -> None:
    done = _run(["--facts"], LANEWAY_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert set(facts) == {"version", "commit", "structs", "path"}
    assert len(facts["commit"]) == 40
    assert not list(tmp_path.iterdir())


def test_cache_directory_follows_the_environment(
    fetch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path.resolve()
    for name in ("LANEWAY_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    assert fetch.cache_dir() == home / ".cache" / "laneway"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "xdg"))
    assert fetch.cache_dir() == home / "xdg" / "laneway"
    monkeypatch.setenv("LANEWAY_CACHE_DIR", str(home / "mine"))
    assert fetch.cache_dir() == home / "mine"
