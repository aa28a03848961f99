from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SUITE = """
from __future__ import annotations

import laneway
import pytest
import trio
from laneway.decoder import Chunk, Sampling, StepBatch


def test_runs_are_closed(laneway_guest_run):
    run = laneway_guest_run()
    run.start(trio.sleep_forever)
    test_runs_are_closed.run = run


def test_runs_were_closed():
    assert test_runs_are_closed.run.over


def test_an_engine(laneway_guest_run, scripted_loader):
    run = laneway_guest_run(lambda: laneway.open_engine(plugins=[scripted_loader.plugin]))
    run.call(run.value.load_model, "scripted:a")
    assert list(scripted_loader.decoders) == ["scripted:a"]


def test_obeyed(scripted_decoder):
    decoder = scripted_decoder(2, 16)
    decoder.open(1, Sampling(), [1])


def test_misused(scripted_decoder):
    with pytest.raises(AssertionError):
        scripted_decoder().open(9, Sampling(), [1])


def test_unseen_failure(laneway_guest_run):
    async def fail():
        raise ZeroDivisionError

    laneway_guest_run().start(fail)


async def test_async(scripted_decoder):
    decoder = scripted_decoder()
    decoder.open(0, Sampling(), [1])
    assert (await decoder.step(StepBatch((Chunk(0, 0, [1], True),)))).tokens.keys() == {0}
"""


def test_the_entry_point_names_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["entry-points"]["pytest11"] == {"laneway": "laneway_pytest"}
    assert "engine/laneway_pytest" in project["tool"]["scikit-build"]["wheel"]["packages"]


def test_loading_it_imports_neither_laneway_nor_trio() -> None:
    code = (
        "import sys, pytest\n"
        "before = set(sys.modules)\n"
        "import laneway_pytest\n"
        "print(*sorted(set(sys.modules) - before))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["laneway_pytest"]


def test_fixtures_work_in_another_suite(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\ntrio_mode = true\nfilterwarnings = error\n", encoding="utf-8")
    # Named here, so that the test does not depend on the entry points of what happens to be installed.
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "laneway_pytest", "-p", "pytest_trio.plugin"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-c", "pytest.ini", "test_suite.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    told = [line for line in done.stdout.splitlines() if line.startswith(("PASSED", "FAILED", "ERROR"))]
    outcomes = sorted({(line.split()[0], line.split()[1].split("::")[1]) for line in told})
    assert outcomes == [
        ("ERROR", "test_misused"),
        ("ERROR", "test_unseen_failure"),
        ("PASSED", "test_an_engine"),
        ("PASSED", "test_async"),
        ("PASSED", "test_misused"),
        ("PASSED", "test_obeyed"),
        ("PASSED", "test_runs_are_closed"),
        ("PASSED", "test_runs_were_closed"),
        ("PASSED", "test_unseen_failure"),
    ], done.stdout + done.stderr
    assert "the decoder protocol was broken 1 times, first: open(9): slots are 0 to 3" in done.stdout
    assert "ZeroDivisionError" in done.stdout


def test_this_suite_has_them_when_installed(request: pytest.FixtureRequest) -> None:
    if not request.config.pluginmanager.has_plugin("laneway"):
        pytest.skip("laneway is not installed here, or was before it had the entry point: make build")
    assert request.getfixturevalue("scripted_loader").decoders == {}
