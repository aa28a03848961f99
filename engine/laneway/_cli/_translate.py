"""``laneway translate``: a file or standard input, with a translation model or a language model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import attrs
import click
import rich.console
import rich.progress
import trio

from laneway import BatchEvent, Done, Engine, Model, Progress, TextDelta, open_engine
from laneway._cli import _answers
from laneway._cli._answers import GrowingText
from laneway.terminal import TerminalText, harmless

LINES_AT_A_TIME = 64
"""Lines that a language model is given in one request."""


@click.command()
@click.argument("model")
@click.argument("file", default="-")
@click.option("--from", "source", metavar="CODE", help="The language of the text (default: the model's, or detected).")
@click.option("--to", "target", metavar="CODE", help="The language to translate into.")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write there, not to the screen.")
@click.option(
    "--package", "packages", multiple=True, metavar="PATH", help="Another pair to go through; may be given again."
)
@click.option("--beam-size", type=click.IntRange(1, 64), help="Look further for better words (translation models).")
@click.option("--context", metavar="TEXT", help="What the text is about (language models).")
@click.option(
    "-n",
    "--max-tokens",
    type=click.IntRange(min=1),
    help="The longest translation of a line, in tokens (language models; default: by the line's length).",
)
@click.option("-p", "--parallel", type=int, help="Lines at a time (language models; default: 4).")
@click.option("--threads", type=int, help="CPU threads.")
def translate(model: str, file: str, **options: Any) -> None:
    """Translate FILE, or standard input, with MODEL, line by line.

    MODEL is an .argosmodel package, a directory of them or a CTranslate2 model; or a language model, by its path or a
    name that was pulled.  Line breaks, blank lines and indentation stay as they are.

    The exit status is 1, and standard error names the lines, where the model came to no end and a line was cut.
    """
    trio.run(_translate, model, file, Settings(**options))


@attrs.frozen(kw_only=True)
class Settings:
    """The command's options."""

    source: str | None
    target: str | None
    output: Path | None
    packages: tuple[str, ...]
    beam_size: int | None
    context: str | None
    max_tokens: int | None
    parallel: int | None
    threads: int | None


async def _translate(source: str, file: str, settings: Settings) -> None:
    text = _read(file)
    given = {"threads": settings.threads, "packages": settings.packages or None}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    async with open_engine() as engine:
        model = await engine.load_model(source, 4 if settings.parallel is None else settings.parallel, **options)
        _check(model, settings)
        with _opened(settings.output) as stream:
            with _shown(stream, file) as (write, progress):
                work = _with_language_model if model.has_decoder else _with_translation_model
                cut = await work(engine, model, text, settings, write, progress)
                if stream.isatty() and not text.endswith("\n"):
                    write("\n")  # or the prompt of the shell would stand behind the last word
    if cut:
        raise click.ClickException(_report(cut))


@attrs.frozen
class Cut:
    """A translation that is not whole: of which line, counted from 1, and why; None for a text as a whole."""

    line: int | None
    why: str


LINES_NAMED = 10
"""Lines that were cut, as many as an error names."""
_REASONS = {
    "length": "the model came to no end",
    "loop": "the model repeated itself",
    "thought": "the model thought and gave no answer",
}


def _report(cut: Sequence[Cut]) -> str:
    if cut[0].line is None:
        return f"the translation is not whole: {_REASONS['length']} of a sentence, which was cut at the longest length"
    count = "1 line was" if len(cut) == 1 else f"{len(cut)} lines were"
    named = [f"{one.line} ({_REASONS.get(one.why, one.why)})" for one in cut[:LINES_NAMED]]
    more = f" and {len(cut) - LINES_NAMED} more" if len(cut) > LINES_NAMED else ""
    return f"the translation is not whole: {count} cut: {', '.join(named)}{more}"


def _check(model: Model, settings: Settings) -> None:
    """Refuse options that the model has no use for, before anything is translated."""
    if model.has_decoder:
        if settings.target is None:
            raise click.UsageError("say which language to translate into: --to de")
        if settings.beam_size is not None:
            raise click.UsageError(f"--beam-size is for translation models, and {model.name} is a language model")
        return
    given = {"--context": settings.context, "--max-tokens": settings.max_tokens, "--parallel": settings.parallel}
    for option, value in given.items():
        if value is not None:
            raise click.UsageError(f"{option} is for language models, and {model.name} is a translation model")


def _read(file: str) -> str:
    # Bytes, not text: reading text would turn every kind of line break into one.
    data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        name = "standard input" if file == "-" else file
        raise click.ClickException(f"{name} is not UTF-8: byte {error.start} ({data[error.start]:#04x})") from error


Write = Callable[[str], None]
Report = Callable[[Progress], None]


async def _with_translation_model(
    engine: Engine, model: Model, text: str, settings: Settings, write: Write, report: Report
) -> list[Cut]:
    given = {"source": settings.source, "target": settings.target, "beam_size": settings.beam_size}
    fields = {name: value for name, value in given.items() if value is not None}
    request = engine.operation(model, "nmt").request_type(text, **fields)
    async with engine.run(model, "nmt", request) as run:
        async for event in run:
            if isinstance(event, TextDelta):
                write(event.text)
            elif isinstance(event, Progress):
                report(event)
        result = await run.result()
    return [Cut(None, "length")] if result.stop_reason == "length" else []


async def _with_language_model(
    engine: Engine, model: Model, text: str, settings: Settings, write: Write, report: Report
) -> list[Cut]:
    """Line by line: a model that is shown the whole would not keep its lines apart."""
    lines = text.splitlines(keepends=True)
    make = engine.operation(model, "translate").request_type
    given = {"context": settings.context, "max_tokens": settings.max_tokens}
    fields = {name: value for name, value in given.items() if value is not None}
    source = settings.source
    cut: list[Cut] = []
    for start in range(0, len(lines), LINES_AT_A_TIME):
        some = lines[start : start + LINES_AT_A_TIME]
        request = make(some, target=settings.target, source=source, **fields)
        in_order = _InOrder(len(some), write)
        async with engine.run(model, "translate", request) as run:
            async for event in run:
                if isinstance(event, BatchEvent) and isinstance(event.event, TextDelta):
                    in_order.add(int(event.id), event.event.text)
                elif isinstance(event, BatchEvent) and isinstance(event.event, Done):
                    in_order.end(int(event.id))
                elif isinstance(event, Progress):
                    report(attrs.evolve(event, done=start + event.done, total=len(lines), unit="line"))
            result = await run.result()
        for number, one in enumerate(result.translations, start + 1):
            if one.cut is not None:
                cut.append(Cut(number, one.cut))
        if source is None and result.source is not None:
            source = result.source.code  # one language for the whole file
    return cut


class _InOrder:
    """Several texts that grow at once, written one behind the other."""

    def __init__(self, count: int, write: Write) -> None:
        self._waiting = [""] * count
        self._ended = [False] * count
        self._place = 0
        self._write = write

    def add(self, index: int, text: str) -> None:
        """More of a text."""
        if index == self._place:
            self._write(text)
        else:
            self._waiting[index] += text

    def end(self, index: int) -> None:
        """The end of a text."""
        self._ended[index] = True
        while self._place < len(self._ended) and self._ended[self._place]:
            self._place += 1
            if self._place < len(self._ended) and self._waiting[self._place]:
                self._write(self._waiting[self._place])
                self._waiting[self._place] = ""


@contextmanager
def _opened(path: Path | None) -> Iterator[IO[str]]:
    if path is None:
        # Line breaks go out as they came in, on every system.
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(newline="")
        yield sys.stdout
        return
    with path.open("w", encoding="utf-8", newline="") as file:
        yield file


@contextmanager
def _shown(stream: IO[str], file: str) -> Iterator[tuple[Write, Report]]:
    """What writes text and what shows progress; a bar is drawn for files, where there is a terminal for it."""
    console = rich.console.Console(stderr=True)
    if file == "-" or not console.is_terminal:
        text = GrowingText(stream)
        yield text.add, lambda progress: None
        text.end()
        return
    columns = (
        rich.progress.TextColumn("{task.description}", markup=False),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TextColumn("{task.fields[unit]}s", markup=False),
        rich.progress.TimeRemainingColumn(),
    )
    to_screen = stream is sys.stdout and _answers.wants_live_view()
    if to_screen:
        console = rich.console.Console()
    with rich.progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(harmless(Path(file).name, one_line=True), total=None, unit="sentence")
        lines = _ScreenLines(console) if to_screen else GrowingText(stream)

        def report(progress: Progress) -> None:
            bar.update(task, completed=progress.done, total=progress.total, unit=progress.unit)

        yield lines.add, report
        lines.end()


class _ScreenLines:
    """Whole lines above the bar: on one screen, half a line and a bar cannot be kept apart."""

    def __init__(self, console: rich.console.Console) -> None:
        self._console = console
        self._safe = TerminalText()
        self._begun = ""

    def add(self, text: str) -> None:
        """Print the lines that are whole."""
        *lines, self._begun = (self._begun + self._safe.push(text)).split("\n")
        for line in lines:
            self._print(line)

    def end(self) -> None:
        """Print the rest."""
        rest = self._begun + self._safe.end()
        self._begun = ""
        if rest:
            self._print(rest)

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)
