"""Which language a text is in, by py3langid, the package of the extra ``detect``."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterable
from typing import Any

import attrs

from laneway import InvalidRequestError, TranslationError
from laneway_plugins._languages import Language, find_language

EXTRA = "detect"
LEAST_PROBABILITY = 0.3
"""Below it the likeliest language is not taken: a word or two may be of several."""
MOST_CHARACTERS = 4_000
"""What is looked at of a text; more of it tells no more."""

_lock = threading.Lock()
_identifier: Any = None


@attrs.define(slots=False, eq=False)
class UndeterminedLanguageError(TranslationError):
    """The source language was not given and cannot be told.  ``candidates`` are codes with their probabilities."""

    candidates: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        return self.reason


def detect_language(texts: Iterable[str]) -> Language:
    """The language of all ``texts`` together.  Blocks; the first call takes a second.

    Raises :class:`UndeterminedLanguageError`, or :class:`TranslationError` without the extra.
    """
    text = "\n".join(texts)[:MOST_CHARACTERS]
    if not any(character.isalpha() for character in text):
        raise UndeterminedLanguageError("there is nothing to tell the source language by; say which it is: source=")
    ranked = _rank(text)[:3]
    code, probability = ranked[0]
    try:
        language = find_language(code, "source")
    except InvalidRequestError:
        language = None
    if language is None or probability < LEAST_PROBABILITY:
        guesses = ", ".join(f"{code} ({probability:.0%})" for code, probability in ranked)
        raise UndeterminedLanguageError(
            f"the source language cannot be told from the text (likeliest: {guesses}); say which it is: source=",
            tuple(ranked),
        )
    return language


def _rank(text: str) -> list[tuple[str, float]]:
    global _identifier
    with _lock:
        if _identifier is None:
            _identifier = _load()
        return [(str(code), float(probability)) for code, probability in _identifier.rank(text)]


def _load() -> Any:
    try:
        module = importlib.import_module("py3langid.langid")
    except ImportError as error:
        raise TranslationError(
            f"the source language is not given, and py3langid, which would detect it, is not installed; say source=, "
            f"or: pip install 'laneway[{EXTRA}]'"
        ) from error
    return module.LanguageIdentifier.from_model_file(module.MODEL_FILE, norm_probs=True)
