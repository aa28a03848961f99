"""Curves of losses, for terminals and as SVG.  Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from html import escape

import attrs

from laneway_plugins._finetune_data import Loss

# The dots of a Braille character by column and row; together they make pixels, two wide and four high.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BLANK = 0x2800
_LABEL = 8
_DECADES = 1.5
"""The scale is logarithmic if the losses span more than this many powers of ten."""


@attrs.frozen
class _Scale:
    """Steps and losses to the unit square, with the lower left corner at 0, 0."""

    first: int
    last: int
    low: float
    high: float
    logarithmic: bool

    @classmethod
    def of(cls, points: Sequence[Loss]) -> _Scale:
        losses = [point.loss for point in points]
        steps = [point.step for point in points]
        low, high = min(losses), max(losses)
        logarithmic = low > 0 and high > 0 and math.log10(high / low) > _DECADES
        return cls(min(steps), max(steps), low, high, logarithmic)

    def across(self, step: int) -> float:
        return (step - self.first) / (self.last - self.first) if self.last > self.first else 0.5

    def up(self, loss: float) -> float:
        if self.high <= self.low:
            return 0.5
        if self.logarithmic:
            return math.log(loss / self.low) / math.log(self.high / self.low)
        return (loss - self.low) / (self.high - self.low)

    def at(self, up: float) -> float:
        """The loss at a height."""
        if self.logarithmic:
            return self.low * math.exp(math.log(self.high / self.low) * up)
        return self.low + (self.high - self.low) * up


def _split(curve: Iterable[Loss]) -> tuple[list[Loss], list[Loss]]:
    points = [point for point in curve if math.isfinite(point.loss)]
    return [point for point in points if not point.validation], [point for point in points if point.validation]


def plot_text(curve: Iterable[Loss], *, width: int = 72, height: int = 12, ascii_only: bool = False) -> str:
    """The curve as lines of text, the last one without its end.  Empty if there are no points.

    ``o`` marks losses of the validation.  ``ascii_only``: without Braille characters.
    """
    learned, measured = _split(curve)
    if not learned and not measured:
        return ""
    scale = _Scale.of(learned + measured)
    columns = max(8, width - _LABEL - 2)
    fine, tall = (1, 1) if ascii_only else (2, 4)
    pixels = _pixels(learned, scale, columns * fine, height * tall)
    rows = []
    for row in range(height):
        cells = []
        for column in range(columns):
            dots = [(x, y) for x in range(fine) for y in range(tall) if (column * fine + x, row * tall + y) in pixels]
            if ascii_only:
                cells.append("*" if dots else " ")
            else:
                cells.append(chr(_BLANK + sum(_DOTS[x][y] for x, y in dots)) if dots else " ")
        rows.append(cells)
    for point in measured:
        column = min(columns - 1, int(scale.across(point.step) * columns))
        rows[_row(scale.up(point.loss), height)][column] = "o"
    lines = []
    for row, cells in enumerate(rows):
        label = ""
        if row in (0, height // 2, height - 1):
            label = f"{scale.at(1 - row / (height - 1) if height > 1 else 1.0):.3g}"
        lines.append(f"{label:>{_LABEL}} |{''.join(cells)}".rstrip())
    lines.append(f"{'':{_LABEL}} +{'-' * columns}")
    first, last = f"step {scale.first}", f"{scale.last}"
    note = "loss" + (", o: validation" if measured else "") + (", logarithmic" if scale.logarithmic else "")
    lines.append(f"{'':{_LABEL}}  {first}{note:^{max(1, columns - len(first) - len(last))}}{last}")
    return "\n".join(lines)


def _row(up: float, rows: int) -> int:
    return min(rows - 1, max(0, round((1 - up) * (rows - 1))))


def _pixels(points: Sequence[Loss], scale: _Scale, width: int, height: int) -> set[tuple[int, int]]:
    """A line through the points; where there are several in a column, all heights between them."""
    spans: dict[int, tuple[int, int]] = {}
    for point in points:
        column = min(width - 1, int(scale.across(point.step) * width))
        row = _row(scale.up(point.loss), height)
        low, high = spans.get(column, (row, row))
        spans[column] = min(low, row), max(high, row)
    pixels = {(column, row) for column, (low, high) in spans.items() for row in range(low, high + 1)}
    ordered = sorted(spans)
    for left, right in itertools.pairwise(ordered):
        start, end = sum(spans[left]) / 2, sum(spans[right]) / 2
        for column in range(left + 1, right):
            share = (column - left) / (right - left)
            pixels.add((column, round(start + (end - start) * share)))
    return pixels


def plot_svg(curve: Iterable[Loss], *, title: str = "", width: int = 720, height: int = 420) -> str:
    """The curve as the text of an SVG file.  Raises :class:`ValueError` if there are no points."""
    learned, measured = _split(curve)
    if not learned and not measured:
        raise ValueError("there are no losses to plot")
    scale = _Scale.of(learned + measured)
    left, right, top, bottom = 64, 16, 40, 48
    inner, tall = width - left - right, height - top - bottom

    def place(point: Loss) -> str:
        return f"{left + scale.across(point.step) * inner:.1f},{top + (1 - scale.up(point.loss)) * tall:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{width / 2:g}" y="22" text-anchor="middle" font-size="14">{escape(title)}</text>',
    ]
    for tick in range(5):
        y = top + tall * (1 - tick / 4)
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{left + inner}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{scale.at(tick / 4):.3g}</text>')
    for tick in range(5):
        step = round(scale.first + (scale.last - scale.first) * tick / 4)
        x = left + scale.across(step) * inner
        parts.append(f'<text x="{x:.1f}" y="{top + tall + 18}" text-anchor="middle">{step}</text>')
        if scale.last == scale.first:
            break
    scaled = "loss (logarithmic)" if scale.logarithmic else "loss"
    parts.append(f'<text x="{left + inner / 2:g}" y="{height - 10}" text-anchor="middle">step</text>')
    middle = top + tall / 2
    parts.append(
        f'<text x="14" y="{middle:g}" text-anchor="middle" transform="rotate(-90 14 {middle:g})">{scaled}</text>'
    )
    for points, colour, name in ((learned, "#1f5fa8", "learned"), (measured, "#c2571a", "validation")):
        if points:
            line = " ".join(map(place, points))
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
            if points is measured or len(points) == 1:
                for point in points:
                    x_text, y_text = place(point).split(",")
                    parts.append(f'<circle cx="{x_text}" cy="{y_text}" r="3" fill="{colour}"/>')
            y = top + 14 + (16 if points is measured else 0)
            parts.append(f'<text x="{left + inner - 6}" y="{y}" text-anchor="end" fill="{colour}">{name}</text>')
    parts.append("</svg>")
    return "\n".join(parts) + "\n"
