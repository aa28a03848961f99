"""CTranslate2 directories and Argos packages on the disk: what is in them, checked before anything native sees it.

A package is a zip file from strangers.  It is read into the memory and never unpacked, so that nothing of it can land
anywhere on the disk or stay behind; what would escape, or swell, is refused all the same.  Everything here blocks.
"""

from __future__ import annotations

import json
import re
import stat
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

import attrs

from laneway import InvalidRequestError, ModelLoadError
from laneway_plugins._languages import find_language

PACKAGE_SUFFIX = ".argosmodel"
MODEL_FILE = "model.bin"

MAX_ENTRIES = 10_000
"""Files of one package."""
MAX_BYTES = 8 << 30
"""All files of one package, unpacked."""
MAX_RATIO = 100
"""How many times larger than the zip file its contents may be; models hardly shrink at all."""
FREE_BYTES = 64 << 20
"""Unpacked bytes below which the ratio is of no interest."""
MAX_METADATA = 1 << 20
"""Bytes of ``metadata.json`` and other small files."""

_SENTENCEPIECE_FILES = ("sentencepiece.model", "spm.model", "sentencepiece.bpe.model", "source.spm")
_ARGOS_CODES = {"zt": "zh-Hant", "pb": "pt-BR"}
"""Codes of its own that Argos uses."""

Tokens = Literal["sentencepiece", "characters", "words"]


@attrs.frozen(kw_only=True)
class Pair:
    """A translation model for one pair of languages, before it is opened.

    ``source`` and ``target`` are codes as :func:`canonical_code` gives them, empty if nothing says what they are.
    """

    path: Path
    name: str
    source: str = ""
    target: str = ""
    target_prefix: tuple[str, ...] = ()
    source_prefix: tuple[str, ...] = ()
    tokens: Tokens | None = None

    @property
    def label(self) -> str:
        """``en to de``, for people."""
        return f"{self.source or '?'} to {self.target or '?'}"


@attrs.frozen(kw_only=True)
class PairFiles:
    """What a pair is opened from: ``model`` maps file names to contents."""

    model: Mapping[str, bytes] = attrs.field(repr=lambda files: f"{len(files)} files")
    sentencepiece: bytes | None = attrs.field(repr=False)
    source_vocabulary: frozenset[str] = attrs.field(repr=False)
    target_vocabulary: frozenset[str] = attrs.field(repr=False)
    tokens: Tokens


def canonical_code(code: str) -> str:
    """The code under which a language is looked for; one that is not known stays as it is, in lower case."""
    try:
        return find_language(_ARGOS_CODES.get(code.lower(), code), "language").code
    except InvalidRequestError:
        return code.lower()


def is_translation_source(path: Path) -> bool:
    """Whether :func:`find_pairs` would look into ``path``."""
    if path.suffix == PACKAGE_SUFFIX or (path / MODEL_FILE).is_file():
        return True
    return path.is_dir() and (_is_unpacked(path) or any(map(_is_package, path.iterdir())))


def _is_package(path: Path) -> bool:
    return (path.suffix == PACKAGE_SUFFIX and path.is_file()) or _is_unpacked(path)


def _is_unpacked(path: Path) -> bool:
    return (path / "metadata.json").is_file() and (path / "model" / MODEL_FILE).is_file()


def find_pairs(path: Path) -> list[Pair]:
    """The pairs at ``path``: of a package or a model directory one, of a directory with such in it all of them.

    Raises :class:`ModelLoadError` if one of them is not what it says.
    """
    if path.suffix == PACKAGE_SUFFIX and path.is_file():
        with _Package(path) as package:
            return [_packaged_pair(path, package.metadata())]
    if (path / MODEL_FILE).is_file():
        return [_directory_pair(path)]
    if _is_unpacked(path):
        return [_packaged_pair(path, _parse_metadata(path, _read_small(path / "metadata.json")))]
    pairs = [pair for entry in sorted(path.iterdir()) if _is_package(entry) for pair in find_pairs(entry)]
    if not pairs:
        raise ModelLoadError(str(path), f"there is neither {MODEL_FILE} nor any {PACKAGE_SUFFIX} package in it")
    return pairs


def read_files(pair: Pair) -> PairFiles:
    """Everything that the model is made of.  Raises :class:`ModelLoadError`."""
    path = pair.path
    if path.is_file():
        with _Package(path) as package:
            files = package.read()
        return _pair_files(pair, _below(files, "model/"), files)
    model = path if (path / MODEL_FILE).is_file() else path / "model"
    around = [path, model] if model != path or (path / "metadata.json").exists() else [path]
    if model == path and (path.parent / "metadata.json").is_file():
        around.append(path.parent)
    try:
        files = {entry.name: entry.read_bytes() for entry in sorted(model.iterdir()) if entry.is_file()}
        others = {
            name: (folder / name).read_bytes()
            for folder in around
            for name in (*_SENTENCEPIECE_FILES, "bpe.model")
            if (folder / name).is_file()
        }
    except OSError as error:
        raise _fault(path, f"{error.filename}: {error.strerror}") from error
    return _pair_files(pair, files, others)


def _pair_files(pair: Pair, model: dict[str, bytes], around: Mapping[str, bytes]) -> PairFiles:
    if MODEL_FILE not in model:
        raise _fault(pair.path, f"it has no {MODEL_FILE}")
    sentencepiece = next((around[name] for name in _SENTENCEPIECE_FILES if name in around), None)
    source = _vocabulary(pair, model, "source_vocabulary")
    target = _vocabulary(pair, model, "target_vocabulary")
    missing = [token for token in pair.target_prefix if token not in target]
    missing += [token for token in pair.source_prefix if token not in source]
    if missing:
        raise _fault(pair.path, f"its vocabulary lacks the prefix {', '.join(map(repr, missing))}")
    tokens = pair.tokens or _guess_tokens(pair, source, sentencepiece, around)
    if tokens == "sentencepiece" and sentencepiece is None:
        raise _fault(pair.path, f"no SentencePiece model is beside it ({', '.join(_SENTENCEPIECE_FILES)})")
    wanted = {name: data for name, data in model.items() if name == MODEL_FILE or name.endswith((".json", ".txt"))}
    return PairFiles(
        model=wanted,
        sentencepiece=sentencepiece if tokens == "sentencepiece" else None,
        source_vocabulary=source,
        target_vocabulary=target,
        tokens=tokens,
    )


def _guess_tokens(
    pair: Pair, vocabulary: Iterable[str], sentencepiece: bytes | None, around: Mapping[str, bytes]
) -> Tokens:
    if sentencepiece is not None:
        return "sentencepiece"
    if "bpe.model" in around:
        raise _fault(pair.path, "its text is cut by subword-nmt (bpe.model), which is not supported")
    plain = [piece for piece in vocabulary if not (piece.startswith("<") and piece.endswith(">"))]
    if any("▁" in piece for piece in plain):
        raise _fault(
            pair.path,
            "its vocabulary is one of SentencePiece, and the model to cut text with is not beside it "
            f"({', '.join(_SENTENCEPIECE_FILES)})",
        )
    return "characters" if all(len(piece) == 1 for piece in plain) else "words"


def _vocabulary(pair: Pair, model: Mapping[str, bytes], kind: str) -> frozenset[str]:
    for stem in (kind, "shared_vocabulary"):
        if f"{stem}.json" in model:
            try:
                pieces = json.loads(model[f"{stem}.json"])
            except ValueError as error:
                raise _fault(pair.path, f"{stem}.json is no JSON: {error}") from error
            if not isinstance(pieces, list) or not all(isinstance(piece, str) for piece in pieces):
                raise _fault(pair.path, f"{stem}.json is not a list of strings")
            return frozenset(pieces)
        if f"{stem}.txt" in model:
            return frozenset(model[f"{stem}.txt"].decode("utf-8", "replace").split("\n")) - {""}
    raise _fault(pair.path, f"it has neither {kind} nor shared_vocabulary (.json or .txt)")


def _below(files: Mapping[str, bytes], folder: str) -> dict[str, bytes]:
    return {name.removeprefix(folder): data for name, data in files.items() if name.startswith(folder)}


# What a pair says of itself.


def _directory_pair(path: Path) -> Pair:
    for folder in (path, path.parent):
        file = folder / "metadata.json"
        if file.is_file():
            described = _packaged_pair(path, _parse_metadata(file, _read_small(file)))
            return attrs.evolve(described, name=path.name if folder == path else folder.name)
    return Pair(path=path, name=path.resolve().name)


def _packaged_pair(path: Path, metadata: Mapping[str, Any]) -> Pair:
    kind = metadata.get("type", "translate")
    if kind != "translate":
        raise _fault(path, f"it is a package for {kind!r}, not for translating")
    codes = []
    for key in ("from_code", "to_code"):
        code = metadata.get(key)
        if not isinstance(code, str) or not code:
            raise _fault(path, f"its metadata.json has no {key}")
        codes.append(canonical_code(code))
    prefix = metadata.get("target_prefix") or []
    tokens = [prefix] if isinstance(prefix, str) else prefix
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise _fault(path, f"the target_prefix in its metadata.json must be a token or a list of them, not {prefix!r}")
    return Pair(path=path, name=path.stem, source=codes[0], target=codes[1], target_prefix=tuple(tokens))


def _parse_metadata(path: Path, data: bytes) -> Mapping[str, Any]:
    try:
        metadata = json.loads(data)
    except ValueError as error:
        raise _fault(path, f"metadata.json is no JSON: {error}") from error
    if not isinstance(metadata, dict):
        raise _fault(path, "metadata.json is no JSON object")
    return metadata


def _read_small(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(MAX_METADATA + 1)
    if len(data) > MAX_METADATA:
        raise _fault(path, f"it is larger than {MAX_METADATA:,} bytes")
    return data


# The zip file.


class _Package:
    """One open package, its entries checked.  ``names`` are below the package's one folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._archive = zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError) as error:
            raise _fault(path, f"it is no zip file that can be read: {error}") from error
        try:
            self._entries = self._checked()
        except BaseException:
            self._archive.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._archive.close()

    def metadata(self) -> Mapping[str, Any]:
        """``metadata.json``."""
        if self._entries["metadata.json"].file_size > MAX_METADATA:
            raise _fault(self._path, f"metadata.json is larger than {MAX_METADATA:,} bytes")
        return _parse_metadata(self._path, self._read("metadata.json"))

    def read(self) -> dict[str, bytes]:
        """The files that a translation needs, by name; tools for cutting sentences and the like are left out."""
        wanted = [
            name
            for name in self._entries
            if re.fullmatch(r"model/[^/]+", name) or name in (*_SENTENCEPIECE_FILES, "bpe.model")
        ]
        return {name: self._read(name) for name in wanted}

    def _read(self, name: str) -> bytes:
        entry = self._entries[name]
        try:
            with self._archive.open(entry) as file:
                # Never more than is declared, whatever the compressed data hold.
                data = file.read(entry.file_size)
        except (OSError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError) as error:
            raise _fault(self._path, f"{name} cannot be read: {error}") from error
        if len(data) != entry.file_size:
            raise _fault(self._path, f"{name} is shorter than it should be: the file is damaged")
        return data

    def _checked(self) -> dict[str, zipfile.ZipInfo]:
        infos = self._archive.infolist()
        if len(infos) > MAX_ENTRIES:
            raise _fault(self._path, f"it has {len(infos):,} entries; at most {MAX_ENTRIES:,} are taken")
        for info in infos:
            _check_entry(self._path, info)
        total = sum(info.file_size for info in infos)
        allowed = max(FREE_BYTES, MAX_RATIO * self._path.stat().st_size)
        if total > min(allowed, MAX_BYTES):
            raise _fault(
                self._path,
                f"its files would be {total:,} bytes unpacked, and of a package of this size at most "
                f"{min(allowed, MAX_BYTES):,} are taken",
            )
        roots = [info.filename.removesuffix("metadata.json") for info in infos if _is_metadata(info.filename)]
        if len(roots) != 1:
            raise _fault(self._path, f"it has {len(roots) or 'no'} metadata.json at its top; a package has one")
        entries: dict[str, zipfile.ZipInfo] = {}
        for info in infos:
            if info.is_dir() or not info.filename.startswith(roots[0]):
                continue
            name = info.filename.removeprefix(roots[0])
            if name in entries:
                raise _fault(self._path, f"it has {name} twice")
            entries[name] = info
        return entries


def _is_metadata(name: str) -> bool:
    return re.fullmatch(r"([^/]+/)?metadata\.json", name) is not None


def _check_entry(path: Path, info: zipfile.ZipInfo) -> None:
    name = info.orig_filename
    parts = name.removesuffix("/").split("/")
    if "\\" in name or "\0" in name or re.match(r"[A-Za-z]:", name) or any(part in ("", ".", "..") for part in parts):
        raise _fault(path, f"its entry {name!r} would land outside of the package's folder")
    kind = stat.S_IFMT(info.external_attr >> 16)
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise _fault(path, f"its entry {name!r} is a link or a special file")
    if info.flag_bits & 1:
        raise _fault(path, f"its entry {name!r} is encrypted")


def _fault(path: Path, reason: str) -> ModelLoadError:
    return ModelLoadError(str(path), reason)
