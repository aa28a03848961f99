"""Shared prefixes: whatever happens, each sequence decodes on the cells that it would have had alone.

In the machine slots hold lists of tokens, and the next token follows from them, so answers are those of a run without
sharing exactly if the cells are.  Whole engines then do the same work, one with sharing and one without.
"""

from __future__ import annotations

import attrs
import trio
import trio.testing
from hypothesis import event, given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

import laneway
from laneway._scheduler import Opening, Scheduler, Sequence, SequenceState, Step, common_prefix
from laneway.decoder import BatchPolicy, DecodeError, Sampling, StepResult
from tests.engine.kit import GREEDY, Body, bench

END = 0
SAMPLING = Sampling()

BEGINNINGS = ((1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4), (1, 2, 3, 4, 4, 4, 4, 4, 4, 4), (1, 2, 2, 2), (3,))
"""What prompts begin with."""

PROMPTS = st.builds(
    lambda beginning, length, rest: (*beginning[:length], *rest),
    st.sampled_from(BEGINNINGS),
    st.integers(1, 12),
    st.lists(st.integers(1, 4), max_size=6),
)


def next_token(cells: list[int]) -> int:
    """The next token, from all that is in cells."""
    return (sum(at * token for at, token in enumerate(cells, 1)) + len(cells)) % 6


def alone(sequence: Sequence) -> tuple[list[int], str]:
    """What a sequence is answered that shares nothing, and how that ends."""
    answer: list[int] = []
    while True:
        token = next_token([*sequence.prompt, *answer])
        if token == END:
            return answer, "eos"
        answer.append(token)
        if len(answer) == sequence.room:
            return answer, "length"


@attrs.define
class Slot:
    """Cells, and whose sampler is there."""

    cells: list[int] = attrs.field(factory=list)
    owner: Sequence | None = None
    broken: bool = False


class PrefixRules(RuleBasedStateMachine):
    jobs = Bundle("jobs")

    @initialize(
        slots=st.integers(1, 5),
        window=st.integers(8, 40),
        least=st.integers(1, 4),
        largest=st.integers(4, 12),
        rounds=st.sampled_from([0.0, 5.0]),
        joint=st.booleans(),
    )
    def open(self, slots: int, window: int, least: int, largest: int, rounds: float, joint: bool) -> None:
        self.window = window
        self.least = least
        policy = BatchPolicy(
            joint_prompts=joint,
            chunk_quantum=1,
            chunk_min=least,
            chunk_max=largest,
            chunk_probe=4,
            rounds_target=rounds,
            rounds_max=3,
        )
        self.scheduler = Scheduler(
            slots=slots,
            window=window,
            policy=policy,
            end_tokens=frozenset({END}),
            piece=lambda token: b"x",
            share=True,
        )
        self.slots = [Slot() for _ in range(slots)]
        self.all: list[Sequence] = []
        self.ended: list[Sequence] = []  # whose slots are still to be freed
        self.step: Step | None = None

    # What requests do

    @rule(target=jobs, ticket=st.integers(1, 4), prompt=PROMPTS, max_tokens=st.none() | st.integers(1, 8))
    def add(self, ticket: int, prompt: tuple[int, ...], max_tokens: int | None) -> Sequence:
        return self._add(ticket, prompt, max_tokens)

    @rule(target=jobs, prompt=PROMPTS, restorable=st.floats(0, 1))
    def restore(self, prompt: tuple[int, ...], restorable: float) -> Sequence:
        return self._add(1, prompt, 4, restorable)

    @rule(target=jobs, job=jobs, more=st.lists(st.integers(1, 4), min_size=1, max_size=4))
    def next_turn(self, job: Sequence, more: list[int]) -> Sequence:
        return self._add(2, (*job.prompt, *job.output, *more), 6)

    @rule(prompt=PROMPTS, count=st.integers(2, 6))
    def burst(self, prompt: tuple[int, ...], count: int) -> None:
        for number in range(count):
            self._add(3, (*prompt, 1 + number % 4, 1 + number % 3), 2)

    @rule(job=jobs)
    def pause(self, job: Sequence) -> None:
        self.scheduler.pause(job)

    @rule(job=jobs)
    def resume(self, job: Sequence) -> None:
        self.scheduler.resume(job)

    @precondition(lambda self: self.step is None)
    @rule(job=jobs)
    def remove(self, job: Sequence) -> None:
        if self.scheduler.remove(job) is not None:
            self.ended.append(job)

    @precondition(lambda self: self.step is None and self.scheduler.running)
    @rule(data=st.data())
    def remove_holder(self, data: st.DataObject) -> None:
        self.remove(data.draw(st.sampled_from(self.scheduler.running)))

    # What the decode loop does

    @precondition(lambda self: self.step is None and self.ended)
    @rule(fails=st.sampled_from([False, False, True]))
    def vacate(self, fails: bool = False) -> None:
        sequence = self.ended.pop(0)
        assert sequence.slot is not None
        number, slot = sequence.slot, self.slots[sequence.slot]
        length = self.scheduler.keepable(sequence)
        if not length or fails:
            self.slots[number] = Slot()
            self.scheduler.release(number)
            return
        assert not slot.broken
        assert self.least <= length <= len(slot.cells)
        self.slots[number] = Slot(slot.cells[:length])
        self.scheduler.keep(number)

    @precondition(lambda self: self.step is None)
    @rule(fails=st.lists(st.booleans(), max_size=4))
    def begin(self, fails: list[bool]) -> None:
        while (opening := self.scheduler.assign()) is not None:
            self._open(opening, bool(fails and fails.pop()))
        # Nobody waits for a slot that only keeps something.
        assert not self.scheduler.waiting or all(slot.owner is not None for slot in self.slots)
        self.step = self.scheduler.schedule()
        live = self.scheduler.running
        if self.step is None:
            assert all(sequence.paused for sequence in live)
            assert all(sequence.state is SequenceState.DECODING for sequence in live)
            return
        for chunk, sequence in zip(self.step.batch.chunks, self.step.sequences, strict=True):
            slot = self.slots[chunk.slot]
            assert slot.owner is sequence
            assert not slot.broken
            known = [*sequence.prompt, *sequence.output]
            assert slot.cells == known[: chunk.position]
            assert list(chunk.tokens) == known[chunk.position : chunk.position + len(chunk.tokens)]
            assert chunk.position + len(chunk.tokens) <= self.window

    @precondition(lambda self: self.step is not None)
    @rule(seconds=st.just(0.1) | st.floats(0.01, 1.0))
    def succeed(self, seconds: float = 0.1) -> None:
        assert self.step is not None
        step, self.step = self.step, None
        rounds: list[dict[int, int]] = []
        for chunk in step.batch.chunks:
            self.slots[chunk.slot].cells.extend(chunk.tokens)
        going = [chunk.slot for chunk in step.batch.chunks if chunk.sample]
        for number in range(step.batch.rounds):
            if number:
                for at in going:
                    self.slots[at].cells.append(rounds[-1][at])
            rounds.append({at: next_token(self.slots[at].cells) for at in going})
            going = [at for at in going if rounds[-1][at] != END]
        for output in self.scheduler.postprocess(step, StepResult(rounds[0], seconds, later=tuple(rounds[1:]))):
            sequence = output.sequence
            answer, reason = alone(sequence)
            assert sequence.output == answer[: len(sequence.output)]
            if output.finish_reason is not None:
                assert (sequence.output, output.finish_reason) == (answer, reason)
                self.ended.append(sequence)

    @precondition(lambda self: self.step is not None)
    @rule(interrupted=st.booleans())
    def fail(self, interrupted: bool) -> None:
        assert self.step is not None
        step, self.step = self.step, None
        for chunk in step.batch.chunks:
            self.slots[chunk.slot].broken = True
        if interrupted:
            self.scheduler.interrupted(step)
            for sequence in step.sequences:
                self.remove(sequence)
        else:
            self.ended += self.scheduler.fail(step)

    @precondition(lambda self: self.step is None)
    @rule(steps=st.integers(1, 15))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            while self.ended:
                self.vacate()
            self.begin([])
            if self.step is None:
                return
            self.succeed()

    def _add(self, ticket: int, prompt: tuple[int, ...], max_tokens: int | None, restorable: float = 0.0) -> Sequence:
        prompt = prompt[: self.window - 1]
        sequence = Sequence(
            ticket=ticket,
            index=len(self.all),
            prompt=prompt,
            sampling=SAMPLING,
            max_tokens=max_tokens,
            restorable=int(restorable * (len(prompt) - 1)),
        )
        self.all.append(sequence)
        self.scheduler.add(sequence)
        return sequence

    def _open(self, opening: Opening, fails: bool) -> None:
        sequence = opening.sequence
        assert sequence.slot is not None
        slot = self.slots[sequence.slot]
        assert slot.owner is (None if opening.opens else sequence)
        assert bool(slot.cells) is (opening.keep is not None)
        self._check_choice(opening)
        if opening.keep is not None:
            if not opening.keep:
                assert all(other.cells or other.owner is not None for other in self.slots), "an empty slot was free"
            if fails and opening.keep:
                slot.cells = []
            else:
                assert len(slot.cells) >= opening.keep
                slot.cells = slot.cells[: opening.keep]
        if opening.copy_from is not None:
            assert not slot.cells
            source = self.slots[opening.copy_from]
            assert not source.broken
            assert len(source.cells) >= sequence.computed
            slot.cells = [] if fails else source.cells[: sequence.computed]
        if opening.load:
            assert not slot.cells
            slot.cells = [] if fails else list(sequence.prompt[: sequence.computed])
        if fails and sequence.computed:
            self.scheduler.missed(sequence)
        slot.owner = sequence

    def _check_choice(self, opening: Opening) -> None:
        """It takes what it can get, or waits for more."""
        sequence = opening.sequence
        prompt = sequence.prompt[:-1]
        now = later = firm = 0
        for slot in self.slots:
            owner = slot.owner
            if owner is sequence or slot.broken or owner in self.ended:
                continue
            if owner is None:
                now = max(now, common_prefix(prompt, tuple(slot.cells)))
            else:
                length = common_prefix(prompt, owner.prompt)
                now = max(now, min(length, owner.computed))
                coming = length if owner.state is SequenceState.PREFILL else 0
                later = max(later, coming)
                if not self.scheduler.follows(owner):
                    firm = max(firm, coming)
        if opening.load:
            assert sequence.computed == sequence.restorable
            # One that has lost whom it waited for cannot wait for those who wait for it.
            assert max(now, later if opening.opens else firm) < max(self.least, sequence.restorable)
            return
        assert sequence.restorable <= max(now, later)
        assert sequence.computed in (0, now)
        if now < self.least:
            assert sequence.computed == 0
        elif later <= now and opening.opens:
            assert sequence.computed == now
        if not sequence.computed:
            assert now < self.least or later > now or not opening.opens

    # What must always hold

    @invariant()
    def what_is_kept_is_what_is_there(self) -> None:
        free = {number: tuple(slot.cells) for number, slot in enumerate(self.slots) if slot.owner is None}
        assert self.scheduler.kept == {number: cells for number, cells in free.items() if cells}

    @invariant()
    def every_cell_is_accounted_for(self) -> None:
        for sequence in self.scheduler.running:
            assert sequence.slot is not None
            slot = self.slots[sequence.slot]
            assert slot.owner is sequence
            if self.step is None or sequence not in self.step.sequences:
                assert len(slot.cells) == sequence.computed
            assert sequence.restored <= sequence.cached <= sequence.computed

    @invariant()
    def it_is_idle_when_nobody_holds_or_waits(self) -> None:
        held = any(slot.owner is not None for slot in self.slots)
        assert self.scheduler.idle is (not held and not self.scheduler.waiting)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        if self.step is not None:
            self.succeed()
        for sequence in self.all:
            self.scheduler.resume(sequence)
        left = [sequence for sequence in self.all if sequence.state is not SequenceState.FINISHED]
        self.run(sum(len(sequence.prompt) + sequence.room for sequence in left) + 1)
        while self.ended:
            self.vacate()
        assert self.scheduler.idle
        assert all(sequence.finish_reason is not None for sequence in left)
        assert not self.scheduler._followers
        assert not self.scheduler._holds


TestPrefixes = PrefixRules.TestCase


@given(
    prompts=st.lists(PROMPTS, min_size=2, max_size=8),
    least=st.integers(1, 4),
    chunk=st.integers(1, 12),
)
def test_a_burst_computes_nothing_twice(prompts: list[tuple[int, ...]], least: int, chunk: int) -> None:
    """Prompts that come together, and that nobody has seen before: each computes what is new in it, and no more."""
    scheduler = Scheduler(
        slots=len(prompts),
        window=40,
        policy=BatchPolicy(chunk_quantum=1, chunk_min=least, chunk_max=chunk, chunk_probe=chunk),
        end_tokens=frozenset({END}),
        piece=lambda token: b"x",
        share=True,
    )
    sequences = [
        Sequence(ticket=1, index=index, prompt=prompt, sampling=SAMPLING, max_tokens=1)
        for index, prompt in enumerate(prompts)
    ]
    for sequence in sequences:
        scheduler.add(sequence)
    computed = 0
    while not scheduler.idle:
        while scheduler.assign() is not None:
            pass
        step = scheduler.schedule()
        assert step is not None
        computed += sum(len(chunk.tokens) for chunk in step.batch.chunks)
        tokens = {chunk.slot: 1 for chunk in step.batch.chunks if chunk.sample}
        for output in scheduler.postprocess(step, StepResult(tokens, 0.01)):
            slot = output.slot_to_drop
            assert slot is not None
            if scheduler.keepable(output.sequence):
                scheduler.keep(slot)
            else:
                scheduler.release(slot)
    expected = 0
    for index, prompt in enumerate(prompts):
        shared = max((common_prefix(prompt[:-1], other) for other in prompts[:index]), default=0)
        expected += len(prompt) - (shared if shared >= least else 0)
    assert computed <= expected


@attrs.frozen
class Turn:
    """A request: one prompt at some time, perhaps cancelled or paused, or with the state of an earlier one."""

    prompt: tuple[int, ...]
    at: int
    max_tokens: int
    cancelled_after: int | None
    paused_for: int
    keeps: bool
    restores: bool


@attrs.frozen
class Plan:
    """What a whole engine does; numbers are tenths of a second, which a step takes, or count calls."""

    turns: list[Turn]
    slots: int
    rounds: float
    failing_steps: set[int]
    failing: dict[str, set[int]]


CALLS = st.sets(st.integers(1, 6), max_size=2)

PLANS = st.builds(
    Plan,
    turns=st.lists(
        st.builds(
            Turn,
            prompt=PROMPTS,
            at=st.integers(0, 30),
            max_tokens=st.integers(1, 12),
            cancelled_after=st.none() | st.none() | st.integers(0, 15),
            paused_for=st.sampled_from([0, 0, 0, 7]),
            keeps=st.booleans(),
            restores=st.booleans(),
        ),
        min_size=1,
        max_size=10,
    ),
    slots=st.integers(1, 4),
    rounds=st.sampled_from([0.0, 5.0]),
    failing_steps=st.sets(st.integers(1, 30), max_size=2),
    failing=st.fixed_dictionaries(dict.fromkeys(("fail_copy", "fail_cut", "fail_load", "fail_save"), CALLS)),
)


async def states_of_before() -> list[laneway.SavedState]:
    """What another engine has saved of sequences that begin as others do."""
    states: list[laneway.SavedState] = []

    async def body(ctx: laneway.RequestContext) -> None:
        for beginning in BEGINNINGS:
            async with ctx.generate([*beginning, 1, 2], GREEDY, max_tokens=3, keep_state=True) as tokens:
                await tokens.finish()
            state = await tokens.saved_state()
            assert state is not None
            states.append(state)

    async with bench(1) as b, b.run("body", Body(body)) as run:
        await run.result()
    return states


async def work(plan: Plan, *, prefix_cache: bool) -> tuple[list[laneway.Answer | None], int]:
    """The answers of those that were neither cancelled nor in a step that failed, and the prompt tokens computed."""
    policy = BatchPolicy(
        joint_prompts=True,
        chunk_quantum=2,
        chunk_min=2,
        chunk_max=6,
        chunk_probe=4,
        rounds_target=plan.rounds,
        rounds_max=3,
    )
    answers: list[laneway.Answer | None] = [None] * len(plan.turns)
    states = await states_of_before()
    failing = {name: dict.fromkeys(calls, DecodeError("as told")) for name, calls in plan.failing.items()}
    steps = dict.fromkeys(plan.failing_steps, DecodeError("as told"))
    async with bench(plan.slots, policy=policy, fail_at=steps, prefix_cache=prefix_cache, **failing) as b:

        async def take_turn(number: int, turn: Turn) -> None:
            async def body(ctx: laneway.RequestContext) -> laneway.Answer:
                restore = max(states, key=lambda state: common_prefix(state.tokens, turn.prompt))
                async with ctx.generate(
                    list(turn.prompt),
                    GREEDY,
                    max_tokens=turn.max_tokens,
                    restore=restore if turn.restores else None,
                    keep_state=turn.keeps,
                ) as tokens:
                    if turn.paused_for:
                        tokens.pause()
                        await trio.sleep(turn.paused_for / 10)
                        tokens.resume()
                    answer = await tokens.finish()
                if turn.keeps and (state := await tokens.saved_state()) is not None:
                    states.append(state)
                if tokens.restored:
                    event("a state is restored")
                return answer

            await trio.sleep(turn.at / 10)
            scope = trio.CancelScope()
            if turn.cancelled_after is not None:
                scope.deadline = trio.current_time() + turn.cancelled_after / 10
            try:
                with scope:
                    async with b.run("body", Body(body)) as run:
                        answers[number] = await run.result()
            except laneway.DecodeError:
                return
            b.decoder.assert_obeyed()

        async with trio.open_nursery() as nursery:
            for number, turn in enumerate(plan.turns):
                nursery.start_soon(take_turn, number, turn)
        b.nothing_left()
        assert b.model.decode_loop is not None
        assert b.decoder.kept == b.model.decode_loop.scheduler.kept
        if b.decoder.kept:
            event("something is kept")
        if b.decoder.statistics().copies:
            event("something is copied")
        for turn, answer in zip(plan.turns, answers, strict=True):
            if answer is not None:
                assert answer.tokens == b.decoder.expected(turn.prompt, GREEDY, turn.max_tokens).tokens
    return answers, sum(answer.stats.cached_tokens for answer in answers if answer is not None)


@given(PLANS)
def test_an_engine_answers_with_it_as_without(plan: Plan) -> None:
    """As far as both answer: who is cancelled, or in a step that fails, is a matter of time, which sharing saves."""

    def run(prefix_cache: bool) -> tuple[list[laneway.Answer | None], int]:
        clock = trio.testing.MockClock(autojump_threshold=0)
        return trio.run(lambda: work(plan, prefix_cache=prefix_cache), clock=clock)

    shared, _ = run(True)
    plain, cached = run(False)
    assert cached == 0 or any(turn.restores for turn in plan.turns)
    for one, other in zip(shared, plain, strict=True):
        if one is not None and other is not None:
            assert (one.text, one.tokens, one.stop_reason) == (other.text, other.tokens, other.stop_reason)
