"""Translation with CTranslate2, beside the language models: no lane, no queue, threads of its own.

::

    model = await engine.load_model("translate-en_de.argosmodel")
    text = await nmt.translate(model, "Good morning.")
    texts = await nmt.translate(model, ["Good morning.", "", "How are you?"], beam_size=4)

A model is one pair of languages, or a directory of them; from French to German goes over English if there are only
those two pairs.  As many texts come out as went in, in order, their line breaks and blank lines where they were.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, final, overload

import attrs
import trio

from laneway import (
    Backend,
    BatchEvent,
    Done,
    InvalidRequestError,
    Loader,
    Model,
    ModelLoadError,
    ModelSource,
    Operation,
    PluginSpec,
    Prepared,
    Progress,
    RequestContext,
    Run,
    Scope,
    Stats,
    StopReason,
    TextDelta,
    TranslationError,
    Use,
    hookimpl,
    threads,
)
from laneway.validators import number, of_type, optional, whole
from laneway_plugins._languages import find_language
from laneway_plugins._nmt_package import Pair, canonical_code, find_pairs, is_translation_source
from laneway_plugins._nmt_pieces import growing_text
from laneway_plugins._nmt_routes import find_route, languages, same_language, unlabelled
from laneway_plugins._nmt_service import NmtService, OpenPair, open_pair, share_of_cpus
from laneway_plugins._nmt_text import Assembly, Chunk, Part, Sentence, split_text
from laneway_plugins._nmt_worker import Hypothesis, MissingExtraError, Search, import_ctranslate2, need
from laneway_plugins._unicode import surrogate_in

BEAM_BATCH = 8
"""Chunks that beam search translates at a time: a cancel waits for them."""
BEAM_PIECES = 320
"""And pieces of these together: fewer chunks if they are long, lest a cancel wait much longer for them."""
GREEDY_BATCH = 32
"""The same of greedy search, which a cancel stops after a token."""
WINDOW = 64
"""Sentences of a stream among which those of like length are put together."""
FIRST_WINDOW = 8
"""The same of the first, so that a stream begins soon."""
WHOLE_WINDOW = 1024
"""The same where nobody reads along."""


# Requests.


class NmtFields(TypedDict, total=False):
    """The fields of :class:`NmtRequest` beside the texts, for signatures."""

    source: str | None
    target: str | None
    beam_size: int
    scores: bool
    alternatives: int
    length_penalty: float
    streamed: bool


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


def _check_text(what: str, text: str) -> None:
    wrong = surrogate_in(text)
    if wrong is not None:
        raise InvalidRequestError(f"{what} is not valid: {wrong}", "texts")


@attrs.frozen
class NmtRequest:
    """Text, and how to translate it.  Raises :class:`InvalidRequestError` when made with anything wrong.

    ``texts`` is one text or a list; an empty or blank one is its own translation.  ``source`` and ``target`` may be
    left out where the model leaves no choice.
    """

    texts: str | tuple[str, ...] = attrs.field(converter=_texts)
    source: str | None = attrs.field(default=None, kw_only=True, validator=optional(of_type(str)))
    target: str | None = attrs.field(default=None, kw_only=True, validator=optional(of_type(str)))
    beam_size: int = attrs.field(default=1, kw_only=True, validator=whole(1, 64))
    """1 is greedy search: the quickest, and every token is shown once it is made."""
    scores: bool = attrs.field(default=False, kw_only=True, validator=of_type(bool))
    alternatives: int = attrs.field(default=0, kw_only=True, validator=whole(0, 63))
    """Further translations of each text; they need a beam of one more, which is then taken."""
    length_penalty: float = attrs.field(default=1.0, kw_only=True, validator=number(0, 10))
    """The power of the length that scores are divided by."""
    streamed: bool = attrs.field(default=True, kw_only=True, validator=of_type(bool))
    """False: text is shown a sentence at a time and in no certain order of items, which saves a tenth of the time and
    more with small models."""

    @property
    def items(self) -> tuple[str, ...]:
        """The texts as a tuple, one of one as well."""
        return (self.texts,) if isinstance(self.texts, str) else self.texts


@attrs.frozen
class Alternative:
    """Another translation of a text.  For ``score`` see :class:`Translation`."""

    text: str
    score: float | None = None


@attrs.frozen
class Translation:
    """One text's translation.

    ``score`` is the sum over its sentences, and over all models on the route, of what CTranslate2 gives: the natural
    log-probability divided by length ** length_penalty; 0.0 for what was kept as it is; None unless asked for.
    ``truncated``: the model did not come to an end, and the translation of a sentence was cut at the longest length.
    """

    text: str
    score: float | None = None
    alternatives: tuple[Alternative, ...] = ()
    truncated: bool = False


@attrs.frozen
class NmtResult:
    """All translations, in the order of the texts.

    ``route`` names the languages that were gone through, ``("fr", "en", "de")``.  ``stats`` counts pieces: those that
    the first model read and those that all models wrote.
    """

    translations: tuple[Translation, ...]
    route: tuple[str, ...]
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
        """``eos``, or ``length`` if something was truncated."""
        return _reason(any(translation.truncated for translation in self.translations))


def _reason(truncated: bool) -> StopReason:
    return "length" if truncated else "eos"


def stream(
    model: Model,
    texts: str | Iterable[str],
    *,
    request_id: str | None = None,
    backpressure: Literal["merge", "pause"] = "merge",
    **fields: Unpack[NmtFields],
) -> AbstractAsyncContextManager[Run]:
    """Translate ``texts`` for the length of a block, which gets the run.  Its result is a :class:`NmtResult`.

    Iterate for :class:`TextDelta` events of a single text, or for :class:`BatchEvent`, tagged ``"0"``, ``"1"`` and so
    on, of a list; between them comes :class:`Progress` in sentences.

    :param request_id: and ``backpressure``: see :meth:`laneway.Engine.run`
    :param fields: those of :class:`NmtRequest`
    """
    return model.engine.run(model, "nmt", NmtRequest(texts, **fields), request_id=request_id, backpressure=backpressure)


async def translate_details(
    model: Model, texts: str | Iterable[str], *, request_id: str | None = None, **fields: Unpack[NmtFields]
) -> NmtResult:
    """Translate, and return everything that is known of it.  The parameters are those of :func:`stream`."""
    fields = {"streamed": False, **fields}
    async with stream(model, texts, request_id=request_id, **fields) as run:
        result: NmtResult = await run.result()
    return result


@overload
async def translate(  # type: ignore[overload-overlap]  # a str is a list of strings, too
    model: Model, texts: str, *, request_id: str | None = None, **fields: Unpack[NmtFields]
) -> str: ...


@overload
async def translate(
    model: Model, texts: Iterable[str], *, request_id: str | None = None, **fields: Unpack[NmtFields]
) -> list[str]: ...


async def translate(
    model: Model, texts: str | Iterable[str], *, request_id: str | None = None, **fields: Unpack[NmtFields]
) -> str | list[str]:
    """Translate one text, or a list of them into a list of as many.

    Raises what :meth:`laneway.Engine.run` and the run raise, :class:`TranslationError` among it; cancelling the caller
    ends the request.
    """
    result = await translate_details(model, texts, request_id=request_id, **fields)
    return result.text if isinstance(texts, str) else result.texts


# The operation.


@attrs.frozen
class Job:
    """A valid request and the way that it goes."""

    request: NmtRequest
    service: NmtService
    way: tuple[int, ...]
    route: tuple[str, ...]


async def prepare(model: Model, request: NmtRequest) -> Prepared:
    """The operation's ``prepare``: finds the route.  Raises :class:`TranslationError` if there is none."""
    service = model.service
    if not isinstance(service, NmtService):
        raise InvalidRequestError(f"model {model.name!r} is no translation model of the nmt loader", "model")
    way, route = choose_route(service.pairs, request.source, request.target)
    return Prepared(payload=Job(request, service, way, route))


def choose_route(
    pairs: Sequence[Pair], source: str | None, target: str | None
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Indexes of the pairs to go through, and the languages passed.

    Raises :class:`InvalidRequestError` if a language must be named, :class:`TranslationError` if no pairs lead there.
    """
    asked_source = None if source is None else canonical_code(source)
    asked_target = None if target is None else canonical_code(target)
    if unlabelled(pairs):
        return (0,), (asked_source or pairs[0].source, asked_target or pairs[0].target)
    start = asked_source or _only({pair.source for pair in pairs}, "source")
    ends = {pair.target for pair in pairs if same_language(start, pair.source)}
    if asked_target is None and not ends:
        installed = ", ".join(sorted({pair.source for pair in pairs}))
        raise TranslationError(f"no installed pair translates from {start!r}; there are pairs from: {installed}")
    end = asked_target or _only(ends, "target")
    if start == end:
        raise TranslationError(f"source and target are the same language: {start!r}")
    way = find_route(pairs, start, end)
    if way is None:
        installed = ", ".join(pair.label for pair in pairs)
        raise TranslationError(f"no installed pairs lead from {start!r} to {end!r}; there are: {installed}")
    return tuple(way), languages(pairs, way)


def _only(codes: set[str], field: str) -> str:
    if len(codes) != 1:
        known = ", ".join(sorted(codes))
        raise InvalidRequestError(f"must be given: the model has several ({known})", field)
    return next(iter(codes))


async def handler(ctx: RequestContext, prepared: Prepared) -> NmtResult:
    """The operation's ``handler``."""
    job: Job = prepared.payload
    hops = [await job.service.open(index) for index in job.way]
    return await _Translating(ctx, job, hops).run()


@attrs.frozen
class _Place:
    """A sentence: of which item, its number there, its text."""

    item: int
    number: int
    text: str


@attrs.define
class _Item:
    """One text while it is being translated."""

    parts: list[Part]
    assembly: Assembly
    left: int
    score: float = 0.0
    truncated: bool = False
    prompt_pieces: int = 0
    made_pieces: int = 0
    others: dict[int, tuple[tuple[str, ...], list[list[_Text]]]] = attrs.field(factory=dict)
    """For alternatives: of each sentence the joints of its chunks, and each chunk's hypotheses."""


@attrs.frozen
class _Text:
    text: str
    score: float


@attrs.frozen
class Work:
    """One chunk on its way through one model: ``place`` and ``chunk`` count within the window and the sentence."""

    place: int
    chunk: int
    pieces: tuple[str, ...]


@attrs.frozen
class _SentenceProgress(Progress):
    """Progress with a stream of its own, so that unread text merges across it (rule S2)."""

    id: str = "progress"


@final
class _Translating:
    """One request while it runs."""

    def __init__(self, ctx: RequestContext, job: Job, hops: Sequence[OpenPair]) -> None:
        self._ctx = ctx
        self._job = job
        self._hops = hops
        request = job.request
        beam = max(request.beam_size, request.alternatives + 1)
        self._search = Search(
            beam_size=beam,
            hypotheses=request.alternatives + 1,
            length_penalty=request.length_penalty,
            scores=request.scores,
        )
        self._single = isinstance(request.texts, str)
        self._items: list[_Item] = []
        self._began = trio.current_time()
        self._first_text_at: float | None = None
        self._done = 0
        self._total = 0

    async def run(self) -> NmtResult:
        """Translate everything."""
        request = self._job.request
        split = functools.partial(_split_all, request.items, self._job.route[0])
        spaced = _spaced(self._job.route[-1])
        for parts in await self._job.service.aside(split):
            sentences = sum(isinstance(part, Sentence) for part in parts)
            self._items.append(_Item(parts, Assembly(parts, spaced=spaced), sentences))
        places = [
            _Place(index, number, sentence.text)
            for index, item in enumerate(self._items)
            for number, sentence in enumerate(part for part in item.parts if isinstance(part, Sentence))
        ]
        self._total = len(places)
        for index in range(len(self._items)):
            self._deliver(index)
        first, later = (FIRST_WINDOW, WINDOW) if request.streamed else (WHOLE_WINDOW, WHOLE_WINDOW)
        for window in _windows(places, first, later):
            await self._translate_window(window)
        return NmtResult(
            tuple(self._translation(item) for item in self._items), self._job.route, self._stats(self._items)
        )

    async def _translate_window(self, window: Sequence[_Place]) -> None:
        texts = [place.text for place in window]
        for index, hop in enumerate(self._hops[:-1]):
            texts = await self._pass_through(hop, window, texts, first=index == 0)
        await self._finish_with(self._hops[-1], window, texts, first=len(self._hops) == 1)

    async def _pass_through(
        self, hop: OpenPair, window: Sequence[_Place], texts: Sequence[str], *, first: bool
    ) -> list[str]:
        """Translate into a language in the middle."""
        cut = await self._cut(hop, window, texts, first=first, target=hop.pair.target)
        made: dict[tuple[int, int], str] = {}

        def finished(work: Work, hypotheses: list[Hypothesis]) -> None:
            best = hypotheses[0]
            self._count(window[work.place].item, best)
            made[work.place, work.chunk] = hop.pieces.text(best.pieces)

        await self._run_all(hop, cut, attrs.evolve(self._search, hypotheses=1), finished)
        return [
            text
            if chunks is None
            else "".join(
                chunk.joint + made[place, number] for number, chunk in enumerate(chunks) if made[place, number]
            )
            for place, (text, chunks) in enumerate(zip(texts, cut, strict=True))
        ]

    async def _finish_with(self, hop: OpenPair, window: Sequence[_Place], texts: Sequence[str], *, first: bool) -> None:
        """Translate into the target language, and show what comes."""
        cut = await self._cut(hop, window, texts, first=first, target=self._job.route[-1])
        missing = []
        for place, text, chunks in zip(window, texts, cut, strict=True):
            item = self._items[place.item]
            joints = [""] if chunks is None else [chunk.joint for chunk in chunks]
            item.assembly.cut(place.number, joints)
            item.others[place.number] = tuple(joints), [[_Text(text, 0.0)] for _ in joints]
            missing.append(len(joints))
            if chunks is None:
                item.assembly.finish(place.number, 0, text)
                self._end_sentence(place)

        def finished(work: Work, hypotheses: list[Hypothesis]) -> None:
            place = window[work.place]
            item = self._items[place.item]
            made = [_Text(hop.pieces.text(one.pieces), one.score) for one in hypotheses]
            item.others[place.number][1][work.chunk] = made
            self._count(place.item, hypotheses[0])
            item.assembly.finish(place.number, work.chunk, made[0].text)
            missing[work.place] -= 1
            if missing[work.place]:
                self._deliver(place.item)
            else:
                self._end_sentence(place)

        def grown(work: Work, so_far: list[str]) -> None:
            text = growing_text(hop.pieces, so_far)
            if text is not None:
                place = window[work.place]
                self._items[place.item].assembly.grow(place.number, work.chunk, text)
                self._deliver(place.item)

        await self._run_all(hop, cut, self._search, finished, grown)

    async def _cut(
        self, hop: OpenPair, window: Sequence[_Place], texts: Sequence[str], *, first: bool, target: str
    ) -> list[list[Chunk] | None]:
        spaced = _spaced_words(target)
        cut = await self._job.service.aside(lambda: [hop.cut(text, spaced=spaced) for text in texts])
        if first:
            for place, chunks in zip(window, cut, strict=True):
                self._items[place.item].prompt_pieces += sum(len(chunk.pieces) for chunk in chunks or ())
        return cut

    async def _run_all(
        self,
        hop: OpenPair,
        cut: Sequence[list[Chunk] | None],
        search: Search,
        finished: Callable[[Work, list[Hypothesis]], None],
        grown: Callable[[Work, list[str]], None] | None = None,
    ) -> None:
        works = [
            Work(place, number, chunk.pieces)
            for place, chunks in enumerate(cut)
            for number, chunk in enumerate(chunks or ())
        ]
        size = GREEDY_BATCH if search.greedy else BEAM_BATCH
        if len(works) > size:
            # What is of one length wastes no steps on the others' ends.
            works.sort(key=lambda work: len(work.pieces))
        batches = batched(works, size, None if search.greedy else BEAM_PIECES)
        line = iter(batches)

        async def some() -> None:
            for batch in line:
                await self._run_batch(hop, batch, search, finished, grown)

        # One more than there are workers: it waits for its turn while the others' results are put in their places.
        await _several(some, min(self._job.service.workers + 1, len(batches)))

    async def _run_batch(
        self,
        hop: OpenPair,
        batch: Sequence[Work],
        search: Search,
        finished: Callable[[Work, list[Hypothesis]], None],
        grown: Callable[[Work, list[str]], None] | None,
    ) -> None:
        feed = None
        if search.greedy and grown is not None and self._job.request.streamed:
            feed = _Feed([functools.partial(grown, work) for work in batch])

        def call(stop: threading.Event) -> list[list[Hypothesis]]:
            pieces = [work.pieces for work in batch]
            return hop.worker.translate(
                pieces, hop.pair.target_prefix, search, stop, None if feed is None else feed.push
            )

        try:
            results = await self._job.service.native(call)
        finally:
            if feed is not None:
                feed.close()
        for work, hypotheses in zip(batch, results, strict=True):
            finished(work, hypotheses)
        # Only this waits for a reader that asked to be waited for.
        await self._ctx.emit(_SentenceProgress(self._done, self._total, "sentence"))

    def _count(self, index: int, best: Hypothesis) -> None:
        item = self._items[index]
        item.score += best.score
        item.made_pieces += len(best.pieces)
        item.truncated = item.truncated or not best.whole

    def _end_sentence(self, place: _Place) -> None:
        self._items[place.item].left -= 1
        self._done += 1
        self._deliver(place.item)

    def _deliver(self, index: int) -> None:
        """Show what there is of an item, and that it has ended if it has."""
        item = self._items[index]
        text = item.assembly.take()
        if text:
            if self._first_text_at is None:
                self._first_text_at = trio.current_time()
            delta = TextDelta(text)
            self._ctx.put(delta if self._single else BatchEvent(str(index), delta))
        if not item.left and not self._single:
            self._ctx.put(BatchEvent(str(index), Done(_reason(item.truncated), self._stats([item]))))

    def _translation(self, item: _Item) -> Translation:
        request = self._job.request
        assert item.assembly.complete
        others = [self._alternative(item, rank) for rank in range(1, request.alternatives + 1)]
        return Translation(
            item.assembly.text,
            item.score if request.scores else None,
            tuple(other if request.scores else attrs.evolve(other, score=None) for other in others),
            item.truncated,
        )

    def _alternative(self, item: _Item, rank: int) -> Alternative:
        """Every chunk's hypothesis of this rank, the best where it has fewer."""
        assembly = Assembly(item.parts, spaced=_spaced(self._job.route[-1]))
        score = item.score
        for sentence, (joints, chunks) in item.others.items():
            assembly.cut(sentence, joints)
            for index, hypotheses in enumerate(chunks):
                chosen = hypotheses[rank] if rank < len(hypotheses) else hypotheses[0]
                score += chosen.score - hypotheses[0].score
                assembly.finish(sentence, index, chosen.text)
        return Alternative(assembly.take(), score)

    def _stats(self, items: Iterable[_Item]) -> Stats:
        read = made = 0
        for item in items:
            read += item.prompt_pieces
            made += item.made_pieces
        seconds = trio.current_time() - self._began
        return Stats(
            prompt_tokens=read,
            generated_tokens=made,
            time_to_first_token=None if self._first_text_at is None else self._first_text_at - self._began,
            tokens_per_second=made / seconds if made and seconds > 0 else None,
        )


@final
class _Feed:
    """Tokens from CTranslate2's thread to Trio's, with one wake-up for all that have come."""

    def __init__(self, grown: Sequence[Callable[[list[str]], None]]) -> None:
        self._grown = grown
        self._so_far: list[list[str]] = [[] for _ in grown]
        self._pushed: deque[tuple[int, str]] = deque()
        self._token = trio.lowlevel.current_trio_token()
        self._awake = False
        self._closed = False

    def push(self, index: int, piece: str) -> None:
        """Called on CTranslate2's thread."""
        self._pushed.append((index, piece))
        # Set before the drain is asked for and unset before it looks: nothing that was pushed is left lying.
        if not self._awake:
            self._awake = True
            try:
                self._token.run_sync_soon(self._drain)
            except trio.RunFinishedError:
                pass

    def _drain(self) -> None:
        self._awake = False
        touched = set()
        while self._pushed:
            index, piece = self._pushed.popleft()
            self._so_far[index].append(piece)
            touched.add(index)
        if not self._closed:
            for index in sorted(touched):
                self._grown[index](self._so_far[index])

    def close(self) -> None:
        """The result is known, or nobody wants it: what still comes is dropped."""
        self._closed = True


async def _several(work: Callable[[], Awaitable[None]], count: int) -> None:
    """Run ``work`` in ``count`` tasks; the first error ends the others and is raised bare."""
    if count <= 1:
        await work()
        return
    errors: list[Exception] = []

    async def one() -> None:
        try:
            await work()
        except Exception as error:
            errors.append(error)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(one)
    if errors:
        raise errors[0]


def batched(works: Sequence[Work], size: int, pieces: int | None) -> list[Sequence[Work]]:
    """Cut ``works`` into batches of at most ``size``, and of at most ``pieces`` pieces unless one alone has more."""
    batches: list[Sequence[Work]] = []
    start = held = 0
    for end, work in enumerate(works):
        held += len(work.pieces)
        if end > start and (end - start == size or (pieces is not None and held > pieces)):
            batches.append(works[start:end])
            start, held = end, len(work.pieces)
    if start < len(works):
        batches.append(works[start:])
    return batches


def _windows(places: Sequence[_Place], first: int, later: int) -> Iterator[Sequence[_Place]]:
    start, size = 0, first
    while start < len(places):
        yield places[start : start + size]
        start, size = start + size, later


def _split_all(texts: Sequence[str], language: str) -> list[list[Part]]:
    segment = need("sentencex").segment
    base = language.partition("-")[0] or "en"
    return [split_text(text, lambda line: list(segment(base, line))) for text in texts]


@functools.cache
def _spaced(code: str) -> bool:
    try:
        return find_language(code, "target").spaced
    except InvalidRequestError:
        return True


@functools.cache
def _spaced_words(code: str) -> bool:
    try:
        return find_language(code, "target").spaced_words
    except InvalidRequestError:
        return True


# The loader.


def _strings(value: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> tuple[str, ...]:
    if isinstance(value, (str, os.PathLike)):
        return (os.fspath(value),)
    if not isinstance(value, Iterable):
        raise InvalidRequestError(f"must be a str or a list of them, not {value!r}")
    strings = tuple(os.fspath(one) if isinstance(one, os.PathLike) else one for one in value)
    if not all(isinstance(one, str) and one for one in strings):
        raise InvalidRequestError(f"must be strings that are not empty, not {value!r}")
    return strings


def _two_codes(value: Iterable[str] | None) -> tuple[str, str] | None:
    if value is None:
        return None
    codes = () if isinstance(value, str) else tuple(value)
    if len(codes) != 2 or not all(isinstance(code, str) and code for code in codes):
        raise InvalidRequestError(f"must be two codes, such as ('en', 'de'), not {value!r}", "languages")
    return canonical_code(codes[0]), canonical_code(codes[1])


def _one_of(*words: str | None) -> Any:
    def check(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if value not in words:
            raise InvalidRequestError(f"must be one of {', '.join(map(repr, words))}, not {value!r}", attribute.name)

    return check


@attrs.frozen(kw_only=True)
class NmtOptions:
    """Options of :meth:`laneway.Engine.load_model` for translation models."""

    threads: int | None = attrs.field(default=None, validator=optional(whole(1, 512)))
    """CPU threads of one translation; None: half of the CPUs, the other half being for a language model."""
    workers: int = attrs.field(default=1, validator=whole(1, 64))
    """Translations at a time, each with ``threads``."""
    compute_type: str = attrs.field(default="default", validator=of_type(str))
    """How CTranslate2 computes: default, auto, int8, int8_float32, int16, float16, bfloat16, float32 and so on."""
    device: str = attrs.field(default="cpu", validator=_one_of("cpu", "cuda", "auto"))
    longest: int = attrs.field(default=100, validator=whole(8, 250))
    """Pieces of one sentence beyond which it is cut up, at punctuation if there is some."""
    packages: tuple[str, ...] = attrs.field(default=(), converter=_strings)
    """More packages or directories, whose pairs may be gone through."""
    languages: tuple[str, str] | None = attrs.field(default=None, converter=_two_codes)
    """From and to, as codes, of a bare CTranslate2 directory, which does not say so itself."""
    source_prefix: tuple[str, ...] = attrs.field(default=(), converter=_strings)
    """Tokens before each source sentence, such as a language's."""
    target_prefix: tuple[str, ...] = attrs.field(default=(), converter=_strings)
    """Tokens that each translation begins with; they are not shown."""
    tokens: Literal["sentencepiece", "characters", "words"] | None = attrs.field(
        default=None, validator=_one_of("sentencepiece", "characters", "words", None)
    )
    """How text is cut into the vocabulary's pieces; None: as the files beside the model tell."""


def accepts(source: ModelSource) -> bool:
    """``*.argosmodel`` packages, CTranslate2 directories with ``model.bin``, and directories of such."""
    try:
        return source.path is not None and is_translation_source(source.path)
    except OSError:
        return False


async def load(source: ModelSource, parallel: int, options: NmtOptions) -> Backend:
    """Load a translation model, in threads.  ``parallel`` concerns lanes, and there is none.

    The only pair of a model is opened now, the pairs of several when they are first needed.
    """
    assert source.path is not None, "accepts() takes paths only"
    find = functools.partial(_find_all, source, options)
    pairs = await threads.run_long(find)
    opener = functools.partial(
        open_pair,
        threads=options.threads or share_of_cpus(),
        workers=options.workers,
        compute_type=options.compute_type,
        device=options.device,
        longest=options.longest,
    )
    service = NmtService(pairs, workers=options.workers, open_pair=opener)
    try:
        if len(pairs) == 1:
            await service.open(0)
    except BaseException:
        await service.aclose()
        raise
    return Backend(
        name=source.name,
        service=service,
        metadata={
            "path": str(source.path),
            "pairs": ", ".join(pair.label for pair in pairs),
            "threads": str(options.threads or share_of_cpus()),
            "workers": str(options.workers),
        },
        aclose=service.aclose,
    )


def _find_all(source: ModelSource, options: NmtOptions) -> list[Pair]:
    try:
        import_ctranslate2()
        for module in ("sentencepiece", "sentencex"):
            need(module)
    except MissingExtraError as error:
        raise ModelLoadError(source.text, str(error)) from error
    assert source.path is not None
    pairs = find_pairs(source.path)
    told = {
        name: value
        for name, value in attrs.asdict(options, recurse=False).items()
        if name in ("languages", "source_prefix", "target_prefix", "tokens") and value
    }
    if told:
        if len(pairs) > 1:
            raise ModelLoadError(
                source.text, f"{', '.join(sorted(told))} can be told of one model alone, and it has {len(pairs)} pairs"
            )
        if "languages" in told:
            told["source"], told["target"] = told.pop("languages")
        pairs = [attrs.evolve(pairs[0], **told)]
    for extra in options.packages:
        try:
            path = Path(extra).expanduser()
        except RuntimeError as error:  # ~name of a user that there is not
            raise ModelLoadError(extra, str(error)) from None
        if not path.exists():
            raise ModelLoadError(extra, "there is no such file or directory")
        pairs.extend(find_pairs(path))
    if len(pairs) > 1 and any(not (pair.source and pair.target) for pair in pairs):
        bare = next(pair for pair in pairs if not (pair.source and pair.target))
        raise ModelLoadError(
            source.text, f"nothing says which languages {bare.path} is for; load it alone, or with languages="
        )
    return pairs


@hookimpl
def laneway_plugin() -> PluginSpec:
    """Declare the operation ``nmt`` and the loader ``ctranslate2``.

    The scope is ``request``: greedy search is left within a token's time, beam search after the micro-batch under way,
    so that a caller waits for no more than that, and nothing of its request runs on behind its back.  With the scope
    ``none`` a handler hears of no cancel, and the rest of a book would be translated for nobody.
    """
    return PluginSpec(
        name="nmt",
        operations=(
            Operation(
                kind="nmt",
                request_type=NmtRequest,
                prepare=prepare,
                handler=handler,
                scope=Scope.REQUEST,
                use=Use.NONE,
                needs_decoder=False,
            ),
        ),
        loaders=(Loader(name="ctranslate2", accepts=accepts, load=load, options_type=NmtOptions),),
    )
