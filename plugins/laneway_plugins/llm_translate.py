"""Translation with a loaded language model, in its lane like any other request.

::

    text = await llm_translate.translate(model, "Guten Morgen", source="de", target="en")
    texts = await llm_translate.translate(model, ["Guten Morgen", "", "Wie geht's?"], target="en")

How a model is asked depends on which one it is: known translation models are asked in the form that they were trained
on, all others in a plain instruction through their own chat template.  See :func:`add_form` for more of them.

A translation has a longest length, by the length of its source, and one that goes round in circles is cut before that.
A model that thinks before it answers is asked not to, and its thoughts are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, Literal, Unpack, final, overload

import attrs

from laneway import (
    BatchEvent,
    ContextOverflowError,
    Done,
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
    TextDelta,
    Tokens,
    TranslationError,
    hookimpl,
    threads,
)
from laneway.validators import of_type, optional
from laneway_plugins._language_detection import UndeterminedLanguageError as UndeterminedLanguageError
from laneway_plugins._language_detection import detect_language
from laneway_plugins._languages import Language as Language
from laneway_plugins._languages import find_language
from laneway_plugins._loops import LoopWatch, longest_translation
from laneway_plugins._signs import has_letters, peel
from laneway_plugins._thoughts import MARKERS, THOUGHT_TOKENS, SpelledOut, WithoutThought, opened_by, thinks
from laneway_plugins._translation_forms import PromptForm as PromptForm
from laneway_plugins._translation_forms import Wanted as Wanted
from laneway_plugins._translation_forms import add_form as add_form
from laneway_plugins._translation_forms import form_for, named_form, prompt_of
from laneway_plugins._translation_forms import known_forms as known_forms
from laneway_plugins._unicode import surrogate_in
from laneway_plugins.completion import CompletionFields, CompletionRequest, Job, prepare_job

NO_THINKING = {"enable_thinking": False, "thinking": False}
"""What templates are told: most ask for the first name, DeepSeek's for the second, and others know neither."""

_EDGES = re.compile(r"([\s\ufeff]*)(.*?)([\s\ufeff]*)", re.DOTALL)


class TranslateFields(CompletionFields, total=False):
    """The fields of :class:`TranslateRequest` beside text and languages, for signatures."""

    context: str | None
    form: str | PromptForm | None


def _texts(value: str | Iterable[str]) -> str | tuple[str, ...]:
    if isinstance(value, str):
        _check_text("the text", value)
        return value
    if isinstance(value, (bytes, Mapping)) or not isinstance(value, Iterable):
        raise InvalidRequestError(f"must be a str or a list of them, not {type(value).__name__}", "texts")
    texts = tuple(value)
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise InvalidRequestError(f"item {index} must be a str, not {type(text).__name__}", "texts")
        _check_text(f"item {index}", text)
    return texts


def _checked_context(context: str | None) -> str | None:
    wrong = surrogate_in(context) if isinstance(context, str) else None
    if wrong is not None:
        raise InvalidRequestError(f"it is not valid: {wrong}", "context")
    return context


def _check_text(what: str, text: str) -> None:
    wrong = surrogate_in(text)
    if wrong is not None:
        raise InvalidRequestError(f"{what} is not valid: {wrong}", "texts")


@attrs.frozen(init=False)
class TranslateRequest:
    """Text, and how to translate it.  Raises :class:`InvalidRequestError` when made with anything wrong.

    ``texts`` is one text or a list; one without a letter is its own translation.  White space at the ends of one
    stays, and so do list marks and emoji at the ends of a single line.
    ``source`` and ``target`` are ISO 639-1 or 639-3 codes, with a script or region if need be (``zh-Hant``); a source
    of None is detected.  ``context`` tells the model what the text is about.  ``form`` is a :class:`PromptForm` or the
    name of one; None chooses by the model.  The other fields are those of :class:`CompletionRequest`, but that the
    temperature is 0 and ``max_tokens`` follows from each text's length if they are not given.
    """

    texts: str | tuple[str, ...]
    target: Language
    source: Language | None
    context: str | None = attrs.field(validator=optional(of_type(str)))
    form: PromptForm | None
    fields: Mapping[str, Any]

    def __init__(
        self,
        texts: str | Iterable[str],
        *,
        target: str,
        source: str | None = None,
        context: str | None = None,
        form: str | PromptForm | None = None,
        **fields: Unpack[CompletionFields],
    ) -> None:
        for name in fields:
            if name not in CompletionFields.__annotations__:
                known = ", ".join(sorted(CompletionFields.__annotations__))
                raise InvalidRequestError(f"there is no such field; there are: {known}", name)
        given: dict[str, Any] = {"temperature": 0.0, **fields}
        # Of a chat: whether the form makes one is known later.
        CompletionRequest([{"role": "user", "content": ""}], **given)
        if form is not None and not isinstance(form, (str, PromptForm)):
            raise InvalidRequestError(f"must be a PromptForm or the name of one, not {form!r}", "form")
        self.__attrs_init__(
            _texts(texts),
            find_language(target, "target"),
            None if source is None else find_language(source, "source"),
            _checked_context(context),
            named_form(form) if isinstance(form, str) else form,
            given,
        )

    @property
    def items(self) -> tuple[str, ...]:
        """The texts as a tuple, one of one as well."""
        return (self.texts,) if isinstance(self.texts, str) else self.texts


Cut = Literal["length", "loop", "thought"]
"""Why a translation is not whole: it came to no end at its longest length; it went round in circles; the model thought,
and came to no answer."""


@attrs.frozen
class LlmTranslation:
    """One text's translation, and how the model's answer ended; ``eos`` for one that needed none.

    ``cut`` says why it is not whole, and is None where it is.  ``stop_reason`` is ``length`` for each that was cut.
    """

    text: str
    stop_reason: StopReason
    stats: Stats
    cut: Cut | None = None


@attrs.frozen
class TranslateResult:
    """All translations, in the order of the texts, and the languages; ``source`` is the one that was detected."""

    translations: tuple[LlmTranslation, ...]
    source: Language | None
    target: Language
    stats: Stats

    @property
    def texts(self) -> list[str]:
        """The translations alone."""
        return [translation.text for translation in self.translations]

    @property
    def text(self) -> str:
        """The translation of a request of one text; of several, joined by line breaks."""
        return "\n".join(self.texts)

    @property
    def stop_reason(self) -> StopReason:
        """``length`` if a translation ended so, else that of the last."""
        reasons = [translation.stop_reason for translation in self.translations]
        return "length" if "length" in reasons else (reasons[-1] if reasons else "eos")


def stream(
    model: Model,
    texts: str | Iterable[str],
    *,
    target: str,
    source: str | None = None,
    request_id: str | None = None,
    overflow: Literal["queue", "reject"] | None = None,
    queue_timeout: float | None = None,
    cap: float | None = None,
    backpressure: Literal["merge", "pause"] = "merge",
    **fields: Unpack[TranslateFields],
) -> AbstractAsyncContextManager[Run]:
    """Translate ``texts`` for the length of a block, which gets the run.  Its result is a :class:`TranslateResult`.

    Iterate for :class:`TextDelta` events of a single text, or for :class:`BatchEvent`, tagged ``"0"``, ``"1"`` and so
    on, of a list, with :class:`Progress` in texts between them.

    :param target: the code of the language to translate into, such as ``"de"``
    :param source: that of the text's own; detected by default, which needs the extra ``detect``
    :param request_id: and what follows up to ``backpressure``: see :meth:`laneway.Engine.run`
    :param fields: those of :class:`TranslateRequest`
    """
    return model.engine.run(
        model,
        "translate",
        TranslateRequest(texts, target=target, source=source, **fields),
        request_id=request_id,
        overflow=overflow,
        queue_timeout=queue_timeout,
        cap=cap,
        backpressure=backpressure,
    )


@overload
async def translate(  # type: ignore[overload-overlap]  # a str is a list of strings, too
    model: Model,
    texts: str,
    *,
    target: str,
    source: str | None = None,
    request_id: str | None = None,
    overflow: Literal["queue", "reject"] | None = None,
    queue_timeout: float | None = None,
    cap: float | None = None,
    **fields: Unpack[TranslateFields],
) -> str: ...


@overload
async def translate(
    model: Model,
    texts: Iterable[str],
    *,
    target: str,
    source: str | None = None,
    request_id: str | None = None,
    overflow: Literal["queue", "reject"] | None = None,
    queue_timeout: float | None = None,
    cap: float | None = None,
    **fields: Unpack[TranslateFields],
) -> list[str]: ...


async def translate(
    model: Model,
    texts: str | Iterable[str],
    *,
    target: str,
    source: str | None = None,
    request_id: str | None = None,
    overflow: Literal["queue", "reject"] | None = None,
    queue_timeout: float | None = None,
    cap: float | None = None,
    **fields: Unpack[TranslateFields],
) -> str | list[str]:
    """Translate one text, or a list of them into a list of as many.  The parameters are those of :func:`stream`.

    Raises what :meth:`laneway.Engine.run` and the run raise, :class:`UndeterminedLanguageError` among it; cancelling
    the caller ends the request.
    """
    async with stream(
        model,
        texts,
        target=target,
        source=source,
        request_id=request_id,
        overflow=overflow,
        queue_timeout=queue_timeout,
        cap=cap,
        **fields,
    ) as run:
        result: TranslateResult = await run.result()
    return result.text if isinstance(texts, str) else result.texts


# The operation.


@attrs.frozen
class _Ready:
    """A text with its white space put aside; ``job`` is None if nothing is left of it.

    ``close`` is what ends the thought that the prompt has opened.
    """

    before: str
    core: str
    job: Job | None
    after: str
    close: str | None = None


@attrs.frozen
class _Prepared:
    request: TranslateRequest
    source: Language | None
    items: tuple[_Ready, ...]
    markers: Mapping[int, str]
    """Control tokens that begin or end thoughts."""


async def prepare(model: Model, request: TranslateRequest) -> Prepared:
    """The operation's ``prepare``: detects the source language, and finds what can be wrong (rule A10).

    A list is taken whole or not at all: the error of one text names it in a note.
    """
    split = [_split(text) for text in request.items]
    wanted = [core for _, core, _ in split if core]
    source = request.source
    if source is None and wanted:
        source = await threads.run_long(detect_language, wanted)
    if source is not None and source == request.target:
        raise TranslationError(f"source and target are the same language: {source.name} ({source.code})")
    form = request.form or form_for(model.name, model.metadata, chats=bool(model.tokenizer.chat_template))
    markers = await _markers(model)
    ready = []
    for index, (before, core, after) in enumerate(split):
        if not core:
            ready.append(_Ready(before, core, None, after))
            continue
        assert source is not None
        job = await _job(model, request, form, Wanted(core, source, request.target, request.context), index)
        ready.append(_Ready(before, core, job, after, opened_by(_end_of(model, job.prompt, markers))))
    weight = max(1, sum(item.job is not None for item in ready))
    return Prepared(weight=weight, payload=_Prepared(request, source, tuple(ready), markers))


async def _markers(model: Model) -> dict[int, str]:
    """The control tokens of the model that begin or end thoughts, with their texts."""
    template = model.tokenizer.chat_template or ""
    found = {}
    for marker in MARKERS:
        if marker in template:
            tokens = await model.tokenize(marker, bos=False, special=True)
            if len(tokens) == 1 and not model.tokenizer.piece(tokens[0]):
                found[tokens[0]] = marker
    return found


def _end_of(model: Model, prompt: list[int], markers: Mapping[int, str]) -> str:
    pieces = [markers[token].encode() if token in markers else model.tokenizer.piece(token) for token in prompt[-16:]]
    return b"".join(pieces).decode("utf-8", "replace")


def _split(text: str) -> tuple[str, str, str]:
    """What stands before what is translated, that, and what stands behind it."""
    match = _EDGES.fullmatch(text)
    assert match is not None
    before, core, after = match.groups()
    if "\n" not in core:
        # In a line of a list, for example: models drop its mark or write another one.
        signs_before, core, signs_after = peel(core, begins_line=True)
        before, after = before + signs_before, signs_after + after
    return (before, core, after) if has_letters(core) else (text, "", "")


async def _job(model: Model, request: TranslateRequest, form: PromptForm, wanted: Wanted, index: int) -> Job:
    fields = dict(request.fields)
    stop = fields.get("stop") or ()
    fields["stop"] = (*((stop,) if isinstance(stop, str) else stop), *_stops(form, wanted.text))
    if fields.get("max_tokens") is None:
        fields["max_tokens"] = longest_translation(len(await model.tokenize(wanted.text, bos=False)))
        if thinks(model.tokenizer.chat_template):
            fields["max_tokens"] += THOUGHT_TOKENS
    asked = prompt_of(form, wanted)
    if not isinstance(asked, str):
        fields["chat_template_kwargs"] = {**NO_THINKING, **(fields.get("chat_template_kwargs") or {})}
    try:
        return await prepare_job(model, CompletionRequest(asked, **fields))
    except (ContextOverflowError, InvalidRequestError) as error:
        if not isinstance(request.texts, str):
            error.add_note(f"this is about text {index} of {len(request.items)}")
        raise


def _stops(form: PromptForm, text: str) -> tuple[str, ...]:
    """The form's stop strings, without those that the text itself has: its translation will have them as well."""
    return tuple(stop for stop in form.stop if stop not in text)


async def handler(ctx: RequestContext, prepared: Prepared) -> TranslateResult:
    """The operation's ``handler``: asks for every answer at once and leaves the slots to the scheduler (rule A15)."""
    job: _Prepared = prepared.payload
    single = isinstance(job.request.texts, str)
    progress = _Count(ctx, len(job.items))
    members = [
        _Member(ctx, None if single else str(index), item, progress, job.markers)
        for index, item in enumerate(job.items)
    ]
    async with AsyncExitStack() as slots:
        for member in members:
            await member.open(slots)
        # One after the other is as quick as all at once: the answers are made by the decode loop, not by these waits.
        translations = [await member.finish() for member in members]
    return TranslateResult(tuple(translations), job.source, job.request.target, ctx.stats)


@attrs.frozen
class _TextProgress(Progress):
    """Progress with a stream of its own, so that unread text merges across it (rule S2)."""

    id: str = "progress"


@final
class _Count:
    """How many texts are done."""

    def __init__(self, ctx: RequestContext, total: int) -> None:
        self._ctx = ctx
        self._total = total
        self._done = 0

    def another(self) -> None:
        """One more is."""
        self._done += 1
        self._ctx.put(_TextProgress(self._done, self._total, "text"))


class _LoopingError(Exception):
    """Raised in the callback that takes the text: it ends the sequence."""


@final
class _Member:
    """One text while it is being translated."""

    def __init__(
        self, ctx: RequestContext, id: str | None, item: _Ready, progress: _Count, markers: Mapping[int, str]
    ) -> None:
        self._ctx = ctx
        self._id = id
        self._item = item
        self._progress = progress
        self._tokens: Tokens | None = None
        self._spelled = SpelledOut(ctx.model.tokenizer.piece, markers) if markers else None
        self._thought = WithoutThought(item.close)
        self._loop = LoopWatch(item.core)
        self._trimmed = Trimmed()
        self._shown: list[str] = []

    async def open(self, slots: AsyncExitStack) -> None:
        """Ask for the answer, if there is something to ask."""
        self._show(self._item.before)
        job = self._item.job
        if job is None:
            return
        request = job.request
        self._tokens = await slots.enter_async_context(
            self._ctx.generate(
                job.prompt,
                request.sampling,
                max_tokens=request.max_tokens,
                stop=request.stop,
                deliver=self._deliver,
            )
        )

    def _deliver(self, delta: TextDelta) -> None:
        # A thought may go round in circles as well, so the loop is looked for first.
        text = self._loop.push(delta.text)
        if self._spelled is not None:
            assert self._tokens is not None
            text = self._spelled.push(text, self._tokens.tokens)
        self._show(self._trimmed.push(self._thought.push(text)))
        if self._loop.looping:
            raise _LoopingError

    def _show(self, text: str) -> None:
        if text:
            self._shown.append(text)
            delta = TextDelta(text)
            self._ctx.put(delta if self._id is None else BatchEvent(self._id, delta))

    async def finish(self) -> LlmTranslation:
        """Wait for the answer, and put the text's own white space behind it."""
        reason: StopReason = "eos"
        stats = Stats()
        cut: Cut | None = None
        if self._tokens is not None:
            try:
                answer = await self._tokens.finish()
                reason, stats = answer.stop_reason, answer.stats
            except _LoopingError:
                reason, stats, cut = "length", self._tokens.stats, "loop"
            if cut is None and reason == "length":
                cut = "length"
            if self._thought.thinking:
                reason, cut = "length", "thought"
            self._show(self._trimmed.push(self._thought.end()))
        self._show(self._item.after)
        if self._id is not None:
            self._ctx.put(BatchEvent(self._id, Done(reason, stats)))
        self._progress.another()
        return LlmTranslation("".join(self._shown), reason, stats, cut)


@final
class Trimmed:
    """A growing text without the white space at its ends."""

    def __init__(self) -> None:
        self._begun = False
        self._held = ""

    def push(self, text: str) -> str:
        """What may be shown now: white space is held back until something stands behind it."""
        text = self._held + text
        if not self._begun:
            text = text.lstrip()
        kept = text.rstrip()
        self._held = text[len(kept) :]
        self._begun = self._begun or bool(kept)
        return kept


@hookimpl
def laneway_plugin() -> PluginSpec:
    """Declare the operation ``translate``."""
    return PluginSpec(
        name="llm_translate",
        operations=(Operation(kind="translate", request_type=TranslateRequest, prepare=prepare, handler=handler),),
    )
