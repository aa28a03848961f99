"""``laneway pull``: fetch a model into the cache of this computer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import rich.console
import rich.progress
import trio

from laneway._download import PullProgress, Report
from laneway._download import pull as fetch
from laneway._sources import CATALOGUE, PACKAGE_SYNTAX, find_package
from laneway.terminal import echo, harmless


@click.command(
    epilog=f"A file of any package on the index that pip uses can be named as {PACKAGE_SYNTAX}.",
)
@click.argument("name", required=False)
@click.option("--list", "listing", is_flag=True, help="List the models that have a name, and which of them are here.")
@click.option(
    "--cache-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep models below this directory (default: $LANEWAY_CACHE_DIR, else the user's cache).",
)
def pull(name: str | None, listing: bool, cache_dir: Path | None) -> None:
    """Fetch the model NAME, check it, and keep it in the cache.  What is there already is not fetched again."""
    if listing:
        list_models(cache_dir)
    elif name is None:
        raise click.UsageError("name a model, or use --list to see which there are")
    else:
        trio.run(_pull, name, cache_dir)


def list_models(cache_dir: Path | None) -> None:
    """One line for each model of the catalogue, and where it lies if it is here."""
    width = max(map(len, CATALOGUE))
    for name, package in sorted(CATALOGUE.items()):
        path = package.path(cache_dir)
        echo(f"{name:{width}}  {_size(package.size or 0):>8}  {package.about}")
        if path.is_file():
            echo(f"{'':{width}}  {'':8}  {path}")


async def _pull(name: str, cache_dir: Path | None) -> None:
    start = trio.current_time()
    package = find_package(name)
    label = name if package is None or name in CATALOGUE else package.file_name
    console = rich.console.Console(stderr=True)
    with _bar(label, console) if console.is_terminal else _lines(label) as show:
        fetched = False

        def report(progress: PullProgress) -> None:
            nonlocal fetched
            fetched = fetched or progress.stage == "fetching"
            show(progress)

        path = await fetch(name, cache_dir=cache_dir, progress=report)
    how = f"fetched in {trio.current_time() - start:.1f} s" if fetched else "it was there already"
    echo(f"{path} ({_size(path.stat().st_size)}, {how})")


def _what(label: str, progress: PullProgress) -> str:
    if progress.stage == "waiting":
        return f"waiting for another pull of {label}"
    part = f", part {progress.part} of {progress.parts}" if progress.parts > 1 else ""
    return f"{progress.stage} {label}{part}"


@contextmanager
def _lines(label: str) -> Iterator[Report]:
    """For whoever is no terminal: a line whenever something new begins."""
    last = ""

    def show(progress: PullProgress) -> None:
        nonlocal last
        what = _what(label, progress)
        if progress.stage != "done" and what != last:
            echo(what, err=True)
        last = what

    yield show


@contextmanager
def _bar(label: str, console: rich.console.Console) -> Iterator[Report]:
    """A progress bar, which is gone when the work is done."""
    columns = (
        rich.progress.SpinnerColumn(),
        rich.progress.TextColumn("{task.description}", markup=False),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(),
        rich.progress.TransferSpeedColumn(),
        rich.progress.TimeElapsedColumn(),
    )
    with rich.progress.Progress(*columns, console=console, transient=True) as bar:
        label = harmless(label, one_line=True)
        task = bar.add_task(label, total=None)
        last = ""

        def show(progress: PullProgress) -> None:
            nonlocal last
            what = _what(label, progress)
            if what != last:
                bar.reset(task, description=what, total=None)
            last = what
            # An unknown total keeps the bar moving to and fro, beside the time that has passed.
            bar.update(task, completed=progress.done, total=progress.total)

        yield show


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.2f} GB"
