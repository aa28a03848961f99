"""Many prompts under one permit, an outcome for each.

::

    for outcome in await batch.complete(model, ["One", "Two", "Three"], max_tokens=16):
        print(outcome.id, outcome.stop_reason, outcome.text)

What is wrong with one item is that item's outcome and costs its siblings nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, Unpack

import attrs
import trio

from laneway import (
    BatchEvent,
    ContextOverflowError,
    Done,
    InferenceCancelledError,
    InvalidRequestError,
    LanewayError,
    Model,
    Operation,
    PluginSpec,
    Prepared,
    RequestContext,
    Run,
    Stats,
    StopReason,
    TextDelta,
    TokenLogprob,
    Tokens,
    hookimpl,
)
from laneway_plugins._messages import Message, Messages
from laneway_plugins.completion import CompletionFields, CompletionRequest, Job, prepare_job

MINTED = "batch-"
"""How ids begin that are made up for items without one: ``batch-0`` for the first item, and so on."""


@attrs.frozen(init=False)
class BatchItem:
    """One prompt of a batch, with an id of its own or with fields that differ from the batch's.

    Nothing is checked yet: the batch does that, so that a bad item is an outcome like any other.
    """

    messages: Messages
    id: str | None
    fields: Mapping[str, Any]

    def __init__(self, messages: Messages, *, id: str | None = None, **fields: Unpack[CompletionFields]) -> None:
        """
        :param messages: a raw prompt or a chat
        :param id: what its events and its outcome are tagged with
        :param fields: those of :class:`CompletionRequest`; they go before the batch's
        """
        self.__attrs_init__(messages, id, dict(fields))


Prompt = str | Iterable[Message | Mapping[str, str]] | BatchItem


@attrs.frozen
class Member:
    """An item as the batch sees it: its id, and a valid request or what is wrong with it."""

    id: str
    request: CompletionRequest | None
    error: InvalidRequestError | None = None


@attrs.frozen(init=False)
class BatchRequest:
    """Prompts, and how to answer them; ``fields`` are those of :class:`CompletionRequest` for every item.

    Raises :class:`InvalidRequestError` when made without items, with wrong ``fields``, or with ids that are wrong or
    used twice.  What is wrong with an item's own prompt or fields is kept in its :class:`Member`.
    """

    members: tuple[Member, ...]

    def __init__(self, prompts: Iterable[Prompt], **fields: Unpack[CompletionFields]) -> None:
        if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
            raise InvalidRequestError(
                f"must be a list of prompts, not {type(prompts).__name__}; for a single one see completion", "prompts"
            )
        # A field of a chat template needs a chat to be checked with.
        checked = _request([Message("user", "")] if fields.get("chat_template_kwargs") else "", fields)
        # As the check has made them of what was given: an iterator of stop strings, say, can be read only once.
        common = {name: getattr(checked, name) for name in fields}
        items = [prompt if isinstance(prompt, BatchItem) else BatchItem(prompt) for prompt in prompts]
        if not items:
            raise InvalidRequestError("a batch needs at least one prompt", "prompts")
        ids: set[str] = set()
        members = []
        for index, item in enumerate(items):
            name = _id_of(item, index, ids)
            ids.add(name)
            members.append(_member(name, item, common))
        self.__attrs_init__(tuple(members))


def _id_of(item: BatchItem, index: int, taken: set[str]) -> str:
    if item.id is None:
        return f"{MINTED}{index}"
    if not isinstance(item.id, str) or not item.id:
        raise InvalidRequestError(f"the id of item {index} must be a str that is not empty, not {item.id!r}", "id")
    if item.id.startswith(MINTED):
        raise InvalidRequestError(
            f"the id of item {index} is {item.id!r}; ids that begin with {MINTED!r} are for items without one", "id"
        )
    if item.id in taken:
        raise InvalidRequestError(f"two items have the id {item.id!r}", "id")
    return item.id


def _member(name: str, item: BatchItem, fields: Mapping[str, Any]) -> Member:
    try:
        return Member(name, _request(item.messages, {**fields, **item.fields}))
    except InvalidRequestError as error:
        return Member(name, None, error)


def _request(messages: Messages, fields: Mapping[str, Any]) -> CompletionRequest:
    for field in fields:
        if field not in CompletionFields.__annotations__:
            known = ", ".join(sorted(CompletionFields.__annotations__))
            raise InvalidRequestError(f"there is no such field; there are: {known}", field)
    return CompletionRequest(messages, **fields)


@attrs.frozen
class BatchOutcome:
    """How one item ended.

    ``stop_reason`` is ``eos``, ``length`` or ``stop`` for an answer, ``cancelled`` or ``error`` with ``error`` set for
    the rest; ``text`` and ``tokens`` hold what there was until then.
    """

    id: str
    text: str
    stats: Stats
    stop_reason: StopReason
    error: Exception | None = None
    tokens: tuple[int, ...] = attrs.field(default=(), repr=False)
    logprobs: tuple[TokenLogprob, ...] = attrs.field(default=(), repr=False)


def stream(
    model: Model,
    prompts: Iterable[Prompt],
    *,
    request_id: str | None = None,
    overflow: Literal["queue", "reject"] | None = None,
    queue_timeout: float | None = None,
    cap: float | None = None,
    backpressure: Literal["merge", "pause"] = "merge",
    **fields: Unpack[CompletionFields],
) -> AbstractAsyncContextManager[Run]:
    """Answer ``prompts`` for the length of a block, which gets the run.

    Iterate for :class:`BatchEvent`, each with the id of its item; ``await run.result()`` gives the outcomes, in input
    order.

    A cancelled batch ends every member that has not ended, each with its :class:`Done`, and then raises
    :class:`InferenceCancelledError` like any other run.

    :param prompts: raw prompts, chats, or :class:`BatchItem`
    :param request_id: and what follows up to ``backpressure``: see :meth:`laneway.Engine.run`
    :param fields: those of :class:`CompletionRequest`, for all items
    """
    return model.engine.run(
        model,
        "batch",
        BatchRequest(prompts, **fields),
        request_id=request_id,
        overflow=overflow,
        queue_timeout=queue_timeout,
        cap=cap,
        backpressure=backpressure,
    )


async def complete(
    model: Model,
    prompts: Iterable[Prompt],
    *,
    request_id: str | None = None,
    overflow: Literal["queue", "reject"] | None = None,
    queue_timeout: float | None = None,
    cap: float | None = None,
    **fields: Unpack[CompletionFields],
) -> list[BatchOutcome]:
    """Answer ``prompts``: an outcome for each, in input order.  The parameters are those of :func:`stream`.

    Raises what :meth:`laneway.Engine.run` and the run raise, never what concerns one item alone.
    """
    async with stream(
        model,
        prompts,
        request_id=request_id,
        overflow=overflow,
        queue_timeout=queue_timeout,
        cap=cap,
        **fields,
    ) as run:
        outcomes: list[BatchOutcome] = await run.result()
    return outcomes


@attrs.frozen
class _Ready:
    """An item after ``prepare``: a job, or the outcome that it has without one."""

    id: str
    job: Job | None
    error: Exception | None = None


async def prepare(model: Model, request: BatchRequest) -> Prepared:
    """The operation's ``prepare``: a bad item is noted, a good one made ready."""
    ready = []
    for member in request.members:
        await trio.lowlevel.checkpoint()
        ready.append(await _ready(model, member))
    return Prepared(weight=max(1, sum(item.job is not None for item in ready)), payload=tuple(ready))


async def _ready(model: Model, member: Member) -> _Ready:
    if member.request is None:
        return _Ready(member.id, None, member.error)
    try:
        return _Ready(member.id, await prepare_job(model, member.request))
    except (InvalidRequestError, ContextOverflowError) as error:
        return _Ready(member.id, None, error)


async def handler(ctx: RequestContext, prepared: Prepared) -> list[BatchOutcome]:
    """The operation's ``handler``: asks for every answer at once and leaves the slots to the scheduler (rule A15)."""
    members = [_Live(ctx, item) for item in prepared.payload]
    try:
        async with contextlib.AsyncExitStack() as slots:
            for member in members:
                await member.open(slots)
            try:
                async with trio.open_nursery() as nursery:
                    for member in members:
                        nursery.start_soon(member.finish)
            finally:
                # All of them before anybody waits, so that they leave at the same step.
                for member in members:
                    member.drop()
    except BaseException as error:
        # The reader hears of every item also when they are cancelled, in a teardown that never waits (rule R4).
        for member in members:
            member.cancelled(_reason(error))
        raise
    return [member.ended for member in members]


class _Live:
    """One item while the batch runs."""

    def __init__(self, ctx: RequestContext, item: _Ready) -> None:
        self._ctx = ctx
        self._item = item
        self._tokens: Tokens | None = None
        self._outcome: BatchOutcome | None = None

    @property
    def ended(self) -> BatchOutcome:
        """The outcome of an item that has ended."""
        assert self._outcome is not None
        return self._outcome

    async def open(self, slots: contextlib.AsyncExitStack) -> None:
        """Ask for the answer, if there is something to ask."""
        job = self._item.job
        if job is None:
            self._end("error", self._item.error)
            return
        request = job.request
        try:
            self._tokens = await slots.enter_async_context(
                self._ctx.generate(
                    job.prompt,
                    request.sampling,
                    max_tokens=request.max_tokens,
                    stop=request.stop,
                    deliver=self._deliver,
                )
            )
        except LanewayError as error:
            self._end("error", error)

    def _deliver(self, delta: TextDelta) -> None:
        self._ctx.put(BatchEvent(self._item.id, delta))

    async def finish(self) -> None:
        """Wait for the answer; whatever goes wrong with it is this item's outcome."""
        if self._tokens is None:
            return
        try:
            answer = await self._tokens.finish()
        except Exception as error:
            self._end("error", error)
        else:
            self._end(answer.stop_reason, logprobs=answer.logprobs)

    def drop(self) -> None:
        """Leave at the next step."""
        if self._tokens is not None:
            self._tokens.drop()

    def cancelled(self, reason: str) -> None:
        """End as cancelled, unless it has ended already."""
        if self._outcome is None:
            text, tokens, stats = self._made()
            self._end("cancelled", InferenceCancelledError(self._ctx.request_id, reason, text, tokens, stats))

    def _made(self) -> tuple[str, tuple[int, ...], Stats]:
        if self._tokens is None:
            return "", (), Stats()
        return self._tokens.text, self._tokens.tokens, self._tokens.stats

    def _end(self, reason: StopReason, error: Exception | None = None, logprobs: tuple[TokenLogprob, ...] = ()) -> None:
        text, tokens, stats = self._made()
        self._outcome = BatchOutcome(self._item.id, text, stats, reason, error, tokens, logprobs)
        self._ctx.put(BatchEvent(self._item.id, Done(reason, stats, error)))


def _reason(error: BaseException) -> str:
    """Why the batch is being cancelled, as whoever cancelled it said."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, trio.Cancelled) and error.reason:
        return error.reason
    return "the batch was cancelled"


@hookimpl
def laneway_plugin() -> PluginSpec:
    """Declare the operation ``batch``."""
    return PluginSpec(
        name="batch",
        operations=(Operation(kind="batch", request_type=BatchRequest, prepare=prepare, handler=handler),),
    )
