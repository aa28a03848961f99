"""Listing, deleting, pruning.  Rules K5 and K6."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from laneway import CacheDeletion, CacheKeyError, CacheRetention, KVCaches
from laneway._kvcache import _files
from laneway._kvcache._format import Facts
from laneway._kvcache._history import history_of, nearest
from laneway._kvcache._keys import path_of
from laneway._kvcache._retention import Candidate, evict
from laneway_plugins import completion
from tests.kvcache.kit import GREEDY, STEP, Directory, Talk, cached, forbidden, report, threads_at_once
from tests.kvcache.test_format import nothing

PRINT = bytes(32)


def put(caches: KVCaches, key: str, model: str = "m", *, size: int = 1000, age: float = 0.0) -> Path:
    """A named cache; an automatic one for the empty key, whose history is the model's name."""
    digests: tuple[str, ...] = ()
    if key:
        path = caches.root() / path_of(key, model)
    else:
        history = history_of(PRINT, [("user", model), ("assistant", "yes")])
        digests, path = history.digests, caches.root() / history.path
    facts = Facts(key=key, model=model, fingerprint=PRINT, tokens=(1, 2, 3), digests=digests)
    _files.write(path, facts, bytes(size), nothing)
    when = time.time() - age
    os.utime(path, (when, when))
    return path


@pytest.fixture
def caches(tmp_path: Path) -> KVCaches:
    return KVCaches(tmp_path)


def names(done: CacheDeletion) -> list[tuple[str | None, str]]:
    return [(entry.key, entry.model) for entry in done.deleted]


async def keys(caches: KVCaches) -> list[tuple[str | None, str]]:
    return [(entry.key, entry.model) for entry in await caches.list()]


# Listing.


async def test_the_listing_shows_key_model_tokens_bytes_and_age(caches: KVCaches) -> None:
    assert await caches.list() == ()
    put(caches, "Users/7", "m")
    put(caches, "chat", "big", age=100)
    put(caches, "", "auto", age=50)
    put(caches, "", "auto 2", age=20)
    damaged = put(caches, "chat", "m")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    (caches.directory / "named/chat/notes.txt").write_text("mine")
    entries = await caches.list()
    assert [(entry.key, entry.model, entry.tokens) for entry in entries] == [
        ("Users/7", "m", 3),
        ("chat", "", 0),
        ("chat", "big", 3),
        (None, "auto 2", 3),
        (None, "auto", 3),
    ]
    assert [entry.automatic for entry in entries] == [False, False, False, True, True]
    assert all(entry.bytes == entry.path.stat().st_size for entry in entries)
    assert [round(entry.age, -1) for entry in entries] == [0, 0, 100, 20, 50]
    assert [bool(entry.damage) for entry in entries] == [False, True, False, False, False]


# Deletion.


async def test_a_copy_of_a_file_is_listed_by_where_it_lies(caches: KVCaches) -> None:
    path = put(caches, "a")
    for key in ("b", "c/d"):
        copy = caches.root() / path_of(key, "m")
        copy.parent.mkdir(parents=True)
        copy.write_bytes(path.read_bytes())
    assert await keys(caches) == [("a", "m"), ("b", "m"), ("c/d", "m")]
    (entry,) = (await caches.delete("b")).deleted
    assert entry.key == "b"
    assert await keys(caches) == [("a", "m"), ("c/d", "m")]


async def test_K5_a_key_is_deleted_on_all_models_or_on_one_and_nested_keys_stay(caches: KVCaches) -> None:
    for key, model in (("a", "m"), ("a", "n"), ("a/b", "m"), ("ab", "m"), ("", "m")):
        put(caches, key, model)
    everything = await keys(caches)
    assert names(await caches.delete("a", model="n")) == [("a", "n")]
    assert names(await caches.delete("a")) == [("a", "m")]
    assert names(await caches.delete("a")) == []
    assert await keys(caches) == [entry for entry in everything if entry[0] != "a"]
    assert names(await caches.delete("a/b")) == [("a/b", "m")]
    assert sorted(os.listdir(caches.directory / "named")) == ["ab"]


async def test_K5_automatic_ones_and_everything_are_said_explicitly(caches: KVCaches) -> None:
    for key, model in (("a", "m"), ("a/b", "m"), ("", "m"), ("", "n")):
        put(caches, key, model)
    (caches.directory / "named/a/notes.txt").write_text("mine")
    done = await caches.delete_automatic()
    assert sorted(names(done)) == [(None, "m"), (None, "n")]
    assert done.bytes == sum(entry.bytes for entry in done.deleted) > 2000
    assert await keys(caches) == [("a", "m"), ("a/b", "m")]
    assert names(await caches.delete_everything()) == [("a", "m"), ("a/b", "m")]
    assert await caches.list() == ()
    assert (caches.directory / "named/a/notes.txt").read_text() == "mine"
    assert caches.directory.is_dir()


@pytest.mark.parametrize("key", ["", ".", "..", "../x", "a/..", "/", "/a", "a/", "C:", "a\\b", "a\0", "*/..", "con"])
async def test_K5_a_key_that_means_more_than_itself_deletes_nothing(caches: KVCaches, key: str) -> None:
    put(caches, "a")
    put(caches, "")
    before = await keys(caches)
    for model in (None, "m"):
        with pytest.raises(CacheKeyError):
            await caches.delete(key, model=model)
    assert await keys(caches) == before


@pytest.mark.parametrize("model", ["", " ", ".", "..", "../m", "/", "m/..", "a\\..", "m\0"])
async def test_K5_a_model_that_would_widen_a_deletion_to_the_whole_key_deletes_nothing(
    caches: KVCaches, model: str
) -> None:
    for key in ("a", "a/b"):
        put(caches, key)
        with pytest.raises(CacheKeyError):
            await caches.delete(key, model=model)
    assert len(await caches.list()) == 2


@pytest.mark.parametrize("pattern", ["*", "a*", "?", "%", "a%2fb"])
async def test_K5_no_key_is_a_pattern(caches: KVCaches, pattern: str) -> None:
    put(caches, "a")
    put(caches, "a/b")
    assert names(await caches.delete(pattern)) == []
    assert len(await caches.list()) == 2


async def test_K5_a_key_that_differs_in_case_only_deletes_nothing(caches: KVCaches) -> None:
    put(caches, "users/Anna")
    for model in (None, "m"):
        with pytest.raises(CacheKeyError, match="differs from the key 'users/Anna'"):
            await caches.delete("users/anna", model=model)
    assert await keys(caches) == [("users/Anna", "m")]


@pytest.mark.parametrize("target", [".", "..", "../automatic", "../..", "/"])
async def test_K5_a_link_that_leads_out_deletes_nothing(caches: KVCaches, tmp_path: Path, target: str) -> None:
    put(caches, "a")
    put(caches, "")
    (tmp_path / "=m.kv").write_text("precious")
    (caches.directory / "named/alias").symlink_to(target)
    for model in (None, "m"):
        with pytest.raises(CacheKeyError, match="leads out"):
            await caches.delete("alias", model=model)
    assert len(await caches.list()) == 2
    assert (tmp_path / "=m.kv").exists()


async def test_K5_what_is_in_use_is_not_deleted_under_its_user(caches: KVCaches, tmp_path: Path) -> None:
    disk = Directory(tmp_path)
    path, automatic = put(caches, "a"), put(caches, "", age=100)
    put(caches, "b")
    with disk.held(path), disk.held(automatic):
        for done in (
            await caches.delete("a"),
            await caches.delete("a", model="m"),
            await caches.delete_automatic(),
            await caches.prune(CacheRetention(max_bytes=0)),
        ):
            assert done.deleted == ()
            assert len(done.in_use) == 1
        done = await caches.delete_everything()
        assert names(done) == [("b", "m")]
        assert sorted((entry.key or "", entry.model) for entry in done.in_use) == [("", "m"), ("a", "m")]
    assert len((await caches.delete_everything()).deleted) == 2
    assert disk.files() == {}


async def test_K5_a_turn_keeps_its_file_from_being_deleted(
    tmp_path: Path, autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads_at_once(monkeypatch)
    async with cached(tmp_path, seconds_per_step=STEP) as s:
        for kv_cache in ("x", True):
            talk = Talk(s.model, kv_cache)
            await talk.say("Hello")
            messages = [*talk.messages, {"role": "user", "content": "on"}]
            async with completion.stream(s.model, messages, kv_cache=kv_cache, **GREEDY) as run:
                await run.admitted()
                await trio.sleep(3 * STEP)
                done = await s.engine.kv_caches.delete_everything()
                assert (len(done.deleted), len(done.in_use)) == (0, 1)
                answer = await run.result()
            assert answer.stats.cached_tokens > 10
            assert report(answer).ended == "commit"
            assert len((await s.engine.kv_caches.delete_everything()).deleted) == 1
        s.assert_idle()


async def test_a_directory_that_may_not_be_written_to_is_an_error_of_the_system(
    caches: KVCaches, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(caches, "a")

    def fail(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied", "x")

    monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(PermissionError):
        await caches.delete("a")
    assert len(await caches.list()) == 1


@pytest.mark.parametrize("what", ["key", "key and model", "automatic", "everything"])
async def test_K5_what_cannot_be_looked_for_is_not_said_to_be_gone(caches: KVCaches, what: str) -> None:
    path = put(caches, "" if what == "automatic" else "a")
    with forbidden(path.parent), pytest.raises(PermissionError):
        if what == "automatic":
            await caches.delete_automatic()
        elif what == "everything":
            await caches.delete_everything()
        else:
            await caches.delete("a", model=None if what == "key" else "m")
    assert len(await caches.list()) == 1
    with forbidden(path.parent):
        assert await caches.list() == ()


# Retention.


@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(0, 50), st.booleans()), max_size=12),
    st.none() | st.integers(0, 400),
    st.none() | st.integers(0, 50),
)
def test_K6_the_longest_unused_go_until_the_rest_is_within_bounds(
    drawn: list[tuple[int, int, bool]], max_bytes: int | None, max_idle: int | None
) -> None:
    files = [Candidate(str(number), size, used) for number, (size, used, _) in enumerate(drawn)]
    in_use = {str(number) for number, (_, _, busy) in enumerate(drawn) if busy}
    now = 50.0
    retention = CacheRetention(max_bytes=max_bytes, max_idle=max_idle)
    gone = evict(files, retention, now, lambda file: file.name not in in_use)
    left = [file for file in files if file not in gone]
    assert not any(file.name in in_use for file in gone)
    idle = [file for file in left if file.name not in in_use]
    if max_idle is not None:
        assert all(now - file.used_at <= max_idle for file in idle)
    if max_bytes is not None and idle:
        assert sum(file.size for file in left) <= max_bytes
    for file in gone:
        expired = max_idle is not None and now - file.used_at > max_idle
        younger = [other for other in left if other.name not in in_use]
        assert expired or all(file.used_at <= other.used_at for other in younger)
    # None went in vain: the last one to go was over the bound.
    for_room = [file for file in gone if max_idle is None or now - file.used_at <= max_idle]
    if for_room:
        assert max_bytes is not None
        assert sum(file.size for file in left) + for_room[-1].size > max_bytes


@pytest.mark.parametrize(
    "bounds",
    [{"max_bytes": -1}, {"max_idle": -0.5}, {"max_idle": float("nan")}, {"max_bytes": "1"}, {"max_bytes": -(10**5000)}],
)
def test_K6_bounds_are_numbers_of_at_least_0(bounds: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="is a number of at least 0, or None"):
        CacheRetention(**bounds)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [None, 5, {"max_bytes": 5}])
def test_K6_bounds_are_checked_when_they_are_set(caches: KVCaches, wrong: Any) -> None:
    with pytest.raises(TypeError, match="retention is a CacheRetention, not"):
        caches.retention = wrong
    assert caches.retention == CacheRetention()
    if wrong is not None:
        with pytest.raises(TypeError, match="retention is a CacheRetention, not"):
            KVCaches(caches.directory, wrong)


@pytest.mark.parametrize("wrong", [0, 5, {"max_bytes": 5}])
async def test_K6_prune_takes_no_other_bounds(caches: KVCaches, wrong: Any) -> None:
    put(caches, "", "m")
    with pytest.raises(TypeError, match="retention is a CacheRetention, not"):
        await caches.prune(wrong)
    assert len(await caches.list()) == 1


async def test_K6_bounds_may_be_larger_than_any_float(caches: KVCaches) -> None:
    put(caches, "", "m", age=10**9)
    await caches.prune(CacheRetention(max_bytes=10**400, max_idle=10**400))
    assert len(await caches.list()) == 1


async def test_K6_only_automatic_caches_are_bounded(caches: KVCaches) -> None:
    put(caches, "kept", size=10_000, age=10**9)
    put(caches, "", "old", age=100)
    put(caches, "", "new", age=10)
    assert names(await caches.prune()) == []
    assert names(await caches.prune(CacheRetention(max_idle=50))) == [(None, "old")]
    assert names(await caches.prune(CacheRetention(max_bytes=500, max_idle=None))) == [(None, "new")]
    assert await keys(caches) == [("kept", "m")]


async def test_K6_a_prune_removes_what_killed_processes_left_but_not_what_is_being_written(
    caches: KVCaches, tmp_path: Path
) -> None:
    disk = Directory(tmp_path)
    path = put(caches, "a")
    other = caches.directory / "automatic/0123/4567.kv"
    other.parent.mkdir(parents=True)
    left = [path.with_name(f"{path.name}.00.tmp"), other.with_name(f"{other.name}.11.tmp")]
    for file in left:
        file.write_bytes(b"half")
    with disk.held(path):
        await caches.prune()
    assert [file.exists() for file in left] == [True, False]
    await caches.prune()
    assert list(disk.files()) == ["named/a/=m.kv"]
    assert disk.folders() == []


async def test_a_foreign_file_is_neither_listed_nor_deleted_nor_in_the_way(caches: KVCaches, tmp_path: Path) -> None:
    path = put(caches, "a")
    foreign = [path.with_name(name) for name in (".tmp", "notes.tmp", "=m.kv.bak.tmp")]
    for file in foreign:
        file.write_bytes(b"mine")
    assert await keys(caches) == [("a", "m")]
    await caches.prune()
    assert names(await caches.delete_everything()) == [("a", "m")]
    assert all(file.read_bytes() == b"mine" for file in foreign)


async def test_K6_a_commit_brings_automatic_caches_within_their_bounds(
    tmp_path: Path, autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads_at_once(monkeypatch)
    async with cached(tmp_path) as s:
        caches = s.engine.kv_caches
        talks = [Talk(s.model, True, [{"role": "system", "content": str(number)}]) for number in range(4)]
        for talk in talks:
            await talk.say("Hello")
        await Talk(s.model, "named").say("Hello")
        sizes = [entry.bytes for entry in await caches.list() if entry.automatic]
        caches.retention = CacheRetention(max_bytes=sum(sizes) - 1)
        for age, entry in zip(
            (40, 10, 30, 20), sorted(await caches.list(), key=lambda entry: entry.path), strict=False
        ):
            os.utime(entry.path, (time.time() - age, time.time() - age))
        oldest = max((entry for entry in await caches.list() if entry.automatic), key=lambda entry: entry.age)
        answer = await Talk(s.model, True).say("Hello")
        assert report(answer).ended == "commit"
        left = await caches.list()
        assert oldest.path not in [entry.path for entry in left]
        assert sum(entry.bytes for entry in left if entry.automatic) <= caches.retention.max_bytes  # type: ignore[operator]
        assert left[0].key == "named"


async def test_K6_use_keeps_a_cache_young(
    tmp_path: Path, autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads_at_once(monkeypatch)
    async with cached(tmp_path, seconds_per_step=STEP) as s:
        talk = Talk(s.model, True)
        await talk.say("Hello")
        (entry,) = await s.engine.kv_caches.list()
        os.utime(entry.path, (0, 0))
        with trio.move_on_after(5 * STEP):
            await talk.say("a turn that is cancelled")
        (entry,) = await s.engine.kv_caches.list()
        assert entry.age < 1000


# Histories.

messages = st.lists(
    st.tuples(st.sampled_from(["system", "user", "assistant"]), st.text(max_size=4)), min_size=1, max_size=6
)


@given(messages, messages)
def test_a_file_is_named_by_all_that_was_said_and_nothing_else(
    one: list[tuple[str, str]], two: list[tuple[str, str]]
) -> None:
    ours, theirs = history_of(PRINT, one), history_of(PRINT, two)
    assert (ours.path == theirs.path) == (one == two)
    assert history_of(b"other" * 6 + b"42", one).path != ours.path
    assert ours.longer("assistant", "x") == history_of(PRINT, [*one, ("assistant", "x")])
    shared = 0
    while shared < min(len(one), len(two)) and one[shared] == two[shared]:
        shared += 1
    assert ours.shared(theirs.digests) == shared


def test_messages_do_not_run_together() -> None:
    paths = {
        history_of(PRINT, messages).path
        for messages in (
            [("user", "ab"), ("assistant", "c")],
            [("user", "a"), ("assistant", "bc")],
            [("user", "ab"), ("assistan", "tc")],
            [("user", "abassistantc")],
        )
    }
    assert len(paths) == 4
    with pytest.raises(ValueError, match="at least one message"):
        history_of(PRINT, [])


def test_all_histories_with_one_opening_lie_together() -> None:
    opening = [("system", "Be brief."), ("user", "Hello")]
    base = history_of(PRINT, opening)
    for more in ([], [("assistant", "x")], [("assistant", "y"), ("user", "z")]):
        assert history_of(PRINT, [*opening, *more]).folder == base.folder
    assert history_of(PRINT, [("system", "Be long."), ("user", "Hello")]).folder != base.folder
    assert history_of(PRINT, [("system", "Be brief.")]).folder != base.folder


@given(messages, st.lists(messages, max_size=5))
def test_the_nearest_history_shares_the_most(
    wanted: list[tuple[str, str]], stored: list[list[tuple[str, str]]]
) -> None:
    history = history_of(PRINT, wanted)
    others: Mapping[int, Sequence[str]] = {
        number: history_of(PRINT, each).digests for number, each in enumerate(stored)
    }
    answer = nearest(history, others)
    found, goes_on = answer
    counts = {number: history.shared(digests) for number, digests in others.items()}
    if found is None:
        assert not any(counts.values())
        return
    assert counts[found] == max(counts.values())
    whole = [number for number, digests in others.items() if counts[number] == counts[found] == len(digests)]
    assert goes_on == bool(whole)
    assert not whole or found in whole
