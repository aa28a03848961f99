"""Caches of a real decoder, on a tiny model: warm is cold, but for the time.  Rules K1, K2 and K4."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

import laneway
from laneway_native import _weights
from laneway_native._gguf import check_gguf
from laneway_plugins import completion
from tests.kvcache.kit import Talk, report
from tests.native import adapters
from tests.tiny_model import write_gguf, write_tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("laneway_native", reason="the native part is not built (make build)", exc_type=ImportError)
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@asynccontextmanager
async def load(tiny: Path, top: Path, parallel: int = 1, **options: Any) -> AsyncIterator[laneway.Model]:
    async with laneway.open_engine(cache_dir=top) as engine:
        yield await engine.load_model(
            tiny,
            parallel,
            **{"context_size": 512 * parallel, "threads": 1, "kv_type": "f32", "prefix_cache": False, **options},
        )


@pytest.mark.parametrize("kv_mode", ["split", "unified"])
@pytest.mark.parametrize("kv_cache", ["chat", True])
async def test_K1_a_warm_cache_gives_the_tokens_of_a_cold_one(
    tiny: Path, tmp_path: Path, kv_mode: str, kv_cache: str | bool
) -> None:
    texts = ["Hello there", "and again", "once more", "the end"]
    warm: list[completion.Completion] = []
    async with load(tiny, tmp_path, kv_mode=kv_mode) as model:
        cold_talk = Talk(model, None)
        cold = [await cold_talk.say(text, max_tokens=20) for text in texts]
    talk: Talk | None = None
    for text in texts:
        # A new engine each time: nothing but the file goes from one turn to the next.
        async with load(tiny, tmp_path, kv_mode=kv_mode) as model:
            talk = Talk(model, kv_cache) if talk is None else Talk(model, kv_cache, talk.messages)
            warm.append(await talk.say(text, max_tokens=20))
    assert [answer.tokens for answer in warm] == [answer.tokens for answer in cold]
    assert [report(answer).ended for answer in warm] == ["commit"] * 4
    assert warm[0].stats.cached_tokens == 0
    for before, after in itertools.pairwise(warm):
        assert after.stats.cached_tokens >= before.stats.prompt_tokens - 1


async def test_K4_another_window_is_a_miss(tiny: Path, tmp_path: Path) -> None:
    async with load(tiny, tmp_path) as model:
        talk = Talk(model, "chat")
        await talk.say("Hello there")
    async with load(tiny, tmp_path, context_size=256) as model:
        again = Talk(model, "chat", talk.messages)
        answer = await again.say("and again")
        assert answer.stats.cached_tokens == 0
        assert "other settings" in str(report(answer).miss)
        assert report(answer).ended == "commit"


async def test_K2_turns_on_one_key_serialise_and_others_overlap(tiny: Path, tmp_path: Path) -> None:
    prompt = "Once upon a time"
    # The tiny model never ends by itself, so the first answer lasts as long as it is wanted.
    async with load(tiny, tmp_path, 2, kv_mode="unified", context_size=2 * 8192) as model:

        async def beside(first: str | None, second: str | None) -> completion.Completion | None:
            """A turn while another one is being answered; None if it did not come to its end meanwhile."""
            async with completion.stream(model, prompt, kv_cache=first, temperature=0.0) as long:
                async for _ in long:
                    break
                async with completion.stream(model, prompt, kv_cache=second, temperature=0.0, max_tokens=9) as run:
                    lane = model.engine.snapshot().model(model.name).lanes[0]
                    if lane.waiting:
                        return None
                    answer: completion.Completion = await run.result()
                assert long.state == "running"
            return answer

        assert await beside("x", "x") is None
        for first, second in (("x", "y"), ("x", None), (None, "x")):
            answer = await beside(first, second)
            assert answer is not None
            assert answer.stats.average_concurrent_sequences == 2.0
        turns: list[completion.Completion] = []

        async def turn() -> None:
            turns.append(await completion.complete(model, prompt, kv_cache="x", temperature=0.0, max_tokens=40))

        async with trio.open_nursery() as both:
            both.start_soon(turn)
            both.start_soon(turn)
        assert [answer.stats.average_concurrent_sequences for answer in turns] == [1.0, 1.0]
        assert turns[0].tokens == turns[1].tokens


# --- the fingerprint knows the weights (rule K4) ----------------------------------------------------------------------


def weights_of(path: Path) -> range:
    """Where a model's weights lie in its file."""
    header = check_gguf(path)
    return range(header.file_size - header.tensor_bytes, header.file_size)


def rewritten(source: Path, target: Path, change: Callable[[bytearray], None]) -> Path:
    """A copy of a file with other bytes in it, of the same name and size."""
    raw = bytearray(source.read_bytes())
    change(raw)
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(raw)
    assert len(raw) == source.stat().st_size
    return target


async def turn(model_file: Path, top: Path, talk: Talk | None = None, **options: Any) -> tuple[Talk, Any]:
    """A turn of a conversation in an engine that knows of it from the disk only."""
    async with load(model_file, top, **options) as model:
        talk = Talk(model, "chat", talk.messages) if talk else Talk(model, "chat")
        return talk, await talk.say("Hello there" if len(talk.messages) < 2 else "and again", max_tokens=12)


async def cold_answer(model_file: Path, talk: Talk, **options: Any) -> tuple[int, ...]:
    """What the conversation's last answer is without any cache."""
    async with load(model_file, model_file.parent, **options) as model:
        again = Talk(model, None, talk.messages[:-2])
        return (await again.say("and again", max_tokens=12)).tokens


def half_of_the_weights(raw: bytearray, weights: range) -> None:
    """Their signs, so that they stay numbers."""
    for at in range(weights.start + 3, weights.start + len(weights) // 2, 4):
        raw[at] ^= 0x80


def one_number(raw: bytearray, weights: range) -> None:
    raw[weights.stop - 1] ^= 0x80


@pytest.mark.parametrize("change", [half_of_the_weights, one_number])
async def test_K4_a_file_with_other_weights_begins_anew(
    tiny: Path, tmp_path: Path, change: Callable[[bytearray, range], None]
) -> None:
    weights = weights_of(tiny)
    other = rewritten(tiny, tmp_path / "other" / tiny.name, lambda raw: change(raw, weights))
    assert check_gguf(other).sha256 == check_gguf(tiny).sha256
    talk, first = await turn(tiny, tmp_path)
    assert report(first).ended == "commit"
    talk, answer = await turn(other, tmp_path, talk)
    assert "of another model" in str(report(answer).miss)
    assert answer.stats.cached_tokens == 0
    assert answer.tokens == await cold_answer(other, talk)


async def test_K4_each_tensor_counts(tiny: Path, tmp_path: Path) -> None:
    start, prints = weights_of(tiny).start, set()
    header = check_gguf(tiny)
    for tensor in header.tensors.values():

        def change(raw: bytearray, at: int = start + tensor.offset + tensor.size // 2) -> None:
            raw[at] ^= 1

        async with load(rewritten(tiny, tmp_path / "other" / tiny.name, change), tmp_path) as model:
            prints.add(await model.state_fingerprint())
    assert len(prints) == header.tensor_count


async def test_K4_another_adapter_or_scale_begins_anew(tiny: Path, tmp_path: Path) -> None:
    adapter = write_gguf(tmp_path / "adapter.gguf", *adapters.adapter_parts())

    def change(raw: bytearray) -> None:
        raw[-1] ^= 0x80

    other = rewritten(adapter, tmp_path / "other" / adapter.name, change)
    talk, _ = await turn(tiny, tmp_path, lora=[adapter])
    for lora in ([other], [(adapter, 0.5)], [], [adapter, adapter]):
        talk, answer = await turn(tiny, tmp_path, talk, lora=lora)
        assert "of another model" in str(report(answer).miss)
        assert answer.stats.cached_tokens == 0
        assert answer.tokens == await cold_answer(tiny, talk, lora=lora)
    talk, answer = await turn(tiny, tmp_path, talk, lora=[adapter, adapter])
    assert report(answer).miss is None


async def test_K4_the_same_weights_elsewhere_and_of_another_time_go_on(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_weights, "AT_REST", -1.0)
    reads: list[str] = []
    real = _weights.digest_piece

    def counted(path: str, *how: Any) -> bytes:
        reads.append(path)
        return real(path, *how)

    monkeypatch.setattr(_weights, "digest_piece", counted)
    adapter = write_gguf(tmp_path / "adapter.gguf", *adapters.adapter_parts())
    here, there = (rewritten(tiny, tmp_path / name / tiny.name, lambda raw: None) for name in ("here", "there"))
    copied = rewritten(adapter, tmp_path / "there" / "renamed.gguf", lambda raw: None)
    talk, _ = await turn(here, tmp_path, lora=[adapter])
    assert reads == [str(here), str(adapter)]
    # Known from the last process.
    talk, answer = await turn(here, tmp_path, talk, lora=[adapter])
    assert report(answer).miss is None
    assert len(reads) == 2
    os.utime(here)
    for model_file, lora in ((here, adapter), (there, copied)):
        reads.clear()
        talk, answer = await turn(model_file, tmp_path, talk, lora=[lora])
        assert report(answer).miss is None
        assert answer.stats.cached_tokens > 0
        assert str(model_file) in reads


async def test_K4_without_a_cache_on_disk_weights_are_not_read(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> bytes:
        raise AssertionError("it was not asked for")

    monkeypatch.setattr(_weights, "digest_piece", never)
    async with load(tiny, tmp_path) as model:
        await Talk(model, None).say("Hello there")


@pytest.mark.parametrize("use_mmap", [True, False])
async def test_K4_weights_that_are_written_over_in_use_do_not_go_into_a_file_of_theirs(
    tiny: Path, tmp_path: Path, use_mmap: bool
) -> None:
    weights = weights_of(tiny)
    mine = rewritten(tiny, tmp_path / "mine" / tiny.name, lambda raw: None)
    talk, _ = await turn(mine, tmp_path, use_mmap=use_mmap)
    async with load(mine, tmp_path, use_mmap=use_mmap) as model:
        second = Talk(model, "chat", talk.messages)
        assert report(await second.say("and again", max_tokens=12)).miss is None
        rewritten(tiny, mine, lambda raw: half_of_the_weights(raw, weights))
        answer = await second.say("once more", max_tokens=12)
        # What was read into memory is what it was; what is mapped has changed with the file.
        assert (report(answer).miss is None) is not use_mmap
    _, answer = await turn(mine, tmp_path, second)
    assert "of another model" in str(report(answer).miss)


async def test_a_deadline_ends_the_wait_for_a_fingerprint(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk may take longer; other requests go on meanwhile."""
    began, go = threading.Event(), threading.Event()
    real = _weights.digest_piece

    def slow(*how: Any) -> bytes:
        began.set()
        assert go.wait(60), "the event loop was held up"
        return real(*how)

    monkeypatch.setattr(_weights, "digest_piece", slow)
    async with load(tiny, tmp_path, 2) as model:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                for key in ("one", "two"):
                    nursery.start_soon(Talk(model, key).say, "Hello there")
                with trio.fail_after(60):
                    while not began.is_set():
                        await trio.lowlevel.checkpoint()
                assert (await Talk(model, None).say("Hello there")).tokens
                scope.cancel()
        assert scope.cancelled_caught
        (snapshot,) = model.engine.snapshot().models
        assert not any(lane.running or lane.waiting for lane in snapshot.lanes)
        go.set()
        assert report(await Talk(model, "one").say("Hello there")).ended == "commit"
