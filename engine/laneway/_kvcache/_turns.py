"""One turn of a conversation on its cache file: begin, then commit, rollback or release (rule K3).

What is on the disk changes in one place, the rename inside a commit.  Until then a turn may end in any way, and the
file that the last one committed is there byte for byte.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, final

import trio

from laneway import threads
from laneway._errors import CacheKeyError
from laneway._events import CacheReport
from laneway._kvcache import _files
from laneway._kvcache._caches import CachePlan, lane_key
from laneway._kvcache._format import Facts, Miss, common
from laneway._kvcache._history import History
from laneway._kvcache._keys import lies_in
from laneway._kvcache._locks import FileLock
from laneway._tokens import SavedState

if TYPE_CHECKING:
    from types import TracebackType

log = logging.getLogger("laneway.cache")

WORTH_READING = 64
"""A state is read if one in so many of its tokens is wanted: reading takes that much less time than computing."""


@final
class CacheTurn:
    """A turn, for the length of a block.  The request holds the file alone: see :class:`laneway.Prepared`.

    ::

        async with ctx.cache_turn(plan, prompt) as turn:
            async with ctx.generate(prompt, sampling, restore=turn.state, keep_state=True) as tokens:
                answer = await tokens.finish()
            await turn.commit(await tokens.saved_state(), answer.text)

    A block that is left without a commit ends in a release, or in a rollback if there was no file before.
    """

    def __init__(
        self,
        plan: CachePlan,
        prompt: list[int],
        claim: Callable[[Hashable], bool],
        on_end: Callable[[CacheReport], None] | None = None,
        in_memory: int = 0,
    ) -> None:
        self.state: SavedState | None = None
        """What the file holds, if anything of it can be taken up."""
        self.report: CacheReport | None = None
        """What became of the cache, once the turn has ended."""
        self._plan = plan
        self._caches = plan.caches
        self._prompt = prompt
        self._claim = claim
        self._on_end = on_end
        self._in_memory = in_memory
        self._miss: str | None = None
        self._unusable: str | None = None
        self._existed = False
        self._key = plan.key or ""
        self._new: FileLock | None = None

    def __repr__(self) -> str:
        state = "under way" if self.report is None else self.report.ended
        return f"<laneway.CacheTurn {self._plan.key or 'automatic'!r} {state}>"

    async def __aenter__(self) -> CacheTurn:
        try:
            await threads.run_file(self._look)
            if self._unusable is None:
                # Reading a large state takes a while and changes nothing, so a cancel need not wait for it.
                await threads.run_long(self._begin, abandon_on_cancel=True)
        except BaseException as error:
            self.release(_reason_of(error))
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release("it ended without a commit" if error is None else _reason_of(error))
        await trio.lowlevel.cancel_shielded_checkpoint()

    def release(self, reason: str) -> None:
        """End the turn and leave the cache as it was before, for a reason that the stats tell."""
        if self.report is None:
            self._end("release", reason)

    async def commit(self, saved: SavedState | None, answer: str = "") -> None:
        """Put the state in the file's place.  The file is durable when this returns.

        What keeps that from happening (a full disk, say) ends the turn in a release, and raises nothing: the answer is
        good all the same.  The stats tell.

        :param saved: what ``Tokens.saved_state()`` gave; None is a release
        :param answer: the text of the answer, by which the next turn finds an automatic cache
        """
        if self.report is not None:
            raise RuntimeError("this turn has ended: a turn commits once")
        if saved is None:
            return self._end("release", "the state of the sequence could not be kept")
        if self._unusable is not None:
            return self._end("release", self._unusable)
        plan, path = self._plan, self._plan.path
        history = None
        if plan.history is not None:
            history = plan.history.longer("assistant", answer)
            path = self._caches.root() / history.path
            if path != plan.path and not self._claim(lane_key(path)):
                return self._end("release", "the file of the longer history is in use")
        assert path is not None
        try:
            refused = await threads.run_long(self._commit, path, history, saved)
        except OSError as error:
            log.warning("the cache %s was not written: %s", path, error)
            return self._end("release", _files.explain(error))
        except MemoryError:
            return self._end("release", "there is no memory to write it with")
        return self._end("release", refused) if refused else self._end("commit", None)

    # In worker threads.

    def _look(self) -> None:
        path, gate = self._plan.path, self._plan.gate
        if path is not None:
            self._existed = _files.is_file(path)
        if gate is not None and not gate.held:
            why = "nobody has taken the lock" if gate.failure is None else _files.explain(gate.failure)
            self._miss = self._unusable = f"the file cannot be locked: {why}"

    def _begin(self) -> None:
        try:
            self.state = self._read()
        except Miss as miss:
            self._miss = str(miss)
        except CacheKeyError as error:
            # Somebody has made the file under another spelling since this request was looked at.
            self._miss = self._unusable = error.reason

    def _read(self) -> SavedState:
        plan, path = self._plan, self._plan.path
        if plan.history is not None and (path is None or not _files.is_file(path)):
            # Another turn may have gone on from there while this one waited for it.
            path, _ = self._caches.nearest(plan.history)
            if path is None:
                raise Miss("no cache begins with this history")
        assert path is not None
        if plan.key is not None:
            self._caches.check_spelling(path, plan.key)
        stored = _files.read(path, functools.partial(self._wanted, path))
        _files.touch(path)
        # Its checksum and its fingerprint are right: what the decoder would find out once more.
        return SavedState(stored.facts.tokens, stored.state, verified=True)

    def _wanted(self, path: Path, facts: Facts) -> None:
        if self._plan.key is not None and lies_in(facts.key, path.parent.relative_to(self._caches.root()).as_posix()):
            self._key = facts.key  # which this turn's key may be an alias of: the file keeps its name
        if facts.fingerprint != self._plan.fingerprint:
            raise Miss("the file is of another model, or of one that was loaded with other settings")
        shared = common(facts.tokens, self._prompt)
        if self._in_memory >= min(shared, len(self._prompt) - 1) > 0:
            # Should somebody need that slot in the meantime, the prompt is computed.  That is rare, and to read every
            # file in vain would cost more.
            _files.touch(path)
            raise Miss(f"a slot in memory has {self._in_memory} tokens of the prompt, and the file no more")
        if shared * WORTH_READING < max(1, len(facts.tokens)):
            raise Miss(f"the prompt begins with {shared} of its {len(facts.tokens)} tokens")

    def _commit(self, path: Path, history: History | None, saved: SavedState) -> str | None:
        plan = self._plan
        if path != plan.path:
            self._new = FileLock(self._caches.root(), path)
            if not self._new.try_enter():
                if self._new.failure is not None:
                    raise self._new.failure
                return "another process uses the file of the longer history"
        facts = Facts(
            key=self._key,
            model=plan.model,
            fingerprint=plan.fingerprint,
            tokens=tuple(saved.tokens),
            digests=() if history is None else history.digests,
        )
        _files.sweep(path)
        try:
            _files.write(path, facts, saved.data, trio.from_thread.check_cancelled)
        except BaseException:
            _files.tidy(path.parent, self._caches.root())
            raise
        # From here on it is committed: what fails now is put right by a later turn, or by the bounds.
        try:
            if plan.path is not None and path != plan.path:
                _files.remove(plan.path)
                _files.sync_directory(plan.path.parent)
            if history is not None:
                self._caches.evict(self._caches.retention)
        except OSError as error:
            log.warning("tidying up after the cache %s failed: %s", path, error)
        return None

    def _end(self, ended: Literal["commit", "release"], reason: str | None) -> None:
        self.state = None  # which may be large
        if self._new is not None:
            self._new.leave()
        outcome: Literal["commit", "rollback", "release"] = ended
        if ended == "release" and not self._existed:
            outcome = "rollback"
        self.report = CacheReport(key=self._plan.key, miss=self._miss, ended=outcome, reason=reason)
        log.info("cache=%s turn=%s reason=%s miss=%s", self._plan.key, outcome, reason, self._miss)
        if self._on_end is not None:
            self._on_end(self.report)


def _reason_of(error: BaseException) -> str:
    return "it was cancelled" if isinstance(error, trio.Cancelled) else f"it failed: {error}"
