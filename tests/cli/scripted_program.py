"""The ``laneway`` program with scripted models, in virtual time."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from typing import Any

import pytest
import trio
import trio.testing
from click.testing import CliRunner, Result

import laneway
from laneway._cli import main
from laneway.testing import ScriptedLoader


class Program:
    """Commands whose engines know ``scripted:`` models."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: str, **defaults: Any) -> None:
        self.loader = ScriptedLoader(**{"seconds_per_step": 0.02, **defaults})
        real_run = trio.run

        def open_engine(plugins: Iterable[Any] = ()) -> Any:
            return laneway.open_engine(plugins=[*plugins, self.loader.plugin])

        def run(*args: Any) -> Any:
            return real_run(*args, clock=trio.testing.MockClock(autojump_threshold=0))

        __import__(module)
        monkeypatch.setattr(sys.modules[module], "open_engine", open_engine)
        monkeypatch.setattr(trio, "run", functools.wraps(real_run)(run))

    def __call__(self, *args: str, stdin: str | None = None) -> Result:
        """Run one command line."""
        result = CliRunner().invoke(main, list(args), input=stdin)
        for decoder in self.loader.decoders.values():
            decoder.assert_obeyed()
        return result
