"""parse_source and the catalogue."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import platformdirs
import pytest

import laneway
from laneway._errors import InvalidRequestError, ModelLoadError
from laneway._sources import (
    CATALOGUE,
    Package,
    PackageFile,
    cache_directory,
    find_package,
    models_directory,
    parse_source,
)

SHA = "ab" * 32


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tests run in an empty directory, with an empty cache."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("LANEWAY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(folder))
    return folder


def refusal(source: object) -> str:
    with pytest.raises(ModelLoadError) as caught:
        parse_source(source)  # type: ignore[arg-type]
    assert caught.value.source == str(source)
    return caught.value.reason


def put(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"GGUF")
    return path


# --- paths ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["tiny.gguf", "./tiny.gguf", "~/tiny.gguf", "../here/tiny.gguf"])
def test_path(here: Path, text: str) -> None:
    put(here / "tiny.gguf")
    source = parse_source(text)
    assert source.text == text
    assert source.path is not None
    assert source.path.samefile(here / "tiny.gguf")
    assert source.name == "tiny"


def test_path_object_is_a_path_whatever_it_is_called(here: Path) -> None:
    put(here / "smollm2")
    source = parse_source(Path("smollm2"))
    assert (source.path, source.name) == (Path("smollm2"), "smollm2")
    assert refusal(Path("pypi:x==1/m")) == "there is no such file or directory"


def test_directory_and_split_model(here: Path) -> None:
    (here / "model.d").mkdir()
    assert parse_source("model.d").name == "model.d"
    assert parse_source(".").name == "here"
    put(here / "big-00001-of-00003.gguf")
    assert parse_source("big-00001-of-00003.gguf").name == "big"


def test_a_file_may_look_like_a_scheme(here: Path) -> None:
    put(here / "odd:name.gguf")
    assert parse_source("odd:name.gguf").path == Path("odd:name.gguf")


def test_missing_path(here: Path) -> None:
    assert refusal("nothing.gguf") == "there is no such file or directory"
    assert refusal("./nothing") == "there is no such file or directory"
    (here / "link.gguf").symlink_to("gone.gguf")
    assert refusal("link.gguf") == "it is a link to gone.gguf, which is not there"
    assert "home" in refusal("~no-such-user-here/x.gguf").lower()


def test_path_that_cannot_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def exists(_path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", exists)
    assert refusal("secret.gguf") == "Permission denied"


def test_no_source_at_all() -> None:
    assert "a source is a path, a name of the catalogue, or pypi:" in refusal("")
    assert refusal(3) == "a source is a path or a string"
    assert "a source is a path" in refusal(os.fsencode("x"))


def test_other_schemes_are_for_loaders() -> None:
    source = parse_source("scripted:echo")
    assert (source.text, source.path, source.name) == ("scripted:echo", None, "echo")
    # One letter is a drive.
    assert refusal("c:model.gguf") == "there is no such file or directory"


# --- names ------------------------------------------------------------------------------------------------------------


def test_unknown_name_tells_the_known_ones() -> None:
    assert refusal("smolm2") == (
        "no model is known by this name, and there is no such file; "
        "known names: gemma3-270m, smollm2 (see: laneway pull --list)"
    )


@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_name_that_has_not_been_pulled(name: str, tmp_path: Path) -> None:
    reason = refusal(name)
    assert f"run: laneway pull {name}" in reason
    put(CATALOGUE[name].path())
    source = parse_source(name)
    assert source.name == name
    assert source.path == tmp_path / "cache" / "models" / CATALOGUE[name].folder / CATALOGUE[name].file_name


def test_a_name_comes_before_a_file(here: Path) -> None:
    put(here / "smollm2")
    assert "laneway pull smollm2" in refusal("smollm2")
    assert parse_source("./smollm2").path == Path("smollm2")


def test_cache_dir_argument_comes_before_the_environment(tmp_path: Path) -> None:
    path = put(CATALOGUE["smollm2"].path(tmp_path / "other"))
    assert parse_source("smollm2", cache_dir=tmp_path / "other").path == path
    assert path.is_relative_to(tmp_path / "other" / "models")


def test_cache_directory(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    monkeypatch.setenv("LANEWAY_CACHE_DIR", "~/kept")
    assert cache_directory() == here / "kept"
    assert models_directory() == here / "kept" / "models"
    monkeypatch.delenv("LANEWAY_CACHE_DIR")
    assert cache_directory() == platformdirs.user_cache_path("laneway")


@pytest.mark.parametrize("given", ["~nosuchuser/x", b"bytes", 5, "nul\0character"])
def test_what_names_no_cache_directory_is_an_invalid_request(given: Any) -> None:
    for use in (cache_directory, laneway.KVCaches, lambda place: laneway.open_engine(cache_dir=place)):
        with pytest.raises(InvalidRequestError, match=r"cache_dir: .*(the home directory of a user|must be a path)"):
            use(given)


def test_a_cache_directory_that_is_a_file_is_an_invalid_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    for place in (file, file / "below"):
        with pytest.raises(InvalidRequestError, match=r"cache_dir: .* is no directory; name a directory"):
            laneway.open_engine(cache_dir=place)
        monkeypatch.setenv("LANEWAY_CACHE_DIR", str(place))
        with pytest.raises(InvalidRequestError, match=r"LANEWAY_CACHE_DIR: .* is no directory"):
            laneway.open_engine()
    monkeypatch.setenv("LANEWAY_CACHE_DIR", "~nosuchuser/x")
    with pytest.raises(InvalidRequestError, match=r"LANEWAY_CACHE_DIR: '~nosuchuser/x' names the home directory"):
        laneway.open_engine()


def test_catalogue_entries_say_what_they_are() -> None:
    for name, package in CATALOGUE.items():
        assert package.name == name
        assert re.fullmatch(r"[0-9a-f]{64}", package.sha256 or "")
        assert package.size
        assert package.about
        assert find_package(name) is package
        folders = {other.folder for other in CATALOGUE.values() if other is not package}
        assert package.folder not in folders
        for file in package.files:
            assert find_package(f"pypi:{file.requirement}/{file.member}") is not None


# --- packages ---------------------------------------------------------------------------------------------------------


def test_package_source(tmp_path: Path) -> None:
    text = f"pypi:My_Model.Pkg==1.2.post1/some/dir/tiny.gguf#sha256={SHA.upper()}"
    assert find_package(text) == Package(
        name="tiny",
        files=(PackageFile("my-model-pkg", "1.2.post1", "some/dir/tiny.gguf"),),
        folder="my-model-pkg-1.2.post1",
        file_name="tiny.gguf",
        sha256=SHA,
    )
    assert f"run: laneway pull '{text}'" in refusal(text)
    put(tmp_path / "cache" / "models" / "my-model-pkg-1.2.post1" / "tiny.gguf")
    assert parse_source(text).name == "tiny"


def test_package_source_and_name_share_the_file() -> None:
    package = CATALOGUE["smollm2"]
    put(package.path())
    (file,) = package.files
    assert parse_source(f"pypi:{file.requirement}/{file.member}").path == package.path()


@pytest.mark.parametrize(
    "text",
    [
        "pypi:",
        "pypi:name/file.gguf",
        "pypi:name==1.0",
        "pypi:name==1.0/",
        "pypi:name>=1.0/file.gguf",
        "pypi:name==../file.gguf",
        "pypi:../name==1.0/file.gguf",
        "pypi:name==1.0/../../file.gguf",
        "pypi:name==1.0//etc/passwd",
        "pypi:name==1.0/a/./b.gguf",
        "pypi:name==1.0/a\\b.gguf",
        "pypi:name==1.0/a\0b.gguf",
        "pypi:name==1.0/file.gguf#sha256=abc",
        "pypi:name==1.0/file.gguf#md5=abc",
        "pypi:--index-url==1.0/file.gguf",
    ],
)
def test_malformed_package_source(text: str) -> None:
    reason = refusal(text)
    assert "it is not of the form pypi:" in reason or "is no path of a file inside a wheel" in reason
