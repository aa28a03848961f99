"""What the next native call does, and what its result means: continuous batching over a fixed number of slots.

Rule 1: every change of a sequence's state, slot and position is made here.
Rule 2: nothing here does I/O, has a clock or imports Trio.  The decode loop makes ready the slots that
:meth:`Scheduler.assign` gives out, asks :meth:`Scheduler.schedule` for a step, runs it, hands the result to
:meth:`Scheduler.postprocess` and carries out what it is told; seconds come with results.

The policy:

- Decoding comes first.  A step is a token of every decoding sequence, or a chunk of prompts.  Between two decode
  steps lies one chunk; nor, while a prompt is pending, does more than one decode step lie between two chunks.
- But a burst of short prompts is taken in together: while many begin and few go on, prompts of one chunk follow each
  other for as long as an idle decoder may be busy with one.  A decode step that few sequences share is dear.
- Prompts take turns, a chunk each, in ``(ticket, index)`` order (rule A15).  Chunks are sized by time (rule C9).  Where
  the backend takes several prompts in one step, short ones share what time there is for one chunk: a pass over all
  weights costs the same for one of them.
- A free slot goes to the request that holds the fewest, then to the older one, inside it in input order (rule A15).
- Prompt and answer together never exceed the window (rule A10).  The last token of an answer needs no cell.
- Where steps are short a decode step makes several tokens of each stream, unless a prompt is pending.
- Gaps between decoding slots are closed by moves where the backend's policy asks for it, once nobody waits for a slot.
- What prompts have in common at their beginning is computed once, where the backend can share it.  A slot whose
  sequence has ended keeps its cells until somebody needs the slot, the longest unused one first; a prompt takes what it
  can from any slot, and waits for one that is just computing what it needs, too.  A slot with kept cells counts as
  free, and no slot ever holds more than its window, so nobody goes short (rule A10).
"""

from __future__ import annotations

import enum
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, final

import attrs

from laneway._text import TextAssembler
from laneway.decoder import Chunk, StepBatch

if TYPE_CHECKING:
    from laneway._events import StopReason, TokenLogprob
    from laneway.decoder import BatchPolicy, DecodeError, Sampling, StepResult

__all__ = ["Opening", "Output", "Scheduler", "SchedulerSnapshot", "Sequence", "SequenceState", "Step"]


class SequenceState(enum.Enum):
    """``WAITING`` for a slot, then ``PREFILL`` (prompt not yet all in cells), then ``DECODING``, then ``FINISHED``."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODING = "decoding"
    FINISHED = "finished"


@final
@attrs.define(eq=False, kw_only=True)
class Sequence:
    """One prompt and its answer so far.  The first group is the caller's, the rest is kept by the :class:`Scheduler`.

    ``(ticket, index)`` must be unique among live sequences.
    """

    ticket: int
    """The request's arrival number: fairness and order."""
    index: int
    """Input order inside the request."""
    prompt: tuple[int, ...] = attrs.field(repr=False)
    sampling: Sampling = attrs.field(repr=False)
    max_tokens: int | None = None
    """At least 1; None: until the window is full."""
    stop: tuple[str, ...] = attrs.field(default=(), repr=False)
    stop_tokens: frozenset[int] = attrs.field(default=frozenset(), repr=False)
    """Control tokens that the caller named as stop strings.  Nothing of them is in the text."""

    restorable: int = 0
    """How many of the prompt's first tokens, not all of them, a saved state could bring into its cells."""
    computed: int = attrs.field(default=0, init=False)
    """Tokens in cells: where the next chunk goes."""
    cached: int = attrs.field(default=0, init=False)
    """The first tokens of the prompt that were not computed for it."""
    restored: int = attrs.field(default=0, init=False)
    """Those of them that came from its saved state."""
    state: SequenceState = attrs.field(default=SequenceState.WAITING, init=False)
    slot: int | None = attrs.field(default=None, init=False)
    """Kept after the end until the slot has been released."""
    output: list[int] = attrs.field(factory=list, init=False, repr=False)
    """The answer's tokens.  An end token, or one of ``stop_tokens``, ends the answer and is no part of it."""
    finish_reason: StopReason | None = attrs.field(default=None, init=False)
    """``eos``, ``length`` or ``stop``; None while it runs, and after it was removed or failed, alone or in its step."""
    paused: bool = attrs.field(default=False, init=False)
    """Set through the scheduler: :meth:`Scheduler.pause` and :meth:`Scheduler.resume`."""
    text: TextAssembler = attrs.field(
        default=attrs.Factory(lambda self: TextAssembler(self.stop), takes_self=True), init=False, repr=False
    )
    beyond: tuple[int, ...] = attrs.field(default=(), init=False, repr=False)
    """What a step of several tokens has decoded after the end of the answer: it is in cells, too."""
    whole: bool = attrs.field(default=True, init=False)
    """Whether its cells are what they should be: not so after a step that failed or was interrupted."""
    decode_steps: int = attrs.field(default=0, init=False)
    """Decode steps that it took part in, counting each round of a step."""
    concurrency_sum: int = attrs.field(default=0, init=False)
    """Sum, over those, of the sequences in them."""
    room: int = attrs.field(default=0, init=False)
    """Tokens that the answer may have: the smaller of ``max_tokens`` and what the window leaves."""
    prefill_rate: float | None = attrs.field(default=None, init=False)
    """Tokens a second of its last chunk."""

    @property
    def key(self) -> tuple[int, int]:
        """Its place in the order of prompts."""
        return self.ticket, self.index

    @property
    def held(self) -> tuple[int, ...]:
        """The tokens in its cells, as long as it is whole."""
        return _answered(self) + self.beyond


@final
@attrs.frozen(kw_only=True)
class Opening:
    """What is to be done to a slot before the next step, in the order of the fields.

    If something of it fails, the slot is to be dropped and :meth:`Scheduler.missed` told; the rest is still done.
    """

    sequence: Sequence
    keep: int | None = None
    """The slot has cells of another sequence: cut it to so many, drop it for 0.  None: it is empty."""
    copy_from: int | None = None
    """Copy the first ``sequence.computed`` cells of this slot."""
    load: bool = False
    """Load the first ``sequence.computed`` cells of its saved state."""
    opens: bool = True
    """It has just been given its slot: call ``decoder.open(slot, sampling, prompt)``."""


@attrs.define(eq=False)
class _Prefix:
    """Cells that stay in the slot of a sequence that has ended."""

    tokens: tuple[int, ...]
    used: int  # when it was last of use, in assignments


@final
@attrs.frozen
class Step:
    """One native call and what it is about: ``sequences`` has the sequence of each chunk, in chunk order."""

    batch: StepBatch
    sequences: tuple[Sequence, ...]
    prefill: bool
    """True: a chunk of prompts.  False: one token of each of ``sequences``, or several in rounds."""


@final
@attrs.frozen
class Output:
    """What one step did for a sequence."""

    sequence: Sequence
    tokens: int
    """How many it made, a closing token included."""
    text: str
    """More text of the answer, safe to hand out; maybe none."""
    logprob: TokenLogprob | None
    """Of the one token, if asked for; None for a closing token."""
    finish_reason: StopReason | None = None
    closed: bool = False
    """Whether the last of the tokens is a closing one: it ended the answer and is no part of it."""
    error: DecodeError | None = None
    """Why the sequence was given no token more: it has ended, its peers have not."""
    held: str = ""
    """Text that was made and is held back: it may become a stop string.  Empty once the answer has ended."""
    slot_to_drop: int | None = None
    """Set with ``finish_reason`` or ``error``: drop it in the decoder, then :meth:`Scheduler.release` it."""

    @property
    def ended(self) -> bool:
        """Whether the sequence has ended, well or not."""
        return self.slot_to_drop is not None


@final
@attrs.frozen
class SchedulerSnapshot:
    """Who holds and who waits, at one moment."""

    slots: Mapping[int, tuple[int, int, SequenceState]]
    """Slot to the ticket, index and state of its sequence; ``FINISHED``: the slot is about to be dropped."""
    waiting: Mapping[int, int]
    """Ticket to the number of its sequences that wait for a slot."""


@final
class Scheduler:
    """Shares a decoder's slots and steps out among sequences.

    ``slots`` and ``window`` (tokens) are the decoder's; ``end_tokens`` end an answer; ``piece`` gives a token's bytes
    and is called for every token, so it should be quick.  ``share``: prefixes are kept and copied, which the decoder
    must be able to; it goes with slots in any order.

    :meth:`add`, :meth:`pause` and :meth:`resume` may come at any time, also while a step is under way; everything else
    comes between steps.  Nothing raises but for bugs.
    """

    def __init__(
        self,
        *,
        slots: int,
        window: int,
        policy: BatchPolicy,
        end_tokens: frozenset[int],
        piece: Callable[[int], bytes],
        share: bool = False,
    ) -> None:
        assert slots >= 1
        assert not (share and policy.contiguous)
        self._window = window
        self._policy = policy
        self._end_tokens = end_tokens
        self._piece = piece
        self._share = share
        self._free = set(range(slots))  # those with kept cells among them
        self._owners: list[Sequence | None] = [None] * slots  # slot -> who holds it, or held it and is to be dropped
        self._waiting: dict[int, list[Sequence]] = {}  # ticket -> its sequences without a slot, in input order
        self._holds: dict[int, int] = {}  # ticket -> slots of its live sequences
        self._prefilling: list[Sequence] = []  # as they were given their slots
        self._followers: dict[Sequence, tuple[Sequence, int]] = {}  # who waits for whose cells, and how many, as above
        self._kept: dict[int, _Prefix] = {}  # free slot -> its cells
        self._uses = 0  # of slots, to tell when a prefix was last used
        self._streams: list[tuple[int, Sequence]] = []  # (slot, decoding sequence), ascending; see _refresh
        self._stale = False  # whether _streams must be made anew
        self._gaps = False  # whether _streams has gaps that the policy was not asked about yet
        self._pace: tuple[float, int] | None = None  # seconds of a round of the last decode step, and its streams
        self._last_prompt = (-1, -1)  # key of the prompt that had the last chunk
        self._chunk_was_last = False
        self._intake = 0.0  # seconds of the chunks since the last decode step
        self._rate: float | None = None  # prefill tokens a second, see _learn

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {len(self.running)}/{len(self._owners)} slots in use, {self.waiting} waiting>"

    # What is asked of it

    @property
    def waiting(self) -> int:
        """How many sequences wait for a slot."""
        return sum(map(len, self._waiting.values()))

    @property
    def running(self) -> list[Sequence]:
        """The live sequences that hold slots, in slot order."""
        return [sequence for _, sequence in self._live()]

    @property
    def idle(self) -> bool:
        """Whether nobody waits and every slot is free, with kept cells or without."""
        return not self._waiting and len(self._free) == len(self._owners)

    @property
    def kept(self) -> dict[int, tuple[int, ...]]:
        """The tokens in free slots: prefixes that others may share."""
        return {slot: prefix.tokens for slot, prefix in self._kept.items()}

    def snapshot(self) -> SchedulerSnapshot:
        """Who holds which slot and how many wait for one."""
        return SchedulerSnapshot(
            slots={slot: (*held.key, held.state) for slot, held in enumerate(self._owners) if held is not None},
            waiting={ticket: len(line) for ticket, line in self._waiting.items()},
        )

    # What it is told

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for a slot.  Its prompt was found on arrival to leave room in the window (rule A10)."""
        assert sequence.state is SequenceState.WAITING
        assert 0 <= sequence.restorable < len(sequence.prompt) < self._window
        assert sequence.max_tokens is None or sequence.max_tokens >= 1
        room = self._window - len(sequence.prompt)
        sequence.room = room if sequence.max_tokens is None else min(room, sequence.max_tokens)
        insort(self._waiting.setdefault(sequence.ticket, []), sequence, key=_input_order)

    def remove(self, sequence: Sequence) -> int | None:
        """End a sequence that its owner no longer wants.  Returns the slot to drop, if it holds one.

        Comes between steps, but may also follow a step that was interrupted, in place of its ``postprocess``.
        Does nothing for one that has ended: its slot was named when it did.
        """
        if sequence.state is SequenceState.FINISHED:
            return None
        if sequence.state is SequenceState.WAITING:
            self._leave_line(sequence)
            sequence.state = SequenceState.FINISHED
            return None
        self._retire(sequence)
        return sequence.slot

    def release(self, slot: int) -> None:
        """The decoder has dropped the slot of an ended sequence: it is free."""
        owner = self._owners[slot]
        assert owner is not None
        assert owner.state is SequenceState.FINISHED
        owner.slot = None
        self._owners[slot] = None
        self._free.add(slot)
        self._stale = True

    def keepable(self, sequence: Sequence) -> int:
        """How many cells of an ended sequence are worth keeping, to be cut to and :meth:`keep`; 0: drop its slot.

        Nothing that another slot keeps, too.
        """
        if not self._share or not sequence.whole or sequence.computed < self._policy.chunk_min:
            return 0
        tokens = _answered(sequence)
        for prefix in self._kept.values():
            if len(prefix.tokens) >= len(tokens) and common_prefix(prefix.tokens, tokens) == len(tokens):
                self._touch(prefix)
                return 0
        return len(tokens)

    def keep(self, slot: int) -> None:
        """The slot of an ended sequence is free, and was cut to what was :meth:`keepable`."""
        owner = self._owners[slot]
        assert owner is not None
        tokens = _answered(owner)
        for prefix in self._kept.values():
            if common_prefix(prefix.tokens, tokens) == len(prefix.tokens):
                prefix.used = 0  # the new one is as good, so this one is the first to go
        self.release(slot)
        self._kept[slot] = _Prefix(tokens, used=0)
        self._touch(self._kept[slot])

    def _touch(self, prefix: _Prefix) -> None:
        self._uses += 1
        prefix.used = self._uses

    def pause(self, sequence: Sequence) -> None:
        """Keep a sequence out of decode steps (rule S2).  It keeps its slot; a prompt is still taken in."""
        sequence.paused = True
        self._stale = True

    def resume(self, sequence: Sequence) -> None:
        """Let a paused sequence decode again, from the next decode step on."""
        sequence.paused = False
        self._stale = True

    # A step

    def assign(self) -> Opening | None:
        """What is to be done to some slot before the next step; None if nothing more is.  Do it before asking again.

        A sequence that cannot be opened is removed; its slot is dropped and released as that of any other.
        """
        if self._followers:
            opening = self._end_following()
            if opening is not None:
                return opening
        if not self._free or not self._waiting:
            return None
        ticket = min(self._waiting, key=self._claim)
        sequence = self._waiting[ticket][0]
        self._leave_line(sequence)
        self._holds[ticket] = self._holds.get(ticket, 0) + 1
        return self._give_slot(sequence)

    def missed(self, sequence: Sequence) -> None:
        """What was to be in its cells before its first chunk is not there: the slot is empty, all is to be computed."""
        assert sequence.state is SequenceState.PREFILL
        assert sequence.computed == sequence.cached
        sequence.computed = sequence.cached = sequence.restored = 0

    def not_loaded(self, sequence: Sequence) -> Opening | None:
        """Its saved state did not load, and its slot is empty: look for a prefix in memory instead.

        Returns what to copy, if there is something now.  It may also wait for another's cells, see :meth:`follows`.
        """
        self.missed(sequence)
        sequence.restorable = 0
        return self._share_later(sequence, *self._find_prefix(sequence))

    def follows(self, sequence: Sequence) -> bool:
        """Whether a sequence waits for another's cells.  It may yet load its saved state, should they not come."""
        return sequence in self._followers

    def schedule(self) -> Step | None:
        """The next step; None if there is nothing to do until somebody is added or resumed.

        Comes right after :meth:`assign`.  A step must be run.  Sequences are where they will be after its moves, which
        a decoder makes first, so that even a step that fails leaves them there.
        """
        if self._stale:
            self._refresh()
        if self._prefilling:
            intake = self._next_intake()
            if not self._streams or not self._chunk_was_last or self._burst_goes_on(intake):
                return self._prefill_step(intake)
        if self._streams:
            return self._decode_step()
        return None

    def postprocess(self, step: Step, result: StepResult) -> list[Output]:
        """Take in what a step gave: its tokens, in chunk order, with their text and who has ended."""
        if step.prefill:
            return self._take_chunks(step, result)
        rounds = (result.tokens, *result.later)
        outputs = []
        for chunk, sequence in zip(step.batch.chunks, step.sequences, strict=True):
            output = self._take_tokens(sequence, chunk.slot, rounds, result)
            # A round that gave no token has decoded the one before it all the same.
            decoded = output.tokens + (output.error is not None)
            sequence.computed += decoded
            sequence.decode_steps += decoded
            sequence.concurrency_sum += sum(map(len, rounds[:decoded]))
            outputs.append(output)
        self._pace = result.seconds / len(rounds), len(step.sequences)
        return outputs

    def fail(self, step: Step) -> list[Sequence]:
        """A step has failed: end its sequences (rule C11) and return them; their slots are to be dropped.

        Peers that the step only moved live on, at their new slots.  If a backend's move could fail half way, dropping
        the moves' sources as well leaves nothing behind; a peer whose cells were lost fails alone at its next step.
        """
        self.interrupted(step)
        for sequence in step.sequences:
            self._retire(sequence)
        return list(step.sequences)

    def interrupted(self, step: Step) -> None:
        """A step was cut short: what is in the cells of its sequences, nobody knows.  They are to be removed."""
        for sequence in step.sequences:
            sequence.whole = False

    # Slots

    def _give_slot(self, sequence: Sequence) -> Opening:
        source, length, leader = self._find_prefix(sequence)
        load = sequence.restorable > (length if leader is None else leader[1])
        if load:
            source, length, leader = None, sequence.restorable, None
        slot = self._choose_slot(source, length)
        keep = None
        if slot in self._kept:
            del self._kept[slot]
            keep = length if slot == source else 0
        self._free.remove(slot)
        self._owners[slot] = sequence
        sequence.slot = slot
        sequence.state = SequenceState.PREFILL
        self._prefilling.append(sequence)
        if leader is not None:
            self._followers[sequence] = leader
            return Opening(sequence=sequence, keep=keep)
        sequence.computed = sequence.cached = length
        sequence.restored = length if load else 0
        return Opening(sequence=sequence, keep=keep, copy_from=None if slot == source else source, load=load)

    def _choose_slot(self, source: int | None, length: int) -> int:
        """The slot for a sequence that will share ``length`` tokens of what ``source`` holds."""
        if source in self._kept and len(self._kept[source].tokens) == length:
            return source  # nothing of it is lost
        empty = self._free.difference(self._kept)
        if empty:
            return self._policy.choose_slot(empty)
        return min(self._kept, key=lambda slot: (slot == source, self._kept[slot].used))

    def _claim(self, ticket: int) -> tuple[int, int]:
        return self._holds.get(ticket, 0), ticket

    def _leave_line(self, sequence: Sequence) -> None:
        line = self._waiting[sequence.ticket]
        place = bisect_left(line, sequence.index, key=_input_order)
        while line[place] is not sequence:
            place += 1
        del line[place]
        if not line:
            del self._waiting[sequence.ticket]

    def _retire(self, sequence: Sequence) -> None:
        """End a sequence that holds a slot.  The slot is neither held nor free until it is released."""
        if sequence.state is SequenceState.PREFILL:
            self._prefilling.remove(sequence)
            self._followers.pop(sequence, None)
        sequence.state = SequenceState.FINISHED
        self._holds[sequence.ticket] -= 1
        if not self._holds[sequence.ticket]:
            del self._holds[sequence.ticket]
        self._stale = True

    def _live(self) -> Iterator[tuple[int, Sequence]]:
        for slot, held in enumerate(self._owners):
            if held is not None and held.state is not SequenceState.FINISHED:
                yield slot, held

    # Prefixes

    def _find_prefix(self, sequence: Sequence) -> tuple[int | None, int, tuple[Sequence, int] | None]:
        """The slot that holds most of its first tokens, and how many: ``(slot, length, None)``.

        If somebody is going to have more of them, whom to wait for, and how long: ``(None, 0, (leader, length))``.
        A sequence waits only for one that was given its slot before, or that waits for nobody: so one of them goes on.
        """
        source: int | None = None
        length = 0
        leader = None
        if not self._share:
            return source, length, leader
        prompt = sequence.prompt[:-1]  # the last token is always computed: it brings the first of the answer
        most = self._policy.chunk_min - 1  # so few are not worth it: no chunk is smaller
        for slot, held in self._live():
            if held.state is SequenceState.DECODING and (found := _longer_prefix(prompt, held.prompt, most)):
                source, length, most = slot, found, found
        for slot, prefix in sorted(self._kept.items(), key=lambda item: item[1].used, reverse=True):
            if found := _longer_prefix(prompt, prefix.tokens, most):
                source, length, most = slot, found, found
        before = True
        for held in self._prefilling:
            if held is sequence:
                before = False
            elif before or held not in self._followers:
                # Of two that are as good, one that has it already is better than one that will.
                found = _longer_prefix(prompt, held.prompt, most if leader is None else most - 1)
                if found and found <= held.computed:
                    source, length, leader, most = held.slot, found, None, found
                elif found > most:
                    source, length, leader, most = None, 0, (held, found), found
        if source is not None and source in self._kept:
            self._touch(self._kept[source])
        return source, length, leader

    def _end_following(self) -> Opening | None:
        """A copy for one whose leader has got as far as it needs, or has ended before."""
        while (sequence := self._done_following()) is not None:
            del self._followers[sequence]
            source, length, again = self._find_prefix(sequence)
            if sequence.restorable > (length if again is None else again[1]):
                # Whom it waited for has ended before its time.
                sequence.computed = sequence.cached = sequence.restored = sequence.restorable
                return Opening(sequence=sequence, load=True, opens=False)
            opening = self._share_later(sequence, source, length, again)
            if opening is not None:
                return opening
        return None

    def _share_later(
        self, sequence: Sequence, source: int | None, length: int, leader: tuple[Sequence, int] | None
    ) -> Opening | None:
        """What :meth:`_find_prefix` found, for a sequence that has its slot already: wait for a leader, or copy."""
        if leader is not None:
            self._followers[sequence] = leader
        elif source is not None:
            sequence.computed = sequence.cached = length
            return Opening(sequence=sequence, copy_from=source, opens=False)
        return None

    def _done_following(self) -> Sequence | None:
        for sequence, (leader, length) in self._followers.items():
            if leader.state is not SequenceState.PREFILL or leader.computed >= length:
                return sequence
        return None

    # The two kinds of steps

    def _decode_step(self) -> Step:
        self._chunk_was_last = False
        self._intake = 0.0
        moves = self._close_gaps() if self._gaps else ()
        streams = self._streams
        chunks = tuple([Chunk(slot, sequence.computed, (sequence.output[-1],), True) for slot, sequence in streams])
        batch = StepBatch(chunks, moves, self._rounds())
        return Step(batch, tuple([sequence for _, sequence in streams]), prefill=False)

    def _rounds(self) -> int:
        """Tokens that the next decode step makes of each stream: no more than any of them has room for."""
        if self._pace is None or self._prefilling:
            return 1
        seconds, streams = self._pace
        # More streams than those whose pace is known take longer, but never more than in proportion.
        rounds = self._policy.rounds(seconds * max(1.0, len(self._streams) / streams))
        if rounds == 1 or any(sequence.sampling.logprobs for _, sequence in self._streams):
            return 1
        return min(rounds, min(sequence.room - len(sequence.output) for _, sequence in self._streams))

    def _prefill_step(self, intake: list[tuple[Sequence, int]]) -> Step:
        self._chunk_was_last = True
        self._last_prompt = intake[-1][0].key
        intake.sort(key=lambda part: _slot_of(part[0]))
        chunks = []
        for sequence, size in intake:
            start, end = sequence.computed, sequence.computed + size
            chunks.append(Chunk(_slot_of(sequence), start, sequence.prompt[start:end], end == len(sequence.prompt)))
        return Step(StepBatch(tuple(chunks)), tuple([sequence for sequence, _ in intake]), prefill=True)

    def _next_intake(self) -> list[tuple[Sequence, int]]:
        """The prompt whose turn it is, and how many of its tokens the next step would take in; then those beside it."""
        first, *others = sorted([each for each in self._prefilling if each not in self._followers], key=self._turn)
        rate = first.prefill_rate or self._rate
        size = self._policy.chunk_size(_missing(first), rate, len(self._streams))
        intake = [(first, size)]
        if self._policy.joint_prompts and rate is not None and size == _missing(first):
            together = size + sum(map(_missing, others))
            room = self._policy.chunk_size(together, rate, len(self._streams)) - size
            for other in others:
                room -= _missing(other)
                if room < 0:
                    break  # whole or not at all: a prompt that was begun is no part of a burst
                intake.append((other, _missing(other)))
        return intake

    def _burst_goes_on(self, intake: list[tuple[Sequence, int]]) -> bool:
        if self._rate is None:
            return False
        if any(each.computed > each.cached or size < _missing(each) for each, size in intake):
            return False  # it has several chunks, begun or to be begun
        seconds = self._intake + sum([size for _, size in intake]) / self._rate
        return self._policy.takes_in_burst(len(self._prefilling), len(self._streams), seconds)

    def _turn(self, sequence: Sequence) -> tuple[bool, tuple[int, int]]:
        # Round robin: those after the one that had the last chunk, then from the beginning again.
        return sequence.key <= self._last_prompt, sequence.key

    def _refresh(self) -> None:
        """Bring the list of streams up to date, after a change.  Most steps find it so."""
        self._stale = False
        self._streams = [
            (slot, sequence)
            for slot, sequence in self._live()
            if sequence.state is SequenceState.DECODING and not sequence.paused
        ]
        self._gaps = bool(self._streams) and self._streams[-1][0] - self._streams[0][0] >= len(self._streams)

    def _close_gaps(self) -> tuple[tuple[int, int], ...]:
        """The moves of this decode step.

        Only decode steps move: a chunk does not care where its peers are, and a newcomer may fill a hole for nothing
        meanwhile.  Slots have just been given out, so a slot that is free now is one that nobody waits for.
        """
        self._gaps = False  # asked once; any change of the streams asks anew
        taken = [slot for slot, _ in self._live()]
        if len(taken) + len(self._free) < len(self._owners):
            return ()  # some slot is still to be dropped: no hole yet, and nothing to move
        moves = tuple(self._policy.fill_holes(taken))
        for source, target in moves:
            self._move(source, target)
        if moves:
            self._refresh()
        return moves

    def _move(self, source: int, target: int) -> None:
        sequence = self._owners[source]
        assert sequence is not None
        self._free.remove(target)
        self._free.add(source)
        self._owners[source], self._owners[target] = None, sequence
        sequence.slot = target
        self._stale = True

    # What their results mean

    def _take_chunks(self, step: Step, result: StepResult) -> list[Output]:
        self._intake += result.seconds
        self._learn(step, result.seconds)
        outputs = []
        for chunk, sequence in zip(step.batch.chunks, step.sequences, strict=True):
            sequence.computed += len(chunk.tokens)
            if chunk.sample:
                self._prefilling.remove(sequence)
                sequence.state = SequenceState.DECODING
                self._stale = True
                outputs.append(self._take_tokens(sequence, chunk.slot, (result.tokens,), result))
        return outputs

    def _take_tokens(
        self, sequence: Sequence, slot: int, rounds: tuple[Mapping[int, int], ...], result: StepResult
    ) -> Output:
        """Append its token of each round to its answer, up to the one that ends it.

        If a token does several things at once, a stop string counts before an end token, that before the length.
        """
        logprob = result.logprobs.get(slot)
        failure = result.failures.get(slot)
        text, taken = "", 0
        reason: StopReason | None = None
        closed = False
        assembler = sequence.text
        for tokens in rounds:
            token = tokens.get(slot)
            if token is None:
                assert failure is not None
                text += assembler.finish()
                self._retire(sequence)
                return Output(sequence, taken, text, None, error=failure, slot_to_drop=slot)
            taken += 1
            if token in sequence.stop_tokens or token in self._end_tokens:
                reason = "stop" if token in sequence.stop_tokens else "eos"
                closed, logprob = True, None
                break
            sequence.output.append(token)
            text += assembler.push(self._piece(token))
            if len(sequence.output) >= sequence.room:
                reason = "length"
            if reason is not None or assembler.stopped is not None:
                break
        else:
            return Output(sequence, taken, text, logprob, held=assembler.held)
        # All picked tokens but the last are in cells.  The last one is too if a later round failed to pick a token.
        picked = [tokens[slot] for tokens in rounds if slot in tokens]
        sequence.beyond = tuple(picked[taken - 1 : None if failure is not None else -1])
        text += assembler.finish()  # which may complete a stop string, too
        sequence.finish_reason = reason if assembler.stopped is None else "stop"
        self._retire(sequence)
        return Output(sequence, taken, text, logprob, sequence.finish_reason, closed, slot_to_drop=slot)

    def _learn(self, step: Step, seconds: float) -> None:
        """Remember how fast a chunk was, for the size of the next one.

        A chunk of n tokens takes about a + b * n seconds, so n / seconds is too low a rate for longer chunks.  That is
        safe, and mends itself: the sizes n, target * n / (a + b * n), ... rise to the one that takes just the target.
        But the short tail of a prompt is nearly all a, and the next prompt would have to begin down there.  So a chunk
        that took less than half the target, and thus harmed nobody, may only raise the rate; a longer one counts as it
        is, however few its tokens, or a machine that has become slower would go unnoticed.  Chunks also get slower with
        their position: a prompt goes by its own last chunk, and only its first one by what is known of others.
        """
        if seconds <= 0.0:
            return  # too short for the clock: tells nothing
        rate = sum([len(chunk.tokens) for chunk in step.batch.chunks]) / seconds
        for sequence in step.sequences:
            sequence.prefill_rate = rate
        if self._rate is None or rate > self._rate or seconds > self._policy.chunk_target / 2:
            self._rate = rate


_input_order = attrgetter("index")


def _missing(sequence: Sequence) -> int:
    """Tokens of its prompt that are not in cells yet."""
    return len(sequence.prompt) - sequence.computed


def _slot_of(sequence: Sequence) -> int:
    assert sequence.slot is not None
    return sequence.slot


def _answered(sequence: Sequence) -> tuple[int, ...]:
    """The tokens in its cells up to the end of its answer."""
    return (*sequence.prompt, *sequence.output)[: sequence.computed]


def _longer_prefix(prompt: tuple[int, ...], tokens: tuple[int, ...], than: int) -> int:
    """How many tokens they have in common, if that is more than ``than``; else 0."""
    if len(tokens) <= than or len(prompt) <= than or prompt[than] != tokens[than] or prompt[:than] != tokens[:than]:
        return 0
    return common_prefix(prompt, tokens, than + 1)


def common_prefix(left: tuple[int, ...], right: tuple[int, ...], known: int = 0) -> int:
    """How many tokens two sequences have in common at their beginning; ``known``: so many are known to be."""
    low, high = known, min(len(left), len(right))
    size = 16
    # Compared in growing pieces, then halved: slices are compared in C, and most differ early or not at all.
    while low < high:
        end = min(low + size, high)
        if left[low:end] == right[low:end]:
            low, size = end, size * 4
        elif end - low == 1:
            break
        else:
            high, size = end, max(1, (end - low) // 2)
    return low
