"""Summaries of texts that may be longer than a slot's window.

::

    summary = await laneway_summarise.summarise(model, text, max_tokens=100)

The text is cut into parts that fit.  All parts are summarised together, under one permit and in as many slots as are
free, and the summary of the whole is made of theirs.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, Literal

import attrs
import trio

from laneway import (
    ContextOverflowError,
    InvalidRequestError,
    Model,
    Operation,
    PluginSpec,
    Prepared,
    Progress,
    RequestContext,
    Run,
    Stats,
    StopReason,
    Tokens,
    hookimpl,
)
from laneway.validators import of_type, whole
from laneway_plugins.completion import CompletionRequest, Job, prepare_job

INSTRUCTION = "Summarise the following text in a few plain sentences."


def _not_blank(instance: object, attribute: attrs.Attribute[Any], value: str) -> None:
    if not value.strip():
        raise InvalidRequestError("must not be blank", attribute.name)


@attrs.frozen
class SummariseRequest:
    """A text, and the most tokens that its summary, or that of one of its parts, may have.

    Raises :class:`laneway.InvalidRequestError` when made with anything wrong.
    """

    text: str = attrs.field(validator=[of_type(str), _not_blank])
    max_tokens: int = attrs.field(default=128, kw_only=True, validator=whole(1, 4096))
    instruction: str = attrs.field(default=INSTRUCTION, kw_only=True, validator=[of_type(str), _not_blank])


@attrs.frozen
class Summary:
    """The summary of a text, of how many parts it was made, why it ended, and the figures of the whole work."""

    text: str
    parts: int
    stop_reason: StopReason
    stats: Stats


def stream(
    model: Model,
    text: str,
    *,
    max_tokens: int = 128,
    instruction: str = INSTRUCTION,
    request_id: str | None = None,
    overflow: Literal["queue", "reject"] | None = None,
) -> AbstractAsyncContextManager[Run]:
    """Summarise ``text`` for the length of a block, which gets the run.

    Iterate for :class:`laneway.Progress` while parts are read, :class:`laneway.TextDelta` of the summary, and
    :class:`laneway.Done`; ``await run.result()`` gives the :class:`Summary`.
    """
    request = SummariseRequest(text, max_tokens=max_tokens, instruction=instruction)
    return model.engine.run(model, "summarise", request, request_id=request_id, overflow=overflow)


async def summarise(model: Model, text: str, *, max_tokens: int = 128, instruction: str = INSTRUCTION) -> Summary:
    """Summarise ``text`` and return the whole :class:`Summary`.  Cancelling the caller ends the request."""
    async with stream(model, text, max_tokens=max_tokens, instruction=instruction) as run:
        summary: Summary = await run.result()
    return summary


async def prepare(model: Model, request: SummariseRequest) -> Prepared:
    """Cut the text into parts.  What can never run is refused here, before the request takes a ticket."""
    overhead = len((await _job(model, request, "")).prompt)
    room = model.window - overhead - request.max_tokens
    # Two more for each part's summary: what stands between it and the next one.
    most = room // (request.max_tokens + 2)
    if most < 2:
        raise InvalidRequestError(
            f"a slot of model {model.name!r} holds {model.window} tokens, which leaves {max(room, 0)} for the text and "
            "takes no two summaries; lower max_tokens, or load the model with a larger context_size",
            "max_tokens",
        )
    parts = await _cut(model, request, request.text)
    if len(parts) > most:
        raise InvalidRequestError(
            f"it makes {len(parts)} parts, and a slot holds the summaries of {most}; shorten it, lower max_tokens, or "
            "load the model with a larger context_size",
            "text",
        )
    return Prepared(weight=len(parts), payload=(request, parts))


async def handler(ctx: RequestContext, prepared: Prepared) -> Summary:
    """Summarise the parts, then their summaries.  What it opens, the engine takes back, however this ends."""
    request, parts = prepared.payload
    job = parts[0]
    if len(parts) > 1:
        summaries = []
        async with AsyncExitStack() as opened:
            # All are asked for before any is awaited: they share the model's steps.
            answers = [await opened.enter_async_context(_generate(ctx, part)) for part in parts]
            for number, answer in enumerate(answers, 1):
                summaries.append((await answer.finish()).text.strip())
                await ctx.emit(Progress(number, len(parts), "part"))
        job = await _job(ctx.model, request, "\n\n".join(summaries))
    # Straight to the reader: this task sleeps until the answer has ended.
    async with _generate(ctx, job, deliver=ctx.put) as tokens:
        last = await tokens.finish()
    return Summary(last.text, len(parts), last.stop_reason, ctx.stats)


def _generate(ctx: RequestContext, job: Job, **more: Any) -> AbstractAsyncContextManager[Tokens]:
    return ctx.generate(job.prompt, job.request.sampling, max_tokens=job.request.max_tokens, **more)


async def _job(model: Model, request: SummariseRequest, text: str) -> Job:
    """The prompt that asks for the summary of ``text``; raises :class:`ContextOverflowError` if it does not fit."""
    prompt = f"{request.instruction}\n\n{text}"
    chats = model.tokenizer.chat_template is not None
    messages = [{"role": "user", "content": prompt}] if chats else f"{prompt}\n\nSummary:"
    return await prepare_job(model, CompletionRequest(messages, max_tokens=request.max_tokens, temperature=0.0))


async def _cut(model: Model, request: SummariseRequest, text: str) -> list[Job]:
    """Jobs for parts of ``text``, in order, each with room for its answer."""
    try:
        job = await _job(model, request, text)
        if len(job.prompt) + request.max_tokens <= model.window:
            return [job]
    except ContextOverflowError:
        pass
    # Tokenising is work: let other tasks have a turn between two cuts.
    await trio.lowlevel.checkpoint()
    head, tail = halve(text)
    return [*await _cut(model, request, head), *await _cut(model, request, tail)]


def halve(text: str) -> tuple[str, str]:
    """Cut ``text`` before its middle: behind a paragraph, a line, a sentence or a word, if one ends near by."""
    middle = len(text) // 2
    for border in ("\n\n", "\n", ". ", " "):
        at = text.rfind(border, middle // 2, middle)
        if at >= 0:
            return text[: at + len(border)], text[at + len(border) :]
    return text[:middle], text[middle:]


@hookimpl
def laneway_plugin() -> PluginSpec:
    """Declare the operation ``summarise``."""
    return PluginSpec(
        name="summarise",
        operations=(Operation(kind="summarise", request_type=SummariseRequest, prepare=prepare, handler=handler),),
    )
