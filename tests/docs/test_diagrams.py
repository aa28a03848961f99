"""The pictures of the documentation are those that the engine's tables give."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from laneway import _lifecycle
from tests.docs.pages import DOCS, load

diagrams = load(DOCS / "_tools" / "diagrams.py")
SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return ["".join(element.itertext()) for element in ET.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.parametrize("name", diagrams.PICTURES)
def test_the_committed_picture_is_up_to_date(name: str) -> None:
    committed = (diagrams.IMAGES / f"{name}.svg").read_text(encoding="utf-8")
    assert committed == diagrams.PICTURES[name]().svg(), "run: python docs/_tools/diagrams.py"


def test_there_is_no_picture_that_nothing_draws() -> None:
    assert {file.stem for file in diagrams.IMAGES.iterdir()} == set(diagrams.PICTURES)


def test_the_life_of_a_request_shows_every_state_and_transition() -> None:
    shown = texts(diagrams.life().svg())
    assert {state.value for state in _lifecycle.State} <= set(shown)
    labels = [re.sub(r"([ARC]\d+ ?)+$", "", text) for text in shown]
    for happening in _lifecycle.Happening:
        edges = sum(happening in row for row in _lifecycle.TRANSITIONS.values())
        assert labels.count(happening.value) == edges, happening


def test_a_transition_that_has_no_place_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    row: dict[Any, Any] = {_lifecycle.Happening.ARRIVE: _lifecycle.State.WAITING}
    monkeypatch.setitem(_lifecycle.TRANSITIONS, _lifecycle.State.REJECTED, row)
    with pytest.raises(SystemExit, match="REJECTED"):
        diagrams.life()


@pytest.mark.parametrize("name", diagrams.PICTURES)
def test_nothing_is_drawn_beyond_the_edge(name: str) -> None:
    root = ET.fromstring(diagrams.PICTURES[name]().svg())
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for text in root.iter(f"{SVG}text"):
        # DejaVu Sans, the widest of these fonts, takes about 7 pixels a letter.
        size = 7.25 * len("".join(text.itertext()))
        shift = {"start": 0.0, "middle": 0.5, "end": 1.0}[text.attrib["text-anchor"]]
        left = float(text.attrib["x"]) - shift * size
        assert left >= 0, "".join(text.itertext())
        assert left + size <= width, "".join(text.itertext())
        assert 0 < float(text.attrib["y"]) < height
    for box in root.iter(f"{SVG}rect"):
        assert float(box.attrib["x"]) + float(box.attrib["width"]) <= width
        assert float(box.attrib["y"]) + float(box.attrib["height"]) <= height


@pytest.mark.parametrize("name", diagrams.PICTURES)
def test_every_colour_has_one_for_dark_surroundings(name: str) -> None:
    svg = diagrams.PICTURES[name]().svg()
    light, dark = svg.split("@media (prefers-color-scheme: dark)")
    rules = re.compile(r"^\s*\.(\w+) \{.*(?:fill|stroke): #", re.MULTILINE)
    used = set(re.findall(r'class="(\w+)"', svg))
    assert used <= set(rules.findall(light))
    assert used <= set(rules.findall(dark))


def test_checking_says_what_is_stale(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(diagrams, "IMAGES", tmp_path / "images")
    assert diagrams.main(["--check"]) == 1
    assert "life.svg is not up to date" in capsys.readouterr().out
    assert not (tmp_path / "images").exists()
    assert diagrams.main([]) == 0
    capsys.readouterr()
    assert diagrams.main(["--check"]) == 0
    assert capsys.readouterr().out == ""
