"""What this machine, or the part of it that this process may use, has: memory and processors."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterator


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
    """Limit and use of every control group around this process that has a memory limit."""
    found = []
    for folder, version in _folders(root, "memory"):
        if version == 2:
            names = "memory.max", "memory.current", "inactive_file"
        else:
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        pair = _limit_and_use(folder / names[0], folder / names[1], folder / "memory.stat", names[2])
        if pair is not None:
            found.append(pair)
    return found


def _folders(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Folders and versions of the control groups around this process: its own, its parent's and so on."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, version = root / "sys/fs/cgroup", 2
        elif controller in controllers.split(","):
            base, version = root / "sys/fs/cgroup" / controllers, 1
            if not base.exists():
                base = root / "sys/fs/cgroup" / controller
        else:
            continue
        folder = base / path.lstrip("/")
        while True:
            yield folder, version
            if folder == base or base not in folder.parents:
                break
            folder = folder.parent


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


def default_threads(root: Path = Path("/")) -> int:
    """Physical cores that this process may run on, no more than its control groups give it time for."""
    try:
        cpus = os.sched_getaffinity(0)
    except AttributeError:  # not on this system
        return os.cpu_count() or 1
    cores = set()
    for cpu in cpus:
        try:
            siblings = (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
        except OSError:
            siblings = str(cpu)
        cores.add(siblings.strip())
    # A thread that has used up its share stops for the rest of the period, and all others wait for it.
    return max(1, min([len(cores), *(math.floor(share + 0.5) for share in _cpu_shares(root))]))


def _cpu_shares(root: Path) -> Iterator[float]:
    for folder, version in _folders(root, "cpu"):
        try:
            if version == 2:
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota = (folder / "cpu.cfs_quota_us").read_text()
                period = (folder / "cpu.cfs_period_us").read_text()
            if int(quota) > 0:
                yield int(quota) / int(period)
        except (OSError, ValueError):  # no such file, or no limit
            continue
