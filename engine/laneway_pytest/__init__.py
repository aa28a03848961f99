"""Fixtures for suites that test programs or plugins made with Laneway.

pytest imports this in every run of an environment that has Laneway, also of suites that never use it.  So it is a
package of its own, and nothing of Laneway or Trio is imported before a fixture is asked for: importing
``laneway.testing._anything`` would import all of ``laneway`` first, cost each run a third of a second, and be too early
for tools that must see a package being imported, such as coverage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractAsyncContextManager

    from laneway.testing import GuestRun, ScriptedDecoder, ScriptedLoader

V = TypeVar("V")


@pytest.fixture
def laneway_guest_run() -> Iterator[Callable[..., GuestRun[Any]]]:
    """A function that makes a :class:`laneway.testing.GuestRun`, which is closed when the test ends.

    It takes what the class takes.  For tests that are plain functions: an ``async def`` test has a run already.
    """
    from laneway.testing import GuestRun

    runs: list[GuestRun[Any]] = []

    def make(main: Callable[[], AbstractAsyncContextManager[V]] | None = None, **options: Any) -> GuestRun[Any]:
        run: GuestRun[Any] = GuestRun(**options) if main is None else GuestRun(main, **options)
        runs.append(run)
        return run

    yield make
    for run in runs:
        run.close()


@pytest.fixture
def scripted_decoder() -> Iterator[Callable[..., ScriptedDecoder]]:
    """A function that makes a :class:`laneway.testing.ScriptedDecoder`.  The test fails if it is misused.

    The function takes what the class takes.
    """
    from laneway.testing import ScriptedDecoder

    decoders: list[ScriptedDecoder] = []

    def make(*arguments: Any, **options: Any) -> ScriptedDecoder:
        decoder = ScriptedDecoder(*arguments, **options)
        decoders.append(decoder)
        return decoder

    yield make
    for decoder in decoders:
        decoder.assert_obeyed()


@pytest.fixture
def scripted_loader() -> Iterator[ScriptedLoader]:
    """A :class:`laneway.testing.ScriptedLoader`, for ``open_engine(plugins=[scripted_loader.plugin])``.

    The test fails if an engine misuses a decoder of its models.
    """
    from laneway.testing import ScriptedLoader

    loader = ScriptedLoader()
    yield loader
    for decoder in loader.decoders.values():
        decoder.assert_obeyed()
