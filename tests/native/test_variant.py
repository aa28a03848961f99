"""Builds for older processors: which of them are tested, and that the tests run on them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.portable import __main__ as portable
from tests.portable.__main__ import ALL, QUICK, ROOT, VARIANTS, features, installed_features, why_not

INFO = "CPU : SSE3 = 1 | SSSE3 = 1 | AVX = 1 | AVX2 = 1 | F16C = 1 | FMA = 1 | BMI2 = 1 | LLAMAFILE = 1 | REPACK = 1 | "
AVX2, SSE42 = VARIANTS


def test_the_instruction_sets_are_read_from_what_llama_says() -> None:
    assert features(INFO) == AVX2.features
    assert features("CPU : SSE3 = 1 | SSSE3 = 1 | LLAMAFILE = 1 | ") == SSE42.features
    assert features("CPU : NEON = 1 | ARM_FMA = 1 | SVE = 0 | ") == {"NEON", "ARM_FMA"}
    assert features("") == frozenset()


def test_what_this_processor_cannot_run_or_has_installed_is_left_out() -> None:
    richer = AVX2.features | {"AVX512"}
    assert [why_not(each, richer) for each in VARIANTS] == [None, None]
    assert [why_not(each, AVX2.features) for each in VARIANTS] == ["the installed build is one for AVX2", None]
    assert [why_not(each, SSE42.features) for each in VARIANTS] == [
        "this processor has no AVX2",
        "the installed build is one for SSE4.2",
    ]
    assert why_not(SSE42, frozenset({"NEON"})) == "this processor has no SSE4.2"


def test_where_no_build_has_variants_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(portable, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["portable"])
    folder = tmp_path / "build" / "cp311"
    folder.mkdir(parents=True)
    (folder / "build.ninja").write_text("build all: phony\n")
    assert portable.main() == 0
    assert "there is nothing to vary" in capsys.readouterr().out
    (folder / "build.ninja").write_text("build laneway-avx2: phony\n")
    assert portable.build_folder() == folder


def test_all_files_that_are_run_are_there() -> None:
    assert all((ROOT / path).exists() for path in (*ALL, *QUICK))


if "LANEWAY_NATIVE_VARIANT" in os.environ:

    def test_the_build_under_test_is_the_one_for_the_older_processor() -> None:
        from laneway_native import _llama

        wanted = frozenset(os.environ["LANEWAY_NATIVE_FEATURES"].split())
        assert installed_features() == wanted
        assert Path(_llama.__file__).parent == Path(os.environ["LANEWAY_NATIVE_VARIANT"])
        # Children of tests, such as the trainer, have it too.
        program = "import laneway_native._llama as module; print(module.__file__)"
        told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        assert told.strip() == _llama.__file__
