"""The repair of AMX intrinsics for GCC 12 and older: where it is applied, and that it computes the right thing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEADER = ROOT / "native" / "cmake" / "gcc_amx.h"

# Multiplies two tiles of bytes under a configuration that is put together on the stack, for two shapes, and
# compares with plain loops.  The configuration has a frame of its own: there GCC 12 sees that nobody else reads it, and
# without the header the program dies.
PROGRAM = r"""
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

struct config {
    uint8_t palette, start, reserved[14];
    uint16_t width[16];
    uint8_t rows[16];
};

template <int rows, int depth> __attribute__((noinline)) static void configure() {
    alignas(64) config shapes = {};
    shapes.palette = 1;
    for (int tile = 0; tile < 8; tile++) {
        shapes.rows[tile] = tile == 2 ? depth / 4 : rows;
        shapes.width[tile] = tile == 1 ? depth : 64;
    }
    _tile_loadconfig(&shapes);
}

template <int rows, int depth> static int multiply() {
    configure<rows, depth>();
    int8_t a[16][64], b[16][64];
    int32_t c[16][16];
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 64; j++) {
            a[i][j] = (int8_t)(i * 7 + j * 3);
            b[i][j] = (int8_t)(i * 5 - j * 11);
        }
    _tile_zero(0);
    _tile_loadd(1, &a[0][0], 64);
    _tile_loadd(2, &b[0][0], 64);
    _tile_dpbssd(0, 1, 2);
    _tile_stored(0, &c[0][0], 64);

    for (int i = 0; i < rows; i++)
        for (int j = 0; j < 16; j++) {
            int32_t sum = 0;
            for (int k = 0; k < depth; k++) sum += a[i][k] * b[k / 4][j * 4 + k % 4];
            if (sum != c[i][j]) {
                printf("%d x %d: row %d column %d is %d, not %d\n", rows, depth, i, j, c[i][j], sum);
                return 1;
            }
        }
    return 0;
}

int main() {
    const long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)) return 77;
    int bad = multiply<16, 64>() + multiply<3, 32>();
    if (!bad) puts("right");
    return bad;
}
"""


def _has_amx() -> bool:
    try:
        return "amx_int8" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not _has_amx(), reason="this CPU has no AMX")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("level", ["-O0", "-O2", "-O3"])
def test_tiles_multiply_as_plain_loops_do(tmp_path: Path, level: str) -> None:
    source, program = tmp_path / "tiles.cpp", tmp_path / "tiles"
    source.write_text(PROGRAM)
    flags = [level, "-std=c++17", "-mamx-tile", "-mamx-int8", "-include", str(HEADER)]
    built = subprocess.run(
        ["g++", *flags, str(source), "-o", str(program)], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    if ran.returncode == 77:
        pytest.skip("the kernel grants no AMX state")
    assert (ran.returncode, ran.stdout) == (0, "right\n")


def _commands() -> list[dict[str, str]]:
    found = sorted(ROOT.glob("build/cp*/compile_commands.json"))
    if not found:
        pytest.skip("nothing was built here: make build")
    commands: list[dict[str, str]] = json.loads(found[-1].read_text())
    if not any("/ggml-cpu/" in command["file"] for command in commands):
        pytest.skip("built with the system's llama.cpp")
    return commands


def _compiler_needs_it(compiler: str) -> bool:
    said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    version = subprocess.run([compiler, "-dumpversion"], capture_output=True, text=True, check=True).stdout
    return "Free Software Foundation" in said and int(version.split(".")[0]) < 13


def test_it_is_applied_to_the_cpu_kernels_of_old_gcc_and_to_nothing_else() -> None:
    commands = _commands()
    applied = {command["file"] for command in commands if HEADER.name in command["command"]}
    kernels = {command["file"] for command in commands if re.search(r"/(ggml-cpu|csrc/ggml)/.*\.cpp$", command["file"])}
    compiler = next(command["command"].split()[0] for command in commands if command["file"] in kernels)
    assert len(kernels) > 5
    assert applied == (kernels if _compiler_needs_it(compiler) else set())


def test_ggml_runs_on_its_own_threads() -> None:
    assert not [command["file"] for command in _commands() if re.search(r"openmp", command["command"], re.IGNORECASE)]
