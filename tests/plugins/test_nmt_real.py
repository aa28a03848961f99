"""Translation with small real models: English to German, French to English."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import laneway
from laneway import TextDelta
from laneway_plugins import nmt
from tests.docs.pages import DOCS, load
from tests.plugins.nmt_models import DATA, real_package

ENGLISH_GERMAN = "translate-en_de.argosmodel"
FRENCH_ENGLISH = "translate-fr_en.argosmodel"


@pytest.fixture(scope="module")
def english_german() -> Path:
    return real_package(ENGLISH_GERMAN)


@asynccontextmanager
async def loaded(path: Path, *packages: Path) -> AsyncIterator[laneway.Model]:
    async with laneway.open_engine(strict_plugins=True) as engine:
        yield await engine.load_model(path, threads=1, packages=packages)


def sentence_pairs(count: int) -> list[tuple[str, str]]:
    lines = (DATA / "tatoeba-en-de-2000.tsv").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("\t")[:2] for line in lines[:: len(lines) // count]]
    return [(source, target) for source, target in pairs[:count]]


def shared_words(made: list[str], wanted: list[str]) -> float:
    """The share of the wanted words that were made, over all texts."""
    hits = total = 0
    for one, other in zip(made, wanted, strict=True):
        words = Counter(other.lower().split())
        hits += sum((words & Counter(one.lower().split())).values())
        total += sum(words.values())
    return hits / total


@pytest.mark.parametrize("beam_size", [1, 4])
async def test_translations_are_good(english_german: Path, beam_size: int) -> None:
    pairs = sentence_pairs(100)
    async with loaded(english_german) as model:
        texts = await nmt.translate(model, [source for source, _ in pairs], beam_size=beam_size)
    assert shared_words(texts, [target for _, target in pairs]) > 0.5
    assert shared_words(texts[1:] + texts[:1], [target for _, target in pairs]) < 0.2, "that it can fail"


@pytest.mark.parametrize("beam_size", [1, 4])
async def test_odd_items(english_german: Path, beam_size: int) -> None:
    long = " ".join(["I have a cat and a dog,", "and Tom has a house."] * 200)
    assert len(long.split()) == 2400
    items = [
        "I like cats.",
        "",
        "   ",
        "😀😀",
        "\n\n",
        "I like cats.\n\n  I like dogs.\r\n",
        long,
        "你好，世界。",
        "123 456",
        "I like cats.",
    ]
    async with loaded(english_german) as model:
        texts = await nmt.translate(model, items, beam_size=beam_size)
    assert len(texts) == len(items)
    for index in (1, 2, 3, 4, 7, 8):
        assert texts[index] == items[index]
    assert texts[0] == texts[9] == "Ich mag Katzen."
    first, blank, last, end = texts[5].replace("\r\n", "\n").split("\n")
    assert (first, blank, end) == ("Ich mag Katzen.", "", "")
    assert last.startswith("  Ich ")
    assert texts[5].endswith("\r\n")
    assert texts[6].count("Tom") >= 150, "the end of a long text is there as its beginning is"
    assert len(texts[6].split()) > 2000


async def test_the_pivot(english_german: Path) -> None:
    french = real_package(FRENCH_ENGLISH)
    texts = ["Où est la gare ?", "", "Il pleut.\n\nJ'aime les chats."]
    async with loaded(french, english_german) as model:
        english = await nmt.translate(model, texts, source="fr", target="en", beam_size=4)
        german = await nmt.translate(model, english, source="en", target="de", beam_size=4)
        result = await nmt.translate_details(model, texts, source="fr", target="de", beam_size=4, scores=True)
    assert result.route == ("fr", "en", "de")
    assert result.texts == german
    assert "Bahnhof" in result.texts[0]
    assert result.texts[1] == ""
    assert result.texts[2].startswith("Es regnet")
    assert result.texts[2].count("\n") == 2


async def test_a_directory_of_packages_is_one_model(english_german: Path) -> None:
    real_package(FRENCH_ENGLISH)
    async with loaded(english_german.parent) as model:
        assert "Bahnhof" in await nmt.translate(model, "Où est la gare ?", source="fr", target="de")


async def test_a_stream_shows_each_sentence_once_it_is_begun(english_german: Path) -> None:
    text = "I like cats. Where is the station?\n\nIt is raining."
    async with loaded(english_german) as model:
        async with nmt.stream(model, text) as run:
            shown = [event.text async for event in run if isinstance(event, TextDelta)]
            result = await run.result()
    assert "".join(shown) == result.text
    assert result.text.startswith("Ich mag Katzen. Wo ist der Bahnhof?\n\nEs regnet")


async def test_characters_instead_of_sentencepiece() -> None:
    path = real_package("aren-transliteration-i8")
    async with loaded(path) as model:
        assert await nmt.translate(model, ["جورج", "", "جورج\n"]) == ["jorg", "", "jorg\n"]


async def test_the_programs_of_the_page_about_translating(english_german: Path) -> None:
    page = load(DOCS / "examples" / "translating.py")
    async with laneway.open_engine() as engine:
        morning, again, blank, how = await page.translate_with_a_translation_model(engine, english_german)
        assert "Morgen" in morning
        assert "Morgen" in again
        assert (blank, how) == ("", "Wie geht es dir?")
        assert "Bahnhof" in await page.go_over_english(engine, real_package(FRENCH_ENGLISH), english_german)
        bare = await page.load_a_bare_model(engine, real_package("aren-transliteration-i8"))
        assert bare.metadata["pairs"] == "en to de"
