"""The caches of one directory: finding, listing, deleting, and keeping them within their bounds.

Files are looked at in worker threads.  Nobody deletes what is in use: whoever does a turn holds the lock of its file,
and so does whoever removes one.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, final
from urllib.parse import unquote

import attrs

from laneway import threads
from laneway._errors import CacheKeyError, InvalidRequestError, shown
from laneway._kvcache import _files
from laneway._kvcache._format import Facts, Miss
from laneway._kvcache._history import History, history_of, nearest
from laneway._kvcache._keys import AUTOMATIC, NAMED, check_model, folder_of, lies_in, path_of
from laneway._kvcache._locks import FileLock
from laneway._kvcache._retention import CacheRetention, Candidate, evict
from laneway._sources import cache_directory, check_directory

if TYPE_CHECKING:
    from laneway._model import Model

log = logging.getLogger("laneway.cache")


@attrs.frozen(kw_only=True)
class CacheEntry:
    """One cache file."""

    key: str | None
    """None for an automatic one."""
    model: str
    """The name of the model that it was made on; empty if the file cannot be read."""
    tokens: int
    bytes: int
    age: float
    """Seconds since it was last used."""
    path: Path
    damage: str | None = None
    """What is wrong with the file, which is a miss to everybody then."""

    @property
    def automatic(self) -> bool:
        """Whether it has no key."""
        return self.key is None


@attrs.frozen(kw_only=True)
class CacheDeletion:
    """What was deleted, and what was not because somebody uses it (rule K5)."""

    deleted: tuple[CacheEntry, ...] = ()
    in_use: tuple[CacheEntry, ...] = ()

    @property
    def bytes(self) -> int:
        """What was freed."""
        return sum(entry.bytes for entry in self.deleted)


@final
@attrs.frozen(kw_only=True, eq=False)
class CachePlan:
    """Which file a request is going to use.  Made before it arrives, by :meth:`KVCaches.plan`."""

    caches: KVCaches
    model: str
    fingerprint: bytes = attrs.field(repr=False)
    key: str | None = None
    history: History | None = None
    path: Path | None = None
    """The file whose turn it is; None for an automatic one that goes on from nowhere."""
    gate: FileLock | None = None
    """Keeps other processes off the file: for ``Prepared(gate=...)``."""

    @property
    def keys(self) -> tuple[Hashable, ...]:
        """What the request must hold alone in its lane: for ``Prepared(keys=...)``."""
        return () if self.path is None else (lane_key(self.path),)


def lane_key(path: Path) -> Hashable:
    """What a turn on a file claims in its lane (rule K2)."""
    return ("kv-cache", str(path))


@attrs.frozen
class _File(Candidate):
    path: Path


_Entries = list[CacheEntry]  # KVCaches has a method of the name `list`


@final
class KVCaches:
    """The KV caches below one directory.

    An engine has one of its own, ``engine.kv_caches``; any number of them, in any number of processes, may share a
    directory.

    :param cache_dir: Laneway's cache directory, as :func:`laneway.open_engine` takes it
    :param retention: the bounds of automatic caches (rule K6)
    """

    def __init__(
        self, cache_dir: str | os.PathLike[str] | None = None, retention: CacheRetention | None = None
    ) -> None:
        self.retention = CacheRetention() if retention is None else retention
        self._directory = cache_directory(cache_dir) / "kv"
        self._digests = cache_directory(cache_dir) / "digests"
        self._resolved: Path | None = None

    def __repr__(self) -> str:
        return f"<laneway.KVCaches {str(self._directory)!r}>"

    @property
    def directory(self) -> Path:
        """Where the files lie."""
        return self._directory

    @property
    def retention(self) -> CacheRetention:
        """The bounds of automatic caches (rule K6).  They may be changed at any time."""
        return self._retention

    @retention.setter
    def retention(self, value: CacheRetention) -> None:
        # Looked at after a commit, where it would be too late to complain.
        self._retention = _checked(value)

    # For operations.

    async def plan(
        self, model: Model, *, key: str | None = None, messages: Iterable[tuple[str, str]] = ()
    ) -> CachePlan:
        """Find the file of a request, and change no cache.

        The first call for a model waits until its weights have been read once, beside the event loop, because a saved
        state fits only the weights that made it.

        :param key: the conversation's name, nested ones as ``a/b``; or
        :param messages: the chat so far, as pairs of role and content, to find the file by
        :raises CacheKeyError: the key names no file, or one that another spelling of it has named
        :raises InvalidRequestError: the model's state cannot be kept
        """
        if key is not None:
            path_of(key, model.name)
        fingerprint = await model.state_fingerprint(str(self._digests))
        if fingerprint is None:
            raise InvalidRequestError(
                f"model {model.name!r} cannot keep a KV cache: its backend tells no fingerprint of its state",
                "kv_cache",
            )
        history = history_of(fingerprint, messages) if key is None else None
        return await threads.run_file(self._plan, model.name, fingerprint, key, history)

    def _plan(self, model: str, fingerprint: bytes, key: str | None, history: History | None) -> CachePlan:
        path: Path | None
        if key is not None:
            path = self._place(key, model)
            self.check_spelling(path, key)
        else:
            assert history is not None
            path, goes_on = self.nearest(history)
            if not goes_on:
                path = None  # a branch of another conversation: read, but not taken away
        return CachePlan(
            caches=self,
            model=model,
            fingerprint=fingerprint,
            key=key,
            history=history,
            path=path,
            gate=None if path is None else FileLock(self.root(), path),
        )

    # For turns; all of it blocks.

    def root(self) -> Path:
        """The directory with all links followed, looked up once."""
        if self._resolved is None:
            self._resolved = Path(os.path.realpath(self._directory))
        return self._resolved

    def _place(self, key: str, model: str) -> Path:
        """The file of a key."""
        return _files.place(self.root(), NAMED, path_of(key, model), key)

    def check_spelling(self, path: Path, key: str) -> None:
        """Raise :class:`CacheKeyError` if the file was made under a key that some disks take for this one."""
        try:
            stored = _files.read_head(path).facts.key
            alike = stored != key and folder_of(stored) == folder_of(key)
        except (Miss, CacheKeyError):
            return
        if alike:
            raise CacheKeyError(
                key, f"it differs from the key {stored!r} in case or in the form of its characters only; write it so"
            )

    def nearest(self, history: History) -> tuple[Path | None, bool]:
        """The file that shares the most messages with a history, and whether the history goes on from there."""
        known: dict[Path, tuple[str, ...]] = {}
        for path in _files.walk(self.root() / history.folder, deep=False):
            try:
                known[path] = _files.read_head(path).facts.digests
            except Miss:
                continue
        return nearest(history, known)

    # For programs.

    async def list(self) -> tuple[CacheEntry, ...]:
        """Every cache, those with keys first, in the order of their names; automatic ones the last used first."""
        return await threads.run_file(self._list)

    def _list(self) -> tuple[CacheEntry, ...]:
        check_directory(self._directory)
        entries = [entry for path in self._all(NAMED, AUTOMATIC) if (entry := self._entry(path)) is not None]
        entries.sort(key=lambda entry: (entry.automatic, entry.key or "", entry.age, entry.model))
        return tuple(entries)

    async def delete(self, key: str, *, model: str | None = None) -> CacheDeletion:
        """Delete the caches of a key, on all models or on one.  Keys nested in it are keys of their own, and stay.

        :raises CacheKeyError: the key or the model names no file inside the directory, or more than was meant
        """
        return await threads.run_file(self._delete_key, key, model)

    def _delete_key(self, key: str, model: str | None) -> CacheDeletion:
        check_directory(self._directory)
        if model is None:
            folder = _files.place(self.root(), NAMED, folder_of(key), key)
            paths = list(_caches(_files.walk(folder, deep=False, strict=True)))
        else:
            path = self._place(key, check_model(model, key))
            paths = [path] if path.is_file() else []
        for path in paths:
            self.check_spelling(path, key)
        return self._delete(paths)

    async def delete_automatic(self) -> CacheDeletion:
        """Delete all caches that have no key."""
        return await threads.run_file(lambda: self._delete(self._all(AUTOMATIC, strict=True)))

    async def delete_everything(self) -> CacheDeletion:
        """Delete all caches, those with keys included.  The directory itself stays."""
        return await threads.run_file(lambda: self._delete(self._all(NAMED, AUTOMATIC, strict=True)))

    async def prune(self, retention: CacheRetention | None = None) -> CacheDeletion:
        """Bring automatic caches within their bounds now, and remove what killed processes have left (rule K6).

        :param retention: other bounds than those of this object
        """
        return await threads.run_file(self._prune, self.retention if retention is None else _checked(retention))

    def _prune(self, retention: CacheRetention) -> CacheDeletion:
        """:meth:`prune`, blocking."""
        check_directory(self._directory)
        for path in _files.walk(self.root()):
            target = _files.target_of(path)
            if target is not None:
                self._holding(target, self._sweep_held)
        return self.evict(retention)

    def _sweep_held(self, path: Path) -> None:
        _files.sweep(path)
        _files.tidy(path.parent, self.root())

    def evict(self, retention: CacheRetention) -> CacheDeletion:
        """Remove automatic caches, the longest unused first, until they are within their bounds.  Blocks."""
        files = []
        for path in _caches(_files.walk(self.root() / AUTOMATIC)):
            try:
                status = path.stat()
            except OSError:
                continue  # gone meanwhile
            files.append(_File(path.name, status.st_size, status.st_mtime, path))
        deleted: list[CacheEntry] = []
        in_use: list[CacheEntry] = []
        evict(files, retention, time.time(), lambda file: self._remove(file.path, deleted, in_use))
        return CacheDeletion(deleted=tuple(deleted), in_use=tuple(in_use))

    def _all(self, *bases: str, strict: bool = False) -> Iterator[Path]:
        for base in bases:
            yield from _caches(_files.walk(self.root() / base, strict=strict))

    def _delete(self, paths: Iterable[Path]) -> CacheDeletion:
        check_directory(self._directory)
        deleted: list[CacheEntry] = []
        in_use: list[CacheEntry] = []
        for path in list(paths):
            self._remove(path, deleted, in_use)
        return CacheDeletion(deleted=tuple(deleted), in_use=tuple(in_use))

    def _remove(self, path: Path, deleted: _Entries, in_use: _Entries) -> bool:
        entry = self._entry(path)
        if entry is None:
            return True  # gone meanwhile
        gone = self._holding(path, self._remove_held)
        (deleted if gone else in_use).append(entry)
        return gone

    def _remove_held(self, path: Path) -> None:
        _files.remove(path)
        self._sweep_held(path)

    def _holding(self, path: Path, work: Callable[[Path], object]) -> bool:
        """Do ``work`` on a file under its lock; False if somebody else has that."""
        lock = FileLock(self.root(), path)
        if not lock.try_enter():
            if lock.failure is not None:
                raise lock.failure
            return False
        try:
            work(path)
        finally:
            lock.leave()
        return True

    def _entry(self, path: Path) -> CacheEntry | None:
        try:
            status = path.stat()
        except OSError:
            return None
        facts: Facts | None = None
        damage = None
        try:
            facts = _files.read_head(path).facts
        except Miss as miss:
            damage = str(miss)
        below = path.relative_to(self.root()).parts
        key = None
        if below[0] == NAMED:
            # Of a file that cannot be read, or that was copied from another key, the folded key is all that there is.
            ours = facts is not None and lies_in(facts.key, "/".join(below[:-1]))
            key = facts.key if facts is not None and ours else unquote("/".join(below[1:-1]))
        return CacheEntry(
            key=key,
            model="" if facts is None else facts.model,
            tokens=0 if facts is None else len(facts.tokens),
            bytes=status.st_size,
            age=max(0.0, time.time() - status.st_mtime),
            path=path,
            damage=damage,
        )


def _checked(value: CacheRetention) -> CacheRetention:
    if not isinstance(value, CacheRetention):
        raise TypeError(
            f"retention is a CacheRetention, not {shown(value)}; "
            "for no bounds take CacheRetention(max_bytes=None, max_idle=None)"
        )
    return value


def _caches(paths: Iterable[Path]) -> Iterator[Path]:
    return (path for path in paths if _files.target_of(path) is None)
