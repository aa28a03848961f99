"""Which file a key and a model name, as a path below the directory of caches.

Rule 1: what a key names lies inside that directory, on every operating system.

Rule 2: two keys that any disk could take for one share a path.  Names are folded before they become paths, the file
remembers the key that made it, and a second spelling is refused: so it does not matter what the disk folds itself.

Rule 3: no key is in the way of another.  Files begin with a character that no directory of a key can have.
"""

from __future__ import annotations

import unicodedata

from laneway._errors import CacheKeyError

NAMED = "named"
"""The directory of caches that have a key."""
AUTOMATIC = "automatic"
"""The directory of caches that are found by their content."""
LOCKS = "locks"
"""The directory of lock files."""
SUFFIX = ".kv"
"""How the files end."""

MAX_KEY = 256
"""Characters of a key."""
MAX_NAME = 200
"""Bytes of one part of a path: file systems take 255, and a suffix comes to it."""

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-_.")
_DEVICES = frozenset(
    {"con", "prn", "aux", "nul"} | {f"{name}{digit}" for name in ("com", "lpt") for digit in "0123456789¹²³"}
)
"""What Windows takes for a device, whatever suffix comes after it."""


def check_key(key: object) -> tuple[str, ...]:
    """The parts of a key, outermost first.  ``a/b`` is a key of two parts.

    :raises CacheKeyError: it names no file inside the cache directory, or not the same one everywhere
    """
    if not isinstance(key, str):
        raise CacheKeyError(repr(key), f"a key is a str, not {type(key).__name__}")
    if not key:
        raise CacheKeyError(key, "it is empty; give the conversation a name")
    if len(key) > MAX_KEY:
        raise CacheKeyError(key[:40] + "...", f"it has {len(key)} characters, of which {MAX_KEY} are taken")
    for character in key:
        if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp"):
            raise CacheKeyError(key, f"it holds {character!a}, which is no character of a name")
    if "\\" in key:
        raise CacheKeyError(key, "it holds a backslash; nested keys are written with /")
    if key.startswith("/"):
        raise CacheKeyError(key, "it is an absolute path; keys are names inside the cache directory")
    parts = tuple(key.split("/"))
    for part in parts:
        _check_part(key, part)
    return parts


def _check_part(key: str, part: str) -> None:
    if not part:
        raise CacheKeyError(key, "a part of it is empty; nested keys are written a/b")
    if part[1:2] == ":" and part[0].isalpha():
        raise CacheKeyError(key, f"{part!r} begins with a drive letter; keys are names inside the cache directory")
    if part in (".", ".."):
        raise CacheKeyError(key, f"{part!r} is no name; keys cannot leave the cache directory")
    if part[-1] in ". " or part[0] == " ":
        raise CacheKeyError(key, f"{part!r} begins or ends with what some systems cut off from names")
    if _fold(part).partition(".")[0].rstrip() in _DEVICES:
        raise CacheKeyError(key, f"{part!r} is the name of a device on some systems")
    if len(_name(part)) > MAX_NAME:
        raise CacheKeyError(key, f"{part!r} makes a name of more than {MAX_NAME} bytes")


def check_model(model: object, key: str = "") -> str:
    """The name of a model, of which a file name can be made.

    :raises CacheKeyError: none can be, so that nothing or too much would be meant by it
    """
    if not isinstance(model, str) or not model.strip():
        raise CacheKeyError(key, f"a model is named by a str that is not empty, not {model!r}")
    if any(part in ("", ".", "..") for part in model.replace("\\", "/").split("/")):
        raise CacheKeyError(key, f"{model!r} is no name of a model but a path, and could mean more than one file")
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in model):
        raise CacheKeyError(key, f"{model!a} is no name of a model")
    if len(_name(model)) > MAX_NAME:
        raise CacheKeyError(key, f"the model's name {model[:40]!r}... is too long to be part of a file's name")
    return model


def folder_of(key: str) -> str:
    """The directory of a key's files, with ``/`` between its parts."""
    return "/".join((NAMED, *map(_name, check_key(key))))


def lies_in(key: str, folder: str) -> bool:
    """Whether ``folder`` is the directory of a key's files; False for what is no key."""
    try:
        return folder_of(key) == folder
    except CacheKeyError:
        return False


def path_of(key: str, model: str) -> str:
    """The file of a key on a model, with ``/`` between its parts."""
    return f"{folder_of(key)}/={_name(check_model(model, key))}{SUFFIX}"


def _fold(text: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).casefold())


def _name(text: str) -> str:
    """``text`` as a name of ASCII alone, which no disk folds any further."""
    out = []
    for character in _fold(text):
        if character in _PLAIN:
            out.append(character)
        else:
            out.extend(f"%{byte:02x}" for byte in character.encode())
    return "".join(out)
