"""Draws the pictures of the documentation from the engine's own tables and constants, and from what was measured.

    python docs/_tools/diagrams.py            writes docs/images/*.svg
    python docs/_tools/diagrams.py --check    says which of them are not up to date

The places are chosen by hand here; what is drawn (states, happenings, limits, reasons, names of functions) comes from
the code.  A state or a transition that the table gains and this file does not place is an error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args
from xml.sax.saxutils import escape

from laneway._admission import MAX_PARALLEL, QUEUE_LIMIT, Admission
from laneway._context import Context
from laneway._engine import Engine
from laneway._errors import RejectionReason
from laneway._lane import Lanes
from laneway._lifecycle import TERMINAL, TRANSITIONS, Happening, State
from laneway._request import Request
from laneway._scheduler import Scheduler
from laneway.decoder import Decoder

IMAGES = Path(__file__).resolve().parent.parent / "images"
DATA = IMAGES.parent / "data"

# Colours by class: in light surroundings and in dark ones.  (fill, stroke) of shapes, fill of texts.
SHAPES = {
    "page": ("#ffffff", "#d1d9e0", "#0d1117", "#3d444d"),
    "area": ("#f6f8fa", "#818b98", "#151b23", "#656c76"),
    "box": ("#ffffff", "#59636e", "#212830", "#9198a1"),
    "live": ("#ddf4ff", "#0969da", "#10233d", "#4493f8"),
    "good": ("#dafbe1", "#1a7f37", "#12261e", "#3fb950"),
    "bad": ("#ffebe9", "#cf222e", "#2d1316", "#f85149"),
    "warn": ("#fff8c5", "#9a6700", "#272115", "#d29922"),
}
TEXTS = {
    "ink": ("#1f2328", "#f0f6fc"),
    "mute": ("#59636e", "#9198a1"),
}
LINE = ("#59636e", "#9198a1")

Point = tuple[float, float]


class Picture:
    """An SVG under construction.  Coordinates are pixels, from the top left."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size = (width, height)
        self._title = title
        self._parts: list[str] = []
        self.box(0.5, 0.5, width - 1, height - 1, style="page", radius=8)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *lines: str,
        style: str = "box",
        radius: float = 6,
        dashed: bool = False,
    ) -> None:
        """A rectangle with lines of text in its middle, the first one bold if there are several."""
        dash = ' stroke-dasharray="6 4"' if dashed else ""
        self._parts.append(
            f'<rect class="{style}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"{dash}/>'
        )
        top = y + height / 2 - 17 * (len(lines) - 1) / 2 + 4.5
        for number, line in enumerate(lines):
            bold = number == 0
            self.text(x + width / 2, top + 17 * number, line, bold=bold, style="ink" if bold else "mute")

    def text(
        self, x: float, y: float, text: str, *, style: str = "ink", bold: bool = False, anchor: str = "middle"
    ) -> None:
        """One line of text at its base line."""
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text class="{style}" x="{x:g}" y="{y:g}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'
        )

    def label(self, x: float, y: float, text: str, rules: str, *, anchor: str) -> None:
        """A word, and the numbers of rules behind it."""
        self._parts.append(
            f'<text class="ink" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}'
            f'<tspan class="mute" font-size="11" dx="5">{rules}</tspan></text>'
        )

    def arrow(self, *points: Point, dashed: bool = False) -> None:
        """A line through ``points`` with round corners and a head at its end."""
        path = [f"M{points[0][0]:g},{points[0][1]:g}"]
        for before, corner, after in zip(points, points[1:], points[2:], strict=False):
            (x1, y1), (x2, y2) = _towards(corner, before), _towards(corner, after)
            path.append(f"L{x1:g},{y1:g} Q{corner[0]:g},{corner[1]:g} {x2:g},{y2:g}")
        path.append(f"L{points[-1][0]:g},{points[-1][1]:g}")
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(f'<path class="line" d="{" ".join(path)}" marker-end="url(#head)"{dash}/>')

    def svg(self) -> str:
        """The file's text."""
        width, height = self._size
        body = "\n".join(f"  {part}" for part in self._parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            f" role=\"img\" font-family=\"system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif\""
            f' font-size="13">\n'
            f"  <title>{escape(self._title)}</title>\n"
            f"  <style>\n{_rules(0)}\n    @media (prefers-color-scheme: dark) {{\n{_rules(1)}\n    }}\n  </style>\n"
            f'  <defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8"'
            f' orient="auto-start-reverse"><path class="head" d="M0,0.5 L10,5 L0,9.5 Z"/></marker></defs>\n'
            f"{body}\n</svg>\n"
        )


def _towards(corner: Point, other: Point, radius: float = 10) -> Point:
    """The point on the way from ``corner`` to ``other`` where the rounding begins."""
    dx, dy = other[0] - corner[0], other[1] - corner[1]
    length = (dx * dx + dy * dy) ** 0.5
    share = min(radius, length / 2) / length
    return round(corner[0] + dx * share, 1), round(corner[1] + dy * share, 1)


def _rules(scheme: int) -> str:
    """The style sheet, for light (0) or dark (1) surroundings."""
    rules = [f".{name} {{ fill: {c[2 * scheme]}; stroke: {c[2 * scheme + 1]}; }}" for name, c in SHAPES.items()]
    rules += [f".{name} {{ fill: {colours[scheme]}; }}" for name, colours in TEXTS.items()]
    rules.append(f".line {{ fill: none; stroke: {LINE[scheme]}; stroke-width: 1.3; }}")
    rules.append(f".head {{ fill: {LINE[scheme]}; }}")
    return "\n".join(("    " if scheme == 0 else "      ") + rule for rule in rules)


def named(function: Callable[..., object] | property) -> str:
    """The name of a function of the engine, so that a picture cannot show one that is gone."""
    real = function.fget if isinstance(function, property) else function
    name: str = getattr(real, "__name__")  # noqa: B009 - not every callable has one, as far as types know
    return name


# The life of a request.

STATE_WIDTH, STATE_HEIGHT = 116, 40
# The middles of the states.
PLACES: dict[State, Point] = {
    State.NEW: (90, 150),
    State.WAITING: (310, 150),
    State.RUNNING: (570, 150),
    State.COMPLETED: (830, 150),
    State.REJECTED: (310, 52),
    State.FAILED: (440, 252),
    State.CANCELLING: (570, 354),
    State.CANCELLED: (830, 354),
}
STYLES = {
    State.NEW: "box",
    State.COMPLETED: "good",
    State.FAILED: "bad",
    State.CANCELLED: "warn",
    State.REJECTED: "warn",
}
# For each transition: its line; where its label begins ("start"), ends or has its middle; the rules that speak of it.
ROUTES: dict[tuple[State, Happening], tuple[tuple[Point, ...], Point, str, str]] = {
    (State.NEW, Happening.ARRIVE): (((148, 150), (252, 150)), (200, 142), "middle", "A3"),
    (State.NEW, Happening.REFUSE): (((90, 130), (90, 52), (252, 52)), (174, 44), "middle", "A4 A6 A7"),
    (State.NEW, Happening.END_CANCELLED): (
        ((90, 170), (90, 424), (830, 424), (830, 374)),
        (440, 416),
        "middle",
        "C5",
    ),
    (State.WAITING, Happening.ADMIT): (((368, 150), (512, 150)), (440, 142), "middle", "A3 A6 A13"),
    (State.WAITING, Happening.REFUSE): (((310, 130), (310, 72)), (318, 106), "start", "A5"),
    (State.WAITING, Happening.CANCEL): (((282, 170), (282, 354), (512, 354)), (392, 346), "middle", "C3"),
    (State.WAITING, Happening.FAIL): (((338, 170), (412, 232)), (366, 212), "end", "C11"),
    (State.RUNNING, Happening.COMPLETE): (((628, 150), (772, 150)), (700, 142), "middle", "R4"),
    (State.RUNNING, Happening.FAIL): (((542, 170), (468, 232)), (488, 196), "end", "C10"),
    (State.RUNNING, Happening.CANCEL): (((570, 170), (570, 334)), (578, 240), "start", "C1 C3"),
    (State.CANCELLING, Happening.FAIL): (((542, 334), (468, 272)), (488, 314), "end", "C7"),
    (State.CANCELLING, Happening.COMPLETE): (((606, 334), (810, 170)), (724, 258), "start", "C7"),
    (State.CANCELLING, Happening.END_CANCELLED): (((628, 354), (772, 354)), (700, 346), "middle", "C6"),
}


def life() -> Picture:
    """The table of ``laneway._lifecycle``."""
    edges = {(state, happening) for state, row in TRANSITIONS.items() for happening in row}
    _agree("states", set(PLACES), set(TRANSITIONS))
    _agree("transitions", set(ROUTES), edges)
    picture = Picture(916, 446, "The life of a request")
    for (_, happening), (line, (x, y), anchor, rules) in ROUTES.items():
        picture.arrow(*line)
        picture.label(x, y, happening.value, rules, anchor=anchor)
    for state, (x, y) in PLACES.items():
        style = STYLES.get(state, "live")
        if (style in ("good", "bad", "warn")) != (state in TERMINAL):
            raise SystemExit(f"{state} is drawn as what it is not: a terminal state")
        picture.box(x - STATE_WIDTH / 2, y - STATE_HEIGHT / 2, STATE_WIDTH, STATE_HEIGHT, state.value, style=style)
    return picture


def _agree(what: str, placed: set[Any], there: set[Any]) -> None:
    if placed != there:
        missing, gone = there - placed, placed - there
        raise SystemExit(f"docs/_tools/diagrams.py: {what} without a place: {missing}; places without one: {gone}")


# A lane.


def lane() -> Picture:
    """How a lane admits: the queue, the permits, and every way in and out."""
    reasons = list(get_args(RejectionReason))
    _agree("reasons", {"queue_full", "overflow", "busy", "queue_timeout"}, set(reasons))
    picture = Picture(890, 286, "A lane")
    top, height = 68, 46
    picture.box(170, 28, 352, 126, style="area")
    picture.text(346, 48, f"the line: {QUEUE_LIMIT} may wait, the oldest first", style="mute")
    waiters = [("…", "box"), ("9", "live"), ("8", "live"), ("7", "bad"), ("6", "live"), ("5", "warn")]
    for place, (name, style) in enumerate(waiters):
        picture.box(184 + 55 * place, top, 49, height, name, style=style)
    picture.text(514, 142, "6 is the oldest that is ready", style="mute", anchor="end")

    picture.box(640, 28, 222, 126, style="area")
    picture.text(751, 48, f"permits: parallel, 1 to {MAX_PARALLEL}", style="mute")
    for place, name in enumerate(["2", "3", "4", ""]):
        picture.box(654 + 50 * place, top, 44, height, *([name] if name else []), style="live", dashed=not name)
    picture.text(751, 142, "one of four is free: 6 starts", style="mute")

    picture.arrow((28, 91), (170, 91))
    picture.text(92, 83, named(Admission.arrive), bold=True)
    picture.arrow((522, 91), (640, 91))
    picture.text(581, 83, "admit", bold=True)
    picture.arrow((92, 97), (92, 174))
    picture.text(107, 192, ", ".join(reason for reason in reasons if reason != "queue_timeout"))
    picture.text(107, 210, "refused, nothing has changed", style="mute")
    picture.arrow((346, 154), (346, 174))
    picture.text(346, 192, f"{named(Admission.withdraw)}: cancelled, or queue_timeout")
    picture.text(346, 210, "admit whoever can start now", style="mute")
    picture.arrow((751, 154), (751, 186), (581, 186), (581, 97))
    picture.text(690, 204, f"{named(Admission.finish)}: teardown is over,")
    picture.text(690, 222, "permits and keys go back", style="mute")

    legend = [
        (28, "live", "shared: beside others"),
        (236, "warn", "not ready: lacks a key, may be passed"),
        (556, "bad", "exclusive: runs alone, is never passed"),
    ]
    for x, style, text in legend:
        picture.box(x, 248, 18, 18, style=style, radius=4)
        picture.text(x + 26, 261.5, text, style="mute", anchor="start")
    return picture


# The way of a request.


def way() -> Picture:
    """Who does what for a request, in which nursery."""
    picture = Picture(900, 516, "The way of a request")
    # The caller.
    picture.box(34, 64, 210, 300, style="area")
    picture.text(139, 86, "the caller's task", bold=True)
    picture.box(50, 104, 178, 62, f"1  engine.{named(Engine.run)}(…)", "prepare: can it ever run?", "id, ticket, task")
    picture.box(50, 212, 178, 46, "async for event in run", "unread text merges", style="live")
    picture.box(50, 300, 178, 46, "leaving the block", "waits for the teardown")

    # The requests' nursery.
    picture.box(310, 64, 250, 426, style="area")
    picture.text(435, 86, "nursery of requests", bold=True)
    picture.text(435, 103, "cancelled with the program", style="mute")
    picture.box(326, 118, 218, 356, style="page", dashed=True)
    picture.text(435, 138, "task of one request", style="mute")
    steps = [
        (f"2  {named(Lanes.wait_turn)}", "parked in its lane", "box"),
        ("3  the plugin's handler", f"ctx.{named(Context.generate)}, ctx.{named(Context.emit)}", "live"),
        ("6  teardown, shielded", "drops its sequences", "box"),
        (f"{named(Lanes.leave)}", "permit back, next one in", "box"),
    ]
    for place, (first, second, style) in enumerate(steps):
        y = 152 + 80 * place
        picture.box(342, y, 186, 50, first, second, style=style)
        if place:
            picture.arrow((435, y - 30), (435, y))

    # The services' nursery.
    picture.box(626, 64, 250, 254, style="area")
    picture.text(751, 86, "nursery of services", bold=True)
    picture.text(751, 103, "shielded, ends last", style="mute")
    picture.box(642, 118, 218, 184, style="page", dashed=True)
    picture.text(751, 138, "decode loop of a model", style="mute")
    picture.box(658, 154, 186, 50, "5  delivery", "beside the next step", style="live")
    loop = f"{named(Scheduler.schedule)}, {named(Decoder.step)}, {named(Scheduler.postprocess)}"
    picture.box(652, 236, 198, 50, "4  step after step", loop, style="live")
    picture.arrow((751, 236), (751, 204))

    # The decoder.
    picture.box(658, 392, 186, 66, "the decoder", "one native call a step;", "only that loop uses it", style="warn")
    picture.arrow((726, 286), (726, 392))
    picture.text(718, 360, named(Decoder.step), anchor="end", style="mute")
    picture.arrow((776, 392), (776, 286))
    picture.text(784, 360, "tokens", anchor="start", style="mute")

    # Between them.
    picture.arrow((228, 135), (277, 135), (277, 177), (342, 177))
    picture.text(277, 126, "starts", style="mute")
    picture.arrow((528, 257), (652, 257))
    picture.text(593, 250, "sequences", style="mute")
    picture.arrow((528, 337), (600, 337), (600, 272), (652, 272))
    picture.text(594, 352, "drop", style="mute")
    picture.arrow((658, 179), (593, 179), (593, 40), (16, 40), (16, 235), (50, 235), dashed=True)
    picture.text(305, 33, f"{named(Request.put)}: straight to the run's reader", style="mute")
    picture.arrow((342, 417), (139, 417), (139, 346), dashed=True)
    picture.text(222, 410, "ended, with its outcome", style="mute")
    return picture


# What was measured of the attention kernel.


def attention() -> Picture:
    """``docs/data/attention.json``, which ``python -m benchmarks.kernels`` writes."""
    cases: dict[str, dict[str, dict[str, float]]] = json.loads((DATA / "attention.json").read_text())["cases"]
    ways = list(next(iter(cases.values())))
    left, right, row, top = 150, 760, 15, 62
    block = row * len(ways) + 22
    picture = Picture(890, top + block * len(cases) + 12, "Whole jobs with our attention and with llama.cpp's")
    picture.text(
        left, 28, "Generated tokens a second of the whole job, over the fastest of llama.cpp's ways", anchor="start"
    )
    picture.text(
        left, 46, "requests × prompt + generated tokens; the line is llama.cpp's fastest", style="mute", anchor="start"
    )
    most = max(values["all_in"] / _best(case) for case in cases.values() for values in case.values())
    line = round(left + (right - left) / most, 1)
    for number, (name, case) in enumerate(cases.items()):
        y = top + block * number
        picture.text(left - 14, y + row * len(ways) / 2 + 4, name.replace("x", " × ").replace("+", " + "), anchor="end")
        picture.box(line - 0.5, y - 4, 1, row * len(ways) + 5, style="area", radius=0)
        for place, way_ in enumerate(ways):
            share = case[way_]["all_in"] / _best(case)
            width = round((right - left) * share / most, 1)
            style = "good" if way_ == "ours" else "box"
            picture.box(left, y + row * place, width, row - 3, style=style, radius=2)
            text = f"{way_} {share:.2f}"
            picture.text(
                max(left + width, line) + 6,
                y + row * place + 10,
                text,
                style="ink" if way_ == "ours" else "mute",
                anchor="start",
            )
    return picture


def _best(case: dict[str, dict[str, float]]) -> float:
    return max(values["all_in"] for name, values in case.items() if name != "ours")


PICTURES: dict[str, Callable[[], Picture]] = {"life": life, "lane": lane, "way": way, "attention": attention}


def main(arguments: list[str]) -> int:
    """Write the pictures, or with ``--check`` say which ones differ."""
    stale = []
    for name, draw in PICTURES.items():
        file, text = IMAGES / f"{name}.svg", draw().svg()
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            stale.append(file)
            if "--check" not in arguments:
                file.parent.mkdir(exist_ok=True)
                file.write_text(text, encoding="utf-8")
    for file in stale:
        print(f"{file.name} {'is not up to date' if '--check' in arguments else 'written'}")
    return int("--check" in arguments and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
