"""Translation with both kinds of models, one function for each thing.

::

    laneway pull smollm2
    python docs/examples/translating.py tests/data/nmt/translate-en_de.argosmodel smollm2
"""

from __future__ import annotations

import sys
from os import PathLike

import trio

import laneway
from laneway_plugins import llm_translate, nmt


async def translate_with_a_translation_model(engine: laneway.Engine, package: str | PathLike[str]) -> list[str]:
    """One text, then a list: as many come out as went in."""
    model = await engine.load_model(package, threads=1)
    text = await nmt.translate(model, "Good morning.")
    texts = await nmt.translate(model, ["Good morning.", "", "How are you?"], beam_size=4)
    return [text, *texts]


async def load_a_bare_model(engine: laneway.Engine, directory: str | PathLike[str]) -> laneway.Model:
    """A CTranslate2 directory that does not say what it is for."""
    return await engine.load_model(directory, languages=("en", "de"))


async def go_over_english(
    engine: laneway.Engine, french_english: str | PathLike[str], english_german: str | PathLike[str]
) -> str:
    """From French to German, where there is no such pair."""
    model = await engine.load_model(french_english, packages=[english_german])
    result = await nmt.translate_details(model, "Où est la gare ?", source="fr", target="de")
    assert result.route == ("fr", "en", "de")
    return result.text


async def translate_with_a_language_model(model: laneway.Model) -> list[str]:
    """The same through a language model's lane."""
    text = await llm_translate.translate(model, "Guten Morgen", source="de", target="en")
    texts = await llm_translate.translate(model, ["Hallo", "", "Wie geht's?"], source="de", target="en", context="chat")
    return [text, *texts]


def ask(wanted: llm_translate.Wanted) -> str:
    """The prompt that a model of ours was trained on."""
    return f"<2{wanted.target.base}> {wanted.text}"


OURS = llm_translate.PromptForm(name="ours", models=r"\bours-mt\b", ask=ask)


async def main(package: str | PathLike[str], language_model: str) -> None:
    """Translate with both."""
    async with laneway.open_engine() as engine:
        print(await translate_with_a_translation_model(engine, package))
        print(await translate_with_a_language_model(await engine.load_model(language_model)))


if __name__ == "__main__":
    trio.run(main, sys.argv[1], sys.argv[2])
