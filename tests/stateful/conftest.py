from __future__ import annotations

import faulthandler
import logging
import os
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


@pytest.fixture(autouse=True)
def no_watchdog() -> None:
    """In the longer profiles minutes are no sign of a hang; and the traceback that pytest lets be written after two of
    them is read from a thread that goes on meanwhile, which may end in a segmentation fault."""
    if os.environ.get("LANEWAY_HYPOTHESIS_PROFILE", "dev") != "dev":
        faulthandler.cancel_dump_traceback_later()
