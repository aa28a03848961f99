"""``laneway cache``: what it lists, what it deletes, and what it refuses to."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from laneway import KVCaches
from laneway._cli import main
from tests.kvcache.kit import Directory
from tests.kvcache.test_caches import put


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KVCaches:
    monkeypatch.setenv("LANEWAY_CACHE_DIR", str(tmp_path))
    return KVCaches()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["cache", *arguments], prog_name="laneway")


def test_the_listing(caches: KVCaches) -> None:
    result = run("list")
    assert (result.exit_code, result.stdout) == (0, f"no caches in {caches.directory}\n")
    put(caches, "users/7", "smollm2", size=2_000_000, age=7300)
    put(caches, "", "smollm2", size=10)
    damaged = put(caches, "chat", "m")
    damaged.write_bytes(b"")
    result = run("list")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines == [
        ["KEY", "MODEL", "TOKENS", "SIZE", "AGE"],
        ["chat", "?", "damaged", "0", "B", "0s"],
        ["users/7", "smollm2", "3", "2.0", "MB", "2h"],
        ["(automatic)", "smollm2", "3", lines[3][3], "B", "0s"],
    ]
    assert result.stderr == f"3 caches, 2.0 MB, in {caches.directory}\n"
    assert result.exit_code == 0


@pytest.mark.parametrize("arguments", [["list"], ["delete", "a"], ["delete", "--everything"], ["prune"]])
@pytest.mark.parametrize("below", ["", "kv"])
def test_a_file_in_the_directorys_place_is_told(
    arguments: list[str], below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANEWAY_CACHE_DIR", str(tmp_path / "cache"))
    place = tmp_path / "cache" / below
    place.parent.mkdir(exist_ok=True)
    place.write_bytes(b"mine")
    result = run(*arguments)
    assert result.exit_code == 1
    assert f"{place} is no directory; name a directory" in result.stderr
    assert result.stdout == ""
    assert place.read_bytes() == b"mine"


def test_K5_deleting_by_key_by_key_and_model_automatic_ones_and_everything(caches: KVCaches, tmp_path: Path) -> None:
    for key, model in (("a", "m"), ("a", "n"), ("a/b", "m"), ("c", "m"), ("", "m"), ("", "n")):
        put(caches, key, model)
    left = Directory(tmp_path).files
    for arguments, count in (
        (["a", "--model", "m"], 5),
        (["a"], 4),
        (["nobody"], 4),
        (["--automatic"], 2),
        (["--everything"], 0),
    ):
        result = run("delete", *arguments)
        assert result.exit_code == 0
        assert len(left()) == count
    assert run("delete", "--everything").stderr == "deleted 0 caches, 0 B\n"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "say one of: a KEY, --automatic, --everything"),
        (["a", "--automatic"], "say one of"),
        (["a", "--everything"], "say one of"),
        (["--automatic", "--everything"], "say one of"),
        (["--automatic", "--model", "m"], "--model narrows down a KEY"),
        (["--everything", "--model", "m"], "--model narrows down a KEY"),
        ([".."], "keys cannot leave the cache directory"),
        (["/"], "absolute"),
        ([""], "empty"),
        (["a", "--model", ""], "a model is named"),
        (["a", "--model", ".."], "no name of a model"),
    ],
)
def test_K5_what_is_not_said_clearly_deletes_nothing(
    caches: KVCaches, tmp_path: Path, arguments: list[str], reason: str
) -> None:
    put(caches, "a")
    put(caches, "")
    before = Directory(tmp_path).files()
    result = run("delete", *arguments)
    assert result.exit_code in (1, 2)
    assert reason in result.stderr
    assert Directory(tmp_path).files() == before


def test_K5_what_is_in_use_stays_and_is_told(caches: KVCaches, tmp_path: Path) -> None:
    path = put(caches, "a", size=5000)
    with Directory(tmp_path).held(path):
        result = run("delete", "a")
    assert result.exit_code == 1
    assert result.stderr == "deleted 0 caches, 0 B\nin use, kept: a on m (5.2 kB)\n"
    assert path.exists()


def test_K6_prune_takes_sizes_and_times_with_units(caches: KVCaches) -> None:
    put(caches, "kept", size=5_000_000, age=10**8)
    put(caches, "", "old", size=1000, age=3 * 3600)
    new = put(caches, "", "new", size=1_500_000)
    assert run("prune").stderr == "deleted 0 caches, 0 B\n"
    result = run("prune", "--max-idle", "2h")
    assert result.exit_code == 0
    assert re.fullmatch(r"deleted an automatic cache on old \(1\.\d kB\)\n", result.stdout)
    assert run("prune", "--max-size", "1.6MB").stdout == ""
    os.utime(new, (time.time() - 90, time.time() - 90))
    assert run("prune", "--max-size", "1600 kb", "--max-idle", "1.5d").stdout == ""
    assert run("prune", "--max-size", "1mb").stdout == "deleted an automatic cache on new (1.5 MB)\n"
    assert [line.split()[0] for line in run("list").stdout.splitlines()] == ["KEY", "kept"]


@pytest.mark.parametrize("value", ["", "-1", "1.2.3", "2 parsecs", "GB"])
def test_a_size_that_is_none_is_told_with_an_example(caches: KVCaches, value: str) -> None:
    result = run("prune", f"--max-size={value}")
    assert result.exit_code == 2
    assert "is no size: write a number and one of b, kb, mb, gb, such as 2gb" in result.stderr


def test_another_directory(caches: KVCaches, tmp_path: Path) -> None:
    put(KVCaches(tmp_path / "other"), "there")
    assert "there" in run("list", "--cache-dir", str(tmp_path / "other")).stdout
    assert run("delete", "there", "--cache-dir", str(tmp_path / "other")).stdout.startswith("deleted there on m")
