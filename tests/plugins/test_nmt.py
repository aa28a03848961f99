"""The operation ``nmt``, on models with random weights."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

import laneway
from laneway import (
    BatchEvent,
    Done,
    InferenceCancelledError,
    InvalidRequestError,
    ModelLoadError,
    Progress,
    TextDelta,
    TranslationError,
)
from laneway.testing import ScriptedLoader
from laneway_plugins import completion, llm_translate, nmt
from laneway_plugins._nmt_service import NmtService
from laneway_plugins._nmt_worker import Worker
from tests.plugins import nmt_models
from tests.plugins.nmt_models import CHARACTERS, WORDS, make_model, make_package
from tests.program_threads import all_tokens_held


@pytest.fixture(scope="module", autouse=True)
def extra() -> None:
    nmt_models.need_nmt()


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "words")


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "endless", width=128, layers=4, end_bias=-100.0)


@pytest.fixture(scope="module")
def small_endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "endless", end_bias=-100.0)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    for number, pair in enumerate(("fr-en", "en-de", "de-ja")):
        model = make_model(tmp_path_factory.mktemp("models") / pair, seed=10 + number)
        make_package(folder / f"{pair}.argosmodel", pair, model)
    return folder


@asynccontextmanager
async def loaded(path: Path, **options: Any) -> AsyncIterator[laneway.Model]:
    async with laneway.open_engine(strict_plugins=True) as engine:
        yield await engine.load_model(path, threads=1, **options)


SENTENCE = "w1 w2 w3 w4"


async def test_translating_needs_no_thread_of_the_programs_own(packages: Path) -> None:
    async with all_tokens_held(), loaded(packages) as model:
        assert await nmt.translate(model, SENTENCE, source="fr", target="ja")


# Requests.


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"texts": 5}, "texts: must be a str or a list"),
        ({"texts": b"x"}, "texts: must be a str or a list"),
        ({"texts": {"a": "b"}}, "texts: must be a str or a list"),
        ({"texts": ["a", None]}, "texts: item 1 must be a str"),
        ({"texts": "ab\ud800"}, r"texts: the text is not valid: character 3 is a lone surrogate \(U\+D800\)"),
        ({"texts": ["a", "\udcff"]}, r"texts: item 1 is not valid: character 1 is a lone surrogate \(U\+DCFF\)"),
        ({"source": 5}, "source: must be str"),
        ({"beam_size": 0}, "beam_size: must be an integer from 1"),
        ({"beam_size": True}, "beam_size"),
        ({"alternatives": -1}, "alternatives"),
        ({"scores": 1}, "scores: must be bool"),
        ({"length_penalty": float("nan")}, "length_penalty"),
    ],
)
def test_wrong_requests(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        nmt.NmtRequest(**{"texts": "x", **fields})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"threads": 0}, "threads"),
        ({"workers": 0}, "workers"),
        ({"longest": 7}, "longest"),
        ({"device": "tpu"}, "device"),
        ({"tokens": "bytes"}, "tokens"),
        ({"compute_type": "int99"}, "CTranslate2 does not take it: Invalid compute type"),
        ({"languages": ("en",)}, "languages: must be two codes"),
        ({"languages": "en"}, "languages: must be two codes"),
        ({"target_prefix": ["nope"]}, "lacks the prefix 'nope'"),
        ({"tokens": "sentencepiece"}, "no SentencePiece model is beside it"),
        ({"packages": ["/no/such.argosmodel"]}, "no such file"),
        ({"context_size": 5}, "the ctranslate2 loader has no option context_size"),
    ],
)
async def test_wrong_options(words: Path, options: dict[str, Any], reason: str) -> None:
    async with laneway.open_engine() as engine:
        with pytest.raises(ModelLoadError, match=reason):
            await engine.load_model(words, **options)


async def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"garbage that is no model at all")
    (tmp_path / "shared_vocabulary.json").write_text('["a"]')
    async with laneway.open_engine() as engine:
        with pytest.raises(ModelLoadError, match="CTranslate2 does not take it"):
            await engine.load_model(tmp_path)


# Structure.


ODD = [
    "",
    " ",
    "\n\n",
    SENTENCE,
    f"\t{SENTENCE}  \r\n\r\n {SENTENCE}\n",
    "😀😀",
    "123, 456!",
    "жжж шшш",  # no piece of it is known
    " ".join(f"w{number % 61}" for number in range(2000)),
    "w1\u2028w2",
]


@pytest.mark.parametrize("beam_size", [1, 4])
async def test_as_many_items_come_out_as_went_in(words: Path, beam_size: int) -> None:
    async with loaded(words) as model:
        texts = await nmt.translate(model, ODD, beam_size=beam_size)
        alone = [await nmt.translate(model, text, beam_size=beam_size) for text in ODD]
    assert len(texts) == len(ODD)
    assert texts == alone
    for index in (0, 1, 2, 5, 6, 7):
        assert texts[index] == ODD[index]
    once = texts[3]
    assert once
    assert texts[4] == f"\t{once}  \r\n\r\n {once}\n"
    assert len(texts[8].split()) >= 20, "every chunk has its translation"
    assert texts[9].count("\u2028") == 1


async def test_no_items_give_no_items(words: Path) -> None:
    async with loaded(words) as model:
        assert await nmt.translate(model, []) == []
        assert await nmt.translate(model, "") == ""


async def test_a_very_long_sentence_reaches_the_model_whole(words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    translate = Worker.translate

    def spy(self: Worker, batch: Any, *args: Any) -> Any:
        given.extend(piece for pieces in batch for piece in pieces)
        assert all(len(pieces) <= 100 for pieces in batch)
        return translate(self, batch, *args)

    monkeypatch.setattr(Worker, "translate", spy)
    async with loaded(words) as model:
        await nmt.translate(model, ODD[8])
    assert sorted(given) == sorted(ODD[8].split())


async def test_a_translation_without_an_end_says_so(small_endless: Path, words: Path) -> None:
    async with loaded(small_endless) as model:
        result = await nmt.translate_details(model, ["w1", "", "9"])
        assert result.stop_reason == "length"
        assert [translation.truncated for translation in result.translations] == [True, False, False]
        assert len(result.texts[0].split()) == 256
    async with loaded(words) as model:
        assert (await nmt.translate_details(model, SENTENCE)).stop_reason == "eos"


# Streams.


@pytest.mark.parametrize("beam_size", [1, 4])
async def test_a_stream_joined_is_the_result(words: Path, beam_size: int) -> None:
    text = f"{SENTENCE}. w5 w6 w7!\n\n  w8 w9 " + " ".join(WORDS) * 4
    async with loaded(words) as model:
        async with nmt.stream(model, text, beam_size=beam_size) as run:
            events = [event async for event in run]
            result = await run.result()
        assert "".join(event.text for event in events if isinstance(event, TextDelta)) == result.text
        assert events[-1] == Done("eos", result.stats)
        assert any(isinstance(event, Progress) for event in events)
        assert result.stats.generated_tokens > 0
        assert result.stats.prompt_tokens > 0

        async with nmt.stream(model, [text, "", "9", SENTENCE], beam_size=beam_size) as run:
            shown = ["", "", "", ""]
            ended: list[str] = []
            async for event in run:
                if isinstance(event, BatchEvent) and isinstance(event.event, TextDelta):
                    assert event.id not in ended
                    shown[int(event.id)] += event.event.text
                elif isinstance(event, BatchEvent):
                    ended.append(event.id)
            assert shown == (await run.result()).texts
            assert sorted(ended) == ["0", "1", "2", "3"]


async def test_S2_unread_text_merges(small_endless: Path) -> None:
    async with loaded(small_endless) as model:
        async with nmt.stream(model, "\n".join([SENTENCE] * 16)) as run:
            await model.engine.wait_ended(run.request_id)
            events = [event async for event in run]
    assert len([event for event in events if isinstance(event, TextDelta)]) == 1
    assert len(events) == 3, "the text, the last progress, the end"


async def test_greedy_text_comes_before_the_sentence_has_ended(endless: Path) -> None:
    async with loaded(endless) as model:
        async with nmt.stream(model, SENTENCE) as run:
            first = await anext(run)
            assert isinstance(first, TextDelta)
            assert 0 < len(first.text.split()) < 256


# Scores and alternatives.


async def test_scores_and_alternatives(words: Path) -> None:
    async with loaded(words) as model:
        plain = await nmt.translate_details(model, [SENTENCE, ""])
        assert [translation.score for translation in plain.translations] == [None, None]
        assert plain.translations[0].alternatives == ()
        result = await nmt.translate_details(
            model, [SENTENCE, f"{SENTENCE}\n{SENTENCE}", ""], scores=True, alternatives=2
        )
    one, two, blank = result.translations
    assert one.score is not None
    assert one.score < 0
    assert two.score == pytest.approx(2 * one.score)
    assert [other.score for other in one.alternatives] == sorted(
        (other.score or 0.0 for other in one.alternatives), reverse=True
    )
    assert one.alternatives[0].score is not None
    assert one.score >= one.alternatives[0].score
    assert len({one.text, *(other.text for other in one.alternatives)}) == 3
    assert two.alternatives[0].text == f"{one.alternatives[0].text}\n{one.alternatives[0].text}"
    assert (blank.text, blank.score, [other.text for other in blank.alternatives]) == ("", 0.0, ["", ""])


# Routes.


async def test_a_route_goes_through_the_pairs_that_are_there(packages: Path) -> None:
    async with loaded(packages) as model:
        service = model.service
        assert isinstance(service, NmtService)
        first = await nmt.translate(model, [SENTENCE, "", "w7"], source="fr", target="en")
        second = await nmt.translate(model, first, source="en", target="de")
        result = await nmt.translate_details(model, [SENTENCE, "", "w7"], source="fr", target="de", scores=True)
        assert result.route == ("fr", "en", "de")
        assert result.texts == second
        far = await nmt.translate_details(model, f"{SENTENCE}. {SENTENCE}.", source="fra", target="ja", beam_size=2)
        assert far.route == ("fr", "en", "de", "ja")
        with pytest.raises(TranslationError, match="no installed pairs lead from 'ja' to 'fr'; there are: de to ja"):
            await nmt.translate(model, "x", source="ja", target="fr")
        with pytest.raises(TranslationError, match="the same language"):
            await nmt.translate(model, "x", source="de", target="deu")
        with pytest.raises(TranslationError, match="no installed pair translates from 'xx'; there are pairs from: "):
            await nmt.translate(model, "x", source="xx")
        with pytest.raises(InvalidRequestError, match="source: must be given: the model has several"):
            await nmt.translate(model, "x", target="de")
        assert (await nmt.translate_details(model, "w1", source="fr")).route == ("fr", "en")


async def test_pairs_are_opened_when_they_are_needed(packages: Path) -> None:
    async with loaded(packages / "fr-en.argosmodel", packages=[packages / "en-de.argosmodel"]) as model:
        assert "0 of 2 open" in repr(model.service)
        await nmt.translate(model, "w1", source="en", target="de")
        assert "1 of 2 open" in repr(model.service)
        await nmt.translate(model, "w1", source="fr", target="de")
        assert "2 of 2 open" in repr(model.service)


async def test_a_bare_directory_may_be_told_its_languages(words: Path) -> None:
    async with loaded(words, languages=("eng", "de")) as model:
        assert (await nmt.translate_details(model, "w1")).route == ("en", "de")
        with pytest.raises(TranslationError, match="no installed pairs lead from 'fr'"):
            await nmt.translate(model, "w1", source="fr", target="de")
    async with loaded(words) as model:
        assert (await nmt.translate_details(model, "w1", source="fr", target="de")).route == ("fr", "de")
    async with laneway.open_engine() as engine:
        with pytest.raises(ModelLoadError, match="nothing says which languages"):
            await engine.load_model(words, packages=[words])


async def test_prefixes_are_given_to_the_model_and_not_shown(words: Path) -> None:
    async with loaded(words) as model:
        plain = await nmt.translate(model, "w1 w2")
    async with loaded(words, target_prefix=["w60", "w59"], source_prefix=["w58"]) as model:
        for beam_size in (1, 3):
            async with nmt.stream(model, "w1 w2", beam_size=beam_size) as run:
                shown = "".join([event.text async for event in run if isinstance(event, TextDelta)])
                assert shown == (await run.result()).text
            assert not shown.startswith("w60 w59")
            assert shown != plain


async def test_sentencepiece_and_characters(tmp_path: Path) -> None:
    import sentencepiece

    lines = ["the cat sat on the mat", "a dog is not a cat", "bats and cats"] * 20
    proto = nmt_models.make_sentencepiece(lines, 60)
    processor = sentencepiece.SentencePieceProcessor(model_proto=proto)
    pieces = [processor.id_to_piece(index) for index in range(processor.get_piece_size())]
    model = make_model(tmp_path / "m", [piece for piece in pieces if not piece.startswith("<")])
    path = make_package(tmp_path / "x.argosmodel", "en-de", model, files={"sentencepiece.model": proto})
    async with loaded(path) as translator:
        text = await nmt.translate(translator, "the cat sat. the dog\n")
        assert "▁" not in text
        assert text.endswith("\n")
    characters = make_model(tmp_path / "c", CHARACTERS)
    async with loaded(characters) as translator:
        assert len((await nmt.translate(translator, "abc")).split()) == 1
        assert await nmt.translate(translator, "ЖЖ") == "ЖЖ"


# Beside the lanes (A1).


async def test_A1_nmt_answers_while_a_translation_by_language_model_waits(words: Path, mock_clock: MockClock) -> None:
    scripted = ScriptedLoader(seconds_per_step=1.0)
    async with laneway.open_engine(plugins=[scripted.plugin]) as engine:
        llm = await engine.load_model("scripted:m", parallel=1, queue_limit=1)
        translator = await engine.load_model(words, threads=1)
        async with completion.stream(llm, "a long story", max_tokens=50) as story:
            await story.admitted()
            async with llm_translate.stream(llm, "Guten Morgen", source="de", target="en") as waiting:
                # Time stands still: the story does not end, and the translation by the language model cannot begin.
                for _ in range(3):
                    assert await nmt.translate(translator, SENTENCE)
                assert (story.state, waiting.state) == ("running", "waiting")
                (lane,) = engine.snapshot().model("m").lanes
                assert [entry.kind for entry in lane.waiting] == ["translate"]
                with pytest.raises(laneway.RequestRejectedByPolicyError):
                    await llm_translate.translate(llm, "Tag", source="de", target="en")
                assert await nmt.translate(translator, SENTENCE), "a full queue is none of its business"
                async with nmt.stream(translator, SENTENCE) as run:
                    snapshot = engine.snapshot().model(translator.name)
                    assert [entry.request_id for entry in snapshot.without_lane] == [run.request_id]
                    assert all(not lane.running and not lane.waiting for lane in snapshot.lanes)
                mock_clock.autojump_threshold = 0
                await story.result()
                assert (await waiting.result()).text


async def test_nmt_has_threads_of_its_own(words: Path) -> None:
    async with loaded(words) as model:
        limiter = trio.to_thread.current_default_thread_limiter()
        holders = [object() for _ in range(int(limiter.total_tokens))]
        for holder in holders:
            limiter.acquire_on_behalf_of_nowait(holder)
        try:
            with trio.fail_after(600):
                assert await nmt.translate(model, SENTENCE)
        finally:
            for holder in holders:
                limiter.release_on_behalf_of(holder)


# Cancelling (C1).


class Spy:
    """Counts what the native side does after a cancel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = 0
        self.stopped: threading.Event | None = None
        self.tokens_after = 0
        self.on_token: Callable[[], None] = lambda: None
        self.results: list[Any] = []
        translate = Worker.translate

        def spy(worker: Worker, batch: Any, prefix: Any, search: Any, stop: threading.Event, push: Any) -> Any:
            self.begun += 1
            self.stopped = stop

            def on_token(index: int, piece: str) -> None:
                self.tokens_after += stop.is_set()
                self.on_token()
                if push is not None:
                    push(index, piece)

            made = translate(worker, batch, prefix, search, stop, on_token)
            self.results.append(made)
            return made

        monkeypatch.setattr(Worker, "translate", spy)


async def test_C1_greedy_search_stops_within_a_token(endless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy(monkeypatch)
    async with loaded(endless) as model:
        async with nmt.stream(model, [SENTENCE] * 200) as run:
            async for event in run:
                if isinstance(event, BatchEvent) and isinstance(event.event, TextDelta):
                    break
            assert model.engine.cancel(run.request_id) == 1
            with pytest.raises(InferenceCancelledError):
                await run.result()
        assert run.state == "cancelled"
        assert spy.begun == 1
        # One token that was under way for each sentence of the batch, at the most.
        assert spy.tokens_after <= 2 * nmt.GREEDY_BATCH
        (made,) = spy.results
        assert all(len(hypotheses[0].pieces) < 256 for hypotheses in made)
        assert model.engine.snapshot().model(model.name).without_lane == ()


async def test_C1_beam_search_stops_between_batches(words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy(monkeypatch)
    async with loaded(words) as model:
        async with nmt.stream(model, [SENTENCE] * 200, beam_size=4) as run:
            async for event in run:
                if isinstance(event, Progress):
                    break
            begun = spy.begun
            run_id = run.request_id
            assert model.engine.cancel(run_id) == 1
            await model.engine.wait_ended(run_id)
            with pytest.raises(InferenceCancelledError) as cancelled:
                await run.result()
            # Rule C6: what it had made until then.
            assert cancelled.value.text
        assert spy.begun <= begun + 1
        assert all(len(made) <= nmt.BEAM_BATCH for made in spy.results)


@pytest.mark.parametrize(
    ("lengths", "pieces", "counts"),
    [
        ([], 10, []),
        ([1] * 17, None, [8, 8, 1]),
        ([1] * 17, 100, [8, 8, 1]),
        ([4, 4, 4, 4], 10, [2, 2]),
        ([20, 20, 1, 1], 10, [1, 1, 2]),
        ([5, 5, 5], 10, [2, 1]),
    ],
)
def test_micro_batches_are_small_by_number_and_by_length(
    lengths: list[int], pieces: int | None, counts: list[int]
) -> None:
    works = [nmt.Work(index, 0, ("x",) * length) for index, length in enumerate(lengths)]
    batches = nmt.batched(works, 8, pieces)
    assert [len(batch) for batch in batches] == counts
    assert [work for batch in batches for work in batch] == works


async def test_C1_a_deadline_of_the_caller_holds_and_leaves_nothing_running(
    endless: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = Spy(monkeypatch)
    began = threading.Event()
    spy.on_token = began.set
    async with loaded(endless) as model:
        with trio.CancelScope() as scope:

            async def cancel_when_begun() -> None:
                await trio.to_thread.run_sync(began.wait)
                scope.cancel()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(cancel_when_begun)
                await nmt.translate(model, [SENTENCE] * 64)
        assert scope.cancelled_caught
        assert len(spy.results) == spy.begun == 1, "the native call has ended"
        assert await nmt.translate(model, "9") == "9"


async def test_C2_cancelling_one_leaves_the_others_alone(endless: Path) -> None:
    async with loaded(endless, workers=2) as model:
        expected = await nmt.translate(model, SENTENCE)
        async with nmt.stream(model, [SENTENCE] * 100) as first:
            await first.admitted()
            texts: list[str] = []

            async def other() -> None:
                texts.append(await nmt.translate(model, SENTENCE))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(other)
                await anext(first)
                model.engine.cancel(first.request_id)
            with pytest.raises(InferenceCancelledError):
                await first.result()
        assert texts == [expected]


async def test_a_request_that_waits_for_a_thread_is_cancelled_at_once(
    endless: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = Spy(monkeypatch)
    async with loaded(endless) as model:
        async with nmt.stream(model, [SENTENCE] * 100) as first:
            await anext(first)
            begun = spy.begun
            with pytest.raises(trio.TooSlowError):
                with trio.fail_after(0):
                    await nmt.translate(model, SENTENCE)
            assert spy.begun == begun
            model.engine.cancel(first.request_id)
            with pytest.raises(InferenceCancelledError):
                await first.result()


async def test_C8_unloading_ends_requests_and_closes_the_translators_off_the_loop(
    endless: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed_in: list[threading.Thread] = []
    close = Worker.close

    def spy(self: Worker) -> None:
        closed_in.append(threading.current_thread())
        close(self)

    monkeypatch.setattr(Worker, "close", spy)
    async with loaded(endless) as model:
        worker = (await model.service.open(0)).worker
        async with nmt.stream(model, [SENTENCE] * 100) as run:
            await anext(run)
            await model.engine.unload_model(model)
            with pytest.raises(InferenceCancelledError):
                await run.result()
        assert worker.closed
        (thread,) = closed_in
        assert thread is not threading.main_thread()
        with pytest.raises(laneway.ModelNotLoadedError):
            await nmt.translate(model, "x")


async def test_several_workers_give_the_same(words: Path) -> None:
    texts = [f"w{number} w{number + 1}" for number in range(60)]
    async with loaded(words) as model:
        expected = await nmt.translate(model, texts, beam_size=2)
    async with loaded(words, workers=3) as model:
        assert await nmt.translate(model, texts, beam_size=2) == expected


@pytest.mark.parametrize("workers", [1, 3])
async def test_C10_what_fails_natively_is_a_typed_error_of_its_own_request(
    words: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with loaded(words, workers=workers) as model:
        worker = (await model.service.open(0)).worker

        class Broken:
            def translate_batch(self, *args: Any, **kwargs: Any) -> Any:
                raise RuntimeError("no position encodings")

        with monkeypatch.context() as patch:
            patch.setattr(worker, "_only", [Broken()])
            with pytest.raises(TranslationError, match="CTranslate2 failed with words: no position"):
                await nmt.translate(model, [SENTENCE] * 100)
        assert await nmt.translate(model, SENTENCE)


# The end of the process.


ALIVE_AT_EXIT = """
import sys, threading
from pathlib import Path
from laneway_plugins._nmt_worker import Search, Worker
files = {file.name: file.read_bytes() for file in Path(sys.argv[1]).iterdir()}
worker = Worker("words", files, threads=1, workers=1, compute_type="default", device="cpu")
print(len(worker.translate([["w1", "w2"]] * 4, (), Search(), threading.Event(), lambda index, piece: None)))
"""


@pytest.mark.slow
def test_a_forgotten_translator_does_not_abort_the_process(words: Path) -> None:
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-c", ALIVE_AT_EXIT, str(words)], capture_output=True, text=True, timeout=600
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "4\n", "")


# Without the extra.

WITHOUT = """
import sys
for name in ("ctranslate2", "sentencepiece", "sentencex"):
    if name in sys.argv[2].split(","):
        sys.modules[name] = None
import trio
import laneway
from laneway_plugins import nmt

async def main():
    async with laneway.open_engine(strict_plugins=True) as engine:
        try:
            await engine.load_model(sys.argv[1])
        except laneway.ModelLoadError as error:
            print(error)

trio.run(main)
"""


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["ctranslate2,sentencepiece,sentencex", "sentencex"])
def test_without_the_extra_there_is_one_clear_error(words: Path, missing: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(words), missing], capture_output=True, text=True, timeout=600
    )
    assert (done.returncode, done.stderr) == (0, "")
    first = missing.partition(",")[0]
    assert done.stdout == (
        f"cannot load model {str(words)!r}: {first} is not installed; for translation models: "
        "pip install 'laneway[nmt]'\n"
    )
