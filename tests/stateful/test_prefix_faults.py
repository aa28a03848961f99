"""Seeded faults: the machine that watches over shared prefixes has to notice each of them.

Each fault is a change of the scheduler's text that somebody could make.
"""

from __future__ import annotations

import inspect
import textwrap
from typing import Any

import hypothesis
import pytest
from hypothesis.stateful import run_state_machine_as_test

from laneway import _scheduler
from tests.stateful import finding, test_prefix_machine

BEGINNINGS = 10
SETTINGS = finding.budget(50)

FAULTS = {
    "keeps the cells of a step that failed": ("not sequence.whole or ", ""),
    "shares a prompt's last token, too": ("prompt = sequence.prompt[:-1]", "prompt = sequence.prompt"),
    "lets two wait for each other": ("elif before or held not in self._followers:", "else:"),
    "takes what is only going to be there": ("if found and found <= held.computed:", "if found:"),
    "waits for one that is gone": ("leader.state is not SequenceState.PREFILL or ", ""),
    "takes over a slot with more in it than is shared": (
        "keep = length if slot == source else 0",
        "keep = length + 1 if slot == source else 0",
    ),
    "takes a slot over and believes it empty": ("keep = length if slot == source else 0", "keep = None"),
    "keeps a slot from those who wait": (
        "if not self._free or not self._waiting:",
        "if not self._free.difference(self._kept) or not self._waiting:",
    ),
    "shares nothing that was kept": (
        "for slot, prefix in sorted(self._kept.items()",
        "for slot, prefix in sorted({}.items()",
    ),
    "computes what a peer is computing": ("source, length, leader, most = None, 0, (held, found), found", "pass"),
    "goes on as if it had what it missed": (
        "sequence.computed = sequence.cached = sequence.restored = 0",
        "sequence.cached = sequence.restored = 0",
    ),
    "lets a follower have its turn": (
        "[each for each in self._prefilling if each not in self._followers]",
        "self._prefilling",
    ),
    "forgets that one who has left was waiting": ("self._followers.pop(sequence, None)", "pass"),
    "prefers a saved state that is shorter": (
        "load = sequence.restorable > (length if leader is None else leader[1])",
        "load = sequence.restorable > 0",
    ),
}


def faulty_scheduler(right: str, wrong: str) -> type[Any]:
    """The scheduler with a piece of its text replaced."""
    source = textwrap.dedent(inspect.getsource(_scheduler.Scheduler))
    assert source.count(right) == 1, f"the scheduler has no such text any more, or several times: {right}"
    names = dict(vars(_scheduler))
    code = compile("from __future__ import annotations\n" + source.replace(right, wrong), "faulty", "exec")
    exec(code, names)  # noqa: S102 - our own source
    return names["Scheduler"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_prefix_machine, "Scheduler", faulty_scheduler(*FAULTS[fault]))
    with pytest.raises(Exception):  # noqa: B017 - whatever the machine finds, or breaks on
        for number in range(BEGINNINGS):
            machine = hypothesis.seed(number)(type("FaultyRules", (test_prefix_machine.PrefixRules,), {}))
            run_state_machine_as_test(machine, settings=SETTINGS)
