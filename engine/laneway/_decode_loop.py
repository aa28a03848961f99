"""The task that owns a model's decoder: schedule, step, postprocess, deliver.

Nothing else calls the decoder (but for ``interrupt``), so its memory has one user.  Between two steps the loop takes in
new sequences and drops those that left; during a step other tasks only leave notes here.

Delivering has a task of its own: it is woken with a step's outputs just before the next step starts, and so runs while
that step decodes.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import attrs
import trio

from laneway._errors import DecodeError, ModelNotLoadedError
from laneway._scheduler import Scheduler
from laneway.decoder import StepInterrupted

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from laneway._scheduler import Output, Sequence, Step
    from laneway._tokens import Tokens
    from laneway.decoder import Decoder, Tokenizer

log = logging.getLogger("laneway.decode")

FAILED_STEPS_IN_A_ROW = 3
"""After so many the model counts as broken: rule C11."""


@attrs.frozen(kw_only=True)
class LoopStatistics:
    """Counts since the loop began; ``step_seconds`` is the time inside the decoder."""

    steps: int
    decode_steps: int
    tokens: int
    step_seconds: float
    sequences: int
    slot_waiters: int


class _DropError(Exception):
    """Ends the loop, and with it the model: rule C11."""


class DecodeLoop:
    """Runs one decoder for everybody who asks its model for tokens."""

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer, *, model: str, on_failed: Callable[[str], None]) -> None:
        self.decoder = decoder
        self.scheduler = Scheduler(
            slots=decoder.slots,
            window=decoder.window,
            policy=decoder.policy,
            end_tokens=tokenizer.end_tokens,
            piece=tokenizer.piece,
        )
        self.failure: str | None = None
        self._model = model
        self._on_failed = on_failed
        self._streams: dict[Sequence, Tokens] = {}
        self._leaving: list[Tokens] = []
        self._undelivered: list[tuple[Tokens, Output, float]] = []
        self._under_way: Step | None = None
        self._failed_steps = 0
        self._stopping = False
        self._work = trio.lowlevel.ParkingLot()
        self._delivery = trio.lowlevel.ParkingLot()
        self._stopped = trio.Event()
        self._steps = self._decode_steps = self._tokens = 0
        self._step_seconds = 0.0

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
        self._work.unpark()

    @trio.lowlevel.enable_ki_protection
    def remove(self, tokens: Tokens) -> None:
        """Let a sequence leave at the next step; ``tokens.freed`` tells when its slot is free."""
        if tokens.freed.is_set() or tokens.leaving:
            return
        tokens.leaving = True
        self._leaving.append(tokens)
        # Rule C9: a call that nobody waits for any more need not run to its end.
        if self._under_way is not None and not self._wanted(self._under_way):
            self.decoder.interrupt()
        self._work.unpark()

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
            self._work.unpark()

    # What the engine calls.

    @trio.lowlevel.enable_ki_protection
    async def run(self) -> None:
        """The loop's task.  Ends after :meth:`stop`, or when the model has failed."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._guard, self._deliver_forever)
                await self._guard(self._step_forever)
                nursery.cancel_scope.cancel()
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

    async def _guard(self, task: Callable[[], Awaitable[None]]) -> None:
        try:
            await task()
        except Exception as error:
            log.exception("the decode loop of model %r broke", self._model)
            reason = str(error) if isinstance(error, _DropError) else f"its decode loop broke: {error!r}"
            self._break(reason, error)
            self._work.unpark()

    async def _step_forever(self) -> None:
        while not self._stopping and self.failure is None:
            self._sweep()
            step = self.scheduler.schedule()
            if step is None:
                await self._work.park()
            else:
                await self._execute(step)
        self._sweep()

    async def _execute(self, step: Step) -> None:
        now = trio.current_time()
        if step.prefill:
            tokens = self._streams[step.sequences[0]]
            if tokens.first_chunk_at is None:
                tokens.first_chunk_at = now
        for sequence in step.opens:
            assert sequence.slot is not None
            self.decoder.open(sequence.slot, sequence.sampling, sequence.prompt)
        self._under_way = step
        try:
            result = await self.decoder.step(step.batch)
        except StepInterrupted:
            self._interrupted(step)
        except DecodeError as error:
            self._step_failed(step, error)
        else:
            self._failed_steps = 0
            self._steps += 1
            self._decode_steps += not step.prefill
            self._step_seconds += result.seconds
            self._collect(self.scheduler.postprocess(step, result))
        finally:
            self._under_way = None

    def _collect(self, outputs: list[Output]) -> None:
        if not outputs:
            return
        now = trio.current_time()
        self._tokens += len(outputs)
        for output in outputs:
            tokens = self._streams[output.sequence]
            self._undelivered.append((tokens, output, now))
            if output.finish_reason is not None:
                self._drop(output.slot_to_drop)
                self._forget(tokens)
        self._delivery.unpark()

    def _interrupted(self, step: Step) -> None:
        # Only calls that nobody wants are interrupted; should one be cut short all the same, whoever stayed must know.
        if self._wanted(step) and not self._stopping:
            self._step_failed(step, DecodeError("it was interrupted", sequences=len(step.sequences)))

    def _step_failed(self, step: Step, error: DecodeError) -> None:
        """Rule C11: the sequences of the failed call end, the loop goes on, but not for ever."""
        self._failed_steps += 1
        log.error("a step of model %r failed: %s", self._model, error)
        for sequence in self.scheduler.fail(step):
            tokens = self._streams[sequence]
            self._drop(sequence.slot)
            self._forget(tokens)
            ended = DecodeError(error.reason, error.status, len(step.sequences))
            ended.__cause__ = error
            tokens.fail(ended)
        if self._failed_steps >= FAILED_STEPS_IN_A_ROW:
            self._break(f"{self._failed_steps} decode steps in a row failed, the last one: {error.reason}", error)

    def _wanted(self, step: Step) -> bool:
        return any(not self._streams[sequence].leaving for sequence in step.sequences)

    def _sweep(self) -> None:
        # Popped one at a time: if a drop raises, what is left is still known to _end_all.
        while self._leaving:
            tokens = self._leaving.pop()
            if tokens.sequence in self._streams:
                self._drop(self.scheduler.remove(tokens.sequence))
                self._forget(tokens)
                tokens.fail(trio.ClosedResourceError("this sequence was dropped"))

    def _drop(self, slot: int | None) -> None:
        if slot is not None:
            try:
                self.decoder.drop(slot)
            except Exception as error:
                # What is still in the slot would end up in somebody else's answer.
                raise _DropError(f"slot {slot} could not be dropped: {error}") from error
            self.scheduler.release(slot)

    def _forget(self, tokens: Tokens) -> None:
        del self._streams[tokens.sequence]
        tokens.freed.set()

    def _break(self, reason: str, cause: Exception) -> None:
        if self.failure is not None:
            return
        self.failure = reason
        self._end_all(reason, cause)
        self._on_failed(reason)

    def _end_all(self, reason: str, cause: Exception | None = None) -> None:
        # What had been made before is theirs, and maybe all that they wanted.
        self._deliver()
        # The slots are not dropped here: this loop decodes no more, they go with the decoder.
        for tokens in list(self._streams.values()):
            error = DecodeError(reason, sequences=len(self._streams))
            error.__cause__ = cause
            tokens.fail(error)
            self._forget(tokens)
        self._leaving.clear()

    async def _deliver_forever(self) -> None:
        while True:
            self._deliver()
            await self._delivery.park()

    def _deliver(self) -> None:
        undelivered, self._undelivered = self._undelivered, []
        for tokens, output, now in undelivered:
            try:
                tokens.receive(output, now)
            except Exception as error:
                # Only a deliver callback can raise here, and it belongs to the request (rule C10).
                tokens.fail(error)
                self.remove(tokens)
