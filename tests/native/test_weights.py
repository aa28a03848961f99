"""The digest of a model's weights: what it notices, when it is made again, and what it says of a file that changed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import trio

from laneway.decoder import InvalidRequestError
from laneway_native import Model, _weights, check_gguf, weights_digest
from laneway_native._weights import BLOCK, STRIDE, WHOLE, blocks
from tests.native.driving import decoder_of
from tests.tiny_model import tiny_model_parts, write_gguf

LONG_AGO = 1_000_000_000 * 10**9


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A model whose file was written long ago."""
    metadata, tensors = tiny_model_parts(layers=2)
    return aged(write_gguf(tmp_path / "model.gguf", metadata, tensors))


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins with no digest known."""
    monkeypatch.setattr(_weights, "_known", {})


def aged(path: Path, when: int = LONG_AGO) -> Path:
    """Give a file another time of change.  The kernel sets its other time to now, so no digest of it is kept."""
    os.utime(path, ns=(when, when))
    return path


def settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all files count as changed long ago."""
    monkeypatch.setattr(_weights, "_SETTLED_NS", -(10**18))


def digest(path: Path) -> bytes:
    return weights_digest(check_gguf(path).data)


class Reads:
    """Counts how many files were read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._feed = _weights._feed
        monkeypatch.setattr(_weights, "_feed", self.feed)

    def feed(self, *args: Any) -> None:
        self.count += 1
        self._feed(*args)


def flip(path: Path, at: int, count: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        old = file.read(count)
        file.seek(at)
        file.write(bytes(byte ^ 0xFF for byte in old))


def test_K4_the_digest_notices_a_change_in_every_tensor(path: Path, tmp_path: Path) -> None:
    header = check_gguf(path)
    before = digest(path)
    seen = {before}
    for name, (begin, length) in zip(header.tensors, header.data[0].ranges, strict=True):
        other = tmp_path / "other.gguf"
        shutil.copyfile(path, other)
        flip(other, begin, length)
        changed = check_gguf(other)
        assert changed.sha256 == header.sha256, "the header and the size are as they were"
        assert changed.file_size == header.file_size
        seen.add(digest(other))
        assert len(seen) == 2, name
        seen = {before}


def test_K4_the_digest_is_of_the_data_and_not_of_the_place(path: Path, tmp_path: Path) -> None:
    before = digest(path)
    moved = tmp_path / "elsewhere.gguf"
    shutil.copyfile(path, moved)
    assert digest(moved) == before
    os.utime(path)
    assert digest(path) == before


@pytest.mark.parametrize("length", [0, 1, WHOLE, WHOLE + 1, WHOLE + BLOCK, 5 * WHOLE + 12345])
def test_blocks_cover_small_tensors_and_reach_into_every_stride_of_large_ones(length: int) -> None:
    found = list(blocks(100, length))
    if length <= WHOLE:
        assert found == [(100, length)]
        return
    ends = [at + count for at, count in found]
    assert found[0] == (100, BLOCK)
    assert ends[-1] == 100 + length
    gaps = [begin - end for (begin, _), end in zip(found[1:], ends, strict=False)]
    assert max(gaps) < STRIDE


def test_a_digest_is_made_once_of_a_file_that_has_settled(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(monkeypatch)
    # Written a moment ago: the clock of the disk may not tell the next change from this one.
    digest(path)
    digest(path)
    assert reads.count == 2
    settle(monkeypatch)
    first = digest(path)
    assert digest(path) == first
    assert reads.count == 3
    os.utime(path)
    assert digest(path) == first
    assert reads.count == 4


def test_a_file_that_changed_since_it_was_loaded_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = check_gguf(path).data
    begin = loaded[0].ranges[0][0]
    flip(path, begin)
    with pytest.raises(InvalidRequestError, match=r"has changed since it was loaded.*load the model again"):
        weights_digest(loaded)
    path.unlink()
    with pytest.raises(InvalidRequestError, match="load the model again"):
        weights_digest(loaded)


def test_a_known_digest_outlives_a_touch_and_a_replacement(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settle(monkeypatch)
    loaded = check_gguf(path).data
    before = weights_digest(loaded)
    os.utime(path, ns=(LONG_AGO + 1, LONG_AGO + 1))
    assert weights_digest(loaded) == before
    flip(path, loaded[0].ranges[0][0])
    with pytest.raises(InvalidRequestError, match="has changed since it was loaded"):
        weights_digest(loaded)
    other = path.with_name("new.gguf")
    shutil.copyfile(path, other)
    # What was mapped is the old file, which has no name any more.
    other.replace(path)
    assert weights_digest(loaded) == before


async def test_a_cancel_ends_the_wait_for_a_digest(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_weights, "_PIECE", 0)
    looks = 0
    check = trio.from_thread.check_cancelled

    def stuck() -> None:
        nonlocal looks
        looks += 1
        trio.from_thread.run_sync(scope.cancel)
        check()

    monkeypatch.setattr(trio.from_thread, "check_cancelled", stuck)
    with Model.load(path) as model:
        async with decoder_of(model) as decoder:
            with trio.CancelScope() as scope:
                await decoder.weights_digest()
            assert scope.cancelled_caught
            assert looks == 1
            monkeypatch.undo()
            assert await decoder.weights_digest() == digest(path)
