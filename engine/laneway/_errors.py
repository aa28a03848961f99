"""Every error that Laneway raises on purpose, named by what went wrong.

All of them derive from :class:`LanewayError`.  The fields carry the facts, ``str()`` gives the sentence a person
reads: what happened, with which numbers, and what to do about it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import attrs

if TYPE_CHECKING:
    from laneway._events import Stats

PROGRAM_ENDS = (KeyboardInterrupt, SystemExit)
"""What ends the whole program.  Whatever else a plugin raises is an affair of its request or its model (rule C10)."""


def holds(error: BaseException, kinds: type[BaseException] | tuple[type[BaseException], ...]) -> bool:
    """Whether ``error`` is of one of ``kinds``, or a group with one of them in it."""
    if isinstance(error, BaseExceptionGroup):
        return any(holds(leaf, kinds) for leaf in error.exceptions)
    return isinstance(error, kinds)


def shown(value: object) -> str:
    """``value`` for an error that refuses it: its repr, shortened, or its type if the repr fails.

    Python refuses to write an int of more than some thousand digits.
    """
    try:
        text = repr(value)
    except Exception:
        if isinstance(value, int):
            return f"an int of {value.bit_length():,} bits"
        return f"an object of type {type(value).__name__}"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}... ({len(text)} characters)"


LONGEST_SHOWN = 120
"""Characters of a refused value that an error shows."""

RejectionReason = Literal["queue_full", "overflow", "queue_timeout", "busy"]
"""Why a lane refused: rule A4 of the contract."""


class LanewayError(Exception):
    """Base of all errors of this package.  Never raised itself."""


@attrs.define(slots=False, eq=False)
class RequestRejectedByPolicyError(LanewayError):
    """The lane refused a well-formed request.  The same request may be admitted later; nothing was started."""

    request_id: str
    kind: str
    model: str
    reason: RejectionReason
    waiting: int
    limit: int

    def __str__(self) -> str:
        head = f"{self.kind} request {self.request_id!r} on model {self.model!r} was refused"
        if self.reason == "queue_full":
            return f"{head}: {self.waiting} requests wait and the queue holds {self.limit}; retry when some have ended"
        if self.reason == "overflow":
            return f"{head}: it could not start at once and asked not to wait; use overflow='queue' to wait in line"
        if self.reason == "queue_timeout":
            return (
                f"{head}: it waited for its queue_timeout without a turn ({self.waiting} still wait); allow more time"
            )
        return f"{head}: another {self.kind} is live on this model and only one may be; wait for its end or cancel it"


@attrs.define(slots=False, eq=False)
class RequestIdConflictError(LanewayError):
    """The request id is in use by a live request (rule A9)."""

    request_id: str
    state: str

    def __str__(self) -> str:
        return (
            f"request id {self.request_id!r} belongs to a request that is {self.state}; "
            "ids are free again when teardown has ended: pick another, or await engine.wait_ended(id)"
        )


@attrs.define(slots=False, eq=False)
class InferenceCancelledError(LanewayError):
    """The engine ended this request: by id, by model, by unload or by shutdown (rule C6).

    Not raised when the caller's own scope was cancelled: that is :class:`trio.Cancelled`.
    ``text``, ``tokens`` and ``stats`` hold what had been made until then.
    """

    request_id: str
    reason: str
    text: str = ""
    tokens: tuple[int, ...] = attrs.field(default=(), repr=False)
    stats: Stats | None = None

    def __str__(self) -> str:
        return f"request {self.request_id!r} was cancelled ({self.reason}) after {len(self.tokens)} tokens"


@attrs.define(slots=False, eq=False)
class ContextOverflowError(LanewayError):
    """A prompt that can never fit into what one slot holds (rule A10).  ``window`` is in tokens.

    ``at_least``: the prompt was refused before its tokens were made, so ``prompt_tokens`` is only a lower bound.
    """

    prompt_tokens: int
    window: int
    context_size: int
    parallel: int
    at_least: bool = False

    def __str__(self) -> str:
        count = f"at least {self.prompt_tokens}" if self.at_least else str(self.prompt_tokens)
        return (
            f"the prompt has {count} tokens and one slot holds {self.window} "
            f"(context_size {self.context_size} / parallel {self.parallel}), of which one is for the answer; "
            "shorten the prompt, or load the model with a larger context_size or a smaller parallel"
        )


@attrs.define(slots=False, eq=False)
class InvalidRequestError(LanewayError):
    """The request is wrong, or this model can never do what it asks for.  ``field`` names the wrong field, if any."""

    reason: str
    field: str | None = None

    def __str__(self) -> str:
        return self.reason if self.field is None else f"{self.field}: {self.reason}"


@attrs.define(slots=False, eq=False)
class ModelLoadError(LanewayError):
    """A model could not be loaded.  Contrast :class:`ModelNotLoadedError`: there was one and it is gone."""

    source: str
    reason: str

    def __str__(self) -> str:
        return f"cannot load model {self.source!r}: {self.reason}"


@attrs.define(slots=False, eq=False)
class ModelNotLoadedError(LanewayError):
    """The model was unloaded, is unloading, or has failed."""

    model: str
    reason: str

    def __str__(self) -> str:
        return f"model {self.model!r} takes no requests: {self.reason}"


class EngineClosedError(LanewayError):
    """The engine is shutting down or has shut down."""

    def __str__(self) -> str:
        return "the engine is closed: requests need the block of open_engine() that made it"


@attrs.define(slots=False, eq=False)
class OperationNotFoundError(LanewayError):
    """No plugin declares an operation of this kind for this model."""

    kind: str
    model: str
    known: tuple[str, ...]

    def __str__(self) -> str:
        known = ", ".join(self.known) or "none"
        return f"no operation {self.kind!r} for model {self.model!r}; known: {known} (see: laneway plugins)"


@attrs.define(slots=False, eq=False)
class PluginDeclarationError(LanewayError):
    """A plugin declares something that cannot be run.  Names the plugin and the distribution that brought it."""

    plugin: str
    distribution: str
    reason: str

    def __str__(self) -> str:
        return f"plugin {self.plugin!r} (from {self.distribution}): {self.reason}"


@attrs.define(slots=False, eq=False)
class CacheKeyError(LanewayError):
    """A key of a KV cache that names no file inside the cache directory."""

    key: str
    reason: str

    def __str__(self) -> str:
        return f"cache key {self.key!r}: {self.reason}"


@attrs.define(slots=False, eq=False)
class DecodeError(LanewayError):
    """A native step failed, or gave one of its sequences no token, which ended alone.

    ``status`` is the backend's code, ``sequences`` how many took part and were ended: the same number for all of them.
    """

    reason: str
    status: int = 0
    sequences: int = 0

    def __str__(self) -> str:
        ended = "1 sequence" if self.sequences == 1 else f"{self.sequences} sequences"
        return f"the decode step failed: {self.reason} (status {self.status}, {ended} ended)"


@attrs.define(slots=False, eq=False)
class FinetuneError(LanewayError):
    """A training was refused, or ended badly.

    ``step`` counts optimiser steps, ``log_line`` is the last that the training process has logged.
    """

    reason: str
    step: int | None = None
    log_line: str = ""

    def __str__(self) -> str:
        text = self.reason if self.step is None else f"{self.reason} (at step {self.step})"
        return f"{text}; its log ends with: {self.log_line}" if self.log_line else text


@attrs.define(slots=False, eq=False)
class TranslationError(LanewayError):
    """A text could not be translated."""

    reason: str

    def __str__(self) -> str:
        return self.reason
