"""Turns on the scripted decoder: which lane, who waits for whom, how each of them ends.  Rules K1 to K4."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing

import laneway
from laneway import (
    CacheKeyError,
    ContextOverflowError,
    DecodeError,
    InferenceCancelledError,
    InvalidRequestError,
    RequestRejectedByPolicyError,
)
from laneway._kvcache import _files
from laneway.testing import ScriptedDecoder
from laneway_plugins import completion
from tests.kvcache.kit import GREEDY, STEP, Directory, Talk, cached, cold, forbidden, report, threads_at_once
from tests.plugins.scripted import Scripted


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    threads_at_once(monkeypatch)


@pytest.fixture
def disk(tmp_path: Path) -> Directory:
    return Directory(tmp_path)


# A conversation.


@pytest.mark.parametrize("kv_cache", ["chat", "users/7/chat", True])
async def test_K1_each_turn_takes_up_what_the_one_before_has_left(disk: Directory, kv_cache: str | bool) -> None:
    async with cached(disk.top) as s:
        talk = Talk(s.model, kv_cache)
        kept = 0
        for number, text in enumerate(("Hello", " world", "the end")):
            answer = await talk.say(text)
            assert answer.tokens == cold(s, talk.messages)
            assert (report(answer).ended, report(answer).reason) == ("commit", None)
            assert report(answer).key == (None if kv_cache is True else kv_cache)
            assert (report(answer).miss is None) is (number > 0)
            assert answer.stats.cached_tokens >= kept
            # What is new: this message and the markers around it, and the last answer's last token.
            assert answer.stats.prompt_tokens - answer.stats.cached_tokens < 25 or not number
            kept = answer.stats.prompt_tokens
        assert len(disk.files()) == 1
        assert disk.folders() == []
        s.assert_idle()


async def test_a_file_is_not_read_for_what_a_slot_in_memory_has(disk: Directory) -> None:
    async with cached(disk.top, prefix_cache=True) as s:
        for kv_cache in ("chat", True):
            talk = Talk(s.model, kv_cache)
            await talk.say("Hello")
            loads = s.decoder.statistics().loads
            await talk.say("and on")
            answer = await talk.say("and on")
            assert answer.tokens == cold(s, talk.messages)
            assert report(answer).ended == "commit"
            assert "a slot in memory has" in str(report(answer).miss)
            assert s.decoder.statistics().loads == loads
            assert answer.stats.cached_tokens > 40
            await Talk(s.model, None).say("something else, which takes the slot" * 2)
            answer = await talk.say("again")
            assert answer.tokens == cold(s, talk.messages)
            assert report(answer).miss is None
            assert answer.stats.cached_tokens > 60
            assert s.decoder.statistics().loads == loads + 1


async def test_an_edited_history_loses_only_what_follows_the_edit(disk: Directory) -> None:
    async with cached(disk.top) as s:
        for kv_cache in ("chat", True):
            talk = Talk(s.model, kv_cache)
            await talk.say("Hello")
            first = list(talk.messages)
            await talk.say("A second turn, rather long")
            edited = Talk(s.model, kv_cache, [*first])
            answer = await edited.say("A second turn, edited")
            assert answer.tokens == cold(s, edited.messages)
            shared = len(s.tokenizer.tokenize("<|turn|>system\nBe brief.<|turn_end|>\n", special=True))
            assert answer.stats.cached_tokens > shared + 20
            assert report(answer).ended == "commit"


async def test_an_automatic_branch_leaves_the_conversation_that_it_branches_from(disk: Directory) -> None:
    async with cached(disk.top) as s:
        talk = Talk(s.model, True)
        await talk.say("Hello")
        opening = list(talk.messages)
        await talk.say("one way")
        before = disk.files()
        branch = Talk(s.model, True, opening)
        answer = await branch.say("another way")
        assert answer.stats.cached_tokens > 20
        assert before.items() < disk.files().items()
        assert (await talk.say("on")).stats.cached_tokens > answer.stats.cached_tokens
        assert len(disk.files()) == 2


async def test_an_automatic_turn_moves_the_file_to_the_longer_history(disk: Directory) -> None:
    async with cached(disk.top) as s:
        talk = Talk(s.model, True)
        await talk.say("Hello")
        (first,) = disk.files()
        await talk.say("Hello again")
        (second,) = disk.files()
        assert first != second
        assert Path(first).parent == Path(second).parent


async def test_a_raw_prompt_has_a_cache_by_key_alone(disk: Directory) -> None:
    async with cached(disk.top) as s:
        one = await completion.complete(s.model, "Hello world", kv_cache="story", **GREEDY)
        longer = "Hello world" + one.text + " the"
        two = await completion.complete(s.model, longer, kv_cache="story", **GREEDY)
        assert two.tokens == s.expected(longer, 12, temperature=0.0).tokens
        assert two.stats.cached_tokens > 2
        with pytest.raises(InvalidRequestError, match="raw prompt has none") as caught:
            await completion.complete(s.model, "Hello", kv_cache=True)
        assert caught.value.field == "kv_cache"


@pytest.mark.parametrize("wrong", [5, 1.0, b"chat", ["chat"], 1])
def test_A10_a_cache_is_named_by_a_key_or_by_true(wrong: Any) -> None:
    with pytest.raises(InvalidRequestError, match="must be a key") as caught:
        completion.CompletionRequest("x", kv_cache=wrong)
    assert caught.value.field == "kv_cache"


async def test_A10_a_bad_key_is_refused_before_the_request_arrives(disk: Directory) -> None:
    async with cached(disk.top) as s:
        for key in ("", "..", "../x", "/etc/x", "a/../b", "C:x", "a\0b", "a\\b", "nul"):
            with pytest.raises(CacheKeyError):
                await completion.complete(s.model, "Hello", kv_cache=key, **GREEDY)
        assert s.decoder.statistics().steps == 0
        assert disk.files() == {}


async def test_A10_a_model_that_cannot_keep_its_state_is_told_so(
    disk: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cached(disk.top) as s:
        monkeypatch.setattr(type(s.decoder), "state_fingerprint", None)
        with pytest.raises(InvalidRequestError, match="cannot keep a KV cache") as caught:
            await completion.complete(s.model, "Hello", kv_cache="chat", **GREEDY)
        assert caught.value.field == "kv_cache"


async def test_without_a_cache_nothing_is_written_and_nothing_is_told(disk: Directory) -> None:
    async with cached(disk.top) as s:
        for kv_cache in (None, False):
            answer = await completion.complete(s.model, "Hello", kv_cache=kv_cache, **GREEDY)
            assert answer.stats.cache is None
        assert s.decoder.statistics().saves == 0
    assert not disk.kv.exists()


# K1, K2: the lane.


async def test_K1_a_turn_counts_toward_parallel_and_keeps_its_place(
    disk: Directory, autojump_clock: trio.testing.MockClock
) -> None:
    async with cached(disk.top, seconds_per_step=STEP) as s:
        order: list[str] = []

        async def one(name: str, kv_cache: str | None) -> None:
            async with completion.stream(s.model, "Hello", kv_cache=kv_cache, request_id=name, **GREEDY) as run:
                await run.admitted()
                order.append(name)
                assert s.lane.used == 1
                await run.result()

        async with trio.open_nursery() as nursery:
            for name, kv_cache in (("a", None), ("b", "x"), ("c", None), ("d", "x"), ("e", None)):
                nursery.start_soon(one, name, kv_cache)
                await trio.testing.wait_all_tasks_blocked()
            assert [request.request_id for request in s.lane.running] == ["a"]
            assert [request.request_id for request in s.lane.waiting] == ["b", "c", "d", "e"]
        assert order == ["a", "b", "c", "d", "e"]
        s.assert_idle()


async def test_K1_a_turn_is_refused_like_any_other(disk: Directory) -> None:
    async with cached(disk.top) as s, completion.stream(s.model, "Hello", **GREEDY) as run:
        with pytest.raises(RequestRejectedByPolicyError):
            await completion.complete(s.model, "Hello", kv_cache="x", overflow="reject", **GREEDY)
        assert disk.files() == {}
        await run.result()


async def _at_once(s: Any, *kv_caches: str | bool | None) -> tuple[int, list[completion.Completion]]:
    """Turns that begin together, and the most sequences that a step had."""
    answers: list[completion.Completion | None] = [None] * len(kv_caches)

    async def one(index: int, kv_cache: str | bool | None) -> None:
        messages = [{"role": "user", "content": "Hello"}]
        answers[index] = await completion.complete(s.model, messages, kv_cache=kv_cache, **GREEDY)

    async with trio.open_nursery() as nursery:
        for index, kv_cache in enumerate(kv_caches):
            nursery.start_soon(one, index, kv_cache)
    done = [answer for answer in answers if answer is not None]
    assert len(done) == len(kv_caches)
    assert len({answer.tokens for answer in done}) == 1
    return s.decoder.statistics().max_concurrency, done


async def test_K2_two_turns_on_one_key_serialise(disk: Directory) -> None:
    async with cached(disk.top, 2) as s:
        concurrency, answers = await _at_once(s, "x", "x")
        assert concurrency == 1
        assert {report(answer).ended for answer in answers} == {"commit"}
        assert sorted(answer.stats.cached_tokens > 0 for answer in answers) == [False, True]


async def test_K2_turns_on_two_keys_overlap_and_so_do_cached_and_plain(disk: Directory) -> None:
    async with cached(disk.top, 3) as s:
        assert (await _at_once(s, "x", "y", None))[0] == 3


async def test_K2_whatever_alias_names_the_file(disk: Directory) -> None:
    async with cached(disk.top, 3) as s:
        await Talk(s.model, "x").say("Hello")
        (disk.kv / "named/alias").symlink_to("x")
        s.decoder._max_concurrency = 0
        concurrency, answers = await _at_once(s, "x", "alias")
        assert concurrency == 1
        assert {report(answer).ended for answer in answers} == {"commit"}
        assert len(disk.files()) == 1
        (entry,) = await s.engine.kv_caches.list()
        assert entry.key == "x"


async def test_K5_a_key_that_differs_in_case_only_is_refused(disk: Directory) -> None:
    async with cached(disk.top) as s:
        await Talk(s.model, "users/Anna").say("Hello")
        before = disk.files()
        for key in ("users/anna", "Users/Anna", "USERS/ANNA"):
            with pytest.raises(CacheKeyError, match="differs from the key 'users/Anna' in case"):
                await Talk(s.model, key).say("Hello")
        assert disk.files() == before


async def test_K5_of_two_such_keys_that_come_at_once_the_second_goes_without(disk: Directory) -> None:
    async with cached(disk.top, 2) as s:
        concurrency, answers = await _at_once(s, "Anna", "anna")
        assert concurrency == 1
        one, two = sorted(answers, key=lambda answer: report(answer).ended)
        assert report(one).ended == "commit"
        assert (report(two).ended, two.stats.cached_tokens) == ("release", 0)
        assert "differs from the key" in str(report(two).reason)
        assert [entry.key for entry in await s.engine.kv_caches.list()] == [report(one).key]


async def test_K2_a_file_that_another_process_holds_is_waited_for_without_a_permit(
    disk: Directory, autojump_clock: trio.testing.MockClock
) -> None:
    async with cached(disk.top) as s:
        await Talk(s.model, "x").say("Hello")
        async with trio.open_nursery() as nursery:
            with disk.held(disk.file("x")):
                done: list[completion.Completion] = []

                async def turn() -> None:
                    done.append(await Talk(s.model, "x").say("Hello"))

                nursery.start_soon(turn)
                await trio.testing.wait_all_tasks_blocked()
                assert len(s.lane.waiting) == 1
                for _ in range(3):
                    await Talk(s.model, None).say("Hello")  # passes it
                with pytest.raises(RequestRejectedByPolicyError, match="overflow"):
                    await completion.complete(s.model, "Hello", kv_cache="x", overflow="reject", **GREEDY)
                with trio.move_on_after(1) as scope:
                    await completion.complete(s.model, "Hello", kv_cache="x", **GREEDY)
                assert scope.cancelled_caught
                assert not done
        assert report(done[0]).ended == "commit"
        assert done[0].stats.cached_tokens > 0
        assert [name for name in disk.files() if name.startswith("locks")] == []
        s.assert_idle()


async def test_K2_two_engines_on_one_directory_take_turns(
    disk: Directory, autojump_clock: trio.testing.MockClock
) -> None:
    async with cached(disk.top, 2, seconds_per_step=STEP) as one, cached(disk.top, 2, seconds_per_step=STEP) as two:
        spans: dict[str, list[float]] = {}
        began = trio.current_time()

        async def turn(name: str, s: Scripted, kv_cache: str) -> None:
            async with completion.stream(s.model, "Hello", kv_cache=kv_cache, **GREEDY) as run:
                await run.admitted()
                spans[name] = [trio.current_time()]
                await run.result()
                spans[name].append(trio.current_time())

        async with trio.open_nursery() as nursery:
            for name, s, kv_cache in (("a", one, "x"), ("b", two, "x"), ("c", two, "y")):
                nursery.start_soon(turn, name, s, kv_cache)
        assert spans["a"][1] <= spans["b"][0] or spans["b"][1] <= spans["a"][0]
        assert spans["c"][0] == began == min(spans["a"][0], spans["b"][0])
        for s in (one, two):
            s.assert_idle()


async def test_K2_a_model_is_unloaded_under_one_that_waits_for_its_file(disk: Directory) -> None:
    async with cached(disk.top) as s:
        with disk.held(disk.file("x")):
            with pytest.raises(InferenceCancelledError, match="was unloaded"):
                async with completion.stream(s.model, "Hello", kv_cache="x", **GREEDY) as run:
                    await s.engine.unload_model(s.model)
                    await run.result()
        assert [name for name in disk.files() if not name.startswith("locks")] == []


async def test_K3_permit_and_key_are_held_until_the_file_is_durable(
    disk: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cached(disk.top, 2) as s:
        seen: list[tuple[int, bool]] = []
        sync = _files.sync_directory

        def look(folder: Path) -> None:
            sync(folder)
            seen.append((s.lane.used, s.model.lanes._admission.free([("kv-cache", str(disk.file("x")))])))

        monkeypatch.setattr(_files, "sync_directory", look)
        await Talk(s.model, "x").say("Hello")
        assert set(seen) == {(1, False)}
        s.assert_idle()


# K3: ends.


async def _committed(s: Any, disk: Directory, kv_cache: str | bool = "x") -> tuple[Talk, dict[str, bytes]]:
    talk = Talk(s.model, kv_cache)
    await talk.say("Hello")
    return talk, disk.files()


@pytest.mark.parametrize("kv_cache", ["x", True])
@pytest.mark.parametrize("after", [0.0, 0.5 * STEP, 3.5 * STEP, 8.5 * STEP])
async def test_K3_a_turn_cancelled_in_its_middle_leaves_the_file_byte_for_byte(
    disk: Directory, autojump_clock: trio.testing.MockClock, kv_cache: str | bool, after: float
) -> None:
    async with cached(disk.top, seconds_per_step=STEP) as s:
        talk, before = await _committed(s, disk, kv_cache)
        with trio.move_on_after(after) as scope:
            await talk.say("A second turn that is cancelled")
        assert scope.cancelled_caught
        assert disk.files() == before
        s.assert_idle()
        answer = await talk.say("A second turn")
        assert answer.tokens == cold(s, talk.messages)
        assert answer.stats.cached_tokens > 20


async def test_K3_a_cancel_by_id_tells_how_the_turn_ended(disk: Directory) -> None:
    async with cached(disk.top) as s:
        for expected in ("rollback", "release"):
            before = disk.files()
            with pytest.raises(InferenceCancelledError) as caught:
                async with completion.stream(
                    s.model, "Hello", kv_cache="x", request_id="turn", temperature=0.0, max_tokens=50
                ) as run:
                    async for _ in run:
                        s.engine.cancel("turn")
            assert caught.value.stats is not None
            assert caught.value.stats.cache is not None
            assert (caught.value.stats.cache.ended, caught.value.stats.cache.reason) == (expected, "it was cancelled")
            assert disk.files() == before
            await completion.complete(s.model, "Hello", kv_cache="x", **GREEDY)


@pytest.mark.parametrize("kv_cache", ["x/y", True])
async def test_K3_a_first_turn_that_is_cancelled_leaves_nothing(
    disk: Directory, autojump_clock: trio.testing.MockClock, kv_cache: str | bool
) -> None:
    async with cached(disk.top, seconds_per_step=STEP) as s:
        with trio.move_on_after(5 * STEP) as scope:
            await Talk(s.model, kv_cache).say("Hello")
        assert scope.cancelled_caught
        assert disk.files() == {}
        assert disk.folders() == []
        s.assert_idle()


async def test_K3_a_consumer_that_leaves_ends_in_a_release(disk: Directory) -> None:
    async with cached(disk.top) as s:
        _, before = await _committed(s, disk)
        async with completion.stream(s.model, "Hello world", kv_cache="x", max_tokens=50, temperature=0.0) as run:
            async for _ in run:
                break
        assert run.state == "cancelled"
        assert run.stats.cache is not None
        assert run.stats.cache.ended == "release"
        assert disk.files() == before
        s.assert_idle()


async def test_K3_an_answer_without_tokens_ends_in_a_release(disk: Directory) -> None:
    nothing: Callable[[tuple[int, ...]], Any] = lambda prompt: ()  # noqa: E731 - a script, not a function of ours
    for kv_cache in ("x", True):
        async with cached(disk.top, script=nothing) as s:
            answer = await Talk(s.model, kv_cache).say("Hello")
            assert (answer.tokens, answer.stop_reason) == ((), "eos")
            assert (report(answer).ended, report(answer).reason) == ("rollback", "the answer has no tokens")
            assert disk.files() == {}
    async with cached(disk.top) as s:
        _, before = await _committed(s, disk)
        s.decoder._model = attrs.evolve(s.decoder._model, script=nothing)
        answer = await Talk(s.model, "x").say("Hello")
        assert (answer.tokens, report(answer).ended) == ((), "release")
        assert disk.files() == before


async def test_K3_a_turn_that_fills_the_window_is_committed_and_the_next_is_refused_before_it_arrives(
    disk: Directory,
) -> None:
    async with cached(disk.top, context_size=90) as s:
        talk = Talk(s.model, "x")
        answer = await talk.say("Hello", max_tokens=None)
        assert (answer.stop_reason, report(answer).ended) == ("length", "commit")
        assert answer.stats.prompt_tokens + len(answer.tokens) == s.model.window
        before = disk.files()
        with pytest.raises(ContextOverflowError):
            await talk.say("One more turn, which is one too many for so small a window")
        assert disk.files() == before
        s.assert_idle()


async def test_a_run_that_is_kept_keeps_no_state(disk: Directory) -> None:
    async with cached(disk.top) as s:
        await _committed(s, disk)
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
        async with completion.stream(s.model, messages, kv_cache="x", **GREEDY) as run:
            assert report(await run.result()).miss is None
        gc.collect()
        left = [thing for thing in gc.get_objects() if type(thing) is laneway.SavedState]
        assert not left
        assert run.state == "completed"


async def test_K3_a_failed_step_ends_in_a_release(disk: Directory) -> None:
    async with cached(disk.top) as s:
        talk, before = await _committed(s, disk)
        s.decoder.fail_at[s.decoder.statistics().steps + 4] = DecodeError("boom")
        with pytest.raises(DecodeError, match="boom"):
            async with completion.stream(s.model, "Hello world", kv_cache="x", max_tokens=50, temperature=0.0) as run:
                await run.result()
        assert run.stats.cache is not None
        assert run.stats.cache.ended == "release"
        assert "boom" in str(run.stats.cache.reason)
        assert disk.files() == before
        answer = await talk.say("and on")
        assert answer.tokens == cold(s, talk.messages)


async def test_K3_a_state_that_cannot_be_copied_ends_in_a_release_and_the_answer_is_good(disk: Directory) -> None:
    async with cached(disk.top) as s:
        talk, before = await _committed(s, disk)
        s.decoder.fail_save[s.decoder.statistics().saves + 1] = DecodeError("no room")
        answer = await talk.say("and on")
        assert answer.tokens == cold(s, talk.messages)
        assert (report(answer).ended, report(answer).reason) == (
            "release",
            "the state of the sequence could not be kept",
        )
        assert disk.files() == before


@pytest.mark.parametrize("held_by", ["this engine", "another process"])
async def test_K3_a_move_to_a_history_in_use_ends_in_a_release(disk: Directory, held_by: str) -> None:
    async with cached(disk.top, 2) as s:
        talk, before = await _committed(s, disk, True)
        opening = list(talk.messages)
        await talk.say("and on")
        (longer,) = disk.files()
        for name, data in before.items():
            (disk.kv / name).write_bytes(data)
        (disk.kv / longer).unlink()
        again = Talk(s.model, True, opening)
        if held_by == "this engine":
            ticket = s.model.lanes.arrive("completion", keys=[("kv-cache", str((disk.kv / longer).resolve()))])
            answer = await again.say("and on")
            s.model.lanes.leave(ticket)
        else:
            with disk.held((disk.kv / longer).resolve()):
                answer = await again.say("and on")
        assert answer.tokens == cold(s, again.messages)
        assert answer.stats.cached_tokens > 20
        assert report(answer).ended == "release"
        assert "longer history" in str(report(answer).reason)
        assert disk.files() == before
        assert report(await Talk(s.model, True, opening).say("and on")).ended == "commit"
        s.assert_idle()


# K4: what may be wrong with a file.


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _foreign(path: Path) -> None:
    path.write_bytes(b"GIF89a" + bytes(1000))


def _vanish(path: Path) -> None:
    path.unlink()


def _swap_for_directory(path: Path) -> None:
    path.unlink()
    (path / "inside").mkdir(parents=True)


def _swap_for_link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.with_name("nowhere"))


@pytest.mark.parametrize("harm", [_cut, _flip, _empty, _foreign, _vanish])
async def test_K4_a_damaged_file_is_a_clean_miss_and_the_turn_mends_it(
    disk: Directory, harm: Callable[[Path], None]
) -> None:
    async with cached(disk.top) as s:
        talk, _ = await _committed(s, disk)
        harm(disk.file("x"))
        answer = await talk.say("and on")
        assert answer.tokens == cold(s, talk.messages)
        assert (answer.stats.cached_tokens, report(answer).ended) == (0, "commit")
        assert report(answer).miss
        assert (await talk.say("and on")).stats.cached_tokens > 20


@pytest.mark.parametrize("harm", [_cut, _flip, _empty, _foreign, _vanish, _swap_for_directory])
async def test_K4_so_it_is_when_the_harm_is_done_while_the_turn_waits(
    disk: Directory, autojump_clock: trio.testing.MockClock, harm: Callable[[Path], None]
) -> None:
    async with cached(disk.top, seconds_per_step=STEP) as s:
        for kv_cache in ("x", True):
            talk, files = await _committed(s, disk, kv_cache)
            (name,) = [name for name in files if (kv_cache is True) == name.startswith("automatic")]
            async with completion.stream(s.model, "plain", **GREEDY) as plain, trio.open_nursery() as nursery:
                answers: list[completion.Completion] = []

                async def turn(talk: Talk = talk, answers: list[completion.Completion] = answers) -> None:
                    answers.append(await talk.say("and on"))

                nursery.start_soon(turn)
                await trio.testing.wait_all_tasks_blocked()
                assert len(s.lane.waiting) == 1
                harm(disk.kv / name)
                await plain.result()
            (answer,) = answers
            assert answer.tokens == cold(s, talk.messages)
            assert answer.stats.cached_tokens == 0
            assert report(answer).miss
            if kv_cache == "x" and harm is _swap_for_directory:
                assert report(answer).ended == "rollback"
                assert report(answer).reason
            else:
                assert report(answer).ended == "commit"
        s.assert_idle()


async def test_K4_a_directory_in_the_files_place_is_left_alone(disk: Directory) -> None:
    async with cached(disk.top) as s:
        (disk.file("x") / "inside").mkdir(parents=True)
        answer = await Talk(s.model, "x").say("Hello")
        assert (report(answer).ended, answer.stats.generated_tokens) == ("rollback", 12)
        assert report(answer).reason
        assert (disk.file("x") / "inside").is_dir()


async def _of_another_model(decoder: ScriptedDecoder, folder: str | None) -> bytes:
    return bytes(32)


async def test_K4_a_file_of_another_model_is_a_miss(disk: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    async with cached(disk.top) as s:
        talk, _ = await _committed(s, disk)
        monkeypatch.setattr(type(s.decoder), "state_fingerprint", _of_another_model)
        answer = await talk.say("and on")
        assert answer.tokens == cold(s, talk.messages)
        assert "other settings" in str(report(answer).miss)
        assert answer.stats.cached_tokens == 0


async def test_K4_a_state_that_the_model_refuses_is_a_miss(disk: Directory) -> None:
    async with cached(disk.top) as s:
        talk, _ = await _committed(s, disk)
        s.decoder.fail_load[s.decoder.statistics().loads + 1] = DecodeError("does not fit")
        answer = await talk.say("and on")
        assert answer.tokens == cold(s, talk.messages)
        assert (answer.stats.cached_tokens, report(answer).ended) == (0, "commit")


async def test_K4_another_conversation_under_the_key_begins_anew(disk: Directory) -> None:
    async with cached(disk.top) as s:
        await completion.complete(s.model, "a" * 120, kv_cache="x", **GREEDY)
        answer = await completion.complete(s.model, "b" * 120, kv_cache="x", **GREEDY)
        assert answer.tokens == s.expected("b" * 120, 12, temperature=0.0).tokens
        assert "begins with 1 of its" in str(report(answer).miss)
        assert report(answer).ended == "commit"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("kv_cache", ["x", True])
async def test_K4_a_disk_that_fails_costs_the_cache_and_not_the_answer(
    disk: Directory, monkeypatch: pytest.MonkeyPatch, number: int, kv_cache: str | bool
) -> None:
    async with cached(disk.top) as s:
        talk, before = await _committed(s, disk, kv_cache)

        def fail(*args: object) -> None:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            answer = await talk.say("and on")
            fresh = await Talk(s.model, "fresh" if kv_cache == "x" else True).say("a first turn")
        assert answer.tokens == cold(s, talk.messages)
        assert answer.stats.cached_tokens > 20
        assert report(answer).ended == "release"
        assert report(answer).reason == _files.explain(OSError(number, os.strerror(number)))
        assert report(fresh).ended == "rollback"
        assert disk.files() == before
        assert disk.folders() == []
        s.assert_idle()


async def test_K4_a_directory_that_cannot_be_made_costs_the_cache_and_not_the_answer(disk: Directory) -> None:
    disk.kv.write_text("a file, where the directory should be")
    async with cached(disk.top) as s:
        for kv_cache in ("x", True):
            answer = await Talk(s.model, kv_cache).say("Hello")
            assert answer.stats.generated_tokens == 12
            assert report(answer).ended == "rollback"
            assert report(answer).reason
        with pytest.raises(InvalidRequestError, match="is no directory; name a directory"):
            await s.engine.kv_caches.list()
    assert disk.kv.read_text() == "a file, where the directory should be"


@pytest.mark.parametrize("kv_cache", ["x", "users/7/x", True])
@pytest.mark.parametrize("what", ["all keys", "the key", "the locks"])
async def test_K4_a_directory_that_may_not_be_looked_into_costs_the_cache_and_not_the_answer(
    disk: Directory, kv_cache: str | bool, what: str
) -> None:
    async with cached(disk.top) as s:
        talk, before = await _committed(s, disk, kv_cache)
        (name,) = before
        path = (disk.kv / name).resolve()
        base = disk.kv.resolve() / Path(name).parts[0]
        folder = {"all keys": base, "the key": path.parent, "the locks": disk.kv.resolve() / "locks"}[what]
        with forbidden(folder):
            answer = await talk.say("and on")
        assert answer.tokens == cold(s, talk.messages)
        assert answer.stats.cached_tokens == 0
        # The file of a history that cannot be looked for is not known to be there.
        ended = "rollback" if kv_cache is True and what != "the locks" else "release"
        assert (report(answer).ended, "ermission denied" in str(report(answer).reason)) == (ended, True)
        assert disk.files() == before
        s.assert_idle()
        assert (await talk.say("and on")).tokens == cold(s, talk.messages)


@pytest.mark.parametrize("kv_cache", ["x", True])
async def test_a_foreign_file_beside_it_is_not_in_the_way(disk: Directory, kv_cache: str | bool) -> None:
    async with cached(disk.top) as s:
        talk, (name,) = await _committed(s, disk, kv_cache)
        foreign = [(disk.kv / name).with_name(other) for other in (".tmp", "notes.tmp")]
        for file in foreign:
            file.write_bytes(b"mine")
        answer = await talk.say("and on")
        assert answer.tokens == cold(s, talk.messages)
        assert report(answer).ended == "commit"
        assert all(file.read_bytes() == b"mine" for file in foreign)


async def test_a_copy_under_another_key_becomes_that_keys_own(disk: Directory) -> None:
    async with cached(disk.top) as s:
        talk, _ = await _committed(s, disk, "x")
        disk.file("y").parent.mkdir()
        disk.file("y").write_bytes(disk.file("x").read_bytes())
        branch = Talk(s.model, "y", list(talk.messages))
        answer = await branch.say("another way")
        assert answer.tokens == cold(s, branch.messages)
        assert answer.stats.cached_tokens > 20
        assert [_files.read_head(disk.file(key)).facts.key for key in ("x", "y")] == ["x", "y"]


async def test_a_turn_commits_once(disk: Directory) -> None:
    async with cached(disk.top) as s:
        plan = await s.engine.kv_caches.plan(s.model, key="x")
        assert plan.gate is not None
        assert plan.gate.enter()
        turn = laneway.CacheTurn(plan, [1, 2, 3], lambda key: True)
        async with turn:
            await turn.commit(laneway.SavedState((1, 2), b"state"))
            with pytest.raises(RuntimeError, match="commits once"):
                await turn.commit(laneway.SavedState((1, 2), b"state"))
        assert turn.report is not None
        assert turn.report.ended == "commit"
        async with laneway.CacheTurn(plan, [1, 2, 3], lambda key: True) as turn:
            assert turn.state == laneway.SavedState((1, 2), b"state", verified=True)
        assert turn.report is not None
        assert (turn.report.ended, turn.report.reason) == ("release", "it ended without a commit")
        plan.gate.leave()
        async with laneway.CacheTurn(plan, [1, 2, 3], lambda key: True) as turn:
            assert turn.state is None
            await turn.commit(laneway.SavedState((1, 2), b"state"))
        assert turn.report is not None
        assert (turn.report.ended, turn.report.reason) == (
            "release",
            "the file cannot be locked: nobody has taken the lock",
        )
