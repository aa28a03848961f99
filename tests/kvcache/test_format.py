"""What is in a file, and that damage of any kind is a miss.  Rule K4."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneway._kvcache import _files
from laneway._kvcache._format import FORMAT, PREAMBLE, Facts, Miss, common, pack_head, parse_head, parse_preamble

FACTS = Facts(key="users/7", model="tiny", fingerprint=bytes(range(32)), tokens=(1, 5, 70_000), digests=("ab", "cd"))
STATE = bytes(range(256)) * 3

facts = st.builds(
    Facts,
    key=st.text(max_size=20),
    model=st.text(max_size=20),
    fingerprint=st.binary(min_size=32, max_size=32),
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=40).map(tuple),
    digests=st.lists(st.text("0123456789abcdef", min_size=32, max_size=32), max_size=5).map(tuple),
)


def nothing() -> None:
    """The checkpoint of a write that nobody cancels."""


def take(_: Facts) -> None:
    """Every state is wanted."""


def save(path: Path, what: Facts = FACTS, state: bytes = STATE) -> bytes:
    _files.write(path, what, state, nothing)
    return path.read_bytes()


@given(facts, st.binary(max_size=500))
def test_what_is_packed_comes_back(what: Facts, state: bytes) -> None:
    data = pack_head(what, state) + state
    preamble = parse_preamble(data[:PREAMBLE], len(data))
    head = parse_head(preamble, data[PREAMBLE : PREAMBLE + preamble.head])
    assert head.facts == what
    assert head.state_size == len(state)
    assert data[head.size :] == state


def test_K4_what_is_written_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "a/b/=m.kv"
    assert _files.write(path, FACTS, STATE, nothing) == path.stat().st_size
    assert _files.read(path, take) == _files.Stored(FACTS, STATE)
    assert os.listdir(path.parent) == [path.name]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_K4_a_file_cut_off_anywhere_is_a_miss(tmp_path: Path) -> None:
    path = tmp_path / "=m.kv"
    data = save(path, state=STATE[:40])
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(Miss, match=r"empty|truncated"):
            _files.read(path, take)


def test_K4_a_file_with_a_wrong_byte_anywhere_is_a_miss(tmp_path: Path) -> None:
    path = tmp_path / "=m.kv"
    data = save(path, state=STATE[:40])
    for place in range(len(data)):
        for flip in (0x01, 0x80, 0xFF):
            path.write_bytes(data[:place] + bytes([data[place] ^ flip]) + data[place + 1 :])
            with pytest.raises(Miss):
                _files.read(path, take)


@given(st.data())
def test_K4_bytes_in_another_order_or_number_are_a_miss(data: st.DataObject) -> None:
    whole = pack_head(FACTS, STATE) + STATE
    start, end = sorted(data.draw(st.lists(st.integers(0, len(whole)), min_size=2, max_size=2, unique=True)))
    piece = data.draw(st.binary(max_size=20) | st.just(whole[start:end][::-1]) | st.just(bytes(end - start)))
    other = whole[:start] + piece + whole[end:]
    if other == whole:
        return
    with pytest.raises(Miss):
        preamble = parse_preamble(other[:PREAMBLE], len(other))
        head = parse_head(preamble, other[PREAMBLE : PREAMBLE + preamble.head])
        from laneway._kvcache._format import check_state

        check_state(head, other[head.size :])


@given(st.binary(max_size=300))
def test_K4_a_foreign_file_is_a_miss(junk: bytes) -> None:
    with pytest.raises(Miss):
        parse_preamble(junk[:PREAMBLE], len(junk))


def test_another_format_is_named(tmp_path: Path) -> None:
    path = tmp_path / "=m.kv"
    data = bytearray(save(path))
    data[8] = FORMAT + 1
    path.write_bytes(data)
    with pytest.raises(Miss, match=f"format {FORMAT + 1}"):
        _files.read(path, take)


def test_a_whole_file_that_says_something_else_is_a_miss(tmp_path: Path) -> None:
    path = tmp_path / "=m.kv"
    for wrong in ({"key": 5}, {"fingerprint": b"xyz"}, {"digests": (1,)}):

        class Odd:
            def hex(self) -> str:
                return "no hex"

        changed: dict[str, Any] = {"fingerprint": Odd()} if "fingerprint" in wrong else wrong
        save(path, attrs.evolve(FACTS, **changed))
        with pytest.raises(Miss, match="no cache"):
            _files.read(path, take)


# What may be there instead of a file.


def test_K4_nothing_there_is_a_miss(tmp_path: Path) -> None:
    with pytest.raises(Miss, match="there is no file"):
        _files.read(tmp_path / "a/=m.kv", take)


def _directory(path: Path) -> None:
    path.mkdir()


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _link(path: Path) -> None:
    other = path.with_name("other")
    save(other)
    path.symlink_to(other)


@pytest.mark.parametrize("make", [_directory, _pipe, _link])
def test_K4_something_else_in_its_place_is_a_miss(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "=m.kv"
    make(path)
    with pytest.raises(Miss, match=r"something else|cannot be opened"):
        _files.read(path, take)


def test_K4_a_file_that_may_not_be_read_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "=m.kv"
    save(path)

    def refuse(*args: object, **kwargs: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(Miss, match="Permission denied"):
        _files.read(path, take)


def test_the_state_is_not_read_if_nobody_wants_it(tmp_path: Path) -> None:
    path = tmp_path / "=m.kv"
    data = save(path)
    path.write_bytes(data[:-1] + b"?")

    def refuse(what: Facts) -> None:
        assert what == FACTS
        raise Miss("not wanted")

    with pytest.raises(Miss, match="not wanted"):
        _files.read(path, refuse)


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_common_is_the_longest_prefix_of_both(one: list[int], two: list[int]) -> None:
    count = common(tuple(one), two)
    assert one[:count] == two[:count]
    assert count == min(len(one), len(two)) or one[count] != two[count]
