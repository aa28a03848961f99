"""Keeping other processes off a cache file: an advisory lock for each, which never makes anybody wait.

The lock is on a file of its own, because the cache file is replaced by every turn.  It is gone again when nobody holds
it: the holder removes it before it lets go, and who has opened it meanwhile finds that out and tries again with a new
one.  The kernel frees the lock of a process that dies, however it dies.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import filelock

from laneway._kvcache._keys import LOCKS

log = logging.getLogger("laneway.cache")


class FileLock:
    """The lock of one cache file.  Does not block; tells what is wrong instead of raising."""

    def __init__(self, root: Path, path: Path) -> None:
        self.path = path
        """The file that it is for."""
        self.failure: OSError | None = None
        """Why nobody can be kept off, if so."""
        # By the path inside the directory: whatever another process calls the directory itself, it is the same file.
        name = hashlib.blake2b(path.relative_to(root).as_posix().encode(), digest_size=16).hexdigest()
        self._file = root / LOCKS / f"{name}.lock"
        self._lock: filelock.BaseFileLock | None = None

    def __repr__(self) -> str:
        return f"<laneway.FileLock {'held' if self.held else 'not held'}, {self.path.name}>"

    @property
    def held(self) -> bool:
        """Whether this object holds the lock."""
        return self._lock is not None and self._lock.is_locked

    def try_enter(self) -> bool:
        """Take the lock if nobody has it; whether it was taken.  False, too, where locking itself fails: see
        :attr:`failure`."""
        if self.held:
            return True
        self.failure = None
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            # Soft locks would outlive a process that is killed, and with it its turn.
            lock = filelock.FileLock(self._file, timeout=0, thread_local=False, fallback_to_soft=False)
            lock.acquire()
        except filelock.Timeout:
            return False
        except OSError as error:
            self.failure = error
            return False
        self._lock = lock
        return True

    def enter(self) -> bool:
        """As the gate of a request: whether it may go on, with the lock or because there can be none."""
        return self.try_enter() or self.failure is not None

    def leave(self) -> None:
        """Let go of the lock, if it is held."""
        lock, self._lock = self._lock, None
        if lock is None:
            return
        try:
            self._file.unlink(missing_ok=True)
        except OSError as error:
            log.debug("the lock file %s stays: %s", self._file, error)
        try:
            lock.release()
        except OSError as error:
            # Its descriptor is closed all the same, and with it the lock is gone.
            log.warning("letting go of %s failed: %s", self._file, error)
