"""LlamaDecoder on a tiny F32 model: the protocol, exactness, interrupts, and that nothing is left behind."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from laneway.decoder import (
    Chunk,
    DecodeError,
    Decoder,
    InvalidRequestError,
    ModelLoadError,
    Sampling,
    StepBatch,
    StepInterrupted,
)
from laneway_native import LlamaDecoder, Model
from tests.native.driving import GREEDY, Driver, answer, decoder_of, prompts, saved
from tests.tiny_model import write_tiny_model

MODES: list[dict[str, Any]] = [
    {"kv_mode": "split", "flash_attention": False},
    {"kv_mode": "split", "flash_attention": True},
    {"kv_mode": "unified", "flash_attention": False},
    {"kv_mode": "unified", "flash_attention": True},
]
in_every_mode = pytest.mark.parametrize("mode", MODES, ids=lambda mode: f"{mode['kv_mode']}-{mode['flash_attention']}")


async def test_implements_the_protocol(tiny: Model) -> None:
    async with decoder_of(tiny) as decoder:
        assert isinstance(decoder, Decoder)
        assert (decoder.slots, decoder.window) == (4, 256)


@in_every_mode
@pytest.mark.parametrize(("context_size", "parallel"), [(1000, 3), (256, 4), (7, 7), (515, 2), (300, 1)])
async def test_A10_every_slot_holds_its_window(
    tiny: Model, mode: dict[str, Any], context_size: int, parallel: int
) -> None:
    async with decoder_of(tiny, context_size=context_size, parallel=parallel, **mode) as decoder:
        assert decoder.window == context_size // parallel
        filling = [5 + i % 90 for i in range(decoder.window)]
        for slot in range(parallel):
            decoder.open(slot, GREEDY, filling)
            for position in range(0, decoder.window, 256):
                part = filling[position : position + 256]
                await decoder.step(StepBatch((Chunk(slot, position, part, False),)))
        assert [decoder.length(slot) for slot in range(parallel)] == [decoder.window] * parallel


@in_every_mode
@pytest.mark.parametrize("chunk", [1, 3, 16])
async def test_chunks_of_a_prompt_equal_the_whole(tiny: Model, mode: dict[str, Any], chunk: int) -> None:
    prompt = tiny.tokenize("the quick brown fox jumps over the lazy dog and then some")
    async with decoder_of(tiny, **mode) as decoder:
        whole = await answer(decoder, prompt, 24)
        assert await answer(decoder, prompt, 24, chunk=chunk) == whole
        assert len(set(whole)) > 4  # it wanders, or equality would mean little


async def test_prompts_that_share_a_step_give_the_tokens_of_prompts_alone(tiny: Model) -> None:
    given_prompts = prompts(tiny, 4)
    assert len({len(prompt) for prompt in given_prompts}) > 1
    async with decoder_of(tiny, kv_mode="unified") as decoder:
        assert decoder.policy.joint_prompts
        alone = [await answer(decoder, prompt, 8) for prompt in given_prompts]
        driver = Driver(decoder)
        chunks = []
        for slot, prompt in enumerate(given_prompts):
            decoder.open(slot, GREEDY, prompt)
            chunks.append(Chunk(slot, 0, prompt, True))
        result = await decoder.step(StepBatch(tuple(chunks)))
        driver.tokens = {slot: [*prompt, result.tokens[slot]] for slot, prompt in enumerate(given_prompts)}
        for _ in range(7):
            await driver.decode()
        assert [driver.tokens[slot][len(prompt) :] for slot, prompt in enumerate(given_prompts)] == alone


@in_every_mode
async def test_several_rounds_of_a_step_give_the_tokens_of_as_many_steps(tiny: Model, mode: dict[str, Any]) -> None:
    samplings = [
        GREEDY,
        Sampling(temperature=0.0, grammar='root ::= "ab"'),  # ends before the others
        Sampling(temperature=1.2, seed=11, repeat_penalty=1.3),
        GREEDY,
    ]
    given_prompts = prompts(tiny, 4)
    async with decoder_of(tiny, **mode) as decoder:
        answers = []
        for prompt, sampling in zip(given_prompts, samplings, strict=True):
            answers.append(await answer(decoder, prompt, 10, sampling))
        ended = next(at for at, token in enumerate(answers[1]) if token in tiny.end_tokens)
        assert 1 <= ended < 5

        driver = Driver(decoder)
        for slot, (prompt, sampling) in enumerate(zip(given_prompts, samplings, strict=True)):
            await driver.start(slot, prompt, sampling)
        batch = [Chunk(slot, len(driver.tokens[slot]) - 1, driver.tokens[slot][-1:], True) for slot in range(4)]
        result = await decoder.step(StepBatch(tuple(batch), rounds=8))
        assert len(result.later) == 7
        for slot in range(4):
            got = [rounds[slot] for rounds in (result.tokens, *result.later) if slot in rounds]
            expected = answers[slot][1 : ended + 1] if slot == 1 else answers[slot][1:9]
            assert got == expected
            assert decoder.length(slot) == len(given_prompts[slot]) + len(got)


async def test_a_step_of_several_rounds_is_over_when_every_sequence_has_ended(tiny: Model) -> None:
    prompt = prompts(tiny)[0]
    async with decoder_of(tiny) as decoder:
        driver = Driver(decoder)
        first = await driver.start(0, prompt, Sampling(temperature=0.0, grammar='root ::= "a"'))
        result = await decoder.step(StepBatch((Chunk(0, len(prompt), [first], True),), rounds=8))
        assert result.tokens[0] in tiny.end_tokens
        assert result.later == ()


@in_every_mode
async def test_C2_peers_of_a_dropped_sequence_keep_their_tokens(tiny: Model, mode: dict[str, Any]) -> None:
    given_prompts = prompts(tiny, 4)
    async with decoder_of(tiny, **mode) as decoder:
        alone = [await answer(decoder, prompt, 20) for prompt in given_prompts]
        driver = Driver(decoder)
        for slot, prompt in enumerate(given_prompts):
            await driver.start(slot, prompt)
        for round_ in range(19):
            if round_ == 7:
                driver.drop(1)
            await driver.decode()
        for slot in (0, 2, 3):
            assert driver.tokens[slot][len(given_prompts[slot]) :] == alone[slot]


@in_every_mode
async def test_a_dropped_slot_can_be_used_at_once(tiny: Model, mode: dict[str, Any]) -> None:
    first, second = prompts(tiny, 2)
    async with decoder_of(tiny, **mode) as decoder:
        expected = await answer(decoder, second, 12)
        driver = Driver(decoder)
        await driver.start(2, first)
        await driver.decode()
        driver.drop(2)
        assert decoder.length(2) == 0
        await driver.start(2, second)
        for _ in range(11):
            await driver.decode()
        assert driver.tokens[2][len(second) :] == expected


@in_every_mode
@pytest.mark.parametrize(
    "sampling", [GREEDY, Sampling(temperature=1.2, seed=11, repeat_penalty=1.3, frequency_penalty=0.3)]
)
async def test_a_move_takes_cells_and_sampler_along(tiny: Model, mode: dict[str, Any], sampling: Sampling) -> None:
    given_prompts = prompts(tiny, 4)
    async with decoder_of(tiny, **mode) as decoder:
        alone = [await answer(decoder, prompt, 20, sampling) for prompt in given_prompts]
        driver = Driver(decoder)
        for slot, prompt in enumerate(given_prompts):
            await driver.start(slot, prompt, sampling)
        for round_ in range(19):
            if round_ == 5:
                driver.drop(1)
                driver.moves.append((3, 1))
            if round_ == 9:
                driver.moves += [(1, 3), (0, 1)]
            await driver.decode()
        assert driver.tokens[1][len(given_prompts[0]) :] == alone[0]
        assert driver.tokens[2][len(given_prompts[2]) :] == alone[2]
        assert driver.tokens[3][len(given_prompts[3]) :] == alone[3]
        assert decoder.length(0) == 0


async def test_a_move_keeps_logprobs(tiny: Model) -> None:
    async with decoder_of(tiny) as decoder:
        prompt = prompts(tiny, 1)[0]
        decoder.open(2, Sampling(temperature=0.0, logprobs=True, top_logprobs=3), prompt)
        first = await decoder.step(StepBatch((Chunk(2, 0, prompt, True),)))
        assert set(first.logprobs) == {2}
        second = await decoder.step(StepBatch((Chunk(0, len(prompt), [first.tokens[2]], True),), ((2, 0),)))
        assert set(second.logprobs) == {0}
        told = second.logprobs[0]
        assert told.token == second.tokens[0]
        assert told.top[0] == (told.token, told.logprob)
        assert [logprob for _, logprob in told.top] == sorted((logprob for _, logprob in told.top), reverse=True)


async def test_only_who_asks_gets_logprobs(tiny: Model) -> None:
    async with decoder_of(tiny) as decoder:
        driver = Driver(decoder)
        await driver.start(0, prompts(tiny)[0])
        await driver.start(1, prompts(tiny)[1], Sampling(temperature=0.0, logprobs=True))
        chunks = tuple(Chunk(slot, len(driver.tokens[slot]) - 1, driver.tokens[slot][-1:], True) for slot in (0, 1))
        result = await decoder.step(StepBatch(chunks))
        assert set(result.logprobs) == {1}
        assert result.logprobs[1].top == ()


async def test_same_seed_same_tokens(tiny: Model) -> None:
    prompt = prompts(tiny)[0]
    async with decoder_of(tiny) as decoder:
        runs = [await answer(decoder, prompt, 30, Sampling(temperature=1.5, seed=seed)) for seed in (1, 1, 2)]
        assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("mode", MODES[2:], ids=["plain", "flash"])
@pytest.mark.parametrize("length", [1, 6, 10])
async def test_a_copied_prefix_answers_like_a_prefilled_one(tiny: Model, mode: dict[str, Any], length: int) -> None:
    prompt = tiny.tokenize("the quick brown fox jumps")
    other = [*prompt[:length], *tiny.tokenize("and sleeps", bos=False)]
    async with decoder_of(tiny, **mode) as decoder:
        expected = await answer(decoder, prompt, 16), await answer(decoder, other, 16)
        driver = Driver(decoder)
        await driver.start(0, prompt)
        decoder.copy(0, 1, length)
        assert decoder.length(1) == length
        await driver.start(1, other, done=length)
        for _ in range(15):
            await driver.decode()
        assert (driver.tokens[0][len(prompt) :], driver.tokens[1][len(other) :]) == expected
        # The copy outlives its source.
        driver.drop(0)
        await driver.decode()


async def test_a_copy_is_refused_where_it_cannot_be(tiny: Model) -> None:
    prompt = prompts(tiny)[0]
    async with decoder_of(tiny, kv_mode="split") as decoder:
        await Driver(decoder).start(0, prompt)
        with pytest.raises(DecodeError, match="unified"):
            decoder.copy(0, 1, 3)
        assert decoder.length(1) == 0
    async with decoder_of(tiny, kv_mode="unified") as decoder:
        driver = Driver(decoder)
        await driver.start(0, prompt)
        await driver.start(1, prompt)
        for source, target, length in [
            (0, 2, len(prompt) + 1),
            (0, 2, 0),
            (0, 2, -1),
            (0, 0, 2),
            (3, 2, 1),
            (0, 9, 2),
            (0, -1, 2),
        ]:
            with pytest.raises(DecodeError):
                decoder.copy(source, target, length)
        with pytest.raises(DecodeError, match="still holds"):
            decoder.copy(0, 1, 2)
        await driver.decode()


async def test_steps_that_make_no_sense_are_refused_and_harm_nobody(tiny: Model) -> None:
    prompt = prompts(tiny)[0]
    async with decoder_of(tiny) as decoder:
        expected = await answer(decoder, prompt, 8)
        driver = Driver(decoder)
        await driver.start(0, prompt)
        here = len(prompt)
        senseless = [
            (Chunk(0, here + 1, [7], True),),  # a hole
            (Chunk(0, here - 1, [7], True),),  # the past
            (Chunk(0, here, [], True),),
            (Chunk(0, here, [tiny.size], True),),
            (Chunk(0, here, [-1], True),),
            (Chunk(0, here, [2**40], True),),
            (Chunk(1, 0, [7], True),),  # not open
            (Chunk(9, 0, [7], True),),
            (Chunk(-1, 0, [7], True),),
            (Chunk(0, here, [7], True), Chunk(0, here + 1, [7], True)),
            (Chunk(0, here, [7] * 600, True),),
        ]
        for chunks in senseless:
            with pytest.raises(DecodeError):
                await decoder.step(StepBatch(chunks))
        for moves in [((0, 0),), ((0, 9),), ((9, 1),), ((0, -1),)]:
            with pytest.raises(DecodeError):
                await decoder.step(StepBatch((), moves))
        for tokens, sample, rounds in [([7], True, 0), ([7], True, 33), ([7], False, 2), ([7, 8], True, 2)]:
            with pytest.raises(DecodeError, match="rounds"):
                await decoder.step(StepBatch((Chunk(0, here, tokens, sample),), rounds=rounds))
        with pytest.raises(DecodeError, match="open already"):
            decoder.open(0, GREEDY, prompt)
        for slot in (-1, 4):
            with pytest.raises(DecodeError, match="does not exist"):
                decoder.open(slot, GREEDY, prompt)
            with pytest.raises(DecodeError, match="does not exist"):
                decoder.drop(slot)
        for _ in range(7):
            await driver.decode()
        assert driver.tokens[0][here:] == expected


@in_every_mode
async def test_C11_full_cells_fail_the_step_and_the_context_goes_on(tiny: Model, mode: dict[str, Any]) -> None:
    """No scheduler lets it come so far; if one does, it is told, and nothing is broken."""
    prompt = prompts(tiny)[0]
    async with decoder_of(tiny, context_size=512, parallel=2, **mode) as decoder:
        expected = await answer(decoder, prompt, 6)
        filling = [5 + i % 90 for i in range(256)]
        for slot in range(2):
            decoder.open(slot, GREEDY, filling)
            await decoder.step(StepBatch((Chunk(slot, 0, filling, False),)))
        for _ in range(2):
            with pytest.raises(DecodeError) as caught:
                await decoder.step(StepBatch((Chunk(0, 256, [7], True),)))
            assert caught.value.status == 1
            assert caught.value.sequences == 1
            assert "no free KV cells" in caught.value.reason
        assert [decoder.length(slot) for slot in range(2)] == [256, 256]
        decoder.drop(0)
        driver = Driver(decoder)
        await driver.start(0, prompt)
        for _ in range(5):
            await driver.decode()
        assert driver.tokens[0][len(prompt) :] == expected


async def test_dropping_an_empty_slot_does_nothing(tiny: Model) -> None:
    async with decoder_of(tiny) as decoder:
        for slot in range(4):
            decoder.drop(slot)
            decoder.drop(slot)


# Interrupts.


async def interrupted_step(decoder: LlamaDecoder, batch: StepBatch, after: float) -> float:
    """Interrupt a step from another thread, and return how long this process worked from there to the step's end.

    ``after``: seconds of the process's work, by which the step must be inside llama.cpp.  Other programs take none of
    it.
    """
    at = 0.0
    began = time.process_time()

    def interrupt() -> None:
        nonlocal at
        while time.process_time() - began < after:
            time.sleep(after / 100)
        at = time.process_time()
        decoder.interrupt()

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(StepInterrupted):
            await decoder.step(batch)
        return time.process_time() - at
    finally:
        thread.join()


@pytest.fixture(scope="module")
def slow_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes long enough for a prompt to be interrupted."""
    path = tmp_path_factory.mktemp("models") / "slow.gguf"
    return write_tiny_model(path, layers=8, embd=256, ff=1024, heads=8, kv_heads=4, context=2048)


async def test_C9_an_interrupt_ends_the_step_at_once(slow_path: Path) -> None:
    with Model.load(slow_path) as model:
        async with decoder_of(model, context_size=4096) as decoder:
            prompt = [5 + i % 90 for i in range(512)]
            decoder.open(0, GREEDY, prompt)
            began = time.process_time()
            await decoder.step(StepBatch((Chunk(0, 0, prompt, True),)))
            whole = time.process_time() - began
            decoder.drop(0)
            decoder.open(0, GREEDY, prompt)
            took = await interrupted_step(decoder, StepBatch((Chunk(0, 0, prompt, True),)), whole / 4)
            # One operation of the graph is what it may still take.
            assert took < whole / 3
            # The context goes on, and the next step is not interrupted.
            decoder.drop(0)
            short = prompt[:16]
            assert await answer(decoder, short, 4) == await answer(decoder, short, 4)


async def test_an_interrupt_without_a_step_is_forgotten(tiny: Model) -> None:
    async with decoder_of(tiny) as decoder:
        decoder.interrupt()
        assert len(await answer(decoder, prompts(tiny)[0], 3)) == 3
    decoder.interrupt()  # closed: still nothing


async def test_a_step_of_several_rounds_can_end_after_any_of_them(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompts(tiny)[0]
    async with decoder_of(tiny) as decoder:
        expected = await answer(decoder, prompt, 6)
        decoder.end_round()  # without a step: forgotten
        driver = Driver(decoder)
        tokens = [await driver.start(0, prompt)]
        begin_step = decoder._begin_step

        def end_first() -> None:
            decoder.end_round()
            begin_step()

        for begin, rounds in [(end_first, 1), (begin_step, 4)]:
            monkeypatch.setattr(decoder, "_begin_step", begin)
            chunk = Chunk(0, decoder.length(0), tokens[-1:], True)
            result = await decoder.step(StepBatch((chunk,), rounds=4))
            assert len(result.later) == rounds - 1
            tokens += [picked[0] for picked in (result.tokens, *result.later)]
        assert tokens == expected
    decoder.end_round()  # closed: still nothing


async def test_a_cancelled_caller_waits_for_the_native_call(tiny: Model) -> None:
    prompt = prompts(tiny)[0]
    async with decoder_of(tiny) as decoder:
        decoder.open(0, GREEDY, prompt)
        with trio.CancelScope() as scope:
            scope.cancel()
            result = await decoder.step(StepBatch((Chunk(0, 0, prompt, True),)))
            assert set(result.tokens) == {0}
            assert decoder.length(0) == len(prompt)
            await trio.lowlevel.checkpoint()
        assert scope.cancelled_caught


async def test_moves_happen_although_the_step_is_interrupted(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompts(tiny)[0]
    async with decoder_of(tiny) as decoder:
        driver = Driver(decoder)
        await driver.start(2, prompt)
        begin_step = decoder._begin_step

        def interrupted_first() -> None:
            decoder.interrupt()
            begin_step()

        with monkeypatch.context() as patch:
            patch.setattr(decoder, "_begin_step", interrupted_first)
            with pytest.raises(StepInterrupted):
                await decoder.step(StepBatch((Chunk(0, len(prompt), driver.tokens[2][-1:], True),), ((2, 0),)))
        assert [decoder.length(slot) for slot in range(3)] == [len(prompt), 0, 0]


# What is refused when a decoder is made.


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"parallel": 0}, "parallel is an integer from 1 to 256"),
        ({"parallel": 257, "context_size": 2**20}, "parallel"),
        ({"parallel": True}, "parallel"),
        ({"parallel": 2.5}, "parallel"),
        ({"context_size": 3}, "context_size is an integer from 4"),
        ({"context_size": "4096"}, "context_size"),
        ({"threads": 0}, "threads"),
        ({"poll": 101}, "poll"),
        ({"kv_type": "q3_0"}, "kv_type is one of"),
        ({"kv_type": "q8_0", "flash_attention": False}, "needs flash attention"),
        ({"kv_mode": "both"}, "kv_mode"),
        ({"chunk_target": 0}, "chunk_target"),
        ({"chunk_target": float("nan")}, "chunk_target"),
        ({"chunk_target": 10**400}, "chunk_target"),
        ({"rounds_target": -1}, "rounds_target"),
        ({"rounds_target": True}, "rounds_target"),
        ({"lora": [("/nowhere/adapter.gguf", 1.0)]}, "adapter"),
    ],
)
def test_bad_options_are_load_errors(tiny: Model, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelLoadError, match=match):
        LlamaDecoder(tiny, **{"context_size": 1024, "parallel": 4, "threads": 1, **options})


@pytest.mark.parametrize("kv_mode", ["split", "unified"])
def test_a_context_beyond_all_memory_is_refused_before_it_is_allocated(tiny: Model, kv_mode: Any) -> None:
    before = resident()
    with pytest.raises(ModelLoadError, match=r"needs about [\d,.]+ GiB and [\d,.]+ [MG]iB of memory are free"):
        LlamaDecoder(tiny, context_size=2**31 - 1, parallel=4, threads=1, kv_mode=kv_mode)
    assert resident() - before < 32 * 2**20


async def test_quantised_kv_works(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "wide.gguf", embd=128, heads=4, kv_heads=2)
    with Model.load(path) as model:
        async with decoder_of(model, kv_type="q8_0") as decoder:
            assert decoder.policy.flash_attention
            assert len(await answer(decoder, prompts(model)[0], 5)) == 5


# Sampling that the decoder checks.


async def test_check_refuses_what_cannot_be_sampled(tiny: Model) -> None:
    async with decoder_of(tiny) as decoder:
        decoder.check(Sampling(logit_bias={0: 1.0, tiny.size - 1: 1.0}))
        for token in (tiny.size, -1):
            with pytest.raises(InvalidRequestError, match="logit_bias: token"):
                decoder.check(Sampling(logit_bias={token: 1.0}))


async def test_a_closed_decoder_says_so(tiny: Model) -> None:
    async with decoder_of(tiny) as decoder:
        pass
    await decoder.aclose()
    with pytest.raises(DecodeError, match="closed"):
        decoder.open(0, GREEDY, [1])
    with pytest.raises(DecodeError, match="closed"):
        decoder.drop(0)
    with pytest.raises(DecodeError, match="closed"):
        decoder.copy(0, 1, 1)
    with pytest.raises(DecodeError, match="closed"):
        await decoder.step(StepBatch((Chunk(0, 0, [1], True),)))


# Leaks.


def resident() -> int:
    """Bytes of memory that this process has touched."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def native_threads() -> int:
    return len(os.listdir("/proc/self/task"))


async def test_a_thousand_rounds_leave_memory_and_threads_as_they_were(tiny: Model) -> None:
    given_prompts = prompts(tiny, 4)
    grammar = Sampling(temperature=1.0, seed=3, grammar="root ::= [a-z ]+", logprobs=True, logit_bias={3: 1.0})
    async with decoder_of(tiny) as decoder:

        async def rounds(count: int) -> None:
            driver = Driver(decoder)
            for number in range(count):
                slot = number % 4
                if slot in driver.tokens:
                    driver.drop(slot)
                await driver.start(slot, given_prompts[slot], grammar if number % 3 == 0 else GREEDY)
                if number % 7 == 0:
                    await driver.decode()
            for slot in list(driver.tokens):
                driver.drop(slot)

        await rounds(200)
        gc.collect()
        before, threads = resident(), native_threads()
        await rounds(1000)
        gc.collect()
        assert native_threads() <= threads
        assert resident() - before < 2 * 2**20


async def test_opening_and_closing_decoders_leaves_memory_and_threads_as_they_were(tiny: Model) -> None:
    async def once() -> None:
        async with decoder_of(tiny, threads=3) as decoder:
            await answer(decoder, prompts(tiny)[0], 2)

    for _ in range(5):
        await once()
    gc.collect()
    before, threads = resident(), native_threads()
    for _ in range(20):
        await once()
    gc.collect()
    assert native_threads() <= threads
    assert resident() - before < 4 * 2**20


# State, see also test_state.py.


@in_every_mode
async def test_a_cut_slot_is_the_beginning_of_another_prompt(tiny: Model, mode: dict[str, Any]) -> None:
    prompt = prompts(tiny)[3]
    async with decoder_of(tiny, **mode) as decoder:
        for length in (1, 6, len(prompt)):
            other = [*prompt[:length], *prompts(tiny)[2]]
            expected = await answer(decoder, other, 10)
            driver = Driver(decoder)
            await driver.start(1, prompt)
            await driver.start(0, prompts(tiny)[0])
            await driver.decode()
            decoder.cut(1, length)
            del driver.tokens[1]
            assert decoder.length(1) == length
            with pytest.raises(DecodeError, match="is not open"):
                await decoder.step(StepBatch((Chunk(1, length, [1], True),)))
            await driver.decode()
            await driver.start(1, other, done=length)
            for _ in range(9):
                await driver.decode()
            assert driver.tokens[1][len(other) :] == expected
            driver.drop(0)
            driver.drop(1)


async def test_a_cut_keeps_no_more_and_no_less_than_there_is(tiny: Model) -> None:
    prompt = prompts(tiny)[0]
    async with decoder_of(tiny) as decoder:
        await Driver(decoder).start(0, prompt)
        for length in (-1, 0, len(prompt) + 1):
            with pytest.raises(DecodeError, match="cannot be kept"):
                decoder.cut(0, length)
        assert decoder.length(0) == len(prompt)
        with pytest.raises(DecodeError, match="cannot be kept"):
            decoder.cut(1, 1)
        with pytest.raises(DecodeError, match="does not exist"):
            decoder.cut(4, 1)


@pytest.mark.parametrize(("kv_mode", "shares"), [("unified", True), ("split", False)])
async def test_prefixes_are_shared_in_unified_cells(tiny: Model, kv_mode: Any, shares: bool) -> None:
    async with decoder_of(tiny, kv_mode=kv_mode) as decoder:
        assert decoder.shares_prefixes is shares


@in_every_mode
async def test_a_saved_sequence_goes_on_in_another_slot(tiny: Model, mode: dict[str, Any]) -> None:
    prompt = prompts(tiny)[0]
    async with decoder_of(tiny, **mode) as decoder:
        expected = await answer(decoder, prompt, 20)
        driver = Driver(decoder)
        await driver.start(0, prompt)
        for _ in range(6):
            await driver.decode()
        state = await saved(decoder, 0)
        tokens = driver.tokens[0]
        driver.drop(0)
        await driver.start(1, prompts(tiny)[1])
        await decoder.load(3, state, len(tokens) - 1)
        assert decoder.length(3) == len(tokens) - 1
        decoder.open(3, GREEDY, tokens)
        driver.tokens[3] = tokens
        for _ in range(13):
            await driver.decode()
        assert driver.tokens[3][len(prompt) :] == expected


@given(st.data())
def test_any_schedule_gives_each_sequence_its_own_tokens(tiny: Model, data: st.DataObject) -> None:
    """Starts, chunks, decode steps, drops, moves, copies, cuts and states in any order.

    On an F32 model each answer is the lonely one.
    """
    mode = data.draw(st.sampled_from(MODES))
    plan = data.draw(
        st.lists(
            st.tuples(
                st.sampled_from(["start", "decode", "drop", "move", "copy", "cut", "state"]),
                st.integers(0, 3),
                st.integers(1, 9),
            ),
            max_size=25,
        )
    )

    async def main() -> None:
        async with decoder_of(tiny, context_size=512, **mode) as decoder:
            texts = prompts(tiny)
            alone = [await answer(decoder, prompt, 26) for prompt in texts]
            driver = Driver(decoder)
            who: dict[int, int] = {}
            for what, slot, number in plan:
                if what == "start" and slot not in who:
                    who[slot] = number % len(texts)
                    await driver.start(slot, texts[who[slot]], chunk=number)
                elif what == "drop" and slot in who:
                    driver.drop(slot)
                    del who[slot]
                elif what == "move" and slot in who and number % 4 not in who:
                    driver.moves.append((slot, number % 4))
                    who[number % 4] = who.pop(slot)
                    await driver.decode()
                elif what == "copy" and who and slot not in who and decoder.shares_prefixes:
                    source = sorted(who)[number % len(who)]
                    prompt = texts[who[source]]
                    decoder.copy(source, slot, done := min(2 * number, len(prompt) - 1))
                    await driver.start(slot, prompt, chunk=number, done=done)
                    who[slot] = who[source]
                elif what == "cut" and slot in who:
                    prompt = texts[who[slot]]
                    decoder.cut(slot, done := min(2 * number, len(prompt) - 1))
                    await driver.start(slot, prompt, chunk=number, done=done)
                elif what == "state" and slot in who:
                    prompt, state = texts[who[slot]], await saved(decoder, slot)
                    decoder.drop(slot)
                    await decoder.load(slot, state, done := min(2 * number, len(prompt) - 1))
                    await driver.start(slot, prompt, chunk=number, done=done)
                elif what == "decode" and who:
                    await driver.decode([chosen for chosen in who if (number >> chosen) & 1] or who)
            for slot, text in who.items():
                made = driver.tokens[slot][len(texts[text]) :]
                assert made == alone[text][: len(made)]

    trio.run(main)
