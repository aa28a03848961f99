"""Digests of weights: which bytes they cover, when they are made anew, and what a changed file means."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio
import trio.testing

from laneway.decoder import ModelLoadError
from laneway_native import _weights
from laneway_native._weights import Stamp, WeightFile, file_digest, file_digest_here, recall, remember, stamp_of

SIZE = 1000
PIECE = 300


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_weights, "PIECE", PIECE)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where the pieces began that were read."""
    begins: list[int] = []
    real = _weights.digest_piece

    def counted(path: str, stamp: Stamp, begin: int) -> bytes:
        begins.append(begin)
        return real(path, stamp, begin)

    monkeypatch.setattr(_weights, "digest_piece", counted)
    return begins


def at_rest(monkeypatch: pytest.MonkeyPatch, rests: bool) -> None:
    """Whether files count as unchanged for long enough; those of a test are all new."""
    monkeypatch.setattr(_weights, "AT_REST", -1e9 if rests else 1e9)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(content())
    return path


def content(*changed: int) -> bytes:
    raw = bytearray(at * 7 % 251 for at in range(SIZE))
    for at in changed:
        raw[at] ^= 1
    return bytes(raw)


def loaded(path: Path, *, mapped: bool = True) -> WeightFile:
    file = WeightFile(path, mapped=mapped)
    file.confirm()
    return file


def fill(path: Path, raw: bytes) -> None:
    path.write_bytes(raw)


def remove(path: Path) -> None:
    path.unlink()


def write_over(path: Path, raw: bytes) -> None:
    """In place, with times that differ for certain."""
    with path.open("r+b") as file:
        file.write(raw)
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1_000_000))


async def test_K4_a_digest_covers_every_byte(path: Path, tmp_path: Path) -> None:
    digests = [await loaded(path).digest()]
    for at in (0, 1, PIECE - 1, PIECE, SIZE // 2, SIZE - 1):
        fill(path, content(at))
        digests.append(await loaded(path).digest())
    for raw in (content()[:-1], content() + b"\0", content()[PIECE:] + content()[:PIECE]):
        fill(path, raw)
        digests.append(await loaded(path).digest())
    assert len(set(digests)) == len(digests)
    copy = tmp_path / "copy"
    copy.write_bytes(content())
    assert await loaded(copy).digest() == digests[0]


async def test_a_digest_is_made_once(path: Path, read: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    at_rest(monkeypatch, True)
    file = loaded(path)
    found: list[bytes] = []

    async def ask() -> None:
        found.append(await file.digest())

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(ask)
    found.append(await file.digest())
    assert len(set(found)) == 1
    assert read == [0, 300, 600, 900]


async def test_a_digest_is_remembered_in_its_folder(
    path: Path, read: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_rest(monkeypatch, True)
    folder = tmp_path / "a" / "digests"
    digest = await loaded(path).digest(str(folder))
    assert len(read) == 4
    assert await loaded(path).digest(str(folder)) == digest
    assert len(read) == 4
    # Only for these times: the same bytes are read again, and another record takes the place of the old one.
    os.utime(path)
    assert await loaded(path).digest(str(folder)) == digest
    assert len(read) == 8
    assert len(list(folder.iterdir())) == 1
    # A copy is another file.
    copy = tmp_path / "copy"
    copy.write_bytes(content())
    assert await loaded(copy).digest(str(folder)) == digest
    assert len(read) == 12
    assert len(list(folder.iterdir())) == 2


async def test_a_folder_that_cannot_be_written_costs_time_only(
    path: Path, read: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_rest(monkeypatch, True)
    folder = tmp_path / "file"
    folder.write_text("")
    assert await loaded(path).digest(str(folder)) == await loaded(path).digest(None)
    assert len(read) == 8


@pytest.mark.parametrize(
    "spoil",
    [
        lambda record: b"",
        lambda record: b"[]",
        lambda record: b"[" * 100_000,
        lambda record: b"\xff",
        lambda record: json.dumps(record)[:-10].encode(),
        lambda record: json.dumps({**record, "sha256": record["sha256"][2:]}).encode(),
        lambda record: json.dumps({**record, "sha256": 5}).encode(),
        lambda record: json.dumps({**record, "changed": record["changed"] + 1}).encode(),
        lambda record: json.dumps({**record, "size": str(record["size"])}).encode(),
        lambda record: json.dumps({key: record[key] for key in record if key != "modified"}).encode(),
    ],
)
def test_a_record_is_believed_whole_or_not_at_all(path: Path, tmp_path: Path, spoil: Callable[..., bytes]) -> None:
    stamp = stamp_of(str(path))
    assert stamp is not None
    folder = tmp_path / "digests"
    remember(str(folder), stamp, b"d" * 32)
    assert recall(str(folder), stamp) == b"d" * 32
    (record,) = folder.iterdir()
    record.write_bytes(spoil(json.loads(record.read_bytes())))
    assert recall(str(folder), stamp) is None


def test_records_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_weights, "MOST_RECORDS", 3)
    stamps = [Stamp(1, inode, 10, 5, 6) for inode in range(5)]
    for number, stamp in enumerate(stamps):
        remember(str(tmp_path), stamp, bytes(32))
        for record in tmp_path.glob(f"1-{number:x}.json"):
            os.utime(record, (number, number))
    assert [recall(str(tmp_path), stamp) is not None for stamp in stamps] == [False, False, True, True, True]


async def test_a_file_that_changed_just_now_is_read_again(
    path: Path, read: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_rest(monkeypatch, False)
    folder = tmp_path / "digests"
    file = loaded(path)
    digest = await file.digest(str(folder))
    assert await file.digest(str(folder)) == digest
    assert len(read) == 8
    assert not folder.exists()
    at_rest(monkeypatch, True)
    for _ in range(2):
        assert await file.digest(str(folder)) == digest
    assert len(read) == 12
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("rests", [True, False])
async def test_a_change_within_the_clocks_granularity_is_seen_if_the_file_was_new(
    path: Path, monkeypatch: pytest.MonkeyPatch, rests: bool
) -> None:
    """Digests of new files are not remembered for this reason; a file at rest is not read again."""
    at_rest(monkeypatch, rests)
    stamp = stamp_of(str(path))
    monkeypatch.setattr(Stamp, "of", classmethod(lambda *_: stamp))
    file = loaded(path)
    digest = await file.digest()
    fill(path, content(SIZE // 2))
    later = await file.digest()
    assert (later == digest) == rests
    assert await file.digest() == later


def test_a_stamp_that_stood_here_for_a_while_is_at_rest_by_any_clock(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file may lie on a machine whose clock is ahead."""
    now = 1000.0
    clock = SimpleNamespace(monotonic=lambda: now, time_ns=lambda: path.stat().st_ctime_ns - 3600 * 10**9)
    monkeypatch.setattr(_weights, "time", clock)
    file, stamp = loaded(path), stamp_of(str(path))
    assert stamp is not None
    now += _weights.AT_REST
    assert not file._is_at_rest(stamp)
    now += 0.1
    assert file._is_at_rest(stamp)


# --- files that change while they are loaded --------------------------------------------------------------------------


@pytest.mark.parametrize("mapped", [True, False])
async def test_a_file_in_its_place_does_not_change_what_was_loaded(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mapped: bool
) -> None:
    at_rest(monkeypatch, True)
    file = loaded(path, mapped=mapped)
    digest = await file.digest()
    other = tmp_path / "other"
    other.write_bytes(content(5))
    other.replace(path)
    assert await file.digest() == digest
    assert await loaded(path).digest() != digest
    remove(path)
    assert await file.digest() == digest


async def test_K4_a_mapped_file_that_is_written_over_is_other_weights(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    at_rest(monkeypatch, True)
    folder = str(tmp_path / "digests")
    file, copied = loaded(path), loaded(path, mapped=False)
    before = await file.digest(folder)
    assert await copied.digest(folder) == before
    write_over(path, content(5))
    after = await file.digest(folder)
    # Neither the old weights nor the file's: what was computed before is a mixture.
    assert after not in (before, await loaded(path).digest(folder))
    assert await file.digest(folder) == after
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "it has changed since it was loaded" in caplog.text
    write_over(path, content())
    assert await file.digest(folder) not in (before, after)
    # What was read into memory is as it was.
    assert await copied.digest(folder) == before


async def test_K4_a_file_that_changed_before_its_digest_was_made_is_unknown(path: Path, tmp_path: Path) -> None:
    file = loaded(path)
    write_over(path, content(5))
    digests = {await file.digest(), await loaded(path).digest()}
    fill(path, content())
    digests |= {await loaded(path).digest()}
    assert len(digests) == 3
    gone = loaded(path)
    remove(path)
    first = await gone.digest()
    assert first not in digests
    assert await gone.digest() == first


async def test_a_touched_file_is_read_again_and_is_the_same(
    path: Path, read: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_rest(monkeypatch, True)
    file = loaded(path)
    digest = await file.digest()
    for _ in range(2):
        write_over(path, content())
        assert await file.digest() == digest
        assert await file.digest() == digest
    assert len(read) == 12


async def test_a_record_tells_what_was_loaded_before_the_file_was_touched(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_rest(monkeypatch, True)
    folder = str(tmp_path / "digests")
    digest = await loaded(path).digest(folder)
    file = loaded(path)
    write_over(path, content())
    assert await file.digest(folder) == digest


async def test_a_file_that_changes_while_it_is_loaded_is_unknown(path: Path) -> None:
    file = WeightFile(path, mapped=True)
    write_over(path, content())
    file.confirm()
    assert await file.digest() != await loaded(path).digest()


async def test_a_file_that_changes_while_it_is_read_is_unknown(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = _weights.digest_piece

    def changing(file: str, stamp: Stamp, begin: int) -> bytes:
        if begin == 600:
            write_over(path, content(5))
        return real(file, stamp, begin)

    known = await loaded(path).digest()
    monkeypatch.setattr(_weights, "digest_piece", changing)
    digest = await loaded(path).digest()
    monkeypatch.setattr(_weights, "digest_piece", real)
    assert digest not in (known, await loaded(path).digest())


async def test_a_file_that_cannot_be_read_is_unknown_and_said_so(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: object) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(_weights, "digest_piece", failing)
    file = loaded(path)
    digest = await file.digest()
    assert await file.digest() == digest
    assert await loaded(path).digest() != digest
    assert "it cannot be read any more: Permission denied" in caplog.text


# --- beside the event loop --------------------------------------------------------------------------------------------


class Slow:
    """A disk that gives a piece when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.real = _weights.digest_piece
        self.go = threading.Semaphore(0)
        self.asked: list[int] = []
        monkeypatch.setattr(_weights, "digest_piece", self.digest_piece)

    def digest_piece(self, path: str, stamp: Stamp, begin: int) -> bytes:
        self.asked.append(begin)
        assert self.go.acquire(timeout=60), "the event loop was held up"
        return self.real(path, stamp, begin)


async def test_the_event_loop_goes_on_while_weights_are_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch)
    turns = 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(loaded(path).digest)
        for pieces in range(1, 5):
            while len(slow.asked) < pieces:
                turns += 1
                await trio.lowlevel.checkpoint()
            # The disk waits for us, so these turns pass while it is being read.
            for _ in range(50):
                turns += 1
                await trio.lowlevel.checkpoint()
            slow.go.release()
    assert turns >= 200
    assert slow.asked == [0, 300, 600, 900]


async def test_a_cancel_ends_the_wait_and_what_was_read_counts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = await loaded(path).digest()
    slow = Slow(monkeypatch)
    file = loaded(path)
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(file.digest)
            slow.go.release(2)
            while len(slow.asked) < 3:
                await trio.lowlevel.checkpoint()
            # Its third piece is still being read, and will be for as long as the disk takes.
            scope.cancel()
    assert scope.cancelled_caught
    # For the one that is left alone, and for those that are wanted now.
    slow.go.release(3)
    assert await file.digest() == expected
    assert sorted(slow.asked) == [0, 300, 600, 600, 900]


async def test_a_waiting_task_goes_on_where_a_cancelled_one_has_stopped(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await loaded(path).digest()
    slow = Slow(monkeypatch)
    file = loaded(path)
    scope = trio.CancelScope()
    found: list[bytes] = []

    async def first() -> None:
        with scope:
            await file.digest()

    async def second() -> None:
        found.append(await file.digest())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(first)
        while not slow.asked:
            await trio.lowlevel.checkpoint()
        nursery.start_soon(second)
        await trio.testing.wait_all_tasks_blocked()
        scope.cancel()
        slow.go.release(5)
    assert found == [expected]
    assert sorted(slow.asked) == [0, 0, 300, 600, 900]


async def test_the_digest_of_a_file_as_it_is(path: Path, read: list[int]) -> None:
    first = await file_digest(str(path))
    assert read == [0, 300, 600, 900]
    assert first == await loaded(path).digest()
    assert file_digest_here(str(path)) == (stamp_of(str(path)), first)
    write_over(path, content(SIZE - 1))
    assert await file_digest(str(path)) != first


async def test_no_digest_of_a_file_that_changes_or_has_gone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = _weights.digest_piece

    def changing(name: str, stamp: Stamp, begin: int) -> bytes:
        if begin == PIECE:
            write_over(path, content(0))
        return real(name, stamp, begin)

    monkeypatch.setattr(_weights, "digest_piece", changing)
    with pytest.raises(ModelLoadError, match="changed while"):
        await file_digest(str(path))
    with pytest.raises(ModelLoadError, match="changed while"):
        file_digest_here(str(path))
    remove(path)
    with pytest.raises(ModelLoadError, match="cannot be read"):
        await file_digest(str(path))
