"""What a model's weights are, as a digest: a kept state is of use on the same weights alone.

Hashing 20 GB whole takes most of a minute on one core, so large tensors are sampled: each tensor up to 1 MiB is hashed
whole, of each larger one the first and the last 4 KiB and 4 KiB of every 64 KiB.  A tensor that was trained further,
or stored with another type, differs nearly everywhere, so one such tensor is always noticed; so is any change that
covers 64 KiB in a row.  The digest is a guard against mistakes.  It is no proof against a file that was forged to have
the same digest.

A digest is kept in memory for the file that it was made of.  The file is known by device, inode, size and the times of
its last changes; a file that was changed less than two seconds before is hashed again next time, because some file
systems tell times no finer than that.
"""

from __future__ import annotations

import functools
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs

from laneway.decoder import InvalidRequestError

WHOLE = 1 << 20
"""Bytes up to which a tensor is hashed whole."""
STRIDE = 1 << 16
"""Of a larger tensor one block is read for every so many bytes."""
BLOCK = 1 << 12
"""Bytes of such a block."""
_SETTLED_NS = 2 * 10**9
_PIECE = 1 << 20
"""Bytes that are read at a time."""

Identity = tuple[int, int, int, int, int]
"""Device, inode, size, and the times of the last change of the contents and of the file, in nanoseconds."""


def identity_of(facts: os.stat_result) -> Identity:
    """What tells a file, as it is now, from every other file and from itself after a change."""
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns


@attrs.frozen
class DataFile:
    """A file with weights as it was when its header was read, and where the data of its tensors lie, in bytes."""

    path: Path
    identity: Identity
    ranges: tuple[tuple[int, int], ...] = attrs.field(repr=False)
    """Begin and length of each tensor."""

    def now(self) -> DataFile | None:
        """The file that has this name now; None if there is none."""
        try:
            return attrs.evolve(self, identity=identity_of(self.path.stat()))
        except OSError:
            return None

    def replaced_by(self, other: DataFile | None) -> bool:
        """Whether ``other`` has taken its name, so that what was mapped of it is as it was."""
        return other is None or other.identity[:2] != self.identity[:2]


def blocks(begin: int, length: int) -> Iterator[tuple[int, int]]:
    """Begin and length of what is hashed of a tensor's data, in order."""
    if length <= WHOLE:
        yield begin, length
        return
    for at in range(begin, begin + length - BLOCK, STRIDE):
        yield at, BLOCK
    yield begin + length - BLOCK, BLOCK


_known: dict[tuple[Identity, ...], bytes] = {}
_lock = threading.Lock()


def weights_digest(files: Sequence[DataFile], check: Callable[[], object] = lambda: None) -> bytes:
    """32 bytes that tell the weights in ``files``, the parts of one model, from other weights.

    Blocks for as long as the reading takes, about a sixteenth of the files.  ``check`` is called for every few MiB and
    may raise to end it.  One thread at a time makes digests; a second one for the same files finds that of the first.

    A file that was replaced since is still in memory as it was, so a digest that is known of it holds.  A file that was
    written to may have changed in memory, too: its digest must come out as before.

    Raises :class:`InvalidRequestError` if what is in memory is not known: a file has changed since it was loaded.
    """
    while not _lock.acquire(timeout=0.05):
        check()
    try:
        known = _known.get(_key(files))
        current = [file.now() for file in files]
        if current == list(files):
            return known or _compute(files, check)
        changed = [(file, now) for file, now in zip(files, current, strict=True) if now != file]
        if known is None:
            raise _changed(changed[0][0])
        for file, now in changed:
            if not file.replaced_by(now):
                assert now is not None
                if _compute([now if each is file else each for each in files], check) != known:
                    raise _changed(file)
        return known
    finally:
        _lock.release()


def _key(files: Sequence[DataFile]) -> tuple[Identity, ...]:
    return tuple(file.identity for file in files)


def _compute(files: Sequence[DataFile], check: Callable[[], object]) -> bytes:
    # Taken before the reading: a change that comes later has a later time.
    began = time.time_ns()
    hasher = hashlib.blake2b(digest_size=32)
    for file in files:
        _feed(hasher.update, file, check)
    digest = hasher.digest()
    for file in files:
        if file.now() != file:
            raise _changed(file)
    if all(began - max(file.identity[3:]) >= _SETTLED_NS for file in files):
        _known[_key(files)] = digest
    return digest


def _feed(update: Callable[[bytes], object], file: DataFile, check: Callable[[], object]) -> None:
    try:
        with open(file.path, "rb", buffering=0) as opened:
            if identity_of(os.fstat(opened.fileno())) != file.identity:
                raise _changed(file)
            read = functools.partial(os.pread, opened.fileno())
            since = 0
            for begin, length in file.ranges:
                update(length.to_bytes(8, "little"))
                for at, count in blocks(begin, length):
                    update(read(count, at))
                    since += count
                    if since >= _PIECE:
                        since = 0
                        check()
    except OSError as error:
        raise InvalidRequestError(
            f"the model's file {file.path} cannot be read any more ({error.strerror or error}), so a cache cannot be "
            "tied to its weights; load the model again",
            "kv_cache",
        ) from error


def _changed(file: DataFile) -> InvalidRequestError:
    return InvalidRequestError(
        f"the model's file {file.path} has changed since it was loaded, so a cache cannot be tied to the weights in "
        "memory; load the model again",
        "kv_cache",
    )
