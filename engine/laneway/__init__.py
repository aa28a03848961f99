"""Laneway runs language models inside a Trio program.

All requests on one loaded model go through one lane, first come, first served, and are decoded together; cancelling
one leaves the others decoding.  Start at :func:`open_engine`.
"""

from __future__ import annotations

from laneway._declarations import Backend as Backend
from laneway._declarations import Gate as Gate
from laneway._declarations import Loader as Loader
from laneway._declarations import Operation as Operation
from laneway._declarations import Overflow as Overflow
from laneway._declarations import PluginSpec as PluginSpec
from laneway._declarations import Prepared as Prepared
from laneway._declarations import RequestContext as RequestContext
from laneway._declarations import Scope as Scope
from laneway._declarations import Use as Use
from laneway._engine import Engine as Engine
from laneway._engine import open_engine as open_engine
from laneway._errors import CacheKeyError as CacheKeyError
from laneway._errors import ContextOverflowError as ContextOverflowError
from laneway._errors import DecodeError as DecodeError
from laneway._errors import EngineClosedError as EngineClosedError
from laneway._errors import FinetuneError as FinetuneError
from laneway._errors import InferenceCancelledError as InferenceCancelledError
from laneway._errors import InvalidRequestError as InvalidRequestError
from laneway._errors import LanewayError as LanewayError
from laneway._errors import ModelLoadError as ModelLoadError
from laneway._errors import ModelNotLoadedError as ModelNotLoadedError
from laneway._errors import OperationNotFoundError as OperationNotFoundError
from laneway._errors import PluginDeclarationError as PluginDeclarationError
from laneway._errors import RequestIdConflictError as RequestIdConflictError
from laneway._errors import RequestRejectedByPolicyError as RequestRejectedByPolicyError
from laneway._errors import TranslationError as TranslationError
from laneway._events import BatchEvent as BatchEvent
from laneway._events import CacheReport as CacheReport
from laneway._events import Done as Done
from laneway._events import Event as Event
from laneway._events import Progress as Progress
from laneway._events import Stats as Stats
from laneway._events import StopReason as StopReason
from laneway._events import TextDelta as TextDelta
from laneway._events import TokenLogprob as TokenLogprob
from laneway._kvcache._caches import CacheDeletion as CacheDeletion
from laneway._kvcache._caches import CacheEntry as CacheEntry
from laneway._kvcache._caches import CachePlan as CachePlan
from laneway._kvcache._caches import KVCaches as KVCaches
from laneway._kvcache._retention import CacheRetention as CacheRetention
from laneway._kvcache._turns import CacheTurn as CacheTurn
from laneway._model import Model as Model
from laneway._records import RequestRecord as RequestRecord
from laneway._run import Run as Run
from laneway._snapshot import EngineSnapshot as EngineSnapshot
from laneway._snapshot import LaneSnapshot as LaneSnapshot
from laneway._snapshot import ModelSnapshot as ModelSnapshot
from laneway._snapshot import RequestSnapshot as RequestSnapshot
from laneway._sources import ModelSource as ModelSource
from laneway._tokens import Answer as Answer
from laneway._tokens import SavedState as SavedState
from laneway._tokens import Tokens as Tokens
from laneway.decoder import Sampling as Sampling
from laneway.hookspecs import hookimpl as hookimpl

__version__ = "0.1.0"
