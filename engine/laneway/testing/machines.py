"""State machines that hold an implementation to the contract, for use in test suites of one's own.

Needs Hypothesis.  :class:`AdmissionMachine` judges the pure core of admission; to hold another core to the same rules,
derive from it and set ``make_admission``.
"""

from __future__ import annotations

try:
    import hypothesis.stateful  # noqa: F401 - tried first, for the sake of the message
except ImportError as error:
    raise ImportError("laneway.testing.machines needs Hypothesis: python -m pip install hypothesis") from error

from laneway.testing._admission_machine import AdmissionMachine as AdmissionMachine

__all__ = ["AdmissionMachine"]
