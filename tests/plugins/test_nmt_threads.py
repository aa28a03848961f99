"""What the page about translating says of threads: how many a translator takes, and how those of OpenMP wait."""

from __future__ import annotations

import os
import sys
from types import ModuleType

import pytest

from laneway_plugins import _nmt_worker
from laneway_plugins._nmt_service import share_of_cpus

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The policy that CTranslate2 would find at each import of it."""
    found: list[str | None] = []

    def need(module: str) -> ModuleType:
        assert module == "ctranslate2"
        found.append(os.environ.get("OMP_WAIT_POLICY"))
        return ModuleType(module)

    monkeypatch.setattr(_nmt_worker, "need", need)
    monkeypatch.delitem(sys.modules, "ctranslate2", raising=False)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return found


def test_threads_of_openmp_sleep_while_they_wait(seen: list[str | None]) -> None:
    _nmt_worker.import_ctranslate2()
    assert seen == ["passive"]
    assert "OMP_WAIT_POLICY" not in os.environ


def test_the_variable_is_taken_back_where_the_import_fails(
    seen: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def need(module: str) -> ModuleType:
        seen.append(os.environ.get("OMP_WAIT_POLICY"))
        raise _nmt_worker.MissingExtraError(module)

    monkeypatch.setattr(_nmt_worker, "need", need)
    with pytest.raises(_nmt_worker.MissingExtraError):
        _nmt_worker.import_ctranslate2()
    assert seen == ["passive"]
    assert "OMP_WAIT_POLICY" not in os.environ


@pytest.mark.parametrize(("name", "value"), [("OMP_WAIT_POLICY", "active"), ("GOMP_SPINCOUNT", "1000")])
def test_variables_of_the_user_are_left_alone(
    seen: list[str | None], name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    _nmt_worker.import_ctranslate2()
    assert seen == [value if name == "OMP_WAIT_POLICY" else None]
    assert os.environ[name] == value


@pytest.mark.parametrize(("there", "taken"), [(1, 1), (2, 1), (3, 1), (4, 2), (7, 3), (64, 32)])
def test_a_translator_takes_half_of_the_cpus_and_one_at_least(
    there: int, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(there)), raising=False)
    assert share_of_cpus() == taken


def test_where_no_process_has_a_set_of_cpus_all_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert share_of_cpus() == 3
