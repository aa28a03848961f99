"""``laneway run``: answers to prompts, streamed."""

from __future__ import annotations

import sys
from typing import Any, Protocol

import attrs
import click
import rich.console
import rich.text
import trio

from laneway import Done, Engine, LanewayError, Model, TextDelta, open_engine
from laneway._cli import _answers
from laneway._cli._answers import GrowingText, LabelledLines, Pane
from laneway.terminal import echo, harmless

DEFAULT_MAX_TOKENS = 512
MOST_AT_ONCE = 8
"""Answers at a time, if ``--parallel`` does not say how many."""


@click.command()
@click.argument("model")
@click.argument("prompts", nargs=-1, required=True, metavar="PROMPT...")
@click.option("--system", metavar="TEXT", help="What the model is told before each prompt.")
@click.option("--raw", is_flag=True, help="Let the model continue the prompts instead of chatting.")
@click.option("-p", "--parallel", type=int, help=f"Answers at a time (default: all, up to {MOST_AT_ONCE}).")
@click.option(
    "-n",
    "--max-tokens",
    type=click.IntRange(min=1),
    default=DEFAULT_MAX_TOKENS,
    show_default=True,
    help="The longest answer, in tokens.",
)
@click.option("-t", "--temperature", type=float, help="0 takes the likeliest token always (default: 0.8).")
@click.option(
    "--seed",
    type=int,
    help="What drawing starts from. It promises no equal answers: see the docs.",
)
@click.option("--stop", multiple=True, metavar="TEXT", help="End an answer before this text; may be given again.")
@click.option("--context-size", type=int, help="Tokens of all answers at a time together, prompts included.")
@click.option("--threads", type=int, help="CPU threads (default: one for each physical core).")
def run(model: str, prompts: tuple[str, ...], **options: Any) -> None:
    """Answer each PROMPT with MODEL, streamed.

    MODEL is a path, or a name that was pulled.  The prompt - is read from standard input.  Models that chat are asked
    in a chat, others continue the text.
    """
    trio.run(_run, model, _read_prompts(prompts), Settings(**options))


@attrs.frozen(kw_only=True)
class Settings:
    """The command's options."""

    system: str | None
    raw: bool
    parallel: int | None
    max_tokens: int
    temperature: float | None
    seed: int | None
    stop: tuple[str, ...]
    context_size: int | None
    threads: int | None

    def __attrs_post_init__(self) -> None:
        if self.raw and self.system is not None:
            raise click.UsageError("--system is for chats, and --raw asks for none")
        for text, name in ((self.system or "", "--system"), *((stop, "--stop") for stop in self.stop)):
            _checked(text, name)


def _read_prompts(prompts: tuple[str, ...]) -> list[str]:
    if prompts.count("-") > 1:
        raise click.UsageError("standard input can be read once, and - is given more than once")
    return [
        _read_standard_input() if prompt == "-" else _checked(prompt, f"prompt {number}")
        for number, prompt in enumerate(prompts, 1)
    ]


def _checked(text: str, name: str) -> str:
    """Refuse an argument whose bytes were no text: they have come as surrogates, which no model reads."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        what = f"{code - 0xDC00:#04x}" if 0xDC80 <= code <= 0xDCFF else f"a lone surrogate, {code:#x}"
        before = len(text[: error.start].encode("utf-8"))
        raise click.UsageError(f"{name} is not UTF-8: byte {before} ({what})") from error
    return text


def _read_standard_input() -> str:
    # Bytes, because the decoder of the stream may let through what is no text, and tells no position.
    data = sys.stdin.buffer.read()
    encoding = sys.stdin.encoding or "utf-8"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        where = f"byte {error.start} ({data[error.start]:#04x})"
        raise click.UsageError(f"standard input is not {encoding.upper()}: {where}") from error
    text = text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n")
    if not text:
        raise click.UsageError("there is nothing on standard input")
    return text


async def _run(source: str, prompts: list[str], settings: Settings) -> None:
    parallel = min(len(prompts), MOST_AT_ONCE) if settings.parallel is None else settings.parallel
    options: dict[str, Any] = {"context_size": settings.context_size, "threads": settings.threads}
    async with open_engine() as engine:
        model = await engine.load_model(
            source,
            parallel,
            queue_limit=len(prompts),
            **{name: value for name, value in options.items() if value is not None},
        )
        chat = _chats(model, settings)
        requests = [
            _answers.completion_request(
                engine,
                model,
                _messages(prompt, settings) if chat else prompt,
                max_tokens=settings.max_tokens,
                temperature=settings.temperature,
                seed=settings.seed,
                stop=settings.stop,
            )
            for prompt in prompts
        ]
        if len(prompts) == 1:
            await _answer_one(engine, model, requests[0])
        elif _answers.wants_live_view():
            await _answer_side_by_side(engine, model, requests, prompts)
        else:
            await _answer_all(engine, model, requests, _Labelled())


def _chats(model: Model, settings: Settings) -> bool:
    if settings.raw:
        return False
    if model.tokenizer.chat_template:
        return True
    if settings.system is not None:
        raise click.UsageError(f"--system is for chats, and model {model.name} has no chat template")
    return False


def _messages(prompt: str, settings: Settings) -> list[dict[str, str]]:
    first = [] if settings.system is None else [{"role": "system", "content": settings.system}]
    return [*first, {"role": "user", "content": prompt}]


class Sink(Protocol):
    """Where answers go, each known by its number."""

    def said(self, index: int, text: str) -> None:
        """More of an answer."""

    def ended(self, index: int, why: str) -> None:
        """The end of an answer."""

    def failed(self, index: int, error: LanewayError) -> None:
        """The end of what is no answer."""


async def _answer(
    engine: Engine, model: Model, request: Any, index: int, sink: Sink, arrived: trio.Event | None = None
) -> None:
    async with engine.run(model, "completion", request) as answer:
        if arrived is not None:
            arrived.set()
        async for event in answer:
            if isinstance(event, TextDelta):
                sink.said(index, event.text)
            elif isinstance(event, Done):
                sink.ended(index, event.stop_reason)


async def _answer_one(engine: Engine, model: Model, request: Any) -> None:
    sink = _One()
    try:
        await _answer(engine, model, request, 0, sink)
    except LanewayError as error:
        sink.failed(0, error)
        raise


async def _answer_side_by_side(engine: Engine, model: Model, requests: list[Any], prompts: list[str]) -> None:
    console = rich.console.Console()
    panes = _Panes(prompts, console)
    try:
        with _answers.live(console, keep=False) as view:
            async with _answers.redrawn(view, panes.picture):
                await _answer_all(engine, model, requests, panes)
    finally:
        panes.print_all()


async def _answer_all(engine: Engine, model: Model, requests: list[Any], sink: Sink) -> None:
    """Answer everything that can be answered, then say that something was not."""
    failed = 0

    async def one(index: int, arrived: trio.Event) -> None:
        nonlocal failed
        try:
            await _answer(engine, model, requests[index], index, sink, arrived)
        except LanewayError as error:
            failed += 1
            sink.failed(index, error)
        finally:
            arrived.set()

    async with trio.open_nursery() as nursery:
        # One after the other, so that they arrive in this order.
        for index in range(len(requests)):
            arrived = trio.Event()
            nursery.start_soon(one, index, arrived)
            await arrived.wait()
    if failed:
        raise click.ClickException(f"{failed} of {len(requests)} prompts could not be answered")


class _One:
    """A single answer, as it comes."""

    def __init__(self) -> None:
        self._in_a_line = False
        self._text = GrowingText(sys.stdout)

    def said(self, index: int, text: str) -> None:
        self._in_a_line = True
        self._text.add(text)

    def ended(self, index: int, why: str) -> None:
        self._text.end()
        echo()

    def failed(self, index: int, error: LanewayError) -> None:
        if self._in_a_line:
            self._text.end()
            echo()


class _Labelled:
    """Several answers, line by line."""

    def __init__(self) -> None:
        self._lines = LabelledLines(echo)

    def said(self, index: int, text: str) -> None:
        self._lines.add(f"[{index + 1}]", text)

    def ended(self, index: int, why: str) -> None:
        self._lines.end(f"[{index + 1}]")

    def failed(self, index: int, error: LanewayError) -> None:
        self._lines.end(f"[{index + 1}]")
        echo(f"[{index + 1}] {error}", err=True)


class _Panes:
    """Several answers, side by side, and one below the other in the end."""

    def __init__(self, prompts: list[str], console: rich.console.Console) -> None:
        self._console = console
        self._panes = [Pane(" ".join(prompt.split())) for prompt in prompts]
        self._errors: dict[int, LanewayError] = {}

    def said(self, index: int, text: str) -> None:
        self._panes[index].text += text

    def ended(self, index: int, why: str) -> None:
        self._panes[index].status = why
        self._panes[index].style = "dim"

    def failed(self, index: int, error: LanewayError) -> None:
        self._panes[index].status = "error"
        self._panes[index].style = "red"
        self._errors[index] = error

    def picture(self) -> rich.console.RenderableType:
        """What the screen shows now."""
        return _answers.side_by_side(self._panes, self._console, self._console.height - 1)

    def print_all(self) -> None:
        """Every answer whole."""
        for index, pane in enumerate(self._panes):
            title = rich.text.Text(harmless(f"[{index + 1}] {pane.title}", one_line=True), no_wrap=True)
            title.overflow = "ellipsis"
            self._console.rule(title, align="left", style="dim")
            self._console.print(rich.text.Text(harmless(pane.text)))
            if index in self._errors:
                self._console.print(rich.text.Text(harmless(str(self._errors[index])), style="red"))
