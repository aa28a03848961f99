"""How much memory there is and how much is needed, on made-up file systems."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from laneway.decoder import ModelLoadError
from laneway_native import LlamaDecoder, Model
from laneway_native._machine import Available, available, default_threads
from laneway_native._memory import KV_TYPES, Need, shortage

GIB = 2**30


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    write(
        tmp_path,
        "proc/meminfo",
        "MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable:    8388608 kB\nHugePages_Total: 0\n",
    )
    return tmp_path


def test_a_machine_without_groups(machine: Path) -> None:
    assert available(machine) == Available(8 * GIB, 16 * GIB)


def test_a_group_of_version_2_with_a_limit(machine: Path) -> None:
    write(machine, "proc/self/cgroup", "0::/app/worker\n")
    write(machine, "sys/fs/cgroup/app/worker/memory.max", "max\n")
    write(machine, "sys/fs/cgroup/app/memory.max", str(4 * GIB))
    write(machine, "sys/fs/cgroup/app/memory.current", str(3 * GIB))
    write(machine, "sys/fs/cgroup/app/memory.stat", f"anon 5\ninactive_file {2 * GIB}\n")
    # A parent's limit binds, and file pages that nobody uses count as free.
    assert available(machine) == Available(3 * GIB, 4 * GIB)


def test_the_name_of_a_group_is_bytes(machine: Path) -> None:
    # As a path is; the locale has no say.
    name = os.fsdecode(b"caf\xe9")
    write(machine, "proc/self/cgroup", "")
    (machine / "proc/self/cgroup").write_bytes(b"0::/caf\xe9\n")
    write(machine, f"sys/fs/cgroup/{name}/memory.max", str(GIB))
    write(machine, f"sys/fs/cgroup/{name}/memory.current", "0")
    assert available(machine).total == GIB


def test_a_group_of_version_1(machine: Path) -> None:
    write(machine, "proc/self/cgroup", "4:cpu,cpuacct:/x\n3:memory:/docker/abc\n")
    write(machine, "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", str(2 * GIB))
    write(machine, "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes", str(GIB))
    write(machine, "sys/fs/cgroup/memory/memory.limit_in_bytes", str(0x7FFFFFFFFFFFF000))
    write(machine, "sys/fs/cgroup/memory/memory.usage_in_bytes", "0")
    assert available(machine) == Available(GIB, 2 * GIB)


def test_a_full_group_leaves_nothing(machine: Path) -> None:
    write(machine, "proc/self/cgroup", "0::/\n")
    write(machine, "sys/fs/cgroup/memory.max", str(GIB))
    write(machine, "sys/fs/cgroup/memory.current", str(2 * GIB))
    assert available(machine) == Available(0, GIB)


def test_a_system_that_does_not_tell(tmp_path: Path) -> None:
    there = available(tmp_path)
    assert there.now is None
    assert there.total is None or there.total > 0
    assert shortage(Need(kv=1 << 60, compute=0), 0, Available(None, None)) is None


@pytest.mark.parametrize(
    ("need", "model", "there", "words"),
    [
        (Need(kv=GIB, compute=GIB), 0, Available(2 * GIB, 4 * GIB), None),
        (
            Need(kv=GIB, compute=GIB + 1),
            0,
            Available(2 * GIB, 4 * GIB),
            "needs about 2.0 GiB and 2.0 GiB of memory are free",
        ),
        (Need(kv=GIB, compute=0), 3 * GIB, Available(2 * GIB, 4 * GIB), None),
        (
            Need(kv=GIB, compute=0),
            3 * GIB + 1,
            Available(2 * GIB, 4 * GIB),
            "beside the model's 3.0 GiB, and there are 4.0 GiB",
        ),
        (Need(kv=3 << 20, compute=0), 0, Available(2 << 20, 4 * GIB), "needs about 3 MiB and 2 MiB of memory are free"),
    ],
)
def testshortage(need: Need, model: int, there: Available, words: str | None) -> None:
    found = shortage(need, model, there)
    assert (found is None) if words is None else (found is not None and words in found)


def test_kv_types() -> None:
    assert KV_TYPES["f16"].bytes_per_value == 2
    assert KV_TYPES["q8_0"].bytes_per_value == 34 / 32
    assert {name for name, kind in KV_TYPES.items() if kind.quantised} == {
        "q8_0",
        "q5_1",
        "q5_0",
        "q4_1",
        "q4_0",
        "iq4_nl",
    }


@pytest.mark.parametrize("options", [{"kv_mode": "split"}, {"kv_mode": "unified", "flash_attention": True}])
def test_the_estimate_is_near_what_llama_allocates(
    tiny: Model, options: dict[str, object], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    needs: list[Need] = []

    def note(need: Need, model_bytes: int, there: Available) -> None:
        needs.append(need)

    monkeypatch.setattr("laneway_native._decoder.shortage", note)
    with caplog.at_level("INFO", logger="laneway.llama"):
        decoder = LlamaDecoder(tiny, context_size=16384, parallel=4, threads=1, **options)  # type: ignore[arg-type]
    decoder._free()
    (need,) = needs
    sizes = {"KV": 0.0, "compute": 0.0}
    for record in caplog.records:
        for kind in sizes:
            _, found, size = record.getMessage().partition(f"{kind} buffer size =")
            if found:
                sizes[kind] += float(size.removesuffix("MiB")) * 2**20
    assert need.kv == sizes["KV"]
    assert sizes["compute"] <= need.compute <= 3 * sizes["compute"]


def test_default_threads_is_a_number_of_cpus_that_there_are() -> None:
    assert 1 <= default_threads() <= (os.cpu_count() or 1)


def with_cpus(root: Path, monkeypatch: pytest.MonkeyPatch, siblings: dict[int, str]) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(siblings), raising=False)
    for cpu, text in siblings.items():
        write(root, f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", text + "\n")


def test_two_threads_of_a_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_cpus(tmp_path, monkeypatch, {0: "0,4", 4: "0,4", 1: "1,5", 6: "2,6"})
    assert default_threads(tmp_path) == 3


@pytest.mark.parametrize(
    ("limit", "threads"), [("max 100000", 4), ("200000 100000", 2), ("50000 100000", 1), ("150000 100000", 2)]
)
def test_a_share_of_time_bounds_the_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, threads: int
) -> None:
    with_cpus(tmp_path, monkeypatch, {cpu: str(cpu) for cpu in range(4)})
    write(tmp_path, "proc/self/cgroup", "0::/app/worker\n")
    write(tmp_path, "sys/fs/cgroup/app/cpu.max", limit)
    assert default_threads(tmp_path) == threads


def test_a_share_of_time_of_version_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_cpus(tmp_path, monkeypatch, {cpu: str(cpu) for cpu in range(4)})
    write(tmp_path, "proc/self/cgroup", "4:cpu,cpuacct:/x\n3:memory:/x\n")
    write(tmp_path, "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us", "100000")
    write(tmp_path, "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us", "100000")
    assert default_threads(tmp_path) == 1


def test_a_model_beyond_all_memory_is_refused(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laneway_native._model.available", lambda: Available(1 << 30, 1 << 10))
    with pytest.raises(ModelLoadError, match="its weights take"):
        Model.load(tiny_path)
