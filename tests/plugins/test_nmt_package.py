"""Packages and directories as strangers write them."""

from __future__ import annotations

import json
import stat
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from laneway import ModelLoadError
from laneway_plugins import _nmt_package
from laneway_plugins._nmt_package import Pair, canonical_code, find_pairs, is_translation_source, read_files
from laneway_plugins._nmt_routes import find_route, languages

METADATA = {"from_code": "en", "to_code": "de"}
VOCABULARY = json.dumps(["<unk>", "<s>", "</s>", "▁a", "b", "__de__"])


def package(path: Path, entries: dict[str, str] | None = None, metadata: object = METADATA) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("pair/metadata.json", metadata if isinstance(metadata, str) else json.dumps(metadata))
        for name, text in (entries or {}).items():
            archive.writestr(name, text)
    return path


GOOD = {
    "pair/model/model.bin": "weights",
    "pair/model/config.json": "{}",
    "pair/model/shared_vocabulary.json": VOCABULARY,
    "pair/sentencepiece.model": "pieces",
    "pair/stanza/large": "left where it is",
    "pair/README.md": "text",
}


def test_a_package_is_read_without_being_unpacked(tmp_path: Path) -> None:
    path = package(tmp_path / "en_de.argosmodel", GOOD, {**METADATA, "target_prefix": "__de__"})
    (pair,) = find_pairs(path)
    assert (pair.source, pair.target, pair.target_prefix, pair.name) == ("en", "de", ("__de__",), "en_de")
    files = read_files(pair)
    assert dict(files.model) == {
        "model.bin": b"weights",
        "config.json": b"{}",
        "shared_vocabulary.json": VOCABULARY.encode(),
    }
    assert files.sentencepiece == b"pieces"
    assert files.tokens == "sentencepiece"
    assert files.source_vocabulary == files.target_vocabulary == set(json.loads(VOCABULARY))
    assert sorted(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "name",
    [
        "../evil",
        "pair/../../evil",
        "/etc/evil",
        "pair//evil",
        "./pair/evil",
        "C:/evil",
        "pair\\..\\evil",
        "pair/model/..",
    ],
)
def test_entries_that_would_escape_are_refused(tmp_path: Path, name: str) -> None:
    path = package(tmp_path / "x.argosmodel", {**GOOD, name: "boo"})
    with pytest.raises(ModelLoadError, match="would land outside"):
        find_pairs(path)
    assert sorted(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR])
def test_links_and_special_files_are_refused(tmp_path: Path, kind: int) -> None:
    path = package(tmp_path / "x.argosmodel", GOOD)
    with zipfile.ZipFile(path, "a") as archive:
        entry = zipfile.ZipInfo("pair/model/vmap.txt")
        entry.external_attr = (kind | 0o777) << 16
        archive.writestr(entry, "/etc/passwd")
    with pytest.raises(ModelLoadError, match="a link or a special file"):
        find_pairs(path)


def test_bombs_are_refused_before_they_are_read(tmp_path: Path) -> None:
    path = package(tmp_path / "x.argosmodel", GOOD)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("pair/model/extra.txt", "w") as file:
            for _ in range(65):
                file.write(bytes(1 << 20))
    assert path.stat().st_size < 200_000
    with pytest.raises(ModelLoadError, match="bytes unpacked, and of a package of this size at most 67,108,864"):
        find_pairs(path)


def test_a_bomb_that_lies_about_its_size_gives_what_it_declared_at_most(tmp_path: Path) -> None:
    path = package(tmp_path / "x.argosmodel", {**GOOD, "pair/model/extra.txt": "0" * 100_000})
    data = bytearray(path.read_bytes())
    record = data.rindex(b"pair/model/extra.txt") - 46  # the entry in the directory at the end of the file
    assert data[record : record + 4] == b"PK\x01\x02"
    struct.pack_into("<I", data, record + 24, 10)
    path.write_bytes(data)
    (pair,) = find_pairs(path)
    with pytest.raises(ModelLoadError, match="cannot be read: Bad CRC"):
        read_files(pair)


def test_too_many_entries_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_nmt_package, "MAX_ENTRIES", 5)
    with pytest.raises(ModelLoadError, match="it has 7 entries; at most 5"):
        find_pairs(package(tmp_path / "x.argosmodel", GOOD))


def without(name: str) -> dict[str, str]:
    return {key: value for key, value in GOOD.items() if key != f"pair/{name}"}


@pytest.mark.parametrize(
    ("entries", "metadata", "reason"),
    [
        (without("model/model.bin"), METADATA, "it has no model.bin"),
        (without("model/shared_vocabulary.json"), METADATA, "neither source_vocabulary nor shared_vocabulary"),
        (without("sentencepiece.model"), METADATA, "the model to cut text with is not beside it"),
        ({**without("sentencepiece.model"), "pair/bpe.model": "x"}, METADATA, "subword-nmt"),
        ({**GOOD, "pair/model/shared_vocabulary.json": "[1]"}, METADATA, "not a list of strings"),
        ({**GOOD, "pair/model/shared_vocabulary.json": "["}, METADATA, "is no JSON"),
        (GOOD, "[", "metadata.json is no JSON"),
        (GOOD, "[]", "no JSON object"),
        (GOOD, {"from_code": "en"}, "no to_code"),
        (GOOD, {**METADATA, "type": "sbd"}, "a package for 'sbd'"),
        (GOOD, {**METADATA, "target_prefix": 5}, "must be a token or a list"),
        (GOOD, {**METADATA, "target_prefix": "__fr__"}, "its vocabulary lacks the prefix '__fr__'"),
        ({**GOOD, "other/metadata.json": "{}"}, METADATA, "it has 2 metadata.json"),
    ],
)
def test_what_is_wrong_with_a_package_is_said(
    tmp_path: Path, entries: dict[str, str], metadata: object, reason: str
) -> None:
    path = package(tmp_path / "x.argosmodel", entries, metadata)
    with pytest.raises(ModelLoadError, match=reason) as caught:
        for pair in find_pairs(path):
            read_files(pair)
    assert caught.value.source == str(path)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    place = data.index(b"pair/model/model.bin") + len("pair/model/model.bin")
    data[place + 2] ^= 0xFF
    path.write_bytes(data)


def page(path: Path) -> None:
    path.write_text("<!DOCTYPE html>")


@pytest.mark.parametrize("harm", [truncate, flip, page])
def test_damaged_packages(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    path = package(tmp_path / "x.argosmodel", GOOD)
    harm(path)
    with pytest.raises(ModelLoadError, match=r"no zip file that can be read|cannot be read"):
        for pair in find_pairs(path):
            read_files(pair)


# Directories.


def unpacked(folder: Path, source: str = "en", target: str = "de") -> Path:
    (folder / "model").mkdir(parents=True)
    (folder / "metadata.json").write_text(json.dumps({"from_code": source, "to_code": target}))
    (folder / "model" / "model.bin").write_bytes(b"weights")
    (folder / "model" / "shared_vocabulary.json").write_text(VOCABULARY)
    (folder / "sentencepiece.model").write_bytes(b"pieces")
    return folder


def test_directories(tmp_path: Path) -> None:
    root = tmp_path / "packages"
    inner = unpacked(root / "en_de")
    package(root / "fr_en.argosmodel", GOOD, {"from_code": "fr", "to_code": "en"})
    (root / "notes.txt").write_text("x")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "model.bin").write_bytes(b"weights")
    (bare / "source_vocabulary.txt").write_text("<s>\na\nb\n")
    (bare / "target_vocabulary.txt").write_text("<s>\nabc\n")

    assert [(pair.source, pair.target) for pair in find_pairs(root)] == [("en", "de"), ("fr", "en")]
    for path in (inner, inner / "model"):
        (pair,) = find_pairs(path)
        assert (pair.source, pair.target) == ("en", "de")
        files = read_files(pair)
        assert files.sentencepiece == b"pieces"
        assert "model.bin" in files.model
    (pair,) = find_pairs(bare)
    assert (pair.source, pair.target) == ("", "")
    files = read_files(pair)
    assert files.tokens == "characters"
    assert files.source_vocabulary == {"<s>", "a", "b"}
    assert all(map(is_translation_source, (root, inner, inner / "model", bare, root / "fr_en.argosmodel")))
    assert not is_translation_source(tmp_path)
    assert not is_translation_source(root / "notes.txt")
    with pytest.raises(ModelLoadError, match=r"neither model\.bin nor any"):
        find_pairs(tmp_path)


# Codes and routes.


@pytest.mark.parametrize(
    ("code", "canonical"),
    [("en", "en"), ("eng", "en"), ("zt", "zh-Hant"), ("pb", "pt-BR"), ("zh_hans", "zh-Hans"), ("Klingon", "klingon")],
)
def test_codes_as_they_are_looked_for(code: str, canonical: str) -> None:
    assert canonical_code(code) == canonical


def pairs(text: str) -> list[Pair]:
    return [
        Pair(path=Path(pair), name=pair, source=pair.partition(">")[0], target=pair.partition(">")[2])
        for pair in text.split()
    ]


@pytest.mark.parametrize(
    ("installed", "source", "target", "route"),
    [
        ("en>de fr>en", "fr", "de", "fr en de"),
        ("en>de fr>en", "en", "de", "en de"),
        ("en>de fr>en", "de", "fr", None),
        ("fr>es es>de fr>en en>de", "fr", "de", "fr en de"),
        ("fr>en en>de fr>de", "fr", "de", "fr de"),
        ("fr>en en>fr", "fr", "de", None),
        ("a>b b>c c>d d>e", "a", "e", "a b c d e"),
        ("en>zh", "en", "zh-Hant", "en zh"),
        ("en>zh en>zh-Hant", "en", "zh-Hant", "en zh-Hant"),
        ("en>zh-Hant en>zh", "en", "zh", "en zh"),
        ("pt-BR>en en>de", "pt", "de", "pt-BR en de"),
        ("", "en", "de", None),
    ],
)
def test_routes(installed: str, source: str, target: str, route: str | None) -> None:
    known = pairs(installed)
    way = find_route(known, source, target)
    assert (None if way is None else " ".join(languages(known, way))) == route
