"""``laneway finetune``: train an adapter, watch the loss, pause with Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click
import trio

from laneway import open_engine, threads
from laneway.terminal import echo, harmless

if TYPE_CHECKING:
    from laneway_plugins.finetune import FinetuneProgress, FinetuneRequest, FinetuneResult, Training

CONTEXT_SIZE = 512
"""Of the loaded model, which only lends its tokenizer and its template."""
LINES = 20
"""About how many lines of progress there are where there is no terminal."""


def _share_or_file(text: str) -> float | Path:
    try:
        return float(text)
    except ValueError:
        return Path(text)


@click.command()
@click.argument("model")
@click.argument("data", required=False, type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path, dir_okay=False), help="The adapter to write."
)
@click.option("--resume", is_flag=True, help="Go on with the paused training of this output; DATA may be left out.")
@click.option("--restart", is_flag=True, help="Throw away the paused training of this output, and begin anew.")
@click.option(
    "--validation",
    type=_share_or_file,
    metavar="SHARE|FILE",
    help="What to measure with: a share of the data, such as 0.1, or a file.",
)
@click.option("--format", type=click.Choice(["auto", "text", "chat"]), help="Of DATA (default: by its content).")
@click.option("--truncate", is_flag=True, default=None, help="Cut chats that are too long instead of refusing them.")
@click.option("--rank", type=int, help="Of the adapter (default: 16).")
@click.option("--alpha", type=float, help="The adapter is scaled by alpha / rank (default: twice the rank).")
@click.option("--modules", metavar="NAMES", help="Matrices to adapt, with commas between them (default: all).")
@click.option("--epochs", type=int, help="How often DATA is gone through (default: 3).")
@click.option("--context-length", type=int, help="Tokens of the longest sequence (default: 512).")
@click.option("--batch", type=int, help="Sequences of one step (default: 8).")
@click.option("--learning-rate", type=float, help="At its highest (default: 0.001).")
@click.option("--schedule", type=click.Choice(["constant", "linear", "cosine"]), help="How it falls (default: cosine).")
@click.option("--warmup", type=float, help="Steps until it is at its highest, or their share (default: 0.05).")
@click.option("--weight-decay", type=float, help="Of the optimiser, AdamW (default: 0.01).")
@click.option("--seed", type=int, help="The same seed draws the same (default: 0).")
@click.option("--threads", type=int, help="CPU threads (default: one for each physical core).")
@click.option(
    "--base",
    type=click.Choice(["auto", "f32", "native"]),
    help="Train on a copy of the weights in F32, or on them as the file has them (default: native).",
)
@click.option("--checkpoint-every", type=int, metavar="STEPS", help="How often to save (default: 50).")
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), help="Write the curve of the loss there, as SVG."
)
@click.pass_context
def finetune(
    ctx: click.Context,
    /,
    model: str,
    data: Path | None,
    output: Path,
    resume: bool,
    restart: bool,
    plot: Path | None,
    **fields: Any,
) -> None:
    """Train a LoRA adapter for MODEL on DATA.

    DATA is plain text, or chats, one a line or in a JSON array: {"messages": [{"role": ..., "content": ...}, ...]}, or
    the forms of Alpaca and ShareGPT.  Of chats the assistant's words are learned.  Ctrl-C pauses: the checkpoint is
    kept, and --resume goes on.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    if data is not None:
        given["dataset"] = data
    if plot is not None:
        _check_plot(plot, output)
    if data is None and not resume:
        raise click.UsageError("say what to train on: DATA; or go on with --resume")
    if resume and restart:
        raise click.UsageError("--resume goes on and --restart begins anew: give one of them")
    request = _request(output, resume, given)
    if restart:
        # Nothing is thrown away for a training that cannot begin.
        request.dataset.open("rb").close()
    result = trio.run(_finetune, model, request, restart)
    _show_result(result, model, plot)
    if result.state == "paused":
        ctx.exit(128 + signal.SIGINT)


def _check_plot(plot: Path, output: Path) -> None:
    """It is written in the end, and by then it would be a pity."""
    if plot.suffix != ".svg":
        raise click.UsageError(f"--plot writes SVG: give a name that ends in .svg, not {plot.name}")
    if plot.absolute() == output.absolute():
        raise click.UsageError(f"--plot and --output are both {plot}: give each a name of its own")
    if not plot.parent.is_dir() or not os.access(plot.parent, os.W_OK):
        raise click.UsageError(f"--plot cannot be written: {plot.parent} is no directory that can be written to")


def _request(output: Path, resume: bool, given: dict[str, Any]) -> FinetuneRequest:
    from laneway_plugins import finetune as plugin

    if not resume:
        return plugin.FinetuneRequest(output=output, **given)
    # What is not given is as it was; what is given must be as it was, and the operation says so.
    return attrs.evolve(plugin.stored_request(output), **given)


async def _finetune(source: str, request: FinetuneRequest, restart: bool) -> FinetuneResult:
    from laneway_plugins import finetune as plugin

    async with open_engine() as engine:
        model = await engine.load_model(source, 1, context_size=CONTEXT_SIZE)
        if restart:
            await threads.run_file(plugin.discard, request.output)
        result: FinetuneResult | None = None
        # Up to here, while the data are read too, Ctrl-C ends the program: there is nothing to pause yet.
        async with plugin.start_request(model, request) as training:
            with trio.open_signal_receiver(signal.SIGINT) as interrupts:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_pause, interrupts, training)
                    with _shown(request.output.name) as report:
                        async for event in training:
                            if isinstance(event, plugin.FinetuneProgress):
                                report(event)
                    result = await training.result()
                    nursery.cancel_scope.cancel()
    assert result is not None
    return result


async def _pause(interrupts: AsyncIterator[int], training: Training) -> None:
    """The first Ctrl-C pauses; the second leaves at once."""
    async with trio.open_nursery() as nursery:
        count = 0
        async for _ in interrupts:
            count += 1
            if count > 1:
                raise KeyboardInterrupt
            echo("pausing after the step under way; Ctrl-C again leaves at once", err=True)
            nursery.start_soon(training.pause)


@contextmanager
def _shown(name: str) -> Iterator[Callable[[FinetuneProgress], None]]:
    import rich.console

    console = rich.console.Console(stderr=True)
    if not console.is_terminal:
        yield _lines()
        return
    import rich.progress
    import rich.table

    def column() -> rich.table.Column:
        return rich.table.Column(no_wrap=True)

    # The bar takes what the figures leave of the line.
    columns = (
        rich.progress.TextColumn("{task.description}", markup=False, table_column=column()),
        rich.progress.BarColumn(bar_width=None, table_column=rich.table.Column(ratio=1, min_width=4)),
        rich.progress.MofNCompleteColumn(table_column=column()),
        rich.progress.TextColumn("{task.fields[figures]}", markup=False, table_column=column()),
        rich.progress.TextColumn("{task.fields[left]}", markup=False, table_column=column()),
    )
    with rich.progress.Progress(*columns, console=console, transient=True, expand=True) as bar:
        task = bar.add_task(harmless(name, one_line=True), total=None, figures="loading", left="")

        def report(progress: FinetuneProgress) -> None:
            left = "" if progress.seconds_left is None else f"{_time(progress.seconds_left)} left"
            bar.update(task, completed=progress.done, total=progress.total, figures=_short(progress), left=left)

        yield report


def _lines() -> Callable[[FinetuneProgress], None]:
    shown = -1

    def report(progress: FinetuneProgress) -> None:
        nonlocal shown
        if progress.loss is None or progress.total is None:
            return
        part = progress.done * LINES // max(1, progress.total)
        if part != shown:
            shown = part
            echo(f"step {progress.done}/{progress.total}  {_figures(progress)}", err=True)

    return report


def _short(progress: FinetuneProgress) -> str:
    if progress.loss is None:
        return "loading"
    parts = [f"loss {progress.loss:.3f}"]
    if progress.validation_loss is not None:
        parts.append(f"val {progress.validation_loss:.3f}")
    if progress.tokens_per_second is not None:
        parts.append(f"{progress.tokens_per_second:.0f} tok/s")
    return "  ".join(parts)


def _figures(progress: FinetuneProgress) -> str:
    parts = []
    if progress.epoch is not None:
        parts.append(f"epoch {progress.epoch}")
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.4f}")
    if progress.validation_loss is not None:
        parts.append(f"validation {progress.validation_loss:.4f}")
    if progress.learning_rate is not None:
        parts.append(f"rate {progress.learning_rate:.2g}")
    if progress.tokens_per_second is not None:
        parts.append(f"{progress.tokens_per_second:.0f} tokens/s")
    return "  ".join(parts)


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _show_result(result: FinetuneResult, model: str, plot: Path | None) -> None:
    import shlex

    import rich.console

    from laneway_plugins._finetune_curve import plot_text

    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    picture = plot_text(result.curve, width=min(100, rich.console.Console().width), ascii_only=encoding != "utf8")
    if picture:
        echo(picture)
    losses = [f"loss {result.loss:.4f}"] if result.loss is not None else []
    if result.validation_loss is not None:
        losses.append(f"validation {result.validation_loss:.4f}")
    how_far = ", ".join([f"step {result.step} of {result.steps}", *losses, _time(result.seconds)])
    if result.state == "completed":
        echo(f"{result.output} ({how_far})")
    else:
        again = shlex.join(["laneway", "finetune", model, "--output", str(result.output), "--resume"])
        echo(f"paused ({how_far}); go on with: {again}", err=True)
    if plot is not None:
        # Last, for it may fail, and the adapter is there all the same.
        _plot(result, plot)


def _plot(result: FinetuneResult, plot: Path) -> None:
    from laneway_plugins._finetune_curve import plot_svg

    try:
        picture = plot_svg(result.curve, title=result.output.name)
    except ValueError as error:
        echo(f"no {plot}: {error}", err=True)
    else:
        plot.write_text(picture, encoding="utf-8")
