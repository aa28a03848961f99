"""Answers on their way to a person: side by side on a terminal, line by line elsewhere."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import IO, Any, final

import attrs
import rich.console
import rich.live
import rich.panel
import rich.table
import rich.text
import trio

from laneway import Engine, Model
from laneway.terminal import TerminalText, harmless, is_terminal

REFRESH_SECONDS = 0.1
"""How often what is live on a terminal is drawn again."""
_NARROWEST = 24
"""Columns below which side by side is no help any more."""


def completion_request(engine: Engine, model: Model, messages: Any, **fields: Any) -> Any:
    """A request of the operation ``completion``, whichever plugin declares it; ``fields`` that are None are left out.

    Raises :class:`OperationNotFoundError` if none does.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    return engine.operation(model, "completion").request_type(messages, **given)


def wants_live_view() -> bool:
    """Whether standard output is a terminal that can be drawn on."""
    return is_terminal(sys.stdout) and not rich.console.Console().is_dumb_terminal


class LabelledLines:
    """Several texts that grow at once, printed as whole lines, each with the label of its text.

    ``width``: a line that gets longer is broken between two words, so that it shows before it ends; None: never.
    """

    def __init__(self, write: Callable[[str], None], *, width: int | None = None) -> None:
        self._write = write
        self._width = width
        self._begun: dict[str, str] = {}

    def add(self, label: str, text: str) -> None:
        """Print what is complete now."""
        *lines, rest = (self._begun.get(label, "") + text).split("\n")
        while self._width is not None and len(rest) > self._width:
            cut = rest.rfind(" ", 1, self._width + 1)
            if cut < 0:
                cut = self._width
            lines.append(rest[:cut])
            rest = rest[cut:].removeprefix(" ")
        for line in lines:
            self._write(f"{label} {line}".rstrip())
        self._begun[label] = rest

    def end(self, label: str) -> None:
        """Print the rest of a text."""
        rest = self._begun.pop(label, "")
        if rest:
            self._write(f"{label} {rest}".rstrip())


@attrs.define
class Pane:
    """One text in a frame, with a line above it and one below."""

    title: str
    text: str = ""
    status: str = ""
    style: str = ""


def side_by_side(panes: Sequence[Pane], console: rich.console.Console, lines: int) -> rich.table.Table:
    """The panes in as many columns as the console has room for.

    ``lines`` is the height of all rows together; of longer texts the end is shown.
    """
    columns = max(1, min(len(panes), console.width // _NARROWEST))
    rows = -(-len(panes) // columns)
    height = max(1, lines // rows - 2)
    width = console.width // columns
    table = rich.table.Table.grid(expand=True)
    for _ in range(columns):
        table.add_column(width=width)
    frames = [_frame(pane, console, width, height) for pane in panes]
    for start in range(0, len(frames), columns):
        table.add_row(*frames[start : start + columns])
    return table


def _frame(pane: Pane, console: rich.console.Console, width: int, height: int) -> rich.panel.Panel:
    # Text objects, because brackets in what a model says must not be read as markup.
    wrapped = rich.text.Text(harmless(pane.text)).wrap(console, width - 4)
    return rich.panel.Panel(
        rich.text.Text("\n").join(wrapped[-height:]),
        title=rich.text.Text(harmless(pane.title, one_line=True)),
        subtitle=rich.text.Text(harmless(pane.status, one_line=True)),
        height=height + 2,
        border_style=pane.style,
    )


@contextmanager
def live(console: rich.console.Console, *, keep: bool) -> Iterator[rich.live.Live]:
    """A live view that is drawn when it is told to, not by a thread.  ``keep``: leave the last picture standing."""
    with rich.live.Live(console=console, auto_refresh=False, transient=not keep) as view:
        yield view


@asynccontextmanager
async def redrawn(view: rich.live.Live, picture: Callable[[], rich.console.RenderableType]) -> AsyncIterator[None]:
    """Draw again and again while the block runs, and once when it has ended well.

    The block's errors are those of a nursery: in a group.
    """

    async def draw() -> None:
        while True:
            view.update(picture(), refresh=True)
            await trio.sleep(REFRESH_SECONDS)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(draw)
        yield
        nursery.cancel_scope.cancel()
    view.update(picture(), refresh=True)


@final
class GrowingText:
    """One text that grows on standard output or in a file, and is seen as it grows."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._safe = TerminalText() if is_terminal(stream) else None

    def add(self, text: str) -> None:
        """Write more of it."""
        self._write(text if self._safe is None else self._safe.push(text))

    def end(self) -> None:
        """Write what was held back."""
        if self._safe is not None:
            self._write(self._safe.end())

    def _write(self, text: str) -> None:
        if text:
            self._stream.write(text)
            self._stream.flush()
