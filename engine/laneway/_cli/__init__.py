"""The ``laneway`` program: which commands there are, and how every one of them fails.

Commands live in modules of their own that are imported when they run: ``laneway --help`` needs neither a model nor a
compiler.  Commands of plugins are looked up only when the program's own do not settle the matter.

How it fails: an error that a person can do something about is one line, ``laneway: error: ...``, and exit status 1; a
wrong use of the command line the same with status 2; Ctrl-C is 130.  ``--debug``, or ``LANEWAY_DEBUG=1``, shows the
traceback as well.  Anything else is a bug and always shows its traceback.  A standard stream that is closed, full or of
a narrow encoding is such an error as well, or none: ``_streams`` sees to it.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any

import attrs
import click

import laneway
from laneway._cli import _signals, _streams
from laneway._errors import LanewayError
from laneway._plugins import PluginHost, truthy
from laneway.terminal import echo, harmless, is_terminal

if TYPE_CHECKING:
    from collections.abc import Callable

INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 and the number of SIGINT, as shells count."""


@attrs.frozen
class CoreCommand:
    """One of the program's own commands: ``attribute`` of ``module``, imported when it is needed."""

    module: str
    attribute: str
    summary: str
    """The line of ``laneway --help``, kept here so that listing the commands imports none."""

    def load(self) -> click.Command:
        command = getattr(importlib.import_module(self.module), self.attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{self.module}.{self.attribute} is not a click command: {command!r}")
        return command


CORE_COMMANDS: dict[str, CoreCommand] = {
    "cache": CoreCommand("laneway._cli._cache", "cache", "List, delete and prune the conversations on disk."),
    "demo": CoreCommand(
        "laneway._cli._demo", "demo", "Watch answers side by side, cancels and the queue on a real model."
    ),
    "plugins": CoreCommand("laneway._cli._plugins", "plugins", "List the plugins, and what is wrong with broken ones."),
    "pull": CoreCommand("laneway._cli._pull", "pull", "Fetch the model NAME, check it, and keep it in the cache."),
    "run": CoreCommand("laneway._cli._run", "run", "Answer each PROMPT with MODEL, streamed."),
    "translate": CoreCommand(
        "laneway._cli._translate", "translate", "Translate FILE, or standard input, with MODEL, line by line."
    ),
}


class LanewayGroup(click.Group):
    """The top-level group: finds commands late and turns errors into one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*CORE_COMMANDS, *installed_plugins(ctx).commands})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        core = CORE_COMMANDS.get(cmd_name)
        if core is not None:
            return core.load()
        return installed_plugins(ctx).commands.get(cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None and not ctx.resilient_parsing:
            known = self.list_commands(ctx)
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(known)}"
            broken = _broken(installed_plugins(ctx))
            ctx.fail(f"no command {name!r}; {hint}" + (f" ({broken})" if broken else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.summary) for name, command in sorted(CORE_COMMANDS.items())])
        host = installed_plugins(ctx)
        rows = [
            (name, command.get_short_help_str(formatter.width - 20))
            for name, command in sorted(host.commands.items())
            if not command.hidden
        ]
        if rows:
            with formatter.section("Commands of plugins"):
                formatter.write_dl(rows)
        broken = _broken(host)
        if broken:
            formatter.write_paragraph()
            formatter.write_text(f"Note: {broken}.")

    def invoke(self, ctx: click.Context) -> None:
        """Run the command.  Its return value is nobody's: a command ends with another status through ``ctx.exit``."""
        try:
            super().invoke(ctx)
        except (click.exceptions.Exit, SystemExit):
            raise
        except BaseException as error:
            status = report(error, debug=bool(ctx.params.get("debug")))
            if status is None:
                raise
            ctx.exit(status)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = "laneway",
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the program and exit, like every click command; what it could not begin with fails like the rest."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        with _streams.prepared(), _signals.cursor_restored():
            debug = truthy(os.environ.get("LANEWAY_DEBUG", ""))
            try:
                status = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
            except (click.ClickException, click.Abort, OSError) as error:
                # An OSError comes of what prints the help or the version; those of commands were reported.
                status = report(error, debug=debug)
            except Exception as error:
                if not is_terminal(sys.stderr):
                    raise
                # The interpreter would print what the error quotes as it is.
                _traceback(error, debug=True)
                status = 1
            status = _flushed(debug) or status
        sys.exit(status or 0)


def installed_plugins(ctx: click.Context) -> PluginHost:
    """The plugins of this computer, loaded once for each run of the program."""
    meta = ctx.find_root().meta
    if "laneway.plugins" not in meta:
        # Broken ones are not announced: the help and `laneway plugins` say so in their own words.
        meta["laneway.plugins"] = PluginHost.load(announce=False)
    host: PluginHost = meta["laneway.plugins"]
    return host


def _broken(host: PluginHost) -> str:
    count = sum(record.state == "broken" for record in host.records)
    if not count:
        return ""
    return f"{count} {'plugin is' if count == 1 else 'plugins are'} broken, see: laneway plugins"


def _flushed(debug: bool) -> int:
    """Write what is still in the buffer.  Returns 0, or the status for what went wrong."""
    try:
        # The interpreter's own flush is too late: a reader that has gone could not be told from a bug by then.
        sys.stdout.flush()
    except OSError as error:
        return report(error, debug=debug) or 1
    return 0


def report(error: BaseException, *, debug: bool) -> int | None:
    """Say on standard error what went wrong.  Returns the exit status, or None for an error that is a bug.

    Of a group, every member must be explicable; each gets its line.
    """
    leaves = list(_leaves(error))
    if any(_interrupted(leaf) for leaf in leaves):
        _traceback(error, debug)
        echo("laneway: interrupted", err=True)
        return INTERRUPTED
    if all(isinstance(leaf, OSError) and leaf.errno == errno.EPIPE for leaf in leaves):
        # Whoever read our output has had enough, as `head` does: nothing to say, and nobody to say it to.
        _traceback(error, debug)
        _streams.discard(sys.stdout)
        return 1
    lines = [_explain(leaf, debug) for leaf in leaves]
    if any(line is None for line in lines):
        return None
    _traceback(error, debug)
    for line in dict.fromkeys(lines):
        if line is not None:
            echo(line, err=True)
    _streams.settle(sys.stdout)
    return max(getattr(leaf, "exit_code", 1) for leaf in leaves)


def _interrupted(error: BaseException) -> bool:
    # click turns a Ctrl-C that it sees itself into its Abort.
    return isinstance(error.__cause__ if isinstance(error, click.Abort) else error, KeyboardInterrupt)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _explain(error: BaseException, debug: bool) -> str | None:
    """The lines to show for an error that a user can do something about; None for any other."""
    help_shown = getattr(click.exceptions, "NoArgsIsHelpError", ())
    if isinstance(error, help_shown):
        return str(error.format_message())
    if isinstance(error, click.UsageError):
        command = "laneway" if error.ctx is None else error.ctx.command_path
        return _line(error.format_message().rstrip("."), f"see: {command} --help")
    if isinstance(error, click.ClickException):
        return _line(error.format_message())
    if isinstance(error, click.Abort):
        return _line("the input ended too early" if isinstance(error.__cause__, EOFError) else "given up")
    if isinstance(error, LanewayError):
        return _line(str(error))
    if isinstance(error, OSError):
        what = error.strerror or str(error) or type(error).__name__
        file = error.filename
        if file is None and _streams.is_broken(sys.stdout):
            file = "standard output"
        return _line(what if file is None else f"{os.fsdecode(file)}: {what}")
    if isinstance(error, ValueError):
        # Mostly a value that was given, such as --parallel 0; now and then a bug, which the traceback then shows.
        return _line(str(error) or type(error).__name__, "" if debug else "--debug shows where")
    return None


def _line(text: str, hint: str = "") -> str:
    return f"laneway: error: {' '.join(text.split())}" + (f" ({hint})" if hint else "")


def _traceback(error: BaseException, debug: bool) -> None:
    if debug:
        echo("".join(traceback.format_exception(error)), err=True, nl=False)


class _StandardError(logging.StreamHandler[IO[str]]):
    """Writes to whatever ``sys.stderr`` is at the time, in the form of the program's other messages."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def format(self, record: logging.LogRecord) -> str:
        line = f"laneway: {record.levelname.lower()}: {super().format(record)}"
        return harmless(line) if is_terminal(self.stream) else line

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _log_to_standard_error(debug: bool) -> Callable[[], None]:
    """Show warnings, and with ``debug`` everything that Laneway logs.  Returns what takes it back."""
    handler = _StandardError()
    ours = logging.getLogger("laneway")
    before = ours.level
    logging.getLogger().addHandler(handler)
    if debug:
        ours.setLevel(logging.DEBUG)

    def undo() -> None:
        logging.getLogger().removeHandler(handler)
        ours.setLevel(before)

    return undo


@click.group("laneway", cls=LanewayGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, envvar="LANEWAY_DEBUG", help="Show tracebacks and debug messages.")
@click.version_option(laneway.__version__, message="laneway %(version)s", help="Show the version and exit.")
@click.pass_context
def main(ctx: click.Context, debug: bool) -> None:
    """Run language models: fair admission, continuous batching, clean cancelling."""
    ctx.call_on_close(_log_to_standard_error(debug))
