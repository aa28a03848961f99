"""Scripted scenes of the scheduler: who gets a slot, what a step holds, when an answer ends."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from laneway._scheduler import Output, Scheduler, SchedulerSnapshot, Sequence, SequenceState, Step
from laneway.decoder import BatchPolicy, Sampling, StepResult, TokenLogprob

END = 0
LETTER = ord("a")  # token n of these tests is the byte n
SAMPLING = Sampling(temperature=0.0)


def seq(
    ticket: int = 1,
    index: int = 0,
    prompt: int = 4,
    max_tokens: int | None = None,
    stop: tuple[str, ...] = (),
    restorable: int = 0,
) -> Sequence:
    """A sequence whose prompt has so many tokens."""
    return Sequence(
        ticket=ticket,
        index=index,
        prompt=tuple(range(1, prompt + 1)),
        sampling=SAMPLING,
        max_tokens=max_tokens,
        stop=stop,
        restorable=restorable,
    )


class Bench:
    """A scheduler, and a decoder that gives a letter for everything and drops slots at once."""

    def __init__(
        self, *sequences: Sequence, slots: int = 4, window: int = 1000, policy: BatchPolicy | None = None
    ) -> None:
        policy = BatchPolicy() if policy is None else policy
        self.scheduler = Scheduler(
            slots=slots, window=window, policy=policy, end_tokens=frozenset({END}), piece=lambda token: bytes([token])
        )
        for sequence in sequences:
            self.scheduler.add(sequence)

    def next(self) -> Step:
        self.opened = tuple(opening.sequence for opening in iter(self.scheduler.assign, None))
        step = self.scheduler.schedule()
        assert step is not None
        return step

    def opens(self) -> tuple[Sequence, ...]:
        """Who has been given a slot for the next step."""
        self.next()
        return self.opened

    def finish(
        self, step: Step, token: int = LETTER, seconds: float = 0.01, logprobs: dict[int, TokenLogprob] | None = None
    ) -> list[Output]:
        tokens = {chunk.slot: token for chunk in step.batch.chunks if chunk.sample}
        later = (tokens,) * (step.batch.rounds - 1)
        result = StepResult(tokens, seconds * step.batch.rounds, logprobs or {}, later)
        outputs = self.scheduler.postprocess(step, result)
        for output in outputs:
            self.release(output.slot_to_drop)
        return outputs

    def release(self, slot: int | None) -> None:
        if slot is not None:
            self.scheduler.release(slot)

    def step(self, token: int = LETTER, seconds: float = 0.01) -> Step:
        step = self.next()
        self.finish(step, token, seconds)
        return step

    def remove(self, sequence: Sequence) -> None:
        self.release(self.scheduler.remove(sequence))

    def prefill_all(self) -> None:
        """Run until no prompt is left to take in."""
        while self.scheduler.waiting or any(not sequence.output for sequence in self.scheduler.running):
            self.step()

    def slots(self) -> dict[int, tuple[int, int]]:
        return {slot: (ticket, index) for slot, (ticket, index, _) in self.scheduler.snapshot().slots.items()}


def kinds(bench: Bench, steps: int) -> str:
    """The kinds of the next steps, P for a chunk and D for a decode step."""
    return "".join("P" if bench.step().prefill else "D" for _ in range(steps))


# Slots


def test_A15_a_free_slot_goes_to_the_request_that_holds_fewest() -> None:
    first = [seq(1, index) for index in range(4)]
    second = [seq(2, index) for index in range(2)]
    bench = Bench(*first, slots=3)
    assert bench.opens() == tuple(first[:3])
    for late in second:
        bench.scheduler.add(late)
    bench.remove(first[0])
    assert bench.opens() == (second[0],)  # 2 against 0
    bench.remove(first[1])
    assert bench.opens() == (first[3],)  # 1 against 1: the older one
    bench.remove(first[2])
    assert bench.opens() == (second[1],)  # nobody else waits


def test_A15_slots_given_at_one_time_are_shared_out_too() -> None:
    bench = Bench(*[seq(ticket, index) for ticket in (3, 1, 2) for index in range(4)], slots=5)
    assert [sequence.key for sequence in bench.opens()] == [(1, 0), (2, 0), (3, 0), (1, 1), (2, 1)]


def test_A15_inside_a_request_input_order_counts_not_the_order_of_arrival() -> None:
    bench = Bench(*[seq(1, index) for index in (3, 0, 2, 1)], slots=3)
    assert [sequence.index for sequence in bench.opens()] == [0, 1, 2]


def test_A15_a_slot_on_its_way_out_counts_no_longer() -> None:
    bench = Bench(seq(1, 0), seq(1, 1), seq(2, 0), seq(2, 1), slots=2)
    one, two = bench.opens()
    assert (one.ticket, two.ticket) == (1, 2)
    slots = [bench.scheduler.remove(one), bench.scheduler.remove(two)]
    for slot in slots:
        bench.release(slot)
    assert [sequence.key for sequence in bench.opens()] == [(1, 1), (2, 1)]


def test_A15_prompts_take_turns_in_ticket_order() -> None:
    bench = Bench(*[seq(ticket, 0, prompt=64) for ticket in (2, 1, 3)], policy=BatchPolicy(chunk_max=16))
    served = [bench.step().sequences[0].ticket for _ in range(5)]
    bench.scheduler.add(seq(1, 1, prompt=64))
    served += [bench.step().sequences[0].ticket for _ in range(4)]
    assert served == [1, 2, 3, 1, 2, 3, 1, 1, 2]


def test_a_new_sequence_takes_the_lowest_free_slot() -> None:
    sequences = [seq(1, index) for index in range(4)]
    bench = Bench(*sequences)
    bench.next()
    bench.remove(sequences[2])
    bench.remove(sequences[1])
    bench.scheduler.add(late := seq(2))
    assert bench.opens() == (late,)
    assert late.slot == 1


def test_a_slot_is_not_given_away_before_it_is_released() -> None:
    bench = Bench(first := seq(1), second := seq(2), slots=1)
    bench.next()
    slot = bench.scheduler.remove(first)
    assert slot == 0
    assert bench.scheduler.assign() is None
    assert bench.scheduler.schedule() is None
    assert not bench.scheduler.idle
    assert bench.scheduler.snapshot().slots == {0: (1, 0, SequenceState.FINISHED)}
    bench.scheduler.release(slot)
    assert first.slot is None
    assert bench.opens() == (second,)


def test_a_waiting_sequence_leaves_at_once_and_removing_twice_changes_nothing() -> None:
    bench = Bench(first := seq(1), second := seq(1, 1), third := seq(1, 2), slots=1)
    bench.next()
    assert bench.scheduler.remove(second) is None
    assert second.state is SequenceState.FINISHED
    assert bench.scheduler.remove(second) is None
    assert bench.scheduler.waiting == 1
    assert bench.scheduler.remove(first) == 0
    assert bench.scheduler.remove(first) is None
    bench.scheduler.release(0)
    assert bench.opens() == (third,)


def test_equal_places_in_the_input_are_told_apart() -> None:
    bench = Bench(first := seq(1, 5), second := seq(1, 5), third := seq(1, 5), slots=1)
    bench.remove(second)
    assert bench.opens() == (first,)
    bench.remove(first)
    assert bench.opens() == (third,)


def test_snapshot_and_repr_tell_who_holds_and_who_waits() -> None:
    bench = Bench(seq(1), seq(1, 1), seq(1, 2), seq(2), seq(2, 1), slots=2)
    bench.step()
    assert bench.scheduler.snapshot() == SchedulerSnapshot(
        slots={0: (1, 0, SequenceState.DECODING), 1: (2, 0, SequenceState.PREFILL)}, waiting={1: 2, 2: 1}
    )
    assert repr(bench.scheduler) == "<Scheduler 2/2 slots in use, 3 waiting>"
    assert [sequence.ticket for sequence in bench.scheduler.running] == [1, 2]


# Steps


def test_decode_steps_and_chunks_alternate_while_a_prompt_is_pending() -> None:
    bench = Bench(seq(1), policy=BatchPolicy(chunk_max=16))
    assert kinds(bench, 3) == "PDD"
    bench.scheduler.add(seq(2, prompt=64))
    assert kinds(bench, 9) == "PDPDPDPDD"


def test_a_burst_of_short_prompts_is_taken_in_together() -> None:
    bench = Bench(seq(1), slots=9)
    assert kinds(bench, 2) == "PD"
    for ticket in range(2, 10):
        bench.scheduler.add(seq(ticket))
    # Beside 7 streams there are 2 prompts left, fewer than half as many.
    assert kinds(bench, 12) == "PPPPPPDPDPDD"


def test_a_burst_ends_when_it_has_lasted_as_long_as_an_idle_chunk_may() -> None:
    # Each of these prompts takes 0.01 s.
    bench = Bench(*[seq(ticket) for ticket in range(12)], slots=12, policy=BatchPolicy(idle_chunk_target=0.035))
    assert kinds(bench, 12) == "PPPDPPPDPPPD"


def test_a_prompt_of_several_chunks_is_no_part_of_a_burst() -> None:
    bench = Bench(seq(1), seq(2, prompt=64), seq(3), seq(4), policy=BatchPolicy(chunk_max=16))
    # The long one waits for a decode step before each of its chunks; those after it follow it in a burst.
    assert kinds(bench, 13) == "PDPPPDPDPDPDD"


def test_a_prompt_that_was_begun_is_no_part_of_a_burst_however_quick_its_chunk_was() -> None:
    policy = BatchPolicy(chunk_quantum=1, chunk_min=1, chunk_probe=3, chunk_max=3)
    bench = Bench(seq(1, 0), seq(1, 1), policy=policy)
    for _ in range(2):
        assert bench.step(seconds=0.0).prefill  # too quick for the clock
    assert kinds(bench, 3) == "PDP"


JOINT = BatchPolicy(joint_prompts=True)


def parts(step: Step) -> list[tuple[int, int]]:
    """The tickets of a step in slot order, and how many tokens each has in it."""
    return [(each.ticket, len(chunk.tokens)) for each, chunk in zip(step.sequences, step.batch.chunks, strict=True)]


def test_short_prompts_are_taken_in_together() -> None:
    prompts = [seq(ticket, prompt=40) for ticket in range(1, 6)]
    bench = Bench(*prompts, slots=5, policy=JOINT)
    # The first chunk is a probe, and shows that there is time for all of them.
    assert parts(bench.step()) == [(1, 32)]
    assert parts(bench.step()) == [(1, 8), (2, 40), (3, 40), (4, 40), (5, 40)]
    assert all(each.output == [LETTER] for each in prompts)
    assert kinds(bench, 1) == "D"


def test_prompts_that_share_a_step_take_no_longer_than_one_chunk() -> None:
    bench = Bench(seq(1), slots=6, policy=JOINT)
    bench.step(seconds=0.004)  # a millisecond a token: a hundred fill the target beside a stream
    for ticket in range(2, 6):
        bench.scheduler.add(seq(ticket, prompt=40))
    step = bench.next()
    assert parts(step) == [(2, 40), (3, 40)]
    bench.finish(step, seconds=0.08)
    # Two prompts for three streams: the burst goes on.
    assert parts(bench.next()) == [(4, 40), (5, 40)]


def test_a_prompt_that_does_not_fit_beside_others_is_taken_in_alone() -> None:
    bench = Bench(seq(1), slots=6, policy=JOINT)
    bench.step(seconds=0.004)
    for ticket, prompt in [(2, 40), (3, 400), (4, 40)]:
        bench.scheduler.add(seq(ticket, prompt=prompt))
    taken = []
    for _ in range(5):
        step = bench.next()
        seconds = sum(len(chunk.tokens) for chunk in step.batch.chunks) / 1000
        bench.finish(step, seconds=seconds)
        if step.prefill:
            taken.append(parts(step))
    assert taken == [[(2, 40)], [(3, 96)], [(4, 40)]]


def test_a_prompt_pending_beside_idle_slots_has_every_step() -> None:
    assert kinds(Bench(seq(1, prompt=64), policy=BatchPolicy(chunk_max=16)), 5) == "PPPPD"


def test_a_decode_step_has_one_token_of_each_stream_in_slot_order() -> None:
    bench = Bench(*[seq(1, index, prompt=3 + index) for index in range(3)])
    bench.prefill_all()
    before = {slot: sequence.computed for slot, sequence in enumerate(bench.scheduler.running)}
    step = bench.next()
    assert not step.prefill
    assert [chunk.slot for chunk in step.batch.chunks] == [0, 1, 2]
    assert {chunk.slot: chunk.position for chunk in step.batch.chunks} == before
    assert all(list(chunk.tokens) == [LETTER] and chunk.sample for chunk in step.batch.chunks)
    assert list(step.sequences) == bench.scheduler.running


ROUNDS = BatchPolicy(rounds_target=0.02)
"""Four rounds of the 0.005 s that steps take in these tests."""


def rounds(bench: Bench, steps: int) -> list[int]:
    """The rounds of the next steps, 0 for a chunk."""
    taken = [bench.step(seconds=0.005) for _ in range(steps)]
    return [0 if step.prefill else step.batch.rounds for step in taken]


def test_short_decode_steps_make_several_tokens_once_their_time_is_known() -> None:
    bench = Bench(one := seq(1), two := seq(2), policy=ROUNDS)
    assert rounds(bench, 5) == [0, 0, 1, 4, 4]
    assert one.output == two.output == [LETTER] * 10
    assert (one.computed, one.decode_steps, one.concurrency_sum) == (4 + 9, 9, 18)
    assert bench.step(seconds=0.03).batch.rounds == 4
    assert rounds(bench, 2) == [1, 4]
    # A step that was ended early tells as well as a whole one.
    step = bench.next()
    picked = dict.fromkeys((0, 1), LETTER)
    bench.scheduler.postprocess(step, StepResult(picked, 0.02, later=(picked,)))
    assert rounds(bench, 1) == [2]
    # By default, and where the clock cannot tell, it is one.
    assert rounds(Bench(seq()), 4) == [0, 1, 1, 1]
    bench = Bench(seq(), policy=ROUNDS)
    assert [bench.step(seconds=0.0).batch.rounds for _ in range(3)] == [1, 1, 1]
    assert BatchPolicy(rounds_target=0.02).rounds(1e-9) == 32
    assert BatchPolicy(rounds_target=0.02).rounds(0.008) == 2


def test_rounds_stop_where_an_answer_has_no_more_room() -> None:
    bench = Bench(seq(1, max_tokens=8), seq(2, max_tokens=20), policy=ROUNDS)
    # The first one ends with its eighth token.
    assert rounds(bench, 8) == [0, 0, 1, 4, 2, 4, 4, 4]
    assert bench.scheduler.idle


def test_nobody_waits_for_several_rounds() -> None:
    bench = Bench(seq(1), policy=ROUNDS)
    assert rounds(bench, 3) == [0, 1, 4]
    bench.scheduler.add(two := seq(2, prompt=8))
    # Two streams may take twice as long as the one that was timed.
    assert rounds(bench, 4) == [0, 2, 4, 4]
    bench.scheduler.pause(two)
    assert rounds(bench, 1) == [4]
    bench.scheduler.resume(two)
    assert rounds(bench, 2) == [2, 4]


def test_log_probabilities_come_with_every_token() -> None:
    bench = Bench(seq(1), policy=ROUNDS)
    wanted = Sequence(ticket=2, index=0, prompt=(1,), sampling=Sampling(logprobs=True))
    bench.scheduler.add(wanted)
    assert rounds(bench, 5) == [0, 0, 1, 1, 1]


def test_what_comes_after_the_end_of_an_answer_in_later_rounds_is_ignored() -> None:
    bench = Bench(one := seq(1, stop=(chr(LETTER) * 5,)), two := seq(2), three := seq(3), policy=ROUNDS)
    assert rounds(bench, 4) == [0, 0, 0, 1]
    step = bench.next()
    assert step.batch.rounds == 4
    picked = {0: LETTER, 1: LETTER, 2: LETTER}
    # The backend knows of end tokens; it cannot know of stop strings.
    later = ({0: LETTER, 1: END, 2: LETTER}, {0: LETTER, 2: LETTER}, {0: LETTER, 2: LETTER})
    outputs = bench.scheduler.postprocess(step, StepResult(picked, 0.02, later=later))
    assert [(output.sequence, output.tokens, output.finish_reason) for output in outputs] == [
        (one, 3, "stop"),
        (two, 2, "eos"),
        (three, 4, None),
    ]
    assert [len(sequence.output) for sequence in (one, two, three)] == [5, 3, 6]
    assert outputs[1].text == chr(LETTER)
    assert outputs[2].text == chr(LETTER) * 4
    # Four rounds, of 3, 3, 2 and 2 sequences.
    assert (three.decode_steps, three.concurrency_sum) == (5, 13)


def test_only_the_last_chunk_of_a_prompt_samples() -> None:
    bench = Bench(seq(prompt=40), policy=BatchPolicy(chunk_max=16))
    chunks = [bench.step().batch.chunks[0] for _ in range(3)]
    assert [(chunk.position, len(chunk.tokens), chunk.sample) for chunk in chunks] == [
        (0, 16, False),
        (16, 16, False),
        (32, 8, True),
    ]
    assert [token for chunk in chunks for token in chunk.tokens] == list(range(1, 41))


def test_a_prompt_whose_beginning_is_in_cells_already_goes_on_from_there() -> None:
    bench = Bench(sequence := seq(prompt=10, restorable=6))
    chunk = bench.step().batch.chunks[0]
    assert (chunk.position, list(chunk.tokens), chunk.sample) == (6, [7, 8, 9, 10], True)
    assert bench.step().batch.chunks[0].position == 10
    assert (sequence.computed, sequence.cached, sequence.restored) == (11, 6, 6)


def test_a_beginning_that_could_not_be_loaded_is_computed() -> None:
    bench = Bench(sequence := seq(prompt=10, restorable=6))
    opening = bench.scheduler.assign()
    assert opening is not None
    assert (opening.sequence, opening.load, sequence.computed) == (sequence, True, 6)
    bench.scheduler.missed(sequence)
    chunk = bench.step().batch.chunks[0]
    assert (chunk.position, len(chunk.tokens)) == (0, 10)
    assert (sequence.cached, sequence.restored) == (0, 0)


def test_what_a_step_decodes_after_the_end_of_an_answer_is_in_cells_too() -> None:
    policy = BatchPolicy(rounds_target=1.0, rounds_max=4)
    bench = Bench(sequence := seq(prompt=3, stop=("ab",)), policy=policy)
    bench.step(ord("x"))
    bench.step(ord("y"), seconds=0.1)
    step = bench.next()
    assert step.batch.rounds == 4
    rounds = [{0: ord(letter)} for letter in "abcd"]
    (output,) = bench.scheduler.postprocess(step, StepResult(rounds[0], 0.4, later=tuple(rounds[1:])))
    assert (output.finish_reason, output.tokens, bytes(sequence.output)) == ("stop", 2, b"xyab")
    assert sequence.held == (1, 2, 3, *b"xyabc")
    assert sequence.whole


@pytest.mark.parametrize("how", ["fail", "interrupted"])
def test_a_step_that_was_not_finished_leaves_its_sequences_broken(how: str) -> None:
    bench = Bench(one := seq(1), two := seq(2))
    bench.step()
    getattr(bench.scheduler, how)(bench.next())
    assert (one.whole, two.whole) == (True, False)


def test_concurrency_is_counted_over_decode_steps() -> None:
    bench = Bench(one := seq(1, max_tokens=5), two := seq(2, max_tokens=3))
    while not bench.scheduler.idle:
        bench.step()
    # P1 D(1) P2 D(1,2) D(1,2) D(1)
    assert (one.decode_steps, one.concurrency_sum) == (4, 6)
    assert (two.decode_steps, two.concurrency_sum) == (2, 4)


def test_nothing_to_do_is_no_step() -> None:
    bench = Bench()
    assert bench.scheduler.idle
    assert bench.scheduler.schedule() is None


# Pausing


def test_S2_a_paused_sequence_holds_its_slot_and_decodes_no_more() -> None:
    bench = Bench(one := seq(1), two := seq(2))
    bench.prefill_all()
    bench.scheduler.pause(one)
    assert bench.step().sequences == (two,)
    assert one.slot == 0
    bench.scheduler.resume(one)
    assert bench.step().sequences == (one, two)


def test_S2_a_sequence_paused_during_a_step_still_takes_that_steps_token() -> None:
    bench = Bench(one := seq(1))
    bench.prefill_all()
    step = bench.next()
    bench.scheduler.pause(one)
    bench.finish(step)
    assert len(one.output) == 2
    assert bench.scheduler.schedule() is None
    assert not bench.scheduler.idle
    bench.scheduler.resume(one)
    assert bench.next().batch.chunks[0].position == len(one.prompt) + 1


def test_S2_a_prompt_of_a_paused_sequence_is_taken_in_and_gives_its_first_token() -> None:
    bench = Bench(one := seq(1))
    bench.scheduler.pause(one)
    assert bench.step().prefill
    assert one.output == [LETTER]
    assert bench.scheduler.schedule() is None


def test_S2_a_paused_sequence_can_be_removed() -> None:
    bench = Bench(one := seq(1))
    bench.step()
    bench.scheduler.pause(one)
    bench.remove(one)
    assert bench.scheduler.idle


# Ends


def test_an_end_token_ends_the_answer_and_is_no_part_of_it() -> None:
    bench = Bench(sequence := seq())
    bench.step()
    step = bench.next()
    (output,) = bench.finish(step, END, logprobs={0: TokenLogprob(END, -0.5)})
    assert (output.finish_reason, output.text, output.logprob, output.slot_to_drop) == ("eos", "", None, 0)
    assert output.tokens == 1
    assert sequence.output == [LETTER]
    assert sequence.finish_reason == "eos"
    assert sequence.state is SequenceState.FINISHED
    assert bench.scheduler.idle


def test_an_answer_may_be_empty() -> None:
    bench = Bench(sequence := seq())
    (output,) = bench.finish(bench.next(), END)
    assert (output.finish_reason, sequence.output) == ("eos", [])
    assert bench.scheduler.idle


@pytest.mark.parametrize("wanted", [1, 2, 7])
def test_max_tokens_are_given_and_no_more(wanted: int) -> None:
    bench = Bench(sequence := seq(max_tokens=wanted))
    while not bench.scheduler.idle:
        bench.step()
    assert sequence.output == [LETTER] * wanted
    assert sequence.finish_reason == "length"
    assert sequence.decode_steps == wanted - 1


@pytest.mark.parametrize("max_tokens", [None, 4, 5])
@pytest.mark.parametrize("prompt", [6, 8, 9])
def test_A10_window_prompt_and_answer_together_never_exceed_it(prompt: int, max_tokens: int | None) -> None:
    bench = Bench(sequence := seq(prompt=prompt, max_tokens=max_tokens), window=10)
    cells = 0
    while not bench.scheduler.idle:
        (chunk,) = bench.step().batch.chunks
        cells = chunk.position + len(chunk.tokens)
    assert len(sequence.prompt) + len(sequence.output) == 10
    assert sequence.finish_reason == "length"
    assert cells == 9  # the last token needs none


def test_a_stop_string_ends_the_answer_and_is_not_emitted() -> None:
    bench = Bench(sequence := seq(stop=("bc",)))
    outputs = [bench.finish(bench.next(), ord(letter))[0] for letter in "abc"]
    assert [output.text for output in outputs] == ["a", "", ""]
    assert (sequence.finish_reason, outputs[-1].slot_to_drop) == ("stop", 0)
    assert sequence.output == [ord(letter) for letter in "abc"]
    assert bench.scheduler.idle


@pytest.mark.parametrize(("last", "reason"), [(END, "eos"), (ord("b"), "length")])
def test_S1_text_held_back_is_flushed_with_the_last_token(last: int, reason: str) -> None:
    bench = Bench(seq(stop=("abc",), max_tokens=2))
    (held,) = bench.finish(bench.next(), ord("a"))
    (output,) = bench.finish(bench.next(), last)
    assert held.text == ""
    assert (output.text, output.finish_reason) == ("a" if last == END else "ab", reason)


def test_S1_a_dangling_half_is_replaced_with_the_last_token() -> None:
    bench = Bench(seq(max_tokens=2))
    bench.finish(bench.next(), 0xE2)
    (output,) = bench.finish(bench.next(), 0x82)
    assert (output.text, output.finish_reason) == ("�", "length")


def test_a_stop_string_counts_before_the_length() -> None:
    bench = Bench(seq(stop=("b",), max_tokens=2))
    bench.step()
    (output,) = bench.finish(bench.next(), ord("b"))
    assert (output.text, output.finish_reason) == ("", "stop")


def test_a_stop_string_that_the_end_completes_counts_before_the_end_token() -> None:
    bench = Bench(seq(stop=("�",)))
    bench.finish(bench.next(), 0xE2)
    (output,) = bench.finish(bench.next(), END)
    assert (output.text, output.finish_reason) == ("", "stop")


def test_log_probabilities_come_with_their_token() -> None:
    bench = Bench(seq(1), seq(2))
    bench.prefill_all()
    entry = TokenLogprob(LETTER, -1.0)
    one, two = bench.finish(bench.next(), logprobs={1: entry})
    assert (one.logprob, two.logprob) == (None, entry)


def test_the_first_token_has_its_log_probability_too() -> None:
    bench = Bench(seq())
    entry = TokenLogprob(LETTER, -1.0)
    (output,) = bench.finish(bench.next(), logprobs={0: entry})
    assert output.logprob == entry


# Chunk sizes


class Machine:
    """Chunks take ``overhead + per_token * n`` seconds, ``per_position`` more a token for each token before them."""

    def __init__(self, overhead: float, per_token: float, per_position: float = 0.0) -> None:
        self.overhead, self.per_token, self.per_position = overhead, per_token, per_position

    def seconds(self, step: Step) -> float:
        (chunk,) = step.batch.chunks
        n = len(chunk.tokens)
        return self.overhead + n * (self.per_token + self.per_position * chunk.position)


def chunks(bench: Bench, machine: Machine, count: int) -> list[tuple[int, float]]:
    """Tokens and seconds of the next chunks, decode steps between them left out."""
    out: list[tuple[int, float]] = []
    while len(out) < count:
        step = bench.next()
        seconds = machine.seconds(step) if step.prefill else 0.01
        bench.finish(step, seconds=seconds)
        if step.prefill:
            out.append((len(step.batch.chunks[0].tokens), seconds))
    return out


def streaming(*prompts: Sequence, policy: BatchPolicy | None = None) -> Bench:
    """A bench where one sequence decodes and nothing was learnt of chunks (its own took no time)."""
    bench = Bench(seq(0), window=100_000, policy=policy)
    bench.step(seconds=0.0)
    for prompt in prompts:
        bench.scheduler.add(prompt)
    return bench


def test_C9_the_first_chunk_is_a_probe_and_the_next_fills_the_target() -> None:
    machine = Machine(0.0, 0.001)
    assert [n for n, _ in chunks(streaming(seq(prompt=4000)), machine, 3)] == [32, 96, 96]


def test_C9_with_nobody_decoding_chunks_may_take_longer() -> None:
    bench = Bench(seq(prompt=4000), window=100_000)
    assert [n for n, _ in chunks(bench, Machine(0.0, 0.001), 2)] == [32, 384]


@given(overhead=st.floats(0.0, 0.08), per_token=st.floats(1e-5, 0.005), quantum=st.sampled_from([1, 4, 16]))
def test_C9_chunks_grow_to_the_target_and_never_beyond(overhead: float, per_token: float, quantum: int) -> None:
    policy = BatchPolicy(chunk_quantum=quantum, chunk_min=16, chunk_probe=16)
    assume(overhead + 16 * per_token < policy.chunk_target)
    taken = chunks(streaming(seq(prompt=90_000), policy=policy), Machine(overhead, per_token), 60)
    sizes = [n for n, _ in taken]
    assert sizes == sorted(sizes)
    most = policy.chunk_target * (1 + policy.chunk_overrun)
    assert max(seconds for _, seconds in taken) <= most * 1.000001
    # At the end one quantum more would have been too much, by the last chunk's own speed.
    n, seconds = taken[-1]
    assert n == policy.chunk_max or (n + quantum) * seconds / n > policy.chunk_target * 0.999999


def test_C9_a_short_prompt_does_not_spoil_the_next_one() -> None:
    machine = Machine(0.02, 0.0005)
    bench = streaming(first := seq(1, prompt=1000))
    while first.state is not SequenceState.DECODING:
        chunks(bench, machine, 1)
    bench.remove(first)
    bench.scheduler.add(short := seq(2, prompt=4))
    assert chunks(bench, machine, 1) == [(4, 0.022)]
    bench.remove(short)
    bench.scheduler.add(seq(3, prompt=4000))
    ((size, seconds),) = chunks(bench, machine, 1)
    assert size >= 128
    assert seconds <= 0.1


@pytest.mark.parametrize(("rest", "sizes"), [(160, [160]), (208, [208]), (209, [160, 49])])
def test_C9_a_short_rest_of_a_prompt_is_taken_along(rest: int, sizes: list[int]) -> None:
    # 160 tokens fill the target, and 208 exceed it as far as they may.
    machine = Machine(0.0, 0.1 / 160)
    bench = streaming(seq(1, prompt=32 + rest))
    assert [n for n, _ in chunks(bench, machine, 1 + len(sizes))] == [32, *sizes]
    assert kinds(bench, 2) == "DD"


def test_C9_a_machine_that_becomes_slower_is_noticed_by_short_prompts_too() -> None:
    bench = streaming(seq(1, prompt=1000))
    chunks(bench, Machine(0.0, 0.0002), 3)
    slow = Machine(0.0, 0.004)
    for ticket in range(2, 5):
        bench.scheduler.add(seq(ticket, prompt=100, max_tokens=1))  # one token each, so that the last one gets a slot
    taken = chunks(bench, slow, 6)
    assert taken[0][0] == 100  # all that was known was the old speed
    assert all(n <= 32 for n, _ in taken[1:])


def test_C9_a_long_prompt_goes_by_its_own_last_chunk_not_by_a_new_ones() -> None:
    # At position 4000 a token costs thrice what it costs at the beginning.
    machine = Machine(0.0, 0.0005, per_position=0.00000025)
    bench = streaming(old := seq(1, prompt=6000))
    while old.computed < 4000:
        chunks(bench, machine, 1)
    bench.scheduler.add(seq(2, prompt=6000))
    taken = chunks(bench, machine, 12)
    assert max(seconds for _, seconds in taken) < 0.135
    assert min(n for n, _ in taken[2::2]) > 1.5 * max(n for n, _ in taken[1::2])


def test_C9_a_fast_chunk_of_one_prompt_lets_the_next_one_begin_with_more() -> None:
    bench = streaming(*[seq(ticket, prompt=100) for ticket in (1, 2)], seq(3, prompt=4000))
    taken = chunks(bench, Machine(0.01, 0.00001), 4)  # far below the target, each of them
    assert [n for n, _ in taken] == [32, 100, 512, 68]


def test_C9_steps_without_a_time_teach_nothing() -> None:
    bench = streaming(seq(prompt=4000))
    assert [n for n, _ in chunks(bench, Machine(0.0, 0.0), 3)] == [32, 32, 32]


def test_C9_a_prompt_that_is_cancelled_leaves_at_the_next_chunk() -> None:
    bench = Bench(one := seq(1, prompt=64), two := seq(2, prompt=64), policy=BatchPolicy(chunk_max=16), slots=2)
    bench.step()
    bench.step()
    assert (one.computed, two.computed) == (16, 16)
    bench.remove(one)
    bench.scheduler.add(three := seq(3, prompt=16))
    assert [bench.step().sequences for _ in range(3)] == [(three,), (three,), (two,)]
    assert three.slot == 0


# Failures


def test_C11_a_failed_step_ends_its_own_sequences_only() -> None:
    bench = Bench(one := seq(1), two := seq(2), policy=BatchPolicy(chunk_max=16))
    bench.prefill_all()
    bench.scheduler.add(three := seq(3, prompt=64))
    assert kinds(bench, 2) == "DP"
    step = bench.next()
    assert step.sequences == (one, two)
    assert bench.scheduler.fail(step) == [one, two]
    assert (one.state, one.finish_reason, one.slot) == (SequenceState.FINISHED, None, 0)
    bench.release(one.slot)
    bench.release(two.slot)
    assert bench.scheduler.running == [three]
    assert bench.step().sequences == (three,)


def test_C11_a_failed_chunk_ends_its_prompt_only() -> None:
    bench = Bench(one := seq(1), policy=BatchPolicy(chunk_max=16))
    bench.step()
    bench.scheduler.add(two := seq(2, prompt=64))
    bench.step()
    step = bench.next()
    assert step.prefill
    assert bench.scheduler.fail(step) == [two]
    bench.release(two.slot)
    assert kinds(bench, 3) == "DDD"
    assert bench.scheduler.running == [one]


def test_C11_peers_that_a_failed_step_moved_go_on_at_their_new_slots() -> None:
    policy = BatchPolicy(contiguous=True)
    bench = Bench(*(sequences := [seq(1, index) for index in range(4)]), policy=policy)
    bench.prefill_all()
    bench.scheduler.pause(sequences[3])
    bench.remove(sequences[1])
    step = bench.next()
    assert step.batch.moves == ((3, 1),)
    for sequence in bench.scheduler.fail(step):
        bench.release(sequence.slot)
    bench.scheduler.resume(sequences[3])
    assert bench.slots() == {1: (1, 3)}
    assert bench.step().batch.chunks[0].slot == 1


# Moves


def fill(policy: BatchPolicy, count: int = 5) -> tuple[Bench, list[Sequence]]:
    sequences = [seq(1, index) for index in range(count)]
    bench = Bench(*sequences, slots=6, policy=policy)
    bench.prefill_all()
    bench.step()
    return bench, sequences


def test_holes_are_filled_before_the_next_decode_step() -> None:
    bench, sequences = fill(BatchPolicy(contiguous=True))
    bench.remove(sequences[1])
    bench.remove(sequences[2])
    step = bench.next()
    assert step.batch.moves == ((4, 1), (3, 2))
    assert [chunk.slot for chunk in step.batch.chunks] == [0, 1, 2]
    assert step.sequences == (sequences[0], sequences[4], sequences[3])
    assert [sequence.slot for sequence in step.sequences] == [0, 1, 2]
    bench.finish(step)
    assert bench.step().batch.moves == ()


def test_holes_cost_nothing_where_the_policy_says_so() -> None:
    bench, sequences = fill(BatchPolicy(contiguous=False))
    bench.remove(sequences[1])
    step = bench.next()
    assert step.batch.moves == ()
    assert [chunk.slot for chunk in step.batch.chunks] == [0, 2, 3, 4]


def test_a_waiting_sequence_takes_the_hole_and_nobody_moves() -> None:
    bench, sequences = fill(BatchPolicy(contiguous=True))
    bench.remove(sequences[1])
    bench.scheduler.add(late := seq(2))
    assert bench.step().prefill
    assert late.slot == 1
    assert bench.step().batch.moves == ()


def test_a_hole_at_the_end_or_the_beginning_moves_nobody() -> None:
    bench, sequences = fill(BatchPolicy(contiguous=True))
    bench.remove(sequences[0])
    bench.remove(sequences[4])
    step = bench.next()
    assert step.batch.moves == ()
    assert [chunk.slot for chunk in step.batch.chunks] == [1, 2, 3]


def test_a_prompt_under_way_between_streams_is_no_hole() -> None:
    bench, sequences = fill(BatchPolicy(contiguous=True, chunk_max=16))
    bench.remove(sequences[2])
    bench.scheduler.add(late := seq(2, prompt=64))
    steps = [bench.step() for _ in range(4)]
    assert late.slot == 2
    assert [step.prefill for step in steps] == [True, False, True, False]
    assert all(step.batch.moves == () for step in steps)
    assert [chunk.slot for chunk in steps[1].batch.chunks] == [0, 1, 3, 4]


def test_nobody_moves_while_a_slot_is_still_to_be_dropped() -> None:
    bench, sequences = fill(BatchPolicy(contiguous=True))
    slot = bench.scheduler.remove(sequences[2])
    step = bench.next()
    assert step.batch.moves == ()
    bench.finish(step)
    bench.release(slot)
    assert bench.next().batch.moves == ((4, 2),)


def test_the_policy_is_asked_about_a_gap_once() -> None:
    asked = []

    class Curious(BatchPolicy):
        def fill_holes(self, taken: Collection[int]) -> list[tuple[int, int]]:
            asked.append(sorted(taken))
            return []

    bench, sequences = fill(Curious())
    bench.remove(sequences[1])
    assert kinds(bench, 3) == "DDD"
    assert asked == [[0, 2, 3, 4]]


def test_a_paused_sequence_is_moved_like_any_other() -> None:
    bench, sequences = fill(BatchPolicy(contiguous=True))
    bench.scheduler.pause(sequences[4])
    bench.remove(sequences[1])
    step = bench.next()
    assert step.batch.moves == ((4, 1),)
    assert sequences[4].slot == 1
    assert sequences[4] not in step.sequences
