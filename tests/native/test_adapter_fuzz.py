"""Broken adapters: each one is a ModelLoadError that says what is wrong, and none of them ends the process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.native import adapters, load_adapters

FLIPPED = int(os.environ.get("LANEWAY_FUZZ_ADAPTERS", "100"))
"""How many good files get flipped bits."""
ROOT = Path(__file__).parents[2]


def outcomes(model: Path, folder: Path, contents: Sequence[bytes]) -> list[str]:
    """What became of each file in one child process."""
    paths = [folder / f"{number}.gguf" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    done = subprocess.run(
        [sys.executable, "-m", load_adapters.__name__, str(model)],
        input="".join(f"{path}\n" for path in paths),
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60 + len(paths),
        check=False,
    )
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert said, done.stderr
    assert done.returncode == 0, f"ended by {said[-1]['path']}:\n{done.stderr[-3000:]}"
    found = {line["path"]: line["outcome"] for line in said if "outcome" in line}
    assert list(found) == list(map(str, paths))
    return list(found.values())


@pytest.mark.slow
def test_each_broken_adapter_is_a_load_error_that_says_why(tiny_path: Path, tmp_path: Path) -> None:
    corpus = adapters.systematic()
    # As many as are promised, and no two of them are one file.
    assert len({broken.content for broken in corpus}) == len({broken.name for broken in corpus}) == len(corpus)
    assert len(corpus) >= 200
    wrong = {}
    for broken, outcome in zip(
        corpus, outcomes(tiny_path, tmp_path, [broken.content for broken in corpus]), strict=True
    ):
        path = re.escape(str(tmp_path))
        if not re.fullmatch(rf"ModelLoadError: .*adapter '{path}/\d+\.gguf': .*(?:{broken.match}).*", outcome):
            wrong[broken.name] = outcome
    assert not wrong


@pytest.mark.slow
def test_flipped_bits_are_told_or_do_no_harm(tiny_path: Path, tmp_path: Path) -> None:
    seed = int(os.environ.get("LANEWAY_FUZZ_SEED", "0"))
    found = outcomes(tiny_path, tmp_path, list(adapters.flipped(FLIPPED, seed)))
    refused = [outcome for outcome in found if outcome.startswith("ModelLoadError: ")]
    used = found.count("used")
    # A flip in alpha or in an invocation token leaves a good adapter.
    assert len(refused) + used == len(found), found
    assert used
    assert len(refused) > used
