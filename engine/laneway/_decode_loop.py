"""The task that owns a model's decoder: schedule, step, postprocess, deliver.

Nothing else calls the decoder (but for ``interrupt``, ``end_round`` and ``verify``), so its memory has one user.
Between two steps the loop takes in new sequences, loads what was saved of them, and saves and drops those that have
ended; during a step other tasks only leave notes here.

What a step gave is delivered when the next one has begun, so that readers are served while the backend works.
"""

from __future__ import annotations

import logging
import types
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import trio

from laneway._errors import PROGRAM_ENDS, DecodeError, InvalidRequestError, ModelNotLoadedError, holds
from laneway._scheduler import Scheduler
from laneway.decoder import StepInterrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator

    from laneway._scheduler import Opening, Output, Sequence, Step
    from laneway._tokens import Tokens
    from laneway.decoder import Decoder, Tokenizer

log = logging.getLogger("laneway.decode")

FAILED_STEPS_IN_A_ROW = 3
"""After so many the model counts as broken: rule C11."""


@attrs.frozen(kw_only=True)
class LoopStatistics:
    """Counts since the loop began; ``step_seconds`` is the time inside the decoder, ``decode_seconds`` that part of it
    which was no intake of prompts."""

    steps: int
    decode_steps: int
    tokens: int
    step_seconds: float
    decode_seconds: float
    sequences: int
    slot_waiters: int


class _DropError(Exception):
    """Ends the loop, and with it the model: rule C11."""


_T = TypeVar("_T")


@types.coroutine
def _beside(call: Coroutine[Any, Any, _T], work: Callable[[], None]) -> Generator[Any, Any, _T]:
    """Await ``call``, and do ``work`` once it waits: while the backend is busy, and without a task of its own.

    ``work`` must not raise: the call would go on with nobody to wait for it.
    """
    try:
        trap = call.send(None)
        work()
        while True:
            trap = call.send((yield trap))
    except StopIteration as over:
        result: _T = over.value
        return result


class DecodeLoop:
    """Runs one decoder for everybody who asks its model for tokens."""

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        *,
        model: str,
        on_failed: Callable[[str], None],
        prefix_cache: bool = True,
    ) -> None:
        self.decoder = decoder
        self.scheduler = Scheduler(
            slots=decoder.slots,
            window=decoder.window,
            policy=decoder.policy,
            end_tokens=tokenizer.end_tokens,
            piece=tokenizer.piece,
            share=prefix_cache and decoder.shares_prefixes and not decoder.policy.contiguous,
        )
        self.failure: str | None = None
        self._model = model
        self._on_failed = on_failed
        self._streams: dict[Sequence, Tokens] = {}
        self._leaving: list[Tokens] = []
        self._to_save: deque[Tokens] = deque()
        self._undelivered: list[tuple[Tokens, Output, float]] = []
        self._under_way: Step | None = None
        self._failed_steps = 0
        self._stopping = False
        self._delivering_beside = False
        self._work = trio.lowlevel.ParkingLot()
        self._stopped = trio.Event()
        self._steps = self._decode_steps = self._tokens = 0
        self._step_seconds = self._decode_seconds = 0.0

    def __repr__(self) -> str:
        state = f"failed: {self.failure}" if self.failure else f"{len(self._streams)} sequences"
        return f"<laneway.DecodeLoop {self._model!r} {state}>"

    def statistics(self) -> LoopStatistics:
        """Counts and seconds, frozen."""
        return LoopStatistics(
            steps=self._steps,
            decode_steps=self._decode_steps,
            tokens=self._tokens,
            step_seconds=self._step_seconds,
            decode_seconds=self._decode_seconds,
            sequences=len(self._streams),
            slot_waiters=self.scheduler.waiting,
        )

    # What handlers' tasks call, through Tokens.

    @trio.lowlevel.enable_ki_protection
    def add(self, tokens: Tokens) -> None:
        """Let a sequence join at the next step.  Raises :class:`ModelNotLoadedError` if there will be none."""
        if self.failure is not None or self._stopping:
            raise ModelNotLoadedError(self._model, self.failure or "it is unloading")
        self.scheduler.add(tokens.sequence)
        self._streams[tokens.sequence] = tokens
        self._change()

    @trio.lowlevel.enable_ki_protection
    def remove(self, tokens: Tokens) -> None:
        """Let a sequence leave at the next step; ``tokens.freed`` tells when its slot is free."""
        if tokens.freed.is_set() or tokens.leaving:
            return
        tokens.leaving = True
        self._leaving.append(tokens)
        if self._delivering_beside:
            # Our own task is on its way into the step.  An interrupt may wake it, so it has to be asleep by then.
            trio.lowlevel.current_trio_token().run_sync_soon(self._interrupt_if_unwanted)
        else:
            self._interrupt_if_unwanted()
        self._change()

    @trio.lowlevel.enable_ki_protection
    def pause(self, tokens: Tokens) -> None:
        """Decode no more of a sequence for now."""
        if tokens.sequence in self._streams:
            self.scheduler.pause(tokens.sequence)

    @trio.lowlevel.enable_ki_protection
    def resume(self, tokens: Tokens) -> None:
        """Decode a paused sequence again."""
        if tokens.sequence in self._streams:
            self.scheduler.resume(tokens.sequence)
            self._change()

    def _change(self) -> None:
        # Whoever comes or leaves waits for the pass over the weights that is under way, and for no more of them.
        if self._under_way is not None and self._under_way.batch.rounds > 1:
            self.decoder.end_round()
        self._work.unpark()

    def _interrupt_if_unwanted(self) -> None:
        # Rule C9: a call that nobody waits for any more need not run to its end.
        if self._under_way is not None and not self._wanted(self._under_way):
            self.decoder.interrupt()

    async def verify(self, state: bytes) -> None:
        """Raise :class:`DecodeError` for a saved state that :meth:`add` need not come with."""
        await self.decoder.verify(state)

    # What the engine calls.

    @trio.lowlevel.enable_ki_protection
    async def run(self) -> None:
        """The loop's task.  Ends after :meth:`stop`, or when the model has failed."""
        try:
            await self._step_forever()
        except BaseException as error:
            # Nobody cancels this task, so whatever comes up here has broken it.
            log.exception("the decode loop of model %r broke", self._model)
            self._break(str(error) if isinstance(error, _DropError) else f"its decode loop broke: {error!r}", error)
            if holds(error, PROGRAM_ENDS):
                raise
        finally:
            self._end_all("the decode loop has ended")
            self._stopped.set()

    async def stop(self) -> None:
        """End the task, and every sequence that it still has.  Returns when the decoder is no longer in use."""
        self._stopping = True
        if self._under_way is not None:
            self.decoder.interrupt()
        self._work.unpark()
        await self._stopped.wait()

    # The task.

    async def _step_forever(self) -> None:
        while not self._stopping and self.failure is None:
            self._sweep()
            if self._to_save:
                await self._save(self._to_save.popleft())
                continue
            opening = self.scheduler.assign()
            if opening is not None:
                await self._open(opening)
                continue  # a load takes time, in which others may have left
            step = self.scheduler.schedule()
            if step is not None:
                await self._execute(step)
            elif self._undelivered:
                self._deliver()
            else:
                await self._work.park()
        self._sweep()

    async def _execute(self, step: Step) -> None:
        if step.prefill:
            now = trio.current_time()
            for sequence in step.sequences:
                tokens = self._streams[sequence]
                if tokens.first_chunk_at is None:
                    tokens.first_chunk_at = now
        self._under_way = step
        try:
            result = await _beside(self.decoder.step(step.batch), self._deliver_beside)
        except StepInterrupted:
            self._interrupted(step)
        except DecodeError as error:
            self._step_failed(step, error)
        else:
            self._failed_steps = 0
            self._steps += 1
            self._step_seconds += result.seconds
            if not step.prefill:
                self._decode_steps += 1
                self._decode_seconds += result.seconds
            self._collect(self.scheduler.postprocess(step, result))
        finally:
            self._under_way = None

    async def _open(self, opening: Opening) -> None:
        """Make a slot ready for its sequence."""
        sequence = opening.sequence
        slot = sequence.slot
        assert slot is not None
        if opening.keep == 0:
            self._empty(slot)
        self._share(opening, slot)
        if opening.load:
            await self._load(sequence, slot)
        if not (self.scheduler.follows(sequence) and sequence.restorable):
            self._streams[sequence].restore = None  # it may be large
        if opening.opens:
            self._open_sampler(sequence, slot)

    def _share(self, opening: Opening, slot: int) -> None:
        """Let a slot keep or copy the cells of a prefix; it is empty if that fails."""
        try:
            if opening.keep:
                self.decoder.cut(slot, opening.keep)
            if opening.copy_from is not None:
                self.decoder.copy(opening.copy_from, slot, opening.sequence.computed)
        except DecodeError as error:
            # Cells that have slid out of the model's window, say.
            log.info("a prefix of model %r cannot be shared, so it is computed anew: %s", self._model, error.reason)
            if opening.keep:
                self._empty(slot)
            self.scheduler.missed(opening.sequence)

    def _open_sampler(self, sequence: Sequence, slot: int) -> None:
        try:
            self.decoder.open(slot, sequence.sampling, sequence.prompt)
        except (DecodeError, InvalidRequestError) as error:
            # No room for one more sampler, say: nobody else is in that slot, so nobody else is hurt (rule C10).
            log.exception("slot %d of model %r could not be opened", slot, self._model)
            tokens = self._streams[sequence]
            self._drop(self.scheduler.remove(sequence))
            self._forget(tokens)
            tokens.fail(error)

    async def _load(self, sequence: Sequence, slot: int) -> None:
        restore = self._streams[sequence].restore
        assert restore is not None
        try:
            load = self.decoder.load(slot, restore.data, sequence.computed, verified=True)
            await _beside(load, self._deliver_beside)
        except DecodeError as error:
            log.warning(
                "a saved state of model %r could not be loaded, so it is computed anew: %s", self._model, error.reason
            )
            opening = self.scheduler.not_loaded(sequence)
            if opening is not None:
                self._share(opening, slot)

    async def _save(self, tokens: Tokens) -> None:
        """Copy the state of a sequence that has ended, then free its slot."""
        sequence = tokens.sequence
        assert sequence.slot is not None
        # Its owner may have been cancelled while others were saved.
        if tokens.wants_state:
            try:
                tokens.seal = await _beside(self.decoder.save(sequence.slot), self._deliver_beside)
            except DecodeError as error:
                log.warning("the state of a sequence of model %r could not be saved: %s", self._model, error.reason)
        self._vacate(sequence)
        self._forget(tokens)

    def _retire(self, tokens: Tokens) -> None:
        """A sequence has ended: free its slot, at once or when its state was saved."""
        sequence = tokens.sequence
        if tokens.wants_state and sequence.slot is not None and sequence.whole and sequence.computed:
            self._to_save.append(tokens)
            return
        self._vacate(sequence)
        self._forget(tokens)

    def _vacate(self, sequence: Sequence) -> None:
        """Free the slot of a sequence that has ended, with its cells if others may share them."""
        length = self.scheduler.keepable(sequence)
        if sequence.slot is not None and length:
            try:
                self.decoder.cut(sequence.slot, length)
            except DecodeError as error:
                log.info("the cells of a sequence of model %r cannot be kept: %s", self._model, error.reason)
            else:
                self.scheduler.keep(sequence.slot)
                return
        self._drop(sequence.slot)

    def _collect(self, outputs: list[Output]) -> None:
        if not outputs:
            return
        now = trio.current_time()
        self._tokens += sum([output.tokens for output in outputs])
        # All of them first: a drop that fails takes from nobody what this step has made.
        self._undelivered.extend([(self._streams[output.sequence], output, now) for output in outputs])
        for output in outputs:
            if output.error is not None:
                log.warning("a sequence of model %r has ended: %s", self._model, output.error.reason)
            if output.ended:
                self._retire(self._streams[output.sequence])

    def _interrupted(self, step: Step) -> None:
        self.scheduler.interrupted(step)
        # Only calls that nobody wants are interrupted; should one be cut short all the same, whoever stayed must know.
        if self._wanted(step) and not self._stopping:
            self._step_failed(step, DecodeError("it was interrupted", sequences=len(step.sequences)))

    def _step_failed(self, step: Step, error: DecodeError) -> None:
        """Rule C11: the sequences of the failed call end, the loop goes on, but not for ever."""
        self._failed_steps += 1
        log.error("a step of model %r failed: %s", self._model, error)
        for sequence in self.scheduler.fail(step):
            tokens = self._streams[sequence]
            self._retire(tokens)
            ended = DecodeError(error.reason, error.status, len(step.sequences))
            ended.__cause__ = error
            tokens.fail(ended)
        if self._failed_steps >= FAILED_STEPS_IN_A_ROW:
            self._break(f"{self._failed_steps} decode steps in a row failed, the last one: {error.reason}", error)

    def _wanted(self, step: Step) -> bool:
        streams = [self._streams[sequence] for sequence in step.sequences]
        return any(not tokens.leaving or tokens.wants_state for tokens in streams)

    def _sweep(self) -> None:
        # Popped one at a time: if a drop raises, what is left is still known to _end_all.
        while self._leaving:
            tokens = self._leaving.pop()
            if tokens.sequence in self._streams and tokens not in self._to_save:
                self.scheduler.remove(tokens.sequence)
                self._retire(tokens)
                tokens.fail(trio.ClosedResourceError("this sequence was dropped"))

    def _drop(self, slot: int | None) -> None:
        if slot is not None:
            self._empty(slot)
            self.scheduler.release(slot)

    def _empty(self, slot: int) -> None:
        try:
            self.decoder.drop(slot)
        except Exception as error:
            # What is still in the slot would end up in somebody else's answer.
            raise _DropError(f"slot {slot} could not be dropped: {error}") from error

    def _forget(self, tokens: Tokens) -> None:
        del self._streams[tokens.sequence]
        tokens.freed.set()

    def _break(self, reason: str, cause: BaseException) -> None:
        if self.failure is not None:
            return
        self.failure = reason
        self._end_all(reason, cause)
        self._on_failed(reason)

    def _end_all(self, reason: str, cause: BaseException | None = None) -> None:
        # What had been made before is theirs, and maybe all that they wanted.
        self._deliver()
        # The slots are not dropped here: this loop decodes no more, they go with the decoder.
        streams = list(self._streams.values())
        for tokens in streams:
            error = DecodeError(reason, sequences=len(streams))
            error.__cause__ = cause
            tokens.fail(error)
            self._forget(tokens)
        self._leaving.clear()
        self._to_save.clear()

    def _deliver_beside(self) -> None:
        self._delivering_beside = True
        try:
            self._deliver()
        finally:
            self._delivering_beside = False

    def _deliver(self) -> None:
        undelivered, self._undelivered = self._undelivered, []
        for tokens, output, now in undelivered:
            try:
                tokens.receive(output, now)
            except BaseException as error:
                # Only a deliver callback can raise here, and it belongs to the request (rule C10), whose handler is
                # told: also of what is for the whole program.
                tokens.fail(error)
                self.remove(tokens)
