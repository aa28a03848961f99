"""Curves of losses, as text and as SVG."""

from __future__ import annotations

import itertools
import math
import xml.etree.ElementTree as ET

import pytest

from laneway_plugins._finetune_curve import plot_svg, plot_text
from laneway_plugins._finetune_data import Loss

FALLING = [Loss(step, 4.0 - step * 0.03) for step in range(1, 101)]
MEASURED = [Loss(step, 4.2 - step * 0.02, validation=True) for step in range(0, 101, 25)]


def cells(text: str) -> list[str]:
    """The picture without its labels and axis."""
    return [row.partition("|")[2] for row in text.splitlines() if "|" in row]


@pytest.mark.parametrize("ascii_only", [False, True])
def test_a_falling_curve_falls(ascii_only: bool) -> None:
    rows = cells(plot_text(FALLING, width=60, height=10, ascii_only=ascii_only))
    assert len(rows) == 10
    assert all(len(row) <= 50 for row in rows)
    starts = [len(row) - len(row.lstrip()) for row in rows]
    assert starts == sorted(starts)
    assert starts[0] == 0
    assert len(rows[-1]) == 50


def test_labels_tell_the_scale() -> None:
    text = plot_text([*FALLING, *MEASURED], width=70, height=9)
    lines = text.splitlines()
    assert lines[0].split()[0] == "4.2"
    assert lines[8].split()[0] == "1"
    assert lines[-1].split()[:2] == ["step", "0"]
    assert lines[-1].split()[-1] == "100"
    assert "o: validation" in lines[-1]
    assert sum(row.count("o") for row in cells(text)) == len(MEASURED)
    assert max(map(len, lines)) <= 70


def test_a_wide_span_is_logarithmic() -> None:
    points = [Loss(step, 10.0 ** (1 - step / 25)) for step in range(101)]
    text = plot_text(points, width=60, height=11, ascii_only=True)
    assert "logarithmic" in text
    # A power of ten takes as much room everywhere: a straight line.
    rows = cells(text)
    starts = [len(row) - len(row.lstrip()) for row in rows]
    assert max(abs((b - a) - 5) for a, b in itertools.pairwise(starts[1:])) <= 1
    assert "logarithmic" in plot_svg(points)
    assert "logarithmic" not in plot_text(FALLING)


@pytest.mark.parametrize(
    "points", [[Loss(1, 2.0)], [Loss(1, 2.0), Loss(2, 2.0)], [Loss(0, 0.0), Loss(1, -1.0)], [Loss(3, 1.0, True)]]
)
def test_odd_curves_are_drawn(points: list[Loss]) -> None:
    assert any(row.strip() for row in cells(plot_text(points)))
    ET.fromstring(plot_svg(points))


def test_nothing_to_draw() -> None:
    assert plot_text([]) == ""
    assert plot_text([Loss(1, math.nan)]) == ""
    with pytest.raises(ValueError, match="no losses"):
        plot_svg([Loss(1, math.inf)])


def test_the_svg_has_every_point() -> None:
    root = ET.fromstring(plot_svg([*FALLING, *MEASURED], title="a <b> & c"))
    space = {"s": "http://www.w3.org/2000/svg"}
    learned, measured = root.findall("s:polyline", space)
    assert len(learned.attrib["points"].split()) == len(FALLING)
    assert len(measured.attrib["points"].split()) == len(MEASURED)
    assert len(root.findall("s:circle", space)) == len(MEASURED)
    heights = [float(point.split(",")[1]) for point in learned.attrib["points"].split()]
    assert heights == sorted(heights), "a falling loss goes down the page"
    assert next(text.text for text in root.findall("s:text", space)) == "a <b> & c"
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for line in (learned, measured):
        for point in line.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= width
            assert 0 <= y <= height
