"""Runs the native tests on builds for older processors than this one.

    python -m tests.portable                  all tests of native code, with each build that is not the installed one
    python -m tests.portable avx2 --quick     those that compute, with one build

A build is a target of CMake (native/cmake/LanewayVariants.cmake).  The module of this folder, sitecustomize, puts it in
the place of the installed one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import attrs

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent

ALL = (
    "tests/native",
    "tests/kvcache/test_real.py",
    "tests/plugins/test_finetune_real.py",
    "tests/plugins/test_llama.py",
    "tests/plugins/test_real_model.py",
)
"""Tests of what is compiled."""
QUICK = (
    "tests/native/test_variant.py",
    "tests/native/test_attention.py",
    "tests/native/test_attention_faults.py",
    "tests/native/test_decoder.py",
    "tests/native/test_lora.py",
    "tests/native/test_prefixes.py",
    "tests/native/test_real_model.py",
    "tests/native/test_sampling.py",
    "tests/native/test_sliding_window.py",
    "tests/native/test_state.py",
    "tests/native/test_training.py",
    "tests/native/test_training_real.py",
    "tests/plugins/test_finetune_real.py",
)
"""Those of them that compute."""


@attrs.frozen
class Variant:
    """A build for an older processor: what llama.cpp says that its instructions are."""

    name: str
    title: str
    features: frozenset[str]


VARIANTS = (
    Variant("avx2", "AVX2", frozenset({"SSE3", "SSSE3", "AVX", "AVX2", "F16C", "FMA", "BMI2"})),
    Variant("sse42", "SSE4.2", frozenset({"SSE3", "SSSE3"})),
)
NEUTRAL = frozenset({"LLAMAFILE", "REPACK"})
"""Features that are no instructions."""


def features(text: str) -> frozenset[str]:
    """The instruction sets of a build, from llama.cpp's line about it: ``CPU : AVX = 1 | AVX2 = 1 | ...``."""
    entries = (entry.partition("=") for entry in text.partition(":")[2].split("|"))
    return frozenset(name.strip() for name, _, value in entries if value.strip() == "1") - NEUTRAL


def why_not(variant: Variant, installed: frozenset[str]) -> str | None:
    """Why there is nothing to gain from this build beside the installed one; None if there is."""
    if not variant.features <= installed:
        return f"this processor has no {variant.title}"
    if variant.features == installed:
        return f"the installed build is one for {variant.title}"
    return None


def build_folder() -> Path | None:
    """Where CMake has built what is installed, with targets for other processors; None if there is no such folder."""
    for rules in sorted(ROOT.glob("build/*/build.ninja")):
        if "laneway-avx2" in rules.read_text(encoding="utf-8", errors="replace"):
            return rules.parent
    return None


def installed_features() -> frozenset[str]:
    """Of the build that is installed."""
    from laneway_native._ffi import ffi, lib

    return features(ffi.string(lib.laneway_system_info()).decode())


def run(variant: Variant, folder: Path, tests: tuple[str, ...], arguments: list[str]) -> int:
    """Build a variant, test it, and return the exit status."""
    print(f"laneway: building for {variant.title}", flush=True)
    cmake = shutil.which("cmake", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))
    if cmake is None:
        print("laneway: cmake is missing; run: make env", file=sys.stderr)
        return 1
    log = ROOT / "build" / f"{variant.name}.log"
    command = [cmake, "--build", str(folder), "--target", f"laneway-{variant.name}"]
    with log.open("w", encoding="utf-8") as out:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        print(f"laneway: the build for {variant.title} failed; see {log.relative_to(ROOT)}", file=sys.stderr)
        return done.returncode
    print(f"laneway: testing the build for {variant.title}", flush=True)
    path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "LANEWAY_NATIVE_VARIANT": str(folder / "bin" / variant.name),
        "LANEWAY_NATIVE_FEATURES": " ".join(sorted(variant.features)),
    }
    command = [sys.executable, "-m", "pytest", *tests, *arguments]
    return subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode


def main() -> int:
    """Command line: see the module's text."""
    parser = argparse.ArgumentParser(prog="python -m tests.portable", description="Test builds for older processors.")
    names = ", ".join(each.name for each in VARIANTS)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{names}; none: all")
    parser.add_argument("--quick", action="store_true", help="only the tests that compute")
    parser.add_argument("--pytest", default="", metavar="ARGUMENTS", help="arguments for pytest, in one word")
    options = parser.parse_args()
    known = {each.name: each for each in VARIANTS}
    if wrong := [name for name in options.names if name not in known]:
        parser.error(f"there is no build {wrong[0]!r}; there are {', '.join(known)}")
    folder = build_folder()
    if folder is None:
        print("laneway: this build is not one for this machine's own x86-64 processor: there is nothing to vary")
        return 0
    installed = installed_features()
    for name in options.names or known:
        if reason := why_not(known[name], installed):
            print(f"laneway: no tests with {name}: {reason}")
            continue
        tests = QUICK if options.quick else ALL
        if status := run(known[name], folder, tests, options.pytest.split()):
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
