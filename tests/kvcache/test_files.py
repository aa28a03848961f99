"""Writing: what was there before stays until what is new is whole.  Rules K3 and K4."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from laneway._kvcache import _files
from laneway._kvcache._format import Miss
from tests.kvcache.test_format import FACTS, STATE, nothing, save, take

ROOT = Path(__file__).parents[2]


class Stop(Exception):  # noqa: N818 - stands for a cancel
    """What the checkpoint of a cancelled write raises."""


def _old(tmp_path: Path) -> tuple[Path, bytes]:
    path = tmp_path / "kv/named/chat/=m.kv"
    return path, save(path)


def test_K3_a_write_cancelled_at_any_part_leaves_the_file_byte_for_byte(tmp_path: Path) -> None:
    path, old = _old(tmp_path)
    new = attrs.evolve(FACTS, tokens=(9, 9, 9))
    for parts in range(100):
        left = parts

        def checkpoint() -> None:
            nonlocal left
            if left == 0:
                raise Stop
            left -= 1

        try:
            _files.write(path, new, bytes(5 * 2**20), checkpoint)
        except Stop:
            assert path.read_bytes() == old
            assert os.listdir(path.parent) == [path.name]
        else:
            break
    else:
        pytest.fail("the write never came to its end")
    assert parts >= 8, "there should be a checkpoint for each part of the state"
    assert _files.read(path, take).facts == new


@pytest.mark.parametrize("place", ["open", "write", "fsync", "replace"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EIO, errno.EROFS])
def test_K4_a_disk_that_fails_leaves_the_file_byte_for_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, number: int
) -> None:
    path, old = _old(tmp_path)
    failed = False

    def fail(*args: object, **kwargs: object) -> None:
        nonlocal failed
        failed = True
        raise OSError(number, os.strerror(number), str(path))

    with monkeypatch.context() as patch:
        if place == "write":
            whole = _files._blocks

            def half(head: bytes, state: bytes) -> Iterator[bytes | memoryview]:
                yield from itertools.islice(whole(head, state), 1)
                fail()

            patch.setattr(_files, "_blocks", half)
        else:
            patch.setattr(os, place, fail)
        with pytest.raises(OSError, match=os.strerror(number)) as caught:
            _files.write(path, attrs.evolve(FACTS, tokens=(1,)), STATE * 100, nothing)
    assert failed
    assert _files.explain(caught.value)
    assert path.read_bytes() == old
    assert os.listdir(path.parent) == [path.name]


def test_K3_the_file_its_name_and_its_directories_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    if not Path("/proc/self/fd").exists():
        pytest.skip("this system does not tell which file a descriptor is of")
    monkeypatch.setattr(os, "fsync", note)
    path = tmp_path.resolve() / "kv/named/chat/=m.kv"
    for folders in (["chat", "named", "kv", tmp_path.name], ["chat"]):
        synced.clear()
        save(path)
        assert synced[0].name.endswith(".tmp")
        assert [folder.name for folder in synced[1:]] == folders


def test_a_directory_that_cannot_be_synced_is_told_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(folder: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(_files, "sync_directory", fail)
    save(tmp_path / "kv/=m.kv")
    assert _files.read(tmp_path / "kv/=m.kv", take).facts == FACTS
    assert "may not survive a loss of power: Input/output error" in caplog.text


def test_what_is_wrong_with_the_disk_is_said_with_a_remedy() -> None:
    assert "laneway cache prune" in _files.explain(OSError(errno.ENOSPC, "No space left on device"))
    assert "may write to" in _files.explain(OSError(errno.EACCES, "Permission denied", "/x"))
    assert _files.explain(OSError(errno.EIO, "Input/output error", "/x")) == "Input/output error (/x)"


def test_K4_a_directory_in_its_place_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "named/chat/=m.kv"
    (path / "inside").mkdir(parents=True)
    with pytest.raises(OSError, match=r".+"):
        _files.write(path, FACTS, STATE, nothing)
    assert os.listdir(path.parent) == [path.name]
    assert os.listdir(path) == ["inside"]


def test_K5_a_link_in_its_place_is_replaced_itself(tmp_path: Path) -> None:
    # Somebody has swapped the file since it was looked up: nothing outside is written to.
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    path = tmp_path / "kv/=m.kv"
    path.parent.mkdir()
    path.symlink_to(victim)
    save(path)
    assert victim.read_bytes() == b"precious"
    assert not path.is_symlink()


def test_what_a_killed_process_left_is_swept_away_by_the_next_turn_on_that_file(tmp_path: Path) -> None:
    path, _ = _old(tmp_path)
    ours = path.with_name(path.name + ".0123456789abcdef.tmp")
    others = path.with_name("=other.kv.0123456789abcdef.tmp")
    ours.write_bytes(b"half")
    others.write_bytes(b"half")
    assert _files.sweep(path) == 1
    assert sorted(os.listdir(path.parent)) == sorted([path.name, others.name])
    assert _files.target_of(others) == path.with_name("=other.kv")


@pytest.mark.parametrize(
    "name", [".tmp", "..tmp", "x.tmp", "x.0123.tmp", "=m.kv.tmp", "=m.kv..tmp", "=m.kv.old.tmp", "=m.kv.0123.tmp.tmp"]
)
def test_a_foreign_file_is_nobodys_temporary_one(tmp_path: Path, name: str) -> None:
    path, _ = _old(tmp_path)
    foreign = path.with_name(name)
    foreign.write_bytes(b"mine")
    assert _files.target_of(foreign) is None
    assert _files.sweep(path) == 0
    assert list(_files.walk(path.parent)) == [path]
    assert foreign.read_bytes() == b"mine"


def test_tidy_removes_what_is_empty_and_never_the_root(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    folder = root / "named/a/b"
    folder.mkdir(parents=True)
    (root / "named/full").mkdir()
    (root / "named/full/file").touch()
    _files.tidy(folder, root)
    assert os.listdir(root / "named") == ["full"]
    (root / "named/full/file").unlink()
    _files.tidy(root / "named/full", root)
    assert root.is_dir()
    assert os.listdir(root) == []
    _files.tidy(tmp_path, root)
    assert root.is_dir()


CHILD = """
import sys
from collections.abc import Iterator
from pathlib import Path
from laneway._kvcache import _files
from laneway._kvcache._format import Facts

path = Path(sys.argv[1])
stop_at = int(sys.argv[2])
seen = 0

def checkpoint():
    global seen
    seen += 1
    if seen == stop_at:
        print("here", flush=True)
        sys.stdin.read()

facts = Facts(key="users/7", model="tiny", fingerprint=bytes(32), tokens=(4, 4))
_files.write(path, facts, bytes(3 * 2**20), checkpoint)
print("written", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("stop_at", [1, 2, 3, 4, 5, 6, 7])
def test_K3_a_process_killed_in_the_middle_of_a_write_leaves_the_file_byte_for_byte(
    tmp_path: Path, stop_at: int
) -> None:
    path, old = _old(tmp_path)
    command = [sys.executable, "-c", CHILD, str(path), str(stop_at)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "here\n"
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    assert path.read_bytes() == old
    assert _files.read(path, take).facts == FACTS
    _files.sweep(path)
    assert os.listdir(path.parent) == [path.name]


def test_a_half_written_file_is_never_taken_for_a_whole_one(tmp_path: Path) -> None:
    path, _ = _old(tmp_path)
    half = path.with_name(path.name + ".0123456789abcdef.tmp")
    half.write_bytes(path.read_bytes()[:-5])
    assert list(_files.walk(path.parent)) == [path, half]
    with pytest.raises(Miss):
        _files.read(half, take)


def test_walk_follows_no_link_out_and_takes_nothing_foreign(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    path = root / "named/chat/=m.kv"
    save(path)
    (root / "named/chat/notes.txt").write_text("mine")
    outside = tmp_path / "outside"
    save(outside / "=m.kv")
    (root / "named/link").symlink_to(outside)
    (root / "named/chat/=l.kv").symlink_to(outside / "=m.kv")
    assert list(_files.walk(root)) == [path]
