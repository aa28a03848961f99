"""``laneway plugins``: what is installed, what of it is in use, and what is wrong with the rest."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from laneway._cli import installed_plugins
from laneway.terminal import echo, for_stream, harmless, is_terminal

if TYPE_CHECKING:
    from laneway._plugins import PluginRecord

_COLUMNS = ("name", "version", "distribution", "kinds", "scope", "use", "loaders", "state")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list with an object for each plugin.")
@click.option("-v", "--verbose", is_flag=True, help="Show the whole traceback of each broken plugin.")
@click.option("--strict", is_flag=True, help="Exit with status 1 if a plugin is broken.")
@click.pass_context
def plugins(ctx: click.Context, as_json: bool, verbose: bool, strict: bool) -> None:
    """List the plugins, and what is wrong with broken ones.

    LANEWAY_PLUGINS names the installed plugins that may load, LANEWAY_DISABLE_PLUGINS plugins that may not; both are
    separated by commas.
    """
    records = sorted(installed_plugins(ctx).records, key=lambda record: (record.name, record.distribution))
    if as_json:
        echo(json.dumps([_as_json(record) for record in records], indent=2))
    else:
        rows = [_row(record) for record in records]
        if is_terminal(sys.stdout):
            _print_table(rows)
        else:
            _print_plain([_COLUMNS, *([", ".join(cell) or "-" for cell in row] for row in rows)])
        for record in records:
            if record.state == "broken":
                echo(f"\n{_field(record.name)} (from {_field(record.distribution)}) is broken: {record.reason}")
                if verbose:
                    echo(record.traceback.rstrip("\n"))
            elif record.state == "disabled" and verbose:
                echo(f"\n{_field(record.name)} (from {_field(record.distribution)}) is disabled: {record.reason}")
    if strict and any(record.state == "broken" for record in records):
        ctx.exit(1)


def _field(text: str) -> str:
    return for_stream(text, sys.stdout, one_line=True)


def _as_json(record: PluginRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "origin": record.origin,
        "distribution": record.distribution,
        "version": record.version,
        "state": record.state,
        "operations": [
            {
                "kind": operation.kind,
                "scope": operation.scope.value,
                "use": operation.use.value,
                "lane_group": operation.lane_group,
                "unique": operation.unique,
                "needs_decoder": operation.needs_decoder,
            }
            for operation in record.operations
        ],
        "loaders": list(record.loaders),
        "commands": list(record.commands),
        "observes": list(record.observes),
        "reason": record.reason,
        "traceback": record.traceback,
    }


def _row(record: PluginRecord) -> list[Sequence[str]]:
    """The cells of :data:`_COLUMNS`.  Kinds, scopes and uses are in one order, so that they can be read across."""
    return [
        [record.name],
        [record.version] if record.version else [],
        [record.distribution],
        record.kinds,
        [operation.scope.value for operation in record.operations],
        [operation.use.value for operation in record.operations],
        record.loaders,
        [record.state],
    ]


def _print_plain(lines: Sequence[Sequence[str]]) -> None:
    widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS))]
    for line in lines:
        echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _print_table(rows: Sequence[Sequence[Sequence[str]]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"loaded": "green", "broken": "bold red", "disabled": "dim"}
    table = Table(header_style="bold", box=None, pad_edge=False)
    for column in _COLUMNS:
        table.add_column(column, overflow="fold")
    for row in rows:
        (state,) = row[-1]
        # Text, because markup in a name that a stranger chose would be obeyed.
        cells = [Text("\n".join(harmless(text, one_line=True) for text in cell) or "-") for cell in row[:-1]]
        table.add_row(*cells, Text(state, style=colours[state]))
    Console().print(table)
