"""Installs Laneway editably, or makes a wheel of it, with visible progress and a failure that fits on one line.

    python native/pip_build.py editable
    python native/pip_build.py wheel

Both use the one build folder that ``pyproject.toml`` names and the tools of the running interpreter's environment, so
what did not change is not compiled again.  pip says nothing or everything: everything goes to a log under ``build/``.
"""

from __future__ import annotations

import fcntl
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEP = re.compile(r"\s*(\[[1-9]\d*/\d+\]) (\S+) .*?([^/\s]+)$")
OURS = re.compile(r"( *)laneway: (.*)")
# A compiler's or CMake's complaint, most telling first; about these pip says only that something failed.
COMPLAINTS = (
    re.compile(r"\s*(.*\bfatal error: .*)"),
    re.compile(r"\s*(.*\berror: (?!subprocess-exited|metadata-generation|failed-wheel).*)"),
    re.compile(r"\s*(CMake Error.*)"),
)
PIP = re.compile(r"ERROR: (.*)")


def reason(lines: Iterable[str]) -> str:
    """The line of a build log that says why it failed."""
    lines = list(lines)
    ours = [match[2] for line in lines if (match := OURS.fullmatch(line))]
    # Ours are progress and reason alike, and the reason ends the build.
    if ours and any("CMake Error" in line for line in lines):
        return ours[-1]
    for pattern in COMPLAINTS:
        for line in lines:
            if match := pattern.fullmatch(line):
                return match[1].strip()
    said = [match[1] for line in lines if (match := PIP.fullmatch(line))]
    return f"{said[-1] if said else 'pip gave no reason'}; check the network and pip's settings and repeat"


def _show(line: str) -> None:
    if match := STEP.fullmatch(line):
        text, end = f"  {match[1]} {match[2]} {match[3]}", "\n"
        if sys.stdout.isatty():
            text, end = f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}", ""
        print(text, end=end, flush=True)
    # pip indents by two; what is indented more is part of an error, which is shown at the end.
    elif (match := OURS.fullmatch(line)) and len(match[1]) <= 2:
        print(f"laneway: {match[2]}", flush=True)


def run(what: str, command: list[str]) -> None:
    """Runs pip, shows how far it is, and exits with the reason if it fails."""
    log = ROOT / "build" / f"{what}.log"
    log.parent.mkdir(exist_ok=True)
    lines: list[str] = []
    with (log.parent / ".lock").open("w") as lock:
        # Two builds in one folder would write the same object files.
        fcntl.flock(lock, fcntl.LOCK_EX)
        with log.open("w", encoding="utf-8") as copy, _pip(command) as pip:
            assert pip.stdout is not None
            for line in pip.stdout:
                copy.write(line)
                lines.append(line.rstrip("\n"))
                _show(lines[-1])
    if sys.stdout.isatty():
        print("\r\x1b[K", end="", flush=True)
    if pip.returncode:
        sys.exit(f"laneway: the build failed: {reason(lines)} (the whole log: {log.relative_to(ROOT)})")


def _pip(command: list[str]) -> subprocess.Popen[str]:
    pipe, none = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen(
        command, cwd=ROOT, stdin=none, stdout=pipe, stderr=subprocess.STDOUT, text=True, errors="replace"
    )


def main() -> None:
    """Command line: see the module's text."""
    what = sys.argv[1] if len(sys.argv) == 2 else ""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    if what == "editable":
        print("laneway: building (the first time takes a minute or two)", flush=True)
        run(what, [*pip, "install", "--verbose", "--no-build-isolation", "--editable", ".[nmt]"])
    elif what == "wheel":
        print("laneway: making the wheel", flush=True)
        dist = ROOT / "build" / "dist"
        shutil.rmtree(dist, ignore_errors=True)
        run(what, [*pip, "wheel", "--verbose", "--no-build-isolation", "--no-deps", "--wheel-dir", str(dist), "."])
        print(*(f"laneway: {wheel.relative_to(ROOT)}" for wheel in dist.glob("*.whl")), sep="\n")
    else:
        sys.exit("usage: python native/pip_build.py editable|wheel")


if __name__ == "__main__":
    main()
