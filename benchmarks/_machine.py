"""What was measured on: facts of the machine and of the build, none of which name the host."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def describe() -> dict[str, Any]:
    """Processor, cores, memory, system, compiler and build flags, versions."""
    from laneway_native._ffi import ffi, lib

    cache = _cmake_cache()
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": f"{platform.system()} {platform.release().split('-')[0]}, {platform.machine()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "compiler": _first_line([cache.get("CMAKE_CXX_COMPILER", "c++"), "--version"]),
        "build": {
            name: cache[name]
            for name in ("CMAKE_BUILD_TYPE", "GGML_NATIVE", "GGML_OPENMP", "GGML_CUDA", "GGML_VULKAN", "GGML_METAL")
            if name in cache
        },
        "llama_cpp": ffi.string(lib.laneway_llama_commit()).decode(),
        "commit": _first_line(["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]),
    }


def load() -> float | None:
    """The load average of the last minute."""
    try:
        return round(os.getloadavg()[0], 2)
    except OSError:
        return None


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return _first_line(["sysctl", "-n", "machdep.cpu.brand_string"]) or platform.processor()
    facts = dict(re.findall(r"^(model name|cpu family|model|flags)\s*: (.*)$", text, re.MULTILINE))
    known = facts.get("flags", "").split()
    wide = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_tile") if name in known]
    return f"{facts.get('model name', platform.machine())} (family {facts.get('cpu family')}, {', '.join(wide)})"


def _cmake_cache() -> dict[str, str]:
    for path in (ROOT / "build").glob("*/CMakeCache.txt"):
        return dict(re.findall(r"^([A-Z_]+):\w+=(.*)$", path.read_text(), re.MULTILINE))
    return {}


def _first_line(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.partition("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
