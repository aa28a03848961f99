"""One CTranslate2 translator, and the two things that must be seen to with it.

It stops early: greedy search asks a callback after each token, on CTranslate2's own thread; beam search does not ask,
and is stopped between two calls.  And it must be gone before the interpreter ends: its threads may hold a Python
callback, and a thread that wants the interpreter's lock then aborts the whole process.  :meth:`Worker.close` joins
them; at exit it is called for every worker that was forgotten.

Everything here blocks, and none of it belongs on the event loop.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import attrs

from laneway import TranslationError

EXTRA = "nmt"
_import_lock = threading.Lock()


class MissingExtraError(Exception):
    """What nmt needs beside Laneway is not installed."""

    def __init__(self, module: str) -> None:
        super().__init__(f"{module} is not installed; for translation models: pip install 'laneway[{EXTRA}]'")


def need(module: str) -> ModuleType:
    """Import a module of the extra.  Raises :class:`MissingExtraError`."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(module) from error


def import_ctranslate2() -> ModuleType:
    """CTranslate2, with OpenMP threads that sleep while they wait.

    Its OpenMP library reads the policy once, when it is loaded.  The variable is taken back at once: another library's
    OpenMP, that of a llama.cpp built with it say, needs its threads awake.  Who has set one of these keeps it.
    """
    with _import_lock:
        if "ctranslate2" in sys.modules or any(name in os.environ for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")):
            return need("ctranslate2")
        os.environ["OMP_WAIT_POLICY"] = "passive"
        try:
            return need("ctranslate2")
        finally:
            del os.environ["OMP_WAIT_POLICY"]


@attrs.frozen(kw_only=True)
class Search:
    """How a translation is looked for."""

    beam_size: int = 1
    hypotheses: int = 1
    length_penalty: float = 1.0
    longest: int = 256
    """Pieces of one translation."""
    scores: bool = False
    """Ask for them: a few hundredths of the time."""

    @property
    def greedy(self) -> bool:
        """Whether a token is final once it is made."""
        return self.beam_size == 1


@attrs.frozen
class Hypothesis:
    """One translation in pieces, without prefix and end token; ``score`` is CTranslate2's own, 0.0 unless asked for.

    ``whole`` is False if the model had not come to an end at the longest length.
    """

    pieces: tuple[str, ...]
    score: float
    whole: bool


OnToken = Callable[[int, str], None]


class Worker:
    """One translator.  :meth:`translate` may be called from several threads at a time."""

    def __init__(
        self,
        name: str,
        files: Mapping[str, bytes],
        *,
        threads: int,
        workers: int,
        compute_type: str,
        device: str,
    ) -> None:
        """Load the model.  Raises RuntimeError or ValueError, as CTranslate2 puts it, or :class:`MissingExtraError`."""
        module = import_ctranslate2()
        self.name = name
        # The only reference there is: no frame and no traceback may keep the translator alive beyond close().
        self._only: list[Any] = [
            module.Translator(
                name,
                device=device,
                compute_type=compute_type,
                inter_threads=workers,
                intra_threads=threads,
                files=dict(files),
            )
        ]
        config = _config(files)
        self._end = config.get("eos_token", "</s>")
        self._vmap = "vmap.txt" in files
        self._kept_threads: set[int] = set()
        self._idle = threading.Condition()
        self._running = 0
        self._closed = False
        _remember(self)

    def translate(
        self,
        batch: Sequence[Sequence[str]],
        prefix: Sequence[str],
        search: Search,
        stop: threading.Event,
        on_token: OnToken | None = None,
    ) -> list[list[Hypothesis]]:
        """Translate each sequence of pieces; the likeliest hypothesis comes first.

        Greedy search gives every token to ``on_token(index, piece)``, on another thread, and ends within a token's time
        once ``stop`` is set; what it then returns is cut short.

        Raises :class:`TranslationError`.
        """
        with self._idle:
            if self._closed:
                raise TranslationError(f"the translator {self.name} is closed")
            self._running += 1
        try:
            return self._translate(batch, tuple(prefix), search, stop, on_token)
        except (RuntimeError, ValueError) as error:
            raise TranslationError(f"CTranslate2 failed with {self.name}: {error}") from error
        finally:
            with self._idle:
                self._running -= 1
                self._idle.notify_all()

    def _translate(
        self,
        batch: Sequence[Sequence[str]],
        prefix: tuple[str, ...],
        search: Search,
        stop: threading.Event,
        on_token: OnToken | None,
    ) -> list[list[Hypothesis]]:
        options: dict[str, Any] = {}
        if search.greedy:
            options["callback"] = self._callback(stop, len(prefix), on_token)
        if prefix:
            options["target_prefix"] = [list(prefix)] * len(batch)
        results = self._only[0].translate_batch(
            [list(pieces) for pieces in batch],
            beam_size=search.beam_size,
            num_hypotheses=search.hypotheses,
            length_penalty=search.length_penalty,
            max_input_length=0,  # nothing is cut off unseen: what is too long has been cut up before
            max_decoding_length=search.longest,
            return_end_token=True,
            return_scores=search.scores,
            replace_unknowns=True,
            use_vmap=self._vmap,
            **options,
        )
        return [
            [
                self._hypothesis(pieces[len(prefix) :], score)
                for pieces, score in zip(
                    result.hypotheses, result.scores or [0.0] * len(result.hypotheses), strict=True
                )
            ]
            for result in results
        ]

    def _callback(self, stop: threading.Event, prefix: int, on_token: OnToken | None) -> Callable[[Any], bool]:
        closing, end, kept = self, self._end, self._kept_threads

        def after_token(step: Any) -> bool:
            thread = threading.get_ident()
            if thread not in kept:
                kept.add(thread)
                _keep_thread_state()
            if on_token is not None and step.step >= prefix and step.token != end:
                on_token(step.batch_id, step.token)
            return stop.is_set() or closing._closed

        return after_token

    def _hypothesis(self, pieces: list[str], score: float) -> Hypothesis:
        whole = bool(pieces) and pieces[-1] == self._end
        return Hypothesis(tuple(pieces[:-1] if whole else pieces), score, whole)

    def close(self) -> None:
        """Wait for the calls under way, greedy ones being stopped, then free the model and join its threads."""
        with self._idle:
            self._closed = True
            self._idle.wait_for(lambda: not self._running)
            self._only.clear()

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has been called."""
        return self._closed


def _config(files: Mapping[str, bytes]) -> dict[str, Any]:
    import json

    try:
        config = json.loads(files.get("config.json", b"{}"))
    except ValueError:
        return {}
    return config if isinstance(config, dict) else {}


def _keep_thread_state() -> None:
    """Let the calling thread, which is not one of Python's, keep what Python knows of it between two callbacks.

    Without this it is made and thrown away for each token: 11 us instead of 1.4, a fifth of the time of a small model.
    It is a few hundred bytes for each thread of a translator, which the interpreter frees at its end.
    """
    api = getattr(ctypes, "pythonapi", None)
    if api is not None:
        api.PyGILState_Ensure()


_alive: weakref.WeakSet[Worker] = weakref.WeakSet()


def _remember(worker: Worker) -> None:
    if not _alive:
        atexit.unregister(_close_all)
        atexit.register(_close_all)
    _alive.add(worker)


def _close_all() -> None:
    for worker in list(_alive):
        worker.close()
