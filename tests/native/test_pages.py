"""Large buffers ask the system for large pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from laneway_native import Model, has_attention_kernel
from tests.native.driving import decoder_of

SMAPS = Path("/proc/self/smaps")


def asking_bytes() -> int:
    """Bytes of this process's memory for which large pages were asked."""
    total, size = 0, 0
    for line in SMAPS.read_text().splitlines():
        if match := re.match(r"Size: +(\d+) kB", line):
            size = int(match[1]) * 1024
        elif line.startswith("VmFlags:") and " hg" in line:
            total += size
    return total


@pytest.mark.skipif(not has_attention_kernel(), reason="the system's libllama allocates as it likes")
@pytest.mark.skipif(
    not SMAPS.exists() or not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no such pages here"
)
async def test_the_cells_of_a_large_context_ask_for_large_pages(tiny: Model) -> None:
    before = asking_bytes()
    facts = tiny.facts
    cells = 65_536
    kv_bytes = 2 * 2 * cells * facts.layers * facts.embedding * facts.heads_kv // facts.heads
    assert kv_bytes >= 8 * 2**20
    async with decoder_of(tiny, context_size=cells, parallel=1):
        assert asking_bytes() - before >= kv_bytes - 4 * 2**20
    assert asking_bytes() == before
