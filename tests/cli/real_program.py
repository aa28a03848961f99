"""The ``laneway`` program as a real process, with a scripted model: streams, terminals and signals are real."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import attrs

from tests.plugins_host.fake_site import FakeSite

MODEL = """
    from laneway.testing import ScriptedLoader, ScriptedTokenizer

    WORDS = ScriptedTokenizer()
    SCRIPT = {{tuple(WORDS.tokenize(prompt, special=True)): answer for prompt, answer in {script!r}.items()}}
    plugin = ScriptedLoader(script=SCRIPT, seconds_per_step={seconds!r}, context_size=4096).plugin
"""


@attrs.frozen
class RealProgram:
    """``laneway`` with a loader for ``scripted:`` models that answers as ``script`` says, prompt by prompt."""

    site: FakeSite

    @classmethod
    def make(cls, tmp_path: Path, script: Mapping[str, str], seconds: float = 0.0) -> RealProgram:
        path = tmp_path / "real-site"
        path.mkdir()
        site = FakeSite(path)
        site.add(
            "laneway-scripted",
            {"laneway_scripted_model": MODEL.format(script=dict(script), seconds=seconds)},
            {"scripted": "laneway_scripted_model:plugin"},
        )
        return cls(site)

    def command(self, *args: str) -> list[str]:
        """The command line."""
        code = f"import sys; sys.path.insert(0, {str(self.site.path)!r}); from laneway._cli import main; main()"
        return [sys.executable, "-c", code, *args]

    def run(self, *args: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
        """Run to the end; ``options`` are those of :func:`subprocess.run`."""
        given: dict[str, Any] = {"stdin": subprocess.DEVNULL, "env": environment(), **options}
        if "capture_output" not in given:
            given.setdefault("stdout", subprocess.PIPE)
            given.setdefault("stderr", subprocess.PIPE)
        return subprocess.run(self.command(*args), check=False, timeout=120, **given)

    def with_redirections(self, redirections: str, *args: str) -> subprocess.CompletedProcess[bytes]:
        """Run in a shell, with these redirections behind the command, such as ``>&-``."""
        script = f'exec "$@" {redirections}'
        command = ["sh", "-c", script, "sh", *self.command(*args)]
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=120, env=environment()
        )

    def on_terminal(self, *args: str, stdin: IO[bytes] | None = None, **variables: str) -> tuple[bytes, int]:
        """What a terminal is shown, standard error included, and the status."""
        ours, theirs = pty.openpty()
        settings = environment(TERM="xterm", COLUMNS="100", LINES="30", **variables)
        source = theirs if stdin is None else stdin
        with subprocess.Popen(self.command(*args), stdin=source, stdout=theirs, stderr=theirs, env=settings) as process:
            os.close(theirs)
            shown = read_all(ours)
        os.close(ours)
        return shown, process.returncode


def environment(**variables: str) -> dict[str, str]:
    """This environment, without what would change how text is shown."""
    dropped = {"PYTHONUNBUFFERED", "PYTHONIOENCODING", "PYTHONUTF8", "LANEWAY_DEBUG", "NO_COLOR", "FORCE_COLOR"}
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**kept, "LC_ALL": "C.UTF-8", **variables}


def read_all(descriptor: int) -> bytes:
    """Everything that comes until the other end of a pseudo-terminal is closed."""
    blocks: list[bytes] = []
    with suppress(OSError):  # how Linux says that the other end is closed
        while block := os.read(descriptor, 1 << 16):
            blocks.append(block)
    return b"".join(blocks)


def lines(data: bytes) -> Sequence[str]:
    """The lines of an output."""
    return data.decode("utf-8").splitlines()
