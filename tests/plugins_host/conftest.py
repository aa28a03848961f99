from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.plugins_host.fake_site import FakeSite, fake_site


@pytest.fixture
def site(tmp_path: Path) -> Iterator[FakeSite]:
    with fake_site(tmp_path) as site:
        yield site
