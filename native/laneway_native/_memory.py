"""How much memory there is, and how much a context needs."""

from __future__ import annotations

import os
from pathlib import Path

import attrs

_KV_TYPES = {
    # name: (ggml's number, bytes of a block, values in a block)
    "f32": (0, 4, 1),
    "f16": (1, 2, 1),
    "bf16": (30, 2, 1),
    "q8_0": (8, 34, 32),
    "q5_1": (7, 24, 32),
    "q5_0": (6, 22, 32),
    "q4_1": (3, 20, 32),
    "q4_0": (2, 18, 32),
    "iq4_nl": (20, 18, 32),
}


@attrs.frozen
class KvType:
    """How keys and values are stored."""

    name: str
    number: int
    block_bytes: int
    block_values: int

    @property
    def quantised(self) -> bool:
        """Whether values share a scale; llama.cpp then needs flash attention."""
        return self.block_values > 1

    @property
    def bytes_per_value(self) -> float:
        """Bytes, on average."""
        return self.block_bytes / self.block_values


KV_TYPES = {name: KvType(name, *figures) for name, figures in _KV_TYPES.items()}
"""The types that llama.cpp's KV cache takes, by name."""


@attrs.frozen
class Available:
    """Bytes that can still be had, and that there are at all.  None where the system does not tell."""

    now: int | None
    total: int | None


def available(root: Path = Path("/")) -> Available:
    """What the machine, and the control group that holds this process, have.  ``root`` is for tests."""
    now, total = _machine(root)
    for limit, used in _groups(root):
        total = limit if total is None else min(total, limit)
        now = max(0, limit - used) if now is None else min(now, max(0, limit - used))
    return Available(now, total)


def _machine(root: Path) -> tuple[int | None, int | None]:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        try:
            return None, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (ValueError, OSError):
            return None, None
    sizes = {
        name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines) if rest.split()
    }
    return sizes.get("MemAvailable"), sizes.get("MemTotal")


def _groups(root: Path) -> list[tuple[int, int]]:
    """Limit and use of every control group around this process that has a limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit_name, used_name, cache_name = (
                root / "sys/fs/cgroup",
                "memory.max",
                "memory.current",
                "inactive_file",
            )
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            limit_name, used_name = "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache_name = "total_inactive_file"
        else:
            continue
        folder = base / path.lstrip("/")
        while True:
            # A parent's limit binds its children too.
            pair = _limit_and_use(folder / limit_name, folder / used_name, folder / "memory.stat", cache_name)
            if pair is not None:
                found.append(pair)
            if folder == base or base not in folder.parents:
                break
            folder = folder.parent
    return found


def _limit_and_use(limit_file: Path, used_file: Path, stat_file: Path, cache_name: str) -> tuple[int, int] | None:
    try:
        limit, used = int(limit_file.read_text()), int(used_file.read_text())
    except (OSError, ValueError):  # there is no limit, or its text is "max"
        return None
    if limit >= 1 << 60:  # how version 1 spells "no limit"
        return None
    try:
        # File pages that nobody uses are given back when memory is asked for.
        stat = dict(line.split() for line in stat_file.read_text().splitlines())
        used -= int(stat.get(cache_name, 0))
    except (OSError, ValueError):
        pass
    return limit, max(0, used)


@attrs.frozen(kw_only=True)
class Need:
    """Bytes of a context, estimated from the model's facts."""

    kv: int
    compute: int

    @property
    def context(self) -> int:
        """All that is allocated when the context is made."""
        return self.kv + self.compute


def context_need(
    *,
    cells: int,
    kv_bytes_per_cell: int,
    batch: int,
    slots: int,
    slot_cells: int,
    vocabulary: int,
    embedding: int,
    feed_forward: int,
    heads: int,
    flash_attention: bool,
) -> Need:
    """Estimate what a context allocates.

    ``cells`` is the number of KV cells over all slots, ``batch`` the tokens of one micro-batch, ``slot_cells`` the
    cells that one row of attention looks at.
    """
    # Activations live a few at a time; logits are one row a slot, computed and copied out; one mask.
    compute = 4 * batch * (8 * embedding + 3 * feed_forward) + 2 * 4 * slots * vocabulary + 4 * batch * slot_cells
    if not flash_attention:
        # The scores of every head against every cell exist at once.
        compute += 4 * heads * batch * slot_cells
    return Need(kv=cells * kv_bytes_per_cell, compute=compute)
