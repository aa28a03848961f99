from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def nothing_is_logged() -> Iterator[None]:
    """Hundreds of examples fail requests on purpose; what is logged of that would all be kept for a report."""
    logger = logging.getLogger("laneway")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    yield
    logger.setLevel(before)
