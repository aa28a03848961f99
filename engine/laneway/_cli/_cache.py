"""``laneway cache``: the conversations on disk."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import click
import trio

from laneway._kvcache._caches import CacheDeletion, CacheEntry, KVCaches
from laneway._kvcache._retention import CacheRetention
from laneway.terminal import echo, for_stream

_directory = click.option(
    "--cache-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Look below this directory (default: $LANEWAY_CACHE_DIR, else the user's cache).",
)


def _amount(noun: str, units: dict[str, float]) -> Callable[[click.Context, click.Parameter, str | None], float | None]:
    """Reads a number with a unit behind it."""

    def read(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
        if value is None:
            return None
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        unit = None if match is None else units.get(match[2].lower())
        if match is None or unit is None:
            known = [name for name in units if name]
            raise click.BadParameter(
                f"{value!r} is no {noun}: write a number and one of {', '.join(known)}, such as 2{known[-1]}",
                ctx,
                param,
            )
        return float(match[1]) * unit

    return read


_size_of = _amount("size", {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9})
_time_of = _amount("time", {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400})


@click.group()
def cache() -> None:
    """List, delete and prune the conversations on disk.

    A completion with a KV cache keeps them, so that its next turn need not begin anew.
    """


@cache.command("list")
@_directory
def list_command(cache_dir: Path | None) -> None:
    """List the caches.

    One line for each: key, model, tokens, size, time since it was last used.
    """
    caches = KVCaches(cache_dir)
    entries = trio.run(caches.list)
    if not entries:
        echo(f"no caches in {caches.directory}")
        return
    rows = [("KEY", "MODEL", "TOKENS", "SIZE", "AGE"), *map(_row, entries)]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for key, model, *figures in rows:
        shown = [f"{figure:>{width}}" for figure, width in zip(figures, widths[2:], strict=True)]
        echo("  ".join([f"{key:{widths[0]}}", f"{model:{widths[1]}}", *shown]).rstrip())
    count = f"{len(entries)} cache{'' if len(entries) == 1 else 's'}"
    echo(f"{count}, {_size(sum(entry.bytes for entry in entries))}, in {caches.directory}", err=True)


@cache.command("delete")
@click.argument("key", required=False)
@click.option("--model", help="Only the cache that KEY has on this model.")
@click.option("--automatic", is_flag=True, help="All caches that have no key.")
@click.option("--everything", is_flag=True, help="All caches, those with keys included.")
@_directory
@click.pass_context
def delete_command(
    ctx: click.Context, key: str | None, model: str | None, automatic: bool, everything: bool, cache_dir: Path | None
) -> None:
    """Delete the caches of KEY, or those of an option.

    Those of KEY on all models, unless one is named.  Keys that are nested in KEY stay.  What is in use stays as well,
    and makes the exit status 1.
    """
    if (key is not None) + automatic + everything != 1:
        raise click.UsageError("say one of: a KEY, --automatic, --everything")
    if model is not None and key is None:
        raise click.UsageError("--model narrows down a KEY")
    caches = KVCaches(cache_dir)
    if automatic:
        done = trio.run(caches.delete_automatic)
    elif everything:
        done = trio.run(caches.delete_everything)
    else:
        assert key is not None
        done = trio.run(_delete, caches, key, model)
    _report(ctx, done)


async def _delete(caches: KVCaches, key: str, model: str | None) -> CacheDeletion:
    return await caches.delete(key, model=model)


@cache.command("prune")
@click.option(
    "--max-size",
    callback=_size_of,
    metavar="SIZE",
    help="Bytes that automatic caches may have, such as 2GB (default: 8 GiB).",
)
@click.option(
    "--max-idle", callback=_time_of, metavar="TIME", help="How long they may lie unused, such as 12h (default: 7d)."
)
@_directory
def prune_command(max_size: float | None, max_idle: float | None, cache_dir: Path | None) -> None:
    """Bring automatic caches within bounds.

    The longest unused go first.  What killed processes have left goes as well.  Caches with a key are kept, whatever
    their size and age.
    """
    usual = CacheRetention()
    bounds = CacheRetention(
        max_bytes=usual.max_bytes if max_size is None else int(max_size),
        max_idle=usual.max_idle if max_idle is None else max_idle,
    )
    _report(None, trio.run(KVCaches(cache_dir).prune, bounds))


def _report(ctx: click.Context | None, done: CacheDeletion) -> None:
    for entry in done.deleted:
        echo(f"deleted {_name(entry)}")
    count = f"{len(done.deleted)} cache{'' if len(done.deleted) == 1 else 's'}"
    echo(f"deleted {count}, {_size(done.bytes)}", err=True)
    for entry in done.in_use:
        echo(f"in use, kept: {_name(entry)}", err=True)
    if done.in_use and ctx is not None:
        ctx.exit(1)


def _row(entry: CacheEntry) -> tuple[str, ...]:
    key = "(automatic)" if entry.key is None else entry.key
    tokens = "damaged" if entry.damage else str(entry.tokens)
    key, model = (_field(text) for text in (key, entry.model or "?"))
    return key, model, tokens, _size(entry.bytes), _age(entry.age)


def _name(entry: CacheEntry) -> str:
    what = "an automatic cache" if entry.key is None else entry.key
    return f"{_field(what)} on {_field(entry.model or 'an unknown model')} ({_size(entry.bytes)})"


def _field(text: str) -> str:
    """A key or a name, which a file tells of itself, as a cell of a table."""
    return for_stream(text, sys.stdout, one_line=True)


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"
