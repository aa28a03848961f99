"""What tests of programs and plugins that use Laneway need: no model, no threads, no real time.

:class:`ScriptedDecoder` stands in for a model, :class:`ScriptedTokenizer` for its vocabulary, and
:func:`expected_answer` says what a sequence must be answered.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from laneway.testing._decoder import SCRIPTED_POLICY as SCRIPTED_POLICY
    from laneway.testing._decoder import Call as Call
    from laneway.testing._decoder import ProtocolViolation as ProtocolViolation
    from laneway.testing._decoder import ScriptedDecoder as ScriptedDecoder
    from laneway.testing._decoder import ScriptedStatistics as ScriptedStatistics
    from laneway.testing._guest import GuestRun as GuestRun
    from laneway.testing._guest import GuestRunError as GuestRunError
    from laneway.testing._guest import GuestTask as GuestTask
    from laneway.testing._scripted_model import Script as Script
    from laneway.testing._scripted_model import ScriptedAnswer as ScriptedAnswer
    from laneway.testing._scripted_model import expected_answer as expected_answer
    from laneway.testing._scripted_model import expected_tokens as expected_tokens
    from laneway.testing._tokenizer import SCRIPTED_CHAT_TEMPLATE as SCRIPTED_CHAT_TEMPLATE
    from laneway.testing._tokenizer import ScriptedTokenizer as ScriptedTokenizer

# Loaded when first asked for: pytest imports this package for its plugin in every run, also of suites that never touch
# Laneway, and those should pay for neither trio nor the engine.
_HOMES = {
    "SCRIPTED_POLICY": "_decoder",
    "Call": "_decoder",
    "ProtocolViolation": "_decoder",
    "ScriptedDecoder": "_decoder",
    "ScriptedStatistics": "_decoder",
    "GuestRun": "_guest",
    "GuestRunError": "_guest",
    "GuestTask": "_guest",
    "Script": "_scripted_model",
    "ScriptedAnswer": "_scripted_model",
    "expected_answer": "_scripted_model",
    "expected_tokens": "_scripted_model",
    "SCRIPTED_CHAT_TEMPLATE": "_tokenizer",
    "ScriptedTokenizer": "_tokenizer",
}

__all__ = sorted(_HOMES)

if not TYPE_CHECKING:  # so that a type checker knows the names above and no others

    def __getattr__(name: str) -> object:
        try:
            home = _HOMES[name]
        except KeyError:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
        value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
