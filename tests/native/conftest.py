"""A tiny model for the tests of the native layer, loaded once, and short ways to drive a decoder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from laneway_native import Model
from laneway_native.training import Job
from tests.native.training import Child, Start
from tests.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An F32 model: its answers do not depend on who else is in the batch."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny(tiny_path: Path) -> Iterator[Model]:
    with Model.load(tiny_path) as model:
        yield model


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts training children."""
    children: list[Child] = []

    def begin(job: Job | str) -> Child:
        children.append(Child(job))
        return children[-1]

    yield begin
    for child in children:
        child.close()
