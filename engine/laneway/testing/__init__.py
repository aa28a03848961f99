"""What tests of programs and plugins that use Laneway need: no model, no threads, no real time.

- :class:`ScriptedLoader` brings models named ``scripted:...`` to an engine.
- :class:`ScriptedDecoder` and :class:`ScriptedTokenizer` are what such a model is made of; :func:`expected_answer` says
  what it must answer.
- :class:`GuestRun` drives a Trio run from synchronous code, a step at a time, in virtual time.
- :func:`check_plugin` tries whether a plugin keeps what it declares.
- :mod:`laneway.testing.strategies` draws requests, :mod:`laneway.testing.machines` holds state machines that judge an
  implementation by the contract.  These two need Hypothesis.

With Laneway installed, pytest has the fixtures of :mod:`laneway_pytest`.
"""

from __future__ import annotations

from laneway.testing._backend import ScriptedLoader as ScriptedLoader
from laneway.testing._backend import ScriptedOptions as ScriptedOptions
from laneway.testing._backend import scripted_backend as scripted_backend
from laneway.testing._backend import scripted_loader_plugin as scripted_loader_plugin
from laneway.testing._check_plugin import BrokenPromise as BrokenPromise
from laneway.testing._check_plugin import CheckedOperation as CheckedOperation
from laneway.testing._check_plugin import Promise as Promise
from laneway.testing._check_plugin import check_plugin as check_plugin
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
