"""The scheduler against a model that knows only the rules, with a decoder that checks everything it is asked to do."""

from __future__ import annotations

import attrs
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from laneway._scheduler import Output, Scheduler, Sequence, SequenceState, Step
from laneway.decoder import BatchPolicy, DecodeError, Sampling, StepBatch, StepResult

PIECES = [b"", b"a", b"b", b"\xc3", b"\xa9", b""]  # \xc3 and \xa9 make one character together
END = 0
CONTROL = 5  # a control token, which some sequences have as a stop string
NOTHING = -1  # in place of a token: the decoder has none for this sequence
SAMPLING = Sampling()

TOKENS = st.lists(st.integers(1, 4) | st.integers(1, 4) | st.integers(NOTHING, CONTROL), min_size=1, max_size=20)
SECONDS = st.just(0.0) | st.floats(1e-4, 2.0)


@attrs.define(eq=False)
class Job:
    """What the rules say about one sequence."""

    sequence: Sequence
    room: int
    state: SequenceState = SequenceState.WAITING
    slot: int | None = None
    paused: bool = False
    cells: list[int] = attrs.field(factory=list)
    beyond: list[int] = attrs.field(factory=list)  # cells after those, decoded when the answer had ended
    whole: bool = True
    answer: list[int] = attrs.field(factory=list)
    said: str = ""
    together: list[int] = attrs.field(factory=list)  # the sizes of its decode steps

    @property
    def key(self) -> tuple[int, int]:
        return self.sequence.ticket, self.sequence.index

    @property
    def streams(self) -> bool:
        return self.state is SequenceState.DECODING and not self.paused

    def text(self) -> tuple[str, bool]:
        """The text of its answer, and whether a stop string ended it."""
        text = b"".join(PIECES[token] for token in self.answer).decode("utf-8", "replace")
        for end in range(len(text) + 1):
            complete = [len(stop) for stop in self.sequence.stop if text[:end].endswith(stop)]
            if complete:
                return text[: end - max(complete)], True
        return text, False


class Decoder:
    """Cells of slots.  It refuses what a real one could not do, or would do wrong."""

    def __init__(self, slots: int, window: int) -> None:
        self.window = window
        self.slots: list[Job | None] = [None] * slots

    def open(self, slot: int, job: Job) -> None:
        assert self.slots[slot] is None
        self.slots[slot] = job
        job.cells = list(job.sequence.prompt[: job.sequence.computed])

    def drop(self, slot: int) -> None:
        assert self.slots[slot] is not None
        self.slots[slot] = None

    def step(self, batch: StepBatch) -> list[Job]:
        for source, target in batch.moves:
            job = self.slots[source]
            assert job is not None
            assert self.slots[target] is None
            self.slots[source], self.slots[target] = None, job
            job.slot = target
        slots = [chunk.slot for chunk in batch.chunks]
        assert slots == sorted(set(slots)) != []
        jobs = []
        for chunk in batch.chunks:
            job = self.slots[chunk.slot]
            assert job is not None
            assert chunk.tokens
            assert chunk.position == len(job.cells)
            assert chunk.position + len(chunk.tokens) <= self.window
            jobs.append(job)
        return jobs


class SchedulerRules(RuleBasedStateMachine):
    jobs = Bundle("jobs")

    @initialize(
        slots=st.integers(1, 6),
        window=st.integers(2, 40),
        kv=st.sampled_from(["contiguous", "contiguous", "any slots", "joint", "joint"]),
        quantum=st.integers(1, 3),
        largest=st.integers(3, 12),
        rounds=st.sampled_from([0.0, 0.5, 5.0]),
    )
    def open(self, slots: int, window: int, kv: str, quantum: int, largest: int, rounds: float) -> None:
        self.window = window
        self.policy = BatchPolicy(
            contiguous=kv == "contiguous",
            joint_prompts=kv == "joint",
            chunk_quantum=quantum,
            chunk_min=quantum,
            chunk_max=largest,
            chunk_probe=3,
            rounds_target=rounds,
            rounds_max=3,
        )
        self.scheduler = Scheduler(
            slots=slots, window=window, policy=self.policy, end_tokens=frozenset({END}), piece=PIECES.__getitem__
        )
        self.decoder = Decoder(slots, window)
        self.all: dict[Sequence, Job] = {}
        self.step: Step | None = None
        self.to_drop: set[int] = set()
        self.last_prompt = (-1, -1)
        self.last_was_chunk = False
        self.intake = 0.0

    # What requests do, at any time

    @rule(
        target=jobs,
        ticket=st.integers(1, 4),
        wanted=st.lists(st.tuples(st.integers(0, 20), st.none() | st.integers(1, 20)), min_size=1, max_size=5),
        prompt=st.floats(0, 1),
        cached=st.just(0.0) | st.floats(0, 1),
        stop=st.sampled_from([(), (), ("ab",), ("bb", "aba"), ("é",)]),
        stop_tokens=st.sampled_from([frozenset[int](), frozenset({CONTROL}), frozenset({CONTROL, END})]),
    )
    def add(
        self,
        ticket: int,
        wanted: list[tuple[int, int | None]],
        prompt: float,
        cached: float,
        stop: tuple[str, ...],
        stop_tokens: frozenset[int],
    ) -> MultipleResults[Job]:
        length = 1 + int(prompt * (self.window - 2))
        left = self.window - length
        jobs = []
        for index, max_tokens in wanted:
            while (ticket, index) in {job.key for job in self.all.values()}:
                index += 1
            sequence = Sequence(
                ticket=ticket,
                index=index,
                prompt=tuple(range(100, 100 + length)),
                sampling=SAMPLING,
                max_tokens=max_tokens,
                stop=stop,
                stop_tokens=stop_tokens,
                restorable=min(int(cached * length), length - 1),
            )
            job = self.all[sequence] = Job(sequence, room=left if max_tokens is None else min(left, max_tokens))
            self.scheduler.add(sequence)
            jobs.append(job)
        return multiple(*jobs)

    @rule(job=jobs)
    def pause(self, job: Job) -> None:
        self.scheduler.pause(job.sequence)
        job.paused = True

    # Most jobs of the bundle have ended or wait: these pick one that matters.
    @precondition(lambda self: self._streams())
    @rule(data=st.data())
    def pause_stream(self, data: st.DataObject) -> None:
        self.pause(data.draw(st.sampled_from(self._streams())))

    @rule(job=jobs)
    def resume(self, job: Job) -> None:
        self.scheduler.resume(job.sequence)
        job.paused = False

    # What the decode loop does between steps

    @precondition(lambda self: self.step is None)
    @rule(job=jobs)
    def remove(self, job: Job) -> None:
        held = job.slot if job.state in (SequenceState.PREFILL, SequenceState.DECODING) else None
        assert self.scheduler.remove(job.sequence) == held
        self._end(job)

    @precondition(lambda self: self.step is None and self._live())
    @rule(data=st.data(), drop=st.booleans())
    def remove_holder(self, data: st.DataObject, drop: bool) -> None:
        job = data.draw(st.sampled_from(self._live()))
        self.remove(job)
        if drop and job.slot is not None:
            self._release(job.slot)

    @precondition(lambda self: self.step is None)
    @rule(ticket=st.integers(1, 4))
    def end_request(self, ticket: int) -> None:
        """A request's teardown: all of its sequences leave at once, and gaps open between those of others."""
        for job in self.all.values():
            if job.key[0] == ticket:
                self.remove(job)
        for slot in sorted(self.to_drop):
            self._release(slot)

    @precondition(lambda self: self.step is None and self.to_drop)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self._release(data.draw(st.sampled_from(sorted(self.to_drop))))

    @precondition(lambda self: self.step is None and (self._live() or self.scheduler.waiting))
    @rule(miss=st.sampled_from([False, False, True]))
    def begin(self, miss: bool = False) -> None:
        opens = self._expected_opens()
        for job in opens:
            opening = self.scheduler.assign()
            assert opening is not None
            assert (opening.sequence, opening.opens) == (job.sequence, True)
            assert (opening.keep, opening.copy_from) == (None, None)
            assert job.sequence.slot == job.slot
            assert job.slot is not None
            assert opening.load is (job.sequence.restorable > 0)
            if opening.load and miss:
                self.scheduler.missed(job.sequence)
            expected = 0 if miss else job.sequence.restorable
            assert job.sequence.computed == job.sequence.cached == job.sequence.restored == expected
            self.decoder.open(job.slot, job)
        assert self.scheduler.assign() is None
        step = self.scheduler.schedule()
        if step is None:
            assert not self._streams()
            assert not self._pending()
            return
        # Neither streams nor prompts starve: where there are both, the two kinds of steps alternate, but for bursts.
        if self._streams() and self._pending():
            assert step.prefill or self.last_was_chunk
            if step.prefill and self.last_was_chunk:
                self._check_burst(step)
        else:
            assert step.prefill is bool(self._pending())
        self.last_was_chunk = step.prefill
        self.intake = self.intake if step.prefill else 0.0
        before = {job.slot for job in self._live()}
        jobs = self.decoder.step(step.batch)
        assert jobs == [self.all[sequence] for sequence in step.sequences]
        self._check_moves(step, before)
        if step.prefill:
            self._check_chunk(step, jobs)
        else:
            self._check_decode(step, jobs)
        self.step = step

    @precondition(lambda self: self.step is not None)
    @rule(tokens=TOKENS, seconds=SECONDS, ended_after=st.sampled_from([1, 2, 3, 3]))
    def succeed(self, tokens: list[int], seconds: float, ended_after: int = 3) -> None:
        assert self.step is not None
        step, self.step = self.step, None
        sampled = [chunk.slot for chunk in step.batch.chunks if chunk.sample]
        rounds: list[dict[int, int]] = []
        failures: dict[int, DecodeError] = {}
        going = sampled
        for number in range(min(step.batch.rounds, ended_after)):
            picked = {slot: tokens[(number + at) % len(tokens)] for at, slot in enumerate(going)}
            failures |= {slot: DecodeError("nothing") for slot in going if picked[slot] == NOTHING}
            rounds.append({slot: token for slot, token in picked.items() if token != NOTHING})
            going = [slot for slot, token in rounds[-1].items() if token != END]
        for chunk, sequence in zip(step.batch.chunks, step.sequences, strict=True):
            job = self.all[sequence]
            job.cells.extend(chunk.tokens)
            job.beyond = [made[chunk.slot] for made in rounds if chunk.slot in made]
            if chunk.slot not in failures:
                job.beyond = job.beyond[:-1]
        if step.prefill:
            self.intake += seconds
        result = StepResult(rounds[0], seconds, later=tuple(rounds[1:]), failures=failures)
        outputs = self.scheduler.postprocess(step, result)
        assert [self.all[output.sequence].slot for output in outputs] == sampled
        for output in outputs:
            self._check_output(output, rounds, failures, decoding=not step.prefill)

    @precondition(lambda self: self.step is not None)
    @rule()
    def fail(self) -> None:
        assert self.step is not None
        step, self.step = self.step, None
        assert self.scheduler.fail(step) == list(step.sequences)
        for sequence in step.sequences:
            self.all[sequence].whole = False
            assert sequence.slot == self.all[sequence].slot
            self._end(self.all[sequence])

    @precondition(lambda self: self.step is not None)
    @rule()
    def interrupt(self) -> None:
        assert self.step is not None
        step, self.step = self.step, None
        self.scheduler.interrupted(step)
        for sequence in step.sequences:
            self.all[sequence].whole = False
            self.remove(self.all[sequence])

    @precondition(lambda self: self.step is None and (self._live() or self.scheduler.waiting))
    @rule(count=st.integers(1, 12), tokens=TOKENS, seconds=SECONDS, drop=st.sampled_from([True, True, False]))
    def run(self, count: int, tokens: list[int], seconds: float, drop: bool = True) -> None:
        """Several good steps, mostly with ended sequences dropped before each: what a loop does all day."""
        for at in range(count):
            for slot in sorted(self.to_drop) if drop else ():
                self._release(slot)
            self.begin()
            if self.step is None:
                return
            self.succeed(tokens[at % len(tokens) :], seconds)

    # What must always hold

    @invariant()
    def it_tells_who_holds_and_who_waits(self) -> None:
        snapshot = self.scheduler.snapshot()
        held = {slot: job for slot, job in enumerate(self.decoder.slots) if job is not None}
        assert snapshot.slots == {slot: (*job.key, job.state) for slot, job in held.items()}
        assert {slot for slot, job in held.items() if job.state is SequenceState.FINISHED} == self.to_drop
        waiting = [job for job in self.all.values() if job.state is SequenceState.WAITING]
        assert snapshot.waiting == {
            ticket: sum(job.key[0] == ticket for job in waiting) for ticket in {job.key[0] for job in waiting}
        }
        assert self.scheduler.waiting == len(waiting)
        assert self.scheduler.running == [job.sequence for job in held.values() if job.slot not in self.to_drop]
        assert self.scheduler.idle is (not held and not waiting)

    @invariant()
    def every_sequence_is_where_its_cells_are(self) -> None:
        for slot, job in enumerate(self.decoder.slots):
            if job is None or job.state is SequenceState.FINISHED:
                continue
            assert job.slot == slot
            assert (job.sequence.slot, job.sequence.state) == (job.slot, job.state)
            assert job.sequence.computed == len(job.cells)
            assert job.cells == [*job.sequence.prompt, *job.answer][: len(job.cells)]

    @invariant()
    def what_was_in_cells_at_the_end_is_known(self) -> None:
        for sequence, job in self.all.items():
            assert sequence.whole is job.whole
            assert not job.whole or list(sequence.held) == job.cells + job.beyond

    @invariant()
    def decode_steps_are_counted(self) -> None:
        for sequence, job in self.all.items():
            assert (sequence.decode_steps, sequence.concurrency_sum) == (len(job.together), sum(job.together))

    @invariant()
    def the_window_holds(self) -> None:
        for job in self.all.values():
            assert len(job.sequence.prompt) + len(job.answer) <= self.window
            assert len(job.cells) < self.window

    @invariant()
    def nothing_that_was_said_is_taken_back(self) -> None:
        for job in self.all.values():
            text, _ = job.text()
            assert text.startswith(job.said)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        if self.step is not None:
            self.succeed([1], 0.01)
        for job in self.all.values():
            self.resume(job)
        live = [job for job in self.all.values() if job.state is not SequenceState.FINISHED]
        work = sum(len(job.sequence.prompt) + job.room for job in live)
        self.run(work + 1, [1, 2, 3], 0.01)
        assert self.scheduler.idle
        assert self.scheduler.schedule() is None
        assert all(job.state is SequenceState.FINISHED for job in live)
        assert all(job.sequence.finish_reason is not None and job.sequence.slot is None for job in live)
        assert not self.scheduler._holds
        assert not self.scheduler._prefilling
        assert not self.scheduler._streams

    # The model

    def _live(self) -> list[Job]:
        return [job for job in self.decoder.slots if job is not None and job.state is not SequenceState.FINISHED]

    def _streams(self) -> list[Job]:
        return [job for job in self._live() if job.streams]

    def _pending(self) -> list[Job]:
        return [job for job in self._live() if job.state is SequenceState.PREFILL]

    def _expected_opens(self) -> list[Job]:
        """Rule A15, one free slot after the other."""
        free = [slot for slot, job in enumerate(self.decoder.slots) if job is None]
        waiting = [job for job in self.all.values() if job.state is SequenceState.WAITING]
        holders = [job.key[0] for job in self._live()]
        opens = []
        while free and waiting:
            job = min(waiting, key=lambda job: (holders.count(job.key[0]), job.key))
            waiting.remove(job)
            holders.append(job.key[0])
            job.slot, job.state = free.pop(0), SequenceState.PREFILL
            opens.append(job)
        return opens

    def _check_moves(self, step: Step, before: set[int | None]) -> None:
        if step.batch.moves:
            assert self.policy.contiguous
            assert not step.prefill
            assert not self.to_drop
            assert not self.scheduler.waiting
        after = {job.slot for job in self._live()}
        assert len(after) == len(before)
        if self.policy.contiguous and not step.prefill and not self.to_drop:
            slots = [chunk.slot for chunk in step.batch.chunks]
            consecutive = slots == list(range(slots[0], slots[0] + len(slots)))
            assert consecutive or after == set(range(len(after)))

    def _check_chunk(self, step: Step, jobs: list[Job]) -> None:
        pending = sorted(self._pending(), key=lambda job: (job.key <= self.last_prompt, job.key))
        assert {job.key for job in jobs} == {job.key for job in pending[: len(jobs)]}
        self.last_prompt = pending[len(jobs) - 1].key
        assert len(jobs) == 1 or self.policy.joint_prompts
        for chunk, job in zip(step.batch.chunks, jobs, strict=True):
            prompt, end = job.sequence.prompt, chunk.position + len(chunk.tokens)
            assert list(chunk.tokens) == list(prompt[chunk.position : end])
            assert chunk.sample is (end == len(prompt))
            assert chunk.sample or (len(jobs) == 1 and len(chunk.tokens) % self.policy.chunk_quantum == 0)
        assert sum(len(chunk.tokens) for chunk in step.batch.chunks) <= self.policy.chunk_max

    def _check_burst(self, step: Step) -> None:
        """A chunk that follows another although somebody waits for a decode step."""
        for chunk, sequence in zip(step.batch.chunks, step.sequences, strict=True):
            assert chunk.sample
            assert chunk.position == sequence.cached  # not begun before
        assert 2 * len(self._pending()) >= len(self._streams())
        assert self.intake < self.policy.idle_chunk_target

    def _check_decode(self, step: Step, jobs: list[Job]) -> None:
        assert jobs == self._streams()
        for chunk, job in zip(step.batch.chunks, jobs, strict=True):
            assert list(chunk.tokens) == job.answer[-1:]
            assert chunk.sample
            assert 1 <= step.batch.rounds <= max(1, job.room - len(job.answer))
        assert step.batch.rounds == 1 or (self.policy.rounds_target and not self._pending())

    def _check_output(
        self, output: Output, rounds: list[dict[int, int]], failures: dict[int, DecodeError], *, decoding: bool
    ) -> None:
        job = self.all[output.sequence]
        assert job.slot is not None
        job.state = SequenceState.DECODING
        reason = None
        taken = 0
        closed = failed = False
        while reason is None and not failed and taken < len(rounds):
            token = rounds[taken].get(job.slot, NOTHING)
            if taken:
                job.cells.append(job.answer[-1])
                assert job.beyond.pop(0) == job.answer[-1]
            if decoding:
                job.together.append(len(rounds[taken]))
            if token == NOTHING:
                failed = True
                break
            taken += 1
            closed = token == END or token in job.sequence.stop_tokens
            if not closed:
                job.answer.append(token)
            if job.text()[1] or token in job.sequence.stop_tokens:
                reason = "stop"
            elif token == END:
                reason = "eos"
            elif len(job.answer) == job.room:
                reason = "length"
        assert output.tokens == taken
        assert output.sequence.output == job.answer
        job.said += output.text
        text, _ = job.text()
        assert output.closed is closed
        assert output.error is (failures[job.slot] if failed else None)
        if reason is None and not failed:
            assert (output.finish_reason, output.slot_to_drop) == (None, None)
            return
        assert output.ended
        assert (output.finish_reason, output.slot_to_drop) == (reason, job.slot)
        assert output.sequence.finish_reason == reason
        assert job.said == text
        self._end(job)

    def _end(self, job: Job) -> None:
        if job.state in (SequenceState.PREFILL, SequenceState.DECODING):
            assert job.slot is not None
            self.to_drop.add(job.slot)
        job.state = SequenceState.FINISHED
        assert job.sequence.state is SequenceState.FINISHED

    def _release(self, slot: int) -> None:
        self.decoder.drop(slot)
        self.to_drop.remove(slot)
        self.scheduler.release(slot)


TestScheduler = SchedulerRules.TestCase
