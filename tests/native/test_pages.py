"""Large buffers ask the system for large pages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from laneway_native import Model, has_attention_kernel

# In a process of its own: what other tests have allocated, or free meanwhile, is not this one's.
PROGRAM = """
import json, re, sys
from pathlib import Path
from laneway_native import LlamaDecoder, Model

def asking():
    total, size = 0, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"Size: +(\\d+) kB", line):
            size = int(match[1]) * 1024
        elif line.startswith("VmFlags:") and " hg" in line:
            total += size
    return total

with Model.load(sys.argv[1]) as model:
    before = asking()
    decoder = LlamaDecoder(model, context_size=int(sys.argv[2]), parallel=1)
    during = asking()
    import trio
    trio.run(decoder.aclose)
    print(json.dumps([before, during, asking()]))
"""


@pytest.mark.skipif(not has_attention_kernel(), reason="the system's libllama allocates as it likes")
@pytest.mark.skipif(
    not all(map(Path.exists, map(Path, ("/proc/self/smaps", "/sys/kernel/mm/transparent_hugepage")))),
    reason="no such pages here",
)
def test_the_cells_of_a_large_context_ask_for_large_pages(tiny: Model) -> None:
    facts = tiny.facts
    cells = 65_536
    kv_bytes = 2 * 2 * cells * facts.layers * facts.embedding * facts.heads_kv // facts.heads
    assert kv_bytes >= 8 * 2**20
    command = [sys.executable, "-c", PROGRAM, tiny.path, str(cells)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    before, during, after = json.loads(said)
    # The last, partial page of a buffer is left as it is.
    assert during - before >= kv_bytes - 4 * 2**20
    assert after == before
