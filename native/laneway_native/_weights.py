"""Which weights a file holds: a digest of all its bytes, made beside the event loop and remembered.

A kept state is of use to the weights that made it, and to no others.  Two files may agree in header and size and
differ in one number, so nothing less than all bytes will do: a sample would miss a tensor that was changed in a place
between two samples.  What that costs was measured on one core of a server with AVX-512: SHA-256 takes in 1.1 GB/s
(BLAKE2b 0.9), so a model of 100 MB takes 0.09 s and one of 20 GB 18 s, once a file.

So a digest is made only for a request that keeps its state on disk, in pieces, in worker threads.  It is remembered by
the file's device, inode, size and both its times of change, in a folder that the caller names.  Those times have a
granularity: a file that changes twice within it looks as if it had changed once.  Version control systems have the same
problem with their index.  A digest is therefore remembered only if the file had been at rest for longer than that when
the reading began; else it is made again the next time.

A loaded model may differ from the file of its name: see :class:`WeightFile`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar, TypeVarTuple, Unpack

import attrs
import trio

from laneway.decoder import ModelLoadError
from laneway_native._log import logger
from laneway_native._threads import limiter_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PIECE = 1 << 24
"""Bytes of a file that are read at a time: some 15 ms of work, after which a cancelled wait leaves nothing behind."""

AT_REST = 2.0
"""Seconds after which a second change to a file shows in its times.  FAT counts them in steps of two."""

THREADS = 4
"""How many files are read at a time."""

MOST_RECORDS = 256
"""Digests that a folder keeps; the oldest make place."""


@attrs.frozen
class Stamp:
    """What changes with a file's content, times in nanoseconds."""

    device: int
    inode: int
    size: int
    modified: int
    changed: int

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def is_same_file(self, other: Stamp) -> bool:
        return (self.device, self.inode) == (other.device, other.inode)

    @property
    def age(self) -> float:
        """Seconds since the last change, by this machine's clock."""
        return (time.time_ns() - max(self.modified, self.changed)) / 1e9


_Args = TypeVarTuple("_Args")
_Result = TypeVar("_Result")
_limiter: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("laneway weight files")


async def _in_thread(function: Callable[[Unpack[_Args]], _Result], *args: *_Args) -> _Result:
    """Run a function in a worker thread.  A cancel abandons it, so it only reads, or replaces a file whole."""
    # The program's worker threads may all wait for this digest, so it has its own limiter.
    limiter = limiter_of(_limiter, THREADS)
    return await trio.to_thread.run_sync(function, *args, abandon_on_cancel=True, limiter=limiter)


class FileChanged(Exception):  # noqa: N818 - a verdict, which never leaves this module
    """A file is no longer what its stamp said."""


def stamp_of(path: str) -> Stamp | None:
    """None if the file cannot be looked at: it has gone, or its name can be no file's."""
    try:
        return Stamp.of(os.stat(path))
    except (OSError, ValueError):
        return None


def digest_piece(path: str, stamp: Stamp, begin: int) -> bytes:
    """The digest of a file's bytes from ``begin`` on, up to :data:`PIECE` of them.

    Raises :class:`FileChanged` unless the stamp holds before and after.
    """
    with open(path, "rb") as file:
        if Stamp.of(os.fstat(file.fileno())) != stamp:
            raise FileChanged
        file.seek(begin)
        piece = file.read(min(PIECE, stamp.size - begin))
        if Stamp.of(os.fstat(file.fileno())) != stamp:
            raise FileChanged
        return hashlib.sha256(piece).digest()


async def file_digest(path: str) -> bytes:
    """The digest of a file as it is now, 32 bytes.  It reads the file in worker threads, and remembers nothing.

    Raises :class:`ModelLoadError` if the file cannot be read, or changes while it is read.
    """
    with _faults_named(path):
        stamp = Stamp.of(await _in_thread(os.stat, path))
        pieces = [await _in_thread(digest_piece, path, stamp, begin) for begin in range(0, stamp.size, PIECE)]
    return hashlib.sha256(b"".join(pieces)).digest()


def file_digest_here(path: str) -> tuple[Stamp, bytes]:
    """The same in the calling thread, and the stamp that held while the file was read."""
    with _faults_named(path):
        stamp = Stamp.of(os.stat(path))
        pieces = [digest_piece(path, stamp, begin) for begin in range(0, stamp.size, PIECE)]
    return stamp, hashlib.sha256(b"".join(pieces)).digest()


@contextlib.contextmanager
def _faults_named(path: str) -> Iterator[None]:
    try:
        yield
    except FileChanged:
        raise ModelLoadError(
            path, "the file changed while its weights were read; try again when it is complete"
        ) from None
    except OSError as error:
        raise ModelLoadError(path, f"its weights cannot be read: {error.strerror or error}") from error


class WeightFile:
    """A file that is about to be loaded: afterwards, the digest of the weights that are in use.

    A file can change while it is loaded.  What was read from it stays as it was.  What is mapped stays as it was if
    another file has taken its name, and changes with the file if that was written over in place.  So the digest is
    that of the bytes at the time of the load, as long as it can be known.  Otherwise (the file was written over, or
    changed before its digest was made) 32 random bytes stand for it.  States that were kept before are of no use then;
    those that are kept now are of use until the model is unloaded or the file changes once more.  The log says so.

    Make it before the load and call :meth:`confirm` after it.  Its users are tasks of one Trio run.
    """

    def __init__(self, path: str | os.PathLike[str], *, mapped: bool) -> None:
        self.path = os.fspath(path)
        self._mapped = mapped
        self._loaded = stamp_of(self.path)
        self._seen = time.monotonic()
        self._digest: bytes | None = None
        self._settled = False
        """Whether the digest need not be made again."""
        self._lock = trio.Lock()
        self._pieces: list[bytes] = []
        self._pieces_of: Stamp | None = None
        self._pieces_settled = False
        self._stand_in: tuple[Stamp | None, bytes] | None = None

    def confirm(self) -> None:
        """The load has ended.  If the file has changed meanwhile, what was loaded cannot be known."""
        if stamp_of(self.path) != self._loaded:
            self._loaded = None

    async def digest(self, folder: str | None = None) -> bytes:
        """32 bytes that tell the weights in use from all others.

        ``folder``: where digests are remembered, None for nowhere.  One task works at a time, and others wait for what
        it finds.  A cancel ends the wait; pieces that are done are not read again.
        """
        async with self._lock:
            if self._digest is not None and self._settled and not self._mapped:
                return self._digest
            now = await _in_thread(stamp_of, self.path)
            why = "it has changed since it was loaded"
            try:
                known = await self._digest_at(now, folder)
            except FileChanged:
                known = None
            except OSError as error:
                known, why = None, f"it cannot be read any more: {error.strerror or error}"
            return known or self._instead(now, why)

    async def _digest_at(self, now: Stamp | None, folder: str | None) -> bytes | None:
        """The digest of what was loaded; None if it cannot be known."""
        loaded = self._loaded
        if loaded is None:
            return None
        if now == loaded:
            return await self._digest_of_loaded(loaded, folder)
        if self._digest is None and folder is not None:
            self._digest = await _in_thread(recall, folder, loaded)
        if self._digest is None:
            return None
        if now is None or not now.is_same_file(loaded) or not self._mapped:
            return self._digest
        # Touched, linked or written over: its bytes tell.
        found, settled = await self._read(now, folder)
        if found != self._digest:
            self._forget()
            return None
        self._loaded, self._settled = now, settled
        return found

    async def _digest_of_loaded(self, loaded: Stamp, folder: str | None) -> bytes | None:
        if self._digest is not None and self._settled:
            return self._digest
        found, settled = await self._read(loaded, folder)
        if self._digest not in (None, found):
            # It has changed, too soon after the last change for its times to show it.
            self._forget()
            return None
        self._digest, self._settled = found, settled
        return found

    async def _read(self, stamp: Stamp, folder: str | None) -> tuple[bytes, bool]:
        """The digest of the file as it is, and whether it may be remembered."""
        if folder is not None:
            known = await _in_thread(recall, folder, stamp)
            if known is not None:
                return known, True
        if self._pieces_of != stamp:
            self._pieces, self._pieces_of = [], stamp
            self._pieces_settled = self._is_at_rest(stamp)
            logger.info("reading the weights in %s, to know which kept states are theirs", self.path)
        while len(self._pieces) * PIECE < stamp.size:
            begin = len(self._pieces) * PIECE
            self._pieces.append(await _in_thread(digest_piece, self.path, stamp, begin))
        digest = hashlib.sha256(b"".join(self._pieces)).digest()
        settled = self._pieces_settled
        self._pieces, self._pieces_of = [], None
        if settled and folder is not None:
            await _in_thread(remember, folder, stamp, digest)
        return digest, settled

    def _is_at_rest(self, stamp: Stamp) -> bool:
        """Whether a change from now on would show in the stamp.

        The file may lie on another machine, whose clock is another one.  A stamp that has stood here for a while shows
        the same.
        """
        return stamp.age > AT_REST or (stamp == self._loaded and time.monotonic() - self._seen > AT_REST)

    def _forget(self) -> None:
        self._loaded = self._digest = None

    def _instead(self, now: Stamp | None, why: str) -> bytes:
        if self._stand_in is None or self._stand_in[0] != now:
            logger.warning(
                "conversations that were kept on disk with the weights in %s begin anew (%s); load the model again to "
                "have them back",
                self.path,
                why,
            )
            self._stand_in = now, secrets.token_bytes(32)
        return self._stand_in[1]


# --- records on disk --------------------------------------------------------------------------------------------------


def _record_path(folder: str, stamp: Stamp) -> Path:
    return Path(folder, f"{stamp.device:x}-{stamp.inode:x}.json")


def recall(folder: str, stamp: Stamp) -> bytes | None:
    """The digest that was remembered for a file of this stamp; None if there is none, or none that can be read."""
    try:
        record = json.loads(_record_path(folder, stamp).read_bytes())
        digest = bytes.fromhex(record.pop("sha256"))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return digest if record == attrs.asdict(stamp) and len(digest) == 32 else None


def remember(folder: str, stamp: Stamp, digest: bytes) -> None:
    """Keep a digest for :func:`recall`.  Where that cannot be written, the digest will be made again."""
    path = _record_path(folder, stamp)
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_text(json.dumps({**attrs.asdict(stamp), "sha256": digest.hex()}))
            part.replace(path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                part.unlink()
        records = sorted(path.parent.glob("*.json"), key=lambda each: each.stat().st_mtime_ns)
        for oldest in records[:-MOST_RECORDS]:
            oldest.unlink(missing_ok=True)
    except OSError as error:
        logger.info("the digest of the weights is not kept in %s: %s", folder, error)
