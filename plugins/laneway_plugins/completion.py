"""One prompt or chat, one answer.

::

    answer = await completion.complete(model, [{"role": "user", "content": "Why is the sky blue?"}], max_tokens=64)

    async with completion.stream(model, "Once upon a time") as run:
        async for event in run: ...
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, TypedDict, Unpack

import attrs

from laneway import (
    Answer,
    CachePlan,
    CacheTurn,
    InvalidRequestError,
    Model,
    Operation,
    PluginSpec,
    Prepared,
    RequestContext,
    Run,
    Sampling,
    SavedState,
    Stats,
    StopReason,
    TokenLogprob,
    hookimpl,
)
from laneway.validators import optional, whole
from laneway_plugins._messages import Message as Message
from laneway_plugins._messages import Messages, to_messages
from laneway_plugins._prompts import to_tokens
from laneway_plugins._template_variables import to_variables

MAX_STOP_STRINGS = 16
"""Stop strings that one request may have."""


class CompletionFields(TypedDict, total=False):
    """The fields of :class:`CompletionRequest` beside the messages, for signatures."""

    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    stop: str | Iterable[str]
    frequency_penalty: float
    presence_penalty: float
    repeat_penalty: float
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None
    logprobs: bool
    top_logprobs: int
    grammar: str | None
    kv_cache: str | bool | None
    chat_template_kwargs: Mapping[str, Any] | None


def _stop_strings(value: str | Iterable[str]) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    if isinstance(strings, (bytes, Mapping)) or not isinstance(strings, Iterable):
        raise InvalidRequestError(f"must be a str or a list of them, not {value!r}", "stop")
    out = tuple(strings)
    for string in out:
        if not isinstance(string, str):
            raise InvalidRequestError(f"a stop string is a str, not {string!r}", "stop")
        if not string:
            raise InvalidRequestError("a stop string must not be empty: it would stop every answer at once", "stop")
        try:
            string.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"a stop string is not valid Unicode: {error.reason}", "stop") from None
    if len(out) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"at most {MAX_STOP_STRINGS} stop strings are taken, not {len(out)}", "stop")
    return out


def _biases(value: Mapping[int, float] | Sequence[tuple[int, float]] | None) -> tuple[tuple[int, float], ...]:
    return Sampling(logit_bias=value).logit_bias


def _cache_name(value: str | bool | None) -> str | bool | None:
    if value is None or value is False:
        return None
    if value is not True and not isinstance(value, str):
        raise InvalidRequestError(f"must be a key (a str), True or None, not {value!r}", "kv_cache")
    return value


def _names_a_conversation(instance: CompletionRequest, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is True and isinstance(instance.messages, str):
        raise InvalidRequestError(
            "True finds a conversation by its messages, and a raw prompt has none; give the cache a key", "kv_cache"
        )


def _needs_a_template(instance: CompletionRequest, attribute: attrs.Attribute[Any], value: Mapping[str, Any]) -> None:
    if value and isinstance(instance.messages, str):
        raise InvalidRequestError(
            "a raw prompt goes without the model's chat template; give messages as a list", "chat_template_kwargs"
        )


def _needs_logprobs(instance: CompletionRequest, attribute: attrs.Attribute[Any], value: object) -> None:
    if value and instance.logprobs is False:
        raise InvalidRequestError("needs logprobs=True", "top_logprobs")


_DEFAULT = Sampling()


@attrs.frozen
class CompletionRequest:
    """A prompt, and how to answer it.  Raises :class:`InvalidRequestError` when made with anything wrong.

    ``messages`` is a str, taken as it is, or a chat, which the model's own template makes a prompt of.  ``stop`` is one
    string or several that end the answer and are no part of it.  ``max_tokens`` None: until the window is full.
    ``top_logprobs`` needs ``logprobs``.  ``kv_cache`` keeps the model's memory of the conversation on disk, so that the
    next turn computes what is new and nothing else: a key names the conversation, True finds it by its messages.
    ``chat_template_kwargs`` are more names for the model's template, such as ``{"enable_thinking": False}``, with
    values like those of JSON; the template says which names it knows.  For the rest see :class:`laneway.Sampling`,
    whose defaults hold.
    """

    messages: str | tuple[Message, ...] = attrs.field(converter=to_messages)
    max_tokens: int | None = attrs.field(default=None, kw_only=True, validator=optional(whole(1, 2**31 - 1)))
    temperature: float = attrs.field(default=_DEFAULT.temperature, kw_only=True)
    top_k: int = attrs.field(default=_DEFAULT.top_k, kw_only=True)
    top_p: float = attrs.field(default=_DEFAULT.top_p, kw_only=True)
    min_p: float = attrs.field(default=_DEFAULT.min_p, kw_only=True)
    seed: int | None = attrs.field(default=_DEFAULT.seed, kw_only=True)
    stop: tuple[str, ...] = attrs.field(default=(), kw_only=True, converter=_stop_strings)
    frequency_penalty: float = attrs.field(default=_DEFAULT.frequency_penalty, kw_only=True)
    presence_penalty: float = attrs.field(default=_DEFAULT.presence_penalty, kw_only=True)
    repeat_penalty: float = attrs.field(default=_DEFAULT.repeat_penalty, kw_only=True)
    logit_bias: tuple[tuple[int, float], ...] = attrs.field(default=(), kw_only=True, converter=_biases)
    logprobs: bool = attrs.field(default=_DEFAULT.logprobs, kw_only=True)
    top_logprobs: int = attrs.field(default=_DEFAULT.top_logprobs, kw_only=True, validator=_needs_logprobs)
    grammar: str | None = attrs.field(default=_DEFAULT.grammar, kw_only=True)
    kv_cache: str | bool | None = attrs.field(
        default=None, kw_only=True, converter=_cache_name, validator=_names_a_conversation
    )
    chat_template_kwargs: Mapping[str, Any] = attrs.field(
        default=None, kw_only=True, converter=to_variables, validator=_needs_a_template, hash=False
    )
    sampling: Sampling = attrs.field(init=False, repr=False)
    """The fields that say how tokens are picked, checked."""

    @sampling.default
    def _make_sampling(self) -> Sampling:
        return Sampling(**{field.name: getattr(self, field.name) for field in attrs.fields(Sampling)})


@attrs.frozen
class Completion:
    """An answer.

    ``tokens`` are without the end token, ``stop_reason`` is ``eos``, ``length`` or ``stop``, and there is one of
    ``logprobs`` for each token if they were asked for.
    """

    text: str
    tokens: tuple[int, ...] = attrs.field(repr=False)
    stop_reason: StopReason
    stats: Stats
    logprobs: tuple[TokenLogprob, ...] = attrs.field(default=(), repr=False)


@attrs.frozen
class Job:
    """A valid request, ready to run."""

    request: CompletionRequest
    prompt: list[int]
    cache: CachePlan | None = None


def stream(
    model: Model,
    messages: Messages,
    *,
    request_id: str | None = None,
    overflow: Literal["queue", "reject"] | None = None,
    queue_timeout: float | None = None,
    cap: float | None = None,
    backpressure: Literal["merge", "pause"] = "merge",
    **fields: Unpack[CompletionFields],
) -> AbstractAsyncContextManager[Run]:
    """Answer ``messages`` for the length of a block, which gets the run: iterate for :class:`TextDelta` events and the
    last, :class:`Done`; ``await run.result()`` gives the :class:`Completion`.

    :param request_id: and what follows up to ``backpressure``: see :meth:`laneway.Engine.run`
    :param fields: those of :class:`CompletionRequest`
    """
    return model.engine.run(
        model,
        "completion",
        CompletionRequest(messages, **fields),
        request_id=request_id,
        overflow=overflow,
        queue_timeout=queue_timeout,
        cap=cap,
        backpressure=backpressure,
    )


async def complete(
    model: Model,
    messages: Messages,
    *,
    request_id: str | None = None,
    overflow: Literal["queue", "reject"] | None = None,
    queue_timeout: float | None = None,
    cap: float | None = None,
    **fields: Unpack[CompletionFields],
) -> Completion:
    """Answer ``messages`` and return the whole answer.  The parameters are those of :func:`stream`.

    Raises what :meth:`laneway.Engine.run` and the run raise; cancelling the caller ends the request.
    """
    async with stream(
        model,
        messages,
        request_id=request_id,
        overflow=overflow,
        queue_timeout=queue_timeout,
        cap=cap,
        **fields,
    ) as run:
        answer: Completion = await run.result()
    return answer


async def prepare_job(model: Model, request: CompletionRequest) -> Job:
    """Everything that can be wrong with ``request`` on ``model`` is found here, before it arrives (rule A10).

    For operations that answer a chat as a part of what they do; they have no caches on disk.
    Raises :class:`InvalidRequestError` or :class:`ContextOverflowError`.
    """
    if request.kv_cache is not None:
        raise InvalidRequestError("only a completion of its own keeps its conversation on disk", "kv_cache")
    return await _prepare_job(model, request)


async def _prepare_job(model: Model, request: CompletionRequest) -> Job:
    prompt = await to_tokens(model, request.messages, request.chat_template_kwargs)
    model.check_prompt(prompt)
    model.check_sampling(request.sampling)
    return Job(request, prompt)


async def prepare(model: Model, request: CompletionRequest) -> Prepared:
    """The operation's ``prepare``.

    Raises :class:`CacheKeyError`, too, for a ``kv_cache`` that names no file.
    """
    job = await _prepare_job(model, request)
    if request.kv_cache is None:
        return Prepared(payload=job)
    caches = model.engine.kv_caches
    if isinstance(request.kv_cache, str):
        plan = await caches.plan(model, key=request.kv_cache)
    else:
        assert not isinstance(request.messages, str), "checked when the request was made"
        # Without the variables: turns may differ in them.  A kept state is taken only as far as the tokens agree.
        said = [(message.role, message.content) for message in request.messages]
        plan = await caches.plan(model, messages=said)
    return Prepared(keys=plan.keys, gate=plan.gate, payload=attrs.evolve(job, cache=plan))


async def handler(ctx: RequestContext, prepared: Prepared) -> Completion:
    """The operation's ``handler``."""
    job: Job = prepared.payload
    if job.cache is None:
        answer, _ = await _generate(ctx, job)
        stats = answer.stats
    else:
        # The permit and the file's key are held until the file is durable (rule K3): both are given back after this.
        async with ctx.cache_turn(job.cache, job.prompt) as turn:
            answer, state = await _generate(ctx, job, turn)
            if answer.tokens:
                await turn.commit(state, answer.text)
            else:
                turn.release("the answer has no tokens")
        stats = attrs.evolve(answer.stats, cache=turn.report)
    return Completion(answer.text, answer.tokens, answer.stop_reason, stats, answer.logprobs)


async def _generate(ctx: RequestContext, job: Job, turn: CacheTurn | None = None) -> tuple[Answer, SavedState | None]:
    request = job.request
    # Straight from the decode loop to the reader: this task sleeps until the answer has ended.
    async with ctx.generate(
        job.prompt,
        request.sampling,
        max_tokens=request.max_tokens,
        stop=request.stop,
        deliver=ctx.put,
        restore=None if turn is None else turn.state,
        keep_state=turn is not None,
    ) as tokens:
        answer = await tokens.finish()
        state = None if turn is None else await tokens.saved_state()
    return answer, state


@hookimpl
def laneway_plugin() -> PluginSpec:
    """Declare the operation ``completion``."""
    return PluginSpec(
        name="completion",
        operations=(Operation(kind="completion", request_type=CompletionRequest, prepare=prepare, handler=handler),),
    )
