"""State machines that hold an implementation to the contract, for use in test suites of one's own.

Needs Hypothesis.

- :class:`AdmissionMachine` judges the pure core of admission; to hold another core to the same rules, derive from it
  and set ``make_admission``.
- :class:`RequestMachine` and :class:`DecodingMachine` drive a whole engine on scripted decoders: who runs when and how
  requests end, and what becomes of tokens.  To hold an engine that is put together in another way to the same rules,
  derive from them and set ``open_engine``.
"""

from __future__ import annotations

try:
    import hypothesis.stateful  # noqa: F401 - tried first, for the sake of the message
except ImportError as error:
    raise ImportError("laneway.testing.machines needs Hypothesis: python -m pip install hypothesis") from error

from laneway.testing._admission_machine import AdmissionMachine as AdmissionMachine
from laneway.testing._engine_machine import DecodingMachine as DecodingMachine
from laneway.testing._engine_machine import EngineMachine as EngineMachine
from laneway.testing._engine_machine import RequestMachine as RequestMachine

__all__ = ["AdmissionMachine", "DecodingMachine", "EngineMachine", "RequestMachine"]
