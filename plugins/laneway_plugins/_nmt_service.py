"""The translators of one loaded model, and how they are called from Trio."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import TypeVar, final

import attrs
import trio

from laneway import ModelLoadError, threads
from laneway_plugins._nmt_package import Pair, PairFiles, read_files
from laneway_plugins._nmt_pieces import Characters, Pieces, SentencePieces, Words
from laneway_plugins._nmt_text import Chunk, split_pieces
from laneway_plugins._nmt_worker import MissingExtraError, Worker, need
from laneway_plugins._signs import has_letters

_T = TypeVar("_T")


def share_of_cpus() -> int:
    """Threads of a translator if nobody says how many: half of the CPUs that this process may use.

    The other half is for a language model's decode loop, which takes one thread for each core.
    """
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        count = os.cpu_count() or 1
    return max(1, count // 2)


@final
class OpenPair:
    """A pair whose model is in the memory."""

    def __init__(self, pair: Pair, worker: Worker, pieces: Pieces, vocabulary: frozenset[str], longest: int) -> None:
        self.pair = pair
        self.worker = worker
        self.pieces = pieces
        self._vocabulary = vocabulary
        self._longest = longest

    def cut(self, text: str, *, spaced: bool) -> list[Chunk] | None:
        """The chunks of a sentence; None if the model knows nothing of it, so that it stays as it is.

        ``spaced``: whether the target language puts spaces between chunks.
        """
        pieces = self.pieces.encode(text)
        if not any(piece in self._vocabulary and has_letters(piece) for piece in pieces):
            return None
        room = max(1, self._longest - len(self.pair.source_prefix))
        chunks = split_pieces(pieces, room, self.pieces.starts_word, spaced)
        if not self.pair.source_prefix:
            return chunks
        return [attrs.evolve(chunk, pieces=self.pair.source_prefix + chunk.pieces) for chunk in chunks]


def open_pair(pair: Pair, *, threads: int, workers: int, compute_type: str, device: str, longest: int) -> OpenPair:
    """Read and load a pair.  Blocks.  Raises :class:`ModelLoadError`."""
    files = read_files(pair)
    try:
        pieces = _make_pieces(pair, files)
        worker = Worker(
            pair.name,
            files.model,
            threads=threads,
            workers=workers,
            compute_type=compute_type,
            device=device,
        )
    except MissingExtraError as error:
        raise ModelLoadError(str(pair.path), str(error)) from error
    except (RuntimeError, ValueError) as error:
        raise ModelLoadError(str(pair.path), f"CTranslate2 does not take it: {error}") from error
    return OpenPair(pair, worker, pieces, files.source_vocabulary, longest)


def _make_pieces(pair: Pair, files: PairFiles) -> Pieces:
    if files.tokens == "characters":
        return Characters()
    if files.tokens == "words":
        return Words()
    module = need("sentencepiece")
    try:
        processor = module.SentencePieceProcessor(model_proto=files.sentencepiece)
    except (RuntimeError, OSError, ValueError, TypeError) as error:
        raise ModelLoadError(str(pair.path), f"its SentencePiece model cannot be read: {error}") from error
    return SentencePieces(processor)


@final
class NmtService:
    """What the operation ``nmt`` works with: pairs that are opened when they are first needed."""

    def __init__(self, pairs: list[Pair], *, workers: int, open_pair: Callable[[Pair], OpenPair]) -> None:
        self.pairs = tuple(pairs)
        self.workers = workers
        self._open_pair = open_pair
        self._open: dict[int, OpenPair] = {}
        self._opening = trio.Lock()
        # No other work of the program waits behind a translation, nor a translation behind it.
        self._native = trio.CapacityLimiter(workers)
        self._aside = trio.CapacityLimiter(1)

    def __repr__(self) -> str:
        pairs = ", ".join(pair.label for pair in self.pairs)
        return f"<laneway nmt {pairs}: {len(self._open)} of {len(self.pairs)} open>"

    async def open(self, index: int) -> OpenPair:
        """The pair with this index of :attr:`pairs`, loaded.  Raises :class:`ModelLoadError`."""
        async with self._opening:
            if index not in self._open:
                load = functools.partial(self._open_pair, self.pairs[index])
                self._open[index] = await threads.run_long(load)
            return self._open[index]

    async def aside(self, work: Callable[[], _T]) -> _T:
        """Do some work of Python's, such as cutting text, in a thread."""
        return await trio.to_thread.run_sync(work, limiter=self._aside)

    async def native(self, work: Callable[[threading.Event], _T]) -> _T:
        """Call ``work`` in a thread when one of ours is free.

        A cancel sets the event that ``work`` is given; then its end is waited for: no call outlives its request.
        """
        stop = threading.Event()
        result: list[_T] = []
        error: list[BaseException] = []

        def call() -> None:
            try:
                result.append(work(stop))
            except Exception as caught:
                error.append(caught)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(_set_when_cancelled, stop)
            await trio.to_thread.run_sync(call, limiter=self._native)
            nursery.cancel_scope.cancel()
        await trio.lowlevel.checkpoint_if_cancelled()
        if error:
            # Here, not in the thread: out of the nursery it would come in a group.
            raise error.pop()
        return result.pop()

    async def aclose(self) -> None:
        """Free every translator, in a thread: its own threads are joined."""
        with trio.CancelScope(shield=True):
            async with self._opening:
                opened = list(self._open.values())
                self._open.clear()
            for pair in opened:
                await threads.run_long(pair.worker.close)


async def _set_when_cancelled(stop: threading.Event) -> None:
    try:
        await trio.sleep_forever()
    finally:
        stop.set()
