"""Cache files on the disk.  Everything here blocks: it runs in worker threads.

A file is written whole: under a temporary name beside its place, synced, renamed, the directory synced.  Whatever
happens, what was there before stays until the rename, and after it the new one is there for good.  A process that is
killed leaves its temporary file; whoever writes to that place next sweeps it away, and so does a prune.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import attrs

from laneway._errors import CacheKeyError
from laneway._kvcache._format import (
    PREAMBLE,
    Facts,
    Head,
    Miss,
    check_state,
    pack_head,
    parse_head,
    parse_preamble,
)
from laneway._kvcache._keys import SUFFIX

log = logging.getLogger("laneway.cache")

TEMPORARY = ".tmp"
_MADE_FOR = re.compile(rf"(.+{re.escape(SUFFIX)})\.[0-9a-f]+{re.escape(TEMPORARY)}", re.DOTALL)
_BLOCK = 2**20  # bytes between two looks at whether the writing is still wanted


@attrs.frozen
class Stored:
    """What a file held: its facts, and the decoder's state."""

    facts: Facts
    state: bytes = attrs.field(repr=False)


def place(root: Path, base: str, relative: str, key: str = "") -> Path:
    """The file or directory that ``relative`` names below ``root`` (itself resolved), links followed.

    Two aliases of one file have one place, so turns on them wait for each other (rule K2).

    :raises CacheKeyError: a link leads out of ``base``, a directory in ``root``, to it, or round in circles
    """
    path = root / relative
    inside = root / base
    try:
        resolved = Path(os.path.realpath(path, strict=False))
    except OSError as error:
        raise CacheKeyError(key, f"{path} cannot be followed: {_reason(error)}") from None
    if os.path.islink(resolved):  # where looking is forbidden, whoever opens the file will hear of it
        raise CacheKeyError(key, f"{path} is a link that leads round in circles")
    # A file, whose name begins so, lies in the directory of a key, and that is never the directory of all keys.
    folder = resolved.parent if path.name.startswith("=") else resolved
    if folder == inside or not folder.is_relative_to(inside):
        raise CacheKeyError(key, f"{path} leads out of the directory of its caches, to {resolved}")
    return resolved


def read_head(path: Path) -> Head:
    """What a file says of itself.  Raises :class:`Miss`."""
    with _open(path) as file:
        return _head(file)


def read(path: Path, wanted: Callable[[Facts], None]) -> Stored:
    """A whole file, if ``wanted`` does not raise :class:`Miss` for what it says of itself.  Raises :class:`Miss`."""
    with _open(path) as file:
        head = _head(file)
        wanted(head.facts)
        try:
            state = file.read(head.state_size)
        except OSError as error:
            raise Miss(f"the file cannot be read: {_reason(error)}") from error
        except MemoryError:
            raise Miss(f"the file's state of {head.state_size} bytes does not fit into memory") from None
    check_state(head, state)
    return Stored(head.facts, state)


def write(path: Path, facts: Facts, state: bytes, checkpoint: Callable[[], object]) -> int:
    """Put a file in its place, whole and for good.  Returns its size in bytes.

    Should the disk fail to sync the directory, after all that, the file is there all the same, which is logged.

    :param checkpoint: called before every part; what it raises ends the writing, and nothing has changed
    :raises OSError: nothing has changed
    """
    checkpoint()
    head = pack_head(facts, state)
    checkpoint()
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}{TEMPORARY}")
    # A new directory is there for good only when the one that it lies in has been synced as well.
    new = [folder for folder in path.parents if not folder.exists()]
    file = _create(temporary)
    try:
        with file:
            for block in _blocks(head, state):
                checkpoint()
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        checkpoint()
        os.replace(temporary, path)
    except BaseException:
        remove(temporary)
        raise
    try:
        for folder in (path.parent, *(folder.parent for folder in new)):
            sync_directory(folder)
    except OSError as error:
        # It is in its place, whole; to call it not written would be as wrong.
        log.warning("the cache %s may not survive a loss of power: %s", path, _reason(error))
    return len(head) + len(state)


def remove(path: Path) -> bool:
    """Whether there was a file at ``path``, which is gone now.  Raises OSError for what is no file."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def sweep(path: Path) -> int:
    """Remove the temporary files of ``path``, whose lock the caller holds.  Returns how many there were."""
    count = 0
    for name in _names(path.parent):
        if target_of(path.with_name(name)) == path:
            count += remove(path.with_name(name))
    return count


def target_of(path: Path) -> Path | None:
    """The place that a temporary file of ours was made for; None for any other file, whatever it ends with."""
    made_for = _MADE_FOR.fullmatch(path.name)
    return None if made_for is None else path.with_name(made_for[1])


def is_file(path: Path) -> bool:
    """Whether there is a file; True, too, if nobody lets us look, for it may well be there."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def tidy(folder: Path, root: Path) -> None:
    """Remove ``folder`` and those around it up to ``root``, which stays, as far as they are empty."""
    while folder != root and folder.is_relative_to(root):
        try:
            folder.rmdir()
        except FileNotFoundError:
            pass
        except OSError:
            return  # something is in there
        folder = folder.parent


def walk(folder: Path, *, deep: bool = True, strict: bool = False) -> Iterator[Path]:
    """All files below ``folder`` that are named as caches and their temporary files are, links left out.

    A directory that cannot be read has none; with ``strict``, that raises OSError.
    """
    for name in _names(folder, strict=strict):
        path = folder / name
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            continue  # gone meanwhile
        except OSError:
            if strict:
                raise
            continue
        if stat.S_ISDIR(mode):
            if deep:
                yield from walk(path, strict=strict)
        elif stat.S_ISREG(mode) and (name.endswith(SUFFIX) or target_of(path) is not None):
            yield path


def touch(path: Path) -> None:
    """Note that a file was used now.  A disk that does not take the note is no reason to fail."""
    try:
        os.utime(path)
    except OSError:
        pass


def sync_directory(folder: Path) -> None:
    """Make a rename or a removal in ``folder`` survive a loss of power, where the system can."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    except OSError:
        return  # a system without directories that can be opened syncs them by itself
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _open(path: Path) -> IO[bytes]:
    # Neither a link nor a pipe that was put here meanwhile is followed or waited for.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        raise Miss("there is no file") from None
    except OSError as error:
        raise Miss(f"the file cannot be opened: {_reason(error)}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Miss("something else than a file is in its place")
    return os.fdopen(descriptor, "rb")


def _head(file: IO[bytes]) -> Head:
    try:
        preamble = parse_preamble(file.read(PREAMBLE), os.fstat(file.fileno()).st_size)
        return parse_head(preamble, file.read(preamble.head))
    except OSError as error:
        raise Miss(f"the file cannot be read: {_reason(error)}") from error


def _create(path: Path) -> IO[bytes]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    # Its directory may be tidied away by another process between the two lines, again and again.
    for _ in range(100):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # Conversations are nobody else's business.
            return os.fdopen(os.open(path, flags, 0o600), "wb")
        except FileNotFoundError:
            continue
    raise FileNotFoundError(errno.ENOENT, "its directory does not stay", str(path.parent))


def _blocks(head: bytes, state: bytes) -> Iterator[bytes | memoryview]:
    yield head
    view = memoryview(state)
    for start in range(0, len(view), _BLOCK):
        yield view[start : start + _BLOCK]


def _names(folder: Path, *, strict: bool = False) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        if strict and not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise
        return []


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__


def explain(error: OSError) -> str:
    """What is wrong with the disk, and what to do about it."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full; free some space (laneway cache prune), or choose another cache_dir"
    where = f" ({os.fsdecode(error.filename)})" if error.filename else ""
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{_reason(error)}{where}; choose a cache_dir that this user may write to"
    return _reason(error) + where
